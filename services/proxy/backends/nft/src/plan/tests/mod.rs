//! A simulated table, and the results of packets in it.

mod cases;
mod order;
mod properties;
mod stability;

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
};

use super::*;
use crate::{
    chain::Choice,
    element::{KEY_MAX, Verdict},
    testing,
};

impl Plan {
    fn delete(&mut self, service: &ServiceName) {
        self.set(service, Vec::new());
    }

    fn service_ports_of(&self, service: &ServiceName) -> impl Iterator<Item = PortView<'_>> {
        self.service_ports().filter(move |port| port.service == service)
    }
}

/// The sets of a table, as strict as the kernel.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Table(pub(super) Kernel);

impl Table {
    pub(super) fn of(elements: impl IntoIterator<Item = Element>) -> Self {
        let mut table = Self::default();
        for element in elements {
            table.add(element);
        }
        table
    }

    fn add(&mut self, element: Element) {
        if element.set.is_interval() {
            let end = element.key_end.expect("an interval has an end");
            assert!(element.key <= end);
            for ((set, key), (other_end, _)) in &self.0 {
                let other_end = other_end.unwrap_or(*key);
                let overlaps = *set == element.set && *key <= end && element.key <= other_end;
                assert!(!overlaps, "{element:?} overlaps {key:?} to {other_end:?}");
            }
        } else {
            assert_eq!(element.key_end, None);
        }
        let before = self.0.insert((element.set, element.key), (element.key_end, element.value));
        assert_eq!(before, None, "{element:?} is there already");
    }

    fn delete(&mut self, element: Element) {
        let before = self.0.remove(&(element.set, element.key));
        assert_eq!(before, Some((element.key_end, element.value)), "{element:?} is not there");
    }

    pub(super) fn apply(&mut self, op: Op) {
        match op {
            Op::Add(element) => self.add(element),
            Op::Delete(element) => self.delete(element),
            Op::Replace(before, after) => {
                assert_eq!((before.set, before.key), (after.set, after.key));
                self.delete(before);
                self.add(after);
            }
        }
    }

    pub(super) fn apply_all(&mut self, ops: Vec<Op>) {
        in_order(ops).into_iter().flatten().for_each(|op| self.apply(op));
    }

    pub(super) fn elements(&self) -> impl Iterator<Item = Element> {
        self.0.iter().map(|((set, key), (key_end, value))| Element {
            set: *set,
            key: *key,
            key_end: *key_end,
            value: *value,
        })
    }

    fn value(&self, set: SetName, key: Key) -> Option<Value> {
        self.0.get(&(set, key)).map(|(_, value)| *value)
    }

    fn data(&self, set: SetName, key: Key) -> Option<Key> {
        match self.value(set, key)? {
            Value::Data(data) => Some(data),
            other => panic!("{set} gives {other:?}"),
        }
    }

    fn chain(&self, set: SetName, number: Key) -> Option<Chain> {
        match self.value(set, number)? {
            Value::Verdict(Verdict::Goto(chain)) => Some(chain),
            other => panic!("{set} gives {other:?}"),
        }
    }

    pub(super) fn filters(&self, source: IpAddr, to: To) -> bool {
        let key = Key::new().ip(to.ip).protocol(to.protocol).port(to.port);
        let lengths = match self.chain(SetName::Filtered, key) {
            None => return false,
            Some(Chain::Sources { protocol, lengths }) => {
                assert_eq!(protocol, to.protocol);
                lengths
            }
            Some(other) => panic!("filtered leads to {other}"),
        };
        let network = |length| IpNet::new(source, length).unwrap().network();
        let admits = |length: u8| {
            let kind = SetName::range_kind(to.protocol, length);
            let key = Key::new().ip(to.ip).port(to.port).ip(network(length)).index(kind);
            self.value(SetName::SourceRanges, key).is_some()
        };
        !lengths.iter().any(admits)
    }

    fn in_interval(&self, wanted: SetName, key: Key) -> bool {
        let holds = |((set, start), (end, _)): (&(SetName, Key), &(Option<Key>, Value))| {
            *set == wanted && *start <= key && end.is_some_and(|end| key <= end)
        };
        self.0.iter().any(holds)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Pod,
    Host,
    Outside,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct To {
    pub(super) ip: IpAddr,
    pub(super) protocol: Protocol,
    pub(super) port: u16,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// One of these, at random or because it is remembered.
    Endpoints {
        chosen: BTreeSet<Endpoint>,
        remembered: BTreeSet<Endpoint>,
        external: bool,
    },
    Drop,
    Reject,
    /// No rule applies.
    Passes,
    /// A map lacks an element that another one refers to.
    Miss(&'static str),
}

impl Outcome {
    pub(super) fn served(&self) -> Option<BTreeSet<Endpoint>> {
        match self {
            Self::Endpoints { chosen, remembered, .. } => Some(chosen | remembered),
            _ => None,
        }
    }
}

/// Simulates the chains, with a detector and node ports at `node-port-addresses`.
pub(super) fn send(table: &Table, family: Family, from: (Source, IpAddr), to: To) -> Outcome {
    let (source, source_ip) = from;
    let to_port = Key::new().protocol(to.protocol).port(to.port);
    let address = Key::new().ip(to.ip).protocol(to.protocol).port(to.port);
    if table.filters(source_ip, to) {
        return Outcome::Drop;
    }
    let to_node = table.value(SetName::NodePortAddresses, Key::new().ip(to.ip)).is_some();
    if let Some(number) = table.data(SetName::ClusterIpPorts, address) {
        return internal(table, family, number);
    }
    if let Some(number) = table.data(SetName::ExternalPorts, address) {
        return external(table, family, number, source);
    }
    if to_node && let Some(number) = table.data(SetName::NodePorts, to_port) {
        return external(table, family, number, source);
    }
    let refused_node_port = table.value(SetName::RefusedNodePorts, to_port).filter(|_| to_node);
    match refused_node_port.or(table.value(SetName::Refused, address)) {
        Some(Value::Verdict(Verdict::Drop)) => return Outcome::Drop,
        Some(Value::Verdict(Verdict::Goto(Chain::Reject))) => return Outcome::Reject,
        Some(other) => panic!("refused by {other:?}"),
        None => {}
    }
    if table.value(SetName::ClusterIps, Key::new().ip(to.ip)).is_some() {
        return Outcome::Reject;
    }
    if table.in_interval(SetName::ServiceCidrs, Key::new().ip(to.ip)) {
        Outcome::Drop
    } else {
        Outcome::Passes
    }
}

/// The key of the service port's slots.
fn id(number: Key) -> Key {
    Number::of(number).map_or(number, |number| Key::new().number(number.id()))
}

/// By the choice and count in the number; `None` if it contains none.
fn by_count(table: &Table, family: Family, number: Key, external: bool) -> Option<Outcome> {
    let class = Key::new().number(Number::of(number)?.class());
    let chain = table.chain(SetName::Counts, class)?;
    Some(choose(table, family, id(number), chain, external))
}

fn internal(table: &Table, family: Family, number: Key) -> Outcome {
    if let Some(outcome) = by_count(table, family, number, false) {
        return outcome;
    }
    match table.chain(SetName::InternalChoice, number) {
        Some(chain) => choose(table, family, id(number), chain, false),
        None => Outcome::Miss("internal-choice"),
    }
}

fn external(table: &Table, family: Family, number: Key, source: Source) -> Outcome {
    if let Some(outcome) = by_count(table, family, number, true) {
        return outcome;
    }
    let cluster = || match table.chain(SetName::ExternalChoice, number) {
        Some(chain) => choose(table, family, id(number), chain, true),
        None => Outcome::Miss("external-choice"),
    };
    match (table.chain(SetName::ExternalPolicy, number), source) {
        (None, _) | (Some(Chain::ExternalLocal), Source::Pod | Source::Host) => cluster(),
        (Some(Chain::ExternalLocal), Source::Outside) => match table.chain(SetName::LocalChoice, number) {
            Some(chain) => choose(table, family, id(number), chain, true),
            None => Outcome::Drop,
        },
        (Some(other), _) => panic!("external-policy leads to {other}"),
    }
}

fn choose(table: &Table, family: Family, number: Key, chain: Chain, external: bool) -> Outcome {
    let (choice, count, affinity) = match chain {
        Chain::LoadBalance { choice, count } => (choice, count, false),
        Chain::Affinity { choice, count, .. } => (choice, count, true),
        other => panic!("{other} does not choose"),
    };
    assert!(count > 0);
    let [slots, affinity_slots, affinity_endpoints] = match choice {
        Choice::Cluster => [SetName::Slots, SetName::AffinitySlots, SetName::AffinityEndpoints],
        Choice::Local => [SetName::LocalSlots, SetName::LocalAffinitySlots, SetName::LocalAffinityEndpoints],
    };
    let mut chosen = BTreeSet::new();
    for index in 0..count {
        let endpoint = if affinity {
            let Some(which) = table.data(affinity_slots, number.index(index)) else {
                return Outcome::Miss("affinity-slots");
            };
            table.data(affinity_endpoints, which)
        } else {
            table.data(slots, number.index(index))
        };
        let Some(endpoint) = endpoint else { return Outcome::Miss("endpoint") };
        chosen.insert(parse(family, endpoint));
    }
    let of_number = |((set, key), (_, value)): (&(SetName, Key), &(Option<Key>, Value))| match value {
        Value::Data(endpoint) if *set == affinity_endpoints => {
            let service = |key: Key| Number::of(key).unwrap().masked(Number::SERVICE_MASK);
            (service(*key) == service(number)).then(|| parse(family, *endpoint))
        }
        _ => None,
    };
    let remembered = if affinity { table.0.iter().filter_map(of_number).collect() } else { BTreeSet::new() };
    Outcome::Endpoints { chosen, remembered, external }
}

fn parse(family: Family, endpoint: Key) -> Endpoint {
    let (ip, port) = endpoint.as_slice().split_at(family.address_len());
    let ip = match family {
        Family::V4 => IpAddr::from(<[u8; 4]>::try_from(ip).unwrap()),
        Family::V6 => IpAddr::from(<[u8; 16]>::try_from(ip).unwrap()),
    };
    assert_eq!(port[2..], [0, 0]);
    Endpoint { ip, port: u16::from_be_bytes([port[0], port[1]]) }
}

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A service port with V, without endpoints.
pub(super) fn service_port(service: &ServiceName, name: &str, cluster_ip: &str, port: u16) -> ServicePort {
    testing::service_port(service, name, ip(cluster_ip), port)
}

/// `10.244.0.<last>:8080`.
pub(super) fn endpoint(last: u8) -> Endpoint {
    Endpoint { ip: IpAddr::from([10, 244, 0, last]), port: 8080 }
}

#[test]
fn keys_fit() {
    let longest = Key::new().ip(ip("fd00::1")).protocol(Protocol::Tcp).port(1).ip(ip("fd00::2"));
    assert_eq!(longest.as_slice().len(), KEY_MAX);
    assert_eq!(HashMap::from([(longest, 1)]).get(&longest), Some(&1));
}
