//! The Service in the form of the Endpoints API.
//!
//! Owns: the conversion of decisions into `ServiceEndpoints`. In: an [`Evaluation`]. Out: the message; equal
//! decisions give equal bytes.
//!
//! Every message field is present, even if empty, so that clients with generated code need no checks.

use std::{collections::BTreeMap, net::IpAddr};

use keelson_proto::localnetv1::{
    Endpoint, EndpointConditions, EndpointPort, IpSet, PortMapping, ServiceEndpoints, ServiceIPs,
};

use super::{
    Evaluation,
    merge::{self, Candidate},
    parse::{Family, PerFamily},
};

pub(super) fn ip_set<T: ToString>(of: &PerFamily<Vec<T>>) -> IpSet {
    let texts = |family| of[family].iter().map(T::to_string).collect();
    IpSet { v4: texts(Family::V4), v6: texts(Family::V6) }
}

/// `None` if the Service is not served.
pub(super) fn service_endpoints(evaluation: &Evaluation<'_>) -> Option<ServiceEndpoints> {
    let facts = &evaluation.facts;
    facts.served.ok()?;
    let cluster = |family| facts.cluster[family].into_iter().collect();
    // Counted only if a health check can request it, so that otherwise it makes no revision.
    let local_ready =
        if facts.external_local { merge::local_ready(&evaluation.candidates) } else { PerFamily::default() };
    Some(ServiceEndpoints {
        namespace: evaluation.namespace.to_owned(),
        name: evaluation.name.to_owned(),
        r#type: facts.kind.to_owned(),
        i_ps: Some(ServiceIPs {
            cluster_ip: facts.primary.map_or_else(String::new, |ip| ip.to_string()),
            external_i_ps: Some(ip_set(&facts.external)),
            cluster_i_ps: Some(ip_set(&PerFamily::<Vec<IpAddr>>::new(
                cluster(Family::V4),
                cluster(Family::V6),
            ))),
            load_balancer_i_ps: Some(ip_set(&facts.load_balancer)),
        }),
        map_all: false,
        ports: ports(evaluation),
        endpoints: endpoints(evaluation),
        external_traffic_to_local: facts.external_local,
        internal_traffic_to_local: facts.internal_local,
        client_ip_affinity_seconds: facts.affinity,
        source_ranges: Some(ip_set(&facts.ranges)),
        health_check_node_port: facts.health_check_node_port.into(),
        local_ready_v4: local_ready[Family::V4],
        local_ready_v6: local_ready[Family::V6],
        service_proxy_name: facts.proxy_name.to_owned(),
    })
}

/// Endpoints that are published: selected among copies, ready or serving, and for a port of the Service.
fn sent<'e, 'a>(evaluation: &'e Evaluation<'a>) -> impl Iterator<Item = &'e Candidate<'a>> {
    let ports = evaluation.facts.ports.len();
    let is_sent =
        move |it: &&Candidate<'_>| !it.superseded && (it.ready || it.serving) && (it.port as usize) < ports;
    evaluation.candidates.iter().filter(is_sent)
}

fn ports(evaluation: &Evaluation<'_>) -> Vec<PortMapping> {
    let mut numbers: BTreeMap<(u32, u16), usize> = BTreeMap::new();
    for it in sent(evaluation) {
        *numbers.entry((it.port, it.number)).or_default() += 1;
    }
    let mut most: Vec<(usize, u16)> = vec![(0, 0); evaluation.facts.ports.len()];
    // In ascending order of numbers: among equally frequent ones the lowest is kept.
    for ((port, number), count) in numbers {
        if let Some(most) = most.get_mut(port as usize).filter(|most| most.0 < count) {
            *most = (count, number);
        }
    }
    let decided = evaluation.facts.ports.iter().zip(&evaluation.decisions).zip(most);
    decided
        .map(|((port, decision), (_, target))| PortMapping {
            name: port.name.to_owned(),
            protocol: port.protocol.into(),
            port: port.port.into(),
            node_port: port.node_port.into(),
            target_port: target.into(),
            has_any_v4: decision[Family::V4].has_any(),
            has_any_v6: decision[Family::V6].has_any(),
        })
        .collect()
}

/// Ports of an address share a message if everything else is equal and each port occurs once.
fn endpoints(evaluation: &Evaluation<'_>) -> Vec<Endpoint> {
    let mut endpoints: Vec<Endpoint> = Vec::new();
    let (mut last, mut first_of_address) = (None, 0);
    for it in sent(evaluation) {
        if last.replace(it.ip) != Some(it.ip) {
            first_of_address = endpoints.len();
        }
        let of_address = endpoints.get_mut(first_of_address..).unwrap_or_default();
        match of_address.iter_mut().find(|endpoint| shares(endpoint, it)) {
            Some(endpoint) => add(endpoint, it),
            None => endpoints.push(endpoint(it)),
        }
    }
    endpoints
}

fn hostname<'a>(it: &Candidate<'a>) -> &'a str {
    it.source.hostname.as_deref().unwrap_or_default()
}

fn conditions(it: &Candidate<'_>, selected: bool) -> EndpointConditions {
    EndpointConditions {
        ready: it.ready,
        selected,
        local: it.local,
        serving: it.serving,
        terminating: it.terminating,
    }
}

fn shares(endpoint: &Endpoint, it: &Candidate<'_>) -> bool {
    let selected = endpoint.conditions.is_some_and(|conditions| conditions.selected);
    endpoint.conditions == Some(conditions(it, selected))
        && endpoint.hostname == hostname(it)
        && endpoint.ports.last().is_none_or(|port| port.index < it.port)
}

fn port(it: &Candidate<'_>) -> EndpointPort {
    EndpointPort {
        index: it.port,
        port: it.number.into(),
        cluster: it.cluster_place.is_in(),
        local: it.local_place.is_in(),
    }
}

fn add(endpoint: &mut Endpoint, it: &Candidate<'_>) {
    let port = port(it);
    if let Some(conditions) = &mut endpoint.conditions {
        conditions.selected |= port.cluster || port.local;
    }
    endpoint.ports.push(port);
}

fn endpoint(it: &Candidate<'_>) -> Endpoint {
    let text = vec![it.ip.to_string()];
    let (v4, v6) = if it.ip.is_ipv4() { (text, Vec::new()) } else { (Vec::new(), text) };
    let port = port(it);
    Endpoint {
        hostname: hostname(it).to_owned(),
        conditions: Some(conditions(it, port.cluster || port.local)),
        i_ps: Some(IpSet { v4, v6 }),
        ports: vec![port],
    }
}
