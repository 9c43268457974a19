//! Explains what happens to a connection.
//!
//! Owns: [`explain`]. In: the plan, the node's addresses, a [`Question`], and the explanation of the packet level. Out: a
//! [`pb::Explanation`]. Pure.
//!
//! A pod or the node asks the socket level first. What it translates never meets a rule for the address of the Service; for
//! the rest, and for sources outside, the explanation is that of the packet level.

use std::net::IpAddr;

use keelson_proto::proxy as pb;
use keelson_proxy::{
    explain::{
        Question, Source, Target,
        source::{Origin, SourceFacts},
    },
    model::{Endpoint, Frontend, Protocol, ServicePort},
    options::NodeConfig,
};

use crate::{
    layout::{MapName, SetKey, SetKind},
    plan::{Plan, Reason},
};

#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) plan: &'a Plan,
    /// `None`: the node is not known yet.
    pub(crate) node: Option<&'a NodeConfig>,
    pub(crate) local: &'a [IpAddr],
}

pub(crate) fn explain(
    context: &Context<'_>,
    question: &Question,
    packets: &dyn Fn(&Question) -> pb::Explanation,
) -> pb::Explanation {
    let mut explanation = packets(question);
    let Some((frontend, port, decided)) = context.find(question.target) else { return explanation };
    // One question for each kind of source, in the order of the packet level.
    let kinds = match question.from {
        Source::Any => vec![Source::Pod, Source::Node, Source::Outside],
        one => vec![one],
    };
    let ways = kinds.into_iter().flat_map(|from| {
        let of_packets = packets(&Question { from, ..*question }).ways;
        let is_here = context.is_on_node(&Question { from, ..*question });
        match (is_here, decided) {
            (true, Ok(set)) => {
                let from = of_packets.first().map_or_else(String::new, |way| way.from.clone());
                vec![context.translated(from, frontend, port, set, question.target)]
            }
            (true, Err(reason)) => of_packets.into_iter().map(|way| left(way, reason)).collect(),
            (false, _) => of_packets,
        }
    });
    explanation.ways = ways.collect();
    explanation
}

/// A way of the packet level that a socket of the node takes.
fn left(mut way: pb::Way, reason: Reason) -> pb::Way {
    way.steps.insert(0, format!("socket level: left to packets, because {}", reason.describe()));
    way
}

impl Context<'_> {
    pub(crate) fn find(&self, target: Target) -> Option<(Frontend, &ServicePort, Result<SetKey, Reason>)> {
        let family = target.family();
        target.frontends().into_iter().find_map(|frontend| {
            let (_, port, decided) = self.plan.lookup(family, frontend)?;
            let is_here = matches!(frontend, Frontend::Address { .. })
                || self.plan.serves_node_ports_at(family, target.address);
            is_here.then_some((frontend, port.as_ref(), decided))
        })
    }

    /// Whether a source is a socket of the node: a process, or a pod by its address. Where only an interface tells pods, an
    /// address may be either, and the packet level has both ways.
    fn is_on_node(&self, question: &Question) -> bool {
        let Source::Address(_) = question.from else { return question.from != Source::Outside };
        let facts = SourceFacts {
            detector: self.node.and_then(|node| node.detector.as_ref()),
            node_ips: self.node.map_or(&[], |node| &node.node_ips),
            local: self.local,
        };
        facts.sources(question).iter().all(|source| source.origin != Origin::Outside)
    }

    fn translated(
        &self,
        from: String,
        frontend: Frontend,
        port: &ServicePort,
        set: SetKey,
        target: Target,
    ) -> pb::Way {
        let kind = set.set_kind().unwrap_or(SetKind::Cluster);
        let placed = self.plan.placed(target.family(), &port.name);
        let endpoints: &[Endpoint] = placed.map_or(&[], |placed| placed.endpoints(kind));
        let range = placed.and_then(|placed| placed.range(kind));
        let six = if target.address.is_ipv4() { "4" } else { "6" };
        let programs = match target.protocol {
            Protocol::Udp => format!("keelson_connect{six} or keelson_sendmsg{six}"),
            _ => format!("keelson_connect{six}"),
        };
        let mut steps = vec![
            format!("socket level: program {programs}"),
            format!("map {}: {frontend} : set {set}", MapName::Frontends.as_str()),
        ];
        if let Some(range) = range {
            let map = MapName::Sets.as_str();
            steps.push(format!("map {map}: {set} : {} slots from {}", range.count, range.first));
        }
        steps.push(match port.affinity_seconds {
            0 => format!("map {}: one at random", MapName::Slots.as_str()),
            seconds => format!(
                "map {}: the endpoint of the last {seconds} s, otherwise one of map {} at random",
                MapName::Affinity.as_str(),
                MapName::Slots.as_str()
            ),
        });
        steps.push("the socket sends to the endpoint; packets are not translated".to_owned());
        pb::Way {
            from,
            verdict: "forwarded".into(),
            masqueraded: false,
            endpoints: endpoints.iter().map(ToString::to_string).collect(),
            steps,
        }
    }
}
