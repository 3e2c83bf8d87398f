//! JSON in qemu-img's layout: four spaces a level, and an empty list over two lines.

use std::io::{self, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::ser::Formatter;

/// Reads a value. The error names the wrong key for the user who wrote it.
pub fn read<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        explain(&path, &error.into_inner().to_string())
    })
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

struct Layout {
    depth: usize,
}

impl Layout {
    fn line<W: ?Sized + Write>(&self, out: &mut W) -> io::Result<()> {
        out.write_all(b"\n")?;
        for _ in 0..self.depth {
            out.write_all(b"    ")?;
        }
        Ok(())
    }

    fn begin<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        out.write_all(bracket)
    }

    fn item<W: ?Sized + Write>(&self, out: &mut W, first: bool) -> io::Result<()> {
        if !first {
            out.write_all(b",")?;
        }
        self.line(out)
    }

    fn end<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        self.line(out)?;
        out.write_all(bracket)
    }
}

impl Formatter for Layout {
    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.item(out, first)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.item(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

/// Writes `value` and a line end.
pub fn write(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    let mut text = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, Layout { depth: 0 });
    value.serialize(&mut serializer).map_err(io::Error::other)?;
    text.push(b'\n');
    out.write_all(&text)
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

    #[test]
    fn nested_and_empty_containers() {
        let mut text = Vec::new();
        let value = serde_json::json!({"a": [], "b": {"c": [1, "x"]}});
        write(&mut text, &value).expect("writing to memory");
        let expected = "{\n    \"a\": [\n    ],\n    \"b\": {\n        \"c\": [\n            1,\n            \"x\"\n        ]\n    }\n}\n";
        assert_eq!(String::from_utf8_lossy(&text), expected);
    }
}
