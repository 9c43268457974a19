//! The report of `keelson doctor`.
//!
//! Owns: [`Report`]. In: checks, by part. Out: text or JSON, and whether one has failed.

use std::fmt::Write as _;

use clap::ValueEnum;
use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Part {
    /// Settings, state directory, debug socket and ports of the agent.
    Agent,
    /// Container runtime, limit, and the kubelet's configuration.
    Pulls,
    /// API server, credentials, permissions and node name.
    Heartbeats,
    /// Sources and permissions of the service endpoints.
    Endpoints,
    /// Kernel, ports, pod networks, conntrack, and a kube-proxy beside it.
    Proxy,
}

impl Part {
    pub(crate) const ALL: [Self; 5] =
        [Self::Agent, Self::Pulls, Self::Heartbeats, Self::Endpoints, Self::Proxy];

    fn name(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Pulls => "pulls",
            Self::Heartbeats => "heartbeats",
            Self::Endpoints => "endpoints",
            Self::Proxy => "proxy",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Outcome {
    Ok,
    /// It works, and is probably not what is wanted.
    Warning,
    Failed,
    /// It does not apply to this node, or cannot be looked at.
    Skipped,
}

impl Outcome {
    fn text(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "FAILED",
            Self::Skipped => "skipped",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Check {
    /// Part of the interface, such as `limit`.
    pub(crate) name: &'static str,
    pub(crate) outcome: Outcome,
    /// What was looked at, and what was found.
    pub(crate) found: String,
    /// What to do; empty if there is nothing to do.
    pub(crate) action: String,
}

impl Check {
    pub(crate) fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, outcome: Outcome::Ok, found: found.into(), action: String::new() }
    }

    pub(crate) fn skipped(name: &'static str, found: impl Into<String>) -> Self {
        Self { outcome: Outcome::Skipped, ..Self::ok(name, found) }
    }

    pub(crate) fn warning(name: &'static str, found: impl Into<String>, action: impl Into<String>) -> Self {
        Self { outcome: Outcome::Warning, action: action.into(), ..Self::ok(name, found) }
    }

    pub(crate) fn failed(name: &'static str, found: impl Into<String>, action: impl Into<String>) -> Self {
        Self { outcome: Outcome::Failed, ..Self::warning(name, found, action) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Section {
    part: Part,
    checks: Vec<Check>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    sections: Vec<Section>,
}

impl Report {
    pub(crate) fn add(&mut self, part: Part, checks: Vec<Check>) {
        self.sections.push(Section { part, checks });
    }

    fn count(&self, outcome: Outcome) -> usize {
        self.sections
            .iter()
            .flat_map(|section| &section.checks)
            .filter(|check| check.outcome == outcome)
            .count()
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.count(Outcome::Failed) > 0
    }

    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for Section { part, checks } in &self.sections {
            // Writing to a String does not fail.
            let _ = writeln!(text, "{}", part.name());
            text.push_str(&lines(checks));
        }
        let _ = write!(
            text,
            "{} ok, {} warnings, {} failed, {} skipped",
            self.count(Outcome::Ok),
            self.count(Outcome::Warning),
            self.count(Outcome::Failed),
            self.count(Outcome::Skipped)
        );
        text
    }
}

/// One line for each check, and one for what to do.
pub(crate) fn lines(checks: &[Check]) -> String {
    let mut text = String::new();
    for Check { name, outcome, found, action } in checks {
        let _ = writeln!(text, "  {:<8} {name}: {found}", outcome.text());
        if !action.is_empty() {
            let _ = writeln!(text, "           -> {action}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_for_each_check_and_one_for_what_to_do() {
        let mut report = Report::default();
        report.add(Part::Agent, vec![Check::ok("settings", "valid")]);
        report.add(
            Part::Pulls,
            vec![Check::warning("limit", "none", "set it"), Check::skipped("kubelet", "none")],
        );
        assert!(!report.has_failed());
        report.add(Part::Proxy, vec![Check::failed("ports", "taken", "stop it")]);
        assert!(report.has_failed());
        assert_eq!(
            report.text(),
            "agent\n  ok       settings: valid\npulls\n  warning  limit: none\n           -> set it\n  skipped  \
             kubelet: none\nproxy\n  FAILED   ports: taken\n           -> stop it\n1 ok, 1 warnings, 1 failed, 1 skipped"
        );
        let json = serde_json::to_value(&report).expect("serializes");
        assert_eq!(json["sections"][1]["checks"][0]["outcome"], "warning");
    }
}
