//! Which rules a packet meets, in words.
//!
//! Owns: [`explain`]. In: the rules ([`Base`] and the plan's elements), the node's addresses, and a [`Question`]. Out:
//! a [`pb::Explanation`]. Pure.
//!
//! Nothing here knows what Services mean: the first packet of a connection is taken through the very rules that the kernel
//! has ([`rules`](super::ruleset::rules)), in the order of the kernel's hooks, and each match is a step. So an explanation
//! cannot disagree with the rules. What is random or remembered by the kernel alone (slots, affinity) is described as a choice.

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

/// What packets meet, in one family.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RuleContext<'a> {
    /// What the fixed rules depend on.
    pub(crate) base: &'a Base,
    /// The elements.
    pub(crate) plan: &'a Plan,
    /// The addresses that the node's interfaces have, loopback ones among them.
    pub(crate) local: &'a [IpAddr],
    /// The chain that adds established flows to the flowtable, if there is one.
    pub(crate) offload: Option<Chain>,
}

impl RuleContext<'_> {
    /// Whether an address is one of the node.
    fn is_local(&self, address: IpAddr) -> bool {
        address.is_loopback() || self.local.contains(&address)
    }
}

/// What becomes of the first packet of a connection. `context` is of the family of the question's address.
pub(crate) fn explain(context: &RuleContext<'_>, question: &Question) -> pb::Explanation {
    meeting(context, &ReachableElements::of_target(context.plan, question.target), question)
}

/// As [`explain`], of a packet that meets these elements.
fn meeting(context: &RuleContext<'_>, elements: &ReachableElements, question: &Question) -> pb::Explanation {
    let target = question.target;
    let (frontend, service_port) = frontend::describe(context, target);
    let sources = source::sources(context, elements, question);
    let ways = sources.iter().map(|source| Walk::new(context, elements, source, target).way()).collect();
    pb::Explanation { frontend, service_port, ways }
}
