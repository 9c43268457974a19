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
        let connected = client("127.0.0.1");
        connected.connect(at(V, 80)).unwrap();
        connected.send(b"?").unwrap();
        connected.recv(&mut [0; 64]).unwrap();
        assert_eq!(ask(&socket, at(V, 80)), one);
        // It terminates, and still serves.
        let terminating =
            ServicePort { serving: vec![endpoint(one), endpoint(two)], ..port(Protocol::Udp, V, &[two]) };
        serve(&mut sockets, Family::V4, vec![terminating]);
        assert_eq!(ask(&socket, at(V, 80)), one);
        assert_eq!(ask(&client("127.0.0.1"), at(V, 80)), two);
        let ends = |sockets: &mut Sockets| {
            sockets.maintain(Family::V4, Instant::now()).unwrap();
            while !sockets.sweeper().is_free() {
                thread::sleep(Duration::from_millis(5));
            }
            sockets.sweeper().status().destroyed
        };
        assert_eq!(ends(&mut sockets), 0);
        serve(&mut sockets, Family::V4, vec![port(Protocol::Udp, V, &[two])]);
        assert_eq!(ask(&socket, at(V, 80)), two);
        // A connected socket is not asked again: it ends.
        assert_eq!(ends(&mut sockets), 1);
        let error = connected.recv(&mut [0; 64]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::ECONNABORTED));
        assert_eq!(ask(&socket, at(V, 80)), two);
    });
}
