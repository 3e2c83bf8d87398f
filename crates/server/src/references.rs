//! What an image may have opened, as command lines and the control socket say it.

use std::path::{Path, PathBuf};

use gaur_engine::References;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::open;

/// Which files the images may refer to, besides regular files in their own directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ReferenceOptions {
    /// Let the image refer to this file or NBD export, or to the files in this directory, besides those in its
    /// own directory
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "PATH"))]
    pub allow: Vec<PathBuf>,
    /// Let the image refer to any file
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[cfg_attr(feature = "clap", arg(long))]
    pub allow_any: bool,
    /// The image may be an attacker's: it may refer to no file, and its format is not guessed to write to it
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[cfg_attr(feature = "clap", arg(long, conflicts_with_all = ["allow", "allow_any"]))]
    pub untrusted: bool,
}

/// Advice to who opens an image whose reference was refused.
pub(crate) fn hint(references: &References) -> &'static str {
    match references {
        References::Nothing => "without --untrusted those in its own directory are opened",
        _ => {
            "--allow PATH permits a file, those in a directory, an NBD export, or what is below the name of a store; --allow-any permits all"
        }
    }
}

impl ReferenceOptions {
    /// Whether nothing is said.
    pub fn is_default(&self) -> bool {
        *self == ReferenceOptions::default()
    }

    /// The same for the engine.
    pub fn references(&self) -> References {
        match self {
            options if options.untrusted => References::Nothing,
            options if options.allow_any => References::Any,
            options if options.allow.is_empty() => References::Beside,
            options => References::Allowed(options.allow.clone()),
        }
    }

    /// The same for an overlay over `base`, which the command has made by its user's word.
    pub fn over(&self, base: &Path) -> ReferenceOptions {
        match self.references().over(base) {
            References::Allowed(allow) => ReferenceOptions {
                allow,
                ..ReferenceOptions::default()
            },
            _ => self.clone(),
        }
    }

    /// The same for a process that may run in another directory.
    pub fn absolute(mut self) -> Result<ReferenceOptions, Failure> {
        for path in &mut self.allow {
            *path = open::absolute(path)?;
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_choose_the_policy_and_the_default_is_the_own_directory() {
        let options = ReferenceOptions::default();
        assert_eq!(options.references(), References::Beside);
        let options = ReferenceOptions {
            allow: vec!["/bases".into()],
            ..ReferenceOptions::default()
        };
        let allowed = References::Allowed(vec!["/bases".into()]);
        assert_eq!(options.references(), allowed);
        let options = ReferenceOptions {
            allow_any: true,
            ..options
        };
        assert_eq!(options.references(), References::Any);
        let options = ReferenceOptions {
            untrusted: true,
            ..options
        };
        assert_eq!(options.references(), References::Nothing);
    }
}
