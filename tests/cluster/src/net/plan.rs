//! Owns: the addresses of a [`World`](super::World), of both families.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub use keelson_proto::family::Family;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Dual {
    pub v4: Ipv4Addr,
    pub v6: Ipv6Addr,
}

impl Dual {
    const fn new(v4: [u8; 4], v6: [u16; 8]) -> Self {
        let [a, b, c, d] = v4;
        let [e, f, g, h, i, j, k, l] = v6;
        Self { v4: Ipv4Addr::new(a, b, c, d), v6: Ipv6Addr::new(e, f, g, h, i, j, k, l) }
    }

    pub fn of(self, family: Family) -> IpAddr {
        match family {
            Family::V4 => IpAddr::V4(self.v4),
            Family::V6 => IpAddr::V6(self.v6),
        }
    }

    pub fn at(self, family: Family, port: u16) -> SocketAddr {
        SocketAddr::new(self.of(family), port)
    }
}

/// N: the node's address on its underlay.
pub const NODE: Dual = Dual::new([192, 168, 10, 1], [0xfd00, 0x10, 1, 0, 0, 0, 0, 1]);
/// N2: the node's second address there.
pub const NODE_2: Dual = Dual::new([192, 168, 10, 101], [0xfd00, 0x10, 1, 0, 0, 0, 0, 0x101]);
/// The node's address on the bridge of its pods, which is the source of masqueraded connections to its pods.
pub const BRIDGE: Dual = Dual::new([10, 244, 1, 1], [0xfd00, 0x10, 0x244, 1, 0, 0, 0, 1]);
pub const NODE_OTHER: Dual = Dual::new([192, 168, 10, 2], [0xfd00, 0x10, 1, 0, 0, 0, 0, 2]);
/// The node's default route.
pub const GATEWAY: Dual = Dual::new([192, 168, 10, 254], [0xfd00, 0x10, 1, 0, 0, 0, 0, 0xfe]);
/// A pod of the node that is no endpoint, but a client.
pub const POD: Dual = Dual::new([10, 244, 1, 20], [0xfd00, 0x10, 0x244, 1, 0, 0, 0, 0x20]);
/// C: a client outside of the cluster, in 203.0.113.0/25 and fd00:cc::/64.
pub const CLIENT: Dual = Dual::new([203, 0, 113, 10], [0xfd00, 0xcc, 0, 0, 0, 0, 0, 0x10]);
/// B: a client outside of the cluster and of C's networks, in 198.51.100.0/24 and fd00:bb::/64.
pub const OUTSIDE_CLIENT: Dual = Dual::new([198, 51, 100, 10], [0xfd00, 0xbb, 0, 0, 0, 0, 0, 0x10]);

/// The addresses of all pods, of every node.
pub const CLUSTER_CIDRS: [&str; 2] = ["10.244.0.0/16", "fd00:10:244::/48"];
/// The node's own part of them.
pub const NODE_CIDRS: [&str; 2] = ["10.244.1.0/24", "fd00:10:244:1::/64"];
pub const NODE_NETWORKS: [&str; 2] = ["192.168.10.0/24", "fd00:10:1::/64"];
/// C's network.
pub const CLIENT_NETWORKS: [&str; 2] = ["203.0.113.0/25", "fd00:cc::/64"];
/// Addresses of Services, if the API server was started with them.
pub const SERVICE_CIDRS: [&str; 2] = ["10.96.0.0/12", "fd00:10:96::/112"];
/// Addresses of load balancers and external IPs.
pub const EXTERNAL_CIDRS: [&str; 2] = ["172.30.0.0/15", "fd00:ee::/32"];

/// Number of pods of the node that are endpoints: `local(1)` and so on, each in a separate namespace.
pub const LOCALS: u8 = 3;
/// Number of pods of the other node that are endpoints: `remote(1)` and so on.
pub const REMOTES: u8 = 5;
/// The ports on which every endpoint serves TCP, UDP and SCTP.
pub const SERVED: [u16; 3] = [8080, 8081, 8082];
/// The ports on which the gateway answers TCP for every address of Services and load balancers: a client that reaches
/// it was not redirected by the node.
pub const UNTOUCHED: [u16; 4] = [80, 81, 82, 443];

/// L1 and following: a pod of the node that is an endpoint.
pub const fn local(number: u8) -> Dual {
    Dual::new([10, 244, 1, 10 + number], [0xfd00, 0x10, 0x244, 1, 0, 0, 0, 0x10 + number as u16])
}

/// R1 and following: a pod of the other node that is an endpoint.
pub const fn remote(number: u8) -> Dual {
    Dual::new([10, 244, 2, 10 + number], [0xfd00, 0x10, 0x244, 2, 0, 0, 0, 0x10 + number as u16])
}
