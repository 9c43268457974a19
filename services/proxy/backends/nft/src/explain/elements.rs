//! The elements that a packet can meet.
//!
//! Owns: [`ReachableElements`]. In: the plan. Out: elements by set and key, as the kernel finds them.

use std::{collections::HashMap, net::IpAddr};

use ipnet::IpNet;
use keelson_proxy::explain::Target;

use crate::{
    element::{Element, Key, SetName},
    plan::Plan,
};

/// A part of the table.
#[derive(Debug, Default)]
pub(super) struct ReachableElements {
    exact: HashMap<(SetName, Key), Element>,
    intervals: Vec<Element>,
}

impl ReachableElements {
    /// Everything that a packet to `target` can meet, wherever it is sent.
    pub(super) fn of_target(plan: &Plan, target: Target) -> Self {
        Self::of(plan.reachable_elements(target.address, target.protocol, target.port))
    }

    pub(super) fn of(elements: impl IntoIterator<Item = Element>) -> Self {
        let mut table = Self::default();
        for element in elements {
            if element.set.is_interval() {
                table.intervals.push(element);
            } else {
                table.exact.insert((element.set, element.key), element);
            }
        }
        table
    }

    pub(super) fn get(&self, set: SetName, key: Key) -> Option<&Element> {
        match set.is_interval() {
            true => self.intervals.iter().find(|element| element.set == set && holds(element, key)),
            false => self.exact.get(&(set, key)),
        }
    }

    /// Networks that may reach a frontend, from [`SetName::SourceRanges`], ordered.
    pub(super) fn ranges(&self, target: Target) -> Vec<IpNet> {
        let frontend = Key::new().ip(target.address).port(target.port);
        let range = |(set, key): &(SetName, Key)| {
            let rest = key.as_slice().strip_prefix(frontend.as_slice())?;
            let (network, kind) = rest.split_last_chunk()?;
            let [.., length] = u32::from_ne_bytes(*kind).to_be_bytes();
            let wanted = SetName::range_kind(target.protocol, length).to_ne_bytes();
            (*set == SetName::SourceRanges && *kind == wanted)
                .then(|| IpNet::new(address(network)?, length).ok())?
        };
        let mut ranges: Vec<IpNet> = self.exact.keys().filter_map(range).collect();
        ranges.sort_unstable();
        ranges
    }
}

/// All fields but the last are equal at both ends, so the byte order is that of the last field.
fn holds(element: &Element, key: Key) -> bool {
    element.key.as_slice() <= key.as_slice()
        && element.key_end.is_some_and(|end| key.as_slice() <= end.as_slice())
}

/// `None` if the length is not that of an address.
pub(super) fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from);
    v4.or_else(|| <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from))
}
