//! The files in which Amazon's own tools keep keys: `~/.aws/credentials` and `~/.aws/config`.

use std::collections::HashMap;
use std::path::PathBuf;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};

/// Longest file that is read.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What the files say, under which variables of the environment it is otherwise known.
const KEYS: [(&str, &[&str], AmazonS3ConfigKey); 5] = [
    (
        "aws_access_key_id",
        &["AWS_ACCESS_KEY_ID"],
        AmazonS3ConfigKey::AccessKeyId,
    ),
    (
        "aws_secret_access_key",
        &["AWS_ACCESS_KEY_ID"],
        AmazonS3ConfigKey::SecretAccessKey,
    ),
    (
        "aws_session_token",
        &["AWS_ACCESS_KEY_ID"],
        AmazonS3ConfigKey::Token,
    ),
    (
        "region",
        &["AWS_REGION", "AWS_DEFAULT_REGION"],
        AmazonS3ConfigKey::Region,
    ),
    (
        "endpoint_url",
        &["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"],
        AmazonS3ConfigKey::Endpoint,
    ),
];

/// Adds what the profile of `AWS_PROFILE` (`default`) says and the environment does not.
pub(crate) fn complete(mut builder: AmazonS3Builder) -> AmazonS3Builder {
    let mut found = entries();
    for (key, variables, option) in KEYS {
        if variables.iter().all(|name| variable(name).is_none())
            && let Some(value) = found.remove(key)
        {
            builder = builder.with_config(option, value);
        }
    }
    builder
}

/// The store that the profile names.
pub(crate) fn endpoint() -> Option<String> {
    entries().remove("endpoint_url")
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// What the profile says.
fn entries() -> HashMap<String, String> {
    let name = variable("AWS_PROFILE").unwrap_or_else(|| "default".to_owned());
    let file = |variable_name: &str, own: &str| {
        let home = || Some(PathBuf::from(variable("HOME")?).join(".aws").join(own));
        variable(variable_name).map(PathBuf::from).or_else(home)
    };
    let mut found = HashMap::new();
    for (path, section) in [
        (file("AWS_CONFIG_FILE", "config"), format!("profile {name}")),
        (
            file("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
            name.clone(),
        ),
    ] {
        let readable = |path: &PathBuf| {
            std::fs::metadata(path)
                .is_ok_and(|facts| facts.is_file() && facts.len() <= FILE_BYTES_MAX)
        };
        let text = path
            .filter(readable)
            .and_then(|path| std::fs::read_to_string(path).ok());
        found.extend(section_of(&text.unwrap_or_default(), &[&section, &name]));
    }
    found
}

/// The entries of the sections of these names.
fn section_of(text: &str, names: &[&str]) -> HashMap<String, String> {
    let mut inside = false;
    let mut found = HashMap::new();
    for line in text.lines() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix('[') {
            let name = name.split(']').next().unwrap_or_default().trim();
            inside = names.contains(&name);
        } else if let Some((key, value)) = line.split_once('=')
            && inside
            && !line.starts_with(['#', ';'])
        {
            found.insert(key.trim().to_owned(), value.trim().to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_ends_where_the_next_begins() {
        let text = "[default]\naws_access_key_id = A\n# aws_access_key_id = no\n\n[profile b]\nregion=eu-1\n[b]\nx = y=z";
        let section = |names: &[&str], key: &str| section_of(text, names).remove(key);
        assert_eq!(section(&["default"], "aws_access_key_id").unwrap(), "A");
        assert_eq!(section(&["default"], "region"), None);
        let both = ["profile b", "b"];
        assert_eq!(section(&both, "region").unwrap(), "eu-1");
        assert_eq!(section(&both, "x").unwrap(), "y=z");
    }
}
