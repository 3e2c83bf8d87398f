//! `--image-opts` and `json:{..}` beside `qemu-img`.

use crate::workdir::WorkDir;

/// Strings that both tools take for the image `top.qcow2` on `base.qcow2`.
const STRINGS: [&str; 8] = [
    "driver=qcow2,file.filename=top.qcow2",
    "file.driver=file,file.filename=top.qcow2",
    "driver=qcow2,file.driver=file,file.filename=top.qcow2,l2-cache-size=64k,\
     l2-cache-entry-size=4k,refcount-cache-size=256k,cache-clean-interval=3",
    "driver=qcow2,file.filename=top.qcow2,cache-size=1M,cache.direct=on,file.aio=native",
    "driver=qcow2,file.filename=top.qcow2,file.cache.direct=on,discard=unmap,read-only=on",
    "driver=qcow2,file.filename=top.qcow2,lazy-refcounts=on,overlap-check=constant,\
     pass-discard-request=on,pass-discard-snapshot=off,pass-discard-other=off,file.locking=off",
    "driver=qcow2,file.filename=top.qcow2,overlap-check.template=all,\
     overlap-check.main-header=off,node-name=disk,auto-read-only=on,detect-zeroes=off",
    "driver=raw,driver=qcow2,file.filename=base.qcow2,file.filename=top.qcow2",
];

/// The same for names in JSON.
const NAMES: [&str; 6] = [
    r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"top.qcow2"}}"#,
    r#"json:{"driver":"qcow2","file.filename":"top.qcow2","l2-cache-size":65536}"#,
    r#"json: {"file": {"filename": "top.qcow2"}, "l2-cache-size": "64k"}"#,
    r#"json:{"driver":"qcow2","file":{"filename":"top.qcow2","aio":"threads"},
        "cache":{"direct":true},"lazy-refcounts":true}"#,
    r#"json:{"driver":"qcow2","file":{"filename":"top.qcow2"},"cache.no-flush":"on",
        "overlap-check":{"template":"none","active-l2":true}}"#,
    r#"json:{"driver":"qcow2","file.filename":"top.qcow2","backing":null}"#,
];

/// Strings that both tools refuse.
const REFUSED: [&str; 22] = [
    "top.qcow2",
    "",
    "driver=qcow2",
    "driver=foo,file.filename=top.qcow2",
    "driver=qcow2,filename=top.qcow2",
    "driver=qcow2,file=top.qcow2",
    "driver=file,filename=none",
    "file.filename=none",
    "filename=top.qcow2",
    "driver=qcow2,file.filename=top.qcow2,foo=1",
    "driver=qcow2,file.filename=top.qcow2,file.foo=1",
    "driver=qcow2,file.filename=top.qcow2,size=5",
    "driver=qcow2,file.filename=top.qcow2,l2-cache-size=abc",
    "driver=qcow2,file.filename=top.qcow2,l2-cache-size=-1",
    "driver=qcow2,file.filename=top.qcow2,cache-clean-interval=-1",
    "driver=qcow2,file.filename=top.qcow2,cache-clean-interval=99999999999",
    "driver=qcow2,file.filename=top.qcow2,lazy-refcounts=maybe",
    "driver=qcow2,file.filename=top.qcow2,overlap-check=some",
    "driver=qcow2,file.filename=top.qcow2,discard=some",
    "driver=qcow2,file.filename=top.qcow2,file.aio=native",
    "driver=qcow2,file.filename=top.qcow2,file.locking=some",
    r#"json:{"driver":"qcow2","file.filename":"top.qcow2"}"#,
];

/// Names in JSON that both tools refuse.
const REFUSED_NAMES: [&str; 8] = [
    "json:",
    "json:{",
    "json:[]",
    r#"json:{"driver":"qcow2","file.filename":"top.qcow2"} x"#,
    r#"json:{"driver":"qcow2","driver":"qcow2","file.filename":"top.qcow2"}"#,
    r#"json:{"driver":"qcow2","file":["top.qcow2"]}"#,
    r#"json:{"driver":"qcow2","file.filename":"top.qcow2","l2-cache-size":1.5}"#,
    r#"json:{"driver":"qcow2","file.filename":"top.qcow2","foo":{"bar":1}}"#,
];

fn chain() -> WorkDir {
    let dir = WorkDir::new();
    dir.qemu_create(&["base.qcow2", "8M"]);
    dir.qemu_io("base.qcow2", &["write -P 1 0 1M"]);
    dir.qemu_create(&["-b", "base.qcow2", "-F", "qcow2", "top.qcow2"]);
    dir.qemu_io("top.qcow2", &["write -P 2 2M 1M"]);
    dir
}

#[test]
fn verbs_that_read_answer_as_qemu_img_does() {
    let dir = chain();
    let strings = STRINGS.iter().map(|text| vec!["--image-opts", text]);
    let names = NAMES.iter().map(|name| vec![*name]);
    for image in strings.chain(names) {
        for verb in ["info", "check", "map"] {
            let args = [&[verb, "--output=json"], &image[..]].concat();
            let (ours, theirs) = (dir.gaur(&args), dir.qemu_img(&args));
            assert_eq!((ours.code, theirs.code), (0, 0), "{args:?} {ours:?}");
            assert_eq!(ours.json(), theirs.json(), "{args:?}");
            dir.same(&[&[verb], &image[..]].concat());
        }
        let args = [&["bench", "-q", "-c", "10"], &image[..]].concat();
        assert_eq!(
            (dir.gaur(&args).code, dir.qemu_img(&args).code),
            (0, 0),
            "{args:?}"
        );
    }
}

#[test]
fn what_qemu_img_refuses_every_verb_refuses() {
    let dir = chain();
    let strings = REFUSED.iter().map(|text| vec!["--image-opts", text]);
    let names = REFUSED_NAMES.iter().map(|name| vec![*name]);
    for image in strings.chain(names) {
        for verb in [&["info"][..], &["check"], &["map"], &["bench", "-c", "1"]] {
            let args = [verb, &image[..]].concat();
            assert_eq!(dir.qemu_img(&args).code, 1, "{args:?}");
            dir.gaur(&args).fails(1, &[]);
        }
        let resize = [&["resize"], &image[..], &["9M"]].concat();
        dir.gaur(&resize).fails(1, &[]);
        let serve = [&["serve"], &image[..]].concat();
        dir.gaur(&serve).fails(1, &[]);
        let convert = [&["convert"], &image[..], &["out.raw"]].concat();
        dir.gaur(&convert).fails(1, &[]);
        assert!(!dir.path("out.raw").exists(), "{image:?}");
        let second = *image.last().expect("an image");
        let compare = [&["compare"], &image[..], &[second]].concat();
        assert_eq!(dir.qemu_img(&compare).code, 2, "{compare:?}");
        dir.gaur(&compare).fails(2, &[]);
    }
}

#[test]
fn a_format_beside_the_options_is_refused() {
    let dir = chain();
    let options = "driver=qcow2,file.filename=top.qcow2";
    for verb in ["info", "check", "map", "bench"] {
        let args = [verb, "-f", "qcow2", "--image-opts", options];
        assert_eq!(dir.qemu_img(&args).code, 1, "{args:?}");
        dir.gaur(&args).fails(1, &["--image-opts", "--format"]);
    }
    let compare = ["compare", "--image-opts", "-F", "qcow2", options, options];
    dir.gaur(&compare).fails(2, &["--image-opts"]);
    // In JSON the switch counts more than the driver.
    let json = r#"json:{"driver":"raw","file.filename":"top.qcow2"}"#;
    let info = dir.same(&["info", "-f", "qcow2", json]).ok();
    assert!(info.contains("file format: qcow2"), "{info}");
}

#[test]
fn convert_takes_options_on_both_sides() {
    let dir = chain();
    let source = "driver=qcow2,file.filename=top.qcow2,l2-cache-size=64k";
    let pairs = [
        (&["--image-opts", source][..], "whole"),
        (
            &[
                "--image-opts",
                "driver=qcow2,file.filename=top.qcow2,backing=",
            ],
            "alone",
        ),
        (&[NAMES[5]], "alone"),
        (&["--image-opts", "driver=file,filename=top.qcow2"], "bytes"),
    ];
    for (args, name) in pairs {
        let (ours, theirs) = (format!("{name}.raw"), format!("{name}.qemu.raw"));
        let convert = |target| [&["convert", "-O", "raw"], args, &[target]].concat();
        dir.gaur(&convert(&ours)).ok();
        dir.qemu_img(&convert(&theirs)).ok();
        assert!(dir.read(&ours) == dir.read(&theirs), "{args:?}");
    }
    assert!(dir.read("whole.raw") != dir.read("alone.raw"));
    dir.qemu_create(&["target.qcow2", "8M"]);
    let target = "driver=qcow2,file.filename=target.qcow2,cache.direct=on,discard=unmap";
    let convert = ["convert", "-n", "--target-image-opts", "top.qcow2", target];
    dir.gaur(&convert).ok();
    dir.check_clean("target.qcow2");
    dir.identical("target.qcow2", "whole.raw");
    let json = r#"json:{"driver":"qcow2","file.filename":"target.qcow2"}"#;
    dir.gaur(&["convert", "-n", "top.qcow2", json]).ok();
    dir.identical("target.qcow2", "whole.raw");
    for args in [
        &["convert", "--target-image-opts", "top.qcow2", target][..],
        &[
            "convert",
            "-n",
            "--target-image-opts",
            "-O",
            "raw",
            "top.qcow2",
            target,
        ],
        &[
            "convert",
            "-n",
            "--target-image-opts",
            "top.qcow2",
            "target.qcow2",
        ],
        &["convert", "-O", "qcow2", "top.qcow2", json],
    ] {
        assert_eq!(dir.qemu_img(args).code, 1, "{args:?}");
        dir.gaur(args).fails(1, &[]);
    }
}

#[test]
fn compare_and_resize_take_them() {
    let dir = chain();
    dir.gaur(&["convert", "top.qcow2", "whole.raw"]).ok();
    let (top, raw) = (STRINGS[2], "driver=raw,file.filename=whole.raw");
    dir.same(&["compare", "--image-opts", top, raw]).ok();
    dir.same(&["compare", NAMES[0], "whole.raw"]).ok();
    let alone = "driver=qcow2,file.filename=top.qcow2,backing=";
    let differ = dir.same(&["compare", "--image-opts", alone, raw]);
    assert_eq!(differ.code, 1);
    dir.gaur(&["resize", "--image-opts", top, "9M"]).ok();
    dir.gaur(&["resize", NAMES[1], "+1M"]).ok();
    dir.check_clean("top.qcow2");
    let size = dir.qemu_img(&["info", "--output=json", "top.qcow2"]).json();
    assert_eq!(size["virtual-size"], 10 << 20);
    let read_only = "driver=qcow2,file.filename=top.qcow2,read-only=on";
    for args in [
        &["resize", "--image-opts", read_only, "11M"][..],
        &["bench", "-w", "-c", "1", "--image-opts", read_only],
    ] {
        assert_eq!(dir.qemu_img(args).code, 1, "{args:?}");
        dir.gaur(args).fails(1, &["top.qcow2", "read-only=on"]);
    }
}

#[test]
fn only_the_command_line_may_use_json() {
    let dir = chain();
    let json = r#"json:{"driver":"qcow2","file.filename":"base.qcow2"}"#;
    dir.qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        json,
        "-F",
        "qcow2",
        "over.qcow2",
    ])
    .ok();
    for verb in [&["map"][..], &["bench"], &["info", "--backing-chain"]] {
        dir.gaur(&[verb, &["over.qcow2"]].concat())
            .fails(1, &["json"]);
    }
    let create = [
        "create",
        "-f",
        "qcow2",
        "-b",
        json,
        "-F",
        "qcow2",
        "new.qcow2",
    ];
    dir.gaur(&create).fails(1, &["named by its path"]);
    let name = r#"json:{"driver":"qcow2","file.filename":"new.qcow2"}"#;
    let args = ["create", "-f", "qcow2", name, "1M"];
    assert_eq!(dir.qemu_img(&args).code, 1);
    dir.gaur(&args).fails(1, &["named by its path"]);
    assert!(!dir.path("new.qcow2").exists() && !dir.path(name).exists());
}

#[test]
fn options_of_qcow2_are_refused_for_an_image_that_turns_out_to_be_raw() {
    let dir = WorkDir::new();
    std::fs::write(dir.path("disk.raw"), [7; 4096]).expect("a file");
    let options = "file.filename=disk.raw,l2-cache-size=1M";
    let args = ["bench", "-c", "1", "--image-opts", options];
    assert_eq!(dir.qemu_img(&args).code, 1);
    dir.gaur(&args).fails(1, &["disk.raw", "'l2-cache-size'"]);
}

#[test]
fn contradicting_share_options_are_refused() {
    let dir = chain();
    for (args, words) in [
        (
            &[
                "-U",
                "--image-opts",
                "driver=qcow2,file.filename=top.qcow2,force-share=off",
            ][..],
            "-U",
        ),
        (
            &[
                "-w",
                "--image-opts",
                "driver=qcow2,file.filename=top.qcow2,force-share=on",
            ],
            "read-only",
        ),
        (&["-w", "-U", "top.qcow2"], "read-only"),
    ] {
        let args = [&["bench", "-c", "1"], args].concat();
        assert_eq!(dir.qemu_img(&args).code, 1, "{args:?}");
        dir.gaur(&args).fails(1, &["top.qcow2", words]);
    }
}
