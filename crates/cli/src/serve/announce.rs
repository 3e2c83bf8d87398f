//! What a server says when it is ready.

use std::io::Write;

use super::Args;
use gaur_server::server::Server;

use crate::exporter::Export;
use crate::failure::Failure;
use crate::fronts::FrontConfig;
use crate::notice::say;
use crate::size::human;

/// Prints where the exports are: the place of each on a line of its own, then what to do with it.
pub fn announce(args: &Args, server: &Server, out: &mut dyn Write) -> Result<(), Failure> {
    let exports = server.exporter().exports();
    for export in &exports {
        writeln!(out, "{}", export.place)?;
    }
    match exports.first() {
        Some(first) => advise(first, out)?,
        None => {
            if let Some(uri) = server.exporter().nbd_uri("NAME") {
                writeln!(
                    out,
                    "# nothing is exported yet; NBD exports will be at {uri}"
                )?;
            }
        }
    }
    if let Some(path) = &args.control {
        let path = path.display();
        writeln!(out, "# commands: gaur export list --control '{path}'")?;
    }
    out.flush()?;
    if args.insecure {
        say("every host that reaches this machine can connect (-b 127.0.0.1 keeps it local)");
    }
    Ok(())
}

/// What to do with an export.
fn advise(export: &Export, out: &mut dyn Write) -> Result<(), Failure> {
    let served = &export.served;
    let (name, size) = (served.name(), human(served.size_bytes()));
    let place = &export.place;
    let quoted = format!("'{place}'");
    let read_only = served.read_only;
    match &export.config {
        FrontConfig::Nbd {} => {
            writeln!(out, "# {name}, {size}; connect with one of these:")?;
            writeln!(out, "nbdinfo {quoted}")?;
            let read_only = if read_only { ",readonly=on" } else { "" };
            writeln!(
                out,
                "qemu-system-x86_64 -m 1G -drive 'file={place},format=raw,if=virtio{read_only}'"
            )?;
        }
        FrontConfig::VhostUser(_) => {
            writeln!(out, "# {name}, {size}; connect with:")?;
            writeln!(
                out,
                "qemu-system-x86_64 -m 1G -object memory-backend-memfd,id=m,size=1G,share=on \\\n    \
                 -machine memory-backend=m -chardev socket,id=c,path={place} -device vhost-user-blk-pci,chardev=c"
            )?;
        }
        _ => writeln!(out, "# {name}, {size}")?,
    }
    Ok(())
}
