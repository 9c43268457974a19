//! Which destinations the socket level translates, and to which endpoints (service-semantics 2 and 3).
//!
//! Owns: [`Policy`]. In: a service port, facts of the node. Out: for each frontend, a set of endpoints or the [`Reason`] why
//! packets decide. Pure.
//!
//! At the socket level, sockets of the node and of its pods are the clients: an external policy Local is for others, as in
//! kube-proxy. For direct return, outside clients of external addresses are. What needs
//! the source of a packet, its translation, or an answer of the kernel (reject, drop) is left to packets.

use ipnet::IpNet;
use keelson_proxy::model::{Endpoint, FrontendKind, Protocol, ServicePort};

use crate::layout::SetKind;

/// What decisions depend on besides the Service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NodeFacts {
    /// Traffic to Services shall have the node's address as its source.
    pub(crate) masquerade_all: bool,
    /// Pods are distinguished from outside sources.
    pub(crate) detects_pods: bool,
    /// Of the service port: an interface of the node has its cluster IP, as with NodeLocal DNSCache.
    pub(crate) has_cluster_ip: bool,
    /// For packets of outside clients, by direct return; otherwise for sockets of the node and its pods.
    pub(crate) is_direct_return: bool,
}

/// Why packets decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    Protocol,
    MasqueradeAll,
    SourceRanges,
    NodeHasAddress,
    /// A datagram to a node port may be the answer to a client of the node that has this port for itself.
    UdpNodePort,
    /// An external policy Local, and pods count as outside.
    UnknownPods,
    /// Another frontend of the service port is left to packets, and a client shall have one endpoint at all of them.
    SharedAffinity,
    /// Packets are rejected, or dropped by a policy.
    NoEndpoint,
    /// The maps have no room for the service port.
    Full,
    /// Direct return: it is an address for clients in the cluster.
    ClusterIp,
    /// Direct return: a client has one endpoint, whichever way its packets come.
    Affinity,
}

impl Reason {
    pub(crate) const fn describe(self) -> &'static str {
        match self {
            Self::Protocol => "SCTP is not translated there",
            Self::MasqueradeAll => "masquerade_all is set, and nothing is masqueraded there",
            Self::SourceRanges => "it has source ranges, which need the source of the packet",
            Self::NodeHasAddress => "the node has the cluster IP, so a process of the node may serve it",
            Self::UdpNodePort => {
                "a datagram to a port of the node may be an answer to a client there, which connection tracking tells"
            }
            Self::UnknownPods => {
                "externalTrafficPolicy is Local, and pods are not distinguished from other sources"
            }
            Self::SharedAffinity => {
                "a client has one endpoint at all addresses of the service port, and some of them are left to packets"
            }
            Self::NoEndpoint => "no endpoint is in the set, so packets are refused",
            Self::Full => "the maps are full",
            Self::ClusterIp => "it is a cluster IP, and packets to it come from clients in the cluster",
            Self::Affinity => "the service port has session affinity",
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy<'a> {
    pub(crate) port: &'a ServicePort,
    pub(crate) node: NodeFacts,
}

impl<'a> Policy<'a> {
    /// The set that a frontend of this kind leads to, never empty.
    pub(crate) fn of(self, kind: FrontendKind) -> Result<SetKind, Reason> {
        let set = self.set_of(kind)?;
        if self.endpoints(set).is_empty() {
            return Err(Reason::NoEndpoint);
        }
        let is_left = |(_, other): (_, FrontendKind)| self.set_of(other).is_err();
        if self.port.affinity_seconds != 0 && self.port.frontends().any(is_left) {
            return Err(Reason::SharedAffinity);
        }
        Ok(set)
    }

    /// The same without regard to endpoints and other frontends.
    fn set_of(self, kind: FrontendKind) -> Result<SetKind, Reason> {
        let Self { port, node } = self;
        if port.name.protocol == Protocol::Sctp {
            return Err(Reason::Protocol);
        }
        if node.masquerade_all {
            return Err(Reason::MasqueradeAll);
        }
        if node.has_cluster_ip {
            return Err(Reason::NodeHasAddress);
        }
        match kind {
            FrontendKind::ClusterIp if node.is_direct_return => Err(Reason::ClusterIp),
            FrontendKind::LoadBalancerIp if !node.is_direct_return && self.has_ranges(kind) => {
                Err(Reason::SourceRanges)
            }
            _ if node.is_direct_return && port.affinity_seconds != 0 => Err(Reason::Affinity),
            _ if node.is_direct_return && port.external_local => Ok(SetKind::Local),
            FrontendKind::ClusterIp if port.internal_local => Ok(SetKind::Local),
            FrontendKind::ClusterIp => Ok(SetKind::Cluster),
            FrontendKind::NodePort if port.name.protocol == Protocol::Udp && !node.is_direct_return => {
                Err(Reason::UdpNodePort)
            }
            _ if port.external_local && !node.detects_pods => Err(Reason::UnknownPods),
            _ => Ok(SetKind::Cluster),
        }
    }

    /// Whether clients outside of the source ranges are refused.
    pub(crate) fn has_ranges(self, kind: FrontendKind) -> bool {
        kind == FrontendKind::LoadBalancerIp && !self.port.source_ranges.is_empty()
    }

    /// Those that direct return looks for a client in.
    pub(crate) fn used_ranges(self) -> &'a [IpNet] {
        let is_used = self.node.is_direct_return
            && self.port.frontends().any(|(_, kind)| self.has_ranges(kind) && self.of(kind).is_ok());
        if is_used { &self.port.source_ranges } else { &[] }
    }

    pub(crate) fn endpoints(self, set: SetKind) -> &'a [Endpoint] {
        match set {
            SetKind::Cluster => &self.port.cluster,
            SetKind::Local => &self.port.local,
        }
    }

    /// The endpoints of a set; empty if no frontend leads to it.
    pub(crate) fn used_endpoints(self, set: SetKind) -> &'a [Endpoint] {
        let is_used = self.port.frontends().any(|(_, kind)| self.of(kind) == Ok(set));
        if is_used { self.endpoints(set) } else { &[] }
    }
}
