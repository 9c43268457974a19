//! Elements that an earlier run left in the kernel.
//!
//! Owns: [`Existing`]. In: elements as read from the kernel, complete or not. Out: the former number of a service port,
//! and the order of its endpoints. Contradictory elements are used in part; the comparison repairs them.

use std::{
    collections::{HashMap, HashSet},
    net::IpAddr,
};

use keelson_proxy::model::{Endpoint, Family, Frontend, Protocol};

use crate::element::{Element, Key, Number, SetName, Value};

/// The parts that allow a restart without changes. [`Existing::default`]: none.
#[derive(Debug, Default)]
pub(crate) struct Existing {
    /// Key: whether it is in [`SetName::ClusterIpPorts`], and the frontend.
    frontends: HashMap<(bool, Frontend), Number>,
    numbers: HashMap<Number, NumberElements>,
    /// Numbers that no frontend leads to, because another service port has them all: by their endpoints.
    without_frontend: HashMap<Sets, Vec<Number>>,
    /// A frontend has a number of an older version, which is not read: it may lead to any of these.
    has_older_numbers: bool,
}

/// Whether there is affinity, and ClusterSet and LocalSet in the order of endpoints.
type Sets = (bool, Vec<Endpoint>, Vec<Endpoint>);

#[derive(Debug, Default)]
struct NumberElements {
    slots: [Vec<(u32, Endpoint)>; 2],
    affinity_slots: [Vec<(u32, u16)>; 2],
    endpoints: [Vec<(u16, Endpoint)>; 2],
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PortState {
    pub(super) number: Number,
    /// The endpoint number that was assigned last.
    pub(super) last: u16,
    /// ClusterSet with indexes.
    pub(super) cluster: Vec<(u32, Endpoint)>,
    /// LocalSet with indexes.
    pub(super) local: Vec<(u32, Endpoint)>,
    /// With affinity: the numbers of the endpoints of both sets, without duplicates.
    pub(super) numbers: Vec<(Endpoint, u16)>,
}

impl Existing {
    /// Reads elements in any order, and ignores those that it cannot decode.
    pub(crate) fn new(family: Family, elements: impl IntoIterator<Item = Element>) -> Self {
        let mut existing = Self::default();
        for element in elements {
            let Value::Data(value) = element.value else { continue };
            let _ = existing.read(family, element.set, element.key, value);
        }
        if !existing.has_older_numbers {
            existing.without_frontend = existing.find_without_frontend();
        }
        existing
    }

    fn find_without_frontend(&self) -> HashMap<Sets, Vec<Number>> {
        let reached: HashSet<Number> = self.frontends.values().copied().collect();
        let mut left: Vec<Number> =
            self.numbers().filter(|number| number.is_service_port() && !reached.contains(number)).collect();
        left.sort_unstable();
        let mut found: HashMap<Sets, Vec<Number>> = HashMap::new();
        for number in left {
            let Some(state) = self.state(number) else { continue };
            let ordered = |slots: &[(u32, Endpoint)]| {
                let mut endpoints: Vec<Endpoint> = slots.iter().map(|(_, endpoint)| *endpoint).collect();
                endpoints.sort_unstable();
                endpoints
            };
            let sets = (number.has_affinity(), ordered(&state.cluster), ordered(&state.local));
            found.entry(sets).or_default().push(number);
        }
        found
    }

    fn read(&mut self, family: Family, set: SetName, key: Key, value: Key) -> Option<()> {
        let (mut key, mut value) = (Fields(key.as_slice()), Fields(value.as_slice()));
        match set {
            SetName::ClusterIpPorts | SetName::ExternalPorts => {
                let ip = key.ip(family)?;
                let frontend = Frontend::Address { ip, protocol: key.protocol()?, port: key.port()? };
                self.read_frontend(set == SetName::ClusterIpPorts, frontend, value.number()?)?;
            }
            SetName::NodePorts => {
                let frontend = Frontend::NodePort { protocol: key.protocol()?, port: key.port()? };
                self.read_frontend(false, frontend, value.number()?)?;
            }
            SetName::Slots | SetName::LocalSlots => {
                let (number, index, endpoint) = (key.number()?, key.index()?, value.endpoint(family)?);
                let [cluster, local] = &mut self.numbers.entry(number).or_default().slots;
                if set == SetName::Slots { cluster } else { local }.push((index, endpoint));
            }
            SetName::AffinitySlots | SetName::LocalAffinitySlots => {
                let (number, index) = (key.number()?, key.index()?);
                let (of, endpoint) = value.number()?.split()?;
                let [cluster, local] = &mut self.numbers.entry(number).or_default().affinity_slots;
                if of == number {
                    if set == SetName::AffinitySlots { cluster } else { local }.push((index, endpoint));
                }
            }
            SetName::AffinityEndpoints | SetName::LocalAffinityEndpoints => {
                let (number, which) = key.number()?.split()?;
                let endpoint = value.endpoint(family)?;
                let [cluster, local] = &mut self.numbers.entry(number).or_default().endpoints;
                if set == SetName::AffinityEndpoints { cluster } else { local }.push((which, endpoint));
            }
            _ => {}
        }
        Some(())
    }

    fn read_frontend(&mut self, is_cluster_ip: bool, frontend: Frontend, number: Number) -> Option<()> {
        if !number.is_set() {
            self.has_older_numbers = true;
            return None;
        }
        let number = number.id();
        self.numbers.entry(number).or_default();
        number.is_service_port().then(|| self.frontends.insert((is_cluster_ip, frontend), number))?;
        Some(())
    }

    pub(super) fn len(&self) -> usize {
        self.numbers.len()
    }

    pub(super) fn numbers(&self) -> impl Iterator<Item = Number> {
        self.numbers.keys().copied()
    }

    pub(super) fn has(&self, number: Number) -> bool {
        self.numbers.contains_key(&number)
    }

    pub(super) fn number(&self, is_cluster_ip: bool, frontend: Frontend) -> Option<Number> {
        self.frontends.get(&(is_cluster_ip, frontend)).copied()
    }

    /// Numbers without a frontend that have exactly these endpoints, which are ordered.
    pub(super) fn without_frontend(
        &self,
        affinity: bool,
        cluster: &[Endpoint],
        local: &[Endpoint],
    ) -> &[Number] {
        if self.without_frontend.is_empty() {
            return &[];
        }
        self.without_frontend.get(&(affinity, cluster.to_vec(), local.to_vec())).map_or(&[], Vec::as_slice)
    }

    pub(super) fn state(&self, number: Number) -> Option<PortState> {
        let left = self.numbers.get(&number)?;
        if !number.has_affinity() {
            let [cluster, local] = left.slots.clone();
            return Some(PortState { number, last: 0, cluster, local, numbers: Vec::new() });
        }
        let (mut numbers, mut seen) = (HashMap::new(), HashSet::new());
        let [cluster, local] = &left.endpoints;
        for (which, endpoint) in cluster.iter().chain(local) {
            if !numbers.contains_key(which) && seen.insert(*endpoint) {
                numbers.insert(*which, *endpoint);
            }
        }
        let named = |slots: &[(u32, u16)]| {
            slots.iter().filter_map(|(index, which)| Some((*index, *numbers.get(which)?))).collect()
        };
        let [cluster, local] = &left.affinity_slots;
        Some(PortState {
            number,
            last: numbers.keys().copied().max().unwrap_or(0),
            cluster: named(cluster),
            local: named(local),
            numbers: numbers.iter().map(|(which, endpoint)| (*endpoint, *which)).collect(),
        })
    }
}

/// The fields of a key that are not read yet.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*field)
    }

    fn ip(&mut self, family: Family) -> Option<IpAddr> {
        Some(match family {
            Family::V4 => IpAddr::from(self.take::<4>()?),
            Family::V6 => IpAddr::from(self.take::<16>()?),
        })
    }

    fn number(&mut self) -> Option<Number> {
        self.index().map(Number)
    }

    fn protocol(&mut self) -> Option<Protocol> {
        let [number, ..] = self.take::<4>()?;
        Protocol::from_number(number)
    }

    fn port(&mut self) -> Option<u16> {
        let [high, low, ..] = self.take::<4>()?;
        Some(u16::from_be_bytes([high, low]))
    }

    fn index(&mut self) -> Option<u32> {
        self.take::<4>().map(u32::from_ne_bytes)
    }

    fn endpoint(&mut self, family: Family) -> Option<Endpoint> {
        Some(Endpoint { ip: self.ip(family)?, port: self.port()? })
    }
}
