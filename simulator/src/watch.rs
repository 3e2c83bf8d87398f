//! When a run is inspected: at random steps, more often while snapshots change, and most often in the few
//! steps between the write of the header and its flush.

use gaur_sim::{Deadlock, Random, Scheduler, SimHost, Stop};

use crate::machine::TOP;

/// The looks that are left in an epoch.
#[derive(Debug)]
pub(crate) struct Watch {
    stride: u64,
    looks: u32,
    close: Option<SnapshotWatch>,
    /// The epoch ends here if it has not ended before.
    pub(crate) crash_at: u64,
}

/// Looks at operations on snapshots.
#[derive(Debug)]
struct SnapshotWatch {
    stride: u64,
    looks: u32,
    /// Those while the header is not durable.
    switch_looks: u32,
}

/// What is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Any moment.
    Any,
    /// One while snapshots change.
    Change,
    /// One at which a header is written and not durable.
    Switch,
}

impl Watch {
    /// The looks of an epoch, in which snapshots are changed if `watches` says so.
    pub(crate) fn draw(random: &mut Random, watches: bool) -> Watch {
        let stride = random.pick(&[10, 40, 150, 600]);
        let close = watches.then(|| SnapshotWatch {
            stride: random.pick(&[3, 12, 50]),
            looks: 20,
            switch_looks: 25,
        });
        // Snapshots take their time.
        let longest = if watches { 120 * stride } else { 12 * stride };
        let crash_at = match random.below(3) {
            0 => u64::MAX,
            _ => random.below(longest),
        };
        Watch {
            stride,
            looks: 12,
            close,
            crash_at,
        }
    }

    /// Moves the run on to where there may be something to see.
    pub(crate) fn run(
        &mut self,
        scheduler: &mut Scheduler,
        host: &SimHost,
        random: &mut Random,
    ) -> Result<Stop, Deadlock> {
        match &self.close {
            Some(close) if close.switch_looks > 0 => {
                if host.is_dirty(TOP, 0) {
                    return scheduler.run(1);
                }
                for _ in 0..random.between(1, close.stride) {
                    if scheduler.run(1)? == Stop::Done {
                        return Ok(Stop::Done);
                    }
                    if host.is_dirty(TOP, 0) {
                        break;
                    }
                }
                Ok(Stop::Steps)
            }
            Some(close) if close.looks > 0 => scheduler.run(random.between(1, close.stride)),
            _ if self.looks > 0 => scheduler.run(random.between(1, self.stride)),
            _ => scheduler.run(10_000),
        }
    }

    /// Whether to look now; `changing` while something about snapshots is in flight.
    pub(crate) fn look(
        &mut self,
        host: &SimHost,
        random: &mut Random,
        changing: bool,
    ) -> Option<Phase> {
        if let Some(close) = &mut self.close {
            if changing && close.switch_looks > 0 && host.is_dirty(TOP, 0) {
                let looks = random.chance(600);
                close.switch_looks -= u32::from(looks);
                return looks.then_some(Phase::Switch);
            }
            if changing && close.looks > 0 {
                close.looks -= 1;
                return Some(Phase::Change);
            }
            if close.looks > 0 && !random.chance(100) {
                return None;
            }
        }
        self.looks = self.looks.checked_sub(1)?;
        Some(Phase::Any)
    }
}
