//! The rules of the table.
//!
//! Owns: the fixed ruleset and the chains that depend on counts, each rule once as a [`Rule`], which is rendered as
//! text for people ([`print_with_flowtable`]) and as expressions for the kernel ([`Rule::expressions`]). In: [`Base`].
//! Out: values; nothing here accesses the kernel.

mod definition;
mod expressions;
mod print;
mod rule;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use keelson_proxy::{
    model::{Family, Protocol},
    options::Detector,
};

pub use self::{
    definition::{SetData, SetDefinition, definition},
    print::{element_text, flowtable_text, print_with_flowtable},
    rule::Rule,
};
use super::{
    chain::{Chain, Choice, PrefixLengths},
    element::SetName,
};
pub(crate) use rule::{Field, Statement};

/// In both families.
pub const TABLE: &str = "keelson";

/// In both families.
pub const FLOWTABLE: &str = "service-flows";

/// Dependencies of the fixed ruleset, in one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    pub family: Family,
    /// Masquerade all traffic to cluster IPs (kube-proxy: `masqueradeAll`).
    pub masquerade_all: bool,
    /// The bit of the packet mark that requests masquerading, as a mask of one bit (kube-proxy: `masqueradeBit`).
    pub mark: u32,
    /// How to detect a pod's traffic. `None`: traffic to cluster IPs is not masqueraded, and pods are treated as
    /// outside sources.
    pub detector: Option<Detector>,
    pub node_ports: NodePortMatch,
    /// Flows between pods that need no translation are not tracked, as far as pods are detected by their network.
    pub untracked_pods: bool,
}

impl Base {
    /// The network of the pods whose flows to each other are not tracked.
    #[must_use]
    pub fn untracked(&self) -> Option<IpNet> {
        self.detector.as_ref()?.network(self.family).filter(|_| self.untracked_pods)
    }
}

/// Addresses at which node ports are served (kube-proxy: `nodePortAddresses`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodePortMatch {
    /// All local ones except loopback.
    AllLocal,
    /// Those in [`SetName::NodePortAddresses`].
    Addresses,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hook {
    /// `nat` or `filter`.
    pub kind: &'static str,
    /// `NF_INET_*`.
    pub hook: u32,
    /// Lower ones are called first.
    pub priority: i32,
    /// The priority as nft writes it.
    pub text: &'static str,
}

/// The hook of a chain; `None` if it is no base chain. The policy of every base chain is accept.
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
        Chain::RawPrerouting => {
            ("filter", PREROUTING, -300, "type filter hook prerouting priority raw; policy accept;")
        }
        Chain::FilterForwardOffload | Chain::FilterForwardOffloadTcp => {
            ("filter", FORWARD, 200, "type filter hook forward priority 200; policy accept;")
        }
        _ => return None,
    };
    Some(Hook { kind, hook, priority, text })
}

#[must_use]
pub fn rules(base: &Base, chain: Chain) -> Vec<Rule> {
    match chain {
        Chain::NatPrerouting | Chain::NatOutput => vec![Rule::of([Statement::Jump(Chain::Services)])],
        Chain::NatPostrouting => postrouting(base),
        Chain::FilterPrerouting | Chain::FilterOutputFirst => {
            vec![Rule::of([Statement::New, Statement::Choose(FRONTEND.to_vec(), SetName::Filtered)])]
        }
        Chain::FilterInput => vec![
            Rule::of(
                [Statement::New]
                    .into_iter()
                    .chain(node_ports(base))
                    .chain([Statement::Choose(NODE_PORT.to_vec(), SetName::RefusedNodePorts)]),
            ),
            Rule::of([Statement::New, Statement::Choose(FRONTEND.to_vec(), SetName::Refused)]),
        ],
        Chain::FilterForward | Chain::FilterOutput => {
            vec![Rule::of([Statement::New, Statement::Untranslated, Statement::Jump(Chain::ClusterIpsCheck)])]
        }
        Chain::FilterForwardOffload => offload(&[Protocol::Tcp, Protocol::Udp]),
        Chain::FilterForwardOffloadTcp => offload(&[Protocol::Tcp]),
        Chain::RawPrerouting => {
            let rule = |between: Vec<Statement>| {
                Rule::of(between.into_iter().chain([Statement::RemoteDestination, Statement::Untrack]))
            };
            between_pods(base).into_iter().map(rule).collect()
        }
        Chain::Services => services(base),
        Chain::Internal => internal(base),
        Chain::External => vec![
            Rule::of([Statement::CountsCluster, Statement::Mark(base.mark)]),
            by_count(),
            choose(SetName::ExternalPolicy),
            Rule::of([Statement::Mark(base.mark)]),
            choose(SetName::ExternalChoice),
            Rule::of([Statement::Drop]),
        ],
        Chain::ExternalLocal => external_local(base),
        Chain::Sources { protocol, lengths } => sources(protocol, lengths),
        Chain::ClusterIpsCheck => vec![
            Rule::of([Statement::Choose(FRONTEND.to_vec(), SetName::Refused)]),
            Rule::of([is_in(Field::Destination, SetName::ClusterIps), Statement::Reject]),
            Rule::of([is_in(Field::Destination, SetName::ServiceCidrs), Statement::Drop]),
        ],
        Chain::Reject => vec![Rule::of([Statement::Reject])],
        Chain::LoadBalance { choice, count } => {
            let slots = match choice {
                Choice::Cluster => SetName::Slots,
                Choice::Local => SetName::LocalSlots,
            };
            let mut rules = translate(&[Field::Id, Field::Random(count.max(1))], slots);
            rules.push(Rule::of([Statement::Drop]));
            rules
        }
        Chain::Affinity { choice, count, seconds, group } => vec![
            Rule::of([
                Statement::SetNumber(vec![Field::Source, Field::Number], SetName::affinity(group)),
                Statement::Goto(Chain::AffinityKept { choice, count, seconds, group }),
            ]),
            Rule::of([Statement::Goto(Chain::AffinityNew { choice, count, seconds, group })]),
        ],
        Chain::AffinityKept { choice, count, seconds, group } => affinity_kept(choice, count, seconds, group),
        Chain::AffinityNew { choice, count, seconds, group } => affinity_new(choice, count, seconds, group),
    }
}

const FRONTEND: [Field; 3] = [Field::Destination, Field::Protocol, Field::Port];
const NODE_PORT: [Field; 2] = [Field::Protocol, Field::Port];

/// Key of a random slot of a number with affinity. A chain for zero endpoints (nothing refers to one) finds none.
fn slot(count: u32) -> [Field; 2] {
    [Field::Number, Field::Random(count.max(1))]
}

fn is_in(field: Field, set: SetName) -> Statement {
    Statement::In { fields: vec![field], set, inside: true }
}

/// Continues with the chain for the choice and count in the number.
fn by_count() -> Rule {
    Rule::of([Statement::Choose(vec![Field::Class], SetName::Counts)])
}

fn choose(set: SetName) -> Rule {
    Rule::of([Statement::Choose(vec![Field::Number], set)])
}

/// Matches a destination address at which node ports are served.
fn node_ports(base: &Base) -> Vec<Statement> {
    match base.node_ports {
        NodePortMatch::Addresses => vec![is_in(Field::Destination, SetName::NodePortAddresses)],
        NodePortMatch::AllLocal => {
            let loopback = match base.family {
                Family::V4 => IpNet::new_assert(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8),
                Family::V6 => IpNet::new_assert(IpAddr::V6(Ipv6Addr::LOCALHOST), 128),
            };
            vec![
                Statement::LocalDestination,
                Statement::Address { field: Field::Destination, net: loopback, inside: false },
            ]
        }
    }
}

/// Looks up the number of the frontend.
fn services(base: &Base) -> Vec<Rule> {
    vec![
        Rule::of([
            Statement::SetNumber(FRONTEND.to_vec(), SetName::ClusterIpPorts),
            Statement::Goto(Chain::Internal),
        ]),
        Rule::of([
            Statement::SetNumber(FRONTEND.to_vec(), SetName::ExternalPorts),
            Statement::Goto(Chain::External),
        ]),
        Rule::of(node_ports(base).into_iter().chain([
            Statement::SetNumber(NODE_PORT.to_vec(), SetName::NodePorts),
            Statement::Goto(Chain::External),
        ])),
    ]
}

/// Statements that match traffic of pods, or all other traffic. `None` if pods cannot be detected, or if nothing would
/// match.
fn from_pod(base: &Base, pod: bool) -> Option<Vec<Statement>> {
    match base.detector.as_ref()? {
        Detector::Cidr(net) if !base.family.has(&net.addr()) => None,
        Detector::Cidr(net) if net.prefix_len() == 0 => pod.then(Vec::new),
        Detector::Cidr(net) => {
            Some(vec![Statement::Address { field: Field::Source, net: net.trunc(), inside: pod }])
        }
        Detector::Bridge(name) | Detector::InterfacePrefix(name) if name.is_empty() => None,
        Detector::Bridge(name) => {
            Some(vec![Statement::Interface { name: name.clone(), prefix: false, is: pod }])
        }
        Detector::InterfacePrefix(name) => {
            Some(vec![Statement::Interface { name: name.clone(), prefix: true, is: pod }])
        }
    }
}

/// Traffic to a cluster IP.
fn internal(base: &Base) -> Vec<Rule> {
    let masqueraded = if base.masquerade_all { Some(Vec::new()) } else { from_pod(base, false) };
    let mark =
        masqueraded.map(|statements| Rule::of(statements.into_iter().chain([Statement::Mark(base.mark)])));
    let chosen = [by_count(), choose(SetName::InternalChoice), Rule::of([Statement::Drop])];
    mark.into_iter().chain(chosen).collect()
}

/// Traffic to an external address with externalTrafficPolicy Local. Traffic from a pod or from the node itself is not
/// external: it may go to any endpoint. masqueradeAll applies to cluster IPs only.
fn external_local(base: &Base) -> Vec<Rule> {
    let any = Statement::Choose(vec![Field::Number], SetName::ExternalChoice);
    let pod = from_pod(base, true).map(|statements| Rule::of(statements.into_iter().chain([any.clone()])));
    let node = Rule::of([Statement::LocalSource, Statement::Mark(base.mark), any]);
    pod.into_iter().chain([node, choose(SetName::LocalChoice), Rule::of([Statement::Drop])]).collect()
}

/// Checks whether the source of a packet is in one of the ranges of its frontend, with one hash lookup per prefix
/// length, so the ranges of other frontends do not matter.
fn sources(protocol: Protocol, lengths: PrefixLengths) -> Vec<Rule> {
    let of_length = |length: u8| {
        let kind = Field::Constant(SetName::range_kind(protocol, length));
        let fields = vec![Field::Destination, Field::Port, Field::SourceNetwork(length), kind];
        Rule::of([Statement::In { fields, set: SetName::SourceRanges, inside: true }, Statement::Return])
    };
    lengths.iter().map(of_length).chain([Rule::of([Statement::Drop])]).collect()
}

/// Masquerades marked packets, and those of a pod that reaches itself. A nat chain sees only the first packet of a
/// connection, which is the one with a number. (When IPv4 forwards a packet, the kernel has reset its priority.) The
/// priority of other connections is kept.
///
/// Where flows between pods are not tracked, those that are translated, by whatever table, are masqueraded as well: their replies
/// go to an address of the node, by which the chain at priority raw tells them from others.
fn postrouting(base: &Base) -> Vec<Rule> {
    let told_apart = |between: Vec<Statement>| {
        Rule::of([Statement::Translated].into_iter().chain(between).chain([Statement::Masquerade]))
    };
    let mut rules = vec![
        Rule::of([Statement::Translated, Statement::HasNumber, Statement::ClearNumber]),
        Rule::of([Statement::Marked(base.mark), Statement::ToggleMark(base.mark), Statement::Masquerade]),
    ];
    rules.extend(between_pods(base).into_iter().map(told_apart));
    rules.push(Rule::of([
        Statement::Translated,
        Statement::In {
            fields: vec![Field::Source, Field::Destination, Field::Protocol, Field::Port],
            set: SetName::Hairpin,
            inside: true,
        },
        Statement::Masquerade,
    ]));
    rules
}

/// Matches packets of TCP and of UDP from pods to pods, where they are not tracked.
fn between_pods(base: &Base) -> Vec<Vec<Statement>> {
    let inside = |field, net| Statement::Address { field, net, inside: true };
    let of = |net: IpNet, protocol| {
        vec![inside(Field::Source, net), inside(Field::Destination, net), Statement::Protocol(protocol)]
    };
    let nets = base.untracked().into_iter();
    nets.flat_map(|net| [Protocol::Tcp, Protocol::Udp].map(|protocol| of(net, protocol))).collect()
}

/// Adds flows to the flowtable that are translated and answered. The kernel supports only TCP and UDP there.
pub(crate) fn offload(protocols: &[Protocol]) -> Vec<Rule> {
    let of = |protocol: &Protocol| {
        Rule::of([
            Statement::Established,
            Statement::Translated,
            Statement::Protocol(*protocol),
            Statement::Offload,
        ])
    };
    protocols.iter().map(of).collect()
}

/// Translates to the endpoint in a map. nft accepts ports only after a protocol that has ports, hence one rule for
/// each.
fn translate(key: &[Field], map: SetName) -> Vec<Rule> {
    Protocol::ALL
        .map(|protocol| Rule::of([Statement::Protocol(protocol), Statement::Translate(key.to_vec(), map)]))
        .into()
}

/// Maps of the endpoints of service ports with affinity: by slot, and by number.
const fn affinity_maps(choice: Choice) -> (SetName, SetName) {
    match choice {
        Choice::Cluster => (SetName::AffinitySlots, SetName::AffinityEndpoints),
        Choice::Local => (SetName::LocalAffinitySlots, SetName::LocalAffinityEndpoints),
    }
}

/// The packet has the number of the client's former endpoint.
fn affinity_kept(choice: Choice, count: u32, seconds: u32, group: u8) -> Vec<Rule> {
    let (_, endpoints) = affinity_maps(choice);
    let mut rules = vec![Rule::of([Statement::Remember { seconds, map: SetName::affinity(group) }])];
    rules.extend(translate(&[Field::Number], endpoints));
    rules.extend([
        Rule::of([Statement::Forget { map: SetName::affinity(group) }]),
        Rule::of([Statement::SetNumberToService]),
        Rule::of([Statement::Goto(Chain::AffinityNew { choice, count, seconds, group })]),
    ]);
    rules
}

/// The packet has the number of the service port.
fn affinity_new(choice: Choice, count: u32, seconds: u32, group: u8) -> Vec<Rule> {
    let (slots, endpoints) = affinity_maps(choice);
    let mut rules = vec![
        Rule::of([Statement::SetNumber(slot(count).to_vec(), slots)]),
        Rule::of([Statement::Remember { seconds, map: SetName::affinity(group) }]),
    ];
    rules.extend(translate(&[Field::Number], endpoints));
    rules.push(Rule::of([Statement::Drop]));
    rules
}
