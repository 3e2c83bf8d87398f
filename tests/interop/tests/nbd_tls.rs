//! NBD over TLS: our server with QEMU's and libnbd's clients, and the list of our `qemu-nbd -L` with QEMU's server.

use std::path::Path;
use std::process::Command;

use gaur_interop::gaur::{binary, gaur};
use gaur_interop::nbd::Server;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, qemu_img, run};

/// Makes an authority, or has one sign, by `openssl`.
fn openssl(folder: &Path, line: &str) {
    let line = format!("cd {} && {line}", folder.display());
    run("bash", &["-c", &line]).ok();
}

/// A directory `name` with an authority's certificate.
fn authority(scratch: &Scratch, name: &str) -> String {
    let path = scratch.path(name);
    std::fs::create_dir(&path).expect("scratch is writable");
    openssl(
        Path::new(&path),
        &format!(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca-key.pem \
             -out ca-cert.pem -days 100 -subj '/CN=authority {name}' \
             -addext basicConstraints=critical,CA:TRUE -addext keyUsage=keyCertSign,cRLSign"
        ),
    );
    path
}

/// A new directory with a certificate of `authority`.
fn identity(scratch: &Scratch, authority: &str, name: &str, kind: &str, days: &str) -> String {
    let path = scratch.path(name);
    std::fs::create_dir(&path).expect("scratch is writable");
    openssl(
        Path::new(&path),
        &format!(
            "cp {authority}/ca-cert.pem . && \
             openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {kind}-key.pem \
             -out request.pem -subj '/C=AQ/O=Gaur, and more/CN={name}' && \
             openssl x509 -req -in request.pem -CA ca-cert.pem -CAkey {authority}/ca-key.pem -CAcreateserial \
             -out {kind}-cert.pem {days} -extfile <(printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage={kind}Auth\n')"
        ),
    );
    path
}

const VALID: &str = "-days 10";

/// Directories of a server and of a client that trust each other, and of strangers.
struct Place {
    scratch: Scratch,
    server: String,
    client: String,
    image: String,
}

impl Place {
    fn new(name: &str) -> Place {
        let scratch = Scratch::new(name);
        let home = authority(&scratch, "home");
        let image = scratch.path("disk.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", &image, "16M"]).ok();
        run(
            "qemu-io",
            &["-f", "qcow2", "-c", "write -q -P 7 1M 1M", &image],
        )
        .ok();
        Place {
            server: identity(&scratch, &home, "server", "server", VALID),
            client: identity(&scratch, &home, "client", "client", VALID),
            image,
            scratch,
        }
    }

    fn home(&self) -> String {
        self.scratch.path("home")
    }

    fn socket(&self) -> String {
        self.scratch.path("s")
    }

    /// Our `qemu-nbd` with more flags.
    fn serve(&self, more: &[&str]) -> Server {
        let mut command = Command::new(binary());
        command.args([
            "qemu-nbd",
            "-t",
            "-e",
            "8",
            "-f",
            "qcow2",
            "-k",
            &self.socket(),
        ]);
        command.args(more).arg(&self.image);
        Server::start(command, &self.socket())
    }

    fn encrypted(&self, more: &[&str]) -> Server {
        let object = format!("tls-creds-x509,id=t,endpoint=server,dir={}", self.server);
        let words = ["--object", &object, "--tls-creds", "t"];
        self.serve(&[&words[..], more].concat())
    }

    /// QEMU's client with the certificates in a directory.
    fn qemu(&self, directory: &str) -> Run {
        let object = format!("tls-creds-x509,id=t,endpoint=client,dir={directory}");
        let options = format!(
            "driver=nbd,path={},tls-creds=t,tls-hostname=localhost",
            self.socket()
        );
        qemu_img(&["info", "--object", &object, "--image-opts", &options])
    }

    fn uri(&self, directory: &str) -> String {
        let socket = self.socket();
        format!("nbds+unix:///?socket={socket}&tls-certificates={directory}&tls-hostname=localhost")
    }

    /// The directory of a client that knows the authority and has no certificate.
    fn nobody(&self) -> String {
        let nobody = self.scratch.path("nobody");
        std::fs::create_dir(&nobody).expect("scratch is writable");
        let (from, to) = (&self.client, &nobody);
        let copied = std::fs::copy(format!("{from}/ca-cert.pem"), format!("{to}/ca-cert.pem"));
        copied.expect("scratch is writable");
        nobody
    }
}

#[test]
fn clients_of_libnbd_and_qemu_read_and_write_over_tls() {
    let place = Place::new("tls-clients");
    let server = place.encrypted(&[]);
    let said = place.qemu(&place.client).ok();
    assert!(said.stdout.contains("16 MiB"), "{said}");
    let uri = place.uri(&place.client);
    let info = run("nbdinfo", &[&uri]).ok();
    assert!(info.stdout.contains("with TLS"), "{info}");
    let (raw, plain) = (place.scratch.path("raw"), place.scratch.path("plain"));
    run("nbdcopy", &[&uri, &raw]).ok();
    qemu_img(&[
        "convert",
        "-f",
        "qcow2",
        "-O",
        "raw",
        &place.image,
        &plain,
        "-U",
    ])
    .ok();
    run("cmp", &[&raw, &plain]).ok();
    // And back, with other content.
    let other = place.scratch.file("other", &vec![0x5a; 16 << 20]);
    run("nbdcopy", &[&other, &uri]).ok();
    server.stop();
    qemu_img(&["compare", "-f", "raw", "-F", "qcow2", &other, &place.image]).ok();
}

#[test]
fn clients_without_the_right_certificate_are_refused_and_said_so() {
    let place = Place::new("tls-refused");
    let abroad = authority(&place.scratch, "abroad");
    let stranger = identity(&place.scratch, &abroad, "stranger", "client", VALID);
    let nobody = place.nobody();
    let old = identity(&place.scratch, &place.home(), "old", "client", "-days -1");
    let server = place.encrypted(&[]);
    for directory in [&stranger, &nobody] {
        assert_eq!(place.qemu(directory).code, 1, "{directory}");
    }
    for uri in [
        place.uri(&old),
        place.uri(&nobody),
        format!("nbd+unix:///?socket={}", place.socket()),
    ] {
        assert!(run("nbdinfo", &["--size", &uri]).code != 0, "{uri}");
    }
    place.qemu(&place.client).ok();
    server.signal("TERM");
    let mut server = server;
    let said = server.wait().ok().stderr;
    assert!(
        said.contains("option negotiation failed: TLS handshake: the client has no certificate"),
        "{said}"
    );
    assert!(said.contains("certificate has expired"), "{said}");
}

#[test]
fn server_without_verify_peer_takes_any_client_and_one_with_authorization_few() {
    let place = Place::new("tls-authz");
    let nobody = place.nobody();
    let object = format!(
        "tls-creds-x509,id=t,endpoint=server,dir={},verify-peer=off",
        place.server
    );
    let server = place.serve(&["--object", &object, "--tls-creds", "t"]);
    place.qemu(&nobody).ok();
    server.stop();
    // The name as QEMU writes it, with its commas escaped by a backslash, and doubled for the option.
    for (name, code) in [
        (r"C=AQ,,O=Gaur\,, and more,,CN=client", 0),
        ("CN=client", 1),
    ] {
        let object = format!("authz-simple,id=a,identity={name}");
        let server = place.encrypted(&["--object", &object, "--tls-authz", "a"]);
        assert_eq!(place.qemu(&place.client).code, code, "{name}");
        server.stop();
        // QEMU's server thinks the same of that name.
        let mut command = Command::new("qemu-nbd");
        let creds = format!("tls-creds-x509,id=t,endpoint=server,dir={}", place.server);
        command.args([
            "-t",
            "-f",
            "qcow2",
            "-k",
            &place.socket(),
            "--object",
            &creds,
        ]);
        command.args([
            "--tls-creds",
            "t",
            "--object",
            &object,
            "--tls-authz",
            "a",
            &place.image,
        ]);
        let server = Server::start(command, &place.socket());
        assert_eq!(place.qemu(&place.client).code, code, "QEMU: {name}");
        server.stop();
    }
    let list = "authz-list,id=a,rules.0.match=*,,CN=cl*,rules.0.format=glob,rules.0.policy=allow";
    let server = place.encrypted(&["--object", list, "--tls-authz", "a"]);
    place.qemu(&place.client).ok();
    server.stop();
}

#[test]
fn credentials_that_cannot_work_are_refused_at_the_start() {
    let place = Place::new("tls-start");
    let old = identity(&place.scratch, &place.home(), "old", "server", "-days -1");
    let start = |object: &str, more: &[&str]| {
        let words = ["qemu-nbd", "-k", &place.socket(), "--object", object];
        gaur(&[&words[..], more, &[&place.image]].concat())
            .code(1)
            .refused()
    };
    let creds = |directory: &str| format!("tls-creds-x509,id=t,endpoint=server,dir={directory}");
    for (object, more, word) in [
        (
            creds(&old),
            &["--tls-creds", "t"][..],
            "server-cert.pem: has expired",
        ),
        (
            creds(&place.client),
            &["--tls-creds", "t"],
            "server-cert.pem: no such file",
        ),
        (
            creds(&place.server),
            &["--tls-creds", "x"],
            "no TLS credentials with id 'x'",
        ),
        (
            creds(&place.server),
            &["--tls-creds", "t", "--tls-authz", "x"],
            "no authorization",
        ),
        (
            "tls-creds-psk,id=t,dir=/x,endpoint=server".to_owned(),
            &["--tls-creds", "t"],
            "rustls has only certificates",
        ),
        (
            "tls-creds-x509,id=t,dir=/x".to_owned(),
            &["--tls-creds", "t"],
            "endpoint=server",
        ),
    ] {
        let said = start(&object, more).stderr;
        assert!(said.contains(word), "{said}");
    }
}

#[test]
fn our_list_reads_servers_of_qemu_over_tls() {
    let place = Place::new("tls-list");
    let object = format!("tls-creds-x509,id=t,endpoint=server,dir={}", place.server);
    let mut command = Command::new("qemu-nbd");
    command.args([
        "-t",
        "-f",
        "qcow2",
        "-k",
        &place.socket(),
        "--object",
        &object,
    ]);
    command.args(["--tls-creds", "t", &place.image]);
    let server = Server::start(command, &place.socket());
    let object = format!("tls-creds-x509,id=t,endpoint=client,dir={}", place.client);
    let (socket, creds) = (place.socket(), ["--object", &object, "--tls-creds", "t"]);
    let words = |more: &[&'static str]| {
        let words = [&["-L", "-k", &socket], &creds[..], more].concat();
        words
            .iter()
            .map(|word| (*word).to_owned())
            .collect::<Vec<_>>()
    };
    let ours = |words: &[String]| {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        gaur(&[&["qemu-nbd"][..], &words].concat())
    };
    let theirs = |words: &[String]| {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        run("qemu-nbd", &words)
    };
    let named = words(&["--tls-hostname", "localhost"]);
    assert_eq!(ours(&named).ok().stdout, theirs(&named).ok().stdout);
    for (words, word) in [
        (words(&[]), "no hostname for certificate validation"),
        (
            words(&["--tls-hostname", "elsewhere"]),
            "does not match the hostname elsewhere",
        ),
        (
            vec!["-L".to_owned(), "-k".to_owned(), socket.clone()],
            "TLS",
        ),
    ] {
        assert_eq!(theirs(&words).code, 1);
        let said = ours(&words).code(1).refused().stderr;
        assert!(said.contains(word), "{said}");
    }
    server.stop();
}

#[test]
fn serve_encrypts_by_a_directory_and_refuses_to_serve_other_machines_without() {
    let place = Place::new("tls-serve");
    let mut command = Command::new(binary());
    let socket = place.socket();
    command.args([
        "serve",
        "-t",
        "-k",
        &socket,
        "--tls-dir",
        &place.server,
        &place.image,
    ]);
    let server = Server::start(command, &socket);
    place.qemu(&place.client).ok();
    server.stop();
    for bind in [
        &["-p", "0"][..],
        &["-b", "0.0.0.0", "-p", "0"],
        &["-b", "::", "-p", "0"],
    ] {
        let words = [&["serve"][..], bind, &[&place.image]].concat();
        let said = gaur(&words).code(1).refused().stderr;
        assert!(said.contains("--insecure"), "{said}");
    }
    let command = [
        "serve",
        "-k",
        &socket,
        "--tls-dir",
        &place.client,
        &place.image,
    ];
    gaur(&command).code(1).refused();
}

/// Our client reads over TLS from both servers, and neither from who it does not trust nor without TLS.
#[test]
fn options_of_the_nbd_driver_name_credentials() {
    let place = Place::new("tls-creds");
    let object = |directory: &str| format!("tls-creds-x509,id=t,dir={directory}");
    let (trusted, copy) = (object(&place.client), place.scratch.path("copy.raw"));
    let options = |name: &str| {
        let socket = place.socket();
        format!(
            "driver=raw,file.driver=nbd,file.path={socket},file.tls-creds=t,file.tls-hostname={name}"
        )
    };
    for program in [binary(), "qemu-nbd"] {
        let mut command = Command::new(program);
        if program == binary() {
            command.arg("qemu-nbd");
        }
        let server = format!("tls-creds-x509,id=t,endpoint=server,dir={}", place.server);
        command.args(["-t", "-e", "8", "-f", "qcow2", "-k", &place.socket()]);
        command.args(["--object", &server, "--tls-creds", "t", &place.image]);
        let server = Server::start(command, &place.socket());
        let image = options("localhost");
        let lines: [&[&str]; 5] = [
            &["convert", "--image-opts", &image, "-O", "raw", &copy],
            &["info", "--image-opts", &image],
            &["qemu-io", "--image-opts", &image, "-c", "write -P 9 3M 1M"],
            &["map", "--output=json", "--image-opts", &image],
            &["compare", "--image-opts", &image, &image],
        ];
        for line in lines {
            let words = [&line[..1], &["--object", &trusted], &line[1..]].concat();
            gaur(&words).ok();
        }
        let json = format!(
            r#"json:{{"driver":"nbd","path":"{}","tls-creds":"t","tls-hostname":"localhost"}}"#,
            place.socket()
        );
        gaur(&[
            "convert", "--object", &trusted, "-n", "-O", "raw", &copy, &json,
        ])
        .refused();
        let back = ["convert", "--object", &trusted, "-n", "--target-image-opts"];
        gaur(&[&back[..], &[&copy, &image]].concat()).ok();
        qemu_img(&[
            "compare",
            "-U",
            "-f",
            "raw",
            "-F",
            "qcow2",
            &copy,
            &place.image,
        ])
        .ok();
        for (object, name) in [
            (&trusted, "elsewhere"),
            (&object("/nowhere"), "localhost"),
            (&server_object(&place), "localhost"),
            (&trusted.replace("id=t", "id=u"), "localhost"),
        ] {
            let words = ["info", "--object", object, "--image-opts", &options(name)];
            assert_eq!(qemu_img(&words).code, 1);
            let refusal = gaur(&words).refused();
            assert_eq!(refusal.stderr.lines().count(), 1, "{refusal}");
        }
        server.stop();
        let _ = std::fs::remove_file(place.socket());
    }
}

fn server_object(place: &Place) -> String {
    format!("tls-creds-x509,id=t,endpoint=server,dir={}", place.server)
}

#[test]
fn our_client_speaks_tls_with_whom_it_trusts() {
    let place = Place::new("tls-client");
    let stranger = authority(&place.scratch, "stranger");
    let uri = |scheme: &str, more: &str| {
        let socket = place.socket();
        format!("{scheme}+unix:///?socket={socket}{more}")
    };
    let map = |more: &str| gaur(&["map", "-f", "raw", &uri("nbds", more)]);
    let copy = place.scratch.path("copy.qcow2");
    for program in [binary(), "qemu-nbd"] {
        let mut command = Command::new(program);
        if program == binary() {
            command.arg("qemu-nbd");
        }
        let object = format!("tls-creds-x509,id=t,endpoint=server,dir={}", place.server);
        command.args(["-t", "-e", "8", "-f", "qcow2", "-k", &place.socket()]);
        command.args(["--object", &object, "--tls-creds", "t", &place.image]);
        let server = Server::start(command, &place.socket());
        let trusted = format!("&tls-certificates={}", place.client);
        let source = uri("nbds", &trusted);
        gaur(&["convert", "-f", "raw", &source, &copy]).ok();
        qemu_img(&["compare", "-U", &copy, &place.image]).ok();
        map(&format!("{trusted}&tls-hostname=127.0.0.1")).ok();
        for (more, words) in [
            (format!("{trusted}&tls-hostname=elsewhere"), "TLS"),
            (format!("&tls-certificates={stranger}"), "TLS"),
            ("&tls-certificates=/nowhere".to_owned(), "/nowhere"),
        ] {
            let refusal = map(&more).refused();
            assert!(refusal.stderr.contains(words), "{refusal}");
            assert_eq!(refusal.stderr.lines().count(), 1, "{refusal}");
        }
        let plain = gaur(&["map", "-f", "raw", &uri("nbd", "")]).refused();
        assert!(plain.stderr.contains("TLS"), "{plain}");
        server.stop();
        let _ = std::fs::remove_file(place.socket());
    }
    let plain = Server::qemu(&place.image, "qcow2", &place.socket(), true);
    let trusted = format!("&tls-certificates={}", place.client);
    let refusal = map(&trusted).refused();
    assert!(
        refusal.stderr.contains("the server has no TLS"),
        "{refusal}"
    );
    plain.stop();
}
