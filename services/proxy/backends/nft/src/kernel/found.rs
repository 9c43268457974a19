//! Our table in the kernel.
//!
//! Owns: [`Found`], and the comparison of its chains and sets with the wanted ones. In: a dump. Out: results of
//! comparisons, names, elements.

use std::collections::{BTreeMap, BTreeSet};

use keelson_proxy::model::Family;

use super::{
    compare::{self, Expression},
    elements::Elements,
};
use crate::{
    chain::Chain,
    element::SetName,
    flowtable::FoundFlowtable,
    ruleset::{self, Rule, SetData},
};

/// `NFT_DATA_VERDICT`: the type of verdict values.
pub(super) const VERDICT: u32 = 0xffff_ff00;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundHook {
    /// `NF_INET_*`.
    pub number: u32,
    /// Lower is earlier.
    pub priority: i32,
    /// `nat`, `filter` or `route`.
    pub kind: String,
    /// `NF_ACCEPT` is 1.
    pub policy: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FoundChain {
    /// `None`: not a base chain.
    pub hook: Option<FoundHook>,
    pub rules: Vec<Vec<Expression>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FoundSet {
    /// `NFT_SET_*`.
    pub flags: u32,
    /// nft's number of the key type.
    pub key_type: u32,
    /// In bytes.
    pub key_len: u32,
    /// The type of the value; 0xffffff00 is a verdict.
    pub data_type: u32,
    /// In bytes; 0 for a verdict.
    pub data_len: u32,
    /// Maximum number of elements; 0: no limit.
    pub size: u32,
    /// Default timeout of elements, in milliseconds; 0: none.
    pub timeout: u64,
    /// Number of elements that were read; 0 if the elements of the set are not read.
    pub count: usize,
    /// It has an element that no operation of ours can delete or replace: a catch-all, or an interval that shares an
    /// end with another.
    pub foreign_elements: bool,
}

/// Our table of one family.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Found {
    /// The elements that were read may not be all.
    pub(super) incomplete: bool,
    pub(super) dormant: bool,
    pub(super) chains: BTreeMap<String, FoundChain>,
    pub(super) sets: BTreeMap<String, FoundSet>,
    pub(super) others: BTreeSet<String>,
    pub(super) flowtables: BTreeMap<String, FoundFlowtable>,
    pub(super) elements: Elements,
}

impl Found {
    /// Whether all elements were read. False if a set changed while it was read.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        !self.incomplete
    }

    /// Replaces flowtables and the rules of a chain, for kernels without flowtables.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn with_flowtables(
        mut self,
        family: Family,
        flowtables: BTreeMap<String, FoundFlowtable>,
        (chain, rules): (Chain, &[Rule]),
    ) -> Self {
        let expressions =
            |rule: &Rule| compare::of_library(&rule.expressions(family)).expect("a rule of ours can be read");
        if let Some(found) = self.chains.get_mut(&chain.to_string()) {
            found.rules = rules.iter().map(expressions).collect();
        }
        self.flowtables = flowtables;
        self
    }

    /// Adds the elements of an earlier read to a structure that was read without them.
    #[must_use]
    pub fn with_elements_of(mut self, other: Self) -> Self {
        for (name, set) in &mut self.sets {
            if let Some(other) = other.sets.get(name) {
                set.count = other.count;
                set.foreign_elements = other.foreign_elements;
            }
        }
        Self { elements: other.elements, incomplete: other.incomplete, ..self }
    }

    #[must_use]
    pub fn has_chain(&self, chain: Chain) -> bool {
        self.chains.contains_key(&chain.to_string())
    }

    /// Whether a chain exists and has the wanted hook, or none if it is no base chain.
    #[must_use]
    pub fn hook_is(&self, chain: Chain) -> bool {
        /// `NF_ACCEPT`.
        const ACCEPT: u32 = 1;
        let Some(found) = self.chains.get(&chain.to_string()) else {
            return false;
        };
        match (ruleset::hook(chain), &found.hook) {
            (None, None) => true,
            // The kernel calls no chain of a dormant table.
            (Some(hook), Some(found)) => {
                !self.dormant
                    && (found.number, found.priority, found.kind.as_str(), found.policy)
                        == (hook.hook, hook.priority, hook.kind, ACCEPT)
            }
            _ => false,
        }
    }

    /// Whether a chain exists, has the wanted hook, and has exactly these rules.
    #[must_use]
    pub fn chain_is(&self, family: Family, chain: Chain, rules: &[Rule]) -> bool {
        let Some(found) = self.chains.get(&chain.to_string()) else {
            return false;
        };
        self.hook_is(chain)
            && found.rules.len() == rules.len()
            && rules.iter().zip(&found.rules).all(|(rule, found)| {
                compare::of_library(&rule.expressions(family)).is_ok_and(|rule| compare::same(&rule, found))
            })
    }

    #[must_use]
    pub fn has_set(&self, set: SetName) -> bool {
        self.sets.contains_key(set.as_str())
    }

    /// Whether a set exists, has the wanted properties, and all its elements could be ours. The userdata that `nft`
    /// stores with a set is not compared.
    #[must_use]
    pub fn set_is(&self, family: Family, set: SetName) -> bool {
        let Some(found) = self.sets.get(set.as_str()) else {
            return false;
        };
        let expected = FoundSet { count: found.count, ..expected_set(family, set) };
        *found == expected
    }

    /// Our chains that exist, in no particular order.
    pub fn chains(&self) -> impl Iterator<Item = Chain> + '_ {
        self.chains.keys().filter_map(|name| Chain::parse(name))
    }

    pub fn unknown_chains(&self) -> impl Iterator<Item = &str> + '_ {
        self.chains.keys().map(String::as_str).filter(|name| Chain::parse(name).is_none())
    }

    pub fn unknown_sets(&self) -> impl Iterator<Item = &str> + '_ {
        self.sets.keys().map(String::as_str).filter(|name| SetName::parse(name).is_none())
    }

    /// All flowtables of the table, including ours.
    #[must_use]
    pub const fn flowtables(&self) -> &BTreeMap<String, FoundFlowtable> {
        &self.flowtables
    }

    #[must_use]
    pub fn chain(&self, chain: Chain) -> Option<&FoundChain> {
        self.chains.get(&chain.to_string())
    }

    #[must_use]
    pub fn set(&self, set: SetName) -> Option<&FoundSet> {
        self.sets.get(set.as_str())
    }

    /// The elements of all our sets except the dynamic ones.
    #[must_use]
    pub const fn elements(&self) -> &Elements {
        &self.elements
    }

    pub fn take_elements(&mut self) -> Elements {
        std::mem::take(&mut self.elements)
    }
}

fn expected_set(family: Family, set: SetName) -> FoundSet {
    let definition = ruleset::definition(family, set);
    let (data_type, data_len) = match definition.data {
        None => (0, 0),
        Some(SetData::Verdict) => (VERDICT, 0),
        Some(SetData::Data { data_type, len }) => (data_type, len),
    };
    FoundSet {
        flags: definition.flags.bits(),
        key_type: definition.key_type,
        key_len: definition.key_len,
        data_type,
        data_len,
        size: definition.size.unwrap_or(0),
        timeout: 0,
        count: 0,
        foreign_elements: false,
    }
}
