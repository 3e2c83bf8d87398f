//! What the engine itself costs, without a host: `engine [SECONDS [LOAD]]`.
//!
//! The image is in memory, so a request never waits and its time is the engine's own. Each load runs
//! on one thread and then on two, with a queue each on one image; `scaling` is the second rate over
//! the first. Loads: reads and writes of mapped clusters at random, and writes to clusters that have
//! to be allocated, in order and at random; with standard and with extended L2 entries.

use std::time::Duration;

use gaur_bench::engine::{Failure, Load, measure};

fn main() -> Result<(), Failure> {
    let seconds = std::env::args().nth(1).map_or(Ok(1.0), |text| text.parse());
    let time = Duration::from_secs_f64(seconds?);
    let only = std::env::args().nth(2);
    println!(
        "{:18} {:8} {:>10} {:>10} {:>10} {:>8}",
        "load", "entries", "1: kIOPS", "1: ns/op", "2: kIOPS", "scaling"
    );
    for extended_l2 in [false, true] {
        for load in [
            Load::Read,
            Load::Write,
            Load::AllocateInOrder,
            Load::AllocateAtRandom,
        ] {
            if only
                .as_ref()
                .is_some_and(|only| *only != format!("{load:?}"))
            {
                continue;
            }
            let one = measure(load, extended_l2, 1, time)?;
            let two = measure(load, extended_l2, 2, time)?;
            println!(
                "{:18} {:8} {:10.0} {:10.0} {:10.0} {:8.2}",
                format!("{load:?}"),
                if extended_l2 { "extended" } else { "standard" },
                one / 1e3,
                1e9 / one,
                two / 1e3,
                two / one
            );
        }
    }
    Ok(())
}
