//! The maps by their pins.
//!
//! Owns: [`ServiceMaps`], those of Services, which both levels of programs have (source ranges: direct return alone); and [`Maps`], those of the socket level. In: a folder of pins, [`Change`]s. Out: elements, as they are in the kernel.

use std::{ops::Range, path::Path, thread, time::Duration};

use aya::maps::{
    HashMap, Map, MapData, MapError, PerCpuArray,
    lpm_trie::{self, LpmTrie},
};

use super::{Decisions, KernelError, chain, slots::Slots};
use crate::{
    elements::{Change, Contents, Element, Key},
    layout::{
        Address, Counter, FlowKey, FlowValue, FrontendKey, Layout, MapName, MemberKey, RangeKey, SetKey,
        SetValue, SlotValue,
    },
};

const MEMORY_ATTEMPTS: u32 = 100;
const MEMORY_PAUSE: Duration = Duration::from_millis(1);

type Hash<const K: usize, const V: usize> = HashMap<MapData, [u8; K], [u8; V]>;

pub(crate) struct ServiceMaps {
    frontends: Hash<20, 8>,
    sets: Hash<8, 16>,
    slots: Slots,
    members: Hash<24, 4>,
    node_addresses: Hash<16, 4>,
    ranges: Option<LpmTrie<MapData, [u8; 20], u32>>,
}

pub(crate) struct Maps {
    pub(crate) services: ServiceMaps,
    affinity: Hash<16, 32>,
    udp_replies: Hash<32, 24>,
    counters: PerCpuArray<MapData, u64>,
}

fn pinned(folder: &Path, map: MapName) -> Result<MapData, KernelError> {
    let data = MapData::from_pin(folder.join(map.as_str()));
    data.map_err(|error| KernelError::map("open", map, &error))
}

/// Opens a pinned map. The kernel checks no sizes here; aya compares them with the types.
fn open<M: TryFrom<Map, Error = MapError>>(
    folder: &Path,
    map: MapName,
    wrap: impl FnOnce(MapData) -> Map,
) -> Result<M, KernelError> {
    wrap(pinned(folder, map)?).try_into().map_err(|error| KernelError::map("use", map, &error))
}

/// Opens a pinned map that only one level has.
pub(crate) fn open_named<M: TryFrom<Map, Error = MapError>>(
    folder: &Path,
    map: &'static str,
    wrap: impl FnOnce(MapData) -> Map,
) -> Result<M, KernelError> {
    let data = MapData::from_pin(folder.join(map)).map_err(failed_named("open", map))?;
    wrap(data).try_into().map_err(failed_named("use", map))
}

pub(crate) fn failed_named(action: &'static str, map: &'static str) -> impl Fn(MapError) -> KernelError {
    move |error| KernelError::NamedMap { action, map, reason: chain(&error) }
}

impl ServiceMaps {
    pub(crate) fn open(folder: &Path) -> Result<Self, KernelError> {
        let slots = Slots::new(pinned(folder, MapName::Slots)?);
        Ok(Self {
            frontends: open(folder, MapName::Frontends, Map::HashMap)?,
            sets: open(folder, MapName::Sets, Map::HashMap)?,
            slots: slots.map_err(|error| KernelError::map("use", MapName::Slots, &error))?,
            members: open(folder, MapName::Members, Map::HashMap)?,
            node_addresses: open(folder, MapName::NodeAddresses, Map::HashMap)?,
            ranges: None,
        })
    }

    /// With the map of source ranges.
    pub(crate) fn open_with_ranges(folder: &Path) -> Result<Self, KernelError> {
        let ranges = Some(open(folder, MapName::SourceRanges, Map::LpmTrie)?);
        Ok(Self { ranges, ..Self::open(folder)? })
    }

    /// The kernel takes elements from a small store that it fills in the background: in a burst, it may say that there is no
    /// memory when there is a moment later.
    pub(crate) fn apply(&mut self, change: &Change) -> Result<(), KernelError> {
        if let Some(slot) = change.slot() {
            return self.put_slots(&[slot]);
        }
        let mut attempts = 0;
        loop {
            match self.try_apply(change) {
                Err(error) if attempts < MEMORY_ATTEMPTS && is_without_memory(&error) => {
                    attempts += 1;
                    thread::sleep(MEMORY_PAUSE);
                }
                result => return result.map_err(|error| KernelError::map("write", change.map(), &error)),
            }
        }
    }

    pub(crate) fn put_slots(&mut self, slots: &[(u32, SlotValue)]) -> Result<(), KernelError> {
        self.slots.put(slots).map_err(|error| KernelError::memory("write", MapName::Slots, &error))
    }

    /// Deleting what is not there is no error: the plan may know less than the kernel after a failure.
    fn try_apply(&mut self, change: &Change) -> Result<(), MapError> {
        match change {
            // Written in another way.
            Change::Put(Element::Slot(..)) => Ok(()),
            Change::Put(Element::Member(key, bits)) => {
                self.members.insert(key.to_bytes(), bits.to_bytes(), 0)
            }
            Change::Put(Element::Set(key, value)) => self.sets.insert(key.to_bytes(), value.to_bytes(), 0),
            Change::Put(Element::Frontend(key, value)) => {
                self.frontends.insert(key.to_bytes(), value.to_bytes(), 0)
            }
            Change::Put(Element::NodeAddress(key, value)) => {
                self.node_addresses.insert(key.to_bytes(), value.to_bytes(), 0)
            }
            Change::Delete(Key::Member(key)) => present(self.members.remove(&key.to_bytes())),
            Change::Delete(Key::Set(key)) => present(self.sets.remove(&key.to_bytes())),
            Change::Delete(Key::Frontend(key)) => present(self.frontends.remove(&key.to_bytes())),
            Change::Delete(Key::NodeAddress(key)) => present(self.node_addresses.remove(&key.to_bytes())),
            // The plan of the socket level has none.
            Change::Put(Element::Range(key, value)) => {
                self.ranges.as_mut().map_or(Ok(()), |ranges| ranges.insert(&trie_key(*key), value, 0))
            }
            Change::Delete(Key::Range(key)) => {
                self.ranges.as_mut().map_or(Ok(()), |ranges| present(ranges.remove(&trie_key(*key))))
            }
        }
    }

    /// What the proxy has written. Of slots, those that some set has.
    pub(crate) fn read(&self) -> Result<Contents, KernelError> {
        let mut contents = Contents::default();
        each(&self.frontends, MapName::Frontends, |key, value| {
            contents.insert(Element::Frontend(FrontendKey::from_bytes(key), SetKey::from_bytes(value)));
        })?;
        each(&self.members, MapName::Members, |key, bits| {
            contents.insert(Element::Member(MemberKey::from_bytes(key), u32::from_bytes(bits)));
        })?;
        each(&self.node_addresses, MapName::NodeAddresses, |key, value| {
            contents.insert(Element::NodeAddress(Address::from_bytes(key), u32::from_bytes(value)));
        })?;
        for entry in self.ranges.iter().flat_map(LpmTrie::iter) {
            let (key, value) =
                entry.map_err(|error| KernelError::map("read", MapName::SourceRanges, &error))?;
            contents.insert(Element::Range(RangeKey::from_trie(key.prefix_len(), key.data()), value));
        }
        each(&self.sets, MapName::Sets, |key, value| {
            contents.insert(Element::Set(SetKey::from_bytes(key), SetValue::from_bytes(value)));
        })?;
        let ranges: Vec<Range<u32>> = contents.sets.values().map(|set| set.places()).collect();
        let end = ranges.iter().map(|places| places.end).max().unwrap_or_default();
        let window = self.slots.window(0..end);
        let window = window.map_err(|error| KernelError::memory("read", MapName::Slots, &error))?;
        let values = |places: Range<u32>| window.iter().flat_map(move |window| window.values(places.clone()));
        contents.slots.extend(ranges.into_iter().flat_map(values));
        Ok(contents)
    }
}

impl Maps {
    pub(crate) fn open(folder: &Path) -> Result<Self, KernelError> {
        Ok(Self {
            services: ServiceMaps::open(folder)?,
            affinity: open(folder, MapName::Affinity, Map::LruHashMap)?,
            udp_replies: open(folder, MapName::UdpReplies, Map::LruHashMap)?,
            counters: open(folder, MapName::Counters, Map::PerCpuArray)?,
        })
    }

    /// What sockets of UDP hear from endpoints.
    pub(crate) fn udp_replies(&self) -> Result<Vec<(FlowKey, FlowValue)>, KernelError> {
        let mut replies = Vec::new();
        for entry in self.udp_replies.iter() {
            match entry {
                Ok((key, value)) => replies.push((FlowKey::from_bytes(key), FlowValue::from_bytes(value))),
                // The kernel forgot it meanwhile.
                Err(MapError::KeyNotFound) => {}
                Err(error) => return Err(KernelError::map("read", MapName::UdpReplies, &error)),
            }
        }
        Ok(replies)
    }

    /// Clients with affinity of a family, by the number that they have it for.
    pub(crate) fn affinity_numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.affinity.keys().flatten().map(|key| {
            let [_, _, _, _, _, _, _, _, a, b, c, d, ..] = key;
            u32::from_ne_bytes([a, b, c, d])
        })
    }

    pub(crate) fn counters(&self) -> Result<Vec<Decisions>, KernelError> {
        let read = |counter: Counter| {
            let values = self.counters.get(&(counter as u32), 0);
            let values = values.map_err(|error| KernelError::map("read", MapName::Counters, &error))?;
            let total = values.iter().sum();
            Ok(Decisions { label: counter.as_str(), text: counter.describe(), total })
        };
        Counter::ALL.into_iter().map(read).collect()
    }
}

fn trie_key(range: RangeKey) -> lpm_trie::Key<[u8; 20]> {
    let (bits, data) = range.to_trie();
    lpm_trie::Key::new(bits, data)
}

fn is_without_memory(error: &MapError) -> bool {
    matches!(error, MapError::SyscallError(error) if error.io_error.raw_os_error() == Some(nix::libc::ENOMEM))
}

fn present(removed: Result<(), MapError>) -> Result<(), MapError> {
    found(removed).map(drop)
}

/// `None`: there is no such element.
pub(crate) fn found<T>(result: Result<T, MapError>) -> Result<Option<T>, MapError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(nix::libc::ENOENT) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn each<const K: usize, const V: usize>(
    map: &Hash<K, V>,
    name: MapName,
    mut take: impl FnMut([u8; K], [u8; V]),
) -> Result<(), KernelError> {
    for entry in map.iter() {
        let (key, value) = entry.map_err(|error| KernelError::map("read", name, &error))?;
        take(key, value);
    }
    Ok(())
}
