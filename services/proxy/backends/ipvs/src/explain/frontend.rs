//! Describes an address and port.
//!
//! In: the plan, the node's addresses, the target. Out: a sentence, and the service port if there is one.

use keelson_proxy::{
    explain::Target,
    model::{Frontend, FrontendKind, ServicePort},
};

use super::{RuleContext, frontends, socket};
use crate::plan::Refusal;

/// The sentence, and the name of the service port; empty if there is none.
pub(super) fn describe(context: &RuleContext<'_>, target: Target) -> (String, String) {
    let [address, node_port] = frontends(target);
    if let Some((kind, port)) = context.plan.lookup(address) {
        let what = match kind {
            FrontendKind::ClusterIp => "the cluster IP",
            FrontendKind::ExternalIp => "an external IP",
            FrontendKind::LoadBalancerIp | FrontendKind::NodePort => "a load-balancer IP",
        };
        return named(context, target, address, kind, what, port);
    }
    if let Some((kind, port)) = context.plan.lookup(node_port) {
        if is_served(context, target) {
            return named(context, target, node_port, kind, "the node port", port);
        }
        if context.is_local(target.address) {
            let Target { address, port: number, protocol } = target;
            let text = format!(
                "{} has the node port {number}/{protocol}, but node ports are not served at {address}",
                port.name
            );
            return (text, String::new());
        }
    }
    (unclaimed(context, target), String::new())
}

fn is_served(context: &RuleContext<'_>, target: Target) -> bool {
    context.plan.serves_node_ports_at(target.address)
}

fn named(
    context: &RuleContext<'_>,
    target: Target,
    frontend: Frontend,
    kind: FrontendKind,
    what: &str,
    port: &ServicePort,
) -> (String, String) {
    let mut text = format!("{target} is {what} of {}", port.name);
    match kind {
        FrontendKind::ClusterIp if port.internal_local => text.push_str(", internalTrafficPolicy Local"),
        FrontendKind::ClusterIp => {}
        _ if port.external_local => text.push_str(", externalTrafficPolicy Local"),
        _ => {}
    }
    match context.plan.state(socket(target)).and_then(|state| state.refusal) {
        Some(Refusal::Reject) => text.push_str(": no usable endpoint on any node"),
        Some(Refusal::Drop) => text.push_str(": it has endpoints, but none that this traffic may use"),
        None => {}
    }
    let conflicts = context.plan.conflicts();
    if let Some(conflict) = conflicts.iter().find(|conflict| conflict.frontend == frontend) {
        let others: Vec<String> = conflict.others.iter().map(ToString::to_string).collect();
        text.push_str(&format!("; also claimed by {}", others.join(", ")));
    }
    (text, port.name.to_string())
}

fn unclaimed(context: &RuleContext<'_>, target: Target) -> String {
    let Target { address, port, protocol } = target;
    let owner = context.plan.ports().find(|port| {
        port.cluster_ip == address
            || port.external_ips.contains(&address)
            || port.load_balancer_ips.contains(&address)
    });
    if let Some(owner) = owner {
        let service = &owner.name.service;
        return format!("{address} is an address of {service}, which has no port {port}/{protocol}");
    }
    match context.is_local(address) {
        true => format!(
            "{address} is an address of this node, but no Service has the node port {port}/{protocol}"
        ),
        false => format!("{target} is not a frontend: {address} belongs to no Service and not to this node"),
    }
}
