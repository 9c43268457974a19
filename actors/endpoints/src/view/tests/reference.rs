//! A reference implementation of the rules, one after the other, without regard to cost.
//!
//! Sections 1 and 2 of the semantics as sets: for every port and family the endpoints by address and number, and the
//! members of each set. What kube-proxy leaves open is decided as in `Candidate::wins`.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use keelson_proto::kubernetes::Endpoint;

use super::{EndpointSlice, NodeView, Service, ServicePort};

pub(super) type Place = (IpAddr, i32);

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Sets {
    pub(super) cluster: BTreeSet<Place>,
    pub(super) local: BTreeSet<Place>,
    /// Ready or serving.
    pub(super) sent: BTreeSet<Place>,
    pub(super) has_any: bool,
}

#[derive(Debug, Clone)]
struct Copy {
    slice: String,
    ready: bool,
    serving: bool,
    terminating: bool,
    local: bool,
    zones: Vec<String>,
    nodes: Vec<String>,
}

impl Copy {
    fn st(&self) -> bool {
        self.serving && self.terminating
    }

    fn replaces(&self, other: &Self) -> bool {
        if self.terminating != other.terminating {
            return other.terminating;
        }
        if self.ready != other.ready {
            return self.ready;
        }
        if self.serving != other.serving {
            return self.serving;
        }
        self.slice > other.slice
    }
}

fn ip(text: &str) -> Option<IpAddr> {
    text.parse::<IpAddr>().ok()
}

/// Endpoints by service port name, protocol, address and number.
type Merged = BTreeMap<(String, String, IpAddr, i32), Copy>;

fn merged(slices: &[EndpointSlice], node: &NodeView, family: &str) -> Merged {
    let mut merged = Merged::new();
    for slice in slices {
        let metadata = slice.metadata.clone().unwrap();
        let service = metadata.labels.get("kubernetes.io/service-name");
        if (metadata.namespace.as_str(), service.map(String::as_str)) != ("ns", Some("web")) {
            continue;
        }
        if slice.address_type != family || metadata.labels.contains_key("service.kubernetes.io/headless") {
            continue;
        }
        for port in &slice.ports {
            let (Some(name), Some(number)) = (port.name.clone(), port.port) else { continue };
            if !(1..=65535).contains(&number) {
                continue;
            }
            let protocol = port.protocol.clone().unwrap_or_else(|| "TCP".to_owned());
            for endpoint in &slice.endpoints {
                let Some(ip) = endpoint.addresses.first().and_then(|text| ip(text)) else { continue };
                let copy = copy(&metadata.name, endpoint, node);
                let key = (name.clone(), protocol.clone(), ip, number);
                if merged.get(&key).is_none_or(|held| copy.replaces(held)) {
                    merged.insert(key, copy);
                }
            }
        }
    }
    merged
}

fn copy(slice: &str, endpoint: &Endpoint, node: &NodeView) -> Copy {
    let conditions = endpoint.conditions.unwrap_or_default();
    let hints = endpoint.hints.clone().unwrap_or_default();
    Copy {
        slice: slice.to_owned(),
        ready: conditions.ready != Some(false),
        serving: conditions.serving != Some(false),
        terminating: conditions.terminating == Some(true),
        local: endpoint.node_name.as_ref() == Some(&node.name),
        zones: hints.for_zones.into_iter().map(|zone| zone.name).collect(),
        nodes: hints.for_nodes.into_iter().map(|node| node.name).collect(),
    }
}

/// Whether a port has a node port, an external IP or a load balancer IP in a family.
fn ext(service: &Service, port: &ServicePort, six: bool) -> bool {
    let spec = service.spec.clone().unwrap();
    let ingress = service.status.clone().unwrap_or_default().load_balancer.unwrap_or_default().ingress;
    let vips =
        ingress.into_iter().filter(|it| it.ip_mode.as_deref().unwrap_or("VIP") == "VIP").map(|it| it.ip);
    port.node_port != 0
        || spec
            .external_ips
            .into_iter()
            .chain(vips)
            .filter_map(|text| ip(&text))
            .any(|ip| ip.is_ipv6() == six)
}

fn external_local(service: &Service) -> bool {
    let spec = service.spec.clone().unwrap();
    let outside = ["LoadBalancer", "NodePort"].contains(&spec.r#type.as_str())
        || (spec.r#type == "ClusterIP" && !spec.external_ips.is_empty());
    outside && spec.external_traffic_policy == "Local"
}

fn topology<'a>(ready: &[(&'a Place, &'a Copy)], node: &NodeView) -> Vec<&'a Place> {
    let zone = node.zone.clone().unwrap_or_default();
    let named = |of: fn(&Copy) -> &Vec<String>, name: &str| -> Option<Vec<&'a Place>> {
        if name.is_empty() || ready.iter().any(|(_, copy)| of(copy).is_empty()) {
            return None;
        }
        let kept = ready.iter().filter(|(_, copy)| of(copy).iter().any(|hint| hint == name));
        let kept: Vec<_> = kept.map(|(place, _)| *place).collect();
        (!kept.is_empty()).then_some(kept)
    };
    named(|copy| &copy.nodes, &node.name)
        .or_else(|| named(|copy| &copy.zones, &zone))
        .unwrap_or_else(|| ready.iter().map(|(place, _)| *place).collect())
}

pub(super) fn sets(
    service: &Service,
    port: &ServicePort,
    slices: &[EndpointSlice],
    node: &NodeView,
    six: bool,
) -> Sets {
    let spec = service.spec.clone().unwrap();
    let family = if six { "IPv6" } else { "IPv4" };
    let mut sets = Sets::default();
    if !spec.ip_families.iter().any(|it| it == family) {
        return sets;
    }
    let of_port: BTreeMap<Place, Copy> = merged(slices, node, family)
        .into_iter()
        .filter(|((name, protocol, ..), _)| (name, protocol) == (&port.name, &port.protocol))
        .map(|((_, _, ip, number), copy)| ((ip, number), copy))
        .collect();
    let pick =
        |is: &dyn Fn(&Copy) -> bool| -> Vec<_> { of_port.iter().filter(|(_, copy)| is(copy)).collect() };
    let places =
        |of: Vec<(&Place, &Copy)>| -> BTreeSet<Place> { of.into_iter().map(|(place, _)| *place).collect() };

    let internal_local = spec.internal_traffic_policy.as_deref() == Some("Local");
    let ext = ext(service, port, six);
    if !internal_local || ext {
        sets.cluster = topology(&pick(&|copy| copy.ready), node).into_iter().copied().collect();
        if sets.cluster.is_empty() {
            sets.cluster = places(pick(&Copy::st));
        }
    }
    if internal_local || (external_local(service) && ext) {
        sets.local = places(pick(&|copy| copy.local && copy.ready));
        if sets.local.is_empty() {
            sets.local = places(pick(&|copy| copy.local && copy.st()));
        }
    }
    sets.has_any = !pick(&|copy| copy.ready || copy.st()).is_empty();
    sets.sent = places(pick(&|copy| copy.ready || copy.serving));
    sets
}

/// Number of distinct ready addresses on the node, over all ports in slices.
pub(super) fn local_ready(service: &Service, slices: &[EndpointSlice], node: &NodeView, six: bool) -> usize {
    let family = if six { "IPv6" } else { "IPv4" };
    let served = service.spec.clone().unwrap().ip_families.iter().any(|it| it == family);
    if !served || !external_local(service) {
        return 0;
    }
    let merged = merged(slices, node, family);
    let ready = merged.iter().filter(|(_, copy)| copy.ready && copy.local);
    ready.map(|((_, _, ip, _), _)| *ip).collect::<BTreeSet<_>>().len()
}
