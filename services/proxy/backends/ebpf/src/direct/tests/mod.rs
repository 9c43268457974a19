//! The programs with packets between network namespaces: a client, two nodes with a pod each, and a switch.
//!
//! ```text
//!                          switch: a bridge
//!              ┌──────────────────┼──────────────────┐
//!       client 192.0.2.10   node 0 192.0.2.1    node 1 192.0.2.2
//!                                 │                  │
//!                           pod 10.244.0.5     pod 10.244.1.5
//! ```
//!
//! On each node another server has the node port for itself: it answers what the programs leave to the kernel.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use keelson_client::ServiceName;
use keelson_proxy::{
    addresses::{InterfacePattern, Match},
    backend::{Access, Backend, Driver as _, Outcome},
    model::{Endpoint, PortName, Protocol, ServicePort},
    options::{DirectReturnHook, EbpfOptions},
};
use keelson_proxy_nft::Nft;

use super::*;
use crate::{
    elements::Contents,
    kernel::{find_pins, remove_pins},
    layout::{MapName, PODS as KNOWN_PODS, REPLIES, SOURCE_RANGES},
    nets::{
        ANSWER, BpfFolder, Net, at, connect, exchange, in_mounts, read_line, run_with, serve_tcp, serve_udp,
        udp_socket,
    },
    pods,
    testing::{options, service_port},
};

mod flows;
mod hand_over;
mod life;
mod limits;
mod measure;
mod odd;
mod traffic;

const NODE_PORT: u16 = 30_080;
const PORT: u16 = 8_080;
/// Served by both nodes, routed to the first one.
const EXTERNAL: [&str; 2] = ["203.0.113.7", "2001:db8:7::7"];
const CLIENT: [&str; 2] = ["192.0.2.10", "2001:db8::10"];
const NODES: [[&str; 2]; 2] = [["192.0.2.1", "2001:db8::1"], ["192.0.2.2", "2001:db8::2"]];
const PODS: [[&str; 2]; 2] = [["10.244.0.5", "fd00:10:244::5"], ["10.244.1.5", "fd00:10:244:1::5"]];
const GATEWAYS: [[&str; 2]; 2] = [["10.244.0.1", "fd00:10:244::1"], ["10.244.1.1", "fd00:10:244:1::1"]];
const POD_NETWORKS: [[&str; 2]; 2] =
    [["10.244.0.0/24", "fd00:10:244::/64"], ["10.244.1.0/24", "fd00:10:244:1::/64"]];

struct World {
    _folder: BpfFolder,
    switch: Net,
    client: Net,
    nodes: [Net; 2],
    pods: [Net; 2],
}

/// Runs a test in a new world. Needs root.
fn in_world<T: Send>(test: impl FnOnce(&World) -> T + Send) -> T {
    in_mounts(|| test(&World::new()))
}

impl World {
    fn new() -> Self {
        let world = Self {
            _folder: BpfFolder::new(),
            switch: Net::new(),
            client: Net::new(),
            nodes: [Net::new(), Net::new()],
            pods: [Net::new(), Net::new()],
        };
        let Self { switch, client, nodes, pods, .. } = &world;
        for (port, net) in [("client", client), ("node0", &nodes[0]), ("node1", &nodes[1])] {
            switch.connect(port, net, "eth0");
        }
        switch.ip("link add br0 type bridge\nlink set br0 up
             link set client master br0\nlink set node0 master br0\nlink set node1 master br0");
        client.address("eth0", CLIENT);
        client.route(["203.0.113.0/24", "2001:db8:7::/64"], NODES[0]);
        for n in [0, 1] {
            nodes[n].address("eth0", NODES[n]);
            nodes[n].route(POD_NETWORKS[1 - n], NODES[1 - n]);
            nodes[n].connect("pod", &pods[n], "eth0");
            nodes[n].address("pod", GATEWAYS[n]);
            pods[n].address("eth0", PODS[n]);
            pods[n].route(["default", "::/0"], GATEWAYS[n]);
        }
        world
    }

    /// Devices of this kind leave checksums to who needs them, and XDP does: real ones have computed them. And they take what
    /// XDP sends only where XDP receives, too: programs without devices leave everything as it is.
    fn prepare_for_xdp(&self) -> aya::Ebpf {
        self.client.command("ethtool", "-K eth0 tx off");
        self.switch.run(|| {
            let object = crate::kernel::programs::direct_object().unwrap();
            let mut loaded =
                Loader::default().load(object, &layout::DIRECT_MAPS, None, &small_sizes()).unwrap();
            let program: &mut aya::programs::Xdp =
                loaded.program_mut("keelson_dr_xdp").unwrap().try_into().unwrap();
            program.load().unwrap();
            for port in ["client", "node0", "node1"] {
                program.attach(port, aya::programs::xdp::XdpMode::Driver).unwrap();
            }
            loaded
        })
    }
}

/// The programs at both nodes.
struct Cluster<'a> {
    world: &'a World,
    hook: DirectReturnHook,
    sizes: Sizes,
    /// Maps with pod devices.
    shares: bool,
    levels: [Direct; 2],
    _switch: Option<aya::Ebpf>,
}

fn endpoint(at: SocketAddr) -> Endpoint {
    Endpoint { ip: at.ip(), port: at.port() }
}

fn small_sizes() -> Sizes {
    let mut sizes = usual_sizes(false);
    sizes.extend([(layout::FLOWS.name, 4_096), (REPLIES.name, 4_096), ("slots", 1_024)]);
    sizes
}

impl<'a> Cluster<'a> {
    fn new(world: &'a World, hook: DirectReturnHook, sizes: Sizes) -> Self {
        let switch = (hook == DirectReturnHook::Xdp).then(|| world.prepare_for_xdp());
        let levels = [0, 1].map(|n| open(world, n, hook, &sizes, false));
        Self { world, hook, sizes, shares: false, levels, _switch: switch }
    }

    /// With pod devices at the nodes.
    fn sharing(world: &'a World) -> Self {
        let mut sizes = small_sizes();
        sizes.insert(KNOWN_PODS.name, KNOWN_PODS.max_entries);
        let hook = DirectReturnHook::Tc;
        let levels = [0, 1].map(|n| open(world, n, hook, &sizes, true));
        Self { world, hook, sizes, shares: true, levels, _switch: None }
    }

    /// As a process that starts again.
    fn restart(&mut self, n: usize) {
        self.levels[n] = open(self.world, n, self.hook, &self.sizes, self.shares);
    }

    /// Sets the service port on both nodes, with the endpoints of these pods.
    fn serve(&mut self, protocol: Protocol, family: usize, pods: &[usize]) {
        for n in [0, 1] {
            self.serve_on(n, service(protocol, family, pods, n));
        }
    }

    fn serve_on(&mut self, n: usize, port: ServicePort) {
        let level = &mut self.levels[n];
        let family = Family::of(port.cluster_ip);
        level.sockets.plan.set(family, &port.name.service.clone(), vec![port]);
        self.sync(n);
    }

    fn sync(&mut self, n: usize) -> Vec<Outcome> {
        let level = &mut self.levels[n];
        let sync = || Family::ALL.map(|family| level.sockets.sync(family, Instant::now()).unwrap());
        self.world.nodes[n].run(sync).to_vec()
    }

    /// What the programs of a node have counted.
    fn counted(&self, n: usize) -> BTreeMap<&'static str, u64> {
        let counters = self.levels[n].sockets.kernel().unwrap().counters().unwrap();
        counters.into_iter().map(|decisions| (decisions.label, decisions.total)).collect()
    }
}

fn open(world: &World, n: usize, hook: DirectReturnHook, sizes: &Sizes, shares: bool) -> Direct {
    let nodes = NODES.concat().into_iter().map(|ip| IpNet::from(ip.parse::<IpAddr>().unwrap())).collect();
    world.nodes[n].run(|| {
        let pods = || Shared::with(pods::maps_folder(&pods::usual_sizes(true)).unwrap());
        let mut direct = open_with_nodes(hook, sizes, nodes, shares.then(pods)).unwrap();
        let index = nix::net::if_::if_nametoindex("eth0").unwrap();
        let index = usize::try_from(index).unwrap();
        direct.set_interfaces(&[Interface { name: "eth0".into(), index }]);
        for family in Family::ALL {
            let node = NodeConfig {
                family,
                masquerade_all: false,
                mark: 0x4000,
                detector: None,
                service_cidrs: Vec::new(),
                node_ips: Vec::new(),
                node_ports: Match::AllLocal,
                untracked_pods: false,
            };
            direct.set_node(&node, &[NODES[n][family as usize].parse().unwrap()]);
        }
        direct
    })
}

fn open_with_nodes(
    hook: DirectReturnHook,
    sizes: &Sizes,
    nodes: Vec<IpNet>,
    shared: Option<Shared>,
) -> Result<Direct, KernelError> {
    let own = DirectReturnOptions { devices: vec![InterfacePattern::parse("eth*")], hook, nodes };
    let mut all = options(&["10.244.0.0/16", "fd00:10:244::/56"]);
    all.ebpf = EbpfOptions { direct_return: Some(own.clone()), ..EbpfOptions::default() };
    Direct::open_with(&own, &all, Some(sizes.clone()), shared, [true, true], &mut Loader::default())
}

/// The service port as node `n` knows it.
fn service(protocol: Protocol, family: usize, pods: &[usize], n: usize) -> ServicePort {
    let service = ServiceName::new("default", "web");
    let of = |pod: &usize| endpoint(at(PODS[*pod][family], PORT));
    let cluster: Vec<Endpoint> = pods.iter().map(of).collect();
    let here: Vec<Endpoint> = pods.iter().filter(|pod| **pod == n).map(of).collect();
    let serving = if protocol == Protocol::Udp { cluster.clone() } else { Vec::new() };
    let cluster_ip = ["10.96.0.1", "fd00:10:96::1"][family].parse().unwrap();
    ServicePort {
        name: PortName { service: service.clone(), port: "web".into(), protocol },
        external_ips: vec![EXTERNAL[family].parse().unwrap()],
        node_port: NODE_PORT,
        has_any: !cluster.is_empty(),
        cluster,
        local: here.clone(),
        on_node: here,
        serving,
        ..service_port(&service, "web", cluster_ip, 80)
    }
}

/// The tables of nftables on the first node, as they are beside the programs in the backend.
fn tables(world: &World, protocol: Protocol, pods: &[usize]) -> Box<dyn Backend> {
    world.nodes[0].run(|| {
        let mut nft = Nft.open(&options(&["10.244.0.0/16"]), Access::Program).unwrap();
        nft.set_addresses(&[NODES[0][0].parse().unwrap()]);
        nft.set_node(NodeConfig {
            family: Family::V4,
            masquerade_all: false,
            mark: 0x4000,
            detector: Some(Detector::Cidr("10.244.0.0/16".parse().unwrap())),
            service_cidrs: Vec::new(),
            node_ips: vec![NODES[0][0].parse().unwrap()],
            node_ports: Match::AllLocal,
            untracked_pods: false,
        });
        let port = service(protocol, 0, pods, 0);
        nft.set_service(Family::V4, &port.name.service.clone(), vec![port]);
        nft.sync(Family::V4, Instant::now()).unwrap();
        nft
    })
}

/// Servers of both pods and, for what the programs leave, of both nodes.
fn serve_all(world: &World, protocol: Protocol, family: usize) {
    let serve = if protocol == Protocol::Udp { serve_udp } else { serve_tcp };
    for (n, names) in [("pod0", "node0"), ("pod1", "node1")].into_iter().enumerate() {
        serve(&world.pods[n], PODS[n][family], PORT, names.0);
        serve(&world.nodes[n], NODES[n][family], NODE_PORT, names.1);
    }
}

/// Who answers the client, and whether it has seen the client's own address.
fn ask(world: &World, protocol: Protocol, to: SocketAddr) -> (String, bool) {
    let (line, own) = world.client.run(|| match protocol {
        Protocol::Udp => {
            let socket = udp_socket(to);
            (exchange(&socket, "0").trim_end().to_owned(), socket.local_addr().unwrap())
        }
        _ => {
            let (stream, line) = connect(to);
            assert_eq!(stream.peer_addr().unwrap(), to);
            (line, stream.local_addr().unwrap())
        }
    });
    let (name, seen) = line.split_once(' ').unwrap();
    (name.to_owned(), seen == own.to_string())
}
