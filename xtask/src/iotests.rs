//! `cargo xtask iotests`: QEMU's own tests of its programs, run on ours.
//!
//! `tests/iotests/run` runs them; it is told here where QEMU's source is, which comes from Debian's mirror, and which
//! tests are to be run in which configurations. Those that cannot pass are named in `docs/compat.md`, with the reason:
//! any other failure is an error, and so is a test of that table that passes.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use gaur_artifacts::Cache;
use serde_json::Value;

use crate::ci;
use crate::workspace::{self, output};

/// QEMU's source, as Debian has it.
const SOURCE: &str = "qemu_10.0.2+ds.orig.tar.xz";
const SOURCE_SHA256: &str = "0901da33844a331bf8b3602b9c1fbd178e60b737c8e3ade678255bd090c9b9f1";
const SOURCE_PLACE: &str = "pool/main/q/qemu";
/// Where the tests are listed that cannot pass, and under which heading.
const KNOWN: &str = "docs/compat.md";
const KNOWN_HEADING: &str = "## Tests of QEMU that do not pass";

/// As much of what differs is shown.
const DIFF_LINES_MAX: usize = 40;

/// Run QEMU's own tests on this project's programs
#[derive(Debug, Default, clap::Args)]
pub struct Arguments {
    /// Each test in one configuration only, as continuous integration does
    #[arg(long)]
    pub once: bool,
    /// The program (built if none is named)
    #[arg(long, value_name = "PATH")]
    pub gaur: Option<PathBuf>,
    /// Tests side by side
    #[arg(short, long, value_name = "N", default_value_t = 2)]
    pub jobs: usize,
    /// Only these tests
    pub tests: Vec<String>,
}

/// A test in a configuration.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    test: String,
    format: String,
    options: String,
}

impl Case {
    /// The configuration in a word.
    fn configuration(&self) -> &str {
        match (self.format.as_str(), self.options.as_str()) {
            (format, "-") => format,
            (_, "compat=0.10") => "v2",
            (_, "extended_l2=on") => "xl2",
            (_, "extended_l2=on,cluster_size=128k") => "xl2+128k",
            (_, "refcount_bits=1") => "rc1",
            (_, "compression_type=zstd") => "zstd",
            (_, "lazy_refcounts=on") => "lazy",
            (_, options) if options.starts_with("data_file=") => "data",
            (_, options) => options,
        }
    }

    fn shown(&self) -> String {
        format!("{} ({})", self.test, self.configuration())
    }
}

/// Runs the tests and judges them.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    let root = workspace::root();
    let listed = read(&root.join("tests/iotests/tests.txt"))?;
    let cases = chosen(arguments, parse_list(&listed));
    let known = known(&read(&root.join(KNOWN))?)?;
    let gaur = match &arguments.gaur {
        Some(path) => path.clone(),
        None => ci::build_gaur()?,
    };
    let cache = Cache::open()?;
    let source = cache.get(SOURCE, fetch)?;
    let folder = tempfile::Builder::new()
        // The tests run as an ordinary user.
        .permissions(std::fs::Permissions::from_mode(0o755))
        .tempdir()
        .map_err(|error| format!("a folder: {error}"))?;
    let mut runner = Command::new("python3");
    runner
        .arg(root.join("tests/iotests/run"))
        .env("IOTESTS_CACHE", cache.folder().join("iotests"))
        .arg("--tarball")
        .arg(source)
        .arg("--gaur")
        .arg(gaur)
        .args(["--jobs", &arguments.jobs.to_string()])
        .arg("--work")
        .arg(folder.path().join("work"));
    let mut execute = |cases: &[Case]| execute(&mut runner, folder.path(), cases);
    let mut judged = Judged::default();
    judged.judge(&execute(&cases)?, &known)?;
    // A few depend on time.
    if !judged.failed.is_empty() {
        let again = std::mem::take(&mut judged.failed);
        judged.judge(&execute(&again)?, &known)?;
    }
    judged.conclude()
}

/// Runs the cases; returns the results, as JSON. What they are told by, and tell, is in the folder.
fn execute(runner: &mut Command, folder: &Path, cases: &[Case]) -> Result<String, String> {
    let (list, results) = (folder.join("list"), folder.join("results"));
    write_list(&list, cases)?;
    let _ = std::fs::remove_file(&results);
    let command = runner.arg("--list").arg(&list).arg("--json").arg(&results);
    // Its status says that something has failed, which is judged here.
    let status = command.status();
    let status = status.map_err(|error| format!("cannot start {command:?}: {error}"))?;
    match results.exists() {
        true => read(&results),
        false => Err(format!("{command:?}: {status}")),
    }
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// The beginning of a file that may not be there.
fn first_lines(path: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().take(DIFF_LINES_MAX).collect();
    lines.join("\n")
}

/// Brings QEMU's source from the mirror that this machine has its packages from.
fn fetch(to: &Path) -> Result<(), String> {
    let mut targets = Command::new("apt-get");
    let wanted = ["--format", "$(REPO_URI)", "Created-By: Packages"];
    let mirrors = output(targets.arg("indextargets").args(wanted))?;
    let mirrors: BTreeSet<&str> = mirrors.lines().collect();
    let mut last = format!("no mirror of packages is known, which {SOURCE} could come from");
    for mirror in mirrors {
        let mut download = Command::new("/usr/lib/apt/apt-helper");
        download.arg("download-file");
        download.arg(format!("{mirror}{SOURCE_PLACE}/{SOURCE}"));
        download.arg(to).arg(format!("SHA256:{SOURCE_SHA256}"));
        match output(&mut download) {
            Ok(_) => return Ok(()),
            Err(message) => last = message,
        }
    }
    Err(last)
}

/// The lines of the list: test, class, format, options.
fn parse_list(text: &str) -> Vec<Case> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let case = |line: &str| {
        let mut words = line.split_whitespace().map(str::to_owned);
        let (test, _class) = (words.next()?, words.next()?);
        let (format, options) = (words.next()?, words.next()?);
        Some(Case {
            test,
            format,
            options,
        })
    };
    lines.filter_map(case).collect()
}

/// The cases to run. With `once` the configuration differs from test to test, and is the same in every run.
fn chosen(arguments: &Arguments, mut cases: Vec<Case>) -> Vec<Case> {
    if !arguments.tests.is_empty() {
        cases.retain(|case| arguments.tests.contains(&case.test));
    }
    if !arguments.once {
        return cases;
    }
    let tests: BTreeSet<String> = cases.iter().map(|case| case.test.clone()).collect();
    let choice = |(place, test): (usize, String)| {
        let of_test: Vec<&Case> = cases.iter().filter(|case| case.test == test).collect();
        of_test.get(place % of_test.len()).copied().cloned()
    };
    tests.into_iter().enumerate().filter_map(choice).collect()
}

fn write_list(path: &Path, cases: &[Case]) -> Result<(), String> {
    let line = |case: &Case| format!("{} - {} {}\n", case.test, case.format, case.options);
    let text: String = cases.iter().map(line).collect();
    std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// A row of the table of tests that cannot pass.
#[derive(Debug, PartialEq, Eq)]
struct Known {
    test: String,
    /// Empty stands for all.
    configurations: Vec<String>,
}

impl Known {
    fn covers(&self, case: &Case) -> bool {
        let configuration = case.configuration();
        self.test == case.test
            && (self.configurations.is_empty()
                || self.configurations.iter().any(|name| name == configuration))
    }
}

/// Reads the table: `| 020, 046 | all | reason |`, or a list of configurations in place of `all`.
fn known(text: &str) -> Result<Vec<Known>, String> {
    let missing = || format!("{KNOWN}: the heading '{KNOWN_HEADING}' is missing");
    let (_, section) = text.split_once(KNOWN_HEADING).ok_or_else(missing)?;
    let section = section.split("\n## ").next().unwrap_or_default();
    let mut rows = Vec::new();
    for line in section.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [tests, configurations, reason] = cells[..] else {
            return Err(format!("{KNOWN}: three cells are expected: {line}"));
        };
        if tests == "tests" {
            continue;
        }
        if reason.is_empty() {
            return Err(format!("{KNOWN}: a reason is missing: {line}"));
        }
        let list = |cell: &str| cell.split(',').map(|one| one.trim().to_owned()).collect();
        let configurations = match configurations {
            "all" => Vec::new(),
            some => list(some),
        };
        let tests: Vec<String> = list(tests);
        rows.extend(tests.into_iter().map(|test| Known {
            test,
            configurations: configurations.clone(),
        }));
    }
    Ok(rows)
}

/// The results beside the table.
#[derive(Debug, Default, PartialEq, Eq)]
struct Judged {
    passed: usize,
    /// Those that cannot pass, and did not.
    named: usize,
    skipped: usize,
    /// Those that should have passed.
    failed: Vec<Case>,
    /// What is wrong, a line each.
    lines: Vec<String>,
}

impl Judged {
    fn judge(&mut self, results: &str, known: &[Known]) -> Result<(), String> {
        let results: Value =
            serde_json::from_str(results).map_err(|error| format!("the results: {error}"))?;
        // Those of an earlier run count no more.
        self.lines.retain(|line| !line.contains(" fails: "));
        for result in results["results"].as_array().into_iter().flatten() {
            let word = |key: &str| result[key].as_str().unwrap_or_default().to_owned();
            let case = Case {
                test: word("test"),
                format: word("format"),
                options: word("opts"),
            };
            let is_known = known.iter().any(|row| row.covers(&case));
            match (word("status").as_str(), is_known) {
                ("pass", false) => self.passed += 1,
                ("fail", true) => self.named += 1,
                // It skips itself for something the machine lacks.
                ("skip", _) => self.skipped += 1,
                ("pass", true) => {
                    let line = format!("{} passes, but {KNOWN} names it", case.shown());
                    self.lines.push(line);
                }
                _ => {
                    let (shown, why) = (case.shown(), word("why"));
                    let diff = first_lines(&word("diff"));
                    self.lines.push(format!("{shown} fails: {why}\n{diff}"));
                    self.failed.push(case);
                }
            }
        }
        Ok(())
    }

    fn conclude(self) -> Result<(), String> {
        let (passed, named, skipped) = (self.passed, self.named, self.skipped);
        println!(
            "{passed} pass, {named} cannot ({KNOWN}), {skipped} lack something of this machine"
        );
        match (self.lines.is_empty(), passed + named) {
            (true, 0) => Err("no test of QEMU was run".to_owned()),
            (true, _) => Ok(()),
            (false, _) => Err(format!("tests of QEMU:\n{}", self.lines.join("\n"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str =
        "# a comment\n001\tio\tqcow2\t-\n001\tio\tqcow2\tcompat=0.10\n002\timg\traw/nbd\t-\n";

    #[test]
    fn each_test_is_run_once_or_in_all_configurations() {
        let cases = parse_list(LIST);
        assert_eq!(cases.len(), 3);
        assert_eq!(chosen(&Arguments::default(), cases.clone()), cases);
        let once = Arguments {
            once: true,
            ..Arguments::default()
        };
        let shown: Vec<String> = chosen(&once, cases).iter().map(Case::shown).collect();
        assert_eq!(shown, ["001 (qcow2)", "002 (raw/nbd)"]);
    }

    #[test]
    fn a_failure_is_wrong_unless_it_is_named_and_a_named_test_must_fail() {
        let table = format!(
            "text\n\n{KNOWN_HEADING}\n\n| tests | configurations | why |\n|---|---|---|\n\
             | 003, 004 | all | a reason |\n| 001 | v2, data | a reason |\n\n## Next\n| 9 | all | no |\n"
        );
        let known = known(&table).expect("a table");
        assert_eq!(known.len(), 3);
        let result = |test: &str, options: &str, status: &str| {
            format!(
                r#"{{"test":"{test}","format":"qcow2","opts":"{options}","status":"{status}","why":"x"}}"#
            )
        };
        let judged = |runs: &[&[String]]| {
            let mut judged = Judged::default();
            for list in runs {
                let results = format!(r#"{{"results":[{}]}}"#, list.join(","));
                judged.judge(&results, &known)?;
            }
            judged.conclude()
        };
        let good = [
            result("001", "-", "pass"),
            result("001", "compat=0.10", "fail"),
            result("003", "refcount_bits=1", "fail"),
            result("009", "-", "skip"),
        ];
        assert_eq!(judged(&[&good]), Ok(()));
        for (bad, word) in [
            (result("001", "-", "fail"), "001 (qcow2) fails: x"),
            (result("004", "-", "pass"), "004 (qcow2) passes"),
            (result("001", "data_file=x", "pass"), "001 (data) passes"),
        ] {
            let message = judged(&[&good, &[bad]]).expect_err(word);
            assert!(message.contains(word), "{message}");
        }
        // What passes when it is run again was no failure.
        let (first, again) = ([result("001", "-", "fail")], [result("001", "-", "pass")]);
        assert_eq!(judged(&[&first, &again]), Ok(()));
        assert!(judged(&[]).is_err());
    }
}
