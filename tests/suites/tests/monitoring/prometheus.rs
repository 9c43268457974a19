//! A real Prometheus, and what it scrapes.
//!
//! Owns: its process, its settings, its HTTP API, and the families in the text of `/metrics`. In: targets, the shipped
//! rules. Out: results of queries.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use http::Method;
use keelson_harness::peers;
use keelson_harness::process::{Process, Program};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually, eventually_slow, free_port, http, http_get};
use serde_json::{Value, json};

use crate::files;

pub(crate) struct Target {
    pub(crate) job: &'static str,
    /// The label, in place of an address.
    pub(crate) instance: &'static str,
    /// On the machine's loopback.
    pub(crate) address: String,
}

impl Target {
    pub(crate) async fn scrape(&self) -> Result<String> {
        Ok(http_get(&format!("http://{}/metrics", self.address)).await?.success()?.text())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Counter,
    Gauge,
    Histogram,
    Info,
}

impl Kind {
    /// Names of the series of a family.
    pub(crate) fn series(self, family: &str) -> Vec<String> {
        let endings: &[&str] = match self {
            Self::Counter => &["_total"],
            Self::Gauge => &[""],
            Self::Histogram => &["_bucket", "_sum", "_count"],
            Self::Info => &["_info"],
        };
        endings.iter().map(|ending| format!("{family}{ending}")).collect()
    }
}

/// Of the text of `/metrics`.
pub(crate) fn families(text: &str) -> Result<BTreeMap<String, Kind>> {
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    types.map(|(name, kind)| Ok((name.to_owned(), kind.parse()?))).collect()
}

pub(crate) struct Prometheus {
    url: String,
    _process: Process,
}

impl Prometheus {
    /// Scrapes and evaluates every second.
    pub(crate) async fn start(scratch: &Scratch, targets: &[Target]) -> Result<Self> {
        let folder = scratch.dir("prometheus")?;
        let jobs: BTreeSet<&str> = targets.iter().map(|target| target.job).collect();
        let static_config =
            |target: &Target| json!({"targets": [target.address], "labels": {"instance": target.instance}});
        let scrape = |job: &str| {
            let of_job = targets.iter().filter(|target| target.job == job);
            json!({"job_name": job, "static_configs": of_job.map(static_config).collect::<Vec<_>>()})
        };
        let settings = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [files::path(files::RULES)],
            "scrape_configs": jobs.into_iter().map(scrape).collect::<Vec<_>>(),
        });
        let config = folder.join("prometheus.yaml");
        // JSON is YAML.
        std::fs::write(&config, settings.to_string())?;
        let address = format!("127.0.0.1:{}", free_port()?);
        let process = Program {
            name: "prometheus".to_owned(),
            path: peers::system("prometheus", "prometheus")?,
            args: vec![
                format!("--config.file={}", config.display()),
                format!("--storage.tsdb.path={}", folder.join("data").display()),
                format!("--web.listen-address={address}"),
            ],
            env: Vec::new(),
            log: folder.join("prometheus.log"),
        }
        .start()?;
        let url = format!("http://{address}");
        eventually(PATIENCE, "Prometheus is ready", || {
            let url = format!("{url}/-/ready");
            async move { http_get(&url).await?.success().map(drop) }
        })
        .await?;
        Ok(Self { url, _process: process })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    async fn api(&self, path: &str) -> Result<Value> {
        let answer = http(Method::GET, &format!("{}/api/v1/{path}", self.url), &[], Bytes::new()).await?;
        let text = answer.text();
        let mut value: Value = serde_json::from_str(&text).with_context(|| format!("{path}: {text}"))?;
        ensure!(value["status"] == "success", "{path}: {text}");
        Ok(value["data"].take())
    }

    /// Whether there is a result. An error if the expression is invalid.
    pub(crate) async fn query(&self, expr: &str) -> Result<bool> {
        let data = self.api(&format!("query?query={}", escaped(expr))).await?;
        Ok(data["result"].as_array().is_some_and(|result| !result.is_empty()))
    }

    /// Waits until every target has answered.
    pub(crate) async fn follows_all(&self, targets: usize) -> Result<()> {
        eventually_slow("every target was scraped", || async {
            let data = self.api("targets?state=active").await?;
            let active = data["activeTargets"].as_array().context("no targets")?;
            let healthy = active.iter().filter(|target| target["health"] == "up").count();
            ensure!(healthy == targets, "{data}");
            Ok(())
        })
        .await
    }

    /// Fails unless this number of rules is there and none has an error.
    pub(crate) async fn rules_are_healthy(&self, rules: usize) -> Result<()> {
        let data = self.api("rules").await?;
        let groups = data["groups"].as_array().into_iter().flatten();
        let all: Vec<&Value> =
            groups.flat_map(|group| group["rules"].as_array().into_iter().flatten()).collect();
        ensure!(all.len() == rules, "{} rules, not {rules}", all.len());
        match all.iter().find(|rule| rule["health"] != "ok") {
            Some(rule) => bail!("{rule}"),
            None => Ok(()),
        }
    }

    pub(crate) async fn fires(&self, alert: &str) -> Result<()> {
        let expr = format!("ALERTS{{alertname=\"{alert}\",alertstate=\"firing\"}}");
        ensure!(self.query(&expr).await?, "it does not fire");
        Ok(())
    }
}

/// For the value of a query parameter.
fn escaped(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
            other => format!("%{other:02X}"),
        })
        .collect()
}
