//! What an image consists of, as its registry says.

use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::auth::{self, Auth};
use crate::store::Fault;

const INDEXES: [&str; 2] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];
const MANIFESTS: [&str; 2] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];
/// Media types of a layer that is a tar file as it is.
const PLAIN: [&str; 2] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar",
];
/// Longest manifest: what registries take.
const MANIFEST_BYTES: usize = 4 << 20;
const LAYERS_MAX: usize = 128;

/// A layer of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layer {
    pub(super) digest: String,
    pub(super) len_bytes: u64,
    /// A tar file that is not compressed.
    pub(super) is_plain: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    media_type: String,
    digest: String,
    size: u64,
    platform: Option<Platform>,
}

#[derive(Deserialize)]
struct Platform {
    os: String,
    architecture: String,
}

/// An index has `manifests`, a manifest `layers`.
#[derive(Deserialize)]
struct Manifest {
    #[serde(default)]
    manifests: Vec<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
}

/// The layers of an image, of an index those of the image for this machine.
pub(super) async fn layers(base: &str, version: &str, auth: &Auth) -> Result<Vec<Layer>, Fault> {
    let first = fetch(base, version, auth).await?;
    let manifest = match first.manifests.as_slice() {
        [] => first,
        list => {
            let chosen = list.iter().find(|one| one.is_for_here()).or(match list {
                [only] => Some(only),
                _ => None,
            });
            let chosen = chosen.ok_or_else(|| Fault::last("it has no image for this machine"))?;
            check_digest(&chosen.digest)?;
            fetch(base, &chosen.digest, auth).await?
        }
    };
    if manifest.layers.is_empty() || manifest.layers.len() > LAYERS_MAX {
        return Err(Fault::last("the image has no layers, or too many"));
    }
    let layers = manifest.layers.into_iter().map(|layer| {
        check_digest(&layer.digest)?;
        Ok(Layer {
            is_plain: PLAIN.contains(&layer.media_type.as_str()),
            digest: layer.digest,
            len_bytes: layer.size,
        })
    });
    layers.collect()
}

impl Descriptor {
    fn is_for_here(&self) -> bool {
        let here = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let platform = self.platform.as_ref();
        platform.is_some_and(|platform| platform.os == "linux" && platform.architecture == here)
    }
}

fn check_digest(digest: &str) -> Result<(), Fault> {
    let hex = digest.strip_prefix("sha256:").unwrap_or_default();
    match hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        true => Ok(()),
        false => Err(Fault::last("the registry names a digest that is none")),
    }
}

/// An index or manifest, by tag or digest; one by digest has it.
async fn fetch(base: &str, version: &str, auth: &Auth) -> Result<Manifest, Fault> {
    let page = auth::page(&format!("{base}/manifests/{version}"))?;
    let accept = [INDEXES, MANIFESTS].concat().join(", ");
    let sent = auth.header().await;
    let mut asked = page.small(&accept, sent.clone(), MANIFEST_BYTES).await;
    if let Err(fault) = &asked
        && fault.challenge.is_some()
    {
        auth.answer(fault, sent.as_deref()).await?;
        asked = page
            .small(&accept, auth.header().await, MANIFEST_BYTES)
            .await;
    }
    let answer = asked?;
    if let Some(hex) = version.strip_prefix("sha256:") {
        let found = Sha256::digest(&answer);
        let found: String = found.iter().map(|byte| format!("{byte:02x}")).collect();
        if found != hex {
            return Err(Fault::last(
                "the manifest has another digest than was asked for",
            ));
        }
    }
    let bad = |_| Fault::last("the registry sent no manifest that is understood");
    serde_json::from_slice(&answer).map_err(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_looked_at_before_they_become_part_of_a_url() {
        assert!(check_digest(&format!("sha256:{}", "0f".repeat(32))).is_ok());
        for bad in ["", "sha256:", "sha256:../../x", "sha512:00"] {
            assert!(check_digest(bad).is_err(), "{bad}");
        }
    }
}
