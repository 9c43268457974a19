//! In which order operations reach the kernel.
//!
//! Owns: [`in_order`]. In: operations that lead from one state to another. Out: the same in an order in which traffic is
//! served at any moment, wherever transactions are cut.
//!
//! Why it holds. A number that is in use has, at any moment, a chain for every choice, and a slot for every index that the
//! chain may choose:
//! 1. What packets do not come to yet is added from its end: endpoints and slots, then choices, then policies. No choice in
//!    use counts so far as to reach what is added.
//! 2. What is in use is switched over: first slots (of an index that stays) and affinity endpoints, then choices, whose
//!    new count finds all slots; then frontends lead to numbers that are whole. A frontend that moves from one map to another
//!    is in both for a moment, never in none. A filter is there before its frontend, and goes after it. Where only the
//!    external policy of a number changes, "Cluster" comes before frontends move and "Local", which may lead to nothing, after:
//!    a frontend that comes or goes in the same state meets neither.
//! 3. What packets do not come to any more is deleted from its beginning: policies, choices, slots and endpoints.
//!
//! Where one state changes both a policy and a set, or who has a frontend and its endpoints, the frontend may for a moment
//! be under the policy, or with the owner, of before and have the endpoints of now: always some that serve.
//!
//! The ranges that a filter looks for come before it does, and go after it. Where a range is cut in another way, both are there
//! for a moment. ServiceCIDRs cannot be had so: the kernel refuses intervals that overlap, so the old ones go before the new
//! ones come; they serve nothing.

use std::collections::HashSet;

use crate::element::{Key, Op, SetName};

/// Puts operations in the order in which they have to reach the kernel: what is added and not yet used, what is switched
/// over, what is deleted and not used any more. Each part may be cut into transactions anywhere, as long as operations stay
/// in their order.
pub(crate) fn in_order(ops: Vec<Op>) -> [Vec<Op>; 3] {
    let ranking = Ranking::new(&ops);
    let mut ranks: [Vec<Op>; RANKS] = std::array::from_fn(|_| Vec::new());
    for op in ops {
        if let Some(rank) = ranks.get_mut(ranking.rank(&op)) {
            rank.push(op);
        }
    }
    // Those that go, those whose end moves, those that come.
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

// The ranks. Below these: what is added and not in use, by depth.
const SLOTS: usize = 3;
const CHOICES: usize = SLOTS + 1;
const POLICIES_THAT_GO: usize = SLOTS + 2;
/// ServiceCIDRs.
const INTERVALS: usize = SLOTS + 3;
const RANGES_THAT_COME: usize = SLOTS + 4;
const FILTERS_THAT_COME: usize = SLOTS + 5;
const FRONTENDS: usize = SLOTS + 6;
const FRONTENDS_THAT_GO: usize = SLOTS + 7;
const POLICIES_THAT_COME: usize = SLOTS + 8;
const FILTERS_THAT_GO: usize = SLOTS + 9;
const RANGES_THAT_GO: usize = SLOTS + 10;
/// From here: what is deleted and not in use, by depth.
const CLEAR: usize = SLOTS + 11;
const RANKS: usize = CLEAR + 3;

/// How far a set that is no entry is from where packets come in: 2, 1 and 0.
const fn depth(set: SetName) -> usize {
    match set {
        SetName::ExternalPolicy => 2,
        SetName::Counts | SetName::InternalChoice | SetName::ExternalChoice | SetName::LocalChoice => 1,
        _ => 0,
    }
}

/// What the rank of an operation depends on, besides itself.
struct Ranking {
    /// The numbers of which only the external policy comes or goes: there is traffic before and after.
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
            Op::Add(_) if switched => POLICIES_THAT_COME,
            Op::Delete(_) if switched => POLICIES_THAT_GO,
            Op::Add(_) if !set.is_entry() => depth(set),
            Op::Delete(_) if !set.is_entry() => CLEAR + 2 - depth(set),
            Op::Replace(..) if depth(set) != 0 => CHOICES,
            Op::Replace(..) if !set.is_entry() => SLOTS,
            _ if set.is_interval() => INTERVALS,
            Op::Delete(_) if set == SetName::SourceRanges => RANGES_THAT_GO,
            _ if set == SetName::SourceRanges => RANGES_THAT_COME,
            Op::Add(_) | Op::Replace(..) if set == SetName::Filtered => FILTERS_THAT_COME,
            Op::Delete(_) if set == SetName::Filtered => FILTERS_THAT_GO,
            Op::Delete(_) => FRONTENDS_THAT_GO,
            Op::Add(_) | Op::Replace(..) => FRONTENDS,
        }
    }
}
