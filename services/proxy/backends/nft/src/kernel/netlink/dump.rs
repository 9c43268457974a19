//! Reads the table.
//!
//! Owns: nothing. In: a family. Out: [`Found`], with the elements of sets, as far as the kernel shows them.

use std::{collections::HashMap, time::Duration};

use keelson_proxy::model::Family;
use netlink_packet_core::NLM_F_DUMP;
use netlink_packet_netfilter::nftables::{
    ChainMessage, NfTablesMessage, RuleAttribute, RuleMessage, SetAttribute, SetElementList,
    SetElementMessage, SetMessage, TableAttribute, TableMessage,
};
use nix::errno::Errno;

use super::{Netlink, READS, RequestError};
use crate::{
    element::SetName,
    kernel::{
        Found, FoundSet, KernelError,
        codec::{message, protocol},
        elements::Reader,
        parse,
    },
    ruleset::TABLE,
};

/// Dumps of a set before it counts as incomplete.
const DUMPS: u32 = 4;

/// `NFT_SET_INTERVAL`.
const INTERVAL: u32 = 4;

/// Number of elements by set, as counted by the kernel.
pub(super) type Counts = HashMap<SetName, usize>;

impl Netlink {
    /// The structure of the table, and the number of elements of each set if the kernel returns it.
    pub(super) fn structure(&mut self, family: Family) -> Result<Option<(Found, Counts)>, KernelError> {
        let mut last = None;
        for attempt in 0..READS {
            match self.structure_once(family) {
                Ok(None) => return Ok(None),
                Ok(Some((found, counts, complete))) => {
                    // A table to which another program has added other objects has more than chains and sets: if two
                    // dumps are equal, they are complete.
                    if complete || last.as_ref() == Some(&found) {
                        return Ok(Some((found, counts)));
                    }
                    last = Some(found);
                }
                Err(RequestError::Interrupted) => {}
                Err(error) => return Err(error.into_error("the table")),
            }
            std::thread::sleep(Duration::from_millis(u64::from(attempt)));
        }
        Err(KernelError::ReadInterrupted { family, attempts: READS })
    }

    /// One attempt of [`Self::structure`]. The bool: whether it has as many chains and sets as the kernel counts.
    pub(super) fn structure_once(
        &mut self,
        family: Family,
    ) -> Result<Option<(Found, Counts, bool)>, RequestError> {
        let mut found = Found::default();
        let named = TableMessage { attributes: vec![TableAttribute::Name(TABLE.to_owned())] };
        let mut table = parse::FoundTable::default();
        let asked = self.request(
            "the table",
            protocol(family),
            0,
            NfTablesMessage::GetTable(named),
            |kind, _, message| {
                if kind == message::NEW_TABLE {
                    table = parse::table(message)?;
                }
                Ok(())
            },
        );
        match asked {
            Err(RequestError::Rejected(Errno::ENOENT, _)) => return Ok(None),
            other => other?,
        }
        found.dormant = table.dormant;
        self.read_chains(family, &mut found)?;
        let counts = self.read_sets(family, &mut found)?;
        found.flowtables = self.flowtables(family)?;
        let complete = table.objects == Some(found.chains.len() + found.sets.len() + found.flowtables.len());
        Ok(Some((found, counts, complete)))
    }

    pub(super) fn read_chains(&mut self, family: Family, found: &mut Found) -> Result<(), RequestError> {
        let chains = &mut found.chains;
        let all = ChainMessage { attributes: Vec::new() };
        self.request(
            "chains",
            protocol(family),
            NLM_F_DUMP,
            NfTablesMessage::GetChain(all),
            |kind, _, message| {
                if kind == message::NEW_CHAIN {
                    // The dump has chains of all tables of the family.
                    let (table, name, chain) = parse::chain(message)?;
                    if table == TABLE {
                        chains.insert(name, chain);
                    }
                }
                Ok(())
            },
        )?;
        let ours = RuleMessage { attributes: vec![RuleAttribute::Table(TABLE.to_owned())] };
        self.request(
            "rules",
            protocol(family),
            NLM_F_DUMP,
            NfTablesMessage::GetRule(ours),
            |kind, _, message| {
                if kind == message::NEW_RULE {
                    let (table, chain, rule) = parse::rule(message)?;
                    if table == TABLE
                        && let Some(chain) = chains.get_mut(&chain)
                    {
                        chain.rules.push(rule);
                    }
                }
                Ok(())
            },
        )
    }

    /// Reads the properties of sets. Returns the numbers of elements that the kernel reports.
    pub(super) fn read_sets(&mut self, family: Family, found: &mut Found) -> Result<Counts, RequestError> {
        let sets = &mut found.sets;
        let mut counts = HashMap::new();
        let ours = SetMessage { attributes: vec![SetAttribute::Table(TABLE.to_owned())] };
        self.request(
            "sets",
            protocol(family),
            NLM_F_DUMP,
            NfTablesMessage::GetSet(ours),
            |kind, _, message| {
                if kind == message::NEW_SET {
                    let (table, name, set, count) = parse::set(message)?;
                    if table == TABLE {
                        counts.extend(SetName::parse(&name).zip(count));
                        sets.insert(name, set);
                    }
                }
                Ok(())
            },
        )?;
        Ok(counts)
    }

    /// Reads the elements of all our sets.
    ///
    /// The kernel resizes a hash table some milliseconds after a transaction. A dump during a resize lists some
    /// elements twice and others not at all, without a notice; so does a dump of a set that changes. The element count
    /// (6.16 and later) shows it, and another dump returns the others; without the count, dumps are repeated until one
    /// returns nothing new.
    pub(super) fn read_elements(
        &mut self,
        family: Family,
        counts: &Counts,
        found: &mut Found,
    ) -> Result<(), RequestError> {
        let mut reader = Reader::default();
        reader.elements.reserve(counts.values().sum());
        for set in SetName::ALL.into_iter().filter(|set| !set.is_dynamic()) {
            let Some(description) = found.sets.get_mut(set.as_str()) else { continue };
            let readable = is_readable(description);
            let mut complete = false;
            for _ in 0..DUMPS {
                self.dump_set(family, set, readable, &mut reader)?;
                // Elements that an earlier dump of the set did not return.
                let fresh = reader.finish(set);
                description.count += fresh.count;
                description.foreign_elements |= fresh.foreign || !readable;
                complete = match counts.get(&set) {
                    // Intervals are stored in trees, which are not resized, and counted by their ends. The existing set
                    // decides, which may differ from the wanted one.
                    _ if description.flags & INTERVAL != 0 || !readable => true,
                    Some(count) => *count == description.count,
                    None => fresh.count == 0,
                };
                if complete {
                    break;
                }
            }
            found.incomplete |= !complete;
        }
        found.elements = reader.elements;
        Ok(())
    }

    pub(super) fn dump_set(
        &mut self,
        family: Family,
        set: SetName,
        readable: bool,
        reader: &mut Reader,
    ) -> Result<(), RequestError> {
        let list = SetElementMessage {
            attributes: vec![
                SetElementList::Table(TABLE.to_owned()),
                SetElementList::Set(set.as_str().to_owned()),
            ],
        };
        let what = format!("elements of {set}");
        let message = NfTablesMessage::GetSetElement(list);
        self.request(&what, protocol(family), NLM_F_DUMP, message, |kind, _, message| {
            if kind == message::NEW_SET_ELEMENT && readable {
                reader.read(set, message)?;
            }
            Ok(())
        })
    }
}

/// Whether the elements of a set can be ours: others are not read.
fn is_readable(set: &FoundSet) -> bool {
    let longest = crate::element::KEY_MAX as u32;
    set.key_len <= longest && set.data_len <= longest
}
