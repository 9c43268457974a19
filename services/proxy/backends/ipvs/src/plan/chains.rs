//! The chains, which do not depend on Services.
//!
//! Owns: [`chains`]. In: the node's facts. Out: rules.
//!
//! Where IPVS stands in the order of the kernel: packets that come in are taken after the table filter of INPUT; those of the
//! node itself are taken in OUTPUT after the table nat and before the table filter. So what has to be dropped is dropped
//! in the table mangle, before both. What has to be rejected has no virtual server, and passes on to the table filter.

use keelson_proxy::{
    model::{Family, Protocol},
    options::Detector,
};
use keelson_proxy_xtables::{
    names::{
        ADDRESSES, FILTER_OUTPUT, FORWARD, INPUT, MANGLE, NAT_OUTPUT, POSTROUTING, REFUSE, SERVICES, SetKind,
        SetName, Table,
    },
    rule::{Match, Rule, Target},
};

use super::NodeFacts;

/// Marks packets for virtual servers by mark.
pub(crate) const INTERNAL: &str = "KEELSON-INTERNAL";

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

/// Matches pods, and what is not a pod.
fn pods(detector: &Detector) -> (Match, Match) {
    match detector {
        Detector::Cidr(net) => (Match::Source(net.trunc()), Match::NotSource(net.trunc())),
        Detector::Bridge(name) => (Match::Interface(interface(name)), Match::NotInterface(interface(name))),
        Detector::InterfacePrefix(prefix) => {
            (Match::Interface(interface_prefix(prefix)), Match::NotInterface(interface_prefix(prefix)))
        }
    }
}

pub(crate) fn chains(family: Family, facts: &NodeFacts) -> Vec<(Table, &'static str, Vec<Rule>)> {
    let set = |kind| SetName::fixed(family, kind);
    let to = |kind| Match::DestinationIn(set(kind));
    let state = |states| Match::State(states);
    let detected = facts.detector.as_ref().map(pods);

    let mut mangle = vec![
        Rule::new([Match::NotState("NEW")], Target::Return),
        Rule::new([to(SetKind::Filtered), Match::NotAdmitted(set(SetKind::Ranges))], Target::Drop),
    ];
    let internal = |from: Match| Rule::goto([from, to(SetKind::Local)], INTERNAL);
    mangle.extend(detected.clone().map(|(pods, _)| internal(pods)));
    mangle.push(internal(Match::LocalSource));
    mangle.push(Rule::new([to(SetKind::Drop)], Target::Drop));

    let mark = |matches: Vec<Match>| Rule::new(matches, Target::SetMark(facts.mark));
    let mut services = Vec::new();
    match detected {
        _ if facts.masquerade_all => services.push(mark(vec![to(SetKind::ClusterIps)])),
        Some((_, others)) => services.push(mark(vec![others, to(SetKind::ClusterIps)])),
        None => {}
    }
    // The node's own connections to an address of its own have this address as their source.
    services.push(mark(vec![Match::SourceIn(set(SetKind::Addresses)), to(SetKind::ClusterIps)]));
    services.push(mark(vec![to(SetKind::External)]));
    services.push(mark(vec![Match::LocalSource, to(SetKind::Local)]));

    let mut refuse = vec![Rule::new([to(SetKind::Reject)], Target::Reject(family))];
    refuse.extend(Protocol::ALL.map(|protocol| {
        Rule::goto([Match::Protocol(protocol), Match::AddressIn(set(SetKind::Addresses))], ADDRESSES)
    }));
    let mut addresses: Vec<Rule> = [SetKind::ClusterIps, SetKind::External, SetKind::Local]
        .map(|kind| Rule::new([to(kind)], Target::Return))
        .into();
    addresses.push(Rule::new([], Target::Reject(family)));

    let new_to = |chain| Rule::jump([state("NEW")], chain);
    vec![
        (Table::Mangle, MANGLE, mangle),
        (Table::Mangle, INTERNAL, vec![Rule::new([], Target::MapMark(set(SetKind::Local)))]),
        (Table::Nat, SERVICES, services),
        (Table::Nat, NAT_OUTPUT, vec![Rule::jump([], SERVICES)]),
        (
            Table::Nat,
            POSTROUTING,
            vec![
                Rule::new([Match::Hairpin(set(SetKind::Hairpin))], Target::SetMark(facts.mark)),
                Rule::new([Match::NotMarked(facts.mark)], Target::Return),
                Rule::new([], Target::ClearMark(facts.mark)),
                Rule::new([], Target::Masquerade),
            ],
        ),
        (Table::Filter, ADDRESSES, addresses),
        (Table::Filter, REFUSE, refuse),
        (Table::Filter, INPUT, vec![new_to(REFUSE)]),
        (
            Table::Filter,
            FORWARD,
            vec![
                new_to(REFUSE),
                Rule::new([Match::Marked(facts.mark)], Target::Accept),
                Rule::new([state("RELATED,ESTABLISHED")], Target::Accept),
            ],
        ),
        (Table::Filter, FILTER_OUTPUT, vec![new_to(REFUSE)]),
    ]
}
