//! In which order operations reach the kernel.
//!
//! Owns: [`in_order`]. In: operations that lead from one state to another. Out: the same in an order in which traffic is
//! served at any moment, wherever transactions are cut.
//!
//! Why it holds. A number that is in use has, at any moment, a chain for every choice, and a slot for every index that the
//! chain may choose:
//! 1. What packets do not come to yet is added from its end: endpoints and slots, then choices, then policies. No choice in
//!    use counts so far as to reach what is added; a policy is added when the choice behind it is there.
//! 2. What is in use is switched over: first slots (of an index that stays) and affinity endpoints, then choices, whose
//!    new count finds all slots; then frontends lead to numbers that are whole. A frontend that moves from one map to another
//!    is in both for a moment, never in none. A filter is there before its frontend, and goes after it.
//! 3. What packets do not come to any more is deleted from its beginning: policies, choices, slots and endpoints.
//!
//! What cannot be done so: source ranges of a load-balancer address that are cut in another way (10.0.0.0/24 becomes
//! 10.0.0.0/25): the kernel refuses intervals that overlap, so the old ones go before the new ones come. These operations are
//! next to each other, and only new connections to that address are dropped if a transaction ends between them; it is never
//! open. Ranges that stay as they are are not touched. The same holds for ServiceCIDRs, which serve nothing.

use std::collections::HashSet;

use crate::nft::element::{Element, Key, Op, SetName};

/// Puts operations in the order in which they have to reach the kernel: what is added and not yet used, what is switched
/// over, what is deleted and not used any more. Each part may be cut into transactions anywhere, as long as operations stay
/// in their order.
#[must_use]
pub fn in_order(ops: Vec<Op>) -> [Vec<Op>; 3] {
    let unfiltered: HashSet<Key> = ops.iter().filter_map(unfiltered).collect();
    let mut ranks: [Vec<Op>; RANKS] = std::array::from_fn(|_| Vec::new());
    for op in ops {
        if let Some(rank) = ranks.get_mut(rank(&op, &unfiltered)) {
            rank.push(op);
        }
    }
    // Ranges of one address next to each other: those that go, those whose end moves, those that come.
    if let Some(ranges) = ranks.get_mut(RANGES) {
        ranges.sort_by_cached_key(|op| match op {
            Op::Delete(element) => (filtered(element), 0),
            Op::Replace(element, _) => (filtered(element), 1),
            Op::Add(element) => (filtered(element), 2),
        });
    }
    let mut phases: [Vec<Op>; 3] = Default::default();
    for (number, rank) in ranks.into_iter().enumerate() {
        let [first, second, third] = &mut phases;
        match number {
            ..SWITCH => first.extend(rank),
            SWITCH..CLEAR => second.extend(rank),
            _ => third.extend(rank),
        }
    }
    phases
}

/// The first rank of the second phase.
const SWITCH: usize = 3;
/// Source ranges that are cut anew, and ServiceCIDRs.
const RANGES: usize = SWITCH + 2;
/// The first rank of the third phase.
const CLEAR: usize = SWITCH + 8;
const RANKS: usize = CLEAR + 3;

/// How far a set that is no entry is from where packets come in: 2, 1 and 0.
const fn depth(set: SetName) -> usize {
    match set {
        SetName::ExternalPolicy => 2,
        SetName::InternalChoice | SetName::ExternalChoice | SetName::LocalChoice => 1,
        _ => 0,
    }
}

fn rank(op: &Op, unfiltered: &HashSet<Key>) -> usize {
    let (Op::Add(Element { set, .. })
    | Op::Delete(Element { set, .. })
    | Op::Replace(Element { set, .. }, _)) = op;
    let interval_goes = |element| filtered(element).is_some_and(|filtered| unfiltered.contains(&filtered));
    match op {
        Op::Add(_) if !set.is_entry() => depth(*set),
        Op::Delete(_) if !set.is_entry() => CLEAR + 2 - depth(*set),
        Op::Replace(..) if !set.is_entry() => SWITCH + usize::from(depth(*set) != 0),
        Op::Delete(element) if set.is_interval() && interval_goes(element) => SWITCH + 7,
        _ if set.is_interval() => RANGES,
        Op::Add(_) if *set == SetName::Filtered => SWITCH + 3,
        Op::Delete(_) if *set == SetName::Filtered => SWITCH + 6,
        Op::Add(_) | Op::Replace(..) => SWITCH + 4,
        Op::Delete(_) => SWITCH + 5,
    }
}

/// The frontend whose filter is deleted.
fn unfiltered(op: &Op) -> Option<Key> {
    match op {
        Op::Delete(element) if element.set == SetName::Filtered => Some(element.key),
        _ => None,
    }
}

/// The frontend that a source range belongs to: its key is that of the frontend, and an address.
fn filtered(element: &Element) -> Option<Key> {
    let key = element.key.as_slice();
    let frontend = (element.set == SetName::SourceRanges).then_some((key.len() + 8) / 2)?;
    Key::from_slice(key.get(..frontend)?)
}
