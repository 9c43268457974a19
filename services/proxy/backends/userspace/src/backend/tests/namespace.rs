//! Routes, node ports and source addresses, in a network namespace. Needs root.

use std::process::Command;

use keelson_proxy::{
    backend::{Driver as _, RuleOwner},
    conntrack::{Flow, Tuple, UdpFrontends},
};

use super::*;
use crate::{driver::Userspace, isolation::alone};

fn run(command: &str) {
    let mut words = command.split(' ');
    let status = Command::new(words.next().unwrap()).args(words).status().unwrap();
    assert!(status.success(), "{command}");
}

fn start(change: impl FnOnce(&mut Options)) -> Proxy {
    Proxy::start(|options| {
        options.relay.redirect = true;
        change(options);
    })
}

fn check(proxy: &mut Proxy, family: Family) -> Outcome {
    check_during(proxy, family, |_| ())
}

/// `meanwhile`: after the routes were listed, before they are compared.
fn check_during(proxy: &mut Proxy, family: Family, meanwhile: impl FnOnce(&mut Proxy)) -> Outcome {
    let mut observer = proxy.backend.observer().unwrap();
    assert!(proxy.backend.begin_check(family).unwrap());
    observer.read(family).unwrap();
    meanwhile(proxy);
    match proxy.backend.check(family, Instant::now()) {
        Check::Done(outcome) => outcome.unwrap(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn addresses_of_services_are_routed_to_the_proxy() {
    alone(|| {
        let server = endpoint("a");
        let mut proxy = start(|_| {});
        for (cluster_ip, place, family) in
            [("10.96.0.10", "10.96.0.10:80", Family::V4), ("fd00:96::a", "[fd00:96::a]:80", Family::V6)]
        {
            proxy.set(service_port("web", cluster_ip, 80, &[server]));
            assert_eq!(ask(place), 'a');
            assert!(check(&mut proxy, family).is_nothing());
            routes::remove(ip(cluster_ip)).unwrap();
            let outcome = check(&mut proxy, family);
            assert!(outcome.repaired && outcome.structure == 1, "{outcome:?}");
            assert_eq!(ask(place), 'a', "the route was removed and added again");
            proxy.set(service_port("web", cluster_ip, 80, &[]));
            wait_for("a refusal", || is_refused(place));
            let undefined = SocketAddr::new(ip(cluster_ip), 81).to_string();
            assert!(is_refused(&undefined), "case 17");
        }
        proxy = proxy.restart();
        proxy.set(service_port("web", "10.96.0.11", 80, &[server]));
        assert_eq!(routes::list(Family::V4).unwrap(), [ip("10.96.0.11")].into(), "the other one was removed");
        assert_eq!(routes::list(Family::V6).unwrap(), [ip("fd00:96::a")].into(), "IPv6 has no state yet");
        drop(proxy);
        let mut removed = Vec::new();
        Userspace.remove_rules(RuleOwner::KubeProxy, &mut |what| removed.push(what)).unwrap();
        assert!(removed.is_empty());
        Userspace.remove_rules(RuleOwner::Keelson, &mut |what| removed.push(what)).unwrap();
        assert_eq!(removed, ["local route to 10.96.0.11", "local route to fd00:96::a"]);
    });
}

#[test]
fn a_route_that_is_added_during_a_check_is_no_repair() {
    alone(|| {
        let server = endpoint("a");
        let mut proxy = start(|_| {});
        proxy.set(service_port("web", "10.96.0.10", 80, &[server]));
        let outcome = check_during(&mut proxy, Family::V4, |proxy| {
            proxy.set(service_port("other", "10.96.0.11", 80, &[server]));
            assert!(routes::list(Family::V4).unwrap().contains(&ip("10.96.0.11")));
        });
        assert!(outcome.is_nothing(), "{outcome:?}");
    });
}

/// Another backend's interface has the addresses of Services until it is taken over.
#[test]
fn an_address_of_a_service_is_served_when_it_leaves_an_interface() {
    alone(|| {
        let server = endpoint("a");
        run("ip link add kube-ipvs0 type veth peer name other");
        run("ip link set kube-ipvs0 up");
        run("ip link set other up");
        let places = [("10.96.0.10", 32, Family::V4), ("fd00:96::a", 128, Family::V6)];
        for (interface, leaves) in [("kube-ipvs0", "ip link delete kube-ipvs0"), ("lo", "")] {
            for (cluster_ip, bits, _) in places {
                run(&format!("ip address add {cluster_ip}/{bits} dev {interface} nodad"));
            }
            let mut proxy = start(|_| {});
            let place = |cluster_ip| SocketAddr::new(ip(cluster_ip), 80).to_string();
            for (cluster_ip, _, family) in places {
                proxy.set(service_port("web", cluster_ip, 80, &[server]));
                assert_eq!(ask(&place(cluster_ip)), 'a', "{interface}");
                let routed = routes::list(family).unwrap().contains(&ip(cluster_ip));
                assert_eq!(routed, interface == "kube-ipvs0", "{interface}");
            }
            if leaves.is_empty() {
                for (cluster_ip, bits, _) in places {
                    run(&format!("ip address delete {cluster_ip}/{bits} dev {interface}"));
                }
            } else {
                run(leaves);
            }
            for (cluster_ip, _, family) in places {
                proxy.sync(family);
                assert_eq!(ask(&place(cluster_ip)), 'a', "{interface} has {cluster_ip} no longer");
                // Without a Service, the route goes.
                proxy.set(service_port("web", cluster_ip, 80, &[]));
                proxy.backend.set_service(family, &ServiceName::new("default", "web"), Vec::new());
                proxy.sync(family);
                assert!(routes::list(family).unwrap().is_empty(), "{interface}");
            }
        }
    });
}

/// Flows that a former backend translated, of which conntrack would keep those to an endpoint that is gone.
#[test]
fn stale_flows_are_those_that_are_translated_to_an_endpoint_that_is_gone() {
    alone(|| {
        for (redirect, is_stale) in [(true, true), (false, false)] {
            let mut proxy = Proxy::start(|options| options.relay.redirect = redirect);
            let node_ports = Match::Addresses(vec![ip("127.0.0.9")]);
            proxy.backend.set_node(NodeConfig { node_ports, ..node(Family::V4, &proxy.options) });
            let mut port = udp_port("dns", "10.96.0.10", 53, &["10.244.1.2:53".parse().unwrap()]);
            port.node_port = 30053;
            proxy.set(port);
            let frontends: UdpFrontends = proxy.backend.udp_frontends(Family::V4).into_iter().collect();
            let answered_by = |to: &str, by: &str| {
                let (to, by): (SocketAddr, SocketAddr) = (to.parse().unwrap(), by.parse().unwrap());
                let tuple = |source: SocketAddr, destination: SocketAddr| Tuple {
                    source: source.ip(),
                    destination: destination.ip(),
                    source_port: source.port(),
                    destination_port: destination.port(),
                    zone: None,
                };
                let client = "10.244.1.9:40000".parse().unwrap();
                let (original, reply) = (tuple(client, to), tuple(by, client));
                frontends.is_stale(&Flow { protocol: 17, original, reply, zone: None, id: None })
            };
            for place in ["10.96.0.10:53", "127.0.0.9:30053"] {
                assert_eq!(
                    answered_by(place, "10.244.1.3:53"),
                    is_stale,
                    "{place}: an endpoint that is gone"
                );
                assert!(!answered_by(place, "10.244.1.2:53"), "{place}: it serves");
                assert!(!answered_by(place, place), "{place}: not translated");
            }
        }
    });
}

#[test]
fn case_45_and_46_node_ports() {
    alone(|| {
        run("ip address add 192.0.2.1/24 dev lo");
        run("ip address add 192.0.2.2/24 dev lo");
        let mut proxy = start(|_| {});
        let mut port = service_port("web", "10.96.0.10", 80, &[endpoint("a")]);
        port.node_port = 30080;
        let set = |proxy: &mut Proxy, node_ports: Match| {
            let config = NodeConfig { node_ports, ..node(Family::V4, &proxy.options) };
            proxy.backend.set_node(config);
            proxy.set(port.clone());
        };
        set(&mut proxy, Match::Addresses(vec![ip("192.0.2.1")]));
        assert_eq!(ask("192.0.2.1:30080"), 'a');
        assert!(is_refused("192.0.2.2:30080") && is_refused("127.0.0.1:30080"));
        set(&mut proxy, Match::AllLocal);
        assert_eq!((ask("192.0.2.1:30080"), ask("192.0.2.2:30080")), ('a', 'a'));
        assert!(is_refused("127.0.0.1:30080"), "case 46");
        run("ip address add 192.0.2.3/24 dev lo");
        set(&mut proxy, Match::AllLocal);
        assert_eq!(ask("192.0.2.3:30080"), 'a', "an address that was added");
    });
}

#[test]
fn case_33_external_traffic_policy_local_by_source() {
    alone(|| {
        run("ip address add 10.244.1.9/32 dev lo");
        run("ip address add 192.0.2.1/24 dev lo");
        let (local, remote) = (endpoint("l"), endpoint("r"));
        let mut proxy = start(|_| {});
        let mut port = service_port("web", "10.96.0.10", 80, &[remote]);
        port.local = sorted(&[local]);
        port.external_local = true;
        port.load_balancer_ips = vec![ip("203.0.113.20")];
        proxy.set(port);
        assert_eq!(ask("203.0.113.20:80"), 'r', "host to W: ClusterSet");
        assert_eq!(ask("10.96.0.10:80"), 'r', "V is not affected");
    });
}

#[test]
fn endpoints_see_the_client_if_that_is_set() {
    // Each in a namespace of its own: a listener of the other proxy may take a moment to close.
    for (transparent, seen) in [(false, "127.0.0.1"), (true, "192.0.2.7")] {
        alone(move || {
            run("ip address add 192.0.2.7/24 dev lo");
            let server = endpoint_at("127.0.0.1:0", |mut stream| {
                let peer = stream.peer_addr().unwrap();
                let _ = stream.write_all(peer.ip().to_string().as_bytes());
            });
            let mut proxy = start(|options| options.relay.transparent = transparent);
            proxy.set(service_port("web", "10.96.0.10", 80, &[server]));
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            socket.bind(&SocketAddr::new(ip("192.0.2.7"), 0).into()).unwrap();
            socket.connect(&"10.96.0.10:80".parse::<SocketAddr>().unwrap().into()).unwrap();
            let mut answer = String::new();
            TcpStream::from(socket).read_to_string(&mut answer).unwrap();
            assert_eq!(answer, seen);
        });
    }
}
