//! Names of chains and sets.
//!
//! Owns: [`Table`], the names of chains that do not depend on Services, and [`SetName`]. In: what a chain or set is for.
//! Out: names that are the same in every run and on every node.
//!
//! Names of Services are chosen by users, so names that depend on them are made with SHA-256 ([`hash`]): no one can
//! choose a Service whose chain is another Service's.

use std::{fmt, fmt::Write as _};

use keelson_proxy::model::{Endpoint, Family, PortName};
use sha2::{Digest as _, Sha256};

/// All our chains and sets begin with it.
pub const PREFIX: &str = "KEELSON-";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    Nat,
    Filter,
    Mangle,
}

impl Table {
    pub const ALL: [Self; 3] = [Self::Nat, Self::Filter, Self::Mangle];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Nat => "nat",
            Self::Filter => "filter",
            Self::Mangle => "mangle",
        }
    }

    /// The built-in chains that lead to ours, each with ours.
    pub const fn jumps(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Nat => &[("PREROUTING", SERVICES), ("OUTPUT", NAT_OUTPUT), ("POSTROUTING", POSTROUTING)],
            Self::Filter => &[("INPUT", INPUT), ("FORWARD", FORWARD), ("OUTPUT", FILTER_OUTPUT)],
            Self::Mangle => &[("PREROUTING", MANGLE), ("OUTPUT", MANGLE)],
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether a rule of a built-in chain leads to our chains.
pub fn is_ours(rule: &str) -> bool {
    let mut words = rule.split(' ').skip_while(|word| !matches!(*word, "-j" | "-g"));
    words.nth(1).is_some_and(|target| target.starts_with(PREFIX))
}

pub const SERVICES: &str = "KEELSON-SERVICES";
/// Only the backend iptables has it.
pub const NODE_PORTS: &str = "KEELSON-NODE-PORTS";
/// Rejects connections to an address of Services that has no such frontend. Only the backend ipvs has it.
pub const ADDRESSES: &str = "KEELSON-ADDRESSES";
pub const NAT_OUTPUT: &str = "KEELSON-NAT-OUTPUT";
pub const POSTROUTING: &str = "KEELSON-POSTROUTING";
pub const INPUT: &str = "KEELSON-INPUT";
pub const FORWARD: &str = "KEELSON-FORWARD";
pub const FILTER_OUTPUT: &str = "KEELSON-OUTPUT";
/// Decides before the destination is chosen.
pub const MANGLE: &str = "KEELSON-MANGLE";
pub const REFUSE: &str = "KEELSON-REFUSE";
pub const REFUSE_NODE_PORTS: &str = "KEELSON-REFUSE-NODE-PORTS";

/// 80 bits of a hash, in the alphabet of base 32: 16 characters.
#[must_use]
pub fn hash(text: &str) -> String {
    const ALPHABET: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    let digest = Sha256::digest(text.as_bytes());
    let bits = digest.iter().take(10).fold(0_u128, |bits, byte| bits << 8 | u128::from(*byte));
    (0..16).rev().map(|at| char::from(ALPHABET[(bits >> (at * 5)) as usize & 31])).collect()
}

/// Unambiguous: no part of a name contains a space.
#[must_use]
pub fn port_text(name: &PortName) -> String {
    format!("{} {} {}", name.service, name.port, name.protocol)
}

/// A chain refers only to chains of lower rank.
pub fn rank(chain: &str) -> u8 {
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
pub enum SetKind {
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
    /// Address and port: cluster IPs.
    ClusterIps,
    /// Address and port: every other frontend whose connections are masqueraded.
    External,
    /// Address and port, each with the mark that a [`crate::rule::Target::MapMark`] gives a packet.
    Local,
    /// Address and port: only sources in [`Self::Ranges`] are admitted.
    Filtered,
    /// Address, port and network of sources.
    Ranges,
    /// Addresses.
    Addresses,
}

impl SetKind {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Hairpin => "HAIRPIN",
            Self::Reject => "REJECT",
            Self::Drop => "DROP",
            Self::RejectNodePorts => "REJECT-NODE-PORTS",
            Self::DropNodePorts => "DROP-NODE-PORTS",
            Self::Affinity => "A-",
            Self::ClusterIps => "CLUSTER-IPS",
            Self::External => "EXTERNAL",
            Self::Local => "LOCAL",
            Self::Filtered => "FILTERED",
            Self::Ranges => "RANGES",
            Self::Addresses => "ADDRESSES",
        }
    }
}

/// Maximum number of entries of each set, and so of clients of an endpoint with session affinity.
pub const MAX_ENTRIES: u32 = 1_048_576;

/// Timeout of entries that a rule gives none; the longest that the API allows.
const DEFAULT_TIMEOUT: u32 = 86_400;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetName {
    pub kind: SetKind,
    name: String,
}

impl SetName {
    pub fn fixed(family: Family, kind: SetKind) -> Self {
        Self { kind, name: format!("{}{}", set_prefix(family), kind.as_str()) }
    }

    pub fn affinity(family: Family, name: &PortName, endpoint: Endpoint) -> Self {
        let hash = hash(&format!("{} {endpoint}", port_text(name)));
        Self { kind: SetKind::Affinity, name: format!("{}A-{hash}", set_prefix(family)) }
    }

    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// The line of `ipset restore` that creates it.
    pub fn create(&self, family: Family) -> String {
        let (kind, size) = match self.kind {
            SetKind::Hairpin => ("hash:ip,port,ip", 1024),
            SetKind::Reject
            | SetKind::Drop
            | SetKind::ClusterIps
            | SetKind::External
            | SetKind::Local
            | SetKind::Filtered => ("hash:ip,port", 1024),
            SetKind::Ranges => ("hash:ip,port,net", 1024),
            SetKind::Addresses => ("hash:ip", 1024),
            SetKind::RejectNodePorts | SetKind::DropNodePorts => ("hash:net,port", 1024),
            SetKind::Affinity => ("hash:ip", 64),
        };
        let inet = match family {
            Family::V4 => "inet",
            Family::V6 => "inet6",
        };
        let mut text =
            format!("create {} {kind} family {inet} hashsize {size} maxelem {MAX_ENTRIES}", self.name);
        match self.kind {
            SetKind::Affinity => {
                let _ = write!(text, " timeout {DEFAULT_TIMEOUT}");
            }
            SetKind::Local => text.push_str(" skbinfo"),
            _ => {}
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
pub const fn set_prefix(family: Family) -> &'static str {
    match family {
        Family::V4 => "KEELSON-4-",
        Family::V6 => "KEELSON-6-",
    }
}

/// The names of the sets of session affinity begin with it.
pub fn is_affinity(family: Family, set: &str) -> bool {
    set.strip_prefix(set_prefix(family)).is_some_and(|rest| rest.starts_with("A-"))
}
