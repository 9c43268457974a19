//! The wanted chains and sets of a family.
//!
//! Owns: [`Plan`]. In: service ports, facts about the node. Out: [`Changes`] since the last sync, or everything
//! ([`Wanted`]). Pure: no I/O, no clock.
//!
//! The plan keeps service ports, and no text of chains: what a Service had is computed again from what it was. Of
//! frontends and of the chains of the trees it keeps fingerprints. The trees are computed anew when a frontend changes: at
//! 10,000 Services some tens of milliseconds, less than one call of `iptables-restore`.

mod fixed;
mod port;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

use keelson_client::ServiceName;
use keelson_proxy::{
    addresses::Match as Addresses,
    model::{Endpoint, Family, Frontend, Protocol, ServicePort, WantedServices},
    options::Detector,
};

pub(crate) use port::{FrontendState, Refusal};

use self::{
    fixed::{fixed_chains, tree_chains},
    port::{affinity_sets, chains, frontend_state},
};
use crate::{
    changes::{Changes, Wanted},
    names::{FIXED_SETS, SetKind, SetName, Table},
    rule::{Rule, chain_text},
    ruleset,
    save::Fingerprint,
};

/// What the rules depend on besides Services.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeFacts {
    pub(crate) mark: u32,
    pub(crate) masquerade_all: bool,
    pub(crate) detector: Option<Detector>,
    pub(crate) node_ips: Vec<IpAddr>,
    pub(crate) node_ports: Addresses,
    /// Node ports are served at 127.0.0.0/8.
    pub(crate) serves_loopback: bool,
    /// Packets that conntrack does not know are not forwarded.
    pub(crate) drops_invalid: bool,
}

#[derive(Debug)]
pub(crate) struct Plan {
    family: Family,
    facts: NodeFacts,
    services: WantedServices,
    /// Number of service ports by endpoint on this node.
    hairpin: HashMap<(Protocol, Endpoint), u32>,
    /// What was last taken; `None`: the next sync compares everything.
    taken: Option<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    frontends: BTreeMap<Frontend, TakenFrontend>,
    trees: BTreeMap<String, Fingerprint>,
    /// The former ports of Services that have changed since.
    services: HashMap<ServiceName, Vec<ServicePort>>,
    claimed: BTreeSet<Frontend>,
    /// Whether these were in the set.
    hairpin: HashMap<(Protocol, Endpoint), bool>,
}

/// A [`FrontendState`], in less memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TakenFrontend {
    /// `None`: it has none.
    rules: Option<Fingerprint>,
    refusal: Option<Refusal>,
}

impl TakenFrontend {
    fn of(state: &FrontendState) -> Self {
        let rules = (!state.rules.is_empty()).then(|| Fingerprint::of(&chain_text("", &state.rules)));
        Self { rules, refusal: state.refusal }
    }
}

impl Plan {
    pub(crate) fn new(family: Family, facts: NodeFacts) -> Self {
        Self { family, facts, services: WantedServices::default(), hairpin: HashMap::new(), taken: None }
    }

    pub(crate) fn facts(&self) -> &NodeFacts {
        &self.facts
    }

    /// If they are new, the next sync compares everything.
    pub(crate) fn set_facts(&mut self, facts: NodeFacts) {
        if self.facts != facts {
            self.facts = facts;
            self.taken = None;
        }
    }

    /// Sets the ports of a Service; empty: it is deleted.
    pub(crate) fn set(&mut self, service: &ServiceName, ports: Vec<ServicePort>) {
        let mut services = std::mem::take(&mut self.services);
        if let Some(old) = services.set(service, ports) {
            self.note_changed(service, old, services.ports_of(service));
        }
        self.services = services;
    }

    fn note_changed(&mut self, service: &ServiceName, old: Vec<ServicePort>, new: &[ServicePort]) {
        old.iter().for_each(|port| self.count_hairpin(port, false));
        new.iter().for_each(|port| self.count_hairpin(port, true));
        if let Some(taken) = &mut self.taken {
            let all = old.iter().chain(new);
            taken.claimed.extend(all.flat_map(|port| port.frontends().map(|(frontend, _)| frontend)));
            taken.services.entry(service.clone()).or_insert(old);
        }
    }

    fn count_hairpin(&mut self, port: &ServicePort, is_added: bool) {
        for endpoint in &port.on_node {
            let key = (port.name.protocol, *endpoint);
            let count = self.hairpin.entry(key).or_default();
            if let Some(taken) = &mut self.taken {
                taken.hairpin.entry(key).or_insert(*count > 0);
            }
            *count = if is_added { *count + 1 } else { count.saturating_sub(1) };
            if *count == 0 {
                self.hairpin.remove(&key);
            }
        }
    }

    pub(crate) fn services(&self) -> &WantedServices {
        &self.services
    }

    /// Rules and entries of sets, about.
    pub(crate) fn elements(&self) -> usize {
        self.services.counts().endpoints + self.services.frontend_count() + self.hairpin.len()
    }

    pub(crate) fn frontend_state(&self, frontend: Frontend) -> Option<FrontendState> {
        let (kind, port) = self.services.lookup(frontend)?;
        Some(frontend_state(port, frontend, kind, &self.facts))
    }

    fn frontend_states(&self) -> BTreeMap<Frontend, FrontendState> {
        self.services
            .frontends()
            .filter_map(|frontend| Some((frontend, self.frontend_state(frontend)?)))
            .collect()
    }

    fn tree_texts(&self, frontends: &BTreeMap<Frontend, FrontendState>) -> BTreeMap<String, String> {
        let text = |(chain, rules): (String, Vec<Rule>)| {
            let text = chain_text(&chain, &rules);
            (chain, text)
        };
        tree_chains(self.family, frontends).into_iter().map(text).collect()
    }

    /// Every chain of a table that a packet to these frontends may meet, by name.
    pub(crate) fn chains_of(&self, asked: &[Frontend]) -> [BTreeMap<String, Vec<Rule>>; 2] {
        let [mut nat, mut filter] = [BTreeMap::new(), BTreeMap::new()];
        for (table, chain, rules) in fixed_chains(self.family, &self.facts) {
            let chains = if table == Table::Nat { &mut nat } else { &mut filter };
            chains.insert(chain, rules);
        }
        nat.extend(tree_chains(self.family, &self.frontend_states()));
        for (_, port) in asked.iter().filter_map(|frontend| self.services.lookup(*frontend)) {
            nat.extend(chains(port, self.family, &self.facts));
        }
        [nat, filter]
    }

    pub(crate) fn is_hairpin(&self, protocol: Protocol, endpoint: Endpoint) -> bool {
        self.hairpin.contains_key(&(protocol, endpoint))
    }

    fn wanted_with(
        &self,
        frontends: &BTreeMap<Frontend, FrontendState>,
        trees: BTreeMap<String, String>,
    ) -> Wanted {
        let mut wanted = Wanted::default();
        wanted.chains_mut(Table::Nat).extend(trees);
        for (table, chain, rules) in fixed_chains(self.family, &self.facts) {
            let text = chain_text(&chain, &rules);
            wanted.chains_mut(table).insert(chain, text);
        }
        for kind in FIXED_SETS {
            wanted.sets.entry(SetName::fixed(self.family, kind)).or_default();
        }
        for port in self.services.ports() {
            for (chain, rules) in chains(port, self.family, &self.facts) {
                let text = chain_text(&chain, &rules);
                wanted.chains_mut(Table::Nat).insert(chain, text);
            }
            let affinity = affinity_sets(port, self.family);
            wanted.sets.extend(affinity.into_iter().map(|set| (set, BTreeSet::new())));
        }
        let refusals = frontends.iter().flat_map(|(frontend, state)| self.refusals(*frontend, state.refusal));
        for (set, entry) in refusals {
            wanted.sets.entry(set).or_default().insert(entry);
        }
        let hairpin = wanted.sets.entry(SetName::fixed(self.family, SetKind::Hairpin)).or_default();
        hairpin.extend(self.hairpin.keys().map(|(protocol, endpoint)| hairpin_entry(*protocol, *endpoint)));
        wanted
    }

    fn refusals(&self, frontend: Frontend, refusal: Option<Refusal>) -> Vec<(SetName, String)> {
        let Some(refusal) = refusal else { return Vec::new() };
        let kind = match (frontend, refusal) {
            (Frontend::Address { .. }, Refusal::Drop) => SetKind::Drop,
            (Frontend::Address { .. }, Refusal::Reject) => SetKind::Reject,
            (Frontend::NodePort { .. }, Refusal::Drop) => SetKind::DropNodePorts,
            (Frontend::NodePort { .. }, Refusal::Reject) => SetKind::RejectNodePorts,
        };
        let entries = match frontend {
            Frontend::Address { ip, protocol, port } => vec![format!("{ip},{}:{port}", protocol.keyword())],
            Frontend::NodePort { protocol, port } => {
                let halves = match self.family {
                    Family::V4 => ["0.0.0.0/1", "128.0.0.0/1"],
                    Family::V6 => ["::/1", "8000::/1"],
                };
                halves.map(|half| format!("{half},{}:{port}", protocol.keyword())).into()
            }
        };
        entries.into_iter().map(|entry| (SetName::fixed(self.family, kind), entry)).collect()
    }

    fn change_ports(&self, before: &[ServicePort], after: &[ServicePort], changes: &mut Changes) {
        let texts = |ports: &[ServicePort]| -> BTreeMap<String, String> {
            let all = ports.iter().flat_map(|port| chains(port, self.family, &self.facts));
            all.map(|(chain, rules)| (chain.clone(), chain_text(&chain, &rules))).collect()
        };
        changes.compare_chains(Table::Nat, texts(after), &fingerprints(&texts(before)));
        let sets = |ports: &[ServicePort]| -> BTreeSet<SetName> {
            ports.iter().flat_map(|port| affinity_sets(port, self.family)).collect()
        };
        let (old, new) = (sets(before), sets(after));
        changes.create_sets.extend(new.difference(&old).cloned());
        changes.destroy_sets.extend(old.difference(&new).map(ToString::to_string));
    }
}

impl ruleset::Plan for Plan {
    const TABLES: &'static [Table] = &[Table::Nat, Table::Filter];

    fn family(&self) -> Family {
        self.family
    }

    fn has_changes(&self) -> bool {
        self.taken.as_ref().is_none_or(|taken| !taken.services.is_empty())
    }

    fn invalidate(&mut self) {
        self.taken = None;
    }

    fn take_changes(&mut self) -> Option<Changes> {
        let mut taken = self.taken.take()?;
        let mut changes = Changes::default();
        for (service, before) in std::mem::take(&mut taken.services) {
            let after = self.services.ports_of(&service);
            self.change_ports(&before, after, &mut changes);
        }
        let mut is_tree_changed = false;
        for frontend in std::mem::take(&mut taken.claimed) {
            let before = taken.frontends.remove(&frontend);
            let after = self.frontend_state(frontend).as_ref().map(TakenFrontend::of);
            let refusals =
                |state: Option<TakenFrontend>| self.refusals(frontend, state.and_then(|state| state.refusal));
            let (old, new) = (refusals(before), refusals(after));
            changes.delete_entries.extend(old.iter().filter(|entry| !new.contains(entry)).cloned());
            changes.add_entries.extend(new.into_iter().filter(|entry| !old.contains(entry)));
            let rules = |state: Option<TakenFrontend>| state.and_then(|state| state.rules);
            is_tree_changed |= rules(before) != rules(after);
            taken.frontends.extend(after.map(|state| (frontend, state)));
        }
        for ((protocol, endpoint), was) in std::mem::take(&mut taken.hairpin) {
            let entry = (SetName::fixed(self.family, SetKind::Hairpin), hairpin_entry(protocol, endpoint));
            match (was, self.is_hairpin(protocol, endpoint)) {
                (false, true) => changes.add_entries.push(entry),
                (true, false) => changes.delete_entries.push(entry),
                _ => {}
            }
        }
        if is_tree_changed {
            let trees = self.tree_texts(&self.frontend_states());
            let known = std::mem::replace(&mut taken.trees, fingerprints(&trees));
            changes.compare_chains(Table::Nat, trees, &known);
        }
        self.taken = Some(taken);
        Some(changes)
    }

    fn wanted(&self) -> Wanted {
        let frontends = self.frontend_states();
        let trees = self.tree_texts(&frontends);
        self.wanted_with(&frontends, trees)
    }

    fn take_wanted(&mut self) -> Wanted {
        let frontends = self.frontend_states();
        let trees = self.tree_texts(&frontends);
        let taken = Taken {
            frontends: frontends.iter().map(|(at, state)| (*at, TakenFrontend::of(state))).collect(),
            trees: fingerprints(&trees),
            ..Taken::default()
        };
        self.taken = Some(taken);
        self.wanted_with(&frontends, trees)
    }
}

fn fingerprints(texts: &BTreeMap<String, String>) -> BTreeMap<String, Fingerprint> {
    texts.iter().map(|(chain, text)| (chain.clone(), Fingerprint::of(text))).collect()
}

fn hairpin_entry(protocol: Protocol, Endpoint { ip, port }: Endpoint) -> String {
    format!("{ip},{}:{port},{ip}", protocol.keyword())
}
