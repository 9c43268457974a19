//! Converts messages of the Endpoints API to service ports.
//!
//! Owns: [`service_ports`]. In: `localnetv1.ServiceEndpoints`, one message per Service. Out: [`ServicePort`]s of one
//! family.
//!
//! The agent has validated and normalized the messages. Values that it never sends (an invalid address or port) are
//! skipped here, and the rest of the Service works.

use std::net::IpAddr;

use ipnet::IpNet;
use keelson_client::ServiceName;
use keelson_proto::localnetv1::{self, IpSet, PortMapping, ServiceEndpoints};

use super::{Endpoint, Family, PortName, Protocol, ServicePort};

/// The ports of a Service in one family, in the order of the Service; empty if it has no cluster IP of the family.
#[must_use]
pub fn service_ports(service: &ServiceEndpoints, family: Family) -> Vec<ServicePort> {
    let Some(ips) = &service.i_ps else { return Vec::new() };
    let Some(&cluster_ip) = addresses(ips.cluster_i_ps.as_ref(), family).first() else { return Vec::new() };
    let load_balancer_ips = distinct(addresses(ips.load_balancer_i_ps.as_ref(), family), &[&[cluster_ip]]);
    // An address that is both is filtered by source ranges, as in kube-proxy.
    let external_ips =
        distinct(addresses(ips.external_i_ps.as_ref(), family), &[&[cluster_ip], &load_balancer_ips]);
    let source_ranges = source_ranges(service.source_ranges.as_ref(), family);
    let name = ServiceName::new(&service.namespace, &service.name);

    let mut ports: Vec<Option<ServicePort>> = (service.ports.iter())
        .map(|mapping| {
            let (protocol, port) = (protocol(mapping)?, port(mapping.port)?);
            let mut port = ServicePort {
                name: PortName { service: name.clone(), port: mapping.name.as_str().into(), protocol },
                port,
                cluster_ip,
                external_ips: external_ips.clone(),
                load_balancer_ips: load_balancer_ips.clone(),
                node_port: self::port(mapping.node_port).unwrap_or_default(),
                internal_local: service.internal_traffic_to_local,
                external_local: service.external_traffic_to_local,
                affinity_seconds: u32::try_from(service.client_ip_affinity_seconds).unwrap_or_default(),
                source_ranges: source_ranges.clone(),
                has_any: match family {
                    Family::V4 => mapping.has_any_v4,
                    Family::V6 => mapping.has_any_v6,
                },
                cluster: Vec::new(),
                local: Vec::new(),
                on_node: Vec::new(),
                serving: Vec::new(),
            };
            port.external_local &= port.is_external();
            Some(port)
        })
        .collect();
    for endpoint in &service.endpoints {
        put_endpoint(endpoint, family, &mut ports);
    }
    let mut ports: Vec<ServicePort> = ports.into_iter().flatten().collect();
    for port in &mut ports {
        for set in [&mut port.cluster, &mut port.local, &mut port.on_node, &mut port.serving] {
            set.sort_unstable();
            set.dedup();
        }
    }
    ports
}

/// Adds an endpoint to the sets of the ports that it serves.
fn put_endpoint(endpoint: &localnetv1::Endpoint, family: Family, ports: &mut [Option<ServicePort>]) {
    let conditions = endpoint.conditions.unwrap_or_default();
    for ip in addresses(endpoint.i_ps.as_ref(), family) {
        for served in &endpoint.ports {
            let place = usize::try_from(served.index).ok().and_then(|index| ports.get_mut(index));
            let (Some(Some(of)), Some(port)) = (place, port(served.port)) else { continue };
            let endpoint = Endpoint { ip, port };
            let (cluster, local) = (served.cluster && of.uses_cluster(), served.local && of.uses_local());
            if cluster {
                of.cluster.push(endpoint);
            }
            if local {
                of.local.push(endpoint);
            }
            if (cluster || local) && conditions.local {
                of.on_node.push(endpoint);
            }
            // A ready endpoint serves, regardless of its condition "serving": a flow to it is not stale.
            if (conditions.serving || conditions.ready) && of.name.protocol == Protocol::Udp {
                of.serving.push(endpoint);
            }
        }
    }
}

fn protocol(mapping: &PortMapping) -> Option<Protocol> {
    match mapping.protocol() {
        localnetv1::Protocol::Tcp => Some(Protocol::Tcp),
        localnetv1::Protocol::Udp => Some(Protocol::Udp),
        localnetv1::Protocol::Sctp => Some(Protocol::Sctp),
        localnetv1::Protocol::Unknown => None,
    }
}

fn port(number: i32) -> Option<u16> {
    u16::try_from(number).ok().filter(|port| *port != 0)
}

fn texts(set: Option<&IpSet>, family: Family) -> &[String] {
    set.map_or(&[], |set| match family {
        Family::V4 => &set.v4,
        Family::V6 => &set.v6,
    })
}

fn addresses(set: Option<&IpSet>, family: Family) -> Vec<IpAddr> {
    texts(set, family).iter().filter_map(|text| text.parse().ok()).filter(|ip| family.has(ip)).collect()
}

/// Without duplicates, and without those in one of `others`.
fn distinct(ips: Vec<IpAddr>, others: &[&[IpAddr]]) -> Vec<IpAddr> {
    let mut distinct = Vec::with_capacity(ips.len());
    for ip in ips {
        if !distinct.contains(&ip) && !others.iter().any(|other| other.contains(&ip)) {
            distinct.push(ip);
        }
    }
    distinct
}

/// Disjoint and ordered; empty if together they contain every address.
fn source_ranges(set: Option<&IpSet>, family: Family) -> Vec<IpNet> {
    let ranges: Vec<IpNet> = (texts(set, family).iter())
        .filter_map(|text| text.parse::<IpNet>().ok())
        .filter(|range| family.has(&range.addr()))
        .collect();
    let ranges = IpNet::aggregate(&ranges);
    if ranges.iter().any(|range| range.prefix_len() == 0) { Vec::new() } else { ranges }
}

#[cfg(test)]
mod tests;
