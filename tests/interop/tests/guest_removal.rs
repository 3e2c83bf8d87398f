//! A device that is removed while it is in use: its users get errors, no process hangs, and the server
//! ends in good order with an image in which nothing is wrong.

use std::time::Duration;

use gaur_interop::attached::{DeviceKind, Shape, attach};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::run_for;

const SIZE_MIB: u64 = 256;

fn under_load(via: DeviceKind, shape: Shape) {
    let scratch = Scratch::new("removal");
    let image = shape.create(&scratch, SIZE_MIB);
    for _ in 0..3 {
        let disk = attach(via, &image, &scratch, &[]);
        let name = format!("--filename={}", disk.path());
        let load = std::thread::spawn(move || {
            let job = [
                "--name=load",
                &name,
                "--ioengine=io_uring",
                "--direct=1",
                "--rw=randrw",
                "--bs=4k",
                "--iodepth=32",
                "--size=128m",
                "--time_based",
                "--runtime=60",
            ];
            run_for("fio", &job, 100)
        });
        std::thread::sleep(Duration::from_millis(800));
        disk.detach();
        let run = load.join().expect("the load's thread ends");
        assert!(run.code != 0 && run.code < 124, "it lost its device: {run}");
    }
}

gaur_interop::every_disk!(crate::under_load);
