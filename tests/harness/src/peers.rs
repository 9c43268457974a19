//! Owns: paths of the real components, built or found once per test process.

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

/// containerd 2.4 and its shim, built from the Go modules in `tests/peers`.
pub fn containerd_v2() -> Result<PathBuf> {
    Ok(built("containerd")?.join("containerd"))
}

/// containerd 1: Debian's 1.6, or 1.7 from the Go module in `tests/peers/containerd-1.7` if `KEELSON_TEST_CONTAINERD` says so.
pub fn containerd_v1() -> Result<PathBuf> {
    match std::env::var("KEELSON_TEST_CONTAINERD").as_deref() {
        Ok("1.7") => Ok(built("containerd-1.7")?.join("containerd")),
        Ok(other) => {
            bail!("KEELSON_TEST_CONTAINERD is {other}: set it to 1.7, or to nothing for Debian's containerd")
        }
        Err(_) => system("containerd", "containerd"),
    }
}

/// The folder of CRI-O 1.34 and its `pinns`, built from the Go module in `tests/peers/crio`.
pub fn crio() -> Result<PathBuf> {
    built("crio")
}

/// `helm`, or `strict`, which checks objects of prometheus-operator. Built from `tests/peers/chart-tools`.
pub fn chart_tool(program: &str) -> Result<PathBuf> {
    Ok(built("chart-tools")?.join(program))
}

/// The folder of the plugins that give pods their network, built from the Go module in `tests/peers/cni`.
pub fn cni() -> Result<PathBuf> {
    built("cni")
}

/// CoreDNS with the plugins of a cluster, built from `tests/peers/coredns`.
pub fn coredns() -> Result<PathBuf> {
    Ok(built("coredns")?.join("coredns"))
}

/// The CRI client in Go, built from `tests/peers/cri-driver`.
pub fn cri_driver() -> Result<PathBuf> {
    Ok(built("cri-driver")?.join("cri-driver"))
}

/// The folder of kubeadm and kubectl of Kubernetes 1.36, built from `tests/peers/kubeadm`.
pub fn kubeadm() -> Result<PathBuf> {
    built("kubeadm")
}

/// Many nodes that watch and renew with client-go, built from `tests/peers/reflectors`.
pub fn reflectors() -> Result<PathBuf> {
    Ok(built("reflectors")?.join("reflectors"))
}

/// The minor version of the control plane that suites run against, which `KEELSON_TEST_KUBERNETES` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kubernetes(&'static str);

impl Kubernetes {
    const OLDEST: Self = Self("1.31");
    /// Built from `tests/peers/kubernetes`; each other one is the peer `kubernetes-MINOR`.
    const NEWEST: Self = Self("1.36");
    const ALL: [Self; 6] =
        [Self::OLDEST, Self("1.32"), Self("1.33"), Self("1.34"), Self("1.35"), Self::NEWEST];

    fn chosen() -> Result<Self> {
        let Some(version) = std::env::var_os("KEELSON_TEST_KUBERNETES") else { return Ok(Self::NEWEST) };
        Self::ALL.into_iter().find(|other| version == other.0).with_context(|| {
            format!("KEELSON_TEST_KUBERNETES is {}: set it to 1.31 to 1.36", version.display())
        })
    }

    fn peer(self) -> String {
        if self == Self::NEWEST { "kubernetes".to_owned() } else { format!("kubernetes-{}", self.0) }
    }
}

/// `kube-apiserver` or `kube-controller-manager`.
pub fn control_plane(program: &str) -> Result<PathBuf> {
    kubernetes_program(Kubernetes::chosen()?, program)
}

/// The etcd server and the program that restores its snapshots: etcd 3.6, built from `tests/peers/etcd`, or Debian's 3.4 for the
/// oldest control plane and for one without streaming lists.
pub fn etcd(streaming_lists: bool) -> Result<(PathBuf, PathBuf)> {
    if streaming_lists && Kubernetes::chosen()? != Kubernetes::OLDEST {
        let folder = built("etcd")?;
        return Ok((folder.join("etcd"), folder.join("etcdutl")));
    }
    Ok((system("etcd", "etcd-server")?, system("etcdctl", "etcd-client")?))
}

/// `kube-proxy`, `kube-scheduler`, `kubectl` or `kubelet` of Kubernetes 1.36.
pub fn kubernetes(program: &str) -> Result<PathBuf> {
    kubernetes_program(Kubernetes::NEWEST, program)
}

fn kubernetes_program(version: Kubernetes, program: &str) -> Result<PathBuf> {
    let peer = version.peer();
    let path = built(&peer)?.join(program);
    if !path.is_file() {
        bail!("tests/peers/build.sh builds no {program} for {peer}");
    }
    Ok(path)
}

/// The library that gives a program another wall clock if it is in `LD_PRELOAD`.
pub fn libfaketime() -> Result<PathBuf> {
    let folder = format!("/usr/lib/{}-linux-gnu/faketime", std::env::consts::ARCH);
    let path = Path::new(&folder).join("libfaketime.so.1");
    if !path.is_file() {
        bail!("{} is missing: install the Debian package libfaketime (make test does)", path.display());
    }
    Ok(path)
}

/// A program of the system, found in `PATH` or the folders of system programs.
pub fn system(program: &str, package: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| anyhow!("{program} is missing: install the Debian package {package} (make test does)"))
}

/// The program of the former version, which `make upgrade-check` builds (scripts/former.sh).
pub fn former() -> Result<PathBuf> {
    let path = std::env::var_os("KEELSON_TEST_FORMER").map(PathBuf::from);
    let path = path.context("KEELSON_TEST_FORMER names no program; run: make upgrade-check")?;
    ensure!(path.exists(), "there is no former program at {}", path.display());
    Ok(path)
}

/// `KEELSON_BIN`, or the `keelson` in the target folder that this program was built into.
pub fn keelson() -> Result<PathBuf> {
    let path = match std::env::var_os("KEELSON_BIN") {
        Some(path) => PathBuf::from(path),
        None => {
            let own = std::env::current_exe().context("cannot tell where this program is")?;
            // target/<profile>/deps/<test>, or target/<profile>/<program>.
            let folder = own.parent().context("a program is in a folder")?;
            let profile = if folder.ends_with("deps") {
                folder.parent().context("deps is in a folder")?
            } else {
                folder
            };
            profile.join("keelson")
        }
    };
    if !path.is_file() {
        bail!("{} does not exist: build it (make test does), or name it in KEELSON_BIN", path.display());
    }
    Ok(path)
}

/// The folder of a peer: from `KEELSON_PEERS`, which holds the output of `build.sh`, or from `build.sh`, which builds
/// it if necessary.
fn built(name: &str) -> Result<PathBuf> {
    let known = std::env::var("KEELSON_PEERS").unwrap_or_default();
    if let Some(folder) = folder_of(name, &known) {
        return Ok(folder);
    }
    type Outcomes = HashMap<String, Result<PathBuf, String>>;
    static BUILT: OnceLock<Mutex<Outcomes>> = OnceLock::new();
    // Held during the build: a test that needs the same peer waits for it anyway.
    let mut outcomes = BUILT.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let outcome =
        outcomes.entry(name.to_owned()).or_insert_with(|| build(name).map_err(|e| format!("{e:#}")));
    outcome.clone().map_err(|e| anyhow!("{e}"))
}

fn build(name: &str) -> Result<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../peers/build.sh");
    let output = Command::new(&script)
        .arg(name)
        .output()
        .with_context(|| format!("cannot run {}", script.display()))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if !output.status.success() {
        bail!("{} {name} failed with {}:\n{}", script.display(), output.status, text(&output.stderr));
    }
    let answer = text(&output.stdout);
    folder_of(name, &answer).with_context(|| format!("{} {name} answered {answer:?}", script.display()))
}

/// Finds the peer in the output of `build.sh`.
fn folder_of(name: &str, answer: &str) -> Option<PathBuf> {
    answer.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).map(PathBuf::from)
}
