//! Owns: the files of a report. In: a finished run, and its timeline. Out: `report.txt`, `report.json`, `report.html`, `samples.csv`.

use crate::page;
use crate::timeline::{Series, Timeline};
use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// What a run has found.
#[derive(Debug)]
pub(crate) struct Finished {
    title: &'static str,
    json: Value,
    text: String,
}

impl Finished {
    pub(crate) fn new(title: &'static str, report: &impl Serialize, text: String) -> Result<Self> {
        Ok(Self { title, json: serde_json::to_value(report).context("cannot encode the report")?, text })
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn write(&self, timeline: &Timeline, out: &Path) -> Result<()> {
        let json = serde_json::to_string_pretty(&self.json).context("cannot encode the report")?;
        let files = [
            ("report.json", json),
            ("report.txt", self.text.clone()),
            ("report.html", page::render(self.title, &self.text, timeline)),
            ("samples.csv", samples(&timeline.series())),
        ];
        for (name, content) in files {
            let path = out.join(name);
            fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }
}

fn samples(series: &Series) -> String {
    let mut text = "seconds,series,value\n".to_owned();
    for (name, values) in series {
        for (at, value) in values {
            let _ = writeln!(text, "{at:.1},\"{name}\",{value}");
        }
    }
    text
}
