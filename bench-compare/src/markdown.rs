//! Sections of Markdown files that programs write: what stands between two markers is replaced.

use std::path::Path;

use anyhow::{Context, Result};

/// Replaces the section `name` of the file at `path`.
pub fn update(path: &Path, name: &str, section: &str) -> Result<()> {
    let old = std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
    let new = replaced(&old, name, section)
        .with_context(|| format!("{}: section '{name}'", path.display()))?;
    std::fs::write(path, new)?;
    Ok(())
}

/// `text` with `section` between the markers of `name`.
fn replaced(text: &str, name: &str, section: &str) -> Result<String> {
    let begin = format!("<!-- bench-compare {name}: begin -->");
    let end = format!("<!-- bench-compare {name}: end -->");
    let from = text.find(&begin).context("the begin marker is missing")? + begin.len();
    let to = text[from..]
        .find(&end)
        .context("the end marker is missing")?
        + from;
    let (before, after) = (&text[..from], &text[to..]);
    Ok(format!("{before}\n\n{}\n\n{after}", section.trim()))
}

#[cfg(test)]
mod tests {
    use super::replaced;

    const TEXT: &str =
        "a\n<!-- bench-compare x: begin -->\nold\n<!-- bench-compare x: end -->\nb\n";

    #[test]
    fn only_what_stands_between_the_markers_changes() {
        let new = replaced(TEXT, "x", "\nnew\n").unwrap();
        let expected = TEXT.replace("\nold\n", "\n\nnew\n\n");
        assert_eq!(new, expected);
        assert_eq!(replaced(&new, "x", "new").unwrap(), expected);
    }

    #[test]
    fn a_missing_marker_is_an_error() {
        assert!(replaced(TEXT, "y", "new").is_err());
        assert!(replaced("<!-- bench-compare x: begin -->", "x", "new").is_err());
    }
}
