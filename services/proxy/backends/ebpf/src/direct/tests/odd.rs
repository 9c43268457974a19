//! Fragments, options, malformed and forged packets.

use std::process::Command;

use socket2::{Domain, SockAddr, Socket, Type};

use super::*;

/// Ones' complement sum of what a checksum covers.
fn checksum(parts: &[&[u8]]) -> u16 {
    let all: Vec<u8> = parts.concat();
    let mut sum: u32 =
        all.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap()
}

fn octets(ip: &str) -> Vec<u8> {
    match ip.parse().unwrap() {
        IpAddr::V4(ip) => ip.octets().into(),
        IpAddr::V6(ip) => ip.octets().into(),
    }
}

/// A datagram with its header.
fn udp(from: (&str, u16), to: (&str, u16), text: &[u8]) -> Vec<u8> {
    let length = u16::try_from(8 + text.len()).unwrap().to_be_bytes();
    let head = [from.1.to_be_bytes(), to.1.to_be_bytes(), length].concat();
    let sum = checksum(&[&octets(from.0), &octets(to.0), &[0, 17], &length, &head, &[0, 0], text]);
    [&head, &sum.to_be_bytes()[..], text].concat()
}

/// A packet of IPv4; the kernel computes its length and checksum. `place`: flags and offset of a fragment.
fn ipv4(to: &str, options: &[u8], place: u16, payload: &[u8]) -> Vec<u8> {
    let first = 0x45 + u8::try_from(options.len() / 4).unwrap();
    let mut packet = vec![first, 0, 0, 0, 0x12, 0x34];
    packet.extend(place.to_be_bytes());
    packet.extend([64, 17, 0, 0]);
    [packet, octets(CLIENT[0]), octets(to), options.to_vec(), payload.to_vec()].concat()
}

fn ipv6(to: &str, next: u8, length: usize, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend(u16::try_from(length).unwrap().to_be_bytes());
    packet.extend([next, 64]);
    [packet, octets(CLIENT[1]), octets(to), payload.to_vec()].concat()
}

/// Sends a packet as it is from the client.
fn send(world: &World, to: &str, packet: &[u8]) {
    world.client.run(|| {
        let to = at(to, 0);
        let domain = if to.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
        let socket = Socket::new(domain, Type::RAW, Some(socket2::Protocol::from(255))).unwrap();
        socket.send_to(packet, &SockAddr::from(to)).unwrap();
    });
}

pub(super) const SYN: u8 = 0x02;
pub(super) const RST: u8 = 0x04;

/// Sends a packet of TCP without a place in any connection from a port of the client.
pub(super) fn send_tcp(world: &World, port: u16, to: (&str, u16), flags: u8) {
    let ports = [port.to_be_bytes(), to.1.to_be_bytes()].concat();
    let head = [&ports[..], &[1, 2, 3, 4, 0, 0, 0, 0, 0x50, flags, 0x10, 0]].concat();
    let sum = checksum(&[&octets(CLIENT[0]), &octets(to.0), &[0, 6, 0, 20], &head, &[0; 4]]);
    let mut packet = ipv4(to.0, &[], 0, &[&head, &sum.to_be_bytes()[..], &[0, 0]].concat());
    packet[9] = 6;
    send(world, to.0, &packet);
}

/// A socket of the client at a port that the packets name.
fn listen(world: &World, family: usize, port: u16) -> UdpSocket {
    let socket = world.client.run(|| UdpSocket::bind(at(CLIENT[family], port)).unwrap());
    socket.set_read_timeout(Some(ANSWER)).unwrap();
    socket
}

/// The first word of the next answer, and where it comes from.
fn heard(socket: &UdpSocket) -> (String, SocketAddr) {
    let mut buffer = [0; 2_048];
    let (length, from) = socket.recv_from(&mut buffer).unwrap();
    (String::from_utf8_lossy(&buffer[..length]).split(' ').next().unwrap().to_owned(), from)
}

fn notice4(service: (&str, u16)) -> Vec<u8> {
    [&[158, 8][..], &service.1.to_be_bytes(), &octets(service.0)].concat()
}

/// Fragments and options go to the kernel, which knows what to do with them.
#[test]
fn fragments_and_options_are_left() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        serve_all(world, Protocol::Udp, 0);
        cluster.serve(Protocol::Udp, 0, &[0]);
        let node = NODES[0][0];
        let socket = listen(world, 0, 7_000);
        let whole = udp((CLIENT[0], 7_000), (node, NODE_PORT), b"0xxxxxxxxxxxxxxxxxxxxxxx");
        send(world, node, &ipv4(node, &[], 0, &whole));
        assert_eq!(heard(&socket), ("pod0".into(), at(node, NODE_PORT)));
        // NOPs, and an unknown option.
        for options in [&[1; 4][..], &[30, 8, 0, 0, 0, 0, 0, 0]] {
            send(world, node, &ipv4(node, options, 0, &whole));
            assert_eq!(heard(&socket).0, "node0");
        }
        assert_eq!(cluster.counted(0)["left_options"], 2);
        send(world, node, &ipv4(node, &[], 0x2000, &whole[..16]));
        send(world, node, &ipv4(node, &[], 2, &whole[16..]));
        assert_eq!(heard(&socket).0, "node0");
        assert_eq!(cluster.counted(0)["left_fragment"], 1);
    });
}

/// Nothing that is short, or says that it is longer or shorter than it is, does harm.
#[test]
fn malformed_packets_do_no_harm() {
    for hook in [DirectReturnHook::Tc, DirectReturnHook::Xdp] {
        in_world(|world| {
            let mut cluster = Cluster::new(world, hook, small_sizes());
            for family in [0, 1] {
                serve_all(world, Protocol::Udp, family);
                cluster.serve(Protocol::Udp, family, &[1]);
                let node = NODES[0][family];
                let before = cluster.counted(0);
                let whole = udp((CLIENT[family], 7_000), (node, NODE_PORT), b"0");
                for length in 0..8 {
                    let packet = match family {
                        0 => ipv4(node, &[], 0, &whole[..length]),
                        _ => ipv6(node, 17, length, &whole[..length]),
                    };
                    send(world, node, &packet);
                }
                if family == 1 {
                    // Longer than the frame, and headers that end too early.
                    send(world, node, &ipv6(node, 17, 400, &whole));
                    for next in [0, 43, 44, 60, 6] {
                        for length in [0, 1, 7, 8, 23] {
                            send(world, node, &ipv6(node, next, length, &vec![17; length]));
                        }
                    }
                }
                let after = cluster.counted(0);
                assert_eq!(after["flow_remote"], before["flow_remote"], "{after:?}");
                // A wrong checksum stays wrong: the endpoint drops it.
                let socket = listen(world, family, 7_000);
                let mut wrong = whole.clone();
                wrong[6] ^= 0x55;
                for payload in [&wrong, &whole] {
                    let packet = match family {
                        0 => ipv4(node, &[], 0, payload),
                        _ => ipv6(node, 17, payload.len(), payload),
                    };
                    send(world, node, &packet);
                }
                assert_eq!(heard(&socket), ("pod1".into(), at(node, NODE_PORT)));
                socket.set_nonblocking(true).unwrap();
                assert!(socket.recv(&mut [0; 16]).is_err(), "only the right one was answered");
            }
            assert_eq!(ask(world, Protocol::Udp, at(NODES[0][0], NODE_PORT)).0, "pod1");
        });
    }
}

/// Who can send packets to an endpoint chooses no source for its answers but an address of its Service.
#[test]
fn a_forged_notice_leads_to_nothing() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        let pod = PODS[0][0];
        world.client.ip(&format!("route add {} via {}", POD_NETWORKS[0][0], NODES[0][0]));
        serve_all(world, Protocol::Udp, 0);
        cluster.serve(Protocol::Udp, 0, &[0]);
        let payload = udp((CLIENT[0], 7_000), (pod, PORT), b"0");
        let socket = listen(world, 0, 7_000);
        // Unused addresses, of the client itself, of the node without the port, of the Service without the port.
        for service in [
            ("198.51.100.1", 80),
            (CLIENT[0], NODE_PORT),
            (NODES[0][0], 22),
            (EXTERNAL[0], NODE_PORT),
            ("0.0.0.0", 80),
        ] {
            send(world, pod, &ipv4(pod, &notice4(service), 0, &payload));
            assert_eq!(heard(&socket), ("pod0".into(), at(pod, PORT)), "{service:?}");
        }
        assert_eq!(cluster.counted(0)["left_notice"], 5);
        send(world, pod, &ipv4(pod, &notice4((NODES[1][0], NODE_PORT)), 0, &payload));
        assert_eq!(heard(&socket), ("pod0".into(), at(NODES[1][0], NODE_PORT)), "an address of the Service");
        // Another address of it, while the first one is in use.
        send(world, pod, &ipv4(pod, &notice4((EXTERNAL[0], 80)), 0, &payload));
        assert_eq!(heard(&socket), ("pod0".into(), at(NODES[1][0], NODE_PORT)));
        assert_eq!(cluster.counted(0)["left_notice"], 6);
        // A load-balancer address, at which the client would be refused.
        let address = "203.0.113.8";
        let port = ServicePort {
            load_balancer_ips: vec![address.parse().unwrap()],
            source_ranges: vec!["198.51.100.0/24".parse().unwrap()],
            ..service(Protocol::Udp, 0, &[0], 0)
        };
        cluster.serve_on(0, port);
        let payload = udp((CLIENT[0], 7_001), (pod, PORT), b"0");
        let socket = listen(world, 0, 7_001);
        send(world, pod, &ipv4(pod, &notice4((address, 80)), 0, &payload));
        assert_eq!(heard(&socket), ("pod0".into(), at(pod, PORT)));
        assert_eq!(cluster.counted(0)["left_notice"], 7);
    });
}

/// One port of the client at two addresses of a Service: the endpoint would see one flow.
#[test]
fn two_addresses_with_one_port_of_the_client_are_two_flows() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        serve_all(world, Protocol::Udp, 0);
        cluster.serve(Protocol::Udp, 0, &[0]);
        let socket = listen(world, 0, 7_000);
        let node = at(NODES[0][0], NODE_PORT);
        world.client.ip(&format!("route replace {}/32 via {}", EXTERNAL[0], NODES[0][0]));
        world.nodes[0].ip(&format!("address add {}/32 dev lo", EXTERNAL[0]));
        serve_udp(&world.nodes[0], EXTERNAL[0], 80, "left");
        socket.send_to(b"0", node).unwrap();
        assert_eq!(heard(&socket), ("pod0".into(), node));
        socket.send_to(b"0", at(EXTERNAL[0], 80)).unwrap();
        assert_eq!(heard(&socket), ("left".into(), at(EXTERNAL[0], 80)));
        assert_eq!(cluster.counted(0)["left_no_endpoint"], 1);
        cluster.serve(Protocol::Udp, 0, &[0, 1]);
        // A datagram is left if each of the four random choices for it is the endpoint that is taken.
        let mut answers = (0..64).map(|_| {
            socket.send_to(b"0", at(EXTERNAL[0], 80)).unwrap();
            heard(&socket)
        });
        let other = answers.find(|(name, _)| name != "left");
        assert_eq!(other, Some(("pod1".into(), at(EXTERNAL[0], 80))), "another endpoint");
    });
}

/// In the namespace of the client.
pub(super) fn connect_from_one_port(to: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&at(CLIENT[0], 7_000).into()).unwrap();
    socket.set_read_timeout(Some(ANSWER)).unwrap();
    socket.connect_timeout(&to.into(), ANSWER).unwrap_or_else(|error| panic!("{to}: {error}"));
    TcpStream::from(socket)
}

/// Both sides have ended it, or one has broken it off.
#[test]
fn a_connection_that_has_ended_leaves_its_port_to_another_address() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        serve_all(world, Protocol::Tcp, 0);
        cluster.serve(Protocol::Tcp, 0, &[0]);
        let addresses = [at(NODES[0][0], NODE_PORT), at(EXTERNAL[0], 80)];
        for (number, to) in addresses.into_iter().cycle().take(3).enumerate() {
            world.client.run(|| {
                let mut stream = connect_from_one_port(to);
                assert_eq!(read_line(&mut stream), format!("pod0 {}:7000", CLIENT[0]));
                if number == 0 {
                    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
                } else {
                    stream.shutdown(std::net::Shutdown::Write).unwrap();
                    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
                }
            });
        }
        let counted = cluster.counted(0);
        assert_eq!((counted["left_no_endpoint"], counted["left_full"]), (0, 0), "{counted:?}");
    });
}

/// An endpoint without a server: the client hears that from the Service.
#[test]
fn a_refused_datagram_is_an_error_of_the_service() {
    for hook in [DirectReturnHook::Tc, DirectReturnHook::Xdp] {
        in_world(|world| {
            let mut cluster = Cluster::new(world, hook, small_sizes());
            for (family, pod) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                cluster.serve(Protocol::Udp, family, &[pod]);
                let error = world.client.run(|| {
                    let socket = udp_socket(at(NODES[0][family], NODE_PORT));
                    socket.send(b"0").unwrap();
                    socket.recv(&mut [0; 16]).unwrap_err()
                });
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{hook:?} {family} {pod}");
                assert!(cluster.counted(pod)["icmp_error"] > 0);
            }
        });
    }
}

/// The way to the other node carries less than the client sends: the node tells the client, and data goes on.
#[test]
fn a_packet_that_is_too_big_for_the_other_node_is_told_to_the_client() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        for family in [0, 1] {
            serve_tcp(&world.pods[1], PODS[1][family], PORT, "pod");
            let (network, via) = (POD_NETWORKS[1][family], NODES[1][family]);
            world.nodes[0].ip(&format!("route replace {network} via {via} mtu lock 1300"));
            cluster.serve(Protocol::Tcp, family, &[1]);
            let data = vec![b'x'; 200_000];
            let back = world.client.run(|| {
                let (mut stream, _) = connect(at(NODES[0][family], NODE_PORT));
                stream.write_all(&data).unwrap();
                stream.shutdown(std::net::Shutdown::Write).unwrap();
                let mut back = Vec::new();
                stream.read_to_end(&mut back).unwrap();
                back
            });
            assert!(back == data, "{family}: {} bytes", back.len());
            assert!(cluster.counted(0)["icmp_error"] > 0, "{:?}", cluster.counted(0));
        }
    });
}

/// A router between the endpoint and the client tells the Service that a reply was too big: the endpoint hears it.
#[test]
fn a_reply_that_is_too_big_is_told_to_the_endpoint() {
    for (hook, pod) in [(DirectReturnHook::Tc, 0), (DirectReturnHook::Tc, 1), (DirectReturnHook::Xdp, 1)] {
        in_world(|world| {
            let mut cluster = Cluster::new(world, hook, small_sizes());
            for family in [0, 1] {
                serve_udp(&world.pods[pod], PODS[pod][family], PORT, "pod");
                cluster.serve(Protocol::Udp, family, &[pod]);
                let (node, client) = (NODES[0][family], CLIENT[family]);
                let socket = listen(world, family, 7_000);
                socket.send_to(b"0", at(node, NODE_PORT)).unwrap();
                assert_eq!(heard(&socket).0, "pod");
                // What the client would have heard.
                let datagram = udp((node, NODE_PORT), (client, 7_000), &[b'y'; 64]);
                let error = match family {
                    0 => {
                        let mut reply = ipv4(client, &[], 0x4000, &datagram);
                        reply[12..16].copy_from_slice(&octets(node));
                        reply[16..20].copy_from_slice(&octets(client));
                        reply[2..4].copy_from_slice(&1_480_u16.to_be_bytes());
                        let sum = checksum(&[&reply[..20]]);
                        reply[10..12].copy_from_slice(&sum.to_be_bytes());
                        let mut error = [&[3, 4, 0, 0, 0, 0][..], &1_300_u16.to_be_bytes(), &reply].concat();
                        let sum = checksum(&[&error]);
                        error[2..4].copy_from_slice(&sum.to_be_bytes());
                        let mut packet = ipv4(node, &[], 0, &error);
                        packet[9] = 1;
                        packet
                    }
                    _ => {
                        let mut reply = ipv6(client, 17, datagram.len(), &datagram);
                        reply[8..24].copy_from_slice(&octets(node));
                        let mut error = [&[2, 0, 0, 0][..], &1_300_u32.to_be_bytes(), &reply].concat();
                        let length = u16::try_from(error.len()).unwrap().to_be_bytes();
                        let sum = checksum(&[&octets(client), &octets(node), &length, &[0, 58], &error]);
                        error[2..4].copy_from_slice(&sum.to_be_bytes());
                        ipv6(node, 58, error.len(), &error)
                    }
                };
                send(world, node, &error);
                let until = Instant::now() + ANSWER;
                let knows = || {
                    let arguments = ["route", "get", client];
                    let output = world.pods[pod].run(|| Command::new("ip").args(arguments).output().unwrap());
                    String::from_utf8_lossy(&output.stdout).contains("mtu 1300")
                };
                while !knows() {
                    assert!(Instant::now() < until, "{hook:?} {pod} {family}: {:?}", cluster.counted(0));
                }
                assert!(cluster.counted(0)["icmp_error"] > 0);
            }
        });
    }
}
