//! Keys of encrypted images, as command lines and the control socket say where they are. The secrets
//! themselves stand on no command line unless the user insists: everybody on the machine can read those.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use gaur_engine::{Keys, Passphrase};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::key_values::KeyValues;
use crate::tls_objects;

/// Longest secret in bytes, as it stands in its file.
const SECRET_BYTES_MAX: usize = 64 << 10;

/// Where the keys of encrypted images are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct KeyOptions {
    /// What image options name: secret,id=ID,file=PATH[,format=raw|base64], tls-creds-x509,id=ID,dir=PATH
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "clap", arg(long = "object", value_name = "TYPE,id=ID,.."))]
    pub objects: Vec<String>,
    /// File with the key of every encrypted image that names no secret; all its bytes count
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "PATH"))]
    pub key_file: Option<PathBuf>,
    /// Take secrets that stand in --object itself (data=SECRET), where everybody on the machine can read them
    #[serde(skip)]
    #[cfg_attr(feature = "clap", arg(long))]
    pub inline_secrets: bool,
}

/// How a secret stands in its file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Coding {
    Raw,
    Base64,
}

impl KeyOptions {
    /// Whether nothing is said.
    pub fn is_default(&self) -> bool {
        *self == KeyOptions::default()
    }

    /// The same for a process that may run in another directory.
    pub fn absolute(mut self) -> Result<KeyOptions, Failure> {
        if let Some(path) = &mut self.key_file {
            *path = std::path::absolute(&*path).map_err(|error| Failure::io(&*path, &error))?;
        }
        for text in &mut self.objects {
            let key = match text.starts_with("tls-creds-") {
                true => ",dir=",
                false => ",file=",
            };
            let Some(at) = text.find(key).map(|at| at + key.len()) else {
                continue;
            };
            if !text[at..].starts_with('/') {
                let here = std::env::current_dir().map_err(|error| Failure::io(".", &error))?;
                // A comma in a value is doubled.
                let here = here.to_string_lossy().replace(',', ",,");
                text.insert_str(at, &format!("{here}/"));
            }
        }
        Ok(self)
    }

    /// Reads the secrets.
    pub fn keys(&self) -> Result<Keys, Failure> {
        let mut keys = Keys::default();
        for text in &self.objects {
            add_object(&mut keys, text, self.inline_secrets)
                .map_err(|failure| failure.with_subject("--object"))?;
        }
        if let Some(path) = &self.key_file {
            keys.for_others(read(path)?);
        }
        Ok(keys)
    }
}

fn add_object(keys: &mut Keys, text: &str, inline: bool) -> Result<(), Failure> {
    const FORM: &str = "for example secret,id=sec0,file=PATH";
    if tls_objects::is_named(text) {
        return Ok(());
    }
    let Some(("secret", rest)) = text.split_once(',') else {
        return Err(Failure::new("only secrets are known as objects").hint(FORM));
    };
    let mut options = KeyValues::from_option_string(rest)?;
    let data = options.take_text("data")?;
    // Before anything else is said of it.
    if data.is_some() && !inline {
        let message = "option 'data' is refused: others see what stands on a command line";
        let hint = "file=PATH names a file with the secret; --inline-secrets allows it";
        return Err(Failure::new(message).hint(hint));
    }
    let codings = [("raw", Coding::Raw), ("base64", Coding::Base64)];
    let coding = options.take_choice("format", &codings)?;
    let needed = |key: &str, value: Option<String>| {
        value.ok_or_else(|| Failure::new(format!("option '{key}' is missing")).hint(FORM))
    };
    let id = options.take_text("id")?;
    let id = needed("id", id)?;
    let file = options.take_text("file")?;
    if let Some(key) = options.find_key(|_| true) {
        return Err(Failure::new(format!("option '{key}' is unknown")).hint(FORM));
    }
    let (mut secret, place) = match (data, file) {
        (Some(_), Some(_)) => {
            return Err(Failure::new("options 'data' and 'file' exclude each other").hint(FORM));
        }
        (Some(data), None) => (Passphrase::new(data.into_bytes()), "data".to_owned()),
        (None, file) => {
            let path = needed("file", file)?;
            (read(Path::new(&path))?, path)
        }
    };
    if coding == Some(Coding::Base64) {
        let decoded = decode_base64(secret.as_bytes());
        secret = decoded.ok_or_else(|| Failure::about(&place, "its content is not base64"))?;
    }
    match keys.add(&*id, secret) {
        true => Ok(()),
        false => Err(Failure::new(format!("there are two secrets '{id}'"))),
    }
}

/// Reads a secret. Its memory is taken at once, so that no piece of it stays behind.
fn read(path: &Path) -> Result<Passphrase, Failure> {
    let failed = |error: std::io::Error| Failure::io(path, &error);
    let file = File::open(path).map_err(failed)?;
    let mut bytes = Vec::with_capacity(SECRET_BYTES_MAX + 64);
    let done = file
        .take(SECRET_BYTES_MAX as u64 + 1)
        .read_to_end(&mut bytes);
    let too_long = bytes.len() > SECRET_BYTES_MAX;
    let secret = Passphrase::new(bytes);
    done.map_err(failed)?;
    if too_long {
        let message = format!("a key has at most {SECRET_BYTES_MAX} bytes");
        return Err(Failure::about(path, message));
    }
    Ok(secret)
}

/// What base64 (RFC 4648, with padding) stands for; line breaks are skipped.
fn decode_base64(text: &[u8]) -> Option<Passphrase> {
    let mut bytes = Vec::with_capacity(text.len());
    let (mut group, mut count, mut padding) = (0_u32, 0, 0);
    for byte in text.iter().filter(|byte| !byte.is_ascii_whitespace()) {
        let digit = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            b'=' => {
                padding += 1;
                0
            }
            _ => return None,
        };
        if padding > 2 || (padding > 0 && *byte != b'=') {
            return None;
        }
        group = group << 6 | u32::from(digit);
        count += 1;
        if count % 4 == 0 {
            bytes.extend_from_slice(&group.to_be_bytes()[1..]);
            group = 0;
        }
    }
    bytes.truncate(bytes.len().saturating_sub(padding));
    let secret = Passphrase::new(bytes);
    (count % 4 == 0).then_some(secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(content: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), content).expect("written");
        file
    }

    fn objects(list: &[String]) -> Result<Keys, Failure> {
        let options = KeyOptions {
            objects: list.to_vec(),
            key_file: None,
            inline_secrets: false,
        };
        options.keys()
    }

    #[test]
    fn secrets_are_read_from_files_raw_and_as_base64() {
        let (raw, coded) = (file(b"open\n"), file(b"b3Bl\nbg==\n"));
        let of = |id: &str, file: &tempfile::NamedTempFile, rest: &str| {
            format!("secret,id={id},file={}{rest}", file.path().display())
        };
        let keys = objects(&[of("a", &raw, ""), of("b", &coded, ",format=base64")]);
        let keys = keys.expect("two secrets");
        let bytes = |id| keys.named(id).map(|key| key.as_bytes().to_vec());
        assert_eq!(bytes("a"), Some(b"open\n".to_vec()));
        assert_eq!(bytes("b"), Some(b"open".to_vec()));
        let options = KeyOptions {
            objects: Vec::new(),
            key_file: Some(raw.path().to_owned()),
            inline_secrets: false,
        };
        let keys = options.keys().expect("a key");
        assert!(keys.of_layer(3).is_some());
    }

    #[test]
    fn a_secret_on_the_command_line_is_taken_when_the_user_insists() {
        let options = |text: &str| KeyOptions {
            objects: vec![text.to_owned()],
            key_file: None,
            inline_secrets: true,
        };
        for text in [
            "secret,id=a,data=open sesame",
            "secret,id=a,format=base64,data=b3BlbiBzZXNhbWU=",
        ] {
            let keys = options(text).keys().expect("a key");
            let key = keys.named("a").map(|key| key.as_bytes().to_vec());
            assert_eq!(key, Some(b"open sesame".to_vec()), "{text}");
        }
        let both = options("secret,id=a,data=x,file=y")
            .keys()
            .expect_err("both");
        assert!(both.to_string().contains("exclude"), "{both}");
    }

    #[test]
    fn wrong_objects_are_refused_in_one_line() {
        let (secret, long) = (file(b"x"), file(&[b'x'; SECRET_BYTES_MAX + 1]));
        let (secret, long) = (secret.path().display(), long.path().display());
        for (text, word) in [
            ("tls-creds-x509,id=a".to_owned(), "only secrets"),
            ("secret".to_owned(), "only secrets"),
            ("secret,id=a,data=hidden".to_owned(), "'data' is refused"),
            (format!("secret,file={secret}"), "'id' is missing"),
            ("secret,id=a".to_owned(), "'file' is missing"),
            (
                format!("secret,id=a,file={secret},keyid=b"),
                "'keyid' is unknown",
            ),
            (format!("secret,id=a,file={secret},format=hex"), "format"),
            (
                format!("secret,id=a,file={secret},format=base64"),
                "not base64",
            ),
            (format!("secret,id=a,file={long}"), "at most 65536 bytes"),
            ("secret,id=a,file=/nowhere/at/all".to_owned(), "/nowhere"),
        ] {
            let failure = objects(&[text]).expect_err(word).to_string();
            assert!(failure.contains(word), "{failure}");
            assert!(!failure.contains("hidden"), "{failure}");
            assert_eq!(failure.lines().count(), 1, "{failure}");
        }
        let twice = format!("secret,id=a,file={secret}");
        assert!(objects(&[twice.clone(), twice]).is_err());
    }

    #[test]
    fn base64_is_whole_groups_with_their_padding() {
        let decoded =
            |text: &str| decode_base64(text.as_bytes()).map(|key| key.as_bytes().to_vec());
        assert_eq!(decoded(""), Some(Vec::new()));
        assert_eq!(decoded("Zm9v"), Some(b"foo".to_vec()));
        assert_eq!(decoded("Zm9vYg=="), Some(b"foob".to_vec()));
        for wrong in ["Z", "Zm9vYg=", "Zm9v=Zm9", "Zm=v", "====", "Zm9%"] {
            assert_eq!(decoded(wrong), None, "{wrong}");
        }
    }
}
