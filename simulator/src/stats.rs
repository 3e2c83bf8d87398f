//! Statistics of a simulation.

use std::fmt;
use std::ops::AddAssign;

/// Counters over any number of seeds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Seeds that ran to their end.
    pub seeds: u64,
    /// Times an image was opened for the load.
    pub epochs: u64,
    /// Requests of the guest.
    pub requests: u64,
    /// Requests that ended with an error (faults, full disks).
    pub errors: u64,
    /// Moments at which the power was cut; each is one image that was judged.
    pub crash_points: u64,
    /// Of these, images that the engine opened and read as a whole.
    pub reopened: u64,
    /// Of these, images that QEMU's tools judged as well.
    pub qemu: u64,
    /// Processes killed with the power on.
    pub kills: u64,
    /// Commits that a process found in the log of one that was killed.
    pub adopted: u64,
    /// Logs that had to be refused, because another writer had changed the image.
    pub stale_logs: u64,
    /// Clean closes.
    pub closes: u64,
    /// Faults that struck.
    pub faults: u64,
    /// Times an epoch moved the L1 table.
    pub l1_moves: u64,
    /// Times an epoch moved the refcount table.
    pub reftable_moves: u64,
    /// Holes made inside clusters.
    pub holes: u64,
    /// Snapshots made, applied, deleted and renamed.
    pub snapshots: u64,
    /// Of these, snapshots with the state of a virtual machine.
    pub states: u64,
    /// Operations on snapshots that failed, by a fault or because they were cancelled.
    pub snapshots_refused: u64,
    /// Of the crash points, those in the middle of an operation on snapshots.
    pub snapshot_crashes: u64,
    /// Steps of the scheduler.
    pub steps: u64,
}

impl AddAssign for Stats {
    fn add_assign(&mut self, other: Stats) {
        self.seeds += other.seeds;
        self.epochs += other.epochs;
        self.requests += other.requests;
        self.errors += other.errors;
        self.crash_points += other.crash_points;
        self.reopened += other.reopened;
        self.qemu += other.qemu;
        self.kills += other.kills;
        self.adopted += other.adopted;
        self.stale_logs += other.stale_logs;
        self.closes += other.closes;
        self.faults += other.faults;
        self.l1_moves += other.l1_moves;
        self.reftable_moves += other.reftable_moves;
        self.holes += other.holes;
        self.snapshots += other.snapshots;
        self.states += other.states;
        self.snapshots_refused += other.snapshots_refused;
        self.snapshot_crashes += other.snapshot_crashes;
        self.steps += other.steps;
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "{} seeds, {} crash points ({} reopened by the engine, {} judged by qemu-img), \
             {} kills ({} commits adopted, {} logs left alone), {} closes, {} epochs, {} requests, {} faults, {} failed requests, \
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
            self.epochs,
            self.requests,
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
        )
    }
}
