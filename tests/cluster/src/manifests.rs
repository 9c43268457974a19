//! The manifests that are shipped: tests use them as they are.

/// The rights of companions, for the account `keelson-agent` of `kube-system`.
pub const COMPANION: &str = include_str!("../../../packaging/kubernetes/companion.yaml");

/// The same for companions that have a Lease.
pub const COMPANION_WITH_LEASE: &str = concat!(
    include_str!("../../../packaging/kubernetes/companion.yaml"),
    "---\n",
    include_str!("../../../packaging/kubernetes/companion-lease.yaml")
);

/// The rights of nodes for service endpoints.
pub const NODE: &str = include_str!("../../../packaging/kubernetes/node.yaml");

/// The rights of nodes to request certificates.
pub const BOOTSTRAP: &str = include_str!("../../../packaging/kubernetes/bootstrap.yaml");

/// The agent as a DaemonSet.
pub const DAEMON_SET: &str = include_str!("../../../packaging/kubernetes/daemonset.yaml");

/// The proxy as a DaemonSet.
pub const PROXY: &str = include_str!("../../../packaging/kubernetes/proxy.yaml");
