//! Owns: a stock kubelet of the test. In: a containerd, a kubeconfig, settings that a test may change.
//! Out: a node in the cluster, and control of the kubelet's process.
//!
//! All its mounts are below its root folder and are removed with the test's folder. It also has its own mount
//! namespace: a kubelet clears and fills some folders that no setting names, which may be those of the machine's own
//! kubelet.

use anyhow::{Context as _, Result, ensure};
use keelson_harness::containerd::Containerd;
use keelson_harness::daemon::Daemon;
use keelson_harness::daemon_life;
use keelson_harness::peers;
use keelson_harness::process::Program;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{free_port, http_get};
use nix::mount::{MsFlags, mount};
use serde_json::{Map, Value, json};
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, Default)]
pub struct KubeletOptions {
    /// Another image service than the containerd itself, such as an agent's socket (`unix://...`).
    pub image_endpoint: Option<String>,
    pub runtime_endpoint: Option<String>,
    /// Another kubeconfig than the one that the cluster makes for the node.
    pub kubeconfig: Option<PathBuf>,
    /// KubeletConfiguration fields that override those of the harness, such as `nodeStatusUpdateFrequency`.
    pub config: Map<String, Value>,
    /// Appended to the flags of the harness, which they override.
    pub args: Vec<String>,
}

impl KubeletOptions {
    pub fn set(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.config.insert(field.to_owned(), value.into());
        self
    }
}

/// Killed on drop; its pods are removed with the containerd and the test's folder.
#[derive(Debug)]
pub struct Kubelet {
    health: String,
    address: String,
    root: PathBuf,
    daemon: Daemon,
}

impl Kubelet {
    /// Starts one below `scratch` and waits until it serves; the node need not be ready yet.
    pub(super) async fn start(
        scratch: &Scratch,
        name: &str,
        kubeconfig: &Path,
        containerd: &Containerd,
        options: &KubeletOptions,
    ) -> Result<Self> {
        let folder = scratch.numbered("kubelet-")?;
        let (port, health) = (free_port()?, free_port()?);
        let config = folder.join("config.yaml");
        let mut settings = settings(&folder, port, health, containerd, options);
        settings.extend(options.config.clone());
        fs::write(&config, Value::Object(settings).to_string())
            .with_context(|| format!("cannot write {}", config.display()))?;
        let root = folder.join("root");
        make_shared(&root)?;
        let mut args = private_mounts(&peers::kubernetes("kubelet")?, &folder)?;
        args.extend([
            format!("--config={}", config.display()),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--hostname-override={name}"),
            format!("--root-dir={}", root.display()),
            format!("--cert-dir={}", folder.join("pki").display()),
        ]);
        if let Some(address) = own_address()? {
            args.push(format!("--node-ip={address}"));
        }
        args.extend(options.args.iter().cloned());
        let program = Program {
            name: format!("kubelet {name}"),
            path: peers::system("unshare", "util-linux")?,
            args,
            env: Vec::new(),
            log: folder.join("kubelet.log"),
        };
        let mut kubelet = Self {
            health: format!("http://127.0.0.1:{health}/healthz"),
            address: format!("127.0.0.1:{port}"),
            root,
            daemon: Daemon::new(program),
        };
        kubelet.start_again().await?;
        Ok(kubelet)
    }

    /// Address of its API, with TLS and anonymous access.
    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Starts it after [`Kubelet::kill9`] or [`Kubelet::terminate`] and waits until it serves.
    pub async fn start_again(&mut self) -> Result<()> {
        let health = &self.health;
        self.daemon.start(|| async move { http_get(health).await?.success().map(drop) }).await
    }
}

daemon_life!(Kubelet);

/// Folders in which a kubelet always has sockets and links, with any setting: `/var/lib/kubelet/device-plugins`, which
/// it empties, and `/var/log/containers`.
const HARD_CODED_FOLDERS: [&str; 2] = ["/var/lib", "/var/log"];

/// Makes a folder a shared mount: what is mounted below it is seen in every mount namespace that has the folder.
fn make_shared(folder: &Path) -> Result<()> {
    let made = || -> std::io::Result<()> {
        fs::create_dir_all(folder)?;
        mount(Some(folder), folder, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
        mount(None::<&str>, folder, None::<&str>, MsFlags::MS_SHARED, None::<&str>)?;
        Ok(())
    };
    made().with_context(|| format!("cannot make a shared mount of {}", folder.display()))
}

/// The arguments of `unshare` for a kubelet that sees empty folders at [`HARD_CODED_FOLDERS`] in its own mount namespace. The
/// containerd still sees what it mounts below its shared root.
fn private_mounts(kubelet: &Path, folder: &Path) -> Result<Vec<String>> {
    ensure!(
        !HARD_CODED_FOLDERS.iter().any(|fixed| folder.starts_with(fixed)),
        "a test's folder may not be below {HARD_CODED_FOLDERS:?}, which a kubelet of the tests sees empty: set TMPDIR"
    );
    // The mounts that hold these folders must not propagate what is mounted over them.
    let script = "for place in $0; do\n\
                  mount --make-private \"$(findmnt --noheadings --output TARGET --target \"$place\" | tail -n 1)\"\n\
                  mount -t tmpfs -o mode=755 none \"$place\"\n\
                  done\nexec \"$@\"";
    let args =
        ["--mount", "--propagation", "unchanged", "--", "sh", "-euc", script, &HARD_CODED_FOLDERS.join(" ")];
    Ok(args.map(str::to_owned).into_iter().chain([kubelet.display().to_string()]).collect())
}

/// The configuration for a machine that may be small, without swap accounting, and in cgroups of another owner.
fn settings(
    folder: &Path,
    port: u16,
    health: u16,
    containerd: &Containerd,
    options: &KubeletOptions,
) -> Map<String, Value> {
    let runtime = options.runtime_endpoint.clone().unwrap_or_else(|| containerd.endpoint());
    let images = options.image_endpoint.clone().unwrap_or_else(|| runtime.clone());
    let fields = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "127.0.0.1",
        "port": port,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": health,
        "readOnlyPort": 0,
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": runtime,
        "imageServiceEndpoint": images,
        "podLogsDir": folder.join("logs"),
        "volumePluginDir": folder.join("plugins"),
        "resolvConf": "",
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": false,
        "enforceNodeAllocatable": [],
        "failSwapOn": false,
        "failCgroupV1": false,
        "serializeImagePulls": false,
        "registryPullQPS": 0,
        "evictionHard": {"memory.available": "1Mi"},
        "imageGCHighThresholdPercent": 100,
        "makeIPTablesUtilChains": false,
        "enableServer": true,
    });
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

/// An address of this machine that is not loopback, which a kubelet does not accept as a node address.
fn own_address() -> Result<Option<Ipv4Addr>> {
    let all = nix::ifaddrs::getifaddrs().context("cannot list the addresses of this machine")?;
    Ok(all
        .filter_map(|interface| Some(interface.address?.as_sockaddr_in()?.ip()))
        .find(|address| !address.is_loopback() && !address.is_link_local()))
}
