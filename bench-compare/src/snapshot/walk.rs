//! Making, applying and deleting snapshots of a large disk whose clusters are all mapped.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::{Bench, Row, Table, qemu_img, settle, timed};

/// Snapshots that are there already in the second half of the table.
const OTHERS: usize = 10;

/// Both do the same with an image of their own.
pub fn measure(bench: &Bench, table: &mut Table) -> Result<()> {
    let gib = bench.arguments.walk_gib;
    table.notes.push(format!(
        "A disk of {gib} GiB, all of whose clusters are mapped (preallocation=metadata) and lie in a sparse \
         file. Seconds of a whole command."
    ));
    let (ours, theirs) = (bench.dir.join("gaur.qcow2"), bench.dir.join("qemu.qcow2"));
    for image in [&ours, &theirs] {
        let mut create = qemu_img(
            &[
                "create",
                "-q",
                "-f",
                "qcow2",
                "-o",
                "preallocation=metadata",
            ],
            image,
        );
        timed(create.arg(format!("{gib}G")))?;
    }
    for others in [0, OTHERS] {
        for number in 0..others {
            // By one engine for both: QEMU would take minutes for each.
            for image in [&ours, &theirs] {
                timed(&mut gaur(
                    bench,
                    "create",
                    image,
                    &format!("other {number}"),
                ))?;
            }
        }
        let mut rows = [
            Row::new(&format!("create, {others} others"), "s"),
            Row::new(&format!("apply, {others} others"), "s"),
            Row::new(&format!("delete, {others} others"), "s"),
        ];
        for _ in 0..bench.arguments.walk_rounds {
            let verbs = [("create", "-c"), ("apply", "-a"), ("delete", "-d")];
            for (row, (verb, flag)) in rows.iter_mut().zip(verbs) {
                settle()?;
                row.add("gaur", timed(&mut gaur(bench, verb, &ours, "wanted"))?);
                settle()?;
                let mut command = qemu_img(&["snapshot", flag, "wanted"], &theirs);
                row.add("qemu-img", timed(&mut command)?);
            }
        }
        for mut row in rows {
            row.judge_ratio("gaur", "qemu-img", 0.1, true);
            table.rows.push(row);
        }
    }
    // Nothing counts that is not right.
    timed(&mut qemu_img(&["check", "-q"], &ours))?;
    std::fs::remove_file(ours)?;
    std::fs::remove_file(theirs)?;
    Ok(())
}

fn gaur(bench: &Bench, verb: &str, image: &Path, name: &str) -> Command {
    let mut command = Command::new(&bench.gaur);
    command.args(["snapshot", verb]).arg(image).arg(name);
    command
}
