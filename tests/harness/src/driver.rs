//! Owns: runs of `cri-driver`, the CRI client written in Go. In: an endpoint and a command. Out: its JSON response.

use crate::peers;
use anyhow::{Context as _, Result, anyhow, bail};
use serde::Deserialize;
use std::path::PathBuf;
use tokio::process::Command;

#[derive(Clone, Debug)]
pub struct Driver {
    program: PathBuf,
    endpoint: String,
}

#[derive(Clone, Debug, Deserialize)]
pub struct DriverAnswer {
    pub ok: bool,
    pub millis: u64,
    #[serde(default)]
    pub result: serde_json::Value,
    pub error: Option<DriverError>,
}

/// A failed call as Go's gRPC reports it.
#[derive(Clone, Debug, Deserialize)]
pub struct DriverError {
    /// Name of the code, such as `Unavailable`.
    pub code: String,
    pub number: u32,
    /// Message without the code.
    pub message: String,
    /// Error string of Go, with code and message.
    pub text: String,
}

impl DriverAnswer {
    pub fn success(self) -> Result<serde_json::Value> {
        match self.error {
            None => Ok(self.result),
            Some(error) => Err(anyhow!("{}", error.text)),
        }
    }

    pub fn failure(self) -> Result<DriverError> {
        self.error.with_context(|| format!("the call succeeded: {}", self.result))
    }
}

impl Driver {
    /// `endpoint` is `unix:///PATH`.
    pub fn new(endpoint: &str) -> Result<Self> {
        Ok(Self { program: peers::cri_driver()?, endpoint: endpoint.to_owned() })
    }

    /// Runs one command. Dropping the future kills the client.
    pub async fn run(&self, args: &[&str]) -> Result<DriverAnswer> {
        let mut command = Command::new(&self.program);
        let output = command
            .args(["--endpoint", &self.endpoint])
            .args(args)
            .kill_on_drop(true)
            .output()
            .await
            .context("cannot run cri-driver")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        match output.status.code() {
            Some(0 | 1) => serde_json::from_slice(&output.stdout)
                .with_context(|| format!("cri-driver {args:?} printed no answer, but: {errors}")),
            _ => bail!("cri-driver {args:?} ended with {}: {errors}", output.status),
        }
    }
}
