//! Looking up a snapshot by a text that may be its id or its name.

use gaur_format::snapshot::Snapshot;

use crate::error::{ErrorKind, ImageError};

/// The snapshot whose id is `which`, else the first whose name it is, as `qemu-img` looks for the one
/// to read or apply.
pub fn find_snapshot<'a>(
    snapshots: &'a [Snapshot],
    which: &str,
) -> Result<&'a Snapshot, ImageError> {
    let by_id = snapshots.iter().find(|one| one.id == which.as_bytes());
    by_id
        .or_else(|| by_name(snapshots, which))
        .ok_or_else(|| missing(snapshots, which))
}

/// The first snapshot whose name is `which`, else the one whose id it is, as `qemu-img` looks for the one
/// to delete, which it finds by name only.
pub(crate) fn find_to_delete<'a>(
    snapshots: &'a [Snapshot],
    which: &str,
) -> Result<&'a Snapshot, ImageError> {
    let by_id = || snapshots.iter().find(|one| one.id == which.as_bytes());
    by_name(snapshots, which)
        .or_else(by_id)
        .ok_or_else(|| missing(snapshots, which))
}

fn by_name<'a>(snapshots: &'a [Snapshot], which: &str) -> Option<&'a Snapshot> {
    snapshots.iter().find(|one| one.name == which.as_bytes())
}

/// Most names that are worth listing in an error.
const NAMES_MAX: usize = 8;

fn missing(snapshots: &[Snapshot], which: &str) -> ImageError {
    let names = || {
        let name = |one: &Snapshot| format!("{:?}", String::from_utf8_lossy(&one.name));
        snapshots.iter().map(name).collect::<Vec<String>>()
    };
    let hint = match snapshots.len() {
        0 => "the image has none".to_owned(),
        1..=NAMES_MAX => format!("the image has {}", names().join(", ")),
        count => format!("the image has {count} others"),
    };
    let text = format!("no snapshot has the name or id {which:?}: {hint}");
    ImageError::new(ErrorKind::NotFound, text)
}

#[cfg(test)]
mod tests {
    use gaur_format::HostOffset;

    use super::*;

    fn snapshot(id: &str, name: &str) -> Snapshot {
        Snapshot {
            l1_table_offset: HostOffset(0x30000),
            l1_size: 1,
            id: id.into(),
            name: name.into(),
            date_sec: 0,
            date_nsec: 0,
            vm_clock_nsec: 0,
            vm_state_size: 0,
            disk_size: Some(512),
            icount: None,
            unknown_extra: Vec::new(),
        }
    }

    #[test]
    fn reads_look_up_by_id_first_and_deletes_by_name_first() {
        let all = [snapshot("1", "2"), snapshot("2", "monday")];
        let id = |found: Result<&Snapshot, ImageError>| found.unwrap().id.clone();
        assert_eq!(id(find_snapshot(&all, "2")), b"2");
        assert_eq!(id(find_to_delete(&all, "2")), b"1");
        assert_eq!(id(find_snapshot(&all, "monday")), b"2");
        assert_eq!(id(find_to_delete(&all, "1")), b"1");
        let error = find_snapshot(&all, "tuesday").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        let line = error.to_string();
        assert!(line.ends_with("the image has \"2\", \"monday\""), "{line}");
        let many = vec![snapshot("1", "x"); NAMES_MAX + 1];
        let line = find_snapshot(&many, "tuesday").unwrap_err().to_string();
        assert!(line.ends_with("has 9 others"), "{line}");
    }
}
