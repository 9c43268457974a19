//! Cases of service-semantics 8, with packets of both families.

use std::net::{IpAddr, UdpSocket};

use keelson_proxy::model::{Family, Protocol, ServicePort};

use crate::{
    testing::in_namespace,
    world::{
        Answer, CLIENT, Frontends, NODE, POD_A, POD_B, World, ask, ask_often, ask_udp, assert_silent,
        endpoint, frontends, pods, run, settings, within,
    },
};

fn none(port: &mut ServicePort) {
    port.has_any = false;
    (port.cluster, port.local, port.on_node) = Default::default();
}

fn sources(answers: &[Answer]) -> Vec<IpAddr> {
    let mut sources: Vec<IpAddr> = answers.iter().filter_map(Answer::source).collect();
    sources.sort_unstable();
    sources.dedup();
    sources
}

fn addresses(family: Family, v4: &[&str], v6: &[&str]) -> Vec<IpAddr> {
    let texts = if family == Family::V4 { v4 } else { v6 };
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

#[test]
#[ignore = "needs a kernel with IPVS: run by in_the_vm"]
fn case_36_37_who_reaches_whom_and_who_is_masqueraded() {
    in_namespace(|| {
        let mut world = World::new(settings());
        world.set(|_| {});
        for family in Family::ALL {
            let Frontends { v, x, w, np } = frontends(family);
            // Pods reach the cluster IP from their own address. Pod A reaches itself masqueraded (case 38).
            let answers = ask_often(POD_A, v);
            assert_eq!(pods(&answers), "ab", "{v}");
            for answer in &answers {
                let own = addresses(family, &["10.244.1.2"], &["fd00:244:1::2"])[0];
                assert_eq!(answer.source() == Some(own), answer.pod() == Some('b'), "{v} {answer:?}");
            }
            // All others are masqueraded: the pod sees the address of the node on its link.
            let node = addresses(family, &["10.244.1.1", "10.244.2.1"], &["fd00:244:1::1", "fd00:244:2::1"]);
            for (from, to) in [
                (CLIENT, v),
                (CLIENT, x),
                (CLIENT, w),
                (CLIENT, np),
                (NODE, v),
                (NODE, x),
                (NODE, w),
                (NODE, np),
                (POD_B, w),
                (POD_B, np),
            ] {
                let answers = ask_often(from, to);
                assert_eq!(pods(&answers), "ab", "{from} {to}");
                assert_eq!(sources(&answers), node, "{from} {to}");
            }
        }
        // Node ports are at every address of the node, and not at addresses of Services or loopback (cases 45, 46).
        assert_eq!(pods(&ask_often(CLIENT, "10.0.0.8:30080".parse().unwrap())), "ab");
        assert_eq!(ask(CLIENT, "10.96.0.1:30080".parse().unwrap()), Answer::Rejected);
        assert_eq!(ask(NODE, "127.0.0.1:30080".parse().unwrap()), Answer::Rejected);
        // Nor does the node's interface with the addresses become the source of other connections.
        let other = ask(NODE, "10.244.1.2:8080".parse().unwrap());
        assert_eq!(other.source(), Some("10.244.1.1".parse().unwrap()));
    });
}

#[test]
#[ignore = "needs a kernel with IPVS: run by in_the_vm"]
fn case_17_other_ports_of_an_address_are_rejected() {
    in_namespace(|| {
        let mut world = World::new(settings());
        world.set(|_| {});
        // A process of the node that listens at every address.
        let _listener = std::net::TcpListener::bind("[::]:8081").unwrap();
        for family in Family::ALL {
            let Frontends { v, w, np, .. } = frontends(family);
            for from in [CLIENT, POD_A, NODE] {
                for mut to in [v, w] {
                    to.set_port(8081);
                    assert_eq!(ask(from, to), Answer::Rejected, "{from} {to}");
                }
            }
            let mut own = np;
            own.set_port(8081);
            // The process accepts, and says nothing.
            assert_silent(CLIENT, own);
        }
    });
}

#[test]
#[ignore = "needs a kernel with IPVS: run by in_the_vm"]
fn case_32_39_without_endpoints_connections_are_rejected_or_dropped() {
    in_namespace(|| {
        let mut world = World::new(settings());
        let all = |family| {
            let Frontends { v, x, w, np } = frontends(family);
            [v, x, w, np]
        };
        world.set(none);
        for to in Family::ALL.into_iter().flat_map(all) {
            for from in [CLIENT, POD_A, NODE] {
                assert_eq!(ask(from, to), Answer::Rejected, "{from} {to}");
            }
        }
        world.set(|port| (port.internal_local, port.local) = (true, Vec::new()));
        for family in Family::ALL {
            let Frontends { v, w, .. } = frontends(family);
            for from in [CLIENT, POD_A, NODE] {
                assert_silent(from, v);
            }
            assert_eq!(pods(&ask_often(CLIENT, w)), "ab", "{w}");
        }
        world.set(|_| {});
        for to in Family::ALL.into_iter().flat_map(all) {
            assert_eq!(pods(&ask_often(CLIENT, to)), "ab", "{to}");
        }
    });
}

#[test]
#[ignore = "needs a kernel with IPVS: run by in_the_vm"]
fn case_33_34_external_traffic_policy_local() {
    in_namespace(|| {
        let mut world = World::new(settings());
        world.set(|port| port.external_local = true);
        for family in Family::ALL {
            let Frontends { v, x, w, np } = frontends(family);
            let client = addresses(family, &["10.0.0.2"], &["fd00::2"]);
            let pod_b = addresses(family, &["10.244.2.2"], &["fd00:244:2::2"])[0];
            for to in [x, w, np] {
                let outside = ask_often(CLIENT, to);
                assert_eq!((pods(&outside).as_str(), sources(&outside)), ("a", client.clone()), "{to}");
                let pod = ask_often(POD_B, to);
                assert_eq!(pods(&pod), "ab", "{to}");
                let seen = pod.iter().filter(|answer| answer.pod() == Some('a'));
                assert!(seen.clone().all(|answer| answer.source() == Some(pod_b)), "{to} {pod:?}");
                assert_eq!(pods(&ask_often(NODE, to)), "ab", "{to}");
            }
            assert_eq!(pods(&ask_often(POD_B, v)), "ab");
        }
        world.set(|port| (port.external_local, port.local) = (true, Vec::new()));
        for family in Family::ALL {
            let Frontends { w, np, .. } = frontends(family);
            for to in [w, np] {
                assert_silent(CLIENT, to);
                assert_eq!(pods(&ask_often(POD_B, to)), "ab", "{to}");
                assert_eq!(pods(&ask_often(NODE, to)), "ab", "{to}");
            }
        }
    });
}

#[test]
#[ignore = "needs a kernel with IPVS: run by in_the_vm"]
fn case_40_source_ranges() {
    in_namespace(|| {
        let mut world = World::new(settings());
        let of = |v4: &'static str, v6: &'static str| {
            move |port: &mut ServicePort| {
                let range = if port.cluster_ip.is_ipv4() { v4 } else { v6 };
                port.source_ranges = vec![range.parse().unwrap()];
            }
        };
        world.set(of("10.0.0.0/24", "fd00::/64"));
        for family in Family::ALL {
            let Frontends { v, w, np, .. } = frontends(family);
            assert_eq!(pods(&ask_often(CLIENT, w)), "ab", "{w}");
            assert_eq!(pods(&ask_often(NODE, w)), "ab", "{w}");
            assert_silent(POD_A, w);
            assert_eq!(pods(&ask_often(POD_B, v)), "ab", "{v}");
            assert_eq!(pods(&ask_often(POD_B, np)), "ab", "{np}");
        }
        world.set(of("198.51.100.0/24", "2001:db8:51::/64"));
        for family in Family::ALL {
            let Frontends { w, np, .. } = frontends(family);
            for from in [CLIENT, NODE, POD_A] {
                assert_silent(from, w);
            }
            assert_eq!(pods(&ask_often(CLIENT, np)), "ab", "{np}");
        }
    });
}

#[test]
#[ignore = "needs a kernel with IPVS: run by in_the_vm"]
fn case_47_session_affinity() {
    in_namespace(|| {
        let mut world = World::new(settings());
        world.set(|port| port.affinity_seconds = 60);
        for family in Family::ALL {
            let Frontends { v, .. } = frontends(family);
            let first = pods(&ask_often(POD_A, v));
            assert_eq!(first.len(), 1, "{v}");
            world.restart();
            world.set(|port| port.affinity_seconds = 60);
            assert_eq!(pods(&ask_often(POD_A, v)), first, "{v}: after a restart");
            let other = if first == "a" { 'b' } else { 'a' };
            world.set(|port| {
                port.affinity_seconds = 60;
                port.cluster = vec![endpoint(Family::of(port.cluster_ip), other)];
            });
            assert_eq!(pods(&ask_often(POD_A, v)), other.to_string(), "{v}: the target is gone");
            world.set(|port| port.affinity_seconds = 60);
        }
    });
}

#[test]
#[ignore = "needs a kernel with IPVS: run by in_the_vm"]
fn case_48_udp_flows_leave_an_endpoint_that_is_gone() {
    in_namespace(|| {
        let mut world = World::new(settings());
        world.set(|port| port.name.protocol = Protocol::Udp);
        for family in Family::ALL {
            let Frontends { v, np, .. } = frontends(family);
            for (from, to) in [(POD_A, v), (CLIENT, np), (NODE, v)] {
                let any = if family == Family::V4 { "0.0.0.0:0" } else { "[::]:0" };
                let socket = within(from, || UdpSocket::bind(any).unwrap());
                let first = ask_udp(&socket, to);
                assert!(first.is_some(), "{from} {to}");
                assert_eq!(ask_udp(&socket, to), first, "{from} {to}: one flow");
                let other = if first == Some('a') { 'b' } else { 'a' };
                world.set(|port| {
                    port.name.protocol = Protocol::Udp;
                    port.cluster = vec![endpoint(Family::of(port.cluster_ip), other)];
                });
                // The proxy deletes entries of conntrack of such flows.
                run("conntrack -D -p udp >/dev/null 2>&1; conntrack -D -f ipv6 -p udp >/dev/null 2>&1; true");
                assert_eq!(ask_udp(&socket, to), Some(other), "{from} {to}");
                world.set(|port| port.name.protocol = Protocol::Udp);
            }
        }
        world.set(|port| {
            port.name.protocol = Protocol::Udp;
            none(port);
        });
        let socket = within(CLIENT, || {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.connect(frontends(Family::V4).v).unwrap();
            socket
        });
        socket.set_read_timeout(Some(std::time::Duration::from_secs(2))).unwrap();
        socket.send(b"?").unwrap();
        let refused = socket.recv(&mut [0; 8]).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    });
}
