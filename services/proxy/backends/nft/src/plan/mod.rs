//! The wanted elements of the table.
//!
//! Owns: [`Plan`], every element of the sets of one family, except those that the kernel writes itself. In: service
//! ports, facts about the node, and what an earlier run left. Out: [`Op`]s, and the chains that they need. Pure: no
//! I/O, no clock.
//!
//! The cost of a change is that of the changed Service. The plan keeps the service ports; elements are computed on
//! demand. Numbers, slots and endpoint numbers are kept wherever possible: over changes, over a Service that is deleted
//! and recreated within one state, and over restarts ([`Existing`]).

mod existing;
mod frontend;
mod ledger;
mod numbers;
mod order;
mod port;
mod reachable;
mod slots;
mod view;

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
};

use ipnet::IpNet;
use keelson_client::ServiceName;
use keelson_proxy::model::{Conflict, Endpoint, Family, Frontend, PortName, Protocol, ServicePort};

pub(crate) use existing::Existing;
pub(crate) use frontend::FrontendTarget;
pub(crate) use keelson_proxy::model::FrontendKind;
pub(crate) use order::in_order;
pub(crate) use view::{Counts, FoundFrontend, PortView};

use self::{
    existing::PortState,
    frontend::{Claim, Claims, FrontendState},
    ledger::Ledger,
    numbers::Numbers,
    port::{EndpointSets, Port, change_ledger},
    view::lacks_affinity,
};
use super::{
    chain::{Chain, Choice},
    element::{Element, Key, Number, Op, SetName, Value, Verdict},
};

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct NodeFacts {
    /// The CIDRs of every ServiceCIDR, in any order. Those of the other family are ignored.
    pub(crate) service_cidrs: Vec<IpNet>,
    /// The addresses of the node in source ranges.
    pub(crate) node_ips: Vec<IpAddr>,
    /// The addresses at which node ports are served; empty for all local ones.
    pub(crate) node_port_addresses: Vec<IpAddr>,
}

/// The elements of all sets in the kernel, by set and key.
pub(crate) type Kernel = HashMap<(SetName, Key), (Option<Key>, Value)>;

#[derive(Debug)]
pub(crate) struct Plan {
    family: Family,
    existing: Existing,
    services: HashMap<ServiceName, Box<[Port]>>,
    frontends: HashMap<Frontend, Claims>,
    cluster_ips: HashMap<IpAddr, u32>,
    /// Number of service ports' numbers that contain a choice and count: two per service port if V and the others have
    /// the same.
    counted: HashMap<(Choice, u32), u32>,
    /// Number of service ports by endpoint on this node.
    hairpin: HashMap<(Protocol, Endpoint), u32>,
    facts: NodeFacts,
    numbers: Numbers,
    /// Service ports that lost their number since the last [`Self::take_ops`].
    released: HashMap<PortName, PortState>,
    ledger: Ledger,
    counts: Counts,
}

impl Plan {
    /// Changes are not recorded until [`Self::record`].
    pub(crate) fn new(family: Family, existing: Existing) -> Self {
        Self {
            family,
            numbers: Numbers::new(&existing),
            existing,
            services: HashMap::new(),
            frontends: HashMap::new(),
            cluster_ips: HashMap::new(),
            counted: HashMap::new(),
            hairpin: HashMap::new(),
            facts: NodeFacts::default(),
            released: HashMap::new(),
            ledger: Ledger::default(),
            counts: Counts::default(),
        }
    }

    /// The elements of an earlier run have been compared and deleted: their numbers may be assigned.
    pub(crate) fn forget_existing(&mut self) {
        self.existing = Existing::default();
    }

    /// Whether changes are recorded for [`Self::take_ops`]. Off if a full comparison follows, as at the start. Discards
    /// recorded changes.
    pub(crate) fn record(&mut self, on: bool) {
        self.ledger.record(on);
        self.free_released();
    }

    /// Sets all ports of a Service.
    pub(crate) fn set(&mut self, service: &ServiceName, ports: Vec<ServicePort>) {
        let old = self.services.get(service).map_or(&[][..], |ports| ports);
        let new = distinct(ports);
        let claimed = claims(old.iter());
        let claims = claims(new.iter().map(|(port, _)| port));
        let mut affected: Vec<Frontend> = claimed.iter().chain(&claims).map(|claim| claim.0).collect();
        affected.sort_unstable();
        affected.dedup();
        let before: Vec<_> = affected.iter().map(|frontend| self.frontend_state(frontend)).collect();

        let old = self.services.remove(service).unwrap_or_default();
        let new = self.place(service, &old, new);
        self.change_own(&old, &new);
        self.count_services(&old, &new);
        if !new.is_empty() {
            self.services.insert(service.clone(), new);
        }
        if claimed != claims {
            self.claim(service, claimed, claims);
        }
        for (frontend, before) in affected.iter().zip(before) {
            let after = self.frontend_state(frontend);
            if before != after {
                let elements = |state: Option<FrontendState>| {
                    state.map_or_else(Vec::new, |state| state.elements(&self.facts))
                };
                self.ledger.change_all(&elements(before), &elements(after));
            }
        }
    }

    /// Costs as much as there are Services if the node's addresses change.
    pub(crate) fn facts(&mut self, facts: NodeFacts) {
        if facts == self.facts {
            return;
        }
        let before = fact_elements(self.family, &self.facts);
        self.ledger.change_all(&before, &fact_elements(self.family, &facts));
        let old = std::mem::replace(&mut self.facts, facts);
        if old.node_ips == self.facts.node_ips {
            return;
        }
        let filtered: Vec<FrontendState> = (self.frontends.keys())
            .filter_map(|frontend| self.frontend_state(frontend))
            .filter(|state| state.ranges.is_some())
            .collect();
        for state in filtered {
            let before = state.elements(&old);
            self.ledger.change_all(&before, &state.elements(&self.facts));
        }
    }

    /// Whether [`Self::take_ops`] may return something.
    pub(crate) fn has_changes(&self) -> bool {
        self.ledger.has_changes()
    }

    /// The changes since the last call, in any order ([`in_order`]), at most one operation per key. Released numbers
    /// may be assigned again afterwards.
    pub(crate) fn take_ops(&mut self) -> Vec<Op> {
        self.free_released();
        self.ledger.take()
    }

    fn free_released(&mut self) {
        self.numbers.free_released();
        self.released = HashMap::new();
    }

    /// Every wanted element, once, computed from the Services, without those that the kernel writes. In an order in
    /// which an empty table can be filled: entry sets come last, a filter before its frontend.
    pub(crate) fn elements(&self) -> impl Iterator<Item = Element> + '_ {
        let family = self.family;
        let ports = || self.services.values().flatten();
        let frontends = || {
            let states = self.frontends.keys().filter_map(|frontend| self.frontend_state(frontend));
            states.flat_map(|state| state.elements(&self.facts))
        };
        // Few frontends have other elements than the one that comes last.
        let is_last = |element: &Element| {
            element.set.is_entry() && !matches!(element.set, SetName::SourceRanges | SetName::Filtered)
        };
        let (entries, others): (Vec<_>, Vec<_>) =
            frontends().filter(|element| !is_last(element)).partition(|element| element.set.is_entry());
        let (ranges, filtered): (Vec<_>, Vec<_>) =
            entries.into_iter().partition(|element| element.set == SetName::SourceRanges);
        let choices = |policies: bool| {
            let all = ports().flat_map(move |port| port.choice_elements());
            all.filter(move |element| (element.set == SetName::ExternalPolicy) == policies)
        };
        let hairpin = self.hairpin.keys().map(|(protocol, endpoint)| hairpin(*protocol, *endpoint));
        ports()
            .flat_map(move |port| port.slot_elements())
            .chain(hairpin)
            .chain(others)
            .chain(self.counted.keys().map(|counted| count_element(*counted)))
            .chain(choices(false))
            .chain(choices(true))
            .chain(fact_elements(family, &self.facts))
            .chain(ranges)
            .chain(filtered)
            .chain(frontends().filter(is_last))
            .chain(self.cluster_ips.keys().map(|ip| cluster_ip(*ip)))
    }

    /// The chains in use that choose among a count of endpoints, without their companions.
    pub(crate) fn chains(&self) -> BTreeSet<Chain> {
        self.ledger.chains()
    }

    /// Changes from the kernel's elements to the wanted ones, in any order ([`in_order`]).
    pub(crate) fn difference(&self, mut found: Kernel) -> Vec<Op> {
        found.retain(|(set, _), _| !set.is_dynamic());
        let mut ops = Vec::new();
        for element in self.elements() {
            match found.remove(&(element.set, element.key)) {
                None => ops.push(Op::Add(element)),
                Some(content) if content == (element.key_end, element.value) => {}
                Some((key_end, value)) => {
                    ops.push(Op::Replace(Element { key_end, value, ..element }, element))
                }
            }
        }
        let left = found.into_iter();
        ops.extend(
            left.map(|((set, key), (key_end, value))| Op::Delete(Element { set, key, key_end, value })),
        );
        ops
    }

    pub(crate) fn counts(&self) -> Counts {
        Counts { elements: self.ledger.elements(), ..self.counts }
    }

    /// Frontends that more than one service port claims, ordered.
    pub(crate) fn conflicts(&self) -> Vec<Conflict> {
        let name = |claim: &Claim| Some(self.view(claim)?.name());
        let conflict = |(frontend, claims): (&Frontend, &Claims)| {
            let (owner, others) = claims.all().split_first()?;
            let others: Vec<PortName> = others.iter().filter_map(name).collect();
            (!others.is_empty()).then_some(Conflict { frontend: *frontend, owner: name(owner)?, others })
        };
        let mut conflicts: Vec<Conflict> = self.frontends.iter().filter_map(conflict).collect();
        conflicts.sort_unstable_by_key(|conflict| conflict.frontend);
        conflicts
    }

    /// In any order.
    pub(crate) fn service_ports(&self) -> impl Iterator<Item = PortView<'_>> {
        self.services
            .iter()
            .flat_map(|(service, ports)| ports.iter().map(move |port| PortView { service, inner: port }))
    }

    /// `None` if no Service has the frontend.
    pub(crate) fn lookup(&self, frontend: Frontend) -> Option<FoundFrontend<'_>> {
        let claim = self.frontends.get(&frontend)?.all().first()?;
        let port = self.view(claim)?;
        Some(FoundFrontend { frontend, kind: claim.kind, target: port.target(claim.kind), port })
    }

    /// Whether an address is a cluster IP, whose other ports reject.
    pub(crate) fn is_cluster_ip(&self, ip: IpAddr) -> bool {
        self.cluster_ips.contains_key(&ip)
    }

    pub(crate) fn node_facts(&self) -> &NodeFacts {
        &self.facts
    }

    fn port(&self, claim: &Claim) -> Option<&Port> {
        self.services.get(&claim.service)?.get(claim.port as usize)
    }

    fn view(&self, claim: &Claim) -> Option<PortView<'_>> {
        let (service, ports) = self.services.get_key_value(&claim.service)?;
        Some(PortView { service, inner: ports.get(claim.port as usize)? })
    }

    fn frontend_state(&self, frontend: &Frontend) -> Option<FrontendState> {
        let claim = self.frontends.get(frontend)?.all().first()?;
        let port = self.port(claim)?;
        let ranges = if claim.kind == FrontendKind::LoadBalancerIp {
            port.source_ranges.clone()
        } else {
            Default::default()
        };
        Some(FrontendState { frontend: *frontend, kind: claim.kind, target: port.target(claim.kind), ranges })
    }

    /// Assigns numbers and slots to the new ports of a Service. Releases numbers that are no longer used.
    fn place(&mut self, service: &ServiceName, old: &[Port], new: Vec<(Port, EndpointSets)>) -> Box<[Port]> {
        let (mut placed, mut kept) = (Vec::with_capacity(new.len()), Vec::new());
        for (mut port, endpoints) in new {
            if !endpoints.is_empty() {
                let before = find(old, &port);
                let affinity = port.affinity_seconds != 0 && endpoints.can_be_numbered();
                let state = self.former_state(service, &port, &endpoints, before, affinity);
                let number = match &state {
                    Some(state) => Some(state.number),
                    None => self.allocate(affinity),
                };
                port.place(number, state.as_ref(), &endpoints);
                kept.extend(number);
            }
            placed.push(port);
        }
        for port in old {
            if let Some(state) = port.state().filter(|state| !kept.contains(&state.number)) {
                self.numbers.release(state.number);
                if self.ledger.is_recording() {
                    let name = PortName {
                        service: service.clone(),
                        port: port.name.clone(),
                        protocol: port.protocol,
                    };
                    self.released.insert(name, state);
                } else {
                    self.numbers.free_released();
                }
            }
        }
        placed.into()
    }

    /// Falls back to a number without affinity if all numbers with affinity are assigned.
    fn allocate(&mut self, affinity: bool) -> Option<Number> {
        let number = if affinity { self.numbers.allocate(true, &self.existing) } else { None };
        number.or_else(|| self.numbers.allocate(false, &self.existing))
    }

    /// The former state of a service port, if it can keep its number.
    fn former_state(
        &mut self,
        service: &ServiceName,
        port: &Port,
        endpoints: &EndpointSets,
        before: Option<&Port>,
        affinity: bool,
    ) -> Option<PortState> {
        let fits = |state: &PortState| state.number.has_affinity() == affinity;
        if let Some(state) = before.and_then(Port::state).filter(fits) {
            return Some(state);
        }
        if !self.released.is_empty() {
            let name =
                PortName { service: service.clone(), port: port.name.clone(), protocol: port.protocol };
            if let Some(state) = self.released.remove(&name).filter(fits)
                && self.numbers.reclaim(state.number)
            {
                return Some(state);
            }
        }
        // No other service port can have its cluster IP. Other frontends may lead to the number of the one that had them.
        let (own, others): (Vec<_>, Vec<_>) =
            port.frontends().partition(|(_, kind)| *kind == FrontendKind::ClusterIp);
        let by_own = self.claim_by_frontend(own, affinity);
        by_own.or_else(|| self.claim_without_frontend(endpoints, affinity)).or_else(|| {
            let mut others = others;
            others.sort_by_key(|(_, kind)| *kind != FrontendKind::NodePort);
            self.claim_by_frontend(others, affinity)
        })
    }

    fn claim_by_frontend(
        &mut self,
        frontends: Vec<(Frontend, FrontendKind)>,
        affinity: bool,
    ) -> Option<PortState> {
        frontends.into_iter().find_map(|(frontend, kind)| {
            let number = self.existing.number(kind == FrontendKind::ClusterIp, frontend)?;
            let state =
                self.existing.state(number).filter(|state| state.number.has_affinity() == affinity)?;
            self.numbers.claim(number).then_some(state)
        })
    }

    /// For a service port that had lost its frontends to others.
    fn claim_without_frontend(&mut self, endpoints: &EndpointSets, affinity: bool) -> Option<PortState> {
        let [cluster, local] = endpoints.sets();
        let numbers = self.existing.without_frontend(affinity, cluster, local);
        let number = *numbers.iter().find(|number| self.numbers.claim(**number))?;
        self.existing.state(number)
    }

    /// Records all changes of a Service except those of frontends.
    fn change_own(&mut self, old: &[Port], new: &[Port]) {
        for port in new {
            change_ledger(find(old, port), Some(port), &mut self.ledger);
        }
        for port in old.iter().filter(|old| find(new, old).is_none()) {
            change_ledger(Some(port), None, &mut self.ledger);
        }
        // Additions before removals: what stays is no change.
        for port in new {
            add(&mut self.cluster_ips, port.cluster_ip, cluster_ip, &mut self.ledger);
            for counted in port.all_counted() {
                add(&mut self.counted, counted, count_element, &mut self.ledger);
            }
            for endpoint in &port.on_node {
                let key = (port.protocol, *endpoint);
                add(&mut self.hairpin, key, |(protocol, it)| hairpin(protocol, it), &mut self.ledger);
            }
        }
        for port in old {
            remove(&mut self.cluster_ips, port.cluster_ip, cluster_ip, &mut self.ledger);
            for counted in port.all_counted() {
                remove(&mut self.counted, counted, count_element, &mut self.ledger);
            }
            for endpoint in &port.on_node {
                let key = (port.protocol, *endpoint);
                remove(&mut self.hairpin, key, |(protocol, it)| hairpin(protocol, it), &mut self.ledger);
            }
        }
    }

    fn count_services(&mut self, old: &[Port], new: &[Port]) {
        let endpoints = |ports: &[Port]| ports.iter().map(|port| port.endpoints as usize).sum::<usize>();
        let lacking = |ports: &[Port]| ports.iter().filter(|port| lacks_affinity(port)).count();
        let counts = &mut self.counts;
        counts.services = counts.services + usize::from(!new.is_empty()) - usize::from(!old.is_empty());
        counts.service_ports = counts.service_ports + new.len() - old.len();
        counts.endpoints = counts.endpoints + endpoints(new) - endpoints(old);
        counts.without_affinity = counts.without_affinity + lacking(new) - lacking(old);
    }

    fn claim(&mut self, service: &ServiceName, old: Vec<RawClaim>, new: Vec<RawClaim>) {
        for (frontend, ..) in old {
            if let Some(claims) = self.frontends.remove(&frontend)
                && let Some(claims) = claims.without(service)
            {
                self.frontends.insert(frontend, claims);
            }
        }
        for (frontend, port, kind) in new {
            let claim = Claim { service: service.clone(), port, kind };
            let claims = match self.frontends.remove(&frontend) {
                None => Claims::One(claim),
                Some(claims) => claims.add(claim),
            };
            self.frontends.insert(frontend, claims);
        }
    }
}

/// A claim of one Service: the frontend, the index of the port, the kind.
type RawClaim = (Frontend, u32, FrontendKind);

fn claims<'a>(ports: impl Iterator<Item = &'a Port>) -> Vec<RawClaim> {
    (0..).zip(ports).flat_map(|(at, port)| port.frontends().map(move |(it, kind)| (it, at, kind))).collect()
}

/// Finds the port with the same name and protocol. `ports` is in the order of names.
fn find<'a>(ports: &'a [Port], port: &Port) -> Option<&'a Port> {
    let order = |other: &Port| (&other.name, other.protocol).cmp(&(&port.name, port.protocol));
    ports.get(ports.binary_search_by(order).ok()?)
}

/// In the order of names; of ports with the same name and protocol, which no Service has, only the first.
fn distinct(mut ports: Vec<ServicePort>) -> Vec<(Port, EndpointSets)> {
    let same = |port: &ServicePort, other: &ServicePort| {
        (&port.name.port, port.name.protocol) == (&other.name.port, other.name.protocol)
    };
    ports.sort_by(|a, b| (&a.name.port, a.name.protocol).cmp(&(&b.name.port, b.name.protocol)));
    ports.dedup_by(|later, first| same(later, first));
    ports.into_iter().map(Port::new).collect()
}

/// Increments the count of a key; the first increment adds the element.
fn add<K: Eq + std::hash::Hash + Copy>(
    counts: &mut HashMap<K, u32>,
    key: K,
    element: impl Fn(K) -> Element,
    ledger: &mut Ledger,
) {
    let count = counts.entry(key).or_default();
    *count += 1;
    if *count == 1 {
        ledger.change_all(&[], &[element(key)]);
    }
}

/// Decrements the count of a key; the last decrement deletes the element.
fn remove<K: Eq + std::hash::Hash + Copy>(
    counts: &mut HashMap<K, u32>,
    key: K,
    element: impl Fn(K) -> Element,
    ledger: &mut Ledger,
) {
    let Some(count) = counts.get_mut(&key) else { return };
    *count -= 1;
    if *count == 0 {
        counts.remove(&key);
        ledger.change_all(&[element(key)], &[]);
    }
}

fn cluster_ip(ip: IpAddr) -> Element {
    Element { set: SetName::ClusterIps, key: Key::new().ip(ip), key_end: None, value: Value::None }
}

/// Maps numbers with a choice and count to their chain.
fn count_element((choice, count): (Choice, u32)) -> Element {
    let class = Number(0).with_count(choice, count).class();
    Element {
        set: SetName::Counts,
        key: Key::new().number(class),
        key_end: None,
        value: Value::Verdict(Verdict::Goto(Chain::LoadBalance { choice, count })),
    }
}

fn hairpin(protocol: Protocol, Endpoint { ip, port }: Endpoint) -> Element {
    let key = Key::new().ip(ip).ip(ip).protocol(protocol).port(port);
    Element { set: SetName::Hairpin, key, key_end: None, value: Value::None }
}

/// Ordered by set and key.
fn fact_elements(family: Family, facts: &NodeFacts) -> Vec<Element> {
    let cidrs: Vec<IpNet> =
        facts.service_cidrs.iter().filter(|net| family.has(&net.addr())).copied().collect();
    let cidrs = IpNet::aggregate(&cidrs).into_iter().map(|net| Element {
        set: SetName::ServiceCidrs,
        key: Key::new().ip(net.network()),
        key_end: Some(Key::new().ip(net.broadcast())),
        value: Value::None,
    });
    let addresses: BTreeSet<IpAddr> = facts.node_port_addresses.iter().copied().collect();
    let addresses = addresses.into_iter().filter(|ip| family.has(ip)).map(|ip| Element {
        set: SetName::NodePortAddresses,
        key: Key::new().ip(ip),
        key_end: None,
        value: Value::None,
    });
    addresses.chain(cidrs).collect()
}

#[cfg(test)]
mod tests;
