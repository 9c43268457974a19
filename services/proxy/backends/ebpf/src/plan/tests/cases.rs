//! Which frontends are translated, to which endpoints, and how few elements a change is.

use super::*;

fn sync(plan: &mut Plan, contents: &mut Contents) -> Vec<Change> {
    let changes = plan.changes(Family::V4, Instant::now());
    changes.iter().for_each(|change| apply(contents, change));
    changes
}

/// Numbers of the endpoints of each frontend: cluster IP, load-balancer IP, external IP, node port; `-`: left to packets.
fn found(port: ServicePort, facts: NodeFacts) -> [String; 4] {
    let port = ServicePort {
        load_balancer_ips: vec![ip("198.51.100.1")],
        external_ips: vec![ip("203.0.113.1")],
        node_port: 30_080,
        ..port
    };
    let protocol = port.name.protocol;
    let mut plan = plan();
    plan.set_facts(Family::V4, facts);
    plan.set(Family::V4, &name("web"), vec![port]);
    let mut contents = Contents::default();
    sync(&mut plan, &mut contents);
    let node_port = FrontendKey::of(Frontend::NodePort { protocol, port: 30_080 }, Family::V4);
    let keys = ["10.96.0.1", "198.51.100.1", "203.0.113.1"].map(|address| frontend(address, 80, protocol));
    let [v, w, x] = keys;
    [v, w, x, node_port].map(|key| match resolve(&contents, &key) {
        None => "-".to_owned(),
        Some(found) => found.iter().map(|endpoint| (endpoint.port - 8000).to_string()).collect(),
    })
}

#[test]
fn policies_choose_the_set_and_the_rest_is_left_to_packets() {
    let node = NodeFacts { detects_pods: true, ..NodeFacts::default() };
    let both = || ServicePort { local: endpoints([1]), ..port("web", 1, &[1, 2]) };
    let ranges = || vec!["192.0.2.0/24".parse().unwrap()];
    for (what, port, facts, expected) in [
        ("plain", port("web", 1, &[1, 2]), node, ["12", "12", "12", "12"]),
        ("no endpoint", port("web", 1, &[]), node, ["-"; 4]),
        ("internal Local", ServicePort { internal_local: true, ..both() }, node, ["1", "12", "12", "12"]),
        (
            "internal Local without one",
            ServicePort { internal_local: true, ..port("web", 1, &[2]) },
            node,
            ["-", "2", "2", "2"],
        ),
        // Pods and the node take the short cut.
        ("external Local", ServicePort { external_local: true, ..both() }, node, ["12"; 4]),
        (
            "external Local, pods unknown",
            ServicePort { external_local: true, ..both() },
            NodeFacts { detects_pods: false, ..node },
            ["12", "-", "-", "-"],
        ),
        ("pods unknown", both(), NodeFacts { detects_pods: false, ..node }, ["12"; 4]),
        ("masquerade all", both(), NodeFacts { masquerade_all: true, ..node }, ["-"; 4]),
        ("source ranges", ServicePort { source_ranges: ranges(), ..both() }, node, ["12", "-", "12", "12"]),
        ("affinity", ServicePort { affinity_seconds: 10, ..both() }, node, ["12"; 4]),
        (
            "affinity and source ranges",
            ServicePort { affinity_seconds: 10, source_ranges: ranges(), ..both() },
            node,
            ["-"; 4],
        ),
        ("UDP", udp(port("web", 1, &[1, 2])), node, ["12", "12", "12", "-"]),
        (
            "UDP with affinity: one endpoint at all addresses",
            ServicePort { affinity_seconds: 10, ..udp(port("web", 1, &[1, 2])) },
            node,
            ["-"; 4],
        ),
        (
            "SCTP",
            ServicePort {
                name: PortName { protocol: Protocol::Sctp, ..port("web", 1, &[]).name },
                ..port("web", 1, &[1])
            },
            node,
            ["-"; 4],
        ),
    ] {
        assert_eq!(found(port, facts), expected, "{what}");
    }
}

/// For outside clients of external addresses: cluster IPs, and what needs more than the destination, are left.
#[test]
fn direct_return_has_policies_of_its_own() {
    let node = NodeFacts { is_direct_return: true, ..NodeFacts::default() };
    let both = || ServicePort { local: endpoints([1]), ..port("web", 1, &[1, 2]) };
    let local = || ServicePort { external_local: true, ..both() };
    for (what, port, facts, expected) in [
        ("plain", both(), node, ["-", "12", "12", "12"]),
        ("no endpoint", port("web", 1, &[]), node, ["-"; 4]),
        ("internal Local", ServicePort { internal_local: true, ..both() }, node, ["-", "12", "12", "12"]),
        ("external Local", local(), node, ["-", "1", "1", "1"]),
        ("external Local without one", ServicePort { local: Vec::new(), ..local() }, node, ["-"; 4]),
        ("masquerade all", both(), NodeFacts { masquerade_all: true, ..node }, ["-"; 4]),
        (
            "source ranges",
            ServicePort { source_ranges: vec!["192.0.2.0/24".parse().unwrap()], ..both() },
            node,
            ["-", "12", "12", "12"],
        ),
        ("affinity", ServicePort { affinity_seconds: 10, ..both() }, node, ["-"; 4]),
        ("UDP", udp(both()), node, ["-", "12", "12", "12"]),
    ] {
        assert_eq!(found(port, facts), expected, "{what}");
    }
}

fn udp(port: ServicePort) -> ServicePort {
    ServicePort { name: PortName { protocol: Protocol::Udp, ..port.name }, ..port }
}

#[test]
fn members_of_direct_return_tell_whether_they_are_here() {
    let mut plan = plan();
    plan.set_facts(Family::V4, NodeFacts { is_direct_return: true, ..NodeFacts::default() });
    let of = ServicePort { node_port: 30_080, on_node: endpoints([1]), ..port("web", 1, &[1, 2]) };
    plan.set(Family::V4, &name("web"), vec![of]);
    let mut contents = Contents::default();
    sync(&mut plan, &mut contents);
    let bits: Vec<u32> = contents.members.values().copied().collect();
    assert_eq!(bits, [1 | crate::layout::MEMBER_HERE, 1]);
}

/// Only at its load-balancer addresses; a change of the ranges is a change of these alone.
#[test]
fn source_ranges_are_those_of_load_balancers_in_direct_return() {
    let mut plan = plan();
    let mut contents = Contents::default();
    let mut of = |facts: NodeFacts, ranges: &[&str]| {
        plan.set_facts(Family::V4, facts);
        let source_ranges = ranges.iter().map(|range| range.parse().unwrap()).collect();
        let load_balancer_ips = vec![ip("198.51.100.1")];
        let port =
            ServicePort { load_balancer_ips, node_port: 30_080, source_ranges, ..port("web", 1, &[1]) };
        plan.set(Family::V4, &name("web"), vec![port]);
        let changes = sync(&mut plan, &mut contents);
        let used: Vec<String> = contents.ranges.keys().map(ToString::to_string).collect();
        let has_ranges: Vec<bool> = contents.frontends.values().map(|set| set.has_ranges()).collect();
        (used, has_ranges, plan.usage(Family::V4).source_ranges, changes.len())
    };
    let direct = NodeFacts { is_direct_return: true, ..NodeFacts::default() };
    let one = ["2 192.0.2.0/25".to_owned()];
    // The node port comes first. A slot, a set, a member, two frontends.
    assert_eq!(of(direct, &[]), (vec![], vec![false, false], 0, 5));
    assert_eq!(of(direct, &["192.0.2.0/25"]), (one.into(), vec![false, true], 1, 2));
    let two = ["2 192.0.2.0/25".to_owned(), "2 10.0.0.0/8".to_owned()];
    assert_eq!(
        of(direct, &["192.0.2.0/25", "10.0.0.0/8"]),
        ([two[1].clone(), two[0].clone()].into(), vec![false, true], 2, 1)
    );
    assert_eq!(of(direct, &["10.0.0.0/8"]), ([two[1].clone()].into(), vec![false, true], 1, 1));
    let (used, has_ranges, ..) = of(NodeFacts::default(), &["10.0.0.0/8"]);
    assert_eq!((used, has_ranges), (vec![], vec![false, false]), "the socket level leaves that address");
}

#[test]
fn a_change_is_as_large_as_its_service_port() {
    let mut plan = plan();
    let mut contents = Contents::default();
    for number in 1..=40 {
        plan.set(
            Family::V4,
            &name(&format!("s{number}")),
            vec![port(&format!("s{number}"), number, &[1, 2])],
        );
    }
    assert_eq!(sync(&mut plan, &mut contents).len(), 40 * 4, "two slots, a set and a frontend each");
    assert_eq!(sync(&mut plan, &mut contents), []);
    plan.set(Family::V4, &name("s7"), vec![port("s7", 7, &[1, 2])]);
    assert_eq!(sync(&mut plan, &mut contents), [], "the same again");
    plan.set(Family::V4, &name("s7"), vec![port("s7", 7, &[1, 2, 3])]);
    let changes = sync(&mut plan, &mut contents);
    assert_eq!(changes.len(), 4, "{changes:?}");
    assert_eq!(resolve(&contents, &frontend("10.96.0.7", 80, Protocol::Tcp)).unwrap().len(), 3);
    plan.set(Family::V4, &name("s7"), vec![]);
    let changes: Vec<String> = sync(&mut plan, &mut contents).iter().map(ToString::to_string).collect();
    assert_eq!(changes, ["delete from map frontends: 10.96.0.7:80/TCP", "delete from map sets: 76 cluster"]);
}

#[test]
fn members_are_there_where_programs_ask_for_them() {
    let mut plan = plan();
    let mut contents = Contents::default();
    let udp = PortName { protocol: Protocol::Udp, ..port("dns", 1, &[]).name };
    let dns = |serving: &[u16]| ServicePort {
        name: udp.clone(),
        serving: endpoints(serving.iter().copied()),
        ..port("dns", 1, &[1])
    };
    plan.set(Family::V4, &name("dns"), vec![dns(&[1, 2])]);
    plan.set(Family::V4, &name("web"), vec![port("web", 2, &[1])]);
    plan.set(Family::V4, &name("kept"), vec![ServicePort { affinity_seconds: 5, ..port("kept", 3, &[4]) }]);
    sync(&mut plan, &mut contents);
    let bits = |contents: &Contents| -> Vec<(u16, u32)> {
        contents.members.iter().map(|(key, bits)| (key.remote.port - 8000, *bits)).collect()
    };
    let mut found = bits(&contents);
    found.sort_unstable();
    assert_eq!(found, [(1, 5), (2, 4), (4, 1)]);
    let service = Remote { address: ip("10.96.0.1").into(), port: 80 };
    let stale = |plan: &Plan| [1, 2, 3].map(|n| plan.is_stale(service, endpoint(n).into()));
    // Flows of a former Service may be there.
    assert_eq!((stale(&plan), plan.take_lost_udp()), ([false, false, true], true));
    plan.set(Family::V4, &name("dns"), vec![dns(&[1])]);
    sync(&mut plan, &mut contents);
    assert_eq!((stale(&plan), plan.take_lost_udp()), ([false, true, true], true));
    // Without any endpoint, flows stay; with another one, they end.
    plan.set(Family::V4, &name("dns"), vec![ServicePort { cluster: vec![], ..dns(&[]) }]);
    sync(&mut plan, &mut contents);
    assert_eq!((stale(&plan), plan.take_lost_udp()), ([false; 3], false));
    plan.set(Family::V4, &name("dns"), vec![ServicePort { cluster: endpoints([3]), ..dns(&[3]) }]);
    sync(&mut plan, &mut contents);
    assert_eq!((stale(&plan), plan.take_lost_udp()), ([true, true, false], true));
    plan.set(Family::V4, &name("dns"), vec![]);
    sync(&mut plan, &mut contents);
    assert_eq!(
        (stale(&plan), plan.take_lost_udp()),
        ([false; 3], false),
        "a deleted Service leaves flows alone"
    );
    // It is made again: another number, the same address.
    plan.set(Family::V4, &name("dns"), vec![dns(&[2])]);
    sync(&mut plan, &mut contents);
    assert_eq!((stale(&plan), plan.take_lost_udp()), ([false, false, true], true));
    plan.set(Family::V4, &name("dns"), vec![ServicePort { cluster: endpoints([2]), ..dns(&[2]) }]);
    sync(&mut plan, &mut contents);
    assert_eq!((stale(&plan), plan.take_lost_udp()), ([true, false, true], true));
}

/// Addresses of Services and node ports; those of others are of no Service.
#[test]
fn a_flow_is_judged_by_the_service_port_that_has_its_address_now() {
    let mut plan = plan();
    plan.set_node_addresses(Family::V4, &[ip("192.0.2.1")]);
    let mut of = ServicePort {
        external_ips: vec![ip("203.0.113.1")],
        node_port: 30_053,
        serving: endpoints([1]),
        ..port("dns", 1, &[1])
    };
    of.name.protocol = Protocol::Udp;
    plan.set(Family::V4, &name("dns"), vec![of]);
    sync(&mut plan, &mut Contents::default());
    for (address, port, is_stale) in [
        ("10.96.0.1", 80, true),
        ("203.0.113.1", 80, true),
        ("192.0.2.1", 30_053, true),
        ("192.0.2.2", 30_053, false),
        ("192.0.2.1", 80, false),
        ("10.96.0.1", 81, false),
        ("fd00::1", 80, false),
    ] {
        let service = Remote { address: ip(address).into(), port };
        assert_eq!(plan.is_stale(service, endpoint(2).into()), is_stale, "{address} {port}");
        assert!(!plan.is_stale(service, endpoint(1).into()), "{address} {port}");
    }
}

#[test]
fn a_frontend_that_two_claim_goes_to_one_and_then_to_the_other() {
    let mut plan = plan();
    let mut contents = Contents::default();
    let shared = |service: &str, number, which| ServicePort {
        external_ips: vec![ip("203.0.113.1")],
        ..port(service, number, &[which])
    };
    plan.set(Family::V4, &name("b"), vec![shared("b", 2, 2)]);
    plan.set(Family::V4, &name("a"), vec![shared("a", 1, 1)]);
    sync(&mut plan, &mut contents);
    let who = |contents: &Contents| resolve(contents, &frontend("203.0.113.1", 80, Protocol::Tcp));
    assert_eq!(who(&contents), Some(endpoints([1]).into_iter().collect()));
    plan.set(Family::V4, &name("a"), vec![]);
    sync(&mut plan, &mut contents);
    assert_eq!(who(&contents), Some(endpoints([2]).into_iter().collect()));
}

#[test]
fn what_has_no_room_is_left_out_and_tried_again() {
    let mut plan = Plan::new(Capacity { slots: 4, ..ROOM });
    plan.set_facts(Family::V4, NodeFacts { detects_pods: true, ..NodeFacts::default() });
    let mut contents = Contents::default();
    let now = Instant::now();
    let sync_at = |plan: &mut Plan, contents: &mut Contents, now| {
        let changes = plan.changes(Family::V4, now);
        changes.iter().for_each(|change| apply(contents, change));
        contents.frontends.len()
    };
    for number in 1..=3 {
        plan.set(
            Family::V4,
            &name(&format!("s{number}")),
            vec![port(&format!("s{number}"), number, &[1, 2])],
        );
    }
    assert_eq!(sync_at(&mut plan, &mut contents, now), 2);
    assert_eq!((plan.usage(Family::V4).left_out, plan.wake(now)), (1, false));
    let reason =
        plan.lookup(Family::V4, Frontend::Address { ip: ip("10.96.0.3"), protocol: Protocol::Tcp, port: 80 });
    assert_eq!(reason.unwrap().2, Err(Reason::Full));
    plan.set(Family::V4, &name("s1"), vec![]);
    assert_eq!(sync_at(&mut plan, &mut contents, now), 1);
    let later = now + std::time::Duration::from_secs(2);
    assert!(plan.wake(later));
    assert_eq!(sync_at(&mut plan, &mut contents, later), 2);
    assert!(!plan.wake(later), "nothing is left to try");
    assert_eq!(resolve(&contents, &frontend("10.96.0.3", 80, Protocol::Tcp)).unwrap().len(), 2);
    // A service port with more endpoints than there are slots never fits.
    plan.set(Family::V4, &name("s2"), vec![port("s2", 2, &[1, 2, 3, 4, 5])]);
    assert_eq!(sync_at(&mut plan, &mut contents, later), 1);
}

/// Each limit leaves a whole service port out, and one that is freed lets it in.
#[test]
fn every_limit_leaves_whole_service_ports_to_packets() {
    // Two frontends, one set, two slots and, of UDP, two members each.
    let of = |number: u8| {
        let service = format!("s{number}");
        let mut port = ServicePort {
            external_ips: vec![ip(&format!("203.0.113.{number}"))],
            serving: endpoints([1, 2]),
            ..port(&service, number, &[1, 2])
        };
        port.name.protocol = Protocol::Udp;
        (name(&service), port)
    };
    for (what, capacity) in [
        ("frontends", Capacity { frontends: 5, ..ROOM }),
        ("sets", Capacity { sets: 2, ..ROOM }),
        ("slots", Capacity { slots: 5, ..ROOM }),
        ("members", Capacity { members: 5, ..ROOM }),
    ] {
        let mut plan = Plan::new(capacity);
        plan.set_facts(Family::V4, NodeFacts { detects_pods: true, ..NodeFacts::default() });
        let mut contents = Contents::default();
        let mut now = Instant::now();
        for number in 1..=3 {
            let (service, port) = of(number);
            plan.set(Family::V4, &service, vec![port]);
        }
        let mut sync = |plan: &mut Plan, now| {
            let changes = plan.changes(Family::V4, now);
            changes.iter().for_each(|change| apply(&mut contents, change));
            (contents.frontends.len(), contents.sets.len(), plan.usage(Family::V4).left_out)
        };
        assert_eq!(sync(&mut plan, now), (4, 2, 1), "{what}");
        for address in ["10.96.0.3", "203.0.113.3"] {
            let asked = Frontend::Address { ip: ip(address), protocol: Protocol::Udp, port: 80 };
            assert_eq!(plan.lookup(Family::V4, asked).unwrap().2, Err(Reason::Full), "{what}");
        }
        plan.set(Family::V4, &name("s2"), vec![]);
        sync(&mut plan, now);
        now += std::time::Duration::from_secs(2);
        plan.wake(now);
        assert_eq!(sync(&mut plan, now), (4, 2, 0), "{what}: it is tried again");
    }
}

/// As NodeLocal DNSCache: a process of the node serves the address of a Service, and rules of its own keep packets from being translated.
#[test]
fn a_cluster_ip_that_the_node_has_is_left_to_packets() {
    let mut plan = plan();
    let mut contents = Contents::default();
    plan.set(Family::V4, &name("dns"), vec![port("dns", 1, &[1, 2])]);
    plan.set(Family::V4, &name("web"), vec![port("web", 2, &[3])]);
    let left = |contents: &Contents| {
        [1, 2].map(|number| {
            resolve(contents, &frontend(&format!("10.96.0.{number}"), 80, Protocol::Tcp)).is_none()
        })
    };
    for (addresses, expected) in [
        (&["192.0.2.1", "10.96.0.1"][..], [true, false]),
        (&["192.0.2.1"], [false, false]),
        (&["10.96.0.2", "10.96.0.1"], [true, true]),
        (&[], [false, false]),
    ] {
        let addresses: Vec<IpAddr> = addresses.iter().map(|address| ip(address)).collect();
        plan.set_local_addresses(Family::V4, &addresses);
        sync(&mut plan, &mut contents);
        assert_eq!(left(&contents), expected, "{addresses:?}");
    }
}

#[test]
fn node_ports_at_more_addresses_than_the_map_has_are_left_to_packets() {
    let mut plan = Plan::new(Capacity { node_addresses: 4, ..ROOM });
    let all: Vec<IpAddr> = (1..=9).map(|number| ip(&format!("192.0.2.{number}"))).collect();
    plan.set_node_addresses(Family::V4, &all);
    let mut contents = Contents::default();
    sync(&mut plan, &mut contents);
    assert_eq!(contents.node_addresses.len(), 2, "IPv6 has the other half");
    assert!(plan.serves_node_ports_at(Family::V4, all[1]) && !plan.serves_node_ports_at(Family::V4, all[2]));
    let usage = plan.usage(Family::V4);
    assert_eq!((usage.node_addresses, usage.left_addresses), (2, 7));
    plan.set_node_addresses(Family::V4, &[all[0], all[1], all[0], ip("127.0.0.1"), ip("fd00::1")]);
    assert_eq!(plan.usage(Family::V4).left_addresses, 0);
}

#[test]
fn what_an_earlier_run_left_is_kept_where_it_is_right() {
    let now = Instant::now();
    let services = [("s1", vec![1, 2]), ("s2", vec![3]), ("s3", vec![])];
    let wanted = |plan: &mut Plan| {
        for (number, (service, numbers)) in (1..).zip(&services) {
            plan.set(Family::V4, &name(service), vec![port(service, number, numbers)]);
        }
    };
    let mut first = plan();
    wanted(&mut first);
    let mut contents = Contents::default();
    for change in first.full(Family::V4, &Contents::default(), now) {
        apply(&mut contents, &change);
    }
    let mut second = plan();
    // Another order: numbers would be others.
    second.set(Family::V4, &name("new"), vec![port("new", 9, &[9])]);
    wanted(&mut second);
    let changes = second.full(Family::V4, &contents, now);
    let texts: Vec<String> = changes.iter().map(ToString::to_string).collect();
    assert_eq!(texts.len(), 3, "{texts:?}");
    assert!(
        texts.iter().all(|text| !text.contains("10.96.0.1:") && !text.contains("10.96.0.2:")),
        "{texts:?}"
    );
    changes.iter().for_each(|change| apply(&mut contents, change));
    assert_eq!(second.full(Family::V4, &contents, now), []);
    // Nonsense of another program: ranges that overlap, beyond the end, empty; numbers of no family; foreign frontends.
    let mut odd = contents.clone();
    let set = |first, count| SetValue { first, count, affinity_seconds: 0 };
    odd.sets.insert(SetKey { number: 4, kind: 7 }, set(0, 1));
    odd.sets.insert(SetKey { number: u32::MAX, kind: 0 }, set(u32::MAX, u32::MAX));
    odd.sets.insert(SetKey { number: 0, kind: 0 }, set(3, 0));
    odd.frontends.insert(frontend("10.96.0.99", 1, Protocol::Tcp), SetKey { number: 0, kind: 0 });
    for value in odd.frontends.values_mut() {
        value.number |= 1;
    }
    let mut third = plan();
    wanted(&mut third);
    for change in third.full(Family::V4, &odd, now) {
        apply(&mut odd, &change);
    }
    for (number, (_, numbers)) in (1..).zip(&services) {
        let expected: BTreeSet<Endpoint> = endpoints(numbers.clone()).into_iter().collect();
        let key = frontend(&format!("10.96.0.{number}"), 80, Protocol::Tcp);
        assert_eq!(resolve(&odd, &key).unwrap_or_default(), expected);
    }
    assert_eq!(third.full(Family::V4, &odd, now), []);
}
