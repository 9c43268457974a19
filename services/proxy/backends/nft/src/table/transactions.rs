//! Transactions that bring a table up to date.
//!
//! Owns: their size, order and retries. In: changes. Out: transactions, through [`NfTables`].

use std::{
    collections::{HashMap, hash_map::Entry},
    mem,
    sync::mpsc,
    thread,
    time::Duration,
};

use keelson_proxy::{backend::Outcome, model::Family};

use super::{CHUNK, ONE_TRANSACTION, Table, difference::Difference};
use crate::{
    chain::Chain,
    element::{Element, Op, SetName},
    kernel::{Change, Elements, ErrorKind, KernelError, NfTables},
    plan::{Plan, in_order},
};

/// Attempts to commit a transaction that fails with a temporary error.
const TRIES: u32 = 5;

impl Table {
    /// Creates the table with all elements, in the order of the plan. The next ones are computed while the kernel takes those
    /// before: there is no list of all of them in memory.
    pub(super) fn fill(
        &mut self,
        tables: &mut dyn NfTables,
        outcome: &mut Outcome,
    ) -> Result<(), KernelError> {
        let structure = self.structure();
        outcome.structure = structure.len();
        let (family, plan) = (self.base.family, &self.plan);
        let total = plan.counts().all_elements();
        let (mut transactions, mut added) = (0, 0);
        if total <= ONE_TRANSACTION {
            let elements = plan.elements().map(|element| Change::Element(Op::Add(element)));
            let changes: Vec<Change> = structure.into_iter().chain(elements).collect();
            commit(family, tables, &changes)?;
            (transactions, added) = (1, changes.len() - outcome.structure);
        } else {
            thread::scope(|scope| {
                let (sender, chunks) = mpsc::sync_channel(1);
                let (spent, spare) = mpsc::channel();
                scope.spawn(move || send_chunks(plan, structure, &sender, &spare));
                for mut changes in chunks {
                    commit(family, tables, &changes)?;
                    transactions += 1;
                    added += changes.len();
                    changes.clear();
                    // The last ones are not needed any more.
                    let _ = spent.send(changes);
                }
                Ok(())
            })?;
            added -= outcome.structure;
        }
        outcome.added += added;
        self.count(transactions);
        outcome.transactions += transactions;
        Ok(())
    }

    /// Changes an existing table.
    pub(super) fn repair(
        &mut self,
        tables: &mut dyn NfTables,
        mut difference: Difference,
        outcome: &mut Outcome,
    ) -> Result<(), KernelError> {
        difference.prepare(&self.base);
        outcome.structure += difference.structure();
        if difference.rebuild {
            self.rebuild(tables, &difference, outcome)?;
        } else {
            self.load(tables, difference.first, difference.ops, outcome)?;
            if !difference.last.is_empty() {
                self.commit(tables, &difference.last, outcome)?;
            }
        }
        // Unused chains stay marked as unused.
        let since = |chain: &Chain| self.chains.get(chain).copied().flatten();
        self.chains = difference.kept.into_iter().map(|chain| (chain, since(&chain))).collect();
        Ok(())
    }

    /// The operations that are still needed, given the elements that the kernel has now.
    pub(super) fn verify(&self, ops: Vec<Op>, tables: &mut dyn NfTables) -> Result<Vec<Op>, KernelError> {
        let family = self.family();
        let mut intervals: HashMap<SetName, Elements> = HashMap::new();
        let mut needed = Vec::new();
        for op in ops {
            let (Op::Add(element) | Op::Delete(element) | Op::Replace(_, element)) = op;
            let (set, key) = (element.set, element.key);
            let current = if set.is_interval() {
                if let Entry::Vacant(vacant) = intervals.entry(set) {
                    vacant.insert(tables.netlink().read_set(family, set)?);
                }
                intervals.get(&set).and_then(|all| all.get(&(set, key)).copied())
            } else {
                tables.netlink().get(family, set, &key)?
            };
            let current = current.map(|(key_end, value)| Element { set, key, key_end, value });
            let wanted = (!matches!(op, Op::Delete(_))).then_some(element);
            needed.extend(match (current, wanted) {
                (None, Some(wanted)) => Some(Op::Add(wanted)),
                (Some(current), Some(wanted)) if current != wanted => Some(Op::Replace(current, wanted)),
                (Some(current), None) => Some(Op::Delete(current)),
                _ => None,
            });
        }
        Ok(needed)
    }

    /// Replaces the table in one transaction, because it cannot be repaired in place: connections continue, session
    /// affinity is lost.
    fn rebuild(
        &mut self,
        tables: &mut dyn NfTables,
        difference: &Difference,
        outcome: &mut Outcome,
    ) -> Result<(), KernelError> {
        tracing::warn!(
            family = %self.family(),
            "cannot repair the table in place; replacing it in one transaction, which discards session affinity"
        );
        let mut changes = vec![Change::DeleteTable];
        changes.extend(self.structure());
        changes.extend(difference.ops.iter().copied().map(Change::Element));
        count(&difference.ops, outcome);
        self.commit(tables, &changes, outcome)
    }

    /// Commits structure and elements: in one transaction if they are few, otherwise in an order that keeps traffic
    /// served.
    pub(super) fn load(
        &mut self,
        tables: &mut dyn NfTables,
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

    pub(super) fn commit(
        &mut self,
        tables: &mut dyn NfTables,
        changes: &[Change],
        outcome: &mut Outcome,
    ) -> Result<(), KernelError> {
        commit(self.family(), tables, changes)?;
        self.count(1);
        outcome.transactions += 1;
        Ok(())
    }
}

/// Sends transactions that fill a table: its structure with the first elements, and no elements of entry sets together with others
/// ([`Plan::elements`] has the order). Ends early when the receiver is gone. `spare`: empty lists, for their memory of megabytes.
fn send_chunks(
    plan: &Plan,
    structure: Vec<Change>,
    chunks: &mpsc::SyncSender<Vec<Change>>,
    spare: &mpsc::Receiver<Vec<Change>>,
) {
    let mut changes = structure;
    let mut elements = plan.elements().peekable();
    while let Some(first) = elements.peek() {
        let is_entry = first.set.is_entry();
        let of_kind = std::iter::from_fn(|| elements.next_if(|element| element.set.is_entry() == is_entry));
        changes.extend(of_kind.take(CHUNK).map(|element| Change::Element(Op::Add(element))));
        let next = spare.try_recv().unwrap_or_else(|_| Vec::with_capacity(CHUNK));
        if chunks.send(mem::replace(&mut changes, next)).is_err() {
            return;
        }
    }
}

/// Commits one transaction; waits and retries after temporary errors.
fn commit(family: Family, tables: &mut dyn NfTables, changes: &[Change]) -> Result<(), KernelError> {
    let mut tries = 1;
    loop {
        match tables.commit(family, changes) {
            Err(error) if error.kind() == ErrorKind::Retry && tries < TRIES => {
                tracing::debug!(%family, %error, tries, "retrying a transaction");
                std::thread::sleep(Duration::from_millis(1 << tries));
                tries += 1;
            }
            committed => return committed,
        }
    }
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
