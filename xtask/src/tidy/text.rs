//! Tidy rules for any text: no paths of one machine, no dead links, no vague actors in module heads.

use std::path::Path;

use crate::tidy::finding::Finding;

/// Prefixes of absolute paths that exist on one machine only, in parts so that this file
/// does not break its own rule.
const MACHINE_PATHS: &[&[&str]] = &[
    &["/wo", "rk/"],
    &["/ho", "me/"],
    &["/Us", "ers/"],
    &["/ro", "ot/"],
];

/// Words that hide who acts: the first line of a module's head names the thread, the client or the kernel.
const VAGUE_WORDS: &[&str] = &["whoever", "nobody", "somebody", "anybody", "everybody"];

/// Findings in a file's text.
pub fn check(path: &Path, content: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let head = content
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("//!"));
    for word in head.into_iter().flat_map(str::split_whitespace) {
        let word = word
            .trim_matches(|c: char| !c.is_alphanumeric())
            .to_lowercase();
        if VAGUE_WORDS.contains(&word.as_str()) {
            findings.push(Finding::at(path, 1, format!("who is '{word}'?")));
        }
    }
    for (index, line) in content.lines().enumerate() {
        for pieces in MACHINE_PATHS {
            let word = pieces.concat();
            if has_path(line, &word) {
                let what = format!("names a path of one machine ('{word}')");
                findings.push(Finding::at(path, index + 1, what));
            }
        }
        if path.extension().is_some_and(|extension| extension == "md") {
            findings.extend(dead_links(path, index + 1, line));
        }
    }
    findings
}

/// Whether an absolute path starts with `word` in this line; `tests/work/` is not absolute.
fn has_path(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '}' | ')'))
    })
}

/// Relative links of a Markdown line that lead to no file.
fn dead_links(path: &Path, line_number: usize, line: &str) -> Vec<Finding> {
    let folder = path.parent().unwrap_or(path);
    let mut findings = Vec::new();
    for part in line.split("](").skip(1) {
        let Some((link, _)) = part.split_once(')') else {
            continue;
        };
        let target = link.split('#').next().unwrap_or_default();
        let elsewhere =
            target.is_empty() || target.contains("://") || target.starts_with("mailto:");
        if !elsewhere && !folder.join(target).exists() {
            findings.push(Finding::at(
                path,
                line_number,
                format!("link to nowhere: {target}"),
            ));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_one_machine_is_found() {
        let line = format!("see {}{}/notes", "/ho", "me/me");
        assert_eq!(check(Path::new("a.rs"), &line).len(), 1);
        assert_eq!(check(Path::new("a.rs"), "see frame/home/me").len(), 0);
    }

    #[test]
    fn a_vague_actor_in_a_module_head_is_found() {
        let found = |content| check(Path::new("a.rs"), content).len();
        assert_eq!(found("//! Memory that nobody uses.\n"), 1);
        assert_eq!(
            found("//! Memory that is idle.\n//!\n//! Nobody waits.\n"),
            0
        );
    }

    #[test]
    fn a_dead_link_is_found() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("a.md");
        assert_eq!(check(&here, "[x](Cargo.toml) [y](no-such.md#z)").len(), 1);
        assert_eq!(check(&here, "[x](https://example.org/no-such)").len(), 0);
    }
}
