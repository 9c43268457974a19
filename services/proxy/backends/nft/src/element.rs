//! The sets and maps of the table, and their elements.
//!
//! Owns: [`SetName`], [`Element`] and the kernel's form of keys and values. In and out: values. A key or value is kept
//! as the bytes of the kernel: fields in order, each padded to 4 bytes; addresses and ports in network byte order,
//! numbers and slot indexes in host byte order.

use std::{fmt, net::IpAddr};

use keelson_proxy::model::{Endpoint, Protocol};

use super::chain::{Chain, Choice};

pub const AFFINITY_GROUPS: u8 = 8;

/// A set or map of the table `keelson`. "Number" identifies a service port, "endpoint number" an endpoint of a service
/// port with affinity: see [`Number`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SetName {
    /// Map: V . protocol . port : number.
    ClusterIpPorts,
    /// Map: X or W . protocol . port : number.
    ExternalPorts,
    /// Map: protocol . node port : number.
    NodePorts,
    /// Set: addresses at which node ports are served. Unused if these are all local ones.
    NodePortAddresses,
    /// Map: choice and count of a number ([`Number::with_count`]) : verdict, the chain that chooses.
    Counts,
    /// Map: number : verdict, the chain that chooses for traffic to V, if the number does not contain the count.
    InternalChoice,
    /// Map: number : verdict, to [`Chain::ExternalLocal`] if externalTrafficPolicy is Local.
    ExternalPolicy,
    /// Map: number : verdict, the chain that chooses from ClusterSet for traffic to X, W and NP, if the number does not
    /// contain the count.
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
    /// Map, dynamic, with timeouts: client address . number : endpoint number. Written only by the kernel. There are
    /// several, so that one Service with many clients takes no room from most others: see [`Self::affinity`].
    Affinity0,
    Affinity1,
    Affinity2,
    Affinity3,
    Affinity4,
    Affinity5,
    Affinity6,
    Affinity7,
    /// Set: pod address . pod address . protocol . port: a pod that reaches itself.
    Hairpin,
    /// Set: every V.
    ClusterIps,
    /// Set of intervals: the ServiceCIDRs.
    ServiceCidrs,
    /// Map: V, X or W . protocol . port : drop, or goto [`Chain::Reject`].
    Refused,
    /// Map: protocol . node port : drop, or goto [`Chain::Reject`].
    RefusedNodePorts,
    /// Map: W . protocol . port with source ranges : verdict, the chain that looks them up.
    Filtered,
    /// Set: W . port . network . kind ([`SetName::range_kind`]): admitted sources. The protocol is part of the kind
    /// because nft 1.0.6 fails an assertion when it lists a set whose keys have five fields, one of them an integer.
    SourceRanges,
}

impl SetName {
    /// In order of creation.
    pub const ALL: [Self; 30] = [
        Self::ClusterIpPorts,
        Self::ExternalPorts,
        Self::NodePorts,
        Self::NodePortAddresses,
        Self::Counts,
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
        Self::Affinity0,
        Self::Affinity1,
        Self::Affinity2,
        Self::Affinity3,
        Self::Affinity4,
        Self::Affinity5,
        Self::Affinity6,
        Self::Affinity7,
        Self::Hairpin,
        Self::ClusterIps,
        Self::ServiceCidrs,
        Self::Refused,
        Self::RefusedNodePorts,
        Self::Filtered,
        Self::SourceRanges,
    ];

    /// Maps of clients, written by the kernel.
    pub const AFFINITY: [Self; AFFINITY_GROUPS as usize] = [
        Self::Affinity0,
        Self::Affinity1,
        Self::Affinity2,
        Self::Affinity3,
        Self::Affinity4,
        Self::Affinity5,
        Self::Affinity6,
        Self::Affinity7,
    ];

    /// The map of a group ([`Number::affinity_group`]), modulo the number of maps.
    #[must_use]
    pub fn affinity(group: u8) -> Self {
        Self::AFFINITY.into_iter().cycle().nth(group.into()).unwrap_or(Self::Affinity0)
    }

    /// The name in the kernel.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ClusterIpPorts => "cluster-ip-ports",
            Self::ExternalPorts => "external-ports",
            Self::NodePorts => "node-ports",
            Self::NodePortAddresses => "node-port-addresses",
            Self::Counts => "counts",
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
            Self::Affinity0 => "affinity-0",
            Self::Affinity1 => "affinity-1",
            Self::Affinity2 => "affinity-2",
            Self::Affinity3 => "affinity-3",
            Self::Affinity4 => "affinity-4",
            Self::Affinity5 => "affinity-5",
            Self::Affinity6 => "affinity-6",
            Self::Affinity7 => "affinity-7",
            Self::Hairpin => "hairpin",
            Self::ClusterIps => "cluster-ips",
            Self::ServiceCidrs => "service-cidrs",
            Self::Refused => "refused",
            Self::RefusedNodePorts => "refused-node-ports",
            Self::Filtered => "filtered",
            Self::SourceRanges => "source-ranges",
        }
    }

    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|set| set.as_str() == name)
    }

    /// Whether the kernel writes the elements: they are neither compared nor deleted.
    #[must_use]
    pub const fn is_dynamic(self) -> bool {
        const FIRST: usize = SetName::Affinity0 as usize;
        const LAST: usize = SetName::Affinity7 as usize;
        matches!(self as usize, FIRST..=LAST)
    }

    /// Distinguishes ranges of one network in [`Self::SourceRanges`].
    #[must_use]
    pub fn range_kind(protocol: Protocol, prefix_len: u8) -> u32 {
        u32::from(protocol.number()) << 8 | u32::from(prefix_len)
    }

    /// Whether keys are intervals: elements have a [`Element::key_end`] (inclusive).
    #[must_use]
    pub const fn is_interval(self) -> bool {
        matches!(self, Self::ServiceCidrs)
    }

    /// Whether packets enter through it: its elements are added after those that they refer to, and deleted before
    /// them.
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

/// Identifies a service port, or an endpoint of a service port with session affinity, while the first packet of a
/// connection traverses the chains. It is kept in the priority of the packet (`meta priority`), see
/// [`is_set`](Self::is_set).
///
/// A service port without affinity has an ID from 1 to 0xf_ffff. Frontends map to the ID combined with the choice and
/// count of endpoints ([`Self::with_count`]), so a changed count changes the value of a map and not a verdict, or to
/// the ID alone ([`Self::uncounted`]). A service port with affinity has a multiple of 65,536 from 0x8000_0000; its
/// endpoints have the 65,535 numbers after it, so the number of an endpoint contains that of its service port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Number(pub u32);

impl Number {
    /// The first number of a service port with affinity.
    pub const FIRST_WITH_AFFINITY: u32 = 0x8000_0000;
    /// The bits that distinguish service ports without affinity.
    pub const ID_MASK: Self = Self(0x000f_ffff);
    /// The bits of an endpoint's number that identify its service port.
    pub const SERVICE_MASK: Self = Self(0xffff_0000);
    /// All bits but [`Self::ID_MASK`].
    pub const CLASS_MASK: Self = Self(!Self::ID_MASK.0);
    /// Every number in a packet has at least one of these bits; a priority that other programs set has none of them,
    /// unless it is a traffic class below a handle of 4000 or more.
    pub const SET_MASK: Self = Self(0xc000_0000);
    /// The bits that show whether a number contains a count of ClusterSet.
    pub const CLUSTER_MASK: Self = Self(0xe000_0000);
    /// The value of these bits in a number that contains a count of ClusterSet.
    pub const CLUSTER: Self = Self(0x4000_0000);
    /// The highest count that a number can contain.
    pub const COUNT_MAX: u32 = 0x1ff;
    /// Distance between the numbers of service ports with affinity.
    pub(crate) const STRIDE: u32 = 1 << 16;
    const PLAIN: u32 = 0x4000_0000;
    const LOCAL: u32 = 0x2000_0000;
    const COUNT_SHIFT: u32 = 20;

    /// With the set of endpoints and their count, the key of [`SetName::Counts`]. [`Self::uncounted`] above
    /// [`Self::COUNT_MAX`]; unchanged with affinity.
    #[must_use]
    pub const fn with_count(self, choice: Choice, count: u32) -> Self {
        if self.has_affinity() {
            return self;
        }
        if count > Self::COUNT_MAX {
            return self.uncounted();
        }
        let local = match choice {
            Choice::Cluster => 0,
            Choice::Local => Self::LOCAL,
        };
        Self(self.0 & Self::ID_MASK.0 | Self::PLAIN | local | count << Self::COUNT_SHIFT)
    }

    /// The number in a packet if the count of endpoints is not part of it: with the count 0 of LocalSet, which no
    /// service port has. Unchanged with affinity.
    #[must_use]
    pub const fn uncounted(self) -> Self {
        if self.has_affinity() { self } else { self.with_count(Choice::Local, 0) }
    }

    /// The ID of the service port; unchanged with affinity.
    #[must_use]
    pub const fn id(self) -> Self {
        if self.has_affinity() { self } else { Self(self.0 & Self::ID_MASK.0) }
    }

    /// Whether it can be the number of a service port; else it is that of an endpoint, or none.
    pub(crate) fn is_service_port(self) -> bool {
        if self.has_affinity() {
            self.0.is_multiple_of(Self::STRIDE)
        } else {
            (1..=Self::ID_MASK.0).contains(&self.0)
        }
    }

    /// Splits an endpoint's number into the service port's number and the endpoint; `None` without affinity.
    pub(crate) fn split(self) -> Option<(Self, u16)> {
        let endpoint = (self.0 % Self::STRIDE) as u16;
        (self.has_affinity() && endpoint != 0).then_some((Self(self.0 - u32::from(endpoint)), endpoint))
    }

    /// `bytes`: a key or value that is a number alone.
    #[must_use]
    pub fn of(bytes: Key) -> Option<Self> {
        <[u8; 4]>::try_from(bytes.as_slice()).ok().map(|bytes| Self(u32::from_ne_bytes(bytes)))
    }

    /// Whether it can be in a packet. An ID alone cannot.
    #[must_use]
    pub const fn is_set(self) -> bool {
        self.0 & Self::SET_MASK.0 != 0
    }

    /// Whether it contains a count of ClusterSet.
    #[must_use]
    pub const fn counts_cluster(self) -> bool {
        self.0 & Self::CLUSTER_MASK.0 == Self::CLUSTER.0
    }

    /// The key of [`SetName::Counts`].
    #[must_use]
    pub const fn class(self) -> Self {
        Self(self.0 & Self::CLASS_MASK.0)
    }

    /// Of a service port with affinity, or of its endpoints.
    #[must_use]
    pub const fn has_affinity(self) -> bool {
        self.0 >= Self::FIRST_WITH_AFFINITY
    }

    /// The affinity map with the clients of a service port. Numbers are assigned in turn, so as many service ports as
    /// there are groups have one each.
    #[must_use]
    pub const fn affinity_group(self) -> u8 {
        (self.0 >> 16) as u8 % AFFINITY_GROUPS
    }

    #[must_use]
    pub const fn masked(self, mask: Self) -> Self {
        Self(self.0 & mask.0)
    }
}

impl fmt::Display for Number {
    /// As nft writes a priority: the handle of a traffic class, two hexadecimal numbers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}:{:x}", self.0 >> 16, self.0 & 0xffff)
    }
}

/// The longest key, in bytes: two IPv6 addresses and two other fields.
pub const KEY_MAX: usize = 40;

/// Bytes in the kernel's form, up to [`KEY_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    len: u8,
    bytes: [u8; KEY_MAX],
}

impl Key {
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// `None` if longer than any key of ours.
    #[must_use]
    pub fn from_slice(slice: &[u8]) -> Option<Self> {
        let mut bytes = [0; KEY_MAX];
        bytes.get_mut(..slice.len())?.copy_from_slice(slice);
        Some(Self { len: u8::try_from(slice.len()).ok()?, bytes })
    }

    #[must_use]
    pub const fn new() -> Self {
        Self { len: 0, bytes: [0; KEY_MAX] }
    }

    #[must_use]
    pub fn ip(self, ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(ip) => self.field(&ip.octets()),
            IpAddr::V6(ip) => self.field(&ip.octets()),
        }
    }

    #[must_use]
    pub fn number(self, number: Number) -> Self {
        self.index(number.0)
    }

    #[must_use]
    pub fn protocol(self, protocol: Protocol) -> Self {
        self.field(&[protocol.number(), 0, 0, 0])
    }

    #[must_use]
    pub fn port(self, port: u16) -> Self {
        let [high, low] = port.to_be_bytes();
        self.field(&[high, low, 0, 0])
    }

    /// Appends the index of a slot, or another number in host byte order.
    #[must_use]
    pub fn index(self, index: u32) -> Self {
        self.field(&index.to_ne_bytes())
    }

    #[must_use]
    pub fn endpoint(self, endpoint: Endpoint) -> Self {
        self.ip(endpoint.ip).port(endpoint.port)
    }

    /// Fields beyond [`KEY_MAX`] bytes are ignored; no key of ours is longer.
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    Drop,
    Goto(Chain),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Value {
    None,
    /// Bytes, as in keys.
    Data(Key),
    Verdict(Verdict),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Element {
    pub set: SetName,
    /// Of an interval, the first key.
    pub key: Key,
    /// Of an interval, the last key.
    pub key_end: Option<Key>,
    pub value: Value,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// No element with this key exists.
    Add(Element),
    Delete(Element),
    /// The first is deleted and the second, with the same key, is added, in one transaction.
    Replace(Element, Element),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_numbers_contain_the_service_port_number() {
        assert_eq!(Number(0x8001_0003).split(), Some((Number(0x8001_0000), 3)));
        assert_eq!(Number(0x8001_0000).split(), None);
        assert_eq!(Number(7).split(), None);
    }
}
