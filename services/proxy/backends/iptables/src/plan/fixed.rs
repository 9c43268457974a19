//! The chains that do not depend on Services, and those of the two trees.
//!
//! Owns: [`fixed_chains`] and [`tree_chains`]. In: the node's facts; the states of the frontends. Out: rules.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use keelson_proxy::{
    addresses::Match as Addresses,
    model::{Family, Frontend, Protocol},
};

use super::{FrontendState, NodeFacts};
use crate::{
    names::{
        FILTER_OUTPUT, FORWARD, INPUT, NAT_OUTPUT, NODE_PORTS, POSTROUTING, REFUSE, REFUSE_NODE_PORTS,
        SERVICES, SetKind, SetName, Table, address_chain, node_port_chain,
    },
    rule::{Match, Rule, Target, host},
    tree::{NodeKind, tree},
};

pub(crate) fn loopback(family: Family) -> IpNet {
    match family {
        Family::V4 => IpNet::V4(Ipv4Net::new_assert([127, 0, 0, 0].into(), 8)),
        Family::V6 => IpNet::V6(Ipv6Net::new_assert(std::net::Ipv6Addr::LOCALHOST, 128)),
    }
}

/// Matches of the destinations at which node ports are served, without loopback addresses.
fn node_port_matches(family: Family, facts: &NodeFacts) -> Vec<Vec<Match>> {
    match &facts.node_ports {
        Addresses::AllLocal => vec![vec![Match::NotDestination(loopback(family)), Match::LocalDestination]],
        Addresses::Addresses(addresses) => {
            addresses.iter().map(|ip| vec![Match::Destination(host(*ip))]).collect()
        }
    }
}

pub(crate) fn fixed_chains(family: Family, facts: &NodeFacts) -> Vec<(Table, String, Vec<Rule>)> {
    let set = |kind| SetName::fixed(family, kind);
    let state = |states| Match::State(states);
    let node_ports = node_port_matches(family, facts);

    let root = address_chain(family, 0, 0);
    let mut services = vec![Rule::jump([], root)];
    services.extend(node_ports.iter().map(|matches| Rule::jump(matches.clone(), NODE_PORTS)));

    // Only the node itself reaches node ports at 127.0.0.1, so they are not in the way of packets that come in.
    let mut nat_output = Vec::new();
    let mut input = Vec::new();
    let mut local = node_ports;
    if facts.serves_loopback {
        let net = loopback(family);
        nat_output.push(Rule::jump([Match::Destination(net)], NODE_PORTS));
        // route_localnet lets the kernel accept them by any interface.
        input.push(Rule::new(
            [Match::NotSource(net), Match::Destination(net), Match::NotState("RELATED,ESTABLISHED,DNAT")],
            Target::Drop,
        ));
        local.push(vec![Match::Destination(net)]);
    }
    nat_output.push(Rule::jump([], SERVICES));

    input.push(Rule::jump([state("NEW")], REFUSE));
    input.extend(local.into_iter().map(|mut matches| {
        matches.push(state("NEW"));
        Rule::jump(matches, REFUSE_NODE_PORTS)
    }));

    let mut forward = Vec::new();
    if facts.drops_invalid {
        // Otherwise a late packet is not translated, reaches the client from an unknown address, and is reset.
        forward.push(Rule::new([state("INVALID")], Target::Drop));
    }
    forward.push(Rule::jump([state("NEW")], REFUSE));
    forward.push(Rule::new([Match::Marked(facts.mark)], Target::Accept));
    forward.push(Rule::new([state("RELATED,ESTABLISHED")], Target::Accept));

    let refuse = |reject, drop| {
        vec![
            Rule::new([Match::DestinationIn(set(reject))], Target::Reject(family)),
            Rule::new([Match::DestinationIn(set(drop))], Target::Drop),
        ]
    };
    let postrouting = vec![
        Rule::new([Match::Hairpin(set(SetKind::Hairpin)), state("DNAT")], Target::SetMark(facts.mark)),
        Rule::new([Match::NotMarked(facts.mark)], Target::Return),
        Rule::new([], Target::ClearMark(facts.mark)),
        Rule::new([], Target::Masquerade),
    ];
    [
        (Table::Nat, SERVICES, services),
        (Table::Nat, NAT_OUTPUT, nat_output),
        (Table::Nat, POSTROUTING, postrouting),
        (Table::Filter, REFUSE, refuse(SetKind::Reject, SetKind::Drop)),
        (Table::Filter, REFUSE_NODE_PORTS, refuse(SetKind::RejectNodePorts, SetKind::DropNodePorts)),
        (Table::Filter, INPUT, input),
        (Table::Filter, FORWARD, forward),
        (Table::Filter, FILTER_OUTPUT, vec![Rule::jump([state("NEW")], REFUSE)]),
    ]
    .map(|(table, chain, rules)| (table, chain.to_owned(), rules))
    .into()
}

/// The chains that lead from an address or a node port to the rules of its frontends.
pub(crate) fn tree_chains(
    family: Family,
    frontends: &BTreeMap<Frontend, FrontendState>,
) -> Vec<(String, Vec<Rule>)> {
    let mut addresses: BTreeMap<u128, Vec<&FrontendState>> = BTreeMap::new();
    let mut ports: BTreeMap<Protocol, BTreeMap<u128, Vec<&FrontendState>>> = BTreeMap::new();
    for (frontend, state) in frontends.iter().filter(|(_, state)| !state.rules.is_empty()) {
        let (keys, key) = match *frontend {
            Frontend::Address { ip, .. } => (&mut addresses, key_of(ip)),
            Frontend::NodePort { protocol, port } => (ports.entry(protocol).or_default(), port.into()),
        };
        keys.entry(key).or_default().push(state);
    }
    let bits = match family {
        Family::V4 => 32,
        Family::V6 => 128,
    };
    let mut chains = Vec::new();
    let name = |prefix, length| address_chain(family, prefix, length);
    let covers = |prefix, length| vec![Match::Destination(net_of(family, prefix, length))];
    add_tree(&addresses, bits, name, covers, &mut chains);
    let mut node_ports = Vec::new();
    for (protocol, ports) in ports {
        let name = |prefix, length| node_port_chain(protocol, prefix, length);
        let covers = |prefix, length| {
            let (first, last) = port_range(prefix, length);
            vec![Match::Protocol(protocol), Match::Ports(protocol, first, last)]
        };
        node_ports.push(Rule::goto([Match::Protocol(protocol)], name(0, 0)));
        add_tree(&ports, 16, name, covers, &mut chains);
    }
    chains.push((NODE_PORTS.to_owned(), node_ports));
    chains
}

fn add_tree(
    entries: &BTreeMap<u128, Vec<&FrontendState>>,
    bits: u8,
    name: impl Fn(u128, u8) -> String,
    covers: impl Fn(u128, u8) -> Vec<Match>,
    chains: &mut Vec<(String, Vec<Rule>)>,
) {
    let keys: Vec<u128> = entries.keys().copied().collect();
    for node in tree(&keys, bits) {
        let rules = match node.kind {
            NodeKind::Leaf(range) => {
                let states = keys[range].iter().filter_map(|key| entries.get(key)).flatten();
                states.flat_map(|state| state.rules.iter().cloned()).collect()
            }
            NodeKind::Inner(children) => children
                .into_iter()
                .map(|(prefix, length)| Rule::goto(covers(prefix, length), name(prefix, length)))
                .collect(),
        };
        chains.push((name(node.prefix, node.length), rules));
    }
}

fn key_of(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => ip.to_bits().into(),
        IpAddr::V6(ip) => ip.to_bits(),
    }
}

fn net_of(family: Family, prefix: u128, length: u8) -> IpNet {
    match family {
        Family::V4 => {
            let ip = std::net::Ipv4Addr::from_bits(u32::try_from(prefix).unwrap_or_default());
            IpNet::V4(Ipv4Net::new_assert(ip, length.min(32)))
        }
        Family::V6 => IpNet::V6(Ipv6Net::new_assert(std::net::Ipv6Addr::from_bits(prefix), length.min(128))),
    }
}

fn port_range(prefix: u128, length: u8) -> (u16, u16) {
    let first = u16::try_from(prefix).unwrap_or_default();
    (first, first | u16::MAX.checked_shr(length.into()).unwrap_or(0))
}
