//! Sources of packets.
//!
//! Owns: [`sources`]. In: the question, the plan, the node's addresses. Out: sources that the rules treat differently; each
//! has one way.

use keelson_proxy::{
    explain::{
        Question, Target,
        source::{PacketSource, SourceFacts},
    },
    model::FrontendKind,
};

use super::{RuleContext, frontends};

pub(super) fn sources(context: &RuleContext<'_>, question: &Question) -> Vec<PacketSource> {
    let facts = context.plan.facts();
    let all =
        SourceFacts { detector: facts.detector.as_ref(), node_ips: &facts.node_ips, local: context.local };
    let kinds = all.sources(question).into_iter();
    kinds.flat_map(|source| by_range(context, question.target, source)).collect()
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
