//! Owns: runs of `cri-driver`, the CRI client of another make. In: an endpoint and a command. Out: its JSON answer.

use crate::peers;
use anyhow::{Context as _, Result, anyhow, bail};
use serde::Deserialize;
use std::path::PathBuf;
use tokio::process::Command;

/// The driver for one CRI endpoint.
#[derive(Clone, Debug)]
pub struct Driver {
    program: PathBuf,
    endpoint: String,
}

/// What a run printed.
#[derive(Clone, Debug, Deserialize)]
pub struct DriverAnswer {
    /// Whether the call succeeded.
    pub ok: bool,
    /// How long it took.
    pub millis: u64,
    /// The response.
    #[serde(default)]
    pub result: serde_json::Value,
    /// The error.
    pub error: Option<DriverError>,
}

/// A failed call as Go's gRPC saw it.
#[derive(Clone, Debug, Deserialize)]
pub struct DriverError {
    /// The name of the code, such as `Unavailable`.
    pub code: String,
    /// Its number.
    pub number: u32,
    /// The message without the code.
    pub message: String,
    /// The whole error.
    pub text: String,
}

impl DriverAnswer {
    /// The response of a call that must have succeeded.
    pub fn success(self) -> Result<serde_json::Value> {
        match self.error {
            None => Ok(self.result),
            Some(error) => Err(anyhow!("{}", error.text)),
        }
    }

    /// The error of a call that must have failed.
    pub fn failure(self) -> Result<DriverError> {
        self.error.with_context(|| format!("the call succeeded: {}", self.result))
    }
}

impl Driver {
    /// A driver for `unix:///PATH`.
    pub fn new(endpoint: &str) -> Result<Self> {
        Ok(Self { program: peers::cri_driver()?, endpoint: endpoint.to_owned() })
    }

    /// Runs one command and waits for its answer. Dropping the future kills the client.
    pub async fn run(&self, args: &[&str]) -> Result<DriverAnswer> {
        let mut command = Command::new(&self.program);
        command.args(["--endpoint", &self.endpoint, "--logtostderr=false", "--alsologtostderr=false"]);
        let output = command.args(args).kill_on_drop(true).output().await.context("cannot run cri-driver")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        match output.status.code() {
            Some(0 | 1) => serde_json::from_slice(&output.stdout)
                .with_context(|| format!("cri-driver {args:?} printed no answer; it said: {errors}")),
            _ => bail!("cri-driver {args:?} ended with {}: {errors}", output.status),
        }
    }
}
