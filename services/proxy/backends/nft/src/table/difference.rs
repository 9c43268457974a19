//! What leads from the kernel's table to the plan.
//!
//! Owns: [`Difference`]. In: the table as it was found. Out: changes, of which none is made here.

use std::collections::{BTreeSet, HashMap};

use super::Table;
use crate::{
    chain::Chain,
    element::{Op, SetName},
    flowtable::device_changes,
    kernel::{Change, Found},
    ruleset::{Base, FLOWTABLE, rules},
};

/// Prepared chains that are missing over a filled `slots` are made in batches. Maximum number of elements that the kernel checks
/// for one batch, about 30 ms; a batch has at least one chain.
const PREPARE_MAX: usize = 65_536;

/// What leads from what the kernel has to the plan.
#[derive(Debug, Default)]
pub(crate) struct Difference {
    /// There is no table.
    pub(crate) absent: bool,
    /// Nothing less than a new table will do.
    pub(crate) rebuild: bool,
    /// Chains and sets to be made and chains to be written again, before the elements.
    pub(crate) first: Vec<Change>,
    /// Elements.
    pub(crate) ops: Vec<Op>,
    /// What somebody else has put into the table, to be deleted after the elements.
    pub(crate) last: Vec<Change>,
    /// Interfaces of the flowtable. These are changed by [`Table::sync_devices`], and no part of a sync.
    pub(crate) devices: Vec<Change>,
    /// Prepared chains that are missing and that nothing leads to.
    pub(crate) prepared: Vec<Chain>,
    /// Number of elements of `slots` that the kernel has.
    pub(super) slots: usize,
    /// The counted chains that there are then.
    pub(super) kept: BTreeSet<Chain>,
}

impl Difference {
    pub(super) fn structure(&self) -> usize {
        usize::from(self.rebuild) + self.first.len() + self.last.len()
    }

    /// Has as many of the prepared chains made as one transaction may; [`Table::collect`] makes the others later.
    pub(super) fn prepare(&mut self, base: &Base) {
        self.prepared.truncate(prepared_at_once(self.slots));
        make_chains(base, &self.prepared, &mut self.first);
        self.kept.extend(&self.prepared);
    }
}

impl Table {
    /// The empty table: sets, chains, rules.
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
        let family = self.family();
        let Some(mut found) = found else {
            let none = BTreeSet::new();
            return Difference {
                devices: self.devices.as_ref().map_or(Vec::new(), |wanted| device_changes(&none, wanted)),
                first: self.structure(),
                ops: self.plan.difference(HashMap::new()),
                kept: self.wanted_chains(),
                absent: true,
                ..Difference::default()
            };
        };
        let (absent, wrong): (Vec<_>, Vec<_>) = SetName::ALL
            .into_iter()
            .filter(|&set| !found.set_is(family, set))
            .partition(|set| !found.has_set(*set));
        let used = self.used_chains();
        let counted = self.wanted_chains();
        let fixed = self.fixed();
        let hooked_wrongly = fixed.iter().any(|&chain| found.has_chain(chain) && !found.hook_is(chain));
        let flowtable = found.flowtables().get(FLOWTABLE).filter(|_| self.offloads());
        let other_flowtable = flowtable.is_some_and(|flowtable| !flowtable.is_ours());
        if !wrong.is_empty() || hooked_wrongly || other_flowtable {
            return Difference {
                rebuild: true,
                ops: self.plan.difference(HashMap::new()),
                kept: counted,
                ..Difference::default()
            };
        }
        let mut first: Vec<Change> = absent.into_iter().map(Change::MakeSet).collect();
        let former = Chain::OFFLOAD.into_iter().filter(|&chain| Some(chain) != self.offload_chain());
        let former: Vec<Change> =
            former.filter(|&chain| found.has_chain(chain)).map(Change::DeleteChain).collect();
        // The flows of the former chain end with their flowtable.
        let flowtable = flowtable.filter(|_| former.is_empty());
        let mut last = Vec::new();
        if self.offloads() {
            first.extend(former);
            if flowtable.is_none() {
                let old = found.flowtables().contains_key(FLOWTABLE);
                first.extend(old.then(|| Change::DeleteFlowtable(FLOWTABLE.to_owned())));
                first.push(Change::MakeFlowtable);
            }
        } else {
            last.extend(former);
        }
        let devices = match (&self.devices, flowtable) {
            (Some(wanted), Some(flowtable)) => device_changes(&flowtable.devices, wanted),
            (Some(wanted), None) => device_changes(&BTreeSet::new(), wanted),
            (None, _) => Vec::new(),
        };
        let (mut fresh, mut prepared, mut rewritten) = (Vec::new(), Vec::new(), Vec::new());
        for &chain in fixed.iter().chain(&counted) {
            if !found.has_chain(chain) {
                let unused = chain.is_prepared() && !used.contains(&chain);
                if unused { &mut prepared } else { &mut fresh }.push(chain);
            } else {
                let wanted = rules(&self.base, chain);
                if !found.chain_is(family, chain, &wanted) {
                    rewritten.push(Change::Rules(chain, wanted));
                }
            }
        }
        make_chains(&self.base, &fresh, &mut first);
        first.extend(rewritten);
        let left: Vec<Chain> = found
            .chains()
            .filter(|chain| !Chain::FIXED.contains(chain) && !counted.contains(chain))
            .filter(|chain| !Chain::OFFLOAD.contains(chain))
            .collect();
        last.extend(found.unknown_chains().map(|name| Change::DeleteChainNamed(name.to_owned())));
        last.extend(found.unknown_sets().map(|name| Change::DeleteSetNamed(name.to_owned())));
        let flowtables = found.flowtables().keys();
        let surplus = flowtables.filter(|name| !self.offloads() || name.as_str() != FLOWTABLE);
        last.extend(surplus.cloned().map(Change::DeleteFlowtable));
        let missing = |chain: &Chain| prepared.contains(chain);
        let kept = counted.iter().copied().filter(|chain| !missing(chain)).chain(left).collect();
        Difference {
            rebuild: false,
            absent: false,
            slots: found.set(SetName::Slots).map_or(0, |set| set.count),
            prepared,
            first,
            ops: self.plan.difference(found.take_elements()),
            last,
            devices,
            kept,
        }
    }
}

/// How many prepared chains one transaction makes over this number of slots.
pub(super) fn prepared_at_once(slots: usize) -> usize {
    (PREPARE_MAX / slots.max(1)).max(1)
}

pub(super) fn make_chains(base: &Base, chains: &[Chain], changes: &mut Vec<Change>) {
    changes.extend(chains.iter().copied().map(Change::MakeChain));
    changes.extend(chains.iter().map(|&chain| Change::Rules(chain, rules(base, chain))));
}
