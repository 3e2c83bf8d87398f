//! Backing chains: deep ones, odd lengths, names relative to the overlay, loops, and backing files
//! that are no files.

use gaur_interop::builder::{Kind, build, create, noise};
use gaur_interop::compare::{assert_same_view, qemu_view};
use gaur_interop::field::header;
use gaur_interop::gaur::{binary, gaur, gaur_bounded, serve, serve_with};
use gaur_interop::layout::Layout;
use gaur_interop::nbd::Server;
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img, run};

const SMALL: Layout = Layout::v3(4096);

/// Links an overlay to a backing file without looking at it.
fn link(overlay: &str, backing: &str, format: &str) {
    qemu_img(&[
        "rebase", "-u", "-f", "qcow2", "-b", backing, "-F", format, overlay,
    ])
    .ok();
}

/// An overlay on something that need not exist or be an image.
fn overlay_on(scratch: &Scratch, backing: &str, format: &str) -> String {
    let path = scratch.path("overlay.qcow2");
    create(&path, &SMALL);
    link(&path, backing, format);
    path
}

#[test]
fn a_chain_of_300_is_read_and_written() {
    const DEPTH: u64 = 300;
    let scratch = Scratch::new("deep");
    let name = |number: u64| format!("{number}.qcow2");
    create(&scratch.path(&name(0)), &SMALL);
    for number in 1..DEPTH {
        let backing = name(number - 1);
        let path = scratch.path(&name(number));
        let create = ["create", "-q", "-u", "-f", "qcow2", "-o", "cluster_size=4k"];
        qemu_img(&[&create[..], &["-b", &backing, "-F", "qcow2", &path, "4M"]].concat()).ok();
    }
    let marked: Vec<u64> = (0..DEPTH).step_by(13).collect();
    for &number in &marked {
        let path = scratch.path(&name(number));
        link_free_write(&path, number);
        if number > 0 {
            link(&path, &name(number - 1), "qcow2");
        }
    }
    let top = scratch.path(&name(DEPTH - 1));
    let expected: Vec<Op> = marked
        .iter()
        .map(|&number| mark(number))
        .map(expect)
        .collect();
    let server = serve(&top, &scratch.path("s"));
    op::apply("raw", &server.uri(), &expected);
    op::apply(
        "raw",
        &server.uri(),
        &[Op::Write {
            offset: 5000,
            len: 10_000,
            pattern: 0xfe,
        }],
    );
    op::apply(
        "raw",
        &server.uri(),
        &[Op::Expect {
            offset: 5000,
            len: 10_000,
            pattern: 0xfe,
        }],
    );
    server.stop();
    assert_clean(&top);
    gaur_bounded(&["map", "--output=json", &top]).ok();
}

/// Layers of several layouts and lengths, each written at random: data, zeros and holes.
#[test]
fn deep_chain_of_unlike_images_shows_what_qemu_shows() {
    let scratch = Scratch::new("unlike");
    let noise = noise(&scratch);
    let layouts = [
        Layout::v3(65536),
        Layout::extended(16384),
        Layout::v3(4096),
        Layout::extended(65536),
        Layout::v3(512),
        Layout::v3(65536),
    ];
    let lengths = [100_u64, 70, 90, 40, 120, 110];
    let mut below: Option<String> = None;
    for (number, (layout, percent)) in layouts.iter().zip(lengths).enumerate() {
        let path = scratch.path(&format!("{number}.qcow2"));
        create(&path, layout);
        let size = (layout.size_bytes() * percent / 100) & !511;
        if let Some(below) = &below {
            link(&path, below, "qcow2");
        }
        op::apply(
            "qcow2",
            &path,
            &op::random(layout, number as u64, 40, true, &noise),
        );
        qemu_img(&[
            "resize",
            "-q",
            "--shrink",
            "-f",
            "qcow2",
            &path,
            &size.to_string(),
        ])
        .ok();
        below = Some(path);
    }
    let top = below.expect("there are layers");
    let expected = scratch.path("expected.raw");
    qemu_view(&top, &expected);
    gaur(&["compare", "-F", "raw", &top, &expected]).ok();
    assert_eq!(
        gaur(&["map", "--output=json", &top]).ok().stdout,
        qemu_img(&["map", "--output=json", &top]).ok().stdout
    );
    let server = serve(&top, &scratch.path("s"));
    let size = std::fs::metadata(&expected).expect("it is there").len();
    let ops: Vec<Op> = (0..50)
        .map(|number| Op::Write {
            offset: number * 7919 * 13 % (size - 3000),
            len: 2500,
            pattern: number as u8 + 1,
        })
        .collect();
    op::apply("raw", &server.uri(), &ops);
    server.stop();
    op::apply("raw", &expected, &ops);
    assert_same_view(("qcow2", &top), ("raw", &expected));
}

/// What layer `number` holds and no other: a sector at a place of its own.
fn mark(number: u64) -> (u64, u8) {
    ((1 << 20) + number * 8192, (number % 250) as u8 + 1)
}

fn expect((offset, pattern): (u64, u8)) -> Op {
    Op::Expect {
        offset,
        len: 512,
        pattern,
    }
}

/// Writes a layer's mark while it has no backing file, which is quicker than through the chain.
fn link_free_write(path: &str, number: u64) {
    if number > 0 {
        qemu_img(&["rebase", "-u", "-f", "qcow2", "-b", "", path]).ok();
    }
    let (offset, pattern) = mark(number);
    // The whole cluster: the rest of it would otherwise be zeros from this layer on anyway.
    op::apply(
        "qcow2",
        path,
        &[
            Op::Zero {
                offset: offset / 4096 * 4096,
                len: 4096,
                unmap: false,
            },
            Op::Write {
                offset,
                len: 512,
                pattern,
            },
        ],
    );
}

#[test]
fn names_are_relative_to_the_overlay_not_to_the_working_folder() {
    let scratch = Scratch::new("relative");
    std::fs::create_dir(scratch.path("below")).expect("scratch is writable");
    let base = scratch.path("below/base.qcow2");
    create(&base, &SMALL);
    op::apply(
        "qcow2",
        &base,
        &[Op::Write {
            offset: 0,
            len: 4096,
            pattern: 5,
        }],
    );
    let overlay = overlay_on(&scratch, "below/base.qcow2", "qcow2");
    let view = scratch.path("view.raw");
    for folder in ["/", scratch.folder().to_str().expect("UTF-8")] {
        let script = "cd \"$1\" && exec \"$0\" convert -O raw \"$2\" \"$3\"";
        run("bash", &["-c", script, binary(), folder, &overlay, &view]).ok();
        op::apply(
            "raw",
            &view,
            &[Op::Expect {
                offset: 0,
                len: 4096,
                pattern: 5,
            }],
        );
    }
    let script = "cd \"$1\" && exec \"$0\" info overlay.qcow2";
    run("bash", &["-c", script, binary(), &scratch.path("")]).ok();
}

#[test]
fn a_raw_backing_file_may_end_anywhere() {
    for len in [1, 511, 1000, 4096, 4097, 100_000] {
        let scratch = Scratch::new("odd");
        scratch.file("odd.raw", &vec![0x5a; len]);
        let overlay = overlay_on(&scratch, "odd.raw", "raw");
        let expected = scratch.path("expected.raw");
        qemu_view(&overlay, &expected);
        gaur(&["compare", "-F", "raw", &overlay, &expected]).ok();
        // Copy on write across the end of the backing file.
        let server = serve(&overlay, &scratch.path("s"));
        let ops = [
            Op::Write {
                offset: len as u64 / 2,
                len: 100,
                pattern: 1,
            },
            Op::Write {
                offset: len as u64 + 3,
                len: 50,
                pattern: 2,
            },
        ];
        op::apply("raw", &server.uri(), &ops);
        server.stop();
        op::apply("raw", &expected, &ops);
        assert_clean(&overlay);
        assert_same_view(("qcow2", &overlay), ("raw", &expected));
    }
}

#[test]
fn writing_to_an_overlay_leaves_the_backing_files_alone() {
    let layout = Layout::extended(65536);
    let scratch = Scratch::new("alone");
    let top = build(Kind::Chain, &layout, &scratch);
    let below = ["base.raw", "middle.qcow2"].map(|name| scratch.path(name));
    let before = below
        .each_ref()
        .map(|path| std::fs::read(path).expect("it is there"));
    let server = serve(&top, &scratch.path("s"));
    op::apply(
        "raw",
        &server.uri(),
        &op::random(&layout, 3, 100, true, &noise(&scratch)),
    );
    server.stop();
    let after = below
        .each_ref()
        .map(|path| std::fs::read(path).expect("it is there"));
    assert!(before == after, "a backing file changed");
}

#[test]
fn backing_loop_is_refused() {
    let scratch = Scratch::new("loop");
    let path = |name: &str| scratch.path(name);
    for name in ["a.qcow2", "b.qcow2", "c.qcow2", "self.qcow2"] {
        create(&path(name), &SMALL);
    }
    for (overlay, backing) in [("a", "b"), ("b", "c"), ("c", "a"), ("self", "self")] {
        link(
            &path(&format!("{overlay}.qcow2")),
            &format!("{backing}.qcow2"),
            "qcow2",
        );
    }
    for name in ["a.qcow2", "self.qcow2"] {
        let image = path(name);
        gaur_bounded(&["convert", "-O", "raw", &image, &path("out.raw")]).refused();
        refuse_to_serve(&image, &scratch);
    }
}

#[test]
fn a_backing_file_that_is_no_file_is_refused() {
    for (backing, format) in [
        ("/", "raw"),
        ("/", "qcow2"),
        ("no-such-file", "raw"),
        ("/dev/null", "qcow2"),
    ] {
        let scratch = Scratch::new("nofile");
        let overlay = overlay_on(&scratch, backing, format);
        let refusal =
            gaur_bounded(&["convert", "-O", "raw", &overlay, &scratch.path("out.raw")]).refused();
        assert!(
            refusal.stderr.contains(backing),
            "names the backing file: {refusal}"
        );
        refuse_to_serve(&overlay, &scratch);
    }
}

#[test]
fn unknown_backing_format_is_refused() {
    let scratch = Scratch::new("format");
    let base = scratch.zeros("base.qed", 1 << 20);
    let overlay = overlay_on(&scratch, &base, "qed");
    gaur_bounded(&["convert", "-O", "raw", &overlay, &scratch.path("out.raw")]).refused();
}

#[test]
fn a_backing_name_that_is_a_protocol_is_refused() {
    for name in ["nbd://localhost/x", "json:{\"driver\":\"qcow2\"}"] {
        let scratch = Scratch::new("protocol");
        let overlay = overlay_on(&scratch, "base.raw", "raw");
        // QEMU would connect to it: the name is put there by hand.
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(&overlay)
            .expect("it opens");
        use std::os::unix::fs::FileExt;
        let offset = header("backing_file_offset").get(&overlay);
        file.write_all_at(name.as_bytes(), offset)
            .expect("the overlay is writable");
        header("backing_file_size").set(&overlay, name.len() as u64);
        gaur_bounded(&["convert", "-O", "raw", &overlay, &scratch.path("out.raw")]).refused();
    }
}

/// An image probed as raw because the backing format was not given would hand its writer the
/// host's files: a backing file that is raw by declaration is never probed.
#[test]
fn a_raw_backing_file_is_never_probed() {
    let scratch = Scratch::new("probe");
    let inner = scratch.path("inner.qcow2");
    create(&inner, &SMALL);
    op::apply(
        "qcow2",
        &inner,
        &[Op::Write {
            offset: 0,
            len: 4096,
            pattern: 5,
        }],
    );
    let overlay = overlay_on(&scratch, "inner.qcow2", "raw");
    let server = serve_with(&overlay, &scratch.path("s"), &["--read-only"]);
    let magic = [
        Op::Expect {
            offset: 0,
            len: 1,
            pattern: b'Q',
        },
        Op::Expect {
            offset: 1,
            len: 1,
            pattern: b'F',
        },
        Op::Expect {
            offset: 3,
            len: 1,
            pattern: 0xfb,
        },
    ];
    op::apply("raw", &server.uri(), &magic);
    server.stop();
}

/// `serve` says no, in one line.
fn refuse_to_serve(image: &str, scratch: &Scratch) {
    let socket = scratch.path("refused");
    let mut command = std::process::Command::new(binary());
    command.args(["serve", "--persistent", "--socket", &socket, image]);
    match Server::try_start(command, &socket) {
        Ok(_) => panic!("{image} is served"),
        Err(run) => run.refused(),
    };
}
