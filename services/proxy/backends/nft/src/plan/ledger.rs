//! Records changes of elements.
//!
//! Owns: [`Ledger`], which counts elements and chains and records changes. In: changes of elements. Out: [`Op`]s, one
//! per key.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::{
    chain::Chain,
    element::{Element, Key, Op, SetName, Value, Verdict},
};

/// An element without its set and key: the end of an interval, and the value.
pub(super) type Content = (Option<Key>, Value);

/// The content at the last [`Ledger::take`], and now.
type Change = (Option<Content>, Option<Content>);

#[derive(Debug, Default)]
pub(super) struct Ledger {
    record: bool,
    changes: HashMap<(SetName, Key), Change>,
    chains: BTreeMap<Chain, usize>,
    elements: [usize; SetName::ALL.len()],
}

impl Ledger {
    pub(super) fn record(&mut self, on: bool) {
        self.record = on;
        self.changes = HashMap::new();
    }

    pub(super) fn has_changes(&self) -> bool {
        !self.changes.is_empty()
    }

    pub(super) fn is_recording(&self) -> bool {
        self.record
    }

    /// Replaces, adds or deletes an element. Equal contents are no change.
    pub(super) fn change(&mut self, set: SetName, key: Key, before: Option<Content>, after: Option<Content>) {
        if before == after {
            return;
        }
        if let Some((_, value)) = before {
            self.forget(set, value);
        }
        if let Some((_, value)) = after {
            self.count(set, value);
        }
        if self.record {
            self.changes.entry((set, key)).or_insert((before, None)).1 = after;
        }
    }

    /// Both lists are ordered by set and key, without duplicate keys.
    pub(super) fn change_all(&mut self, before: &[Element], after: &[Element]) {
        let (mut before, mut after) = (before.iter().peekable(), after.iter().peekable());
        let content = |element: &Element| (element.key_end, element.value);
        loop {
            let order = match (before.peek(), after.peek()) {
                (None, None) => break,
                (Some(_), None) => std::cmp::Ordering::Less,
                (None, Some(_)) => std::cmp::Ordering::Greater,
                (Some(before), Some(after)) => (before.set, before.key).cmp(&(after.set, after.key)),
            };
            let old = if order.is_le() { before.next() } else { None };
            let new = if order.is_ge() { after.next() } else { None };
            if let Some(Element { set, key, .. }) = old.or(new) {
                self.change(*set, *key, old.map(content), new.map(content));
            }
        }
    }

    fn count(&mut self, set: SetName, value: Value) {
        if let Some(count) = self.elements.get_mut(set as usize) {
            *count += 1;
        }
        if let Some(chain) = counted(value) {
            *self.chains.entry(chain).or_default() += 1;
        }
    }

    fn forget(&mut self, set: SetName, value: Value) {
        if let Some(count) = self.elements.get_mut(set as usize) {
            *count -= 1;
        }
        let Some(chain) = counted(value) else { return };
        if let Some(count) = self.chains.get_mut(&chain) {
            *count -= 1;
            if *count == 0 {
                self.chains.remove(&chain);
            }
        }
    }

    /// The changes since the last call.
    pub(super) fn take(&mut self) -> Vec<Op> {
        let changes = std::mem::take(&mut self.changes);
        let op = |((set, key), (before, after)): ((SetName, Key), Change)| {
            let element = |(key_end, value): Content| Element { set, key, key_end, value };
            match (before.map(element), after.map(element)) {
                (Some(before), Some(after)) if before != after => Some(Op::Replace(before, after)),
                (Some(before), None) => Some(Op::Delete(before)),
                (None, Some(after)) => Some(Op::Add(after)),
                _ => None,
            }
        };
        changes.into_iter().filter_map(op).collect()
    }

    pub(super) fn chains(&self) -> BTreeSet<Chain> {
        self.chains.keys().copied().collect()
    }

    pub(super) fn elements(&self) -> [usize; SetName::ALL.len()] {
        self.elements
    }
}

/// The chain that a value refers to, if it is created on demand.
fn counted(value: Value) -> Option<Chain> {
    match value {
        Value::Verdict(Verdict::Goto(
            chain @ (Chain::LoadBalance { .. } | Chain::Affinity { .. } | Chain::Sources { .. }),
        )) => Some(chain),
        _ => None,
    }
}
