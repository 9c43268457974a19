//! Owns: a steady load of CRI calls by the kubelet's client library (`cri-driver load`).
//! In: a CRI endpoint and a rate. Out: every failed call with its time, and latencies.

use crate::peers;
use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::task::JoinHandle;

/// Ends with this process.
#[derive(Debug)]
pub struct Load {
    child: Child,
    /// Closed to end the load.
    stdin: Option<ChildStdin>,
    reader: JoinHandle<Result<LoadReport>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    pub result: LoadResult,
    pub failures: Vec<FailedCall>,
}

/// Totals. Latencies count from the moment at which a call was due.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct LoadResult {
    pub calls: u64,
    pub failed: u64,
    pub median_micros: u64,
    pub p99_micros: u64,
    pub longest_micros: u64,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FailedCall {
    pub call: String,
    /// When it was due, in Unix milliseconds.
    pub started_millis: u64,
    /// When it failed, in Unix milliseconds.
    pub ended_millis: u64,
    pub error: CallError,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub struct CallError {
    /// Name of the gRPC code.
    pub code: String,
    pub message: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Failed(FailedCall),
    Ended { ok: bool, result: Option<LoadResult>, error: Option<CallError> },
}

impl Load {
    /// Starts `rate` calls a second over `clients` pairs of connections (one for each CRI service, as in a kubelet),
    /// and waits until all are connected. `ImageStatus` asks for `image`.
    pub async fn start(endpoint: &str, rate: u32, clients: u32, image: &str) -> Result<Self> {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(peers::cri_driver()?);
        command.args(["--endpoint", endpoint, "load"]);
        command.args(["--rate", &rate.to_string(), "--clients", &clients.to_string(), image]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
        let mut child = command.spawn().context("cannot run cri-driver")?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("cri-driver has no standard output")?;
        let mut lines = BufReader::new(stdout).lines();
        let first = lines.next_line().await.context("cannot read from cri-driver")?;
        if !first.as_deref().is_some_and(|line| line.contains("\"started\"")) {
            bail!("cri-driver load did not start: {first:?}");
        }
        Ok(Self { child, stdin, reader: tokio::spawn(read(lines)) })
    }

    /// Whether it has ended by itself, which is an error.
    pub fn has_ended(&self) -> bool {
        self.reader.is_finished()
    }

    /// Ends the load and waits for calls in flight.
    pub async fn stop(mut self) -> Result<LoadReport> {
        drop(self.stdin.take());
        let report = self.reader.await.context("the reader of cri-driver panicked")??;
        self.child.wait().await.context("cannot wait for cri-driver")?;
        Ok(report)
    }
}

async fn read(mut lines: Lines<BufReader<ChildStdout>>) -> Result<LoadReport> {
    let mut failures = Vec::new();
    while let Some(line) = lines.next_line().await.context("cannot read from cri-driver")? {
        match serde_json::from_str(&line).with_context(|| format!("not a line of cri-driver: {line}"))? {
            Line::Failed(failed) => failures.push(failed),
            Line::Ended { ok: true, result: Some(result), .. } => return Ok(LoadReport { result, failures }),
            Line::Ended { error, .. } => bail!("cri-driver load failed: {error:?}"),
        }
    }
    bail!("cri-driver load ended without a result")
}
