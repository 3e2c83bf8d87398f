//! What is told of internal snapshots, in JSON: qemu-img's words, and more.

use gaur_engine::Snapshot;
use serde::{Deserialize, Serialize};

const NANOSECONDS: u64 = 1_000_000_000;

/// An internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotInfo {
    /// Instructions executed, where they were counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub icount: Option<u64>,
    /// Time of the guest's clock: nanoseconds beyond the second.
    pub vm_clock_nsec: u64,
    /// Its name.
    pub name: String,
    /// When it was made: seconds since 1970.
    pub date_sec: u64,
    /// When it was made: nanoseconds beyond the second.
    pub date_nsec: u32,
    /// Time of the guest's clock: seconds.
    pub vm_clock_sec: u64,
    /// Its number.
    pub id: String,
    /// Bytes of machine state.
    pub vm_state_size: u64,
    /// Bytes of the disk it keeps, where that was recorded and is asked for; qemu-img does not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_size: Option<u64>,
}

impl SnapshotInfo {
    /// From an entry of the table.
    pub fn new(snapshot: &Snapshot) -> SnapshotInfo {
        SnapshotInfo {
            icount: snapshot.icount,
            vm_clock_nsec: snapshot.vm_clock_nsec % NANOSECONDS,
            name: String::from_utf8_lossy(&snapshot.name).into_owned(),
            date_sec: u64::from(snapshot.date_sec),
            date_nsec: snapshot.date_nsec,
            vm_clock_sec: snapshot.vm_clock_nsec / NANOSECONDS,
            id: String::from_utf8_lossy(&snapshot.id).into_owned(),
            vm_state_size: snapshot.vm_state_size,
            disk_size: snapshot.disk_size,
        }
    }

    /// The same without what qemu-img does not tell.
    pub fn of_qemu(self) -> SnapshotInfo {
        SnapshotInfo {
            disk_size: None,
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot() -> SnapshotInfo {
        SnapshotInfo {
            icount: None,
            vm_clock_nsec: 7_000_000,
            name: "before upgrade".into(),
            date_sec: 0,
            date_nsec: 0,
            vm_clock_sec: 3 * 3600 + 62,
            id: "12".into(),
            vm_state_size: 1107,
            disk_size: Some(1 << 30),
        }
    }

    #[test]
    fn details_are_one_object_that_reads_back() {
        let detail = snapshot();
        let value = serde_json::to_value(&detail).expect("plain data");
        assert_eq!(value["disk-size"], 1 << 30);
        assert_eq!(value["vm-state-size"], 1107);
        assert!(value.get("icount").is_none());
        let back: SnapshotInfo = serde_json::from_value(value).expect("the same");
        assert_eq!(back, detail);
    }
}
