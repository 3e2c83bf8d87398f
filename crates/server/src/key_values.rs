//! The two forms in which QEMU's tools take the options of an image: `key=value,..` and
//! `json:{..}`. Both become one flat list of dotted keys.

use std::collections::HashSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use crate::failure::Failure;
use crate::options::OptionList;
use crate::size::parse_size;

/// What stands before options in JSON.
pub const JSON_PREFIX: &str = "json:";

/// A value as it was given.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// Of an option string, or a JSON string.
    Text(String),
    /// JSON's `true` or `false`.
    Bool(bool),
    /// A JSON number that is a whole one and not negative.
    Number(u64),
    /// Any other JSON number, which no option takes.
    OtherNumber(f64),
    /// JSON's `null`.
    Null,
}

impl fmt::Display for Value {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Text(text) => write!(out, "'{text}'"),
            Value::Bool(bool) => write!(out, "{bool}"),
            Value::Number(number) => write!(out, "{number}"),
            Value::OtherNumber(number) => write!(out, "{number}"),
            Value::Null => out.write_str("null"),
        }
    }
}

/// Options by dotted key, until they are taken out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeyValues(Vec<(String, Value)>);

impl KeyValues {
    /// The options in a file name of the form `json:{..}`.
    pub fn from_file_name(name: &str) -> Result<KeyValues, Failure> {
        KeyValues::from_json(name.strip_prefix(JSON_PREFIX).unwrap_or(name))
    }

    /// The options in `key=value,..`; the last of several of one name counts.
    pub fn from_option_string(text: &str) -> Result<KeyValues, Failure> {
        let first = text.split(',').next().unwrap_or_default();
        if !first.contains('=') || text.starts_with(JSON_PREFIX) {
            let failure = Failure::new("--image-opts wants KEY=VALUE,.. and this is none");
            return Err(failure.hint("leave --image-opts out to name a file"));
        }
        let list = OptionList::parse(&[text.to_owned()]);
        let list = list.map_err(|failure| failure.hint("a comma in a value is written twice"))?;
        let items = list
            .into_items()
            .map(|(key, value)| (key, Value::Text(value)));
        Ok(KeyValues(items.collect()))
    }

    fn from_json(text: &str) -> Result<KeyValues, Failure> {
        let JsonTree::Object(members) = serde_json::from_str(text).map_err(invalid)? else {
            return Err(Failure::new("the options in JSON must be one object, {..}"));
        };
        let mut found = KeyValues::default();
        found.flatten("", members)?;
        Ok(found)
    }

    /// Adds the members of an object; their keys begin with `start`.
    fn flatten(&mut self, start: &str, members: Vec<(String, JsonTree)>) -> Result<(), Failure> {
        let mut names = HashSet::new();
        if let Some((name, _)) = members.iter().find(|(name, _)| !names.insert(name)) {
            return Err(invalid(format_args!("key {name:?} is there twice")));
        }
        for (name, tree) in members {
            let key = format!("{start}{name}");
            match tree {
                JsonTree::Leaf(_) if self.has(&key) => {
                    return Err(Failure::new(format!("option '{key}' is given twice")));
                }
                // Whole numbers up to here are exact in a float.
                JsonTree::Leaf(Value::OtherNumber(number))
                    if number.fract() == 0.0
                        && (0.0..=9_007_199_254_740_992.0).contains(&number) =>
                {
                    self.0.push((key, Value::Number(number as u64)));
                }
                JsonTree::Leaf(value) => self.0.push((key, value)),
                JsonTree::Object(members) => self.flatten(&format!("{key}."), members)?,
                JsonTree::List(items) => {
                    let numbered = items.into_iter().enumerate();
                    let members = numbered.map(|(index, item)| (index.to_string(), item));
                    self.flatten(&format!("{key}."), members.collect())?;
                }
            }
        }
        Ok(())
    }

    fn has(&self, key: &str) -> bool {
        self.0.iter().any(|(name, _)| name == key)
    }

    /// A key that is left.
    pub fn first_key(&self) -> Option<&str> {
        self.0.first().map(|(key, _)| key.as_str())
    }

    /// A key that is left and for which `wanted` holds.
    pub fn find_key(&self, wanted: impl Fn(&str) -> bool) -> Option<&str> {
        let mut keys = self.0.iter().map(|(key, _)| key.as_str());
        keys.find(|key| wanted(key))
    }

    /// Takes the option called `key` out.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        let value = self.0.iter().rev().find(|(name, _)| name == key);
        let value = value.map(|(_, value)| value.clone());
        self.0.retain(|(name, _)| name != key);
        value
    }

    /// Takes a text.
    pub fn take_text(&mut self, key: &str) -> Result<Option<String>, Failure> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(key, &other, "a text")),
        }
    }

    /// Takes what is on or off.
    pub fn take_bool(&mut self, key: &str) -> Result<Option<bool>, Failure> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        let bool = match &value {
            Value::Bool(bool) => Some(*bool),
            Value::Text(text) => match text.as_str() {
                "on" | "yes" | "true" | "y" => Some(true),
                "off" | "no" | "false" | "n" => Some(false),
                _ => None,
            },
            _ => None,
        };
        bool.map(Some)
            .ok_or_else(|| wrong(key, &value, "on or off"))
    }

    /// Takes a number of bytes: a number, or a text with a suffix.
    pub fn take_size(&mut self, key: &str) -> Result<Option<u64>, Failure> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Number(number)) => Ok(Some(number)),
            Some(Value::Text(text)) => match parse_size(&text) {
                Ok(size) => Ok(Some(size)),
                Err(error) => Err(Failure::new(format!("option '{key}': {error}"))),
            },
            Some(other) => Err(wrong(key, &other, "a size")),
        }
    }

    /// Takes a whole number.
    pub fn take_number(&mut self, key: &str) -> Result<Option<u32>, Failure> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        let number = match &value {
            Value::Number(number) => u32::try_from(*number).ok(),
            Value::Text(text) => text.parse().ok(),
            _ => None,
        };
        let allowed = "a whole number below 2^32";
        number.map(Some).ok_or_else(|| wrong(key, &value, allowed))
    }

    /// Takes one of a few words and returns its place in `words`.
    pub fn take_choice(&mut self, key: &str, words: &[&str]) -> Result<Option<usize>, Failure> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        let place = match &value {
            Value::Text(text) => words.iter().position(|word| word == text),
            _ => None,
        };
        let allowed = || format!("one of {}", words.join(", "));
        place
            .map(Some)
            .ok_or_else(|| wrong(key, &value, &allowed()))
    }
}

fn wrong(key: &str, value: &Value, allowed: &str) -> Failure {
    Failure::new(format!("option '{key}' is {value}, it must be {allowed}"))
}

fn invalid(reason: impl fmt::Display) -> Failure {
    Failure::new(format!("this is not valid JSON: {reason}"))
}

/// JSON whose objects keep all that they say, also a key that they have twice.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum JsonTree {
    Leaf(Value),
    List(Vec<JsonTree>),
    Object(#[serde(deserialize_with = "members")] Vec<(String, JsonTree)>),
}

fn members<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(String, JsonTree)>, D::Error> {
    struct Members;

    impl<'de> Visitor<'de> for Members {
        type Value = Vec<(String, JsonTree)>;

        fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            std::iter::from_fn(|| map.next_entry().transpose()).collect()
        }
    }
    from.deserialize_map(Members)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> Result<KeyValues, String> {
        KeyValues::from_file_name(text).map_err(|failure| failure.to_string())
    }

    fn text(value: &str) -> Value {
        Value::Text(value.to_owned())
    }

    #[test]
    fn nested_and_dotted_keys_are_the_same() {
        let nested =
            json(r#"json:{"driver":"qcow2","file":{"driver":"file","cache":{"direct":true}}}"#);
        let dotted =
            json(r#"json: {"driver":"qcow2","file.driver":"file","file.cache.direct":true}"#);
        assert_eq!(nested, dotted);
        let mut found = nested.expect("valid JSON");
        assert_eq!(found.take("file.driver"), Some(text("file")));
        assert_eq!(
            found.take_bool("file.cache.direct").expect("a bool"),
            Some(true)
        );
        assert_eq!(found.first_key(), Some("driver"));
    }

    #[test]
    fn duplicate_json_key_is_refused() {
        for name in [
            r#"json:{"driver":"qcow2","driver":"raw"}"#,
            r#"json:{"file":{"filename":"a"},"file.filename":"b"}"#,
        ] {
            assert!(json(name).expect_err(name).contains("twice"), "{name}");
        }
        let mut found = KeyValues::from_option_string("driver=qcow2,driver=raw").expect("options");
        assert_eq!(found.take("driver"), Some(text("raw")));
    }

    #[test]
    fn invalid_json_is_refused_in_one_line() {
        for name in [
            "json:",
            "json:{",
            "json:[]",
            "json:1",
            "json:{} x",
            "json:{'a':1}",
        ] {
            let message = json(name).expect_err(name);
            assert_eq!(message.lines().count(), 1, "{message}");
        }
    }

    #[test]
    fn file_name_is_refused_as_option_string() {
        for given in ["disk.qcow2", "disk,a=b", "", r#"json:{"a":"b=c"}"#] {
            let failure = KeyValues::from_option_string(given).expect_err(given);
            assert!(failure.to_string().contains("--image-opts"), "{failure}");
        }
    }

    #[test]
    fn sizes_are_numbers_or_texts_with_suffixes() {
        let mut found = json(r#"json:{"a":65536,"b":"64k","c":65536.0,"d":1.5,"e":-1,"f":true}"#)
            .expect("valid JSON");
        for key in ["a", "b", "c"] {
            assert_eq!(found.take_size(key).expect(key), Some(65536), "{key}");
        }
        for key in ["d", "e", "f"] {
            assert!(found.take_size(key).is_err(), "{key}");
        }
        assert_eq!(found.take_size("g").expect("nothing"), None);
    }

    #[test]
    fn option_errors_name_the_key() {
        let mut found = KeyValues::from_option_string("a=maybe,b=5x,c=slow").expect("options");
        let told = [
            found.take_bool("a").expect_err("not a bool").to_string(),
            found
                .take_number("b")
                .expect_err("not a number")
                .to_string(),
            found
                .take_choice("c", &["fast", "faster"])
                .expect_err("not among them")
                .to_string(),
        ];
        assert_eq!(
            told,
            [
                "option 'a' is 'maybe', it must be on or off",
                "option 'b' is '5x', it must be a whole number below 2^32",
                "option 'c' is 'slow', it must be one of fast, faster",
            ]
        );
    }

    #[test]
    fn deep_nesting_is_refused_and_not_followed() {
        let name = format!("json:{}", "{\"a\":".repeat(100_000));
        assert!(json(&name).is_err());
    }
}
