//! Describes an address and port.
//!
//! In: the plan, the node's addresses, the target. Out: a sentence, and the service port if there is one.

use std::net::IpAddr;

use keelson_proxy::{
    explain::Target,
    model::{Family, Frontend},
};

use super::RuleContext;
use crate::{
    plan::{FoundFrontend, FrontendKind, FrontendTarget, PortView},
    ruleset::NodePortMatch,
};

/// The sentence, and the name of the service port; empty if there is none.
pub(super) fn describe(context: &RuleContext<'_>, target: Target) -> (String, String) {
    let Target { address, port, protocol } = target;
    if let Some(found) = context.plan.lookup(Frontend::Address { ip: address, protocol, port }) {
        let what = match found.kind {
            FrontendKind::ClusterIp => "the cluster IP",
            FrontendKind::ExternalIp => "an external IP",
            FrontendKind::LoadBalancerIp | FrontendKind::NodePort => "a load-balancer IP",
        };
        let name = found.port.name().to_string();
        return (
            format!("{target} is {what} of {name}{}{}", facts(&found), other_claims(context, &found)),
            name,
        );
    }
    if let Some(found) = context.plan.lookup(Frontend::NodePort { protocol, port }) {
        let name = found.port.name().to_string();
        match why_node_port_unserved(context, address) {
            None => {
                return (
                    format!(
                        "{target} is the node port of {name}{}{}",
                        facts(&found),
                        other_claims(context, &found)
                    ),
                    name,
                );
            }
            Some(why) if context.is_local(address) => {
                return (format!("{name} has the node port {port}/{protocol}, but {why}"), String::new());
            }
            // An address of another host, whatever node ports exist.
            Some(_) => {}
        }
    }
    (describe_unclaimed(context, target), String::new())
}

/// Why node ports are not served at an address; `None` if they are.
pub(super) fn why_node_port_unserved(context: &RuleContext<'_>, address: IpAddr) -> Option<String> {
    let listed = &context.plan.node_facts().node_port_addresses;
    match context.base.node_ports {
        NodePortMatch::Addresses if listed.contains(&address) => None,
        NodePortMatch::Addresses => {
            let named: Vec<String> = listed.iter().map(ToString::to_string).collect();
            let where_else =
                if named.is_empty() { "nowhere".into() } else { format!("at {}", named.join(", ")) };
            Some(format!("node ports are served {where_else}, not at {address}"))
        }
        NodePortMatch::AllLocal if address.is_loopback() => {
            Some(format!("node ports are not served at loopback addresses such as {address}"))
        }
        NodePortMatch::AllLocal if context.is_local(address) => None,
        NodePortMatch::AllLocal => Some(format!(
            "node ports are served at the addresses of the node, and {address} is not one of them"
        )),
    }
}

fn describe_unclaimed(context: &RuleContext<'_>, target: Target) -> String {
    let Target { address, port, protocol } = target;
    let of = |has: &dyn Fn(&PortView<'_>) -> bool| {
        // Few Services share an address; the first by name is named.
        context.plan.service_ports().filter(has).map(|port| port.service.to_string()).min()
    };
    if context.plan.is_cluster_ip(address) {
        let service = of(&|port| port.cluster_ip == address).unwrap_or_default();
        return format!("{address} is the cluster IP of {service}, which has no port {port}/{protocol}");
    }
    if let Some(service) =
        of(&|port| port.external_ips.contains(&address) || port.load_balancer_ips.contains(&address))
    {
        return format!("{address} is an external address of {service}, which has no port {port}/{protocol}");
    }
    if let Some(net) = context.plan.node_facts().service_cidrs.iter().find(|net| net.contains(&address)) {
        return format!("{address} is in the ServiceCIDR {net}, but no Service uses it");
    }
    if context.is_local(address) {
        return format!(
            "{address} is an address of this node, but no Service has the node port {port}/{protocol}"
        );
    }
    let family = match address {
        IpAddr::V4(_) => Family::V4,
        IpAddr::V6(_) => Family::V6,
    };
    format!(
        "{target} is not a frontend: {address} belongs to no Service, no {family} ServiceCIDR and not to \
         this node"
    )
}

/// Properties of the service port that matter for this frontend.
fn facts(found: &FoundFrontend<'_>) -> String {
    let mut text = String::new();
    let (local, which) = match found.kind {
        FrontendKind::ClusterIp => (found.port.internal_local, "internalTrafficPolicy"),
        _ => (found.port.external_local, "externalTrafficPolicy"),
    };
    if local {
        text.push_str(&format!(", {which} Local"));
    }
    if found.port.lacks_affinity() {
        text.push_str(", without the requested session affinity (too many service ports use it)");
    }
    if let Some(why) = why_refused(found) {
        text.push_str(&format!(": {why}"));
    }
    text
}

/// Other service ports that claim it.
fn other_claims(context: &RuleContext<'_>, found: &FoundFrontend<'_>) -> String {
    let conflict = context.plan.conflicts().into_iter().find(|conflict| conflict.frontend == found.frontend);
    let others: Vec<String> =
        conflict.map_or_else(Vec::new, |conflict| conflict.others.iter().map(ToString::to_string).collect());
    match others.as_slice() {
        [] => String::new(),
        [one] => format!("; {one} also claims it"),
        some => format!("; {} also claim it", some.join(", ")),
    }
}

/// Why a frontend has no endpoints; `None` if it has some.
pub(super) fn why_refused(found: &FoundFrontend<'_>) -> Option<&'static str> {
    match found.target {
        FrontendTarget::Number(_) => None,
        FrontendTarget::Reject => Some("no usable endpoint on any node"),
        FrontendTarget::Drop if found.kind == FrontendKind::ClusterIp => {
            Some("no endpoint on this node, and internalTrafficPolicy is Local")
        }
        FrontendTarget::Drop => Some("it has endpoints, but none that this node can send to"),
    }
}
