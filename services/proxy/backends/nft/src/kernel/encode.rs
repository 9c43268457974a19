//! Encoding of transactions.
//!
//! Owns: [`Batch`], the messages of one transaction, and the mapping of errors to changes. In: [`Change`]s. Out: bytes
//! for one datagram; [`KernelError`]s from the kernel's answers.
//!
//! Consecutive elements are sent set by set, all deletions before all additions, in messages of up to 60 KB: an
//! attribute is limited to 64 KiB, and a message per element would be expensive for the kernel.

#[cfg(test)]
mod tests;

use std::collections::HashSet;

use keelson_proxy::model::{Family, Protocol};
use netlink_packet_core::{NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_netfilter::{
    NetfilterProtoFamily,
    nftables::{
        ChainAttribute, ChainMessage, NfTablesMessage, RuleAttribute, RuleMessage, SetAttribute, SetMessage,
        TableAttribute, TableMessage,
    },
    none::ControlMessage,
};
use nix::errno::Errno;

use super::{
    Change,
    codec::{Buffer, Open, SUBSYSTEM, attributes, message, protocol, text},
    elements::{self, LIST_ELEMENTS, LIST_SET, LIST_TABLE},
    error::{KernelError, describe},
    parse::{self, flow},
};
use crate::{
    chain::Chain,
    element::{Element, Key, Op, SetName},
    flowtable,
    ruleset::{self, FLOWTABLE, Rule, Statement, TABLE},
};

/// Maximum length of a list of elements, in bytes, without the last element.
const LIST_MAX: usize = 60_000;

#[derive(Debug, Clone, Copy)]
struct Mark {
    offset: usize,
    change: usize,
}

#[derive(Debug)]
pub(super) struct Batch {
    family: Family,
    buffer: Buffer,
    /// The sequence number of the first message; those of the others follow.
    first: u32,
    /// Where each message begins.
    messages: Vec<usize>,
    /// In the order of the datagram.
    marks: Vec<Mark>,
    changes: usize,
}

impl Batch {
    /// `bytes` is an old buffer, for its memory.
    pub(super) fn new(family: Family, changes: &[Change], first: u32, mut bytes: Vec<u8>) -> Self {
        bytes.clear();
        let mut batch = Self {
            family,
            buffer: Buffer::new(bytes),
            first,
            messages: Vec::new(),
            marks: Vec::with_capacity(changes.len()),
            changes: changes.len(),
        };
        batch.control(ControlMessage::BatchBegin);
        let mut run = Run::default();
        for (index, change) in changes.iter().enumerate() {
            match change {
                Change::Element(op) => run.push(index, op, &mut batch),
                other => {
                    run.write(&mut batch);
                    batch.structure(index, other);
                }
            }
        }
        run.write(&mut batch);
        // The kernel answers only failed messages unless an acknowledgement is requested. The last message is answered
        // after the commit.
        if let Some(&last) = batch.messages.last() {
            batch.buffer.add_flags(last, NLM_F_ACK);
        }
        batch.control(ControlMessage::BatchEnd);
        batch
    }

    fn empty(family: Family, first: u32, changes: usize) -> Self {
        Self { family, buffer: Buffer::default(), first, messages: Vec::new(), marks: Vec::new(), changes }
    }

    pub(super) fn delete_table(family: Family, name: &str, first: u32) -> Self {
        let mut batch = Self::empty(family, first, 1);
        batch.control(ControlMessage::BatchBegin);
        let named = TableMessage { attributes: vec![TableAttribute::Name(name.to_owned())] };
        batch.message(0, NLM_F_ACK, NfTablesMessage::DeleteTable(named));
        batch.control(ControlMessage::BatchEnd);
        batch
    }

    /// Creates the table `name`, if it does not exist, with NAT chains that translate nothing: with the last NAT chain of a
    /// family the kernel stops to translate established connections. One rule asks conntrack: with the last one that does, the
    /// kernel stops to track connections.
    pub(super) fn keep_translation(family: Family, name: &str, first: u32) -> Self {
        let mut batch = Self::empty(family, first, Self::KEEP_TRANSLATION.len());
        batch.control(ControlMessage::BatchBegin);
        let named = TableMessage { attributes: vec![TableAttribute::Name(name.to_owned())] };
        batch.message(0, NLM_F_CREATE, NfTablesMessage::NewTable(named));
        for (index, chain) in Self::NAT_CHAINS.into_iter().enumerate() {
            batch.message(index + 1, NLM_F_CREATE, NfTablesMessage::NewChain(new_chain_in(name, chain)));
        }
        let asks_conntrack = Rule::of([Statement::Established, Statement::Return]);
        let attributes = vec![
            RuleAttribute::Table(name.to_owned()),
            RuleAttribute::Chain(Chain::NatPostrouting.to_string()),
            RuleAttribute::Expressions(asks_conntrack.expressions(family)),
        ];
        let rule = NfTablesMessage::NewRule(RuleMessage { attributes });
        batch.message(Self::NAT_CHAINS.len() + 1, NLM_F_CREATE | NLM_F_APPEND | NLM_F_ACK, rule);
        batch.control(ControlMessage::BatchEnd);
        batch
    }

    const NAT_CHAINS: [Chain; 3] = [Chain::NatPrerouting, Chain::NatOutput, Chain::NatPostrouting];

    /// The changes of [`Self::keep_translation`], for errors.
    pub(super) const KEEP_TRANSLATION: [Change; 5] = [
        Change::MakeTable,
        Change::MakeChain(Chain::NatPrerouting),
        Change::MakeChain(Chain::NatOutput),
        Change::MakeChain(Chain::NatPostrouting),
        Change::Rules(Chain::NatPostrouting, Vec::new()),
    ];

    /// Creates a table of another name with a flowtable and a rule that adds to it, and deletes it again.
    pub(super) fn try_flowtable(family: Family, first: u32) -> Self {
        /// A name that no other table has.
        const PROBE: &str = "keelson-flowtable-probe";
        const CHAIN: Chain = Chain::FilterForwardOffload;
        let mut batch = Self::empty(family, first, Self::TRY_FLOWTABLE.len());
        let name_of_table = || TableMessage { attributes: vec![TableAttribute::Name(PROBE.to_owned())] };
        batch.control(ControlMessage::BatchBegin);
        batch.message(0, NLM_F_CREATE, NfTablesMessage::NewTable(name_of_table()));
        batch.flowtable(1, NLM_F_CREATE | NLM_F_EXCL, PROBE, &[]);
        // The chain has no hook: only the parts of the rule are probed.
        let attributes =
            vec![ChainAttribute::Table(PROBE.to_owned()), ChainAttribute::Name(CHAIN.to_string())];
        batch.message(2, NLM_F_CREATE | NLM_F_EXCL, NfTablesMessage::NewChain(ChainMessage { attributes }));
        for rule in ruleset::offload(&[Protocol::Tcp]) {
            let attributes = vec![
                RuleAttribute::Table(PROBE.to_owned()),
                RuleAttribute::Chain(CHAIN.to_string()),
                RuleAttribute::Expressions(rule.expressions(family)),
            ];
            batch.message(
                3,
                NLM_F_CREATE | NLM_F_APPEND,
                NfTablesMessage::NewRule(RuleMessage { attributes }),
            );
        }
        batch.message(4, NLM_F_ACK, NfTablesMessage::DeleteTable(name_of_table()));
        batch.control(ControlMessage::BatchEnd);
        batch
    }

    /// The changes of [`Self::try_flowtable`], for errors.
    pub(super) const TRY_FLOWTABLE: [Change; 5] = [
        Change::MakeTable,
        Change::MakeFlowtable,
        Change::MakeChain(Chain::FilterForwardOffload),
        Change::Rules(Chain::FilterForwardOffload, Vec::new()),
        Change::DeleteTable,
    ];

    fn next_sequence(&self) -> u32 {
        self.first.wrapping_add(self.messages.len() as u32)
    }

    fn control(&mut self, message: ControlMessage) {
        let sequence = self.next_sequence();
        self.messages.push(self.buffer.len());
        self.buffer.message(NetfilterProtoFamily::Unspec, SUBSYSTEM, 0, sequence, message);
    }

    fn message(&mut self, change: usize, flags: u16, message: NfTablesMessage) {
        let sequence = self.next_sequence();
        let offset = self.buffer.len();
        self.messages.push(offset);
        self.marks.push(Mark { offset, change });
        self.buffer.message(protocol(self.family), 0, flags, sequence, message);
    }

    fn structure(&mut self, index: usize, change: &Change) {
        let table = || TABLE.to_owned();
        let name_of_table = || TableMessage { attributes: vec![TableAttribute::Name(table())] };
        let chain_named = |name: String| ChainMessage {
            attributes: vec![ChainAttribute::Table(table()), ChainAttribute::Name(name)],
        };
        let set_named = |name: String| SetMessage {
            attributes: vec![SetAttribute::Table(table()), SetAttribute::Name(name)],
        };
        let fresh = NLM_F_CREATE | NLM_F_EXCL;
        match change {
            Change::MakeTable => {
                self.message(index, NLM_F_CREATE, NfTablesMessage::NewTable(name_of_table()))
            }
            Change::DeleteTable => self.message(index, 0, NfTablesMessage::DeleteTable(name_of_table())),
            Change::MakeChain(chain) => {
                self.message(index, fresh, NfTablesMessage::NewChain(new_chain(*chain)));
            }
            Change::DeleteChain(chain) => {
                self.message(index, 0, NfTablesMessage::DeleteChain(chain_named(chain.to_string())));
            }
            Change::DeleteChainNamed(name) => {
                self.message(index, 0, NfTablesMessage::DeleteChain(chain_named(name.clone())));
            }
            Change::Rules(chain, rules) => self.rules(index, *chain, rules),
            Change::MakeSet(set) => {
                let id = index as u32;
                self.message(index, fresh, NfTablesMessage::NewSet(new_set(self.family, *set, id)));
            }
            Change::DeleteSetNamed(name) => {
                self.message(index, 0, NfTablesMessage::DeleteSet(set_named(name.clone())));
            }
            Change::MakeFlowtable => self.flowtable(index, fresh, TABLE, &[]),
            Change::AddDevices(devices) => self.flowtable(index, NLM_F_CREATE, TABLE, devices),
            Change::DeleteFlowtable(name) => {
                let open = self.begin_flowtable(index, message::DELETE_FLOWTABLE, 0, TABLE, name);
                self.buffer.end(open);
            }
            Change::RemoveDevices(devices) => {
                let open = self.begin_flowtable(index, message::DELETE_FLOWTABLE, 0, TABLE, FLOWTABLE);
                self.flowtable_hook(devices);
                self.buffer.end(open);
            }
            Change::Element(_) => {}
        }
    }

    fn rules(&mut self, index: usize, chain: Chain, rules: &[ruleset::Rule]) {
        let attributes =
            || vec![RuleAttribute::Table(TABLE.to_owned()), RuleAttribute::Chain(chain.to_string())];
        let message = RuleMessage { attributes: attributes() };
        self.message(index, 0, NfTablesMessage::DeleteRule(message));
        for rule in rules {
            let mut attributes = attributes();
            attributes.push(RuleAttribute::Expressions(rule.expressions(self.family)));
            let message = NfTablesMessage::NewRule(RuleMessage { attributes });
            self.message(index, NLM_F_CREATE | NLM_F_APPEND, message);
        }
    }

    /// Creates our flowtable in a table, or adds devices to it.
    fn flowtable(&mut self, index: usize, flags: u16, table: &str, devices: &[String]) {
        let open = self.begin_flowtable(index, message::NEW_FLOWTABLE, flags, table, FLOWTABLE);
        self.flowtable_hook(devices);
        self.buffer.attribute(flow::FLAGS, &flowtable::FLAGS.to_be_bytes());
        self.buffer.end(open);
    }

    fn begin_flowtable(&mut self, index: usize, kind: u16, flags: u16, table: &str, name: &str) -> Open {
        let sequence = self.next_sequence();
        let offset = self.buffer.len();
        self.messages.push(offset);
        self.marks.push(Mark { offset, change: index });
        let open = self.buffer.begin(kind, self.family, flags, sequence);
        self.buffer.text(flow::TABLE, table);
        self.buffer.text(flow::NAME, name);
        open
    }

    fn flowtable_hook(&mut self, devices: &[String]) {
        let hook = self.buffer.nest(flow::HOOK);
        self.buffer.attribute(flow::HOOK_NUMBER, &flowtable::INGRESS.to_be_bytes());
        self.buffer.attribute(flow::HOOK_PRIORITY, &flowtable::PRIORITY.to_be_bytes());
        if !devices.is_empty() {
            let list = self.buffer.nest(flow::HOOK_DEVICES);
            for device in devices {
                self.buffer.text(flow::DEVICE_NAME, device);
            }
            self.buffer.close(list);
        }
        self.buffer.close(hook);
    }

    /// Begins a message about elements of a set. Returns its position, and what ends it.
    fn begin_elements(&mut self, kind: u16, set: SetName, flags: u16) -> (usize, Open) {
        let sequence = self.next_sequence();
        let offset = self.buffer.len();
        self.messages.push(offset);
        let open = self.buffer.begin(kind, self.family, flags, sequence);
        self.buffer.text(LIST_TABLE, TABLE);
        self.buffer.text(LIST_SET, set);
        (offset, open)
    }

    fn elements(&mut self, kind: u16, flags: u16, list: &[(usize, &Element)]) {
        let with_value = kind == message::NEW_SET_ELEMENT;
        let mut rest = list.iter().peekable();
        while let Some(&&(_, Element { set, .. })) = rest.peek() {
            let (_, open) = self.begin_elements(kind, *set, flags);
            let elements = self.buffer.nest(LIST_ELEMENTS);
            let begin = self.buffer.len();
            while self.buffer.len() - begin < LIST_MAX {
                let Some(&(change, element)) = rest.next() else { break };
                self.marks.push(Mark { offset: self.buffer.len(), change });
                elements::write(&mut self.buffer, element, with_value);
            }
            self.buffer.close(elements);
            self.buffer.end(open);
        }
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        self.buffer.as_slice()
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.buffer.into_bytes()
    }

    /// Number of sequence numbers that the transaction uses.
    pub(super) fn messages(&self) -> u32 {
        self.messages.len() as u32
    }

    pub(super) fn place(&self, sequence: u32) -> Option<usize> {
        let place = sequence.wrapping_sub(self.first) as usize;
        (place < self.messages.len()).then_some(place)
    }

    /// Whether the answer to the message acknowledges the whole transaction.
    pub(super) fn is_answered(&self, place: usize) -> bool {
        place + 2 == self.messages.len()
    }

    /// Maps an error in the kernel's answer.
    pub(super) fn error(
        &self,
        changes: &[Change],
        place: usize,
        errno: Errno,
        offset: Option<usize>,
        reported: Option<&str>,
    ) -> KernelError {
        // The mark of a message, or of the element in it that the kernel points to, is the last one up to there.
        let begin = self.messages.get(place).copied().unwrap_or_default();
        let at = begin + offset.unwrap_or(0);
        let end = self.messages.get(place + 1).copied().unwrap_or(self.buffer.len());
        let before = self.marks.partition_point(|mark| mark.offset <= at);
        let exact =
            before.checked_sub(1).and_then(|last| self.marks.get(last)).filter(|mark| mark.offset >= begin);
        let first = || self.marks.get(before).filter(|mark| mark.offset < end);
        let index = exact.or_else(first).map(|mark| mark.change);
        match index.and_then(|index| Some((index, changes.get(index)?))) {
            None if errno == Errno::EPERM => KernelError::NotPermitted,
            None => KernelError::Transaction { family: self.family, changes: self.changes, errno },
            Some(_) if errno == Errno::EPERM => KernelError::NotPermitted,
            Some((index, change)) => match self.missing(change, begin..end, at, errno) {
                Some(feature) => KernelError::Unsupported { feature, errno },
                None => KernelError::Refused {
                    family: self.family,
                    index,
                    change: describe(change),
                    errno,
                    message: reported.map(str::to_owned),
                },
            },
        }
    }

    /// The part of nf_tables that the kernel lacks, if the error means that. ENOENT may also mean a missing chain or
    /// set, which only the position in the message distinguishes.
    fn missing(
        &self,
        change: &Change,
        message: std::ops::Range<usize>,
        at: usize,
        errno: Errno,
    ) -> Option<String> {
        let unsupported = matches!(errno, Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT);
        match change {
            Change::MakeTable if unsupported => Some(format!("nftables for {}", self.family)),
            Change::MakeSet(set) if unsupported => Some(format!("nftables sets of the kind of {set}")),
            // Without devices, the message refers to nothing else that could be missing.
            Change::MakeFlowtable if unsupported || errno == Errno::ENOENT => {
                let of_type = unsupported || self.top_attribute(message, at) != Some(flow::TABLE);
                of_type.then(|| format!("nftables flowtables for {} (CONFIG_NF_FLOW_TABLE)", self.family))
            }
            Change::MakeChain(chain) if unsupported || errno == Errno::ENOENT => {
                let hook = ruleset::hook(*chain)?;
                let of_type = unsupported || self.top_attribute(message, at) != Some(CHAIN_TABLE);
                of_type.then(|| format!("nftables chains of type {} for {}", hook.kind, self.family))
            }
            Change::Rules(..) if unsupported || errno == Errno::ENOENT => {
                let name = self.expression_at(message, at)?;
                // These expressions are part of nf_tables itself; ENOENT refers to what they name.
                let refers = ["lookup", "immediate", "dynset"].contains(&name.as_str());
                (unsupported || !refers).then(|| format!("nftables expression {name}"))
            }
            _ => None,
        }
    }

    /// Kind of the attribute that contains a position of the datagram.
    fn top_attribute(&self, message: std::ops::Range<usize>, at: usize) -> Option<u16> {
        self.attributes_at(message.start + ATTRIBUTES..message.end, at).map(|(kind, ..)| kind)
    }

    /// Kind and value of the attribute that contains a position of the datagram, and where the value begins.
    fn attributes_at(&self, range: std::ops::Range<usize>, at: usize) -> Option<(u16, &[u8], usize)> {
        let mut begin = range.start;
        for attribute in attributes(self.buffer.as_slice().get(range)?) {
            let (kind, value) = attribute.ok()?;
            let next = begin + (4 + value.len()).next_multiple_of(4);
            if (begin..next).contains(&at) {
                return Some((kind, value, begin + 4));
            }
            begin = next;
        }
        None
    }

    /// Name of the expression that contains a position of the datagram.
    fn expression_at(&self, message: std::ops::Range<usize>, at: usize) -> Option<String> {
        /// `NFTA_RULE_EXPRESSIONS` and `NFTA_EXPR_NAME`.
        const EXPRESSIONS: u16 = 4;
        const NAME: u16 = 1;
        let (kind, list, begin) = self.attributes_at(message.start + ATTRIBUTES..message.end, at)?;
        if kind != EXPRESSIONS {
            return None;
        }
        let (_, expression, _) = self.attributes_at(begin..begin + list.len(), at)?;
        let name = attributes(expression).flatten().find(|(kind, _)| *kind == NAME)?;
        text(name.1).ok().map(str::to_owned)
    }
}

/// `NFTA_CHAIN_TABLE`.
const CHAIN_TABLE: u16 = 1;

const ATTRIBUTES: usize = super::codec::HEADER + super::codec::GENERIC;

fn new_chain(chain: Chain) -> ChainMessage {
    new_chain_in(TABLE, chain)
}

fn new_chain_in(table: &str, chain: Chain) -> ChainMessage {
    /// `NF_ACCEPT`.
    const ACCEPT: u32 = 1;
    let mut attributes =
        vec![ChainAttribute::Table(table.to_owned()), ChainAttribute::Name(chain.to_string())];
    if let Some(hook) = ruleset::hook(chain) {
        attributes.extend([
            ChainAttribute::Hook(parse::hook_attributes(hook.hook, hook.priority)),
            ChainAttribute::Policy(ACCEPT),
            ChainAttribute::Type(hook.kind.to_owned()),
        ]);
    }
    ChainMessage { attributes }
}

fn new_set(family: Family, set: SetName, id: u32) -> SetMessage {
    let mut attributes = vec![
        SetAttribute::Table(TABLE.to_owned()),
        SetAttribute::Name(set.as_str().to_owned()),
        // The kernel requires an ID, although nothing refers to it.
        SetAttribute::Id(id.wrapping_add(1)),
    ];
    attributes.extend(ruleset::definition(family, set).attributes());
    SetMessage { attributes }
}

/// Consecutive element operations.
#[derive(Debug, Default)]
struct Run<'a> {
    sets: Vec<(SetName, Side<'a>)>,
}

#[derive(Debug, Default)]
struct Side<'a> {
    deleted: Vec<(usize, &'a Element)>,
    added: Vec<(usize, &'a Element)>,
    /// The keys of the first `looked_at` elements of `added`.
    keys: HashSet<Key>,
    looked_at: usize,
}

impl<'a> Side<'a> {
    /// Whether the run adds this key.
    fn adds(&mut self, key: Key) -> bool {
        let fresh = self.added.get(self.looked_at..).unwrap_or_default();
        self.keys.extend(fresh.iter().map(|(_, element)| element.key));
        self.looked_at = self.added.len();
        self.keys.contains(&key)
    }
}

impl<'a> Run<'a> {
    fn push(&mut self, index: usize, op: &'a Op, batch: &mut Batch) {
        let (deleted, added) = match op {
            Op::Add(added) => (None, Some(added)),
            Op::Delete(deleted) => (Some(deleted), None),
            Op::Replace(deleted, added) => (Some(deleted), Some(added)),
        };
        if let Some(element) = deleted {
            // Deletions are sent first, so deleting an element that this run adds requires a new run.
            if self.side(element.set).adds(element.key) {
                self.write(batch);
            }
            self.side(element.set).deleted.push((index, element));
        }
        if let Some(element) = added {
            self.side(element.set).added.push((index, element));
        }
    }

    fn side(&mut self, set: SetName) -> &mut Side<'a> {
        let place = self.sets.iter().position(|(other, _)| *other == set).unwrap_or_else(|| {
            self.sets.push((set, Side::default()));
            self.sets.len() - 1
        });
        &mut self.sets[place].1
    }

    fn write(&mut self, batch: &mut Batch) {
        let sets = std::mem::take(&mut self.sets);
        for (_, side) in &sets {
            batch.elements(message::DELETE_SET_ELEMENT, 0, &side.deleted);
        }
        for (_, side) in &sets {
            batch.elements(message::NEW_SET_ELEMENT, NLM_F_CREATE | NLM_F_EXCL, &side.added);
        }
    }
}
