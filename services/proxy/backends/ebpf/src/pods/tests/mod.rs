//! The program with packets between pods of a node, in network namespaces.
//!
//! ```text
//!        node 10.244.0.1
//!     ┌───────┼───────┐       veth0 to veth2: each with a route, or ports of a bridge
//!   pod 0   pod 1   pod 2     10.244.0.11 to 10.244.0.13
//! ```

use std::{
    io::{Read as _, Write as _},
    net::UdpSocket,
    time::Duration,
};

use keelson_proxy::{addresses::LocalAddresses, model::Protocol};

use super::*;
use crate::nets::{
    BpfFolder, Net, at, check_rights, connect, exchange, in_mounts, read_line, serve_tcp, serve_udp,
    udp_socket,
};

mod life;
mod odd;

const PORT: u16 = 8_080;
const NODE: [&str; 2] = ["10.244.0.1", "fd00:10:244::1"];
const PODS: [[&str; 2]; 3] = [
    ["10.244.0.11", "fd00:10:244::11"],
    ["10.244.0.12", "fd00:10:244::12"],
    ["10.244.0.13", "fd00:10:244::13"],
];
const NETWORKS: [&str; 2] = ["10.244.0.0/16", "fd00:10:244::/56"];
const LENGTHS: [u8; 2] = [32, 128];
const EXCHANGES: u64 = 20;

/// How pods reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// By the node, with a route to each device: CNI's plugin ptp, Calico.
    Routed,
    /// By the node, and devices are ports of a bridge.
    Bridged,
    /// By a bridge alone, which has nothing to do with the program: CNI's plugin bridge.
    Switched,
}

const LAYOUTS: [Layout; 2] = [Layout::Routed, Layout::Bridged];

struct World {
    _folder: BpfFolder,
    layout: Layout,
    node: Net,
    pods: Vec<Net>,
}

fn in_world<T: Send>(layout: Layout, test: impl FnOnce(&World) -> T + Send) -> T {
    in_mounts(|| test(&World::new(layout)))
}

impl World {
    fn new(layout: Layout) -> Self {
        let node = Net::new();
        if layout != Layout::Routed {
            // Its own would be that of a port, and pods would not know the next one.
            node.ip("link add cni0 address 02:00:00:00:00:01 type bridge\nlink set cni0 up");
            node.address("cni0", NODE);
        }
        let mut world = Self { _folder: BpfFolder::new(), layout, node, pods: Vec::new() };
        world.pods = (0..PODS.len()).map(|n| world.make_pod(&format!("veth{n}"), n)).collect();
        world
    }

    /// A pod with the addresses of number `n`.
    fn make_pod(&self, device: &str, n: usize) -> Net {
        let pod = Net::new();
        self.node.connect(device, &pod, "eth0");
        if self.layout == Layout::Switched {
            pod.address("eth0", PODS[n]);
        }
        let (mut at_node, mut at_pod) = (String::new(), String::new());
        for (family, length) in LENGTHS.into_iter().enumerate() {
            let (own, gateway) = (PODS[n][family], NODE[family]);
            let nodad = if family == 1 { " nodad" } else { "" };
            if self.layout == Layout::Routed {
                at_node += &format!("address add {gateway}/{length} dev {device}{nodad}\n");
                at_node += &format!("route replace {own}/{length} dev {device}\n");
            }
            if self.layout != Layout::Switched {
                at_pod += &format!("address add {own}/{length} dev eth0{nodad}\n");
                at_pod += &format!("route add {gateway}/{length} dev eth0\n");
            }
            at_pod += &format!("route add {} via {gateway}\n", ["default", "::/0"][family]);
        }
        if self.layout != Layout::Routed {
            at_node += &format!("link set {device} master cni0\n");
        }
        self.node.ip(&at_node);
        pod.ip(&at_pod);
        pod
    }

    fn open(&self) -> Pods {
        self.open_with(usual_sizes(false))
    }

    fn open_with(&self, sizes: Sizes) -> Pods {
        let patterns = [InterfacePattern::parse("veth*")];
        let pods = self.node.run(|| Pods::open_with(&patterns, Some(sizes), None, &mut Loader::default()));
        let mut pods = pods.unwrap();
        self.look(&mut pods);
        pods
    }

    /// Tells the level which interfaces there are.
    fn look(&self, pods: &mut Pods) {
        let local = self.node.run(|| LocalAddresses::now().unwrap());
        pods.set_interfaces(local.interfaces());
    }

    /// As the backend does it once flows between pods are not tracked.
    fn begin(&self, pods: &mut Pods) -> Outcome {
        self.node.run(|| {
            for (family, network) in Family::ALL.into_iter().zip(networks()) {
                pods.narrow(family, network).unwrap();
                pods.set_network(family, network).unwrap();
            }
            pods.maintain(Instant::now())
        })
    }

    fn start(&self) -> Pods {
        let mut pods = self.open();
        self.begin(&mut pods);
        assert_eq!(pods.devices.len(), self.pods.len(), "{:?}", pods.features());
        pods
    }

    fn serve(&self, n: usize) {
        serve(&self.pods[n], n);
    }

    /// A conversation of two pods; the endpoint sees the client's own address.
    fn talk(&self, from: usize, to: usize, family: usize, protocol: Protocol) {
        let to = at(PODS[to][family], PORT);
        self.pods[from].run(|| match protocol {
            Protocol::Udp => {
                let socket = udp_socket(to);
                for _ in 0..EXCHANGES {
                    assert_eq!(exchange(&socket, "0"), format!("pod {}\n", socket.local_addr().unwrap()));
                }
            }
            _ => {
                let (mut stream, line) = connect(to);
                assert_eq!(line, format!("pod {}", stream.local_addr().unwrap()));
                for _ in 0..EXCHANGES {
                    stream.write_all(b"ping\n").unwrap();
                    assert_eq!(read_line(&mut stream), "ping");
                }
            }
        });
    }
}

/// Servers of a pod with the addresses of number `n`.
fn serve(pod: &Net, n: usize) {
    for ip in PODS[n] {
        serve_tcp(pod, ip, PORT, "pod");
        serve_udp(pod, ip, PORT, "pod");
    }
}

fn networks() -> [Option<IpNet>; 2] {
    NETWORKS.map(|network| network.parse().ok())
}

fn counted(pods: &Pods, label: &str) -> u64 {
    pods.counters().iter().find(|decisions| decisions.label == label).unwrap().total
}

/// How many packets were handed over meanwhile.
fn handed_over(pods: &Pods, talk: impl FnOnce()) -> u64 {
    let before = counted(pods, "handed_over");
    talk();
    counted(pods, "handed_over") - before
}

#[test]
fn conversations_of_pods_are_handed_over() {
    for layout in LAYOUTS {
        in_world(layout, |world| {
            let pods = world.start();
            world.serve(1);
            for family in [0, 1] {
                for protocol in [Protocol::Tcp, Protocol::Udp] {
                    // The first packets tell where the pods are.
                    let count = handed_over(&pods, || world.talk(0, 1, family, protocol));
                    assert!(
                        count > EXCHANGES,
                        "{layout:?} {family} {protocol}: {count}: {:?}",
                        pods.features()
                    );
                }
            }
        });
    }
}

#[test]
fn each_packet_loses_a_hop() {
    for layout in LAYOUTS {
        in_world(layout, |world| {
            let pods = world.start();
            world.serve(1);
            for (family, field) in ["ip ttl", "ip6 hoplimit"].into_iter().enumerate() {
                let pod = &world.pods[1];
                let table = format!("{} hops", ["ip", "ip6"][family]);
                pod.command("nft", &format!("add table {table}"));
                pod.command(
                    "nft",
                    &format!("add chain {table} input {{ type filter hook input priority 0; }}"),
                );
                pod.command("nft", &format!("add rule {table} input udp dport {PORT} {field} != 63 drop"));
                let count = handed_over(&pods, || world.talk(0, 1, family, Protocol::Udp));
                assert!(count > EXCHANGES, "{layout:?}: {count}");
            }
        });
    }
}

/// Frames that a bridge leads to another pod.
#[test]
fn a_bridge_does_as_it_does() {
    in_world(Layout::Switched, |world| {
        let pods = world.start();
        world.serve(1);
        for family in [0, 1] {
            assert_eq!(handed_over(&pods, || world.talk(0, 1, family, Protocol::Tcp)), 0);
        }
    });
}

#[test]
fn without_a_network_nothing_is_handed_over() {
    in_world(Layout::Routed, |world| {
        let mut pods = world.start();
        world.serve(1);
        world.node.run(|| pods.set_network(Family::V4, None)).unwrap();
        assert_eq!(handed_over(&pods, || world.talk(0, 1, 0, Protocol::Tcp)), 0);
        // Of TCP, some packets that end a connection might come later.
        assert!(handed_over(&pods, || world.talk(0, 1, 1, Protocol::Udp)) > EXCHANGES);
        // Pods of other networks.
        world.node.run(|| pods.set_network(Family::V4, "10.245.0.0/16".parse().ok())).unwrap();
        assert_eq!(handed_over(&pods, || world.talk(0, 1, 0, Protocol::Udp)), 0);
    });
}

/// The node itself, and what is behind it, has an address that no device of a pod leads to.
#[test]
fn other_destinations_are_left() {
    in_world(Layout::Routed, |world| {
        let pods = world.start();
        serve_udp(&world.node, NODE[0], PORT, "node");
        let to = at(NODE[0], PORT);
        let count = handed_over(&pods, || {
            world.pods[0].run(|| assert!(exchange(&udp_socket(to), "0").starts_with("node 10.244.0.11:")));
        });
        assert_eq!(count, 0);
        assert!(counted(&pods, "left_destination") > 0);
    });
}
