//! One family in the kernel: virtual servers, addresses, rules and sets.
//!
//! Owns: [`FamilyState`]: the plan, and what the kernel is known to have. In: changes of the plan; [`Kernel`], [`Programs`].
//! Out: changes of the kernel, in an order in which traffic meets the old state or the new one.
//!
//! The order: virtual servers by mark; entries of sets and rules; virtual servers and real servers that are added; addresses
//! that are added; what is removed. So a frontend is reached only when its rules are there. Where chains of the backend iptables
//! serve, they do so until the rules replace them, so these come after the addresses.
//!
//! Neither IPVS nor IP sets count changes, so everything is read from time to time. What was read may be older than a sync: a
//! difference is only a reason to read again, by a full sync.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use keelson_proxy::{
    backend::{BackendError, Outcome},
    model::Family,
};
use keelson_proxy_xtables::{
    names::{NODE_PORTS, Table},
    programs::{ProgramError, Programs},
    ruleset::{Plan as _, Ruleset, read_family},
    save::Found,
};

use crate::{
    kernel::Kernel,
    plan::{Changed, Plan},
    servers::{FoundServer, ServerChange, ServerKey, ServerTable},
};

/// Virtual servers whose connections are counted in one call of [`FamilyState::maintain`].
const COUNTED_AT_ONCE: usize = 64;

/// What the kernel had.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) rules: Found,
    pub(crate) servers: BTreeMap<ServerKey, FoundServer>,
    pub(crate) addresses: BTreeSet<IpAddr>,
    pub(crate) took: Duration,
}

impl Snapshot {
    pub(crate) fn read(
        kernel: &mut dyn Kernel,
        programs: &mut dyn Programs,
        family: Family,
    ) -> Result<Self, BackendError> {
        let begun = Instant::now();
        Ok(Self {
            rules: read_family(programs, family, Plan::TABLES)?,
            servers: kernel.servers(family)?,
            addresses: kernel.addresses(family)?.unwrap_or_default(),
            took: begun.elapsed(),
        })
    }

    /// Clients with session affinity of our virtual servers.
    pub(crate) fn clients(&self) -> usize {
        let ours = self.servers.values().filter(|server| server.spec.is_ours());
        let clients = ours.flat_map(|server| &server.destinations).map(|found| found.clients as usize);
        clients.sum()
    }
}

fn has_chains_of_iptables(programs: &mut dyn Programs) -> Result<bool, ProgramError> {
    Ok(programs.save(Table::Nat)?.contains(&format!("\n:{NODE_PORTS} ")))
}

#[derive(Debug)]
pub(crate) struct FamilyState {
    pub(crate) ruleset: Ruleset<Plan>,
    servers: ServerTable,
    /// The addresses of the interface.
    bound: BTreeSet<IpAddr>,
    /// The virtual server whose connections were counted last.
    counted: Option<ServerKey>,
}

impl FamilyState {
    pub(crate) fn new(plan: Plan) -> Self {
        Self {
            ruleset: Ruleset::new(plan),
            servers: ServerTable::default(),
            bound: BTreeSet::new(),
            counted: None,
        }
    }

    pub(crate) fn plan(&self) -> &Plan {
        self.ruleset.plan()
    }

    fn family(&self) -> Family {
        self.plan().family()
    }

    pub(crate) fn sync(
        &mut self,
        kernel: &mut dyn Kernel,
        programs: &mut dyn Programs,
    ) -> Result<Outcome, BackendError> {
        let result = self.try_sync(kernel, programs);
        if result.is_err() {
            self.ruleset.plan_mut().invalidate();
        }
        result
    }

    fn try_sync(
        &mut self,
        kernel: &mut dyn Kernel,
        programs: &mut dyn Programs,
    ) -> Result<Outcome, BackendError> {
        let changed = match self.plan().is_unknown() {
            true => {
                self.read(kernel)?;
                self.everything()
            }
            false => self.ruleset.plan_mut().take_changed(),
        };
        let (additions, removals) = self.server_changes(&changed);
        let (marks, sockets): (Vec<_>, Vec<_>) =
            additions.into_iter().partition(|change| matches!(change.key(), ServerKey::Mark(_)));
        let mut outcome = Outcome::default();
        // Until they are replaced, chains of the backend iptables translate.
        let rules_last = !self.ruleset.has_synced() && has_chains_of_iptables(programs)?;
        self.change_servers(kernel, &marks, &mut outcome)?;
        if rules_last {
            self.add_frontends(kernel, &sockets, &changed.addresses, &mut outcome)?;
        }
        let rules = self.ruleset.sync(programs)?;
        if rules_last {
            outcome.replaced = Some("iptables");
        } else {
            self.add_frontends(kernel, &sockets, &changed.addresses, &mut outcome)?;
        }
        self.change_servers(kernel, &removals, &mut outcome)?;
        self.change_addresses(kernel, &changed.addresses, false, &mut outcome)?;
        // A frontend that had no connections is gone at once.
        let is_unwanted = |key: &ServerKey| self.plan().server(*key).is_none();
        let removed: BTreeSet<ServerKey> =
            removals.iter().map(ServerChange::key).filter(is_unwanted).collect();
        self.end_finished(kernel, removed.into_iter().take(COUNTED_AT_ONCE), &mut outcome)?;
        Ok(outcome.plus(rules))
    }

    fn add_frontends(
        &mut self,
        kernel: &mut dyn Kernel,
        servers: &[ServerChange],
        addresses: &BTreeSet<IpAddr>,
        outcome: &mut Outcome,
    ) -> Result<(), BackendError> {
        self.change_servers(kernel, servers, outcome)?;
        self.change_addresses(kernel, addresses, true, outcome)
    }

    /// Reads virtual servers and addresses, and creates the interface if it does not exist.
    fn read(&mut self, kernel: &mut dyn Kernel) -> Result<(), BackendError> {
        let family = self.family();
        let found = kernel.servers(family)?;
        self.servers = self.ours(&found);
        self.bound = match kernel.addresses(family)? {
            Some(addresses) => addresses,
            None => {
                kernel.create_interface()?;
                BTreeSet::new()
            }
        };
        Ok(())
    }

    fn ours(&self, found: &BTreeMap<ServerKey, FoundServer>) -> ServerTable {
        ServerTable::of(found, |key| self.plan().server(key).is_some())
    }

    /// Every virtual server and address that is wanted or known.
    fn everything(&self) -> Changed {
        let mut servers = self.plan().servers();
        servers.extend(self.servers.keys());
        let mut addresses = self.plan().bound();
        addresses.extend(&self.bound);
        Changed { servers, addresses }
    }

    /// Changes of virtual servers: those that come first, and those that come last.
    fn server_changes(&self, changed: &Changed) -> (Vec<ServerChange>, Vec<ServerChange>) {
        let mut all = Vec::new();
        for key in &changed.servers {
            self.servers.changes(*key, self.plan().server(*key).as_ref(), &mut all);
        }
        all.into_iter().partition(|change| !change.is_removal())
    }

    fn change_servers(
        &mut self,
        kernel: &mut dyn Kernel,
        changes: &[ServerChange],
        outcome: &mut Outcome,
    ) -> Result<(), BackendError> {
        if changes.is_empty() {
            return Ok(());
        }
        kernel.change_servers(self.plan().family(), changes)?;
        outcome.transactions += 1;
        for change in changes {
            self.servers.apply(change);
            match change {
                ServerChange::AddServer(..) | ServerChange::SetServer(..) | ServerChange::DeleteServer(_) => {
                    outcome.structure += 1;
                }
                change if change.is_removal() => outcome.deleted += 1,
                _ => outcome.added += 1,
            }
        }
        Ok(())
    }

    /// Adds or deletes addresses. One with a virtual server stays: its last connections need it.
    fn change_addresses(
        &mut self,
        kernel: &mut dyn Kernel,
        among: &BTreeSet<IpAddr>,
        is_added: bool,
        outcome: &mut Outcome,
    ) -> Result<(), BackendError> {
        let differs = |ip: &&IpAddr| {
            let (is_bound, is_wanted) = (self.bound.contains(*ip), self.plan().binds(**ip));
            if is_added { is_wanted && !is_bound } else { is_bound && !is_wanted && !self.servers.uses(**ip) }
        };
        let changes: Vec<IpAddr> = among.iter().filter(differs).copied().collect();
        if changes.is_empty() {
            return Ok(());
        }
        outcome.transactions += 1;
        if is_added {
            kernel.change_addresses(&changes, &[])?;
            outcome.added += changes.len();
            self.bound.extend(changes);
        } else {
            kernel.change_addresses(&[], &changes)?;
            outcome.deleted += changes.len();
            changes.iter().for_each(|ip| {
                self.bound.remove(ip);
            });
        }
        Ok(())
    }

    /// Deletes real servers and virtual servers whose last connections have ended.
    pub(crate) fn maintain(
        &mut self,
        kernel: &mut dyn Kernel,
        programs: &mut dyn Programs,
    ) -> Result<Outcome, BackendError> {
        let mut outcome = self.ruleset.maintain(programs);
        let keys = self.servers.draining(self.counted, COUNTED_AT_ONCE);
        self.counted = keys.last().copied().or(self.counted);
        let result = self.end_finished(kernel, keys, &mut outcome);
        if result.is_err() {
            self.ruleset.plan_mut().invalidate();
        }
        result.map(|()| outcome)
    }

    fn end_finished(
        &mut self,
        kernel: &mut dyn Kernel,
        keys: impl IntoIterator<Item = ServerKey>,
        outcome: &mut Outcome,
    ) -> Result<(), BackendError> {
        let (mut changes, mut addresses) = (Vec::new(), BTreeSet::new());
        for key in keys {
            // One that is gone has no connections.
            let found = kernel.destinations(self.family(), key)?.unwrap_or_default();
            changes.extend(self.servers.finished(key, &found, self.plan().server(key).is_some()));
            if let ServerKey::Socket(socket) = key {
                addresses.insert(socket.ip);
            }
        }
        self.change_servers(kernel, &changes, outcome)?;
        self.change_addresses(kernel, &addresses, false, outcome)
    }

    /// Compares what was read, and repairs drift.
    pub(crate) fn check(
        &mut self,
        found: &Snapshot,
        kernel: &mut dyn Kernel,
        programs: &mut dyn Programs,
        now: Instant,
    ) -> Result<Outcome, BackendError> {
        if self.has_drifted(found) {
            self.ruleset.note_read(now, found.took);
            self.ruleset.plan_mut().invalidate();
            let mut outcome = self.sync(kernel, programs)?;
            outcome.repaired = !outcome.is_nothing();
            return Ok(outcome);
        }
        Ok(self.ruleset.check(&found.rules, found.took, programs, now)?)
    }

    /// Whether virtual servers or addresses differ.
    fn has_drifted(&self, found: &Snapshot) -> bool {
        let (additions, removals) = self.difference(&found.servers);
        let has_addresses = found.addresses.iter().all(|ip| self.plan().binds(*ip) || self.servers.uses(*ip))
            && self.plan().bound().iter().all(|ip| found.addresses.contains(ip));
        !has_addresses || !additions.is_empty() || !removals.is_empty()
    }

    fn difference(&self, found: &BTreeMap<ServerKey, FoundServer>) -> (Vec<ServerChange>, Vec<ServerChange>) {
        let table = self.ours(found);
        let mut keys = self.plan().servers();
        keys.extend(table.keys());
        let mut all = Vec::new();
        for key in keys {
            table.changes(key, self.plan().server(key).as_ref(), &mut all);
        }
        all.into_iter().partition(|change| !change.is_removal())
    }

    /// What a full sync would change, one line each.
    pub(crate) fn lines(
        &self,
        kernel: &mut dyn Kernel,
        programs: &mut dyn Programs,
    ) -> Result<Vec<String>, BackendError> {
        let family = self.family();
        let mut lines = self.ruleset.difference(programs)?.lines(family);
        let found = kernel.servers(family)?;
        let (additions, removals) = self.difference(&found);
        lines.extend(additions.iter().chain(&removals).map(|change| format!("{family}: {change}")));
        let (bound, wanted) = (kernel.addresses(family)?.unwrap_or_default(), self.plan().bound());
        let table = self.ours(&found);
        lines.extend(wanted.difference(&bound).map(|ip| format!("{family}: add address {ip}")));
        let gone = bound.difference(&wanted).filter(|ip| !table.uses(**ip));
        lines.extend(gone.map(|ip| format!("{family}: delete address {ip}")));
        Ok(lines)
    }
}
