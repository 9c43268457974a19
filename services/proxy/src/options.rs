//! Options of a proxy, and what follows from them for the node.
//!
//! Owns: [`Options`], [`DetectLocal`] and [`NodeConfig`]. In: values that the binary made of the settings and checked; the Node
//! and its addresses. Out: values.

use std::{net::IpAddr, time::Duration};

use ipnet::IpNet;

use keelson_client::NodeInfo;

use crate::{
    addresses::{InterfacePattern, Match, NodePortAddresses, node_port_addresses},
    conntrack::ConntrackOptions,
    model::Family,
};

/// How traffic of this node's pods is told from other traffic. Source: kube-proxy's `detectLocalMode`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DetectLocal {
    /// A source in the first network of the family; no network: pods are not told from others.
    ClusterCidr(Vec<IpNet>),
    /// A source in the Node's `spec.podCIDRs`.
    NodeCidr,
    /// It comes in by this bridge.
    BridgeInterface(String),
    /// It comes in by an interface whose name begins so.
    InterfaceNamePrefix(String),
}

/// Options of every backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Addresses that stand for the node's own, at most one a family.
    pub bind_address: Vec<IpAddr>,
    /// How pods are told from others.
    pub detect_local: DetectLocal,
    /// Masquerade all traffic to cluster IPs.
    pub masquerade_all: bool,
    /// The bit of the packet mark that says that a packet is to be masqueraded: 0 to 31.
    pub masquerade_bit: u32,
    /// At which addresses node ports are served.
    pub node_port_addresses: NodePortAddresses,
    /// Serve `spec.externalIPs`. Source: kube-proxy's feature gate `AllowServiceExternalIPs`.
    pub allow_external_ips: bool,
    /// Interfaces whose established flows of Services are offloaded to a flowtable; none: no flowtable.
    pub flowtable_interfaces: Vec<InterfacePattern>,
    /// Settings of conntrack.
    pub conntrack: ConntrackOptions,
    /// Between commits of a lasting burst; 0: no limit. The first ones of a burst are made at once.
    pub min_sync_period: Duration,
    /// How long until what failed is tried again at the latest, and until what another program changed is repaired.
    pub sync_period: Duration,
    /// For how long endpoints may be stale before the node asks for no more traffic; `None`: forever.
    pub max_staleness: Option<Duration>,
}

/// How to tell the traffic that comes from a pod. One that can match nothing (a network of the other family, an empty name)
/// is like none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Detector {
    /// The source address is in this network (ClusterCIDR, NodeCIDR).
    Cidr(IpNet),
    /// It came in by the interface of this name; at most 15 bytes count, as in the kernel.
    Bridge(String),
    /// It came in by an interface whose name begins like this; at most 15 bytes count.
    InterfacePrefix(String),
}

/// What the rules of a family depend on besides Services.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeConfig {
    /// The family.
    pub family: Family,
    /// Masquerade all traffic to cluster IPs.
    pub masquerade_all: bool,
    /// The bit of the packet mark that says that a packet is to be masqueraded, as a mask.
    pub mark: u32,
    /// How to tell a pod's traffic. `None`: traffic to cluster IPs is not masqueraded, and pods are as sources outside.
    pub detector: Option<Detector>,
    /// The CIDRs of every ServiceCIDR, in any order.
    pub service_cidrs: Vec<IpNet>,
    /// The addresses that stand for the node in source ranges.
    pub node_ips: Vec<IpAddr>,
    /// Where node ports are served.
    pub node_ports: Match,
}

impl Options {
    /// The mask of [`Self::masquerade_bit`].
    #[must_use]
    pub fn mark(&self) -> u32 {
        1_u32.checked_shl(self.masquerade_bit).unwrap_or(0)
    }

    /// The node's address of each family: those given, else the first of the Node's.
    #[must_use]
    pub fn node_ips(&self, node: &NodeInfo, family: Family) -> Vec<IpAddr> {
        let given = self.bind_address.iter().copied().filter(|ip| family.has(ip) && !ip.is_unspecified());
        let ips = node.i_ps.as_ref();
        let texts = match family {
            Family::V4 => ips.map(|ips| &ips.v4),
            Family::V6 => ips.map(|ips| &ips.v6),
        };
        let known = texts.into_iter().flatten().filter_map(|text| text.parse().ok());
        given.chain(known.filter(|ip| family.has(ip))).take(1).collect()
    }

    /// What the rules of a family depend on. `None`: the networks of the node's pods are not known yet.
    #[must_use]
    pub fn node_config(&self, node: &NodeInfo, local: &[IpAddr], family: Family) -> Option<NodeConfig> {
        let node_ips = self.node_ips(node, family);
        let service_cidrs = node.service_cid_rs.iter().filter_map(|text| text.parse::<IpNet>().ok());
        Some(NodeConfig {
            family,
            masquerade_all: self.masquerade_all,
            mark: self.mark(),
            detector: self.detector(node, family)?,
            service_cidrs: service_cidrs.filter(|cidr| family.has(&cidr.addr())).collect(),
            node_ports: node_port_addresses(&self.node_port_addresses, &node_ips, local, family),
            node_ips,
        })
    }

    /// None: not known yet.
    fn detector(&self, node: &NodeInfo, family: Family) -> Option<Option<Detector>> {
        let first = |cidrs: &[IpNet]| cidrs.iter().find(|cidr| family.has(&cidr.addr())).copied();
        Some(match &self.detect_local {
            DetectLocal::ClusterCidr(cidrs) => first(cidrs).map(Detector::Cidr),
            DetectLocal::NodeCidr => {
                let cidrs: Vec<IpNet> = node.pod_cid_rs.iter().filter_map(|text| text.parse().ok()).collect();
                if cidrs.is_empty() {
                    return None;
                }
                first(&cidrs).map(Detector::Cidr)
            }
            DetectLocal::BridgeInterface(name) => Some(Detector::Bridge(name.clone())),
            DetectLocal::InterfaceNamePrefix(prefix) => Some(Detector::InterfacePrefix(prefix.clone())),
        })
    }
}
