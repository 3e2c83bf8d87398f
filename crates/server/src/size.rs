//! Size parsing and formatting: `1.5G`, `0x100000`, `4 KiB`.
//!
//! What is accepted and how it is rounded is what qemu-img does, so that scripts can switch.

use std::num::IntErrorKind;

use gaur_engine::ErrorKind;

use crate::failure::Failure;

/// The largest size an image may have, in bytes: offsets are signed in the tools of this format.
pub const SIZE_MAX: u64 = i64::MAX as u64;

fn not_a_size(text: &str) -> String {
    format!("'{text}' is not a size: expected bytes, or a number with one of k M G T P E")
}

/// Bytes per unit of a suffix letter.
fn unit(letter: char) -> Option<u64> {
    let place = "bkmgtpe".find(letter.to_ascii_lowercase())?;
    Some(1 << (10 * place))
}

/// Reads a size in bytes: decimal with an optional fraction and an optional suffix (b k M G T P E,
/// powers of 1024, either case), or hexadecimal with `0x` and no suffix. Space and a plus before it
/// do not matter. At most [`SIZE_MAX`].
pub fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = |too_large| match too_large {
        true => format!("size '{text}' is larger than {SIZE_MAX} bytes"),
        false => not_a_size(text),
    };
    let number = text.trim_ascii_start();
    let number = number.strip_prefix('+').unwrap_or(number);
    let value = if let Some(digits) = number.strip_prefix("0x").or(number.strip_prefix("0X")) {
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(wrong(false));
        }
        u128::from_str_radix(digits, 16).map_err(|_| wrong(true))?
    } else {
        let (number, scale) = match number.chars().last().and_then(unit) {
            Some(scale) => (&number[..number.len() - 1], scale),
            None => (number, 1),
        };
        parse_decimal(number, scale).map_err(wrong)?
    };
    match u64::try_from(value) {
        Ok(bytes) if bytes <= SIZE_MAX => Ok(bytes),
        _ => Err(wrong(true)),
    }
}

/// `number` times `scale`, rounded to the nearest byte; the error says whether it is too large.
fn parse_decimal(number: &str, scale: u64) -> Result<u128, bool> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(fraction) || (whole.is_empty() && fraction.is_empty()) {
        return Err(false);
    }
    let units: u128 = match whole {
        "" => 0,
        _ => whole.parse().map_err(|_| true)?,
    };
    // More digits than a double holds change nothing that a byte could show.
    let part: f64 = match fraction {
        "" => 0.0,
        _ => format!("0.{fraction}").parse().map_err(|_| false)?,
    };
    if part > 0.0 && scale == 1 {
        return Err(false); // half a byte
    }
    let bytes = units.checked_mul(u128::from(scale)).ok_or(true)?;
    let rest = (part * scale as f64 + 0.5) as u128;
    bytes.checked_add(rest).ok_or(true)
}

/// Reads a whole number as C's strtol: decimal, hexadecimal with `0x`, octal with `0`, with space and a plus before it if
/// need be. Programs pass `-e 2` as one word.
pub fn parse_whole_number<N: TryFrom<u64>>(text: &str) -> Result<N, String> {
    let number = text.trim_ascii_start();
    let number = number.strip_prefix('+').unwrap_or(number);
    let (digits, radix) = match number.strip_prefix("0x").or(number.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None if number.starts_with('0') => (number, 8),
        None => (number, 10),
    };
    if !digits.starts_with(|first: char| first.is_digit(radix)) {
        return Err("not a whole number".to_owned());
    }
    let value = u64::from_str_radix(digits, radix).map_err(|error| match error.kind() {
        IntErrorKind::PosOverflow => "too large".to_owned(),
        _ => "not a whole number".to_owned(),
    })?;
    N::try_from(value).map_err(|_| "too large".to_owned())
}

/// How the virtual size of an image is to change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewSize {
    /// This many bytes.
    Exactly(u64),
    /// This many bytes more.
    More(u64),
    /// This many bytes less.
    Less(u64),
}

/// Reads `SIZE`, `+SIZE` or `-SIZE`.
pub fn parse_new_size(text: &str) -> Result<NewSize, String> {
    // A change has one sign, and its number follows at once.
    let change = |size: &str| match size.starts_with(['+', '-', ' ', '\t']) || size.is_empty() {
        false => parse_size(size),
        true => Err(not_a_size(text)),
    };
    if let Some(more) = text.strip_prefix('+') {
        change(more).map(NewSize::More)
    } else if let Some(less) = text.strip_prefix('-') {
        change(less).map(NewSize::Less)
    } else {
        parse_size(text).map(NewSize::Exactly)
    }
}

/// A size for people, with three significant digits: `0 B`, `1.27 MiB`, `10 GiB`.
pub fn human(bytes: u64) -> String {
    const SUFFIXES: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    // The next unit is used from 1000 of the smaller one on, so that three digits are enough.
    let mut power = 0;
    while power + 1 < SUFFIXES.len() && bytes as f64 / unit_size(power) >= 1000.0 {
        power += 1;
    }
    let value = bytes as f64 / unit_size(power);
    format!("{} {}B", three_digits(value), SUFFIXES[power])
}

fn unit_size(power: usize) -> f64 {
    (1u64 << (10 * power)) as f64
}

/// `value` (0 to below 1000) as C's `%.3g` writes it.
fn three_digits(value: f64) -> String {
    let decimals = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else if value >= 1.0 || value == 0.0 {
        2
    } else {
        3
    };
    let text = format!("{value:.decimals$}");
    if text.starts_with("1000") {
        return "1e+03".to_owned(); // 999.5 and more need a fourth digit
    }
    if text.contains('.') {
        let trimmed = text.trim_end_matches('0').trim_end_matches('.');
        return trimmed.to_owned();
    }
    text
}

/// The new size in bytes of an image that has `old`.
pub fn checked(image: &str, old: u64, size: NewSize, shrink: bool) -> Result<u64, Failure> {
    let fail = |message: &str| Failure::about(image, message).kind(ErrorKind::InvalidInput);
    let new = match size {
        NewSize::Exactly(size) => Some(size),
        NewSize::More(more) => old.checked_add(more),
        NewSize::Less(less) => match old.checked_sub(less) {
            Some(size) => Some(size),
            None => return Err(fail("cannot take away more than there is")),
        },
    };
    let new = new.filter(|size| *size <= SIZE_MAX);
    let new =
        new.ok_or_else(|| fail(&format!("the size would be larger than {SIZE_MAX} bytes")))?;
    if new < old && !shrink {
        let failure = fail(&format!(
            "the new size of {new} bytes is smaller than the old of {old}"
        ));
        return Err(failure.hint("--shrink allows it; what lies beyond the new size is lost"));
    }
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_with_and_without_suffix() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("10b", 10),
            ("1k", 1024),
            ("1K", 1024),
            (" +1K", 1024),
            ("1.5G", 3 << 29),
            (".5k", 512),
            ("1.k", 1024),
            ("12.345M", 12_944_671),
            ("0x100000", 1 << 20),
            ("0XfF", 255),
            ("7E", 7 << 60),
            ("9223372036854775807", SIZE_MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in [
            "", ".", "k", "-1", "+", "+ 1", "++1", "1e3", "10kb", "10Q", "1G ", "1.5", "1.5b",
            "0x", "0x1g", "1k5", "1..5k", "0x1.8", "inf", "nan", "١",
        ] {
            assert_eq!(
                parse_size(text).map_err(|error| error.contains("larger")),
                Err(false),
                "{text}"
            );
        }
        for text in [
            "8E",
            "9223372036854775808",
            "99999999999999999999999999999999999999999999G",
            "0xffffffffffffffffffffffffffffffffffffffff",
        ] {
            assert_eq!(
                parse_size(text).map_err(|error| error.contains("larger")),
                Err(true),
                "{text}"
            );
        }
    }

    #[test]
    fn whole_numbers_are_those_of_strtol() {
        for (text, number) in [
            ("0", 0),
            (" 2", 2),
            ("+7", 7),
            ("\t+0x1F", 31),
            ("255", 255),
            ("017", 15),
        ] {
            assert_eq!(parse_whole_number(text), Ok(number), "{text}");
        }
        for text in [
            "", " ", "-1", "2 ", "++1", "0x", "0x+1", "1k", "1.0", "x", "08",
        ] {
            let refused = parse_whole_number::<u8>(text);
            assert_eq!(refused, Err("not a whole number".to_owned()), "{text}");
        }
        for text in ["256", "0x100", "99999999999999999999"] {
            assert_eq!(parse_whole_number::<u8>(text), Err("too large".to_owned()));
        }
    }

    #[test]
    fn new_sizes_are_absolute_or_relative() {
        assert_eq!(parse_new_size("1k"), Ok(NewSize::Exactly(1024)));
        assert_eq!(parse_new_size("+1k"), Ok(NewSize::More(1024)));
        assert_eq!(parse_new_size("-0.5k"), Ok(NewSize::Less(512)));
        assert!(parse_new_size("--1").is_err());
        assert!(parse_new_size("+").is_err());
    }

    #[test]
    fn sizes_for_people_have_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (999, "999 B"),
            (1000, "0.977 KiB"),
            (1024, "1 KiB"),
            (1107, "1.08 KiB"),
            (331_776, "324 KiB"),
            (1_335_296, "1.27 MiB"),
            (1 << 30, "1 GiB"),
            (10 << 30, "10 GiB"),
            (1_023_487, "999 KiB"),
            (1_023_488, "1e+03 KiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(human(bytes), text, "{bytes}");
        }
    }
}
