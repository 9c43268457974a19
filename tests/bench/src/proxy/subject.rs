//! The subject of a measurement: an agent with `keelson proxy`, or kube-proxy.
//!
//! Owns: [`Subject`], in its own network. In: a test environment. Out: control of its processes, the progress of their
//! sync in the kernel, the resources they use.

use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::kube::{KubeProxy, KubeProxyOptions};
use keelson_cluster::net::{
    Forward, KeelsonProxy, KeelsonProxyOptions, Namespace, NetClient, Outcome, Transport, World,
    http_get_from,
};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::peers;
use keelson_harness::process::is_program;
use keelson_harness::util::eventually;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use super::kernel::{Generations, Nft, Set};
use super::maps::{Flows, Maps, has_programs};
use super::test_env::{NODE, TestEnv};
use super::usage::{Memory, Usage, children};

/// Time without a transaction after which completeness is checked.
pub(super) const REST: Duration = Duration::from_millis(500);
/// kube-proxy makes real servers one after the other: after this time without another one it has made all.
const SETTLED: Duration = Duration::from_secs(5);
/// Timeout of steps that are not measured.
pub(super) const PATIENCE: Duration = Duration::from_secs(300);
/// Pause between two readings of what a gradual sync has set.
const BETWEEN_COUNTS: Duration = Duration::from_millis(100);
/// Timeout of one request to an endpoint.
const ANSWER: Duration = Duration::from_millis(500);
/// IPVS remembers deleted real servers for up to three minutes, and looks through all of them for each one that is added.
const SERVERS_FORGOTTEN: Duration = Duration::from_secs(190);
/// As many add less than a second to a first sync.
const FEW_SERVERS: usize = 10_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Keelson,
    /// With the backend nft, beside the backend ebpf.
    KeelsonNft,
    KubeProxy,
}

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::Keelson, Self::KeelsonNft, Self::KubeProxy];

    pub(super) fn is_keelson(self) -> bool {
        self != Self::KubeProxy
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Keelson => "keelson",
            Self::KeelsonNft => "keelson-nft",
            Self::KubeProxy => "kube-proxy",
        }
    }

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Keelson => "agent + `keelson proxy`",
            Self::KeelsonNft => "agent + `keelson proxy`, backend nft",
            Self::KubeProxy => "kube-proxy",
        }
    }

    /// Rest after which another change is separate: longer than kube-proxy's `minSyncPeriod`, which is 1 s, and its
    /// delayed deletions.
    pub(super) fn pause(self) -> Duration {
        match self {
            Self::Keelson | Self::KeelsonNft => Duration::from_millis(100),
            Self::KubeProxy => Duration::from_secs(2),
        }
    }
}

/// A backend of Keelson, and the mode of kube-proxy that corresponds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backend {
    Nft,
    /// Variant nft for both.
    Iptables,
    /// Variant legacy for both, whose rules have no generation.
    IptablesLegacy,
    /// In a virtual machine ([`vm`](super::vm)).
    Ipvs,
    /// kube-proxy has no such mode.
    Userspace,
    /// Sockets of the node and its pods connect by it, packets by nftables. kube-proxy has no such mode: its mode nftables is
    /// beside it.
    Ebpf,
}

impl Backend {
    pub(super) const ALL: [Self; 6] =
        [Self::Nft, Self::Iptables, Self::IptablesLegacy, Self::Ipvs, Self::Userspace, Self::Ebpf];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Nft => "nft",
            Self::Iptables => "iptables",
            Self::IptablesLegacy => "iptables-legacy",
            Self::Ipvs => "ipvs",
            Self::Userspace => "userspace",
            Self::Ebpf => "ebpf",
        }
    }

    /// Whether the kernel counts changes of the rules.
    pub(super) fn has_generations(self) -> bool {
        matches!(self, Self::Nft | Self::Iptables | Self::Ebpf)
    }

    /// Whether what a sync sets comes in many steps, and not by few transactions.
    fn is_gradual(self) -> bool {
        matches!(self, Self::Ipvs | Self::Userspace)
    }

    /// Whether Services are served while no process runs.
    pub(super) fn outlives_process(self) -> bool {
        self != Self::Userspace
    }

    /// The value of `proxy.backend`.
    fn setting(self) -> &'static str {
        match self {
            Self::Nft => "nft",
            Self::Iptables | Self::IptablesLegacy => "iptables",
            Self::Ipvs => "ipvs",
            Self::Userspace => "userspace",
            Self::Ebpf => "ebpf",
        }
    }

    /// The value of `proxy.iptables_variant`.
    fn variant(self) -> &'static str {
        if self == Self::IptablesLegacy { "legacy" } else { "nft" }
    }

    /// kube-proxy's mode that corresponds to it.
    pub(super) fn mode(self) -> Option<&'static str> {
        match self {
            Self::Nft | Self::Ebpf => Some("nftables"),
            Self::Iptables | Self::IptablesLegacy => Some("iptables"),
            Self::Ipvs => Some("ipvs"),
            Self::Userspace => None,
        }
    }
}

/// The tables of iptables that a proxy has chains in.
const TABLES: [&str; 3] = ["nat", "filter", "mangle"];
/// Metrics address of kube-proxy, inside its namespace.
const METRICS: &str = "127.0.0.1:10249";
const OWN_FIGURE: &str = "kubeproxy_sync_full_proxy_rules_duration_seconds";

enum Programs {
    Keelson { agent: Box<Agent>, proxy: KeelsonProxy },
    KubeProxy { proxy: KubeProxy, _api: Forward },
}

pub(super) struct Subject {
    pub(super) kind: Kind,
    pub(super) backend: Backend,
    pub(super) world: World,
    programs: Programs,
}

impl Subject {
    /// Creates its world and prepares its programs without leaving one running. Must be called before there are
    /// Services.
    pub(super) async fn new(env: &TestEnv, runtime: &str, kind: Kind, backend: Backend) -> Result<Self> {
        let backend = if kind == Kind::KeelsonNft { Backend::Nft } else { backend };
        let world = World::new()?;
        let programs = match kind {
            Kind::Keelson | Kind::KeelsonNft => {
                let settings = Settings::new()
                    .set("agent.node_name", NODE)
                    .set("node.role", "companion")
                    // It must be current before a proxy starts.
                    .set("endpoints.watch", "always")
                    .set("node.root_dir", env.scratch.path().display().to_string())
                    // The disk of the machine may be full.
                    .set("node.eviction_hard", "memory.available<1Mi")
                    .set("kube.kubeconfig", env.companion.kubeconfig().display().to_string());
                let agent = Box::new(Agent::new(&env.scratch, runtime, &settings)?);
                let options = KeelsonProxyOptions::new(&agent.endpoints_target())
                    .set("proxy.backend", backend.setting())
                    .set("proxy.iptables_variant", backend.variant());
                let options = match backend {
                    Backend::Ebpf => options.at_socket_level(&world)?,
                    _ => options,
                };
                let proxy = KeelsonProxy::new(&env.scratch, world.node(), &options)?;
                Programs::Keelson { agent, proxy }
            }
            Kind::KubeProxy => {
                let address = env.cluster.api.address();
                let inside: SocketAddr = address.parse().context("the API server's address")?;
                let api = Forward::start(world.node(), inside, address)?;
                let mode = backend.mode().context("kube-proxy has no such mode")?;
                let mut options = KubeProxyOptions::new(NODE).with(json!({"mode": mode}));
                if backend == Backend::IptablesLegacy {
                    options.env.push(("PATH".to_owned(), legacy_path(env)?));
                }
                let mut proxy = KubeProxy::start(&env.scratch, &env.cluster, world.node(), &options).await?;
                proxy.terminate().await?;
                Programs::KubeProxy { proxy, _api: api }
            }
        };
        Ok(Self { kind, backend, world, programs })
    }

    /// The program that is run to change rules; Keelson's backend nft runs none.
    pub(super) fn program(&self) -> &'static str {
        match (self.backend, self.kind.is_keelson()) {
            (Backend::Nft | Backend::Userspace | Backend::Ebpf, _) => "nft",
            (Backend::Ipvs, true) => "ipset",
            (Backend::Iptables, true) => "iptables-nft-restore",
            (Backend::IptablesLegacy, true) => "iptables-legacy-restore",
            (Backend::Iptables | Backend::IptablesLegacy | Backend::Ipvs, false) => "iptables-restore",
        }
    }

    pub(super) fn namespace(&self) -> &Namespace {
        self.world.node()
    }

    /// Records when the rules change; for rules without a generation, when those of one Service do.
    pub(super) fn watch(&self, env: &TestEnv) -> Result<Generations> {
        match self.backend.has_generations() {
            true => Generations::watch(self.namespace()),
            false => Generations::watch_answers(self.world.pod().namespace(), env.asked()?.0),
        }
    }

    /// Starts the processes that do not run, at the same time, and waits until they serve, but not for their first
    /// sync.
    pub(super) async fn start(&mut self) -> Result<()> {
        let namespace = self.world.node();
        match &mut self.programs {
            Programs::Keelson { agent, proxy } => {
                let starting =
                    async { if agent.pid().is_none() { agent.start_live().await } else { Ok(()) } };
                let proxying =
                    async { if proxy.pid().is_none() { proxy.start_again(namespace).await } else { Ok(()) } };
                tokio::try_join!(starting, proxying).map(drop)
            }
            Programs::KubeProxy { proxy, .. } => proxy.start_again(namespace).await,
        }
    }

    /// Starts the agent, if there is one, and waits until it has all objects.
    pub(super) async fn start_agent(&mut self, env: &TestEnv) -> Result<()> {
        let Programs::Keelson { agent, .. } = &mut self.programs else { return Ok(()) };
        if agent.pid().is_none() {
            agent.start_live().await?;
        }
        eventually(PATIENCE, "the agent serves everything", || async {
            let text = agent.http_get("/metrics").await?.success()?.text();
            let (have, stale) =
                (metric(&text, "keelson_endpoints_services")?, metric(&text, "keelson_endpoints_stale")?);
            ensure!(have >= env.services() as f64 && stale == 0.0, "{have} Services, stale: {stale}");
            Ok(())
        })
        .await
    }

    /// Stops the proxy, and with `all` the agent too, whose state is removed. The rules stay.
    pub(super) async fn stop(&mut self, all: bool) -> Result<()> {
        let program = self.program();
        match &mut self.programs {
            Programs::Keelson { agent, proxy } => {
                if proxy.pid().is_some() {
                    proxy.terminate().await?;
                }
                if all && agent.pid().is_some() {
                    agent.terminate().await?;
                    fs::remove_dir_all(agent.state_dir()).context("cannot remove the agent's state")?;
                }
            }
            Programs::KubeProxy { proxy, .. } => {
                let Some(pid) = proxy.pid() else { return Ok(()) };
                // Its children would finish their work, and change the rules later.
                let programs = children(pid);
                proxy.terminate().await?;
                for pid in programs.into_iter().filter(|pid| is_program(*pid, program)) {
                    let pid = Pid::from_raw(pid.try_into().context("a pid is positive")?);
                    // An error here means that it exited at this moment.
                    let _ = kill(pid, Signal::SIGKILL);
                }
            }
        }
        Ok(())
    }

    /// Sends SIGKILL to the proxy, or with `agent` to the agent.
    pub(super) fn kill(&mut self, agent: bool) -> Result<()> {
        match &mut self.programs {
            Programs::Keelson { agent: one, .. } if agent => one.kill9(),
            Programs::Keelson { proxy, .. } => proxy.kill9(),
            Programs::KubeProxy { proxy, .. } => proxy.kill9(),
        }
    }

    /// Clients: a pod, the node, and one outside.
    pub(super) fn clients(&self) -> Vec<NetClient> {
        vec![self.world.pod(), self.world.host(), self.world.client()]
    }

    /// Removes all rules, and waits until the kernel has finished.
    pub(super) async fn flush(&self) -> Result<()> {
        self.namespace().nft(&["flush", "ruleset"])?;
        if self.backend == Backend::Ipvs {
            let program = peers::system("ipvsadm", "ipvsadm")?;
            let listed = self.namespace().command(&program, &["--list", "--numeric"])?;
            self.namespace().command(&program, &["--clear"])?;
            if listed.lines().count() > FEW_SERVERS {
                tokio::time::sleep(SERVERS_FORGOTTEN).await;
            }
        }
        if self.backend == Backend::IptablesLegacy {
            for base in ["iptables", "ip6tables"] {
                let program = peers::system(&format!("{base}-legacy"), "iptables")?;
                for (table, command) in TABLES.iter().flat_map(|table| [(table, "-F"), (table, "-X")]) {
                    self.namespace().command(&program, &["-t", table, command])?;
                }
            }
        }
        if !matches!(self.backend, Backend::Nft | Backend::Ebpf) {
            self.namespace().command(&peers::system("ipset", "ipset")?, &["destroy"])?;
        }
        if self.has_maps() {
            let pins = self.pins()?;
            match fs::remove_dir_all(&pins) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed.with_context(|| format!("cannot remove {}", pins.display()))?,
            }
        }
        // Memory is released later.
        tokio::time::sleep(4 * REST).await;
        Ok(())
    }

    /// Whether maps of eBPF follow the rules in each sync. They have no generation: the proxy tells when it has written them.
    fn has_maps(&self) -> bool {
        self.backend == Backend::Ebpf && self.kind == Kind::Keelson
    }

    /// The maps that follow the rules in each sync; `None`: none do.
    pub(super) fn maps(&self) -> Result<Option<Arc<Maps>>> {
        self.has_maps().then(|| Ok(Arc::new(Maps::open(&self.pins()?)?))).transpose()
    }

    /// What its programs remember of packets; `None`: nothing.
    pub(super) fn flows(&self) -> Result<Option<Flows>> {
        match self.has_maps() {
            true => Flows::open(&self.pins()?),
            false => Ok(None),
        }
    }

    fn pins(&self) -> Result<PathBuf> {
        let inode = fs::metadata(Path::new("/run/netns").join(self.namespace().name()))?.ino();
        Ok(self.world.bpf()?.join(format!("keelson/netns-{inode}")))
    }

    /// Whether the proxy has programmed what the agent has published.
    async fn has_applied(&self) -> Result<bool> {
        let Programs::Keelson { agent, proxy } = &self.programs else { bail!("kube-proxy has no revisions") };
        let state = agent.json("/debug/endpoints?max=0").await?;
        let published = state["rev"].as_f64().with_context(|| format!("no revision in {state}"))?;
        Ok(proxy.applied_rev(self.world.node()).await? >= Some(published))
    }

    /// Waits until all rules are in the kernel: the sets and maps have the expected number of elements, and no
    /// transaction followed for [`REST`]. Returns the time of the last one, or of the maps of eBPF that come after it, or None if
    /// that took longer than `patience`. Without transactions, the time at which everything was seen.
    pub(super) async fn synced(
        &self,
        env: &TestEnv,
        generations: &Generations,
        begun: Instant,
        patience: Duration,
    ) -> Result<Option<Instant>> {
        let mut nft = Nft::open(self.namespace())?;
        let mut looked = None;
        let (mut count, mut counted) = (0, begun);
        let mut attached = None;
        loop {
            if attached.is_none() && self.has_maps() && has_programs(&self.pins()?) {
                attached = Some(Instant::now());
            }
            if self.backend.is_gradual() {
                let missing = self.missing(env, &mut nft)?;
                if self.kind == Kind::KubeProxy {
                    let backend = self.backend;
                    let now = self.namespace().run(move || count_in_proc(backend))??;
                    if now != count {
                        (count, counted) = (now, Instant::now());
                    }
                }
                match missing {
                    // It has no real servers of frontends that it serves in another way, so the end is when no more come.
                    None if self.kind == Kind::KubeProxy && counted.elapsed() < SETTLED => {
                        tokio::time::sleep(BETWEEN_COUNTS).await;
                    }
                    None if self.kind == Kind::KubeProxy => return Ok(Some(counted)),
                    None => return Ok(Some(Instant::now())),
                    Some(missing) if begun.elapsed() > patience => {
                        eprintln!("{} was given up: {missing}", self.kind.name());
                        return Ok(None);
                    }
                    Some(_) => tokio::time::sleep(BETWEEN_COUNTS).await,
                }
                continue;
            }
            let last = generations.after(begun)?.last().copied();
            if let Some(last) = last.filter(|last| last.elapsed() >= REST && looked != Some(*last)) {
                let is_complete = self.missing(env, &mut nft)?.is_none();
                if is_complete && (!self.has_maps() || self.has_applied().await?) {
                    // Programs are attached when the maps are filled.
                    return Ok(Some(attached.map_or(last, |attached| last.max(attached))));
                }
                looked = (!is_complete).then_some(last);
            }
            if begun.elapsed() > patience {
                let missing = self.missing(env, &mut nft)?.unwrap_or_else(|| "nothing".to_owned());
                eprintln!("{} was given up: {missing}", self.kind.name());
                return Ok(None);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The first set or map with a wrong number of elements.
    fn missing(&self, env: &TestEnv, nft: &mut Nft) -> Result<Option<String>> {
        let (ports, endpoints) = (env.service_ports(), env.endpoints());
        let backend = self.backend;
        if backend.is_gradual() {
            let (what, expected) = match backend {
                Backend::Ipvs if self.kind == Kind::KubeProxy => ("real servers", endpoints * 9 / 10),
                Backend::Ipvs => ("real servers", endpoints),
                _ => ("sockets", ports),
            };
            let count = self.namespace().run(move || count_in_proc(backend))??;
            return Ok((count < expected).then(|| format!("there are {count} {what}, and not {expected}")));
        }
        if !matches!(self.backend, Backend::Nft | Backend::Ebpf) {
            let save = format!("iptables-{}-save", self.backend.variant());
            let save = peers::system(&save, "iptables")?;
            let rules = self.namespace().command(&save, &["-t", "nat"])?;
            let count = rules.lines().filter(|line| line.contains("-j DNAT")).count();
            return Ok((count < endpoints).then(|| format!("{count} rules translate, and not {endpoints}")));
        }
        let expected = match self.kind {
            Kind::Keelson | Kind::KeelsonNft => {
                vec![("keelson", "cluster-ip-ports", ports), ("keelson", "slots", endpoints)]
            }
            // Its endpoints are in rules, which are part of the same transaction.
            Kind::KubeProxy => vec![("kube-proxy", "service-ips", ports + env.ingress_ports())],
        };
        for (table, name, expected) in expected {
            let count = nft.count(Set { table, name })?;
            if count != expected {
                return Ok(Some(format!("{name} has {count} elements and not {expected}")));
            }
        }
        if self.kind.is_keelson() && env.ranges() > 0 {
            // Those of Services with connections are not counted.
            let count = nft.count(Set { table: "keelson", name: "source-ranges" })?;
            if count < env.ranges() {
                return Ok(Some(format!("there are {count} source ranges and not {}", env.ranges())));
            }
        }
        Ok(None)
    }

    /// Fails unless all rules are in the kernel.
    pub(super) fn check_complete(&self, env: &TestEnv) -> Result<()> {
        match self.missing(env, &mut Nft::open(self.namespace())?)? {
            Some(missing) => bail!("{}: {missing}", self.kind.name()),
            None => Ok(()),
        }
    }

    /// Sends a request to a real Service from a pod: whether its present endpoints answer.
    pub(super) async fn answers(&self, env: &TestEnv) -> Result<bool> {
        let (service, port) = env.asked()?;
        let outcome = self.world.pod().ask(service, Transport::Tcp, ANSWER).await?;
        Ok(matches!(outcome, Outcome::Answered { by, .. } if by.port() == port))
    }

    pub(super) async fn wait_for_answers(&self, env: &TestEnv) -> Result<()> {
        let what = format!("a Service answers by the rules of {}", self.kind.name());
        eventually(Duration::from_secs(10), &what, || async {
            ensure!(self.answers(env).await?, "it does not");
            Ok(())
        })
        .await
    }

    /// The agent first.
    fn pids(&self) -> Vec<u32> {
        match &self.programs {
            Programs::Keelson { agent, proxy } => agent.pid().into_iter().chain(proxy.pid()).collect(),
            Programs::KubeProxy { proxy, .. } => proxy.pid().into_iter().collect(),
        }
    }

    pub(super) fn pid(&self) -> Result<u32> {
        self.pids().last().copied().context("it does not run")
    }

    /// Of each process, the agent first.
    pub(super) fn usage(&self) -> Result<Vec<Usage>> {
        self.pids().into_iter().map(Usage::of).collect()
    }

    /// Of each process, the agent first.
    pub(super) fn memory(&self) -> Result<Vec<Memory>> {
        self.pids().into_iter().map(Memory::of).collect()
    }

    /// Mean duration of its full syncs by its own metric, in seconds. Only kube-proxy has it.
    pub(super) async fn own_figure(&self) -> Result<Option<f64>> {
        if self.kind.is_keelson() {
            return Ok(None);
        }
        let metrics = METRICS.parse().context("an address")?;
        let text = http_get_from(self.namespace(), metrics, "/metrics").await?.success()?.text();
        // One per family; IPv6 has no work.
        let value = |what| metric(&text, &format!("{OWN_FIGURE}_{what}{{ip_family=\"IPv4\"}}"));
        let (sum, count) = (value("sum")?, value("count")?);
        Ok((count > 0.0).then(|| sum / count))
    }
}

/// Number of real servers, or of sockets that wait for clients, in the network namespace of this thread.
fn count_in_proc(backend: Backend) -> Result<usize> {
    let lines = |name: &str| {
        let path = format!("/proc/thread-self/net/{name}");
        fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))
    };
    if backend == Backend::Ipvs {
        let servers = lines("ip_vs")?.lines().filter(|line| line.trim_start().starts_with("-> ")).count();
        // The heading has an arrow, too.
        return Ok(servers.saturating_sub(1));
    }
    let listening = lines("tcp")?.lines().filter(|line| line.split_whitespace().nth(3) == Some("0A")).count();
    Ok(listening + lines("udp")?.lines().skip(1).count())
}

/// A search path on which the programs of iptables without a suffix are those of the variant legacy.
fn legacy_path(env: &TestEnv) -> Result<String> {
    let folder = env.scratch.path().join("iptables-legacy");
    if !folder.is_dir() {
        fs::create_dir(&folder).context("cannot make a folder for programs")?;
        for base in ["iptables", "ip6tables"] {
            for action in ["", "-save", "-restore"] {
                let program = peers::system(&format!("{base}-legacy{action}"), "iptables")?;
                symlink(program, folder.join(format!("{base}{action}"))).context("cannot link a program")?;
            }
        }
    }
    Ok(format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default()))
}

/// A metric by its full name with labels; 0 if it does not exist yet.
fn metric(text: &str, name: &str) -> Result<f64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).unwrap_or("0");
    value.trim().parse().with_context(|| format!("{name} is {value:?}"))
}
