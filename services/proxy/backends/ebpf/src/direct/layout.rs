//! The maps of direct return, as the kernel has them.
//!
//! Owns: the table of these maps, their sizes, and what programs count. In and out: names and bytes. Those of Services are the
//! same as at the socket level, and are in `layout`. What changes their meaning without a change of sizes is a new [`LAYOUT`].

use crate::layout::{self, MAPS, MapDefinition, MapName, map};

/// Part of the name of the folder with the pinned maps.
pub(crate) const LAYOUT: u32 = 3;

pub(crate) const NETWORKS: &str = "networks";
pub(crate) const DEVICES: &str = layout::DEVICES.name;
pub(crate) const FLOWS: MapDefinition = map("direct_flows", 44, 32, 131_072);
pub(crate) const FRAGMENTS: &str = "reply_fragments";
pub(crate) const COUNTERS: &str = "direct_counters";

/// All maps of the object.
pub(crate) const DIRECT_MAPS: [MapDefinition; 14] = [
    MAPS[MapName::Frontends as usize],
    MAPS[MapName::Sets as usize],
    MAPS[MapName::Slots as usize],
    MAPS[MapName::Members as usize],
    MAPS[MapName::NodeAddresses as usize],
    map(NETWORKS, 20, 4, 16_384),
    layout::SOURCE_RANGES,
    layout::DEVICES,
    FLOWS,
    layout::REPLIES,
    map(FRAGMENTS, 40, 16, 4_096),
    map(COUNTERS, 4, 8, DirectCounter::ALL.len() as u32),
    layout::POD_NETWORKS,
    layout::PODS,
];

/// What programs count, in the order of `enum direct_counter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DirectCounter {
    FlowHere,
    FlowRemote,
    PacketHere,
    PacketHandedOver,
    PacketRedirected,
    PacketRouted,
    NoticeTaken,
    Reply,
    IcmpError,
    LeftInside,
    LeftFragment,
    LeftOptions,
    LeftSetChanging,
    LeftNoEndpoint,
    LeftUnrouted,
    LeftFull,
    LeftNotice,
    LeftRanges,
}

impl DirectCounter {
    pub(crate) const ALL: [Self; 18] = [
        Self::FlowHere,
        Self::FlowRemote,
        Self::PacketHere,
        Self::PacketHandedOver,
        Self::PacketRedirected,
        Self::PacketRouted,
        Self::NoticeTaken,
        Self::Reply,
        Self::IcmpError,
        Self::LeftInside,
        Self::LeftFragment,
        Self::LeftOptions,
        Self::LeftSetChanging,
        Self::LeftNoEndpoint,
        Self::LeftUnrouted,
        Self::LeftFull,
        Self::LeftNotice,
        Self::LeftRanges,
    ];

    /// The label in metrics.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::FlowHere => "flow_here",
            Self::FlowRemote => "flow_remote",
            Self::PacketHere => "packet_here",
            Self::PacketHandedOver => "packet_handed_over",
            Self::PacketRedirected => "packet_redirected",
            Self::PacketRouted => "packet_routed",
            Self::NoticeTaken => "notice_taken",
            Self::Reply => "reply",
            Self::IcmpError => "icmp_error",
            Self::LeftInside => "left_inside",
            Self::LeftFragment => "left_fragment",
            Self::LeftOptions => "left_options",
            Self::LeftSetChanging => "left_set_changing",
            Self::LeftNoEndpoint => "left_no_endpoint",
            Self::LeftUnrouted => "left_unrouted",
            Self::LeftFull => "left_full",
            Self::LeftNotice => "left_notice",
            Self::LeftRanges => "left_ranges",
        }
    }

    pub(crate) const fn describe(self) -> &'static str {
        match self {
            Self::FlowHere => "flows to endpoints of this node",
            Self::FlowRemote => "flows to endpoints of other nodes",
            Self::PacketHere => "packets to endpoints of this node",
            Self::PacketHandedOver => "packets handed over to the devices of endpoints",
            Self::PacketRedirected => "packets sent on to other nodes",
            Self::PacketRouted => "packets that the kernel routed to other nodes",
            Self::NoticeTaken => "packets with a notice of another node",
            Self::Reply => "replies with the address of the Service",
            Self::IcmpError => "ICMP errors translated",
            Self::LeftInside => "left to nftables: the client is in the cluster",
            Self::LeftFragment => "left to nftables: fragments",
            Self::LeftOptions => "left to nftables: options of IPv4",
            Self::LeftSetChanging => "left to nftables: the endpoints were just changing",
            Self::LeftNoEndpoint => "left to nftables: no endpoint could be used",
            Self::LeftUnrouted => "left to nftables: no route, too large, or the TTL ends here",
            Self::LeftFull => "left to nftables: the flow could not be remembered",
            Self::LeftNotice => "notices that are not for an endpoint here",
            Self::LeftRanges => "left to nftables: the client is outside of the source ranges",
        }
    }
}

/// What a network has, by the bits of `programs/direct/layout.h`.
pub(crate) const NETWORK_NODES: u32 = 1;
pub(crate) const NETWORK_PODS: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        direct::flows::{ENDED_BY_CLIENT, ENDED_BY_ENDPOINT, LASTS, ONE_SIDED, RESET},
        layout::tests::assert_sizes,
    };

    /// The compiler of the programs compares the sizes and the number of counters with [`DIRECT_MAPS`].
    #[test]
    fn the_programs_have_the_same_sizes() {
        let types = [
            ("frontends", "struct frontend_key", "struct set_key"),
            ("sets", "struct set_key", "struct set"),
            ("slots", "__u32", "struct slot"),
            ("members", "struct member_key", "__u32"),
            ("node_addresses", "struct address", "__u32"),
            (NETWORKS, "struct network_key", "__u32"),
            (layout::SOURCE_RANGES.name, "struct range_key", "__u32"),
            (DEVICES, "__u32", "struct device"),
            (FLOWS.name, "struct direct_key", "struct direct_flow"),
            (layout::REPLIES.name, "struct direct_key", "struct direct_reply"),
            (FRAGMENTS, "struct fragment_key", "struct address"),
            (COUNTERS, "__u32", "__u64"),
            (layout::POD_NETWORKS.name, "__u32", "struct pod_network"),
            (layout::PODS.name, "struct address", "struct pod"),
        ];
        let facts = [
            format!("DIRECT_COUNTERS == {}", DirectCounter::ALL.len()),
            format!("LEFT_RANGES == {}", DirectCounter::LeftRanges as u32),
            format!("HAS_RANGES == {}", layout::HAS_RANGES),
            format!("PACKET_HANDED_OVER == {}", DirectCounter::PacketHandedOver as u32),
            format!("LEFT_INSIDE == {}", DirectCounter::LeftInside as u32),
            format!("MEMBER_HERE == {}", crate::layout::MEMBER_HERE),
            format!("ENDED_BY_CLIENT == {ENDED_BY_CLIENT} && ENDED_BY_ENDPOINT == {ENDED_BY_ENDPOINT}"),
            format!("RESET == {RESET} && LASTS == {LASTS} && ONE_SIDED == {ONE_SIDED}"),
            format!("NETWORK_NODES == {NETWORK_NODES} && NETWORK_PODS == {NETWORK_PODS}"),
        ];
        assert_sizes("shared.h", &DIRECT_MAPS, &types, &facts);
    }
}
