//! Decoding of tables, chains, rules and sets.
//!
//! Owns: decoding of their attributes. In: attributes of one message of a dump. Out: names and [`FoundChain`]s,
//! [`FoundSet`]s, [`Expression`]s.

use netlink_packet_core::Parseable;
use netlink_packet_netfilter::nftables::{
    ChainAttribute, ChainMessage, Hook, HookNumber, InetHookNumber, SetAttribute, SetDescription, SetMessage,
    TableAttribute, TableFlags, TableMessage,
};

use super::{
    codec::{attributes, text},
    compare::{self, Expression},
    found::{FoundChain, FoundHook, FoundSet, VERDICT},
};
use crate::flowtable::FoundFlowtable;

/// `NFTA_FLOWTABLE_*`, `NFTA_FLOWTABLE_HOOK_*`, `NFTA_DEVICE_NAME`.
pub(super) mod flow {
    pub(in crate::kernel) const TABLE: u16 = 1;
    pub(in crate::kernel) const NAME: u16 = 2;
    pub(in crate::kernel) const HOOK: u16 = 3;
    pub(in crate::kernel) const FLAGS: u16 = 7;
    pub(in crate::kernel) const HOOK_NUMBER: u16 = 1;
    pub(in crate::kernel) const HOOK_PRIORITY: u16 = 2;
    pub(in crate::kernel) const HOOK_DEVICES: u16 = 3;
    pub(in crate::kernel) const DEVICE_NAME: u16 = 1;
}

#[derive(Debug, Default)]
pub(super) struct FoundTable {
    pub(super) name: String,
    /// The kernel calls no chain of the table.
    pub(super) dormant: bool,
    /// Number of chains, sets, stateful objects and flowtables.
    pub(super) objects: Option<usize>,
}

pub(super) fn table(message: &[u8]) -> Result<FoundTable, String> {
    let (mut name, mut dormant, mut objects) = (None, false, None);
    for attribute in TableMessage::parse(message).map_err(|error| error.to_string())?.attributes {
        match attribute {
            TableAttribute::Name(found) => name = Some(found),
            TableAttribute::Flags(flags) => dormant = flags.contains(TableFlags::Dormant),
            TableAttribute::Use(count) => objects = usize::try_from(count).ok(),
            _ => {}
        }
    }
    Ok(FoundTable { name: name.ok_or("a table without a name")?, dormant, objects })
}

/// Table and name of a chain, and its hook.
pub(super) fn chain(message: &[u8]) -> Result<(String, String, FoundChain), String> {
    let (mut table, mut name, mut hooks, mut kind, mut policy) = (None, None, None, String::new(), 0);
    for attribute in ChainMessage::parse(message).map_err(|error| error.to_string())?.attributes {
        match attribute {
            ChainAttribute::Table(found) => table = Some(found),
            ChainAttribute::Name(found) => name = Some(found),
            ChainAttribute::Hook(found) => hooks = Some(found),
            ChainAttribute::Type(found) => kind = found,
            ChainAttribute::Policy(found) => policy = found,
            _ => {}
        }
    }
    let hook = hooks.map(|hooks| hook(&hooks, kind, policy));
    Ok((
        table.ok_or("a chain without a table")?,
        name.ok_or("a chain without a name")?,
        FoundChain { hook, rules: Vec::new() },
    ))
}

fn hook(attributes: &[Hook], kind: String, policy: u32) -> FoundHook {
    let (mut number, mut priority) = (u32::MAX, 0);
    for attribute in attributes {
        match attribute {
            Hook::Number(found) => number = u32::from(*found),
            Hook::Priority(found) => priority = found.cast_signed(),
            _ => {}
        }
    }
    FoundHook { number, priority, kind, policy }
}

pub(super) fn hook_attributes(number: u32, priority: i32) -> Vec<Hook> {
    vec![
        Hook::Number(HookNumber::Inet(InetHookNumber::from(number))),
        Hook::Priority(priority.cast_unsigned()),
    ]
}

/// Table and chain of a rule, and its expressions.
pub(super) fn rule(message: &[u8]) -> Result<(String, String, Vec<Expression>), String> {
    /// `NFTA_RULE_*`.
    const TABLE: u16 = 1;
    const CHAIN: u16 = 2;
    const EXPRESSIONS: u16 = 4;
    let (mut table, mut chain, mut expressions) = (None, None, Vec::new());
    for attribute in attributes(message) {
        match attribute? {
            (TABLE, value) => table = Some(text(value)?.to_owned()),
            (CHAIN, value) => chain = Some(text(value)?.to_owned()),
            (EXPRESSIONS, value) => expressions = compare::of_bytes(value)?,
            _ => {}
        }
    }
    Ok((table.ok_or("a rule without a table")?, chain.ok_or("a rule without a chain")?, expressions))
}

/// Table and name of a set, its properties, and the number of its elements if the kernel returns it
/// ([`FoundSet::count`] is the number of those that are read).
pub(super) fn set(message: &[u8]) -> Result<(String, String, FoundSet, Option<usize>), String> {
    let (mut table, mut name, mut set, mut count) = (None, None, FoundSet::default(), None);
    for attribute in SetMessage::parse(message).map_err(|error| error.to_string())?.attributes {
        match attribute {
            SetAttribute::Table(found) => table = Some(found),
            SetAttribute::Name(found) => name = Some(found),
            SetAttribute::Flags(flags) => set.flags = flags.bits(),
            SetAttribute::KeyType(found) => set.key_type = found,
            SetAttribute::KeyLen(found) => set.key_len = found,
            SetAttribute::DataType(found) => set.data_type = found,
            SetAttribute::DataLen(found) => set.data_len = found,
            SetAttribute::Timeout(found) => set.timeout = found,
            SetAttribute::Count(found) => count = Some(found as usize),
            SetAttribute::Description(found) => {
                let size = found.iter().find_map(|attribute| match attribute {
                    SetDescription::Size(size) => Some(*size),
                    _ => None,
                });
                set.size = size.unwrap_or(set.size);
            }
            _ => {}
        }
    }
    if set.data_type == VERDICT {
        // The kernel returns the size of its own structure.
        set.data_len = 0;
    }
    Ok((table.ok_or("a set without a table")?, name.ok_or("a set without a name")?, set, count))
}

/// Table and name of a flowtable, and its properties.
pub(super) fn flowtable(message: &[u8]) -> Result<(String, String, FoundFlowtable), String> {
    let (mut table, mut name, mut flowtable) = (None, None, FoundFlowtable::default());
    for attribute in attributes(message) {
        match attribute? {
            (flow::TABLE, value) => table = Some(text(value)?.to_owned()),
            (flow::NAME, value) => name = Some(text(value)?.to_owned()),
            (flow::FLAGS, value) => flowtable.flags = super::codec::number(value)?,
            (flow::HOOK, value) => {
                for attribute in attributes(value) {
                    match attribute? {
                        (flow::HOOK_NUMBER, value) => flowtable.hook = super::codec::number(value)?,
                        (flow::HOOK_PRIORITY, value) => {
                            flowtable.priority = super::codec::number(value)?.cast_signed();
                        }
                        (flow::HOOK_DEVICES, list) => {
                            for device in attributes(list) {
                                if let (flow::DEVICE_NAME, device) = device? {
                                    flowtable.devices.insert(text(device)?.to_owned());
                                }
                            }
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    Ok((table.ok_or("a flowtable without a table")?, name.ok_or("a flowtable without a name")?, flowtable))
}

pub(super) fn generation(message: &[u8]) -> Result<u32, String> {
    /// `NFTA_GEN_ID`.
    const ID: u16 = 1;
    for attribute in attributes(message) {
        if let (ID, value) = attribute? {
            return super::codec::number(value);
        }
    }
    Err("a generation without a number".to_owned())
}
