//! What is in the maps that the proxy writes.
//!
//! Owns: [`Contents`], [`Element`] and [`Change`], and the difference of two contents. In and out: values; the kernel is in
//! `kernel`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use keelson_proxy::model::{Family, Protocol};

use crate::layout::{
    Address, FrontendKey, MEMBER_HERE, MEMBER_SERVES, MapName, MemberKey, RangeKey, SetKey, SetKind,
    SetValue, SlotValue,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    Slot(u32, SlotValue),
    Member(MemberKey, u32),
    Set(SetKey, SetValue),
    Frontend(FrontendKey, SetKey),
    /// The value is 1.
    NodeAddress(Address, u32),
    /// The value is 1.
    Range(RangeKey, u32),
}

/// Keys alone. Slots are not deleted: nothing leads to one that no set has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    Member(MemberKey),
    Set(SetKey),
    Frontend(FrontendKey),
    NodeAddress(Address),
    Range(RangeKey),
}

impl Element {
    /// `None`: it is not deleted.
    pub(crate) const fn key(&self) -> Option<Key> {
        match self {
            Self::Slot(..) => None,
            Self::Member(key, _) => Some(Key::Member(*key)),
            Self::Set(key, _) => Some(Key::Set(*key)),
            Self::Frontend(key, _) => Some(Key::Frontend(*key)),
            Self::NodeAddress(key, _) => Some(Key::NodeAddress(*key)),
            Self::Range(key, _) => Some(Key::Range(*key)),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Put(Element),
    Delete(Key),
}

impl Change {
    /// The place in the order of a sync: what is pointed to is put before what points to it, and deleted after it.
    const fn rank(&self) -> u8 {
        match self {
            Self::Put(Element::Slot(..)) => 0,
            Self::Put(Element::Member(..) | Element::Range(..)) => 1,
            Self::Put(Element::Set(..)) => 2,
            Self::Put(Element::Frontend(..) | Element::NodeAddress(..)) => 3,
            Self::Delete(Key::Frontend(_) | Key::NodeAddress(_)) => 4,
            Self::Delete(Key::Set(_)) => 5,
            Self::Delete(Key::Member(_) | Key::Range(_)) => 6,
        }
    }

    /// The slot that it writes.
    pub(crate) const fn slot(&self) -> Option<(u32, SlotValue)> {
        match self {
            Self::Put(Element::Slot(place, value)) => Some((*place, *value)),
            _ => None,
        }
    }

    pub(crate) const fn map(&self) -> MapName {
        match self {
            Self::Put(Element::Slot(..)) => MapName::Slots,
            Self::Put(Element::Member(..)) | Self::Delete(Key::Member(_)) => MapName::Members,
            Self::Put(Element::Set(..)) | Self::Delete(Key::Set(_)) => MapName::Sets,
            Self::Put(Element::Frontend(..)) | Self::Delete(Key::Frontend(_)) => MapName::Frontends,
            Self::Put(Element::NodeAddress(..)) | Self::Delete(Key::NodeAddress(_)) => MapName::NodeAddresses,
            Self::Put(Element::Range(..)) | Self::Delete(Key::Range(_)) => MapName::SourceRanges,
        }
    }
}

/// Sorts changes so that programs meet the old state or the new one of each service port.
pub(crate) fn sort(changes: &mut [Change]) {
    changes.sort_by_key(Change::rank);
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) slots: BTreeMap<u32, SlotValue>,
    pub(crate) members: BTreeMap<MemberKey, u32>,
    pub(crate) sets: BTreeMap<SetKey, SetValue>,
    pub(crate) frontends: BTreeMap<FrontendKey, SetKey>,
    pub(crate) node_addresses: BTreeMap<Address, u32>,
    pub(crate) ranges: BTreeMap<RangeKey, u32>,
}

/// The lowest bit of a number tells its family.
pub(crate) const fn family_of(number: u32) -> Family {
    if number & 1 == 0 { Family::V4 } else { Family::V6 }
}

impl Contents {
    pub(crate) fn insert(&mut self, element: Element) {
        match element {
            Element::Slot(key, value) => drop(self.slots.insert(key, value)),
            Element::Member(key, value) => drop(self.members.insert(key, value)),
            Element::Set(key, value) => drop(self.sets.insert(key, value)),
            Element::Frontend(key, value) => drop(self.frontends.insert(key, value)),
            Element::NodeAddress(key, value) => drop(self.node_addresses.insert(key, value)),
            Element::Range(key, value) => drop(self.ranges.insert(key, value)),
        }
    }

    /// Changes that make the contents of a family to what is wanted, and passed to a callback.
    pub(crate) fn changes_to(
        &self,
        family: Family,
        wanted: impl FnOnce(&mut dyn FnMut(Element)),
    ) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut left = self.keys(family);
        wanted(&mut |element| {
            if let Some(key) = element.key().filter(|_| !left.is_empty()) {
                left.remove(&key);
            }
            if !self.has(&element) {
                changes.push(Change::Put(element));
            }
        });
        changes.extend(left.into_iter().map(Change::Delete));
        sort(&mut changes);
        changes
    }

    fn has(&self, element: &Element) -> bool {
        match element {
            Element::Slot(key, value) => self.slots.get(key) == Some(value),
            Element::Member(key, value) => self.members.get(key) == Some(value),
            Element::Set(key, value) => self.sets.get(key) == Some(value),
            Element::Frontend(key, value) => self.frontends.get(key) == Some(value),
            Element::NodeAddress(key, value) => self.node_addresses.get(key) == Some(value),
            Element::Range(key, value) => self.ranges.get(key) == Some(value),
        }
    }

    /// Those of a family.
    fn keys(&self, family: Family) -> BTreeSet<Key> {
        let members = self.members.keys().filter(|key| family_of(key.number) == family);
        let sets = self.sets.keys().filter(|key| family_of(key.number) == family);
        let frontends = self.frontends.keys().filter(|key| key.address.family() == family);
        let addresses = self.node_addresses.keys().filter(|key| key.family() == family);
        let ranges = self.ranges.keys().filter(|key| family_of(key.number) == family);
        let keys = members.copied().map(Key::Member).chain(sets.copied().map(Key::Set));
        let keys = keys.chain(frontends.copied().map(Key::Frontend));
        let keys = keys.chain(addresses.copied().map(Key::NodeAddress));
        keys.chain(ranges.copied().map(Key::Range)).collect()
    }
}

impl fmt::Display for SetKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.number, self.set_kind().map_or("unknown", SetKind::as_str))?;
        if self.has_ranges() { f.write_str(", in source ranges") } else { Ok(()) }
    }
}

impl fmt::Display for RangeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, bits, address } = self;
        let mapped = if address.ip().is_ipv4() { 96 } else { 0 };
        write!(f, "{number} {}/{}", address.ip(), bits.saturating_sub(mapped))
    }
}

impl fmt::Display for SetValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} slots from {}", self.count, self.first)?;
        match self.affinity_seconds {
            0 => Ok(()),
            seconds => write!(f, ", affinity {seconds} s"),
        }
    }
}

impl fmt::Display for FrontendKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, port, protocol, is_node_port } = self;
        let protocol = Protocol::from_number(*protocol).map_or("unknown", Protocol::as_str);
        match is_node_port {
            true => write!(f, "node port {port}/{protocol} of {}", address.family()),
            false => write!(f, "{}/{protocol}", std::net::SocketAddr::new(address.ip(), *port)),
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slot(place, SlotValue { remote, number }) => {
                write!(f, "{place} : {} of {number}", remote.endpoint())
            }
            Self::Member(MemberKey { number, remote }, bits) => {
                let names = [(1, "cluster"), (2, "local"), (MEMBER_SERVES, "serving"), (MEMBER_HERE, "here")];
                let names = names.into_iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| name);
                write!(f, "{number} {} : {}", remote.endpoint(), names.collect::<Vec<_>>().join(" "))
            }
            Self::Set(key, value) => write!(f, "{key} : {value}"),
            Self::Frontend(key, value) => write!(f, "{key} : {value}"),
            Self::NodeAddress(address, _) => write!(f, "{}", address.ip()),
            Self::Range(key, _) => key.fmt(f),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Member(MemberKey { number, remote }) => write!(f, "{number} {}", remote.endpoint()),
            Self::Set(key) => key.fmt(f),
            Self::Frontend(key) => key.fmt(f),
            Self::NodeAddress(address) => address.ip().fmt(f),
            Self::Range(key) => key.fmt(f),
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let map = self.map().as_str();
        match self {
            Self::Put(element) => write!(f, "put in map {map}: {element}"),
            Self::Delete(key) => write!(f, "delete from map {map}: {key}"),
        }
    }
}
