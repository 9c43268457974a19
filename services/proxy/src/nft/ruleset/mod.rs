//! The rules of the table: what each chain says, and what sets and maps are.
//!
//! Owns: the fixed ruleset and the chains that depend on counts, each rule once as a [`Rule`], which is rendered as text for
//! people ([`print()`]) and as expressions for the kernel ([`Rule::expressions`]). In: [`Base`]. Out: values; nothing here
//! talks to the kernel.

mod definition;
mod expressions;
mod print;
mod rule;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

pub use self::{
    definition::{SetData, SetDefinition, definition},
    print::{element_text, print},
    rule::Rule,
};
use super::{
    chain::{Chain, Choice},
    element::SetName,
};
use crate::model::{Family, Protocol};
pub(in crate::nft) use rule::{Field, Part};

/// The name of the table, in both families.
pub const TABLE: &str = "keelson";

/// What the fixed ruleset depends on, in one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    /// The family.
    pub family: Family,
    /// Whether everything that goes to a cluster IP is masqueraded (kube-proxy: `masqueradeAll`).
    pub masquerade_all: bool,
    /// The bit of the packet mark that says "masquerade", as a mask of one bit (kube-proxy: `masqueradeBit`).
    pub mark: u32,
    /// How to tell a pod's traffic. None: traffic to cluster IPs is not masqueraded, and pods are like anybody outside.
    pub detector: Option<Detector>,
    /// Where node ports answer.
    pub node_ports: NodePortMatch,
}

/// How to tell the traffic that comes from a pod (kube-proxy: `detectLocalMode`). One that could match nothing (a network
/// of the other family, an empty name) is like none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Detector {
    /// The source address is in this network (ClusterCIDR, NodeCIDR).
    Cidr(IpNet),
    /// It came in by the interface of this name; at most 15 bytes count, as in the kernel.
    Bridge(String),
    /// It came in by an interface whose name begins like this; at most 15 bytes count.
    InterfacePrefix(String),
}

/// Where node ports answer (kube-proxy: `nodePortAddresses`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodePortMatch {
    /// At every address of the node but loopback ones.
    AllLocal,
    /// At those in [`SetName::NodePortAddresses`].
    Addresses,
}

/// Where a base chain is called from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hook {
    /// The type of chain: `nat` or `filter`.
    pub kind: &'static str,
    /// The number of the hook (`NF_INET_*`).
    pub hook: u32,
    /// The priority: lower ones are called first.
    pub priority: i32,
    /// The same as nft writes it.
    pub text: &'static str,
}

/// Where a chain is called from; none if only other chains lead to it. The policy of every base chain is accept.
#[must_use]
pub const fn hook(chain: Chain) -> Option<Hook> {
    /// `NF_INET_*`.
    const PREROUTING: u32 = 0;
    const INPUT: u32 = 1;
    const FORWARD: u32 = 2;
    const OUTPUT: u32 = 3;
    const POSTROUTING: u32 = 4;
    let (kind, hook, priority, text) = match chain {
        Chain::NatPrerouting => {
            ("nat", PREROUTING, -101, "type nat hook prerouting priority dstnat - 1; policy accept;")
        }
        Chain::NatOutput => ("nat", OUTPUT, -101, "type nat hook output priority -101; policy accept;"),
        Chain::NatPostrouting => {
            ("nat", POSTROUTING, 99, "type nat hook postrouting priority srcnat - 1; policy accept;")
        }
        Chain::FilterPrerouting => {
            ("filter", PREROUTING, -110, "type filter hook prerouting priority dstnat - 10; policy accept;")
        }
        Chain::FilterOutputFirst => {
            ("filter", OUTPUT, -110, "type filter hook output priority -110; policy accept;")
        }
        Chain::FilterInput => ("filter", INPUT, 0, "type filter hook input priority filter; policy accept;"),
        Chain::FilterForward => {
            ("filter", FORWARD, 0, "type filter hook forward priority filter; policy accept;")
        }
        Chain::FilterOutput => {
            ("filter", OUTPUT, 0, "type filter hook output priority filter; policy accept;")
        }
        _ => return None,
    };
    Some(Hook { kind, hook, priority, text })
}

/// The rules of a chain, in order.
#[must_use]
pub fn rules(base: &Base, chain: Chain) -> Vec<Rule> {
    match chain {
        Chain::NatPrerouting | Chain::NatOutput => vec![Rule::of([Part::Jump(Chain::Services)])],
        Chain::NatPostrouting => postrouting(base),
        Chain::FilterPrerouting | Chain::FilterOutputFirst => {
            vec![Rule::of([Part::New, Part::Jump(Chain::Firewall)])]
        }
        Chain::FilterInput => vec![
            Rule::of(
                [Part::New]
                    .into_iter()
                    .chain(node_ports(base))
                    .chain([Part::Choose(NODE_PORT.to_vec(), SetName::RefusedNodePorts)]),
            ),
            refused(),
        ],
        Chain::FilterForward | Chain::FilterOutput => {
            vec![refused(), Rule::of([Part::New, Part::Jump(Chain::ClusterIpsCheck)])]
        }
        Chain::Services => services(base),
        Chain::Internal => internal(base),
        Chain::External => vec![
            choose(SetName::ExternalPolicy),
            Rule::of([Part::Mark(base.mark)]),
            choose(SetName::ExternalChoice),
            Rule::of([Part::Drop]),
        ],
        Chain::ExternalLocal => external_local(base),
        Chain::Firewall => {
            let mut with_source = FRONTEND.to_vec();
            with_source.push(Field::Source);
            vec![Rule::of([
                Part::In { fields: FRONTEND.to_vec(), set: SetName::Filtered, inside: true },
                Part::In { fields: with_source, set: SetName::SourceRanges, inside: false },
                Part::Drop,
            ])]
        }
        Chain::ClusterIpsCheck => vec![
            Rule::of([is_in(Field::Destination, SetName::ClusterIps), Part::Reject]),
            Rule::of([is_in(Field::Destination, SetName::ServiceCidrs), Part::Drop]),
        ],
        Chain::Reject => vec![Rule::of([Part::Reject])],
        Chain::LoadBalance { choice, count } => {
            let slots = match choice {
                Choice::Cluster => SetName::Slots,
                Choice::Local => SetName::LocalSlots,
            };
            let mut rules = translate(&slot(count), slots);
            rules.push(Rule::of([Part::Drop]));
            rules
        }
        Chain::Affinity { choice, count, seconds } => vec![
            Rule::of([
                Part::SetDestination(vec![Field::Source, Field::Destination], SetName::Affinity),
                Part::Goto(Chain::AffinityKept { choice, count, seconds }),
            ]),
            Rule::of([Part::Goto(Chain::AffinityNew { choice, count, seconds })]),
        ],
        Chain::AffinityKept { choice, count, seconds } => affinity_kept(choice, count, seconds),
        Chain::AffinityNew { choice, count, seconds } => affinity_new(choice, count, seconds),
    }
}

/// What tells a frontend: destination address, protocol and port.
const FRONTEND: [Field; 3] = [Field::Destination, Field::Protocol, Field::Port];
/// What tells a node port.
const NODE_PORT: [Field; 2] = [Field::Protocol, Field::Port];

/// Key of one of the slots of a number, chosen at random. A chain for no endpoints at all (nothing leads to one) finds none.
fn slot(count: u32) -> [Field; 2] {
    [Field::Destination, Field::Random(count.max(1))]
}

fn is_in(field: Field, set: SetName) -> Part {
    Part::In { fields: vec![field], set, inside: true }
}

fn choose(set: SetName) -> Rule {
    Rule::of([Part::Choose(vec![Field::Destination], set)])
}

fn refused() -> Rule {
    Rule::of([Part::New, Part::Choose(FRONTEND.to_vec(), SetName::Refused)])
}

/// Whether the destination is an address where node ports answer.
fn node_ports(base: &Base) -> Vec<Part> {
    match base.node_ports {
        NodePortMatch::Addresses => vec![is_in(Field::Destination, SetName::NodePortAddresses)],
        NodePortMatch::AllLocal => {
            let loopback = match base.family {
                Family::V4 => IpNet::new_assert(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8),
                Family::V6 => IpNet::new_assert(IpAddr::V6(Ipv6Addr::LOCALHOST), 128),
            };
            vec![
                Part::LocalDestination,
                Part::Address { field: Field::Destination, net: loopback, inside: false },
            ]
        }
    }
}

/// Finds the number of the frontend.
fn services(base: &Base) -> Vec<Rule> {
    vec![
        Rule::of([
            Part::SetDestination(FRONTEND.to_vec(), SetName::ClusterIpPorts),
            Part::Goto(Chain::Internal),
        ]),
        Rule::of([
            Part::SetDestination(FRONTEND.to_vec(), SetName::ExternalPorts),
            Part::Goto(Chain::External),
        ]),
        Rule::of(node_ports(base).into_iter().chain([
            Part::SetDestination(NODE_PORT.to_vec(), SetName::NodePorts),
            Part::Goto(Chain::External),
        ])),
    ]
}

/// The parts that match a pod's traffic, or all but that. None if there is no way to tell, or if nothing would match.
fn from_pod(base: &Base, pod: bool) -> Option<Vec<Part>> {
    match base.detector.as_ref()? {
        Detector::Cidr(net) if !base.family.has(&net.addr()) => None,
        Detector::Cidr(net) if net.prefix_len() == 0 => pod.then(Vec::new),
        Detector::Cidr(net) => {
            Some(vec![Part::Address { field: Field::Source, net: net.trunc(), inside: pod }])
        }
        Detector::Bridge(name) | Detector::InterfacePrefix(name) if name.is_empty() => None,
        Detector::Bridge(name) => Some(vec![Part::Interface { name: name.clone(), prefix: false, is: pod }]),
        Detector::InterfacePrefix(name) => {
            Some(vec![Part::Interface { name: name.clone(), prefix: true, is: pod }])
        }
    }
}

/// To a cluster IP.
fn internal(base: &Base) -> Vec<Rule> {
    let masqueraded = if base.masquerade_all { Some(Vec::new()) } else { from_pod(base, false) };
    let mark = masqueraded.map(|parts| Rule::of(parts.into_iter().chain([Part::Mark(base.mark)])));
    mark.into_iter().chain([choose(SetName::InternalChoice), Rule::of([Part::Drop])]).collect()
}

/// To an external address where externalTrafficPolicy is Local. What comes from a pod or from the node itself is not outside
/// traffic: it may go to any endpoint. masqueradeAll is about cluster IPs alone.
fn external_local(base: &Base) -> Vec<Rule> {
    let any = Part::Choose(vec![Field::Destination], SetName::ExternalChoice);
    let pod = from_pod(base, true).map(|parts| Rule::of(parts.into_iter().chain([any.clone()])));
    let node = Rule::of([Part::LocalSource, Part::Mark(base.mark), any]);
    pod.into_iter().chain([node, choose(SetName::LocalChoice), Rule::of([Part::Drop])]).collect()
}

/// What was marked, and a pod that reaches itself.
fn postrouting(base: &Base) -> Vec<Rule> {
    vec![
        Rule::of([Part::Marked(base.mark), Part::ToggleMark(base.mark), Part::Masquerade]),
        Rule::of([
            Part::Translated,
            Part::In {
                fields: vec![Field::Source, Field::Destination, Field::Protocol, Field::Port],
                set: SetName::Hairpin,
                inside: true,
            },
            Part::Masquerade,
        ]),
    ]
}

/// To the endpoint that a map gives. nft writes ports only after a protocol that has some, hence one rule for each.
fn translate(key: &[Field], map: SetName) -> Vec<Rule> {
    Protocol::ALL
        .map(|protocol| Rule::of([Part::Protocol(protocol), Part::Translate(key.to_vec(), map)]))
        .into()
}

/// Maps of the endpoints of service ports that have affinity: by slot, and by number.
const fn affinity_maps(choice: Choice) -> (SetName, SetName) {
    match choice {
        Choice::Cluster => (SetName::AffinitySlots, SetName::AffinityEndpoints),
        Choice::Local => (SetName::LocalAffinitySlots, SetName::LocalAffinityEndpoints),
    }
}

/// The destination is the number of the endpoint that the client had.
fn affinity_kept(choice: Choice, count: u32, seconds: u32) -> Vec<Rule> {
    let (_, endpoints) = affinity_maps(choice);
    let mut rules = vec![Rule::of([Part::Remember { seconds }])];
    rules.extend(translate(&[Field::Destination], endpoints));
    rules.extend([
        Rule::of([Part::Forget]),
        Rule::of([Part::SetDestinationToService]),
        Rule::of([Part::Goto(Chain::AffinityNew { choice, count, seconds })]),
    ]);
    rules
}

/// The destination is the number of the service port.
fn affinity_new(choice: Choice, count: u32, seconds: u32) -> Vec<Rule> {
    let (slots, endpoints) = affinity_maps(choice);
    let mut rules = vec![
        Rule::of([Part::SetDestination(slot(count).to_vec(), slots)]),
        Rule::of([Part::Remember { seconds }]),
    ];
    rules.extend(translate(&[Field::Destination], endpoints));
    rules.push(Rule::of([Part::Drop]));
    rules
}
