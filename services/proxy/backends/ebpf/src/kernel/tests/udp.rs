//! Datagrams, and the flows that programs remember.

use std::collections::BTreeSet;

use super::*;

fn client(own: &str) -> UdpSocket {
    let socket = UdpSocket::bind((own.parse::<IpAddr>().unwrap(), 0)).unwrap();
    socket.set_read_timeout(Some(ANSWER)).unwrap();
    socket
}

/// Sends to an address without connecting; who answers, after the source of the answer was compared.
fn ask(socket: &UdpSocket, to: SocketAddr) -> SocketAddr {
    socket.send_to(b"?", to).unwrap();
    let mut buffer = [0; 64];
    let (length, from) = socket.recv_from(&mut buffer).unwrap();
    assert_eq!(from, to, "the source is the Service");
    std::str::from_utf8(&buffer[..length]).unwrap().parse().unwrap()
}

#[test]
fn datagrams_of_a_socket_go_to_one_endpoint_and_answers_show_the_service() {
    in_world(|world| {
        let mut sockets = world.sockets();
        for (ip, own) in [(V, "127.0.0.1"), (V6, "::1")] {
            let servers = [udp_server(own), udp_server(own)];
            serve(&mut sockets, family_of_ip(ip), vec![port(Protocol::Udp, ip, &servers)]);
            let mut all = BTreeSet::new();
            for _ in 0..32 {
                let socket = client(own);
                let first = ask(&socket, at(ip, 80));
                assert!((0..10).all(|_| ask(&socket, at(ip, 80)) == first), "{ip}: a flow stays");
                all.insert(first);
            }
            assert_eq!(all, BTreeSet::from(servers));
        }
    });
}

#[test]
fn a_connected_socket_shows_the_service() {
    in_world(|world| {
        let mut sockets = world.sockets();
        for (ip, own) in [(V, "127.0.0.1"), (V6, "::1")] {
            let servers = [udp_server(own), udp_server(own)];
            serve(&mut sockets, family_of_ip(ip), vec![port(Protocol::Udp, ip, &servers)]);
            let socket = client(own);
            socket.connect(at(ip, 80)).unwrap();
            assert_eq!(socket.peer_addr().unwrap(), at(ip, 80));
            let mut first = None;
            for _ in 0..10 {
                socket.send(b"?").unwrap();
                let mut buffer = [0; 64];
                let (length, from) = socket.recv_from(&mut buffer).unwrap();
                assert_eq!(from, at(ip, 80));
                let by: SocketAddr = std::str::from_utf8(&buffer[..length]).unwrap().parse().unwrap();
                assert_eq!(*first.get_or_insert(by), by);
                // Connecting again is the same flow, as for conntrack.
                socket.connect(at(ip, 80)).unwrap();
            }
        }
    });
}

/// Of two Services with different endpoints, and of a peer that is no Service.
#[test]
fn one_socket_hears_from_several() {
    in_world(|world| {
        let mut sockets = world.sockets();
        let (one, two, plain) = (udp_server("127.0.0.1"), udp_server("127.0.0.2"), udp_server("127.0.0.3"));
        let second = "10.96.0.11";
        let mut other = port(Protocol::Udp, second, &[two]);
        other.name.port = "other".into();
        serve(&mut sockets, Family::V4, vec![port(Protocol::Udp, V, &[one]), other]);
        let socket = client("127.0.0.1");
        for _ in 0..3 {
            assert_eq!(ask(&socket, at(V, 80)), one);
            assert_eq!(ask(&socket, at(second, 80)), two);
            assert_eq!(ask(&socket, plain), plain);
        }
        let mapped = client("::");
        assert_eq!(ask(&mapped, at(&format!("::ffff:{V}"), 80)), one, "a socket of IPv6");
    });
}

#[test]
fn a_flow_leaves_an_endpoint_that_is_gone_and_stays_with_one_that_serves() {
    in_world(|world| {
        let mut sockets = world.sockets();
        let (one, two) = (udp_server("127.0.0.1"), udp_server("127.0.0.2"));
        serve(&mut sockets, Family::V4, vec![port(Protocol::Udp, V, &[one])]);
        let socket = client("127.0.0.1");
        let connected = connected(at(V, 80));
        assert_eq!(ask(&socket, at(V, 80)), one);
        // It terminates, and still serves.
        let terminating =
            ServicePort { serving: vec![endpoint(one), endpoint(two)], ..port(Protocol::Udp, V, &[two]) };
        serve(&mut sockets, Family::V4, vec![terminating]);
        assert_eq!(ask(&socket, at(V, 80)), one);
        assert_eq!(ask(&client("127.0.0.1"), at(V, 80)), two);
        let before = destroyed(&mut sockets);
        serve(&mut sockets, Family::V4, vec![port(Protocol::Udp, V, &[two])]);
        assert_eq!(ask(&socket, at(V, 80)), two);
        // A connected socket is not asked again: it ends.
        assert_eq!((before, destroyed(&mut sockets)), (0, 1));
        assert_aborted(&connected);
        assert_eq!(ask(&socket, at(V, 80)), two);
    });
}

/// UDP sockets that were ended, after what maintenance has begun.
fn destroyed(sockets: &mut Sockets) -> u64 {
    sockets.maintain(Family::V4, Instant::now()).unwrap();
    while !sockets.sweeper().is_free() {
        thread::sleep(Duration::from_millis(5));
    }
    sockets.sweeper().status().destroyed
}

fn assert_aborted(socket: &UdpSocket) {
    let error = socket.recv(&mut [0; 64]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(nix::libc::ECONNABORTED));
}

/// A socket that is connected to a Service, after an exchange.
fn connected(to: SocketAddr) -> UdpSocket {
    let socket = client("127.0.0.1");
    socket.connect(to).unwrap();
    socket.send(b"?").unwrap();
    socket.recv(&mut [0; 64]).unwrap();
    socket
}

#[test]
fn an_endpoint_that_went_while_no_process_ran_is_left() {
    in_world(|world| {
        let mut sockets = world.sockets();
        let (one, two) = (udp_server("127.0.0.1"), udp_server("127.0.0.2"));
        serve(&mut sockets, Family::V4, vec![port(Protocol::Udp, V, &[one])]);
        let gone = connected(at(V, 80));
        drop(sockets);
        let mut sockets = world.sockets();
        serve(&mut sockets, Family::V4, vec![port(Protocol::Udp, V, &[two])]);
        let stays = connected(at(V, 80));
        assert_eq!(destroyed(&mut sockets), 1);
        assert_aborted(&gone);
        assert_eq!(stays.send(b"?").unwrap(), 1);
        assert_eq!(destroyed(&mut sockets), 1, "once");
    });
}

#[test]
fn a_service_that_is_made_again_ends_the_flows_of_the_former_one() {
    in_world(|world| {
        let mut sockets = world.sockets();
        let (one, two) = (udp_server("127.0.0.1"), udp_server("127.0.0.2"));
        serve(&mut sockets, Family::V4, vec![port(Protocol::Udp, V, &[one, two])]);
        let both = [0; 32].map(|_| connected(at(V, 80)));
        serve(&mut sockets, Family::V4, vec![]);
        assert_eq!(destroyed(&mut sockets), 0, "without a Service flows stay");
        serve(&mut sockets, Family::V4, vec![port(Protocol::Udp, V, &[two])]);
        let is_stale = |socket: &&UdpSocket| socket.send(b"?").is_err();
        let ended = destroyed(&mut sockets);
        let stale: Vec<&UdpSocket> = both.iter().filter(is_stale).collect();
        assert_eq!(stale.len() as u64, ended);
        assert!((1..32).contains(&ended), "{ended} of 32 had one of two endpoints");
        stale.into_iter().for_each(assert_aborted);
    });
}

/// Adds an address to the node. The kernel makes the route of an IPv6 address a moment later, and loses packets until then.
fn add_address(address: &str) {
    let ip = |arguments: &[&str]| {
        let done = Command::new("ip").args(arguments).output().unwrap();
        assert!(done.status.success(), "{arguments:?}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    };
    let nodad: &[&str] = if address.contains(':') { &["nodad"] } else { &[] };
    ip(&[&["address", "add", address, "dev", "lo"], nodad].concat());
    // Seconds in a virtual machine on a busy one.
    let until = Instant::now() + 12 * ANSWER;
    while !ip(&["route", "get", address]).starts_with("local ") {
        assert!(Instant::now() < until, "no local route to {address}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A pod's server answers a client of the node that has the number of a node port for itself: from a socket for all clients, and
/// from one that is connected.
#[test]
fn an_answer_to_a_client_with_the_number_of_a_node_port_arrives() {
    in_world(|world| {
        let mut sockets = world.sockets();
        for (ip, own, loopback) in [(V, "192.0.2.1", "127.0.0.1"), (V6, "2001:db8::1", "::1")] {
            add_address(own);
            let other = udp_server(loopback);
            let (server, asking) = (client(own), client(own));
            let from = asking.local_addr().unwrap();
            let of = ServicePort { node_port: from.port(), ..port(Protocol::Udp, ip, &[other]) };
            sockets.plan.set_node_addresses(family_of_ip(ip), &[from.ip()]);
            serve(&mut sockets, family_of_ip(ip), vec![of]);
            for connects in [false, true] {
                asking.send_to(b"?", server.local_addr().unwrap()).unwrap();
                let (_, seen) = server.recv_from(&mut [0; 64]).unwrap();
                assert_eq!(seen, from);
                match connects {
                    false => server.send_to(b"!", seen).unwrap(),
                    true => server.connect(seen).and_then(|()| server.send(b"!")).unwrap(),
                };
                let (_, by) = asking.recv_from(&mut [0; 64]).unwrap();
                assert_eq!(by, server.local_addr().unwrap());
            }
        }
    });
}

/// A socket that is connected to a Service, and names its address all the same.
#[test]
fn a_connected_socket_keeps_its_endpoint_when_it_names_the_service() {
    in_world(|world| {
        let mut sockets = world.sockets();
        let (one, two) = (udp_server("127.0.0.1"), udp_server("127.0.0.2"));
        let second = "10.96.0.11";
        let mut other = port(Protocol::Udp, second, &[one, two]);
        other.name.port = "other".into();
        let both = |of: &[SocketAddr]| vec![port(Protocol::Udp, V, of), other.clone()];
        serve(&mut sockets, Family::V4, both(&[one, two]));
        for _ in 0..16 {
            let socket = client("127.0.0.1");
            // It may have had another endpoint before.
            ask(&socket, at(V, 80));
            socket.connect(at(V, 80)).unwrap();
            let first = ask(&socket, at(V, 80));
            assert!((0..4).all(|_| ask(&socket, at(V, 80)) == first));
            socket.connect(at(second, 80)).unwrap();
            assert_eq!(socket.peer_addr().unwrap(), at(second, 80));
            ask(&socket, at(second, 80));
        }
        let mapped = client("::");
        let to = at(&format!("::ffff:{V}"), 80);
        mapped.connect(to).unwrap();
        let first = ask(&mapped, to);
        assert!((0..8).all(|_| ask(&mapped, to) == first));
        // An endpoint that serves no longer is left when the socket connects again.
        let socket = client("127.0.0.1");
        socket.connect(at(V, 80)).unwrap();
        let left = if ask(&socket, at(V, 80)) == one { two } else { one };
        serve(&mut sockets, Family::V4, both(&[left]));
        socket.connect(at(V, 80)).unwrap();
        assert_eq!(ask(&socket, at(V, 80)), left);
    });
}
