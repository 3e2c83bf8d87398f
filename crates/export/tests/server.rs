//! Requests and replies of a running server, seen through a client that speaks the protocol by hand.

#![cfg(feature = "nbd")]

mod harness;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gaur_block::Errno;
use gaur_export::device::{Memory, Null};
use gaur_export::nbd::Export;
use harness::gate::Gated;
use harness::*;

const MIB: u64 = 1 << 20;

#[test]
fn reads_return_what_was_written() {
    for mode in MODES {
        let server = Server::start(mode, options(), Memory::new(64 * MIB));
        let mut client = Client::simple(&server.socket, "");
        for (offset, len) in [
            (0, 1),
            (511, 1026),
            (4096, 4096),
            (MIB - 3, 300_001),
            (8 * MIB, 32 << 20),
        ] {
            let data = pattern(offset, len);
            assert_eq!(client.write_at(offset, &data), Ok(()));
            assert_eq!(
                client.read_at(offset, len as u32),
                Ok(data),
                "{len} at {offset}"
            );
        }
        assert_eq!(client.read_at(64 * MIB - 5, 5), Ok(vec![0; 5]));
        assert_eq!(client.read_at(0, 0), Ok(Vec::new()));
        assert_eq!(client.write_at(0, b""), Ok(()));
        server.finish();
    }
}

#[test]
fn many_pipelined_requests_are_all_answered() {
    for mode in MODES {
        let server = Server::start(mode, options(), Memory::new(64 * MIB));
        let mut client = Client::simple(&server.socket, "");
        // Ten times the depth, from another thread: the answers have to be taken meanwhile.
        let count = 1280_u64;
        let mut sender = Client {
            stream: client.stream.try_clone().unwrap(),
        };
        let writer = std::thread::spawn(move || {
            for cookie in 0..count {
                sender.request(0, WRITE, cookie, cookie * 5000, 5000);
                sender.send(&pattern(cookie * 5000, 5000));
            }
        });
        let mut answered: Vec<u64> = (0..count)
            .map(|_| {
                let (error, cookie) = client.reply();
                assert_eq!(error, 0);
                cookie
            })
            .collect();
        writer.join().unwrap();
        answered.sort_unstable();
        assert!(answered.into_iter().eq(0..count), "each is answered once");
        let len = count as usize * 5000;
        assert_eq!(client.read_at(0, len as u32), Ok(pattern(0, len)));
        server.finish();
    }
}

#[test]
fn errors_reach_the_client_and_the_connection_goes_on() {
    for mode in MODES {
        let device = Gated::new(MIB);
        let gate = device.gate.clone();
        let server = Server::start(mode, options(), device);
        let mut client = Client::simple(&server.socket, "");
        assert_eq!(client.write_at(MIB - 1, b"xx"), Err(28));
        assert_eq!(client.read_at(MIB - 1, 2), Err(22));
        client.request(0, 99, 5, 0, 0);
        assert_eq!(client.reply(), (22, 5));
        gate.fail(Errno::EIO);
        assert_eq!(client.read_at(0, 512), Err(5));
        gate.fail(Errno::ENOSPC);
        assert_eq!(client.write_at(0, &[1; 512]), Err(28));
        let mut structured = Client::structured(&server.socket, "");
        structured.request(0, READ, 9, 0, 512);
        let chunk = structured.chunk();
        assert_eq!((chunk.done, chunk.kind, chunk.cookie), (true, 0x8001, 9));
        assert_eq!(chunk.content, b"\0\0\0\x1c\0\x17no space left on device");
        server.stop.drain();
        let error = server.join().unwrap_err().to_string();
        assert_eq!(
            error,
            "flush of export \"\" failed: no space left on device"
        );
    }
}

#[test]
fn structured_reads_skip_zeros() {
    for mode in MODES {
        let server = Server::start(mode, options(), Memory::new(8 * MIB));
        let mut client = Client::structured(&server.socket, "");
        client.request(0, WRITE, 1, 65536, 65536);
        client.send(&[7; 65536]);
        assert_eq!(client.reply(), (0, 1));
        client.request(0, READ, 2, 0, 262_144);
        let first = client.chunk();
        assert_eq!((first.done, first.kind, first.cookie), (false, 2, 2));
        assert_eq!(first.content, b"\0\0\0\0\0\0\0\0\0\x01\0\0");
        let second = client.chunk();
        assert_eq!((second.done, second.kind), (false, 1));
        assert_eq!(second.content[..8], 65536_u64.to_be_bytes());
        assert_eq!(second.content[8..], [7; 65536]);
        let third = client.chunk();
        assert_eq!((third.done, third.kind), (true, 2));
        assert_eq!(third.content, b"\0\0\0\0\0\x02\0\0\0\x02\0\0");
        // DF: one chunk of data.
        client.request(4, READ, 3, 0, 262_144);
        let chunk = client.chunk();
        assert_eq!(
            (chunk.done, chunk.kind, chunk.content.len()),
            (true, 1, 8 + 262_144)
        );
        client.request(0, READ, 4, 0, 0);
        let chunk = client.chunk();
        assert_eq!((chunk.done, chunk.kind, chunk.content.len()), (true, 0, 0));
        server.finish();
    }
}

#[test]
fn block_status_tells_holes_from_data() {
    for mode in MODES {
        let server = Server::start(mode, options(), Memory::new(8 * MIB));
        let mut client = Client::structured(&server.socket, "");
        client.request(0, WRITE, 1, 65536, 65536);
        client.send(&[7; 65536]);
        assert_eq!(client.reply(), (0, 1));
        let status = |client: &mut Client, flags, offset, len| {
            client.request(flags, BLOCK_STATUS, 2, offset, len);
            let chunk = client.chunk();
            assert_eq!((chunk.done, chunk.kind), (true, 5));
            assert_eq!(chunk.content[..4], [0, 0, 0, 1]);
            let field = |at: &[u8]| u32::from_be_bytes(at.try_into().unwrap());
            let pairs = chunk.content[4..].chunks_exact(8);
            pairs
                .map(|pair| (field(&pair[..4]), field(&pair[4..])))
                .collect::<Vec<_>>()
        };
        let all = [(65536, 3), (65536, 0), (8 * MIB as u32 - 131_072, 3)];
        assert_eq!(status(&mut client, 0, 0, 8 * MIB as u32), all);
        assert_eq!(status(&mut client, 8, 0, 8 * MIB as u32), all[..1]);
        assert_eq!(status(&mut client, 0, 65537, 10), [(10, 0)]);
        server.finish();
    }
}

#[test]
fn zeroing_trimming_caching_and_flushing_work() {
    for mode in MODES {
        let device = Gated::new(8 * MIB);
        let gate = device.gate.clone();
        let server = Server::start(mode, options(), device);
        let mut client = Client::simple(&server.socket, "");
        let data = pattern(0, 300_000);
        assert_eq!(client.write_at(0, &data), Ok(()));
        client.request(0, WRITE_ZEROES, 1, 1000, 200_000);
        assert_eq!(client.reply(), (0, 1));
        let mut expected = data.clone();
        expected[1000..201_000].fill(0);
        assert_eq!(client.read_at(0, 300_000), Ok(expected));
        client.request(0, CACHE, 2, 0, 5 << 20);
        assert_eq!(client.reply(), (0, 2));
        assert_eq!(gate.flushes.load(Ordering::Acquire), 0);
        client.request(FUA, TRIM, 3, 0, 1 << 20);
        assert_eq!(client.reply(), (0, 3));
        assert_eq!(
            gate.flushes.load(Ordering::Acquire),
            1,
            "fua of a trim is a flush"
        );
        client.request(0, FLUSH, 4, 0, 0);
        assert_eq!(client.reply(), (0, 4));
        assert_eq!(gate.flushes.load(Ordering::Acquire), 2);
        client.request(FUA, WRITE_ZEROES, 5, 0, 0);
        assert_eq!(client.reply(), (0, 5));
        server.finish();
    }
}

#[test]
fn transfers_are_cut_to_what_the_device_takes() {
    for mode in MODES {
        let device = Gated::new(8 * MIB);
        let gate = device.gate.clone();
        gate.limit_transfer(65536);
        let server = Server::start(mode, options(), device);
        let mut client = Client::simple(&server.socket, "");
        let data = pattern(77, 1_000_000);
        client.request(FUA, WRITE, 1, 77, 1_000_000);
        client.send(&data);
        assert_eq!(client.reply(), (0, 1));
        assert_eq!(
            gate.flushes.load(Ordering::Acquire),
            1,
            "a cut write is durable by a flush"
        );
        assert_eq!(client.read_at(77, 1_000_000), Ok(data));
        assert_eq!(gate.longest.load(Ordering::Acquire), 65536);
        server.finish();
    }
}

#[test]
fn a_read_only_export_refuses_writes() {
    for mode in MODES {
        let mut options = options();
        options.exports[0].read_only = true;
        let device = Gated::new(MIB);
        let gate = device.gate.clone();
        let server = Server::start(mode, options, device);
        let mut client = Client::simple(&server.socket, "");
        assert_eq!(client.write_at(0, &[1; 70_000]), Err(1));
        for kind in [TRIM, WRITE_ZEROES] {
            client.request(0, kind, 4, 0, 512);
            assert_eq!(client.reply(), (1, 4));
        }
        assert_eq!(client.read_at(0, 16), Ok(vec![0; 16]));
        server.finish();
        assert_eq!(gate.flushes.load(Ordering::Acquire), 0, "nothing to flush");
    }
}

#[test]
fn exports_are_apart_and_threads_share_them() {
    for mode in MODES {
        let names = ["a", "b", "c"];
        let mut options = options();
        options.exports = names.iter().map(|name| Export::new(*name)).collect();
        options.default_export = Some(1);
        let disks: Vec<Memory> = names.iter().map(|_| Memory::new(MIB)).collect();
        let server =
            Server::start_with(mode, options, move |place| Ok(disks[place.export].clone()));
        let clients = || names.map(|name| Client::simple(&server.socket, name));
        for (index, client) in clients().iter_mut().enumerate() {
            assert_eq!(client.write_at(0, &[index as u8 + 1; 4096]), Ok(()));
        }
        for (index, client) in clients().iter_mut().enumerate() {
            assert_eq!(client.read_at(0, 4096), Ok(vec![index as u8 + 1; 4096]));
        }
        assert_eq!(
            Client::simple(&server.socket, "").read_at(9, 1),
            Ok(vec![2])
        );
        server.finish();
    }
}

#[test]
fn a_bad_or_dead_client_costs_only_its_own_connection() {
    for mode in MODES {
        let server = Server::start(mode, options(), Memory::new(64 * MIB));
        let mut good = Client::simple(&server.socket, "");
        let mut junk = Client::connect(&server.socket);
        junk.send(&[0x55; 4000]);
        let mut bad = Client::simple(&server.socket, "");
        bad.send(&[0; 28]);
        assert!(bad.is_closed());
        server.wait_for_log("protocol violation: bad request magic 0x00000000");
        server.wait_for_log("protocol violation: unknown client flags 0x55555555");
        // Gone in the middle of a payload, and with replies under way.
        let mut dead = Client::simple(&server.socket, "");
        for cookie in 0..20 {
            dead.request(0, READ, cookie, 0, 4 << 20);
        }
        dead.request(0, WRITE, 1, 0, 1 << 20);
        dead.send(&[1; 5000]);
        drop(dead);
        let mut greedy = Client::simple(&server.socket, "");
        greedy.request(0, WRITE, 1, 0, (32 << 20) + 1);
        assert!(greedy.is_closed());
        assert_eq!(good.read_at(0, 4096), Ok(vec![0; 4096]));
        server.finish();
    }
}

#[test]
fn a_device_that_panics_costs_one_connection() {
    let device = Gated::new(MIB);
    device.gate.panic_at(512);
    let server = Server::start(Mode::Reactor, options(), device);
    let mut other = Client::simple(&server.socket, "");
    let mut client = Client::simple(&server.socket, "");
    client.request(0, READ, 1, 512, 512);
    assert!(client.is_closed());
    assert_eq!(other.read_at(0, 512), Ok(vec![0; 512]));
    server.finish();
}

#[test]
fn a_client_that_takes_no_replies_is_bounded_and_others_go_on() {
    for mode in MODES {
        let server = Server::start(mode, options(), Null::new(1 << 40));
        let mut lazy = Client::simple(&server.socket, "");
        lazy.stream.set_nonblocking(true).unwrap();
        // As many as the socket takes; the server must stop reading at some point.
        let mut asked = 0_u32;
        let quiet = Instant::now();
        while quiet.elapsed() < Duration::from_millis(500) {
            match std::io::Write::write(&mut lazy.stream, &request(0, READ, 0, 0, 1 << 20)) {
                Ok(28) => asked += 1,
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
            assert!(asked < 100_000, "the server takes requests without end");
        }
        let mut other = Client::simple(&server.socket, "");
        assert_eq!(other.read_at(5, 512), Ok(vec![0; 512]));
        drop(lazy);
        server.finish();
    }
}

/// Random bytes, some of them after a proper handshake and some between proper requests.
#[test]
fn random_bytes_never_hurt_the_server() {
    for mode in MODES {
        let server = Server::start(mode, options(), Memory::new(64 * MIB));
        let mut good = Client::simple(&server.socket, "");
        let mut seed = 0x5eed_1234_u64;
        let mut chance = move || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        for round in 0..300_u64 {
            let mut client = match round % 3 {
                0 => Client::connect(&server.socket),
                1 => Client::simple(&server.socket, ""),
                _ => Client::structured(&server.socket, ""),
            };
            let mut bytes = Vec::new();
            for _ in 0..chance() % 30 {
                let kind = (chance() % 10) as u16;
                let len = (chance() % 300_000) as u32;
                let offset = chance() % (65 * MIB);
                bytes.extend(request(chance() as u16 & 0x1f, kind, chance(), offset, len));
                if kind == WRITE {
                    bytes.resize(bytes.len() + len as usize, 3);
                }
            }
            for _ in 0..chance() % 3 * 20 {
                bytes.push(chance() as u8);
            }
            // The server may hang up in the middle; that it does not take the rest is fine.
            client
                .stream
                .set_write_timeout(Some(Duration::from_millis(50)))
                .unwrap();
            let _ = std::io::Write::write_all(&mut client.stream, &bytes);
            if round % 7 == 0 {
                let _ = client.stream.shutdown(std::net::Shutdown::Write);
                let _ = std::io::Read::read(&mut client.stream, &mut vec![0; 1 << 16]);
            }
            drop(client);
            assert_eq!(good.read_at(64 * MIB - 1, 1).map(|byte| byte.len()), Ok(1));
        }
        drop(good);
        server.finish();
    }
}

#[test]
fn extended_headers_carry_long_ranges() {
    for mode in MODES {
        let server = Server::start(mode, options(), Null::new(1 << 41));
        let mut client = Client::extended(&server.socket, "");
        let long = 1 << 40;
        for kind in [TRIM, WRITE_ZEROES] {
            client.extended_request(0, kind, 4096, long);
            assert_eq!(client.extended_chunk(4096), (0, Vec::new()));
        }
        client.extended_request(0, BLOCK_STATUS, 4096, long);
        let expected = [
            &[0, 0, 0, 1, 0, 0, 0, 1][..],
            &long.to_be_bytes(),
            &3_u64.to_be_bytes(),
        ];
        assert_eq!(client.extended_chunk(4096), (6, expected.concat()));
        client.extended_request(1 << 5, WRITE, 8192, 512);
        client.send(&[1; 512]);
        assert_eq!(client.extended_chunk(8192), (0, Vec::new()));
        client.extended_request(0, READ, 8192, 512);
        let data = [&8192_u64.to_be_bytes()[..], &[0; 512]].concat();
        assert_eq!(client.extended_chunk(8192), (1, data));
        client.extended_request(0, READ, 8192, 1 << 20);
        let hole = b"\0\0\0\0\0\0\x20\0\0\x10\0\0".to_vec();
        assert_eq!(client.extended_chunk(8192), (2, hole));
        client.extended_request(0, TRIM, 4096, 1 << 41);
        let (kind, content) = client.extended_chunk(4096);
        assert_eq!((kind, &content[..4]), (0x8001, &[0, 0, 0, 22][..]));
        client.extended_request(0, FLUSH, 0, 0);
        assert_eq!(client.extended_chunk(0), (0, Vec::new()));
        server.finish();
    }
}
