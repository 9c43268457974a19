//! Where sockets listen.
//!
//! Owns: [`SocketKey`], the sockets of a frontend, and [`MappedPorts`]. In: frontends, the addresses of node ports. Out:
//! addresses. Pure.

use std::{
    collections::BTreeMap,
    fmt,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use keelson_proxy::model::{Frontend, Protocol};

/// A place where clients expect a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SocketKey {
    pub(crate) protocol: Protocol,
    pub(crate) address: SocketAddr,
}

impl fmt::Display for SocketKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.protocol)
    }
}

/// The sockets of a frontend. A node port has one at each address, so that replies of UDP come from the address that
/// was asked. Link-local addresses are left out: they need a scope.
pub(crate) fn wanted_sockets(frontend: Frontend, node_ports: &[IpAddr]) -> Vec<SocketKey> {
    match frontend {
        Frontend::Address { ip, protocol, port } => {
            vec![SocketKey { protocol, address: SocketAddr::new(ip, port) }]
        }
        Frontend::NodePort { protocol, port } => {
            let is_usable = |ip: &&IpAddr| match ip {
                IpAddr::V4(ip) => !ip.is_loopback(),
                IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
            };
            let socket = |ip: &IpAddr| SocketKey { protocol, address: SocketAddr::new(*ip, port) };
            node_ports.iter().filter(is_usable).map(socket).collect()
        }
    }
}

/// Loopback ports that replace addresses which cannot be bound. A place keeps its port while it is mapped, and gets the
/// same one after a restart unless others took it first.
#[derive(Debug, Default)]
pub(crate) struct MappedPorts {
    base: u16,
    by_place: BTreeMap<SocketKey, u16>,
    taken: BTreeMap<(Protocol, bool, u16), SocketKey>,
}

impl MappedPorts {
    /// `base`: the smallest port; 0: the kernel chooses.
    pub(crate) fn new(base: u16) -> Self {
        Self { base, ..Self::default() }
    }

    /// The address for a place. Port 0: any. `skip`: how many candidates were found in use by other programs.
    pub(crate) fn assign(&mut self, place: SocketKey, skip: u16) -> SocketAddr {
        let is_v6 = place.address.is_ipv6();
        let loopback: IpAddr = if is_v6 { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() };
        if self.base == 0 {
            return SocketAddr::new(loopback, 0);
        }
        if let (Some(port), 0) = (self.by_place.get(&place), skip) {
            return SocketAddr::new(loopback, *port);
        }
        self.release(&place);
        let size = u64::from(u16::MAX - self.base) + 1;
        let mut hasher = DefaultHasher::new();
        place.hash(&mut hasher);
        let start = hasher.finish() % size + u64::from(skip);
        let candidates = (0..size).filter_map(|step| {
            let offset = u16::try_from((start + step) % size).ok()?;
            self.base.checked_add(offset)
        });
        let free = |port: &u16| !self.taken.contains_key(&(place.protocol, is_v6, *port));
        let port = candidates.into_iter().find(free).unwrap_or(0);
        if port != 0 {
            self.by_place.insert(place, port);
            self.taken.insert((place.protocol, is_v6, port), place);
        }
        SocketAddr::new(loopback, port)
    }

    pub(crate) fn release(&mut self, place: &SocketKey) {
        if let Some(port) = self.by_place.remove(place) {
            self.taken.remove(&(place.protocol, place.address.is_ipv6(), port));
        }
    }
}
