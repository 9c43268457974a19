//! Owns: everything that takes part: two registries behind proxies, a runtime whose images have a separate small disk,
//! an agent whose state has one too, an API server and a stock kubelet.
//! In: the kind of runtime and the limit. Out: access to each, and control of the agent's and the runtime's processes.

use crate::agent_host::{AgentHost, STATE_DISK};
use crate::timeline::{Broken, Timeline};
use anyhow::{Context as _, Result};
use keelson_cluster::kube::{ApiOptions, Cluster, Kubelet, KubeletOptions};
use keelson_cluster::manifests::COMPANION as MANIFEST;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::cri::Cri;
use keelson_harness::disk::LoopDisk;
use keelson_harness::images::{Image, ImageSpec};
use keelson_harness::peers;
use keelson_harness::registry::{Access, Registry};
use keelson_harness::registry_proxy::RegistryProxy;
use keelson_harness::scratch::Scratch;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::Mutex;

pub(crate) const NODE: &str = "soak";

const MIB: u64 = 1 << 20;
const IMAGE_DISK: u64 = 1536 * MIB;

/// Bytes per second of a blob while no registry is slow on purpose: layers take long enough to be interrupted.
pub(crate) const RATE: u64 = 4 * MIB;

/// A registry and the proxy before it.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) registry: Registry,
    pub(crate) proxy: RegistryProxy,
}

/// Everything that takes part. Fields are dropped in this order: users before what they use.
#[derive(Debug)]
pub(crate) struct TestEnv {
    kubelet: Kubelet,
    pub(crate) agent: AgentHost,
    pub(crate) kind: Kind,
    pub(crate) runtime: Mutex<Containerd>,
    pub(crate) cluster: Cluster,
    /// One that is open to all, and one that asks for credentials.
    pub(crate) sources: [Source; 2],
    pub(crate) image_disk: LoopDisk,
    pub(crate) socket: PathBuf,
    pub(crate) url: String,
    _scratch: Scratch,
}

impl TestEnv {
    pub(crate) async fn start(kind: Kind, limit: usize, timeline: &Timeline) -> Result<Self> {
        let scratch = Scratch::new()?;
        let at = scratch.path();
        let open = source(&scratch, Access::Anonymous).await?;
        let private = source(&scratch, Access::Users).await?;

        let folder = scratch.dir("c")?;
        let image_disk = LoopDisk::mount(&at.join("images.ext4"), &folder.join("root"), IMAGE_DISK)?;
        let pause = program("soak/pause").push(&open.registry).await?;
        let pause = pause.at(open.registry.address());
        let mirrors = [&open, &private].map(|source| source.proxy.address().to_owned());
        let mut mirrors: Vec<_> = mirrors.into();
        mirrors.push(open.registry.address().to_owned());
        let options = Options {
            sandbox_image: Some(pause.clone()),
            network: true,
            mirrors: mirrors.into_iter().map(|name| (name.clone(), name)).collect(),
            ..Options::default()
        };
        let runtime = Containerd::start_in(&folder, kind, &options).await?;
        runtime.cri().await?.pull_image(&pause).await?;

        let cluster = Cluster::start_with(&scratch, &ApiOptions::default()).await?;
        cluster.admin.apply(MANIFEST).await?;
        let identity = cluster.companion(&scratch, "keelson-agent", NODE).await?;
        let state_disk =
            Arc::new(LoopDisk::mount(&at.join("state.ext4"), &at.join("state-disk"), STATE_DISK)?);
        let settings = settings(limit, &identity.kubeconfig(), &state_disk.path().join("state"));
        let mut agent = Agent::new(&scratch, &runtime.endpoint(), &settings)?;
        agent.start_live().await?;
        let (socket, url) = (agent.socket(), agent.url());
        let options =
            KubeletOptions { runtime_endpoint: Some(agent.endpoint()), ..KubeletOptions::default() };
        let kubelet = cluster.kubelet(&scratch, NODE, &runtime, &options).await?;
        cluster.admin.await_condition(NODE, "Ready", "True").await?;
        agent.ready().await?;
        timeline.record("stage", "started");
        Ok(Self {
            kubelet,
            agent: AgentHost::new(agent, &state_disk, [Broken::AgentKilled, Broken::AgentRestarted]),
            kind,
            runtime: Mutex::new(runtime),
            cluster,
            sources: [open, private],
            image_disk,
            socket,
            url,
            _scratch: scratch,
        })
    }

    pub(crate) fn source(&self, private: bool) -> &Source {
        let [open, closed] = &self.sources;
        if private { closed } else { open }
    }

    /// A new connection to the agent, which is made at the first call and again when it is lost.
    pub(crate) fn cri(&self) -> Result<Cri> {
        Cri::lazy(&self.socket)
    }

    /// Pushes an image into the registry, bypassing its proxy.
    pub(crate) async fn push(&self, private: bool, spec: &ImageSpec) -> Result<Image> {
        spec.push(&self.source(private).registry).await
    }

    pub(crate) async fn keep_logs(&self, out: &Path) -> Result<()> {
        let keep = |name: &str, log: Result<String>| -> Result<()> {
            let path = out.join(name);
            std::fs::write(&path, log.unwrap_or_else(|error| format!("{error:#}")))
                .with_context(|| format!("cannot write {}", path.display()))
        };
        keep("keelson.log", self.agent.log().await)?;
        keep("runtime.log", self.runtime.lock().await.log())?;
        keep("kubelet.log", self.kubelet.log())
    }
}

/// An image that does nothing and never exits.
pub(crate) fn program(repo: &str) -> ImageSpec {
    let program = peers::cri_driver().unwrap_or_default();
    ImageSpec::program(repo, &program, &["pause"])
}

async fn source(scratch: &Scratch, access: Access) -> Result<Source> {
    let registry = Registry::start(scratch, access).await?;
    let proxy = RegistryProxy::start(registry.address()).await?;
    proxy.throttle(Some(RATE));
    Ok(Source { registry, proxy })
}

fn settings(limit: usize, kubeconfig: &Path, state: &Path) -> Settings {
    Settings::limit(i64::try_from(limit).unwrap_or(3))
        .set("agent.node_name", NODE)
        .set("agent.state_dir", state.display().to_string())
        .set("agent.drain_timeout", "10s")
        .set("agent.handover_timeout", "1m")
        // A hung registry must not hold a slot for the whole run.
        .set("pulls.stall_timeout", "60s")
        .set("pulls.cancel_grace", "2s")
        .set("endpoints.source", "off")
        .set("kube.kubeconfig", kubeconfig.display().to_string())
}
