//! Owns: commands that a test runs to their end. In: a command. Out: its output and exit code.

use anyhow::{Context as _, Result, ensure};
use serde::de::DeserializeOwned;
use std::process::{Output, Stdio};
use std::time::Duration;
use tokio::process::Command;

/// Time limit of a command; far above what one takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

#[derive(Clone, Debug)]
pub struct CommandOutput {
    pub out: String,
    pub err: String,
    /// None if a signal ended it.
    pub code: Option<i32>,
}

impl From<Output> for CommandOutput {
    fn from(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { out: text(&output.stdout), err: text(&output.stderr), code: output.status.code() }
    }
}

impl CommandOutput {
    pub fn is_success(&self) -> bool {
        self.code == Some(0)
    }

    /// Fails unless the exit code is 0.
    pub fn success(self) -> Result<Self> {
        ensure!(self.is_success(), "{self:?}");
        Ok(self)
    }

    /// Standard output as JSON; fails unless the exit code is 0.
    pub fn json<T: DeserializeOwned>(self) -> Result<T> {
        let output = self.success()?;
        serde_json::from_str(&output.out)
            .with_context(|| format!("not the JSON that was expected: {output:?}"))
    }
}

/// Runs a command to its end, without standard input.
pub async fn run(mut command: Command) -> Result<CommandOutput> {
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(LIMIT, command.output()).await;
    let output = output.with_context(|| format!("{:?} does not end", command.as_std()))?;
    Ok(output.with_context(|| format!("cannot run {:?}", command.as_std()))?.into())
}
