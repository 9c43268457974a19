//! Text tables.
//!
//! In: a head and rows of cells. Out: lines with aligned columns, without trailing blanks.

#[derive(Debug)]
pub(super) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(head: &[&str]) -> Self {
        Self { rows: vec![head.iter().map(ToString::to_string).collect()] }
    }

    /// Adds a row; an empty cell is shown as `-`.
    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let filled = |cell: String| if cell.is_empty() { "-".into() } else { cell };
        self.rows.push(cells.into_iter().map(filled).collect());
    }

    /// Whether it has no rows below the head.
    pub(super) fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    pub(super) fn text(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            let cells: Vec<String> =
                row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
            text.push_str(cells.join("  ").trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&["NAME", "N", "TEXT"]);
        assert!(table.is_empty());
        table.row(["a".into(), "1000000".into(), String::new()]);
        table.row(["\u{e4}\u{f6}\u{fc}-name".into(), "2".into(), "long text".into()]);
        assert_eq!(
            table.text(),
            "NAME      N        TEXT\na         1000000  -\n\u{e4}\u{f6}\u{fc}-name  2        long text\n"
        );
    }
}
