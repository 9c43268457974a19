//! What happens to a new connection (service-semantics 2 and 3).
//!
//! Owns: the classes of sources ([`Origin`]), and [`Rule::decide`]. In: a rule, facts of the node, the source address.
//! Out: a [`Decision`]. Pure.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use keelson_proxy::{
    model::{Endpoint, Frontend, FrontendKind},
    options::Detector,
};

use super::Rule;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    Pod,
    /// A process of the node, or a pod in the node's network.
    Host,
    Outside,
}

/// What decisions depend on besides the Service.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct NodeFacts {
    /// The network of pods, where sources tell it.
    pub(crate) pods: Option<IpNet>,
    /// The node's addresses in source ranges.
    pub(crate) node_ips: Vec<IpAddr>,
    /// The addresses of the node's interfaces.
    pub(crate) local: BTreeSet<IpAddr>,
}

impl NodeFacts {
    /// A detector by interface finds nothing: a socket does not tell the input interface.
    pub(crate) fn pods_of(detector: Option<&Detector>) -> Option<IpNet> {
        match detector {
            Some(Detector::Cidr(net)) => Some(*net),
            Some(Detector::Bridge(_) | Detector::InterfacePrefix(_)) | None => None,
        }
    }

    /// `destination`: the address that was connected to. The kernel uses it as the source of the node's own connections
    /// to it.
    pub(crate) fn origin(&self, source: IpAddr, destination: IpAddr) -> Origin {
        if source.is_loopback() || source == destination || self.local.contains(&source) {
            Origin::Host
        } else if self.pods.is_some_and(|net| net.contains(&source)) {
            Origin::Pod
        } else {
            Origin::Outside
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision<'a> {
    /// One of these; never empty.
    Relay(&'a [Endpoint]),
    Drop,
    Reject,
}

impl Rule {
    pub(crate) fn decide(&self, origin: Origin, source: IpAddr, facts: &NodeFacts) -> Decision<'_> {
        if !self.admits(source, facts) {
            return Decision::Drop;
        }
        self.decide_admitted(origin)
    }

    /// The decision for a source that source ranges do not exclude.
    pub(crate) fn decide_admitted(&self, origin: Origin) -> Decision<'_> {
        let is_local = match self.kind {
            FrontendKind::ClusterIp => self.port.internal_local,
            _ => self.port.external_local && origin == Origin::Outside,
        };
        let set = if is_local { &self.port.local } else { &self.port.cluster };
        match (set.is_empty(), self.port.has_any) {
            (false, _) => Decision::Relay(set),
            (true, true) => Decision::Drop,
            (true, false) => Decision::Reject,
        }
    }

    /// Source ranges apply to load-balancer IPs only, and to every source.
    pub(crate) fn admits(&self, source: IpAddr, facts: &NodeFacts) -> bool {
        let ranges = self.ranges();
        let contains = |ip: &IpAddr| ranges.iter().any(|range| range.contains(ip));
        // An address that is bound on this node is the source of the node's own connections to it.
        let is_own = matches!(self.frontend, Frontend::Address { ip, .. } if ip == source);
        ranges.is_empty() || contains(&source) || (is_own && facts.node_ips.iter().any(contains))
    }

    /// Empty: any source is admitted.
    pub(crate) fn ranges(&self) -> &[IpNet] {
        if self.kind == FrontendKind::LoadBalancerIp { &self.port.source_ranges } else { &[] }
    }

    /// Whether every source is rejected: nothing needs to listen then, and the kernel rejects.
    pub(crate) fn rejects_all(&self) -> bool {
        let rejects = |origin| self.decide_admitted(origin) == Decision::Reject;
        self.ranges().is_empty() && [Origin::Pod, Origin::Host, Origin::Outside].into_iter().all(rejects)
    }
}
