//! Where traffic to Services arrives, and who has it.
//!
//! Owns: [`Frontend`], [`Claims`], and the elements of a frontend. In: what service ports claim. Out: elements.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;
use keelson_client::ServiceName;
use keelson_proxy::model::Frontend;

use super::NodeFacts;
use crate::{
    chain::{Chain, PrefixLengths},
    element::{Element, Key, Number, SetName, Value, Verdict},
};

/// What a frontend is to the service port that has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum FrontendKind {
    /// V.
    ClusterIp,
    /// W.
    LoadBalancerIp,
    /// X.
    ExternalIp,
    /// NP.
    NodePort,
}

/// Where a frontend leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum FrontendTarget {
    /// To endpoints, by the number of the service port.
    Number(Number),
    /// Nowhere, though endpoints exist: dropped.
    Drop,
    /// Nowhere, for nothing could serve it: rejected.
    Reject,
}

/// Who claims a frontend. Ordered by kind, then by service and service port, which is the order of `PortName`s as the ports of
/// a Service are kept in that order. Anybody who may write a Service can put any address into its `externalIPs`: so cluster IPs
/// come first, which the API server gives out, then load-balancer addresses, which a controller does.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Claim {
    pub(super) kind: FrontendKind,
    pub(super) service: ServiceName,
    /// The place of the service port in its Service.
    pub(super) port: u32,
}

/// Everybody who claims a frontend, ordered: the first one has it.
#[derive(Debug)]
pub(super) enum Claims {
    /// As it nearly always is.
    One(Claim),
    /// At least two.
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

    /// Without those of a Service; none if that is all.
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

/// What a frontend means: all that its elements depend on, besides [`NodeFacts`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Meaning {
    pub(super) frontend: Frontend,
    pub(super) kind: FrontendKind,
    pub(super) target: FrontendTarget,
    /// Who may; none: anyone.
    pub(super) ranges: Option<Arc<[IpNet]>>,
}

impl Meaning {
    /// The elements, ordered by set and key.
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

/// Who may reach a load-balancer address, disjoint and ordered: the node itself, where it may, is seen to come from the
/// very address if that is bound on the node (service-semantics 3, "Source ranges").
pub(super) fn admitted(ranges: &[IpNet], ip: IpAddr, facts: &NodeFacts) -> Vec<IpNet> {
    let mut ranges = ranges.to_vec();
    if facts.node_ips.iter().any(|node| ranges.iter().any(|range| range.contains(node))) {
        ranges.push(IpNet::from(ip));
    }
    IpNet::aggregate(&ranges)
}
