//! Chains and sets of one service port, and what its frontends lead to.
//!
//! Owns: [`chains`], [`affinity_sets`] and [`FrontendState`]. In: a service port and the node's facts. Out: rules.
//! Source: service-semantics 2 and 3.

use std::net::IpAddr;

use ipnet::IpNet;
use keelson_proxy::{
    model::{Endpoint, Family, Frontend, FrontendKind, ServicePort},
    options::Detector,
};

use super::NodeFacts;
use crate::{
    names::{PortChain, SetName, endpoint_chain, port_chain, ranges_chain},
    rule::{Match, Rule, Target, host},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Some endpoint exists, but none that this traffic may use; or a source is not admitted.
    Drop,
    /// No endpoint exists.
    Reject,
}

/// What packets to a frontend meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FrontendState {
    /// In the tree; without the match of an address if it is a node port.
    pub(crate) rules: Vec<Rule>,
    /// What becomes of packets that the rules do not translate.
    pub(crate) refusal: Option<Refusal>,
}

pub(crate) fn frontend_state(
    port: &ServicePort,
    frontend: Frontend,
    kind: FrontendKind,
    facts: &NodeFacts,
) -> FrontendState {
    if !port.has_any {
        return FrontendState { rules: Vec::new(), refusal: Some(Refusal::Reject) };
    }
    let (mut to, mut refusal) = match kind {
        FrontendKind::ClusterIp if port.internal_local => target(port, PortChain::Local),
        FrontendKind::ClusterIp => target(port, PortChain::Cluster),
        _ if port.external_local => external_target(port),
        _ => target(port, PortChain::Cluster),
    };
    if let (FrontendKind::LoadBalancerIp, Frontend::Address { ip, .. }) = (kind, frontend)
        && !port.source_ranges.is_empty()
    {
        to = to.map(|_| ranges_chain(&port.name, ip));
        refusal = Some(Refusal::Drop);
    }
    let mut rules = Vec::new();
    if let Some(to) = to {
        let matches = frontend_match(frontend);
        if let Some(mark) = mark_rule(port, kind, &matches, facts) {
            rules.push(mark);
        }
        rules.push(Rule::goto(matches, to));
    }
    FrontendState { rules, refusal }
}

fn target(port: &ServicePort, kind: PortChain) -> (Option<String>, Option<Refusal>) {
    let endpoints = if kind == PortChain::Local { &port.local } else { &port.cluster };
    match endpoints.is_empty() {
        true => (None, Some(Refusal::Drop)),
        false => (Some(port_chain(kind, &port.name)), None),
    }
}

fn external_target(port: &ServicePort) -> (Option<String>, Option<Refusal>) {
    let chain = has_external_chain(port).then(|| port_chain(PortChain::External, &port.name));
    (chain, port.local.is_empty().then_some(Refusal::Drop))
}

fn has_external_chain(port: &ServicePort) -> bool {
    port.external_local && !(port.cluster.is_empty() && port.local.is_empty())
}

fn frontend_match(frontend: Frontend) -> Vec<Match> {
    match frontend {
        Frontend::Address { ip, protocol, port } => {
            vec![Match::Destination(host(ip)), Match::Protocol(protocol), Match::Ports(protocol, port, port)]
        }
        Frontend::NodePort { protocol, port } => {
            vec![Match::Protocol(protocol), Match::Ports(protocol, port, port)]
        }
    }
}

/// Marks what has to be masqueraded whatever endpoint is chosen.
fn mark_rule(port: &ServicePort, kind: FrontendKind, matches: &[Match], facts: &NodeFacts) -> Option<Rule> {
    let target = Target::SetMark(facts.mark);
    if kind != FrontendKind::ClusterIp {
        // With externalTrafficPolicy Local it depends on the source.
        return (!port.external_local).then(|| Rule::new(matches, target));
    }
    if facts.masquerade_all {
        return Some(Rule::new(matches, target));
    }
    let mut matches = matches.to_vec();
    match facts.detector.as_ref()? {
        Detector::Cidr(net) => matches.insert(0, Match::NotSource(net.trunc())),
        Detector::Bridge(name) => matches.insert(1, Match::NotInterface(interface(name))),
        Detector::InterfacePrefix(prefix) => matches.insert(1, Match::NotInterface(interface_prefix(prefix))),
    }
    Some(Rule::new(matches, target))
}

/// The longest name of an interface, in bytes.
const INTERFACE_NAME: usize = 15;

fn interface(name: &str) -> String {
    let end = (0..=INTERFACE_NAME.min(name.len())).rev().find(|end| name.is_char_boundary(*end));
    name[..end.unwrap_or(0)].to_owned()
}

fn interface_prefix(prefix: &str) -> String {
    // A prefix of 15 bytes is a whole name.
    match prefix.len() < INTERFACE_NAME {
        true => format!("{prefix}+"),
        false => interface(prefix),
    }
}

/// Every chain of a service port. Those that no frontend leads to are not among them.
pub(crate) fn chains(port: &ServicePort, family: Family, facts: &NodeFacts) -> Vec<(String, Vec<Rule>)> {
    let mut all = Vec::new();
    if !port.has_any {
        return all;
    }
    if port.uses_cluster() && !port.cluster.is_empty() {
        let name = port_chain(PortChain::Cluster, &port.name);
        all.push((name, choice(port, &port.cluster, family)));
    }
    if port.uses_local() && !port.local.is_empty() {
        all.push((port_chain(PortChain::Local, &port.name), choice(port, &port.local, family)));
    }
    if port.affinity_seconds != 0 {
        let endpoints = port.reachable();
        all.extend(endpoints.into_iter().map(|endpoint| affinity_chain(port, endpoint, family)));
    }
    if has_external_chain(port) {
        all.push((port_chain(PortChain::External, &port.name), external(port, facts)));
    }
    if !port.source_ranges.is_empty() {
        let to = match port.external_local {
            true => external_target(port).0,
            false => target(port, PortChain::Cluster).0,
        };
        if let Some(to) = to {
            all.extend(port.load_balancer_ips.iter().map(|ip| ranges(port, *ip, &to, facts)));
        }
    }
    all
}

/// The sets that remember clients.
pub(crate) fn affinity_sets(port: &ServicePort, family: Family) -> Vec<SetName> {
    if port.affinity_seconds == 0 || !port.has_any {
        return Vec::new();
    }
    port.reachable().into_iter().map(|endpoint| SetName::affinity(family, &port.name, endpoint)).collect()
}

fn choice(port: &ServicePort, endpoints: &[Endpoint], family: Family) -> Vec<Rule> {
    let protocol = port.name.protocol;
    let mut rules = Vec::with_capacity(endpoints.len());
    let affine = port.affinity_seconds != 0;
    if affine {
        rules.extend(endpoints.iter().map(|&endpoint| {
            let known = SetName::affinity(family, &port.name, endpoint);
            Rule::goto([Match::SourceIn(known)], endpoint_chain(&port.name, endpoint))
        }));
    }
    for (at, &endpoint) in endpoints.iter().enumerate() {
        let mut matches = Vec::with_capacity(2);
        if !affine {
            matches.push(Match::Protocol(protocol));
        }
        let left = endpoints.len() - at;
        if left > 1 {
            matches.push(Match::OneOf(left));
        }
        rules.push(match affine {
            true => Rule::goto(matches, endpoint_chain(&port.name, endpoint)),
            false => Rule::new(matches, Target::Dnat(endpoint)),
        });
    }
    rules
}

fn affinity_chain(port: &ServicePort, endpoint: Endpoint, family: Family) -> (String, Vec<Rule>) {
    let set = SetName::affinity(family, &port.name, endpoint);
    let rules = vec![
        Rule::new([], Target::AddSource(set, port.affinity_seconds)),
        Rule::new([Match::Protocol(port.name.protocol)], Target::Dnat(endpoint)),
    ];
    (endpoint_chain(&port.name, endpoint), rules)
}

/// externalTrafficPolicy Local: pods and the node itself reach every endpoint, others only those of the node.
fn external(port: &ServicePort, facts: &NodeFacts) -> Vec<Rule> {
    let mut rules = Vec::new();
    if !port.cluster.is_empty() {
        let cluster = port_chain(PortChain::Cluster, &port.name);
        let pods = facts.detector.as_ref().map(|detector| match detector {
            Detector::Cidr(net) => Match::Source(net.trunc()),
            Detector::Bridge(name) => Match::Interface(interface(name)),
            Detector::InterfacePrefix(prefix) => Match::Interface(interface_prefix(prefix)),
        });
        rules.extend(pods.map(|pods| Rule::goto([pods], cluster.clone())));
        rules.push(Rule::new([Match::LocalSource], Target::SetMark(facts.mark)));
        rules.push(Rule::goto([Match::LocalSource], cluster));
    }
    if !port.local.is_empty() {
        rules.push(Rule::goto([], port_chain(PortChain::Local, &port.name)));
    }
    rules
}

fn ranges(port: &ServicePort, ip: IpAddr, to: &str, facts: &NodeFacts) -> (String, Vec<Rule>) {
    let admitted = admitted(&port.source_ranges, ip, &facts.node_ips);
    let rule = |range: &IpNet| Rule::goto([Match::Source(range.trunc())], to);
    (ranges_chain(&port.name, ip), admitted.iter().map(rule).collect())
}

/// Sources that may reach a load-balancer address, disjoint and ordered. If the node is admitted and the address is
/// bound on it, the address itself is a source (service-semantics 3, "Source ranges").
fn admitted(ranges: &[IpNet], ip: IpAddr, node_ips: &[IpAddr]) -> Vec<IpNet> {
    let mut ranges = ranges.to_vec();
    if node_ips.iter().any(|node| ranges.iter().any(|range| range.contains(node))) {
        ranges.push(IpNet::from(ip));
    }
    IpNet::aggregate(&ranges)
}
