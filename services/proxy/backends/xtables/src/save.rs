//! What the kernel has.
//!
//! Owns: [`Found`]. In: output of `iptables-save` and of `ipset save`. Out: our chains and sets, and the rules of built-in
//! chains. Other programs' chains and sets are skipped. Of the text of our chains, only a [`Fingerprint`] is kept: at
//! 10,000 Services of 10 endpoints the text is 20 MB.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hasher as _},
};

use keelson_proxy::model::Family;

use crate::names::{PREFIX, Table, is_affinity, is_ours, set_prefix};

/// 64 bits of a hash of a text. Two texts with the same are taken for equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint(u64);

impl Fingerprint {
    #[must_use]
    pub fn of(text: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write(text.as_bytes());
        Self(hasher.finish())
    }
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Found {
    /// Our chains, by table.
    chains: [BTreeMap<String, Fingerprint>; 3],
    /// Rules of each built-in chain, without `-A CHAIN`.
    built_in: [BTreeMap<String, Vec<String>>; 3],
    /// Entries of each of our sets. Those of affinity are not kept.
    pub sets: BTreeMap<String, BTreeSet<String>>,
    /// A chain of a kube-proxy in mode iptables or ipvs.
    pub kube_proxy: Option<String>,
}

impl Found {
    pub fn chains(&self, table: Table) -> &BTreeMap<String, Fingerprint> {
        &self.chains[table as usize]
    }

    pub fn built_in(&self, table: Table, chain: &str) -> &[String] {
        self.built_in[table as usize].get(chain).map_or(&[], Vec::as_slice)
    }

    /// Rules of built-in chains that lead to our chains: the chain, and the rule without `-A CHAIN`.
    pub fn jumps_to_ours(&self, table: Table) -> impl Iterator<Item = (&str, &str)> {
        self.built_in[table as usize].iter().flat_map(|(chain, rules)| {
            rules.iter().filter(|rule| is_ours(rule)).map(move |rule| (chain.as_str(), rule.as_str()))
        })
    }

    /// Adds the output of `iptables-save -t TABLE`.
    pub fn add_rules(&mut self, table: Table, saved: &str) {
        let (chains, built_in) = (&mut self.chains[table as usize], &mut self.built_in[table as usize]);
        // Rules are listed chain by chain.
        let (mut current, mut text) = ("", String::new());
        for line in saved.lines() {
            if let Some(declared) = line.strip_prefix(':') {
                let mut words = declared.split(' ');
                let (Some(chain), Some(policy)) = (words.next(), words.next()) else { continue };
                if policy != "-" {
                    built_in.entry(chain.to_owned()).or_default();
                } else if chain.starts_with(PREFIX) {
                    chains.insert(chain.to_owned(), Fingerprint::of(""));
                } else if matches!(chain, "KUBE-SERVICES" | "KUBE-FORWARD") {
                    self.kube_proxy = Some(format!("chain {chain} in table {table}"));
                }
                continue;
            }
            let Some((chain, rule)) = line.strip_prefix("-A ").and_then(|rest| rest.split_once(' ')) else {
                continue;
            };
            if chain.starts_with(PREFIX) {
                if chain != current {
                    chains.insert(current.to_owned(), Fingerprint::of(&text));
                    text.clear();
                    current = chain;
                }
                text.push_str(line);
                text.push('\n');
            } else if let Some(rules) = built_in.get_mut(chain) {
                rules.push(rule.to_owned());
            }
        }
        chains.insert(current.to_owned(), Fingerprint::of(&text));
        chains.remove("");
    }

    /// Adds the output of `ipset save`.
    pub fn add_sets(&mut self, family: Family, saved: &str) {
        for line in saved.lines() {
            // An entry may have options: all of them are what it is.
            let mut words = line.splitn(3, ' ');
            let (Some(command), Some(set)) = (words.next(), words.next()) else { continue };
            if !set.starts_with(set_prefix(family)) {
                continue;
            }
            let entries = self.sets.entry(set.to_owned()).or_default();
            if let (false, "add", Some(entry)) = (is_affinity(family, set), command, words.next()) {
                entries.insert(entry.to_owned());
            }
        }
    }
}
