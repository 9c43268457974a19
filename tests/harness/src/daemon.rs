//! Owns: a program that a test starts, stops and restarts. In: the program, and a readiness check. Out: control of its
//! process.

use crate::process::{Process, Program};
use crate::util::{PATIENCE, eventually};
use anyhow::{Context as _, Result, bail};
use std::fs;
use std::process::ExitStatus;
use std::time::Duration;

/// Maximum time until a program serves: on a busy machine, an API server has taken more than a minute.
const START: Duration = PATIENCE.saturating_mul(2);

/// Killed on drop.
#[derive(Debug)]
pub struct Daemon {
    program: Program,
    process: Option<Process>,
}

impl Daemon {
    pub fn new(program: Program) -> Self {
        Self { program, process: None }
    }

    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::pid)
    }

    pub fn arg(&mut self, arg: &str) {
        self.program.args.push(arg.to_owned());
    }

    pub fn process(&mut self) -> Result<&mut Process> {
        self.process.as_mut().with_context(|| format!("{} is not running", self.program.name))
    }

    pub fn spawn(&mut self) -> Result<()> {
        if self.process.is_some() {
            bail!("{} is running already", self.program.name);
        }
        self.process = Some(self.program.start()?);
        Ok(())
    }

    /// Waits until `check` succeeds. An error if the program exits before.
    pub async fn ready<F: Future<Output = Result<()>>>(
        &mut self,
        mut check: impl FnMut() -> F,
    ) -> Result<()> {
        let name = self.program.name.clone();
        let process = self.process()?;
        let mut ended = None;
        let waited = eventually(START, &format!("{name} serves"), || {
            ended = process.ended().ok().flatten();
            let check = ended.is_none().then(&mut check);
            async move {
                match check {
                    // Nothing to wait for.
                    None => Ok(()),
                    Some(check) => check.await,
                }
            }
        })
        .await;
        let log = process.log_tail();
        if let Some(status) = ended {
            self.process = None;
            bail!("{name} ended with {status}; its log ends:\n{log}");
        }
        waited.with_context(|| format!("the log of {name} ends:\n{log}"))
    }

    /// Starts it and waits until `check` succeeds. Killed if it does not serve in time.
    pub async fn start<F: Future<Output = Result<()>>>(&mut self, check: impl FnMut() -> F) -> Result<()> {
        self.spawn()?;
        let ready = self.ready(check).await;
        if ready.is_err() {
            self.process = None;
        }
        ready
    }

    /// False as well after it ended by itself.
    pub fn is_running(&mut self) -> Result<bool> {
        if let Some(process) = &mut self.process
            && process.ended()?.is_some()
        {
            self.process = None;
        }
        Ok(self.process.is_some())
    }

    pub fn kill9(&mut self) -> Result<()> {
        self.take()?.kill9()
    }

    /// Sends SIGKILL to its whole process group.
    pub fn kill9_group(&mut self) -> Result<()> {
        self.take()?.kill9_group()
    }

    pub async fn terminate(&mut self) -> Result<ExitStatus> {
        self.take()?.terminate(2 * PATIENCE).await
    }

    fn take(&mut self) -> Result<Process> {
        self.process.take().with_context(|| format!("{} is not running", self.program.name))
    }

    /// The log of all its runs.
    pub fn log(&self) -> Result<String> {
        fs::read_to_string(&self.program.log).with_context(|| format!("no {}", self.program.log.display()))
    }
}

/// Gives a type with a field `daemon` the methods that control its process.
#[macro_export]
macro_rules! daemon_life {
    ($host:ty) => {
        impl $host {
            pub fn pid(&self) -> Option<u32> {
                self.daemon.pid()
            }

            /// Sends SIGKILL. Its files stay, and its children keep running.
            pub fn kill9(&mut self) -> anyhow::Result<()> {
                self.daemon.kill9()
            }

            pub async fn terminate(&mut self) -> anyhow::Result<std::process::ExitStatus> {
                self.daemon.terminate().await
            }

            /// The log of all its runs.
            pub fn log(&self) -> anyhow::Result<String> {
                self.daemon.log()
            }
        }
    };
}
