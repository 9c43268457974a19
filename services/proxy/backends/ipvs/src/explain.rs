//! Explains what happens to a packet.
//!
//! Owns: [`explain`]. In: the plan, the node's addresses, and a [`Question`]. Out: a [`pb::Explanation`]. Pure.
//!
//! The first packet of a connection is decided by [`SocketState`](crate::plan::SocketState), which entries of sets and virtual
//! servers are made from. The steps name the chains and sets in the order in which the packet meets them.

#[cfg(test)]
mod tests;
mod way;

use keelson_proto::proxy as pb;
use keelson_proxy::{
    explain::{Question, Target, source::SourceFacts},
    model::{Conflict, Frontend, FrontendKind, ServicePort},
};
use keelson_proxy_xtables::explain::Services;

use crate::{plan::Plan, servers::Socket};

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

fn socket(Target { address, port, protocol }: Target) -> Socket {
    Socket { ip: address, protocol, port }
}

/// Explains the first packet of a connection. `context` is of the family of the question's address.
pub(crate) fn explain(context: &RuleContext<'_>, question: &Question) -> pb::Explanation {
    let (target, facts) = (question.target, context.plan.facts());
    // The node's own connections to an address that it has bound have this address as their source.
    let mut local = context.local.to_vec();
    local.extend(Some(target.address).filter(|ip| context.plan.binds(*ip)));
    let all = SourceFacts { detector: facts.detector.as_ref(), node_ips: &facts.node_ips, local: &local };
    let state = context.plan.state(socket(target));
    let is_refused = |_| state.as_ref().is_some_and(|state| state.refusal.is_some());
    let serves_node_ports = context.plan.serves_node_ports_at(target.address);
    let (frontend, service_port) = context.describe(target, serves_node_ports, is_refused);
    let is_filtered = state.as_ref().is_some_and(|state| state.ranges.is_some());
    let sources = all.sources(question).into_iter().flat_map(|source| source.by_ranges(is_filtered));
    let ways = sources.map(|source| way::way(context, &source, target)).collect();
    pb::Explanation { frontend, service_port, ways }
}
