//! Explains which rules a packet meets.
//!
//! Owns: [`explain`]. In: the plan, the node's addresses, and a [`Question`]. Out: a [`pb::Explanation`]. Pure.
//!
//! Nothing here knows the semantics of Services: the first packet of a connection is evaluated against the rules of the
//! plan, in the order of the kernel's hooks, and each rule that matches is a step. So an explanation cannot disagree with
//! the rules. What is random or known only to the kernel is described as a choice.

mod frontend;
mod source;
#[cfg(test)]
mod tests;
mod walk;

use std::net::IpAddr;

use keelson_proto::proxy as pb;
use keelson_proxy::{
    explain::{Question, Target},
    model::Frontend,
};

use self::walk::Walk;
use crate::plan::Plan;

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

/// Explains the first packet of a connection. `context` is of the family of the question's address.
pub(crate) fn explain(context: &RuleContext<'_>, question: &Question) -> pb::Explanation {
    let target = question.target;
    let [nat, filter] = context.plan.chains_of(&frontends(target));
    let (frontend, service_port) = frontend::describe(context, target);
    let sources = source::sources(context, question);
    let way = |source| Walk::new(context, [&nat, &filter], source, target).way();
    pb::Explanation { frontend, service_port, ways: sources.iter().map(way).collect() }
}
