//! A service port in the maps, and what an earlier run left of it.
//!
//! Owns: [`Placed`], its elements, and [`Inherited`]. In: service ports with their number and ranges; contents of the maps.
//! Out: [`Contents`] of one service port; numbers and ranges that stay. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Instant,
};

use ipnet::IpNet;
use keelson_proxy::model::{Endpoint, Family, Frontend, Protocol, ServicePort};

use super::{
    NodeFacts, Policy,
    ranges::{Range, Ranges},
};
use crate::{
    elements::{Contents, Element, family_of},
    layout::{
        FrontendKey, MEMBER_HERE, MEMBER_SERVES, MemberKey, RangeKey, Remote, SetKey, SetKind, SetValue,
        SlotValue,
    },
};

#[derive(Debug, Clone)]
pub(crate) struct Placed {
    pub(crate) number: u32,
    pub(crate) port: Arc<ServicePort>,
    pub(crate) facts: NodeFacts,
    /// By kind of set; `None`: no frontend leads to it.
    pub(super) ranges: [Option<Range>; 2],
}

impl Placed {
    pub(crate) fn endpoints(&self, set: SetKind) -> &[Endpoint] {
        Policy { port: &self.port, node: self.facts }.used_endpoints(set)
    }

    pub(crate) fn source_ranges(&self) -> &[IpNet] {
        Policy { port: &self.port, node: self.facts }.used_ranges()
    }

    pub(crate) fn range(&self, set: SetKind) -> Option<Range> {
        self.ranges[set as usize]
    }

    pub(super) fn wanted_sets(&self) -> usize {
        SetKind::ALL.into_iter().filter(|set| !self.endpoints(*set).is_empty()).count()
    }

    pub(super) fn sets(&self) -> usize {
        self.ranges.iter().flatten().count()
    }

    /// Those that are translated.
    pub(super) fn frontends(&self) -> usize {
        let policy = Policy { port: &self.port, node: self.facts };
        self.port.frontends().filter(|(_, kind)| policy.of(*kind).is_ok()).count()
    }

    pub(super) fn members(&self) -> usize {
        self.member_bits().len()
    }

    /// Programs ask whether an endpoint is one of a set for clients with affinity, and whether it serves for UDP flows; those of
    /// direct return, for each flow, and whether it is on this node.
    fn member_bits(&self) -> BTreeMap<Remote, u32> {
        let mut bits = BTreeMap::new();
        let is_udp = self.port.name.protocol == Protocol::Udp;
        let is_direct_return = self.facts.is_direct_return;
        if !is_udp && self.port.affinity_seconds == 0 && !is_direct_return {
            return bits;
        }
        for set in SetKind::ALL {
            for endpoint in self.endpoints(set) {
                *bits.entry(Remote::from(*endpoint)).or_default() |= 1 << set as u32;
            }
        }
        if is_udp && !bits.is_empty() {
            for endpoint in self.port.cluster.iter().chain(&self.port.local).chain(&self.port.serving) {
                *bits.entry(Remote::from(*endpoint)).or_default() |= MEMBER_SERVES;
            }
        }
        if is_direct_return && !bits.is_empty() {
            for endpoint in &self.port.on_node {
                *bits.entry(Remote::from(*endpoint)).or_default() |= MEMBER_HERE;
            }
        }
        bits
    }

    /// Passes its slots, sets and members to a callback.
    pub(super) fn each_element(&self, take: &mut dyn FnMut(Element)) {
        let Self { number, port, .. } = self;
        for set in SetKind::ALL {
            let Some(range) = self.range(set) else { continue };
            let Range { first, count } = range;
            let affinity_seconds = port.affinity_seconds;
            take(Element::Set(SetKey::new(*number, set), SetValue { first, count, affinity_seconds }));
            for (place, endpoint) in range.places().zip(self.endpoints(set)) {
                take(Element::Slot(place, slot(*number, *endpoint)));
            }
        }
        for range in self.source_ranges() {
            take(Element::Range(RangeKey::new(*number, *range), 1));
        }
        for (remote, bits) in self.member_bits() {
            take(Element::Member(MemberKey { number: *number, remote }, bits));
        }
    }

    pub(super) fn contents(&self) -> Contents {
        let mut contents = Contents::default();
        self.each_element(&mut |element| contents.insert(element));
        contents
    }

    /// Whether flows to some endpoint may have to end. Also after a time without endpoints: flows to the former ones are there.
    pub(super) fn has_lost_udp(&self, after: Option<&Self>) -> bool {
        if self.port.name.protocol != Protocol::Udp {
            return false;
        }
        let Some(after) = after.filter(|after| !after.port.serving.is_empty()) else { return false };
        let has_lost = |endpoint: &Endpoint| !serves(&after.port, *endpoint);
        let before = &self.port;
        before.serving.is_empty()
            || before.serving.iter().chain(&before.cluster).chain(&before.local).any(has_lost)
    }
}

fn serves(port: &ServicePort, endpoint: Endpoint) -> bool {
    [&port.serving, &port.cluster, &port.local].iter().any(|set| set.contains(&endpoint))
}

/// Whether a UDP flow to the endpoint has to end.
pub(super) fn is_stale(port: &ServicePort, endpoint: Endpoint) -> bool {
    !port.serving.is_empty() && !serves(port, endpoint)
}

fn slot(number: u32, endpoint: Endpoint) -> SlotValue {
    SlotValue { remote: endpoint.into(), number }
}

/// Sets that an earlier run left and whose ranges are still reserved.
#[derive(Debug, Default, Clone)]
pub(super) struct Inherited {
    is_filled: bool,
    ranges: BTreeMap<SetKey, Range>,
    numbers: BTreeSet<u32>,
}

impl Inherited {
    /// Reserves the ranges of all sets: traffic uses them until their set is replaced.
    pub(super) fn fill_once(&mut self, contents: &Contents, ranges: &mut Ranges, last_number: &mut u32) {
        if std::mem::replace(&mut self.is_filled, true) {
            return;
        }
        for (key, SetValue { first, count, .. }) in &contents.sets {
            let range = Range { first: *first, count: *count };
            // Another program's nonsense, or two sets at one place: these are written anew.
            if ranges.take_at(range) {
                self.ranges.insert(*key, range);
            }
            self.numbers.insert(key.number);
            *last_number = (*last_number).max(key.number >> 1);
        }
    }

    pub(super) fn has(&self, number: u32) -> bool {
        self.numbers.contains(&number)
    }

    /// The number that the service port with these frontends had.
    pub(super) fn number(
        &self,
        mut own: impl Iterator<Item = Frontend>,
        family: Family,
        contents: &Contents,
    ) -> Option<u32> {
        let number =
            own.find_map(|frontend| contents.frontends.get(&FrontendKey::of(frontend, family)))?.number;
        (number > 1 && family_of(number) == family && self.has(number)).then_some(number)
    }

    /// The range of a set, if its slots have these endpoints.
    pub(super) fn take(&mut self, key: SetKey, endpoints: &[Endpoint], contents: &Contents) -> Option<Range> {
        let range = *self.ranges.get(&key)?;
        let is_right = usize::try_from(range.count) == Ok(endpoints.len())
            && range
                .places()
                .zip(endpoints)
                .all(|(place, endpoint)| contents.slots.get(&place) == Some(&slot(key.number, *endpoint)));
        if is_right { self.ranges.remove(&key) } else { None }
    }

    /// Gives back what no service port has taken over.
    pub(super) fn give_back(&mut self, family: Family, ranges: &mut Ranges, now: Instant) {
        let is_ours = |key: &SetKey| family_of(key.number) == family;
        let left: Vec<SetKey> = self.ranges.keys().copied().filter(is_ours).collect();
        for range in left.iter().filter_map(|key| self.ranges.remove(key)) {
            ranges.give_back(range, now);
        }
        self.numbers.retain(|number| family_of(*number) != family);
    }
}
