//! The maps of pod devices, as the kernel has them.
//!
//! Owns: the table of these maps, their sizes, their values, and what the program counts. In and out: names and bytes. What changes
//! their meaning without a change of sizes is a new [`LAYOUT`].

use std::net::IpAddr;

use ipnet::IpNet;

use crate::layout::{self, Address, MapDefinition, map};

/// Part of the name of the folder with the pinned maps.
pub(crate) const LAYOUT: u32 = 2;

pub(crate) const DEVICES: &str = "pod_devices";
pub(crate) const NETWORKS: &str = layout::POD_NETWORKS.name;
pub(crate) const FRAGMENTS: &str = "pod_fragments";
pub(crate) const COUNTERS: &str = "pod_counters";

/// All maps of the object.
pub(crate) const POD_MAPS: [MapDefinition; 7] = [
    map(DEVICES, 4, 12, 1_024),
    layout::POD_NETWORKS,
    layout::PODS,
    map(COUNTERS, 4, 8, PodCounter::ALL.len() as u32),
    map(FRAGMENTS, 40, 4, 4_096),
    layout::DEVICES,
    layout::REPLIES,
];

pub(crate) type HardwareAddress = [u8; 6];

/// What routes the packets of a device, and its hardware address: a bridge, or the device itself.
pub(crate) fn device_value(router: u32, address: HardwareAddress) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&router.to_ne_bytes());
    bytes[4..10].copy_from_slice(&address);
    bytes
}

/// `None`: all packets of the family are left.
pub(crate) fn network_value(network: Option<IpNet>) -> [u8; 36] {
    let mut bytes = [0; 36];
    let Some(network) = network else { return bytes };
    let mask = match network.netmask() {
        // Of the mapped address.
        IpAddr::V4(mask) => {
            let mut bytes = [0xff; 16];
            bytes[12..].copy_from_slice(&mask.octets());
            bytes
        }
        IpAddr::V6(mask) => mask.octets(),
    };
    bytes[..16].copy_from_slice(&Address::from(network.network()).0);
    bytes[16..32].copy_from_slice(&mask);
    bytes[32..].copy_from_slice(&1_u32.to_ne_bytes());
    bytes
}

/// What the program counts, in the order of `enum pod_counter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PodCounter {
    HandedOver,
    HandedToClient,
    LeftSource,
    LeftDestination,
    LeftLimit,
}

impl PodCounter {
    pub(crate) const ALL: [Self; 5] =
        [Self::HandedOver, Self::HandedToClient, Self::LeftSource, Self::LeftDestination, Self::LeftLimit];

    /// The label in metrics.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::HandedOver => "handed_over",
            Self::HandedToClient => "handed_to_client",
            Self::LeftSource => "left_source",
            Self::LeftDestination => "left_destination",
            Self::LeftLimit => "left_limit",
        }
    }

    pub(crate) const fn describe(self) -> &'static str {
        match self {
            Self::HandedOver => "packets handed over",
            Self::HandedToClient => "replies of direct return handed over",
            Self::LeftSource => "left to the node: the source is not the pod's own address",
            Self::LeftDestination => {
                "left to the node: the destination is no pod here that has sent something in the last second"
            }
            Self::LeftLimit => "left to the node: too large, the TTL ends here, or there is no way",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::tests::assert_sizes;

    #[test]
    fn networks_are_masks_of_mapped_addresses() {
        let value = network_value("10.244.1.0/24".parse().ok());
        assert_eq!(value[8..16], [0, 0, 0xff, 0xff, 10, 244, 1, 0]);
        assert_eq!(value[16..33], [[0xff; 15].as_slice(), &[0, 1]].concat());
        let value = network_value("fd00:10::/32".parse().ok());
        assert_eq!(value[..4], [0xfd, 0, 0, 0x10]);
        assert_eq!(value[16..22], [0xff, 0xff, 0xff, 0xff, 0, 0]);
        assert_eq!(network_value(None), [0; 36]);
    }

    /// The compiler of the program compares the sizes and the number of counters with [`POD_MAPS`].
    #[test]
    fn the_program_has_the_same_sizes() {
        let types = [
            (DEVICES, "__u32", "struct pod_device"),
            (NETWORKS, "__u32", "struct pod_network"),
            (layout::PODS.name, "struct address", "struct pod"),
            (COUNTERS, "__u32", "__u64"),
            (FRAGMENTS, "struct fragment_key", "__u32"),
            (layout::DEVICES.name, "__u32", "struct device"),
            (layout::REPLIES.name, "struct direct_key", "struct direct_reply"),
        ];
        let facts = [
            format!("POD_COUNTERS == {}", PodCounter::ALL.len()),
            format!("LEFT_LIMIT == {}", PodCounter::LeftLimit as u32),
            "__builtin_offsetof(struct pod_device, router_address) == 4".to_owned(),
            "__builtin_offsetof(struct pod_network, mask) == 16".to_owned(),
            "__builtin_offsetof(struct pod_network, is_on) == 32".to_owned(),
        ];
        assert_sizes("shared.h", &POD_MAPS, &types, &facts);
    }
}
