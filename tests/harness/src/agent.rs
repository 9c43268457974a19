//! Owns: a `keelson agent` of the test. In: settings. Out: its sockets and pages, and control of its process.

use crate::command::{self, CommandOutput};
use crate::cri::Cri;
use crate::peers;
use crate::process::{Process, Program};
use crate::scratch::Scratch;
use crate::util::{Answer, PATIENCE, eventually, free_port, http_get, metric};
use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use tokio::process::Command;

/// Settings beyond the sockets and folders, which the harness sets.
#[derive(Clone, Debug, Default)]
pub struct Settings(toml::Table);

impl Settings {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    pub fn limit(limit: i64) -> Self {
        Self::new().set("pulls.max_parallel_image_pulls", limit)
    }

    /// Sets one value by its dotted name.
    pub fn set(mut self, name: &str, value: impl Into<toml::Value>) -> Self {
        insert(&mut self.0, name, value.into());
        self
    }

    /// Merges both; values of `over` win.
    pub fn with_overrides(self, over: &Self) -> Self {
        Self(merge(self.0, over.0.clone()))
    }

    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(&self.0).context("the settings are no TOML")
    }
}

fn insert(table: &mut toml::Table, name: &str, value: toml::Value) {
    match name.split_once('.') {
        None => {
            table.insert(name.to_owned(), value);
        }
        Some((first, rest)) => {
            let inner = table.entry(first).or_insert_with(|| toml::Value::Table(toml::Table::new()));
            if !inner.is_table() {
                *inner = toml::Value::Table(toml::Table::new());
            }
            if let toml::Value::Table(inner) = inner {
                insert(inner, rest, value);
            }
        }
    }
}

/// Endpoint of a runtime that does not exist: an agent with it is live, but not ready.
pub fn no_runtime(scratch: &Scratch) -> String {
    format!("unix://{}/nowhere.sock", scratch.path().display())
}

/// Killed on drop.
#[derive(Debug)]
pub struct Agent {
    folder: PathBuf,
    port: u16,
    runtime_endpoint: String,
    settings: Settings,
    program: Program,
    process: Option<Process>,
    predecessors: Vec<Process>,
}

impl Agent {
    /// Starts an agent below `scratch` before a runtime (or another agent) and waits until it is ready.
    pub async fn start(scratch: &Scratch, runtime_endpoint: &str, settings: &Settings) -> Result<Self> {
        let mut agent = Self::new(scratch, runtime_endpoint, settings)?;
        agent.start_again().await?;
        Ok(agent)
    }

    pub fn new(scratch: &Scratch, runtime_endpoint: &str, settings: &Settings) -> Result<Self> {
        Self::new_in(&scratch.numbered("a")?, free_port()?, runtime_endpoint, settings)
    }

    /// Prepares an agent in a folder of the caller, with its HTTP server on `port`.
    pub fn new_in(folder: &Path, port: u16, runtime_endpoint: &str, settings: &Settings) -> Result<Self> {
        let program = Program {
            name: "keelson agent".to_owned(),
            path: peers::keelson()?,
            args: vec![
                "agent".to_owned(),
                "--config".to_owned(),
                folder.join("keelson.toml").display().to_string(),
            ],
            env: Vec::new(),
            log: folder.join("keelson.log"),
        };
        let mut agent = Self {
            folder: folder.to_owned(),
            port,
            runtime_endpoint: runtime_endpoint.to_owned(),
            settings: Settings::new(),
            program,
            process: None,
            predecessors: Vec::new(),
        };
        agent.configure(settings)?;
        Ok(agent)
    }

    /// Changes one setting as [`Agent::configure`] does.
    pub fn set(&mut self, name: &str, value: impl Into<toml::Value>) -> Result<()> {
        self.configure(&self.settings.clone().set(name, value))
    }

    /// Writes a new configuration file; a running agent reads it on [`Agent::sighup`].
    pub fn configure(&mut self, settings: &Settings) -> Result<()> {
        self.settings = settings.clone();
        let at = self.folder.display();
        let own = Settings::new()
            .set("agent.node_name", "node")
            // No successor starts, except in suites about restarts, which set it.
            .set("agent.handover_timeout", "0s")
            .set("agent.state_dir", format!("{at}/state"))
            .set("cri.listen", format!("unix://{at}/cri.sock"))
            .set("cri.runtime_endpoint", self.runtime_endpoint.as_str())
            // The free space and speed of the machine's disk must not change results.
            .set("pulls.retain_min_free_percent", 0)
            .set("endpoints.write_timeout", "10m")
            .set("debug.listen", format!("unix://{at}/debug.sock"))
            .set("debug.http", format!("127.0.0.1:{}", self.port))
            .set("endpoints.listen", vec![format!("unix://{at}/endpoints.sock")]);
        let all = merge(own.0, settings.0.clone());
        let text = toml::to_string(&all).context("the settings are no TOML")?;
        fs::write(self.config(), text).with_context(|| format!("cannot write {}", self.config().display()))
    }

    pub fn env(&mut self, name: &str, value: &str) {
        self.program.env.push((name.to_owned(), value.to_owned()));
    }

    pub fn arg(&mut self, arg: &str) {
        self.program.args.push(arg.to_owned());
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.join("cri.sock")
    }

    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    pub fn debug_socket(&self) -> PathBuf {
        self.folder.join("debug.sock")
    }

    pub fn endpoints_target(&self) -> String {
        format!("unix://{}/endpoints.sock", self.folder.display())
    }

    pub fn state_dir(&self) -> PathBuf {
        self.folder.join("state")
    }

    pub fn config(&self) -> PathBuf {
        self.folder.join("keelson.toml")
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// From its next start on, another build of it runs.
    pub fn set_program(&mut self, path: &Path) {
        path.clone_into(&mut self.program.path);
    }

    pub fn program(&self) -> &Path {
        &self.program.path
    }

    /// None unless the harness has it running.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::pid)
    }

    pub async fn cri(&self) -> Result<Cri> {
        Cri::connect(&self.socket()).await
    }

    /// Runs a subcommand of its program with its debug socket.
    pub async fn keelson(&self, args: &[&str]) -> Result<CommandOutput> {
        let mut command = Command::new(self.program());
        command.args(args).args(["--socket", &format!("unix://{}", self.debug_socket().display())]);
        command::run(command).await
    }

    /// Output of a subcommand that must succeed, with its debug socket.
    pub async fn output(&self, args: &[&str]) -> Result<String> {
        Ok(self.keelson(args).await?.success()?.out)
    }

    pub async fn keelson_by_config(&self, args: &[&str]) -> Result<CommandOutput> {
        let mut command = Command::new(self.program());
        command.args(args).arg("--config").arg(self.config());
        command::run(command).await
    }

    /// Waits until the served endpoints are on disk: a revision is served while it is being written.
    pub async fn endpoints_written(&self) -> Result<()> {
        eventually(PATIENCE, "the endpoints are on disk", || async {
            let text = self.output(&["actors", "EndpointPublisher"]).await?;
            ensure!(text.contains("\"writing\": false"), "{text}");
            Ok(())
        })
        .await
    }

    /// A value of `/metrics`; `name` includes all labels.
    pub async fn metric(&self, name: &str) -> Result<Option<f64>> {
        metric(&self.http_get("/metrics").await?.success()?.text(), name)
    }

    /// Starts it and waits until its sockets exist. The runtime may not be reachable.
    pub async fn start_live(&mut self) -> Result<()> {
        if self.process.is_some() {
            bail!("the agent is running already");
        }
        self.process = Some(self.program.start()?);
        self.wait_until_answers("/livez").await
    }

    pub async fn start_again(&mut self) -> Result<()> {
        self.start_live().await?;
        self.ready().await
    }

    /// Starts it and expects it to exit by itself, as an agent that refuses to run does.
    pub async fn start_refused(&mut self) -> Result<ExitStatus> {
        let mut process = self.program.start()?;
        process.wait(PATIENCE).await
    }

    pub async fn ready(&mut self) -> Result<()> {
        self.wait_until_answers("/readyz").await
    }

    async fn wait_until_answers(&mut self, path: &str) -> Result<()> {
        let url = format!("{}{path}", self.url());
        let process = self.process.as_mut().context("the agent is not running")?;
        let mut ended = None;
        let waited = eventually(PATIENCE, &format!("the agent answers {path}"), || {
            ended = process.ended().ok().flatten();
            let (url, ended) = (url.clone(), ended);
            async move {
                match ended {
                    // Nothing to wait for: handled below.
                    Some(_) => Ok(()),
                    None => http_get(&url).await?.success().map(drop),
                }
            }
        })
        .await;
        let log = process.log_tail();
        if let Some(status) = ended {
            self.process = None;
            bail!("the agent ended with {status}; its log ends:\n{log}");
        }
        waited.with_context(|| format!("the agent's log ends:\n{log}"))
    }

    /// Restarts it as an upgrade does: SIGTERM, and the next process at once. Waits until that serves; the old process
    /// continues the calls it holds. Needs `agent.handover_timeout`, but neither a state disk nor readiness.
    pub async fn restart(&mut self) -> Result<()> {
        self.sigterm()?;
        self.start_serving().await
    }

    /// Like [`Agent::restart`] with a runtime that serves. Returns the old process, which exits when it holds no more
    /// calls, as soon as the new one is ready.
    pub async fn replace(&mut self) -> Result<Process> {
        self.sigterm()?;
        self.start_successor().await
    }

    /// Like [`Agent::replace`], after SIGTERM was sent already.
    pub async fn start_successor(&mut self) -> Result<Process> {
        self.start_serving().await?;
        self.ready().await?;
        self.predecessors.pop().context("the agent was running")
    }

    /// Starts the next process beside one that is terminating, which becomes a predecessor. Until the new one serves,
    /// the old one may answer instead.
    async fn start_serving(&mut self) -> Result<()> {
        const SERVES: &str = "agent serving";
        let old = self.process.take().context("the agent is not running")?;
        let before = self.log()?.matches(SERVES).count();
        self.predecessors.push(old);
        let mut process = self.program.start()?;
        let served = eventually(2 * PATIENCE, "the next agent serves", || {
            let (ended, log) = (process.ended(), self.log());
            async move {
                let serves = log?.matches(SERVES).count() > before;
                // One that has exited is handled below.
                ensure!(serves || ended?.is_some(), "it does not");
                Ok(())
            }
        })
        .await;
        if let Some(status) = process.ended()? {
            bail!("the next agent ended with {status}; its log ends:\n{}", process.log_tail());
        }
        self.process = Some(process);
        served.with_context(|| format!("its log ends:\n{}", log_tail(&self.log().unwrap_or_default())))
    }

    /// Waits until the running process has the state folder; before that the old one may answer.
    pub async fn owns_state(&self) -> Result<()> {
        let pid = self.pid().context("the agent is not running")?.to_string();
        let file = self.state_dir().join("keelson.pid");
        eventually(PATIENCE, "the agent has the state folder", || async {
            let holder = fs::read_to_string(&file).unwrap_or_default();
            ensure!(holder.trim() == pid, "{holder:?} has it, not {pid}");
            Ok(())
        })
        .await
        .with_context(|| format!("the agent's log ends:\n{}", self.log().unwrap_or_default()))
    }

    /// Sends SIGKILL and starts it at once, while the kernel still tears down the old process.
    pub async fn kill9_and_start(&mut self) -> Result<()> {
        let mut old = self.process.take().context("the agent is not running")?;
        old.signal(Signal::SIGKILL)?;
        self.process = Some(self.program.start()?);
        // Reaps it, so that its log is not printed.
        let _ended = old.wait(PATIENCE).await?;
        self.owns_state().await?;
        self.ready().await
    }

    pub fn sigterm(&mut self) -> Result<()> {
        self.process.as_mut().context("the agent is not running")?.send_sigterm()
    }

    pub fn kill9(&mut self) -> Result<()> {
        self.process.take().context("the agent is not running")?.kill9()
    }

    /// Waits until it exits by itself, or after [`Agent::sigterm`].
    pub async fn end(&mut self) -> Result<ExitStatus> {
        self.process.take().context("the agent is not running")?.wait(PATIENCE).await
    }

    pub async fn terminate(&mut self) -> Result<ExitStatus> {
        self.process.take().context("the agent is not running")?.terminate(PATIENCE).await
    }

    /// Number of restarted agents that have not exited yet because they hold calls.
    pub fn predecessors(&mut self) -> usize {
        self.predecessors.retain_mut(|old| !matches!(old.ended(), Ok(Some(_))));
        self.predecessors.len()
    }

    pub fn sighup(&mut self) -> Result<()> {
        self.process.as_mut().context("the agent is not running")?.signal(Signal::SIGHUP)
    }

    /// None while it runs.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.process.as_mut().context("the agent was not started")?.ended()
    }

    pub fn log_file(&self) -> PathBuf {
        self.program.log.clone()
    }

    /// The log of all its runs.
    pub fn log(&self) -> Result<String> {
        fs::read_to_string(&self.program.log).with_context(|| format!("no {}", self.program.log.display()))
    }

    pub async fn http_get(&self, path: &str) -> Result<Answer> {
        http_get(&format!("{}{path}", self.url())).await
    }

    pub async fn json(&self, path: &str) -> Result<serde_json::Value> {
        let answer = self.http_get(path).await?.success()?;
        serde_json::from_slice(&answer.body).with_context(|| format!("{path} is no JSON: {}", answer.text()))
    }

    pub async fn pulls_json(&self) -> Result<serde_json::Value> {
        self.json("/debug/pulls").await
    }
}

fn log_tail(log: &str) -> &str {
    let from = log.char_indices().rev().filter(|(_, c)| *c == '\n').nth(20).map_or(0, |(at, _)| at + 1);
    &log[from..]
}

/// Merges `over` into `base`; values of `over` win.
fn merge(mut base: toml::Table, over: toml::Table) -> toml::Table {
    for (key, value) in over {
        let value = match (base.remove(&key), value) {
            (Some(toml::Value::Table(below)), toml::Value::Table(above)) => {
                toml::Value::Table(merge(below, above))
            }
            (_, value) => value,
        };
        base.insert(key, value);
    }
    base
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_the_test_override_those_of_the_harness() {
        let own = Settings::new().set("debug.http", "one").set("debug.listen", "two");
        let test = Settings::limit(3).set("debug.http", "three");
        let text = toml::to_string(&merge(own.0, test.0)).unwrap();
        assert_eq!(
            text,
            "[debug]\nhttp = \"three\"\nlisten = \"two\"\n\n[pulls]\nmax_parallel_image_pulls = 3\n"
        );
    }
}
