//! Tests with real flows in a network namespace, checked with the program `conntrack`; and the rule alone, against a
//! plain restatement.

use std::{
    io::Write as _,
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    process::{Command, Stdio},
};

use proptest::prelude::*;

use super::*;
use crate::{model::Endpoint, testing::in_namespace};

const UDP: u8 = 17;

fn stale(flows: impl IntoIterator<Item = Flow>, frontends: &UdpFrontends) -> Vec<Flow> {
    flows.into_iter().filter(|flow| frontends.is_stale(flow)).collect()
}

/// A node with a Service's addresses. The addresses of the pods are local, too.
pub(super) struct Node {
    family: Family,
    client: IpAddr,
    /// V, X, W; `np` is an address of the node.
    pub(super) v: IpAddr,
    x: IpAddr,
    w: IpAddr,
    np: IpAddr,
    /// An address of no Service.
    other: IpAddr,
    first: Endpoint,
    second: Endpoint,
}

impl Node {
    pub(super) fn run(family: Family, test: impl FnOnce(&Self) + Send) {
        in_namespace(|| {
            let node = Self::new(family);
            test(&node);
        });
    }

    fn new(family: Family) -> Self {
        let ip = |v4: &str, v6: &str| -> IpAddr {
            match family {
                Family::V4 => v4.parse().unwrap(),
                Family::V6 => v6.parse().unwrap(),
            }
        };
        let endpoint = |ip| Endpoint { ip, port: 5353 };
        let node = Self {
            family,
            client: ip("192.0.2.1", "fd00:1::1"),
            v: ip("10.96.0.10", "fd00:96::10"),
            x: ip("10.96.1.10", "fd00:96::1:10"),
            w: ip("10.96.2.10", "fd00:96::2:10"),
            np: ip("192.0.2.2", "fd00:1::2"),
            other: ip("10.96.9.9", "fd00:96::9:9"),
            first: endpoint(ip("10.244.0.2", "fd00:244::2")),
            second: endpoint(ip("10.244.0.3", "fd00:244::3")),
        };
        run("ip", &["link", "add", "outside", "type", "veth", "peer", "name", "nobody"]);
        for interface in ["outside", "nobody"] {
            run("ip", &["link", "set", interface, "up"]);
        }
        for local in [node.client, node.np, node.first.ip, node.second.ip] {
            let local = local.to_string();
            run("ip", &["address", "add", &local, "dev", "lo"]);
            // The kernel adds the route of an IPv6 address a moment later.
            while !run("ip", &["route", "get", &local]).starts_with("local") {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
        let services =
            ip("10.96.0.0", "fd00:96::").to_string() + if family == Family::V4 { "/16" } else { "/64" };
        run("ip", &["route", "add", &services, "dev", "outside"]);
        node
    }

    /// Client port 4001 is served by the first endpoint, 4002 by the second, 4010 and 4011 by the first in zones of
    /// their own; 4003 is not translated. TCP goes to the first.
    pub(super) fn nat(&self) {
        let table = if self.family == Family::V4 { "ip" } else { "ip6" };
        let (first, second) = (self.first, self.second);
        nft(&format!(
            "table {table} test {{
              chain zones {{ type filter hook output priority raw;
                udp sport 4010 ct zone set 7
                udp sport 4011 ct original zone set 9;
              }}
              chain nat {{ type nat hook output priority -100;
                udp dport {{ 53, 30053 }} udp sport {{ 4001, 4010, 4011 }} dnat to {first}
                udp dport {{ 53, 30053 }} udp sport 4002 dnat to {second}
                tcp dport 53 dnat to {first};
              }}
            }}"
        ));
    }

    pub(super) fn send(&self, from: u16, to: IpAddr, port: u16) {
        // A child process that another test starts holds copies of this process's sockets until its exec.
        let socket = loop {
            match UdpSocket::bind((self.client, from)) {
                Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => std::thread::yield_now(),
                bound => break bound.unwrap(),
            }
        };
        socket.send_to(b"?", (to, port)).unwrap();
    }

    /// Opens a TCP connection to the first endpoint and returns both ends.
    pub(super) fn connect(&self, to: IpAddr, port: u16) -> (TcpListener, TcpStream) {
        let listener = TcpListener::bind(SocketAddr::new(self.first.ip, self.first.port)).unwrap();
        let stream = TcpStream::connect((to, port)).unwrap();
        (listener, stream)
    }

    fn frontend(&self, serving: &[Endpoint]) -> UdpFrontend {
        UdpFrontend {
            addresses: vec![self.v, self.x, self.w],
            port: 53,
            node_port: 30_053,
            serving: serving.to_vec(),
        }
    }

    fn clean(&self, serving: &[Endpoint]) -> u64 {
        let cleaned = clean(self.family, &[self.frontend(serving)].into_iter().collect()).unwrap();
        assert_eq!((cleaned.failed, cleaned.interrupted), (0, false), "{cleaned:?}");
        cleaned.deleted
    }

    /// Output of the program `conntrack`: protocol, client port, original destination and its port; ordered.
    fn flows(&self) -> Vec<(String, u16, IpAddr, u16)> {
        let family = if self.family == Family::V4 { "ipv4" } else { "ipv6" };
        let listed = run("conntrack", &["-L", "-f", family]);
        let flow = |line: &str| {
            let field = |name: &str| {
                let word = line.split_whitespace().find_map(|word| word.strip_prefix(name));
                word.unwrap_or_else(|| panic!("{name} in {line}")).to_owned()
            };
            let protocol = line.split_whitespace().next().unwrap().to_owned();
            let from = if protocol == "tcp" { 0 } else { field("sport=").parse().unwrap() };
            (protocol, from, field("dst=").parse().unwrap(), field("dport=").parse().unwrap())
        };
        let known = |line: &&str| line.starts_with("udp") || line.starts_with("tcp");
        let mut flows: Vec<_> = listed.lines().filter(known).map(flow).collect();
        flows.sort();
        flows
    }
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output =
        Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

fn nft(rules: &str) {
    let mut nft = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    nft.stdin.take().unwrap().write_all(rules.as_bytes()).unwrap();
    assert!(nft.wait().unwrap().success(), "{rules}");
}

fn udp(from: u16, to: IpAddr, port: u16) -> (String, u16, IpAddr, u16) {
    ("udp".to_owned(), from, to, port)
}

fn tcp(to: IpAddr, port: u16) -> (String, u16, IpAddr, u16) {
    ("tcp".to_owned(), 0, to, port)
}

#[test]
fn case_48_flows_to_a_removed_endpoint_are_deleted_for_every_frontend() {
    for family in Family::ALL {
        Node::run(family, |node| {
            node.nat();
            for (to, port) in [(node.v, 53), (node.x, 53), (node.w, 53), (node.np, 30_053)] {
                node.send(4001, to, port);
                node.send(4002, to, port);
            }
            node.send(4010, node.v, 53);
            node.send(4011, node.v, 53);
            // Flows that must stay: TCP to the same endpoint, to another address with the port, to V with another port.
            let _connection = node.connect(node.v, 53);
            node.send(4003, node.other, 53);
            node.send(4003, node.v, 54);
            assert_eq!(node.flows().len(), 13, "{:?}", node.flows());

            assert_eq!(node.clean(&[node.first, node.second]), 0, "both serve");
            assert_eq!(node.flows().len(), 13);
            assert_eq!(node.clean(&[node.second]), 6);
            let mut kept = vec![tcp(node.v, 53), udp(4003, node.other, 53), udp(4003, node.v, 54)];
            kept.extend(
                [(node.v, 53), (node.x, 53), (node.w, 53), (node.np, 30_053)]
                    .map(|(to, port)| udp(4002, to, port)),
            );
            kept.sort();
            assert_eq!(node.flows(), kept);
            assert_eq!(node.clean(&[node.second]), 0, "there is nothing left to do");
        });
    }
}

#[test]
fn case_49_untranslated_flows_are_deleted_with_the_first_endpoint_and_kept_with_the_last() {
    for family in Family::ALL {
        Node::run(family, |node| {
            node.nat();
            // V has no endpoint and is not translated. The other flow is older, to the last endpoint that was removed.
            node.send(4003, node.v, 53);
            node.send(4001, node.v, 53);
            assert_eq!(node.clean(&[]), 0);
            assert_eq!(node.flows(), [udp(4001, node.v, 53), udp(4003, node.v, 53)]);
            assert_eq!(node.clean(&[node.second]), 2, "an endpoint has come");
            assert_eq!(node.flows(), []);
            // The same endpoint returns.
            node.send(4003, node.v, 53);
            node.send(4001, node.v, 53);
            assert_eq!(node.clean(&[]), 0);
            assert_eq!(node.clean(&[node.first]), 1);
            assert_eq!(node.flows(), [udp(4001, node.v, 53)]);
        });
    }
}

#[test]
fn case_50_flows_to_serving_endpoints_are_kept_unless_the_port_changed() {
    for family in Family::ALL {
        Node::run(family, |node| {
            node.nat();
            // The policies, topology and readiness of endpoints do not matter: every serving endpoint is in the list.
            node.send(4001, node.np, 30_053);
            node.send(4002, node.w, 53);
            assert_eq!(node.clean(&[node.first, node.second]), 0);
            let moved = Endpoint { port: 5354, ..node.first };
            assert_eq!(node.clean(&[moved, node.second]), 1);
            assert_eq!(node.flows(), [udp(4002, node.w, 53)]);
        });
    }
}

#[test]
fn an_expired_flow_is_no_error() {
    Node::run(Family::V4, |node| {
        node.nat();
        node.send(4001, node.v, 53);
        let mut conntrack = Conntrack::open().unwrap();
        let dump = conntrack.dump(node.family, |_| true).unwrap();
        let flow = dump.flows.iter().next().copied().unwrap();
        let original = Tuple {
            source: node.client,
            destination: node.v,
            source_port: 4001,
            destination_port: 53,
            zone: None,
        };
        let reply = Tuple {
            source: node.first.ip,
            destination: node.client,
            source_port: 5353,
            destination_port: 4001,
            zone: None,
        };
        assert_eq!(
            (dump.flows.len(), flow),
            (1, Flow { protocol: UDP, original, reply, zone: None, id: flow.id })
        );
        assert!(flow.id.is_some());
        assert!(conntrack.delete(&flow).unwrap());
        assert!(!conntrack.delete(&flow).unwrap());
    });
}

fn ip(last: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, last])
}

fn some_flow() -> impl Strategy<Value = Flow> {
    let tuple = |(source, source_port, destination, destination_port)| Tuple {
        source: ip(source),
        destination: ip(destination),
        source_port,
        destination_port,
        zone: None,
    };
    let tuples = (0..6_u8, 50..55_u16, 0..6_u8, 50..55_u16).prop_map(tuple);
    (prop_oneof![4 => Just(UDP), 1 => Just(6), 1 => Just(132)], tuples.clone(), tuples)
        .prop_map(|(protocol, original, reply)| Flow { protocol, original, reply, zone: None, id: None })
}

fn some_frontend() -> impl Strategy<Value = UdpFrontend> {
    let endpoint = (0..6_u8, 50..55_u16).prop_map(|(last, port)| Endpoint { ip: ip(last), port });
    let addresses = prop::collection::vec((0..6_u8).prop_map(ip), 1..3);
    (addresses, 50..55_u16, prop_oneof![Just(0), 50..55_u16], prop::collection::vec(endpoint, 0..4))
        .prop_map(|(addresses, port, node_port, serving)| UdpFrontend { addresses, port, node_port, serving })
}

proptest! {
    #[test]
    fn a_flow_is_stale_if_it_goes_to_the_frontend_and_to_no_serving_endpoint(
        flows in prop::collection::vec(some_flow(), 0..20),
        frontend in some_frontend(),
    ) {
        let expected: Vec<Flow> = flows.iter().copied().filter(|flow| {
            let to = &flow.original;
            let by_address = frontend.addresses.contains(&to.destination) && to.destination_port == frontend.port;
            let by_node_port = frontend.node_port != 0 && to.destination_port == frontend.node_port;
            let from = Endpoint { ip: flow.reply.source, port: flow.reply.source_port };
            flow.protocol == UDP
                && !frontend.serving.is_empty()
                && (by_address || by_node_port)
                && !frontend.serving.contains(&from)
        }).collect();
        prop_assert_eq!(stale(flows, &[frontend].into_iter().collect()), expected);
    }
}

#[test]
fn many_flows_are_matched_to_many_services() {
    let service = |n: u32| IpAddr::from((0x0a60_0000 + n).to_be_bytes());
    let pod = |n: u32| Endpoint { ip: IpAddr::from((0x0af4_0000 + n).to_be_bytes()), port: 5353 };
    let frontends: UdpFrontends = (0..1_000)
        .map(|n| UdpFrontend { addresses: vec![service(n)], port: 53, node_port: 0, serving: vec![pod(n)] })
        .collect();
    let flow = |n: u32| {
        let client = IpAddr::from((0x0b00_0000 + n).to_be_bytes());
        // Every tenth flow goes to the pod of another Service.
        let pod = pod(if n.is_multiple_of(10) { (n + 1) % 1_000 } else { n % 1_000 });
        let tuple = |source, source_port, destination, destination_port| Tuple {
            source,
            destination,
            source_port,
            destination_port,
            zone: None,
        };
        Flow {
            protocol: UDP,
            original: tuple(client, 4_000, service(n % 1_000), 53),
            reply: tuple(pod.ip, pod.port, client, 4_000),
            zone: None,
            id: None,
        }
    };
    assert_eq!(stale((0..100_000).map(flow), &frontends).len(), 10_000);
}

#[test]
fn two_services_of_one_frontend_keep_the_flows_of_both() {
    let frontend = |last| UdpFrontend {
        addresses: vec![ip(1)],
        port: 53,
        node_port: 0,
        serving: vec![Endpoint { ip: ip(last), port: 53 }],
    };
    let frontends: UdpFrontends = [frontend(2), frontend(3)].into_iter().collect();
    let flow = |from: u8| {
        let tuple = |source, destination| Tuple {
            source,
            destination,
            source_port: 53,
            destination_port: 53,
            zone: None,
        };
        Flow {
            protocol: UDP,
            original: tuple(ip(9), ip(1)),
            reply: tuple(ip(from), ip(9)),
            zone: None,
            id: None,
        }
    };
    assert_eq!(stale([2, 3, 4].map(flow), &frontends), [flow(4)]);
}

#[test]
fn offloaded_flows_are_distinguished_from_other_failures() {
    use nix::errno::Errno;
    let error =
        |errno: Errno| ConntrackError::new("delete a flow", std::io::Error::from_raw_os_error(errno as i32));
    assert!(error(Errno::EBUSY).is_offloaded());
    for errno in [Errno::ENOENT, Errno::EPERM, Errno::EOPNOTSUPP, Errno::ENOBUFS] {
        assert!(!error(errno).is_offloaded(), "{errno}");
    }
}

/// The client is a pod here; the endpoints are, too.
#[test]
fn translated_flows_whose_replies_go_to_the_client_are_counted() {
    for family in Family::ALL {
        Node::run(family, |node| {
            let (any, endpoints, client) = match family {
                Family::V4 => ("0.0.0.0/0", "10.244.0.0/16", "192.0.2.0/24"),
                Family::V6 => ("::/0", "fd00:244::/32", "fd00:1::/32"),
            };
            let count = |net: &str| translated_between(family, net.parse().unwrap()).unwrap();
            node.nat();
            node.send(4003, node.v, 53);
            assert_eq!(count(any), 0, "nothing is translated");
            node.send(4001, node.v, 53);
            let _connection = node.connect(node.v, 53);
            assert_eq!(count(any), 2);
            assert_eq!(count(endpoints), 0, "the client is outside");
            assert_eq!(count(client), 0, "the endpoints are outside");
        });
    }
}

#[test]
fn masqueraded_and_untranslated_flows_are_none_between_pods() {
    let tuple = |source: &str, destination: &str| Tuple {
        source: source.parse().unwrap(),
        destination: destination.parse().unwrap(),
        source_port: 4001,
        destination_port: 80,
        zone: None,
    };
    let pods = "10.244.0.0/16".parse().unwrap();
    let (pod, other, frontend, node) = ("10.244.1.1", "10.244.1.2", "10.96.0.10", "10.244.0.1");
    for (protocol, original, reply, expected) in [
        (6, tuple(pod, frontend), tuple(other, pod), true),
        (UDP, tuple(pod, frontend), tuple(other, pod), true),
        (132, tuple(pod, frontend), tuple(other, pod), false),
        (6, tuple(pod, other), tuple(other, pod), false),
        (6, tuple(pod, frontend), tuple(other, node), false),
        (6, tuple("192.0.2.1", frontend), tuple(other, "192.0.2.1"), false),
        (6, tuple(pod, frontend), tuple("192.0.2.1", pod), false),
    ] {
        let flow = Flow { protocol, original, reply, zone: None, id: None };
        assert_eq!(flow.is_translated_between(pods), expected, "{flow:?}");
    }
}
