//! Keys and values of the maps, as the kernel has them.
//!
//! Owns: the table of maps ([`MAPS`]), their sizes, and the types of `programs/layout.h` in Rust. In and out: bytes. What
//! changes their meaning without a change of sizes is a new [`LAYOUT`].

use std::{
    net::{IpAddr, Ipv6Addr},
    ops::Range,
};

use ipnet::IpNet;
use keelson_proxy::model::{Endpoint, Family, Frontend};

/// Part of the name of the folder with the pinned maps.
pub(crate) const LAYOUT: u32 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(dead_code)] // Programs alone use some of the maps.
pub(crate) enum MapName {
    Frontends,
    Sets,
    Slots,
    Members,
    NodeAddresses,
    Affinity,
    UdpFlows,
    UdpReplies,
    TcpPeers,
    Counters,
    /// Of direct return alone.
    SourceRanges,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct MapDefinition {
    /// The name in the object, of the pin and in bpftool.
    pub(crate) name: &'static str,
    pub(crate) key_size: u32,
    pub(crate) value_size: u32,
    pub(crate) max_entries: u32,
}

pub(crate) const fn map(
    name: &'static str,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
) -> MapDefinition {
    MapDefinition { name, key_size, value_size, max_entries }
}

/// Those of the socket level, in the order of [`MapName`].
pub(crate) const MAPS: [MapDefinition; 10] = [
    map("frontends", 20, 8, 262_144),
    map("sets", 8, 16, 131_072),
    map("slots", 4, 24, 262_144),
    map("members", 24, 4, 262_144),
    map("node_addresses", 16, 4, 16_384),
    map("affinity", 16, 32, 65_536),
    map("udp_flows", 32, 24, 65_536),
    map("udp_replies", 32, 24, 65_536),
    map("tcp_peers", 32, 24, 65_536),
    map("counters", 4, 8, Counter::ALL.len() as u32),
];

/// The devices of direct return, what its replies show, the networks of pods, and the pods that send: see `programs/shared.h`.
pub(crate) const DEVICES: MapDefinition = map("devices", 4, 12, 256);
pub(crate) const REPLIES: MapDefinition = map("direct_replies", 44, 32, 131_072);
pub(crate) const POD_NETWORKS: MapDefinition = map("pod_networks", 4, 36, 2);
pub(crate) const PODS: MapDefinition = map("pods", 16, 24, 8_192);

/// The source ranges of service ports, in direct return.
pub(crate) const SOURCE_RANGES: MapDefinition = map("source_ranges", 24, 4, 65_536);

/// Maps that direct return and pod devices both have, and share where both are on. What changes their meaning is a new layout of both.
pub(crate) const SHARED_MAPS: [MapDefinition; 4] = [DEVICES, REPLIES, POD_NETWORKS, PODS];

impl MapName {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::SourceRanges => SOURCE_RANGES.name,
            _ => MAPS[self as usize].name,
        }
    }
}

/// What programs count, in the order of `enum counter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counter {
    ChosenTcp,
    ChosenUdp,
    LeftChanging,
    LeftUnremembered,
}

impl Counter {
    pub(crate) const ALL: [Self; 4] =
        [Self::ChosenTcp, Self::ChosenUdp, Self::LeftChanging, Self::LeftUnremembered];

    /// The label in metrics.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::ChosenTcp => "tcp",
            Self::ChosenUdp => "udp",
            Self::LeftChanging => "left_changing",
            Self::LeftUnremembered => "left_unremembered",
        }
    }

    pub(crate) const fn describe(self) -> &'static str {
        match self {
            Self::ChosenTcp => "TCP connections given an endpoint",
            Self::ChosenUdp => "UDP flows given an endpoint",
            Self::LeftChanging => "left to nftables because the endpoints were just changing",
            Self::LeftUnremembered => "left to nftables because the flow could not be remembered",
        }
    }
}

/// 16 bytes in network order; IPv4 is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Address(pub(crate) [u8; 16]);

impl Address {
    pub(crate) fn ip(self) -> IpAddr {
        IpAddr::from(self.0).to_canonical()
    }

    pub(crate) fn family(self) -> Family {
        Family::of(self.ip())
    }
}

impl From<IpAddr> for Address {
    fn from(ip: IpAddr) -> Self {
        Self(match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        })
    }
}

/// 20 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Remote {
    pub(crate) address: Address,
    pub(crate) port: u16,
}

impl Remote {
    pub(crate) fn endpoint(self) -> Endpoint {
        Endpoint { ip: self.address.ip(), port: self.port }
    }
}

impl From<Endpoint> for Remote {
    fn from(Endpoint { ip, port }: Endpoint) -> Self {
        Self { address: ip.into(), port }
    }
}

/// 20 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct FrontendKey {
    /// Unspecified for node ports.
    pub(crate) address: Address,
    pub(crate) port: u16,
    pub(crate) protocol: u8,
    pub(crate) is_node_port: bool,
}

impl FrontendKey {
    pub(crate) fn of(frontend: Frontend, family: Family) -> Self {
        match frontend {
            Frontend::Address { ip, protocol, port } => {
                Self { address: ip.into(), port, protocol: protocol.number(), is_node_port: false }
            }
            Frontend::NodePort { protocol, port } => {
                let any: IpAddr = match family {
                    Family::V4 => std::net::Ipv4Addr::UNSPECIFIED.into(),
                    Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
                };
                Self { address: any.into(), port, protocol: protocol.number(), is_node_port: true }
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum SetKind {
    /// ClusterSet.
    Cluster,
    /// LocalSet.
    Local,
}

impl SetKind {
    pub(crate) const ALL: [Self; 2] = [Self::Cluster, Self::Local];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Cluster => "cluster",
            Self::Local => "local",
        }
    }
}

/// 8 bytes: the value of a frontend, and the key of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SetKey {
    pub(crate) number: u32,
    /// As in the kernel: a [`SetKind`] if this program has written it, and in a frontend perhaps [`HAS_RANGES`].
    pub(crate) kind: u32,
}

/// Bit of a kind: clients outside of the source ranges are left to packets.
pub(crate) const HAS_RANGES: u32 = 2;

impl SetKey {
    pub(crate) const fn new(number: u32, kind: SetKind) -> Self {
        Self { number, kind: kind as u32 }
    }

    pub(crate) const fn with_ranges(self, has_ranges: bool) -> Self {
        Self { kind: self.kind | if has_ranges { HAS_RANGES } else { 0 }, ..self }
    }

    pub(crate) const fn has_ranges(self) -> bool {
        self.kind & HAS_RANGES != 0
    }

    /// `None`: another program has written it.
    pub(crate) fn set_kind(self) -> Option<SetKind> {
        SetKind::ALL.into_iter().find(|kind| *kind as u32 == self.kind & !HAS_RANGES)
    }
}

/// 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SetValue {
    pub(crate) first: u32,
    pub(crate) count: u32,
    pub(crate) affinity_seconds: u32,
}

impl SetValue {
    /// Of its slots.
    pub(crate) fn places(&self) -> Range<u32> {
        self.first..self.first.saturating_add(self.count)
    }
}

/// 24 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotValue {
    pub(crate) remote: Remote,
    pub(crate) number: u32,
}

/// 24 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct MemberKey {
    pub(crate) number: u32,
    pub(crate) remote: Remote,
}

/// A network as a trie of the kernel has it: bits of the mapped address, and the address.
pub(crate) fn network_key(network: IpNet) -> (u32, [u8; 16]) {
    let mapped = match network {
        IpNet::V4(_) => 96,
        IpNet::V6(_) => 0,
    };
    let address: IpAddr = network.network();
    (mapped + u32::from(network.prefix_len()), Address::from(address).0)
}

/// 24 bytes, of which the kernel's trie has the number of bits apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RangeKey {
    /// Of the service port.
    pub(crate) number: u32,
    /// Of the mapped address.
    pub(crate) bits: u32,
    pub(crate) address: Address,
}

impl RangeKey {
    pub(crate) fn new(number: u32, range: IpNet) -> Self {
        let (bits, address) = network_key(range);
        Self { number, bits, address: Address(address) }
    }

    /// Bits, and the number before the address.
    pub(crate) fn to_trie(self) -> (u32, [u8; 20]) {
        (u32::BITS + self.bits, bytes::range(self.number, self.address))
    }

    pub(crate) fn from_trie(bits: u32, bytes: [u8; 20]) -> Self {
        let (number, address) = bytes::of_range(bytes);
        Self { number, bits: bits.saturating_sub(u32::BITS), address }
    }
}

/// Bit of a member to which UDP flows may go on; the others are `1 << kind`.
pub(crate) const MEMBER_SERVES: u32 = 4;
/// Bit of a member on this node, in the maps of direct return.
pub(crate) const MEMBER_HERE: u32 = 8;

/// A key of `udp_replies` and `tcp_peers`: 32 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FlowKey {
    pub(crate) socket: u64,
    pub(crate) remote: Remote,
}

/// 24 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FlowValue {
    pub(crate) number: u32,
    pub(crate) other: Remote,
}

/// A key of `direct_flows` and `direct_replies`: 44 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DirectKey {
    pub(crate) client: Remote,
    /// The address of the Service; in replies, the endpoint.
    pub(crate) other: Remote,
    pub(crate) protocol: u32,
}

/// 32 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DirectFlow {
    pub(crate) number: u32,
    pub(crate) endpoint: Remote,
    pub(crate) is_remote: bool,
    pub(crate) is_handed_over: bool,
}

/// 32 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DirectReply {
    /// By CLOCK_MONOTONIC_COARSE.
    pub(crate) used_ns: u64,
    pub(crate) service: Remote,
    pub(crate) is_handed_over: bool,
    /// Bits of `programs/direct/layout.h`.
    pub(crate) state: u16,
}

/// Bytes as the kernel has them. `from_bytes` takes whatever is there.
pub(crate) trait Layout<const N: usize>: Sized {
    fn to_bytes(self) -> [u8; N];
    fn from_bytes(bytes: [u8; N]) -> Self;
}

mod bytes;
#[cfg(test)]
pub(crate) mod tests;
