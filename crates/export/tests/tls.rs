//! A server that wants TLS: nothing before it, nothing smuggled in, and time limits that count.

#![cfg(feature = "nbd")]

mod harness;

use std::io::{Read, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gaur_export::device::Memory;
use gaur_export::nbd::{Options, Tls};
use gaur_tls::{Authorization, ClientCredentials, ServerCredentials, Session, file};
use harness::*;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

const MIB: u64 = 1 << 20;

/// A directory that serves both sides.
fn directory() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).expect("scratch is writable");
    };
    let key = KeyPair::generate().expect("a key");
    let mut params = CertificateParams::new(Vec::new()).expect("no names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    write(file::CA, &params.self_signed(&key).expect("signed").pem());
    let issuer = Issuer::new(params, key);
    for (certificate, key) in [
        (file::SERVER_CERTIFICATE, file::SERVER_KEY),
        (file::CLIENT_CERTIFICATE, file::CLIENT_KEY),
    ] {
        let pair = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(vec!["host".to_owned()]).expect("a name");
        params
            .distinguished_name
            .push(DnType::CommonName, "someone");
        let signed = params.signed_by(&pair, &issuer).expect("signed");
        write(certificate, &signed.pem());
        write(key, &pair.serialize_pem());
    }
    folder
}

/// Options of such a server, and the lines about what has failed.
fn options_with(
    folder: &tempfile::TempDir,
    authorization: Option<Authorization>,
) -> (Options, Arc<Mutex<Vec<String>>>) {
    let mut options = options();
    let credentials = ServerCredentials::load(folder.path(), true).expect("credentials");
    options.tls = Some(Tls {
        credentials,
        authorization,
    });
    let lines = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&lines);
    options.failures = Some(Arc::new(move |line: &str| {
        told.lock().expect("no panic").push(line.to_owned());
    }));
    (options, lines)
}

const STARTTLS: &[u8] = b"IHAVEOPT\0\0\0\x05\0\0\0\0";
const LIST: &[u8] = b"IHAVEOPT\0\0\0\x03\0\0\0\0";

fn wait_for_line(lines: &Mutex<Vec<String>>, word: &str) {
    let start = Instant::now();
    loop {
        let told = lines.lock().expect("no panic").clone();
        if told.iter().any(|line| line.contains(word)) {
            return;
        }
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "{word}: {told:?}"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// nbdkit took options that a man in the middle had put behind the plain STARTTLS for the client's own (CVE-2021-3716).
#[test]
fn plain_text_behind_the_switch_to_tls_ends_the_connection() {
    let folder = directory();
    for mode in MODES {
        let (options, lines) = options_with(&folder, None);
        let server = Server::start(mode, options, Memory::new(MIB));
        let mut client = Client::connect(&server.socket);
        client.greet();
        client
            .stream
            .write_all(&[STARTTLS, LIST].concat())
            .expect("sent");
        let mut answer = Vec::new();
        let _ = client.stream.read_to_end(&mut answer);
        // The switch may have been acknowledged; the list was not looked at.
        assert!(answer.len() <= 20, "{answer:?}");
        wait_for_line(&lines, "plain text behind the request for TLS");
        server.finish();
    }
}

fn connect(
    folder: &tempfile::TempDir,
    socket: &std::path::Path,
) -> (std::os::unix::net::UnixStream, Session) {
    let mut client = Client::connect(socket);
    client.greet();
    client.stream.write_all(STARTTLS).expect("sent");
    let mut answer = [0; 20];
    client.stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer[12..16], [0, 0, 0, 1], "the switch is acknowledged");
    let credentials = ClientCredentials::load(folder.path(), true).expect("credentials");
    let session = Session::client(&credentials, "host").expect("a session");
    (client.stream.try_clone().expect("a second handle"), session)
}

/// Carries the handshake, and the answer to one option after it; `None` when the server hangs up.
fn ask(
    stream: &mut std::os::unix::net::UnixStream,
    session: &mut Session,
    option: &[u8],
) -> Option<Vec<u8>> {
    let mut asked = false;
    loop {
        if !session.is_handshaking() && !asked {
            session.write(option);
            asked = true;
        }
        let mut out = Vec::new();
        session.outgoing(&mut out);
        stream.write_all(&out).ok()?;
        let mut bytes = [0; 4096];
        if let gaur_tls::Received::Bytes(count) = session.read(&mut bytes) {
            return Some(bytes[..count].to_vec());
        }
        let count = stream.read(&mut bytes).ok()?;
        if count == 0 {
            return None;
        }
        let mut rest = &bytes[..count];
        while !rest.is_empty() {
            let used = session.receive(rest).ok()?;
            rest = &rest[used..];
        }
    }
}

#[test]
fn clients_come_in_by_their_names() {
    let folder = directory();
    let all = |name: &str| Some(Authorization::names([name.to_owned()]));
    for mode in MODES {
        for (authorization, comes_in) in [
            (None, true),
            (all("CN=someone"), true),
            (all("CN=another"), false),
        ] {
            let (options, lines) = options_with(&folder, authorization);
            let server = Server::start(mode, options, Memory::new(MIB));
            let (mut stream, mut session) = connect(&folder, &server.socket);
            let answer = ask(&mut stream, &mut session, LIST);
            assert_eq!(answer.is_some(), comes_in);
            if !comes_in {
                wait_for_line(&lines, "CN=someone may not come in");
            }
            server.finish();
        }
    }
}

#[test]
fn handshake_that_does_not_go_on_ends_with_the_limit() {
    let folder = directory();
    for mode in MODES {
        let (mut options, _) = options_with(&folder, None);
        options.handshake_timeout = Duration::from_millis(200);
        let server = Server::start(mode, options, Memory::new(MIB));
        let mut client = Client::connect(&server.socket);
        client.greet();
        client.stream.write_all(STARTTLS).expect("sent");
        let mut answer = [0; 20];
        client.stream.read_exact(&mut answer).expect("an answer");
        // The beginning of a record, and no more.
        client.stream.write_all(&[22, 3, 1, 2, 0, 1]).expect("sent");
        let begin = Instant::now();
        assert!(client.is_closed());
        assert!(begin.elapsed() < Duration::from_secs(5));
        server.finish();
    }
}
