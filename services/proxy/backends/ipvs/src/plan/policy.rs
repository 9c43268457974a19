//! What a frontend does with connections.
//!
//! Owns: [`SocketState`], which both rules and explanations are made from. In: a service port, the kind of the frontend, the
//! node's facts. Out: the endpoints of its virtual server, and entries of IP sets. Source: service-semantics 2 and 3.

use std::net::IpAddr;

use ipnet::IpNet;
use keelson_proxy::model::{Endpoint, FrontendKind, ServicePort};
use keelson_proxy_xtables::names::SetKind;

use super::NodeFacts;
use crate::servers::Socket;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Some endpoint exists, but none that this traffic may use.
    Drop,
    /// No endpoint exists.
    Reject,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SocketState<'a> {
    /// Of the virtual server; empty: there is none.
    pub(crate) endpoints: &'a [Endpoint],
    /// What becomes of connections without a virtual server, unless they come from pods or the node and have
    /// [`Self::internal`].
    pub(crate) refusal: Option<Refusal>,
    /// The set that decides on masquerading.
    pub(crate) kind: SetKind,
    /// The endpoints for pods and the node itself, if they differ by externalTrafficPolicy Local.
    pub(crate) internal: Option<&'a [Endpoint]>,
    /// Only these sources are admitted.
    pub(crate) ranges: Option<Vec<IpNet>>,
}

pub(crate) fn socket_state<'a>(
    port: &'a ServicePort,
    kind: FrontendKind,
    ip: IpAddr,
    facts: &NodeFacts,
) -> SocketState<'a> {
    let is_internal = kind == FrontendKind::ClusterIp;
    let is_local = if is_internal { port.internal_local } else { port.external_local };
    let endpoints: &[Endpoint] = match (port.has_any, is_local) {
        (false, _) => &[],
        (true, true) => &port.local,
        (true, false) => &port.cluster,
    };
    let refusal = match (port.has_any, endpoints.is_empty()) {
        (false, _) => Some(Refusal::Reject),
        (true, true) => Some(Refusal::Drop),
        (true, false) => None,
    };
    let set = match (is_internal, is_local) {
        (true, _) => SetKind::ClusterIps,
        (false, false) => SetKind::External,
        (false, true) => SetKind::Local,
    };
    let has_ranges = kind == FrontendKind::LoadBalancerIp && !port.source_ranges.is_empty();
    SocketState {
        endpoints,
        refusal,
        kind: set,
        internal: (!is_internal && needs_mark(port)).then_some(&port.cluster),
        ranges: has_ranges.then(|| admitted(&port.source_ranges, ip, &facts.node_ips)),
    }
}

/// Whether pods and the node reach other endpoints than the rest: a virtual server by mark has them.
pub(crate) fn needs_mark(port: &ServicePort) -> bool {
    port.external_local && port.is_external() && port.has_any && !port.cluster.is_empty()
}

/// Sources that may reach a load-balancer address, disjoint and ordered. If the node is admitted, so is the address itself,
/// which is the source of the node's own connections to it (service-semantics 3, "Source ranges").
fn admitted(ranges: &[IpNet], ip: IpAddr, node_ips: &[IpAddr]) -> Vec<IpNet> {
    let mut ranges = ranges.to_vec();
    if node_ips.iter().any(|node| ranges.iter().any(|range| range.contains(node))) {
        ranges.push(IpNet::from(ip));
    }
    IpNet::aggregate(&ranges)
}

/// The entries of IP sets for a socket. `mark`: the mark of [`SocketState::internal`], and the mask of such marks.
pub(crate) fn entries(
    state: &SocketState<'_>,
    Socket { ip, protocol, port }: Socket,
    mark: Option<(u32, u32)>,
) -> Vec<(SetKind, String)> {
    let key = format!("{ip},{}:{port}", protocol.keyword());
    let mut entries = Vec::with_capacity(2);
    entries.push(match mark.filter(|_| state.internal.is_some()) {
        Some((mark, mask)) => (state.kind, format!("{key} skbmark {mark:#x}/{mask:#x}")),
        None => (state.kind, key.clone()),
    });
    entries.extend(state.refusal.map(|refusal| match refusal {
        Refusal::Drop => (SetKind::Drop, key.clone()),
        Refusal::Reject => (SetKind::Reject, key.clone()),
    }));
    if let Some(ranges) = &state.ranges {
        entries.push((SetKind::Filtered, key.clone()));
        entries.extend(ranges.iter().map(|range| (SetKind::Ranges, format!("{key},{}", network(range)))));
    }
    entries
}

/// As ipset prints it: a single address has no prefix length.
fn network(range: &IpNet) -> String {
    let range = range.trunc();
    match range.prefix_len() == range.max_prefix_len() {
        true => range.addr().to_string(),
        false => range.to_string(),
    }
}
