//! Connections and datagrams of the client.

use super::*;

const HOOKS: [DirectReturnHook; 2] = [DirectReturnHook::Tc, DirectReturnHook::Xdp];

/// Both hooks, protocols and families; node ports and external addresses; endpoints of this node and of the other one.
fn check(hook: DirectReturnHook, protocol: Protocol) {
    in_world(|world| {
        let mut cluster = Cluster::new(world, hook, small_sizes());
        for family in [0, 1] {
            serve_all(world, protocol, family);
            let addresses = [at(NODES[0][family], NODE_PORT), at(EXTERNAL[family], 80)];
            assert_eq!(ask(world, protocol, addresses[0]), ("node0".into(), true), "nothing is attached");
            for (pod, name) in [(0, "pod0"), (1, "pod1")] {
                cluster.serve(protocol, family, &[pod]);
                let before = [0, 1].map(|n| cluster.counted(n));
                for to in addresses {
                    for _ in 0..3 {
                        let answer = ask(world, protocol, to);
                        assert_eq!(
                            answer,
                            (name.into(), true),
                            "{hook:?} {protocol:?} {to}: {:?}",
                            cluster.counted(0)
                        );
                    }
                }
                let after = [0, 1].map(|n| cluster.counted(n));
                let more = |n: usize, what: &str| after[n][what] - before[n][what];
                let is_here = u64::from(pod == 0);
                assert_eq!((more(0, "flow_here"), more(0, "flow_remote")), (6 * is_here, 6 - 6 * is_here));
                assert!(more(pod, "reply") >= 6, "{after:?}");
                if protocol == Protocol::Udp {
                    // Of TCP, some may still end connections to the former endpoint.
                    assert_eq!(more(1 - pod, "reply"), 0, "replies of the other node do not come back here");
                }
                assert_eq!(more(1, "notice_taken") >= 6, pod == 1);
                // XDP leaves the first one to the kernel, which finds out the address of the other node.
                assert!(more(0, "packet_routed") <= u64::from(hook == DirectReturnHook::Xdp), "{after:?}");
            }
            cluster.serve(protocol, family, &[]);
            assert_eq!(ask(world, protocol, addresses[0]), ("node0".into(), true), "no endpoint");
        }
    });
}

#[test]
fn tcp_by_tc() {
    check(DirectReturnHook::Tc, Protocol::Tcp);
}

#[test]
fn udp_by_tc() {
    check(DirectReturnHook::Tc, Protocol::Udp);
}

#[test]
fn tcp_by_xdp() {
    check(DirectReturnHook::Xdp, Protocol::Tcp);
}

#[test]
fn udp_by_xdp() {
    check(DirectReturnHook::Xdp, Protocol::Udp);
}

/// Two endpoints are both chosen, and a flow stays with one.
#[test]
fn a_flow_stays_with_its_endpoint_while_it_serves() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        serve_all(world, Protocol::Udp, 0);
        cluster.serve(Protocol::Udp, 0, &[0, 1]);
        let to = at(NODES[0][0], NODE_PORT);
        let name = |answer: &str| answer.split(' ').next().unwrap().to_owned();
        let sockets: Vec<UdpSocket> = world.client.run(|| (0..20).map(|_| udp_socket(to)).collect());
        let first: Vec<String> = sockets.iter().map(|socket| name(&exchange(socket, "0"))).collect();
        assert!(["pod0", "pod1"].iter().all(|pod| first.iter().any(|name| name == pod)), "{first:?}");
        let again: Vec<String> = sockets.iter().map(|socket| name(&exchange(socket, "0"))).collect();
        assert_eq!(again, first);
        for pod in [0, 1] {
            cluster.serve(Protocol::Udp, 0, &[pod]);
            let now: Vec<String> = sockets.iter().map(|socket| name(&exchange(socket, "0"))).collect();
            assert!(now.iter().all(|name| *name == format!("pod{pod}")), "{now:?}");
        }
        // Without an endpoint, packets are left.
        cluster.serve(Protocol::Udp, 0, &[]);
        assert_eq!(name(&exchange(&sockets[0], "0")), "node0");
    });
}

/// Segments that the kernel has joined, windows, and a megabyte there and back.
#[test]
fn data_arrives_as_it_was_sent() {
    for hook in HOOKS {
        in_world(|world| {
            let mut cluster = Cluster::new(world, hook, small_sizes());
            for (family, pod) in [(0, 1), (1, 1), (0, 0)] {
                serve_tcp(&world.pods[pod], PODS[pod][family], PORT, "pod");
                cluster.serve(Protocol::Tcp, family, &[pod]);
                let data: Vec<u8> = (0..1_000_000_u32).flat_map(u32::to_le_bytes).take(1_000_000).collect();
                let back = world.client.run(|| {
                    let (mut stream, _) = connect(at(NODES[0][family], NODE_PORT));
                    let mut writer = stream.try_clone().unwrap();
                    let sent = data.clone();
                    thread::spawn(move || {
                        writer.write_all(&sent).unwrap();
                        writer.shutdown(std::net::Shutdown::Write).unwrap();
                    });
                    let mut back = Vec::new();
                    stream.read_to_end(&mut back).unwrap();
                    back
                });
                assert!(back == data, "{hook:?} {family} {pod}: {} bytes", back.len());
            }
        });
    }
}

/// Replies that do not fit into one packet: later fragments have no ports.
#[test]
fn fragments_of_replies_show_the_service() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        for (family, pod) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            serve_udp(&world.pods[pod], PODS[pod][family], PORT, "pod");
            cluster.serve(Protocol::Udp, family, &[pod]);
            let answer = world.client.run(|| exchange(&udp_socket(at(NODES[0][family], NODE_PORT)), "8000"));
            assert!(answer.starts_with("pod ") && answer.len() > 8_000, "{} bytes", answer.len());
            if (family, pod) == (1, 1) {
                break;
            }
        }
    });
}

/// A process of the node as an endpoint: nothing is routed there.
#[test]
fn an_endpoint_in_the_network_of_its_node() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        for (n, name) in [(0, "host0"), (1, "host1")] {
            serve_tcp(&world.nodes[n], NODES[n][0], PORT, name);
            for node in [0, 1] {
                let of = endpoint(at(NODES[n][0], PORT));
                let on_node = if node == n { vec![of] } else { Vec::new() };
                let port =
                    ServicePort { cluster: vec![of], on_node, ..service(Protocol::Tcp, 0, &[n], node) };
                cluster.serve_on(node, port);
            }
            assert_eq!(ask(world, Protocol::Tcp, at(NODES[0][0], NODE_PORT)), (name.into(), true));
        }
    });
}

/// The load-balancer address of a Service with these source ranges, and the endpoint of a pod.
fn serve_with_ranges(cluster: &mut Cluster<'_>, protocol: Protocol, pod: usize, ranges: &[&str]) {
    for (family, address) in EXTERNAL.iter().enumerate() {
        for n in [0, 1] {
            let port = service(protocol, family, &[pod], n);
            let of_family = |range: &IpNet| Family::of(range.addr()) as usize == family;
            let port = ServicePort {
                external_ips: Vec::new(),
                load_balancer_ips: vec![address.parse().unwrap()],
                source_ranges: ranges.iter().map(|range| range.parse().unwrap()).filter(of_family).collect(),
                ..port
            };
            cluster.serve_on(n, port);
        }
    }
}

/// Other clients are left, at the load-balancer address alone. A connection continues when its client is not admitted any more,
/// as one that conntrack knows.
#[test]
fn case_40_clients_in_the_source_ranges_are_served() {
    const ADMITTED: [&str; 4] = ["198.51.100.0/24", "192.0.2.8/29", "2001:db8::/120", "2001:db8:9::/48"];
    const OTHERS: [&str; 4] = ["198.51.100.0/24", "192.0.2.12/30", "2001:db8::20/123", "2001:db8:9::/48"];
    for (hook, pod) in [(DirectReturnHook::Tc, 0), (DirectReturnHook::Tc, 1), (DirectReturnHook::Xdp, 1)] {
        in_world(|world| {
            let mut cluster = Cluster::new(world, hook, small_sizes());
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                for family in [0, 1] {
                    serve_all(world, protocol, family);
                    serve_with_ranges(&mut cluster, protocol, pod, &ADMITTED);
                    let (to, name) = (at(EXTERNAL[family], 80), ["pod0", "pod1"][pod]);
                    for _ in 0..3 {
                        assert_eq!(ask(world, protocol, to), (name.into(), true), "{:?}", cluster.counted(0));
                    }
                    let left = cluster.counted(0)["left_ranges"];
                    let (mut stream, socket) = world.client.run(|| {
                        let stream = (protocol == Protocol::Tcp).then(|| connect(to).0);
                        (stream, (protocol == Protocol::Udp).then(|| udp_socket(to)))
                    });
                    serve_with_ranges(&mut cluster, protocol, pod, &OTHERS);
                    if let Some(stream) = &mut stream {
                        stream.write_all(b"more\n").unwrap();
                        assert_eq!(read_line(stream), "more");
                        let again =
                            world.client.run(|| TcpStream::connect_timeout(&to, Duration::from_millis(300)));
                        assert!(again.is_err(), "{again:?}");
                    }
                    if let Some(socket) = &socket {
                        let _ = socket.send(b"0");
                    }
                    let waited = Instant::now();
                    while cluster.counted(0)["left_ranges"] == left {
                        assert!(waited.elapsed() < ANSWER, "{:?}", cluster.counted(0));
                    }
                    let node_port = at(NODES[0][family], NODE_PORT);
                    assert_eq!(ask(world, protocol, node_port), (name.into(), true));
                }
            }
        });
    }
}

/// Clients in the cluster may have their replies on ways without programs.
#[test]
fn clients_of_the_cluster_are_left() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        serve_all(world, Protocol::Tcp, 0);
        cluster.serve(Protocol::Tcp, 0, &[0, 1]);
        let to = at(NODES[0][0], NODE_PORT);
        for (n, client) in [(1, &world.nodes[1]), (2, &world.pods[1])] {
            let (_, line) = client.run(|| connect(to));
            assert!(line.starts_with("node0 "), "{line}");
            assert_eq!(cluster.counted(0)["left_inside"], n);
        }
    });
}

/// As in the backend: what the programs leave is translated by nftables, and nothing that they do is.
#[test]
fn beside_the_tables_of_nftables() {
    for (protocol, pod) in [(Protocol::Tcp, 0), (Protocol::Tcp, 1), (Protocol::Udp, 0), (Protocol::Udp, 1)] {
        in_world(|world| {
            let (to, name) = (at(NODES[0][0], NODE_PORT), ["pod0", "pod1"][pod]);
            let _nft = tables(world, protocol, &[pod]);
            serve_all(world, protocol, 0);
            assert_eq!(ask(world, protocol, to), (name.into(), false), "masqueraded by nftables");
            let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
            cluster.serve(protocol, 0, &[pod]);
            for _ in 0..3 {
                assert_eq!(ask(world, protocol, to), (name.into(), true));
            }
            // From the other node: left.
            let line = world.nodes[1].run(|| match protocol {
                Protocol::Udp => exchange(&udp_socket(to), "0"),
                _ => connect(to).1,
            });
            assert!(line.starts_with(name), "{line}");
            assert_eq!(cluster.counted(0)["left_inside"], 1);
        });
    }
}
