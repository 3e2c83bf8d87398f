//! Real clients: libnbd's tools, QEMU's tools and fio. They must be installed (Debian: libnbd-bin,
//! python3-libnbd, qemu-utils, fio).

#![cfg(feature = "nbd")]

mod harness;

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use gaur_block::{Device, Payload, Request, Source, Target};
use gaur_export::device::Memory;
use gaur_export::nbd::Export;
use harness::gate::Gated;
use harness::*;

const MIB: u64 = 1 << 20;

fn put(memory: &Memory, offset_bytes: u64, data: &[u8]) {
    let request = Request::Write {
        offset_bytes,
        fua: false,
    };
    let payload = Payload::Write(Source::memory(data));
    gaur_reactor::block_on(memory.submit(request, payload)).unwrap();
}

fn get(memory: &Memory, offset_bytes: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    let payload = Payload::Read(Target::memory(&mut data));
    gaur_reactor::block_on(memory.submit(Request::Read { offset_bytes }, payload)).unwrap();
    data
}

/// 64 MiB with data here and there.
fn spotted() -> Memory {
    let memory = Memory::new(64 * MIB);
    for (offset, len) in [
        (0, 5),
        (3 * MIB + 100, 200_000),
        (40 * MIB, 5 << 20),
        (64 * MIB - 1, 1),
    ] {
        put(&memory, offset, &vec![0xa5; len]);
        put(&memory, offset, &pattern(offset, len.min(4096)));
    }
    memory
}

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let mut path = socket_path().into_os_string();
        path.push(name);
        Scratch(path.into())
    }

    fn name(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn nbdinfo_sees_every_export_as_it_is() {
    for mode in MODES {
        let mut options = options();
        options.exports[0].description = "the first disk".to_owned();
        options.exports.push(Export {
            read_only: true,
            ..Export::new("cd")
        });
        let server = Server::start(mode, options, spotted());
        let info = run("nbdinfo", &["--list", "--json", &server.uri]);
        for expected in [
            "\"protocol\": \"newstyle-fixed\"",
            "\"export-name\": \"\"",
            "\"export-name\": \"cd\"",
            "\"description\": \"the first disk\"",
            "\"base:allocation\"",
            "\"structured\": true",
            "\"export-size\": 67108864",
            "\"can_cache\": true",
            "\"can_df\": true",
            "\"can_flush\": true",
            "\"can_fua\": true",
            "\"can_multi_conn\": true",
            "\"can_trim\": true",
            "\"can_zero\": true",
            "\"is_read_only\": true",
            "\"is_read_only\": false",
            "\"block_size_minimum\": 1,",
            "\"block_size_preferred\": 4096,",
            "\"block_size_maximum\": 33554432",
        ] {
            assert!(info.contains(expected), "{expected} in {info}");
        }
        server.finish();
    }
}

#[test]
fn nbdinfo_maps_holes_and_data() {
    for mode in MODES {
        let server = Server::start(mode, options(), spotted());
        let map = run("nbdinfo", &["--map", &server.uri]);
        let lines: Vec<Vec<&str>> = map
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        let expected = [
            ["0", "65536", "0", "data"],
            ["65536", "3080192", "3", "hole,zero"],
            ["3145728", "262144", "0", "data"],
            ["3407872", "38535168", "3", "hole,zero"],
            ["41943040", "5242880", "0", "data"],
            ["47185920", "19857408", "3", "hole,zero"],
            ["67043328", "65536", "0", "data"],
        ];
        assert_eq!(lines, expected);
        server.finish();
    }
}

#[test]
fn nbdcopy_copies_out_and_in() {
    for mode in MODES {
        let memory = spotted();
        let copy = Memory::new(64 * MIB);
        put(&copy, 5 * MIB, &[1; 100_000]);
        let mut options = options();
        options.exports.push(Export::new("copy"));
        let disks = [memory.clone(), copy.clone()];
        let server =
            Server::start_with(mode, options, move |place| Ok(disks[place.export].clone()));
        let file = Scratch::new("copy.img");
        run("nbdcopy", &[&server.uri, file.name()]);
        assert!(
            std::fs::read(&file.0).unwrap() == get(&memory, 0, 64 << 20),
            "copied out"
        );
        run("nbdcopy", &["--flush", file.name(), &server.uri_of("copy")]);
        assert!(
            get(&copy, 0, 64 << 20) == get(&memory, 0, 64 << 20),
            "copied in"
        );
        run(
            "nbdcopy",
            &["--connections=4", &server.uri_of("copy"), "null:"],
        );
        server.finish();
    }
}

/// Everything the protocol can ask, by libnbd, which checks what it gets.
const NBDSH: &str = r#"
import errno, os
h.add_meta_context("base:allocation")
h.connect_uri(os.environ["URI"])
assert h.get_structured_replies_negotiated()
assert h.can_meta_context("base:allocation")
size = h.get_size()
data = os.urandom(123457)
h.pwrite(data, 1000)
assert h.pread(len(data), 1000) == data
h.pwrite(data, 5000000, nbd.CMD_FLAG_FUA)
assert h.pread_structured(len(data), 5000000, lambda *_: 0, nbd.CMD_FLAG_DF) == data
h.zero(50000, 1000)
assert h.pread(50000, 1000) == bytes(50000)
h.zero(1 << 20, 8 << 20, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
h.trim(1 << 20, 8 << 20, nbd.CMD_FLAG_FUA)
h.cache(1 << 20, 0)
h.flush()

# Sparse reads arrive in chunks that cover the range once.
seen = []
def chunk(part, offset, status, error):
    seen.append((offset, len(part), status))
    return 0
h.pwrite(data, 20 << 20)
part = h.pread_structured(4 << 20, 19 << 20, chunk)
assert part == bytes(1 << 20) + data + bytes((3 << 20) - len(data))
at = 19 << 20
for offset, length, status in sorted(seen):
    assert offset == at
    at += length
assert at == 23 << 20
assert any(status == nbd.READ_HOLE for _, _, status in seen), seen

extents = []
def extent(context, offset, entries, error):
    extents.extend(entries)
    return 0
h.block_status(size, 0, extent)
assert sum(extents[::2]) == size
extents.clear()
h.block_status(size, 0, extent, nbd.CMD_FLAG_REQ_ONE)
assert len(extents) == 2

# What must fail does, and the connection survives; the client's own checks are switched off.
h.set_strict_mode(0)
def fails(number, call):
    try:
        call()
    except nbd.Error as error:
        assert error.errnum == number, error
    else:
        assert False, "did not fail"
fails(errno.ENOSPC, lambda: h.pwrite(b"xx", size - 1))
fails(errno.EINVAL, lambda: h.pread(2, size - 1))
fails(errno.EINVAL, lambda: h.trim(2, size - 1))
fails(errno.EINVAL, lambda: h.flush(nbd.CMD_FLAG_DF))
fails(errno.ENOTSUP, lambda: h.zero(512, 0, nbd.CMD_FLAG_FAST_ZERO))
assert h.pread(len(data), 20 << 20) == data

# Many at once.
h.set_strict_mode(nbd.STRICT_COMMANDS)
buffers = [(i, nbd.Buffer.from_bytearray(bytearray([i % 256]) * 65536)) for i in range(200)]
cookies = [h.aio_pwrite(buffer, i * 65536) for i, buffer in buffers]
while any(not h.aio_command_completed(c) if c else False for c in cookies[-1:]):
    h.poll(-1)
while h.aio_in_flight() > 0:
    h.poll(-1)
for i in range(200):
    assert h.pread(65536, i * 65536) == bytes([i % 256]) * 65536
h.shutdown()
"#;

/// The package's module is for the system's Python, which is not always the first one.
fn nbdsh(uri: &str, script: &str) {
    run(
        "env",
        &[
            "PATH=/usr/bin:/bin",
            &format!("URI={uri}"),
            "nbdsh",
            "-c",
            script,
        ],
    );
}

#[test]
fn libnbd_gets_what_it_asks_for() {
    for mode in MODES {
        let server = Server::start(mode, options(), Memory::new(64 * MIB));
        nbdsh(&server.uri, NBDSH);
        server.finish();
    }
}

#[test]
fn libnbd_works_without_structured_replies() {
    for mode in MODES {
        let server = Server::start(mode, options(), Memory::new(64 * MIB));
        let script = r#"
import os
h.set_request_structured_replies(False)
h.connect_uri(os.environ["URI"])
assert not h.get_structured_replies_negotiated()
data = os.urandom(3 << 20)
h.pwrite(data, 4097)
assert h.pread(len(data), 4097) == data
assert h.pread(1 << 20, 32 << 20) == bytes(1 << 20)
h.shutdown()
"#;
        nbdsh(&server.uri, script);
        server.finish();
    }
}

#[test]
fn qemu_io_verifies_its_patterns() {
    for mode in MODES {
        let device = Gated::new(64 * MIB);
        let gate = device.gate.clone();
        let server = Server::start(mode, options(), device);
        let commands = [
            "write -P 0x11 0 64k",
            "write -P 0x22 1000 3000",
            "read -P 0x11 0 1000",
            "read -P 0x22 1000 3000",
            "aio_write -P 0x33 1M 4M",
            "aio_write -P 0x44 8M 8M",
            "aio_flush",
            "read -P 0x33 1M 4M",
            "read -P 0x44 8M 8M",
            "write -z 2M 1M",
            "read -P 0 2M 1M",
            "write -z -u 8M 1M",
            "read -P 0 8M 1M",
            "discard 9M 1M",
            "write -f -P 0x55 64k 64k",
            "read -P 0x55 64k 64k",
            "flush",
        ];
        let mut arguments = vec!["-f", "raw"];
        for command in commands {
            arguments.extend(["-c", command]);
        }
        arguments.push(&server.uri);
        let printed = run("qemu-io", &arguments);
        assert!(!printed.contains("failed"), "{printed}");
        assert!(gate.flushes.load(Ordering::Acquire) > 0);
        server.finish();
    }
}

#[test]
fn qemu_img_converts_and_compares() {
    for mode in MODES {
        let memory = spotted();
        let server = Server::start(mode, options(), memory.clone());
        let file = Scratch::new("convert.qcow2");
        run(
            "qemu-img",
            &[
                "convert",
                "-f",
                "raw",
                "-O",
                "qcow2",
                &server.uri,
                file.name(),
            ],
        );
        let compared = run(
            "qemu-img",
            &[
                "compare",
                "-f",
                "raw",
                "-F",
                "qcow2",
                &server.uri,
                file.name(),
            ],
        );
        assert!(compared.contains("Images are identical"), "{compared}");
        let map = run(
            "qemu-img",
            &["map", "-f", "raw", "--output=json", &server.uri],
        );
        assert!(
            map.contains("\"start\": 65536, \"length\": 3080192"),
            "{map}"
        );
        put(&memory, 7 * MIB, &[3; 1 << 20]);
        run(
            "qemu-img",
            &[
                "convert",
                "-n",
                "-f",
                "qcow2",
                "-O",
                "raw",
                file.name(),
                &server.uri,
            ],
        );
        let compared = run(
            "qemu-img",
            &[
                "compare",
                "-f",
                "raw",
                "-F",
                "qcow2",
                &server.uri,
                file.name(),
            ],
        );
        assert!(compared.contains("Images are identical"), "{compared}");
        server.finish();
    }
}

#[test]
fn fio_verifies_what_several_clients_wrote() {
    for mode in MODES {
        let server = Server::start(mode, options(), Memory::new(64 * MIB));
        let uri = format!("--uri={}", server.uri);
        let state = std::env::temp_dir();
        let state = format!("--aux-path={}", state.display());
        run(
            "fio",
            &[
                "--name=verify",
                "--ioengine=nbd",
                &uri,
                "--rw=randwrite",
                "--bsrange=512-128k",
                "--bs_unaligned=1",
                "--iodepth=32",
                "--numjobs=4",
                "--size=16m",
                "--offset_increment=16m",
                "--verify=crc32c",
                "--do_verify=1",
                "--verify_fatal=1",
                "--verify_state_save=0",
                "--loops=2",
                &state,
            ],
        );
        server.finish();
    }
}
