//! Explains which rules a packet meets.
//!
//! Owns: [`explain`]. In: the rules ([`Base`] and the plan's elements), the node's addresses, and a [`Question`]. Out:
//! a [`pb::Explanation`]. Pure.
//!
//! Nothing here knows the semantics of Services: the first packet of a connection is evaluated against the kernel's own
//! rules ([`rules`](super::ruleset::rules)), in the order of the kernel's hooks, and each match is a step. So an
//! explanation cannot disagree with the rules. What is random or known only to the kernel (slots, affinity) is
//! described as a choice.

mod elements;
mod format;
mod frontend;
mod source;
#[cfg(test)]
mod tests;
mod walk;

use std::net::IpAddr;

use keelson_proto::proxy as pb;
use keelson_proxy::explain::Question;

use self::{elements::ReachableElements, walk::Walk};
use super::{chain::Chain, plan::Plan, ruleset::Base};

#[derive(Debug, Clone, Copy)]
pub(crate) struct RuleContext<'a> {
    pub(crate) base: &'a Base,
    pub(crate) plan: &'a Plan,
    /// The addresses of the node's interfaces, including loopback.
    pub(crate) local: &'a [IpAddr],
    /// The chain that adds established flows to the flowtable, if it exists.
    pub(crate) offload: Option<Chain>,
}

impl RuleContext<'_> {
    fn is_local(&self, address: IpAddr) -> bool {
        address.is_loopback() || self.local.contains(&address)
    }
}

/// Explains the first packet of a connection. `context` is of the family of the question's address.
pub(crate) fn explain(context: &RuleContext<'_>, question: &Question) -> pb::Explanation {
    explain_with(context, &ReachableElements::of_target(context.plan, question.target), question)
}

/// [`explain`] for a packet that meets these elements.
fn explain_with(
    context: &RuleContext<'_>,
    elements: &ReachableElements,
    question: &Question,
) -> pb::Explanation {
    let target = question.target;
    let (frontend, service_port) = frontend::describe(context, target);
    let sources = source::sources(context, elements, question);
    let ways = sources.iter().map(|source| Walk::new(context, elements, source, target).way()).collect();
    pb::Explanation { frontend, service_port, ways }
}
