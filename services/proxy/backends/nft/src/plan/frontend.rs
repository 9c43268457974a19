//! Frontends, and the service ports that get them.
//!
//! Owns: [`Frontend`], [`Claims`], and the elements of a frontend. In: claims of service ports. Out: elements.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;
use keelson_client::ServiceName;
use keelson_proxy::model::{Frontend, FrontendKind};

use super::NodeFacts;
use crate::{
    chain::{Chain, PrefixLengths},
    element::{Element, Key, Number, SetName, Value, Verdict},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum FrontendTarget {
    /// Endpoints, by the number of the service port.
    Number(Number),
    /// No endpoint that may be used, but others exist: dropped.
    Drop,
    /// No endpoint at all: rejected.
    Reject,
}

/// A claim to a frontend. Ordered by kind, then by service and service port, which is the order of `PortName`s because
/// the ports of a Service are kept in that order. Any author of a Service can put any address into its `externalIPs`:
/// so cluster IPs, assigned by the API server, come first, then load-balancer addresses, assigned by a controller.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Claim {
    pub(super) kind: FrontendKind,
    pub(super) service: ServiceName,
    pub(super) port: u32,
}

/// All claims to a frontend, ordered: the first one gets it.
#[derive(Debug)]
pub(super) enum Claims {
    One(Claim),
    Several(Vec<Claim>),
}

impl Claims {
    pub(super) fn all(&self) -> &[Claim] {
        match self {
            Self::One(claim) => std::slice::from_ref(claim),
            Self::Several(claims) => claims,
        }
    }

    pub(super) fn add(self, claim: Claim) -> Self {
        let mut claims = match self {
            Self::One(other) => vec![other],
            Self::Several(claims) => claims,
        };
        claims.push(claim);
        claims.sort_unstable();
        claims.dedup();
        Self::of(claims)
    }

    /// Removes the claims of a Service; `None` if none is left.
    pub(super) fn without(self, service: &ServiceName) -> Option<Self> {
        let mut claims = match self {
            Self::One(claim) => vec![claim],
            Self::Several(claims) => claims,
        };
        claims.retain(|claim| claim.service != *service);
        (!claims.is_empty()).then(|| Self::of(claims))
    }

    fn of(mut claims: Vec<Claim>) -> Self {
        match (claims.pop(), claims.is_empty()) {
            (Some(claim), true) => Self::One(claim),
            (last, _) => {
                claims.extend(last);
                Self::Several(claims)
            }
        }
    }
}

/// Everything that the elements of a frontend depend on, besides [`NodeFacts`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FrontendState {
    pub(super) frontend: Frontend,
    pub(super) kind: FrontendKind,
    pub(super) target: FrontendTarget,
    /// Admitted sources; `None`: any.
    pub(super) ranges: Option<Arc<[IpNet]>>,
}

impl FrontendState {
    /// Ordered by set and key.
    pub(super) fn elements(&self, facts: &NodeFacts) -> Vec<Element> {
        let element = |set, key, value| Element { set, key, key_end: None, value };
        let (key, refused) = match self.frontend {
            Frontend::Address { ip, protocol, port } => {
                (Key::new().ip(ip).protocol(protocol).port(port), SetName::Refused)
            }
            Frontend::NodePort { protocol, port } => {
                (Key::new().protocol(protocol).port(port), SetName::RefusedNodePorts)
            }
        };
        let served = match self.kind {
            FrontendKind::ClusterIp => SetName::ClusterIpPorts,
            FrontendKind::ExternalIp | FrontendKind::LoadBalancerIp => SetName::ExternalPorts,
            FrontendKind::NodePort => SetName::NodePorts,
        };
        let mut elements = vec![match self.target {
            FrontendTarget::Number(number) => element(served, key, Value::Data(Key::new().number(number))),
            FrontendTarget::Drop => element(refused, key, Value::Verdict(Verdict::Drop)),
            FrontendTarget::Reject => element(refused, key, Value::Verdict(Verdict::Goto(Chain::Reject))),
        }];
        if let (Some(ranges), Frontend::Address { ip, protocol, port }) = (&self.ranges, self.frontend) {
            let ranges = admitted(ranges, ip, facts);
            let lengths = PrefixLengths::new(ranges.iter().map(IpNet::prefix_len));
            let look = Value::Verdict(Verdict::Goto(Chain::Sources { protocol, lengths }));
            elements.push(element(SetName::Filtered, key, look));
            let range_key = |range: &IpNet| {
                let kind = SetName::range_kind(protocol, range.prefix_len());
                Key::new().ip(ip).port(port).ip(range.network()).index(kind)
            };
            let mut keys: Vec<Key> = ranges.iter().map(range_key).collect();
            keys.sort_unstable();
            elements.extend(keys.into_iter().map(|key| element(SetName::SourceRanges, key, Value::None)));
        }
        elements
    }
}

/// Sources that may reach a load-balancer address, disjoint and ordered. If the node is admitted and the address is
/// bound on it, the address itself is a source (service-semantics 3, "Source ranges").
pub(super) fn admitted(ranges: &[IpNet], ip: IpAddr, facts: &NodeFacts) -> Vec<IpNet> {
    let mut ranges = ranges.to_vec();
    if facts.node_ips.iter().any(|node| ranges.iter().any(|range| range.contains(node))) {
        ranges.push(IpNet::from(ip));
    }
    IpNet::aggregate(&ranges)
}
