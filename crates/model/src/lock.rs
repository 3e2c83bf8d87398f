//! Mutex, read-write lock, condition variable and once-lock for the model checker.

use std::sync::atomic::Ordering;

pub use loom::sync::MutexGuard;

/// `parking_lot::Mutex`: no poison.
#[derive(Debug, Default)]
pub struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// Free.
    pub fn new(value: T) -> Mutex<T> {
        Mutex(loom::sync::Mutex::new(value))
    }

    /// Waits for the lock and takes it.
    #[track_caller]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        match self.0.lock() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        }
    }
}

/// `parking_lot::RwLock`, as a mutex: no reader of ours does anything under such a lock that another
/// reader could notice.
#[derive(Debug, Default)]
pub struct RwLock<T>(Mutex<T>);

impl<T> RwLock<T> {
    /// Free.
    pub fn new(value: T) -> RwLock<T> {
        RwLock(Mutex::new(value))
    }

    /// Waits for the lock and takes it, to look.
    #[track_caller]
    pub fn read(&self) -> MutexGuard<'_, T> {
        self.0.lock()
    }

    /// Waits for the lock and takes it, to change what it holds.
    #[track_caller]
    pub fn write(&self) -> MutexGuard<'_, T> {
        self.0.lock()
    }
}

/// `std::sync::OnceLock`: a thread that sees the value as set sees all of it.
#[derive(Debug)]
pub struct OnceLock<T> {
    is_set: loom::sync::atomic::AtomicBool,
    setting: Mutex<()>,
    value: std::sync::OnceLock<T>,
}

impl<T> Default for OnceLock<T> {
    fn default() -> OnceLock<T> {
        OnceLock::new()
    }
}

impl<T> OnceLock<T> {
    /// One without a value.
    #[track_caller]
    pub fn new() -> OnceLock<T> {
        OnceLock {
            is_set: loom::sync::atomic::AtomicBool::new(false),
            setting: Mutex::new(()),
            value: std::sync::OnceLock::new(),
        }
    }

    /// The value, once it is there.
    #[track_caller]
    pub fn get(&self) -> Option<&T> {
        match self.is_set.load(Ordering::Acquire) {
            true => self.value.get(),
            false => None,
        }
    }

    /// The value, made now if it is not there.
    #[track_caller]
    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        let _setting = self.setting.lock();
        let value = self.value.get_or_init(make);
        self.is_set.store(true, Ordering::Release);
        value
    }
}
