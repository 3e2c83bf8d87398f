//! The part that runs in the guest: cell by cell, all contestants in turn.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::contestant::{ALL, Contestant, Programs};
use super::device::Target;
use super::image::Images;
use super::load::{self, Run};
use super::record::{BEFORE, Cell, Record, Series};
use super::{ExportsArguments, store, vhost};
use crate::machine;

/// Whose reads tell which of QEMU's ways is the fastest: no kernel stands before it.
const PROBE: &str = "qsd vhost-user";

/// QEMU's ways to read and write files.
const AIO: &[&str] = &["native", "io_uring", "threads"];

/// Measures everything and leaves the record in the shared folder.
pub fn run(arguments: &ExportsArguments) -> Result<()> {
    let dir = PathBuf::from("/tmp/bench");
    std::fs::create_dir_all(&dir)?;
    let folder = store::folder(arguments.store, &dir, arguments.size_mib)?;
    let images = Images::new(&arguments.dir, &folder, arguments.size_mib);
    let mut programs = Programs {
        gaur: arguments.common.gaur()?,
        rublk: arguments.rublk.clone().context("--rublk is missing")?,
        dir,
        qemu_aio: "threads".to_owned(),
    };
    let mut record = Record {
        guest_kernel: machine::kernel(),
        peers: vec![
            machine::version_of("qemu-nbd"),
            machine::version_of("qemu-storage-daemon"),
            machine::version_of(&programs.rublk.to_string_lossy()),
            machine::version_of("fio"),
        ],
        guest_processors: std::thread::available_parallelism().map_or(0, usize::from),
        date: machine::today(),
        store: arguments.store.words().to_owned(),
        seconds: arguments.seconds,
        size_mib: arguments.size_mib,
        ..Record::default()
    };
    let bench = Bench { arguments, images };
    let asks_qemu = |one: &&Contestant| one.who.starts_with("q") && bench.wants(one.who);
    if ALL.iter().any(|one| asks_qemu(&one)) {
        bench.choose_aio(&mut programs)?;
        record.notes.push(format!(
            "QEMU's files are opened with aio={}.",
            programs.qemu_aio
        ));
    }
    for mut cell in bench.cells() {
        bench.measure(&mut cell, &programs);
        record.cells.push(cell);
        // A run that is cut short leaves what it has.
        let text = serde_json::to_string_pretty(&record)?;
        std::fs::write(arguments.dir.join("record.json"), text)?;
    }
    Ok(())
}

struct Bench<'a> {
    arguments: &'a ExportsArguments,
    images: Images,
}

impl Bench<'_> {
    fn wants(&self, who: &str) -> bool {
        let wanted = &self.arguments.who;
        wanted.is_empty() || wanted.iter().any(|one| one == who)
    }

    fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for image in &self.arguments.images {
            for load in &self.arguments.loads {
                for &depth in &self.arguments.depths {
                    for &jobs in &self.arguments.jobs {
                        cells.push(Cell {
                            image: image.clone(),
                            load: load.clone(),
                            depth,
                            jobs,
                            series: Vec::new(),
                        });
                    }
                }
            }
        }
        cells
    }

    /// Finds QEMU's fastest way with files on this machine.
    fn choose_aio(&self, programs: &mut Programs) -> Result<()> {
        let contestant = ALL.iter().find(|one| one.who == PROBE).context(PROBE)?;
        let cell = Cell {
            image: "full".to_owned(),
            load: "randread".to_owned(),
            depth: 64,
            jobs: 1,
            series: Vec::new(),
        };
        let mut best = (0.0, String::new());
        for aio in AIO {
            programs.qemu_aio = (*aio).to_owned();
            match self.once(contestant, &cell, programs) {
                Ok(run) => {
                    println!("{PROBE} with aio={aio}: {:.0} IOPS", run.iops);
                    if run.iops > best.0 {
                        best = (run.iops, programs.qemu_aio.clone());
                    }
                }
                Err(error) => println!("{PROBE} with aio={aio}: {error:#}"),
            }
        }
        if best.1.is_empty() {
            bail!("{PROBE} works in no way");
        }
        programs.qemu_aio = best.1;
        Ok(())
    }

    fn measure(&self, cell: &mut Cell, programs: &Programs) {
        let mut contestants = Vec::new();
        for one in ALL.iter().filter(|one| self.wants(one.who)) {
            contestants.push((one.who.to_owned(), one, programs.clone()));
            if let Some(gaur) = &self.arguments.before
                && one.who.starts_with("gaur")
            {
                let gaur = gaur.clone();
                let programs = Programs {
                    gaur,
                    ..programs.clone()
                };
                contestants.push((format!("{}{BEFORE}", one.who), one, programs));
            }
        }
        for (who, ..) in &contestants {
            cell.series.push(Series {
                who: who.clone(),
                ..Series::default()
            });
        }
        // Forth in one round and back in the next.
        for round in 0..self.arguments.rounds {
            let mut order: Vec<usize> = (0..contestants.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let (name, contestant, programs) = &contestants[index];
                let run = self.once(contestant, cell, programs);
                let what = format!(
                    "{} {} depth {} jobs {}",
                    cell.image, cell.load, cell.depth, cell.jobs
                );
                let run = run.unwrap_or_else(|error| {
                    println!("{what}: {name}: {error:#}");
                    Run::default()
                });
                println!(
                    "{what}: {name}: {:.0} IOPS, p99 {:.0} us",
                    run.iops, run.p99_us
                );
                cell.series[index].iops.push(run.iops);
                cell.series[index].p99_us.push(run.p99_us);
            }
        }
    }

    fn once(&self, contestant: &Contestant, cell: &Cell, programs: &Programs) -> Result<Run> {
        let image = self.images.ready(&cell.image, contestant.raw)?;
        let running = contestant.start(programs, &image)?;
        let size = self.images.size_bytes();
        let seconds = self.arguments.seconds;
        let run = match &running.target {
            Target::Path(path) => {
                settle(path);
                load::run(cell, path, seconds, size)
            }
            Target::Vhost(socket) => vhost::run(cell, socket, seconds, size),
        };
        // Who cannot end has been measured all the same.
        if let Err(error) = running.stop() {
            println!("{} did not end well: {error:#}", contestant.who);
        }
        run
    }
}

/// No scheduler of requests stands between fio and the device.
fn settle(path: &Path) {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    // A file has none.
    let _ = std::fs::write(format!("/sys/block/{name}/queue/scheduler"), "none");
}
