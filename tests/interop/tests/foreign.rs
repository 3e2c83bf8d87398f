//! Images of other programs' formats, made by QEMU in every shape that it writes, and read here.

use gaur_interop::compare::assert_same_bytes;
use gaur_interop::gaur::{gaur, gaur_bounded, serve_with};
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{qemu_img, run};

/// QEMU's name of the format, how a message calls it, and options for `qemu-img create`.
type Shape = (&'static str, &'static str, &'static str);

const SHAPES: &[Shape] = &[
    ("vdi", "VDI", ""),
    ("vdi", "VDI", "static=on"),
    ("vpc", "VHD", ""),
    ("vpc", "VHD", "subformat=fixed"),
    ("vpc", "VHD", "force_size=on"),
    ("vpc", "VHD", "force_size=on,subformat=fixed"),
    ("vhdx", "VHDX", ""),
    ("vhdx", "VHDX", "subformat=fixed"),
    ("vhdx", "VHDX", "block_size=1M"),
    ("vhdx", "VHDX", "block_size=64M,log_size=4M"),
    ("vhdx", "VHDX", "block_state_zero=off"),
    ("vmdk", "VMDK", ""),
    ("vmdk", "VMDK", "zeroed_grain=on"),
    ("vmdk", "VMDK", "subformat=streamOptimized"),
    ("vmdk", "VMDK", "subformat=monolithicFlat"),
    ("vmdk", "VMDK", "subformat=twoGbMaxExtentSparse"),
    ("vmdk", "VMDK", "subformat=twoGbMaxExtentFlat"),
];

/// Not a whole number of blocks of any format.
const SIZE: u64 = (37 << 20) + 5 * 512;

/// A disk with random bytes in some places, bytes that compress in others, and holes.
fn disk(scratch: &Scratch, seed: u64) -> String {
    use std::os::unix::fs::FileExt;
    let path = scratch.zeros("disk", SIZE);
    let file = std::fs::OpenOptions::new().write(true).open(&path);
    let file = file.expect("scratch is writable");
    let mut random = Random::new(seed);
    for _ in 0..40 {
        let len = 512 * (1 + random.below(600)) as usize;
        let at = 512 * random.below((SIZE - len as u64) / 512);
        let bytes = match random.one_in(3) {
            true => vec![random.below(255) as u8 + 1; len],
            false => random.bytes(len),
        };
        file.write_all_at(&bytes, at).expect("scratch is writable");
    }
    file.write_all_at(b"the last bytes", SIZE - 14)
        .expect("scratch is writable");
    path
}

/// Makes the image of the disk.
fn convert(scratch: &Scratch, (format, _, options): Shape, disk: &str) -> String {
    let image = scratch.path("image");
    let mut line = vec!["convert", "-f", "raw", "-O", format];
    if !options.is_empty() {
        line.extend(["-o", options]);
    }
    line.extend([disk, &image]);
    qemu_img(&line).ok();
    image
}

/// The disk in an image, as QEMU reads it.
fn read_by_qemu(scratch: &Scratch, format: &str, image: &str) -> String {
    let raw = scratch.path("by-qemu");
    qemu_img(&["convert", "-f", format, "-O", "raw", image, &raw]).ok();
    raw
}

#[test]
fn convert_compare_and_dd_read_what_qemu_reads() {
    for (seed, shape) in SHAPES.iter().enumerate() {
        let scratch = Scratch::new(shape.0);
        let image = convert(&scratch, *shape, &disk(&scratch, seed as u64));
        let expected = read_by_qemu(&scratch, shape.0, &image);
        let (raw, qcow2) = (scratch.path("raw"), scratch.path("q.qcow2"));
        gaur(&["convert", "-O", "raw", &image, &raw]).ok();
        assert_same_bytes(&expected, &raw);
        gaur(&["convert", "-f", shape.0, &image, &qcow2]).ok();
        qemu_img(&["compare", "-F", "raw", &qcow2, &expected]).ok();
        qemu_img(&["check", &qcow2]).ok();
        gaur(&["compare", "-F", "raw", &image, &expected]).ok();
        gaur(&["compare", "-f", "raw", &expected, &image]).ok();
        let part = scratch.path("part");
        let ends = ["bs=64k", "skip=10", "count=300"];
        let (from, to) = (format!("if={image}"), format!("of={part}"));
        gaur(&[&["dd"], &ends[..], &[&from, &to]].concat()).ok();
        let wanted = scratch.path("wanted");
        let to = format!("of={wanted}");
        let line = [
            &["dd", "-f", shape.0, "-O", "raw"],
            &ends[..],
            &[&from, &to],
        ];
        qemu_img(&line.concat()).ok();
        assert_same_bytes(&wanted, &part);
    }
}

#[test]
fn info_and_measure_give_the_numbers_of_qemu() {
    for (seed, shape) in SHAPES.iter().enumerate() {
        let scratch = Scratch::new(shape.0);
        let image = convert(&scratch, *shape, &disk(&scratch, seed as u64));
        let ours = gaur(&["info", "--output", "json", &image]).ok().json();
        let line = ["info", "-f", shape.0, "--output", "json", &image];
        let theirs = qemu_img(&line).ok().json();
        for key in [
            "format",
            "virtual-size",
            "cluster-size",
            "dirty-flag",
            "filename",
        ] {
            // It stands in a file that the image names, and `info` looks at the image alone.
            let elsewhere = key == "cluster-size" && shape.2.contains("ExtentSparse");
            if !elsewhere {
                assert_eq!(ours[key], theirs[key], "{key} of {shape:?}");
            }
        }
        let text = gaur(&["info", &image]).ok().stdout;
        assert!(
            text.contains(&format!("file format: {}\n", shape.0)),
            "{text}"
        );
        let measured = |json: serde_json::Value| json["fully-allocated"].as_u64();
        let line = ["measure", "-O", "qcow2", "--output", "json"];
        let ours = gaur(&[&line[..], &[&image]].concat()).ok().json();
        let theirs = qemu_img(&[&line[..], &["-f", shape.0, &image]].concat())
            .ok()
            .json();
        assert_eq!(measured(ours), measured(theirs), "{shape:?}");
    }
}

/// What QEMU's map calls data is data here, unless the file has a hole there.
#[test]
fn map_covers_the_disk_and_tells_where_data_is() {
    for (seed, shape) in SHAPES.iter().enumerate() {
        let scratch = Scratch::new(shape.0);
        let image = convert(&scratch, *shape, &disk(&scratch, seed as u64));
        let disk = std::fs::read(read_by_qemu(&scratch, shape.0, &image)).expect("a disk");
        let bytes = std::fs::read(&image).expect("an image");
        let map = gaur(&["map", "--output", "json", &image]).ok().json();
        let mut at = 0;
        for run in map.as_array().expect("runs") {
            let number = |key: &str| run[key].as_u64().map(|number| number as usize);
            let (start, len) = (number("start").unwrap(), number("length").unwrap());
            assert_eq!(start, at);
            let part = &disk[start..start + len];
            match (run["zero"].as_bool().unwrap(), number("offset")) {
                (true, _) => assert!(part.iter().all(|byte| *byte == 0), "{shape:?}: {run}"),
                // Those of a descriptor are in other files.
                (false, Some(_)) if bytes.len() < 4096 => {}
                (false, Some(host)) => {
                    let end = bytes.len().min(host + len);
                    assert!(part.starts_with(&bytes[host..end]), "{shape:?}: {run}");
                }
                (false, None) => assert!(run["compressed"].as_bool().unwrap(), "{run}"),
            }
            at += len;
        }
        assert_eq!(at, disk.len(), "{shape:?}");
    }
}

/// Blocks in the order in which a guest wrote them.
#[test]
fn images_that_a_guest_wrote_are_read() {
    for (seed, shape) in SHAPES.iter().enumerate() {
        let (format, _, options) = *shape;
        if options.contains("streamOptimized") {
            // Written once, from start to end.
            continue;
        }
        let scratch = Scratch::new(format);
        let image = scratch.path("image");
        let size = SIZE.to_string();
        let mut line = vec!["create", "-q", "-f", format];
        if !options.is_empty() {
            line.extend(["-o", options]);
        }
        line.extend([image.as_str(), &size]);
        qemu_img(&line).ok();
        let mut random = Random::new(seed as u64);
        let mut line = vec!["-f".to_owned(), format.to_owned(), image.clone()];
        for _ in 0..60 {
            let len = 512 * (1 + random.below(400));
            let at = 512 * random.below((SIZE - len) / 512);
            let pattern = random.below(255) + 1;
            line.extend(["-c".to_owned(), format!("write -P {pattern} {at} {len}")]);
        }
        let words: Vec<&str> = line.iter().map(String::as_str).collect();
        run("qemu-io", &words).ok();
        let expected = read_by_qemu(&scratch, format, &image);
        let raw = scratch.path("raw");
        gaur(&["convert", "-f", format, "-O", "raw", &image, &raw]).ok();
        assert_same_bytes(&expected, &raw);
    }
}

#[test]
fn foreign_images_are_backing_files_and_are_served() {
    for (seed, shape) in SHAPES.iter().enumerate() {
        let scratch = Scratch::new(shape.0);
        let image = convert(&scratch, *shape, &disk(&scratch, seed as u64));
        let expected = read_by_qemu(&scratch, shape.0, &image);
        let server = serve_with(&image, &scratch.path("r"), &["--read-only"]);
        qemu_img(&[
            "compare",
            "-f",
            "raw",
            "-F",
            "raw",
            &expected,
            &server.uri(),
        ])
        .ok();
        server.stop();
        let overlay = scratch.path("overlay.qcow2");
        gaur(&["create", "-q", "-b", "image", "-F", shape.0, &overlay]).ok();
        qemu_img(&["compare", "-F", "raw", &overlay, &expected]).ok();
        let server = serve_with(&overlay, &scratch.path("w"), &[]);
        let write = "write -P 9 1049088 700000";
        run("qemu-io", &["-f", "raw", &server.uri(), "-c", write]).ok();
        run("qemu-io", &["-f", "raw", &expected, "-c", write]).ok();
        server.stop();
        qemu_img(&["compare", "-F", "raw", &overlay, &expected]).ok();
        gaur(&["compare", "-F", "raw", &overlay, &expected]).ok();
        qemu_img(&["check", &overlay]).ok();
    }
}

#[test]
fn verbs_that_write_refuse_foreign_images_and_leave_them_alone() {
    for shape in SHAPES {
        let (format, name, _) = *shape;
        let scratch = Scratch::new(format);
        let image = convert(&scratch, *shape, &disk(&scratch, 1));
        let before = std::fs::read(&image).expect("an image");
        let new = scratch.path("new.qcow2");
        let read_only = format!("a {name} image, which can only be read; 'gaur convert -O qcow2'");
        for line in [
            &["resize", &image, "+1M"][..],
            &["resize", "-f", format, &image, "+1M"],
            &["snapshot", "create", &image, "name"],
            &["bench", "-w", "-c", "1", &image],
            &["bench", "-w", "-c", "1", "-f", format, &image],
            &["convert", "-n", &scratch.path("disk"), &image],
            &["serve", &image],
            &["serve", "-f", format, &image],
        ] {
            let run = gaur_bounded(line).refused();
            assert!(run.stderr.contains(&read_only), "{run}");
        }
        let check = gaur(&["check", &image]).code(63);
        assert!(
            check
                .stderr
                .contains(&format!("{name} images cannot be checked")),
            "{check}"
        );
        for line in [
            &["create", "-f", format, &new, "1M"][..],
            &["convert", "-O", format, &image, &new],
        ] {
            let run = gaur(line).refused();
            assert!(run.stderr.contains("qcow2, raw"), "{run}");
        }
        let amend = gaur(&["amend", "-o", "compat=1.1", &image]).refused();
        assert!(
            amend.stderr.contains("no options that could be amended"),
            "{amend}"
        );
        let unsaid = gaur(&["create", "-b", &image, &new]).refused();
        assert!(
            unsaid.stderr.contains(&format!("say -F {format}")),
            "{unsaid}"
        );
        assert!(
            before == std::fs::read(&image).expect("an image"),
            "{shape:?}"
        );
    }
}

#[test]
fn differencing_images_and_unusual_logs_are_refused_by_name() {
    use std::os::unix::fs::FileExt;
    let scratch = Scratch::new("refused");
    let disk = disk(&scratch, 1);
    let set = |image: &str, at: u64, bytes: &[u8]| {
        let file = std::fs::OpenOptions::new().write(true).open(image);
        file.expect("it opens")
            .write_all_at(bytes, at)
            .expect("an image");
    };
    let refused = |image: &str, word: &str| {
        for line in [
            &["info", image][..],
            &["map", image],
            &["serve", "-r", image],
        ] {
            let run = gaur_bounded(line).refused();
            assert!(run.stderr.contains(word), "{word}: {run}");
        }
    };
    // The UUID of the image that it was made of.
    let image = convert(&scratch, ("vdi", "VDI", ""), &disk);
    set(&image, 440, &[1; 16]);
    refused(&image, "snapshot or difference of another");
    // Type and checksum: the type grows by one, so that the sum does.
    let image = convert(&scratch, ("vpc", "VHD", ""), &disk);
    for at in [0, std::fs::metadata(&image).expect("an image").len() - 512] {
        let bytes = std::fs::read(&image).expect("an image");
        let sum = &bytes[at as usize + 64..at as usize + 68];
        let sum = u32::from_be_bytes(sum.try_into().expect("four bytes")) - 1;
        set(&image, at + 63, &[4]);
        set(&image, at + 64, &sum.to_be_bytes());
    }
    refused(&image, "differencing VHD");
    // A log longer than what is replayed, and one that changes what is no table.
    let image = convert(&scratch, ("vhdx", "VHDX", ""), &disk);
    let bytes = std::fs::read(&image).expect("an image");
    let mut longer = bytes.clone();
    name_log(&mut longer, 128 << 20);
    set(&image, 0, &longer);
    refused(&image, "134217728 bytes to be replayed");
    let mut elsewhere = bytes.clone();
    let place = name_log(&mut elsewhere, 1 << 20);
    let sector = (elsewhere.len() as u64 - 4096) & !4095;
    put_entry(&mut elsewhere, place, 1, &[(sector, Some(&[7; 4096]))]);
    set(&image, 0, &elsewhere);
    refused(&image, "changes more than the tables");
}

/// Makes the headers of a VHDX name its log, whose length they say; gives its place.
fn name_log(image: &mut [u8], len: u32) -> usize {
    for at in [64 << 10, 128 << 10] {
        let header = &mut image[at..at + 4096];
        header[48..64].fill(1);
        header[68..72].copy_from_slice(&len.to_le_bytes());
        header[4..8].fill(0);
        let sum = crc32c(header).to_le_bytes();
        header[4..8].copy_from_slice(&sum);
    }
    let place = image[(64 << 10) + 72..][..8].try_into();
    u64::from_le_bytes(place.expect("eight bytes")) as usize
}

/// Writes an entry of the log with a number to `at`; its sequence begins at the start of the log. It changes sectors, by
/// their place in the file, to zeros where nothing else is given. Gives its length.
fn put_entry(image: &mut [u8], at: usize, number: u64, changes: &[(u64, Option<&[u8]>)]) -> usize {
    let file_len = (image.len() as u64).to_le_bytes();
    let mut entry = vec![0; 4096];
    entry[..4].copy_from_slice(b"loge");
    entry[16..24].copy_from_slice(&number.to_le_bytes());
    entry[24..28].copy_from_slice(&(changes.len() as u32).to_le_bytes());
    entry[32..48].fill(1);
    entry[48..56].copy_from_slice(&file_len);
    entry[56..64].copy_from_slice(&file_len);
    for (index, (place, bytes)) in changes.iter().enumerate() {
        let mut descriptor = [0; 32];
        descriptor[16..24].copy_from_slice(&place.to_le_bytes());
        descriptor[24..32].copy_from_slice(&number.to_le_bytes());
        match bytes {
            None => {
                descriptor[..4].copy_from_slice(b"zero");
                descriptor[8..16].copy_from_slice(&4096_u64.to_le_bytes());
            }
            Some(bytes) => {
                descriptor[..4].copy_from_slice(b"desc");
                descriptor[4..8].copy_from_slice(&bytes[4092..]);
                descriptor[8..16].copy_from_slice(&bytes[..8]);
                let mut sector = bytes.to_vec();
                sector[..4].copy_from_slice(b"data");
                sector[4..8].copy_from_slice(&((number >> 32) as u32).to_le_bytes());
                sector[4092..].copy_from_slice(&(number as u32).to_le_bytes());
                entry.extend(sector);
            }
        }
        entry[64 + 32 * index..][..32].copy_from_slice(&descriptor);
    }
    let len = entry.len() as u32;
    entry[8..12].copy_from_slice(&len.to_le_bytes());
    let sum = crc32c(&entry).to_le_bytes();
    entry[4..8].copy_from_slice(&sum);
    image[at..at + entry.len()].copy_from_slice(&entry);
    entry.len()
}

/// A program was killed before the table of blocks had its last changes: the log has them. QEMU replays it when it opens the
/// image for writing, here it is laid over what is read.
#[test]
fn a_vhdx_with_a_log_reads_as_after_its_replay() {
    let scratch = Scratch::new("vhdx-log");
    let disk = disk(&scratch, 3);
    let made = convert(&scratch, ("vhdx", "VHDX", "block_size=1M"), &disk);
    let clean = std::fs::read(&made).expect("an image");
    let is_bat = b"\x66\x77\xc2\x2d\x23\xf6\x00\x42\x9d\x64\x11\x5e\x9b\xfd\x4a\x08";
    let regions = &clean[192 << 10..256 << 10];
    let entry = regions.windows(16).position(|guid| guid == is_bat);
    let place = &regions[entry.expect("a table of blocks") + 16..][..8];
    let bat = u64::from_le_bytes(place.try_into().expect("eight bytes"));
    let table = clean[bat as usize..][..4096].to_vec();
    let mut half = table.clone();
    half[40..80].fill(0);
    // What the log says in all, and which entries lack a valid checksum.
    let (whole, part): (&[u8], &[u8]) = (&table, &half);
    type Entries<'a> = Vec<Vec<(u64, Option<&'a [u8]>)>>;
    let cases: [(Entries<'_>, Option<u64>, &[u8]); 4] = [
        (vec![vec![(bat, Some(whole))]], None, whole),
        (
            vec![
                vec![(bat, None)],
                vec![(bat, Some(part))],
                vec![(bat, Some(whole))],
            ],
            None,
            whole,
        ),
        // The last entry was torn: the sequence ends before it.
        (
            vec![vec![(bat, Some(part))], vec![(bat, None)]],
            Some(2),
            part,
        ),
        // No entry is whole: nothing is replayed.
        (vec![vec![(bat, Some(whole))]], Some(1), part),
    ];
    for (number, (entries, torn, expected)) in cases.into_iter().enumerate() {
        let mut dirty = clean.clone();
        dirty[bat as usize..][..4096].copy_from_slice(part);
        let log = name_log(&mut dirty, 1 << 20);
        let mut at = log;
        for (changes, number) in entries.iter().zip(1..) {
            let len = put_entry(&mut dirty, at, number, changes);
            if torn == Some(number) {
                dirty[at + 100] ^= 1;
            }
            at += len;
        }
        let image = scratch.path("dirty.vhdx");
        std::fs::write(&image, &dirty).expect("an image");
        let replayed = scratch.path("replayed.vhdx");
        std::fs::write(&replayed, &dirty).expect("an image");
        run("qemu-io", &["-f", "vhdx", "-c", "flush", &replayed]).ok();
        let after = std::fs::read(&replayed).expect("an image");
        assert!(after[bat as usize..][..4096] == *expected, "case {number}");
        let wanted = read_by_qemu(&scratch, "vhdx", &replayed);
        let raw = scratch.path("raw");
        gaur(&["convert", "-O", "raw", &image, &raw]).ok();
        assert_same_bytes(&wanted, &raw);
        assert!(
            std::fs::read(&image).expect("an image") == dirty,
            "it was changed"
        );
    }
}

/// The checksum of VHDX.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| crc >> 1 ^ (0x82f6_3b78 * (crc & 1));
    let add = |crc: u32, byte: &u8| (0..8).fold(crc ^ u32::from(*byte), step);
    !bytes.iter().fold(u32::MAX, add)
}

/// A disk that a snapshot of the caller's choice is asked of, or options of qcow2.
#[test]
fn what_only_qcow2_has_is_refused_by_name() {
    for shape in SHAPES {
        let scratch = Scratch::new(shape.0);
        let image = convert(&scratch, *shape, &disk(&scratch, 1));
        let refused = |line: &[&str], word: &str| {
            let run = gaur(line).refused();
            assert!(run.stderr.contains(word), "{word}: {run}");
        };
        let raw = scratch.path("raw");
        refused(
            &["convert", "-l", "name", &image, &raw],
            "no internal snapshots",
        );
        let options = format!("driver={},file.filename={image}", shape.0);
        gaur(&["map", "--output", "json", "--image-opts", &options]).ok();
        let options = format!("{options},l2-cache-size=1M");
        refused(
            &["map", "--image-opts", &options],
            "'l2-cache-size' is unknown",
        );
        assert!(gaur(&["snapshot", "list", &image]).ok().stdout.is_empty());
    }
}

/// More than 2 GiB, so that a disk in files has several.
#[test]
fn a_vmdk_in_several_files_is_read_across_their_ends() {
    const GIB: u64 = 1 << 30;
    for options in [
        "subformat=twoGbMaxExtentSparse",
        "subformat=twoGbMaxExtentFlat",
    ] {
        let scratch = Scratch::new("files");
        let image = scratch.path("disk.vmdk");
        let size = (5 * GIB + (1 << 20)).to_string();
        let line = ["create", "-q", "-f", "vmdk", "-o", options, &image, &size];
        qemu_img(&line).ok();
        // QEMU's parts are of 2 GiB less 64 KiB or so: around each border.
        let mut line = vec!["-f".to_owned(), "vmdk".to_owned(), image.clone()];
        for (index, middle) in [0, 2, 4].into_iter().enumerate() {
            let start = (middle * GIB).saturating_sub(300 << 10);
            for part in 0..6 {
                let pattern = 1 + 10 * index + part;
                let at = start + ((part as u64) << 16) * 2;
                line.extend(["-c".to_owned(), format!("write -P {pattern} {at} 128k")]);
            }
        }
        let words: Vec<&str> = line.iter().map(String::as_str).collect();
        run("qemu-io", &words).ok();
        let (expected, raw) = (scratch.path("by-qemu"), scratch.path("raw"));
        qemu_img(&["convert", "-f", "vmdk", "-O", "raw", &image, &expected]).ok();
        gaur(&["convert", "-O", "raw", &image, &raw]).ok();
        qemu_img(&["compare", "-f", "raw", "-F", "raw", &expected, &raw]).ok();
        gaur(&["compare", "-F", "raw", &image, &expected]).ok();
        let map = gaur(&["map", &image]).ok().stdout;
        assert!(
            map.contains("001.vmdk") && map.contains("002.vmdk"),
            "{map}"
        );
        let ours = gaur(&["info", "--output", "json", &image]).ok().json();
        let theirs = qemu_img(&["info", "--output", "json", &image]).ok().json();
        let specific =
            |json: &serde_json::Value, key: &str| json["format-specific"]["data"][key].clone();
        for key in ["cid", "parent-cid", "create-type"] {
            assert_eq!(specific(&ours, key), specific(&theirs, key));
        }
    }
}

/// The names of extents come out of an image, which may be an attacker's.
#[test]
fn a_vmdk_names_no_file_that_it_may_not() {
    let scratch = Scratch::new("names");
    std::fs::create_dir(scratch.path("images")).expect("scratch is writable");
    scratch.file("secret", &[0x5e; 8192]);
    let secret = scratch.path("secret");
    let out = scratch.path("out.raw");
    for name in [
        "../secret",
        &secret,
        "/etc/passwd",
        "/dev/fd/0",
        "nbd://host/x",
        "json:{}",
    ] {
        let text = format!("version=1\nCID=1\nparentCID=ffffffff\nRW 8 FLAT \"{name}\" 0\n");
        let image = scratch.file("images/evil.vmdk", text.as_bytes());
        gaur(&["info", &image]).ok();
        for line in [
            &["map", image.as_str()][..],
            &["convert", "-O", "raw", &image, &out],
            &["map", "-f", "vmdk", &image],
            &["map", "--untrusted", &image],
            &["serve", "-r", &image],
        ] {
            let run = gaur_bounded(line).refused();
            assert!(run.stderr.contains("extent of"), "{run}");
            let read = std::fs::read(&out).unwrap_or_default();
            assert!(!read.contains(&0x5e), "{run}");
        }
    }
    let text = format!("version=1\nCID=1\nparentCID=ffffffff\nRW 8 FLAT \"{secret}\" 0\n");
    let image = scratch.file("images/trusted.vmdk", text.as_bytes());
    let refusal = gaur(&["map", &image]).refused();
    assert!(refusal.stderr.contains("--allow"), "{refusal}");
    gaur(&["map", "--allow", &secret, &image]).ok();
    // A snapshot of VMware names its parent instead.
    let text = "version=1\nCID=1\nparentCID=12345678\nRW 8 SPARSE \"trusted.vmdk\"\n";
    let image = scratch.file("images/delta.vmdk", text.as_bytes());
    let refusal = gaur(&["map", &image]).refused();
    assert!(refusal.stderr.contains("snapshot of another"), "{refusal}");
}
