//! Tidy rule: the dependencies between the crates, as cargo sees them.
//!
//! `format` and `block` are pure and stand below everything; `engine` and `reactor` meet only in
//! `cli`, in benches and in tests. A crate that is not in the table is an error: whoever adds one
//! decides here what it may know.

use serde_json::Value;

use crate::tidy::finding::Finding;
use crate::workspace;

/// What a crate may depend on among our own crates.
struct Rule {
    name: &'static str,
    /// In what is built for users.
    depends: &'static [&'static str],
    /// In its tests and benches on top of that.
    tests: &'static [&'static str],
}

const RULES: &[Rule] = &[
    Rule {
        name: "gaur-format",
        depends: &[],
        tests: &[],
    },
    Rule {
        name: "gaur-block",
        depends: &[],
        tests: &[],
    },
    // Only under `cfg(loom)`.
    Rule {
        name: "gaur-model",
        depends: &[],
        tests: &[],
    },
    Rule {
        name: "gaur-engine",
        depends: &["gaur-format", "gaur-block", "gaur-model"],
        tests: &["gaur-sim", "gaur-reactor"],
    },
    Rule {
        name: "gaur-reactor",
        depends: &["gaur-block", "gaur-model"],
        tests: &["gaur-engine", "gaur-format"],
    },
    Rule {
        name: "gaur-sim",
        depends: &["gaur-block"],
        tests: &["gaur-engine", "gaur-format"],
    },
    Rule {
        name: "gaur-export",
        depends: &["gaur-block", "gaur-reactor"],
        tests: &["gaur-sim", "gaur-engine", "gaur-format"],
    },
    Rule {
        name: "gaur-server",
        depends: &[
            "gaur-format",
            "gaur-block",
            "gaur-engine",
            "gaur-reactor",
            "gaur-export",
        ],
        tests: &[],
    },
    Rule {
        name: "gaur-cli",
        depends: &[
            "gaur-format",
            "gaur-block",
            "gaur-engine",
            "gaur-reactor",
            "gaur-export",
            "gaur-server",
        ],
        tests: &[],
    },
    Rule {
        name: "gaur-simulator",
        depends: &["gaur-format", "gaur-block", "gaur-engine", "gaur-sim"],
        tests: &[],
    },
    Rule {
        name: "gaur-artifacts",
        depends: &[],
        tests: &[],
    },
    Rule {
        name: "gaur-interop",
        depends: &["gaur-artifacts", "gaur-format"],
        tests: &["gaur-block", "gaur-engine", "gaur-reactor"],
    },
    Rule {
        name: "gaur-bench",
        depends: &[
            "gaur-format",
            "gaur-block",
            "gaur-engine",
            "gaur-reactor",
            "gaur-export",
            "gaur-sim",
        ],
        tests: &[],
    },
    Rule {
        name: "gaur-bench-compare",
        depends: &["gaur-artifacts", "gaur-format", "gaur-bench"],
        tests: &[],
    },
    Rule {
        name: "xtask",
        depends: &[
            "gaur-artifacts",
            "gaur-format",
            "gaur-block",
            "gaur-engine",
            "gaur-sim",
            "gaur-simulator",
        ],
        tests: &[],
    },
];

/// Crates that know no runtime, system call, clock, thread or random source.
const PURE: &[&str] = &["gaur-format", "gaur-block", "gaur-engine", "gaur-sim"];

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
    let output = workspace::cargo()
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .output()
        .map_err(|error| format!("cannot start cargo metadata: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr)
        ));
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("cargo metadata: {error}"))?;
    let packages = metadata["packages"]
        .as_array()
        .ok_or("cargo metadata lists no packages")?;
    Ok(packages.iter().flat_map(check_package).collect())
}

fn check_package(package: &Value) -> Vec<Finding> {
    let name = package["name"].as_str().unwrap_or_default();
    let Some(rule) = RULES.iter().find(|rule| rule.name == name) else {
        let what = "is not in the table of arrows (xtask/src/tidy/arrows.rs)";
        return vec![Finding::of(name, what)];
    };
    let dependencies = package["dependencies"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    dependencies
        .iter()
        .filter_map(|dependency| check_dependency(rule, dependency))
        .collect()
}

fn check_dependency(rule: &Rule, dependency: &Value) -> Option<Finding> {
    let on = dependency["name"].as_str().unwrap_or_default();
    let only_tests = dependency["kind"].as_str() == Some("dev");
    if PURE.contains(&rule.name) && IMPURE.contains(&on) && !only_tests {
        let what = format!("depends on {on}: it knows no runtime, system call, clock or chance");
        return Some(Finding::of(rule.name, what));
    }
    let ours = RULES.iter().any(|other| other.name == on);
    let allowed = rule.depends.contains(&on) || (only_tests && rule.tests.contains(&on));
    (ours && !allowed).then(|| {
        let kind = if only_tests {
            "its tests depend on"
        } else {
            "depends on"
        };
        Finding::of(
            rule.name,
            format!("{kind} {on}, allowed are {:?}", rule.depends),
        )
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
