//! Differences between the kernel's table and the plan.
//!
//! Owns: [`Difference`]. In: the table as found. Out: changes, none of which is committed here.

use std::collections::{BTreeSet, HashMap};

use super::{Table, devices::device_changes, with_companions};
use crate::{
    chain::Chain,
    element::{Op, SetName},
    kernel::{Change, Found},
    ruleset::{Base, FLOWTABLE, rules},
};

/// Missing prepared chains are created in batches if `slots` has elements. Maximum number of elements that the kernel
/// checks for one batch, about 30 ms; a batch has at least one chain.
const PREPARE_MAX: usize = 65_536;

#[derive(Debug, Default)]
pub(crate) struct Difference {
    /// The table does not exist.
    pub(crate) absent: bool,
    /// The table has to be replaced.
    pub(crate) rebuild: bool,
    /// Chains and sets to be created and chains to be rewritten, before the elements.
    pub(crate) first: Vec<Change>,
    pub(crate) ops: Vec<Op>,
    /// Objects of other programs in the table, to be deleted after the elements.
    pub(crate) last: Vec<Change>,
    /// Interfaces of the flowtable. [`Table::sync_devices`] changes them; they are not part of a sync.
    pub(crate) devices: Vec<Change>,
    /// Missing prepared chains that are not in use.
    pub(crate) prepared: Vec<Chain>,
    pub(super) slots: usize,
    /// The counted chains that exist afterwards.
    pub(super) kept: BTreeSet<Chain>,
}

impl Difference {
    pub(super) fn structure(&self) -> usize {
        usize::from(self.rebuild) + self.first.len() + self.last.len()
    }

    /// Creates as many of the prepared chains as one transaction may; [`Table::collect`] creates the others later.
    pub(super) fn prepare(&mut self, base: &Base) {
        self.prepared.truncate(prepared_at_once(self.slots));
        make_chains(base, &self.prepared, &mut self.first);
        self.kept.extend(&self.prepared);
    }
}

impl Table {
    /// Sets, chains and rules, without elements.
    pub(super) fn structure(&self) -> Vec<Change> {
        let mut changes = vec![Change::MakeTable];
        changes.extend(SetName::ALL.map(Change::MakeSet));
        changes.extend(self.offloads().then_some(Change::MakeFlowtable));
        make_chains(&self.base, &self.fixed(), &mut changes);
        let counted: Vec<Chain> = self.wanted_chains().into_iter().collect();
        make_chains(&self.base, &counted, &mut changes);
        changes
    }

    pub(super) fn differ(&self, found: Option<Found>) -> Difference {
        let Some(mut found) = found else {
            return Difference {
                devices: self
                    .devices
                    .as_ref()
                    .map_or(Vec::new(), |wanted| device_changes(&BTreeSet::new(), wanted)),
                first: self.structure(),
                ops: self.plan.difference(HashMap::new()),
                kept: self.wanted_chains(),
                absent: true,
                ..Difference::default()
            };
        };
        if self.needs_another_table(&found) {
            let ops = self.plan.difference(HashMap::new());
            return Difference { rebuild: true, ops, kept: self.wanted_chains(), ..Difference::default() };
        }
        let slots = found.set(SetName::Slots).map_or(0, |set| set.count);
        let mut difference = Difference { slots, ..Difference::default() };
        let absent = SetName::ALL.into_iter().filter(|set| !found.has_set(*set));
        difference.first.extend(absent.map(Change::MakeSet));
        // Before translated flows are no longer told apart.
        if self.untracked_chain().is_none() && found.has_chain(Chain::RawPrerouting) {
            difference.first.push(Change::DeleteChain(Chain::RawPrerouting));
        }
        self.differ_in_flowtables(&found, &mut difference);
        self.differ_in_chains(&found, &mut difference);
        let Difference { last, .. } = &mut difference;
        last.extend(found.unknown_chains().map(|name| Change::DeleteChainNamed(name.to_owned())));
        last.extend(found.unknown_sets().map(|name| Change::DeleteSetNamed(name.to_owned())));
        let flowtables = found.flowtables().keys();
        let surplus = flowtables.filter(|name| !self.offloads() || name.as_str() != FLOWTABLE);
        last.extend(surplus.cloned().map(Change::DeleteFlowtable));
        difference.ops = self.plan.difference(found.take_elements());
        difference
    }

    /// Whether an object has one of our names and cannot be changed into ours.
    fn needs_another_table(&self, found: &Found) -> bool {
        let is_other_set = |&set: &SetName| found.has_set(set) && !found.set_is(self.family(), set);
        let is_hooked_wrongly = |&chain: &Chain| found.has_chain(chain) && !found.hook_is(chain);
        let flowtable = found.flowtables().get(FLOWTABLE).filter(|_| self.offloads());
        SetName::ALL.iter().any(is_other_set)
            || self.fixed().iter().any(is_hooked_wrongly)
            || flowtable.is_some_and(|flowtable| !flowtable.is_ours())
    }

    fn differ_in_flowtables(&self, found: &Found, difference: &mut Difference) {
        let former: Vec<Change> = Chain::OFFLOAD
            .into_iter()
            .filter(|&chain| Some(chain) != self.offload_chain() && found.has_chain(chain))
            .map(Change::DeleteChain)
            .collect();
        let Some(wanted) = &self.devices else {
            difference.last.extend(former);
            return;
        };
        let flowtable = found.flowtables().get(FLOWTABLE);
        // The flows of the former chain end with their flowtable.
        let kept = flowtable.filter(|_| former.is_empty());
        difference.first.extend(former);
        if kept.is_none() {
            let old = flowtable.map(|_| Change::DeleteFlowtable(FLOWTABLE.to_owned()));
            difference.first.extend(old.into_iter().chain([Change::MakeFlowtable]));
        }
        let none = BTreeSet::new();
        difference.devices = device_changes(kept.map_or(&none, |flowtable| &flowtable.devices), wanted);
    }

    fn differ_in_chains(&self, found: &Found, difference: &mut Difference) {
        let (used, counted) = (self.used_chains(), self.wanted_chains());
        let is_fixed = |chain: &Chain| {
            Chain::FIXED.contains(chain) || Chain::OFFLOAD.contains(chain) || *chain == Chain::RawPrerouting
        };
        // They must be right when they are used again.
        let unused = found.chains().filter(|chain| !is_fixed(chain) && !counted.contains(chain)).collect();
        let kept: BTreeSet<Chain> = counted.into_iter().chain(with_companions(&unused)).collect();
        let (mut fresh, mut rewritten) = (Vec::new(), Vec::new());
        for &chain in self.fixed().iter().chain(&kept) {
            if !found.has_chain(chain) {
                let is_unused = chain.is_prepared() && !used.contains(&chain);
                if is_unused { &mut difference.prepared } else { &mut fresh }.push(chain);
            } else {
                let wanted = rules(&self.base, chain);
                if !found.chain_is(self.family(), chain, &wanted) {
                    rewritten.push(Change::Rules(chain, wanted));
                }
            }
        }
        make_chains(&self.base, &fresh, &mut difference.first);
        difference.first.extend(rewritten);
        difference.kept = kept.into_iter().filter(|chain| !difference.prepared.contains(chain)).collect();
    }
}

/// Number of prepared chains per transaction for this number of slots.
pub(super) fn prepared_at_once(slots: usize) -> usize {
    (PREPARE_MAX / slots.max(1)).max(1)
}

pub(super) fn make_chains(base: &Base, chains: &[Chain], changes: &mut Vec<Change>) {
    changes.extend(chains.iter().copied().map(Change::MakeChain));
    changes.extend(chains.iter().map(|&chain| Change::Rules(chain, rules(base, chain))));
}
