//! The decisions about a Service in words.
//!
//! Owns: the conversion of decisions into an `Explanation`. In: the same [`Evaluation`] that the view is made of, so
//! that the two cannot differ. Out: the message; the revision is not known here.

use std::{
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
};

use keelson_proto::endpoints as pb;

use super::{
    Evaluation,
    merge::{Candidate, SliceUse},
    parse::{Family, PerFamily},
    reasons,
    service::Port,
    topology::Decision,
};
use crate::NodeView;

/// IPv4 first.
fn texts<T: ToString>(of: &PerFamily<Vec<T>>) -> Vec<String> {
    Family::ALL.into_iter().flat_map(|family| &of[family]).map(T::to_string).collect()
}

pub(super) fn explanation(evaluation: &Evaluation<'_>, node: &NodeView) -> pb::Explanation {
    let facts = &evaluation.facts;
    let cluster = |family| facts.cluster[family].into_iter().collect();
    let served = facts.served.is_ok();
    let ports = facts.ports.iter().enumerate().zip(&evaluation.decisions);
    let (internal, external) = (reasons::internal_policy(facts), reasons::external_policy(facts));
    pb::Explanation {
        namespace: evaluation.namespace.to_owned(),
        name: evaluation.name.to_owned(),
        served,
        reason: facts.served.map_or_else(|reason| reason.to_string(), |()| String::new()),
        r#type: facts.kind.to_owned(),
        cluster_ips: texts(&PerFamily::<Vec<IpAddr>>::new(cluster(Family::V4), cluster(Family::V6))),
        external_ips: texts(&facts.external),
        load_balancer_ips: texts(&facts.load_balancer),
        source_ranges: texts(&facts.ranges),
        internal_traffic_policy: if served { internal.to_owned() } else { String::new() },
        external_traffic_policy: if served { external.to_owned() } else { String::new() },
        affinity: if facts.affinity > 0 { format!("ClientIP, {} s", facts.affinity) } else { String::new() },
        health_check_node_port: facts.health_check_node_port.into(),
        ports: if served {
            ports
                .map(|((place, port), decision)| {
                    PortExplainer { evaluation, node, place, port }.port(decision)
                })
                .collect()
        } else {
            Vec::new()
        },
        slices: slices(evaluation),
        rev: 0,
        ignored: facts.ignored.iter().map(ToString::to_string).collect(),
    }
}

struct PortExplainer<'e, 'a> {
    evaluation: &'e Evaluation<'a>,
    node: &'e NodeView,
    place: usize,
    port: &'e Port<'a>,
}

/// The outcome for traffic, without its origin and destination.
struct TrafficOutcome {
    verdict: &'static str,
    endpoints: Vec<String>,
    reason: String,
}

impl<'e, 'a> PortExplainer<'e, 'a> {
    fn port(&self, decision: &PerFamily<Decision>) -> pb::PortExplanation {
        let is_served = |family: &Family| self.evaluation.facts.cluster[*family].is_some();
        pb::PortExplanation {
            name: self.port.name.to_owned(),
            protocol: self.port.protocol.as_str_name().to_owned(),
            port: self.port.port.into(),
            node_port: self.port.node_port.into(),
            families: Family::ALL
                .into_iter()
                .filter(is_served)
                .map(|family| self.family(family, &decision[family]))
                .collect(),
        }
    }

    fn family(&self, family: Family, decision: &Decision) -> pb::FamilyExplanation {
        let (topology, topology_reason) = reasons::topology(decision, self.node);
        pb::FamilyExplanation {
            family: family.as_str().to_owned(),
            topology: topology.to_owned(),
            topology_reason,
            traffic: self.traffic(family, decision),
            endpoints: self.endpoints(family, decision),
        }
    }

    fn candidates(&self, family: Family) -> impl Iterator<Item = &'e Candidate<'a>> {
        let place = self.place;
        let of_port = move |it: &&Candidate<'_>| it.port as usize == place && Family::of(it.ip) == family;
        self.evaluation.candidates.iter().filter(of_port)
    }

    fn endpoints(&self, family: Family, decision: &Decision) -> Vec<pb::EndpointExplanation> {
        let mut holder = None;
        self.candidates(family)
            .map(|it| {
                let reason = match holder.filter(|_| it.superseded) {
                    Some(holder) => reasons::superseded(it, holder, self.slice(holder)),
                    None => reasons::endpoint(it, decision, self.node),
                };
                if !it.superseded {
                    holder = Some(it);
                }
                self.endpoint(it, reason)
            })
            .collect()
    }

    fn slice(&self, it: &Candidate<'_>) -> &'e str {
        let slice = self.evaluation.slices.get(it.slice as usize).map(|it| it.slice);
        slice.and_then(|slice| slice.metadata.as_ref()).map_or("", |metadata| &metadata.name)
    }

    fn endpoint(&self, it: &Candidate<'_>, reason: String) -> pb::EndpointExplanation {
        let pod = it.source.target_ref.as_ref().map(|target| match target.kind.as_str() {
            "Pod" | "" => target.name.clone(),
            kind => format!("{kind}/{}", target.name),
        });
        pb::EndpointExplanation {
            address: it.ip.to_string(),
            port: it.number.into(),
            pod: pod.unwrap_or_default(),
            node: it.source.node_name.clone().unwrap_or_default(),
            zone: it.source.zone.clone().unwrap_or_default(),
            slice: self.slice(it).to_owned(),
            ready: it.ready,
            serving: it.serving,
            terminating: it.terminating,
            local: it.local,
            cluster_set: it.cluster_place.is_in(),
            local_set: it.local_place.is_in(),
            reason,
        }
    }

    /// Every kind of traffic, in the order of the table in section 2: the cluster IP, then the frontends reached from
    /// outside.
    fn traffic(&self, family: Family, decision: &Decision) -> Vec<pb::TrafficExplanation> {
        let facts = &self.evaluation.facts;
        let mut rows = Vec::new();
        let at = |ip: IpAddr| SocketAddr::new(ip, self.port.port).to_string();
        if let Some(ip) = facts.cluster[family] {
            rows.push(self.row(
                "anyone",
                at(ip),
                "internalTrafficPolicy",
                facts.internal_local,
                family,
                decision,
            ));
        }
        let external = facts.external[family].iter().map(|ip| (at(*ip), false));
        let load_balancer = facts.load_balancer[family].iter().map(|ip| (at(*ip), true));
        let node_port =
            (self.port.node_port != 0).then(|| (format!("node port {}", self.port.node_port), false));
        for (to, filtered) in external.chain(load_balancer).chain(node_port) {
            let begin = rows.len();
            let policy = "externalTrafficPolicy";
            if facts.external_local {
                rows.push(self.row("outside", to.clone(), policy, true, family, decision));
                rows.push(self.row("pods and the node", to, policy, false, family, decision));
            } else {
                rows.push(self.row("anyone", to, policy, false, family, decision));
            }
            let ranges = &facts.ranges[family];
            if filtered && !ranges.is_empty() {
                let ranges = ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                for row in rows.iter_mut().skip(begin) {
                    let _ = write!(
                        row.reason,
                        "; only sources in {ranges} are allowed, all others are dropped, including pods"
                    );
                }
            }
        }
        rows
    }

    fn row(
        &self,
        from: &str,
        to: String,
        policy: &str,
        local: bool,
        family: Family,
        decision: &Decision,
    ) -> pb::TrafficExplanation {
        let fate = if local {
            self.local_outcome(policy, family, decision)
        } else {
            self.cluster_outcome(family, decision)
        };
        pb::TrafficExplanation {
            from: from.to_owned(),
            to,
            verdict: fate.verdict.to_owned(),
            endpoints: fate.endpoints,
            reason: fate.reason,
        }
    }

    fn members(&self, family: Family, is_member: impl Fn(&Candidate<'_>) -> bool) -> Vec<String> {
        let members = self.candidates(family).filter(|it| is_member(it));
        members.map(|it| SocketAddr::new(it.ip, it.number).to_string()).collect()
    }

    fn cluster_outcome(&self, family: Family, decision: &Decision) -> TrafficOutcome {
        let endpoints = self.members(family, |it| it.cluster_place.is_in());
        let tally = &decision.tally;
        let (verdict, reason) = match (endpoints.len(), tally.ready) {
            (0, _) => ("rejected", reasons::NO_USABLE_ENDPOINT.to_owned()),
            (_, 0) => {
                ("forwarded", "no endpoint is ready: to terminating endpoints that still serve".to_owned())
            }
            (chosen, ready) if chosen == ready => ("forwarded", "to every ready endpoint".to_owned()),
            (chosen, ready) => {
                ("forwarded", format!("to {chosen} of {ready} ready endpoints, selected by hints"))
            }
        };
        TrafficOutcome { verdict, endpoints, reason }
    }

    fn local_outcome(&self, policy: &str, family: Family, decision: &Decision) -> TrafficOutcome {
        let endpoints = self.members(family, |it| it.local_place.is_in());
        let tally = &decision.tally;
        let (verdict, reason) = match (endpoints.len(), tally.local_ready) {
            (0, _) if decision.has_any() => {
                ("dropped", format!("{policy} is Local, and this node has no endpoint for it"))
            }
            (0, _) => ("rejected", reasons::NO_USABLE_ENDPOINT.to_owned()),
            (_, 0) => {
                let reason = format!(
                    "{policy} is Local, and no endpoint on this node is ready: to local terminating \
                     endpoints that still serve"
                );
                ("forwarded", reason)
            }
            _ => ("forwarded", format!("{policy} is Local: to every ready endpoint on this node")),
        };
        TrafficOutcome { verdict, endpoints, reason }
    }
}

fn slices(evaluation: &Evaluation<'_>) -> Vec<pb::SliceExplanation> {
    let mut holding = vec![0_usize; evaluation.slices.len()];
    let ports = evaluation.facts.ports.len();
    for it in evaluation.candidates.iter().filter(|it| !it.superseded && (it.port as usize) < ports) {
        if let Some(holding) = holding.get_mut(it.slice as usize) {
            *holding += 1;
        }
    }
    evaluation.slices.iter().zip(holding).map(|(it, holding)| slice(it, holding)).collect()
}

/// `holding`: number of its ports' endpoints that are selected.
fn slice(it: &SliceUse<'_>, holding: usize) -> pb::SliceExplanation {
    let reason = match it.used {
        Err(reason) => reason.to_string(),
        Ok(_) if !it.faults.is_empty() => reasons::faults(&it.faults),
        Ok(_) if holding > 0 => String::new(),
        Ok(_) if it.slice.endpoints.is_empty() => "it has no endpoints".to_owned(),
        Ok(_) if it.slice.ports.is_empty() => "it has no ports".to_owned(),
        Ok(_) => "other slices have copies of all its endpoints, which are used instead".to_owned(),
    };
    pb::SliceExplanation {
        name: it.slice.metadata.as_ref().map_or_else(String::new, |metadata| metadata.name.clone()),
        address_type: it.slice.address_type.clone(),
        endpoints: u32::try_from(it.slice.endpoints.len()).unwrap_or(u32::MAX),
        used: it.used.is_ok() && holding > 0,
        reason,
    }
}
