//! Options that both programs have, on two copies of one image: what is left is the same.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use gaur_interop::compare::assert_same_bytes;
use gaur_interop::filesystem::Kind;
use gaur_interop::gaur::gaur;
use gaur_interop::nbd::Server;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::run;

fn qemu_io(image: &str, commands: &[&str]) {
    let mut all = vec!["-f", "qcow2", image];
    all.extend(commands.iter().flat_map(|command| ["-c", command]));
    let done = run("qemu-io", &all).ok();
    assert!(!done.stdout.contains("failed"), "{done}");
}

/// An image of 4 MiB that is full, with a copy of it: one for each program.
fn twins(scratch: &Scratch) -> [String; 2] {
    let [ours, theirs] = ["ours.qcow2", "theirs.qcow2"].map(|name| scratch.path(name));
    run("qemu-img", &["create", "-q", "-f", "qcow2", &ours, "4M"]).ok();
    qemu_io(&ours, &["write -P 1 0 4M"]);
    fs::copy(&ours, &theirs).expect("scratch is writable");
    [ours, theirs]
}

/// Both programs carry out the commands, on an image that is opened with the options.
fn both(images: &[String; 2], options: &str, commands: &[&str]) {
    for (ours, image) in [true, false].into_iter().zip(images) {
        let opened = format!("driver=qcow2,file.filename={image},{options}");
        let mut all = vec!["--image-opts", &opened];
        all.extend(commands.iter().flat_map(|command| ["-c", command]));
        let done = match ours {
            true => gaur(&[&["qemu-io"], &all[..]].concat()).ok(),
            false => run("qemu-io", &all).ok(),
        };
        assert!(!done.stdout.contains("failed"), "{done}");
        run("qemu-img", &["check", "-q", "-f", "qcow2", image]).ok();
    }
}

fn map(image: &str) -> String {
    run("qemu-img", &["map", "--output=json", image])
        .ok()
        .stdout
}

/// Bytes that the host has allocated, up to a few clusters.
fn allocated_mib(image: &str) -> u64 {
    let blocks = fs::metadata(image).expect("it is there").blocks();
    (blocks * 512 + (256 << 10)) >> 20
}

/// With `discard-no-unref` the mappings are those that QEMU leaves, places included.
#[test]
fn discarded_clusters_keep_their_place_as_with_qemu() {
    let scratch = Scratch::new("beside");
    let images = twins(&scratch);
    let commands = [
        "discard 128k 1M",
        "write -z -u 2M 64k",
        "write -P 2 192k 64k",
    ];
    both(&images, "discard=unmap,discard-no-unref=on", &commands);
    assert_eq!(map(&images[0]), map(&images[1]));
    let [ours, theirs] = images.each_ref().map(|image| {
        let raw = format!("{image}.raw");
        run(
            "qemu-img",
            &["convert", "-f", "qcow2", "-O", "raw", image, &raw],
        )
        .ok();
        raw
    });
    assert_same_bytes(&ours, &theirs);
    assert_eq!(allocated_mib(&images[0]), allocated_mib(&images[1]));
}

/// Whether space goes back is told by the same options, whatever frees it.
#[test]
fn space_goes_back_to_the_host_as_with_qemu() {
    let scratch = Scratch::new("beside");
    for request in ["on", "off"] {
        let images = twins(&scratch);
        let options = format!("discard=unmap,pass-discard-request={request}");
        both(&images, &options, &["discard 0 2M"]);
        let [ours, theirs] = images.each_ref().map(|image| allocated_mib(image));
        assert_eq!(ours, theirs, "pass-discard-request={request}");
        assert_eq!(ours < 4, request == "on", "{ours} MiB");
    }
}

/// The stream of a compressed cluster is damaged: neither program reads it, and both save the rest.
#[test]
fn what_can_be_read_is_salvaged_as_by_qemu() {
    let scratch = Scratch::new("beside");
    let [full, _] = twins(&scratch);
    let image = scratch.path("packed.qcow2");
    run("qemu-img", &["convert", "-c", "-O", "qcow2", &full, &image]).ok();
    let mut bytes = fs::read(&image).expect("it is there");
    let number = |bytes: &[u8], at: u64| {
        let raw = bytes[at as usize..at as usize + 8].try_into();
        u64::from_be_bytes(raw.expect("8 bytes"))
    };
    let table = number(&bytes, number(&bytes, 40)) & 0x00ff_ffff_ffff_fe00;
    let stream = number(&bytes, table + 5 * 8) & ((1 << 54) - 1);
    bytes[stream as usize..stream as usize + 16].fill(0xff);
    fs::write(&image, bytes).expect("scratch is writable");
    let [ours, theirs] = ["ours.raw", "theirs.raw"].map(|name| scratch.path(name));
    let convert = |raw: &str| [image.clone(), raw.to_owned()];
    for plain in [
        &["convert", "-O", "raw"][..],
        &["convert", "-O", "raw", "--salvage"],
    ] {
        let with = |raw: &str| -> Vec<String> {
            let options = plain.iter().map(|option| (*option).to_owned());
            options.chain(convert(raw)).collect()
        };
        let (our, their) = (with(&ours), with(&theirs));
        let our: Vec<&str> = our.iter().map(String::as_str).collect();
        let their: Vec<&str> = their.iter().map(String::as_str).collect();
        let (done, expected) = (gaur(&our), run("qemu-img", &their));
        assert_eq!(done.code == 0, expected.code == 0, "{done}");
        if done.code != 0 {
            assert!(done.stderr.contains("327680"), "{done}");
        }
    }
    assert_same_bytes(&ours, &theirs);
    let lost = fs::read(&ours).expect("it is there");
    assert_eq!(lost.iter().filter(|byte| **byte == 0).count(), 64 << 10);
}

/// A name that is changed and nothing else: both leave the same header.
#[test]
fn a_backing_file_is_renamed_as_by_qemu() {
    let scratch = Scratch::new("beside");
    let base = scratch.path("base.qcow2");
    run("qemu-img", &["create", "-q", "-f", "qcow2", &base, "4M"]).ok();
    let images = ["ours.qcow2", "theirs.qcow2"].map(|name| scratch.path(name));
    for image in &images {
        let over = ["-b", &base, "-F", "qcow2", image];
        run(
            "qemu-img",
            &[&["create", "-q", "-f", "qcow2"], &over[..]].concat(),
        )
        .ok();
        qemu_io(image, &["write -P 1 1M 64k"]);
    }
    for (name, format) in [
        ("elsewhere/moved.qcow2", "qcow2"),
        ("gone.raw", "raw"),
        ("", ""),
    ] {
        let to = match name {
            "" => vec!["-b", ""],
            name => vec!["-b", name, "-F", format],
        };
        let all = [&["rebase", "-u"], &to[..]].concat();
        gaur(&[&all[..], &[&images[0]]].concat()).ok();
        run("qemu-img", &[&all[..], &[&images[1]]].concat()).ok();
        let [ours, theirs] = images.each_ref().map(|image| {
            let told = run("qemu-img", &["info", "-U", image]).ok().stdout;
            let lines = told.lines().filter(|line| line.starts_with("backing file"));
            lines.map(str::to_owned).collect::<Vec<_>>()
        });
        assert_eq!(ours, theirs, "{name}");
        gaur(&["check", "-q", &images[0]]).ok();
    }
    // It needs a backing file that is there, or none.
    run("qemu-img", &["check", "-q", "-f", "qcow2", &images[0]]).ok();
}

/// A limit is a limit: 4 MiB at 1 MiB/s take a while in both programs, although some of it goes ahead.
#[test]
fn a_rate_limit_is_kept_as_by_qemu() {
    let scratch = Scratch::new("beside");
    let [image, _] = twins(&scratch);
    for (ours, name) in [(true, "ours.raw"), (false, "theirs.raw")] {
        let raw = scratch.path(name);
        let all = [
            "convert", "-r", "1M", "-f", "qcow2", "-O", "raw", &image, &raw,
        ];
        let started = Instant::now();
        match ours {
            true => gaur(&all).ok(),
            false => run("qemu-img", &all).ok(),
        };
        let took = started.elapsed();
        assert!(took > Duration::from_millis(1500), "{name} took {took:?}");
    }
}

/// The file systems' own tools say what was asked for a new file.
#[test]
fn new_files_have_the_hints_that_qemu_gives() {
    let scratch = Scratch::new("beside");
    for (kind, tool, options) in [
        (
            Kind::Xfs,
            "xfs_io -c extsize",
            vec!["", "extent_size_hint=2M", "extent_size_hint=0"],
        ),
        (Kind::Btrfs, "lsattr", vec!["", "nocow=on"]),
    ] {
        let disk = scratch.zeros(&format!("{kind:?}"), 400 << 20);
        kind.make(&disk);
        let mounted = kind.mount_file(&disk, &scratch);
        let image = format!("{}/new", mounted.folder());
        let hints = |ours: bool, format: &str, option: &str| {
            let mut all = vec!["create", "-q", "-f", format, &image, "4M"];
            all.extend(
                [["-o", option]]
                    .iter()
                    .flatten()
                    .filter(|_| !option.is_empty()),
            );
            match ours {
                true => gaur(&[&["qemu-img"], &all[..]].concat()).ok(),
                false => run("qemu-img", &all).ok(),
            };
            mounted.shell(&format!("{tool} new; rm new"), &[]).stdout
        };
        for format in ["qcow2", "raw"] {
            let told: Vec<String> = options.iter().map(|one| hints(true, format, one)).collect();
            let theirs: Vec<String> = options
                .iter()
                .map(|one| hints(false, format, one))
                .collect();
            assert_eq!(told, theirs, "{kind:?}, {format}");
            assert!(told[0] != told[1], "{told:?}");
        }
        mounted.unmount();
    }
}

/// A snapshot that is deleted gives its space back to the host, or does not.
#[test]
fn space_of_a_snapshot_goes_back_to_the_host_as_with_qemu() {
    let scratch = Scratch::new("beside");
    for (option, left) in [("on", 4), ("off", 8)] {
        let images = twins(&scratch);
        for (ours, image) in [true, false].into_iter().zip(&images) {
            run("qemu-img", &["snapshot", "-c", "one", image]).ok();
            qemu_io(image, &["write -P 2 0 4M"]);
            assert_eq!(allocated_mib(image), 8);
            let opened = format!(
                "driver=qcow2,file.filename={image},discard=unmap,pass-discard-snapshot={option}"
            );
            let all = ["snapshot", "--image-opts", "-d", "one", &opened];
            match ours {
                true => gaur(&[&["qemu-img"], &all[..]].concat()).ok(),
                false => run("qemu-img", &all).ok(),
            };
            assert_eq!(allocated_mib(image), left, "{image}, {option}");
        }
    }
}

/// `rebase -U` takes no lock away from another program: what is being written to is not touched.
#[test]
fn images_that_are_in_use_are_not_rebased_as_with_qemu() {
    let scratch = Scratch::new("beside");
    let [image, base] = twins(&scratch);
    let over = ["-b", &base, "-F", "qcow2", &image];
    run("qemu-img", &[&["rebase", "-u"], &over[..]].concat()).ok();
    for served in [&image, &base] {
        let server = Server::qemu(served, "qcow2", &scratch.path("s"), false);
        let before = fs::read(&image).expect("it is there");
        for how in [
            vec!["-b", ""],
            vec!["-U", "-b", ""],
            vec!["-U", "-u", "-b", ""],
        ] {
            let all = [&["rebase"], &how[..], &[&image]].concat();
            let theirs = run("qemu-img", &all).code;
            let ours = gaur(&[&["qemu-img"], &all[..]].concat()).code;
            // Of a base in use nothing is read without a copy.
            let unread = served == &base && how.contains(&"-u");
            assert_eq!(
                (ours, theirs),
                if unread { (0, 0) } else { (1, 1) },
                "{all:?}"
            );
            if !unread {
                assert!(before == fs::read(&image).expect("it is there"));
            }
        }
        server.stop();
    }
}
