//! Two sides of a connection in memory: who trusts whom, and what is said when they do not.

use std::path::{Path, PathBuf};

use gaur_tls::{ClientCredentials, Received, ServerCredentials, Session, TlsError, file};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose,
    RevokedCertParams, SerialNumber, date_time_ymd,
};

/// An authority, and directories of who has certificates of it.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    folder: tempfile::TempDir,
}

impl Authority {
    fn new() -> Authority {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).expect("a certificate");
        Authority {
            pem: certificate.pem(),
            issuer: Issuer::new(params, key),
            folder: tempfile::tempdir().expect("a folder"),
        }
    }

    /// A directory with this authority's certificate alone.
    fn directory(&self, name: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::create_dir(&path).expect("a new folder");
        std::fs::write(path.join(file::CA), &self.pem).expect("written");
        path
    }

    /// A directory with a certificate of this authority.
    fn identity(
        &self,
        (name, certificate, key): (&str, &str, &str),
        change: impl FnOnce(&mut CertificateParams),
    ) -> PathBuf {
        let path = self.directory(name);
        let pair = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::OrganizationName, "Gaur");
        params.distinguished_name.push(DnType::CommonName, name);
        params.serial_number = Some(SerialNumber::from(name.len() as u64));
        params.extended_key_usages = vec![match certificate {
            file::SERVER_CERTIFICATE => ExtendedKeyUsagePurpose::ServerAuth,
            _ => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        change(&mut params);
        let signed = params.signed_by(&pair, &self.issuer).expect("signed");
        std::fs::write(path.join(certificate), signed.pem()).expect("written");
        std::fs::write(path.join(key), pair.serialize_pem()).expect("written");
        path
    }

    fn server(&self, name: &str) -> PathBuf {
        let files = (name, file::SERVER_CERTIFICATE, file::SERVER_KEY);
        self.identity(files, |params| {
            params.subject_alt_names = names(&["host", "127.0.0.1"])
        })
    }

    fn client(&self, name: &str) -> PathBuf {
        self.identity((name, file::CLIENT_CERTIFICATE, file::CLIENT_KEY), |_| {})
    }

    /// Has a directory refuse the certificate of who is called `name`.
    fn revoke(&self, directory: &Path, name: &str) {
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2020, 1, 1),
            next_update: date_time_ymd(2100, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: vec![RevokedCertParams {
                serial_number: SerialNumber::from(name.len() as u64),
                revocation_time: date_time_ymd(2020, 1, 1),
                reason_code: None,
                invalidity_date: None,
            }],
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&self.issuer).expect("signed");
        std::fs::write(directory.join(file::REVOKED), list.pem().expect("PEM")).expect("written");
    }
}

fn names(names: &[&str]) -> Vec<rcgen::SanType> {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    CertificateParams::new(names)
        .expect("names")
        .subject_alt_names
}

/// Moves what one side has to send to the other, and reports the first error: whose, and what.
fn shake(server: &mut Session, client: &mut Session) -> Result<(), (&'static str, TlsError)> {
    for _ in 0..20 {
        carry(client, server).map_err(|error| ("server", error))?;
        carry(server, client).map_err(|error| ("client", error))?;
    }
    assert!(!server.is_handshaking() && !client.is_handshaking());
    Ok(())
}

fn carry(from: &mut Session, to: &mut Session) -> Result<(), TlsError> {
    let mut sent = Vec::new();
    from.outgoing(&mut sent);
    let mut rest = sent.as_slice();
    while !rest.is_empty() {
        rest = &rest[to.receive(rest)?..];
    }
    Ok(())
}

fn connect(
    server: (&Path, bool),
    client: (&Path, &str),
) -> Result<(Session, Session), (&'static str, TlsError)> {
    let credentials = ServerCredentials::load(server.0, server.1).expect("a server's directory");
    let mut server = Session::server(&credentials).expect("a server");
    let credentials = ClientCredentials::load(client.0, true).expect("a client's directory");
    let mut client = Session::client(&credentials, client.1).expect("a client");
    shake(&mut server, &mut client)?;
    Ok((server, client))
}

#[test]
fn bytes_arrive_and_peers_know_each_others_names() {
    let authority = Authority::new();
    let (server, client) = (authority.server("server"), authority.client("client"));
    let (mut server, mut client) = connect((&server, true), (&client, "host")).expect("trust");
    assert_eq!(server.peer_name().as_deref(), Some("O=Gaur,CN=client"));
    assert_eq!(client.peer_name().as_deref(), Some("O=Gaur,CN=server"));
    let sent: Vec<u8> = (0..1_000_000_u32).map(|at| (at % 251) as u8).collect();
    let (mut rest, mut got) = (sent.as_slice(), Vec::new());
    let mut piece = [0; 5000];
    while !rest.is_empty() {
        let taken = client.write(rest);
        assert!(taken > 0, "an empty buffer takes something");
        rest = &rest[taken..];
        let mut wire = Vec::new();
        client.outgoing(&mut wire);
        assert!(wire.len() < 80 << 10, "{}", wire.len());
        let mut arrived = wire.as_slice();
        loop {
            match server.read(&mut piece) {
                Received::Bytes(count) => got.extend_from_slice(&piece[..count]),
                Received::Need if arrived.is_empty() => break,
                Received::Need => {
                    let used = server.receive(arrived).expect("sound records");
                    assert!(used > 0);
                    arrived = &arrived[used..];
                }
                Received::End => panic!("it has not ended"),
            }
        }
    }
    assert!(got == sent);
    client.close();
    carry(&mut client, &mut server).expect("a goodbye");
    assert_eq!(server.read(&mut piece), Received::End);
}

#[test]
fn host_name_is_checked_and_the_common_name_counts_where_there_is_no_other() {
    let authority = Authority::new();
    let client = authority.client("client");
    let named = authority.server("named");
    let files = ("plain", file::SERVER_CERTIFICATE, file::SERVER_KEY);
    let plain = authority.identity(files, |_| {});
    for (server, host) in [(&named, "host"), (&named, "127.0.0.1"), (&plain, "PLAIN")] {
        connect((server, true), (&client, host)).expect(host);
    }
    for (server, host) in [(&named, "named"), (&named, "127.0.0.2"), (&plain, "other")] {
        let (who, error) = connect((server, true), (&client, host)).expect_err(host);
        assert_eq!(who, "client");
        let said = error.to_string();
        assert!(said.contains("does not match the hostname"), "{said}");
    }
    let credentials = ClientCredentials::load(&client, true).expect("a client");
    assert!(Session::client(&credentials, "").is_err());
}

#[test]
fn strangers_are_refused_by_both_sides() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let server = ours.server("server");
    let (who, error) = connect((&server, true), (&theirs.client("c"), "host")).expect_err("c");
    assert_eq!(
        (who, error.to_string().contains("ca-cert.pem")),
        ("client", true)
    );
    // One who trusts us, and whom we do not.
    let stranger = theirs.client("stranger");
    std::fs::copy(server.join(file::CA), stranger.join("ours.pem")).expect("copied");
    let both = [file::CA, "ours.pem"].map(|name| std::fs::read(stranger.join(name)).expect("read"));
    std::fs::write(stranger.join(file::CA), both.concat()).expect("written");
    let (who, error) = connect((&server, true), (&stranger, "host")).expect_err("a stranger");
    assert_eq!(
        (who, error.to_string().contains("ca-cert.pem")),
        ("server", true)
    );
    let nobody = ours.directory("nobody");
    let (who, error) = connect((&server, true), (&nobody, "host")).expect_err("nobody");
    assert_eq!(
        (who, &*error.to_string()),
        ("server", "the client has no certificate")
    );
    connect((&server, false), (&nobody, "host")).expect("any client will do");
}

#[test]
fn revoked_and_expired_certificates_are_refused() {
    let authority = Authority::new();
    let (server, client) = (authority.server("server"), authority.client("withdrawn"));
    authority.revoke(&server, "withdrawn");
    let (who, error) = connect((&server, true), (&client, "host")).expect_err("revoked");
    assert_eq!(
        (who, &*error.to_string()),
        ("server", "the peer's certificate was revoked")
    );
    connect((&server, true), (&authority.client("fine"), "host")).expect("not revoked");
    let files = ("old", file::SERVER_CERTIFICATE, file::SERVER_KEY);
    let old = authority.identity(files, |params| params.not_after = date_time_ymd(2020, 1, 1));
    let error = ServerCredentials::load(&old, true)
        .expect_err("expired")
        .to_string();
    assert!(error.ends_with("server-cert.pem: has expired"), "{error}");
}

#[test]
fn directories_that_lack_something_are_named_with_the_file() {
    let authority = Authority::new();
    let path = authority.server("server");
    let refused = |name: &str, content: Option<&[u8]>| {
        let saved = std::fs::read(path.join(name)).expect("it is there");
        match content {
            None => std::fs::remove_file(path.join(name)).expect("removed"),
            Some(bytes) => std::fs::write(path.join(name), bytes).expect("written"),
        }
        let error = ServerCredentials::load(&path, true)
            .expect_err(name)
            .to_string();
        std::fs::write(path.join(name), saved).expect("written");
        assert!(
            error.contains(name) && error.lines().count() == 1,
            "{error}"
        );
        error
    };
    for name in [file::CA, file::SERVER_CERTIFICATE, file::SERVER_KEY] {
        assert!(refused(name, None).contains("no such file"));
        refused(name, Some(b"nothing"));
    }
    let key = b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
    assert!(refused(file::SERVER_KEY, Some(key)).contains("encrypted"));
    let other = std::fs::read(authority.server("other").join(file::SERVER_KEY)).expect("a key");
    refused(file::SERVER_KEY, Some(&other));
    ServerCredentials::load(&path, true).expect("whole again");
    let wrong = authority.client("client");
    assert!(ServerCredentials::load(&wrong, true).is_err());
}

#[test]
fn plaintext_is_no_handshake() {
    let authority = Authority::new();
    let credentials = ServerCredentials::load(&authority.server("server"), true).expect("one");
    let mut server = Session::server(&credentials).expect("a server");
    let error = server
        .receive(b"IHAVEOPT\0\0\0\x03\0\0\0\0")
        .expect_err("no record");
    assert_eq!(error.to_string(), "the peer does not speak TLS");
}
