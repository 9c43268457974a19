//! Texts of other programs, sanitized for one line of output.

/// Every run of white space becomes one space.
#[must_use]
pub fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
