//! The difference between two states of chains and sets.
//!
//! Owns: [`Wanted`], [`Changes`], and the text that makes them. In: what is wanted, and what the kernel has. Out: input of
//! `iptables-restore --noflush` and of `ipset restore`.
//!
//! The order in which changes are applied: sets and entries that rules may need; rules, in which a chain follows those
//! that it refers to; entries that no rule needs any more; unused sets. One section of the text, from `*TABLE` to
//! `COMMIT`, is one atomic change of the kernel. A section is limited ([`SECTION`]): the time that iptables-nft takes for
//! one grows with the square of its number of chains. A change of fewer chains is atomic.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use keelson_proxy::model::Family;

use crate::{
    names::{SetKind, SetName, Table, is_ours, rank},
    save::{Fingerprint, Found},
};

/// Maximum number of chains in a section, where large sections are slow.
pub const SECTION: usize = 1_000;

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Text of each chain, by table.
    chains: [BTreeMap<String, String>; 3],
    /// Entries of each set; those of affinity are the kernel's.
    pub sets: BTreeMap<SetName, BTreeSet<String>>,
}

impl Wanted {
    pub fn chains(&self, table: Table) -> &BTreeMap<String, String> {
        &self.chains[table as usize]
    }

    pub fn chains_mut(&mut self, table: Table) -> &mut BTreeMap<String, String> {
        &mut self.chains[table as usize]
    }

    /// The changes that make the kernel's state the wanted one. `ordered`: our jumps must be the first rules of the
    /// built-in chains; otherwise anywhere in them, because another program may want its own rules to be first, too.
    pub fn changes(&self, found: &Found, ordered: bool) -> Changes {
        self.clone().into_changes(found, ordered)
    }

    /// The same without a copy of the text of chains, which may be large.
    pub fn into_changes(mut self, found: &Found, ordered: bool) -> Changes {
        let mut changes = self.other_changes(found, ordered);
        for table in Table::ALL {
            changes.compare_chains(table, std::mem::take(self.chains_mut(table)), found.chains(table));
        }
        changes
    }

    /// The changes of jumps and sets.
    fn other_changes(&self, found: &Found, ordered: bool) -> Changes {
        let mut changes = Changes::default();
        for table in Table::ALL {
            let is_wanted = |chain: &str| self.chains(table).contains_key(chain);
            for (built_in, chain) in table.jumps().iter().filter(|(_, chain)| is_wanted(chain)) {
                let rules = found.built_in(table, built_in);
                changes.jumps.extend(jump_commands(table, built_in, chain, rules, ordered));
            }
            // No version of this backend has jumps in others.
            let others = found.jumps_to_ours(table).filter(|(built_in, _)| !self.is_used(table, built_in));
            changes.jumps.extend(others.map(|(built_in, rule)| (table, format!("-D {built_in} {rule}"))));
        }
        for (set, entries) in &self.sets {
            let Some(existing) = found.sets.get(set.as_str()) else {
                changes.create_sets.push(set.clone());
                changes.add_entries.extend(entries.iter().map(|entry| (set.clone(), entry.clone())));
                continue;
            };
            if set.kind == SetKind::Affinity {
                continue;
            }
            let entry = |entry: &String| (set.clone(), entry.clone());
            changes.add_entries.extend(entries.difference(existing).map(entry));
            // An entry that is added with another option replaces the one that is there.
            let replaced: BTreeSet<&str> = match set.kind {
                SetKind::Local => entries.difference(existing).map(|entry| key_of(entry)).collect(),
                _ => BTreeSet::new(),
            };
            let gone = existing.difference(entries).filter(|entry| !replaced.contains(key_of(entry)));
            changes.delete_entries.extend(gone.map(entry));
        }
        let wanted: BTreeSet<&str> = self.sets.keys().map(SetName::as_str).collect();
        changes.destroy_sets.extend(found.sets.keys().filter(|set| !wanted.contains(set.as_str())).cloned());
        changes
    }

    /// Whether a built-in chain leads to a wanted one.
    fn is_used(&self, table: Table, built_in: &str) -> bool {
        table.jumps().iter().any(|(used, chain)| *used == built_in && self.chains(table).contains_key(*chain))
    }
}

/// An entry without its options.
#[must_use]
pub fn key_of(entry: &str) -> &str {
    entry.split_once(' ').map_or(entry, |(key, _)| key)
}

/// `rules`: those of the built-in chain, without `-A CHAIN`.
fn jump_commands(
    table: Table,
    built_in: &str,
    chain: &str,
    rules: &[String],
    ordered: bool,
) -> Vec<(Table, String)> {
    let wanted = format!("-j {chain}");
    let kept = match ordered {
        true => rules.first().filter(|rule| **rule == wanted).map(|_| 0),
        false => rules.iter().position(|rule| *rule == wanted),
    };
    // Inserted before others are deleted: at no time is there none.
    let insert = kept.is_none().then(|| (table, format!("-I {built_in} 1 {wanted}")));
    let inserted = usize::from(insert.is_some());
    let surplus = rules.iter().enumerate().filter(|(at, rule)| Some(*at) != kept && is_ours(rule));
    // From the last one on, so that the places of those before stay.
    let delete = surplus.map(|(at, _)| (table, format!("-D {built_in} {}", at + 1 + inserted))).rev();
    insert.into_iter().chain(delete).collect()
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Changes {
    pub create_sets: Vec<SetName>,
    pub add_entries: Vec<(SetName, String)>,
    /// New chains, and those that are written anew: name and text.
    pub chains: Vec<(Table, String, String)>,
    /// Commands that change built-in chains.
    pub jumps: Vec<(Table, String)>,
    pub delete_chains: Vec<(Table, String)>,
    pub delete_entries: Vec<(SetName, String)>,
    pub destroy_sets: Vec<String>,
}

impl Changes {
    /// Removes everything of ours but sets.
    pub fn removal(found: &Found) -> Self {
        let mut changes = Self::default();
        for table in Table::ALL {
            let jumps = found.jumps_to_ours(table).map(|(chain, rule)| (table, format!("-D {chain} {rule}")));
            changes.jumps.extend(jumps);
            changes.compare_chains(table, BTreeMap::new(), found.chains(table));
        }
        changes
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Number of chains and sets.
    pub fn structure(&self) -> usize {
        self.create_sets.len()
            + self.chains.len()
            + self.jumps.len()
            + self.delete_chains.len()
            + self.destroy_sets.len()
    }

    pub fn compare_chains(
        &mut self,
        table: Table,
        wanted: BTreeMap<String, String>,
        found: &BTreeMap<String, Fingerprint>,
    ) {
        let gone = found.keys().filter(|chain| !wanted.contains_key(*chain));
        self.delete_chains.extend(gone.map(|chain| (table, chain.clone())));
        let differs = |(chain, text): &(String, String)| found.get(chain) != Some(&Fingerprint::of(text));
        self.chains.extend(wanted.into_iter().filter(differs).map(|(chain, text)| (table, chain, text)));
    }

    /// Input of `ipset restore` before rules are changed.
    pub fn sets_before(&self, family: Family) -> String {
        let mut text = String::new();
        for set in &self.create_sets {
            let _ = writeln!(text, "{}", set.create(family));
        }
        for (set, entry) in &self.add_entries {
            let _ = writeln!(text, "add {set} {entry}");
        }
        text
    }

    /// Input of `ipset restore` after rules are changed. Sets are destroyed later, and emptied now: an endpoint that comes
    /// back before has no clients.
    pub fn sets_after(&self) -> String {
        let mut text = String::new();
        for set in &self.destroy_sets {
            let _ = writeln!(text, "flush {set}");
        }
        for (set, entry) in &self.delete_entries {
            let _ = writeln!(text, "del {set} {}", key_of(entry));
        }
        text
    }

    /// Input of `iptables-restore --noflush`; empty: no rule changes. `section`: the maximum number of chains in one.
    pub fn rules(&self, section: usize) -> String {
        // The filter comes first: it refuses what the nat table does not translate, and lets pass what it does.
        [Table::Mangle, Table::Filter, Table::Nat]
            .into_iter()
            .map(|table| self.table_rules(table, section))
            .collect()
    }

    fn table_rules(&self, of: Table, section: usize) -> String {
        let mut written: Vec<(&str, &str)> = (self.chains.iter())
            .filter(|(table, ..)| *table == of)
            .map(|(_, chain, text)| (chain.as_str(), text.as_str()))
            .collect();
        written.sort_by_key(|(chain, _)| rank(chain));
        let jumps: Vec<&str> = self
            .jumps
            .iter()
            .filter(|(table, _)| *table == of)
            .map(|(_, command)| command.as_str())
            .collect();
        let deleted: Vec<&str> = (self.delete_chains.iter())
            .filter(|(table, _)| *table == of)
            .map(|(_, chain)| chain.as_str())
            .collect();
        if written.is_empty() && jumps.is_empty() && deleted.is_empty() {
            return String::new();
        }
        let mut text = String::new();
        if written.len() + deleted.len() <= section {
            section_text(of, &written, &jumps, &deleted, &deleted, &mut text);
            return text;
        }
        let mut chunks = written.chunks(section.max(1)).peekable();
        if chunks.peek().is_none() && !jumps.is_empty() {
            section_text(of, &[], &jumps, &[], &[], &mut text);
        }
        while let Some(chunk) = chunks.next() {
            let jumps = if chunks.peek().is_none() { &jumps[..] } else { &[] };
            section_text(of, chunk, jumps, &[], &[], &mut text);
        }
        // Chains that are deleted may refer to each other.
        deleted.chunks(section.max(1)).for_each(|chunk| section_text(of, &[], &[], chunk, &[], &mut text));
        deleted.chunks(section.max(1)).for_each(|chunk| section_text(of, &[], &[], &[], chunk, &mut text));
        text
    }

    /// One line for each change.
    pub fn lines(&self, family: Family) -> Vec<String> {
        let mut lines = Vec::new();
        lines.extend(self.create_sets.iter().map(|set| format!("{family}: create set {set}")));
        lines.extend(
            self.add_entries.iter().map(|(set, entry)| format!("{family}: add {entry} to set {set}")),
        );
        let count = |text: &str| text.lines().count();
        lines.extend(self.chains.iter().map(|(table, chain, text)| {
            format!("{family}: write chain {chain} of table {table}, rules: {}", count(text))
        }));
        lines.extend(self.jumps.iter().map(|(table, command)| format!("{family}: table {table}: {command}")));
        lines.extend(
            self.delete_chains
                .iter()
                .map(|(table, chain)| format!("{family}: delete chain {chain} of table {table}")),
        );
        lines.extend(
            self.delete_entries.iter().map(|(set, entry)| format!("{family}: delete {entry} from set {set}")),
        );
        lines.extend(self.destroy_sets.iter().map(|set| format!("{family}: destroy set {set}")));
        lines
    }
}

/// Declaring a chain creates or flushes it.
fn section_text(
    table: Table,
    written: &[(&str, &str)],
    jumps: &[&str],
    emptied: &[&str],
    deleted: &[&str],
    text: &mut String,
) {
    let _ = writeln!(text, "*{table}");
    for chain in written.iter().map(|(chain, _)| chain).chain(emptied) {
        let _ = writeln!(text, ":{chain} - [0:0]");
    }
    written.iter().for_each(|(_, rules)| text.push_str(rules));
    for command in jumps {
        let _ = writeln!(text, "{command}");
    }
    for chain in deleted {
        let _ = writeln!(text, "-X {chain}");
    }
    text.push_str("COMMIT\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_that_differs_in_any_rule_is_written_anew() {
        let rules = "-A KEELSON-C-1 -j RETURN\n-A KEELSON-C-1 -j ACCEPT\n";
        let mut wanted = Wanted::default();
        wanted.chains_mut(Table::Mangle).insert("KEELSON-C-1".into(), rules.into());
        wanted.chains_mut(Table::Mangle).insert("KEELSON-C-2".into(), String::new());
        let changes = |rules: &str| {
            let mut found = Found::default();
            let chains = ":KEELSON-C-1 - [0:0]\n:KEELSON-C-2 - [0:0]\n:KEELSON-C-3 - [0:0]\n";
            found.add_rules(Table::Mangle, &format!("*mangle\n{chains}{rules}COMMIT\n"));
            wanted.clone().into_changes(&found, false)
        };
        let gone = vec![(Table::Mangle, "KEELSON-C-3".to_owned())];
        let same = Changes { delete_chains: gone.clone(), ..Changes::default() };
        assert_eq!(changes(rules), same);
        let written = vec![(Table::Mangle, "KEELSON-C-1".to_owned(), rules.to_owned())];
        let anew = Changes { chains: written, delete_chains: gone, ..Changes::default() };
        for other in
            ["", "-A KEELSON-C-1 -j ACCEPT\n-A KEELSON-C-1 -j RETURN\n", "-A KEELSON-C-1 -j RETURN\n"]
        {
            assert_eq!(changes(other), anew, "{other}");
        }
    }
}
