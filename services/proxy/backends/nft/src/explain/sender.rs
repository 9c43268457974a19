//! Who sends.
//!
//! Owns: [`Sender`], and which of them a question is about. In: the question, the detector, the node's addresses, source
//! ranges. Out: senders between whom the rules make a difference; each goes one way.

use std::net::IpAddr;

use ipnet::IpNet;
use keelson_proxy::{
    explain::{Question, Source, Target},
    options::Detector,
};

use super::{Place, table::Table, words};
use crate::element::{Key, SetName};

/// From where a packet comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// By an interface, from a pod.
    Pod,
    /// The node itself.
    Node,
    /// By an interface, from anybody else.
    Outside,
}

/// One kind of sender.
#[derive(Debug, Clone)]
pub(super) struct Sender {
    /// In words.
    pub(super) label: String,
    pub(super) origin: Origin,
    /// Its address, if that is known.
    pub(super) address: Option<IpAddr>,
    /// Where the address is not known: whether it is in the source ranges of the target.
    pub(super) admitted: bool,
}

/// Those that the question is about.
pub(super) fn senders(place: &Place<'_>, table: &Table, question: &Question) -> Vec<Sender> {
    let kinds: Vec<Sender> = match question.from {
        Source::Any => vec![pod(place), node(place, question.target), outside()],
        Source::Pod => vec![pod(place)],
        Source::Node => vec![node(place, question.target)],
        Source::Outside => vec![outside()],
        Source::Address(address) => one(place, address),
    };
    kinds.into_iter().flat_map(|sender| by_range(place, table, question.target, sender)).collect()
}

fn pod(place: &Place<'_>) -> Sender {
    let label = match &place.base.detector {
        Some(Detector::Cidr(net)) => format!("a pod ({net})"),
        Some(Detector::Bridge(name)) => format!("a pod (by interface {name})"),
        Some(Detector::InterfacePrefix(prefix)) => format!("a pod (by interface {prefix}*)"),
        None => "a pod (no setting distinguishes pods from other sources)".into(),
    };
    Sender { label, origin: Origin::Pod, address: None, admitted: true }
}

/// The kernel sends to an address of its own from that very address, and to others from the node's.
fn node(place: &Place<'_>, target: Target) -> Sender {
    let address = match place.is_local(target.address) {
        true => Some(target.address),
        false => place.plan.node_facts().node_ips.iter().copied().find(|ip| target.family().has(ip)),
    };
    let from = address.map_or_else(String::new, |address| format!(" ({address})"));
    Sender { label: format!("the node itself{from}"), origin: Origin::Node, address, admitted: true }
}

fn outside() -> Sender {
    Sender { label: "outside".into(), origin: Origin::Outside, address: None, admitted: true }
}

/// The sender of an address; where only the interface tells a pod, either.
fn one(place: &Place<'_>, address: IpAddr) -> Vec<Sender> {
    let sender = |what: String, origin| Sender {
        label: format!("{address}, {what}"),
        origin,
        address: Some(address),
        admitted: true,
    };
    if place.is_local(address) {
        return vec![sender("the node itself".into(), Origin::Node)];
    }
    match &place.base.detector {
        Some(Detector::Cidr(net)) if net.contains(&address) => {
            vec![sender(format!("a pod ({net})"), Origin::Pod)]
        }
        Some(Detector::Bridge(name)) => vec![
            sender(format!("if received on {name}: a pod"), Origin::Pod),
            sender(format!("if not received on {name}"), Origin::Outside),
        ],
        Some(Detector::InterfacePrefix(prefix)) => vec![
            sender(format!("if received on an interface {prefix}*: a pod"), Origin::Pod),
            sender(format!("if not received on an interface {prefix}*"), Origin::Outside),
        ],
        Some(Detector::Cidr(_)) | None => vec![sender("outside".into(), Origin::Outside)],
    }
}

/// One of unknown address is two where source ranges let some in.
fn by_range(place: &Place<'_>, table: &Table, target: Target, sender: Sender) -> Vec<Sender> {
    let frontend = Key::new().ip(target.address).protocol(target.protocol).port(target.port);
    if sender.address.is_some() || table.get(SetName::Filtered, frontend).is_none() {
        return vec![sender];
    }
    let ranges = table.ranges(target);
    let pods = match (&place.base.detector, sender.origin) {
        (Some(Detector::Cidr(net)), Origin::Pod) => Some(*net),
        _ => None,
    };
    let (some, all) = overlap(&ranges, pods);
    let named = words::ranges(&ranges);
    let inside = |sender: &Sender| Sender {
        label: format!("{}, in the source ranges ({named})", sender.label),
        ..sender.clone()
    };
    let elsewhere = |sender: &Sender| Sender {
        label: format!("{}, not in the source ranges ({named})", sender.label),
        admitted: false,
        ..sender.clone()
    };
    match (some, all) {
        (true, true) => vec![inside(&sender)],
        (true, false) => vec![inside(&sender), elsewhere(&sender)],
        (false, _) => vec![elsewhere(&sender)],
    }
}

/// Whether the ranges hold some, and all, of the addresses of a network; of unknown addresses they hold some.
fn overlap(ranges: &[IpNet], net: Option<IpNet>) -> (bool, bool) {
    let Some(net) = net else { return (!ranges.is_empty(), false) };
    let all = ranges.iter().any(|range| range.contains(&net));
    (all || ranges.iter().any(|range| net.contains(range)), all)
}
