//! `gaur gc`: find chunks of published images that nothing refers to, and remove them.

use std::io::Write;
use std::time::Duration;

use gaur_remote::published::collect;
use serde_json::json;

use crate::failure::Failure;
use crate::open::Output;

/// List chunks that no published image of a folder refers to, or remove them
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Remove them
    #[arg(long)]
    remove: bool,
    /// Leave what is younger alone, as 90s, 30m, 12h or 7d
    #[arg(long, value_name = "TIME", default_value = "1d", value_parser = parse_time)]
    grace: Duration,
    /// How to tell what was found
    #[arg(long, value_name = "FORMAT", default_value = "human")]
    output: Output,
    /// The folder of the images: s3://BUCKET/PREFIX
    #[arg(value_name = "NAME")]
    name: String,
}

/// Reads a time: a number of seconds, minutes, hours or days.
fn parse_time(text: &str) -> Result<Duration, String> {
    let wrong = || "a time is a number with s, m, h or d".to_owned();
    let (number, unit) = match text.char_indices().last() {
        Some((at, unit)) if unit.is_ascii_alphabetic() => (&text[..at], unit),
        _ => (text, 's'),
    };
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 60 * 60,
        'd' => 24 * 60 * 60,
        _ => return Err(wrong()),
    };
    let number: u32 = number.parse().map_err(|_| wrong())?;
    Ok(Duration::from_secs(u64::from(number) * seconds))
}

/// Collects.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let found = collect(&args.name, args.grace, args.remove);
    let found = found.map_err(|text| Failure::about(&args.name, text))?;
    let bytes: u64 = found.objects.iter().map(|(_, len_bytes)| len_bytes).sum();
    if args.output == Output::Json {
        let objects: Vec<_> = found
            .objects
            .iter()
            .map(|(key, len_bytes)| json!({"key": key, "bytes": len_bytes}))
            .collect();
        let told = json!({
            "images": found.images,
            "objects": objects,
            "bytes": bytes,
            "younger": found.young,
            "removed": found.removed,
        });
        writeln!(out, "{told:#}")?;
        return Ok(0);
    }
    for (key, _) in &found.objects {
        writeln!(out, "{key}")?;
    }
    let what = if found.removed { "removed" } else { "unused" };
    writeln!(
        out,
        "{} chunks {what}, {bytes} bytes; {} images, {} unused chunks too young",
        found.objects.len(),
        found.images,
        found.young
    )?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (text, seconds) in [
            ("0", 0),
            ("90s", 90),
            ("30m", 1800),
            ("2h", 7200),
            ("7d", 604_800),
        ] {
            assert_eq!(parse_time(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "d", "-1d", "1w", "1 d", "5000000000s", "1é"] {
            assert!(parse_time(text).is_err(), "{text}");
        }
    }
}
