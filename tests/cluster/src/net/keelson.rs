//! Owns: a `keelson proxy` of the test. In: a network namespace, the target of an agent's Endpoints API.
//! Out: control of its process.

use super::http::http_get_from;
use super::namespace::Namespace;
use super::sockets::{CGROUP, SocketPlaces};
use super::world::World;
use anyhow::{Context as _, Result};
use keelson_harness::agent::Settings;
use keelson_harness::daemon::Daemon;
use keelson_harness::daemon_life;
use keelson_harness::peers;
use keelson_harness::process::Program;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::metric;
use nix::sys::signal::Signal;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

/// Its metrics address, inside its namespace.
const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10249);

#[derive(Clone, Debug)]
pub struct KeelsonProxyOptions {
    /// Address of the agent's Endpoints API: `unix:///…`.
    pub target: String,
    /// Settings that override the harness's, by their dotted names, such as `proxy.masquerade_all`.
    pub settings: Settings,
    /// The cgroup and the BPF file system of its world.
    sockets: Option<SocketPlaces>,
}

impl KeelsonProxyOptions {
    /// Pods detected by [`CLUSTER_CIDRS`](super::plan::CLUSTER_CIDRS), all other settings at their defaults.
    pub fn new(target: &str) -> Self {
        let cidrs: Vec<String> = super::plan::CLUSTER_CIDRS.map(str::to_owned).into();
        let settings = Settings::new().set("proxy.cluster_cidr", cidrs);
        Self { target: target.to_owned(), settings, sockets: None }
    }

    /// With the backend ebpf, for the sockets of this world.
    pub fn at_socket_level(mut self, world: &World) -> Result<Self> {
        self.sockets = Some(world.sockets()?.places());
        Ok(self.set("proxy.backend", "ebpf").set("proxy.ebpf_cgroup", CGROUP))
    }

    /// `ip netns exec` and its arguments that run a program of the world, with the rights of the caller.
    pub fn inside(&self, namespace: &Namespace, program: &Path, args: &[&str]) -> Result<Program> {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        let program = Program {
            name: "keelson".to_owned(),
            path: program.into(),
            args,
            env: Vec::new(),
            log: PathBuf::new(),
        };
        match &self.sockets {
            Some(places) => namespace.in_namespace(&places.at_the_usual_places(&program)),
            None => namespace.in_namespace(&program),
        }
    }

    pub fn set(mut self, name: &str, value: impl Into<toml::Value>) -> Self {
        self.settings = self.settings.set(name, value);
        self
    }
}

/// Killed on drop; its rules stay in the namespace.
#[derive(Debug)]
pub struct KeelsonProxy {
    folder: PathBuf,
    /// An older build refuses settings that it does not know.
    is_current: bool,
    daemon: Daemon,
}

impl KeelsonProxy {
    /// Starts one in a namespace and waits until it serves; the test has to wait for its first sync.
    pub async fn start(
        scratch: &Scratch,
        namespace: &Namespace,
        options: &KeelsonProxyOptions,
    ) -> Result<Self> {
        let mut proxy = Self::new(scratch, namespace, options)?;
        proxy.start_again(namespace).await?;
        Ok(proxy)
    }

    pub fn new(scratch: &Scratch, namespace: &Namespace, options: &KeelsonProxyOptions) -> Result<Self> {
        Self::of(&peers::keelson()?, scratch, namespace, options)
    }

    /// Prepares one of another build.
    pub fn of(
        program_path: &Path,
        scratch: &Scratch,
        namespace: &Namespace,
        options: &KeelsonProxyOptions,
    ) -> Result<Self> {
        let folder = scratch.numbered("proxy-")?;
        let config = folder.join("keelson.toml");
        let program = Program {
            name: "keelson proxy".to_owned(),
            path: program_path.to_owned(),
            args: ["proxy", "--config"].map(str::to_owned).into(),
            env: Vec::new(),
            log: folder.join("proxy.log"),
        };
        let mut program = match &options.sockets {
            Some(places) => namespace.in_namespace(&places.at_the_usual_places(&program))?,
            None => namespace.in_namespace(&program)?,
        };
        program.args.push(config.display().to_string());
        let is_current = program_path == peers::keelson()?;
        let proxy = Self { folder, is_current, daemon: Daemon::new(program) };
        proxy.configure(options)?;
        Ok(proxy)
    }

    pub fn configure(&self, options: &KeelsonProxyOptions) -> Result<()> {
        let mut own = Settings::new()
            .set("proxy.target", options.target.as_str())
            .set("proxy.listen", format!("unix://{}", self.socket().display()))
            .set("proxy.http", "");
        if self.is_current {
            let file = self.folder.join("affinity.json").display().to_string();
            own = own.set("proxy.userspace_affinity_file", file);
        }
        let file = self.config();
        let text = own.with_overrides(&options.settings).to_toml()?;
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
    }

    pub fn config(&self) -> PathBuf {
        self.folder.join("keelson.toml")
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.join("proxy.sock")
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub async fn start_again(&mut self, namespace: &Namespace) -> Result<()> {
        let serves = || async { http_get_from(namespace, METRICS, "/metrics").await?.success().map(drop) };
        self.daemon.start(serves).await
    }

    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        self.daemon.process()?.signal(signal)
    }

    /// The revision that the kernel has, if any was synced.
    pub async fn applied_rev(&self, namespace: &Namespace) -> Result<Option<f64>> {
        let metrics = http_get_from(namespace, METRICS, "/metrics").await?.success()?;
        metric(&metrics.text(), "keelson_proxy_applied_rev")
    }
}

daemon_life!(KeelsonProxy);
