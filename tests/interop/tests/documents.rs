//! The commands in the README and in `docs/` work: every shell block is run.
//!
//! The story: the README's example of the library did not compile, and no test noticed.

use std::collections::BTreeMap;

use gaur_interop::build_paths::workspace_dir;
use gaur_interop::document::{Block, blocks};
use gaur_interop::gaur::gaur;
use gaur_interop::tool::run;

/// Languages of code blocks. `text` is for what no machine reads.
const LANGUAGES: [&str; 4] = ["sh", "console", "rust", "text"];

/// The README and what is in `docs/`, by name.
fn documents() -> BTreeMap<String, String> {
    let root = workspace_dir();
    let read = |name: &str| std::fs::read_to_string(root.join(name)).expect("a document");
    let mut found = BTreeMap::from([("README.md".to_owned(), read("README.md"))]);
    for folder in ["docs", "docs/decisions"] {
        for entry in std::fs::read_dir(root.join(folder)).expect("a folder") {
            let name = entry.expect("an entry").file_name();
            let name = format!("{folder}/{}", name.to_str().expect("text"));
            if name.ends_with(".md") {
                found.insert(name.clone(), read(&name));
            }
        }
    }
    found
}

fn all_blocks() -> Vec<Block> {
    let documents = documents();
    let found = documents.iter().flat_map(|(name, text)| blocks(name, text));
    found.collect()
}

#[test]
fn every_shell_block_in_the_docs_runs_or_says_why_not() {
    let mut count = 0;
    for block in all_blocks() {
        let known = LANGUAGES.contains(&block.language.as_str());
        assert!(
            known,
            "{}: '{}' is no language",
            block.place, block.language
        );
        if !block.is_shell() {
            continue;
        }
        match &block.left_out {
            Some(reason) => assert!(reason.len() > 10, "{}: why not?", block.place),
            None => {
                block.check();
                count += 1;
            }
        }
    }
    assert!(count >= 7, "only {count} blocks were found to run");
}

#[test]
fn blocks_are_found_with_what_stands_before_them() {
    let text = "a\n<!-- setup: one\ntwo -->\n\n```sh\nthree\n```\n```console\n$ four\n```\n\
                <!-- not run: no network here -->\n```sh\nfive\n```\n";
    let found = blocks("d.md", text);
    let facts = found
        .iter()
        .map(|block| (&*block.place, &*block.language, &*block.setup));
    let facts: Vec<_> = facts.collect();
    assert_eq!(
        facts,
        [
            ("d.md:5", "sh", "one\ntwo"),
            ("d.md:8", "console", ""),
            ("d.md:12", "sh", "")
        ]
    );
    let texts: Vec<&str> = found.iter().map(|block| &*block.text).collect();
    assert_eq!(texts, ["three", "$ four", "five"]);
    assert_eq!(found[2].left_out.as_deref(), Some("no network here"));
}

/// The options in a help text: the short one, if there is one, and the long one.
fn options(help: &str) -> BTreeMap<String, Option<char>> {
    let mut found = BTreeMap::new();
    for line in help.lines() {
        let mut words = line
            .split_whitespace()
            .map(|word| word.trim_end_matches(','));
        let Some(first) = words.next().filter(|word| word.starts_with('-')) else {
            continue;
        };
        let (short, long) = match first.strip_prefix("--") {
            Some(_) => (None, Some(first)),
            None => (first.chars().nth(1), words.next()),
        };
        if let Some(long) = long.and_then(|word| word.strip_prefix("--")) {
            let end = long.find(['=', '[']).unwrap_or(long.len());
            found.insert(long[..end].to_owned(), short);
        }
    }
    found
}

/// The README said "the options are those of `qemu-nbd`". They are not, and `-o`, `-s` and `-l` mean
/// other things.
#[test]
fn the_table_of_qemu_nbds_options_is_true() {
    let theirs = options(&run("qemu-nbd", &["--help"]).ok().stdout);
    let ours = options(&gaur(&["serve", "--help"]).ok().stdout);
    assert!(theirs.len() > 30 && ours.len() > 30, "{theirs:?} {ours:?}");
    let text = documents().remove("docs/commands.md").expect("a document");
    let mut left = theirs.clone();
    let rows = text
        .lines()
        .skip_while(|line| !line.starts_with("| `qemu-nbd` | `gaur serve` |"));
    for row in rows.skip(2).take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let names = cells[1].split(", ").map(|name| name.trim_matches('`'));
        for long in names.filter_map(|name| name.strip_prefix("--")) {
            let short = left.remove(long);
            let short =
                short.unwrap_or_else(|| panic!("qemu-nbd has no --{long}, or it stands twice"));
            let shown = short.map_or(format!("`--{long}`"), |short| {
                format!("`-{short}`, `--{long}`")
            });
            assert!(cells[1].contains(&shown), "{row}: it is {shown}");
            let same = ours.get(long) == Some(&short);
            let word = cells[2].split(' ').next().unwrap_or_default();
            match word.trim_end_matches(':') {
                "same" => assert!(same, "{row}: ours is {:?}", ours.get(long)),
                "missing" => assert!(!ours.contains_key(long), "{row}: it is there"),
                "other" => {}
                _ => panic!("{row}: same, other or missing?"),
            }
        }
    }
    assert!(left.is_empty(), "not in the table: {left:?}");
}

/// docs/commands.md says that the verbs take all options of `qemu-img`.
#[test]
fn the_verbs_take_all_options_of_qemu_img() {
    let verbs = [
        "create", "info", "check", "map", "measure", "convert", "compare", "commit", "rebase",
        "resize", "amend", "snapshot", "bitmap", "bench",
    ];
    for verb in verbs {
        let theirs = run("qemu-img", &[verb, "--help"]).ok().stdout;
        // A slip in the help of QEMU 10's amend.
        let theirs = options(&theirs.replace("--progres\n", "--progress\n"));
        let help = gaur(&[verb, "--help"]).ok().stdout;
        let ours = options(&help);
        assert!(theirs.len() > 4, "{verb}: {theirs:?}");
        // A short form of ours where they have none is no harm.
        let lacks = |(long, short): &(&String, &Option<char>)| {
            let alias = help.contains(&format!("[alias: --{long}]"));
            let found = ours.get(*long);
            !alias && found.is_none_or(|ours| short.is_some() && ours != *short)
        };
        let missing: Vec<_> = theirs.iter().filter(lacks).collect();
        assert!(missing.is_empty(), "{verb}: {missing:?}");
    }
}

/// docs/compat.md has a row for every line of the help of QEMU's programs.
#[test]
fn compat_has_all_lines_of_the_help_of_qemus_programs() {
    let text = documents().remove("docs/compat.md").expect("a document");
    let section = |program: &str| {
        let heading = format!("\n## {program}\n");
        let (_, rest) = text.split_once(&heading).expect("a heading");
        rest.split("\n## ").next().unwrap_or_default().to_owned()
    };
    let help = |program: &str| run(program, &["--help"]).ok().stdout;
    for program in ["qemu-img", "qemu-io", "qemu-nbd"] {
        let (rows, mut names) = (section(program), Vec::new());
        for (long, short) in options(&help(program)) {
            names.push(format!("--{long}"));
            names.extend(short.map(|short| format!("-{short}")));
        }
        match program {
            "qemu-io" => {
                let commands = run(program, &["-c", "help"]).ok().stdout;
                let lines = commands.lines().filter(|line| line.contains(" -- "));
                let first = |line: &str| line.split_whitespace().next().map(str::to_owned);
                names.extend(lines.filter_map(first));
            }
            "qemu-img" => {
                let help = help(program);
                let (head, formats) = help
                    .split_once("Supported image formats:")
                    .expect("formats");
                let verbs = head.lines().filter_map(|line| line.split_once(" - "));
                names.extend(verbs.map(|(verb, _)| verb.trim().to_owned()));
                let formats = formats.split("See <").next().unwrap_or_default();
                names.extend(formats.split_whitespace().map(str::to_owned));
            }
            _ => {}
        }
        assert!(names.len() > 20, "{program}: {names:?}");
        names.retain(|name| !rows.contains(&format!("`{name}`")));
        assert!(names.is_empty(), "{program}: no row for {names:?}");
    }
}
