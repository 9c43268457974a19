//! Explains what happens to a connection.
//!
//! Owns: [`explain`]. In: the table, the node's addresses, a [`Question`]. Out: a [`pb::Explanation`]. The decisions are
//! [`Rule::decide`]'s own.

use std::{collections::BTreeSet, net::IpAddr};

use keelson_proto::proxy as pb;
use keelson_proxy::{
    explain::{Question, Source, Target},
    model::{Conflict, Frontend, FrontendKind, Protocol},
};

use crate::{
    plan::{Decision, NodeFacts, Origin, Rule, SocketKey, is_served},
    print,
    table::{PlaceStatus, Table},
};

/// A kind of sender that is treated alike.
struct Sender {
    label: String,
    origin: Origin,
    /// `None`: any of its kind.
    address: Option<IpAddr>,
}

/// `keeps_source`: endpoints see the address of the client.
pub(crate) fn explain(
    table: &Table,
    question: &Question,
    local: &[IpAddr],
    keeps_source: bool,
) -> pb::Explanation {
    let target = question.target;
    let local: BTreeSet<IpAddr> = local.iter().copied().collect();
    let facts = table.facts(&local);
    let Some((rule, key)) = find(table, target, &local) else {
        let frontend = unclaimed(table, target);
        let ways = senders(&facts, question).into_iter().map(|sender| untouched(sender.label)).collect();
        return pb::Explanation { frontend, service_port: String::new(), ways };
    };
    let place = table.place(&key).map(|place| &place.status);
    let ways = senders(&facts, question)
        .into_iter()
        .flat_map(|sender| ways(&rule, &facts, sender, place, keeps_source))
        .collect();
    pb::Explanation {
        frontend: describe(table, target, &rule),
        service_port: rule.port.name.to_string(),
        ways,
    }
}

/// The rule at an address and port, and its place.
fn find(table: &Table, target: Target, local: &BTreeSet<IpAddr>) -> Option<(Rule, SocketKey)> {
    let Target { address: ip, port, protocol } = target;
    let node_ports = table.node_port_addresses(local);
    let frontends = [Frontend::Address { ip, protocol, port }, Frontend::NodePort { protocol, port }];
    let key = SocketKey { protocol, address: std::net::SocketAddr::new(ip, port) };
    frontends.into_iter().find_map(|frontend| {
        let rule = table.plan().rule(frontend)?;
        let is_here = matches!(frontend, Frontend::Address { .. }) || node_ports.contains(&ip);
        is_here.then_some((rule, key))
    })
}

fn describe(table: &Table, target: Target, rule: &Rule) -> String {
    let what = match rule.kind {
        FrontendKind::ClusterIp => "the cluster IP",
        FrontendKind::ExternalIp => "an external IP",
        FrontendKind::LoadBalancerIp => "a load-balancer IP",
        FrontendKind::NodePort => "the node port",
    };
    let mut text = format!("{target} is {what} of {}", rule.port.name);
    let (is_local, policy) = match rule.kind {
        FrontendKind::ClusterIp => (rule.port.internal_local, "internalTrafficPolicy"),
        _ => (rule.port.external_local, "externalTrafficPolicy"),
    };
    if is_local {
        text.push_str(&format!(", {policy} Local"));
    }
    let is_this = |conflict: &Conflict| conflict.frontend == rule.frontend;
    if let Some(conflict) = table.plan().conflicts().into_iter().find(is_this) {
        let others: Vec<String> = conflict.others.iter().map(ToString::to_string).collect();
        text.push_str(&format!("; also claimed by {}", others.join(", ")));
    }
    text
}

fn unclaimed(table: &Table, target: Target) -> String {
    let Target { address, port, protocol } = target;
    let has = |of: &dyn Fn(&Rule) -> bool| table.plan().rules().find(|rule| of(rule));
    let is_same = |rule: &Rule| matches!(rule.frontend, Frontend::Address { ip, .. } if ip == address);
    if let Some(rule) = has(&is_same) {
        let service = &rule.port.name.service;
        return format!("{address} is an address of {service}, which has no port {port}/{protocol}");
    }
    if let Some(rule) = table.plan().rule(Frontend::NodePort { protocol, port }) {
        let name = &rule.port.name;
        return format!(
            "{name} has the node port {port}/{protocol}, but node ports are not served at {address}"
        );
    }
    format!("{target} is not a frontend")
}

fn senders(facts: &NodeFacts, question: &Question) -> Vec<Sender> {
    let sender = |label: String, origin| Sender { label, origin, address: None };
    let pod = || match facts.pods {
        Some(net) => sender(format!("a pod ({net})"), Origin::Pod),
        None => sender("a pod (not distinguished from other sources)".into(), Origin::Outside),
    };
    let node = || Sender {
        address: facts.node_ips.first().copied(),
        ..sender("the node itself".into(), Origin::Host)
    };
    let outside = || sender("outside".into(), Origin::Outside);
    match question.from {
        Source::Any => vec![pod(), node(), outside()],
        Source::Pod => vec![pod()],
        Source::Node => vec![node()],
        Source::Outside => vec![outside()],
        Source::Address(address) => {
            let origin = facts.origin(address, question.target.address);
            let what = match origin {
                Origin::Pod => "a pod",
                Origin::Host => "the node itself",
                Origin::Outside => "outside",
            };
            vec![Sender { label: format!("{address}, {what}"), origin, address: Some(address) }]
        }
    }
}

/// One way, or two if source ranges may admit a sender or not.
fn ways(
    rule: &Rule,
    facts: &NodeFacts,
    sender: Sender,
    place: Option<&PlaceStatus>,
    keeps_source: bool,
) -> Vec<pb::Way> {
    let ranges: Vec<String> = rule.ranges().iter().map(ToString::to_string).collect();
    let ranges = ranges.join(", ");
    let Sender { label, origin, address } = sender;
    let admitted = match (ranges.is_empty(), address) {
        (true, _) => return vec![way(label, rule.decide_admitted(origin), rule, place, keeps_source)],
        (false, Some(address)) => vec![rule.admits(address, facts)],
        (false, None) => vec![true, false],
    };
    let of = |is_admitted| {
        let (how, decision) = match is_admitted {
            true => ("in", rule.decide_admitted(origin)),
            false => ("not in", Decision::Drop),
        };
        way(format!("{label}, {how} the source ranges ({ranges})"), decision, rule, place, keeps_source)
    };
    admitted.into_iter().map(of).collect()
}

fn way(
    from: String,
    decision: Decision<'_>,
    rule: &Rule,
    place: Option<&PlaceStatus>,
    keeps_source: bool,
) -> pb::Way {
    let protocol = rule.port.name.protocol;
    if !is_served(protocol) {
        return pb::Way {
            steps: vec![format!("{protocol} is not relayed in user space")],
            ..untouched(from)
        };
    }
    let mut steps = Vec::new();
    match place {
        Some(PlaceStatus::Failing(reason)) => {
            let steps = vec![format!("nothing listens at this place: {reason}")];
            return pb::Way { steps, ..untouched(from) };
        }
        Some(status) => steps.extend(print::status(status)),
        None => {}
    }
    let (verdict, endpoints) = match decision {
        Decision::Relay(endpoints) => {
            let choice = match rule.port.affinity_seconds {
                0 => "one endpoint at random".to_owned(),
                seconds => format!("the endpoint of the last {seconds} s, otherwise one at random"),
            };
            steps.push(format!("accepted and relayed to {choice}"));
            ("forwarded", endpoints.iter().map(ToString::to_string).collect())
        }
        Decision::Drop => {
            steps.push(match protocol {
                Protocol::Udp => "received and discarded".into(),
                _ => "accepted, held without data, then reset".into(),
            });
            ("dropped", Vec::new())
        }
        Decision::Reject => {
            steps.push(match (rule.rejects_all(), protocol) {
                (true, _) => "nothing listens, because the Service has no endpoint".into(),
                (false, Protocol::Udp) => "received and discarded".into(),
                (false, _) => "accepted and reset".into(),
            });
            ("rejected", Vec::new())
        }
    };
    let masqueraded = verdict == "forwarded" && !keeps_source;
    pb::Way { from, verdict: verdict.into(), masqueraded, endpoints, steps }
}

fn untouched(from: String) -> pb::Way {
    pb::Way { from, verdict: "untouched".into(), ..pb::Way::default() }
}
