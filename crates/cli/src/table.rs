//! Text tables with aligned columns.

use std::io::{self, Write};

/// Prints a head and rows, aligned to the left.
pub fn print<const N: usize>(
    head: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let rows: Vec<[String; N]> = std::iter::once(head.map(str::to_owned))
        .chain(rows)
        .collect();
    let mut widths = [0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    for row in &rows {
        let cells = row.iter().zip(widths);
        let line: Vec<String> = cells
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        writeln!(out, "{}", line.join("  ").trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut out = Vec::new();
        let rows = [["a", "1"], ["longer", ""]].map(|row| row.map(str::to_owned));
        print(["X", "NUMBER"], rows.into_iter(), &mut out).expect("memory");
        let text = String::from_utf8_lossy(&out);
        assert_eq!(text, "X       NUMBER\na       1\nlonger\n");
    }
}
