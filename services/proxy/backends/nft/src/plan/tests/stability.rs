//! Numbers, slots and endpoint numbers that stay the same, and the cost of a change.

use super::*;

fn name(of: &str) -> ServiceName {
    ServiceName::new("default", of)
}

fn shop(last: impl IntoIterator<Item = u8>) -> ServicePort {
    let mut port = service_port(&name("shop"), "http", "10.96.0.10", 80);
    port.cluster = last.into_iter().map(endpoint).collect();
    port.has_any = !port.cluster.is_empty();
    port
}

/// A plan that records, and the table that it has made.
fn started(ports: impl IntoIterator<Item = ServicePort>) -> (Plan, Table) {
    let mut plan = Plan::new(Family::V4, Existing::default());
    plan.record(true);
    for port in ports {
        plan.set(&port.name.service.clone(), vec![port]);
    }
    let mut table = Table::default();
    table.apply_all(plan.take_ops());
    (plan, table)
}

fn number_of(plan: &Plan, service: &str) -> Option<u32> {
    plan.service_ports_of(&name(service)).next()?.number.map(|number| number.0)
}

fn apply(ops: &[Op]) -> Vec<String> {
    let mut output: Vec<String> = ops
        .iter()
        .map(|op| match op {
            Op::Add(element) => format!("add {}", element.set),
            Op::Delete(element) => format!("delete {}", element.set),
            Op::Replace(element, _) => format!("replace {}", element.set),
        })
        .collect();
    output.sort();
    output
}

#[test]
fn case_56_no_change_is_no_operation() {
    let (mut plan, _) = started([shop(1..=10)]);
    plan.set(&name("shop"), vec![shop(1..=10)]);
    plan.facts(NodeFacts::default());
    assert_eq!(plan.take_ops(), []);
}

#[test]
fn case_56_one_endpoint_of_ten_is_one_to_three_operations() {
    let (mut plan, mut table) = started([shop(1..=10)]);
    plan.set(&name("shop"), vec![shop(1..=11)]);
    let ops = plan.take_ops();
    assert_eq!(apply(&ops), ["add counts", "add slots", "delete counts", "replace cluster-ip-ports"]);
    table.apply_all(ops);

    plan.set(&name("shop"), vec![shop((1..=11).filter(|last| *last != 3))]);
    let ops = plan.take_ops();
    assert_eq!(
        apply(&ops),
        ["add counts", "delete counts", "delete slots", "replace cluster-ip-ports", "replace slots"]
    );
    table.apply_all(ops);

    plan.set(&name("shop"), vec![shop((1..=12).filter(|last| *last != 3 && *last != 5))]);
    let ops = plan.take_ops();
    assert_eq!(apply(&ops), ["replace slots"], "one goes, one comes");
    table.apply_all(ops);
    assert_eq!(table, Table::of(plan.elements()));
}

#[test]
fn case_56_one_endpoint_of_ten_with_affinity_and_every_frontend() {
    let full = |last: Vec<u8>| {
        let mut port = shop(last);
        port.affinity_seconds = 10;
        port.node_port = 30_080;
        port.load_balancer_ips = vec![ip("203.0.113.9")];
        port.external_ips = vec![ip("203.0.113.10")];
        port
    };
    let (mut plan, mut table) = started([full((1..=10).collect())]);
    plan.set(&name("shop"), vec![full((1..=11).collect())]);
    let ops = plan.take_ops();
    let expected = [
        "add affinity-endpoints",
        "add affinity-slots",
        "replace external-choice",
        "replace internal-choice",
    ];
    assert_eq!(apply(&ops), expected);
    table.apply_all(ops);
    plan.set(&name("shop"), vec![full((2..=11).collect())]);
    let ops = plan.take_ops();
    let expected = [
        "delete affinity-endpoints",
        "delete affinity-slots",
        "replace affinity-slots",
        "replace external-choice",
        "replace internal-choice",
    ];
    assert_eq!(apply(&ops), expected);
    table.apply_all(ops);
    assert_eq!(table, Table::of(plan.elements()));
}

/// Only a new verdict makes the kernel validate the whole table.
#[test]
fn p18_another_count_is_no_new_verdict_where_another_service_has_it() {
    let other = |count: u8| {
        let mut other = service_port(&name("other"), "http", "10.96.0.11", 80);
        other.cluster = (1..=count).map(endpoint).collect();
        (other.has_any, other.node_port) = (true, 30_080);
        other.load_balancer_ips = vec![ip("203.0.113.9")];
        other
    };
    let (mut plan, mut table) = started([shop(1..=4), other(3)]);
    plan.set(&name("third"), vec![ServicePort { node_port: 0, ..other(3) }]);
    table.apply_all(plan.take_ops());
    plan.set(&name("other"), vec![other(4)]);
    let ops = plan.take_ops();
    let verdicts = |op: &&Op| match op {
        Op::Add(element) | Op::Replace(_, element) => matches!(element.value, Value::Verdict(_)),
        Op::Delete(_) => false,
    };
    assert_eq!(ops.iter().filter(verdicts).collect::<Vec<_>>(), [] as [&Op; 0]);
    assert!(ops.len() <= 5, "{ops:?}");
    table.apply_all(ops);
    assert_eq!(table, Table::of(plan.elements()));
}

/// A full affinity map disables stickiness only for every eighth service port.
#[test]
fn p8_service_ports_with_affinity_are_spread_over_maps() {
    let sticky = |number: u8| {
        let mut port = service_port(&name(&format!("s{number}")), "", &format!("10.96.1.{number}"), 80);
        (port.cluster, port.has_any, port.affinity_seconds) = (vec![endpoint(1)], true, 60);
        port
    };
    let (mut plan, table) = started((0..9).map(sticky));
    let group = |plan: &Plan, number: u8| match plan
        .service_ports_of(&name(&format!("s{number}")))
        .next()
        .unwrap()
        .internal_chain()
    {
        Some(Chain::Affinity { group, .. }) => group,
        other => panic!("{other:?}"),
    };
    let groups: BTreeSet<u8> = (0..8).map(|number| group(&plan, number)).collect();
    assert_eq!(groups.len(), 8);
    assert_eq!(group(&plan, 8), group(&plan, 0));
    let maps: BTreeSet<SetName> = groups.iter().map(|group| SetName::affinity(*group)).collect();
    assert_eq!(maps, SetName::AFFINITY.into_iter().collect());
    // A restart, and a change, keep the map: what the kernel remembers stays valid.
    let before: Vec<u8> = (0..9).map(|number| group(&plan, number)).collect();
    plan.set(&name("s3"), vec![ServicePort { cluster: vec![endpoint(1), endpoint(2)], ..sticky(3) }]);
    assert_eq!(group(&plan, 3), before[3]);
    let mut again = Plan::new(Family::V4, Existing::new(Family::V4, table.elements()));
    for number in (0..9).rev() {
        again.set(&name(&format!("s{number}")), vec![sticky(number)]);
    }
    assert_eq!((0..9).map(|number| group(&again, number)).collect::<Vec<_>>(), before);
}

/// Counts that do not fit into a number are in maps of their own.
#[test]
fn p18_more_endpoints_than_a_number_can_count() {
    let many = |count: u32| {
        let mut port = shop([]);
        port.cluster =
            (0..count).map(|ip| Endpoint { ip: (0x0af4_0000 + ip).to_be_bytes().into(), port: 80 }).collect();
        port.has_any = true;
        port
    };
    let (mut plan, mut table) = started([many(Number::COUNT_MAX)]);
    let to = To { ip: ip("10.96.0.10"), protocol: Protocol::Tcp, port: 80 };
    for count in [Number::COUNT_MAX + 1, 2_000, Number::COUNT_MAX, Number::COUNT_MAX + 1] {
        plan.set(&name("shop"), vec![many(count)]);
        table.apply_all(plan.take_ops());
        assert_eq!(table, Table::of(plan.elements()));
        let served = send(&table, Family::V4, (Source::Pod, ip("10.244.0.9")), to).served();
        assert_eq!(served.map(|endpoints| endpoints.len()), Some(count as usize));
        let again = Plan::new(Family::V4, Existing::new(Family::V4, table.elements()));
        let mut again = again;
        again.set(&name("shop"), vec![many(count)]);
        assert_eq!(again.difference(table.0.clone()), [], "a restart changes nothing");
    }
}

/// Numbers of an older version, which had more bits and no count.
#[test]
fn p18_invalid_numbers_of_an_older_table_are_not_kept() {
    let (plan, _) = started([shop(1..=2)]);
    let old = |number: u32| {
        plan.elements().map(move |element| match (element.set, element.value) {
            (SetName::ClusterIpPorts, _) => {
                Element { value: Value::Data(Key::new().number(Number(number))), ..element }
            }
            _ => element,
        })
    };
    let whole = Number(1).with_count(Choice::Cluster, 2).0;
    for (number, kept) in [(whole, true), (Number(1).uncounted().0, true), (1, false), (0x10_0001, false)] {
        let mut again = Plan::new(Family::V4, Existing::new(Family::V4, old(number)));
        again.set(&name("shop"), vec![shop(1..=2)]);
        assert_eq!(number_of(&again, "shop") == Some(1), kept, "{number:#x}");
    }
}

#[test]
fn a_restored_value_is_no_change() {
    let (mut plan, _) = started([shop(1..=3)]);
    plan.set(&name("shop"), vec![shop(1..=5)]);
    plan.set(&name("shop"), vec![shop(1..=3)]);
    assert_eq!(plan.take_ops(), []);
    plan.delete(&name("shop"));
    plan.set(&name("shop"), vec![shop(1..=3)]);
    assert_eq!(plan.take_ops(), [], "deleted and back within one state");
}

#[test]
fn case_58_emptied_and_restored_within_a_state_is_no_change() {
    let (mut plan, mut table) = started([shop(1..=3)]);
    plan.set(&name("shop"), vec![shop([])]);
    plan.set(&name("shop"), vec![shop(1..=3)]);
    assert_eq!(plan.take_ops(), []);
    plan.set(&name("shop"), vec![shop([])]);
    table.apply_all(plan.take_ops());
    plan.set(&name("shop"), vec![shop(1..=3)]);
    table.apply_all(plan.take_ops());
    assert_eq!(table, Table::of(plan.elements()));
}

#[test]
fn a_released_number_is_not_reassigned_before_operations_are_taken() {
    let mut other = shop([9]);
    other.name.service = name("other");
    other.cluster_ip = ip("10.96.0.11");
    let (mut plan, _) = started([shop(1..=3)]);
    assert_eq!(number_of(&plan, "shop"), Some(1));
    plan.delete(&name("shop"));
    plan.set(&name("other"), vec![other]);
    assert_eq!(number_of(&plan, "other"), Some(2));
    plan.set(&name("shop"), vec![shop(1..=3)]);
    assert_eq!(number_of(&plan, "shop"), Some(1), "its own, as it has not left the kernel");
}

#[test]
fn a_frontend_that_moves_within_a_state_is_replaced() {
    let (mut plan, mut table) = started([shop(1..=2)]);
    plan.delete(&name("shop"));
    let mut other = shop(5..=6);
    other.name.service = name("other");
    plan.set(&name("other"), vec![other]);
    let ops = plan.take_ops();
    let output = apply(&ops);
    assert!(output.contains(&"replace cluster-ip-ports".to_owned()), "{output:?}");
    assert!(!output.iter().any(|op| op.ends_with("cluster-ips")), "{output:?}");
    table.apply_all(ops);
    assert_eq!(table, Table::of(plan.elements()));
}

#[test]
fn case_47_endpoint_numbers_stay_while_the_endpoint_is_in_either_set() {
    let sets = |cluster: &[u8], local: &[u8]| {
        let mut port = shop(cluster.iter().copied());
        port.affinity_seconds = 10;
        port.node_port = 30_080;
        port.external_local = true;
        port.local = local.iter().copied().map(endpoint).collect();
        port
    };
    let numbers = |plan: &Plan| -> HashMap<Endpoint, Key> {
        let endpoint = |element: Element| match (element.set, element.value) {
            (SetName::AffinityEndpoints | SetName::LocalAffinityEndpoints, Value::Data(value)) => {
                Some((parse(Family::V4, value), element.key))
            }
            _ => None,
        };
        plan.elements().filter_map(endpoint).collect()
    };
    let (mut plan, _) = started([sets(&[1, 2, 3], &[2])]);
    let first = numbers(&plan);
    assert_eq!(first.len(), 3);
    plan.set(&name("shop"), vec![sets(&[1, 3, 4], &[2])]);
    let second = numbers(&plan);
    assert_eq!(second.len(), 4);
    for last in [1, 2, 3] {
        assert_eq!(first[&endpoint(last)], second[&endpoint(last)], "endpoint {last}");
    }
    plan.set(&name("shop"), vec![sets(&[1, 3, 4, 5], &[])]);
    let third = numbers(&plan);
    assert!(!third.contains_key(&endpoint(2)));
    assert_ne!(third[&endpoint(5)], first[&endpoint(2)], "no client is led to the place of another");

    let existing = Existing::new(Family::V4, plan.elements());
    let mut again = Plan::new(Family::V4, existing);
    again.set(&name("shop"), vec![sets(&[0, 1, 3, 4, 5], &[0])]);
    let fourth = numbers(&again);
    for last in [1, 3, 4, 5] {
        assert_eq!(third[&endpoint(last)], fourth[&endpoint(last)], "endpoint {last}, restarted");
    }
}

#[test]
fn case_57_a_restart_differs_by_the_delta() {
    let ports: Vec<ServicePort> = (1..=20)
        .map(|of| {
            let mut port = shop(1..=of);
            port.name.service = name(&format!("shop-{of}"));
            port.cluster_ip = IpAddr::from([10, 96, 0, of]);
            port.affinity_seconds = u32::from(of % 3) * 10;
            port
        })
        .collect();
    let (plan, table) = started(ports.clone());
    let mut again = Plan::new(Family::V4, Existing::new(Family::V4, plan.elements()));
    for port in ports.iter().rev() {
        again.set(&port.name.service, vec![port.clone()]);
    }
    assert_eq!(again.difference(table.0.clone()), []);
    let mut changed = ports[9].clone();
    changed.cluster.push(endpoint(99));
    again.set(&changed.name.service.clone(), vec![changed]);
    assert_eq!(again.difference(table.0).len(), 3);
}

#[test]
fn existing_numbers_are_not_assigned_until_forgotten() {
    let (plan, table) = started([shop(1..=3)]);
    let mut again = Plan::new(Family::V4, Existing::new(Family::V4, plan.elements()));
    let mut other = shop([1]);
    other.cluster_ip = ip("10.96.0.77");
    again.set(&name("other"), vec![other]);
    assert_eq!(number_of(&again, "other"), Some(2));
    let mut after = table;
    after.apply_all(again.difference(after.0.clone()));
    again.forget_existing();
    assert_eq!(after, Table::of(again.elements()));
}

#[test]
fn enabling_or_disabling_affinity_changes_the_number() {
    let (mut plan, mut table) = started([shop(1..=3)]);
    let mut kept = shop(1..=3);
    kept.affinity_seconds = 10;
    plan.set(&name("shop"), vec![kept]);
    assert_eq!(number_of(&plan, "shop"), Some(Number::FIRST_WITH_AFFINITY));
    table.apply_all(plan.take_ops());
    assert_eq!(table, Table::of(plan.elements()));
    assert_eq!(
        plan.chains().into_iter().collect::<Vec<_>>(),
        [Chain::Affinity { choice: Choice::Cluster, count: 3, seconds: 10, group: 0 }]
    );
}

#[test]
fn too_many_endpoints_for_affinity_are_reported_and_served_without() {
    let mut port = shop([]);
    port.affinity_seconds = 10;
    port.has_any = true;
    let all =
        |count: u32| (0..count).map(|at| Endpoint { ip: std::net::Ipv4Addr::from(at + 1).into(), port: 1 });
    port.cluster = all(65_536).collect();
    let mut plan = Plan::new(Family::V4, Existing::default());
    plan.set(&name("shop"), vec![port.clone()]);
    assert_eq!((number_of(&plan, "shop"), plan.counts().without_affinity), (Some(1), 1));
    assert!(plan.service_ports().next().unwrap().lacks_affinity());
    port.cluster = all(65_535).collect();
    plan.set(&name("shop"), vec![port]);
    assert_eq!(plan.counts().without_affinity, 0);
    assert_eq!(plan.counts().elements(SetName::AffinityEndpoints), 65_535);
}

#[test]
fn too_many_service_ports_with_affinity_are_reported_and_served_without() {
    let mut plan = Plan::new(Family::V4, Existing::default());
    for at in 0..32_769_u32 {
        let mut port = shop([1]);
        port.affinity_seconds = 10;
        port.cluster_ip = std::net::Ipv4Addr::from(0x0a60_0000 + at).into();
        plan.set(&name(&format!("shop-{at}")), vec![port]);
    }
    assert_eq!(plan.counts().without_affinity, 1);
    assert_eq!(plan.counts().elements(SetName::Slots), 1);
    plan.delete(&name("shop-0"));
    let mut port = shop([1]);
    port.affinity_seconds = 10;
    port.cluster_ip = std::net::Ipv4Addr::from(0x0a60_0000 + 32_768).into();
    plan.set(&name("shop-32768"), vec![port]);
    assert_eq!(plan.counts().without_affinity, 0, "there is room again");
}

/// A service port whose only frontend with endpoints is another's has a number and slots, to which no frontend leads.
#[test]
fn a_restart_keeps_numbers_that_no_frontend_leads_to() {
    for (affinity, backwards) in [(0, false), (0, true), (10, false), (10, true)] {
        let port = |of: &str, cluster_ip: &str, endpoints: &[u8]| {
            let mut port = shop(endpoints.iter().copied());
            port.name.service = name(of);
            port.cluster_ip = ip(cluster_ip);
            // No endpoint is on this node.
            port.internal_local = true;
            port.external_ips = vec![ip("203.0.113.7")];
            port.affinity_seconds = affinity;
            port
        };
        let ports = [
            port("a", "10.96.0.1", &[1, 2]),
            port("b", "10.96.0.2", &[3, 4]),
            port("c", "10.96.0.3", &[3, 4]),
        ];
        let (plan, table) = started(ports.clone());
        assert_eq!(plan.conflicts().len(), 1);
        let mut again = Plan::new(Family::V4, Existing::new(Family::V4, plan.elements()));
        let mut ports = ports.to_vec();
        if backwards {
            ports.reverse();
        }
        for port in ports {
            again.set(&port.name.service.clone(), vec![port]);
        }
        assert_eq!(again.difference(table.0), [], "with affinity for {affinity} s, backwards: {backwards}");
    }
}
