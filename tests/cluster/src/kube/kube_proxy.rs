//! Owns: a kube-proxy of the test. In: a cluster with the Node object, a network namespace from which the API server is
//! reached. Out: its metrics, and control of its process.

use super::Cluster;
use super::identity::Identity;
use crate::net::{Namespace, http_get_from};
use anyhow::{Context as _, Result};
use keelson_harness::daemon::Daemon;
use keelson_harness::daemon_life;
use keelson_harness::peers;
use keelson_harness::process::Program;
use keelson_harness::scratch::Scratch;
use serde_json::{Value, json};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

#[derive(Clone, Debug)]
pub struct KubeProxyOptions {
    /// Name of its Node, which must exist and have addresses.
    pub node: String,
    /// A kubeconfig instead of one with a certificate of `system:kube-proxy`.
    pub kubeconfig: Option<PathBuf>,
    pub env: Vec<(String, String)>,
    /// A JSON merge patch for the harness's `KubeProxyConfiguration`.
    pub config: Value,
}

impl KubeProxyOptions {
    /// Mode nftables, pods detected by [`CLUSTER_CIDRS`](crate::net::plan::CLUSTER_CIDRS), all other settings at their
    /// defaults.
    pub fn new(node: &str) -> Self {
        Self { node: node.to_owned(), kubeconfig: None, env: Vec::new(), config: json!({}) }
    }

    pub fn with(mut self, config: Value) -> Self {
        merge(&mut self.config, config);
        self
    }
}

/// Killed on drop.
#[derive(Debug)]
pub struct KubeProxy {
    daemon: Daemon,
}

/// Its metrics address, inside its namespace.
const METRICS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 10249);

impl KubeProxy {
    /// Starts one in a namespace and waits until it serves; the test has to wait for its first sync. The API server
    /// must be reachable there at its own address, for example with [`Forward`](crate::net::Forward).
    pub async fn start(
        scratch: &Scratch,
        cluster: &Cluster,
        namespace: &Namespace,
        options: &KubeProxyOptions,
    ) -> Result<Self> {
        let folder = scratch.numbered("kube-proxy-")?;
        let kubeconfig = match &options.kubeconfig {
            Some(file) => file.clone(),
            None => {
                // The API server itself binds the role of node proxiers to this user.
                let (user, group) = ("system:kube-proxy", "keelson-tests");
                let server = cluster.api.endpoint();
                let made = Identity::certificate(folder.clone(), server, &cluster.pki, user, group).await?;
                made.kubeconfig()
            }
        };
        let mut config = json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clientConnection": {"kubeconfig": kubeconfig},
            "hostnameOverride": options.node,
            "clusterCIDR": crate::net::plan::CLUSTER_CIDRS.join(","),
            "metricsBindAddress": METRICS.to_string(),
            // It may not write these in a namespace.
            "conntrack": {
                "maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s",
            },
        });
        merge(&mut config, options.config.clone());
        let file = folder.join("config.yaml");
        fs::write(&file, config.to_string()).with_context(|| format!("cannot write {}", file.display()))?;
        let program = Program {
            name: "kube-proxy".to_owned(),
            path: peers::kubernetes("kube-proxy")?,
            args: vec![format!("--config={}", file.display()), "-v=2".to_owned()],
            env: options.env.clone(),
            log: folder.join("kube-proxy.log"),
        };
        let mut proxy = Self { daemon: Daemon::new(namespace.in_namespace(&program)?) };
        proxy.start_again(namespace).await?;
        Ok(proxy)
    }

    /// Starts it after [`KubeProxy::kill9`] or [`KubeProxy::terminate`] and waits until it serves.
    pub async fn start_again(&mut self, namespace: &Namespace) -> Result<()> {
        let healthy = || async { http_get_from(namespace, METRICS, "/healthz").await?.success().map(drop) };
        self.daemon.start(healthy).await
    }
}

daemon_life!(KubeProxy);

/// JSON merge patch (RFC 7396), where `null` removes.
fn merge(base: &mut Value, over: Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (key, value) in over {
                if value.is_null() {
                    base.remove(&key);
                } else {
                    merge(base.entry(key).or_insert(Value::Null), value);
                }
            }
        }
        (base, over) => *base = over,
    }
}
