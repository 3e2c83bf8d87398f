//! A plain S3 tool of another project: `s3cmd`.

use crate::scratch::Scratch;
use crate::tool::{Run, run_for};

/// Longest time for a command, in seconds.
const COMMAND_SECONDS: u32 = 600;
/// The region that clients sign for.
pub(super) const REGION: &str = "us-east-1";

/// A key of an S3 store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// `AWS_ACCESS_KEY_ID`
    pub access_key: String,
    /// `AWS_SECRET_ACCESS_KEY`
    pub secret_key: String,
}

impl Credentials {
    /// The variables with which clients find a store at an endpoint (`http://127.0.0.1:8333`) and this key.
    pub fn environment(&self, endpoint: &str) -> [(&'static str, String); 5] {
        [
            ("AWS_ENDPOINT_URL", endpoint.to_owned()),
            ("AWS_ACCESS_KEY_ID", self.access_key.clone()),
            ("AWS_SECRET_ACCESS_KEY", self.secret_key.clone()),
            ("AWS_REGION", REGION.to_owned()),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
        ]
    }
}

/// What a listing says of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Its key, without the bucket.
    pub key: String,
    /// Its size.
    pub len_bytes: u64,
}

/// Runs `s3cmd` with a key on the store at `port`.
pub(super) fn s3cmd(scratch: &Scratch, port: u16, key: &Credentials, arguments: &[&str]) -> Run {
    let Credentials {
        access_key,
        secret_key,
    } = key;
    // Two tries, the second after three seconds: a test that wants errors wants them soon.
    let text = format!(
        "[default]\naccess_key = {access_key}\nsecret_key = {secret_key}\nhost_base = 127.0.0.1:{port}\n\
         host_bucket = 127.0.0.1:{port}\nuse_https = False\nbucket_location = {REGION}\n\
         preserve_attrs = False\nprogress_meter = False\nmax_retries = 2\n"
    );
    let name = format!("s3cmd-{port}-{access_key}");
    let config = scratch.file(&name, text.as_bytes());
    let mut line = vec!["--config", &*config];
    line.extend(arguments);
    run_for("s3cmd", &line, COMMAND_SECONDS)
}

/// The objects of a listing (`s3cmd ls --recursive`): date, time, size and URL a line.
pub(super) fn objects(listing: &str, bucket: &str) -> Vec<Object> {
    let prefix = format!("s3://{bucket}/");
    let object = |line: &str| {
        let (properties, key) = line.split_once(&prefix)?;
        let len_bytes = properties.split_whitespace().nth(2)?;
        Some(Object {
            key: key.to_owned(),
            len_bytes: len_bytes.parse().ok()?,
        })
    };
    listing.lines().filter_map(object).collect()
}
