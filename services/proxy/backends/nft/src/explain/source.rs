//! Sources of packets.
//!
//! Owns: [`sources`]. In: the question, the detector, the node's addresses, source ranges. Out: sources that the rules
//! treat differently; each has one way.

use ipnet::IpNet;
use keelson_proxy::{
    explain::{
        Question, Target,
        source::{Origin, PacketSource, SourceFacts},
    },
    options::Detector,
};

use super::{RuleContext, elements::ReachableElements, format};
use crate::element::{Key, SetName};

pub(super) fn sources(
    context: &RuleContext<'_>,
    elements: &ReachableElements,
    question: &Question,
) -> Vec<PacketSource> {
    let all = SourceFacts {
        detector: context.base.detector.as_ref(),
        node_ips: &context.plan.node_facts().node_ips,
        local: context.local,
    };
    let kinds = all.sources(question).into_iter();
    kinds.flat_map(|source| by_range(context, elements, question.target, source)).collect()
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
