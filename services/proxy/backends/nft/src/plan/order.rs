//! Order of operations.
//!
//! Owns: [`in_order`]. In: operations that lead from one state to another. Out: the same operations in an order in
//! which traffic is served at any moment, however they are split into transactions.
//!
//! Why this holds: at any moment, a number in use has a chain for every choice, and a slot for every index that the
//! chain may choose.
//! 1. What packets do not reach yet is added from its end: endpoints and slots, then choices, then policies. No count
//!    in use reaches what is added.
//! 2. What is in use is replaced: first slots (of an index that stays) and affinity endpoints, then choices, whose new
//!    count finds all slots; then frontends map to complete numbers. A frontend that moves from one map to another is
//!    briefly in both, never in none. A filter is added before its frontend, and deleted after it. If only the external
//!    policy of a number changes, "Cluster" is set before frontends move and "Local", which may have no endpoints,
//!    after: a frontend that is added or deleted in the same state meets neither.
//! 3. What packets no longer reach is deleted from its beginning: policies, choices, slots and endpoints.
//!
//! If one state changes both a policy and a set, or both the owner of a frontend and its endpoints, the frontend may
//! briefly have the former policy or owner and the new endpoints: always some that serve.
//!
//! Ranges are added before the filter that looks them up, and deleted after it. If a range is split differently, both
//! forms exist briefly. This is not possible for ServiceCIDRs: the kernel rejects overlapping intervals, so the old
//! ones are deleted before the new ones are added; they serve nothing.

use std::collections::HashSet;

use crate::element::{Key, Op, SetName};

/// Orders operations: what is added and not yet used, what is replaced, what is deleted and no longer used. Each part
/// may be split into transactions anywhere, if operations stay in order.
pub(crate) fn in_order(ops: Vec<Op>) -> [Vec<Op>; 3] {
    let ranking = Ranking::new(&ops);
    let mut ranks: [Vec<Op>; RANKS] = std::array::from_fn(|_| Vec::new());
    for op in ops {
        if let Some(rank) = ranks.get_mut(ranking.rank(&op)) {
            rank.push(op);
        }
    }
    // Deleted intervals first, then those with another end, then added ones.
    if let Some(intervals) = ranks.get_mut(INTERVALS) {
        intervals.sort_by_key(|op| match op {
            Op::Delete(_) => 0,
            Op::Replace(..) => 1,
            Op::Add(_) => 2,
        });
    }
    let mut phases: [Vec<Op>; 3] = Default::default();
    for (number, rank) in ranks.into_iter().enumerate() {
        let [first, second, third] = &mut phases;
        let phase = match number {
            ..SLOTS => first,
            SLOTS..CLEAR => second,
            _ => third,
        };
        if phase.is_empty() { *phase = rank } else { phase.extend(rank) }
    }
    phases
}

// The ranks. Lower ones: what is added and not in use, by depth.
const SLOTS: usize = 3;
const CHOICES: usize = SLOTS + 1;
const DELETED_POLICIES: usize = SLOTS + 2;
const INTERVALS: usize = SLOTS + 3;
const ADDED_RANGES: usize = SLOTS + 4;
const ADDED_FILTERS: usize = SLOTS + 5;
const FRONTENDS: usize = SLOTS + 6;
const DELETED_FRONTENDS: usize = SLOTS + 7;
const ADDED_POLICIES: usize = SLOTS + 8;
const DELETED_FILTERS: usize = SLOTS + 9;
const DELETED_RANGES: usize = SLOTS + 10;
/// From here: what is deleted and not in use, by depth.
const CLEAR: usize = SLOTS + 11;
const RANKS: usize = CLEAR + 3;

/// Position of a set that is no entry on a packet's way: 2 is next to the entries, 0 is the end.
const fn depth(set: SetName) -> usize {
    match set {
        SetName::ExternalPolicy => 2,
        SetName::Counts | SetName::InternalChoice | SetName::ExternalChoice | SetName::LocalChoice => 1,
        _ => 0,
    }
}

struct Ranking {
    /// Numbers of which only the external policy is added or deleted: traffic exists before and after.
    switched: HashSet<Key>,
}

impl Ranking {
    fn new(ops: &[Op]) -> Self {
        let mut switched = HashSet::new();
        for op in ops {
            if let Op::Add(element) | Op::Delete(element) = op
                && element.set == SetName::ExternalPolicy
            {
                switched.insert(element.key);
            }
        }
        for op in ops {
            if let Op::Add(element) | Op::Delete(element) = op
                && element.set == SetName::ExternalChoice
            {
                switched.remove(&element.key);
            }
        }
        Self { switched }
    }

    fn rank(&self, op: &Op) -> usize {
        let (Op::Add(element) | Op::Delete(element) | Op::Replace(element, _)) = op;
        let set = element.set;
        let switched = set == SetName::ExternalPolicy && self.switched.contains(&element.key);
        match op {
            Op::Add(_) if switched => ADDED_POLICIES,
            Op::Delete(_) if switched => DELETED_POLICIES,
            Op::Add(_) if !set.is_entry() => depth(set),
            Op::Delete(_) if !set.is_entry() => CLEAR + 2 - depth(set),
            Op::Replace(..) if depth(set) != 0 => CHOICES,
            Op::Replace(..) if !set.is_entry() => SLOTS,
            _ if set.is_interval() => INTERVALS,
            Op::Delete(_) if set == SetName::SourceRanges => DELETED_RANGES,
            _ if set == SetName::SourceRanges => ADDED_RANGES,
            Op::Add(_) | Op::Replace(..) if set == SetName::Filtered => ADDED_FILTERS,
            Op::Delete(_) if set == SetName::Filtered => DELETED_FILTERS,
            Op::Delete(_) => DELETED_FRONTENDS,
            Op::Add(_) | Op::Replace(..) => FRONTENDS,
        }
    }
}
