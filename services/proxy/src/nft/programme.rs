//! One family's table in the kernel.
//!
//! Owns: the [`Plan`] of the family, what is known of its table, and the order in which it is brought up to date.
//! In: changes of the plan, and the answers of [`Tables`]. Out: transactions.
//!
//! A change is one transaction. Large loads are several, so that none holds the kernel's lock for long, in an order in
//! which traffic meets the old state or the new one, never half of one ([`in_order`]). The kernel counts transactions:
//! as long as it has counted none but ours, nobody has touched the table; otherwise it is read and compared.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, mem,
    time::{Duration, Instant},
};

use super::{
    chain::Chain,
    element::{Op, SetName},
    kernel::{Change, Found, Generation, KernelError, Kind, Tables},
    plan::{Existing, Plan, in_order},
    ruleset::{Base, print, rules},
};
use crate::model::Family;

/// Up to so many changes of elements are one transaction.
pub const ONE_TRANSACTION: usize = 4_096;

/// How many elements a transaction of a larger load has: some milliseconds of the kernel's lock.
pub const CHUNK: usize = 16_384;

/// A counted chain that nothing leads to any more is deleted so much later. Before 6.2 a kernel that deletes an element may
/// still see what it led to for a moment; and counts come back.
pub const CHAIN_REST: Duration = Duration::from_secs(60);

/// How often a transaction that met a passing difficulty is tried.
const TRIES: u32 = 5;

/// What a sync did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outcome {
    /// The table was read and compared.
    pub full: bool,
    /// Something of the table was not as we had left it.
    pub mended: bool,
    /// Transactions.
    pub transactions: usize,
    /// Elements that came.
    pub added: usize,
    /// Elements that went.
    pub deleted: usize,
    /// Chains and sets that were made, written again or deleted.
    pub structure: usize,
}

impl Outcome {
    /// Whether the kernel had to do anything.
    #[must_use]
    pub const fn is_nothing(&self) -> bool {
        self.added == 0 && self.deleted == 0 && self.structure == 0
    }
}

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
pub struct Programme {
    base: Base,
    plan: Plan,
    known: Known,
    /// Whether there has been a sync.
    synced: bool,
    /// The counted chains that the table has; since when nothing leads to one.
    made: BTreeMap<Chain, Option<Instant>>,
    /// Where the kernel's count of transactions stands, as far as we know.
    generation: u32,
}

impl Programme {
    /// Of what an earlier run left in the kernel, if anything: numbers and places of endpoints are taken over.
    ///
    /// # Errors
    /// The table cannot be read.
    pub fn open(base: Base, tables: &mut dyn Tables) -> Result<Self, KernelError> {
        let existing = match tables.read(base.family)? {
            Some(mut found) => Existing::new(base.family, found.take_elements().into_iter().map(from_parts)),
            None => Existing::default(),
        };
        let mut plan = Plan::new(base.family, existing);
        plan.record(false);
        Ok(Self { base, plan, known: Known::No, synced: false, made: BTreeMap::new(), generation: 0 })
    }

    /// What the table shall be.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// To change what the table shall be; [`Self::sync`] brings it to the kernel.
    pub fn plan_mut(&mut self) -> &mut Plan {
        &mut self.plan
    }

    /// What the fixed rules depend on.
    #[must_use]
    pub fn base(&self) -> &Base {
        &self.base
    }

    /// Changes what the fixed rules depend on; the next sync compares everything.
    pub fn set_base(&mut self, base: Base) {
        if self.base != base {
            self.base = base;
            self.distrust();
        }
    }

    /// The family.
    #[must_use]
    pub fn family(&self) -> Family {
        self.base.family
    }

    /// Whether the kernel has had a whole state.
    #[must_use]
    pub fn has_synced(&self) -> bool {
        self.synced
    }

    /// Chains that the table has.
    #[must_use]
    pub fn chains(&self) -> usize {
        Chain::FIXED.len() + self.made.len()
    }

    /// The whole table as it shall be, as text for `nft -f`.
    ///
    /// # Errors
    /// `out` refuses.
    pub fn print(&self, out: &mut impl fmt::Write) -> fmt::Result {
        let chains = Chain::FIXED.into_iter().chain(with_companions(&self.plan.chains()));
        print(out, &self.base, chains, self.plan.elements())
    }

    /// The next sync reads the table and compares.
    pub fn distrust(&mut self) {
        self.known = Known::No;
        self.plan.record(false);
    }

    /// Brings the table to what the plan says.
    ///
    /// # Errors
    /// The kernel refused, after what was worth trying: what it has may be older than the plan in parts, and the next sync
    /// compares everything.
    pub fn sync(&mut self, tables: &mut dyn Tables, now: Instant) -> Result<Outcome, KernelError> {
        if self.known == Known::AsPlanned {
            match self.follow(tables, now) {
                Ok(outcome) => return Ok(outcome),
                Err(error) if error.kind() == Kind::Resync => {
                    tracing::warn!(family = %self.family(), %error, "the table is not as it was left; comparing all of it");
                }
                Err(error) => {
                    self.distrust();
                    return Err(error);
                }
            }
        }
        self.distrust();
        self.compare(tables, now)
    }

    /// Whether somebody else has committed anything since we last knew, which may or may not concern the table.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn disturbed(&mut self, tables: &mut dyn Tables) -> Result<Option<Generation>, KernelError> {
        let generation = tables.generation()?;
        Ok((generation.id != self.generation).then_some(generation))
    }

    /// Another programme of the same network namespace has committed so often: that is no disturbance.
    pub fn others(&mut self, transactions: usize) {
        self.count(transactions);
    }

    /// Deletes counted chains that have rested.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn collect(&mut self, tables: &mut dyn Tables, now: Instant) -> Result<Outcome, KernelError> {
        let rested = |since: &Option<Instant>| {
            since.is_some_and(|since| now.saturating_duration_since(since) >= CHAIN_REST)
        };
        let old: Vec<Chain> =
            self.made.iter().filter(|(_, since)| rested(since)).map(|(&chain, _)| chain).collect();
        if self.known != Known::AsPlanned || old.is_empty() {
            return Ok(Outcome::default());
        }
        let mut outcome = Outcome { structure: old.len(), ..Outcome::default() };
        let deletes = deletes_in_order(&old);
        if let Err(error) = self.commit(tables, &deletes, &mut outcome) {
            self.distrust();
            return Err(error);
        }
        for chain in old {
            self.made.remove(&chain);
        }
        Ok(outcome)
    }

    /// What a comparison would do, without doing it.
    ///
    /// # Errors
    /// The table cannot be read.
    pub fn difference(&mut self, tables: &mut dyn Tables) -> Result<Difference, KernelError> {
        let found = tables.read(self.family())?;
        Ok(self.differ(found))
    }

    /// Takes the operations since the last sync to the kernel.
    fn follow(&mut self, tables: &mut dyn Tables, now: Instant) -> Result<Outcome, KernelError> {
        let ops = self.plan.take_ops();
        let wanted = with_companions(&self.plan.chains());
        let fresh: Vec<Chain> =
            wanted.iter().filter(|chain| !self.made.contains_key(chain)).copied().collect();
        let mut outcome = Outcome { structure: fresh.len(), ..Outcome::default() };
        if !ops.is_empty() || !fresh.is_empty() {
            let mut changes = Vec::new();
            self.make_chains(&fresh, &mut changes);
            self.load(tables, changes, ops, &mut outcome)?;
        }
        self.note_chains(&wanted, now);
        Ok(outcome)
    }

    /// Reads the table and makes it what the plan says.
    fn compare(&mut self, tables: &mut dyn Tables, now: Instant) -> Result<Outcome, KernelError> {
        let before = tables.generation()?.id;
        let found = tables.read(self.family())?;
        // Whoever commits between the two is noticed by the next look at the count.
        self.generation = before;
        let mut outcome = Outcome { full: true, ..Outcome::default() };
        let counted = with_companions(&self.plan.chains());
        if found.is_none() {
            self.fill(tables, &mut outcome)?;
            self.made = counted.iter().map(|&chain| (chain, None)).collect();
        } else {
            let difference = self.differ(found);
            outcome.structure = difference.structure();
            self.mend(tables, difference, &mut outcome)?;
        }
        outcome.mended = self.synced && !outcome.is_nothing();
        self.note_chains(&counted, now);
        self.known = Known::AsPlanned;
        self.synced = true;
        self.plan.forget_existing();
        self.plan.record(true);
        Ok(outcome)
    }

    /// Where there is no table: all of it, element by element as the plan has them, without a list of them in memory.
    fn fill(&mut self, tables: &mut dyn Tables, outcome: &mut Outcome) -> Result<(), KernelError> {
        let mut changes = self.structure();
        outcome.structure = changes.len();
        let total: usize = SetName::ALL.iter().map(|&set| self.plan.counts().elements(set)).sum();
        let chunk = if total <= ONE_TRANSACTION { usize::MAX } else { CHUNK };
        let mut transactions = 0;
        let Self { plan, base, .. } = self;
        // What packets enter by comes last.
        for entry in [false, true] {
            let mut elements = plan.elements().filter(|element| element.set.is_entry() == entry).peekable();
            while elements.peek().is_some() {
                let before = changes.len();
                changes
                    .extend(elements.by_ref().take(chunk).map(|element| Change::Element(Op::Add(element))));
                outcome.added += changes.len() - before;
                if total > ONE_TRANSACTION {
                    commit(base.family, tables, &changes)?;
                    transactions += 1;
                    changes.clear();
                }
            }
        }
        if !changes.is_empty() {
            commit(base.family, tables, &changes)?;
            transactions += 1;
        }
        self.count(transactions);
        outcome.transactions += transactions;
        Ok(())
    }

    /// Where there is a table.
    fn mend(
        &mut self,
        tables: &mut dyn Tables,
        difference: Difference,
        outcome: &mut Outcome,
    ) -> Result<(), KernelError> {
        if difference.rebuild {
            self.rebuild(tables, &difference, outcome)?;
        } else {
            self.load(tables, difference.first, difference.ops, outcome)?;
            if !difference.last.is_empty() {
                self.commit(tables, &difference.last, outcome)?;
            }
        }
        self.made = difference.kept;
        Ok(())
    }

    /// All of it anew in one transaction, because what is there cannot be made right piece by piece: connections go on, what
    /// clients were bound to by affinity is lost.
    fn rebuild(
        &mut self,
        tables: &mut dyn Tables,
        difference: &Difference,
        outcome: &mut Outcome,
    ) -> Result<(), KernelError> {
        tracing::warn!(family = %self.family(), "the table cannot be mended in parts, so it is made anew; affinities are lost");
        let mut changes = vec![Change::DeleteTable];
        changes.extend(self.structure());
        changes.extend(difference.ops.iter().copied().map(Change::Element));
        count(&difference.ops, outcome);
        self.commit(tables, &changes, outcome)
    }

    /// The empty table: sets, chains, rules.
    fn structure(&self) -> Vec<Change> {
        let mut changes = vec![Change::MakeTable];
        changes.extend(SetName::ALL.map(Change::MakeSet));
        self.make_chains(&Chain::FIXED, &mut changes);
        let counted: Vec<Chain> = with_companions(&self.plan.chains()).into_iter().collect();
        self.make_chains(&counted, &mut changes);
        changes
    }

    fn make_chains(&self, chains: &[Chain], changes: &mut Vec<Change>) {
        changes.extend(chains.iter().copied().map(Change::MakeChain));
        changes.extend(chains.iter().map(|&chain| Change::Rules(chain, rules(&self.base, chain))));
    }

    fn differ(&self, found: Option<Found>) -> Difference {
        let family = self.family();
        let Some(mut found) = found else {
            return Difference {
                first: self.structure(),
                ops: self.plan.difference(std::collections::HashMap::new()),
                kept: with_companions(&self.plan.chains()).into_iter().map(|chain| (chain, None)).collect(),
                absent: true,
                ..Difference::default()
            };
        };
        let (absent, wrong): (Vec<_>, Vec<_>) = SetName::ALL
            .into_iter()
            .filter(|&set| !found.set_is(family, set))
            .partition(|set| !found.has_set(*set));
        let counted = with_companions(&self.plan.chains());
        let hooked_wrongly =
            Chain::FIXED.into_iter().any(|chain| found.has_chain(chain) && !found.hook_is(chain));
        if !wrong.is_empty() || hooked_wrongly {
            return Difference {
                rebuild: true,
                ops: self.plan.difference(std::collections::HashMap::new()),
                kept: counted.into_iter().map(|chain| (chain, None)).collect(),
                ..Difference::default()
            };
        }
        let mut first: Vec<Change> = absent.into_iter().map(Change::MakeSet).collect();
        let (mut fresh, mut rewritten) = (Vec::new(), Vec::new());
        for chain in Chain::FIXED.into_iter().chain(counted.iter().copied()) {
            if !found.has_chain(chain) {
                fresh.push(chain);
            } else {
                let wanted = rules(&self.base, chain);
                if !found.chain_is(family, chain, &wanted) {
                    rewritten.push(Change::Rules(chain, wanted));
                }
            }
        }
        self.make_chains(&fresh, &mut first);
        first.extend(rewritten);
        let left: Vec<Chain> = found
            .chains()
            .filter(|chain| !Chain::FIXED.contains(chain) && !counted.contains(chain))
            .collect();
        let mut last = Vec::new();
        last.extend(found.unknown_chains().map(|name| Change::DeleteChainNamed(name.to_owned())));
        last.extend(found.unknown_sets().map(|name| Change::DeleteSetNamed(name.to_owned())));
        let kept = counted.iter().copied().chain(left).map(|chain| (chain, None)).collect();
        Difference {
            rebuild: false,
            absent: false,
            first,
            ops: self.plan.difference(found.take_elements()),
            last,
            kept,
        }
    }

    /// Commits structure and elements: at once if they are few, else in an order that is good for traffic.
    fn load(
        &mut self,
        tables: &mut dyn Tables,
        mut changes: Vec<Change>,
        ops: Vec<Op>,
        outcome: &mut Outcome,
    ) -> Result<(), KernelError> {
        count(&ops, outcome);
        let few = ops.len() <= ONE_TRANSACTION;
        for phase in in_order(ops) {
            if few {
                changes.extend(phase.into_iter().map(Change::Element));
                continue;
            }
            for chunk in phase.chunks(CHUNK) {
                changes.extend(chunk.iter().copied().map(Change::Element));
                self.commit(tables, &mem::take(&mut changes), outcome)?;
            }
        }
        if changes.is_empty() { Ok(()) } else { self.commit(tables, &changes, outcome) }
    }

    fn commit(
        &mut self,
        tables: &mut dyn Tables,
        changes: &[Change],
        outcome: &mut Outcome,
    ) -> Result<(), KernelError> {
        commit(self.family(), tables, changes)?;
        self.count(1);
        outcome.transactions += 1;
        Ok(())
    }

    /// The kernel leaves 0 out when its count begins again.
    fn count(&mut self, transactions: usize) {
        for _ in 0..transactions {
            self.generation = self.generation.checked_add(1).unwrap_or(1);
        }
    }

    /// The counted chains are there; those that nothing leads to begin to rest.
    fn note_chains(&mut self, wanted: &BTreeSet<Chain>, now: Instant) {
        for &chain in wanted {
            self.made.insert(chain, None);
        }
        for (chain, since) in &mut self.made {
            if !wanted.contains(chain) && since.is_none() {
                *since = Some(now);
            }
        }
    }
}

/// One transaction; what passes is waited for.
fn commit(family: Family, tables: &mut dyn Tables, changes: &[Change]) -> Result<(), KernelError> {
    let mut tries = 1;
    loop {
        match tables.commit(family, changes) {
            Err(error) if error.kind() == Kind::Retry && tries < TRIES => {
                tracing::debug!(%family, %error, tries, "a transaction is tried again");
                std::thread::sleep(Duration::from_millis(1 << tries));
                tries += 1;
            }
            committed => return committed,
        }
    }
}

/// What leads from what the kernel has to the plan.
#[derive(Debug, Default)]
pub struct Difference {
    /// There is no table.
    pub absent: bool,
    /// Nothing less than a new table will do.
    pub rebuild: bool,
    /// Chains and sets to be made and chains to be written again, before the elements.
    pub first: Vec<Change>,
    /// Elements.
    pub ops: Vec<Op>,
    /// What somebody else has put into the table, to be deleted after the elements.
    pub last: Vec<Change>,
    /// The counted chains that there are then.
    kept: BTreeMap<Chain, Option<Instant>>,
}

impl Difference {
    fn structure(&self) -> usize {
        usize::from(self.rebuild) + self.first.len() + self.last.len()
    }

    /// Whether the kernel is as planned.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.structure() == 0 && self.ops.is_empty()
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

fn count(ops: &[Op], outcome: &mut Outcome) {
    for op in ops {
        match op {
            Op::Add(_) => outcome.added += 1,
            Op::Delete(_) => outcome.deleted += 1,
            Op::Replace(..) => {
                outcome.added += 1;
                outcome.deleted += 1;
            }
        }
    }
}

fn from_parts(
    ((set, key), (key_end, value)): (
        (SetName, super::element::Key),
        (Option<super::element::Key>, super::element::Value),
    ),
) -> super::element::Element {
    super::element::Element { set, key, key_end, value }
}
