//! TCP connections through the proxy.

use std::{io::ErrorKind, net::Shutdown};

use super::*;

#[test]
fn data_passes_both_ways_and_half_closed_connections_go_on() {
    isolated(|| {
        // Answers only after the end of the stream.
        let server = endpoint_at("127.0.0.1:0", |mut stream| {
            let mut received = Vec::new();
            stream.read_to_end(&mut received).unwrap();
            stream.write_all(&received).unwrap();
        });
        let mut proxy = Proxy::start(|_| {});
        proxy.set(service_port("web", "127.80.0.1", 8001, &[server]));
        let mut client = connect("127.80.0.1:8001");
        let sent: Vec<u8> = (0..3_000_000_u32).map(|index| (index % 251) as u8).collect();
        client.write_all(&sent).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut received = Vec::new();
        client.read_to_end(&mut received).unwrap();
        assert!(received == sent, "{} of {} bytes", received.len(), sent.len());
        wait_for("the end", || proxy.sessions().tcp_connections == 0);
    });
}

#[test]
fn each_connection_chooses_an_endpoint_at_random() {
    isolated(|| {
        let mut proxy = Proxy::start(|_| {});
        proxy.set(service_port("web", "127.80.0.2", 8002, &[endpoint("a"), endpoint("b"), endpoint("c")]));
        let answers: BTreeSet<char> = (0..60).map(|_| ask("127.80.0.2:8002")).collect();
        assert_eq!(answers, ['a', 'b', 'c'].into());
    });
}

#[test]
fn case_39_without_an_endpoint_connections_are_refused() {
    isolated(|| {
        let mut proxy = Proxy::start(|_| {});
        let place = "127.80.0.3:8003";
        proxy.set(service_port("web", "127.80.0.3", 8003, &[]));
        assert!(is_refused(place));
        proxy.set(service_port("web", "127.80.0.3", 8003, &[endpoint("a")]));
        assert_eq!(ask(place), 'a');
        proxy.set(service_port("web", "127.80.0.3", 8003, &[]));
        wait_for("a refusal", || is_refused(place));
        assert!(is_refused("127.80.0.3:8004"), "case 17: an undefined port");
    });
}

#[test]
fn case_56_changed_endpoints_leave_listeners_and_connections_alone() {
    isolated(|| {
        let (first, second) = (endpoint("a"), endpoint("b"));
        let mut proxy = Proxy::start(|_| {});
        let place = "127.80.0.5:8005";
        let outcome = proxy.set(service_port("web", "127.80.0.5", 8005, &[first]));
        assert_eq!((outcome.full, outcome.structure, outcome.added), (true, 1, 1));
        let mut client = connect(place);
        assert_eq!(name_of(&mut client).unwrap(), 'a');
        let outcome = proxy.set(service_port("web", "127.80.0.5", 8005, &[second]));
        assert_eq!((outcome.full, outcome.structure, outcome.added), (false, 0, 1));
        assert_eq!(ask(place), 'b');
        assert_eq!(echo(&mut client, "still there"), "still there", "case 48: TCP goes on");
        let outcome = proxy.set(service_port("web", "127.80.0.5", 8005, &[second]));
        assert!(outcome.is_nothing(), "{outcome:?}");
    });
}

#[test]
fn case_32_dropped_connections_get_no_data_and_end() {
    isolated(|| {
        let mut proxy = Proxy::start(|options| options.relay.drop_timeout = Duration::from_millis(300));
        let mut port = service_port("web", "127.80.0.6", 8006, &[endpoint("a")]);
        port.internal_local = true;
        proxy.set(port);
        let begun = Instant::now();
        let error = name_of(&mut connect("127.80.0.6:8006")).unwrap_err();
        assert!(begun.elapsed() >= Duration::from_millis(250), "it is held");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn case_40_source_ranges_drop_others() {
    isolated(|| {
        let mut proxy = Proxy::start(|options| options.relay.drop_timeout = Duration::ZERO);
        let mut port = service_port("web", "127.80.0.7", 8007, &[endpoint("a")]);
        port.load_balancer_ips = vec![ip("127.80.0.8")];
        port.source_ranges = vec!["127.0.0.1/32".parse().unwrap()];
        proxy.set(port);
        assert_eq!(ask("127.80.0.7:8007"), 'a', "V has no ranges");
        let from = |source: &str| {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            socket.bind(&SocketAddr::new(ip(source), 0).into()).unwrap();
            socket.connect(&"127.80.0.8:8007".parse::<SocketAddr>().unwrap().into()).unwrap();
            name_of(&mut socket.into())
        };
        assert_eq!(from("127.0.0.1").unwrap(), 'a');
        assert_eq!(from("127.0.0.2").unwrap_err().kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn case_47_affinity_is_shared_by_frontends() {
    isolated(|| {
        let servers = [endpoint("a"), endpoint("b"), endpoint("c")];
        let port = |endpoints: &[SocketAddr]| {
            let mut port = service_port("web", "127.80.0.9", 8009, endpoints);
            port.external_ips = vec![ip("127.80.0.10")];
            port.affinity_seconds = 3_600;
            port
        };
        let mut proxy = Proxy::start(|_| {});
        proxy.set(port(&servers));
        let first = ask("127.80.0.9:8009");
        let same = |address: &str| (0..20).all(|_| ask(address) == first);
        assert!(same("127.80.0.9:8009") && same("127.80.0.10:8009"));
        assert_eq!(
            proxy.backend.observer().unwrap().affinity_clients(Family::V4).unwrap(),
            Some(vec![("clients", 1)])
        );
        let others: Vec<SocketAddr> = servers
            .iter()
            .zip(['a', 'b', 'c'])
            .filter(|(_, name)| *name != first)
            .map(|(at, _)| *at)
            .collect();
        proxy.set(port(&others));
        let second = ask("127.80.0.9:8009");
        assert_ne!(second, first, "the endpoint is gone");
        proxy.set(port(&servers));
        assert_eq!(ask("127.80.0.10:8009"), second, "the new one is kept over a sync");
    });
}

#[test]
fn a_dead_endpoint_is_replaced_by_another() {
    isolated(|| {
        let mut proxy = Proxy::start(|_| {});
        proxy.set(service_port("web", "127.80.0.11", 8011, &[CLOSED[0], endpoint("a"), CLOSED[1]]));
        for _ in 0..20 {
            assert_eq!(ask("127.80.0.11:8011"), 'a');
        }
        proxy.set(service_port("web", "127.80.0.11", 8011, &[CLOSED[0]]));
        let error = name_of(&mut connect("127.80.0.11:8011")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "none is left");
    });
}

#[test]
fn connections_of_a_removed_service_go_on() {
    isolated(|| {
        let mut proxy = Proxy::start(|options| options.relay.drain_timeout = Duration::from_secs(3_600));
        let place = "127.80.0.12:8012";
        proxy.set(service_port("web", "127.80.0.12", 8012, &[endpoint("a")]));
        let mut client = connect(place);
        assert_eq!(name_of(&mut client).unwrap(), 'a');
        let outcome = proxy.delete("web");
        assert_eq!((outcome.structure, outcome.deleted), (1, 1));
        wait_for("a refusal", || is_refused(place));
        assert_eq!(echo(&mut client, "draining"), "draining");
        drop(client);
        wait_for("the end", || proxy.sessions().tcp_connections == 0);
    });
}

#[test]
fn connections_of_a_removed_service_end_after_the_timeout() {
    isolated(|| {
        let timeout = Duration::from_millis(300);
        let mut proxy = Proxy::start(|options| options.relay.drain_timeout = timeout);
        proxy.set(service_port("web", "127.80.0.19", 8019, &[endpoint("a")]));
        let mut client = connect("127.80.0.19:8019");
        assert_eq!(name_of(&mut client).unwrap(), 'a');
        let begun = Instant::now();
        proxy.delete("web");
        let error = name_of(&mut client).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert!(begun.elapsed() >= timeout, "{:?}", begun.elapsed());
        wait_for("the end", || proxy.sessions().tcp_connections == 0);
    });
}

#[test]
fn too_many_connections_are_reset() {
    isolated(|| {
        let mut proxy = Proxy::start(|options| options.relay.max_sessions = 2);
        let place = "127.80.0.13:8013";
        proxy.set(service_port("web", "127.80.0.13", 8013, &[endpoint("a")]));
        let mut held: Vec<TcpStream> = (0..2).map(|_| connect(place)).collect();
        held.iter_mut().for_each(|client| assert_eq!(name_of(client).unwrap(), 'a'));
        assert!(name_of(&mut connect(place)).is_err());
        held.clear();
        wait_for("the end", || proxy.sessions().tcp_connections == 0);
        assert_eq!(ask(place), 'a');
    });
}

#[test]
fn many_connections_at_once() {
    isolated(|| {
        let mut proxy = Proxy::start(|_| {});
        let place = "127.80.0.14:8014";
        proxy.set(service_port("web", "127.80.0.14", 8014, &[endpoint("a"), endpoint("b")]));
        let mut clients: Vec<TcpStream> = (0..200).map(|_| connect(place)).collect();
        for (index, client) in clients.iter_mut().enumerate() {
            assert!(['a', 'b'].contains(&name_of(client).unwrap()));
            let text = format!("client {index}");
            assert_eq!(echo(client, &text), text);
        }
        assert_eq!(proxy.sessions().tcp_connections, 200);
        drop(clients);
        wait_for("the end", || proxy.sessions().tcp_connections == 0);
    });
}

#[test]
fn case_57_the_next_proxy_listens_at_once() {
    isolated(|| {
        let server = endpoint("a");
        let place = "127.80.0.15:8015";
        let mut proxy = Proxy::start(|_| {});
        for _ in 0..3 {
            proxy.set(service_port("web", "127.80.0.15", 8015, &[server]));
            let mut client = connect(place);
            assert_eq!(name_of(&mut client).unwrap(), 'a');
            proxy = proxy.restart();
            assert!(name_of(&mut client).is_err(), "connections end with the proxy");
        }
    });
}

#[test]
fn the_next_service_gets_the_address_of_a_deleted_one() {
    isolated(|| {
        let mut proxy = Proxy::start(|_| {});
        proxy.set(service_port("old", "127.80.0.16", 8016, &[endpoint("a")]));
        proxy.backend.set_service(Family::V4, &ServiceName::new("default", "old"), Vec::new());
        let outcome = proxy.set(service_port("new", "127.80.0.16", 8016, &[endpoint("b")]));
        assert_eq!(outcome.structure, 0, "the socket goes on listening");
        assert_eq!(ask("127.80.0.16:8016"), 'b');
        proxy.delete("new");
        proxy.set(service_port("newer", "127.80.0.16", 8016, &[endpoint("c")]));
        assert_eq!(ask("127.80.0.16:8016"), 'c');
    });
}

#[test]
fn endpoints_are_told_the_client_by_the_proxy_protocol() {
    isolated(|| {
        let server = endpoint_at("127.0.0.1:0", |mut stream| {
            let mut header = [0; 48];
            let length = stream.read(&mut header).unwrap();
            stream.write_all(&header[..length]).unwrap();
        });
        let mut proxy = Proxy::start(|options| options.relay.proxy_protocol = Some(ProxyProtocol::V1));
        proxy.set(service_port("web", "127.80.0.17", 8017, &[server]));
        let mut client = connect("127.80.0.17:8017");
        let port = client.local_addr().unwrap().port();
        let mut header = String::new();
        client.read_to_string(&mut header).unwrap();
        assert_eq!(header, format!("PROXY TCP4 127.0.0.1 127.80.0.17 {port} 8017\r\n"));
    });
}

/// The share of direct connections' throughput that the proxy reaches, with one connection and with several at once.
#[test]
#[ignore = "measures: cargo test --release -p keelson-proxy-userspace --lib measure_throughput -- --ignored --nocapture"]
fn measure_throughput() {
    const BYTES: usize = 1 << 30;
    const CHUNK: usize = 256 * 1024;
    const ROUNDS: usize = 7;
    let send = |address: &str, bytes: usize| {
        let mut client = connect(address);
        let data = vec![7; CHUNK];
        for _ in 0..bytes / CHUNK {
            client.write_all(&data).unwrap();
        }
        client.shutdown(Shutdown::Write).unwrap();
        let mut length = [0; 8];
        client.read_exact(&mut length).unwrap();
        assert_eq!(usize::from_be_bytes(length), bytes);
    };
    let measure = |address: &str, connections: usize| {
        let begun = Instant::now();
        thread::scope(|scope| {
            for _ in 0..connections {
                scope.spawn(|| send(address, BYTES / connections));
            }
        });
        BYTES as f64 / begun.elapsed().as_secs_f64() / 1e9
    };
    isolated(|| {
        let server = endpoint_at("127.0.0.1:0", |mut stream| {
            let mut buffer = vec![0; CHUNK];
            let mut length = 0;
            while let Ok(read @ 1..) = stream.read(&mut buffer) {
                length += read;
            }
            let _ = stream.write_all(&length.to_be_bytes());
        });
        let mut proxy = Proxy::start(|_| {});
        proxy.set(service_port("web", "127.80.0.18", 8018, &[server]));
        for connections in [1, 4, 16] {
            let mut rounds: Vec<(f64, f64)> = (0..ROUNDS)
                .map(|_| {
                    let direct = measure(&server.to_string(), connections);
                    (direct, measure("127.80.0.18:8018", connections))
                })
                .collect();
            rounds.sort_by(|a, b| (a.1 / a.0).total_cmp(&(b.1 / b.0)));
            let share = |(direct, relayed): (f64, f64)| relayed / direct * 100.0;
            let (direct, relayed) = rounds[ROUNDS / 2];
            println!(
                "{connections} connections: direct {direct:.2} GB/s, relayed {relayed:.2} GB/s, {:.0} % ({:.0} to {:.0} %)",
                share((direct, relayed)),
                share(rounds[0]),
                share(rounds[ROUNDS - 1])
            );
        }
    });
}
