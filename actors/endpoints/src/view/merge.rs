//! The endpoints of a Service, from all its slices.
//!
//! Owns: which slices count, which endpoints each port of the Service gets from them, and which copy of an endpoint
//! is selected. In: slices in any order. Out: [`Merged`], ordered by address, port and number.
//!
//! As in kube-proxy: `pkg/proxy/endpointslicecache.go`. There the order of slices is undefined, and with it which of
//! two copies is selected if both or neither are terminating; here [`Candidate::preference`] decides.

use std::{cmp::Ordering, net::IpAddr};

use keelson_proto::kubernetes::{Endpoint, EndpointPort, EndpointSlice};

use super::{
    parse::{self, Family, PerFamily},
    service::{self, Facts, Port},
};
use crate::{NodeView, ServiceName};

pub(super) const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// On slices of headless Services, with any value.
pub(super) const HEADLESS: &str = "service.kubernetes.io/headless";

/// An endpoint in one slice, for one port of the Service.
#[derive(Debug, Clone)]
pub(super) struct Candidate<'a> {
    pub(super) ip: IpAddr,
    /// Index in [`Facts::ports`]; beyond its end: a port that the Service does not have.
    pub(super) port: u32,
    pub(super) number: u16,
    pub(super) slice: u32,
    pub(super) source: &'a Endpoint,
    pub(super) ready: bool,
    pub(super) serving: bool,
    pub(super) terminating: bool,
    pub(super) local: bool,
    pub(super) hints: Hints,
    pub(super) superseded: bool,
    /// Its place in the cluster set, for traffic to any node, and in the local set.
    pub(super) cluster_place: Place,
    pub(super) local_place: Place,
}

/// Whether an endpoint is in one of the two sets, and by which rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Out: no traffic of this port uses the set.
    Unused,
    /// In: ready.
    Ready,
    /// In: ready, with a hint for this node.
    HintedNode,
    /// In: ready, with a hint for this node's zone.
    HintedZone,
    /// In: terminating and serving, while no endpoint for the set is ready.
    Draining,
    /// Out: ready, but with hints for other nodes.
    OtherNode,
    /// Out: ready, but with hints for other zones.
    OtherZone,
    /// Out: on another node.
    Remote,
    /// Out: terminating, while another endpoint is ready.
    NotNeeded,
    /// Out: neither ready nor both terminating and serving.
    NotEligible,
    /// Out: another copy is selected.
    Superseded,
}

impl Place {
    pub(super) fn is_in(self) -> bool {
        matches!(self, Self::Ready | Self::HintedNode | Self::HintedZone | Self::Draining)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Hints {
    pub(super) has_nodes: bool,
    pub(super) names_node: bool,
    pub(super) has_zones: bool,
    pub(super) names_zone: bool,
}

impl Hints {
    fn of(endpoint: &Endpoint, node: &NodeView) -> Self {
        let Some(hints) = &endpoint.hints else { return Self::default() };
        // No hint names a node without a name or zone.
        let zone = node.zone.as_deref().filter(|zone| !zone.is_empty());
        let name = Some(node.name.as_str()).filter(|name| !name.is_empty());
        Self {
            has_nodes: !hints.for_nodes.is_empty(),
            names_node: hints.for_nodes.iter().any(|hint| Some(hint.name.as_str()) == name),
            has_zones: !hints.for_zones.is_empty(),
            names_zone: hints.for_zones.iter().any(|hint| Some(hint.name.as_str()) == zone),
        }
    }
}

/// An endpoint without its address and ports.
#[derive(Clone, Copy)]
struct State {
    ready: bool,
    serving: bool,
    terminating: bool,
    local: bool,
    hints: Hints,
}

impl State {
    fn of(endpoint: &Endpoint, node: &NodeView) -> Self {
        let conditions = endpoint.conditions.unwrap_or_default();
        let on = endpoint.node_name.as_deref().filter(|name| !name.is_empty());
        Self {
            ready: conditions.ready.unwrap_or(true),
            serving: conditions.serving.unwrap_or(true),
            terminating: conditions.terminating.unwrap_or(false),
            local: on == Some(node.name.as_str()),
            hints: Hints::of(endpoint, node),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct SliceUse<'a> {
    pub(super) slice: &'a EndpointSlice,
    pub(super) used: Result<Family, Unused<'a>>,
    pub(super) faults: Vec<Fault<'a>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unused<'a> {
    NoService,
    OtherService(&'a str),
    Headless,
    /// Not an address type of IP addresses.
    AddressType(&'a str),
    /// The Service has no cluster IP of this family.
    NoClusterIp(Family),
    ServiceUnserved,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault<'a> {
    PortWithoutName(Option<i32>),
    PortNumber(&'a str, Option<i32>),
    /// Name and protocol: the Service has no such port.
    PortUnmatched(&'a str, &'a str),
    NoAddress,
    Address(&'a str),
    AddressOfOtherFamily(IpAddr),
}

#[derive(Debug, Clone)]
pub(super) struct Merged<'a> {
    /// Ordered by name.
    pub(super) slices: Vec<SliceUse<'a>>,
    /// Ordered by address, port and number; the selected one of several copies comes first.
    pub(super) candidates: Vec<Candidate<'a>>,
}

fn name(slice: &EndpointSlice) -> &str {
    slice.metadata.as_ref().map_or("", |metadata| &metadata.name)
}

/// Namespace and name of the Service that a slice names.
pub(super) fn service_of(slice: &EndpointSlice) -> Option<(&str, &str)> {
    let metadata = slice.metadata.as_ref()?;
    let name = metadata.labels.get(SERVICE_NAME).filter(|name| !name.is_empty())?;
    Some((&metadata.namespace, name))
}

/// The Service of a slice; `None`: it names none. Also set for slices that are not used, such as those of headless
/// Services.
#[must_use]
pub fn owner(slice: &EndpointSlice) -> Option<ServiceName> {
    service_of(slice).map(|(namespace, name)| ServiceName::new(namespace, name))
}

/// Merges the slices that count for the Service of this name.
pub(super) fn merge<'a>(
    (namespace, service): (&str, &str),
    facts: &Facts<'_>,
    slices: &'a [EndpointSlice],
    node: &NodeView,
) -> Merged<'a> {
    let mut uses: Vec<SliceUse<'a>> = slices
        .iter()
        .map(|slice| SliceUse { slice, used: used((namespace, service), facts, slice), faults: Vec::new() })
        .collect();
    // The keys after the name only make the order of texts deterministic.
    uses.sort_by(|a, b| {
        let order =
            |it: &SliceUse<'a>| (name(it.slice), it.slice.address_type.as_str(), it.slice.endpoints.len());
        order(a).cmp(&order(b))
    });
    let most = uses.iter().map(|it| it.slice.endpoints.len()).sum();
    let mut merging = Merging { facts, node, candidates: Vec::with_capacity(most), others: Vec::new() };
    for (place, it) in uses.iter_mut().enumerate() {
        if let Ok(family) = it.used {
            merging.take(it.slice, u32::try_from(place).unwrap_or(u32::MAX), family, &mut it.faults);
        }
    }
    let mut candidates = merging.candidates;
    let name_of = |place: u32| uses.get(place as usize).map_or("", |it| name(it.slice));
    candidates.sort_unstable_by(|a, b| a.key().cmp(&b.key()).then_with(|| a.preference(b, name_of)));
    let mut held = None;
    for candidate in &mut candidates {
        candidate.superseded = held == Some(candidate.key());
        held = Some(candidate.key());
    }
    Merged { slices: uses, candidates }
}

fn used<'a>(
    service: (&str, &str),
    facts: &Facts<'_>,
    slice: &'a EndpointSlice,
) -> Result<Family, Unused<'a>> {
    match service_of(slice) {
        None => return Err(Unused::NoService),
        Some(owner) if owner != service => return Err(Unused::OtherService(owner.1)),
        Some(_) => {}
    }
    if slice.metadata.as_ref().is_some_and(|metadata| metadata.labels.contains_key(HEADLESS)) {
        return Err(Unused::Headless);
    }
    let family = Family::named(&slice.address_type).ok_or(Unused::AddressType(&slice.address_type))?;
    if facts.served.is_err() {
        return Err(Unused::ServiceUnserved);
    }
    facts.cluster[family].map(|_| family).ok_or(Unused::NoClusterIp(family))
}

struct Merging<'a, 'f> {
    facts: &'f Facts<'f>,
    node: &'f NodeView,
    candidates: Vec<Candidate<'a>>,
    /// Name and protocol of ports in slices that the Service does not have.
    others: Vec<(&'a str, &'a str)>,
}

impl<'a> Merging<'a, '_> {
    fn take(&mut self, slice: &'a EndpointSlice, place: u32, family: Family, faults: &mut Vec<Fault<'a>>) {
        let mut ports: Vec<(u32, u16)> = Vec::with_capacity(slice.ports.len());
        for port in &slice.ports {
            match self.port(port, faults) {
                // A repeated port would make every endpoint a copy of itself.
                Some(port) if !ports.contains(&port) => ports.push(port),
                _ => {}
            }
        }
        for endpoint in &slice.endpoints {
            let Some(ip) = address(endpoint, family, faults) else { continue };
            let state = State::of(endpoint, self.node);
            self.candidates.extend(ports.iter().map(|(port, number)| Candidate {
                ip,
                port: *port,
                number: *number,
                slice: place,
                source: endpoint,
                ready: state.ready,
                serving: state.serving,
                terminating: state.terminating,
                local: state.local,
                hints: state.hints,
                superseded: false,
                cluster_place: Place::Unused,
                local_place: Place::Unused,
            }));
        }
    }

    /// The port of the Service that a slice's port belongs to, and the number at which endpoints listen.
    fn port(&mut self, port: &'a EndpointPort, faults: &mut Vec<Fault<'a>>) -> Option<(u32, u16)> {
        let Some(name) = port.name.as_deref() else {
            faults.push(Fault::PortWithoutName(port.port));
            return None;
        };
        let Some(number) = port.port.and_then(service::port_number) else {
            faults.push(Fault::PortNumber(name, port.port));
            return None;
        };
        let protocol = port.protocol.as_deref().filter(|protocol| !protocol.is_empty()).unwrap_or("TCP");
        let matches = |it: &Port<'_>| it.name == name && service::protocol(protocol) == Some(it.protocol);
        let place = self.facts.ports.iter().position(matches).or_else(|| {
            faults.push(Fault::PortUnmatched(name, protocol));
            self.other((name, protocol))
        })?;
        Some((u32::try_from(place).ok()?, number))
    }

    /// The health check counts endpoints of every port, including those that the Service does not have.
    fn other(&mut self, port: (&'a str, &'a str)) -> Option<usize> {
        if !self.facts.external_local {
            return None;
        }
        let place = self.others.iter().position(|other| *other == port).unwrap_or_else(|| {
            self.others.push(port);
            self.others.len() - 1
        });
        Some(self.facts.ports.len() + place)
    }
}

fn address<'a>(endpoint: &'a Endpoint, family: Family, faults: &mut Vec<Fault<'a>>) -> Option<IpAddr> {
    let fault = match endpoint.addresses.first() {
        None => Fault::NoAddress,
        Some(text) => match parse::address(text) {
            Some(ip) if Family::of(ip) == family => return Some(ip),
            Some(ip) => Fault::AddressOfOtherFamily(ip),
            None => Fault::Address(text),
        },
    };
    faults.push(fault);
    None
}

impl<'a> Candidate<'a> {
    /// Equal for copies of an endpoint.
    fn key(&self) -> (IpAddr, u32, u16) {
        (self.ip, self.port, self.number)
    }

    /// Terminating, but usable if no endpoint is ready. Ready endpoints are never draining.
    pub(super) fn draining(&self) -> bool {
        !self.ready && self.serving && self.terminating
    }

    /// Selects the lesser of two copies: one that is not terminating (kube-proxy's rule), then one that is ready,
    /// then one that is serving, then that of the slice with the later name. Within a slice, the content decides, so
    /// that the order has no effect.
    fn preference<'n>(&self, other: &Self, name_of: impl Fn(u32) -> &'n str) -> Ordering {
        let rank = |it: &Self| (it.terminating, !it.ready, !it.serving);
        let rest = |it: &Self| (!it.local, it.hints.ordered());
        (rank(self).cmp(&rank(other)))
            .then_with(|| name_of(other.slice).cmp(name_of(self.slice)))
            .then_with(|| rest(self).cmp(&rest(other)))
            .then_with(|| texts(self.source).cmp(&texts(other.source)))
            .then_with(|| hint_names(self.source).cmp(hint_names(other.source)))
    }
}

impl Hints {
    fn ordered(self) -> [bool; 4] {
        [self.has_nodes, self.names_node, self.has_zones, self.names_zone]
    }
}

type Texts<'a> = (Option<&'a str>, Option<&'a str>, Option<&'a str>, Option<(&'a str, &'a str)>);

fn texts(endpoint: &Endpoint) -> Texts<'_> {
    let target = endpoint.target_ref.as_ref().map(|target| (target.kind.as_str(), target.name.as_str()));
    (endpoint.hostname.as_deref(), endpoint.node_name.as_deref(), endpoint.zone.as_deref(), target)
}

fn hint_names(endpoint: &Endpoint) -> impl Iterator<Item = &str> {
    let hints = endpoint.hints.as_ref();
    let nodes = hints.into_iter().flat_map(|hints| &hints.for_nodes).map(|hint| hint.name.as_str());
    let zones = hints.into_iter().flat_map(|hints| &hints.for_zones).map(|hint| hint.name.as_str());
    nodes.chain(std::iter::once("")).chain(zones)
}

/// Number of distinct ready addresses of each family on this node, over all ports.
pub(super) fn local_ready(candidates: &[Candidate<'_>]) -> PerFamily<u32> {
    let mut count = PerFamily::default();
    let mut last = None;
    for it in candidates.iter().filter(|it| !it.superseded && it.ready && it.local) {
        // Candidates are ordered by address.
        if last.replace(it.ip) != Some(it.ip) {
            count[Family::of(it.ip)] += 1;
        }
    }
    count
}
