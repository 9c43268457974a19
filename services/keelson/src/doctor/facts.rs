//! What the checks know of a node.
//!
//! Owns: declarations. In: what [`super::probe`] has read. Out: the same, without I/O. An error is a text that says why
//! something is not known.

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use keelson_config::Settings;
use keelson_kube::Credential;

use crate::kubelet::{Kubelet, Process};

#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) settings: Arc<Settings>,
    /// When the facts were gathered, in Unix seconds: credentials expire before or after it.
    pub(crate) now: i64,
    pub(crate) hostname: String,
    pub(crate) state: StateFolder,
    pub(crate) cri: Socket,
    pub(crate) debug: Socket,
    pub(crate) runtime: Socket,
    /// The limit in force, if an agent runs: the number, 0 for none.
    pub(crate) running_limit: Option<u32>,
    pub(crate) kubelet: Kubelet,
    /// Patches of kubeadm for the kubelet's configuration that name the agent's socket.
    pub(crate) patches: Vec<PathBuf>,
    /// `None`: the settings name no API server.
    pub(crate) cluster: Option<Cluster>,
    pub(crate) listeners: Vec<Listener>,
    pub(crate) endpoints: Option<Socket>,
    /// `endpoints.manifests` exists.
    pub(crate) has_manifests: bool,
    /// `None`: not asked for, and no proxy of Keelson is on this node.
    pub(crate) proxy: Option<Proxy>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct StateFolder {
    /// `None`: it does not exist; the agent creates it.
    pub(crate) file: Option<FileMode>,
    /// Of the file system, in bytes.
    pub(crate) free: Option<u64>,
    pub(crate) is_read_only: bool,
    /// Why it cannot be used.
    pub(crate) error: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FileMode {
    pub(crate) owner: u32,
    /// Name of the group, or its number.
    pub(crate) group: String,
    pub(crate) mode: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Socket {
    pub(crate) path: PathBuf,
    /// `None`: there is no such file.
    pub(crate) file: Option<FileMode>,
    pub(crate) answer: Answer,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It accepts connections.
    Listens,
    /// It answers CRI calls.
    Runtime { name: String, version: String },
    /// It did not answer, for this reason.
    Silent(String),
}

impl Socket {
    pub(crate) fn shown(&self) -> String {
        format!("unix://{}", self.path.display())
    }
}

/// A TCP socket that listens on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listener {
    pub(crate) address: SocketAddr,
    /// Program and process ID; `None`: of another user, and this process may not see it.
    pub(crate) owner: Option<(String, i32)>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Cluster {
    /// Where its address and the credentials come from.
    pub(crate) server: String,
    pub(crate) credentials: Vec<Credential>,
    /// Files that others can read.
    pub(crate) warnings: Vec<String>,
    /// Why the credentials cannot be read.
    pub(crate) error: Option<String>,
    pub(crate) node: NodeAnswer,
    pub(crate) rights: Vec<Right>,
    pub(crate) kubeadm: Kubeadm,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum NodeAnswer {
    #[default]
    NotAsked,
    Found {
        pod_cidrs: Vec<String>,
    },
    Absent,
    /// It does not permit the question.
    Refused(String),
    /// The API server does not answer, or does not accept the credentials.
    Failed(String),
}

/// Networks of kubeadm's ClusterConfiguration; `None` where it cannot be read, or says nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Kubeadm {
    pub(crate) pod_subnet: Option<String>,
    pub(crate) service_subnet: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Right {
    /// The job that needs it.
    pub(crate) part: super::Part,
    /// `watch endpointslices.discovery.k8s.io`.
    pub(crate) what: String,
    /// The reason of a refusal may be empty.
    pub(crate) allowed: Result<(), String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Proxy {
    pub(crate) backends: Vec<Backend>,
    /// In this network namespace.
    pub(crate) kube_proxies: Vec<Process>,
    /// Rules of a kube-proxy.
    pub(crate) leftovers: Vec<String>,
    pub(crate) sysctls: Vec<Sysctl>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Backend {
    pub(crate) name: &'static str,
    /// `auto` may choose it.
    pub(crate) is_automatic: bool,
    pub(crate) opened: Result<(), String>,
    pub(crate) rules: Vec<String>,
    /// Another backend whose rules are a part of its own.
    pub(crate) includes: Option<&'static str>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sysctl {
    pub(crate) name: &'static str,
    pub(crate) wanted: u64,
    pub(crate) at_least: bool,
    pub(crate) now: Option<u64>,
}
