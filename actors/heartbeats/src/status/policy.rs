//! The settings that the StatusReporter decides by.
//!
//! Owns: [`StatusPolicy`]. In: the settings of section `[node]`. Out: values of their types.

use std::{path::PathBuf, time::Duration};

use super::settings::{Labels, NodeIps, ResourceList, Taint, Thresholds};

/// What the agent is to its Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// The kubelet is the Node's heartbeat; the agent adds conditions of its own.
    #[default]
    Companion,
    /// The agent is the Node's heartbeat.
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

/// Where service endpoints come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EndpointsOrigin {
    #[default]
    ApiServer,
    /// The folder of manifests, `endpoints.manifests`.
    Manifests,
}

/// What is done in role node when there is no Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Register {
    /// It is made at the start; one that is deleted later stays deleted, as with the kubelet.
    #[default]
    Once,
    /// It is made whenever it is missing.
    Always,
    /// Another program creates it.
    Never,
}

/// The settings. Times are those of the kubelet's settings of the same names.
#[derive(Debug, Clone, PartialEq)]
pub struct StatusPolicy {
    /// What the agent is to the Node.
    pub role: Role,
    pub node_name: String,
    /// How often the status is computed.
    pub update_frequency: Duration,
    /// In role node: how often one that has not changed is reported. A companion reports changes only.
    pub report_frequency: Duration,
    /// Validity of the node's Lease, which is renewed after a quarter of it.
    pub lease_duration: Duration,
    /// When pulls wait, and none that runs has received data for this long, they are stalled.
    pub pulls_stalled_after: Duration,
    /// Where service endpoints come from, for the texts of their condition.
    pub endpoints_origin: EndpointsOrigin,
    /// Conditions that other processes set are reported; else those of an earlier process are taken off the Node.
    pub external_conditions: bool,
    /// What is done when there is no Node.
    pub register: Register,
    /// Labels beside those of host, system, zone and region.
    pub labels: Labels,
    /// Taints that the Node is registered with.
    pub taints: Vec<Taint>,
    /// `topology.kubernetes.io/zone`; empty for none.
    pub zone: String,
    /// `topology.kubernetes.io/region`; empty for none.
    pub region: String,
    /// `spec.providerID`; empty for none.
    pub provider_id: String,
    /// The Node's addresses; empty for those of the host.
    pub node_ips: NodeIps,
    /// What Kubernetes' own daemons need.
    pub kube_reserved: ResourceList,
    /// What the system needs.
    pub system_reserved: ResourceList,
    /// Below what there is pressure.
    pub eviction_hard: Thresholds,
    /// How long a pressure or another problem stays in the conditions after it was last seen.
    pub pressure_transition: Duration,
    pub max_pods: u32,
    /// Most images in the status; -1 for all.
    pub max_images: i32,
    /// The directory whose file system is `nodefs`.
    pub root_dir: PathBuf,
    /// `nodeInfo.kubeletVersion`.
    pub kubelet_version: String,
}

impl StatusPolicy {
    /// The kubelet's defaults, for a Node of this name.
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
