//! Lists of internal snapshots as qemu-img prints them: JSON (`SnapshotInfo`) and a table.

use std::io::Write;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::failure::Failure;
use crate::size::human;
pub use gaur_server::notice::one_line as printable;
pub use gaur_server::snapshot_facts::SnapshotInfo;

/// Prints a snapshot for people.
pub fn print(info: &SnapshotInfo, out: &mut dyn Write) -> Result<(), Failure> {
    writeln!(out, "id: {}", printable(&info.id))?;
    writeln!(out, "name: {}", printable(&info.name))?;
    writeln!(out, "date: {}", local_date(info.date_sec))?;
    if let Some(size) = info.disk_size {
        writeln!(out, "virtual size: {} ({size} bytes)", human(size))?;
    }
    let size = info.vm_state_size;
    writeln!(out, "vm state size: {} ({size} bytes)", human(size))?;
    writeln!(out, "vm clock: {}", clock(info))?;
    if let Some(icount) = info.icount {
        writeln!(out, "icount: {icount}")?;
    }
    Ok(())
}

/// Prints them as a table for people; nothing if there are none.
pub fn print_table(snapshots: &[SnapshotInfo], out: &mut dyn Write) -> Result<(), Failure> {
    if snapshots.is_empty() {
        return Ok(());
    }
    writeln!(out, "Snapshot list:")?;
    writeln!(
        out,
        "{:<7} {:<16} {:>8} {:>19} {:>15} {:>10}",
        "ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"
    )?;
    for snapshot in snapshots {
        let icount = snapshot.icount.map(|count| count.to_string());
        writeln!(
            out,
            "{:<7} {:<16} {:>8} {:>19} {:>15} {:>10}",
            printable(&snapshot.id),
            printable(&snapshot.name),
            human(snapshot.vm_state_size),
            local_date(snapshot.date_sec),
            clock(snapshot),
            icount.as_deref().unwrap_or("--"),
        )?;
    }
    Ok(())
}

/// A date in the time zone of the machine.
fn local_date(seconds: u64) -> String {
    let timestamp = i64::try_from(seconds).ok().map(Timestamp::from_second);
    match timestamp {
        Some(Ok(timestamp)) => {
            let date = timestamp.to_zoned(TimeZone::system());
            date.strftime("%Y-%m-%d %H:%M:%S").to_string()
        }
        _ => seconds.to_string(),
    }
}

fn clock(snapshot: &SnapshotInfo) -> String {
    let seconds = snapshot.vm_clock_sec;
    format!(
        "{:04}:{:02}:{:02}.{:03}",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        snapshot.vm_clock_nsec / 1_000_000
    )
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
            disk_size: None,
        }
    }

    #[test]
    fn snapshots_are_a_table() {
        let mut text = Vec::new();
        print_table(&[snapshot()], &mut text).expect("writing to memory");
        let text = String::from_utf8(text).expect("utf-8");
        let mut lines = text.lines().skip(1);
        assert_eq!(
            lines.next(),
            Some(
                "ID      TAG               VM_SIZE                DATE        VM_CLOCK     ICOUNT"
            )
        );
        let line = lines.next().expect("a line for the snapshot");
        assert!(
            line.starts_with("12      before upgrade   1.08 KiB "),
            "{line}"
        );
        assert!(line.ends_with("  0003:01:02.007         --"), "{line}");
    }

    #[test]
    fn names_out_of_an_image_cannot_drive_the_terminal() {
        let shown = printable("a\x1b[2Jb\nimage: c");
        assert_eq!(shown, "a\\u{1b}[2Jb\\nimage: c");
        assert_eq!(printable("grün 图像.qcow2"), "grün 图像.qcow2");
    }
}
