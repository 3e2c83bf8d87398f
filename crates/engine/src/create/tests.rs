use gaur_block::{Errno, FileLimits};
use gaur_format::Version;
use gaur_format::header::{CompressionType, MAGIC};

use super::*;
use crate::chain::open;
use crate::options::{Format, OpenOptions};
use crate::references::References;
use crate::test_file::{Event, TestFile, TestHost, block_on, cached_limits, direct_limits};

fn sized(size_bytes: u64) -> CreateOptions {
    CreateOptions {
        size_bytes,
        ..CreateOptions::default()
    }
}

fn device(len: usize, alignment: u32) -> TestFile {
    let limits = FileLimits {
        resizable: false,
        discard_zeroes: false,
        ..direct_limits(alignment)
    };
    TestFile::new(vec![0xee; len], limits)
}

fn open_again(file: &TestFile) -> Result<u64, ImageError> {
    let mut host = TestHost::default();
    host.add("new", file.clone());
    let opened = block_on(open(&host, "new", &OpenOptions::new(References::Any)))?;
    assert_eq!(opened.image.layers()[0].format(), Format::Qcow2);
    Ok(opened.image.size_bytes())
}

/// What the file must hold: the plan's writes, and zeros everywhere else.
fn expected(options: &CreateOptions) -> Vec<u8> {
    let plan = plan::create(options).unwrap();
    let mut bytes = vec![0; plan.len_bytes as usize];
    for (offset, piece) in &plan.writes {
        bytes[offset.0 as usize..][..piece.len()].copy_from_slice(piece);
    }
    bytes
}

fn all_options() -> Vec<CreateOptions> {
    let v2 = CreateOptions {
        version: Version::V2,
        ..sized(1 << 20)
    };
    let extended = CreateOptions {
        extended_l2: true,
        ..sized(3 << 20)
    };
    let small = CreateOptions {
        cluster_bits: 9,
        ..sized(1 << 20)
    };
    let zstd = CreateOptions {
        compression_type: CompressionType::Zstd,
        ..sized(1 << 20)
    };
    let wide = CreateOptions {
        refcount_order: 6,
        ..sized(1 << 20)
    };
    vec![
        sized(0),
        sized(512),
        sized(1 << 40),
        v2,
        extended,
        small,
        zstd,
        wide,
    ]
}

#[test]
fn a_new_image_is_what_the_plan_says_on_any_file_and_opens() {
    for options in all_options() {
        for limits in [cached_limits(), direct_limits(512), direct_limits(4096)] {
            let file = TestFile::new(vec![0xee; 100_000], limits);
            block_on(create(&file, &options, &Job::default())).unwrap();
            let (bytes, whole) = (file.bytes(), expected(&options));
            assert!(bytes.starts_with(&whole), "{options:?}");
            // Rewriting the block at its end may lengthen a file of tiny clusters.
            let more = &bytes[whole.len()..];
            assert!(more.len() < 4096 && more.iter().all(|byte| *byte == 0));
            assert_eq!(open_again(&file).unwrap(), options.size_bytes);
        }
        let whole = expected(&options);
        let device = device(whole.len() + 4096, 4096);
        block_on(create(&device, &options, &Job::default())).unwrap();
        assert!(
            device.bytes()[..whole.len()] == whole,
            "{options:?} on a device"
        );
        assert!(
            device.bytes()[whole.len()..]
                .iter()
                .all(|byte| *byte == 0xee)
        );
        assert_eq!(open_again(&device).unwrap(), options.size_bytes);
    }
}

#[test]
fn preallocated_space_is_asked_for_and_reads_as_zeros() {
    for preallocation in [
        Preallocation::Metadata,
        Preallocation::Falloc,
        Preallocation::Full,
    ] {
        let options = CreateOptions {
            preallocation,
            ..sized(1 << 20)
        };
        let file = TestFile::new(Vec::new(), cached_limits());
        block_on(create(&file, &options, &Job::default())).unwrap();
        let whole = expected(&options);
        assert!(whole.len() > 1 << 20 && file.bytes() == whole);
        let len = whole.len() as u64;
        let events = file.events();
        let zeroed = events.contains(&Event::Zero { offset: 0, len });
        assert_eq!(zeroed, preallocation == Preallocation::Falloc);
        let written: usize = events
            .iter()
            .map(|event| {
                if let Event::Write { len, .. } = event {
                    *len
                } else {
                    0
                }
            })
            .sum();
        assert_eq!(written > 1 << 20, preallocation == Preallocation::Full);
        open_again(&file).unwrap();
    }
}

#[test]
fn a_file_that_cannot_zero_ranges_gets_zeros_written() {
    let options = CreateOptions {
        preallocation: Preallocation::Falloc,
        ..sized(1 << 20)
    };
    let file = device(2 << 20, 512).without_write_zeroes();
    block_on(create(&file, &options, &Job::default())).unwrap();
    let whole = expected(&options);
    assert!(file.bytes()[..whole.len()] == whole);
}

#[test]
fn the_header_goes_last_between_two_flushes() {
    for file in [
        TestFile::new(Vec::new(), cached_limits()),
        device(1 << 20, 512),
    ] {
        block_on(create(&file, &sized(1 << 30), &Job::default())).unwrap();
        let events = file.events();
        let last = events.len() - 3;
        assert!(matches!(
            events[last..],
            [Event::Flush, Event::Write { offset: 0, .. }, Event::Flush]
        ));
        let early = events[..last]
            .iter()
            .any(|event| matches!(event, Event::Write { offset: 0, .. }));
        assert!(!early, "{events:?}");
    }
}

/// A device may have held an image; half of it under a fresh table would be taken for an image.
#[test]
fn an_interrupted_create_leaves_no_half_made_image() {
    let options = sized(1 << 30);
    for steps in 0.. {
        let file = device(1 << 20, 512);
        block_on(create(&file, &sized(1 << 20), &Job::default())).unwrap();
        file.forget_events();
        file.fail_from(steps, Errno::EIO);
        let Err(error) = block_on(create(&file, &options, &Job::default())) else {
            assert!(steps > 5, "it takes some steps");
            break;
        };
        assert_eq!(error.kind(), ErrorKind::Io);
        let done = &file.events()[..steps];
        let header_written = done
            .iter()
            .any(|event| matches!(event, Event::Write { offset: 0, .. }));
        let is_image = file.bytes().starts_with(&MAGIC);
        assert_eq!(
            is_image,
            steps == 0 || header_written,
            "after {steps} steps"
        );
    }
}

#[test]
fn a_device_that_is_too_small_is_refused_with_both_sizes_and_left_alone() {
    let file = device(100 << 10, 512);
    let error = block_on(create(&file, &sized(1 << 30), &Job::default())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(
        format!("{error:#}").contains("the device has 102400"),
        "{error:#}"
    );
    assert_eq!(file.events(), []);
}

#[test]
fn options_that_make_no_sense_and_read_only_files_change_nothing() {
    let file = TestFile::new(vec![1; 10], cached_limits());
    let options = CreateOptions {
        cluster_bits: 30,
        ..sized(1 << 20)
    };
    let error = block_on(create(&file, &options, &Job::default())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error:#}");
    assert_eq!(file.bytes(), [1; 10]);
    let locked = TestFile::new(
        vec![1; 10],
        FileLimits {
            read_only: true,
            ..cached_limits()
        },
    );
    assert_eq!(
        block_on(create(&locked, &sized(0), &Job::default()))
            .unwrap_err()
            .kind(),
        ErrorKind::ReadOnly
    );
    assert_eq!(locked.events(), []);
}

#[test]
fn a_failing_flush_is_an_error() {
    let file = TestFile::new(Vec::new(), cached_limits());
    block_on(create(&file, &sized(1 << 20), &Job::default())).unwrap();
    let steps = file.events().len();
    let again = TestFile::new(Vec::new(), cached_limits());
    again.fail_from(steps - 1, Errno::EIO);
    let error = block_on(create(&again, &sized(1 << 20), &Job::default())).unwrap_err();
    assert_eq!(
        format!("{error:#}"),
        "cannot flush the new image: input/output error"
    );
}
