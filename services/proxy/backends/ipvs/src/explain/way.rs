//! The way of a packet.
//!
//! Owns: [`way`]. In: a source, a target, the plan. Out: a [`pb::Way`].

use keelson_proto::proxy as pb;
use keelson_proxy::{
    explain::{
        Target, list,
        source::{Origin, PacketSource},
    },
    model::Endpoint,
};
use keelson_proxy_xtables::names::{ADDRESSES, MANGLE, POSTROUTING, REFUSE, SERVICES, SetKind, SetName};

use super::{RuleContext, socket};
use crate::{
    plan::{INTERNAL, Refusal, SocketState},
    servers::ServerKey,
};

pub(super) fn way(context: &RuleContext<'_>, source: &PacketSource, target: Target) -> pb::Way {
    let mut way = pb::Way { from: source.label.clone(), ..pb::Way::default() };
    let Some(state) = context.plan.state(socket(target)) else {
        way.verdict = if context.plan.binds(target.address) {
            let set = set(target, SetKind::Addresses);
            way.steps.push(format!("{REFUSE}: the address is in set {set}"));
            way.steps.push(format!("{ADDRESSES}: no set of frontends has the port: rejected"));
            "rejected"
        } else {
            way.steps.push("no rule matches; other chains and routes decide".into());
            "untouched"
        }
        .into();
        return way;
    };
    if !is_admitted(&state, source) {
        let (filtered, ranges) = (set(target, SetKind::Filtered), set(target, SetKind::Ranges));
        way.steps
            .push(format!("{MANGLE}: in set {filtered}, and the source is not in set {ranges}: dropped"));
        way.verdict = "dropped".into();
        return way;
    }
    let internal = state.internal.filter(|_| is_internal(context, source));
    if internal.is_some() {
        let set = set(target, SetKind::Local);
        way.steps.push(format!("{MANGLE}: from a pod or the node, in set {set}"));
        way.steps.push(format!("{INTERNAL}: gets the mark of the Service"));
    }
    let endpoints = match (internal, state.refusal) {
        (Some(endpoints), _) => endpoints,
        (None, None) => state.endpoints,
        (None, Some(Refusal::Drop)) => {
            way.steps.push(format!("{MANGLE}: in set {}: dropped", set(target, SetKind::Drop)));
            way.verdict = "dropped".into();
            return way;
        }
        (None, Some(Refusal::Reject)) => {
            way.steps.push(format!("{REFUSE}: in set {}: rejected", set(target, SetKind::Reject)));
            way.verdict = "rejected".into();
            return way;
        }
    };
    forward(context, source, target, (&state, internal.is_some()), endpoints, &mut way);
    way
}

/// The virtual server, and masquerading.
fn forward(
    context: &RuleContext<'_>,
    source: &PacketSource,
    target: Target,
    (state, by_mark): (&SocketState<'_>, bool),
    endpoints: &[Endpoint],
    way: &mut pb::Way,
) {
    let marked = mark_reason(context, source, target, state);
    way.steps.extend(marked.iter().map(|reason| format!("{SERVICES}: {reason}: marked for masquerading")));
    let key = ServerKey::Socket(socket(target));
    let affinity = context.plan.server(key).map_or(0, |server| server.spec.timeout);
    let choice = match affinity {
        0 => format!("scheduler {}", context.plan.facts().scheduler),
        seconds => format!(
            "the endpoint of the last {seconds} s, otherwise scheduler {}",
            context.plan.facts().scheduler
        ),
    };
    let server = if by_mark { "virtual server by mark".to_owned() } else { format!("virtual server {key}") };
    way.steps.push(format!("{server}, {choice}: one of {}: {}", endpoints.len(), list(endpoints)));
    way.verdict = "forwarded".into();
    way.endpoints = endpoints.iter().map(ToString::to_string).collect();
    if marked.is_some() {
        let sees = format!("{POSTROUTING}: masqueraded: the endpoint sees an address of the node");
        way.masqueraded = endpoints.iter().any(|endpoint| !context.is_local(endpoint.ip));
        way.steps.extend(way.masqueraded.then_some(sees));
        return;
    }
    let hairpin: Vec<Endpoint> =
        endpoints.iter().copied().filter(|it| may_be_hairpin(context, source, target, *it)).collect();
    if !hairpin.is_empty() {
        way.steps.push(format!(
            "{POSTROUTING}: masqueraded if the sender itself is chosen from {} (hairpin)",
            list(&hairpin)
        ));
    }
    // Only one endpoint, which is the sender.
    way.masqueraded =
        hairpin.len() == endpoints.len() && source.address == hairpin.first().map(|endpoint| endpoint.ip);
}

fn set(target: Target, kind: SetKind) -> SetName {
    SetName::fixed(target.family(), kind)
}

fn is_admitted(state: &SocketState<'_>, source: &PacketSource) -> bool {
    let Some(ranges) = &state.ranges else { return true };
    source.address.map_or(source.admitted, |address| ranges.iter().any(|range| range.contains(&address)))
}

/// Whether externalTrafficPolicy Local does not apply.
fn is_internal(context: &RuleContext<'_>, source: &PacketSource) -> bool {
    match source.origin {
        Origin::Node => true,
        Origin::Pod => context.plan.facts().detector.is_some(),
        Origin::Outside => false,
    }
}

/// Why a packet is marked for masquerading.
fn mark_reason(
    context: &RuleContext<'_>,
    source: &PacketSource,
    target: Target,
    state: &SocketState<'_>,
) -> Option<&'static str> {
    let facts = context.plan.facts();
    match state.kind {
        SetKind::External => Some("a frontend for sources outside"),
        SetKind::Local if source.origin == Origin::Node => Some("from the node itself"),
        SetKind::ClusterIps if facts.masquerade_all => Some("masquerade_all"),
        SetKind::ClusterIps if facts.detector.is_some() && source.origin != Origin::Pod => {
            Some("not from a pod")
        }
        SetKind::ClusterIps if source.origin == Origin::Node && context.plan.binds(target.address) => {
            Some("from the address itself")
        }
        _ => None,
    }
}

fn may_be_hairpin(
    context: &RuleContext<'_>,
    source: &PacketSource,
    target: Target,
    endpoint: Endpoint,
) -> bool {
    source.origin == Origin::Pod
        && source.address.is_none_or(|address| address == endpoint.ip)
        && context.plan.is_hairpin(target.protocol, endpoint)
}
