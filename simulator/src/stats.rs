//! Statistics of a simulation.

use std::fmt;
use std::ops::AddAssign;

macro_rules! counters {
    ($($(#[$what:meta])* $name:ident,)*) => {
        /// Counters over any number of seeds.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$what])* pub $name: u64,)*
        }

        impl AddAssign for Stats {
            fn add_assign(&mut self, other: Stats) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counters! {
    /// Seeds that ran to their end.
    seeds,
    /// Times an image was opened for the load.
    epochs,
    /// Requests of the guest.
    requests,
    /// Of these, clusters stored compressed.
    packed,
    /// Checks of the open image beside them.
    online_checks,
    /// Streams of what lies below into the top that ended well.
    streams,
    /// Bytes that reads have left in the top.
    copied_bytes,
    /// Requests that ended with an error (faults, full disks).
    errors,
    /// Moments at which the power was cut; each is one image that was judged.
    crash_points,
    /// Of these, images that the engine opened and read as a whole.
    reopened,
    /// Of these, images that QEMU's tools judged as well.
    qemu,
    /// Processes killed with the power on.
    kills,
    /// Commits that a process found in the log of one that was killed.
    adopted,
    /// Logs that had to be refused, because another writer had changed the image.
    stale_logs,
    /// Clean closes.
    closes,
    /// Good bitmaps that a close left.
    bitmaps,
    /// Good bitmaps in use that a crash left.
    recovered,
    /// Faults that struck.
    faults,
    /// Times an epoch moved the L1 table.
    l1_moves,
    /// Times an epoch moved the refcount table.
    reftable_moves,
    /// Holes made inside clusters.
    holes,
    /// Snapshots made, applied, deleted and renamed.
    snapshots,
    /// Of these, snapshots with the state of a virtual machine.
    states,
    /// Operations on snapshots that failed, by a fault or because they were cancelled.
    snapshots_refused,
    /// Of the crash points, those in the middle of an operation on snapshots.
    snapshot_crashes,
    /// Crash points of loads with compressed writes only, where seeds are mixed.
    cuts_compressed,
    /// The same for encrypted images.
    cuts_encrypted,
    /// For images with a data file.
    cuts_data_file,
    /// For images with bitmaps.
    cuts_bitmaps,
    /// Crash points of amendments.
    cuts_amend,
    /// Of changes of keys.
    cuts_keys,
    /// Of repairs.
    cuts_repair,
    /// Of commits.
    cuts_commit,
    /// Of rebases.
    cuts_rebase,
    /// Steps of the scheduler.
    steps,
}

impl fmt::Display for Stats {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "{} seeds, {} crash points ({} reopened by the engine, {} judged by qemu-img), \
             {} kills ({} commits adopted, {} logs left alone), {} closes ({} bitmaps stored, {} recovered), {} epochs, {} requests ({} compressed), {} online checks, {} streams, {} KiB copied by reads, {} faults, {} failed requests, \
             {} L1 tables moved, {} refcount tables moved, {} holes, \
             {} changes of snapshots ({} with a state, {} refused, {} crash points inside), {} steps",
            self.seeds,
            self.crash_points,
            self.reopened,
            self.qemu,
            self.kills,
            self.adopted,
            self.stale_logs,
            self.closes,
            self.bitmaps,
            self.recovered,
            self.epochs,
            self.requests,
            self.packed,
            self.online_checks,
            self.streams,
            self.copied_bytes >> 10,
            self.faults,
            self.errors,
            self.l1_moves,
            self.reftable_moves,
            self.holes,
            self.snapshots,
            self.states,
            self.snapshots_refused,
            self.snapshot_crashes,
            self.steps
        )?;
        let verbs = self.cuts_amend + self.cuts_keys + self.cuts_repair;
        if verbs + self.cuts_commit + self.cuts_rebase == 0 {
            return Ok(());
        }
        write!(
            out,
            "; crash points with compressed writes {}, encryption {}, a data file {}, bitmaps {}, in amend {}, \
             changes of keys {}, repair {}, commit {}, rebase {}",
            self.cuts_compressed,
            self.cuts_encrypted,
            self.cuts_data_file,
            self.cuts_bitmaps,
            self.cuts_amend,
            self.cuts_keys,
            self.cuts_repair,
            self.cuts_commit,
            self.cuts_rebase
        )
    }
}
