//! Explains what happens to a packet.
//!
//! Owns: [`explain`]. In: the plan, the node's addresses, and a [`Question`]. Out: a [`pb::Explanation`]. Pure.
//!
//! The first packet of a connection is decided by [`SocketState`](crate::plan::SocketState), which entries of sets and virtual
//! servers are made from. The steps name the chains and sets in the order in which the packet meets them.

mod frontend;
#[cfg(test)]
mod tests;
mod way;

use std::net::IpAddr;

use keelson_proto::proxy as pb;
use keelson_proxy::{
    explain::{
        Question, Target,
        source::{PacketSource, SourceFacts},
    },
    model::Frontend,
};

use crate::{plan::Plan, servers::Socket};

#[derive(Debug, Clone, Copy)]
pub(crate) struct RuleContext<'a> {
    pub(crate) plan: &'a Plan,
    /// The addresses of the node's interfaces, including loopback.
    pub(crate) local: &'a [IpAddr],
}

impl RuleContext<'_> {
    fn is_local(&self, address: IpAddr) -> bool {
        address.is_loopback() || self.local.contains(&address)
    }
}

/// The frontends that a packet may be for.
fn frontends(Target { address, port, protocol }: Target) -> [Frontend; 2] {
    [Frontend::Address { ip: address, protocol, port }, Frontend::NodePort { protocol, port }]
}

fn socket(Target { address, port, protocol }: Target) -> Socket {
    Socket { ip: address, protocol, port }
}

/// Explains the first packet of a connection. `context` is of the family of the question's address.
pub(crate) fn explain(context: &RuleContext<'_>, question: &Question) -> pb::Explanation {
    let target = question.target;
    let facts = context.plan.facts();
    // The node's own connections to an address that it has bound have this address as their source.
    let mut local = context.local.to_vec();
    local.extend(Some(target.address).filter(|ip| context.plan.binds(*ip)));
    let all = SourceFacts { detector: facts.detector.as_ref(), node_ips: &facts.node_ips, local: &local };
    let (frontend, service_port) = frontend::describe(context, target);
    let sources = all.sources(question).into_iter().flat_map(|source| by_range(context, target, source));
    let ways = sources.map(|source| way::way(context, &source, target)).collect();
    pb::Explanation { frontend, service_port, ways }
}

/// Splits a source of unknown address in two if source ranges apply.
fn by_range(context: &RuleContext<'_>, target: Target, source: PacketSource) -> Vec<PacketSource> {
    let filtered = context.plan.state(socket(target)).is_some_and(|state| state.ranges.is_some());
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
