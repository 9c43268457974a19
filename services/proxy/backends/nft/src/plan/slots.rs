//! The order of the endpoints of a service port.
//!
//! Owns: [`Slots`], and the rules that keep an order as far as possible. In: the former order, the endpoints. Out: the
//! order; equal input gives equal output.

use std::collections::HashSet;

use keelson_proxy::model::Endpoint;

use super::numbers::MAX_ENDPOINT;

/// A set of endpoints, in the order of their slots.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Slots {
    /// Without duplicates.
    pub(super) endpoints: Box<[Endpoint]>,
    /// With affinity, the number of each (without that of the service port); otherwise empty.
    pub(super) numbers: Box<[u16]>,
}

impl Slots {
    pub(super) fn len(&self) -> usize {
        self.endpoints.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.endpoints.is_empty()
    }

    /// Each with its index.
    pub(super) fn indexed(&self) -> impl Iterator<Item = (u32, Endpoint)> {
        (0..).zip(self.endpoints.iter().copied())
    }

    /// Endpoints and their numbers; empty without affinity.
    pub(super) fn numbered(&self) -> impl Iterator<Item = (Endpoint, u16)> {
        self.endpoints.iter().copied().zip(self.numbers.iter().copied())
    }
}

/// Orders `wanted` (ordered, without duplicates) so that those in `before` (index and endpoint) keep their index, if it
/// still exists; the others fill the holes.
pub(super) fn arrange(before: &[(u32, Endpoint)], wanted: &[Endpoint]) -> Box<[Endpoint]> {
    let mut slots: Vec<Option<Endpoint>> = vec![None; wanted.len()];
    let mut placed = vec![false; wanted.len()];
    for (index, endpoint) in before {
        let (Ok(which), Some(slot)) = (wanted.binary_search(endpoint), slots.get_mut(*index as usize)) else {
            continue;
        };
        if slot.is_none() && !placed.get(which).copied().unwrap_or(true) {
            *slot = Some(*endpoint);
            placed.iter_mut().skip(which).take(1).for_each(|placed| *placed = true);
        }
    }
    let mut others = wanted.iter().zip(placed).filter(|(_, placed)| !placed).map(|(endpoint, _)| *endpoint);
    // There are as many others as holes.
    slots.into_iter().filter_map(|slot| slot.or_else(|| others.next())).collect()
}

/// Numbers `wanted` (ordered, without duplicates): those in `before` keep their number, others get the ones after
/// `last`, which is advanced. `None`: there are too many.
pub(super) fn number(
    before: &[(Endpoint, u16)],
    last: &mut u16,
    wanted: &[Endpoint],
) -> Option<Vec<(Endpoint, u16)>> {
    if wanted.len() > usize::from(MAX_ENDPOINT) {
        return None;
    }
    let mut known = before.to_vec();
    known.sort_unstable();
    let find = |endpoint: &Endpoint| {
        let at = known.binary_search_by(|(known, _)| known.cmp(endpoint)).ok()?;
        known.get(at).map(|(_, number)| *number)
    };
    let mut numbered: Vec<(Endpoint, u16)> =
        wanted.iter().filter_map(|endpoint| Some((*endpoint, find(endpoint)?))).collect();
    if numbered.len() == wanted.len() {
        return Some(numbered);
    }
    // Numbers of removed endpoints are avoided, too, unless numbers run short: a client that remembers one must not
    // reach a new endpoint.
    let avoid_all = known.len() + wanted.len() - numbered.len() <= usize::from(MAX_ENDPOINT);
    let avoided = if avoid_all { &known } else { &numbered };
    let mut taken: HashSet<u16> = avoided.iter().map(|(_, number)| *number).collect();
    for endpoint in wanted {
        if find(endpoint).is_none() {
            numbered.push((*endpoint, next_free(&mut taken, last)?));
        }
    }
    numbered.sort_unstable();
    Some(numbered)
}

/// The first free number after `last`.
fn next_free(taken: &mut HashSet<u16>, last: &mut u16) -> Option<u16> {
    for _ in 0..MAX_ENDPOINT {
        *last = if *last == MAX_ENDPOINT { 1 } else { *last + 1 };
        if taken.insert(*last) {
            return Some(*last);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoints(last: impl IntoIterator<Item = u8>) -> Vec<Endpoint> {
        last.into_iter().map(|last| Endpoint { ip: [10, 0, 0, last].into(), port: 80 }).collect()
    }

    fn arranged(before: &[u8], wanted: &[u8]) -> Vec<u8> {
        let before: Vec<_> = (0..).zip(endpoints(before.iter().copied())).collect();
        let slots = arrange(&before, &endpoints(wanted.iter().copied()));
        let last = |endpoint: &Endpoint| match endpoint.ip {
            std::net::IpAddr::V4(ip) => ip.octets()[3],
            std::net::IpAddr::V6(_) => 0,
        };
        slots.iter().map(last).collect()
    }

    #[test]
    fn an_endpoint_that_stays_keeps_its_slot() {
        assert_eq!(arranged(&[], &[1, 2, 3]), [1, 2, 3]);
        assert_eq!(arranged(&[3, 1, 2], &[1, 2, 3]), [3, 1, 2]);
        assert_eq!(arranged(&[3, 1, 2], &[0, 1, 2, 3]), [3, 1, 2, 0], "a new one comes last");
        assert_eq!(arranged(&[3, 1, 2], &[2, 3, 9]), [3, 9, 2], "a new one fills the hole");
        assert_eq!(arranged(&[1, 2, 3, 4], &[1, 3, 4]), [1, 4, 3], "the last one fills the hole");
        assert!(arranged(&[1, 2, 3], &[]).is_empty());
    }

    #[test]
    fn a_broken_order_is_accepted() {
        let one = endpoints([1])[0];
        assert_eq!(arrange(&[(5, one), (0, one), (0, one), (1, one)], &endpoints([1, 2])).len(), 2);
    }

    #[test]
    fn endpoints_keep_numbers_and_freed_numbers_are_not_reused_at_once() {
        let mut last = 0;
        let first = number(&[], &mut last, &endpoints([1, 2, 3])).unwrap();
        assert_eq!(first.iter().map(|(_, number)| *number).collect::<Vec<_>>(), [1, 2, 3]);
        let second = number(&first, &mut last, &endpoints([0, 2, 3])).unwrap();
        assert_eq!(second.iter().map(|(_, number)| *number).collect::<Vec<_>>(), [4, 2, 3]);
        last = u16::MAX;
        let third = number(&second, &mut last, &endpoints([0, 1, 2])).unwrap();
        assert_eq!(third.iter().map(|(_, number)| *number).collect::<Vec<_>>(), [4, 1, 2]);
    }

    #[test]
    fn there_are_65535_numbers() {
        let all = |count: u32| -> Vec<Endpoint> {
            (0..count).map(|ip| Endpoint { ip: std::net::Ipv4Addr::from(ip).into(), port: 1 }).collect()
        };
        let mut last = 0;
        let full = number(&[], &mut last, &all(65_535)).unwrap();
        assert_eq!(number(&full, &mut last, &all(65_536)), None);
        let mut other = all(65_536);
        other.remove(7);
        let moved = number(&full, &mut last, &other).unwrap();
        let numbers: std::collections::HashSet<u16> = moved.iter().map(|(_, number)| *number).collect();
        assert_eq!((moved.len(), numbers.len()), (65_535, 65_535));
        assert!(!numbers.contains(&0));
    }
}
