//! Distinguished names as text, out of a certificate's DER: `C=a,O=b,CN=c`, in the order in which the certificate has
//! them and escaped as in RFC 4514, which is how QEMU's authorization objects have them.
//!
//! The bytes are those of a certificate whose signature was checked; they are walked with bounds all the same.

use std::fmt::Write;

/// A tag of DER and its content.
struct Element<'a> {
    tag: u8,
    content: &'a [u8],
}

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT_IDENTIFIER: u8 = 0x06;
const BMP_STRING: u8 = 0x1e;
/// UTF8String, PrintableString, TeletexString, IA5String.
const TEXT: [u8; 4] = [0x0c, 0x13, 0x14, 0x16];

const COMMON_NAME: &[u8] = &[0x55, 4, 3];

/// Object identifiers as DER has them, and their short names.
const ATTRIBUTES: [(&[u8], &str); 15] = [
    (COMMON_NAME, "CN"),
    (&[0x55, 4, 4], "surName"),
    (&[0x55, 4, 5], "serialNumber"),
    (&[0x55, 4, 6], "C"),
    (&[0x55, 4, 7], "L"),
    (&[0x55, 4, 8], "ST"),
    (&[0x55, 4, 9], "STREET"),
    (&[0x55, 4, 10], "O"),
    (&[0x55, 4, 11], "OU"),
    (&[0x55, 4, 12], "title"),
    (&[0x55, 4, 17], "postalCode"),
    (&[0x55, 4, 42], "givenName"),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 1], "EMAIL"),
    (
        &[0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 1, 1],
        "UID",
    ),
    (
        &[0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 1, 25],
        "DC",
    ),
];

/// The next element, taken off the front.
fn next<'a>(from: &mut &'a [u8]) -> Option<Element<'a>> {
    let (&tag, rest) = from.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (len, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81 => {
            let (&len, rest) = rest.split_first()?;
            (usize::from(len), rest)
        }
        0x82 => {
            let (len, rest) = rest.split_first_chunk::<2>()?;
            (usize::from(u16::from_be_bytes(*len)), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(len)?;
    *from = rest;
    Some(Element { tag, content })
}

fn next_of<'a>(from: &mut &'a [u8], tag: u8) -> Option<&'a [u8]> {
    next(from)
        .filter(|found| found.tag == tag)
        .map(|found| found.content)
}

/// A part of a name: attributes, each with its identifier and its value.
type Part<'a> = Vec<(&'a [u8], Element<'a>)>;

/// The parts of a name.
fn parts(mut name: &[u8]) -> Option<Vec<Part<'_>>> {
    let mut parts = Vec::new();
    while !name.is_empty() {
        let mut set = next_of(&mut name, SET)?;
        let mut attributes = Vec::new();
        while !set.is_empty() {
            let mut attribute = next_of(&mut set, SEQUENCE)?;
            let identifier = next_of(&mut attribute, OBJECT_IDENTIFIER)?;
            attributes.push((identifier, next(&mut attribute)?));
        }
        parts.push(attributes);
    }
    Some(parts)
}

fn text_of(value: &Element<'_>) -> Option<String> {
    match value.tag {
        BMP_STRING => {
            let units = value.content.chunks_exact(2);
            let units = units.map(|unit| u16::from_be_bytes([unit[0], unit[1]]));
            Some(String::from_utf16_lossy(&units.collect::<Vec<_>>()))
        }
        tag if TEXT.contains(&tag) => Some(String::from_utf8_lossy(value.content).into_owned()),
        _ => None,
    }
}

/// The name, whose DER is `subject` (the content of its sequence), as text.
pub(crate) fn text(subject: &[u8]) -> Option<String> {
    let mut text = String::new();
    for part in &parts(subject)? {
        if !text.is_empty() {
            text.push(',');
        }
        for (at, (identifier, value)) in part.iter().enumerate() {
            if at > 0 {
                text.push('+');
            }
            let known = ATTRIBUTES.iter().find(|(bytes, _)| bytes == identifier);
            match (known, text_of(value)) {
                (Some((_, name)), Some(value)) => {
                    text.push_str(name);
                    text.push('=');
                    escape(&mut text, &value);
                }
                _ => {
                    dotted(&mut text, identifier);
                    text.push_str("=#");
                    for byte in value.content {
                        let _ = write!(text, "{byte:02x}");
                    }
                }
            }
        }
    }
    Some(text)
}

/// The last common name.
pub(crate) fn common_name(subject: &[u8]) -> Option<String> {
    let parts = parts(subject)?;
    let attributes = parts.iter().rev().flatten();
    let mut names = attributes.filter(|(identifier, _)| *identifier == COMMON_NAME);
    text_of(&names.next()?.1)
}

fn escape(out: &mut String, value: &str) {
    let last = value.chars().count().saturating_sub(1);
    for (at, letter) in value.chars().enumerate() {
        let edge = (at == 0 && "# ".contains(letter)) || (at == last && letter == ' ');
        if edge || ",+\"\\<>;".contains(letter) {
            out.push('\\');
        }
        out.push(letter);
    }
}

/// An object identifier as numbers.
fn dotted(out: &mut String, identifier: &[u8]) {
    let mut arcs = Vec::new();
    let mut arc = 0_u64;
    for byte in identifier {
        arc = arc.wrapping_shl(7) | u64::from(byte & 0x7f);
        if byte & 0x80 == 0 {
            arcs.push(std::mem::take(&mut arc));
        }
    }
    let Some((first, rest)) = arcs.split_first() else {
        return;
    };
    let top = (first / 40).min(2);
    let _ = write!(out, "{top}.{}", first - top * 40);
    for arc in rest {
        let _ = write!(out, ".{arc}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn element(tag: u8, content: &[u8]) -> Vec<u8> {
        let len = u8::try_from(content.len()).expect("short");
        [&[tag, len], content].concat()
    }

    fn part(identifier: &[u8], tag: u8, value: &[u8]) -> Vec<u8> {
        let attribute = [element(OBJECT_IDENTIFIER, identifier), element(tag, value)].concat();
        element(SET, &element(SEQUENCE, &attribute))
    }

    #[test]
    fn names_are_written_in_their_order_and_escaped() {
        let name = [
            part(&[0x55, 4, 6], 0x13, b"South Pacific"),
            part(&[0x55, 4, 7], 0x0c, b"R'lyeh"),
            part(&[0x55, 4, 10], 0x0c, b"Great, Old+Ones "),
            part(&[0x55, 4, 3], 0x0c, b"localhost"),
        ]
        .concat();
        let expected = r"C=South Pacific,L=R'lyeh,O=Great\, Old\+Ones\ ,CN=localhost";
        assert_eq!(text(&name).as_deref(), Some(expected));
        assert_eq!(common_name(&name).as_deref(), Some("localhost"));
    }

    #[test]
    fn unknown_attributes_are_numbers() {
        let name = part(&[0x2a, 0x86, 0x48, 3], 0x02, &[1, 255]);
        assert_eq!(text(&name).as_deref(), Some("1.2.840.3=#01ff"));
        assert_eq!(common_name(&name), None);
    }

    #[test]
    fn malformed_names_yield_none() {
        let name = part(&[0x55, 4, 3], 0x0c, b"localhost");
        for len in 1..name.len() {
            assert_eq!(text(&name[..len]), None, "{len}");
        }
        assert_eq!(text(&[SET, 0x83, 1, 0, 0]), None);
        assert_eq!(text(&[]).as_deref(), Some(""));
    }
}
