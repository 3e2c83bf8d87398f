//! How fast the state of a machine is saved and loaded, by history's writers and by ours:
//! `vmstate PATH [MIB [ROUNDS [direct|cached]]]`, or `vmstate rotating [MIB]`.
//!
//! `rotating` is no file but a simulated disk of 7200 turns a minute, whose time is virtual: with its write
//! cache off, and on.
//!
//! The file at PATH is made, and removed at the end. Every round runs all writers one after the other;
//! what is printed is the median of the rounds, and the median of each round's ratio to the bare file.

use std::rc::Rc;

use gaur_bench::engine::Failure;
use gaur_bench::vmstate::run::{self, Times};
use gaur_bench::vmstate::{Guest, Writer, disk};
use gaur_sim::Rotating;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next() else {
        return Err("usage: vmstate PATH [MIB [ROUNDS [direct|cached]]]".into());
    };
    if path == "rotating" {
        let mib: u64 = arguments.next().map_or(Ok(128), |text| text.parse())?;
        return rotating(mib);
    }
    let mib: u64 = arguments.next().map_or(Ok(1024), |text| text.parse())?;
    let rounds: usize = arguments.next().map_or(Ok(3), |text| text.parse())?;
    let only = arguments.next();
    let guest = Guest::new(256 << 20);
    for (direct, name) in [(true, "direct"), (false, "cached")] {
        if only.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        let mut all = Vec::new();
        for _ in 0..rounds {
            let mut round = Vec::new();
            for writer in Writer::ALL {
                round.push(run::on_file(writer, &path, direct, &guest, mib << 20)?);
            }
            all.push(round);
        }
        print(name, mib, &all);
    }
    Ok(())
}

fn rotating(mib: u64) -> Result<(), Failure> {
    let guest = Rc::new(Guest::new(32 << 20));
    for (name, write_memory_bytes) in [
        ("rotating disk, write cache off", 0),
        ("rotating disk, write cache of 64 MiB", 64 << 20),
    ] {
        let shape = Rotating {
            write_memory_bytes,
            ..Rotating::SATA_7200
        };
        let mut round = Vec::new();
        for writer in Writer::ALL {
            round.push(disk::on_disk(writer, shape, &guest, mib << 20)?);
        }
        print(name, mib, &[round]);
    }
    Ok(())
}

fn print(host: &str, mib: u64, all: &[Vec<Times>]) {
    println!("\n{mib} MiB, {host}, {} rounds\n", all.len());
    println!("| writer | save | | of the bare file | load | of the bare file |");
    println!("|---|---|---|---|---|---|");
    let speed = |seconds: f64| format!("{:.0} MB/s", (mib << 20) as f64 / seconds / 1e6);
    for (index, writer) in Writer::ALL.into_iter().enumerate() {
        let of = |pick: fn(&Times) -> Option<f64>| {
            let seconds = median(all.iter().filter_map(|round| pick(&round[index])));
            let ratio = median(all.iter().filter_map(|round| {
                let bare = round.last().and_then(pick)?;
                Some(bare / pick(&round[index])?)
            }));
            (seconds, ratio)
        };
        let (save, save_ratio) = of(|times| Some(times.save));
        let (load, load_ratio) = of(|times| times.load);
        let (load, load_ratio) = if load > 0.0 {
            (speed(load), format!("{load_ratio:.2}"))
        } else {
            (String::new(), String::new())
        };
        println!(
            "| {} | {save:.2} s | {} | {save_ratio:.2} | {load} | {load_ratio} |",
            writer.name(),
            speed(save),
        );
    }
}

/// 0 if there are none.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}
