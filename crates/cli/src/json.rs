//! JSON in qemu-img's layout: four spaces a level, and an empty list over two lines.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::Formatter;

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

    #[test]
    fn nested_and_empty_containers() {
        let mut text = Vec::new();
        let value = serde_json::json!({"a": [], "b": {"c": [1, "x"]}});
        write(&mut text, &value).expect("writing to memory");
        let expected = "{\n    \"a\": [\n    ],\n    \"b\": {\n        \"c\": [\n            1,\n            \"x\"\n        ]\n    }\n}\n";
        assert_eq!(String::from_utf8_lossy(&text), expected);
    }
}
