//! Explains which rules a packet meets.
//!
//! Owns: [`explain`]. In: the plan, the node's addresses, and a [`Question`]. Out: a [`pb::Explanation`]. Pure.
//!
//! Nothing here knows the semantics of Services: the first packet of a connection is evaluated against the rules of the
//! plan, in the order of the kernel's hooks, and each rule that matches is a step. So an explanation cannot disagree with
//! the rules. What is random or known only to the kernel is described as a choice.

#[cfg(test)]
mod tests;
mod walk;

use std::net::IpAddr;

use keelson_proto::proxy as pb;
use keelson_proxy::{
    addresses::Match,
    explain::{Question, source::SourceFacts},
    model::{Conflict, Frontend, FrontendKind, ServicePort},
};
use keelson_proxy_xtables::explain::Services;

use self::walk::Walk;
use crate::plan::Plan;

pub(crate) type RuleContext<'a> = keelson_proxy_xtables::explain::RuleContext<'a, Plan>;

impl Services for Plan {
    fn lookup(&self, frontend: Frontend) -> Option<(FrontendKind, &ServicePort)> {
        self.services().lookup(frontend)
    }

    fn ports(&self) -> impl Iterator<Item = &ServicePort> {
        self.services().ports()
    }

    fn conflicts(&self) -> Vec<Conflict> {
        self.services().conflicts()
    }
}

/// Explains the first packet of a connection. `context` is of the family of the question's address.
pub(crate) fn explain(context: &RuleContext<'_>, question: &Question) -> pb::Explanation {
    let (target, facts) = (question.target, context.plan.facts());
    let [nat, filter] = context.plan.chains_of(&target.frontends());
    let is_refused = |frontend| {
        // The rules may translate packets of some sources.
        context.plan.frontend_state(frontend).is_some_and(|state| state.rules.is_empty())
    };
    let serves_node_ports = serves_node_ports_at(context, target.address);
    let (frontend, service_port) = context.describe(target, serves_node_ports, is_refused);
    let all =
        SourceFacts { detector: facts.detector.as_ref(), node_ips: &facts.node_ips, local: context.local };
    let [address, _] = target.frontends();
    let is_filtered = matches!(context.plan.services().lookup(address), Some((FrontendKind::LoadBalancerIp, port))
        if port.has_any && !port.source_ranges.is_empty());
    let sources = all.sources(question).into_iter().flat_map(|source| source.by_ranges(is_filtered));
    let ways = sources.map(|source| Walk::new(context, [&nat, &filter], &source, target).way()).collect();
    pb::Explanation { frontend, service_port, ways }
}

fn serves_node_ports_at(context: &RuleContext<'_>, address: IpAddr) -> bool {
    let facts = context.plan.facts();
    match &facts.node_ports {
        _ if address.is_loopback() => facts.serves_loopback,
        Match::AllLocal => context.is_local(address),
        Match::Addresses(addresses) => addresses.contains(&address),
    }
}
