//! Names of chains and sets.
//!
//! Owns: [`Table`], the names of chains, and [`SetName`]. In: what a chain or set is for. Out: names that are the same in
//! every run and on every node.
//!
//! Names of Services are chosen by users, so names that depend on them are made with SHA-256: no one can choose a
//! Service whose chain is another Service's.

use std::{fmt, fmt::Write as _, net::IpAddr};

use keelson_proxy::model::{Endpoint, Family, PortName, Protocol};
use sha2::{Digest as _, Sha256};

/// All our chains and sets begin with it.
pub(crate) const PREFIX: &str = "KEELSON-";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Table {
    Nat,
    Filter,
}

impl Table {
    pub(crate) const ALL: [Self; 2] = [Self::Nat, Self::Filter];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Nat => "nat",
            Self::Filter => "filter",
        }
    }

    /// The built-in chains that lead to ours, each with ours.
    pub(crate) const fn jumps(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Nat => &[("PREROUTING", SERVICES), ("OUTPUT", NAT_OUTPUT), ("POSTROUTING", POSTROUTING)],
            Self::Filter => &[("INPUT", INPUT), ("FORWARD", FORWARD), ("OUTPUT", FILTER_OUTPUT)],
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

pub(crate) const SERVICES: &str = "KEELSON-SERVICES";
pub(crate) const NODE_PORTS: &str = "KEELSON-NODE-PORTS";
pub(crate) const NAT_OUTPUT: &str = "KEELSON-NAT-OUTPUT";
pub(crate) const POSTROUTING: &str = "KEELSON-POSTROUTING";
pub(crate) const INPUT: &str = "KEELSON-INPUT";
pub(crate) const FORWARD: &str = "KEELSON-FORWARD";
pub(crate) const FILTER_OUTPUT: &str = "KEELSON-OUTPUT";
pub(crate) const REFUSE: &str = "KEELSON-REFUSE";
pub(crate) const REFUSE_NODE_PORTS: &str = "KEELSON-REFUSE-NODE-PORTS";

/// 80 bits of a hash, in the alphabet of base 32: 16 characters.
fn hash(text: &str) -> String {
    const ALPHABET: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    let digest = Sha256::digest(text.as_bytes());
    let bits = digest.iter().take(10).fold(0_u128, |bits, byte| bits << 8 | u128::from(*byte));
    (0..16).rev().map(|at| char::from(ALPHABET[(bits >> (at * 5)) as usize & 31])).collect()
}

/// Unambiguous: no part of a name contains a space.
fn port_text(name: &PortName) -> String {
    format!("{} {} {}", name.service, name.port, name.protocol)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PortChain {
    /// Chooses an endpoint of ClusterSet.
    Cluster,
    /// Chooses an endpoint of LocalSet.
    Local,
    /// Decides between the two by the source: externalTrafficPolicy Local.
    External,
}

pub(crate) fn port_chain(kind: PortChain, name: &PortName) -> String {
    let letter = match kind {
        PortChain::Cluster => 'C',
        PortChain::Local => 'L',
        PortChain::External => 'X',
    };
    format!("{PREFIX}{letter}-{}", hash(&port_text(name)))
}

/// Admits the sources of a load-balancer address.
pub(crate) fn ranges_chain(name: &PortName, ip: IpAddr) -> String {
    format!("{PREFIX}R-{}", hash(&format!("{} {ip}", port_text(name))))
}

/// Remembers the client and translates to one endpoint.
pub(crate) fn endpoint_chain(name: &PortName, endpoint: Endpoint) -> String {
    format!("{PREFIX}E-{}", hash(&format!("{} {endpoint}", port_text(name))))
}

/// A node of the tree over addresses.
pub(crate) fn address_chain(family: Family, prefix: u128, length: u8) -> String {
    match family {
        Family::V4 => format!("{PREFIX}A-{prefix:08x}-{length}"),
        Family::V6 => {
            let hash = hash(&format!("{prefix:032x}"));
            format!("{PREFIX}A-{}-{length}", &hash[..13])
        }
    }
}

/// A node of the tree over node ports.
pub(crate) fn node_port_chain(protocol: Protocol, prefix: u128, length: u8) -> String {
    format!("{PREFIX}N-{}-{prefix:04x}-{length}", protocol.as_str())
}

/// A chain refers only to chains of lower rank.
pub(crate) fn rank(chain: &str) -> u8 {
    let kind = chain.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'));
    match kind {
        Some(("E", _)) => 0,
        Some(("C" | "L", _)) => 1,
        Some(("X", _)) => 2,
        Some(("R", _)) => 3,
        Some(("A" | "N", rest)) => {
            let length = rest.rsplit('-').next().and_then(|length| length.parse().ok());
            4 + 128_u8.saturating_sub(length.unwrap_or(0))
        }
        _ => match chain {
            NODE_PORTS | REFUSE | REFUSE_NODE_PORTS => 253,
            SERVICES => 254,
            _ => 255,
        },
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum SetKind {
    /// Endpoint, port, endpoint: an endpoint on this node that reaches itself.
    Hairpin,
    /// Address and port.
    Reject,
    Drop,
    /// Port, as two networks that together are every address: the only type that knows SCTP and needs no address.
    RejectNodePorts,
    DropNodePorts,
    /// Client of an endpoint; filled by the kernel.
    Affinity,
}

impl SetKind {
    /// Those that always exist.
    pub(crate) const FIXED: [Self; 5] =
        [Self::Hairpin, Self::Reject, Self::Drop, Self::RejectNodePorts, Self::DropNodePorts];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Hairpin => "HAIRPIN",
            Self::Reject => "REJECT",
            Self::Drop => "DROP",
            Self::RejectNodePorts => "REJECT-NODE-PORTS",
            Self::DropNodePorts => "DROP-NODE-PORTS",
            Self::Affinity => "A-",
        }
    }
}

/// Maximum number of entries of each set, and so of clients of an endpoint with session affinity.
pub(crate) const MAX_ENTRIES: u32 = 1_048_576;

/// Timeout of entries that a rule gives none; the longest that the API allows.
const DEFAULT_TIMEOUT: u32 = 86_400;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SetName {
    pub(crate) kind: SetKind,
    name: String,
}

impl SetName {
    pub(crate) fn fixed(family: Family, kind: SetKind) -> Self {
        Self { kind, name: format!("{}{}", set_prefix(family), kind.as_str()) }
    }

    pub(crate) fn affinity(family: Family, name: &PortName, endpoint: Endpoint) -> Self {
        let hash = hash(&format!("{} {endpoint}", port_text(name)));
        Self { kind: SetKind::Affinity, name: format!("{}A-{hash}", set_prefix(family)) }
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.name
    }

    /// The line of `ipset restore` that creates it.
    pub(crate) fn create(&self, family: Family) -> String {
        let (kind, size) = match self.kind {
            SetKind::Hairpin => ("hash:ip,port,ip", 1024),
            SetKind::Reject | SetKind::Drop => ("hash:ip,port", 1024),
            SetKind::RejectNodePorts | SetKind::DropNodePorts => ("hash:net,port", 1024),
            SetKind::Affinity => ("hash:ip", 64),
        };
        let inet = match family {
            Family::V4 => "inet",
            Family::V6 => "inet6",
        };
        let mut text =
            format!("create {} {kind} family {inet} hashsize {size} maxelem {MAX_ENTRIES}", self.name);
        if self.kind == SetKind::Affinity {
            let _ = write!(text, " timeout {DEFAULT_TIMEOUT}");
        }
        text
    }
}

impl fmt::Display for SetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// The names of all sets of a family begin with it.
pub(crate) const fn set_prefix(family: Family) -> &'static str {
    match family {
        Family::V4 => "KEELSON-4-",
        Family::V6 => "KEELSON-6-",
    }
}

/// The names of the sets of session affinity begin with it.
pub(crate) fn is_affinity(family: Family, set: &str) -> bool {
    set.strip_prefix(set_prefix(family)).is_some_and(|rest| rest.starts_with("A-"))
}

#[cfg(test)]
mod tests {
    use keelson_client::ServiceName;

    use super::*;

    #[test]
    fn names_fit_and_differ() {
        let port = |service: &str, port: &str, protocol| PortName {
            service: ServiceName::new("a-namespace", service),
            port: port.into(),
            protocol,
        };
        let (a, b) = (port("web", "http", Protocol::Tcp), port("web", "http", Protocol::Udp));
        let endpoint = Endpoint { ip: "10.0.0.1".parse().unwrap(), port: 80 };
        let chains = [
            port_chain(PortChain::Cluster, &a),
            port_chain(PortChain::Cluster, &b),
            port_chain(PortChain::Local, &a),
            port_chain(PortChain::External, &a),
            ranges_chain(&a, "10.0.0.1".parse().unwrap()),
            endpoint_chain(&a, endpoint),
            address_chain(Family::V4, 0x0a60_0000, 12),
            address_chain(Family::V6, u128::MAX, 128),
            node_port_chain(Protocol::Sctp, 0x7530, 16),
            REFUSE_NODE_PORTS.to_owned(),
        ];
        let distinct: std::collections::BTreeSet<_> = chains.iter().collect();
        assert_eq!(distinct.len(), chains.len());
        for chain in &chains {
            assert!(chain.len() <= 28 && chain.starts_with(PREFIX), "{chain}");
        }
        // Names are in the kernel while another version of the program starts.
        assert_eq!(chains[0], "KEELSON-C-LPYC56QZWFO2KTC5");
        for kind in SetKind::FIXED {
            assert!(SetName::fixed(Family::V6, kind).as_str().len() <= 31);
        }
        let set = SetName::affinity(Family::V4, &a, endpoint);
        assert!(is_affinity(Family::V4, set.as_str()) && !is_affinity(Family::V6, set.as_str()));
        assert!(set.as_str().len() <= 31);
    }

    #[test]
    fn ranks_follow_references() {
        let order = [
            "KEELSON-E-X",
            "KEELSON-C-X",
            "KEELSON-X-X",
            "KEELSON-R-X",
            "KEELSON-A-00000000-32",
            "KEELSON-A-00000000-0",
            NODE_PORTS,
            SERVICES,
            NAT_OUTPUT,
        ];
        assert!(order.windows(2).all(|pair| rank(pair[0]) < rank(pair[1])));
    }
}
