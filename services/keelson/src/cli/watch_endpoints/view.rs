//! Endpoints for scripts.
//!
//! Owns: the JSON and YAML of `keelson watch`: [`FullState`] of `--once`, [`Change`] of a watch. In: states and messages of
//! `localnetv1`. Out: serializable values. Names are those of the API, in camel case; numbers that exceed JSON's range
//! are text.

use keelson_client::{
    Position, ServiceName,
    localnetv1::{self as local, IpSet},
};
use serde::Serialize;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FullState {
    #[serde(flatten)]
    position: At,
    node: Option<Node>,
    services: Vec<Service>,
}

impl FullState {
    pub(super) fn new(
        position: &Position,
        node: Option<&local::NodeInfo>,
        services: &[local::ServiceEndpoints],
    ) -> Self {
        Self {
            position: position.into(),
            node: node.map(Node::from),
            services: services.iter().map(Service::from).collect(),
        }
    }
}

/// A change; `sync` ends the changes that lead to one state.
#[derive(Debug, Serialize)]
#[serde(tag = "change", rename_all = "camelCase")]
pub(super) enum Change {
    Set { service: Service },
    Delete { namespace: String, name: String },
    Node { node: Node },
    Sync(At),
}

impl From<&ServiceName> for Change {
    fn from(name: &ServiceName) -> Self {
        Self::Delete { namespace: name.namespace().into(), name: name.name().into() }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct At {
    #[serde(rename = "instanceID")]
    instance_id: String,
    rev: u64,
    stale: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    stale_reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    stale_since_unix_ms: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    triggered_unix_ms: Option<i64>,
}

impl From<&Position> for At {
    fn from(position: &Position) -> Self {
        Self {
            instance_id: position.instance_id.to_string(),
            rev: position.rev,
            stale: position.stale,
            stale_reason: position.stale_reason.clone(),
            stale_since_unix_ms: position.stale_since_unix_ms,
            triggered_unix_ms: position.triggered_unix_ms,
        }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Node {
    name: String,
    exists: bool,
    zone: String,
    #[serde(rename = "ips")]
    ips: Vec<String>,
    #[serde(rename = "podCIDRs")]
    pod_cidrs: Vec<String>,
    #[serde(rename = "serviceCIDRs")]
    service_cidrs: Vec<String>,
    eligible: bool,
}

impl From<&local::NodeInfo> for Node {
    fn from(node: &local::NodeInfo) -> Self {
        Self {
            name: node.name.clone(),
            exists: node.exists,
            zone: node.zone.clone(),
            ips: addresses(node.i_ps.as_ref()),
            pod_cidrs: node.pod_cid_rs.clone(),
            service_cidrs: node.service_cid_rs.clone(),
            eligible: node.eligible,
        }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Service {
    namespace: String,
    name: String,
    r#type: String,
    #[serde(rename = "clusterIPs")]
    cluster_ips: Vec<String>,
    #[serde(rename = "externalIPs")]
    external_ips: Vec<String>,
    #[serde(rename = "loadBalancerIPs")]
    load_balancer_ips: Vec<String>,
    source_ranges: Vec<String>,
    internal_traffic_to_local: bool,
    external_traffic_to_local: bool,
    #[serde(rename = "clientIPAffinitySeconds")]
    client_ip_affinity_seconds: i32,
    health_check_node_port: i32,
    local_ready: Ready,
    ports: Vec<Port>,
    endpoints: Vec<Endpoint>,
}

/// Number of distinct addresses that are ready on this node.
#[derive(Debug, Serialize)]
struct Ready {
    ipv4: u32,
    ipv6: u32,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Port {
    name: String,
    protocol: &'static str,
    port: i32,
    node_port: i32,
    target_port: i32,
    has_any: Any,
}

/// Whether some endpoint anywhere could serve the port.
#[derive(Debug, Serialize)]
struct Any {
    ipv4: bool,
    ipv6: bool,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint {
    addresses: Vec<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    hostname: String,
    ready: bool,
    serving: bool,
    terminating: bool,
    local: bool,
    selected: bool,
    ports: Vec<EndpointPort>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct EndpointPort {
    /// Index of the port among the Service's ports, from 0.
    index: u32,
    port: i32,
    /// In the set for traffic that may go anywhere.
    cluster: bool,
    /// In the set for traffic that must stay on the node.
    local: bool,
}

impl From<&local::ServiceEndpoints> for Service {
    fn from(service: &local::ServiceEndpoints) -> Self {
        let ips = service.i_ps.as_ref();
        Self {
            namespace: service.namespace.clone(),
            name: service.name.clone(),
            r#type: service.r#type.clone(),
            cluster_ips: cluster_ips(service),
            external_ips: addresses(ips.and_then(|ips| ips.external_i_ps.as_ref())),
            load_balancer_ips: addresses(ips.and_then(|ips| ips.load_balancer_i_ps.as_ref())),
            source_ranges: addresses(service.source_ranges.as_ref()),
            internal_traffic_to_local: service.internal_traffic_to_local,
            external_traffic_to_local: service.external_traffic_to_local,
            client_ip_affinity_seconds: service.client_ip_affinity_seconds,
            health_check_node_port: service.health_check_node_port,
            local_ready: Ready { ipv4: service.local_ready_v4, ipv6: service.local_ready_v6 },
            ports: service.ports.iter().map(Port::from).collect(),
            endpoints: service.endpoints.iter().map(Endpoint::from).collect(),
        }
    }
}

impl From<&local::PortMapping> for Port {
    fn from(port: &local::PortMapping) -> Self {
        Self {
            name: port.name.clone(),
            protocol: protocol(port),
            port: port.port,
            node_port: port.node_port,
            target_port: port.target_port,
            has_any: Any { ipv4: port.has_any_v4, ipv6: port.has_any_v6 },
        }
    }
}

impl From<&local::Endpoint> for Endpoint {
    fn from(endpoint: &local::Endpoint) -> Self {
        let conditions = endpoint.conditions.unwrap_or_default();
        let port = |port: &local::EndpointPort| EndpointPort {
            index: port.index,
            port: port.port,
            cluster: port.cluster,
            local: port.local,
        };
        Self {
            addresses: addresses(endpoint.i_ps.as_ref()),
            hostname: endpoint.hostname.clone(),
            ready: conditions.ready,
            serving: conditions.serving,
            terminating: conditions.terminating,
            local: conditions.local,
            selected: conditions.selected,
            ports: endpoint.ports.iter().map(port).collect(),
        }
    }
}

pub(super) fn addresses(ips: Option<&IpSet>) -> Vec<String> {
    ips.map_or_else(Vec::new, |ips| ips.v4.iter().chain(&ips.v6).cloned().collect())
}

/// All cluster IPs; servers with the oldest form of the API send only one.
pub(super) fn cluster_ips(service: &local::ServiceEndpoints) -> Vec<String> {
    let Some(ips) = &service.i_ps else { return Vec::new() };
    match addresses(ips.cluster_i_ps.as_ref()) {
        all if all.is_empty() && !ips.cluster_ip.is_empty() => vec![ips.cluster_ip.clone()],
        all => all,
    }
}

pub(super) fn protocol(port: &local::PortMapping) -> &'static str {
    match port.protocol() {
        local::Protocol::Tcp => "TCP",
        local::Protocol::Udp => "UDP",
        local::Protocol::Sctp => "SCTP",
        local::Protocol::Unknown => "unknown",
    }
}
