//! What is in a bundle.
//!
//! In: the parts as they were collected. Out: `MANIFEST.txt` and `manifest.json`: for each part its file, where it comes
//! from, how long it took, its size, and what could not be had and why.

use std::time::Duration;

use serde::Serialize;

use super::collect::Collected;
use crate::cli::{
    format::{bytes, one_line},
    table::Table,
};

#[derive(Debug, Serialize)]
pub(super) struct Manifest {
    pub(super) version: &'static str,
    pub(super) node: String,
    /// When the collection began, in UTC (RFC 3339).
    pub(super) created: String,
    /// Why defaults were used in place of the settings; empty: the settings are valid.
    pub(super) settings_error: String,
    pub(super) is_root: bool,
    pub(super) parts: Vec<Entry>,
}

#[derive(Debug, Serialize)]
pub(super) struct Entry {
    pub(super) file: String,
    pub(super) source: String,
    pub(super) seconds: f64,
    pub(super) bytes: usize,
    /// More than the limit of a part was there.
    pub(super) truncated: bool,
    /// Number of values that were removed.
    pub(super) redacted: usize,
    pub(super) exit_code: Option<i32>,
    /// Empty: the part is complete.
    pub(super) error: String,
}

impl Entry {
    /// `collected` with the text that is written, after `redacted` values were removed from it.
    pub(super) fn new(
        file: String,
        source: String,
        redacted: usize,
        collected: &Collected,
        error: String,
    ) -> Self {
        let seconds = |took: Duration| (took.as_secs_f64() * 1000.0).round() / 1000.0;
        Self {
            file,
            source,
            seconds: seconds(collected.took),
            bytes: collected.text.len(),
            truncated: collected.is_truncated,
            redacted,
            exit_code: collected.exit_code,
            error,
        }
    }
}

impl Manifest {
    pub(super) fn failed(&self) -> usize {
        self.parts.iter().filter(|part| !part.error.is_empty()).count()
    }

    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "Support bundle of keelson {} on {}, {}\n{} parts, {} not available or incomplete, {} secrets removed\n",
            self.version,
            self.node,
            self.created,
            self.parts.len(),
            self.failed(),
            self.parts.iter().map(|part| part.redacted).sum::<usize>(),
        );
        if !self.is_root {
            text.push_str("Not collected as root: much cannot be read by other users.\n");
        }
        if !self.settings_error.is_empty() {
            text.push_str(&format!(
                "Defaults in place of the settings: {}\n",
                one_line(&self.settings_error)
            ));
        }
        let mut table = Table::new(&["FILE", "SECONDS", "SIZE", "NOTE"]);
        let mut sources = Table::new(&["FILE", "SOURCE"]);
        for part in &self.parts {
            let mut notes: Vec<String> = Vec::new();
            if !part.error.is_empty() {
                notes.push(one_line(&part.error));
            }
            if part.truncated {
                notes.push("cut off".into());
            }
            if part.redacted > 0 {
                notes.push(format!("{} removed", part.redacted));
            }
            let (file, seconds) = (part.file.clone(), format!("{:.2}", part.seconds));
            table.row([file, seconds, bytes(part.bytes as u64), notes.join("; ")]);
            sources.row([part.file.clone(), part.source.clone()]);
        }
        format!("{text}\n{}\n{}", table.text(), sources.text())
    }
}
