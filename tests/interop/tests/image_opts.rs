//! Images named by `--image-opts` and `json:{..}`: each verb does with such an image what QEMU does
//! with it, and what it does with the plain path.

use gaur_interop::builder::{Kind, build, create, noise};
use gaur_interop::compare::{assert_same_bytes, assert_same_view, qemu_view};
use gaur_interop::gaur::{binary, gaur, serve_with};
use gaur_interop::layout::Layout;
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, assert_clean, qemu_img, run};

/// Options that change how an image is used and not what is in it. Slices and caches as small as
/// they may be make everything come and go.
const TUNINGS: [&str; 4] = [
    "l2-cache-entry-size=512,l2-cache-size=1k,refcount-cache-size=4k,cache-clean-interval=1",
    "cache-size=64k,cache.direct=on,file.aio=native",
    "file.cache.direct=on,file.aio=io_uring,file.locking=auto,overlap-check=all",
    "lazy-refcounts=off,discard=unmap,pass-discard-request=on,cache-clean-interval=0",
];

fn string(image: &str, tuning: &str) -> String {
    format!("driver=qcow2,file.driver=file,file.filename={image},{tuning}")
}

/// The same as a name in JSON, with every value a text.
fn json(image: &str, tuning: &str) -> String {
    let options = tuning
        .split(',')
        .filter_map(|option| option.split_once('='));
    let options = options.map(|(key, value)| format!(r#","{key}":"{value}""#));
    let options: String = options.collect();
    format!(r#"json:{{"driver":"qcow2","file":{{"driver":"file","filename":"{image}"}}{options}}}"#)
}

/// Reads an image by every verb that reads.
fn reads(kind: Kind, layout: Layout) {
    let scratch = Scratch::new("opts");
    let image = build(kind, &layout, &scratch);
    let expected = scratch.path("expected.raw");
    qemu_view(&image, &expected);
    for (number, tuning) in TUNINGS.into_iter().enumerate() {
        let (string, json) = (string(&image, tuning), json(&image, tuning));
        for name in [&["--image-opts", &string][..], &[&json]] {
            for verb in ["info", "check", "map"] {
                let arguments = [&[verb, "--output=json"], name].concat();
                let (ours, theirs) = (gaur(&arguments).ok(), qemu_img(&arguments).ok());
                assert_eq!(ours.json(), theirs.json(), "{ours}");
            }
            let converted = scratch.path(&format!("converted{number}.raw"));
            gaur(&[&["convert", "-O", "raw"], name, &[&converted]].concat()).ok();
            assert_same_bytes(&expected, &converted);
            gaur(&[&["bench", "-q", "--random", "-c", "300"], name].concat()).ok();
        }
        let raw = format!("driver=raw,file.filename={expected}");
        gaur(&["compare", "--image-opts", &string, &raw]).ok();
        gaur(&["compare", &json, &expected]).ok();
        let more = ["--read-only", "--image-opts"];
        let server = serve_with(&string, &scratch.path(&format!("s{number}")), &more);
        assert_same_view(("raw", &server.uri()), ("raw", &expected));
        server.stop();
    }
}

fn plain(layout: Layout) {
    reads(Kind::Plain, layout);
}

mod plain_images {
    gaur_interop::every_layout!(crate::plain);
}

#[test]
fn chains_compressed_clusters_and_snapshots() {
    reads(Kind::Chain, Layout::extended(65536));
    reads(Kind::Chain, Layout::v3(4096));
    reads(Kind::Compressed, Layout::v3(65536));
    reads(Kind::Snapshots, Layout::v2(65536));
}

/// Writes through every verb that writes, with caches that hold next to nothing.
#[test]
fn writers_leave_what_qemu_would_leave() {
    let scratch = Scratch::new("opts-write");
    let layout = Layout::extended(65536);
    let image = build(Kind::Chain, &layout, &scratch);
    let twin = scratch.path("twin.qcow2");
    run("cp", &[&image, &twin]).ok();
    let tuning = TUNINGS[0];
    let bench = ["bench", "-q", "-w", "-c", "200", "--pattern=9", "-S", "20k"];
    gaur(&[&bench[..], &["--image-opts", &string(&image, tuning)]].concat()).ok();
    qemu_img(&[&bench[..], &["--image-opts", &string(&twin, tuning)]].concat()).ok();
    gaur(&["resize", "--image-opts", &string(&image, tuning), "+1M"]).ok();
    qemu_img(&["resize", "--image-opts", &string(&twin, tuning), "+1M"]).ok();
    let server = serve_with(&json(&image, tuning), &scratch.path("s"), &[]);
    let ops = [
        Op::Write {
            offset: 12345,
            len: 300_000,
            pattern: 0x77,
        },
        Op::Zero {
            offset: 100_000,
            len: 65_536,
            unmap: true,
        },
    ];
    op::apply("raw", &server.uri(), &ops);
    server.stop();
    op::apply("qcow2", &twin, &ops);
    assert_clean(&image);
    assert_same_view(("qcow2", &image), ("qcow2", &twin));

    let target = scratch.path("target.qcow2");
    create(&target, &Layout::v3(4096));
    qemu_img(&["resize", &target, "64M"]).ok();
    let to = string(&target, TUNINGS[1]);
    gaur(&["convert", "-n", "--target-image-opts", &image, &to]).ok();
    assert_clean(&target);
    qemu_img(&["compare", &target, &image]).ok();
}

/// What the backing file has is not there without it.
#[test]
fn an_image_can_be_opened_without_its_chain() {
    let scratch = Scratch::new("opts-alone");
    let image = build(Kind::Chain, &Layout::v3(65536), &scratch);
    let (ours, theirs) = (scratch.path("ours.raw"), scratch.path("theirs.raw"));
    let alone = format!(r#"json:{{"driver":"qcow2","file.filename":"{image}","backing":null}}"#);
    gaur(&["convert", "-O", "raw", &alone, &ours]).ok();
    qemu_img(&["convert", "-O", "raw", &alone, &theirs]).ok();
    assert_same_bytes(&ours, &theirs);
    let whole = scratch.path("whole.raw");
    qemu_view(&image, &whole);
    gaur(&["compare", &image, &whole]).ok();
    gaur(&["compare", &alone, &whole]).code(1);
}

/// QEMU opens the file of the image by its own options, and the others by those of the image.
#[test]
fn a_cache_mode_goes_for_the_files_that_it_goes_for_in_qemu() {
    let scratch = Scratch::new("opts-direct");
    let image = build(Kind::Chain, &Layout::v3(65536), &scratch);
    for options in [
        "cache.direct=off",
        "cache.direct=on",
        "file.cache.direct=on",
        "cache.direct=on,file.cache.direct=off",
    ] {
        let name = string(&image, options);
        let bench = ["bench", "-q", "-c", "1", "--image-opts", &name];
        let direct_files = |program: &str| {
            let trace = scratch.path("trace");
            let strace = [
                "-f",
                "-e",
                "trace=?open,openat,?openat2",
                "-o",
                &trace,
                program,
            ];
            run("strace", &[&strace[..], &bench].concat()).ok();
            let trace = std::fs::read_to_string(&trace).expect("strace writes its trace");
            let opened = |name: &str| {
                let mut lines = trace
                    .lines()
                    .filter(|line| line.contains(&format!("{name}\"")));
                lines.any(|line| line.contains("O_DIRECT"))
            };
            ["top.qcow2", "middle.qcow2", "base.raw"].map(opened)
        };
        assert_eq!(
            direct_files(binary()),
            direct_files("qemu-img"),
            "{options}"
        );
    }
}

/// An image in the middle of a larger file, as in a tar archive, is read and written as QEMU does it, and nothing around it
/// changes.
#[test]
fn an_image_can_be_a_part_of_its_file() {
    let scratch = Scratch::new("opts-window");
    let image = build(Kind::Plain, &Layout::v3(65536), &scratch);
    // Room for the image to grow before what follows it.
    let len = std::fs::metadata(&image).expect("it is there").len();
    let (offset, room) = (20_480_u64, (len + (16 << 20)).next_multiple_of(4096));
    let bytes = std::fs::read(&image).expect("the image");
    let mut packed = vec![0x5a; offset as usize];
    packed.extend_from_slice(&bytes);
    packed.resize((offset + room) as usize, 0);
    packed.resize(packed.len() + 20_480, 0x5a);
    let ours = scratch.path("ours.bin");
    std::fs::write(&ours, &packed).expect("a file");
    let inside = |file: &str, more: &str| {
        format!(
            "driver=qcow2,file.driver=raw,file.offset={offset},file.size={room},\
             file.file.driver=file,file.file.filename={file}{more}"
        )
    };
    for verb in ["map", "check", "measure"] {
        let output = ["--output=json", "--image-opts", &inside(&ours, "")];
        let words = match verb {
            "measure" => [&[verb, "-O", "raw"][..], &output].concat(),
            _ => [&[verb][..], &output].concat(),
        };
        let (ours, theirs) = (gaur(&words).ok(), qemu_img(&words).ok());
        let mut theirs = theirs.json();
        if verb == "check" {
            theirs["filename"] = ours.json()["filename"].clone();
        }
        assert_eq!(ours.json(), theirs, "{verb}");
    }
    let ops = op::mixed(&Layout::v3(65536), &noise(&scratch));
    let direct = ",file.file.cache.direct=on";
    for more in ["", direct] {
        let server = serve_with(&inside(&ours, more), &scratch.path("s"), &["--image-opts"]);
        op::apply("raw", &server.uri(), &ops);
        server.stop();
    }
    op::apply("qcow2", &image, &ops);
    gaur(&[
        "compare",
        "--image-opts",
        &inside(&ours, direct),
        &string(&image, "cache.direct=off"),
    ])
    .ok();
    qemu_img(&[
        "compare",
        "--image-opts",
        &inside(&ours, ""),
        &string(&image, "cache.direct=off"),
    ])
    .ok();
    let now = std::fs::read(&ours).expect("the file");
    assert_eq!(now.len(), packed.len());
    let end = now.len() - 20_480;
    let untouched = |part: &[u8]| part.iter().all(|byte| *byte == 0x5a);
    assert!(untouched(&now[..offset as usize]) && untouched(&now[end..]));
}

/// A raw part with an end does not grow, one without does.
#[test]
fn a_raw_disk_can_be_a_part_of_its_file() {
    let scratch = Scratch::new("opts-raw-window");
    let file = noise(&scratch);
    let len = std::fs::metadata(&file).expect("it is there").len();
    let part = format!("driver=raw,offset=4096,size=8192,file.filename={file}");
    let refused = gaur(&["resize", "--image-opts", &part, "+1M"]).code(1);
    assert!(!refused.stderr.is_empty());
    let (left, right) = (scratch.path("left.raw"), scratch.path("right.raw"));
    gaur(&["convert", "-O", "raw", "--image-opts", &part, &left]).ok();
    qemu_img(&["convert", "-O", "raw", "--image-opts", &part, &right]).ok();
    assert_same_bytes(&left, &right);
    let map = ["map", "--output=json", "--image-opts", &part];
    assert_eq!(gaur(&map).ok().json(), qemu_img(&map).ok().json());
    let open = format!("driver=raw,offset=4096,file.filename={file}");
    gaur(&["resize", "--image-opts", &open, "+1M"]).ok();
    let grown = std::fs::metadata(&file).expect("it is there").len();
    assert_eq!(grown, len + (1 << 20));
    for (options, word) in [
        (part.replace("offset=4096", "offset=1G"), "behind the end"),
        (part.replace("size=8192", "size=1000"), "no multiple"),
        (
            part.replace("offset=4096", "offset=10,cache.direct=on"),
            "no multiples",
        ),
    ] {
        let said = gaur(&["map", "--image-opts", &options]).code(1);
        assert!(said.stderr.contains(word), "{}", said.stderr);
    }
}

/// QEMU's `null-co` is a source of zeros of any size.
#[test]
fn zeros_of_no_file_are_read_as_by_qemu() {
    let scratch = Scratch::new("opts-zeros");
    for options in [
        "driver=null-co,read-zeroes=on,size=3M",
        "driver=null-co,read-zeroes=on",
    ] {
        let map = ["map", "--output=json", "--image-opts", options];
        let zeros = |map: serde_json::Value| {
            let runs = map.as_array().expect("a list").clone();
            runs.iter().all(|run| run["zero"] == true)
        };
        assert!(zeros(gaur(&map).ok().json()) && zeros(qemu_img(&map).ok().json()));
        let (ours, theirs) = (scratch.path("ours.qcow2"), scratch.path("theirs.qcow2"));
        let convert = ["convert", "-O", "qcow2", "--image-opts", options];
        gaur(&[&convert[..], &[&ours]].concat()).ok();
        qemu_img(&[&convert[..], &[&theirs]].concat()).ok();
        qemu_img(&["compare", "-s", &ours, &theirs]).ok();
    }
    // What is written is dropped, and takes neither space nor memory.
    let disk = scratch.zeros("disk", 1 << 20);
    let null = "driver=null-aio,read-zeroes=on,size=64G";
    for line in [
        &["bench", "-w", "-c", "100", "--image-opts", "driver=null-co"][..],
        &[
            "convert",
            "-n",
            "-f",
            "raw",
            "-O",
            "raw",
            &disk,
            "null-co://",
        ],
        &[
            "qemu-io",
            "-c",
            "write -P 5 60G 1M",
            "-c",
            "discard 0 2M",
            "-c",
            "write -z 1G 1G",
            "-c",
            "flush",
            "-c",
            "read -P 0 60G 1M",
            "--image-opts",
            null,
        ],
        &["qemu-io", "-c", "length", "-f", "raw", "null-aio://"],
    ] {
        let ours = gaur(line).ok();
        if let Some(("qemu-io", rest)) = line.split_first().map(|(verb, rest)| (*verb, rest)) {
            let theirs = run("qemu-io", rest).ok();
            let lines = |run: &Run| {
                let counted = |line: &&str| !line.contains("ops;");
                run.stdout
                    .lines()
                    .filter(counted)
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            };
            assert_eq!(lines(&ours), lines(&theirs));
        } else {
            qemu_img(line).ok();
        }
    }
    let bad = gaur(&["map", "--image-opts", "driver=null-co,filename=a"]).code(1);
    assert!(bad.stderr.contains("unknown"), "{}", bad.stderr);
}
