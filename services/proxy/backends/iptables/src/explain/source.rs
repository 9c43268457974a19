//! Sources of packets.
//!
//! Owns: [`PacketSource`], and the sources that a question covers. In: the question, the detector, the node's addresses,
//! source ranges. Out: sources that the rules treat differently; each has one way.

use std::net::IpAddr;

use keelson_proxy::{
    explain::{Question, Source, Target},
    model::FrontendKind,
    options::Detector,
};

use super::{RuleContext, frontends};

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

pub(super) fn sources(context: &RuleContext<'_>, question: &Question) -> Vec<PacketSource> {
    let target = question.target;
    let kinds = match question.from {
        Source::Any => vec![pod(context), node(context, target), outside()],
        Source::Pod => vec![pod(context)],
        Source::Node => vec![node(context, target)],
        Source::Outside => vec![outside()],
        Source::Address(address) => of_address(context, address),
    };
    kinds.into_iter().flat_map(|source| by_range(context, target, source)).collect()
}

fn pod(context: &RuleContext<'_>) -> PacketSource {
    let detail = match &context.plan.facts().detector {
        Some(Detector::Cidr(net)) => net.to_string(),
        Some(Detector::Bridge(name)) => format!("by interface {name}"),
        Some(Detector::InterfacePrefix(prefix)) => format!("by interface {prefix}*"),
        None => "no setting distinguishes pods from other sources".into(),
    };
    source(format!("a pod ({detail})"), Origin::Pod, None)
}

fn source(label: String, origin: Origin, address: Option<IpAddr>) -> PacketSource {
    PacketSource { label, origin, address, admitted: true }
}

/// The kernel uses the destination as the source for an address of its own, and the node's address otherwise.
fn node(context: &RuleContext<'_>, target: Target) -> PacketSource {
    let own = || context.plan.facts().node_ips.first().copied();
    let address = if context.is_local(target.address) { Some(target.address) } else { own() };
    let from = address.map_or_else(String::new, |address| format!(" ({address})"));
    source(format!("the node itself{from}"), Origin::Node, address)
}

fn outside() -> PacketSource {
    source("outside".into(), Origin::Outside, None)
}

/// The source with an address; two if only the interface distinguishes pods.
fn of_address(context: &RuleContext<'_>, address: IpAddr) -> Vec<PacketSource> {
    let of = |what: String, origin| source(format!("{address}, {what}"), origin, Some(address));
    let by_interface = |name: String| {
        vec![
            of(format!("if received on {name}: a pod"), Origin::Pod),
            of(format!("if not received on {name}"), Origin::Outside),
        ]
    };
    if context.is_local(address) {
        return vec![of("the node itself".into(), Origin::Node)];
    }
    match &context.plan.facts().detector {
        Some(Detector::Cidr(net)) if net.contains(&address) => {
            vec![of(format!("a pod ({net})"), Origin::Pod)]
        }
        Some(Detector::Bridge(name)) => by_interface(name.clone()),
        Some(Detector::InterfacePrefix(prefix)) => by_interface(format!("an interface {prefix}*")),
        Some(Detector::Cidr(_)) | None => vec![of("outside".into(), Origin::Outside)],
    }
}

/// Splits a source of unknown address in two if source ranges apply.
fn by_range(context: &RuleContext<'_>, target: Target, source: PacketSource) -> Vec<PacketSource> {
    let filtered = match context.plan.lookup(frontends(target)[0]) {
        Some((FrontendKind::LoadBalancerIp, port)) => port.has_any && !port.source_ranges.is_empty(),
        _ => false,
    };
    if source.address.is_some() || !filtered {
        return vec![source];
    }
    let with = |what: &str, admitted| PacketSource {
        label: format!("{}, {what} the source ranges", source.label),
        admitted,
        ..source.clone()
    };
    vec![with("in", true), with("not in", false)]
}
