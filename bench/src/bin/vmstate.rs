//! How fast the state of a machine is saved and loaded: `vmstate PATH [MIB [ROUNDS]]`.

use gaur_bench::engine::Failure;
use gaur_bench::vmstate::{Guest, Writer, run};

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: vmstate PATH [MIB [ROUNDS]]")?;
    let mib: u64 = arguments.next().map_or(Ok(1024), |text| text.parse())?;
    let rounds: u32 = arguments.next().map_or(Ok(3), |text| text.parse())?;
    let guest = Guest::new(256 << 20);
    for direct in [true, false] {
        for round in 0..rounds {
            for writer in Writer::ALL {
                let times = run::on_file(writer, &path, direct, &guest, mib << 20)?;
                println!("{direct} {round} {:40} {:8.3} s {:6.0} MB/s  load {:?}", writer.name(), times.save, (mib << 20) as f64 / times.save / 1e6, times.load.map(|t| (mib<<20) as f64 / t / 1e6));
            }
        }
    }
    Ok(())
}
