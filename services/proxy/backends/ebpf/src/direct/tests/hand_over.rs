//! With pod devices: packets of clients go to the device of the pod, and its replies to that of the client, past the network of
//! the node.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use keelson_proxy::addresses::LocalAddresses;

use super::*;
use crate::pods::Pods;

const NETWORKS: [&str; 2] = ["10.244.0.0/16", "fd00:10:244::/56"];
const EXCHANGES: u64 = 20;

fn open_pods(cluster: &Cluster<'_>) -> Pods {
    let sizes = &cluster.sizes;
    cluster.world.nodes[0].run(|| {
        let shared = Shared::with(maps_folder(sizes).unwrap());
        let patterns = [InterfacePattern::parse("pod")];
        let opened = Pods::open(&patterns, true, Some(shared), &mut Loader::default()).unwrap();
        let mut pods = opened.unwrap();
        pods.set_interfaces(LocalAddresses::now().unwrap().interfaces());
        pods
    })
}

/// As the backend does it once flows between pods are not tracked.
fn begin(world: &World, pods: &mut Pods) {
    world.nodes[0].run(|| {
        for (family, network) in Family::ALL.into_iter().zip(NETWORKS) {
            pods.narrow(family, network.parse().ok()).unwrap();
            pods.set_network(family, network.parse().ok()).unwrap();
        }
        pods.maintain(Instant::now());
    });
}

/// Direct return and pod devices of the first node, with a service port of one endpoint there.
fn start<'a>(world: &'a World, protocol: Protocol, family: usize) -> (Cluster<'a>, Pods) {
    let mut cluster = Cluster::sharing(world);
    // Both have been loaded with maps of their own before either has pinned some.
    let mut pods = open_pods(&cluster);
    serve_all(world, protocol, family);
    cluster.serve(protocol, family, &[0]);
    begin(world, &mut pods);
    (cluster, pods)
}

/// The pod sends something all the time, which tells where it is.
struct Awake {
    ends: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Awake {
    fn new(world: &World, family: usize) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let end = ends.clone();
        let socket = world.pods[0].run(|| udp_socket(at(GATEWAYS[0][family], 9)));
        socket.send(b"0").unwrap();
        let thread = thread::spawn(move || {
            while !end.load(Ordering::Relaxed) {
                // Without a server there, some are refused.
                let _ = socket.send(b"0");
                thread::sleep(Duration::from_millis(50));
            }
        });
        Self { ends, thread: Some(thread) }
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

/// The rules of the node drop all that passes them on its way through the node.
fn fence(world: &World) {
    for command in [
        "add table inet fence",
        "add chain inet fence forward { type filter hook forward priority 0; policy drop; }",
    ] {
        world.nodes[0].command("nft", command);
    }
}

fn ping(stream: &mut TcpStream) {
    stream.write_all(b"ping\n").unwrap();
    assert_eq!(read_line(stream), "ping");
}

/// A conversation with the endpoint, which sees the client's own address.
fn talk(world: &World, protocol: Protocol, to: SocketAddr) {
    world.client.run(|| match protocol {
        Protocol::Udp => {
            let socket = udp_socket(to);
            for _ in 0..EXCHANGES {
                assert_eq!(exchange(&socket, "0"), format!("pod0 {}\n", socket.local_addr().unwrap()));
            }
        }
        _ => {
            let (mut stream, line) = connect(to);
            assert_eq!(line, format!("pod0 {}", stream.local_addr().unwrap()));
            (0..EXCHANGES).for_each(|_| ping(&mut stream));
        }
    });
}

fn counted(pods: &Pods, label: &str) -> u64 {
    pods.counters().iter().find(|decisions| decisions.label == label).unwrap().total
}

/// Packets to the pod and to clients that were handed over.
fn counts(cluster: &Cluster<'_>, pods: &Pods) -> [u64; 2] {
    [cluster.counted(0)["packet_handed_over"], counted(pods, "handed_to_client")]
}

fn state(cluster: &Cluster<'_>, pods: &Pods) -> String {
    format!("{:?} {:?}", cluster.counted(0), pods.features())
}

#[test]
fn conversations_skip_the_network_of_the_node() {
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        for family in [0, 1] {
            in_world(|world| {
                let (cluster, pods) = start(world, protocol, family);
                fence(world);
                let _awake = Awake::new(world, family);
                for to in [at(NODES[0][family], NODE_PORT), at(EXTERNAL[family], 80)] {
                    talk(world, protocol, to);
                }
                let counts = counts(&cluster, &pods);
                assert!(counts.iter().all(|count| *count >= 2 * EXCHANGES), "{}", state(&cluster, &pods));
            });
        }
    }
}

/// Usually direct return has its maps first.
#[test]
fn pod_devices_may_have_their_maps_first() {
    in_world(|world| {
        let mut cluster = Cluster::sharing(world);
        let mut pods = open_pods(&cluster);
        begin(world, &mut pods);
        serve_all(world, Protocol::Tcp, 0);
        cluster.serve(Protocol::Tcp, 0, &[0]);
        fence(world);
        let _awake = Awake::new(world, 0);
        talk(world, Protocol::Tcp, at(NODES[0][0], NODE_PORT));
        let counts = counts(&cluster, &pods);
        assert!(counts.iter().all(|count| *count >= EXCHANGES), "{}", state(&cluster, &pods));
    });
}

#[test]
fn each_packet_loses_a_hop_in_both_directions() {
    for (family, field) in ["ip ttl", "ip6 hoplimit"].into_iter().enumerate() {
        in_world(|world| {
            let (_cluster, _pods) = start(world, Protocol::Udp, family);
            fence(world);
            for (net, port) in [(&world.pods[0], "dport 8080"), (&world.client, "sport 30080")] {
                net.command("nft", "add table inet hops");
                net.command("nft", "add chain inet hops input { type filter hook input priority 0; }");
                net.command("nft", &format!("add rule inet hops input udp {port} {field} != 63 drop"));
            }
            let _awake = Awake::new(world, family);
            talk(world, Protocol::Udp, at(NODES[0][family], NODE_PORT));
        });
    }
}

/// The kernel joins segments in both directions, and the way to the client takes smaller ones than the pod would send.
#[test]
fn large_contents_arrive_whole() {
    for family in [0, 1] {
        in_world(|world| {
            let (cluster, pods) = start(world, Protocol::Tcp, family);
            world.nodes[0].ip(&format!("route add {} dev eth0 mtu 1400", CLIENT[family]));
            fence(world);
            let _awake = Awake::new(world, family);
            world.client.run(|| {
                let (mut stream, _) = connect(at(NODES[0][family], NODE_PORT));
                let sent: Vec<u8> =
                    (0..4 << 20).map(|n: u32| n.to_be_bytes()[2] ^ n.to_be_bytes()[3]).collect();
                let mut output = stream.try_clone().unwrap();
                let received = thread::scope(|scope| {
                    scope.spawn(|| output.write_all(&sent).unwrap());
                    let mut received = vec![0; sent.len()];
                    stream.read_exact(&mut received).unwrap();
                    received
                });
                assert!(sent == received, "contents differ");
            });
            assert!(counts(&cluster, &pods).iter().all(|count| *count > 50), "{}", state(&cluster, &pods));
        });
    }
}

/// The node would take later ones for something new: conntrack puts datagrams together, and has not seen the flow begin.
#[test]
fn datagrams_in_fragments_arrive_whole() {
    for family in [0, 1] {
        in_world(|world| {
            let (_cluster, pods) = start(world, Protocol::Udp, family);
            fence(world);
            let _awake = Awake::new(world, family);
            world.client.run(|| {
                let socket = udp_socket(at(NODES[0][family], NODE_PORT));
                for length in [2_000, 20_000, 3] {
                    let answer = exchange(&socket, &length.to_string());
                    assert!(answer.len() > length && answer.starts_with("pod0 "), "{} bytes", answer.len());
                }
            });
            assert!(counted(&pods, "handed_to_client") > 15, "{:?}", pods.features());
        });
    }
}

/// Network plugins masquerade what begins at a pod and leaves the node. Part of a flow that the network of the node has not seen
/// begin must not look like that.
#[test]
fn a_forgotten_neighbour_breaks_no_connection() {
    for family in [0, 1] {
        in_world(|world| {
            let (cluster, pods) = start(world, Protocol::Tcp, family);
            let (word, network) = (["ip", "ip6"][family], NETWORKS[family]);
            for command in [
                "add table inet plugin",
                "add chain inet plugin postrouting { type nat hook postrouting priority 100; }",
                &format!("add rule inet plugin postrouting {word} saddr {network} oifname eth0 masquerade"),
            ] {
                world.nodes[0].command("nft", command);
            }
            let _awake = Awake::new(world, family);
            let (mut stream, _) = world.client.run(|| connect(at(NODES[0][family], NODE_PORT)));
            for pause in [400, 1_500, 400, 600] {
                ping(&mut stream);
                world.nodes[0].ip("neigh flush dev pod");
                thread::sleep(Duration::from_millis(pause));
                ping(&mut stream);
            }
            assert!(counts(&cluster, &pods).iter().all(|count| *count > 5), "{}", state(&cluster, &pods));
        });
    }
}

/// The network of the node has seen such a flow begin, and sees all of it. By its replies the pod is known to the next one.
#[test]
fn a_connection_to_an_idle_pod_stays_in_the_network_of_the_node() {
    in_world(|world| {
        let (cluster, pods) = start(world, Protocol::Tcp, 0);
        let to = at(NODES[0][0], NODE_PORT);
        let (mut first, _) = world.client.run(|| connect(to));
        (0..EXCHANGES).for_each(|_| ping(&mut first));
        assert_eq!(counts(&cluster, &pods), [0, 0], "{}", state(&cluster, &pods));
        // A slow machine may let more than a second pass between a reply and the next client.
        let is_handed_over = (0..20).any(|_| {
            ping(&mut first);
            talk(world, Protocol::Tcp, to);
            counts(&cluster, &pods).iter().all(|count| *count >= EXCHANGES)
        });
        assert!(is_handed_over, "{}", state(&cluster, &pods));
        assert!(cluster.counted(0)["packet_here"] > EXCHANGES);
    });
}

/// One endpoint has replies for both. nftables, which is left the second flow, knows nothing of the first one.
#[test]
fn one_port_of_a_client_asks_two_addresses_of_services() {
    let addresses = [at(NODES[0][0], NODE_PORT), at(EXTERNAL[0], 80)];
    for protocol in [Protocol::Udp, Protocol::Tcp] {
        in_world(|world| {
            let (mut cluster, pods) = start(world, protocol, 0);
            let port = ServicePort { external_local: true, ..service(protocol, 0, &[0], 0) };
            cluster.serve_on(0, port.clone());
            let mut nft = tables(world, protocol, &[0]);
            nft.set_service(Family::V4, &port.name.service.clone(), vec![port]);
            world.nodes[0].run(|| nft.sync(Family::V4, Instant::now())).unwrap();
            let _awake = Awake::new(world, 0);
            if protocol == Protocol::Udp {
                let asking = world.client.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
                asking.set_read_timeout(Some(ANSWER)).unwrap();
                for (round, to) in addresses.repeat(3).into_iter().enumerate() {
                    asking.send_to(b"0", to).unwrap();
                    let mut buffer = [0; 64];
                    let (length, from) = asking.recv_from(&mut buffer).unwrap();
                    assert_eq!(from, to, "{round}: {}", state(&cluster, &pods));
                    assert!(buffer[..length].starts_with(b"pod0 "));
                }
            } else {
                let mut streams = world.client.run(|| addresses.map(odd::connect_from_one_port));
                for stream in &mut streams {
                    assert!(read_line(stream).starts_with("pod0 "), "{}", state(&cluster, &pods));
                }
                for _ in 0..3 {
                    streams.iter_mut().for_each(ping);
                }
            }
            assert!(counts(&cluster, &pods)[0] > 0, "{}", state(&cluster, &pods));
            assert!(cluster.counted(0)["left_no_endpoint"] > 0, "{}", state(&cluster, &pods));
        });
    }
}

/// A connection that was handed over goes on in the network of the node.
#[test]
fn it_ends_with_that_between_pods() {
    in_world(|world| {
        let (cluster, mut pods) = start(world, Protocol::Tcp, 0);
        let _awake = Awake::new(world, 0);
        let (mut stream, _) = world.client.run(|| connect(at(NODES[0][0], NODE_PORT)));
        (0..EXCHANGES).for_each(|_| ping(&mut stream));
        let before = counts(&cluster, &pods);
        assert!(before[0] >= EXCHANGES, "{}", state(&cluster, &pods));
        world.nodes[0].run(|| pods.set_network(Family::V4, None)).unwrap();
        (0..EXCHANGES).for_each(|_| ping(&mut stream));
        assert_eq!(counts(&cluster, &pods), before);
    });
}

#[test]
fn a_restart_of_both_keeps_connections() {
    in_world(|world| {
        let (mut cluster, mut pods) = start(world, Protocol::Tcp, 0);
        fence(world);
        let _awake = Awake::new(world, 0);
        let (mut stream, _) = world.client.run(|| connect(at(NODES[0][0], NODE_PORT)));
        ping(&mut stream);
        cluster.restart(0);
        let port = service(Protocol::Tcp, 0, &[0], 0);
        cluster.levels[0].sockets.plan.set(Family::V4, &port.name.service.clone(), vec![port]);
        for outcome in cluster.sync(0) {
            assert!(outcome.full && outcome.is_nothing(), "{outcome:?}");
        }
        pods = {
            drop(pods);
            open_pods(&cluster)
        };
        begin(world, &mut pods);
        assert!(!world.nodes[0].run(|| pods.begin_check()).unwrap(), "{:?}", pods.features());
        ping(&mut stream);
    });
}

/// Where the maps of one are made anew, those of the other are used, or are taken over.
#[test]
fn removed_maps_are_shared_again() {
    for prefixes in [&["pods-maps-"][..], &["direct-maps-"], &["pods-maps-", "direct-maps-"]] {
        in_world(|world| {
            let (mut cluster, mut pods) = start(world, Protocol::Tcp, 0);
            let pins = world.nodes[0].run(|| find_pins().unwrap());
            for folder in
                pins.iter().filter(|pin| prefixes.iter().any(|prefix| pin.to_string_lossy().contains(prefix)))
            {
                fs::remove_dir_all(folder).unwrap();
            }
            // As the proxy does it with its checks.
            for _ in 0..2 {
                let port = service(Protocol::Tcp, 0, &[0], 0);
                cluster.restart(0);
                cluster.levels[0].sockets.plan.set(Family::V4, &port.name.service.clone(), vec![port]);
                cluster.sync(0);
                pods = {
                    drop(pods);
                    open_pods(&cluster)
                };
                begin(world, &mut pods);
                world.nodes[0].run(|| pods.check()).unwrap();
            }
            fence(world);
            let _awake = Awake::new(world, 0);
            talk(world, Protocol::Tcp, at(NODES[0][0], NODE_PORT));
            assert!(
                counts(&cluster, &pods).iter().all(|count| *count >= EXCHANGES),
                "{prefixes:?}: {}",
                state(&cluster, &pods)
            );
        });
    }
}

/// The check of the side whose pin it is finds out, and loads its programs with the map of the other side.
#[test]
fn a_removed_pin_is_shared_again() {
    for (prefix, pin) in [("direct-maps-", "pods"), ("pods-maps-", "direct_replies")] {
        in_world(|world| {
            let (mut cluster, mut pods) = start(world, Protocol::Tcp, 0);
            let pins = world.nodes[0].run(|| find_pins().unwrap());
            let folder = pins.iter().find(|folder| folder.to_string_lossy().contains(prefix)).unwrap();
            fs::remove_file(folder.join(pin)).unwrap();
            match prefix {
                "direct-maps-" => drop(life::check(&mut cluster, 0)),
                _ => world.nodes[0].run(|| {
                    assert!(pods.begin_check().unwrap(), "something is missing");
                    pods.check().unwrap();
                    assert!(!pods.begin_check().unwrap(), "{:?}", pods.features());
                }),
            }
            assert!(folder.join(pin).exists());
            fence(world);
            let _awake = Awake::new(world, 0);
            talk(world, Protocol::Tcp, at(NODES[0][0], NODE_PORT));
        });
    }
}
