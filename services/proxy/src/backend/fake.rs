//! A backend with an in-memory kernel, for tests of the proxy.

use std::{
    collections::{BTreeMap, VecDeque},
    net::IpAddr,
    sync::{Arc, Mutex},
};

use super::*;

type Rules = BTreeMap<ServiceName, Vec<ServicePort>>;

#[derive(Default)]
pub(crate) struct KernelState {
    pub(crate) rules: [Rules; 2],
    /// Results of the next commits and checks; `None` is a success. When empty, all succeed.
    pub(crate) faults: VecDeque<Option<BackendError>>,
    pub(crate) commits: usize,
    /// Clients with session affinity; `None`: there are no maps.
    pub(crate) affinity: Option<usize>,
    pub(crate) lacks_v6: bool,
    /// The error of the question whether anything was changed.
    pub(crate) hides_changes: Option<BackendError>,
    /// What rules depend on, by family.
    pub(crate) nodes: [Option<NodeConfig>; 2],
    generation: u32,
}

/// Shared by a backend, its observers and the test.
#[derive(Clone, Default)]
pub(crate) struct FakeKernel(Arc<Mutex<KernelState>>);

impl FakeKernel {
    /// Changes the kernel as another program does.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut KernelState) -> T) -> T {
        let mut state = self.0.lock().unwrap();
        state.generation += 1;
        change(&mut state)
    }

    pub(crate) fn backend(&self) -> Box<FakeBackend> {
        let lacks_v6 = self.0.lock().unwrap().lacks_v6;
        let families = Default::default();
        Box::new(FakeBackend { kernel: self.clone(), lacks_v6, families, snapshots: Snapshots::default() })
    }

    pub(crate) fn observer(&self) -> Box<dyn Observer> {
        self.backend().observer().unwrap()
    }

    fn next_fault(&self) -> Result<(), BackendError> {
        self.0.lock().unwrap().faults.pop_front().flatten().map_or(Ok(()), Err)
    }
}

#[derive(Default)]
struct FamilyState {
    wanted: Rules,
    is_trusted: bool,
    has_synced: bool,
    has_changes: bool,
    offloads_udp: bool,
    generation: u32,
}

pub(crate) struct FakeBackend {
    kernel: FakeKernel,
    lacks_v6: bool,
    families: [FamilyState; 2],
    snapshots: Snapshots<Rules>,
}

impl FakeBackend {
    /// Writes the wanted state to the kernel, as far as it differs from `seen`.
    fn repair(&mut self, family: Family, seen: &Rules) -> Result<Outcome, BackendError> {
        let state = &mut self.families[family as usize];
        let mut outcome = Outcome { full: !state.is_trusted, ..Outcome::default() };
        outcome.added = state.wanted.iter().filter(|(name, ports)| seen.get(*name) != Some(*ports)).count();
        outcome.deleted = seen.keys().filter(|name| !state.wanted.contains_key(*name)).count();
        state.is_trusted = false;
        self.kernel.next_fault()?;
        let mut kernel = self.kernel.0.lock().unwrap();
        if !outcome.is_nothing() {
            outcome.transactions = 1;
            kernel.commits += 1;
        }
        kernel.rules[family as usize] = state.wanted.clone();
        (state.is_trusted, state.has_synced, state.has_changes) = (true, true, false);
        Ok(outcome)
    }
}

impl Backend for FakeBackend {
    fn info(&self) -> BackendInfo {
        BackendInfo { name: "fake", proxy_mode: "fake", requirements: "", has_chains: false }
    }

    fn disabled_reason(&self, family: Family) -> Option<&str> {
        (family == Family::V6 && self.lacks_v6).then_some("no IPv6")
    }

    fn scope(&self, _: Family) -> &'static str {
        "memory"
    }

    fn set_service(&mut self, family: Family, service: &ServiceName, ports: Vec<ServicePort>) {
        assert!(self.disabled_reason(family).is_none(), "nothing is wanted of a disabled family");
        let state = &mut self.families[family as usize];
        state.has_changes = true;
        match ports.is_empty() {
            true => state.wanted.remove(service),
            false => state.wanted.insert(service.clone(), ports),
        };
    }

    fn set_node(&mut self, node: NodeConfig) {
        let family = node.family as usize;
        self.families[family].is_trusted = false;
        self.kernel.0.lock().unwrap().nodes[family] = Some(node);
    }

    fn has_synced(&self, family: Family) -> bool {
        self.families[family as usize].has_synced
    }

    fn sync(&mut self, family: Family, _: Instant) -> Result<Outcome, BackendError> {
        let seen = self.kernel.0.lock().unwrap().rules[family as usize].clone();
        self.repair(family, &seen)
    }

    fn maintain(&mut self, family: Family, _: Instant) -> Result<Outcome, BackendError> {
        let state = &self.families[family as usize];
        assert!(state.has_synced && !state.has_changes, "nothing is pending");
        Ok(Outcome::default())
    }

    fn stop_udp_offload(&mut self, family: Family) -> bool {
        !std::mem::replace(&mut self.families[family as usize].offloads_udp, true)
    }

    fn observer(&self) -> Result<Box<dyn Observer>, BackendError> {
        Ok(Box::new(FakeObserver { kernel: self.kernel.clone(), snapshots: self.snapshots.clone() }))
    }

    fn begin_check(&mut self, family: Family) -> Result<bool, BackendError> {
        let kernel = self.kernel.0.lock().unwrap();
        if let Some(error) = &kernel.hides_changes {
            return Err(error.clone());
        }
        let generation = kernel.generation;
        Ok(std::mem::replace(&mut self.families[family as usize].generation, generation) != generation)
    }

    fn check(&mut self, family: Family, _: Instant) -> Check {
        if self.families[family as usize].has_changes {
            return Check::Postponed;
        }
        if let Err(error) = self.kernel.next_fault() {
            return Check::Unread(error);
        }
        let seen = self.snapshots.take(family).expect("an observer has read");
        let repaired = self.repair(family, &seen);
        Check::Done(repaired.map(|outcome| Outcome { repaired: !outcome.is_nothing(), ..outcome }))
    }

    fn changes(&mut self) -> Result<Vec<String>, BackendError> {
        Ok(Vec::new())
    }

    fn ruleset(&self) -> RulesetPrinter {
        Box::new(|_| Ok(()))
    }

    fn explain(&self, _: &Question, _: &[IpAddr]) -> pb::Explanation {
        pb::Explanation::default()
    }

    fn counts(&self, family: Family) -> Counts {
        let wanted = &self.families[family as usize].wanted;
        Counts { services: wanted.len(), elements: wanted.len(), ..Counts::default() }
    }

    fn details(&self, _: Family) -> Details {
        Details::default()
    }

    fn udp_frontends(&self, _: Family) -> Vec<UdpFrontend> {
        Vec::new()
    }

    fn affinity_capacity(&self) -> u64 {
        100
    }
}

struct FakeObserver {
    kernel: FakeKernel,
    snapshots: Snapshots<Rules>,
}

impl Observer for FakeObserver {
    fn read(&mut self, family: Family) -> Result<(), BackendError> {
        let rules = self.kernel.0.lock().unwrap().rules[family as usize].clone();
        self.snapshots.put(family, rules);
        Ok(())
    }

    fn affinity_clients(&mut self, _: Family) -> Result<Option<AffinityClients>, BackendError> {
        Ok(self.kernel.0.lock().unwrap().affinity.map(|clients| vec![("clients", clients)]))
    }

    fn other_proxies(&mut self) -> Result<Vec<(Family, String)>, BackendError> {
        Ok(Vec::new())
    }
}
