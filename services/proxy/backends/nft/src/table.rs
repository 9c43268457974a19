//! One family's table in the kernel.
//!
//! Owns: the [`Plan`] of the family, the known state of its table, and the order of changes. In: changes of the plan,
//! and the answers of [`NfTables`]. Out: transactions.
//!
//! A change is one transaction. Large loads are several, so that none holds the kernel's lock for long, in an order in
//! which traffic meets the old state or the new one, never a mixture ([`in_order`](super::plan::in_order)). The kernel
//! counts transactions: as long as it has counted only ours, the table is unchanged; otherwise it is checked
//! ([`Table::check`]).
//!
//! A check never stops programming. Elements are read beforehand, while changes continue, so what was read may be older
//! than the plan in parts; each difference is read again, element by element, before it counts as drift.

mod devices;
mod difference;
mod offload;
mod preview;
mod transactions;
mod untracked;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::{Duration, Instant},
};

use keelson_proxy::{backend::Outcome, model::Family};

use self::difference::{make_chains, prepared_at_once};
pub(crate) use self::{difference::Difference, untracked::Untracking};
use super::{
    chain::Chain,
    element::{Element, SetName},
    kernel::{Change, ErrorKind, Found, KernelError, NfTables},
    plan::{Existing, Plan},
    ruleset::{Base, print_with_flowtable},
};

/// Maximum number of element changes that are committed in one transaction.
pub(crate) const ONE_TRANSACTION: usize = 4_096;

/// Number of elements per transaction of a larger load: some milliseconds of the kernel's lock.
pub(crate) const CHUNK: usize = 16_384;

/// An unused counted chain is deleted after this time. Counts recur, in particular of Services that are scaled up and
/// down, and a new chain for the count would cost 20 to 70 ms at 100,000 slots. Before 6.2, a kernel that deletes an
/// element may also use its target for a moment.
pub(crate) const UNUSED_CHAIN_TTL: Duration = Duration::from_secs(3600);

/// Pause before chains are deleted and prepared again after the kernel has rejected it.
pub(crate) const MAINTENANCE_RETRY: Duration = Duration::from_secs(300);

/// Differences that a check verifies one by one, at some microseconds each. With more of them the whole table is read
/// again.
const VERIFY_MAX: usize = 4_096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TableState {
    /// Unknown, or a transaction failed: the next sync reads and compares.
    Unknown,
    /// As the plan was when operations were last taken.
    Planned,
}

#[derive(Debug)]
pub(crate) struct Table {
    base: Base,
    plan: Plan,
    state: TableState,
    synced: bool,
    /// The counted chains of the table; since when a chain is unused, unless it is a prepared one.
    chains: BTreeMap<Chain, Option<Instant>>,
    /// The kernel's transaction count, as last known.
    generation: u32,
    /// Another program has committed since the last comparison.
    unchecked: bool,
    /// When the kernel last rejected deleting and preparing chains.
    refused: Option<Instant>,
    /// The interfaces of the flowtable; `None`: the table has no flowtable.
    devices: Option<BTreeSet<String>>,
    /// UDP flows are kept out of the flowtable.
    tcp_only: bool,
    untracking: Untracking,
}

impl Table {
    /// Opens the table of an earlier run, if it exists: numbers and slots of endpoints are kept.
    pub(crate) fn open(base: Base, tables: &mut dyn NfTables) -> Result<Self, KernelError> {
        let mut found = tables.read(base.family)?.unwrap_or_default();
        let existing = Existing::new(base.family, found.take_elements().into_iter().map(from_parts));
        let tcp_only = found.has_chain(Chain::FilterForwardOffloadTcp);
        let untracking = Untracking::found(found.has_chain(Chain::RawPrerouting));
        Ok(Self { tcp_only, untracking, ..Self::over(base, existing) })
    }

    /// For a family that this node does not support: nothing is read.
    pub(crate) fn unread(base: Base) -> Self {
        Self::over(base, Existing::default())
    }

    fn over(base: Base, existing: Existing) -> Self {
        let mut plan = Plan::new(base.family, existing);
        plan.record(false);
        Self {
            base,
            plan,
            state: TableState::Unknown,
            synced: false,
            chains: BTreeMap::new(),
            generation: 0,
            unchecked: false,
            refused: None,
            devices: None,
            tcp_only: false,
            untracking: Untracking::default(),
        }
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    pub(crate) fn plan_mut(&mut self) -> &mut Plan {
        &mut self.plan
    }

    pub(crate) fn base(&self) -> &Base {
        &self.base
    }

    /// The next sync compares everything.
    pub(crate) fn set_base(&mut self, base: Base) {
        if self.base != base {
            self.base = base;
            self.invalidate();
        }
    }

    pub(crate) fn family(&self) -> Family {
        self.base.family
    }

    /// Whether the kernel has had a full state.
    pub(crate) fn has_synced(&self) -> bool {
        self.synced
    }

    pub(crate) fn chains(&self) -> usize {
        self.fixed().len() + self.chains.len()
    }

    /// A copy of the wanted ruleset, printable without holding the table: about 0.1 microseconds per element.
    pub(crate) fn ruleset(&self) -> Ruleset {
        Ruleset {
            base: self.base.clone(),
            chains: self.fixed().into_iter().chain(self.wanted_chains()).collect(),
            elements: self.plan.elements().collect(),
            devices: self.devices.clone(),
        }
    }

    /// The counted chains that some element refers to, with their companions.
    fn used_chains(&self) -> BTreeSet<Chain> {
        with_companions(&self.plan.chains())
    }

    /// The counted chains in use and the prepared ones.
    fn wanted_chains(&self) -> BTreeSet<Chain> {
        let mut chains = self.used_chains();
        chains.extend(Chain::prepared());
        chains
    }

    /// The next sync reads the table and compares.
    pub(crate) fn invalidate(&mut self) {
        self.state = TableState::Unknown;
        self.plan.record(false);
    }

    /// Syncs the table with the plan.
    ///
    /// # Errors
    /// The kernel rejected the changes, after all useful retries: the table may be older than the plan in parts, and
    /// the next sync compares everything.
    pub(crate) fn sync(&mut self, tables: &mut dyn NfTables, now: Instant) -> Result<Outcome, KernelError> {
        if self.state == TableState::Planned {
            match self.sync_incremental(tables, now) {
                Ok(outcome) => return Ok(outcome),
                Err(error) if error.kind() == ErrorKind::Resync => {
                    tracing::warn!(family = %self.family(), %error, "drift detected in the table; starting a \
                                                                     full sync");
                }
                Err(error) => {
                    self.invalidate();
                    return Err(error);
                }
            }
        }
        // If the table was not as planned, another program has changed it.
        let is_drift = self.state == TableState::Planned;
        self.invalidate();
        self.sync_full(tables, is_drift, now)
    }

    /// Whether another program has committed anything since the last comparison, in this table or not. If so, the
    /// caller reads the table and calls [`Self::check`].
    pub(crate) fn begin_check(&mut self, tables: &mut dyn NfTables) -> Result<bool, KernelError> {
        let generation = tables.netlink().generation()?.id;
        self.unchecked |= generation != self.generation;
        // The next check notices later commits.
        self.generation = generation;
        Ok(self.unchecked)
    }

    /// Whether the table is assumed to be as planned, except for pending changes of the plan.
    pub(crate) fn is_trusted(&self) -> bool {
        self.state == TableState::Planned
    }

    /// Whether no change of the plan waits for a sync.
    pub(crate) fn can_check(&self) -> bool {
        !self.plan.has_changes()
    }

    /// Compares the table with the plan, and repairs drift. `seen` is the table as read after [`Self::begin_check`],
    /// while syncs continued. Only if [`Self::can_check`].
    ///
    /// # Errors
    /// The kernel did not answer: nothing was done, and the table has to be read again. Or it rejected a repair, and
    /// the next sync compares everything ([`Self::is_trusted`] distinguishes the two).
    pub(crate) fn check(
        &mut self,
        seen: Option<Found>,
        tables: &mut dyn NfTables,
        now: Instant,
    ) -> Result<Outcome, KernelError> {
        if self.state != TableState::Planned {
            // The next sync compares everything.
            return Ok(Outcome::default());
        }
        let is_complete = seen.as_ref().is_none_or(Found::is_complete);
        let structure = tables.read_structure(self.family())?;
        let mut difference = match (structure, seen) {
            (Some(structure), Some(seen)) => self.differ(Some(structure.with_elements_of(seen))),
            _ => Difference { absent: true, ..Difference::default() },
        };
        if difference.absent || difference.rebuild || difference.ops.len() > VERIFY_MAX {
            self.invalidate();
            return self.sync_full(tables, true, now);
        }
        difference.ops = self.verify(difference.ops, tables)?;
        // Chains that were not created yet are no drift.
        difference.prepared.retain(|chain| self.chains.contains_key(chain));
        let mut outcome = Outcome::default();
        if let Err(error) = self.repair(tables, difference, &mut outcome) {
            self.invalidate();
            // The table has changed again: only a full comparison helps.
            return if error.kind() == ErrorKind::Resync {
                self.sync_full(tables, true, now)
            } else {
                Err(error)
            };
        }
        outcome.repaired = !outcome.is_nothing();
        self.unchecked = !is_complete;
        self.note_chains(&self.used_chains(), now);
        Ok(outcome)
    }

    /// Our transactions in another table of the network namespace, which do not count as another program's.
    pub(crate) fn add_own_transactions(&mut self, transactions: usize) {
        self.count(transactions);
    }

    /// Deletes counted chains that were unused for [`UNUSED_CHAIN_TTL`], and creates a batch of the missing prepared ones.
    ///
    /// # Errors
    /// The kernel rejected it; the next sync compares everything, and this is not retried for [`MAINTENANCE_RETRY`].
    pub(crate) fn maintain_chains(
        &mut self,
        tables: &mut dyn NfTables,
        now: Instant,
    ) -> Result<Outcome, KernelError> {
        let is_expired = |since: &Option<Instant>| {
            since.is_some_and(|since| now.saturating_duration_since(since) >= UNUSED_CHAIN_TTL)
        };
        let old: Vec<Chain> =
            self.chains.iter().filter(|(_, since)| is_expired(since)).map(|(&chain, _)| chain).collect();
        let at_once = prepared_at_once(self.plan.counts().elements(SetName::Slots));
        let missing: Vec<Chain> =
            Chain::prepared().filter(|chain| !self.chains.contains_key(chain)).take(at_once).collect();
        let refused = self.refused.is_some_and(|at| now.saturating_duration_since(at) < MAINTENANCE_RETRY);
        if self.state != TableState::Planned || refused || (old.is_empty() && missing.is_empty()) {
            return Ok(Outcome::default());
        }
        let mut outcome = Outcome { structure: old.len() + missing.len(), ..Outcome::default() };
        let mut changes = deletes_in_order(&old);
        make_chains(&self.base, &missing, &mut changes);
        if let Err(error) = self.commit(tables, &changes, &mut outcome) {
            self.refused = Some(now);
            self.invalidate();
            return Err(error);
        }
        for chain in old {
            self.chains.remove(&chain);
        }
        self.chains.extend(missing.into_iter().map(|chain| (chain, None)));
        Ok(outcome)
    }

    pub(crate) fn difference(&mut self, tables: &mut dyn NfTables) -> Result<Difference, KernelError> {
        let found = tables.read(self.family())?;
        Ok(self.differ(found))
    }

    /// Applies the operations since the last sync.
    fn sync_incremental(&mut self, tables: &mut dyn NfTables, now: Instant) -> Result<Outcome, KernelError> {
        let ops = self.plan.take_ops();
        let used = self.used_chains();
        let fresh: Vec<Chain> =
            used.iter().filter(|chain| !self.chains.contains_key(chain)).copied().collect();
        let mut outcome = Outcome { structure: fresh.len(), ..Outcome::default() };
        if !ops.is_empty() || !fresh.is_empty() {
            let mut changes = Vec::new();
            make_chains(&self.base, &fresh, &mut changes);
            self.load(tables, changes, ops, &mut outcome)?;
        }
        self.note_chains(&used, now);
        Ok(outcome)
    }

    /// Reads the table and syncs it with the plan. `is_drift`: another program has changed it.
    fn sync_full(
        &mut self,
        tables: &mut dyn NfTables,
        is_drift: bool,
        now: Instant,
    ) -> Result<Outcome, KernelError> {
        let before = tables.netlink().generation()?.id;
        let found = tables.read(self.family())?;
        // The next check notices a commit between the two.
        self.generation = before;
        let is_complete = found.as_ref().is_none_or(Found::is_complete);
        self.unchecked = !is_complete;
        let mut outcome = Outcome { full: true, ..Outcome::default() };
        if found.is_none() {
            self.fill(tables, &mut outcome)?;
            self.chains = self.wanted_chains().into_iter().map(|chain| (chain, None)).collect();
        } else {
            let mut difference = self.differ(found);
            if !is_complete && !difference.rebuild {
                difference.ops = self.verify(difference.ops, tables)?;
            }
            self.repair(tables, difference, &mut outcome)?;
        }
        outcome.repaired = is_drift && self.synced && !outcome.is_nothing();
        self.note_chains(&self.used_chains(), now);
        self.state = TableState::Planned;
        self.synced = true;
        self.plan.forget_existing();
        self.plan.record(true);
        Ok(outcome)
    }

    /// The kernel skips 0 when its count wraps.
    fn count(&mut self, transactions: usize) {
        for _ in 0..transactions {
            self.generation = self.generation.checked_add(1).unwrap_or(1);
        }
    }

    /// Records that the counted chains exist, and since when chains are unused.
    fn note_chains(&mut self, used: &BTreeSet<Chain>, now: Instant) {
        for &chain in used {
            self.chains.insert(chain, None);
        }
        for (chain, since) in &mut self.chains {
            if !used.contains(chain) && !chain.is_prepared() && since.is_none() {
                *since = Some(now);
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct Ruleset {
    base: Base,
    chains: Vec<Chain>,
    elements: Vec<Element>,
    devices: Option<BTreeSet<String>>,
}

impl Ruleset {
    /// Writes the text for `nft -f`.
    pub(crate) fn print(&self, mut out: &mut dyn fmt::Write) -> fmt::Result {
        let (chains, elements) = (self.chains.iter().copied(), self.elements.iter().copied());
        print_with_flowtable(&mut out, &self.base, self.devices.as_ref(), chains, elements)
    }
}

fn with_companions(chains: &BTreeSet<Chain>) -> BTreeSet<Chain> {
    // The rules of an affinity's chains refer to each other, and are written after all of them are created.
    chains.iter().flat_map(|&chain| std::iter::once(chain).chain(chain.companions())).collect()
}

/// A chain cannot be deleted before the rules that refer to it.
fn deletes_in_order(chains: &[Chain]) -> Vec<Change> {
    let emptied = chains.iter().map(|&chain| Change::Rules(chain, Vec::new()));
    emptied.chain(chains.iter().copied().map(Change::DeleteChain)).collect()
}

fn from_parts(
    ((set, key), (key_end, value)): (
        (SetName, super::element::Key),
        (Option<super::element::Key>, super::element::Value),
    ),
) -> super::element::Element {
    super::element::Element { set, key, key_end, value }
}
