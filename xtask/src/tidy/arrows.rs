//! Tidy rule: the dependencies between the crates, as cargo sees them.
//!
//! `format` and `block` are pure and stand below everything; `engine` and `reactor` meet only in
//! `server`, `gaur`, `cli`, in benches and in tests. A crate that is not in the table is an error: its author
//! decides here what it may know.

use serde_json::Value;

use crate::tidy::finding::Finding;
use crate::workspace;

/// A crate, what it may depend on among our own crates in what is built for users, and in its tests and
/// benches on top of that.
type Rule = (&'static str, &'static str, &'static str);

const RULES: &[Rule] = &[
    ("format", "", ""),
    ("block", "", ""),
    // Only under `cfg(loom)`.
    ("model", "", ""),
    ("luks", "", ""),
    ("foreign", "", ""),
    ("tls", "", ""),
    ("nbd", "block", ""),
    ("engine", "format block model luks foreign", "sim reactor"),
    ("reactor", "block nbd tls model", "engine format"),
    ("remote", "block reactor", ""),
    ("sim", "block", "engine format"),
    ("export", "block nbd tls reactor", "sim engine format"),
    ("gaur", "format block luks engine reactor", "export"),
    ("server", "format block luks tls engine reactor export", ""),
    (
        "cli",
        "format block luks nbd tls engine reactor remote export server",
        "",
    ),
    ("simulator", "format block luks engine sim", ""),
    ("artifacts", "", ""),
    ("interop", "artifacts format", "gaur block engine reactor"),
    ("bench", "format block engine reactor export sim", ""),
    ("bench-compare", "artifacts format bench", ""),
    ("xtask", "artifacts format block engine sim simulator", ""),
];

/// Crates that know no runtime, system call, clock, thread or random source.
const PURE: &[&str] = &["format", "block", "luks", "foreign", "nbd", "engine", "sim"];

/// Foreign crates that would bring one in.
const IMPURE: &[&str] = &[
    "async-std",
    "chrono",
    "fastrand",
    "getrandom",
    "io-uring",
    "libc",
    "mio",
    "monoio",
    "nix",
    "rand",
    "rustix",
    "smol",
    "socket2",
    "time",
    "tokio",
];

/// Findings about dependencies of the workspace's crates.
pub fn check() -> Result<Vec<Finding>, String> {
    let packages = workspace::packages(false)?;
    Ok(packages.iter().flat_map(check_package).collect())
}

fn check_package(package: &Value) -> Vec<Finding> {
    let name = short(package);
    let Some(rule) = RULES.iter().find(|rule| rule.0 == name) else {
        let what = "is not in the table of arrows (xtask/src/tidy/arrows.rs)";
        return vec![Finding::of(name, what)];
    };
    let dependencies = package["dependencies"].as_array();
    let dependencies = dependencies.into_iter().flatten();
    dependencies
        .filter_map(|dependency| check_dependency(rule, dependency))
        .collect()
}

/// A crate's name without our own prefix.
fn short(named: &Value) -> &str {
    let name = named["name"].as_str().unwrap_or_default();
    name.strip_prefix("gaur-").unwrap_or(name)
}

fn check_dependency((name, depends, tests): &Rule, dependency: &Value) -> Option<Finding> {
    let on = short(dependency);
    let only_tests = dependency["kind"].as_str() == Some("dev");
    if PURE.contains(name) && IMPURE.contains(&on) && !only_tests {
        let what = format!("depends on {on}: it knows no runtime, system call, clock or chance");
        return Some(Finding::of(*name, what));
    }
    let ours = RULES.iter().any(|other| other.0 == on);
    let lists = |list: &str| list.split(' ').any(|allowed| allowed == on);
    let allowed = lists(depends) || (only_tests && lists(tests));
    (ours && !allowed).then(|| {
        let kind = if only_tests {
            "its tests depend on"
        } else {
            "depends on"
        };
        Finding::of(*name, format!("{kind} {on}, allowed are: {depends}"))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn package(name: &str, on: &str, kind: Option<&str>) -> Vec<Finding> {
        check_package(&json!({
            "name": name,
            "dependencies": [{ "name": on, "kind": kind }],
        }))
    }

    #[test]
    fn the_engine_never_meets_the_reactor_outside_tests() {
        assert_eq!(package("gaur-engine", "gaur-reactor", None).len(), 1);
        assert_eq!(package("gaur-engine", "gaur-reactor", Some("dev")).len(), 0);
        assert_eq!(package("gaur-reactor", "gaur-engine", None).len(), 1);
        assert_eq!(package("gaur-cli", "gaur-engine", None).len(), 0);
    }

    #[test]
    fn a_pure_crate_takes_no_system_calls_and_no_chance() {
        assert_eq!(package("gaur-format", "libc", None).len(), 1);
        assert_eq!(package("gaur-engine", "rand", None).len(), 1);
        assert_eq!(package("gaur-engine", "rand", Some("dev")).len(), 0);
        assert_eq!(package("gaur-reactor", "libc", None).len(), 0);
    }

    #[test]
    fn unlisted_crate_is_reported() {
        assert_eq!(package("gaur-novel", "gaur-block", None).len(), 1);
    }
}
