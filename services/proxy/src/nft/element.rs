//! The sets and maps of the table, and their elements.
//!
//! Owns: [`SetName`], [`Element`] and the kernel's form of keys and values. In and out: values. A key or value is kept as
//! the bytes that the kernel has of it: fields one after the other, each padded to 4 bytes; addresses and ports in network
//! order, the index of a slot in the host's.

use std::{fmt, net::IpAddr};

use super::chain::Chain;
use crate::model::{Endpoint, Family, Protocol};

/// A set or map of the table `keelson`. "Number" is what stands for a service port, "endpoint number" for an endpoint of
/// one that has affinity: see [`Number`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SetName {
    /// Map: V . protocol . port : number.
    ClusterIpPorts,
    /// Map: X or W . protocol . port : number.
    ExternalPorts,
    /// Map: protocol . node port : number.
    NodePorts,
    /// Set: addresses at which node ports answer. Unused where they answer at all local ones.
    NodePortAddresses,
    /// Map: number : verdict, the chain that chooses for traffic to V.
    InternalChoice,
    /// Map: number : verdict, to [`Chain::ExternalLocal`] where externalTrafficPolicy is Local.
    ExternalPolicy,
    /// Map: number : verdict, the chain that chooses from ClusterSet for traffic to X, W and NP.
    ExternalChoice,
    /// Map: number : verdict, the chain that chooses from LocalSet for traffic to X, W and NP.
    LocalChoice,
    /// Map: number . index : endpoint address . port, of ClusterSet.
    Slots,
    /// Map: number . index : endpoint address . port, of LocalSet.
    LocalSlots,
    /// Map: number . index : endpoint number, of ClusterSet.
    AffinitySlots,
    /// Map: number . index : endpoint number, of LocalSet.
    LocalAffinitySlots,
    /// Map: endpoint number : endpoint address . port, of ClusterSet.
    AffinityEndpoints,
    /// Map: endpoint number : endpoint address . port, of LocalSet.
    LocalAffinityEndpoints,
    /// Map, dynamic, with timeouts: client address . number : endpoint number. Written by the kernel alone.
    Affinity,
    /// Set: pod address . pod address . protocol . port: a pod that has reached itself.
    Hairpin,
    /// Set: every V.
    ClusterIps,
    /// Set of intervals: the ServiceCIDRs.
    ServiceCidrs,
    /// Map: V, X or W . protocol . port : drop, or goto [`Chain::Reject`].
    Refused,
    /// Map: protocol . node port : drop, or goto [`Chain::Reject`].
    RefusedNodePorts,
    /// Set: W . protocol . port that has source ranges.
    Filtered,
    /// Set of intervals: W . protocol . port . source address: who may.
    SourceRanges,
}

impl SetName {
    /// All of them, in the order in which they are made.
    pub const ALL: [Self; 22] = [
        Self::ClusterIpPorts,
        Self::ExternalPorts,
        Self::NodePorts,
        Self::NodePortAddresses,
        Self::InternalChoice,
        Self::ExternalPolicy,
        Self::ExternalChoice,
        Self::LocalChoice,
        Self::Slots,
        Self::LocalSlots,
        Self::AffinitySlots,
        Self::LocalAffinitySlots,
        Self::AffinityEndpoints,
        Self::LocalAffinityEndpoints,
        Self::Affinity,
        Self::Hairpin,
        Self::ClusterIps,
        Self::ServiceCidrs,
        Self::Refused,
        Self::RefusedNodePorts,
        Self::Filtered,
        Self::SourceRanges,
    ];

    /// The name in the kernel.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ClusterIpPorts => "cluster-ip-ports",
            Self::ExternalPorts => "external-ports",
            Self::NodePorts => "node-ports",
            Self::NodePortAddresses => "node-port-addresses",
            Self::InternalChoice => "internal-choice",
            Self::ExternalPolicy => "external-policy",
            Self::ExternalChoice => "external-choice",
            Self::LocalChoice => "local-choice",
            Self::Slots => "slots",
            Self::LocalSlots => "local-slots",
            Self::AffinitySlots => "affinity-slots",
            Self::LocalAffinitySlots => "local-affinity-slots",
            Self::AffinityEndpoints => "affinity-endpoints",
            Self::LocalAffinityEndpoints => "local-affinity-endpoints",
            Self::Affinity => "affinity",
            Self::Hairpin => "hairpin",
            Self::ClusterIps => "cluster-ips",
            Self::ServiceCidrs => "service-cidrs",
            Self::Refused => "refused",
            Self::RefusedNodePorts => "refused-node-ports",
            Self::Filtered => "filtered",
            Self::SourceRanges => "source-ranges",
        }
    }

    /// A set by its name in the kernel.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|set| set.as_str() == name)
    }

    /// Whether the elements are written by the kernel: they are neither compared nor deleted.
    #[must_use]
    pub const fn is_dynamic(self) -> bool {
        matches!(self, Self::Affinity)
    }

    /// Whether keys are intervals: an element has a [`Element::key_end`] (both ends belong to it).
    #[must_use]
    pub const fn is_interval(self) -> bool {
        matches!(self, Self::ServiceCidrs | Self::SourceRanges)
    }

    /// Whether packets enter by it: its elements are set after those that they lead to, and deleted before.
    #[must_use]
    pub const fn is_entry(self) -> bool {
        matches!(
            self,
            Self::ClusterIpPorts
                | Self::ExternalPorts
                | Self::NodePorts
                | Self::NodePortAddresses
                | Self::ClusterIps
                | Self::ServiceCidrs
                | Self::Filtered
                | Self::SourceRanges
        )
    }
}

impl fmt::Display for SetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What stands for a service port while a packet is on its way through the chains, in place of its destination address; or
/// for an endpoint of a service port that has affinity.
///
/// A service port without affinity: 1 to 0x7fff_ffff. One with affinity: 0x8000_0000 and up, a multiple of 65,536; its
/// endpoints have the 65,535 numbers after it, so that the number of an endpoint tells that of its service port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Number(pub u32);

impl Number {
    /// The first number of a service port with affinity.
    pub const FIRST_WITH_AFFINITY: u32 = 0x8000_0000;

    /// Whether it is of a service port with affinity, or of its endpoints.
    #[must_use]
    pub const fn has_affinity(self) -> bool {
        self.0 >= Self::FIRST_WITH_AFFINITY
    }

    /// In the form of an address: IPv4 has the number itself, IPv6 in the last four bytes.
    #[must_use]
    pub fn address(self, family: Family) -> IpAddr {
        match family {
            Family::V4 => IpAddr::V4(self.0.into()),
            Family::V6 => IpAddr::V6(u128::from(self.0).into()),
        }
    }
}

/// The longest key: two IPv6 addresses, protocol and port.
pub const KEY_MAX: usize = 40;

/// Bytes in the kernel's form, up to [`KEY_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    len: u8,
    bytes: [u8; KEY_MAX],
}

impl Key {
    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Of bytes from the kernel; none if they are more than any key of ours has.
    #[must_use]
    pub fn from_slice(slice: &[u8]) -> Option<Self> {
        let mut bytes = [0; KEY_MAX];
        bytes.get_mut(..slice.len())?.copy_from_slice(slice);
        Some(Self { len: u8::try_from(slice.len()).ok()?, bytes })
    }

    /// No fields yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { len: 0, bytes: [0; KEY_MAX] }
    }

    /// With another address.
    #[must_use]
    pub fn ip(self, ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(ip) => self.field(&ip.octets()),
            IpAddr::V6(ip) => self.field(&ip.octets()),
        }
    }

    /// With a number in the form of an address.
    #[must_use]
    pub fn number(self, family: Family, number: Number) -> Self {
        self.ip(number.address(family))
    }

    /// With a protocol.
    #[must_use]
    pub fn protocol(self, protocol: Protocol) -> Self {
        self.field(&[protocol.number(), 0, 0, 0])
    }

    /// With a port.
    #[must_use]
    pub fn port(self, port: u16) -> Self {
        let [high, low] = port.to_be_bytes();
        self.field(&[high, low, 0, 0])
    }

    /// With the index of a slot.
    #[must_use]
    pub fn index(self, index: u32) -> Self {
        self.field(&index.to_ne_bytes())
    }

    /// With address and port of an endpoint.
    #[must_use]
    pub fn endpoint(self, endpoint: Endpoint) -> Self {
        self.ip(endpoint.ip).port(endpoint.port)
    }

    /// The longest there is has [`KEY_MAX`] bytes: what would be more is left out, which no key of ours is.
    fn field(mut self, field: &[u8]) -> Self {
        let start = usize::from(self.len);
        debug_assert!(start + field.len() <= KEY_MAX, "a key of {} bytes", start + field.len());
        if let Some(place) = self.bytes.get_mut(start..start + field.len()) {
            place.copy_from_slice(field);
            self.len += field.len() as u8;
        }
        self
    }
}

impl Default for Key {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.as_slice() {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// A verdict that a map gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// drop.
    Drop,
    /// goto.
    Goto(Chain),
}

/// What a map gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Value {
    /// Nothing: it is a set.
    None,
    /// Bytes, as in keys.
    Data(Key),
    /// A verdict.
    Verdict(Verdict),
}

/// An element of a set or map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Element {
    /// Of which.
    pub set: SetName,
    /// Its key; of an interval, the first one.
    pub key: Key,
    /// Of an interval, the last key.
    pub key_end: Option<Key>,
    /// What the map gives.
    pub value: Value,
}

/// What becomes of one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// It is added; there is none of its key.
    Add(Element),
    /// It is deleted.
    Delete(Element),
    /// The first is deleted and the second, of the same key, is added, in one transaction.
    Replace(Element, Element),
}
