//! New images, judged by QEMU's own tools.
//!
//! `qemu-img` must be on the PATH; without it these tests fail.

mod qemu;

use gaur_format::Version;
use gaur_format::plan::{self, CreateOptions, Preallocation};
use qemu::Scratch;

fn create_and_check(options: &CreateOptions) {
    let scratch = Scratch::new("create");
    let path = scratch.path("new.qcow2");
    if let Some(name) = &options.backing_file {
        qemu::img(&[
            "create",
            "-q",
            "-f",
            "raw",
            &scratch.path(std::str::from_utf8(name).expect("text")),
            "1M",
        ]);
    }
    qemu::write_plan(&path, &plan::create(options).unwrap());
    let report = qemu::check(&path);
    assert_eq!(report.number("corruptions"), 0, "{options:?}");
    assert_eq!(report.number("leaks"), 0, "{options:?}");
    assert_eq!(report.number("check-errors"), 0, "{options:?}");
    let info = qemu::img(&["info", "--output=json", &path]);
    let size = format!(
        "\"virtual-size\": {}",
        options.rounded_size_bytes().unwrap()
    );
    assert!(info.contains(&size), "{options:?}: {info}");
    if options.backing_file.is_some() {
        assert!(
            info.contains("\"backing-filename-format\": \"raw\""),
            "{info}"
        );
    }
}

#[test]
fn qemu_finds_new_images_of_every_geometry_clean() {
    for cluster_bits in [9, 10, 12, 14, 16, 21] {
        for refcount_order in 0..=6 {
            let options = CreateOptions {
                cluster_bits,
                refcount_order,
                size_bytes: (100 << 20) + 512,
                ..CreateOptions::default()
            };
            create_and_check(&options);
            if refcount_order == 4 {
                create_and_check(&CreateOptions {
                    version: Version::V2,
                    ..options.clone()
                });
            }
            if cluster_bits >= 14 {
                create_and_check(&CreateOptions {
                    extended_l2: true,
                    ..options
                });
            }
        }
    }
}

#[test]
fn qemu_finds_preallocated_images_clean() {
    for (cluster_bits, extended_l2) in [(9, false), (12, false), (14, true), (16, true)] {
        for refcount_order in [0, 4, 6] {
            let mut options = CreateOptions {
                cluster_bits,
                refcount_order,
                extended_l2,
                size_bytes: (40 << 20) + 512,
                preallocation: Preallocation::Metadata,
                ..CreateOptions::default()
            };
            create_and_check(&options);
            if extended_l2 {
                options.backing_file = Some("base.raw".into());
                options.backing_format = Some("raw".into());
                create_and_check(&options);
            }
        }
    }
}

#[test]
fn qemu_opens_images_with_backing_files() {
    for cluster_bits in [9, 12, 16] {
        for version in [Version::V2, Version::V3] {
            create_and_check(&CreateOptions {
                version,
                cluster_bits,
                size_bytes: 8 << 20,
                backing_file: Some("base.raw".into()),
                backing_format: Some("raw".into()),
                ..CreateOptions::default()
            });
        }
    }
}

#[test]
fn qemu_finds_huge_and_empty_images_clean() {
    for (cluster_bits, size_bytes) in [(9, 128 << 30), (16, 2 << 50), (21, 1 << 60), (16, 0)] {
        create_and_check(&CreateOptions {
            cluster_bits,
            size_bytes,
            ..CreateOptions::default()
        });
    }
    let preallocation = Preallocation::Metadata;
    let size_bytes = 64 << 30;
    create_and_check(&CreateOptions {
        size_bytes,
        preallocation,
        ..CreateOptions::default()
    });
}

#[test]
fn measure_gives_the_numbers_of_qemu_img_measure() {
    for cluster_bits in [9, 12, 14, 16, 21] {
        for refcount_order in [0, 4, 6] {
            for extended_l2 in [false, true] {
                if extended_l2 && cluster_bits < 14 {
                    continue;
                }
                for size_bytes in [0, 512, 1 << 20, (3 << 30) + 512, 10 << 30] {
                    let options = CreateOptions {
                        cluster_bits,
                        refcount_order,
                        extended_l2,
                        size_bytes,
                        ..CreateOptions::default()
                    };
                    let ours = plan::measure(&options, 0).unwrap();
                    let theirs = qemu::measure(&options);
                    assert_eq!(theirs.number("required"), ours.required, "{options:?}");
                    assert_eq!(
                        theirs.number("fully-allocated"),
                        ours.fully_allocated,
                        "{options:?}"
                    );
                }
            }
        }
    }
}
