//! What a proxy is told to do.
//!
//! Owns: [`Options`] and [`DetectLocal`]. In and out: values, checked by whoever makes them (the binary does, from the
//! settings).

use std::{net::IpAddr, time::Duration};

use ipnet::IpNet;

use crate::{
    addresses::{InterfacePattern, Match, NodePortAddresses, node_port_addresses},
    conntrack::ConntrackOptions,
    model::Family,
    nft::{
        plan::NodeFacts,
        ruleset::{Base, Detector, NodePortMatch},
    },
};
use keelson_client::NodeInfo;

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

/// What a proxy is told to do, whatever its backend.
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

impl Options {
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

    /// What the fixed rules of a family are made of, and the facts of the node that its elements are made of. None: the node
    /// does not say yet what its pods' networks are.
    #[must_use]
    pub fn of_family(&self, node: &NodeInfo, local: &[IpAddr], family: Family) -> Option<(Base, NodeFacts)> {
        let node_ips = self.node_ips(node, family);
        let (node_ports, addresses) =
            match node_port_addresses(&self.node_port_addresses, &node_ips, local, family) {
                Match::AllLocal => (NodePortMatch::AllLocal, Vec::new()),
                Match::Addresses(addresses) => (NodePortMatch::Addresses, addresses),
            };
        let base = Base {
            family,
            masquerade_all: self.masquerade_all,
            mark: 1_u32.checked_shl(self.masquerade_bit).unwrap_or(0),
            detector: self.detector(node, family)?,
            node_ports,
        };
        let service_cidrs = node.service_cid_rs.iter().filter_map(|text| text.parse::<IpNet>().ok());
        let facts = NodeFacts {
            service_cidrs: service_cidrs.filter(|cidr| family.has(&cidr.addr())).collect(),
            node_ips,
            node_port_addresses: addresses,
        };
        Some((base, facts))
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
