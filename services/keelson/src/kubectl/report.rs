//! The answer to a question.
//!
//! Owns: its form. Out: text with the verdict in the first line, or JSON.

use serde::Serialize;

use crate::cli::format::one_line;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    /// No problem was found.
    Healthy,
    /// A change is in progress.
    Pending,
    Failing,
    /// Facts that the verdict needs are not available.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Evidence {
    /// Who says it: `pod`, `node`, `events`, `agent`, `proxy`, `service`, `endpoints`.
    pub(super) source: &'static str,
    pub(super) text: String,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Report {
    pub(super) state: State,
    /// The answer in one sentence, which is printed first.
    pub(super) verdict: String,
    pub(super) evidence: Vec<Evidence>,
    /// What to do next; empty: nothing.
    pub(super) hint: String,
}

/// A verdict, and what to do next.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Finding {
    pub(super) state: State,
    pub(super) verdict: String,
    pub(super) hint: String,
}

impl Finding {
    pub(super) fn new(state: State, verdict: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { state, verdict: verdict.into(), hint: hint.into() }
    }

    pub(super) fn failing(verdict: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(State::Failing, verdict, hint)
    }

    pub(super) fn pending(verdict: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(State::Pending, verdict, hint)
    }

    pub(super) fn unknown(verdict: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(State::Unknown, verdict, hint)
    }
}

impl Report {
    pub(super) fn new(finding: Finding, evidence: Vec<Evidence>) -> Self {
        Self { state: finding.state, verdict: finding.verdict, evidence, hint: finding.hint }
    }

    pub(super) fn text(&self) -> String {
        let state = match self.state {
            State::Healthy => "HEALTHY",
            State::Pending => "PENDING",
            State::Failing => "FAILING",
            State::Unknown => "UNKNOWN",
        };
        let mut text = format!("{state}: {}\n", one_line(&self.verdict));
        let width = self.evidence.iter().map(|line| line.source.len()).max().unwrap_or(0);
        if !self.evidence.is_empty() {
            text.push('\n');
        }
        for Evidence { source, text: said } in &self.evidence {
            text.push_str(&format!("{source:width$}  {}\n", one_line(said)));
        }
        if !self.hint.is_empty() {
            text.push_str(&format!("\nNext: {}\n", one_line(&self.hint)));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_comes_first_and_no_text_breaks_a_line() {
        let evidence = vec![
            Evidence { source: "pod", text: "Pending\non n1".into() },
            Evidence { source: "events", text: "none".into() },
        ];
        let report = Report::new(Finding::pending("it waits", "wait"), evidence);
        let text = report.text();
        assert!(text.starts_with("PENDING: it waits\n\npod     Pending"), "{text}");
        assert!(text.ends_with("events  none\n\nNext: wait\n") && text.lines().count() == 6, "{text}");
        assert_eq!(
            Report { hint: String::new(), evidence: Vec::new(), ..report }.text(),
            "PENDING: it waits\n"
        );
    }
}
