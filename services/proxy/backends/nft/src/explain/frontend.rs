//! What an address and port are.
//!
//! In: the plan, the node's addresses, the target. Out: a sentence, and the service port if there is one.

use std::net::IpAddr;

use keelson_proxy::{
    explain::Target,
    model::{Family, Frontend},
};

use super::Place;
use crate::{
    plan::{Found, Kind, PortView, Target as Leads},
    ruleset::NodePortMatch,
};

/// The sentence, and the name of the service port; empty if there is none.
pub(super) fn describe(place: &Place<'_>, target: Target) -> (String, String) {
    let Target { address, port, protocol } = target;
    if let Some(found) = place.plan.lookup(Frontend::Address { ip: address, protocol, port }) {
        let what = match found.kind {
            Kind::ClusterIp => "the cluster IP",
            Kind::ExternalIp => "an external IP",
            Kind::LoadBalancerIp | Kind::NodePort => "a load-balancer IP",
        };
        let name = found.port.name().to_string();
        return (format!("{target} is {what} of {name}{}{}", facts(&found), rivals(place, &found)), name);
    }
    if let Some(found) = place.plan.lookup(Frontend::NodePort { protocol, port }) {
        let name = found.port.name().to_string();
        match no_answer(place, address) {
            None => {
                return (
                    format!("{target} is the node port of {name}{}{}", facts(&found), rivals(place, &found)),
                    name,
                );
            }
            Some(why) if place.is_local(address) => {
                return (format!("{name} has the node port {port}/{protocol}, but {why}"), String::new());
            }
            // Somebody else's address, whatever node ports there are.
            Some(_) => {}
        }
    }
    (elsewhere(place, target), String::new())
}

/// Why node ports do not answer at an address; none: they do.
pub(super) fn no_answer(place: &Place<'_>, address: IpAddr) -> Option<String> {
    let listed = &place.plan.node_facts().node_port_addresses;
    match place.base.node_ports {
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
        NodePortMatch::AllLocal if place.is_local(address) => None,
        NodePortMatch::AllLocal => Some(format!(
            "node ports are served at the addresses of the node, and {address} is not one of them"
        )),
    }
}

/// What belongs to no service port.
fn elsewhere(place: &Place<'_>, target: Target) -> String {
    let Target { address, port, protocol } = target;
    let of = |has: &dyn Fn(&PortView<'_>) -> bool| {
        // Services of one address are few; the first in the order of names speaks for them.
        place.plan.service_ports().filter(has).map(|port| port.service().to_string()).min()
    };
    if place.plan.is_cluster_ip(address) {
        let service = of(&|port| port.cluster_ip() == address).unwrap_or_default();
        return format!("{address} is the cluster IP of {service}, which has no port {port}/{protocol}");
    }
    if let Some(service) =
        of(&|port| port.external_ips().contains(&address) || port.load_balancer_ips().contains(&address))
    {
        return format!("{address} is an external address of {service}, which has no port {port}/{protocol}");
    }
    if let Some(net) = place.plan.node_facts().service_cidrs.iter().find(|net| net.contains(&address)) {
        return format!("{address} is in the ServiceCIDR {net}, but no Service uses it");
    }
    if place.is_local(address) {
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

/// What matters of the service port for this frontend.
fn facts(found: &Found<'_>) -> String {
    let mut text = String::new();
    let (local, which) = match found.kind {
        Kind::ClusterIp => (found.port.internal_local(), "internalTrafficPolicy"),
        _ => (found.port.external_local(), "externalTrafficPolicy"),
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

/// Who else claims it.
fn rivals(place: &Place<'_>, found: &Found<'_>) -> String {
    let conflict = place.plan.conflicts().into_iter().find(|conflict| conflict.frontend == found.frontend);
    let others: Vec<String> =
        conflict.map_or_else(Vec::new, |conflict| conflict.others.iter().map(ToString::to_string).collect());
    match others.as_slice() {
        [] => String::new(),
        [one] => format!("; {one} also claims it"),
        some => format!("; {} also claim it", some.join(", ")),
    }
}

/// Why a frontend leads nowhere; none: it leads to endpoints.
pub(super) fn why_refused(found: &Found<'_>) -> Option<&'static str> {
    match found.target {
        Leads::Number(_) => None,
        Leads::Reject => Some("no usable endpoint on any node"),
        Leads::Drop if found.kind == Kind::ClusterIp => {
            Some("no endpoint on this node, and internalTrafficPolicy is Local")
        }
        Leads::Drop => Some("it has endpoints, but none that this node can send to"),
    }
}
