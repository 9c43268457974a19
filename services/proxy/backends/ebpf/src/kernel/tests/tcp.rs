//! Connections of TCP.

use std::collections::BTreeSet;

use super::*;

#[test]
fn a_connection_goes_to_an_endpoint_and_shows_the_service() {
    in_world(|world| {
        let mut sockets = world.sockets();
        for (ip, own) in [(V, "127.0.0.1"), (V6, "::1")] {
            let servers = [tcp_server(own), tcp_server(own), tcp_server(own)];
            serve(&mut sockets, family_of_ip(ip), vec![port(Protocol::Tcp, ip, &servers)]);
            let answered: BTreeSet<SocketAddr> = (0..60).map(|_| ask_tcp(at(ip, 80))).collect();
            assert_eq!(answered, BTreeSet::from(servers), "{ip}: each is chosen");
        }
    });
}

#[test]
fn an_ipv4_mapped_destination_has_endpoints_of_ipv4() {
    in_world(|world| {
        let mut sockets = world.sockets();
        let server = tcp_server("127.0.0.1");
        serve(&mut sockets, Family::V4, vec![port(Protocol::Tcp, V, &[server])]);
        let to = at(&format!("::ffff:{V}"), 80);
        let socket = socket2::Socket::new(socket2::Domain::IPV6, socket2::Type::STREAM, None).unwrap();
        socket.connect_timeout(&to.into(), ANSWER).unwrap();
        let mut stream = TcpStream::from(socket);
        assert_eq!(stream.peer_addr().unwrap(), to);
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert_eq!(text, server.to_string());
    });
}

/// What is no frontend stays as it is: other addresses, ports, protocols; and a Service without endpoints.
#[test]
fn other_destinations_stay() {
    in_world(|world| {
        let mut sockets = world.sockets();
        let server = tcp_server("127.0.0.1");
        serve(&mut sockets, Family::V4, vec![port(Protocol::Tcp, V, &[server])]);
        assert_eq!(ask_tcp(server), server, "an endpoint itself");
        let refused = |to: &str| TcpStream::connect_timeout(&to.parse().unwrap(), ANSWER).unwrap_err().kind();
        use std::io::ErrorKind::{ConnectionRefused, NetworkUnreachable};
        // No route leads to cluster IPs here: whatever is not translated ends there.
        assert_eq!(refused(&format!("{V}:81")), NetworkUnreachable);
        assert_eq!(refused("10.96.0.11:80"), NetworkUnreachable);
        assert_eq!(refused("127.0.0.1:80"), ConnectionRefused);
        serve(&mut sockets, Family::V4, vec![port(Protocol::Tcp, V, &[])]);
        assert_eq!(refused(&format!("{V}:80")), NetworkUnreachable);
        serve(&mut sockets, Family::V4, vec![]);
        assert_eq!(refused(&format!("{V}:80")), NetworkUnreachable);
    });
}

#[test]
fn node_ports_are_at_the_addresses_of_the_node() {
    in_world(|world| {
        let mut sockets = world.sockets();
        for (ip, own, node) in [(V, "127.0.0.1", "192.0.2.1"), (V6, "::1", "2001:db8::1")] {
            let family = family_of_ip(ip);
            let server = tcp_server(own);
            let of = ServicePort { node_port: 30_080, ..port(Protocol::Tcp, ip, &[server]) };
            sockets.plan.set_node_addresses(family, &[node.parse().unwrap(), own.parse().unwrap()]);
            serve(&mut sockets, family, vec![of]);
            assert_eq!(ask_tcp(at(node, 30_080)), server);
            for other in [at(own, 30_080), at(node, 80), at(node, 30_081)] {
                assert!(TcpStream::connect_timeout(&other, ANSWER).is_err(), "{other}");
            }
            sockets.plan.set_node_addresses(family, &[]);
            sync(&mut sockets);
            assert!(TcpStream::connect_timeout(&at(node, 30_080), ANSWER).is_err());
        }
        // The key of node ports is no destination.
        for any in ["0.0.0.0", "::"] {
            assert!(TcpStream::connect_timeout(&at(any, 30_080), ANSWER).is_err());
        }
    });
}

/// Programs see the connection of TCP inside of it, which getpeername() does not name. The kernel of the VM does not have it.
#[test]
fn a_connection_of_mptcp_is_one_of_tcp() {
    in_world(|world| {
        let mut sockets = world.sockets();
        let server = tcp_server("127.0.0.1");
        serve(&mut sockets, Family::V4, vec![port(Protocol::Tcp, V, &[server])]);
        let protocol = Some(socket2::Protocol::from(262));
        let socket = match socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, protocol) {
            Err(error) if !Path::new("/proc/sys/net/mptcp").exists() => {
                assert_eq!(error.raw_os_error(), Some(nix::libc::EPROTONOSUPPORT));
                return eprintln!("this kernel has no MPTCP");
            }
            socket => socket.unwrap(),
        };
        let to = at(V, 80);
        socket.connect_timeout(&to.into(), ANSWER).unwrap();
        assert_eq!(socket.peer_addr().unwrap().as_socket(), Some(server));
        let mut text = String::new();
        TcpStream::from(socket).read_to_string(&mut text).unwrap();
        assert_eq!(text, server.to_string());
    });
}
