//! Sources of packets.
//!
//! Owns: [`PacketSource`], and the sources that a question covers. In: the question, the detector, the node's
//! addresses, source ranges. Out: sources that the rules treat differently; each has one way.

use std::net::IpAddr;

use ipnet::IpNet;
use keelson_proxy::{
    explain::{Question, Source, Target},
    options::Detector,
};

use super::{RuleContext, elements::ReachableElements, format};
use crate::element::{Key, SetName};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// By an interface, from a pod.
    Pod,
    Node,
    /// By an interface, from anywhere else.
    Outside,
}

#[derive(Debug, Clone)]
pub(super) struct PacketSource {
    pub(super) label: String,
    pub(super) origin: Origin,
    /// `None`: unknown.
    pub(super) address: Option<IpAddr>,
    /// If the address is unknown: whether it is in the source ranges of the target.
    pub(super) admitted: bool,
}

pub(super) fn sources(
    context: &RuleContext<'_>,
    elements: &ReachableElements,
    question: &Question,
) -> Vec<PacketSource> {
    let kinds: Vec<PacketSource> = match question.from {
        Source::Any => vec![pod(context), node(context, question.target), outside()],
        Source::Pod => vec![pod(context)],
        Source::Node => vec![node(context, question.target)],
        Source::Outside => vec![outside()],
        Source::Address(address) => sources_of_address(context, address),
    };
    kinds.into_iter().flat_map(|source| by_range(context, elements, question.target, source)).collect()
}

fn pod(context: &RuleContext<'_>) -> PacketSource {
    let label = match &context.base.detector {
        Some(Detector::Cidr(net)) => format!("a pod ({net})"),
        Some(Detector::Bridge(name)) => format!("a pod (by interface {name})"),
        Some(Detector::InterfacePrefix(prefix)) => format!("a pod (by interface {prefix}*)"),
        None => "a pod (no setting distinguishes pods from other sources)".into(),
    };
    PacketSource { label, origin: Origin::Pod, address: None, admitted: true }
}

/// The kernel uses the destination as the source for an address of its own, and the node's address otherwise.
fn node(context: &RuleContext<'_>, target: Target) -> PacketSource {
    let address = match context.is_local(target.address) {
        true => Some(target.address),
        false => context.plan.node_facts().node_ips.iter().copied().find(|ip| target.family().has(ip)),
    };
    let from = address.map_or_else(String::new, |address| format!(" ({address})"));
    PacketSource { label: format!("the node itself{from}"), origin: Origin::Node, address, admitted: true }
}

fn outside() -> PacketSource {
    PacketSource { label: "outside".into(), origin: Origin::Outside, address: None, admitted: true }
}

/// The source with an address; two if only the interface distinguishes pods.
fn sources_of_address(context: &RuleContext<'_>, address: IpAddr) -> Vec<PacketSource> {
    let source = |what: String, origin| PacketSource {
        label: format!("{address}, {what}"),
        origin,
        address: Some(address),
        admitted: true,
    };
    if context.is_local(address) {
        return vec![source("the node itself".into(), Origin::Node)];
    }
    match &context.base.detector {
        Some(Detector::Cidr(net)) if net.contains(&address) => {
            vec![source(format!("a pod ({net})"), Origin::Pod)]
        }
        Some(Detector::Bridge(name)) => vec![
            source(format!("if received on {name}: a pod"), Origin::Pod),
            source(format!("if not received on {name}"), Origin::Outside),
        ],
        Some(Detector::InterfacePrefix(prefix)) => vec![
            source(format!("if received on an interface {prefix}*: a pod"), Origin::Pod),
            source(format!("if not received on an interface {prefix}*"), Origin::Outside),
        ],
        Some(Detector::Cidr(_)) | None => vec![source("outside".into(), Origin::Outside)],
    }
}

/// Splits a source of unknown address in two if source ranges admit only a part.
fn by_range(
    context: &RuleContext<'_>,
    elements: &ReachableElements,
    target: Target,
    source: PacketSource,
) -> Vec<PacketSource> {
    let frontend = Key::new().ip(target.address).protocol(target.protocol).port(target.port);
    if source.address.is_some() || elements.get(SetName::Filtered, frontend).is_none() {
        return vec![source];
    }
    let ranges = elements.ranges(target);
    let pods = match (&context.base.detector, source.origin) {
        (Some(Detector::Cidr(net)), Origin::Pod) => Some(*net),
        _ => None,
    };
    let (some, all) = overlap(&ranges, pods);
    let named = format::ranges(&ranges);
    let inside = |source: &PacketSource| PacketSource {
        label: format!("{}, in the source ranges ({named})", source.label),
        ..source.clone()
    };
    let elsewhere = |source: &PacketSource| PacketSource {
        label: format!("{}, not in the source ranges ({named})", source.label),
        admitted: false,
        ..source.clone()
    };
    match (some, all) {
        (true, true) => vec![inside(&source)],
        (true, false) => vec![inside(&source), elsewhere(&source)],
        (false, _) => vec![elsewhere(&source)],
    }
}

/// Whether the ranges contain some, and all, of the addresses of a network; of unknown addresses they contain some.
fn overlap(ranges: &[IpNet], net: Option<IpNet>) -> (bool, bool) {
    let Some(net) = net else { return (!ranges.is_empty(), false) };
    let all = ranges.iter().any(|range| range.contains(&net));
    (all || ranges.iter().any(|range| net.contains(range)), all)
}
