//! What a family should have in the kernel.
//!
//! Owns: [`Plan`]. In: service ports, facts about the node. Out: virtual servers ([`Plan::server`]), addresses of the interface
//! ([`Plan::binds`]), chains and sets; what of them has changed. Pure: no I/O, no clock.

mod chains;
mod marks;
mod policy;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
};

use keelson_client::ServiceName;
use keelson_proxy::{
    addresses::Match as Addresses,
    model::{Endpoint, Family, Frontend, FrontendKind, PortName, Protocol, ServicePort, WantedServices},
    options::Detector,
};
use keelson_proxy_xtables::{
    changes::{Changes, Wanted, key_of},
    names::{SetKind, SetName, Table},
    rule::chain_text,
    ruleset,
};

pub(crate) use self::{
    chains::{INTERNAL, chains},
    policy::{Refusal, SocketState},
};
use self::{
    marks::{Marks, field},
    policy::{entries, needs_mark, socket_state},
};
use crate::servers::{ServerKey, Socket, Spec, WantedServer};

/// The sets that always exist.
pub(crate) const SETS: [SetKind; 9] = [
    SetKind::Hairpin,
    SetKind::Reject,
    SetKind::Drop,
    SetKind::ClusterIps,
    SetKind::External,
    SetKind::Local,
    SetKind::Filtered,
    SetKind::Ranges,
    SetKind::Addresses,
];

/// What the plan depends on besides Services.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeFacts {
    /// The bit for masquerading.
    pub(crate) mark: u32,
    pub(crate) masquerade_all: bool,
    pub(crate) detector: Option<Detector>,
    pub(crate) node_ips: Vec<IpAddr>,
    pub(crate) node_ports: Addresses,
    /// The addresses of the node's interfaces, of the family.
    pub(crate) local: BTreeSet<IpAddr>,
    pub(crate) scheduler: String,
}

impl NodeFacts {
    /// The addresses at which node ports are served: never loopback or link-local ones, of which a virtual server cannot
    /// tell the interface.
    fn node_port_addresses(&self) -> Vec<IpAddr> {
        let usable =
            |ip: &IpAddr| !ip.is_loopback() && !matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        match &self.node_ports {
            Addresses::AllLocal => self.local.iter().copied().filter(usable).collect(),
            Addresses::Addresses(addresses) => addresses.iter().copied().filter(usable).collect(),
        }
    }
}

type Entry = (SetKind, String);

#[derive(Debug)]
pub(crate) struct Plan {
    family: Family,
    facts: NodeFacts,
    node_port_addresses: Vec<IpAddr>,
    services: WantedServices,
    marks: Marks,
    /// Number of frontends by address of Services.
    addresses: BTreeMap<IpAddr, u32>,
    /// Number of service ports by endpoint on this node.
    hairpin: HashMap<(Protocol, Endpoint), u32>,
    /// What was last taken; `None`: the next sync compares everything.
    taken: Option<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    /// Entries by frontend.
    sockets: BTreeMap<Socket, Vec<Entry>>,
    /// Those in their sets.
    bound: BTreeSet<IpAddr>,
    hairpin: HashSet<(Protocol, Endpoint)>,
    changed: Changed,
    changed_sockets: BTreeSet<Socket>,
    changed_addresses: BTreeSet<IpAddr>,
    changed_hairpin: HashSet<(Protocol, Endpoint)>,
}

/// What may have changed since the last time.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Changed {
    pub(crate) servers: BTreeSet<ServerKey>,
    pub(crate) addresses: BTreeSet<IpAddr>,
}

impl Plan {
    pub(crate) fn new(family: Family, facts: NodeFacts) -> Self {
        Self {
            family,
            node_port_addresses: facts.node_port_addresses(),
            facts,
            services: WantedServices::default(),
            marks: Marks::default(),
            addresses: BTreeMap::new(),
            hairpin: HashMap::new(),
            taken: None,
        }
    }

    pub(crate) fn facts(&self) -> &NodeFacts {
        &self.facts
    }

    /// If they are new, the next sync compares everything.
    pub(crate) fn set_facts(&mut self, facts: NodeFacts) {
        if self.facts != facts {
            self.node_port_addresses = facts.node_port_addresses();
            self.facts = facts;
            self.taken = None;
        }
    }

    /// Whether the next sync compares everything.
    pub(crate) fn is_unknown(&self) -> bool {
        self.taken.is_none()
    }

    /// Sets the ports of a Service; empty: it is deleted.
    pub(crate) fn set(&mut self, service: &ServiceName, ports: Vec<ServicePort>) {
        let mut services = std::mem::take(&mut self.services);
        if let Some(old) = services.set(service, ports) {
            self.replace_ports(&old, services.ports_of(service));
        }
        self.services = services;
    }

    fn replace_ports(&mut self, old: &[ServicePort], new: &[ServicePort]) {
        for port in old {
            self.note_changed(port);
            self.count(port, false);
            if !new.iter().any(|new| new.name == port.name && needs_mark(new)) {
                self.marks.remove(&port.name);
            }
        }
        for port in new {
            if needs_mark(port) {
                // Without one, pods and the node reach what others reach.
                self.marks.add(&port.name);
            }
            self.count(port, true);
            self.note_changed(port);
        }
    }

    fn count(&mut self, port: &ServicePort, is_added: bool) {
        for (frontend, _) in port.frontends() {
            let Frontend::Address { ip, .. } = frontend else { continue };
            let count = self.addresses.entry(ip).or_default();
            *count = if is_added { *count + 1 } else { count.saturating_sub(1) };
            if *count == 0 {
                self.addresses.remove(&ip);
            }
        }
        for endpoint in &port.on_node {
            let key = (port.name.protocol, *endpoint);
            let count = self.hairpin.entry(key).or_default();
            *count = if is_added { *count + 1 } else { count.saturating_sub(1) };
            if *count == 0 {
                self.hairpin.remove(&key);
            }
        }
    }

    /// Called for the former state of a port, and for the new one.
    fn note_changed(&mut self, port: &ServicePort) {
        let Some(mut taken) = self.taken.take() else { return };
        for (frontend, _) in port.frontends() {
            if let Frontend::Address { ip, .. } = frontend {
                taken.changed.addresses.insert(ip);
                taken.changed_addresses.insert(ip);
            }
            for socket in sockets(frontend, &self.node_port_addresses) {
                taken.changed_sockets.insert(socket);
                taken.changed.servers.insert(ServerKey::Socket(socket));
            }
        }
        for mark in self.marks_of(&port.name) {
            taken.changed.servers.insert(ServerKey::Mark(mark));
        }
        taken.changed_hairpin.extend(port.on_node.iter().map(|endpoint| (port.name.protocol, *endpoint)));
        self.taken = Some(taken);
    }

    /// The marks of a service port: of pods' packets, and of the node's.
    fn marks_of(&self, name: &PortName) -> Vec<u32> {
        let mark = self.marks.mark(name, self.facts.mark);
        mark.map_or_else(Vec::new, |mark| vec![mark, mark | self.facts.mark])
    }

    pub(crate) fn services(&self) -> &WantedServices {
        &self.services
    }

    /// Real servers and entries of sets, about.
    pub(crate) fn elements(&self) -> usize {
        let services = &self.services;
        services.counts().endpoints + services.frontend_count() + self.addresses.len() + self.hairpin.len()
    }

    /// The service port that gets the packets to an address and port. One with the address goes before a node port.
    pub(crate) fn at(&self, socket: Socket) -> Option<(FrontendKind, &ServicePort)> {
        let Socket { ip, protocol, port } = socket;
        self.services.lookup(Frontend::Address { ip, protocol, port }).or_else(|| {
            let is_served = self.node_port_addresses.contains(&ip);
            is_served.then(|| self.services.lookup(Frontend::NodePort { protocol, port })).flatten()
        })
    }

    pub(crate) fn serves_node_ports_at(&self, ip: IpAddr) -> bool {
        self.node_port_addresses.contains(&ip)
    }

    pub(crate) fn state(&self, socket: Socket) -> Option<SocketState<'_>> {
        let (kind, port) = self.at(socket)?;
        Some(socket_state(port, kind, socket.ip, &self.facts))
    }

    pub(crate) fn is_hairpin(&self, protocol: Protocol, endpoint: Endpoint) -> bool {
        self.hairpin.contains_key(&(protocol, endpoint)) && !self.facts.local.contains(&endpoint.ip)
    }

    /// The wanted virtual server; `None`: there is none.
    pub(crate) fn server(&self, key: ServerKey) -> Option<WantedServer<'_>> {
        let (port, endpoints) = match key {
            ServerKey::Socket(socket) => (self.at(socket)?.1, self.state(socket)?.endpoints),
            ServerKey::Mark(mark) => {
                let port = self.services.port(self.marks.name(mark, self.facts.mark)?)?;
                (port, port.cluster.as_slice())
            }
        };
        let spec = Spec::new(&self.facts.scheduler, port.name.protocol, port.affinity_seconds);
        (!endpoints.is_empty()).then_some(WantedServer { spec, endpoints, serving: &port.serving })
    }

    /// The keys of all wanted virtual servers.
    pub(crate) fn servers(&self) -> BTreeSet<ServerKey> {
        let sockets = self.sockets().into_iter().map(ServerKey::Socket);
        let marks = self.marks.marks(self.facts.mark).flat_map(|mark| [mark, mark | self.facts.mark]);
        let all = sockets.chain(marks.map(ServerKey::Mark));
        all.filter(|key| self.server(*key).is_some()).collect()
    }

    fn sockets(&self) -> BTreeSet<Socket> {
        self.services.frontends().flat_map(|frontend| sockets(frontend, &self.node_port_addresses)).collect()
    }

    /// Whether the interface should have an address: another one may have it already.
    pub(crate) fn binds(&self, ip: IpAddr) -> bool {
        self.addresses.contains_key(&ip) && !self.facts.local.contains(&ip)
    }

    /// The addresses that the interface should have.
    pub(crate) fn bound(&self) -> BTreeSet<IpAddr> {
        self.addresses.keys().copied().filter(|ip| !self.facts.local.contains(ip)).collect()
    }

    /// What may have changed since the last time; call it before [`ruleset::Plan::take_changes`].
    pub(crate) fn take_changed(&mut self) -> Changed {
        self.taken.as_mut().map(|taken| std::mem::take(&mut taken.changed)).unwrap_or_default()
    }

    fn entries(&self, socket: Socket) -> Option<Vec<Entry>> {
        let (kind, port) = self.at(socket)?;
        let state = socket_state(port, kind, socket.ip, &self.facts);
        let mark = self.marks.mark(&port.name, self.facts.mark);
        Some(entries(&state, socket, mark.map(|mark| (mark, field(self.facts.mark)))))
    }

    fn all_entries(&self) -> BTreeMap<Socket, Vec<Entry>> {
        self.sockets().into_iter().filter_map(|socket| Some((socket, self.entries(socket)?))).collect()
    }

    fn set_name(&self, kind: SetKind) -> SetName {
        SetName::fixed(self.family, kind)
    }

    fn wanted_with(&self, sockets: &BTreeMap<Socket, Vec<Entry>>) -> Wanted {
        let mut wanted = Wanted::default();
        for (table, chain, rules) in chains(self.family, &self.facts) {
            wanted.chains_mut(table).insert(chain.to_owned(), chain_text(chain, &rules));
        }
        for kind in SETS {
            wanted.sets.entry(self.set_name(kind)).or_default();
        }
        let of_sockets = sockets.values().flatten().cloned();
        let addresses = self.bound().into_iter().map(|ip| (SetKind::Addresses, ip.to_string()));
        let hairpin =
            self.hairpin.keys().filter(|(protocol, endpoint)| self.is_hairpin(*protocol, *endpoint));
        let hairpin =
            hairpin.map(|(protocol, endpoint)| (SetKind::Hairpin, hairpin_entry(*protocol, *endpoint)));
        for (kind, entry) in of_sockets.chain(addresses).chain(hairpin) {
            wanted.sets.entry(self.set_name(kind)).or_default().insert(entry);
        }
        wanted
    }
}

/// Where packets to a frontend arrive.
fn sockets(frontend: Frontend, node_port_addresses: &[IpAddr]) -> Vec<Socket> {
    match frontend {
        Frontend::Address { ip, protocol, port } => vec![Socket { ip, protocol, port }],
        Frontend::NodePort { protocol, port } => {
            node_port_addresses.iter().map(|ip| Socket { ip: *ip, protocol, port }).collect()
        }
    }
}

fn hairpin_entry(protocol: Protocol, Endpoint { ip, port }: Endpoint) -> String {
    format!("{ip},{}:{port},{ip}", protocol.keyword())
}

impl ruleset::Plan for Plan {
    const TABLES: &'static [Table] = &Table::ALL;

    fn family(&self) -> Family {
        self.family
    }

    fn has_changes(&self) -> bool {
        self.taken.as_ref().is_none_or(|taken| {
            !taken.changed_sockets.is_empty()
                || !taken.changed_hairpin.is_empty()
                || taken.changed != Changed::default()
        })
    }

    fn invalidate(&mut self) {
        self.taken = None;
    }

    fn take_changes(&mut self) -> Option<Changes> {
        let mut taken = self.taken.take()?;
        let mut changes = Changes::default();
        for socket in std::mem::take(&mut taken.changed_sockets) {
            let (old, new) = (taken.sockets.remove(&socket).unwrap_or_default(), self.entries(socket));
            let added = new.iter().flatten().filter(|entry| !old.contains(entry));
            changes.add_entries.extend(added.map(|(kind, entry)| (self.set_name(*kind), entry.clone())));
            // An entry with another mark replaces the old one.
            let stays = |(kind, entry): &&Entry| {
                new.iter().flatten().any(|(of, with)| of == kind && key_of(with) == key_of(entry))
            };
            let deleted = old.iter().filter(|entry| !stays(entry));
            changes.delete_entries.extend(deleted.map(|(kind, entry)| (self.set_name(*kind), entry.clone())));
            taken.sockets.extend(new.map(|entries| (socket, entries)));
        }
        let mut put = |kind, entry: String, was: bool, is: bool| match (was, is) {
            (false, true) => changes.add_entries.push((self.set_name(kind), entry)),
            (true, false) => changes.delete_entries.push((self.set_name(kind), entry)),
            _ => {}
        };
        for ip in std::mem::take(&mut taken.changed_addresses) {
            let is = self.binds(ip);
            let was = if is { !taken.bound.insert(ip) } else { taken.bound.remove(&ip) };
            put(SetKind::Addresses, ip.to_string(), was, is);
        }
        for key in std::mem::take(&mut taken.changed_hairpin) {
            let is = self.is_hairpin(key.0, key.1);
            let was = if is { !taken.hairpin.insert(key) } else { taken.hairpin.remove(&key) };
            put(SetKind::Hairpin, hairpin_entry(key.0, key.1), was, is);
        }
        self.taken = Some(taken);
        Some(changes)
    }

    fn take_wanted(&mut self) -> Wanted {
        let sockets = self.all_entries();
        let wanted = self.wanted_with(&sockets);
        let hairpin = self.hairpin.keys().filter(|key| self.is_hairpin(key.0, key.1)).copied().collect();
        self.taken = Some(Taken { sockets, bound: self.bound(), hairpin, ..Taken::default() });
        wanted
    }

    fn wanted(&self) -> Wanted {
        self.wanted_with(&self.all_entries())
    }
}
