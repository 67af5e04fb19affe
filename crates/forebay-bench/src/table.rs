//! Aligned text tables.

/// Lays out rows under a header: the first column to the left, the others to the right where
/// they hold numbers.
pub(crate) fn layout(header: &[&str], rows: &[Vec<String>]) -> String {
    let width_of = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        let widest = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
        widest.max(header[column].chars().count())
    };
    let widths: Vec<usize> = (0..header.len()).map(width_of).collect();
    let mut text = String::new();
    let header: Vec<String> = header.iter().map(|&cell| cell.to_owned()).collect();
    let rule: Vec<String> = widths.iter().map(|&width| "─".repeat(width)).collect();
    for row in [&header, &rule].into_iter().chain(rows) {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, &width)| pad(cell, width)).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

fn pad(cell: &str, width: usize) -> String {
    let is_number =
        cell.starts_with(|char: char| char.is_ascii_digit()) && !cell.contains(char::is_whitespace);
    if is_number { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows =
            [vec!["read".to_owned(), "1.5".to_owned()], vec!["é".to_owned(), "10.25".to_owned()]];
        let text = layout(&["way", "GB/s"], &rows);
        assert_eq!(text, "way   GB/s\n────  ─────\nread    1.5\né     10.25\n");
    }
}
