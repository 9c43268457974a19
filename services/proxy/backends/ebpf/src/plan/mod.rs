//! What is wanted in the maps.
//!
//! Owns: [`Plan`]: the Services of both families, their numbers and places. In: calls of the proxy, what an earlier run left in
//! the maps. Out: [`Change`]s. Pure.
//!
//! A service port has a number as long as it exists; maps of the programs remember it. A set whose endpoints change gets
//! another range of slots: programs read the old range until the set points to the new one, in one step. Service ports for
//! which the maps have no room are left to packets and tried again when something becomes free.

mod placed;
mod policy;
mod ranges;
#[cfg(test)]
mod tests;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
    time::Instant,
};

use keelson_client::ServiceName;
use keelson_proxy::model::{
    Claims, Endpoint, Family, Frontend, FrontendKind, PortName, Protocol, ServicePort,
};

pub(crate) use self::{
    placed::Placed,
    policy::{NodeFacts, Policy, Reason},
};
use self::{
    placed::{Inherited, is_stale},
    ranges::Ranges,
};
use crate::{
    elements::{Change, Contents, Element, Key, sort},
    layout::{Address, FrontendKey, Remote, SetKey},
};

/// Maximum numbers of elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Capacity {
    pub(crate) frontends: usize,
    pub(crate) sets: usize,
    pub(crate) members: usize,
    pub(crate) node_addresses: usize,
    pub(crate) source_ranges: usize,
    pub(crate) slots: u32,
}

#[derive(Debug, Default, Clone)]
struct FamilyPlan {
    services: BTreeMap<ServiceName, Vec<Arc<ServicePort>>>,
    claims: Claims<Arc<ServicePort>>,
    facts: NodeFacts,
    /// The addresses of the node's interfaces.
    local: BTreeSet<IpAddr>,
    node_addresses: BTreeSet<Address>,
    /// Addresses of the node for which the map has no room.
    left_addresses: usize,
    placed: BTreeMap<PortName, Placed>,
    left_out: BTreeSet<PortName>,
    /// What was put, or will be by the changes that were returned last.
    frontends: BTreeMap<FrontendKey, SetKey>,
    put_addresses: BTreeSet<Address>,
    /// Elements of all service ports that have a place.
    sets: usize,
    members: usize,
    source_ranges: usize,
    changed_ports: BTreeSet<PortName>,
    changed_frontends: BTreeSet<Frontend>,
    has_adopted: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Plan {
    capacity: Capacity,
    ranges: Ranges,
    /// Of all service ports that have a place. A frontend that several claim counts for each of them.
    frontends: usize,
    last_number: u32,
    numbers: HashMap<u32, PortName>,
    families: [FamilyPlan; 2],
    inherited: Inherited,
    /// Since the last call of [`Plan::take_lost_udp`], a UDP service port has lost an endpoint, or an address of UDP belongs to
    /// another one: flows of the former one may be there.
    has_lost_udp: bool,
    /// Something was freed since service ports that were left out were tried.
    has_freed: bool,
}

/// Service ports without room that a sync tries again.
const RETRIES: usize = 64;

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) frontends: usize,
    pub(crate) sets: usize,
    /// Of both families.
    pub(crate) slots: u32,
    pub(crate) members: usize,
    pub(crate) source_ranges: usize,
    /// Service ports without room.
    pub(crate) left_out: usize,
    pub(crate) node_addresses: usize,
    /// Addresses of the node without room.
    pub(crate) left_addresses: usize,
}

impl Plan {
    pub(crate) fn new(capacity: Capacity) -> Self {
        Self {
            capacity,
            ranges: Ranges::new(capacity.slots),
            frontends: 0,
            last_number: 0,
            numbers: HashMap::new(),
            families: Default::default(),
            inherited: Inherited::default(),
            has_lost_udp: false,
            has_freed: false,
        }
    }

    /// Sets all ports of a Service; empty: it is deleted.
    pub(crate) fn set(&mut self, family: Family, service: &ServiceName, ports: Vec<ServicePort>) {
        let plan = &mut self.families[family as usize];
        let ports: Vec<Arc<ServicePort>> = ports.into_iter().map(Arc::new).collect();
        let before = match ports.is_empty() {
            true => plan.services.remove(service),
            false => plan.services.insert(service.clone(), ports.clone()),
        };
        let before = before.unwrap_or_default();
        for port in &before {
            plan.claims.remove(port);
        }
        for port in &ports {
            plan.claims.add(port, port);
        }
        if before != ports {
            for port in before.iter().chain(&ports) {
                plan.changed_ports.insert(port.name.clone());
                plan.changed_frontends.extend(port.frontends().map(|(frontend, _)| frontend));
            }
        }
    }

    pub(crate) fn set_facts(&mut self, family: Family, facts: NodeFacts) {
        let plan = &mut self.families[family as usize];
        if plan.facts != facts {
            plan.facts = facts;
            let ports = plan.services.values().flatten();
            plan.changed_ports.extend(ports.map(|port| port.name.clone()));
            plan.changed_frontends.extend(plan.claims.frontends());
        }
    }

    /// The addresses of the node's interfaces, of both families.
    pub(crate) fn set_local_addresses(&mut self, family: Family, addresses: &[IpAddr]) {
        let plan = &mut self.families[family as usize];
        let local: BTreeSet<IpAddr> = addresses.iter().copied().filter(|ip| family.has(ip)).collect();
        let before = std::mem::replace(&mut plan.local, local);
        let changed = |port: &&Arc<ServicePort>| {
            before.contains(&port.cluster_ip) != plan.local.contains(&port.cluster_ip)
        };
        for port in plan.services.values().flatten().filter(changed) {
            plan.changed_ports.insert(port.name.clone());
            plan.changed_frontends.extend(port.frontends().map(|(frontend, _)| frontend));
        }
    }

    /// The addresses at which node ports are served. As packets to it do, the loopback network stays untranslated. Those beyond
    /// the half of the map that a family has are left to packets.
    pub(crate) fn set_node_addresses(&mut self, family: Family, addresses: &[IpAddr]) {
        let max = self.capacity.node_addresses / Family::ALL.len();
        let plan = &mut self.families[family as usize];
        (plan.node_addresses, plan.left_addresses) = (BTreeSet::new(), 0);
        for ip in addresses.iter().filter(|ip| family.has(ip) && !ip.is_loopback()) {
            let address = Address::from(*ip);
            if plan.node_addresses.len() < max {
                plan.node_addresses.insert(address);
            } else if !plan.node_addresses.contains(&address) {
                plan.left_addresses += 1;
            }
        }
    }

    pub(crate) fn has_changes(&self, family: Family) -> bool {
        let plan = self.family(family);
        !plan.changed_ports.is_empty() || !plan.changed_frontends.is_empty()
    }

    /// Whether service ports that were left out may be tried again.
    pub(crate) fn wake(&mut self, now: Instant) -> bool {
        self.has_freed |= self.ranges.wake(now);
        self.has_freed && self.families.iter().any(|plan| !plan.left_out.is_empty())
    }

    /// What the changes since the last call mean for the maps. The plan counts them as applied.
    pub(crate) fn changes(&mut self, family: Family, now: Instant) -> Vec<Change> {
        let tries_again = self.wake(now);
        let plan = &mut self.families[family as usize];
        let mut names = std::mem::take(&mut plan.changed_ports);
        plan.left_out.retain(|name| !names.contains(name));
        if tries_again {
            names.extend(std::iter::from_fn(|| plan.left_out.pop_first()).take(RETRIES));
            // Beyond that, the next sync goes on.
            self.has_freed = !plan.left_out.is_empty();
        }
        let mut frontends = std::mem::take(&mut plan.changed_frontends);
        let mut changes = Vec::new();
        for name in names {
            let before = self.family(family).placed.get(&name).map(Placed::contents).unwrap_or_default();
            self.place(family, &name, now, None);
            let plan = self.family(family);
            let after = plan.placed.get(&name);
            changes.extend(before.changes_to(family, |take| {
                after.into_iter().for_each(|after| after.each_element(take));
            }));
            if let Some(port) = plan.current(&name) {
                frontends.extend(port.frontends().map(|(frontend, _)| frontend));
            }
        }
        for frontend in frontends {
            changes.extend(self.set_frontend(family, frontend));
        }
        let plan = &mut self.families[family as usize];
        let (before, after) = (&plan.put_addresses, &plan.node_addresses);
        changes.extend(after.difference(before).map(|ip| Change::Put(Element::NodeAddress(*ip, 1))));
        changes.extend(before.difference(after).map(|ip| Change::Delete(Key::NodeAddress(*ip))));
        plan.put_addresses = plan.node_addresses.clone();
        sort(&mut changes);
        self.has_lost_udp |= changes.iter().any(puts_udp_frontend);
        changes
    }

    /// What differs between the maps and all that is wanted of a family. The first time, numbers and places are those in the
    /// maps, where they are right.
    pub(crate) fn full(&mut self, family: Family, contents: &Contents, now: Instant) -> Vec<Change> {
        self.inherited.fill_once(contents, &mut self.ranges, &mut self.last_number);
        let adopted = !std::mem::replace(&mut self.families[family as usize].has_adopted, true);
        let source = adopted.then_some(contents);
        let plan = &mut self.families[family as usize];
        plan.changed_ports.clear();
        plan.changed_frontends.clear();
        plan.left_out.clear();
        plan.frontends.clear();
        let mut names: BTreeSet<PortName> = plan.placed.keys().cloned().collect();
        names.extend(plan.services.values().flatten().map(|port| port.name.clone()));
        for name in names {
            self.place(family, &name, now, source);
        }
        for frontend in self.family(family).claims.frontends().collect::<Vec<_>>() {
            self.set_frontend(family, frontend);
        }
        let plan = &mut self.families[family as usize];
        plan.put_addresses = plan.node_addresses.clone();
        let changes = self.difference(contents, family);
        self.has_lost_udp |= changes.iter().any(puts_udp_frontend);
        self.inherited.give_back(family, &mut self.ranges, now);
        changes
    }

    /// Everything that is wanted of a family.
    pub(crate) fn contents(&self, family: Family) -> Contents {
        let mut all = Contents::default();
        self.each_element(family, &mut |element| all.insert(element));
        all
    }

    /// Changes that make contents of the maps to what is wanted of a family.
    pub(crate) fn difference(&self, contents: &Contents, family: Family) -> Vec<Change> {
        contents.changes_to(family, |take| self.each_element(family, take))
    }

    /// Passes everything that is wanted of a family to a callback.
    fn each_element(&self, family: Family, take: &mut dyn FnMut(Element)) {
        let plan = self.family(family);
        plan.placed.values().for_each(|placed| placed.each_element(take));
        plan.frontends.iter().for_each(|(key, value)| take(Element::Frontend(*key, *value)));
        plan.put_addresses.iter().for_each(|ip| take(Element::NodeAddress(*ip, 1)));
    }

    fn family(&self, family: Family) -> &FamilyPlan {
        &self.families[family as usize]
    }

    /// Gives a service port its number and places, or takes them from one that is gone.
    fn place(&mut self, family: Family, name: &PortName, now: Instant, source: Option<&Contents>) {
        let plan = &mut self.families[family as usize];
        let before = plan.placed.remove(name);
        let port = plan.current(name).cloned();
        let facts = port.as_ref().map(|port| plan.facts_of(port)).unwrap_or_default();
        if let Some(before) = &before {
            self.forget(family, before);
        }
        let after = port.and_then(|port| self.find_room(family, port, facts, before.as_ref(), source));
        if let Some(before) = before {
            self.has_lost_udp |= before.has_lost_udp(after.as_ref());
            let kept =
                |range| after.as_ref().is_some_and(|after: &Placed| after.ranges.contains(&Some(range)));
            for range in before.ranges.into_iter().flatten().filter(|range| !kept(*range)) {
                self.ranges.give_back(range, now);
            }
        }
        let Some(after) = after else { return };
        self.frontends += after.frontends();
        self.numbers.insert(after.number, name.clone());
        let plan = &mut self.families[family as usize];
        plan.sets += after.sets();
        plan.members += after.members();
        plan.source_ranges += after.source_ranges().len();
        plan.placed.insert(name.clone(), after);
    }

    fn forget(&mut self, family: Family, before: &Placed) {
        let plan = &mut self.families[family as usize];
        plan.sets -= before.sets();
        plan.members -= before.members();
        plan.source_ranges -= before.source_ranges().len();
        self.frontends -= before.frontends();
        self.numbers.remove(&before.number);
        self.has_freed = true;
    }

    /// `None`, and the port is left out: there is no room.
    fn find_room(
        &mut self,
        family: Family,
        port: Arc<ServicePort>,
        facts: NodeFacts,
        before: Option<&Placed>,
        source: Option<&Contents>,
    ) -> Option<Placed> {
        let name = port.name.clone();
        let claims = &self.family(family).claims;
        // An address that it shares leads to the sets of the Service that has it.
        let is_own = |frontend| claims.owner(frontend).is_some_and(|(_, owner, _)| *owner == name);
        let own = port.frontends().map(|(frontend, _)| frontend).filter(|frontend| is_own(*frontend));
        let inherited = source.and_then(|contents| self.inherited.number(own, family, contents));
        let inherited = inherited.filter(|number| !self.numbers.contains_key(number));
        let number = before.map(|before| before.number).or(inherited);
        let number = number.unwrap_or_else(|| self.next_number(family));
        let mut after = Placed { number, port, facts, ranges: [None; 2] };
        let used = |of: fn(&FamilyPlan) -> usize| self.families.iter().map(of).sum::<usize>();
        let has_room = self.frontends + after.frontends() <= self.capacity.frontends
            && used(|plan| plan.sets) + after.wanted_sets() <= self.capacity.sets
            && used(|plan| plan.members) + after.members() <= self.capacity.members
            && used(|plan| plan.source_ranges) + after.source_ranges().len() <= self.capacity.source_ranges;
        if !(has_room && self.take_ranges(&mut after, before, source)) {
            self.families[family as usize].left_out.insert(name);
            return None;
        }
        Some(after)
    }

    /// Takes a range for each set, the former one if its endpoints are the same.
    fn take_ranges(
        &mut self,
        after: &mut Placed,
        before: Option<&Placed>,
        source: Option<&Contents>,
    ) -> bool {
        let mut taken = Vec::new();
        for set in crate::layout::SetKind::ALL {
            let endpoints = after.endpoints(set);
            if endpoints.is_empty() {
                continue;
            }
            let same = before.filter(|before| before.endpoints(set) == endpoints);
            let kept = same.and_then(|before| before.ranges[set as usize]);
            let inherited = source.and_then(|contents| {
                self.inherited.take(SetKey::new(after.number, set), endpoints, contents)
            });
            let range = kept.or(inherited).or_else(|| {
                let range = self.ranges.take(u32::try_from(endpoints.len()).ok()?)?;
                taken.push(range);
                Some(range)
            });
            if range.is_none() {
                // No program has seen these.
                taken.into_iter().for_each(|range| self.ranges.cancel(range));
                return false;
            }
            after.ranges[set as usize] = range;
        }
        true
    }

    /// Even for IPv4, odd for IPv6; never 0, which empty slots have.
    fn next_number(&mut self, family: Family) -> u32 {
        loop {
            self.last_number = if self.last_number >= 0x7fff_fffe { 1 } else { self.last_number + 1 };
            let number = self.last_number << 1 | family as u32;
            if !self.numbers.contains_key(&number) && !self.inherited.has(number) {
                return number;
            }
        }
    }

    /// Where a frontend leads to, if it does not stay untranslated.
    fn frontend(&self, family: Family, frontend: Frontend) -> Result<Option<SetKey>, Reason> {
        let plan = self.family(family);
        let Some((kind, name, port)) = plan.claims.owner(frontend) else { return Ok(None) };
        let policy = Policy { port, node: plan.facts_of(port) };
        let set = policy.of(kind)?;
        let placed = plan.placed.get(name).ok_or(Reason::Full)?;
        Ok(Some(SetKey::new(placed.number, set).with_ranges(policy.has_ranges(kind))))
    }

    fn set_frontend(&mut self, family: Family, frontend: Frontend) -> Option<Change> {
        let key = FrontendKey::of(frontend, family);
        let wanted = self.frontend(family, frontend).ok().flatten();
        let known = &mut self.families[family as usize].frontends;
        let before = known.get(&key).copied();
        match wanted {
            Some(value) if before == Some(value) => None,
            Some(value) => {
                known.insert(key, value);
                Some(Change::Put(Element::Frontend(key, value)))
            }
            None => known.remove(&key).map(|_| Change::Delete(Key::Frontend(key))),
        }
    }
}

/// What others ask.
impl Plan {
    /// The plan with all changes since the last sync: the same one, or a copy if there are some.
    pub(crate) fn settled(&self, now: Instant) -> Cow<'_, Self> {
        let is_settled = |plan: &FamilyPlan| {
            plan.changed_ports.is_empty()
                && plan.changed_frontends.is_empty()
                && plan.put_addresses == plan.node_addresses
        };
        if self.families.iter().all(is_settled) {
            return Cow::Borrowed(self);
        }
        let mut copy = self.clone();
        for family in Family::ALL {
            copy.changes(family, now);
        }
        Cow::Owned(copy)
    }

    /// Whether the socket level translates connections to a frontend, with the kind and service port that it belongs to.
    pub(crate) fn lookup(
        &self,
        family: Family,
        frontend: Frontend,
    ) -> Option<(FrontendKind, &Arc<ServicePort>, Result<SetKey, Reason>)> {
        let (kind, _, port) = self.family(family).claims.owner(frontend)?;
        let key = FrontendKey::of(frontend, family);
        let decided = self
            .frontend(family, frontend)
            .and_then(|_| self.family(family).frontends.get(&key).copied().ok_or(Reason::Full));
        Some((kind, port, decided))
    }

    pub(crate) fn placed(&self, family: Family, name: &PortName) -> Option<&Placed> {
        self.family(family).placed.get(name)
    }

    pub(crate) fn serves_node_ports_at(&self, family: Family, ip: IpAddr) -> bool {
        self.family(family).node_addresses.contains(&ip.into())
    }

    /// Whether the endpoint of a UDP flow to the address of a Service is gone, and another one serves: as for conntrack
    /// (service-semantics 4), flows stay while there is none. The Service may be another one than that of the flow.
    pub(crate) fn is_stale(&self, service: Remote, endpoint: Remote) -> bool {
        let (family, Endpoint { ip, port }) = (service.address.family(), service.endpoint());
        let protocol = Protocol::Udp;
        let at_address = Frontend::Address { ip, protocol, port };
        let at_node = self.serves_node_ports_at(family, ip).then_some(Frontend::NodePort { protocol, port });
        let claims = &self.family(family).claims;
        let owner =
            [Some(at_address), at_node].into_iter().flatten().find_map(|frontend| claims.owner(frontend));
        owner.is_some_and(|(_, _, port)| is_stale(port, endpoint.endpoint()))
    }

    pub(crate) fn take_lost_udp(&mut self) -> bool {
        std::mem::take(&mut self.has_lost_udp)
    }

    /// The number of service ports for which a map has no room.
    pub(crate) fn left_out(&self, family: Family) -> usize {
        self.family(family).left_out.len()
    }

    /// The number of the node's addresses for which the map has no room.
    pub(crate) fn left_addresses(&self, family: Family) -> usize {
        self.family(family).left_addresses
    }

    /// Cheap: read after every sync.
    pub(crate) fn usage(&self, family: Family) -> Usage {
        let plan = self.family(family);
        Usage {
            frontends: plan.frontends.len(),
            sets: plan.sets,
            slots: self.ranges.used(),
            members: plan.members,
            source_ranges: plan.source_ranges,
            left_out: plan.left_out.len(),
            node_addresses: plan.put_addresses.len(),
            left_addresses: plan.left_addresses,
        }
    }
}

fn puts_udp_frontend(change: &Change) -> bool {
    matches!(change, Change::Put(Element::Frontend(key, _)) if key.protocol == Protocol::Udp.number())
}

impl FamilyPlan {
    fn facts_of(&self, port: &ServicePort) -> NodeFacts {
        NodeFacts { has_cluster_ip: self.local.contains(&port.cluster_ip), ..self.facts }
    }

    fn current(&self, name: &PortName) -> Option<&Arc<ServicePort>> {
        self.services.get(&name.service)?.iter().find(|port| port.name == *name)
    }
}
