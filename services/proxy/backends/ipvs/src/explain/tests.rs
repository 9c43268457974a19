//! Cases of service-semantics 8, by number: what becomes of the first packet of a connection, by the rules.

use std::net::IpAddr;

use keelson_client::ServiceName;
use keelson_proxy::{
    addresses::Match as Addresses,
    explain::{Question, Source},
    model::{Endpoint, Family, Protocol, ServicePort},
    options::Detector,
};

use super::{RuleContext, explain};
use crate::{
    plan::{NodeFacts, Plan},
    testing::service_port,
};

const V: &str = "10.96.0.1:80";
const X: &str = "192.0.2.1:80";
const W: &str = "192.0.2.2:80";
const NP: &str = "10.0.0.7:30080";
const NP2: &str = "10.0.0.8:30080";
const LOOPBACK: &str = "127.0.0.1:30080";

/// L is on the node, R elsewhere.
const L: &str = "10.244.0.1:8080";
const R: &str = "10.244.9.1:8080";

const POD: &str = "pod";
const HOST: &str = "node";
const OUTSIDE: &str = "outside";

fn endpoint(text: &str) -> Endpoint {
    let address: std::net::SocketAddr = text.parse().unwrap();
    Endpoint { ip: address.ip(), port: address.port() }
}

fn facts() -> NodeFacts {
    NodeFacts {
        mark: 0x4000,
        masquerade_all: false,
        detector: Some(Detector::Cidr("10.244.0.0/16".parse().unwrap())),
        node_ips: vec!["10.0.0.7".parse().unwrap()],
        node_ports: Addresses::AllLocal,
        local: ["10.0.0.7", "10.0.0.8", "127.0.0.1"].map(|ip| ip.parse().unwrap()).into(),
        scheduler: "rr".into(),
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

struct Case {
    plan: Plan,
}

fn case(facts: NodeFacts, change: impl FnOnce(&mut ServicePort)) -> Case {
    let mut port = web();
    change(&mut port);
    let mut plan = Plan::new(Family::V4, facts);
    plan.set(&port.name.service.clone(), vec![port]);
    Case { plan }
}

impl Case {
    /// `{endpoints}` with `+M` if masqueraded, or the verdict.
    fn reaches(&self, from: &str, to: &str) -> String {
        let local: Vec<IpAddr> = ["10.0.0.7", "10.0.0.8", "127.0.0.1"].map(|ip| ip.parse().unwrap()).into();
        let question = Question::new(to.parse().unwrap(), from.parse::<Source>().unwrap()).unwrap();
        let explained = explain(&RuleContext { plan: &self.plan, local: &local }, &question);
        let ways: Vec<String> = (explained.ways.iter())
            .map(|way| match way.verdict.as_str() {
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
            })
            .collect();
        ways.join("/")
    }

    fn steps(&self, from: &str, to: &str) -> String {
        let question = Question::new(to.parse().unwrap(), from.parse::<Source>().unwrap()).unwrap();
        let explained = explain(&RuleContext { plan: &self.plan, local: &[] }, &question);
        explained.ways[0].steps.join("\n")
    }

    fn expect(&self, rows: &[(&str, &str, &str)]) {
        for (from, to, expected) in rows {
            assert_eq!(self.reaches(from, to), *expected, "{from} -> {to}");
        }
    }
}

#[test]
fn case_14_17_other_protocols_and_ports_of_an_address_are_rejected() {
    let case = case(facts(), |_| {});
    case.expect(&[
        (POD, "10.96.0.1:80/UDP", "rejected"),
        (POD, "10.96.0.1:81", "rejected"),
        (OUTSIDE, "192.0.2.2:81", "rejected"),
        (OUTSIDE, "10.0.0.7:80", "untouched"),
        (POD, "10.96.0.2:80", "untouched"),
    ]);
}

#[test]
fn case_21_22_no_local_endpoint_is_a_drop_and_none_anywhere_a_rejection() {
    let only_remote = case(facts(), |port| {
        (port.external_local, port.local, port.cluster) = (true, Vec::new(), vec![endpoint(R)]);
    });
    only_remote.expect(&[(POD, V, "R"), (OUTSIDE, W, "dropped"), (OUTSIDE, NP, "dropped")]);
    let none = case(facts(), |port| {
        (port.external_local, port.has_any, port.local, port.cluster) = (true, false, Vec::new(), Vec::new());
    });
    none.expect(&[(POD, V, "rejected"), (OUTSIDE, W, "rejected"), (OUTSIDE, NP, "rejected")]);
}

#[test]
fn case_31_32_internal_policy_local() {
    case(facts(), |port| port.internal_local = true).expect(&[(POD, V, "L"), (OUTSIDE, NP, "LR+M")]);
    let remote = case(facts(), |port| {
        (port.internal_local, port.local, port.cluster) = (true, Vec::new(), vec![endpoint(R)]);
    });
    remote.expect(&[(POD, V, "dropped"), (HOST, V, "dropped"), (OUTSIDE, V, "dropped"), (OUTSIDE, W, "R+M")]);
}

#[test]
fn case_33_34_external_policy_local() {
    case(facts(), |port| port.external_local = true).expect(&[
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
    let remote = case(facts(), |port| {
        (port.external_local, port.local, port.cluster) = (true, Vec::new(), vec![endpoint(R)]);
    });
    remote.expect(&[(OUTSIDE, W, "dropped"), (OUTSIDE, NP, "dropped"), (POD, W, "R"), (HOST, NP, "R+M")]);
}

#[test]
fn case_35_without_a_detector_pods_are_outside() {
    let plain = NodeFacts { detector: None, ..facts() };
    case(plain, |port| port.external_local = true).expect(&[(POD, W, "L"), (HOST, W, "LR+M")]);
}

#[test]
fn case_36_masquerading_to_cluster_ips() {
    case(facts(), |_| {}).expect(&[(POD, V, "LR"), (HOST, V, "LR+M"), (OUTSIDE, V, "LR+M")]);
    let none = NodeFacts { detector: None, ..facts() };
    case(none, |_| {}).expect(&[(POD, V, "LR"), (HOST, V, "LR+M"), (OUTSIDE, V, "LR")]);
    let all = NodeFacts { masquerade_all: true, ..facts() };
    case(all, |_| {}).expect(&[(POD, V, "LR+M"), (HOST, V, "LR+M"), (OUTSIDE, V, "LR+M")]);
    for detector in [Detector::Bridge("cni0".into()), Detector::InterfacePrefix("veth".into())] {
        let by_interface = NodeFacts { detector: Some(detector), ..facts() };
        case(by_interface, |_| {}).expect(&[(POD, V, "LR"), (HOST, V, "LR+M"), (OUTSIDE, V, "LR+M")]);
    }
}

#[test]
fn case_37_external_frontends_are_masqueraded() {
    let case = case(facts(), |_| {});
    for from in [POD, HOST, OUTSIDE] {
        case.expect(&[(from, W, "LR+M"), (from, X, "LR+M"), (from, NP, "LR+M")]);
    }
}

#[test]
fn case_38_hairpin() {
    let one = |to: &'static str| case(facts(), move |port| port.cluster = vec![endpoint(to)]);
    one(L).expect(&[("10.244.0.1", V, "L+M"), ("10.244.0.2", V, "L")]);
    one(R).expect(&[("10.244.0.1", V, "R")]);
}

#[test]
fn case_39_no_endpoints() {
    let case =
        case(facts(), |port| (port.has_any, port.cluster, port.local) = (false, Vec::new(), Vec::new()));
    for from in [POD, HOST, OUTSIDE] {
        for to in [V, W, X, NP] {
            case.expect(&[(from, to, "rejected")]);
        }
    }
}

#[test]
fn case_40_to_42_source_ranges() {
    let ranges = |text: &str| vec![text.parse().unwrap()];
    let clients = case(facts(), |port| port.source_ranges = ranges("198.51.100.0/25"));
    clients.expect(&[
        ("198.51.100.1", W, "LR+M"),
        ("198.51.100.200", W, "dropped"),
        ("10.244.0.9", W, "dropped"),
        ("198.51.100.200", NP, "LR+M"),
        ("198.51.100.200", X, "LR+M"),
        (HOST, W, "dropped"),
        (OUTSIDE, W, "LR+M/dropped"),
    ]);
    let node = case(facts(), |port| port.source_ranges = ranges("10.0.0.0/24"));
    node.expect(&[(HOST, W, "LR+M"), ("192.0.2.2", W, "LR+M")]);
    let none = case(facts(), |port| {
        (port.has_any, port.cluster, port.source_ranges) = (false, Vec::new(), ranges("198.51.100.0/25"));
    });
    none.expect(&[("198.51.100.1", W, "rejected"), ("198.51.100.200", W, "dropped")]);
    let local = case(facts(), |port| {
        (port.external_local, port.source_ranges) = (true, ranges("198.51.100.0/25"));
    });
    local.expect(&[("198.51.100.1", W, "L"), ("198.51.100.200", W, "dropped"), ("198.51.100.200", NP, "L")]);
}

#[test]
fn case_44_45_46_node_ports() {
    case(facts(), |port| port.node_port = 0).expect(&[(OUTSIDE, NP, "untouched"), (OUTSIDE, W, "LR+M")]);
    case(facts(), |_| {}).expect(&[
        (OUTSIDE, NP, "LR+M"),
        (OUTSIDE, NP2, "LR+M"),
        (HOST, LOOPBACK, "untouched"),
    ]);
    let listed = vec!["10.0.0.7".parse().unwrap()];
    let listed = NodeFacts { node_ports: Addresses::Addresses(listed), ..facts() };
    case(listed, |_| {}).expect(&[(OUTSIDE, NP, "LR+M"), (OUTSIDE, NP2, "untouched")]);
}

#[test]
fn case_47_affinity_is_part_of_the_choice() {
    let affine = case(facts(), |port| port.affinity_seconds = 60);
    affine.expect(&[(POD, V, "LR"), (OUTSIDE, W, "LR+M")]);
    let steps = affine.steps("pod", V);
    assert!(steps.contains("the endpoint of the last 60 s, otherwise scheduler rr"), "{steps}");
}

#[test]
fn steps_name_chains_sets_and_virtual_servers() {
    let plain = case(facts(), |_| {});
    assert_eq!(
        plain.steps("outside", V),
        "KEELSON-SERVICES: not from a pod: marked for masquerading\n\
         virtual server 10.96.0.1:80/TCP, scheduler rr: one of 2: 10.244.0.1:8080, 10.244.9.1:8080\n\
         KEELSON-POSTROUTING: masqueraded: the endpoint sees an address of the node"
    );
    let local = case(facts(), |port| (port.external_local, port.local) = (true, Vec::new()));
    assert_eq!(local.steps("outside", W), "KEELSON-MANGLE: in set KEELSON-4-DROP: dropped");
    let steps = local.steps("pod", W);
    assert!(steps.starts_with("KEELSON-MANGLE: from a pod or the node, in set KEELSON-4-LOCAL\n"), "{steps}");
    assert!(steps.contains("virtual server by mark"), "{steps}");
    let steps = plain.steps("pod", "10.96.0.1:81");
    assert!(steps.contains("KEELSON-ADDRESSES: no set of frontends has the port: rejected"), "{steps}");
}

#[test]
fn udp_and_sctp_ports_are_independent() {
    let mut plan = Plan::new(Family::V4, facts());
    let ports = Protocol::ALL.map(|protocol| {
        let mut port = web();
        port.name.protocol = protocol;
        port.cluster = vec![Endpoint { ip: "10.244.3.1".parse().unwrap(), port: protocol.number().into() }];
        port
    });
    plan.set(&web().name.service, ports.into());
    let case = Case { plan };
    case.expect(&[
        (POD, "10.96.0.1:80", "10.244.3.1:6"),
        (POD, "10.96.0.1:80/UDP", "10.244.3.1:17"),
        (OUTSIDE, "10.0.0.7:30080/SCTP", "10.244.3.1:132+M"),
    ]);
}
