//! The parts of the inputs that are kept, and the node.
//!
//! Owns: which fields of Services and slices are read, and the node in the form of the Endpoints API. In: objects of
//! sources. Out: the same objects without all other fields, so that these are neither kept nor compared.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use keelson_proto::{
    kubernetes::{EndpointSlice, ObjectMeta, Service},
    localnetv1::NodeInfo,
};

use super::{
    build,
    merge::{HEADLESS, SERVICE_NAME},
    parse::{self, Family, PerFamily},
    service::PROXY_NAME,
};
use crate::{NodeView, ServiceCidr};

/// The time of the change that led to a slice, in RFC 3339.
const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// Drops labels and annotations that are never read, so that a source keeps less memory.
pub fn reduce(metadata: &mut Option<ObjectMeta>) {
    // New maps, because a cleared one keeps its memory.
    fn retain_names(all: &mut BTreeMap<String, String>, read: &[&str]) {
        *all = std::mem::take(all).into_iter().filter(|(name, _)| read.contains(&name.as_str())).collect();
    }
    if let Some(metadata) = metadata {
        retain_names(&mut metadata.labels, &[SERVICE_NAME, HEADLESS, PROXY_NAME]);
        retain_names(&mut metadata.annotations, &[TRIGGER_TIME]);
    }
}

fn trim(metadata: &mut Option<ObjectMeta>, labels: &[&str]) {
    if let Some(metadata) = metadata {
        metadata.labels.retain(|label, _| labels.contains(&label.as_str()));
        metadata.annotations.clear();
        metadata.resource_version.clear();
    }
}

#[must_use]
pub fn trim_service(mut service: Service) -> Service {
    trim(&mut service.metadata, &[PROXY_NAME]);
    service
}

#[must_use]
pub fn trim_slice(mut slice: EndpointSlice) -> EndpointSlice {
    trim(&mut slice.metadata, &[SERVICE_NAME, HEADLESS]);
    for endpoint in &mut slice.endpoints {
        endpoint.addresses.truncate(1);
    }
    slice
}

/// When the change that led to this slice was made, in Unix milliseconds. Call it before [`trim_slice`], which drops
/// the annotation `endpoints.kubernetes.io/last-change-trigger-time`.
#[must_use]
pub fn triggered_unix_ms(slice: &EndpointSlice) -> Option<i64> {
    let at: jiff::Timestamp = slice.metadata.as_ref()?.annotations.get(TRIGGER_TIME)?.parse().ok()?;
    Some(at.as_millisecond())
}

/// Inverts [`node_info`], except for the order of addresses of different families.
pub(crate) fn node_view(info: &NodeInfo) -> NodeView {
    let ips = info.i_ps.iter().flat_map(|ips| ips.v4.iter().chain(&ips.v6));
    NodeView {
        name: info.name.clone(),
        exists: info.exists,
        zone: Some(info.zone.clone()).filter(|zone| !zone.is_empty()),
        ips: ips.filter_map(|ip| ip.parse().ok()).collect(),
        pod_cidrs: info.pod_cid_rs.clone(),
        eligible: info.eligible,
    }
}

pub fn node_info<'a>(node: &NodeView, cidrs: impl IntoIterator<Item = &'a ServiceCidr>) -> NodeInfo {
    let mut ips: PerFamily<Vec<IpAddr>> = PerFamily::default();
    for ip in node.ips.iter().map(IpAddr::to_canonical) {
        let of_family = &mut ips[Family::of(ip)];
        if !of_family.contains(&ip) {
            of_family.push(ip);
        }
    }
    let specs = cidrs.into_iter().filter_map(|cidr| cidr.spec.as_ref());
    let mut service_cidrs: Vec<IpNet> =
        specs.flat_map(|spec| &spec.cidrs).filter_map(|text| parse::cidr(text)).collect();
    service_cidrs.sort_unstable();
    service_cidrs.dedup();
    NodeInfo {
        name: node.name.clone(),
        exists: node.exists,
        zone: node.zone.clone().unwrap_or_default(),
        i_ps: Some(build::ip_set(&ips)),
        pod_cid_rs: node
            .pod_cidrs
            .iter()
            .filter_map(|text| parse::cidr(text))
            .map(|cidr| cidr.to_string())
            .collect(),
        eligible: node.eligible,
        service_cid_rs: service_cidrs.iter().map(IpNet::to_string).collect(),
        service_proxy_names: Vec::new(),
    }
}
