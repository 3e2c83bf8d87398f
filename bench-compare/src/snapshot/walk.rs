//! Making, applying and deleting snapshots of a large disk whose clusters are all mapped.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::{Bench, create_mapped, row, settle};
use crate::process::{qemu_img, timed};
use crate::record::{Direction, Table, Unit};

/// Snapshots that are there already in the second half of the table.
const OTHERS: usize = 10;

/// Both do the same with an image of their own.
pub fn measure(bench: &Bench, table: &mut Table) -> Result<()> {
    let gib = bench.arguments.walk_gib;
    table.notes.push(format!(
        "A disk of {gib} GiB, all of whose clusters are mapped (preallocation=metadata) and lie in a sparse \
         file. Seconds of a whole command."
    ));
    let (ours, theirs) = (
        bench.arguments.dir.join("gaur.qcow2"),
        bench.arguments.dir.join("qemu.qcow2"),
    );
    for image in [&ours, &theirs] {
        create_mapped(image, gib)?;
    }
    for others in [0, OTHERS] {
        for number in 0..others {
            // By one engine for both: QEMU would take minutes for each.
            for image in [&ours, &theirs] {
                let name = format!("other {number}");
                timed(&mut gaur(bench, "create", image, &name))?;
            }
        }
        let mut rows = ["create", "apply", "delete"]
            .map(|verb| row(&format!("{verb}, {others} others"), Unit::Seconds));
        for _ in 0..bench.arguments.walk_rounds {
            let verbs = [("create", "-c"), ("apply", "-a"), ("delete", "-d")];
            for (row, (verb, flag)) in rows.iter_mut().zip(verbs) {
                settle()?;
                row.add("gaur", timed(&mut gaur(bench, verb, &ours, "wanted"))?);
                settle()?;
                let mut command = qemu_img(&["snapshot", flag, "wanted"]);
                row.add("qemu-img", timed(command.arg(&theirs))?);
            }
        }
        for mut row in rows {
            row.judge_ratio("gaur", "qemu-img", 0.1, Direction::AtMost);
            table.cells.push(row);
        }
    }
    // Nothing counts that is not right.
    timed(qemu_img(&["check", "-q"]).arg(&ours))?;
    std::fs::remove_file(ours)?;
    std::fs::remove_file(theirs)?;
    Ok(())
}

fn gaur(bench: &Bench, verb: &str, image: &Path, name: &str) -> Command {
    let mut command = Command::new(&bench.gaur);
    command.args(["snapshot", verb]).arg(image).arg(name);
    command
}
