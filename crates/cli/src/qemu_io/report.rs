//! The lines that requests end with.

use std::io::{self, Write};
use std::time::Duration;

use gaur_block::Errno;

/// How much of a request's end is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// For people.
    Lines,
    /// For programs: one line of numbers.
    Numbers,
    /// Nothing.
    Nothing,
}

/// A request that was served.
#[derive(Clone, Copy, Debug)]
pub struct Served {
    /// `read`, `wrote` or `discard`.
    pub what: &'static str,
    /// Where on the disk.
    pub offset: i64,
    /// Its bytes.
    pub bytes: u64,
    /// How long it took.
    pub time: Duration,
    /// How it is told.
    pub told: Told,
}

impl Served {
    /// Writes what it says.
    pub fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        let Served {
            what,
            offset,
            bytes,
            time,
            told,
        } = *self;
        let seconds = time.as_secs_f64().max(1e-9);
        let (byte_rate, rate) = (bytes as f64 / seconds, 1.0 / seconds);
        match told {
            Told::Nothing => Ok(()),
            Told::Lines => {
                writeln!(out, "{what} {bytes}/{bytes} bytes at offset {offset}")?;
                let (amount, each) = (size(bytes as f64), size(byte_rate));
                let time = clock(time, false);
                writeln!(
                    out,
                    "{amount}, 1 ops; {time} ({each}/sec and {rate:.4} ops/sec)"
                )
            }
            Told::Numbers => {
                let time = clock(time, true);
                writeln!(out, "{bytes},1,{time},{byte_rate:.3},{rate:.3}")
            }
        }
    }
}

/// An amount of bytes: in the largest unit it has one of, with three digits behind the point if it is not whole.
pub fn size(bytes: f64) -> String {
    const UNITS: [&str; 7] = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut amount = bytes;
    let mut unit = 0;
    while amount >= 1024.0 && unit + 1 < UNITS.len() {
        amount /= 1024.0;
        unit += 1;
    }
    let digits = match unit {
        0 if amount.fract() != 0.0 => format!("{amount:.6}"),
        _ => format!("{amount:.3}"),
    };
    let digits = digits.strip_suffix(".000").unwrap_or(&digits);
    format!("{digits} {}", UNITS[unit])
}

/// A time in hundredths of seconds, with hours and minutes where it has some, or where it is `full`.
fn clock(time: Duration, full: bool) -> String {
    let (seconds, hundredths) = (time.as_secs(), time.subsec_millis() / 10);
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    let rest = seconds % 60;
    match full || seconds >= 60 {
        true => format!("{hours}:{minutes:02}:{rest:02}.{hundredths:02}"),
        false => format!("{rest:02}.{hundredths:02} sec"),
    }
}

/// Bytes in rows of sixteen: where on the disk, in hexadecimal, as letters.
pub fn dump(out: &mut dyn Write, offset: u64, bytes: &[u8]) -> io::Result<()> {
    for (row, at) in bytes.chunks(16).zip((offset..).step_by(16)) {
        write!(out, "{at:08x}:  ")?;
        for byte in row {
            write!(out, "{byte:02x} ")?;
        }
        write!(out, " ")?;
        for byte in row {
            let shown = byte.is_ascii_alphanumeric().then_some(char::from(*byte));
            write!(out, "{}", shown.unwrap_or('.'))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// What the system calls an error.
pub fn reason(errno: Errno) -> String {
    let text = io::Error::from_raw_os_error(errno.raw()).to_string();
    let end = text.find(" (os error").unwrap_or(text.len());
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_largest_unit_and_no_empty_fraction() {
        let shown = [0.0, 512.0, 1024.0, 1536.0, 10485760.0, 12356.5].map(size);
        assert_eq!(
            shown,
            [
                "0 bytes",
                "512 bytes",
                "1 KiB",
                "1.500 KiB",
                "10 MiB",
                "12.067 KiB"
            ]
        );
    }

    #[test]
    fn times_are_seconds_unless_longer_or_for_programs() {
        let time = Duration::from_millis(1234);
        assert_eq!(clock(time, false), "01.23 sec");
        assert_eq!(clock(time, true), "0:00:01.23");
        assert_eq!(clock(Duration::from_secs(3700), false), "1:01:40.00");
    }

    #[test]
    fn rows_of_a_dump_have_sixteen_bytes() {
        let mut out = Vec::new();
        dump(&mut out, 100, b"0123456789abcdefg!").unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(
            text,
            "00000064:  30 31 32 33 34 35 36 37 38 39 61 62 63 64 65 66  0123456789abcdef\n\
             00000074:  67 21  g.\n"
        );
    }
}
