//! The two forms in which QEMU's tools take the options of an image: `key=value,..` and
//! `json:{..}`. Both become one flat list of dotted keys.

use std::collections::HashSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
pub use serde_json::Value;

use crate::failure::Failure;
use crate::options::{OptionList, on_or_off};
use crate::size::parse_size;

/// What stands before options in JSON.
pub const JSON_PREFIX: &str = "json:";

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
            .map(|(key, value)| (key, Value::String(value)));
        Ok(KeyValues(items.collect()))
    }

    fn from_json(text: &str) -> Result<KeyValues, Failure> {
        let text = with_double_quotes(text);
        let JsonTree::Object(members) = serde_json::from_str(&text).map_err(invalid)? else {
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
                JsonTree::Leaf(_) if self.find_key(|other| other == key).is_some() => {
                    return Err(Failure::new(format!("option '{key}' is given twice")));
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

    /// A key that is left and for which `wanted` holds.
    pub fn find_key(&self, wanted: impl Fn(&str) -> bool) -> Option<&str> {
        let mut keys = self.0.iter().map(|(key, _)| key.as_str());
        keys.find(|key| wanted(key))
    }

    /// The text of the option called `key`, which stays.
    pub fn find(&self, key: &str) -> Option<&str> {
        let value = self.0.iter().rev().find(|(name, _)| name == key);
        value.and_then(|(_, value)| value.as_str())
    }

    /// The same without those whose keys begin so.
    pub fn without(mut self, starts: &[&str]) -> KeyValues {
        let goes = |key: &str| starts.iter().any(|start| key.starts_with(start));
        self.0.retain(|(key, _)| !goes(key));
        self
    }

    /// Goes down a level: `below` no longer stands before the keys that begin so.
    pub fn descend(&mut self, below: &str) {
        for (key, _) in &mut self.0 {
            if let Some(rest) = key.strip_prefix(below) {
                *key = rest.to_owned();
            }
        }
    }

    /// Adds an option.
    pub fn add(&mut self, key: &str, value: Value) {
        self.0.push((key.to_owned(), value));
    }

    /// All of them as `key=value,..`, which says the same.
    pub fn option_string(&self) -> String {
        let one = |(key, value): &(String, Value)| match value {
            Value::String(text) => format!("{key}={}", text.replace(',', ",,")),
            Value::Bool(on) => format!("{key}={}", if *on { "on" } else { "off" }),
            value => format!("{key}={value}"),
        };
        self.0.iter().map(one).collect::<Vec<_>>().join(",")
    }

    /// Takes the option called `key` out.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        let value = self.0.iter().rev().find(|(name, _)| name == key);
        let value = value.map(|(_, value)| value.clone());
        self.0.retain(|(name, _)| name != key);
        value
    }

    /// Takes what `read` makes of a value; the error says what is `allowed`.
    fn take_as<T>(
        &mut self,
        key: &str,
        allowed: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, Failure> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        let wrong = || {
            let shown = shown(&value);
            Failure::new(format!("option '{key}' is {shown}, it must be {allowed}"))
        };
        read(&value).map(Some).ok_or_else(wrong)
    }

    /// Takes a text.
    pub fn take_text(&mut self, key: &str) -> Result<Option<String>, Failure> {
        self.take_as(key, "a text", |value| value.as_str().map(str::to_owned))
    }

    /// Takes what is on or off.
    pub fn take_bool(&mut self, key: &str) -> Result<Option<bool>, Failure> {
        self.take_as(key, "on or off", |value| match value {
            Value::String(text) => on_or_off(text),
            value => value.as_bool(),
        })
    }

    /// Takes a number of bytes: a number, or a text with a suffix.
    pub fn take_size(&mut self, key: &str) -> Result<Option<u64>, Failure> {
        let size = self.take_as(key, "a size", |value| match value {
            Value::String(text) => Some(parse_size(text)),
            value => whole(value).map(Ok),
        })?;
        size.transpose()
            .map_err(|error| Failure::new(format!("option '{key}': {error}")))
    }

    /// Takes a whole number.
    pub fn take_number(&mut self, key: &str) -> Result<Option<u32>, Failure> {
        self.take_as(key, "a whole number below 2^32", |value| match value {
            Value::String(text) => text.parse().ok(),
            value => u32::try_from(whole(value)?).ok(),
        })
    }

    /// Takes one of a few words, and returns what it stands for.
    pub fn take_choice<T: Copy>(
        &mut self,
        key: &str,
        words: &[(&str, T)],
    ) -> Result<Option<T>, Failure> {
        let names: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        self.take_as(key, &format!("one of {}", names.join(", ")), |value| {
            let found = words.iter().find(|(word, _)| value == word);
            found.map(|(_, meaning)| *meaning)
        })
    }
}

/// A value as it was given.
pub fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => format!("'{text}'"),
        value => value.to_string(),
    }
}

/// A whole number that is not negative.
fn whole(value: &Value) -> Option<u64> {
    // Up to here they are exact in a float.
    let exact = |number: &f64| (0.0..=9_007_199_254_740_992.0).contains(number);
    let float = || {
        value
            .as_f64()
            .filter(exact)
            .filter(|number| number.fract() == 0.0)
    };
    value
        .as_u64()
        .or_else(|| float().map(|number| number as u64))
}

fn invalid(reason: impl fmt::Display) -> Failure {
    Failure::new(format!("this is not valid JSON: {reason}"))
}

/// JSON whose objects keep all that they say, also a key that they have twice.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum JsonTree {
    List(Vec<JsonTree>),
    Object(#[serde(deserialize_with = "members")] Vec<(String, JsonTree)>),
    Leaf(Value),
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

/// JSON whose strings stand in double quotes: QEMU takes single ones too, and shells make people use them.
fn with_double_quotes(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = None;
    let mut escaped = false;
    for letter in text.chars() {
        match (inside, letter) {
            (Some('\''), '\'') if escaped => {
                // Double quotes need no escape for it, and JSON has none.
                out.pop();
                out.push(letter);
            }
            (Some('\''), '"') if !escaped => out.push_str("\\\""),
            (None, '\'' | '"') => {
                inside = Some(letter);
                out.push('"');
            }
            (Some(quote), _) if letter == quote && !escaped => {
                inside = None;
                out.push('"');
            }
            _ => out.push(letter),
        }
        escaped = inside.is_some() && letter == '\\' && !escaped;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> Result<KeyValues, String> {
        KeyValues::from_file_name(text).map_err(|failure| failure.to_string())
    }

    fn text(value: &str) -> Value {
        Value::String(value.to_owned())
    }

    #[test]
    fn single_quotes_are_as_good_as_double_ones() {
        for (given, expected) in [
            (r#"{'a':'b', "c": 'd'}"#, r#"{"a":"b", "c": "d"}"#),
            (r#"{'a"b':'it\'s'}"#, r#"{"a\"b":"it's"}"#),
            (r#"{"it's":"a\"'b\\"}"#, r#"{"it's":"a\"'b\\"}"#),
            (r#"{'a':'\\','b':'\"'}"#, r#"{"a":"\\","b":"\""}"#),
            ("{'open", "{\"open"),
        ] {
            assert_eq!(with_double_quotes(given), expected);
        }
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
        assert_eq!(found.find_key(|_| true), Some("driver"));
    }

    #[test]
    fn options_are_written_as_they_are_read() {
        let given =
            r#"json:{"driver":"raw","file":{"filename":"a,b"},"offset":512,"discard":true}"#;
        let found = json(given).expect("valid JSON");
        let text = found.option_string();
        assert_eq!(text, "driver=raw,file.filename=a,,b,offset=512,discard=on");
        let again = KeyValues::from_option_string(&text).expect("options");
        assert_eq!(again.find("file.filename"), Some("a,b"));
        let less = again.without(&["off", "disc"]);
        assert_eq!(less.option_string(), "driver=raw,file.filename=a,,b");
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
            "json:{'a':1",
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
                .take_choice("c", &[("fast", 1), ("faster", 2)])
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
