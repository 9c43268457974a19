//! The shipped files, read as they are.
//!
//! Owns: rules, cases, dashboard, lists of families, names in docs. In: files of the repository. Out: typed contents.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use crate::prometheus::Kind;

/// Lists of the families of a crate, which unit tests keep equal to the code.
const LISTS: [&str; 6] = [
    "actors/pulls/src/metrics.txt",
    "actors/heartbeats/src/lease/metrics.txt",
    "actors/heartbeats/src/status/metrics.txt",
    "actors/endpoints/src/metrics.txt",
    "services/endpoints/src/server/metrics.txt",
    "services/proxy/src/metrics/metrics.txt",
];
pub(crate) const RULES: &str = "packaging/chart/keelson/rules.yaml";

pub(crate) fn path(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(file)
}

fn read(file: &str) -> Result<String> {
    std::fs::read_to_string(path(file)).with_context(|| format!("cannot read {file}"))
}

#[derive(Debug, Deserialize)]
pub(crate) struct Rules {
    pub(crate) groups: Vec<Group>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) rules: Vec<Rule>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Rule {
    pub(crate) alert: Option<String>,
    pub(crate) record: Option<String>,
    pub(crate) expr: String,
    #[serde(default)]
    pub(crate) labels: BTreeMap<String, String>,
    #[serde(default)]
    pub(crate) annotations: BTreeMap<String, String>,
}

impl Rule {
    pub(crate) fn name(&self) -> String {
        self.alert.clone().or_else(|| self.record.clone()).unwrap_or_default()
    }
}

impl Rules {
    pub(crate) fn read() -> Result<Self> {
        serde_saphyr::from_str(&read(RULES)?).context("rules.yaml is no list of rules")
    }

    pub(crate) fn recorded(&self) -> BTreeSet<String> {
        self.groups.iter().flat_map(|group| &group.rules).filter_map(|rule| rule.record.clone()).collect()
    }
}

/// Alerts that fire in a case of rules_test.yaml.
pub(crate) fn alerts_with_cases() -> Result<BTreeSet<String>> {
    #[derive(Deserialize)]
    struct Tests {
        tests: Vec<Case>,
    }
    #[derive(Deserialize)]
    struct Case {
        alert_rule_test: Vec<AlertCase>,
    }
    #[derive(Deserialize)]
    struct AlertCase {
        alertname: String,
        exp_alerts: Vec<Value>,
    }
    let tests: Tests = serde_saphyr::from_str(&read("packaging/monitoring/rules_test.yaml")?)?;
    let cases = tests.tests.into_iter().flat_map(|case| case.alert_rule_test);
    Ok(cases.filter(|case| !case.exp_alerts.is_empty()).map(|case| case.alertname).collect())
}

/// Names of sections.
pub(crate) fn headings(file: &str) -> Result<BTreeSet<String>> {
    let text = read(file)?;
    let headings = text.lines().filter(|line| line.starts_with('#'));
    Ok(headings.map(|line| line.trim_start_matches('#').trim().to_owned()).collect())
}

/// Families in the first column of tables: `` | `name` | ``.
pub(crate) fn documented(file: &str) -> Result<BTreeSet<String>> {
    let text = read(file)?;
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let is_family = |name: &str| {
        ["keelson_", "kubelet_", "kubeproxy_", "rest_client_", "process_"]
            .iter()
            .any(|begin| name.starts_with(begin))
    };
    Ok(rows.map(|(name, _)| name.to_owned()).filter(|name| is_family(name)).collect())
}

/// Lines `name kind: help.`
pub(crate) fn families_of_lists() -> Result<BTreeMap<String, Kind>> {
    let mut all = BTreeMap::new();
    for list in LISTS {
        for line in read(list)?.lines() {
            let (name, rest) = line.split_once(' ').with_context(|| format!("{list}: {line}"))?;
            let (kind, _) = rest.split_once(':').with_context(|| format!("{list}: {line}"))?;
            all.insert(name.to_owned(), kind.parse()?);
        }
    }
    Ok(all)
}

pub(crate) struct Dashboard(pub(crate) Value);

impl Dashboard {
    pub(crate) fn read() -> Result<Self> {
        serde_json::from_str(&read("packaging/monitoring/dashboard.json")?)
            .map(Self)
            .context("the dashboard is no JSON")
    }

    /// The title of the panel, and each of its expressions.
    pub(crate) fn expressions(&self) -> Vec<(String, String)> {
        let panels = self.0["panels"].as_array().into_iter().flatten();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        panels
            .flat_map(|panel| {
                let targets = panel["targets"].as_array().into_iter().flatten();
                targets.map(move |target| (text(&panel["title"]), text(&target["expr"])))
            })
            .collect()
    }

    /// With values for Grafana's variables.
    pub(crate) fn concrete(expr: &str) -> String {
        expr.replace("$instance", ".*").replace("$__rate_interval", "15s")
    }
}

impl std::str::FromStr for Kind {
    type Err = anyhow::Error;

    fn from_str(word: &str) -> Result<Self> {
        Ok(match word {
            "counter" => Self::Counter,
            "gauge" => Self::Gauge,
            "histogram" => Self::Histogram,
            "info" => Self::Info,
            other => bail!("a family is of the kind {other}"),
        })
    }
}
