//! The places of a family, and what listens there.
//!
//! Owns: [`Table`]: the plan, the sockets, the mapped ports and the routes of a family. In: Services, the node. Out:
//! listeners, through [`Relay`].
//!
//! A sync touches only frontends that changed. What is new listens before what is gone stops. A place that cannot be
//! bound does not fail the sync: one port in use by another program must not make the node unhealthy. It is mapped or
//! `failing`, and retried.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use keelson_proxy::{
    addresses::Match,
    backend::Outcome,
    conntrack::UdpFrontend,
    model::{Endpoint, Family, Frontend, PortName, ServicePort},
    options::{NodeConfig, RelayOptions},
};

use crate::{
    plan::{MappedPorts, NodeFacts, Plan, Rule, SocketKey, is_served, reachable, wanted_sockets},
    relay::{Listener, OpenSocket, Relay},
    routes::Routes,
};

/// Maximum time that a sync waits until sockets of removed frontends are closed, so that their addresses are free.
const CLOSE_WAIT: Duration = Duration::from_secs(5);

/// Candidates for a mapped port, if other programs use the first ones.
const MAP_ATTEMPTS: u16 = 16;

/// Interval of forgetting clients with session affinity.
const CLEAN_INTERVAL: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) rule: Arc<Rule>,
    pub(crate) status: PlaceStatus,
}

#[derive(Debug)]
pub(crate) enum PlaceStatus {
    /// Nothing listens, so that the kernel rejects.
    Rejecting,
    Listening(Listener),
    /// Listens at a loopback port, because the place cannot be bound.
    Mapped {
        listener: Listener,
        reason: String,
    },
    Failing(String),
}

#[derive(Debug)]
pub(crate) struct Table {
    family: Family,
    plan: Plan,
    node: Option<NodeConfig>,
    node_changed: bool,
    /// The addresses of the node's interfaces, as of the last sync.
    local: BTreeSet<IpAddr>,
    places: BTreeMap<SocketKey, Place>,
    by_frontend: BTreeMap<Frontend, Vec<SocketKey>>,
    mapped: MappedPorts,
    routes: Routes,
    has_synced: bool,
    closing: Vec<OpenSocket>,
    last_retry: Option<Instant>,
    last_clean: Option<Instant>,
}

/// Numbers of places by status.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlaceCounts {
    pub(crate) listening: usize,
    pub(crate) mapped: usize,
    pub(crate) rejecting: usize,
    pub(crate) failing: usize,
}

impl Table {
    pub(crate) fn new(family: Family, options: &RelayOptions) -> Self {
        Self {
            family,
            plan: Plan::default(),
            node: None,
            node_changed: false,
            local: BTreeSet::new(),
            places: BTreeMap::new(),
            by_frontend: BTreeMap::new(),
            mapped: MappedPorts::new(options.mapped_port_base),
            routes: Routes::new(family, options.redirect),
            has_synced: false,
            closing: Vec::new(),
            last_retry: None,
            last_clean: None,
        }
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    pub(crate) fn plan_mut(&mut self) -> &mut Plan {
        &mut self.plan
    }

    pub(crate) fn routes(&self) -> &Routes {
        &self.routes
    }

    pub(crate) fn routes_mut(&mut self) -> &mut Routes {
        &mut self.routes
    }

    pub(crate) fn has_synced(&self) -> bool {
        self.has_synced
    }

    pub(crate) fn place(&self, key: &SocketKey) -> Option<&Place> {
        self.places.get(key)
    }

    pub(crate) fn set_node(&mut self, node: NodeConfig) {
        self.node = Some(node);
        self.node_changed = true;
    }

    pub(crate) fn has_changes(&self) -> bool {
        self.node_changed || self.plan.has_changes()
    }

    /// What decisions depend on, with these addresses of the node.
    pub(crate) fn facts(&self, local: &BTreeSet<IpAddr>) -> NodeFacts {
        NodeFacts {
            pods: NodeFacts::pods_of(self.node.as_ref().and_then(|node| node.detector.as_ref())),
            node_ips: self.node.iter().flat_map(|node| node.node_ips.iter().copied()).collect(),
            local: local.clone(),
        }
    }

    /// The addresses at which node ports are served.
    pub(crate) fn node_port_addresses(&self, local: &BTreeSet<IpAddr>) -> Vec<IpAddr> {
        match self.node.as_ref().map(|node| &node.node_ports) {
            Some(Match::Addresses(addresses)) => addresses.clone(),
            Some(Match::AllLocal) => local.iter().copied().filter(|ip| self.family.has(ip)).collect(),
            None => Vec::new(),
        }
    }

    /// The places of a frontend and its rule. An address and port of a Service precedes the same one of a node port.
    pub(crate) fn wanted(&self, frontend: Frontend, node_ports: &[IpAddr]) -> Vec<(SocketKey, Rule)> {
        let Some(rule) = self.plan.rule(frontend) else { return Vec::new() };
        if !is_served(rule.port.name.protocol) {
            return Vec::new();
        }
        let is_free = |key: &SocketKey| {
            let (ip, port) = (key.address.ip(), key.address.port());
            let address = Frontend::Address { ip, protocol: key.protocol, port };
            address == frontend || self.plan.rule(address).is_none()
        };
        let keys = wanted_sockets(frontend, node_ports).into_iter().filter(is_free);
        keys.map(|key| (key, rule.clone())).collect()
    }

    /// Brings the sockets to the wanted state. `local`: the addresses of the node's interfaces.
    pub(crate) fn sync(&mut self, relay: &Relay, local: BTreeSet<IpAddr>) -> Outcome {
        let full = !self.has_synced || self.node_changed || local != self.local;
        let mut changed = self.plan.take_changed();
        if full {
            if !self.has_synced {
                self.routes.adopt();
            }
            relay.shared().set_facts(self.family, self.facts(&local));
            changed.extend(self.by_frontend.keys().copied());
            changed.extend(self.plan.rules().map(|rule| rule.frontend));
        }
        changed.extend(changed.clone().into_iter().filter_map(node_port_beside));
        self.local = local;
        let node_ports = self.node_port_addresses(&self.local);
        let mut outcome = Outcome { full, ..Outcome::default() };
        let mut obsolete = Vec::new();
        self.wait_for_closing();
        for frontend in changed {
            let wanted = self.wanted(frontend, &node_ports);
            let before = self.by_frontend.remove(&frontend).unwrap_or_default();
            let keys: Vec<SocketKey> = wanted.iter().map(|(key, _)| *key).collect();
            obsolete.extend(before.into_iter().filter(|key| !keys.contains(key)).map(|key| (frontend, key)));
            for (key, rule) in wanted {
                self.ensure(relay, key, Arc::new(rule), &mut outcome);
            }
            if !keys.is_empty() {
                self.by_frontend.insert(frontend, keys);
            }
        }
        for (frontend, key) in obsolete {
            self.remove(frontend, &key, &mut outcome);
        }
        outcome.structure += self.routes.remove_unused();
        outcome.transactions = usize::from(!outcome.is_nothing());
        self.node_changed = false;
        self.has_synced = true;
        outcome
    }

    fn ensure(&mut self, relay: &Relay, key: SocketKey, rule: Arc<Rule>, outcome: &mut Outcome) {
        let before = self.places.remove(&key);
        if let Some(place) = &before
            && place.rule.frontend != rule.frontend
        {
            self.forget_user(place.rule.frontend, &key);
        }
        outcome.structure += usize::from(self.route(&rule, &key));
        outcome.added += usize::from(before.as_ref().is_none_or(|place| place.rule != rule));
        let status = match before.map(|place| place.status) {
            Some(status) if rule.rejects_all() => {
                self.close(key, status, outcome);
                PlaceStatus::Rejecting
            }
            None if rule.rejects_all() => PlaceStatus::Rejecting,
            Some(PlaceStatus::Listening(listener)) if !listener.is_dead() => {
                listener.set_rule(rule.clone());
                PlaceStatus::Listening(listener)
            }
            Some(PlaceStatus::Mapped { listener, reason }) if !listener.is_dead() => {
                listener.set_rule(rule.clone());
                PlaceStatus::Mapped { listener, reason }
            }
            _ => {
                let status = self.open(relay, key, &rule);
                outcome.structure += usize::from(!matches!(status, PlaceStatus::Failing(_)));
                status
            }
        };
        self.places.insert(key, Place { rule, status });
    }

    /// Leads packets to an address of a Service here, if needed: also to one that an interface has no longer.
    fn route(&mut self, rule: &Rule, key: &SocketKey) -> bool {
        let Frontend::Address { ip, .. } = rule.frontend else { return false };
        debug_assert_eq!(ip, key.address.ip());
        let is_local = ip.is_loopback() || self.local.contains(&ip);
        self.routes.add_user(ip, rule.frontend, is_local)
    }

    fn forget_user(&mut self, frontend: Frontend, key: &SocketKey) {
        if matches!(frontend, Frontend::Address { .. }) {
            self.routes.remove_user(key.address.ip(), frontend);
        }
    }

    fn open(&mut self, relay: &Relay, key: SocketKey, rule: &Arc<Rule>) -> PlaceStatus {
        let routed = self.routes.has(key.address.ip());
        let error = match relay.listen(key.address, key, rule.clone(), routed) {
            Ok(listener) => return PlaceStatus::Listening(listener),
            Err(error) => error,
        };
        let reason = bind_reason(&error, self.routes.disabled_reason());
        if error.kind() == io::ErrorKind::QuotaExceeded {
            if relay.shared().may_warn("descriptors") {
                tracing::warn!(place = %key, service_port = %rule.port.name, reason, "cannot listen for Services");
            }
            return PlaceStatus::Failing(reason);
        }
        if matches!(rule.frontend, Frontend::NodePort { .. }) {
            tracing::warn!(place = %key, service_port = %rule.port.name, reason, "cannot listen at a node port");
            return PlaceStatus::Failing(reason);
        }
        for skip in 0..MAP_ATTEMPTS {
            let address: SocketAddr = self.mapped.assign(key, skip);
            if let Ok(listener) = relay.listen(address, key, rule.clone(), false) {
                tracing::debug!(place = %key, address = %listener.address(), reason, "Service is at a mapped port");
                return PlaceStatus::Mapped { listener, reason };
            }
        }
        self.mapped.release(&key);
        tracing::warn!(place = %key, service_port = %rule.port.name, reason, "cannot listen for a Service");
        PlaceStatus::Failing(reason)
    }

    fn close(&mut self, key: SocketKey, status: PlaceStatus, outcome: &mut Outcome) {
        if let PlaceStatus::Listening(listener) | PlaceStatus::Mapped { listener, .. } = status {
            self.closing.push(listener.socket());
            outcome.structure += 1;
        }
        self.mapped.release(&key);
    }

    fn remove(&mut self, frontend: Frontend, key: &SocketKey, outcome: &mut Outcome) {
        if self.places.get(key).is_none_or(|place| place.rule.frontend != frontend) {
            return;
        }
        if let Some(place) = self.places.remove(key) {
            self.forget_user(frontend, key);
            self.close(*key, place.status, outcome);
            outcome.deleted += 1;
        }
    }

    /// A socket is closed by its task, shortly after its listener is dropped.
    fn wait_for_closing(&mut self) {
        let begun = Instant::now();
        self.closing.retain(|socket| !socket.is_closed());
        while !self.closing.is_empty() && begun.elapsed() < CLOSE_WAIT {
            thread::sleep(Duration::from_millis(1));
            self.closing.retain(|socket| !socket.is_closed());
        }
    }

    /// Tries again what could not be bound, each `period`; opens what ended by itself; forgets old clients.
    pub(crate) fn maintain(&mut self, relay: &Relay, now: Instant, period: Duration) -> Outcome {
        if self.last_clean.is_none_or(|last| now.duration_since(last) >= CLEAN_INTERVAL) {
            self.last_clean = Some(now);
            self.clean_affinity(relay);
        }
        let is_due = self.last_retry.is_none_or(|last| now.duration_since(last) >= period);
        if !is_due && !self.has_dead_listener() {
            return Outcome::default();
        }
        self.last_retry = Some(now);
        self.retry(relay)
    }

    pub(crate) fn has_dead_listener(&self) -> bool {
        self.places.values().any(|place| place.status.is_dead())
    }

    fn retry(&mut self, relay: &Relay) -> Outcome {
        let mut outcome = Outcome::default();
        let needs_retry = |place: &Place| match &place.status {
            PlaceStatus::Failing(_) | PlaceStatus::Mapped { .. } => true,
            PlaceStatus::Listening(listener) => listener.is_dead(),
            PlaceStatus::Rejecting => false,
        };
        let keys: Vec<SocketKey> =
            self.places.iter().filter(|(_, place)| needs_retry(place)).map(|(key, _)| *key).collect();
        for key in keys {
            let Some(place) = self.places.remove(&key) else { continue };
            let routed = self.routes.has(key.address.ip());
            let status = match relay.listen(key.address, key, place.rule.clone(), routed) {
                Ok(listener) => {
                    self.close(key, place.status, &mut outcome);
                    outcome.structure += 1;
                    PlaceStatus::Listening(listener)
                }
                Err(_) if place.status.is_dead() => self.open(relay, key, &place.rule),
                Err(_) => place.status,
            };
            self.places.insert(key, Place { rule: place.rule, status });
        }
        outcome.transactions = usize::from(!outcome.is_nothing());
        outcome
    }

    fn clean_affinity(&self, relay: &Relay) {
        let mut known: BTreeMap<&PortName, BTreeSet<Endpoint>> = BTreeMap::new();
        for port in self.plan.service_ports().filter(|port| port.affinity_seconds != 0) {
            known.insert(&port.name, reachable(port));
        }
        let is_known = |port: &PortName, endpoint| known.get(port).is_some_and(|set| set.contains(&endpoint));
        relay.shared().clean_affinity(self.family, is_known);
    }

    /// Service ports of UDP, each with its own addresses besides its endpoints.
    pub(crate) fn udp_frontends(&self) -> Vec<UdpFrontend> {
        let node_ports = self.node_port_addresses(&self.local);
        let of = |port: &Arc<ServicePort>| {
            let mut frontend = UdpFrontend::of(port)?;
            let own = frontend.addresses.iter().map(|&ip| Endpoint { ip, port: frontend.port });
            let at_node = node_ports.iter().map(|&ip| Endpoint { ip, port: frontend.node_port });
            let own: Vec<Endpoint> = own.chain(at_node.filter(|at| at.port != 0)).collect();
            frontend.serving.extend(own);
            Some(frontend)
        };
        self.plan.service_ports().filter_map(of).collect()
    }

    #[cfg(test)]
    pub(crate) fn sockets(&self) -> Vec<OpenSocket> {
        let listening =
            self.places.values().filter_map(|place| place.status.listener().map(Listener::socket));
        listening.chain(self.closing.iter().cloned()).collect()
    }

    pub(crate) fn counts(&self) -> PlaceCounts {
        let mut counts = PlaceCounts::default();
        for place in self.places.values() {
            *match place.status {
                PlaceStatus::Rejecting => &mut counts.rejecting,
                PlaceStatus::Listening(_) => &mut counts.listening,
                PlaceStatus::Mapped { .. } => &mut counts.mapped,
                PlaceStatus::Failing(_) => &mut counts.failing,
            } += 1;
        }
        counts
    }

    /// How a full sync would change the places: `+`, `-` or `~` and a place.
    pub(crate) fn changes(&self, local: &BTreeSet<IpAddr>) -> Vec<String> {
        let node_ports = self.node_port_addresses(local);
        let mut wanted = BTreeMap::new();
        for rule in self.plan.rules() {
            wanted.extend(self.wanted(rule.frontend, &node_ports));
        }
        let gone = self.places.iter().filter(|(key, _)| !wanted.contains_key(key));
        let mut lines: Vec<String> = gone.map(|(key, _)| format!("- {key}")).collect();
        for (key, rule) in &wanted {
            match self.places.get(key) {
                None => lines.push(format!("+ {key} {rule}")),
                Some(place) if *place.rule != *rule => lines.push(format!("~ {key} {rule}")),
                Some(_) => {}
            }
        }
        lines
    }
}

impl PlaceStatus {
    fn listener(&self) -> Option<&Listener> {
        match self {
            Self::Listening(listener) | Self::Mapped { listener, .. } => Some(listener),
            Self::Rejecting | Self::Failing(_) => None,
        }
    }

    fn is_dead(&self) -> bool {
        self.listener().is_some_and(Listener::is_dead)
    }
}

/// The node port that may have lost a place to the frontend, or get it back.
fn node_port_beside(frontend: Frontend) -> Option<Frontend> {
    match frontend {
        Frontend::Address { protocol, port, .. } => Some(Frontend::NodePort { protocol, port }),
        Frontend::NodePort { .. } => None,
    }
}

fn bind_reason(error: &io::Error, no_routes: Option<&str>) -> String {
    match error.kind() {
        io::ErrorKind::AddrNotAvailable => {
            let routes = no_routes.map_or_else(String::new, |why| format!(", and no route is added: {why}"));
            format!("no interface of this node has the address{routes}")
        }
        io::ErrorKind::AddrInUse => "another program listens there".into(),
        io::ErrorKind::PermissionDenied => "no permission to listen at this port".into(),
        _ => error.to_string(),
    }
}
