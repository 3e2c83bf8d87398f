//! The snapshot that `-l` selects: an id or a name, or `snapshot.id=..,snapshot.name=..`.

use gaur_engine::{Format, OpenOptions};
use gaur_format::snapshot::Snapshot;

use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::options::OptionList;
use crate::snapshot_table;

/// What the command line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotChoice {
    /// An id, else a name.
    Any(String),
    /// An id, a name or both, all of which must match.
    Exactly {
        id: Option<String>,
        name: Option<String>,
    },
}

impl SnapshotChoice {
    /// Reads the value of `-l` as qemu-img does.
    pub fn parse(text: &str) -> Result<SnapshotChoice, Failure> {
        if !text.starts_with("snapshot.") {
            return Ok(SnapshotChoice::Any(text.to_owned()));
        }
        let mut options = OptionList::parse(&[text.to_owned()])?;
        let id = options.take("snapshot.id");
        let name = options.take("snapshot.name");
        if let Some(key) = options.rest().next() {
            let failure = Failure::new(format!("option '{key}' of -l is unknown"));
            return Err(failure.hint("snapshot.id and snapshot.name are known"));
        }
        Ok(SnapshotChoice::Exactly { id, name })
    }

    /// What to open the image with: the text the engine looks for. An exact choice is looked up in
    /// the image, opened as `base` says, and becomes an id.
    pub fn resolve(&self, spec: &ImageSpec, base: &OpenOptions) -> Result<String, Failure> {
        let (id, name) = match self {
            SnapshotChoice::Any(which) => return Ok(which.clone()),
            SnapshotChoice::Exactly { id, name } => (id, name),
        };
        let file = spec.open_file(base)?;
        let fail = |message: String| Failure::about(spec.path(), message);
        let format = spec.format_of(&file)?;
        if format != Format::Qcow2 {
            return Err(fail(format!("a {format} image has no internal snapshots")));
        }
        let snapshots = snapshot_table::read(&file, &file.header()?)?;
        let is = |wanted: &Option<String>, value: &[u8]| {
            let wanted = wanted.as_ref();
            wanted.is_none_or(|wanted| wanted.as_bytes() == value)
        };
        let fits = |one: &&Snapshot| is(id, &one.id) && is(name, &one.name);
        let found = snapshots.iter().find(fits).ok_or_else(|| {
            let part = |what: &str, value: &Option<String>| {
                value.as_ref().map(|value| format!("the {what} {value:?}"))
            };
            let parts = [part("id", id), part("name", name)];
            let parts: Vec<String> = parts.into_iter().flatten().collect();
            fail(format!("no snapshot has {}", parts.join(" and ")))
        })?;
        String::from_utf8(found.id.clone())
            .map_err(|_| fail("the snapshot's id is not text".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshot_choice_parses_id_name_or_either() {
        let parse = |text: &str| SnapshotChoice::parse(text).expect("a choice");
        assert_eq!(parse("monday"), SnapshotChoice::Any("monday".to_owned()));
        assert_eq!(parse("a=b"), SnapshotChoice::Any("a=b".to_owned()));
        let exactly = |id: Option<&str>, name: Option<&str>| SnapshotChoice::Exactly {
            id: id.map(str::to_owned),
            name: name.map(str::to_owned),
        };
        assert_eq!(parse("snapshot.id=1"), exactly(Some("1"), None));
        assert_eq!(
            parse("snapshot.name=a,,b,snapshot.id=2"),
            exactly(Some("2"), Some("a,b"))
        );
        for wrong in ["snapshot.", "snapshot.foo=1", "snapshot.id"] {
            assert!(SnapshotChoice::parse(wrong).is_err(), "{wrong}");
        }
    }
}
