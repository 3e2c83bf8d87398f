//! JSON input, with errors that name the wrong key.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde::ser::Error;
use serde_json::{Map, Value, json};

/// Reads a value. The error names the wrong key for the user who wrote it.
pub fn read<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        explain(&path, &error.into_inner().to_string())
    })
}

/// Reads the variant of an enum that is called `name` and has these fields.
pub fn read_variant<T: DeserializeOwned>(
    name: &str,
    fields: Map<String, Value>,
) -> Result<T, String> {
    serde_path_to_error::deserialize(json!({ name: fields })).map_err(|error| {
        let path = error.path().to_string();
        let rest = path.strip_prefix(name);
        let path = rest.and_then(|rest| rest.strip_prefix('.'));
        let text = error.inner().to_string();
        format!("{name}: {}", explain(path.unwrap_or("."), &text))
    })
}

/// Name and fields of the variant that an enum has.
pub fn variant(value: &impl Serialize) -> serde_json::Result<(String, Map<String, Value>)> {
    let object = match serde_json::to_value(value)? {
        Value::Object(object) => object,
        _ => Map::new(),
    };
    match object.into_iter().next() {
        Some((name, Value::Object(fields))) => Ok((name, fields)),
        _ => Err(serde_json::Error::custom("a variant without fields")),
    }
}

/// serde's error in terms of keys instead of Rust's fields.
fn explain(path: &str, text: &str) -> String {
    let named = |start: &str| {
        let (name, rest) = text.strip_prefix(start)?.split_once('`')?;
        Some((name, rest.replace('`', "\"")))
    };
    if let Some((name, rest)) = named("unknown field `") {
        return match rest.split_once("expected ") {
            Some((_, known)) => format!("key \"{name}\" is unknown, expected {known}"),
            None => format!("key \"{name}\" is unknown"),
        };
    }
    match named("missing field `") {
        Some((name, _)) => format!("\"{name}\" is missing"),
        None if path == "." => text.to_owned(),
        None => format!("\"{path}\": {text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "export-add: nbd: unknown field `colour`, there are no fields", and for a value of the wrong type
    /// not even the key.
    #[test]
    fn errors_name_the_key() {
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Nothing {}
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        #[expect(dead_code, reason = "it is never read whole")]
        struct Two {
            size: u64,
            shrink: bool,
        }
        let wrong =
            |text: &str| read::<Two>(serde_json::from_str(text).expect("json")).expect_err(text);
        assert_eq!(wrong(r#"{"size":1}"#), r#""shrink" is missing"#);
        assert_eq!(
            wrong(r#"{"size":1,"colour":2}"#),
            r#"key "colour" is unknown, expected "size" or "shrink""#
        );
        assert_eq!(
            wrong(r#"{"size":1,"shrink":"yes"}"#),
            r#""shrink": invalid type: string "yes", expected a boolean"#
        );
        let none = read::<Nothing>(serde_json::json!({ "colour": 1 }));
        assert_eq!(none.expect_err("unknown"), r#"key "colour" is unknown"#);
    }
}
