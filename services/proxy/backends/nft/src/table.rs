//! One family's table in the kernel.
//!
//! Owns: the [`Plan`] of the family, what is known of its table, and the order in which it is brought up to date.
//! In: changes of the plan, and the answers of [`NfTables`]. Out: transactions.
//!
//! A change is one transaction. Large loads are several, so that none holds the kernel's lock for long, in an order in
//! which traffic meets the old state or the new one, never half of one ([`in_order`](super::plan::in_order)). The kernel counts transactions:
//! as long as it has counted none but ours, nobody has touched the table; otherwise it is checked ([`Table::check`]).
//!
//! A check never stops programming. Elements are read beforehand, while changes go on, so what was read may be older than
//! the plan in parts; each difference is asked for again, element by element, before it counts as drift.

mod difference;
mod offload;
mod preview;
mod transactions;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::{Duration, Instant},
};

use keelson_proxy::{backend::Outcome, model::Family};

pub(crate) use self::difference::Difference;
use self::difference::{make_chains, prepared_at_once};
use super::{
    chain::Chain,
    element::{Element, SetName},
    kernel::{Change, ErrorKind, Found, KernelError, NfTables},
    plan::{Existing, Plan},
    ruleset::{Base, print_with_flowtable},
};

/// Up to so many changes of elements are one transaction.
pub(crate) const ONE_TRANSACTION: usize = 4_096;

/// How many elements a transaction of a larger load has: some milliseconds of the kernel's lock.
pub(crate) const CHUNK: usize = 16_384;

/// A counted chain that nothing leads to any more is deleted after this time. Counts come back, of Services that are scaled up and
/// down in particular, and another chain of the count would cost 20 to 70 ms at 100,000 slots. Before 6.2 a kernel that deletes an element
/// may also see what it led to for a moment.
pub(crate) const CHAIN_REST: Duration = Duration::from_secs(3600);

/// Time without another attempt to delete and prepare chains after the kernel has refused one.
pub(crate) const REFUSED_REST: Duration = Duration::from_secs(300);

/// Differences that a check verifies one by one, at some microseconds each. With more of them the table is read again as a
/// whole.
const VERIFY_MAX: usize = 4_096;

/// What is known of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// Nothing, or a transaction failed: the next sync reads and compares.
    No,
    /// It is as the plan was when operations were last taken.
    AsPlanned,
}

/// The table of one family.
#[derive(Debug)]
pub(crate) struct Table {
    base: Base,
    plan: Plan,
    known: Known,
    /// Whether there has been a sync.
    synced: bool,
    /// The counted chains that the table has; since when nothing leads to one, unless it is a prepared one.
    made: BTreeMap<Chain, Option<Instant>>,
    /// Where the kernel's count of transactions stands, as far as we know.
    generation: u32,
    /// Somebody else has committed since the table was compared last.
    unchecked: bool,
    /// When the kernel refused to delete and prepare chains last.
    refused: Option<Instant>,
    /// The interfaces of the flowtable; none: the table has no flowtable.
    devices: Option<BTreeSet<String>>,
    /// Flows of UDP are kept out of the flowtable.
    tcp_only: bool,
}

impl Table {
    /// Of what an earlier run left in the kernel, if anything: numbers and places of endpoints are taken over.
    ///
    /// # Errors
    /// The table cannot be read.
    pub(crate) fn open(base: Base, tables: &mut dyn NfTables) -> Result<Self, KernelError> {
        let mut found = tables.read(base.family)?.unwrap_or_default();
        let existing = Existing::new(base.family, found.take_elements().into_iter().map(from_parts));
        let tcp_only = found.has_chain(Chain::FilterForwardOffloadTcp);
        Ok(Self { tcp_only, ..Self::over(base, existing) })
    }

    /// Of a family that this node does not support: nothing is read.
    pub(crate) fn unread(base: Base) -> Self {
        Self::over(base, Existing::default())
    }

    fn over(base: Base, existing: Existing) -> Self {
        let mut plan = Plan::new(base.family, existing);
        plan.record(false);
        Self {
            base,
            plan,
            known: Known::No,
            synced: false,
            made: BTreeMap::new(),
            generation: 0,
            unchecked: false,
            refused: None,
            devices: None,
            tcp_only: false,
        }
    }

    /// What the table shall be.
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// To change what the table shall be; [`Self::sync`] brings it to the kernel.
    pub(crate) fn plan_mut(&mut self) -> &mut Plan {
        &mut self.plan
    }

    /// What the fixed rules depend on.
    pub(crate) fn base(&self) -> &Base {
        &self.base
    }

    /// Changes what the fixed rules depend on; the next sync compares everything.
    pub(crate) fn set_base(&mut self, base: Base) {
        if self.base != base {
            self.base = base;
            self.distrust();
        }
    }

    /// The family.
    pub(crate) fn family(&self) -> Family {
        self.base.family
    }

    /// Whether the kernel has had a whole state.
    pub(crate) fn has_synced(&self) -> bool {
        self.synced
    }

    /// Chains that the table has.
    pub(crate) fn chains(&self) -> usize {
        self.fixed().len() + self.made.len()
    }

    /// The wanted ruleset, as a copy that can be printed without holding the table: about 0.1 microseconds per element.
    pub(crate) fn ruleset(&self) -> Ruleset {
        Ruleset {
            base: self.base.clone(),
            chains: self.fixed().into_iter().chain(self.wanted_chains()).collect(),
            elements: self.plan.elements().collect(),
            devices: self.devices.clone(),
        }
    }

    /// The counted chains that some element leads to, with their companions.
    fn used_chains(&self) -> BTreeSet<Chain> {
        with_companions(&self.plan.chains())
    }

    /// The counted chains that the table shall have: those in use and the prepared ones.
    fn wanted_chains(&self) -> BTreeSet<Chain> {
        let mut chains = self.used_chains();
        chains.extend(Chain::prepared());
        chains
    }

    /// The next sync reads the table and compares.
    pub(crate) fn distrust(&mut self) {
        self.known = Known::No;
        self.plan.record(false);
    }

    /// Brings the table to what the plan says.
    ///
    /// # Errors
    /// The kernel refused, after what was worth trying: what it has may be older than the plan in parts, and the next sync
    /// compares everything.
    pub(crate) fn sync(&mut self, tables: &mut dyn NfTables, now: Instant) -> Result<Outcome, KernelError> {
        if self.known == Known::AsPlanned {
            match self.follow(tables, now) {
                Ok(outcome) => return Ok(outcome),
                Err(error) if error.kind() == ErrorKind::Resync => {
                    tracing::warn!(family = %self.family(), %error, "drift detected in the table; starting a \
                                                                     full sync");
                }
                Err(error) => {
                    self.distrust();
                    return Err(error);
                }
            }
        }
        // A table that was not as the plan has it was changed by another program.
        let is_drift = self.known == Known::AsPlanned;
        self.distrust();
        self.compare(tables, is_drift, now)
    }

    /// Whether somebody else has committed anything since the last comparison, which may or may not concern the table. If so,
    /// the table is to be read, and [`Self::check`] to be called with what was read.
    ///
    /// # Errors
    /// The kernel does not say.
    pub(crate) fn begin_check(&mut self, tables: &mut dyn NfTables) -> Result<bool, KernelError> {
        let generation = tables.netlink().generation()?.id;
        self.unchecked |= generation != self.generation;
        // Who commits from now on is noticed by the next check.
        self.generation = generation;
        Ok(self.unchecked)
    }

    /// Whether the table is taken to be as planned, but for changes of the plan that wait.
    pub(crate) fn is_trusted(&self) -> bool {
        self.known == Known::AsPlanned
    }

    /// Whether no change of the plan waits for a sync.
    pub(crate) fn can_check(&self) -> bool {
        !self.plan.has_changes()
    }

    /// Compares the table with the plan, and repairs what somebody else has changed. `seen` is the table as it was read after
    /// [`Self::begin_check`], while syncs went on. Only if [`Self::can_check`].
    ///
    /// # Errors
    /// The kernel did not answer: nothing was done, and the table is to be read once more. Or it refused a repair, and the next
    /// sync compares everything ([`Self::is_trusted`] tells one from the other).
    pub(crate) fn check(
        &mut self,
        seen: Option<Found>,
        tables: &mut dyn NfTables,
        now: Instant,
    ) -> Result<Outcome, KernelError> {
        if self.known != Known::AsPlanned {
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
            self.distrust();
            return self.compare(tables, true, now);
        }
        difference.ops = self.verify(difference.ops, tables)?;
        // Those that were not made yet are no drift.
        difference.prepared.retain(|chain| self.made.contains_key(chain));
        let mut outcome = Outcome::default();
        if let Err(error) = self.repair(tables, difference, &mut outcome) {
            self.distrust();
            // It changed once more: only a whole comparison helps.
            return if error.kind() == ErrorKind::Resync {
                self.compare(tables, true, now)
            } else {
                Err(error)
            };
        }
        outcome.repaired = !outcome.is_nothing();
        self.unchecked = !is_complete;
        self.note_chains(&self.used_chains(), now);
        Ok(outcome)
    }

    /// Another table of the same network namespace has committed so often: that is no disturbance.
    pub(crate) fn others(&mut self, transactions: usize) {
        self.count(transactions);
    }

    /// Deletes counted chains that have rested, and makes a batch of the prepared ones that are missing.
    ///
    /// # Errors
    /// The kernel refused; the next sync compares everything, and this is not tried again for [`REFUSED_REST`].
    pub(crate) fn collect(
        &mut self,
        tables: &mut dyn NfTables,
        now: Instant,
    ) -> Result<Outcome, KernelError> {
        let rested = |since: &Option<Instant>| {
            since.is_some_and(|since| now.saturating_duration_since(since) >= CHAIN_REST)
        };
        let old: Vec<Chain> =
            self.made.iter().filter(|(_, since)| rested(since)).map(|(&chain, _)| chain).collect();
        let at_once = prepared_at_once(self.plan.counts().elements(SetName::Slots));
        let missing: Vec<Chain> =
            Chain::prepared().filter(|chain| !self.made.contains_key(chain)).take(at_once).collect();
        let refused = self.refused.is_some_and(|at| now.saturating_duration_since(at) < REFUSED_REST);
        if self.known != Known::AsPlanned || refused || (old.is_empty() && missing.is_empty()) {
            return Ok(Outcome::default());
        }
        let mut outcome = Outcome { structure: old.len() + missing.len(), ..Outcome::default() };
        let mut changes = deletes_in_order(&old);
        make_chains(&self.base, &missing, &mut changes);
        if let Err(error) = self.commit(tables, &changes, &mut outcome) {
            self.refused = Some(now);
            self.distrust();
            return Err(error);
        }
        for chain in old {
            self.made.remove(&chain);
        }
        self.made.extend(missing.into_iter().map(|chain| (chain, None)));
        Ok(outcome)
    }

    /// What a comparison would do, without doing it.
    ///
    /// # Errors
    /// The table cannot be read.
    pub(crate) fn difference(&mut self, tables: &mut dyn NfTables) -> Result<Difference, KernelError> {
        let found = tables.read(self.family())?;
        Ok(self.differ(found))
    }

    /// Takes the operations since the last sync to the kernel.
    fn follow(&mut self, tables: &mut dyn NfTables, now: Instant) -> Result<Outcome, KernelError> {
        let ops = self.plan.take_ops();
        let used = self.used_chains();
        let fresh: Vec<Chain> = used.iter().filter(|chain| !self.made.contains_key(chain)).copied().collect();
        let mut outcome = Outcome { structure: fresh.len(), ..Outcome::default() };
        if !ops.is_empty() || !fresh.is_empty() {
            let mut changes = Vec::new();
            make_chains(&self.base, &fresh, &mut changes);
            self.load(tables, changes, ops, &mut outcome)?;
        }
        self.note_chains(&used, now);
        Ok(outcome)
    }

    /// Reads the table and makes it what the plan says. `is_drift`: another program has changed it.
    fn compare(
        &mut self,
        tables: &mut dyn NfTables,
        is_drift: bool,
        now: Instant,
    ) -> Result<Outcome, KernelError> {
        let before = tables.netlink().generation()?.id;
        let found = tables.read(self.family())?;
        // A commit between the two is noticed by the next look at the count.
        self.generation = before;
        let is_complete = found.as_ref().is_none_or(Found::is_complete);
        self.unchecked = !is_complete;
        let mut outcome = Outcome { full: true, ..Outcome::default() };
        if found.is_none() {
            self.fill(tables, &mut outcome)?;
            self.made = self.wanted_chains().into_iter().map(|chain| (chain, None)).collect();
        } else {
            let mut difference = self.differ(found);
            if !is_complete && !difference.rebuild {
                difference.ops = self.verify(difference.ops, tables)?;
            }
            self.repair(tables, difference, &mut outcome)?;
        }
        outcome.repaired = is_drift && self.synced && !outcome.is_nothing();
        self.note_chains(&self.used_chains(), now);
        self.known = Known::AsPlanned;
        self.synced = true;
        self.plan.forget_existing();
        self.plan.record(true);
        Ok(outcome)
    }

    /// The kernel leaves 0 out when its count begins again.
    fn count(&mut self, transactions: usize) {
        for _ in 0..transactions {
            self.generation = self.generation.checked_add(1).unwrap_or(1);
        }
    }

    /// The counted chains are there; those that nothing leads to begin to rest.
    fn note_chains(&mut self, used: &BTreeSet<Chain>, now: Instant) {
        for &chain in used {
            self.made.insert(chain, None);
        }
        for (chain, since) in &mut self.made {
            if !used.contains(chain) && !chain.is_prepared() && since.is_none() {
                *since = Some(now);
            }
        }
    }
}

/// The wanted ruleset of one family at one moment.
#[derive(Debug)]
pub(crate) struct Ruleset {
    base: Base,
    chains: Vec<Chain>,
    elements: Vec<Element>,
    devices: Option<BTreeSet<String>>,
}

impl Ruleset {
    /// Writes it as text for `nft -f`.
    ///
    /// # Errors
    /// `out` refuses.
    pub(crate) fn print(&self, mut out: &mut dyn fmt::Write) -> fmt::Result {
        let (chains, elements) = (self.chains.iter().copied(), self.elements.iter().copied());
        print_with_flowtable(&mut out, &self.base, self.devices.as_ref(), chains, elements)
    }
}

fn with_companions(chains: &BTreeSet<Chain>) -> BTreeSet<Chain> {
    // Rules lead from an affinity's chains to each other, and are written when all of them are made.
    chains.iter().flat_map(|&chain| std::iter::once(chain).chain(chain.companions())).collect()
}

/// A chain that others lead to cannot be deleted before their rules are gone.
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
