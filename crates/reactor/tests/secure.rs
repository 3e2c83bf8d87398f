//! Encrypted streams on a ring, on the fallback, and on threads without a reactor.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use gaur_reactor::{Config, Driver, Reactor, SecureStream, Stream, block_on};
use gaur_tls::{ClientCredentials, ServerCredentials, Session, file};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

fn write(directory: &Path, name: &str, text: &str) {
    std::fs::write(directory.join(name), text).expect("scratch is writable");
}

/// A directory that serves both sides, whose host is called `host`.
fn directory(folder: &tempfile::TempDir) -> PathBuf {
    let path = folder.path().to_owned();
    let key = KeyPair::generate().expect("a key");
    let mut params = CertificateParams::new(Vec::new()).expect("no names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    write(
        &path,
        file::CA,
        &params.self_signed(&key).expect("signed").pem(),
    );
    let issuer = Issuer::new(params, key);
    for (certificate, key) in [
        (file::SERVER_CERTIFICATE, file::SERVER_KEY),
        (file::CLIENT_CERTIFICATE, file::CLIENT_KEY),
    ] {
        let pair = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec!["host".to_owned()]).expect("a name");
        let signed = params.signed_by(&pair, &issuer).expect("signed");
        write(&path, certificate, &signed.pem());
        write(&path, key, &pair.serialize_pem());
    }
    path
}

fn run<F: Future>(driver: Option<Driver>, future: F) -> F::Output {
    let Some(driver) = driver else {
        return block_on(future);
    };
    let config = Config {
        driver,
        ..Config::default()
    };
    let reactor = Reactor::new(&config).expect("a reactor");
    reactor.block_on(future)
}

const PLACES: [Option<Driver>; 3] = [Some(Driver::Ring), Some(Driver::Fallback), None];

#[test]
fn encrypted_bytes_arrive_whole_and_in_order_between_all_kinds_of_places() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = directory(&folder);
    let server = ServerCredentials::load(&path, true).expect("a server's");
    let client = ClientCredentials::load(&path, true).expect("a client's");
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251) as u8).collect();
    for (one, other) in PLACES
        .iter()
        .flat_map(|one| PLACES.map(|other| (*one, other)))
    {
        let (here, there) = Stream::pair().expect("sockets");
        let session = Session::server(&server).expect("a session");
        let echo = std::thread::spawn(move || {
            run(one, async {
                let stream = SecureStream::plain(Arc::new(here));
                stream.encrypt(session).await.expect("a handshake");
                let mut memory = vec![0; 3_000_000];
                assert_eq!(stream.recv_exact(&mut memory).await, Ok(memory.len()));
                stream.send(&memory).await.expect("sent");
                assert_eq!(stream.recv(&mut memory).await, Ok(0));
            });
        });
        run(other, async {
            let stream = SecureStream::plain(Arc::new(there));
            let session = Session::client(&client, "host").expect("a session");
            stream.encrypt(session).await.expect("a handshake");
            assert!(stream.is_encrypted() && stream.peer_name().is_some());
            stream.send(&bytes).await.expect("sent");
            let mut back = vec![0; bytes.len()];
            assert_eq!(stream.recv_exact(&mut back).await, Ok(back.len()));
            assert!(back == bytes);
            stream
                .socket()
                .shutdown(std::net::Shutdown::Both)
                .expect("open");
        });
        echo.join().expect("no panic");
    }
}

#[test]
fn failed_handshake_says_why_on_both_sides() {
    let folders = [(), ()].map(|()| tempfile::tempdir().expect("a folder"));
    let [path, other] = [&folders[0], &folders[1]].map(directory);
    let server = ServerCredentials::load(&path, true).expect("a server's");
    let client = ClientCredentials::load(&other, true).expect("a client's");
    let (here, there) = Stream::pair().expect("sockets");
    let session = Session::server(&server).expect("a session");
    let refused = std::thread::spawn(move || {
        let stream = SecureStream::plain(Arc::new(here));
        block_on(stream.encrypt(session)).expect_err("a stranger")
    });
    let stream = SecureStream::plain(Arc::new(there));
    let session = Session::client(&client, "host").expect("a session");
    let told = block_on(stream.encrypt(session)).expect_err("a stranger");
    assert!(
        told.starts_with("TLS handshake: the peer's certificate"),
        "{told}"
    );
    let told = refused.join().expect("no panic");
    assert!(
        told.starts_with("TLS handshake: the peer refused"),
        "{told}"
    );
}

#[test]
fn peer_that_does_not_speak_tls_is_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = ServerCredentials::load(&directory(&folder), true).expect("a server's");
    for (said, why) in [
        (&b"IHAVEOPT\0\0\0\x03"[..], "does not speak TLS"),
        (b"", "hung up"),
    ] {
        let (here, there) = Stream::pair().expect("sockets");
        block_on(there.send(said)).expect("sent");
        drop(there);
        let session = Session::server(&server).expect("a session");
        let stream = SecureStream::plain(Arc::new(here));
        let told = block_on(stream.encrypt(session)).expect_err("plain text");
        assert!(told.contains(why), "{told}");
    }
}
