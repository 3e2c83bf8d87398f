//! Memory for requests whose own lies in many small pieces.
//!
//! Sizes are powers of two from a page to [`PIECE_MAX`]. What was taken once is kept, and all of it
//! together stays under a budget, so a request may have to wait for others, first come, first served,
//! but steady traffic allocates nothing. Nobody needs a second piece to be through with a first, so
//! every wait ends.

use std::cell::{Cell, RefCell};

use gaur_reactor::Buffer;
use gaur_reactor::local::{Mutex, Notify};

/// Longest piece in bytes; longer requests take several. Short enough that what was copied to a piece
/// is still near the processor when it is copied on.
pub(super) const PIECE_MAX: usize = 128 << 10;

const PAGE: usize = 4096;
const CLASSES: usize = (PIECE_MAX / PAGE).trailing_zeros() as usize + 1;

/// The pieces of one thread.
pub(super) struct Bounce {
    budget_bytes: usize,
    held_bytes: Cell<usize>,
    kept: RefCell<[Vec<Buffer>; CLASSES]>,
    /// A bit for each size that was asked for since the last trim.
    active: Cell<u32>,
    room: Notify,
    /// Whoever is next has it; the others wait for that, so that nobody overtakes them.
    turn: Mutex<()>,
}

impl Bounce {
    /// At most `budget_bytes`, but one piece at least.
    pub(super) fn new(budget_bytes: usize) -> Bounce {
        Bounce {
            budget_bytes: budget_bytes.max(PIECE_MAX),
            held_bytes: Cell::new(0),
            kept: RefCell::new([const { Vec::new() }; CLASSES]),
            active: Cell::new(0),
            room: Notify::new(),
            turn: Mutex::new(()),
        }
    }

    /// A piece of at least `len` bytes, at most [`PIECE_MAX`], once there is one.
    pub(super) async fn take(&self, len: usize) -> Buffer {
        let _turn = self.turn.lock().await;
        loop {
            match self.try_take(len) {
                Some(piece) => return piece,
                None => self.room.notified().await,
            }
        }
    }

    fn try_take(&self, len: usize) -> Option<Buffer> {
        let class = class_of(len);
        self.active.set(self.active.get() | 1 << class);
        let mut kept = self.kept.borrow_mut();
        if let Some(piece) = kept[class].pop() {
            return Some(piece);
        }
        let bytes = PAGE << class;
        while self.held_bytes.get() + bytes > self.budget_bytes {
            let other = kept.iter_mut().rev().find_map(Vec::pop)?;
            self.held_bytes.set(self.held_bytes.get() - other.len());
        }
        self.held_bytes.set(self.held_bytes.get() + bytes);
        Some(gaur_reactor::buffer(bytes))
    }

    /// Drops pieces of sizes that were not asked for since the last call.
    pub(super) fn trim(&self) {
        let active = self.active.take();
        for (class, pieces) in self.kept.borrow_mut().iter_mut().enumerate() {
            if active & 1 << class == 0 {
                let bytes: usize = pieces.drain(..).map(|piece| piece.len()).sum();
                self.held_bytes.set(self.held_bytes.get() - bytes);
            }
        }
    }

    /// Takes a piece back.
    pub(super) fn give(&self, piece: Buffer) {
        let class = class_of(piece.len());
        self.kept.borrow_mut()[class].push(piece);
        self.room.notify_one();
    }
}

fn class_of(len: usize) -> usize {
    debug_assert!(len <= PIECE_MAX, "pieces have a longest length");
    let pages = len.max(1).div_ceil(PAGE).next_power_of_two();
    (pages.trailing_zeros() as usize).min(CLASSES - 1)
}
