//! Session affinity by client.

use std::collections::BTreeSet;

use super::*;

fn with_affinity(seconds: u32, endpoints: &[SocketAddr]) -> ServicePort {
    ServicePort { affinity_seconds: seconds, ..port(Protocol::Tcp, V, endpoints) }
}

#[test]
fn a_client_keeps_its_endpoint_until_it_is_gone_or_the_time_is_over() {
    in_world(|world| {
        let mut sockets = world.sockets();
        let servers: Vec<SocketAddr> = (0..8).map(|_| tcp_server("127.0.0.1")).collect();
        let x = "203.0.113.1";
        let of = |servers: &[SocketAddr], seconds| ServicePort {
            external_ips: vec![x.parse().unwrap()],
            ..with_affinity(seconds, servers)
        };
        serve(&mut sockets, Family::V4, vec![of(&servers, 100)]);
        let first = ask_tcp(at(V, 80));
        assert!((0..20).all(|_| ask_tcp(at(V, 80)) == first));
        assert!((0..20).all(|_| ask_tcp(at(x, 80)) == first), "all addresses of a service port share it");
        // Its number is the key: it outlives syncs and this process.
        drop(sockets);
        let mut sockets = world.sockets();
        serve(&mut sockets, Family::V4, vec![of(&servers, 100)]);
        assert!((0..20).all(|_| ask_tcp(at(V, 80)) == first));
        let left: Vec<SocketAddr> = servers.iter().copied().filter(|server| *server != first).collect();
        serve(&mut sockets, Family::V4, vec![of(&left, 100)]);
        let second = ask_tcp(at(V, 80));
        assert_ne!(second, first);
        serve(&mut sockets, Family::V4, vec![of(&servers, 100)]);
        assert!((0..20).all(|_| ask_tcp(at(V, 80)) == second));
        serve(&mut sockets, Family::V4, vec![of(&servers, 1)]);
        let after_a_pause: BTreeSet<SocketAddr> = (0..4)
            .map(|_| {
                thread::sleep(Duration::from_millis(1_100));
                ask_tcp(at(V, 80))
            })
            .collect();
        assert!(after_a_pause.len() > 1 || !after_a_pause.contains(&second), "{after_a_pause:?}");
    });
}

/// Two network namespaces are two clients.
#[test]
fn clients_are_told_apart_by_their_network_namespace() {
    in_world(|world| {
        let mut sockets = world.sockets();
        let mut chosen = BTreeSet::new();
        for _ in 0..12 {
            let pod = unshare(CloneFlags::CLONE_NEWNET);
            pod.unwrap();
            assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
            // The endpoints are in each namespace, at the same addresses.
            let listeners = [1, 2].map(|n| TcpListener::bind(at(&format!("127.0.0.{n}"), 8080)).unwrap());
            let servers = [1, 2].map(|n| at(&format!("127.0.0.{n}"), 8080));
            serve(&mut sockets, Family::V4, vec![with_affinity(100, &servers)]);
            let peers: BTreeSet<IpAddr> = (0..10)
                .map(|_| {
                    let stream = TcpStream::connect_timeout(&at(V, 80), ANSWER).unwrap();
                    // Who accepted it tells the endpoint.
                    listeners.iter().for_each(|listener| listener.set_nonblocking(true).unwrap());
                    let found = listeners.iter().find(|listener| listener.accept().is_ok()).unwrap();
                    drop(stream);
                    found.local_addr().unwrap().ip()
                })
                .collect();
            assert_eq!(peers.len(), 1);
            chosen.extend(peers);
        }
        assert_eq!(chosen.len(), 2, "one of 2^11 runs fails here");
    });
}
