//! The table at the beginning of `docs/performance.md`.
//!
//! Owns: the table and the comments around it. In: the page and the figures. Out: the page with the table.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};

use super::{Measured, format};

const BEGIN: &str = "<!-- figures: begin -->\n";
const END: &str = "<!-- figures: end -->\n";

/// The page with a new table between the two comments.
pub(super) fn insert(page: &str, figures: &[Measured]) -> Result<String> {
    let missing = |comment: &str| format!("it has no line {:?}", comment.trim_end());
    let (head, rest) = page.split_once(BEGIN).with_context(|| missing(BEGIN))?;
    let (_, tail) = rest.split_once(END).with_context(|| missing(END))?;
    Ok(format!("{head}{BEGIN}\n{}\n{END}{tail}", markdown(figures)))
}

fn markdown(figures: &[Measured]) -> String {
    let mut table = String::from(
        "| part | figure | Keelson | beside it | ratio | at most (target) |\n|---|---|---|---|---|---|\n",
    );
    let mut part = "";
    for figure in figures {
        let definition = figure.key.definition();
        // Once for each part.
        let shown = if definition.part == part { "" } else { definition.part };
        part = definition.part;
        let cells = [
            shown.to_owned(),
            definition.name.to_owned(),
            format::keelson(figure),
            format::peer(figure).unwrap_or_default(),
            figure.ratio().map(format::ratio).unwrap_or_default(),
            target(figure),
        ];
        let cells = cells.map(|cell| cell.replace('|', "\\|"));
        // Writing to a string does not fail.
        let _ = writeln!(table, "| {} |", cells.join(" | "));
    }
    table
}

fn target(figure: &Measured) -> String {
    let text = format::target(figure).unwrap_or_default();
    if figure.meets_target() == Some(false) { format!("{text} (missed)") } else { text }
}
