//! The verdicts, endpoints and masquerading of the numbered cases.

use super::*;

fn no_detector(world: World) -> World {
    world.with(|base| base.detector = None)
}

#[test]
fn case_31_internal_local_takes_local_endpoints() {
    let world = World::new(vec![local(web(&["L1", "R1"]), true, false)]);
    world.check(&[(V, "pod", "forwarded L1 -M"), (NP, "outside", "forwarded L1 R1 +M")]);
}

#[test]
fn case_32_internal_local_without_local_endpoints_drops() {
    let world = World::new(vec![local(web(&["R1"]), true, false)]);
    world.check(&[
        (V, "pod", "dropped"),
        (V, "node", "dropped"),
        (V, "outside", "dropped"),
        (W, "outside", "forwarded R1 +M"),
    ]);
    let gone = World::new(vec![local(web(&[]), true, false)]);
    gone.check(&[(V, "pod", "rejected"), (W, C, "rejected")]);
}

#[test]
fn case_33_external_local() {
    let world = World::new(vec![local(web(&["L1", "R1"]), false, true)]);
    for target in [W, NP, X] {
        world.check(&[
            (target, "outside", "forwarded L1 -M"),
            (target, C, "forwarded L1 -M"),
            (target, "pod", "forwarded L1 R1 -M"),
            (target, "10.244.7.7", "forwarded L1 R1 -M"),
            (target, "node", "forwarded L1 R1 +M"),
        ]);
    }
    world.check(&[(V, "pod", "forwarded L1 R1 -M")]);
}

#[test]
fn case_34_external_local_without_local_endpoints() {
    let world = World::new(vec![local(web(&["R1"]), false, true)]);
    world.check(&[
        (W, "outside", "dropped"),
        (NP, "outside", "dropped"),
        (W, "pod", "forwarded R1 -M"),
        (NP, "node", "forwarded R1 +M"),
    ]);
}

#[test]
fn case_35_external_local_without_a_detector() {
    let world = no_detector(World::new(vec![local(web(&["L1", "R1"]), false, true)]));
    world.check(&[(W, "pod", "forwarded L1 -M"), (W, "node", "forwarded L1 R1 +M")]);
}

#[test]
fn case_36_masquerade_of_cluster_ips() {
    let made = || World::new(vec![web(&["R1"])]);
    made().check(&[
        (V, "pod", "forwarded R1 -M"),
        (V, "node", "forwarded R1 +M"),
        (V, "outside", "forwarded R1 +M"),
    ]);
    let none = no_detector(made());
    none.check(&[
        (V, "pod", "forwarded R1 -M"),
        (V, "node", "forwarded R1 -M"),
        (V, "outside", "forwarded R1 -M"),
    ]);
    let all = made().with(|base| base.masquerade_all = true);
    all.check(&[
        (V, "pod", "forwarded R1 +M"),
        (V, "node", "forwarded R1 +M"),
        (V, "outside", "forwarded R1 +M"),
    ]);
}

#[test]
fn case_36_detectors_by_interface() {
    for detector in [Detector::Bridge("cbr0".into()), Detector::InterfacePrefix("veth".into())] {
        let world = World::new(vec![local(web(&["L1", "R1"]), false, true)])
            .with(|base| base.detector = Some(detector));
        world.check(&[
            (V, "pod", "forwarded L1 R1 -M"),
            (V, "outside", "forwarded L1 R1 +M"),
            (V, "node", "forwarded L1 R1 +M"),
            (W, "pod", "forwarded L1 R1 -M"),
            (W, "outside", "forwarded L1 -M"),
            (W, "node", "forwarded L1 R1 +M"),
        ]);
        // The address alone does not tell the input interface.
        let ways = world.explain(V, "10.244.0.9").ways;
        let short: Vec<String> = ways.iter().map(super::short).collect();
        assert_eq!(short, ["forwarded L1 R1 -M", "forwarded L1 R1 +M"], "{ways:?}");
    }
}

#[test]
fn case_37_external_cluster_is_always_masqueraded() {
    let world = World::new(vec![web(&["L1", "R1"])]);
    for target in [W, NP, X] {
        for from in ["pod", "node", "outside", C] {
            world.check(&[(target, from, "forwarded L1 R1 +M")]);
        }
    }
}

#[test]
fn case_38_hairpin() {
    let alone = World::new(vec![web(&["L9"])]);
    alone.check(&[(V, "10.244.0.9", "forwarded L9 +M"), (V, "10.244.0.8", "forwarded L9 -M")]);
    let two = World::new(vec![web(&["L9", "R1"])]);
    let explanation = two.explain(V, "10.244.0.9");
    assert_eq!(short(&explanation.ways[0]), "forwarded L9 R1 -M");
    let last = explanation.ways[0].steps.last().unwrap();
    assert!(last.contains("10.244.0.9:8080 is also the source, masqueraded"), "{last}");
    let outside = two.explain(W, "outside").ways.swap_remove(0).steps.join("\n");
    assert!(!outside.contains("hairpin"), "{outside}");
    let last = two.explain(V, "pod").ways[0].steps.last().unwrap().clone();
    assert!(last.contains("masqueraded if the sender itself is selected from 10.244.0.9:8080"), "{last}");
}

#[test]
fn case_39_no_endpoints_reject() {
    let world = World::new(vec![web(&[])]);
    for target in [V, W, X, NP] {
        for from in ["pod", "node", "outside", C] {
            world.check(&[(target, from, "rejected")]);
        }
    }
}

#[test]
fn case_40_source_ranges() {
    let mut port = web(&["L1"]);
    port.source_ranges = vec![net("192.0.2.0/25"), net("192.168.0.0/24")];
    let world = World::new(vec![port]);
    world.check(&[
        (W, C, "forwarded L1 +M"),
        (W, B, "dropped"),
        (W, "pod", "dropped"),
        (NP, B, "forwarded L1 +M"),
        (X, B, "forwarded L1 +M"),
        (V, B, "forwarded L1 +M"),
        (W, "node", "forwarded L1 +M"),
        (W, "203.0.113.10", "forwarded L1 +M"),
    ]);
    // The node itself sends from a load-balancer address that is bound to it.
    let mut bound = world;
    bound.local.push(ip("203.0.113.10"));
    bound.check(&[(W, "node", "forwarded L1 +M")]);
    let bound = bound.facts(|facts| facts.node_ips = vec![ip("192.168.9.9")]);
    bound.check(&[(W, "node", "dropped")]);
}

#[test]
fn case_40_sources_without_address_may_be_in_or_out_of_range() {
    let mut port = web(&["L1"]);
    port.source_ranges = vec![net("192.0.2.0/25"), net("10.244.3.0/24")];
    let world = World::new(vec![port.clone()]);
    for from in ["outside", "pod"] {
        let ways: Vec<String> = world.explain(W, from).ways.iter().map(short).collect();
        assert_eq!(ways, ["forwarded L1 +M", "dropped"], "{from}");
    }
    port.source_ranges = vec![net("10.0.0.0/8")];
    World::new(vec![port]).check(&[(W, "pod", "forwarded L1 +M")]);
}

#[test]
fn case_42_ranges_come_before_refusals() {
    let mut port = web(&[]);
    port.source_ranges = vec![net("192.0.2.0/25")];
    let world = World::new(vec![port]);
    world.check(&[(W, C, "rejected"), (W, B, "dropped"), (NP, B, "rejected")]);
}

#[test]
fn case_14_protocols_are_independent() {
    let mut udp = web(&["R2"]);
    (udp.name.port, udp.name.protocol) = ("dns".into(), Protocol::Udp);
    let world = World::new(vec![web(&["R1"]), udp]);
    world.check(&[
        ("10.96.0.10:80/TCP", "pod", "forwarded R1 -M"),
        ("10.96.0.10:80/UDP", "pod", "forwarded R2 -M"),
        ("10.96.0.10:80/SCTP", "pod", "rejected"),
    ]);
}

#[test]
fn case_17_undefined_ports_and_unallocated_addresses() {
    let world = World::new(vec![web(&["R1"])]);
    for from in ["pod", "node", "outside"] {
        world.check(&[
            ("10.96.0.10:81", from, "rejected"),
            ("10.96.9.9:80", from, "dropped"),
            ("203.0.113.10:81", from, "untouched"),
            ("8.8.8.8:53/UDP", from, "untouched"),
        ]);
    }
}

#[test]
fn case_45_where_node_ports_answer() {
    let made = || World::new(vec![web(&["R1"])]);
    let at = |address: &str| format!("{address}:30080");
    for from in ["pod", "node", "outside"] {
        made().check(&[(NP, from, "forwarded R1 +M"), (&at("192.168.0.2"), from, "untouched")]);
        let both = made().facts(|facts| facts.node_port_addresses.push(ip("192.168.0.2")));
        both.check(&[(&at("192.168.0.2"), from, "forwarded R1 +M")]);
        let all = made().facts(|facts| facts.node_port_addresses.clear());
        let all = all.with(|base| base.node_ports = NodePortMatch::AllLocal);
        all.check(&[
            (&at("192.168.0.2"), from, "forwarded R1 +M"),
            (&at("10.244.0.254"), from, "forwarded R1 +M"),
            (&at("192.168.0.3"), from, "untouched"),
        ]);
    }
}

#[test]
fn case_46_loopback_has_no_node_ports() {
    let none = World::new(vec![web(&[])]).with(|base| base.node_ports = NodePortMatch::AllLocal);
    let some = World::new(vec![web(&["R1"])]).with(|base| base.node_ports = NodePortMatch::AllLocal);
    for world in [none, some] {
        world.check(&[("127.0.0.1:30080", "node", "untouched")]);
    }
}

#[test]
fn case_47_affinity_chooses_among_the_same_endpoints() {
    let mut port = local(web(&["L1", "R1", "R2"]), false, true);
    port.affinity_seconds = 10_800;
    let world = World::new(vec![port]);
    world.check(&[
        (V, "pod", "forwarded L1 R1 R2 -M"),
        (W, "outside", "forwarded L1 -M"),
        (W, "node", "forwarded L1 R1 R2 +M"),
    ]);
    let steps = world.explain(V, "pod").ways[0].steps.join("\n");
    assert!(steps.contains("affinity-3-10800-0: a client in affinity-0 keeps its endpoint"), "{steps}");
    assert!(steps.contains("for 10800 s"), "{steps}");
}

#[test]
fn endpoints_at_addresses_of_the_node_are_not_masqueraded_from_outside() {
    let host = Endpoint { ip: ip(N), port: 6443 };
    let mut port = web(&["R1"]);
    port.cluster = vec![host];
    let world = World::new(vec![port.clone()]);
    world.check(&[
        (V, "outside", "forwarded 192.168.0.1:6443 -M"),
        (V, "pod", "forwarded 192.168.0.1:6443 -M"),
    ]);
    let last = world.explain(V, "outside").ways[0].steps.last().unwrap().clone();
    assert!(last.starts_with("192.168.0.1:6443 is at an address of this node"), "{last}");
    world.check(&[(V, "node", "forwarded 192.168.0.1:6443 +M")]);
    port.cluster.extend(endpoints(&["R1"]));
    World::new(vec![port]).check(&[(V, "outside", "forwarded R1 192.168.0.1:6443 +M")]);
}

/// Translated packets are not checked again: kube-proxy's forward chains would reject them
/// (docs/kube-proxy-differences.md).
#[test]
fn p12_endpoints_that_are_rejected_frontends_get_traffic() {
    let mut other = web(&[]);
    other.name.service = ServiceName::new("default", "other");
    other.cluster_ip = ip("10.96.0.11");
    (other.external_ips, other.load_balancer_ips, other.node_port) = (vec![], vec![], 0);
    let mut port = web(&["R1"]);
    // The first is a frontend without endpoints, the second a cluster IP at an unused port.
    port.cluster.push(Endpoint { ip: ip("10.96.0.11"), port: 80 });
    let world = World::new(vec![port.clone(), other.clone()]);
    world.check(&[(V, "pod", "forwarded R1 10.96.0.11:80 -M"), ("10.96.0.11:80", "pod", "rejected")]);
    port.cluster = vec![Endpoint { ip: ip("10.96.0.11"), port: 81 }];
    World::new(vec![port, other]).check(&[(V, "pod", "forwarded 10.96.0.11:81 -M")]);
}

#[test]
fn two_services_of_one_frontend() {
    let mut other = web(&["R7"]);
    other.name.service = ServiceName::new("default", "a");
    let world = World::new(vec![web(&["R1"]), other]);
    world.check(&[(V, "pod", "forwarded R7 -M"), (NP, "outside", "forwarded R7 +M")]);
    let explanation = world.explain(V, "pod");
    assert_eq!(explanation.service_port, "default/a:http");
    assert!(
        explanation.frontend.ends_with("of default/a:http; default/web:http also claims it"),
        "{explanation:?}"
    );
}

#[test]
fn ipv6() {
    let mut plan = Plan::new(Family::V6, Existing::default());
    let mut port = web(&[]);
    (port.cluster_ip, port.node_port) = (ip("fd00:96::a"), 30_080);
    (port.external_ips, port.load_balancer_ips) = (vec![], vec![ip("2001:db8::9")]);
    port.cluster =
        vec![Endpoint { ip: ip("fd00:10::2"), port: 8080 }, Endpoint { ip: ip("fd00:10::3"), port: 8080 }];
    (port.has_any, port.affinity_seconds) = (true, 60);
    port.source_ranges = vec![net("2001:db8:1::/48")];
    plan.set(&port.name.service.clone(), vec![port]);
    plan.facts(NodeFacts { service_cidrs: vec![net("fd00:96::/112")], ..Default::default() });
    let base = Base {
        family: Family::V6,
        masquerade_all: false,
        mark: 0x4000,
        detector: Some(Detector::Cidr(net("fd00:10::/64"))),
        node_ports: NodePortMatch::AllLocal,
        untracked_pods: false,
    };
    let local = vec![ip("2001:db8::1"), ip("::1")];
    let context = RuleContext { base: &base, plan: &plan, local: &local, offload: None };
    let way = |target: &str, from: &str| short(&explain(&context, &question(target, from)).ways[0]);
    let both = "forwarded [fd00:10::2] [fd00:10::3]";
    assert_eq!(way("[fd00:96::a]:80", "pod"), format!("{both} -M"));
    assert_eq!(way("[2001:db8::1]:30080", "2001:db8:7::7"), format!("{both} +M"));
    assert_eq!(way("[2001:db8::9]:80", "2001:db8:1::7"), format!("{both} +M"));
    assert_eq!(way("[2001:db8::9]:80", "2001:db8:7::7"), "dropped");
    assert_eq!(way("[fd00:96::a]:81", "pod"), "rejected");
    assert_eq!(way("[fd00:96::b]:80", "pod"), "dropped");
    assert_eq!(way("[::1]:30080", "node"), "untouched");
}

#[test]
fn offload_is_explained_for_forwarded_packets() {
    let output = |offload: Option<Chain>, service: &ServicePort, target: &str, from: &str| {
        let world = World { offload, ..World::new(vec![service.clone()]) };
        let way = world.explain(target, from).ways.remove(0);
        way.steps.iter().filter(|step| step.contains("filter-forward-offload")).count()
    };
    let remote = web(&["R1"]);
    // An endpoint at an address of the node is delivered locally.
    let mut on_node = web(&[]);
    (on_node.cluster, on_node.has_any) = (vec![Endpoint { ip: ip(N), port: 8080 }], true);
    let mut udp = web(&["R1"]);
    udp.name.protocol = Protocol::Udp;
    let [both, tcp] = Chain::OFFLOAD.map(Some);
    let to_udp = "10.96.0.10:80/udp";
    for (offload, service, target, from, expected) in [
        (both, &remote, V, "pod", 1),
        (both, &remote, NP, "outside", 1),
        (both, &remote, V, "node", 0),
        (both, &on_node, V, "pod", 0),
        (both, &web(&[]), V, "pod", 0),
        (both, &remote, "10.96.0.10:81", "pod", 0),
        (both, &udp, to_udp, "pod", 1),
        (tcp, &remote, V, "pod", 1),
        (tcp, &udp, to_udp, "pod", 0),
        (None, &remote, V, "pod", 0),
    ] {
        assert_eq!(output(offload, service, target, from), expected, "{from} -> {target}");
    }
}
