//! What is told about an export, and what one that is to be is told, in JSON.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

use super::{Export, Exporter, ImageOptions, NewExport};
use crate::failure::Failure;
use crate::fronts::FrontConfig;
use crate::image_spec::ImageSpec;
use crate::json;

/// An export as others see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ExportFacts {
    /// What it is called.
    pub name: String,
    /// What its clients speak.
    #[serde(rename = "type")]
    pub kind: String,
    /// Where clients find it.
    pub place: String,
    /// The image.
    pub file: String,
    /// Size for the guest, in bytes.
    pub virtual_size: u64,
    /// Whether clients may not write.
    pub read_only: bool,
    /// How many there are, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clients: Option<usize>,
    /// What fails, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

impl Exporter {
    /// What there is to say about all exports.
    pub fn all_facts(&self) -> Vec<ExportFacts> {
        let exports = self.exports();
        exports.iter().map(|export| self.facts(export)).collect()
    }

    /// What there is to say about an export.
    pub fn facts(&self, export: &Export) -> ExportFacts {
        let of_nbd = export.config.is_nbd();
        let clients = of_nbd.then(|| self.nbd_clients(&export.name)).flatten();
        ExportFacts {
            name: export.name.clone(),
            kind: export.config.name().to_owned(),
            place: export.place.clone(),
            file: export.served.name().to_owned(),
            virtual_size: export.served.size_bytes(),
            read_only: export.served.read_only,
            clients,
            trouble: export.served.health.trouble(),
        }
    }
}

/// An export that is to be, as the control socket has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddExport {
    /// The image, as the command line names it.
    pub file: String,
    /// For people.
    pub description: String,
    /// How the image is opened.
    pub image: ImageOptions,
    /// The front end.
    pub front: FrontConfig,
}

/// The keys of [`ImageOptions`] in JSON.
const IMAGE_KEYS: [&str; 17] = [
    "format",
    "image-opts",
    "references",
    "keys",
    "read-only",
    "snapshot",
    "temporary",
    "cache",
    "discard",
    "detect-zeroes",
    "copy-on-read",
    "allocation",
    "drop-bitmaps",
    "bitmap",
    "allocation-depth",
    "offset",
    "handover",
];

impl AddExport {
    /// Reads the fields of a JSON object; the error is for the client.
    pub fn from_fields(mut fields: Map<String, Value>) -> Result<AddExport, String> {
        let mut text = |key: &str| match fields.remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(format!("\"{key}\" is not text")),
        };
        let kind = text("type")?.unwrap_or_else(|| "nbd".to_owned());
        let file = text("file")?.filter(|file| !file.is_empty());
        let description = text("description")?.unwrap_or_default();
        if !FrontConfig::NAMES.contains(&&*kind) {
            let known = FrontConfig::NAMES.join(", ");
            return Err(format!("type {kind:?} is unknown, there are {known}"));
        }
        let image: Map<String, Value> = IMAGE_KEYS
            .iter()
            .filter_map(|key| Some(((*key).to_owned(), fields.remove(*key)?)))
            .collect();
        let image = json::read(Value::Object(image));
        Ok(AddExport {
            file: file.ok_or("\"file\" is missing")?,
            description,
            image: image?,
            front: json::read_variant(&kind, fields)?,
        })
    }

    /// The fields of a JSON object that say the same.
    pub fn fields(&self) -> Result<Map<String, Value>, Failure> {
        let not_text = |_| {
            let message = "a path is not valid UTF-8, and it is told to the server in JSON";
            Failure::new(message).hint("a link by another name will do")
        };
        let mut fields = Map::new();
        fields.insert("type".to_owned(), json!(self.front.name()));
        fields.insert("file".to_owned(), json!(self.file));
        if !self.description.is_empty() {
            fields.insert("description".to_owned(), json!(self.description));
        }
        let image = serde_json::to_value(&self.image).map_err(not_text)?;
        let (_, front) = json::variant(&self.front).map_err(not_text)?;
        fields.extend(image.as_object().cloned().unwrap_or_default());
        fields.extend(front);
        Ok(fields)
    }

    /// The export that it describes, called `name`.
    pub fn named(self, name: Option<String>) -> Result<NewExport, Failure> {
        let image = self.image;
        let spec = ImageSpec::parse(&self.file, image.image_opts, image.format)?;
        Ok(NewExport {
            name: name.unwrap_or_else(|| crate::export_name::stem(spec.path())),
            spec,
            image,
            description: self.description,
            front: self.front,
        })
    }
}

impl Serialize for AddExport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let fields = self.fields().map_err(serde::ser::Error::custom)?;
        fields.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for AddExport {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<AddExport, D::Error> {
        let fields = Map::deserialize(deserializer)?;
        AddExport::from_fields(fields).map_err(serde::de::Error::custom)
    }
}

impl From<&NewExport> for AddExport {
    fn from(new: &NewExport) -> AddExport {
        AddExport {
            file: new.spec.given().to_string_lossy().into_owned(),
            description: new.description.clone(),
            image: new.image.clone(),
            front: new.front.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fronts::{fuse, ublk, vduse, vhost_user};

    fn fronts() -> Vec<FrontConfig> {
        vec![
            FrontConfig::Nbd {},
            FrontConfig::Ublk(ublk::Config::default()),
            FrontConfig::Ublk(ublk::Config {
                id: Some(7),
                queues: std::num::NonZeroU16::new(2),
                depth: std::num::NonZeroU16::new(64),
                unprivileged: true,
                zero_copy: ublk::ZeroCopy::Off,
                recover: false,
            }),
            FrontConfig::VhostUser(vhost_user::Config {
                socket: "/run/disk.sock".into(),
                queues: std::num::NonZeroU16::new(4),
            }),
            FrontConfig::Vduse(vduse::Config {
                device: "disk".to_owned(),
                queues: None,
            }),
            FrontConfig::Fuse(fuse::Config {
                path: "/mnt/disk.raw".into(),
                growable: true,
            }),
        ]
    }

    #[test]
    fn exports_to_be_read_back() {
        for front in fronts() {
            let add = AddExport {
                file: "/images/disk.qcow2".to_owned(),
                description: "mine".to_owned(),
                image: ImageOptions {
                    read_only: true,
                    snapshot: Some("one".to_owned()),
                    ..ImageOptions::default()
                },
                front,
            };
            assert_eq!(AddExport::from_fields(add.fields().expect("text")), Ok(add));
        }
    }

    #[test]
    fn every_option_of_an_image_has_its_key() {
        let all = ImageOptions {
            format: Some(gaur_engine::Format::Raw),
            snapshot: Some(String::new()),
            allocation: Some(gaur_engine::AllocationPolicy::Compact),
            bitmap: vec!["daily".to_owned()],
            allocation_depth: true,
            offset: 512,
            handover: Some("/run/log".into()),
            references: crate::references::ReferenceOptions {
                untrusted: true,
                ..Default::default()
            },
            keys: crate::keys::KeyOptions {
                objects: Vec::new(),
                key_file: Some("key".into()),
                inline_secrets: false,
            },
            ..ImageOptions::default()
        };
        let json = json!(all);
        let keys = json.as_object().expect("an object").keys();
        let keys: Vec<&str> = keys.map(String::as_str).collect();
        assert_eq!(keys, IMAGE_KEYS);
    }

    #[test]
    fn wrong_fields_are_refused_by_name() {
        for (line, word) in [
            (r#"{"type":"nbd"}"#, "file"),
            (r#"{"file":7}"#, "file"),
            (r#"{"file":"a","type":"iscsi"}"#, "vhost-user"),
            (r#"{"file":"a","colour":"red"}"#, "colour"),
            (r#"{"file":"a","queues":2}"#, "queues"),
            (r#"{"file":"a","type":"ublk","queues":0}"#, "ublk"),
            (r#"{"file":"a","type":"ublk","recover":true}"#, "recover"),
            (r#"{"file":"a","type":"vhost-user"}"#, "socket"),
            (r#"{"file":"a","cache":"warm"}"#, "warm"),
        ] {
            let fields = serde_json::from_str(line).expect("json");
            let error = AddExport::from_fields(fields).expect_err(line);
            assert!(error.contains(word), "{line}: {error}");
        }
    }
}
