//! `cargo xtask tidy`: applies every rule to every file.

use crate::tidy::{arrows, rust, text};
use crate::workspace;

/// Extensions of files that people read; an empty one stands for files without any.
const TEXT: &[&str] = &["rs", "md", "toml", "sh", "yml", ""];

/// Checks the tree; an error lists all that is wrong with it.
pub fn run() -> Result<(), String> {
    let mut findings = arrows::check()?;
    for path in workspace::files(TEXT)? {
        let bytes = std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        // What is not text has no words and no lines.
        let Ok(content) = String::from_utf8(bytes) else {
            continue;
        };
        findings.extend(text::check(&path, &content));
        if path.extension().is_some_and(|extension| extension == "rs") {
            findings.extend(rust::check(&path, &content));
        }
    }
    if findings.is_empty() {
        println!("tidy: nothing found");
        return Ok(());
    }
    findings.sort();
    let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
    Err(format!("{} findings\n{}", findings.len(), lines.join("\n")))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_tree_is_tidy() {
        if let Err(findings) = super::run() {
            panic!("{findings}");
        }
    }
}
