//! `gaur bench` beside `qemu-img bench`.

use crate::workdir::WorkDir;

/// The lines that both tools print, with the time taken out.
fn lines_without_time(out: &str) -> Vec<String> {
    let lines = out.lines().map(|line| match line.split_once(" in ") {
        Some(("Run completed", rest)) => {
            let time = rest.strip_suffix(" seconds.").expect("the unit of time");
            assert!(time.parse::<f64>().is_ok(), "{line}");
            assert_eq!(
                time.split_once('.').map(|(_, digits)| digits.len()),
                Some(3)
            );
            "Run completed".to_owned()
        }
        _ => line.to_owned(),
    });
    lines.collect()
}

#[test]
fn the_same_command_line_writes_the_same_data_and_prints_the_same_lines() {
    let dir = WorkDir::new();
    for options in [
        &["-c", "300"][..],
        &["-w", "-c", "300", "--pattern=65"],
        &[
            "-w",
            "-c",
            "0x11",
            "-s",
            "3000",
            "-S",
            "100k",
            "--pattern",
            "7",
        ],
        &[
            "-w",
            "-c",
            "100",
            "-d",
            "7",
            "-o",
            "1M",
            "-S",
            "3M",
            "-s",
            "64k",
            "--pattern=9",
        ],
        &[
            "-w",
            "-c",
            "40",
            "-d",
            "4",
            "--flush-interval=9",
            "--pattern=1",
        ],
        &[
            "-w",
            "-c",
            "40",
            "-d",
            "4",
            "--flush-interval=4",
            "--no-drain",
            "--pattern=2",
        ],
        &[
            "-w",
            "-c",
            "20",
            "-S",
            "0",
            "-t",
            "writethrough",
            "--pattern=3",
        ],
        &["-w", "-c", "20", "-t", "none", "--pattern=4"],
        &["-w", "-c", "20", "-t", "off", "-o", "512", "--pattern=5"],
        &["-w", "-c", "20", "-t", "unsafe", "--pattern=6"],
    ] {
        let bench = |run: &dyn Fn(&[&str]) -> String, image: &'static str| {
            dir.qemu_create(&[image, "8M"]);
            lines_without_time(&run(&[&["bench", "-q"], options, &[image]].concat()))
        };
        let ours = bench(&|args| dir.gaur(args).ok(), "ours.qcow2");
        let theirs = bench(&|args| dir.qemu_img(args).ok(), "theirs.qcow2");
        assert_eq!(ours, theirs, "{options:?}");
        dir.check_clean("ours.qcow2");
        dir.identical("ours.qcow2", "theirs.qcow2");
    }
}

#[test]
fn what_qemu_img_refuses_is_refused() {
    let dir = WorkDir::new();
    dir.qemu_create(&["disk.qcow2", "8M"]);
    for options in [
        &["-c", "0"][..],
        &["-c", "10k"],
        &["-d", "0"],
        &["-s", "0"],
        &["-s", "3G"],
        &["-S", "3G"],
        &["-o", "9E"],
        &["-w", "--pattern=256"],
        &["--flush-interval=64"],
        &["-w", "--flush-interval=63"],
        &["-t", "fast"],
        &["-o", "8M"],
        &["-o", "8M", "-w"],
        &["-s", "3M", "-c", "3"],
        &["-w", "-s", "3M", "-c", "3"],
    ] {
        let args = [&["bench"], options, &["disk.qcow2"]].concat();
        assert_eq!(dir.qemu_img(&args).code, 1, "{options:?}");
        dir.gaur(&args).fails(1, &[]);
    }
    dir.gaur(&["bench", "-c", "1", "none.qcow2"])
        .fails(1, &["none.qcow2"]);
    let beyond = ["bench", "-c", "1", "-o", "8M", "disk.qcow2"];
    dir.gaur(&beyond).fails(
        1,
        &[
            "disk.qcow2",
            "offset 8388608",
            "beyond the end of the image, 8388608",
        ],
    );
}

#[test]
fn bench_json_reports_the_requests() {
    let dir = WorkDir::new();
    dir.qemu_create(&["disk.qcow2", "8M"]);
    let run = |options: &[&str]| {
        let args = [&["bench", "--output=json"], options, &["disk.qcow2"]].concat();
        let answer = dir.gaur(&args);
        assert_eq!(answer.code, 0, "{answer:?}");
        answer.json()
    };
    let writes = run(&["-w", "-c", "1001", "-d", "5", "--threads=3", "-s", "2048"]);
    assert_eq!(
        (&writes["requests"], &writes["writes"]),
        (&1001.into(), &1001.into())
    );
    assert_eq!(writes["bytes"], 1001 * 2048);
    assert_eq!(
        (&writes["threads"], &writes["depth"]),
        (&3.into(), &5.into())
    );
    assert_eq!(writes["refcount-cache"]["budget-bytes"], 256 << 10);
    let reads = run(&["-c", "500", "--random", "--seed=7"]);
    assert_eq!(
        (&reads["reads"], &reads["flushes"]),
        (&500.into(), &0.into())
    );
    assert!(reads["refcount-cache"].is_null());
    assert!(reads["l2-cache"]["held-bytes"].as_u64() > Some(0));
    let latency = &reads["latency-us"];
    let names = ["min", "p50", "p90", "p99", "p99.9", "max"];
    let times: Vec<f64> = names
        .iter()
        .filter_map(|name| latency[name].as_f64())
        .collect();
    assert_eq!(times.len(), names.len());
    assert!(times.is_sorted() && times[0] > 0.0, "{latency}");
    let mixed = run(&["--read-percent=50", "--runtime=0.2", "--random"]);
    assert!(mixed["seconds"].as_f64() >= Some(0.2));
    assert!(mixed["reads"].as_u64() > Some(0) && mixed["writes"].as_u64() > Some(0));
    assert_eq!(
        mixed["requests"].as_u64(),
        mixed["reads"]
            .as_u64()
            .zip(mixed["writes"].as_u64())
            .map(|(reads, writes)| reads + writes)
    );
    dir.check_clean("disk.qcow2");
}

#[test]
fn flushes_come_at_their_intervals_and_the_last_is_the_close() {
    let dir = WorkDir::new();
    dir.qemu_create(&["disk.qcow2", "8M"]);
    for (options, flushes) in [
        (&["-c", "10", "-d", "2", "--flush-interval=3"][..], 2),
        (
            &["-c", "10", "-d", "2", "--flush-interval=3", "--no-drain"],
            2,
        ),
        (&["-c", "100", "-d", "10", "--flush-interval=10"], 9),
        (
            &["-c", "100", "-d", "10", "--flush-interval=10", "--no-drain"],
            9,
        ),
        (
            &[
                "-c",
                "100",
                "-d",
                "10",
                "--flush-interval=20",
                "--threads=2",
            ],
            4,
        ),
        (&["-c", "100", "-d", "10", "--flush-interval=0"], 0),
        (&["-c", "10", "-d", "10", "--flush-interval=10"], 0),
    ] {
        let args = [&["bench", "-w", "--output=json"], options, &["disk.qcow2"]].concat();
        let report = dir.gaur(&args).json();
        assert_eq!(report["flushes"], flushes, "{options:?}");
        assert_eq!(report["requests"], report["writes"], "{options:?}");
    }
    dir.check_clean("disk.qcow2");
}

#[test]
fn threads_write_together_what_one_writes() {
    let dir = WorkDir::new();
    for (image, threads) in [("one.qcow2", "1"), ("three.qcow2", "3")] {
        dir.qemu_create(&[image, "8M"]);
        let options = [
            "-w",
            "-c",
            "100",
            "-S",
            "24k",
            "--pattern=8",
            "--threads",
            threads,
        ];
        dir.gaur(&[&["bench"], &options[..], &[image]].concat())
            .ok();
        dir.check_clean(image);
    }
    dir.identical("one.qcow2", "three.qcow2");
}

#[test]
fn without_io_uring_it_runs_too() {
    let dir = WorkDir::new();
    dir.qemu_create(&["disk.qcow2", "8M"]);
    let args = [
        "bench",
        "-w",
        "-c",
        "200",
        "--pattern=3",
        "--host=blocking",
        "disk.qcow2",
    ];
    dir.gaur(&args).ok();
    dir.check_clean("disk.qcow2");
    dir.qemu_io("disk.qcow2", &["read -P 3 0 800k", "read -P 0 800k 1M"]);
}

#[test]
fn a_depth_beyond_the_memory_is_refused() {
    let dir = WorkDir::new();
    dir.qemu_create(&["disk.qcow2", "1M"]);
    let args = ["-d", "2000000000", "-c", "2000000000", "-s", "1M"];
    let args = [&["bench"], &args[..], &["disk.qcow2"]].concat();
    dir.gaur(&args).fails(1, &["in flight", "-d"]);
}

#[test]
fn random_request_larger_than_image_is_refused() {
    let dir = WorkDir::new();
    dir.qemu_create(&["disk.qcow2", "1M"]);
    let args = ["bench", "--random", "-s", "2M", "disk.qcow2"];
    dir.gaur(&args)
        .fails(1, &["disk.qcow2", "smaller than a request"]);
}
