//! The cluster of a test: real control plane and kubelets, separate for each test.
//!
//! Owns: etcd ([`Etcd`]), an API server ([`ApiServer`]), controllers ([`ControllerManager`]), kubelets ([`Kubelet`]),
//! users with their kubeconfig files ([`Identity`]), an administrator ([`Admin`]), and two proxies that break the
//! traffic to the API server: one that reads requests ([`ApiProxy`]) and one that only passes bytes ([`TcpProxy`]).
//! Also a wall clock that can be set for one program ([`FakeClock`]).
//! In: a [`Scratch`]. [`Cluster`] holds what most tests need together.

mod apiserver;
mod audit;
mod client;
mod clock;
mod controllers;
mod etcd;
mod identity;
mod journal;
mod kube_proxy;
mod kubelet;
mod pki;
mod proxy;
mod reflectors;
mod scheduler;
mod tcp;

pub use apiserver::{ApiOptions, ApiServer};
pub use audit::AuditEvent;
pub use client::{Admin, Bound, Change, NODE_LEASES, Watch, condition};
pub use clock::FakeClock;
pub use controllers::{ControllerManager, ControllerOptions};
pub use etcd::{Etcd, Writes};
pub use identity::{Identity, client, refused};
pub use journal::{Journal, Put};
pub use kube_proxy::{KubeProxy, KubeProxyOptions};
pub use kubelet::{Kubelet, KubeletOptions};
pub use pki::{Pair, Pki};
pub use proxy::{ApiFault, ApiMatch, ApiProxy, ApiRule, ApiSeen};
pub use reflectors::Reflectors;
pub use scheduler::Scheduler;
pub use tcp::{Chunk, TcpProxy};

use crate::net::Forward;
use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::core::v1::Namespace;
use keelson_harness::containerd::Containerd;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually};
use kube::Api;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;

/// The environment variable with the [`Cluster::description`] of a cluster outside of this virtual machine.
pub const OUTSIDE: &str = "KEELSON_TEST_CLUSTER";

/// A control plane: etcd and an API server that is ready. No controller runs unless a test starts some.
#[derive(Debug)]
pub struct Cluster {
    pub admin: Admin,
    pub api: ApiServer,
    pub etcd: Etcd,
    pki: Arc<Pki>,
    admin_identity: Identity,
    token_nodes: Vec<String>,
    _forwards: Vec<Forward>,
}

impl Cluster {
    /// Starts etcd and an API server below `scratch`, and waits until the namespaces of the system exist.
    pub async fn start(scratch: &Scratch) -> Result<Self> {
        Self::start_with(scratch, &ApiOptions::default()).await
    }

    pub async fn start_with(scratch: &Scratch, options: &ApiOptions) -> Result<Self> {
        let pki = Arc::new(Pki::new(&scratch.numbered("pki-")?)?);
        let etcd = Etcd::start(scratch, options.streaming_lists).await?;
        let folder = scratch.numbered("admin-")?;
        let mut identity = None;
        let api = ApiServer::start(scratch, etcd.endpoint(), &pki, options, |endpoint| async {
            let endpoint = endpoint;
            let made = Identity::certificate(folder, &endpoint, &pki, "admin", "system:masters").await?;
            let admin = Admin::new(made.client().await?);
            identity = Some((made, admin.clone()));
            Ok(admin)
        })
        .await?;
        let (admin_identity, admin) =
            identity.context("the API server was started without its administrator")?;
        let namespaces: Api<Namespace> = Api::all(admin.client());
        for name in ["default", "kube-system", NODE_LEASES] {
            eventually(PATIENCE, &format!("the namespace {name} is there"), || async {
                match namespaces.get_opt(name).await? {
                    Some(_) => Ok(()),
                    None => bail!("it is not"),
                }
            })
            .await?;
        }
        // Pods are refused without it, and no controller runs that would create it.
        admin.ensure_service_account("default", "default").await?;
        let token_nodes = options.token_nodes.clone();
        Ok(Self { admin, api, etcd, pki, admin_identity, token_nodes, _forwards: Vec::new() })
    }

    /// What [`Cluster::outside`] needs to use it from a virtual machine, where the loopback of this machine has another
    /// address.
    pub fn description(&self, loopback: &str) -> String {
        let (api, etcd, key) = (self.api.endpoint(), self.etcd.endpoint(), self.pki.key());
        json!({"api": api, "etcd": etcd, "key": key, "loopback": loopback}).to_string()
    }

    /// The cluster of a [`Cluster::description`], outside of this virtual machine. Its ports are forwarded, so that its
    /// addresses are the same here. It cannot be stopped or restarted.
    pub async fn outside(scratch: &Scratch, description: &str) -> Result<Self> {
        let description: Value = serde_json::from_str(description).context("not a cluster's description")?;
        let text = |key: &str| description[key].as_str().with_context(|| format!("a cluster has its {key}"));
        let mut forwards = Vec::new();
        for endpoint in [text("api")?, text("etcd")?] {
            let (_, address) = endpoint.split_once("//").context("an endpoint is a URL")?;
            let (_, port) = address.split_once(':').context("an endpoint has a port")?;
            let listener = tokio::net::TcpListener::bind(address).await?;
            forwards.push(Forward::of(listener, &format!("{}:{port}", text("loopback")?)));
        }
        let pki = Arc::new(Pki::of(&scratch.numbered("pki-")?, text("key")?)?);
        let folder = scratch.numbered("admin-")?;
        let admin_identity =
            Identity::certificate(folder, text("api")?, &pki, "admin", "system:masters").await?;
        let admin = Admin::new(admin_identity.client().await?);
        let api = ApiServer::outside(scratch, text("api")?, admin.clone());
        let etcd = Etcd::outside(text("etcd")?);
        Ok(Self { admin, api, etcd, pki, admin_identity, token_nodes: Vec::new(), _forwards: forwards })
    }

    pub fn pki(&self) -> &Pki {
        &self.pki
    }

    pub fn admin_kubeconfig(&self) -> PathBuf {
        self.admin_identity.kubeconfig()
    }

    /// Node `name` (user `system:node:NAME` of group `system:nodes`) with a certificate.
    pub async fn node(&self, scratch: &Scratch, name: &str) -> Result<Identity> {
        let folder = scratch.numbered("node-")?;
        let user = format!("system:node:{name}");
        Identity::certificate(folder, self.api.endpoint(), &self.pki, &user, "system:nodes").await
    }

    /// Node `name` with a static token in a file. It must be one of [`ApiOptions::token_nodes`].
    pub async fn node_by_token(&self, scratch: &Scratch, name: &str) -> Result<Identity> {
        if !self.token_nodes.iter().any(|known| known == name) {
            bail!("the API server was not started with a token for {name}: see ApiOptions::token_nodes");
        }
        let folder = scratch.numbered("node-")?;
        let tokens = apiserver::static_tokens(name);
        let user = format!("system:node:{name}");
        Identity::static_token(folder, self.api.endpoint(), &self.pki, &user, tokens).await
    }

    /// A service account with an unbound token in a file. Account and namespace are created if necessary.
    pub async fn service_account(&self, scratch: &Scratch, namespace: &str, name: &str) -> Result<Identity> {
        self.admin.ensure_service_account(namespace, name).await?;
        self.account(scratch, (namespace, name), None).await
    }

    /// The agent of role `companion` on `node`, as its DaemonSet runs it: a service account in `kube-system` with
    /// tokens that are bound to its pod, which no kubelet runs. They become invalid with the pod, and not with the
    /// Node, which need not exist.
    pub async fn companion(&self, scratch: &Scratch, account: &str, node: &str) -> Result<Identity> {
        self.admin.ensure_service_account("kube-system", account).await?;
        let pod = self.admin.ensure_pod_of("kube-system", account, node).await?;
        self.account(scratch, ("kube-system", account), Some(Bound::Pod(pod))).await
    }

    /// The same under systemd: with tokens that are bound to the Node, which must exist, and become invalid with it.
    pub async fn companion_of_node(&self, scratch: &Scratch, account: &str, node: &str) -> Result<Identity> {
        self.admin.ensure_service_account("kube-system", account).await?;
        self.account(scratch, ("kube-system", account), Some(Bound::Node(node.to_owned()))).await
    }

    async fn account(
        &self,
        scratch: &Scratch,
        account: (&str, &str),
        bound: Option<Bound>,
    ) -> Result<Identity> {
        let folder = scratch.numbered("account-")?;
        Identity::service_account(folder, self.api.endpoint(), &self.pki, &self.admin, account, bound).await
    }

    pub async fn controllers(
        &self,
        scratch: &Scratch,
        options: &ControllerOptions,
    ) -> Result<ControllerManager> {
        ControllerManager::start(scratch, &self.admin_kubeconfig(), options).await
    }

    pub async fn scheduler(&self, scratch: &Scratch) -> Result<Scheduler> {
        Scheduler::start(scratch, &self.admin_kubeconfig()).await
    }

    /// Starts a kubelet for node `name` on a containerd, and waits until it serves.
    pub async fn kubelet(
        &self,
        scratch: &Scratch,
        name: &str,
        containerd: &Containerd,
        options: &KubeletOptions,
    ) -> Result<Kubelet> {
        let kubeconfig = match &options.kubeconfig {
            Some(file) => file.clone(),
            None => self.node(scratch, name).await?.kubeconfig(),
        };
        Kubelet::start(scratch, name, &kubeconfig, containerd, options).await
    }

    /// Starts a proxy before the API server that reads requests.
    pub async fn proxy(&self) -> Result<ApiProxy> {
        ApiProxy::start(self.api.address(), &self.pki).await
    }

    /// Starts a proxy before the API server that only passes bytes.
    pub async fn tcp_proxy(&self) -> Result<TcpProxy> {
        TcpProxy::start(self.api.address()).await
    }
}
