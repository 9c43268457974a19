//! Decisions by the numbers of service-semantics 8.

use std::net::{IpAddr, SocketAddr};

use keelson_proxy::{
    model::{Endpoint, Family, PortName},
    options::Detector,
};

use super::*;

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn name(text: &str) -> ServiceName {
    ServiceName::new("default", text)
}

const POD: &str = "10.244.1.9";
const HOST: &str = "192.0.2.1";
const OUTSIDE: &str = "198.51.100.7";
const BLOCKED: &str = "203.0.113.7";

fn local() -> Endpoint {
    Endpoint { ip: ip("10.244.1.1"), port: 8080 }
}

fn remote() -> Endpoint {
    Endpoint { ip: ip("10.244.2.1"), port: 8080 }
}

fn facts() -> NodeFacts {
    NodeFacts {
        pods: Some("10.244.0.0/16".parse().unwrap()),
        node_ips: vec![ip(HOST)],
        local: [ip(HOST), ip("10.244.1.254")].into(),
    }
}

/// A LoadBalancer with every kind of frontend, as in the cases.
fn service_port(change: impl FnOnce(&mut ServicePort)) -> ServicePort {
    let mut port = ServicePort {
        name: PortName { service: name("web"), port: "http".into(), protocol: Protocol::Tcp },
        port: 80,
        cluster_ip: ip("10.96.0.10"),
        external_ips: vec![ip("203.0.113.10")],
        load_balancer_ips: vec![ip("203.0.113.20")],
        node_port: 30080,
        internal_local: false,
        external_local: false,
        affinity_seconds: 0,
        source_ranges: Vec::new(),
        has_any: true,
        cluster: vec![local(), remote()],
        local: Vec::new(),
        on_node: Vec::new(),
        serving: Vec::new(),
    };
    change(&mut port);
    port
}

fn plan_of(ports: impl IntoIterator<Item = ServicePort>) -> Plan {
    let mut plan = Plan::default();
    for port in ports {
        plan.set(&port.name.service.clone(), vec![port]);
    }
    plan
}

fn rule(plan: &Plan, kind: FrontendKind) -> Rule {
    plan.rules().find(|rule| rule.kind == kind).unwrap()
}

/// `L`: the local endpoint, `R`: the remote one, `-`: dropped, `x`: rejected.
fn outcome(rule: &Rule, source: &str) -> String {
    let facts = facts();
    let (source, to) = (ip(source), ip("10.96.0.10"));
    match rule.decide(facts.origin(source, to), source, &facts) {
        Decision::Drop => "-".into(),
        Decision::Reject => "x".into(),
        Decision::Relay(endpoints) => {
            endpoints.iter().map(|endpoint| if *endpoint == local() { 'L' } else { 'R' }).collect()
        }
    }
}

/// Outcomes for pod, host and outside at V, W, X and NP.
fn outcomes(port: ServicePort) -> String {
    let plan = plan_of([port]);
    let kinds = [
        FrontendKind::ClusterIp,
        FrontendKind::LoadBalancerIp,
        FrontendKind::ExternalIp,
        FrontendKind::NodePort,
    ];
    let of = |kind| [POD, HOST, OUTSIDE].map(|source| outcome(&rule(&plan, kind), source)).join(",");
    kinds.map(of).join(" ")
}

type Change = fn(&mut ServicePort);

#[test]
fn policies_decide_which_endpoints_a_source_reaches() {
    let cases: [(&str, Change, &str); 9] = [
        ("37: eTP Cluster", |_| {}, "LR,LR,LR LR,LR,LR LR,LR,LR LR,LR,LR"),
        (
            "33: eTP Local, L1, R1",
            |port| {
                port.external_local = true;
                port.local = vec![local()];
            },
            "LR,LR,LR LR,LR,L LR,LR,L LR,LR,L",
        ),
        (
            "34: eTP Local, R1 only",
            |port| {
                port.external_local = true;
                port.cluster = vec![remote()];
            },
            "R,R,R R,R,- R,R,- R,R,-",
        ),
        (
            "20: READY R1, ST L1, eTP Local",
            |port| {
                port.external_local = true;
                (port.cluster, port.local) = (vec![remote()], vec![local()]);
            },
            "R,R,R R,R,L R,R,L R,R,L",
        ),
        (
            "31: iTP Local, L1, R1",
            |port| {
                port.internal_local = true;
                port.local = vec![local()];
            },
            "L,L,L LR,LR,LR LR,LR,LR LR,LR,LR",
        ),
        (
            "32: iTP Local, R1 only",
            |port| {
                port.internal_local = true;
                port.cluster = vec![remote()];
            },
            "-,-,- R,R,R R,R,R R,R,R",
        ),
        (
            "32: then R1 deleted",
            |port| {
                port.internal_local = true;
                (port.cluster, port.has_any) = (Vec::new(), false);
            },
            "x,x,x x,x,x x,x,x x,x,x",
        ),
        (
            "22: no serving endpoint, eTP Local",
            |port| {
                port.external_local = true;
                (port.cluster, port.has_any) = (Vec::new(), false);
            },
            "x,x,x x,x,x x,x,x x,x,x",
        ),
        (
            "40: source ranges",
            |port| port.source_ranges = vec!["198.51.100.0/25".parse().unwrap()],
            "LR,LR,LR -,-,LR LR,LR,LR LR,LR,LR",
        ),
    ];
    for (case, change, expected) in cases {
        assert_eq!(outcomes(service_port(change)), expected, "case {case}");
    }
}

#[test]
fn case_40_and_42_source_ranges() {
    let ranges = || vec!["198.51.100.0/25".parse().unwrap(), "192.0.2.0/24".parse().unwrap()];
    let plan = plan_of([service_port(|port| port.source_ranges = ranges())]);
    let balancer = rule(&plan, FrontendKind::LoadBalancerIp);
    for (source, expected) in
        [(OUTSIDE, "LR"), (BLOCKED, "-"), (POD, "-"), (HOST, "LR"), ("203.0.113.20", "LR")]
    {
        assert_eq!(outcome(&balancer, source), expected, "case 40: {source} to W");
    }
    assert_eq!(outcome(&rule(&plan, FrontendKind::NodePort), BLOCKED), "LR", "case 40: B to NP");
    let empty = plan_of([service_port(|port| {
        port.source_ranges = ranges();
        (port.cluster, port.has_any) = (Vec::new(), false);
    })]);
    let balancer = rule(&empty, FrontendKind::LoadBalancerIp);
    assert_eq!(
        (outcome(&balancer, OUTSIDE), outcome(&balancer, BLOCKED)),
        ("x".into(), "-".into()),
        "case 42"
    );
    assert!(!balancer.rejects_all(), "case 42: blocked sources are dropped");
    assert!(rule(&empty, FrontendKind::ClusterIp).rejects_all(), "case 39: nothing has to listen");
}

#[test]
fn case_35_without_a_detector_pods_are_outside() {
    let without = NodeFacts { pods: None, ..facts() };
    assert_eq!(without.origin(ip(POD), ip("10.96.0.10")), Origin::Outside);
    for detector in [Detector::Bridge("cni0".into()), Detector::InterfacePrefix("veth".into())] {
        assert_eq!(NodeFacts::pods_of(Some(&detector)), None, "a socket does not tell the interface");
    }
    for (source, origin) in [
        (POD, Origin::Pod),
        (HOST, Origin::Host),
        (OUTSIDE, Origin::Outside),
        ("127.0.0.1", Origin::Host),
        ("10.244.1.254", Origin::Host),
        ("10.96.0.10", Origin::Host),
    ] {
        assert_eq!(facts().origin(ip(source), ip("10.96.0.10")), origin, "{source}");
    }
}

#[test]
fn case_44_and_14_frontends_of_a_port() {
    let plan = plan_of([service_port(|port| port.node_port = 0)]);
    let kinds: BTreeSet<FrontendKind> = plan.rules().map(|rule| rule.kind).collect();
    assert!(!kinds.contains(&FrontendKind::NodePort), "case 44");
    let udp = service_port(|port| {
        port.name = PortName { service: name("dns"), port: "dns".into(), protocol: Protocol::Udp };
    });
    let plan = plan_of([service_port(|_| {}), udp]);
    assert_eq!(plan.rules().count(), 8, "case 14: another protocol is another frontend");
    assert!(plan.conflicts().is_empty());
}

#[test]
fn conflicts_are_resolved_by_kind_and_name() {
    let external = service_port(|port| {
        port.name.service = name("a");
        (port.cluster_ip, port.external_ips) = (ip("10.96.0.1"), vec![ip("10.96.0.10")]);
        (port.load_balancer_ips, port.node_port) = (Vec::new(), 30080);
    });
    let mut plan = plan_of([external, service_port(|_| {})]);
    let frontend = Frontend::Address { ip: ip("10.96.0.10"), protocol: Protocol::Tcp, port: 80 };
    assert_eq!(
        plan.rule(frontend).unwrap().port.name.to_string(),
        "default/web:http",
        "a cluster IP comes first"
    );
    let node_port = Frontend::NodePort { protocol: Protocol::Tcp, port: 30080 };
    assert_eq!(plan.rule(node_port).unwrap().port.name.to_string(), "default/a:http", "the smallest name");
    assert_eq!(plan.conflicts().len(), 2);
    plan.take_changed();
    plan.set(&name("web"), Vec::new());
    assert_eq!(plan.rule(frontend).unwrap().kind, FrontendKind::ExternalIp, "the other claim takes over");
    assert!(plan.take_changed().contains(&frontend));
    plan.set(&name("a"), Vec::new());
    assert_eq!((plan.rules().count(), plan.counts()), (0, PlanCounts::default()));
}

#[test]
fn case_56_an_unchanged_service_changes_nothing() {
    let mut plan = plan_of([service_port(|_| {})]);
    assert_eq!(plan.take_changed().len(), 4);
    plan.set(&name("web"), vec![service_port(|_| {})]);
    assert!(!plan.has_changes());
    plan.set(&name("web"), vec![service_port(|port| port.cluster = vec![local()])]);
    assert_eq!(plan.take_changed().len(), 4);
    assert_eq!(plan.counts(), PlanCounts { services: 1, service_ports: 1, endpoints: 1, frontends: 4 });
    plan.set(&name("web"), vec![service_port(|port| port.cluster = Vec::new())]);
    assert_eq!(plan.counts(), PlanCounts { services: 1, service_ports: 1, endpoints: 0, frontends: 4 });
    plan.set(&name("web"), Vec::new());
    assert_eq!(plan.counts(), PlanCounts::default());
}

#[test]
fn case_45_and_46_node_ports_have_a_socket_at_each_address() {
    let frontend = Frontend::NodePort { protocol: Protocol::Udp, port: 30053 };
    let addresses = [ip("192.0.2.1"), ip("127.0.0.1"), ip("fe80::1"), ip("::1"), ip("2001:db8::1")];
    let sockets: Vec<String> = wanted_sockets(frontend, &addresses).iter().map(ToString::to_string).collect();
    assert_eq!(sockets, ["192.0.2.1:30053/UDP", "[2001:db8::1]:30053/UDP"]);
}

#[test]
fn mapped_ports_are_distinct_and_kept() {
    let place = |last: u8, family: Family| SocketKey {
        protocol: Protocol::Tcp,
        address: match family {
            Family::V4 => SocketAddr::from(([10, 96, 0, last], 80)),
            Family::V6 => SocketAddr::from(([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(last)], 80)),
        },
    };
    let mut ports = MappedPorts::new(65_000);
    let all: BTreeSet<SocketAddr> = (0..=255).map(|last| ports.assign(place(last, Family::V4), 0)).collect();
    assert_eq!(all.len(), 256);
    assert!(all.iter().all(|address| address.port() >= 65_000 && address.ip().is_loopback()));
    let mapped = ports.assign(place(1, Family::V4), 0);
    assert!(all.contains(&mapped), "it is kept");
    assert_ne!(ports.assign(place(1, Family::V4), 1), mapped, "another program uses the first candidate");
    assert_eq!(ports.assign(place(1, Family::V6), 0).ip(), ip("::1"));
    let first = MappedPorts::new(40_000).assign(place(7, Family::V4), 0);
    assert_eq!(MappedPorts::new(40_000).assign(place(7, Family::V4), 0), first, "the same after a restart");
    let mut full = MappedPorts::new(65_535);
    assert_eq!(full.assign(place(1, Family::V4), 0).port(), 65_535);
    assert_eq!(full.assign(place(2, Family::V4), 0).port(), 0, "the kernel chooses if all are taken");
    full.release(&place(1, Family::V4));
    assert_eq!(full.assign(place(2, Family::V4), 0).port(), 65_535);
    assert_eq!(MappedPorts::new(0).assign(place(1, Family::V4), 0).port(), 0);
}
