//! Contestants run in turn: A B A B. Other load of the machine then hits neighbours alike,
//! and the figure to look at is the median of the ratios of neighbours.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::engine::load::{Aio, GaurOptions, Load, Run};
use crate::engine::suite::Suite;
use crate::process::succeed;
use crate::record::{Cell, Series};
use crate::statistics::{NO_SLOWER, median};

/// A program that is measured.
pub struct Contestant<'a> {
    /// What the series is called.
    pub who: &'a str,
    /// One run, with whatever it needs beforehand.
    pub run: Box<dyn FnMut() -> Result<Run> + 'a>,
}

impl<'a> Contestant<'a> {
    /// A contestant by name.
    pub fn new(who: &'a str, run: impl FnMut() -> Result<Run> + 'a) -> Contestant<'a> {
        Contestant {
            who,
            run: Box::new(run),
        }
    }
}

/// Measures all in turn, so many times; the cell gets their series.
pub fn take_turns(cell: &mut Cell, rounds: usize, contestants: &mut [Contestant]) -> Result<()> {
    let mut runs: Vec<Vec<Run>> = contestants.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        for (contestant, runs) in contestants.iter_mut().zip(&mut runs) {
            let run = (contestant.run)().with_context(|| contestant.who.to_owned())?;
            runs.push(run);
        }
    }
    for (contestant, runs) in contestants.iter().zip(&runs) {
        cell.series.push(series(contestant.who, runs));
    }
    Ok(())
}

fn series(who: &str, runs: &[Run]) -> Series {
    let mut details: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (name, value) in runs.iter().flat_map(|run| &run.details) {
        details.entry(name.clone()).or_default().push(*value);
    }
    Series {
        who: who.to_owned(),
        samples: runs.iter().map(|run| run.iops).collect(),
        details: details
            .into_iter()
            .map(|(name, values)| (name, median(&values)))
            .collect(),
    }
}

/// QEMU with its fastest way of input and output for a load, found by one run with each.
pub struct Qemu {
    /// Ways that work, fastest first.
    ways: Vec<Aio>,
    /// Ways that crashed.
    crashed: Vec<Aio>,
}

impl Qemu {
    /// Tries each way once.
    pub fn try_all(mut run: impl FnMut(Aio) -> Result<Option<Run>>) -> Result<Qemu> {
        let mut tried = Vec::new();
        let mut crashed = Vec::new();
        for aio in Aio::ALL {
            match run(aio)? {
                Some(run) => tried.push((aio, run.iops)),
                None => crashed.push(aio),
            }
        }
        tried.sort_by(|a, b| b.1.total_cmp(&a.1));
        Ok(Qemu {
            ways: tried.into_iter().map(|(aio, _)| aio).collect(),
            crashed,
        })
    }

    /// Runs with the fastest way; with the next one from now on when it crashes.
    pub fn run(&mut self, mut run: impl FnMut(Aio) -> Result<Option<Run>>) -> Result<Run> {
        while let Some(&aio) = self.ways.first() {
            if let Some(run) = run(aio)? {
                return Ok(run);
            }
            self.crashed.push(self.ways.remove(0));
        }
        bail!("qemu-img bench crashes whatever its input and output");
    }

    /// What the cell has to say about it.
    pub fn notes(&self) -> Vec<String> {
        let fastest = self.ways.first().map(|aio| format!("aio={}", aio.name()));
        let crashed = self.crashed.iter();
        let crashed = crashed.map(|aio| format!("qemu-img crashes with aio={}", aio.name()));
        fastest.into_iter().chain(crashed).collect()
    }
}

/// A load that both programs make.
pub struct Comparison<'a> {
    /// The load.
    pub load: &'a Load<'a>,
    /// Makes the image anew before each run.
    pub prepare: &'a dyn Fn() -> Result<()>,
    /// Memory that a run takes from the kernel, if the image is in memory.
    pub memory_bytes: u64,
}

impl<'l> Comparison<'l> {
    /// A load that leaves the image as it was.
    pub fn on_a_kept_image(load: &'l Load<'l>) -> Comparison<'l> {
        Comparison {
            load,
            prepare: &|| Ok(()),
            memory_bytes: 0,
        }
    }

    /// Measures both, with others beside them.
    pub fn run<'a>(
        &'a self,
        cell: &mut Cell,
        suite: &'a Suite,
        others: Vec<Contestant<'a>>,
    ) -> Result<()> {
        if let Some(before) = &suite.before {
            return self.against_older(cell, suite, before);
        }
        // Which way is fastest shows in a short run.
        let short = Load {
            requests: self.load.requests.div_ceil(4),
            ..self.load.clone()
        };
        let mut qemu = Qemu::try_all(|aio| {
            (self.prepare)()?;
            short.by_qemu(aio)
        })?;
        let by_qemu = |aio| {
            self.make_ready()?;
            self.load.by_qemu(aio)
        };
        {
            let gaur = Contestant::new("gaur", || {
                self.make_ready()?;
                suite.gaur(self.load)
            });
            let mut contestants = vec![gaur, Contestant::new("qemu", || qemu.run(by_qemu))];
            contestants.extend(others);
            take_turns(cell, suite.rounds, &mut contestants)?;
        }
        cell.notes.extend(qemu.notes());
        Ok(())
    }

    /// Gaur and an older Gaur: the stride of the table, and random offsets from two threads.
    fn against_older(&self, cell: &mut Cell, suite: &Suite, before: &Path) -> Result<()> {
        let threads = GaurOptions {
            random_seed: Some(1),
            threads: 2,
        };
        for (load, beyond) in [("", GaurOptions::default()), (", two threads", threads)] {
            let names = [format!("gaur{load}"), format!("before{load}")];
            let by = |gaur: &'_ Path| {
                self.make_ready()?;
                self.load.by_gaur(gaur, beyond)
            };
            let mut contestants = [
                Contestant::new(&names[0], || by(&suite.gaur)),
                Contestant::new(&names[1], || by(before)),
            ];
            take_turns(cell, suite.rounds, &mut contestants)?;
            cell.expect_ratio(&names[0], &names[1], NO_SLOWER);
        }
        Ok(())
    }

    fn make_ready(&self) -> Result<()> {
        (self.prepare)()?;
        settle(self.load.image)?;
        warm_memory(self.load.image, self.memory_bytes)
    }
}

/// Has the file system write what it still holds, so that no contestant pays for what was done before.
pub fn settle(path: &Path) -> Result<()> {
    succeed(Command::new("sync").arg("-f").arg(path)).map(drop)
}

/// Has the kernel find that much memory and let go of it again, so that the next run gets pages that are
/// there. A virtual machine gives pages that were free for a while back to its host, and getting one
/// again costs several times what a run does with it; that would hit the first contestant.
pub fn warm_memory(image: &Path, len_bytes: u64) -> Result<()> {
    const WRITE_BYTES: u64 = 2 << 20;
    let path = image.with_extension("warm");
    let file = std::fs::File::create(&path)?;
    let bytes = vec![0xA5; WRITE_BYTES as usize];
    for at in 0..len_bytes.div_ceil(WRITE_BYTES) {
        file.write_all_at(&bytes, at * WRITE_BYTES)?;
    }
    std::fs::remove_file(&path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Unit;

    fn run(iops: f64) -> Run {
        Run {
            iops,
            details: [("p99-us".to_owned(), iops * 2.0)].into(),
        }
    }

    #[test]
    fn contestants_alternate() {
        let order = std::cell::RefCell::new(String::new());
        let mut cell = Cell::new(Unit::Iops, &[]);
        let turn = |who: &'static str| {
            let order = &order;
            Contestant::new(who, move || {
                order.borrow_mut().push_str(who);
                Ok(run(order.borrow().len() as f64))
            })
        };
        take_turns(&mut cell, 3, &mut [turn("a"), turn("b")]).unwrap();
        assert_eq!(*order.borrow(), "ababab");
        assert_eq!(cell.series("a").unwrap().samples, [1.0, 3.0, 5.0]);
        assert_eq!(cell.series("b").unwrap().samples, [2.0, 4.0, 6.0]);
        assert_eq!(cell.series("b").unwrap().details["p99-us"], 8.0);
    }

    #[test]
    fn qemu_runs_its_fastest_way_that_does_not_crash() {
        let tried = |aio| {
            Ok(match aio {
                Aio::Native => None,
                Aio::IoUring => Some(run(5.0)),
                Aio::Threads => Some(run(9.0)),
            })
        };
        let mut qemu = Qemu::try_all(tried).unwrap();
        assert_eq!(qemu.run(tried).unwrap().iops, 9.0);
        let later = |aio| Ok((aio != Aio::Threads).then(|| run(5.0)));
        assert_eq!(qemu.run(later).unwrap().iops, 5.0);
        let notes = qemu.notes();
        assert_eq!(notes[0], "aio=io_uring");
        assert_eq!(notes.len(), 3);
        assert!(qemu.run(|_| Ok(None)).is_err());
    }
}
