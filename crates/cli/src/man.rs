//! `gaur man`: manual pages, generated from the definition of the command line. Every verb and every
//! sub-verb has one, called after its words: `gaur-export-add(1)`.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use clap_mangen::Man;

use crate::command::Gaur;
use crate::failure::Failure;

/// Print a manual page, or write all of them to a directory
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Write the pages of all verbs to this directory
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "words")]
    to: Option<PathBuf>,
    /// The verb, and its sub-verb if it has some
    #[arg(value_name = "VERB")]
    words: Vec<String>,
}

/// Prints the page, or writes them all.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let mut root = Gaur::command().disable_help_subcommand(true);
    root.build();
    match &args.to {
        Some(directory) => write_all(&root, directory)?,
        None => out.write_all(&page(&find(&root, &args.words)?)?)?,
    }
    Ok(0)
}

/// A page's command, and those above it, the root first.
fn find<'a>(root: &'a Command, words: &[String]) -> Result<Vec<&'a Command>, Failure> {
    let mut path = vec![root];
    for word in words {
        let above = path.last().copied().unwrap_or(root);
        let Some(verb) = above.find_subcommand(word) else {
            let message = match path.len() {
                1 => format!("there is no verb '{word}'"),
                _ => format!("'{}' has no verb '{word}'", title(above).replace('-', " ")),
            };
            return Err(Failure::new(message).hint("'gaur --help' lists the verbs"));
        };
        path.push(verb);
    }
    Ok(path)
}

/// `gaur-export-add`.
fn title(command: &Command) -> &str {
    command
        .get_display_name()
        .unwrap_or_else(|| command.get_name())
}

fn page(path: &[&Command]) -> Result<Vec<u8>, Failure> {
    let Some(command) = path.last() else {
        return Ok(Vec::new());
    };
    // A date that is not there needs its quotes, or what stands behind it takes its place.
    let man = Man::new((*command).clone()).date(DATE_MARK);
    let version = format!("gaur {}", env!("CARGO_PKG_VERSION"));
    let mut text = Vec::new();
    man.source(version)
        .manual("Gaur Manual")
        .render(&mut text)?;
    let mut text = String::from_utf8_lossy(&text).replacen(DATE_MARK, "\"\"", 1);
    text.push_str(".SH \"SEE ALSO\"\n");
    text.push_str(&see_also(path).join(",\n"));
    text.push('\n');
    Ok(text.into_bytes())
}

/// Stands for the date until the page is there.
const DATE_MARK: &str = "NODATE";

/// The pages above, beside and below one, and the manual of what it is like.
fn see_also(path: &[&Command]) -> Vec<String> {
    let refer =
        |page: &str, section: u8| format!("\\fB{}\\fR({section})", page.replace('-', "\\-"));
    let [above @ .., this] = path else {
        return Vec::new();
    };
    let beside = above
        .last()
        .into_iter()
        .flat_map(|parent| parent.get_subcommands());
    let pages = above
        .iter()
        .copied()
        .chain(beside.filter(|other| other.get_name() != this.get_name()))
        .chain(this.get_subcommands());
    let mut all: Vec<String> = pages.map(|other| refer(title(other), 1)).collect();
    all.push(refer("qemu-img", 1));
    all.push(refer("qemu-nbd", 8));
    all
}

fn write_all(root: &Command, directory: &Path) -> Result<(), Failure> {
    let mut left = vec![vec![root]];
    while let Some(path) = left.pop() {
        let Some(command) = path.last() else { continue };
        let file = directory.join(format!("{}.1", title(command)));
        std::fs::write(&file, page(&path)?).map_err(|error| Failure::io(&file, &error))?;
        let below = command.get_subcommands();
        left.extend(below.map(|verb| [&path[..], &[verb]].concat()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(words: &[&str]) -> Result<String, Failure> {
        let mut root = Gaur::command().disable_help_subcommand(true);
        root.build();
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let page = page(&find(&root, &words)?)?;
        Ok(String::from_utf8(page).expect("text"))
    }

    /// `gaur man export` referred to gaur-export-add(1), which nothing could print, and to
    /// gaur-export-help(1), which is none; the footer of a verb's page said "export" for a version.
    #[test]
    fn every_page_that_a_page_refers_to_is_there() {
        let mut left: Vec<Vec<String>> = vec![Vec::new()];
        let mut seen = 0;
        while let Some(words) = left.pop() {
            let borrowed: Vec<&str> = words.iter().map(String::as_str).collect();
            let page = text(&borrowed).expect("a page");
            let title = [&["gaur"], &borrowed[..]].concat().join("-");
            let version = env!("CARGO_PKG_VERSION");
            let head = format!(".TH {title} 1 \"\" \"gaur {version}\" \"Gaur Manual\"");
            assert!(page.lines().any(|line| line == head), "{title}: {page}");
            assert!(
                page.contains("SEE ALSO") && !page.contains("\\-help(1)"),
                "{page}"
            );
            for line in page
                .lines()
                .filter(|line| line.starts_with(&title.replace('-', "\\-")))
            {
                let Some(name) = line.strip_suffix("(1)") else {
                    continue;
                };
                let name = name.replace("\\-", "-");
                let verb = name[title.len()..].trim_start_matches('-');
                left.push([&words[..], &[verb.to_owned()]].concat());
            }
            seen += 1;
        }
        assert!(seen > 30, "{seen}");
    }

    #[test]
    fn a_verb_that_is_not_there_is_told() {
        let refused = |words: &[&str]| text(words).expect_err("no page").to_string();
        assert!(refused(&["exprot"]).contains("no verb 'exprot'"));
        assert!(refused(&["export", "ad"]).contains("'gaur export' has no verb 'ad'"));
    }
}
