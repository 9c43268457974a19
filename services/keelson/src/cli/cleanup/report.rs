//! The report of `keelson cleanup`.
//!
//! Owns: [`Report`]. In: one entry per object. Out: text or JSON.

use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Outcome {
    Removed,
    /// `--dry-run`.
    WouldRemove,
    Absent,
    /// It does not apply to this node; the detail says why.
    Skipped,
    Failed,
}

impl Outcome {
    fn text(self) -> &'static str {
        match self {
            Self::Removed => "removed",
            Self::WouldRemove => "would remove",
            Self::Absent => "absent",
            Self::Skipped => "skipped",
            Self::Failed => "FAILED",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    outcome: Outcome,
    kind: &'static str,
    name: String,
    detail: String,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    dry_run: bool,
    entries: Vec<Entry>,
}

impl Report {
    pub(super) fn new(dry_run: bool) -> Self {
        Self { dry_run, entries: Vec::new() }
    }

    pub(super) fn is_dry_run(&self) -> bool {
        self.dry_run
    }

    pub(super) fn add(
        &mut self,
        kind: &'static str,
        name: impl Into<String>,
        outcome: Outcome,
        detail: impl Into<String>,
    ) {
        self.entries.push(Entry { outcome, kind, name: name.into(), detail: detail.into() });
    }

    /// Removes an object that exists, unless this is a dry run.
    pub(super) async fn remove(
        &mut self,
        kind: &'static str,
        name: &str,
        detail: String,
        removal: impl AsyncFnOnce() -> Result<(), String>,
    ) {
        if self.dry_run {
            return self.add(kind, name, Outcome::WouldRemove, detail);
        }
        match removal().await {
            Ok(()) => self.add(kind, name, Outcome::Removed, detail),
            Err(error) => self.add(kind, name, Outcome::Failed, error),
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.entries.iter().any(|entry| entry.outcome == Outcome::Failed)
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for Entry { outcome, kind, name, detail } in &self.entries {
            let name = if name.is_empty() { String::new() } else { format!(" {name}") };
            let detail = if detail.is_empty() { String::new() } else { format!(": {detail}") };
            text.push_str(&format!("{:<12}  {kind}{name}{detail}\n", outcome.text()));
        }
        if self.entries.is_empty() {
            text.push_str("nothing to remove\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_line_per_object_and_failures_decide_the_exit_code() {
        let mut report = Report::new(false);
        assert_eq!(report.text(), "nothing to remove\n");
        report.remove("containerd lease", "keelson-1-2", "owner 1, 5 B".into(), async || Ok(())).await;
        report.add("node condition", "ImagePullsStalled", Outcome::Absent, "");
        assert!(!report.has_failed());
        report.remove("Lease", "kube-node-lease/keelson-n", String::new(), async || Err("403".into())).await;
        assert!(report.has_failed());
        let expected = "\
removed       containerd lease keelson-1-2: owner 1, 5 B
absent        node condition ImagePullsStalled
FAILED        Lease kube-node-lease/keelson-n: 403
";
        assert_eq!(report.text(), expected);
    }

    #[tokio::test]
    async fn a_dry_run_removes_nothing() {
        let mut report = Report::new(true);
        report.remove("containerd lease", "x", String::new(), async || panic!("removed")).await;
        assert_eq!(report.text(), "would remove  containerd lease x\n");
    }
}
