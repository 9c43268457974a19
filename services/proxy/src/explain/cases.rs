//! Cases of service-semantics 8, by number, that backends with rules explain alike: what becomes of the first packet of a
//! connection.
//!
//! Owns: [`Case`], and a test for each of the cases. In: `super::DRIVER`, the backend whose tests include this file. Out:
//! nothing; no test needs the kernel.

use std::net::{IpAddr, SocketAddr};

use keelson_client::ServiceName;
use keelson_proto::proxy as pb;
use keelson_proxy::{
    addresses::{Match, NodePortAddresses},
    backend::{Access, Backend},
    explain::{Question, Source},
    model::{Endpoint, Family, Protocol, ServicePort},
    options::{Detector, NodeConfig, Options},
};

use super::DRIVER;
use crate::testing::{options, service_port};

pub(crate) const V: &str = "10.96.0.1:80";
pub(crate) const X: &str = "192.0.2.1:80";
pub(crate) const W: &str = "192.0.2.2:80";
pub(crate) const NP: &str = "10.0.0.7:30080";
pub(crate) const NP2: &str = "10.0.0.8:30080";
pub(crate) const LOOPBACK: &str = "127.0.0.1:30080";

/// L is on the node, R elsewhere.
const L: &str = "10.244.0.1:8080";
const R: &str = "10.244.9.1:8080";

pub(crate) const POD: &str = "pod";
pub(crate) const HOST: &str = "node";
pub(crate) const OUTSIDE: &str = "outside";

const LOCAL: [&str; 3] = ["10.0.0.7", "10.0.0.8", "127.0.0.1"];

fn endpoint(text: &str) -> Endpoint {
    let address: SocketAddr = text.parse().unwrap();
    Endpoint { ip: address.ip(), port: address.port() }
}

pub(crate) fn settings() -> Options {
    let mut options = options(&["10.244.0.0/16"]);
    options.node_port_addresses = NodePortAddresses::Cidrs(Vec::new());
    options
}

/// The node has 10.0.0.7 and 10.0.0.8; its pods are in 10.244.0.0/16.
pub(crate) fn node() -> NodeConfig {
    NodeConfig {
        family: Family::V4,
        masquerade_all: false,
        mark: 0x4000,
        detector: Some(Detector::Cidr("10.244.0.0/16".parse().unwrap())),
        service_cidrs: Vec::new(),
        node_ips: vec!["10.0.0.7".parse().unwrap()],
        node_ports: Match::AllLocal,
        untracked_pods: false,
    }
}

/// A Service of type LoadBalancer with V, X, W and NP, and L and R.
fn web() -> ServicePort {
    let mut port = service_port(&ServiceName::new("default", "web"), "", "10.96.0.1".parse().unwrap(), 80);
    port.external_ips = vec!["192.0.2.1".parse().unwrap()];
    port.load_balancer_ips = vec!["192.0.2.2".parse().unwrap()];
    port.node_port = 30_080;
    port.has_any = true;
    port.cluster = [L, R].map(endpoint).into();
    port.local = vec![endpoint(L)];
    port.on_node = vec![endpoint(L)];
    port
}

pub(crate) struct Case(Box<dyn Backend>);

/// [`web`] with a change.
pub(crate) fn case(node: NodeConfig, change: impl FnOnce(&mut ServicePort)) -> Case {
    case_with(&settings(), node, change)
}

pub(crate) fn case_with(options: &Options, node: NodeConfig, change: impl FnOnce(&mut ServicePort)) -> Case {
    let mut port = web();
    change(&mut port);
    Case::new(options, node, vec![port])
}

impl Case {
    fn new(options: &Options, node: NodeConfig, ports: Vec<ServicePort>) -> Self {
        let mut backend = DRIVER.open(options, Access::Print).unwrap();
        backend.set_addresses(&LOCAL.map(|ip| ip.parse().unwrap()));
        backend.set_node(node);
        backend.set_service(Family::V4, &web().name.service, ports);
        Self(backend)
    }

    pub(crate) fn explain(&self, from: &str, to: &str) -> pb::Explanation {
        let local: Vec<IpAddr> = LOCAL.map(|ip| ip.parse().unwrap()).into();
        let question = Question::new(to.parse().unwrap(), from.parse::<Source>().unwrap()).unwrap();
        self.0.explain(&question, &local)
    }

    /// The steps of the first way, one line each.
    pub(crate) fn steps(&self, from: &str, to: &str) -> String {
        self.explain(from, to).ways[0].steps.join("\n")
    }

    /// `{endpoints}` with `+M` if masqueraded, or the verdict.
    fn reaches(&self, from: &str, to: &str) -> String {
        let short = |way: &pb::Way| match way.verdict.as_str() {
            "forwarded" => {
                let named = |it: &String| match it.as_str() {
                    L => "L".to_owned(),
                    R => "R".to_owned(),
                    other => other.to_owned(),
                };
                let names: Vec<String> = way.endpoints.iter().map(named).collect();
                format!("{}{}", names.join(""), if way.masqueraded { "+M" } else { "" })
            }
            verdict => verdict.to_owned(),
        };
        self.explain(from, to).ways.iter().map(short).collect::<Vec<_>>().join("/")
    }

    /// Rows: source, target, expected result.
    pub(crate) fn expect(&self, rows: &[(&str, &str, &str)]) {
        for (from, to, expected) in rows {
            assert_eq!(self.reaches(from, to), *expected, "{from} -> {to}");
        }
    }
}

#[test]
fn case_21_22_no_local_endpoint_is_a_drop_and_none_anywhere_a_rejection() {
    let only_remote = case(node(), |port| {
        (port.external_local, port.local, port.cluster) = (true, Vec::new(), vec![endpoint(R)]);
    });
    only_remote.expect(&[(POD, V, "R"), (OUTSIDE, W, "dropped"), (OUTSIDE, NP, "dropped")]);
    let none = case(node(), |port| {
        (port.external_local, port.has_any, port.local, port.cluster) = (true, false, Vec::new(), Vec::new());
    });
    none.expect(&[(POD, V, "rejected"), (OUTSIDE, W, "rejected"), (OUTSIDE, NP, "rejected")]);
}

#[test]
fn case_31_32_internal_policy_local() {
    case(node(), |port| port.internal_local = true).expect(&[(POD, V, "L"), (OUTSIDE, NP, "LR+M")]);
    let remote = case(node(), |port| {
        (port.internal_local, port.local, port.cluster) = (true, Vec::new(), vec![endpoint(R)]);
    });
    remote.expect(&[(POD, V, "dropped"), (HOST, V, "dropped"), (OUTSIDE, V, "dropped"), (OUTSIDE, W, "R+M")]);
}

#[test]
fn case_33_34_external_policy_local() {
    case(node(), |port| port.external_local = true).expect(&[
        (OUTSIDE, W, "L"),
        (OUTSIDE, NP, "L"),
        (OUTSIDE, X, "L"),
        (POD, W, "LR"),
        (POD, NP, "LR"),
        (POD, X, "LR"),
        (HOST, W, "LR+M"),
        (HOST, NP, "LR+M"),
        (POD, V, "LR"),
    ]);
    let remote = case(node(), |port| {
        (port.external_local, port.local, port.cluster) = (true, Vec::new(), vec![endpoint(R)]);
    });
    remote.expect(&[(OUTSIDE, W, "dropped"), (OUTSIDE, NP, "dropped"), (POD, W, "R"), (HOST, NP, "R+M")]);
}

#[test]
fn case_35_without_a_detector_pods_are_outside() {
    let plain = NodeConfig { detector: None, ..node() };
    case(plain, |port| port.external_local = true).expect(&[(POD, W, "L"), (HOST, W, "LR+M")]);
}

#[test]
fn case_36_masquerading_to_cluster_ips() {
    case(node(), |_| {}).expect(&[(POD, V, "LR"), (HOST, V, "LR+M"), (OUTSIDE, V, "LR+M")]);
    let none = NodeConfig { detector: None, ..node() };
    case(none, |_| {}).expect(&[(POD, V, "LR"), (OUTSIDE, V, "LR")]);
    let all = NodeConfig { masquerade_all: true, ..node() };
    case(all, |_| {}).expect(&[(POD, V, "LR+M"), (HOST, V, "LR+M"), (OUTSIDE, V, "LR+M")]);
    for detector in [Detector::Bridge("cni0".into()), Detector::InterfacePrefix("veth".into())] {
        let by_interface = NodeConfig { detector: Some(detector), ..node() };
        case(by_interface, |_| {}).expect(&[(POD, V, "LR"), (HOST, V, "LR+M"), (OUTSIDE, V, "LR+M")]);
    }
}

#[test]
fn case_37_external_frontends_are_masqueraded() {
    let web = case(node(), |_| {});
    for from in [POD, HOST, OUTSIDE] {
        web.expect(&[(from, W, "LR+M"), (from, X, "LR+M"), (from, NP, "LR+M")]);
    }
}

#[test]
fn case_38_hairpin() {
    let one = |to: &'static str| case(node(), move |port| port.cluster = vec![endpoint(to)]);
    one(L).expect(&[("10.244.0.1", V, "L+M"), ("10.244.0.2", V, "L")]);
    one(R).expect(&[("10.244.0.1", V, "R")]);
}

#[test]
fn case_39_no_endpoints() {
    let none =
        case(node(), |port| (port.has_any, port.cluster, port.local) = (false, Vec::new(), Vec::new()));
    for from in [POD, HOST, OUTSIDE] {
        for to in [V, W, X, NP] {
            none.expect(&[(from, to, "rejected")]);
        }
    }
}

#[test]
fn case_40_to_42_source_ranges() {
    let ranges = |text: &str| vec![text.parse().unwrap()];
    let clients = case(node(), |port| port.source_ranges = ranges("198.51.100.0/25"));
    clients.expect(&[
        ("198.51.100.1", W, "LR+M"),
        ("198.51.100.200", W, "dropped"),
        ("10.244.0.9", W, "dropped"),
        ("198.51.100.200", NP, "LR+M"),
        ("198.51.100.200", X, "LR+M"),
        (HOST, W, "dropped"),
        (OUTSIDE, W, "LR+M/dropped"),
    ]);
    let with_node = case(node(), |port| port.source_ranges = ranges("10.0.0.0/24"));
    with_node.expect(&[(HOST, W, "LR+M"), ("192.0.2.2", W, "LR+M")]);
    let none = case(node(), |port| {
        (port.has_any, port.cluster, port.source_ranges) = (false, Vec::new(), ranges("198.51.100.0/25"));
    });
    none.expect(&[("198.51.100.1", W, "rejected")]);
    let local = case(node(), |port| {
        (port.external_local, port.source_ranges) = (true, ranges("198.51.100.0/25"));
    });
    local.expect(&[("198.51.100.1", W, "L"), ("198.51.100.200", W, "dropped"), ("198.51.100.200", NP, "L")]);
}

#[test]
fn case_44_45_node_ports() {
    case(node(), |port| port.node_port = 0).expect(&[(OUTSIDE, NP, "untouched"), (OUTSIDE, W, "LR+M")]);
    case(node(), |_| {}).expect(&[(OUTSIDE, NP, "LR+M"), (OUTSIDE, NP2, "LR+M")]);
    let listed = NodeConfig { node_ports: Match::Addresses(vec!["10.0.0.7".parse().unwrap()]), ..node() };
    case(listed, |_| {}).expect(&[(OUTSIDE, NP, "LR+M"), (OUTSIDE, NP2, "untouched")]);
}

#[test]
fn udp_and_sctp_ports_are_independent() {
    let ports = Protocol::ALL.map(|protocol| {
        let mut port = web();
        port.name.protocol = protocol;
        port.cluster = vec![Endpoint { ip: "10.244.3.1".parse().unwrap(), port: protocol.number().into() }];
        port
    });
    Case::new(&settings(), node(), ports.into()).expect(&[
        (POD, "10.96.0.1:80", "10.244.3.1:6"),
        (POD, "10.96.0.1:80/UDP", "10.244.3.1:17"),
        (OUTSIDE, "10.0.0.7:30080/SCTP", "10.244.3.1:132+M"),
    ]);
}

#[test]
fn frontends_are_described() {
    let local = case(node(), |port| {
        (port.internal_local, port.external_local, port.local) = (true, true, Vec::new());
    });
    for (to, described) in [
        (V, ": it has endpoints, but none that this traffic may use"),
        ("10.96.0.1:81", "10.96.0.1 is an address of default/web, which has no port 81/TCP"),
        ("10.0.0.7:81", "10.0.0.7 is an address of this node, but no Service has the node port 81/TCP"),
        (
            "8.8.8.8:53",
            "8.8.8.8:53/TCP is not a frontend: 8.8.8.8 belongs to no Service and not to this node",
        ),
    ] {
        let frontend = local.explain(POD, to).frontend;
        assert!(frontend.ends_with(described), "{frontend}");
    }
    let listed = NodeConfig { node_ports: Match::Addresses(Vec::new()), ..node() };
    let explained = case(listed, |_| {}).explain(OUTSIDE, NP);
    let described = "default/web has the node port 30080/TCP, but node ports are not served at 10.0.0.7";
    assert_eq!((explained.frontend.as_str(), explained.service_port.as_str()), (described, ""));
    let explained = case(node(), |port| port.has_any = false).explain(OUTSIDE, W);
    let described = "192.0.2.2:80/TCP is a load-balancer IP of default/web: no usable endpoint on any node";
    assert_eq!((explained.frontend.as_str(), explained.service_port.as_str()), (described, "default/web"));
}
