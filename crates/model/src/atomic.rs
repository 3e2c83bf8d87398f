//! Atomics for the model checker.
//!
//! loom takes `SeqCst` accesses for `AcqRel` ones, which would report errors that cannot happen. Here
//! such accesses are ordered by a second atomic, see [`Floor`].

pub use std::sync::atomic::Ordering;

use crate::check::{self, Strength};

/// Orders the `SeqCst` accesses of one atomic: a load sees at least what was the last `SeqCst` store
/// when it began. Other accesses, and other atomics, are not ordered by it.
#[derive(Debug, Default)]
struct Floor(loom::sync::atomic::AtomicUsize);

/// What is done to an atomic.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Load,
    Store,
    Both,
}

impl Floor {
    /// Makes an access with the ordering that is granted.
    #[track_caller]
    fn with<T>(&self, asked: Ordering, kind: Access, access: impl FnOnce(Ordering) -> T) -> T {
        let strength = check::strength();
        if strength == Strength::Relaxed {
            return access(Ordering::Relaxed);
        }
        if asked != Ordering::SeqCst {
            return access(asked);
        }
        let in_order = strength == Strength::AsWritten;
        if in_order && kind == Access::Load {
            self.0.fetch_add(0, Ordering::Acquire);
        }
        let result = access(match kind {
            Access::Load => Ordering::Acquire,
            Access::Store => Ordering::Release,
            Access::Both => Ordering::AcqRel,
        });
        if in_order && kind != Access::Load {
            self.0.fetch_add(0, Ordering::Release);
        }
        result
    }
}

macro_rules! atomic {
    ($name:ident, $value:ty) => {
        /// The atomic of the same name.
        #[derive(Debug, Default)]
        pub struct $name {
            value: loom::sync::atomic::$name,
            floor: Floor,
        }

        impl $name {
            /// An atomic that holds `value`.
            #[track_caller]
            pub fn new(value: $value) -> $name {
                $name {
                    value: loom::sync::atomic::$name::new(value),
                    floor: Floor::default(),
                }
            }

            /// The value.
            #[track_caller]
            pub fn load(&self, ordering: Ordering) -> $value {
                let load = |granted| self.value.load(granted);
                self.floor.with(ordering, Access::Load, load)
            }

            /// Replaces the value.
            #[track_caller]
            pub fn store(&self, value: $value, ordering: Ordering) {
                // As a swap, so that it comes last of all stores so far: loom lets a store that
                // no thread saw come before others, even between the two halves of a swap.
                let store = |granted| match ordering {
                    Ordering::SeqCst => drop(self.value.swap(value, granted)),
                    _ => self.value.store(value, granted),
                };
                self.floor.with(ordering, Access::Store, store);
            }

            /// Replaces the value if it is `current`.
            #[track_caller]
            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.floor.with(success, Access::Both, |granted| {
                    self.value.compare_exchange(current, new, granted, failure)
                })
            }

            /// Replaces the value by what `new` makes of it, until it makes nothing. Returns the one before.
            #[track_caller]
            pub fn fetch_update(
                &self,
                success: Ordering,
                failure: Ordering,
                mut new: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                let mut before = self.load(failure);
                while let Some(value) = new(before) {
                    match self.compare_exchange(before, value, success, failure) {
                        Ok(before) => return Ok(before),
                        Err(other) => before = other,
                    }
                }
                Err(before)
            }
        }

        replacing!($name, $value: "Replaces the value and returns the one before." swap,);
    };
}

macro_rules! replacing {
    ($name:ident, $value:ty: $($doc:literal $operation:ident,)*) => {
        impl $name {
            $(#[doc = $doc]
            #[track_caller]
            pub fn $operation(&self, value: $value, ordering: Ordering) -> $value {
                let replace = |granted| self.value.$operation(value, granted);
                self.floor.with(ordering, Access::Both, replace)
            })*
        }
    };
}

macro_rules! counting {
    ($name:ident, $value:ty) => {
        replacing!($name, $value:
            "Adds to the value, and returns the one before." fetch_add,
            "Subtracts from the value, and returns the one before." fetch_sub,
            "Makes the value at least `value`, and returns the one before." fetch_max,
            "Sets bits of the value, and returns the one before." fetch_or,
            "Clears bits that `value` has not, and returns the one before." fetch_and,
        );
    };
}

atomic!(AtomicBool, bool);
atomic!(AtomicI32, i32);
atomic!(AtomicU64, u64);
atomic!(AtomicUsize, usize);
counting!(AtomicU64, u64);
counting!(AtomicUsize, usize);
