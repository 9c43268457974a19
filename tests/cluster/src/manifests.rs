//! The shipped manifests: tests use them unchanged.

/// Rights of companions, for the account `keelson-agent` of `kube-system`.
pub const COMPANION: &str = include_str!("../../../packaging/kubernetes/companion.yaml");

/// The same for companions that have a Lease.
pub const COMPANION_WITH_LEASE: &str = concat!(
    include_str!("../../../packaging/kubernetes/companion.yaml"),
    "---\n",
    include_str!("../../../packaging/kubernetes/companion-lease.yaml")
);

pub const NODE: &str = include_str!("../../../packaging/kubernetes/node.yaml");

pub const BOOTSTRAP: &str = include_str!("../../../packaging/kubernetes/bootstrap.yaml");

pub const DAEMON_SET: &str = include_str!("../../../packaging/kubernetes/daemonset.yaml");

pub const PROXY: &str = include_str!("../../../packaging/kubernetes/proxy.yaml");
