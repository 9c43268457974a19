//! Owns: what the tests share. In: settings. Out: an agent with a folder of manifests, the folder, and the output of
//! the agent and its commands.

use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::{endpoint, port, service, slice};
use keelson_cluster::manifests::ManifestFolder;
use keelson_harness::agent::{Agent, Settings, no_runtime};
use keelson_harness::command::{self, CommandOutput};
use keelson_harness::process::resident_kib;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::free_port;
pub(crate) use keelson_harness::util::{ensure_contains, eventually_slow};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::process::{Child, Command};

/// Timeout of steps that take long only on a very busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// Writes all manifests that are shipped as samples.
pub(crate) fn put_samples(manifests: &ManifestFolder) -> Result<()> {
    let samples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/manifests");
    for entry in fs::read_dir(&samples).with_context(|| format!("no {}", samples.display()))? {
        let file = entry?.path();
        let name = file.file_name().and_then(|name| name.to_str()).context("a sample has a name")?;
        manifests.write(name, &fs::read_to_string(&file)?)?;
    }
    Ok(())
}

/// A Service of namespace `ns` with a port `http` and these ready endpoints on other nodes, and its slice.
pub(crate) fn plain(name: &str, cluster_ip: &str, addresses: &[&str]) -> Vec<Value> {
    let endpoints: Vec<_> = addresses.iter().map(|ip| endpoint(ip, "elsewhere", &json!({}))).collect();
    let spec = json!({"clusterIP": cluster_ip, "clusterIPs": [cluster_ip], "ipFamilies": ["IPv4"]});
    vec![
        of_namespace(service(name, &[port("http", 80)], &spec)),
        of_namespace(slice(name, "a", &[port("http", 8080)], &endpoints)),
    ]
}

pub(crate) fn of_namespace(mut object: Value) -> Value {
    object["metadata"]["namespace"] = json!("ns");
    object
}

/// An agent, not started yet, and its folder of manifests.
pub(crate) struct TestEnv {
    pub(crate) agent: Agent,
    pub(crate) manifests: ManifestFolder,
    pub(crate) tcp: String,
    pub(crate) scratch: Scratch,
}

impl TestEnv {
    /// Listens on a unix socket and on a port of loopback.
    pub(crate) fn new() -> Result<Self> {
        let scratch = Scratch::new()?;
        let manifests = ManifestFolder::new(scratch.dir("manifests")?);
        let folder = scratch.dir("agent")?;
        let tcp = format!("tcp://127.0.0.1:{}", free_port()?);
        let listen = vec![format!("unix://{}/endpoints.sock", folder.display()), tcp.clone()];
        let settings = Settings::new()
            .set("endpoints.source", "files")
            .set("endpoints.manifests", manifests.path().display().to_string())
            .set("endpoints.listen", listen);
        let agent = Agent::new_in(&folder, free_port()?, &no_runtime(&scratch), &settings)?;
        Ok(Self { agent, manifests, tcp, scratch })
    }

    /// The same, with the agent started and a Service of [`plain`] named `web`.
    pub(crate) async fn started() -> Result<Self> {
        let mut env = Self::new()?;
        env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.1"]))?;
        env.agent.start_live().await?;
        env.wait_for_rev(1).await?;
        Ok(env)
    }

    /// The URL of its socket.
    pub(crate) fn target(&self) -> String {
        self.agent.endpoints_target()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        PathBuf::from(self.target().trim_start_matches("unix://"))
    }

    /// Runs a command of the agent's program, with the agent's settings if it takes any.
    pub(crate) async fn keelson(&self, args: &[&str]) -> Result<CommandOutput> {
        let mut command = Command::new(self.agent.program());
        command.args(args);
        command::run(command).await
    }

    pub(crate) async fn endpoints(&self, args: &[&str]) -> Result<CommandOutput> {
        self.agent.keelson(&[&["endpoints"], args].concat()).await
    }

    pub(crate) async fn watch(&self, args: &[&str]) -> Result<CommandOutput> {
        let target = self.target();
        let mut all = vec!["watch", "--target", &target];
        all.extend(args);
        self.keelson(&all).await
    }

    /// State of service endpoints, in JSON.
    pub(crate) async fn state(&self) -> Result<Value> {
        let output = self.endpoints(&["-o", "json"]).await?.success()?;
        serde_json::from_str(&output.out).with_context(|| format!("no JSON: {}", output.out))
    }

    /// Waits until the agent is healthy and at this revision, and returns its instance.
    /// And until it is on disk.
    pub(crate) async fn wait_for_rev(&self, rev: u64) -> Result<u64> {
        let instance_id = eventually_slow(&format!("the agent is at revision {rev}"), || async {
            let state = self.state().await?;
            ensure!(state["state"] == "synced" && state["rev"] == rev, "{state}");
            state["instance_id"].as_str().context("no instance")?.parse().context("no number")
        })
        .await?;
        self.agent.endpoints_written().await?;
        Ok(instance_id)
    }

    /// Waits until this number of callers wait for the state after this revision.
    pub(crate) async fn wait_for_watchers(&self, count: usize, rev: u64) -> Result<()> {
        eventually_slow(&format!("{count} callers wait at revision {rev}"), || async {
            let state = self.state().await?;
            let watchers = state["watchers"].as_array().context("no watchers")?;
            let there = watchers.iter().filter(|watcher| watcher["rev"] == rev).count();
            ensure!(there == count && watchers.len() == count, "{watchers:?}");
            Ok(())
        })
        .await
    }

    /// Memory used by the agent, in bytes.
    pub(crate) fn memory(&self) -> Result<u64> {
        let pid = self.agent.pid().context("the agent does not run")?;
        Ok(resident_kib(pid)? * 1024)
    }

    pub(crate) fn log_lines(&self) -> Result<usize> {
        Ok(self.agent.log()?.lines().count())
    }
}

/// Sends SIGINT to a command, and waits for its end.
pub(crate) async fn interrupt(mut child: Child) -> Result<Option<i32>> {
    let pid = child.id().context("it has ended already")?;
    kill(Pid::from_raw(pid.try_into()?), Signal::SIGINT).context("cannot interrupt it")?;
    let ended = tokio::time::timeout(LONG, child.wait()).await.context("Ctrl-C does not end it")?;
    Ok(ended?.code())
}
