//! Owns: the processes of the demonstration. In: the folder. Out: registry with images, slow proxy, containerd, agent.

use crate::folder::Folder;
use anyhow::{Context as _, Result};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::images::{Image, ImageSpec, push_all};
use keelson_harness::process;
use keelson_harness::registry::{Access, Registry};
use keelson_harness::registry_proxy::RegistryProxy;
use keelson_harness::util::free_port;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

pub(crate) const IMAGES: usize = 9;
pub(crate) const LIMIT: i64 = 3;

/// Rate of a layer: an image takes about eight seconds and can be watched.
const BYTES_A_SECOND: u64 = 1 << 20;
const LAYERS: [u64; 3] = [8 << 20, 5 << 20, 2 << 20];

/// Port of the debug page, if it is free.
const USUAL_PORT: u16 = 9440;

const DRAIN: Duration = Duration::from_secs(30);

pub(crate) struct Stage {
    pub(crate) agent: Agent,
    pub(crate) images: Vec<Image>,
    pub(crate) proxy: RegistryProxy,
    containerd: Containerd,
    _registry: Registry,
}

impl Stage {
    pub(crate) async fn set(folder: &Folder) -> Result<Self> {
        let registry_folder = folder.path().join("registry");
        fs::create_dir_all(&registry_folder).context("cannot create the directory of the registry")?;
        let registry = Registry::start_at(registry_folder, free_port()?, Access::Anonymous).await?;
        let proxy = RegistryProxy::start(registry.address()).await?;
        proxy.throttle(Some(BYTES_A_SECOND));
        let containerd =
            Containerd::start_in(&folder.path().join("containerd"), Kind::Debian16, &Options::default())
                .await?;
        containerd.configure_registry(proxy.address(), proxy.address())?;

        println!("filling the registry with {IMAGES} images ...");
        let specs: Vec<_> = (1..=IMAGES).map(|n| ImageSpec::new(&format!("demo/app-{n}"), &LAYERS)).collect();
        let images = push_all(&specs, &registry).await?;

        println!("starting the agent ...");
        let manifests = folder.path().join("manifests");
        copy_manifests(&manifests)?;
        let settings = Settings::limit(LIMIT).set("endpoints.manifests", manifests.display().to_string());
        let mut agent = Agent::new_in(folder.path(), debug_port()?, &containerd.endpoint(), &settings)?;
        agent.start_again().await?;
        Ok(Self { agent, images, proxy, containerd, _registry: registry })
    }

    /// The running agent: the one that was started here, or the one that the user started instead.
    pub(crate) fn agent_pid(&mut self) -> Option<u32> {
        match self.agent.ended() {
            Ok(None) => self.agent.pid(),
            _ => restarted(&self.agent.state_dir()),
        }
    }

    pub(crate) async fn end(&mut self) {
        if let Some(pid) = self.agent_pid() {
            signal(pid, Signal::SIGTERM);
            let until = Instant::now() + DRAIN;
            while self.agent_pid() == Some(pid) && Instant::now() < until {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        self.kill();
        if let Err(error) = self.containerd.terminate().await {
            eprintln!("cannot stop containerd: {error:#}");
        }
    }

    /// Kills the agent, also one that was started by hand; everything else ends with the stage.
    pub(crate) fn kill(&mut self) {
        if let Some(pid) = self.agent_pid() {
            signal(pid, Signal::SIGKILL);
        }
    }
}

/// Copies the sample manifests, which the user may change.
fn copy_manifests(to: &Path) -> Result<()> {
    let samples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/manifests");
    fs::create_dir_all(to).context("cannot create the manifests directory")?;
    for sample in fs::read_dir(&samples).context("no sample manifests")? {
        let sample = sample?;
        fs::copy(sample.path(), to.join(sample.file_name())).context("cannot copy a sample manifest")?;
    }
    Ok(())
}

fn signal(pid: u32, signal: Signal) {
    if let Ok(pid) = i32::try_from(pid) {
        // It may have exited already.
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

/// The agent in the pid file of the state folder, if it runs.
fn restarted(state: &Path) -> Option<u32> {
    let pid = fs::read_to_string(state.join("keelson.pid")).ok()?.trim().parse().ok()?;
    process::is_program(pid, "keelson").then_some(pid)
}

fn debug_port() -> Result<u16> {
    match TcpListener::bind(("127.0.0.1", USUAL_PORT)) {
        Ok(_) => Ok(USUAL_PORT),
        Err(_) => free_port(),
    }
}
