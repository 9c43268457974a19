//! Plans against tables of cases, and against random histories with a model of the maps.

mod cases;
mod histories;

use std::{collections::BTreeSet, net::IpAddr};

use keelson_proxy::model::Endpoint;

use super::*;
use crate::{
    elements::Contents,
    layout::{SetKind, SetValue},
    testing::service_port,
};

const ROOM: Capacity =
    Capacity { frontends: 100, sets: 100, members: 100, node_addresses: 100, source_ranges: 100, slots: 100 };

fn name(text: &str) -> ServiceName {
    ServiceName::new("default", text)
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn endpoint(number: u16) -> Endpoint {
    Endpoint { ip: ip("10.244.1.1"), port: 8000 + number }
}

fn endpoints(numbers: impl IntoIterator<Item = u16>) -> Vec<Endpoint> {
    numbers.into_iter().map(endpoint).collect()
}

/// A TCP port with a cluster IP that its name tells, and these endpoints.
fn port(service: &str, number: u8, cluster: &[u16]) -> ServicePort {
    ServicePort {
        has_any: !cluster.is_empty(),
        cluster: endpoints(cluster.iter().copied()),
        ..service_port(&name(service), "", ip(&format!("10.96.0.{number}")), 80)
    }
}

fn plan() -> Plan {
    let mut plan = Plan::new(ROOM);
    plan.set_facts(Family::V4, NodeFacts { detects_pods: true, ..NodeFacts::default() });
    plan
}

fn frontend(address: &str, port: u16, protocol: Protocol) -> FrontendKey {
    FrontendKey::of(Frontend::Address { ip: ip(address), protocol, port }, Family::V4)
}

fn apply(contents: &mut Contents, change: &Change) {
    match *change {
        Change::Put(element) => contents.insert(element),
        Change::Delete(Key::Member(key)) => drop(contents.members.remove(&key)),
        Change::Delete(Key::Set(key)) => drop(contents.sets.remove(&key)),
        Change::Delete(Key::Frontend(key)) => drop(contents.frontends.remove(&key)),
        Change::Delete(Key::NodeAddress(key)) => drop(contents.node_addresses.remove(&key)),
        Change::Delete(Key::Range(key)) => drop(contents.ranges.remove(&key)),
    }
}

/// The endpoints that programs find for a frontend; `None`: it is left to packets.
fn resolve(contents: &Contents, key: &FrontendKey) -> Option<BTreeSet<Endpoint>> {
    let set = contents.frontends.get(key)?;
    let SetValue { first, count, .. } = contents.sets.get(&SetKey::new(set.number, set.set_kind()?))?;
    let slots = (*first..first + count).filter_map(|place| contents.slots.get(&place));
    Some(slots.filter(|slot| slot.number == set.number).map(|slot| slot.remote.endpoint()).collect())
}
