//! Sizes, fragments, wrong sources and malformed packets.

use socket2::{Domain, SockAddr, Socket, Type};

use super::*;

/// A datagram of some size, and its answer.
fn exchange_bytes(socket: &UdpSocket, length: usize) {
    let answer = exchange(socket, &format!("{:x<length$}", length));
    assert!(answer.len() > length, "{} bytes", answer.len());
}

#[test]
fn fragments_are_handed_over() {
    for layout in LAYOUTS {
        in_world(layout, |world| {
            let pods = world.start();
            world.serve(1);
            for family in [0, 1] {
                let count = handed_over(&pods, || {
                    world.pods[0].run(|| {
                        let socket = udp_socket(at(PODS[1][family], PORT));
                        (0..10).for_each(|_| exchange_bytes(&socket, 5_000));
                    });
                });
                assert!(count > 40, "{layout:?} {family}: {count}");
            }
        });
    }
}

/// The kernel tells the sender about a smaller MTU, and segments of TCP fit from the start.
#[test]
fn what_is_too_large_is_left_to_the_node() {
    in_world(Layout::Routed, |world| {
        world.node.ip("link set veth1 mtu 1300");
        world.pods[1].ip("link set eth0 mtu 1300");
        let pods = world.start();
        world.serve(1);
        for family in [0, 1] {
            let to = at(PODS[1][family], PORT);
            world.pods[0].run(|| {
                let socket = udp_socket(to);
                exchange_bytes(&socket, 1_000);
                // Its error arrives as one of the socket; from then on, the size is known and datagrams are sent in fragments.
                let large = "0".repeat(1_400);
                let refused = (0..20).any(|_| {
                    std::thread::sleep(Duration::from_millis(10));
                    socket.send(large.as_bytes()).is_err()
                });
                assert!(refused || family == 1, "no error about the size");
                let (mut stream, _) = connect(to);
                let text = [vec![b'x'; 1 << 20], b"\n".to_vec()].concat();
                let mut reader = stream.try_clone().unwrap();
                let mut back = vec![0; text.len()];
                std::thread::scope(|scope| {
                    scope.spawn(|| stream.write_all(&text).unwrap());
                    reader.read_exact(&mut back).unwrap();
                });
                assert!(back == text);
            });
        }
        assert!(counted(&pods, "left_limit") > 0);
    });
}

/// A pod that uses the address of another one is not believed: what is sent to that address still goes to its owner.
#[test]
fn an_address_of_another_pod_is_not_learnt() {
    for layout in [Layout::Routed, Layout::Bridged] {
        in_world(layout, |world| {
            let pods = world.start();
            world.serve(1);
            world.talk(0, 1, 0, Protocol::Udp);
            // It knows the gateway: asked for with the other address, the node would believe it.
            world.talk(2, 1, 0, Protocol::Udp);
            world.pods[2].ip(&format!("address add {}/32 dev lo", PODS[1][0]));
            let before = counted(&pods, "left_source");
            world.pods[2].run(|| {
                let forged = UdpSocket::bind(at(PODS[1][0], 0)).unwrap();
                for _ in 0..10 {
                    forged.send_to(b"forged", at(PODS[0][0], PORT)).unwrap();
                }
            });
            assert!(counted(&pods, "left_source") >= before + 10, "{layout:?}: {:?}", pods.features());
            world.talk(0, 1, 0, Protocol::Udp);
        });
    }
}

/// Sends a packet of IPv4 to pod 1 as it is.
fn send(world: &World, packet: &[u8]) {
    world.pods[0].run(|| {
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(socket2::Protocol::from(255))).unwrap();
        // The kernel itself refuses some.
        let _ = socket.send_to(packet, &SockAddr::from(at(PODS[1][0], 0)));
    });
}

/// `first`: version and length of the header.
fn ipv4(first: u8, ttl: u8, protocol: u8, rest: &[u8]) -> Vec<u8> {
    let octets = |ip: &str| ip.parse::<std::net::Ipv4Addr>().unwrap().octets();
    [
        &[first, 0, 0, 0, 0x12, 0x34, 0, 0, ttl, protocol, 0, 0],
        &octets(PODS[0][0])[..],
        &octets(PODS[1][0]),
        rest,
    ]
    .concat()
}

#[test]
fn malformed_packets_harm_nothing() {
    in_world(Layout::Routed, |world| {
        let pods = world.start();
        world.serve(1);
        world.talk(0, 1, 0, Protocol::Udp);
        for protocol in [6, 17, 1, 132, 255] {
            for first in [0x45, 0x46, 0x4f] {
                for length in 0..64 {
                    send(world, &ipv4(first, 64, protocol, &vec![1; length]));
                }
            }
        }
        // Its last hop: the node answers.
        let before = counted(&pods, "left_limit");
        world.talk(0, 1, 0, Protocol::Udp);
        send(world, &ipv4(0x45, 1, 17, &[0, 9, 0x1f, 0x90, 0, 8, 0, 0]));
        assert_eq!(counted(&pods, "left_limit"), before + 1);
        world.talk(0, 1, 0, Protocol::Tcp);
    });
}
