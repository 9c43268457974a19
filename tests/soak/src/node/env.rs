//! Owns: the cluster of one node, with each process in a lock of its own, so that faults of different lanes meet. In: a place that the
//! process has entered. Out: access to each part, the pods of the work, and the proxy's present process.

use crate::agent_host::{AgentHost, STATE_DISK};
use crate::timeline::{Broken, Timeline};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::{Admin, Cluster, ControllerManager, Kubelet, Scheduler};
use keelson_cluster::one_node::{CLUSTER_CIDR, NODE, OneNode, Operator, Steps, place};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::command::{CommandOutput, run};
use keelson_harness::containerd::Containerd;
use keelson_harness::disk::LoopDisk;
use keelson_harness::images::ImageSpec;
use keelson_harness::peers;
use keelson_harness::process::Program;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{eventually, http_get};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;
use tokio::process::Command;
use tokio::sync::Mutex;

/// Page and probes of the proxy.
pub(super) const PROXY: &str = "http://127.0.0.1:9441";
/// Its metrics, with kube-proxy's names.
pub(super) const PROXY_METRICS: &str = "http://127.0.0.1:10249/metrics";

/// Node of the agent of role `node`.
pub(super) const NODE_AGENT: &str = "node-2";

/// Image of the former version; the chart's is `keelson`.
const FORMER_IMAGE: &str = "keelson-former";

const PROXY_LABEL: &str = "keelson.dev/proxy=true";

/// Fields are dropped in this order: users before what they use.
#[derive(Debug)]
pub(super) struct NodeEnv {
    pub(super) kubelet: Mutex<Kubelet>,
    pub(super) agent: AgentHost,
    /// An agent of role `node`: the heartbeat of a second Node, which has no kubelet and no pods.
    pub(super) node_agent: AgentHost,
    pub(super) runtime: Mutex<Containerd>,
    _scheduler: Scheduler,
    pub(super) controllers: Mutex<ControllerManager>,
    /// Locked by faults of the API server.
    pub(super) cluster: Mutex<Cluster>,
    pub(super) operator: Operator,
    pub(super) admin: Admin,
    /// Addresses of the agents' pages.
    pub(super) url: String,
    pub(super) node_agent_url: String,
    agent_program: PathBuf,
    agent_config: PathBuf,
    agent_log: PathBuf,
    /// Program of the former version.
    pub(super) former: Option<PathBuf>,
    /// Settings of the chart's proxy, as a file.
    proxy_config: PathBuf,
    /// The proxy's process when it was last looked up.
    proxy_pid: StdMutex<Option<u32>>,
    scratch: Scratch,
}

impl NodeEnv {
    pub(super) async fn start(former: Option<PathBuf>, timeline: &Timeline) -> Result<Self> {
        let scratch = Scratch::new()?;
        let at = scratch.path();
        let state_disk = LoopDisk::mount(&at.join("state.ext4"), &at.join("state-disk"), STATE_DISK)?;
        let state_disk = Arc::new(state_disk);
        let settings = Settings::new()
            .set("agent.state_dir", state_disk.path().join("state").display().to_string())
            .set("agent.drain_timeout", "10s")
            .set("agent.handover_timeout", "1m");
        let mut steps = Steps::start();
        let node = OneNode::start(&scratch, &settings, &mut steps).await?;
        node.operator.install(None, &mut steps).await?;
        if let Some(former) = &former {
            node.operator
                .push(&ImageSpec::with_libraries(FORMER_IMAGE, &[(former, "usr/bin/keelson")])?)
                .await?;
        }
        let node_agent = node_agent(&scratch, &node, &settings, &state_disk).await?;
        steps.done("an agent is the heartbeat of another Node");
        node.operator.label_for_proxy(PROXY_LABEL).await?;
        node.operator.rolled_out("kube-system", "ds/keelson-proxy").await?;
        node.operator.rolled_out("kube-system", "deploy/coredns").await?;
        steps.done("Keelson serves Services");
        timeline.record("stage", "the cluster is started");
        let OneNode { kubelet, agent, containerd, scheduler, controllers, cluster, operator } = node;
        let proxy_config = proxy_config(&operator, at).await?;
        Ok(Self {
            kubelet: Mutex::new(kubelet),
            url: agent.url(),
            agent_program: agent.program().to_owned(),
            agent_config: agent.config(),
            agent_log: agent.log_file(),
            agent: AgentHost::new(agent, &state_disk, [Broken::AgentKilled, Broken::AgentRestarted]),
            node_agent_url: node_agent.url(),
            node_agent: AgentHost::new(node_agent, &state_disk, [Broken::NodeAgent; 2]),
            runtime: Mutex::new(containerd),
            _scheduler: scheduler,
            controllers: Mutex::new(controllers),
            admin: cluster.admin.clone(),
            cluster: Mutex::new(cluster),
            operator,
            former,
            proxy_config,
            proxy_pid: StdMutex::new(None),
            scratch,
        })
    }

    /// The proxy's process, in its pod; None while there is none.
    pub(super) fn proxy_pid(&self) -> Option<u32> {
        let mut known = self.proxy_pid.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_none_or(|pid| !is_proxy(pid)) {
            let all = fs::read_dir("/proc").ok()?;
            *known = all
                .flatten()
                .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
                .find(|pid| is_proxy(*pid));
        }
        *known
    }

    /// Bytes of the agent's log, which an operator's logging system would rotate.
    pub(super) fn log_bytes(&self) -> u64 {
        fs::metadata(&self.agent_log).map_or(0, |file| file.len())
    }

    /// Waits until a proxy other than `old` is ready.
    pub(super) async fn proxy_replaced(&self, old: Option<u32>, patience: Duration) -> Result<()> {
        eventually(patience, "the proxy is ready", || async {
            let now = self.proxy_pid();
            ensure!(now.is_some() && now != old, "there is no new process");
            http_get(&format!("{PROXY}/readyz")).await?.success().map(drop)
        })
        .await
    }

    /// Runs `kubectl` until it succeeds: the API server may be broken.
    pub(super) async fn kubectl(&self, args: &[&str]) -> Result<CommandOutput> {
        eventually(Duration::from_secs(240), &format!("kubectl {args:?}"), || async {
            let tried = tokio::time::timeout(Duration::from_secs(30), self.operator.kubectl(args)).await;
            tried.context("no answer in time")??.success()
        })
        .await
    }

    /// Has the proxy's pods run this build.
    pub(super) async fn set_proxy_image(&self, is_former: bool) -> Result<()> {
        let image = self.operator.image(if is_former { FORMER_IMAGE } else { "keelson" });
        let set = format!("proxy={image}");
        self.kubectl(&["-n", "kube-system", "set", "image", "ds/keelson-proxy", &set]).await.map(drop)
    }

    /// Takes the node out of the chart's proxy, or in.
    pub(super) async fn label_for_chart(&self, is_in: bool) -> Result<()> {
        let label = if is_in { PROXY_LABEL } else { "keelson.dev/proxy=host" };
        self.kubectl(&["label", "node", NODE, label, "--overwrite"]).await.map(drop)
    }

    /// A proxy of the host package with another backend.
    pub(super) fn host_proxy(&self, backend: &str) -> Result<Program> {
        let args = ["proxy", "--backend", backend, "--cluster-cidr", CLUSTER_CIDR, "--config"];
        let args = args.map(str::to_owned).into_iter().chain([self.proxy_config.display().to_string()]);
        Ok(Program {
            name: "keelson proxy".to_owned(),
            path: peers::keelson()?,
            args: args.collect(),
            env: Vec::new(),
            log: self.scratch.path().join("host-proxy.log"),
        })
    }

    /// What a new proxy would change. Fails if there is anything.
    pub(super) async fn rules_are_complete(&self) -> Result<()> {
        let mut dry_run = Command::new(peers::keelson()?);
        dry_run
            .args(["proxy", "--dry-run", "--cluster-cidr", CLUSTER_CIDR, "--config"])
            .arg(&self.proxy_config);
        let done = tokio::time::timeout(Duration::from_secs(20), run(dry_run)).await;
        let changes = done.context("no dry run in time")??.success()?.out;
        ensure!(changes.trim() == "no changes", "a fresh sync would change:\n{changes}");
        Ok(())
    }

    /// `keelson doctor`, as JSON.
    pub(super) async fn doctor(&self) -> Result<CommandOutput> {
        let mut doctor = Command::new(&self.agent_program);
        doctor
            .args(["doctor", "agent", "heartbeats", "endpoints", "-o", "json", "--config"])
            .arg(&self.agent_config);
        tokio::time::timeout(Duration::from_secs(60), run(doctor)).await.context("doctor does not end")?
    }

    pub(super) async fn keep_logs(&self, out: &Path) -> Result<()> {
        let keep = |name: &str, log: Result<String>| -> Result<()> {
            let path = out.join(name);
            fs::write(&path, log.unwrap_or_else(|error| format!("{error:#}")))
                .with_context(|| format!("cannot write {}", path.display()))
        };
        keep("keelson.log", self.agent.log().await)?;
        keep("keelson-node.log", self.node_agent.log().await)?;
        keep("runtime.log", self.runtime.lock().await.log())?;
        keep("kubelet.log", self.kubelet.lock().await.log())?;
        keep(
            "host-proxy.log",
            fs::read_to_string(self.scratch.path().join("host-proxy.log")).map_err(Into::into),
        )?;
        let logs = ["-n", "kube-system", "logs", "ds/keelson-proxy", "--tail=-1"];
        keep("proxy.log", self.operator.kubectl(&logs).await.map(|output| output.out))?;
        let pods = ["get", "pods,events", "-A", "-o", "wide"];
        keep("pods.txt", self.operator.kubectl(&pods).await.map(|output| output.out))
    }
}

/// `keelson proxy` of a pod in this network namespace: other nodes of this machine have others.
fn is_proxy(pid: u32) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let network = |of: &str| fs::read_link(format!("/proc/{of}/ns/net")).ok();
    line == b"/usr/bin/keelson\0proxy\0" && network(&pid.to_string()) == network("self")
}

/// Starts an agent of role `node`, and keeps pods from its Node.
async fn node_agent(
    scratch: &Scratch,
    node: &OneNode,
    settings: &Settings,
    state_disk: &LoopDisk,
) -> Result<Agent> {
    let identity = node.cluster.node(scratch, NODE_AGENT).await?;
    let own = Settings::new()
        .set("agent.node_name", NODE_AGENT)
        .set("agent.state_dir", state_disk.path().join("state-of-node").display().to_string())
        .set("kube.kubeconfig", identity.kubeconfig().display().to_string())
        .set("endpoints.source", "off")
        .set("node.role", "node")
        .set("node.root_dir", scratch.path().display().to_string())
        .set("node.node_ip", "192.0.2.11")
        .set("node.eviction_hard", "memory.available<1Mi,nodefs.available<1Mi");
    let mut agent = Agent::new(scratch, &node.containerd.endpoint(), &settings.clone().with_overrides(&own))?;
    agent.start_again().await?;
    node.cluster.admin.await_condition(NODE_AGENT, "Ready", "True").await?;
    node.operator.kubectl(&["cordon", NODE_AGENT]).await?.success()?;
    Ok(agent)
}

async fn proxy_config(operator: &Operator, folder: &Path) -> Result<PathBuf> {
    let get =
        ["-n", "kube-system", "get", "configmap", "keelson-proxy", "-o", "jsonpath={.data.keelson\\.toml}"];
    let settings = operator.kubectl(&get).await?.success()?.out;
    let file = folder.join("proxy.toml");
    fs::write(&file, settings).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}

/// Address of the agent's Endpoints API.
pub(super) fn endpoints() -> String {
    format!("unix://{}", place::ENDPOINTS_SOCKET)
}
