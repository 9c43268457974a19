//! Texts of other programs, made fit for a line of output.

/// The text on one line: every run of white space becomes one space.
#[must_use]
pub fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
