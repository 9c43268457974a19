//! Settings of the StatusReporter.
//!
//! Owns: [`StatusPolicy`]. In: the settings of section `[node]`. Out: typed values.

use std::{path::PathBuf, time::Duration};

use super::settings::{Labels, NodeIps, ResourceList, Taint, Thresholds};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// The kubelet sends the Node's heartbeat; the agent adds its own conditions.
    #[default]
    Companion,
    /// The agent sends the Node's heartbeat.
    Node,
}

impl Role {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Companion => "companion",
            Self::Node => "node",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EndpointsOrigin {
    #[default]
    ApiServer,
    /// The folder `endpoints.manifests`.
    Manifests,
}

/// What role node does if there is no Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Register {
    /// Create it at the start; one that is deleted later stays deleted, as with the kubelet.
    #[default]
    Once,
    Always,
    /// Another program creates it.
    Never,
}

/// Times are those of the kubelet's settings of the same names.
#[derive(Debug, Clone, PartialEq)]
pub struct StatusPolicy {
    pub role: Role,
    pub node_name: String,
    pub update_frequency: Duration,
    /// In role node: how often an unchanged status is reported. A companion reports changes only.
    pub report_frequency: Duration,
    /// Validity of the node's Lease, which is renewed after a quarter of it.
    pub lease_duration: Duration,
    /// Pulls are stalled when some wait and no running one has received data for this long.
    pub pulls_stalled_after: Duration,
    /// For the texts of the endpoints condition.
    pub endpoints_origin: EndpointsOrigin,
    /// Report conditions that other processes set; otherwise those of an earlier process are removed from the Node.
    pub external_conditions: bool,
    pub register: Register,
    /// Labels beside those of host, system, zone and region.
    pub labels: Labels,
    pub taints: Vec<Taint>,
    /// `topology.kubernetes.io/zone`; empty for none.
    pub zone: String,
    /// `topology.kubernetes.io/region`; empty for none.
    pub region: String,
    /// `spec.providerID`; empty for none.
    pub provider_id: String,
    /// Empty: those of the host.
    pub node_ips: NodeIps,
    /// Reserved for Kubernetes' own daemons.
    pub kube_reserved: ResourceList,
    pub system_reserved: ResourceList,
    /// Below these there is pressure.
    pub eviction_hard: Thresholds,
    /// How long a pressure or another problem stays in the conditions after it was last seen.
    pub pressure_transition: Duration,
    pub max_pods: u32,
    /// Maximum number of images in the status; -1 for all.
    pub max_images: i32,
    /// The directory whose file system is `nodefs`.
    pub root_dir: PathBuf,
    /// `nodeInfo.kubeletVersion`.
    pub kubelet_version: String,
}

impl StatusPolicy {
    /// The kubelet's defaults.
    #[must_use]
    pub fn new(role: Role, node_name: &str) -> Self {
        Self {
            role,
            node_name: node_name.to_owned(),
            update_frequency: Duration::from_secs(10),
            report_frequency: Duration::from_secs(300),
            lease_duration: Duration::from_secs(40),
            pulls_stalled_after: Duration::from_secs(120),
            endpoints_origin: EndpointsOrigin::ApiServer,
            external_conditions: true,
            register: Register::Once,
            labels: Labels::default(),
            taints: Vec::new(),
            zone: String::new(),
            region: String::new(),
            provider_id: String::new(),
            node_ips: NodeIps::default(),
            kube_reserved: ResourceList::default(),
            system_reserved: ResourceList::default(),
            eviction_hard: Thresholds::kubelet(),
            pressure_transition: Duration::from_secs(300),
            max_pods: 110,
            max_images: 50,
            root_dir: "/var/lib/kubelet".into(),
            kubelet_version: concat!("v", env!("CARGO_PKG_VERSION"), "-keelson").to_owned(),
        }
    }
}
