//! Usage errors: one line, with a hint.

use std::ffi::OsString;

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::command::Gaur;
use crate::failure::{EXIT_FAILURE, Failure};
use crate::{compare, notice};

/// The version of QEMU whose options and output the programs under its names have.
const QEMU_VERSION: &str = "10.0.2";

/// What a program of QEMU says when it is asked for its version, and that this is not QEMU.
pub fn qemu_version(program: &str) -> String {
    let own = env!("CARGO_PKG_VERSION");
    format!("{program} version {QEMU_VERSION} (gaur {own})")
}

/// Prints help as it is, and errors of usage on one line. Returns the exit code.
pub fn report(program: &str, args: &[OsString], error: &clap::Error) -> u8 {
    match error.kind() {
        // Scripts look for the version of QEMU whose program this is.
        ErrorKind::DisplayVersion if notice::is_qemu() => {
            println!("{}", qemu_version(program));
            return 0;
        }
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let Err(error) = error.print() else {
                return 0;
            };
            let failure = Failure::from(error);
            if !failure.silent {
                notice::say(&failure);
            }
            return failure.code;
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            return EXIT_FAILURE;
        }
        _ => {}
    }
    let verbs = verbs(args);
    let mut words = [&[program], &verbs[..], &["--help"]].concat();
    words.dedup();
    let help = words.join(" ");
    notice::say(explain(args, error).hint(format!("see '{help}'")));
    match verbs.first() {
        // 1 would say that the images differ.
        Some(&"compare") => compare::EXIT_OPEN,
        _ => EXIT_FAILURE,
    }
}

/// The verb and the sub-verb that a command line begins with.
fn verbs(args: &[OsString]) -> Vec<&str> {
    let mut verbs = Vec::new();
    let mut command = Gaur::command();
    for word in args.iter().skip(1).map_while(|word| word.to_str()) {
        let Some(found) = command.find_subcommand(word) else {
            break;
        };
        command = found.clone();
        verbs.push(word);
    }
    verbs
}

fn explain(args: &[OsString], error: &clap::Error) -> Failure {
    if error.kind() == ErrorKind::InvalidUtf8 {
        let wrong = args.iter().find(|word| word.to_str().is_none());
        let wrong = wrong.map_or_else(String::new, |word| word.to_string_lossy().into_owned());
        let message = format!("'{wrong}' is not valid UTF-8, which only paths of files may lack");
        return Failure::new(message);
    }
    if let Some(failure) = about_arguments(args, error) {
        return failure;
    }
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let end = text.find("\nUsage:").unwrap_or(text.len());
    let end = text.find("\nFor more information").unwrap_or(end).min(end);
    // Tips stand in paragraphs of their own. What looks like an option is seldom meant as a value.
    let mut parts = text[..end].split("\n\n  tip:");
    let mut line = words(parts.next().unwrap_or_default());
    for tip in parts.map(words).filter(|tip| !tip.starts_with("to pass ")) {
        line.push_str("; ");
        line.push_str(&tip);
    }
    for (theirs, ours) in NUMBERS {
        line = line.replace(theirs, ours);
    }
    Failure::new(line)
}

/// What Rust's numbers say of themselves, and what a user should read.
const NUMBERS: [(&str, &str); 5] = [
    ("invalid digit found in string", "not a whole number"),
    ("cannot parse integer from empty string", "not a number"),
    (
        "number would be zero for non-zero type",
        "must be 1 or more",
    ),
    ("number too large to fit in target type", "too large"),
    ("number too small to fit in target type", "too small"),
];

/// Where the words of the library mislead.
fn about_arguments(args: &[OsString], error: &clap::Error) -> Option<Failure> {
    match error.kind() {
        ErrorKind::UnknownArgument => {
            let Some(ContextValue::String(given)) = error.get(ContextKind::InvalidArg) else {
                return None;
            };
            let number = given
                .strip_prefix('-')?
                .starts_with(|letter: char| letter.is_ascii_digit());
            let message =
                format!("'{given}': no option is called so, and no number is negative here");
            number.then(|| Failure::new(message))
        }
        // The word was taken for an image, because it is no verb, or stands before one.
        ErrorKind::ArgumentConflict if verbs(args) == ["snapshot"] => {
            error.get(ContextKind::InvalidSubcommand)?;
            let word = args.iter().skip(2).find_map(|word| word.to_str())?;
            let message = format!("'{word}' is no verb of 'gaur snapshot'");
            Some(Failure::new(format!(
                "{message}; the verb comes first, then the image"
            )))
        }
        _ => None,
    }
}

/// Text in one line.
fn words(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(line: &[&str]) -> String {
        let args: Vec<OsString> = ["gaur"].iter().chain(line).map(OsString::from).collect();
        let error = Gaur::command().try_get_matches_from(&args);
        let verbs = verbs(&args).join(" ");
        let failure = explain(&args, &error.expect_err("a wrong command line"));
        format!("{verbs}: {failure}")
    }

    /// `gaur info -c x` was told to use `-- -c`.
    #[test]
    fn usage_hints_name_the_right_option_or_verb() {
        assert_eq!(
            told(&["amend", "x"]),
            "amend: the following required arguments were not provided: --options <KEY=VALUE,..>"
        );
        assert_eq!(
            told(&["info", "-c", "x"]),
            "info: unexpected argument '-c' found"
        );
        assert_eq!(
            told(&["export", "add", "--contorl", "x"]),
            "export add: unexpected argument '--contorl' found; a similar argument exists: '--control'"
        );
        assert_eq!(
            told(&["bench", "-c", "-1", "x"]),
            "bench: '-1': no option is called so, and no number is negative here"
        );
        assert_eq!(
            told(&["bench", "--threads", "0", "x"]),
            "bench: invalid value '0' for '--threads <N>': must be 1 or more"
        );
        for line in [["snapshot", "frob", "x"], ["snapshot", "x", "list"]] {
            assert!(
                told(&line).contains("is no verb of 'gaur snapshot'"),
                "{line:?}"
            );
        }
        assert_eq!(
            told(&["exprot"]),
            ": unrecognized subcommand 'exprot'; a similar subcommand exists: 'export'"
        );
    }

    #[test]
    fn argument_that_is_not_utf8_is_named() {
        use std::os::unix::ffi::OsStringExt;
        let mut args: Vec<OsString> = ["gaur", "create", "-o"].map(OsString::from).into();
        args.push(OsString::from_vec(b"a=\xff".to_vec()));
        args.push("x".into());
        let error = Gaur::command().try_get_matches_from(&args);
        let failure = explain(&args, &error.expect_err("options are text"));
        assert!(
            failure
                .to_string()
                .starts_with("'a=\u{fffd}' is not valid UTF-8")
        );
    }
}
