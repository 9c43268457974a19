//! Entries and virtual servers, and that changes lead to what is wanted.

use keelson_client::ServiceName;
use keelson_proxy::{
    addresses::Match,
    model::{Endpoint, Family, ServicePort},
    options::Detector,
};
use keelson_proxy_xtables::{
    changes::{Changes, key_of},
    ruleset::Plan as _,
};
use proptest::prelude::*;

use super::*;
use crate::testing::service_port;

pub(crate) fn facts() -> NodeFacts {
    NodeFacts {
        mark: 0x4000,
        masquerade_all: false,
        detector: Some(Detector::Cidr("10.244.0.0/16".parse().unwrap())),
        node_ips: vec!["10.0.0.7".parse().unwrap()],
        node_ports: Match::AllLocal,
        local: ["10.0.0.7", "10.0.0.8", "127.0.0.1"].map(|ip| ip.parse().unwrap()).into(),
        scheduler: "rr".into(),
    }
}

fn endpoint(host: u8) -> Endpoint {
    Endpoint { ip: [10, 244, 0, host].into(), port: 8080 }
}

fn name(number: u8) -> ServiceName {
    ServiceName::new("default", &format!("service-{number}"))
}

fn web(number: u8) -> ServicePort {
    let mut port = service_port(&name(number), "", [10, 96, 0, number].into(), 80);
    port.external_ips = vec![[192, 0, 2, number].into()];
    port.load_balancer_ips = vec![[192, 0, 3, number].into()];
    port.node_port = 30_000 + u16::from(number);
    port.has_any = true;
    port.cluster = vec![endpoint(1), endpoint(2)];
    port.local = vec![endpoint(1)];
    port.on_node = vec![endpoint(1)];
    port
}

fn plan(change: impl FnOnce(&mut ServicePort)) -> Plan {
    let mut port = web(1);
    change(&mut port);
    let mut plan = Plan::new(Family::V4, facts());
    plan.set(&name(1), vec![port]);
    plan
}

/// The entries of a set, joined.
fn set(plan: &Plan, kind: SetKind) -> String {
    let wanted = plan.wanted();
    let entries = wanted.sets[&SetName::fixed(Family::V4, kind)].iter().cloned();
    entries.collect::<Vec<_>>().join(" ")
}

const V: &str = "10.96.0.1,tcp:80";
const X: &str = "192.0.2.1,tcp:80";
const W: &str = "192.0.3.1,tcp:80";
const NP: &str = "10.0.0.7,tcp:30001 10.0.0.8,tcp:30001";

#[test]
fn frontends_are_entries_of_the_sets_that_decide() {
    let plain = plan(|_| {});
    assert_eq!(set(&plain, SetKind::ClusterIps), V);
    assert_eq!(set(&plain, SetKind::External), format!("{NP} {X} {W}"));
    assert_eq!(set(&plain, SetKind::Addresses), "10.96.0.1 192.0.2.1 192.0.3.1");
    assert_eq!(set(&plain, SetKind::Hairpin), "10.244.0.1,tcp:8080,10.244.0.1");
    for kind in [SetKind::Reject, SetKind::Drop, SetKind::Local, SetKind::Filtered, SetKind::Ranges] {
        assert_eq!(set(&plain, kind), "", "{kind:?}");
    }
    assert_eq!(plain.servers().len(), 5);

    // Case 39.
    let none = plan(|port| {
        port.has_any = false;
        (port.cluster, port.local, port.on_node) = Default::default();
    });
    assert_eq!(set(&none, SetKind::Reject), format!("{NP} {V} {X} {W}"));
    assert!(none.servers().is_empty());
    // Case 32.
    let internal = plan(|port| {
        port.internal_local = true;
        port.local = Vec::new();
    });
    assert_eq!(set(&internal, SetKind::Drop), V);
    assert_eq!(internal.servers().len(), 4);
    // Case 34: pods and the node have virtual servers by mark.
    let external = plan(|port| {
        port.external_local = true;
        port.local = Vec::new();
    });
    assert_eq!(set(&external, SetKind::Drop), format!("{NP} {X} {W}"));
    assert_eq!(set(&external, SetKind::External), "");
    assert_eq!(set(&external, SetKind::Local).matches("skbmark").count(), 4);
    assert_eq!(external.servers().len(), 3);
}

#[test]
fn case_40_ranges_are_entries_of_the_load_balancer_address() {
    let ranges = |texts: &[&str]| {
        plan(|port| port.source_ranges = texts.iter().map(|text| text.parse().unwrap()).collect())
    };
    let some = ranges(&["198.51.100.0/25", "203.0.113.7/32"]);
    assert_eq!(set(&some, SetKind::Filtered), W);
    assert_eq!(set(&some, SetKind::Ranges), format!("{W},198.51.100.0/25 {W},203.0.113.7"));
    // The node is admitted, and so is the address that its connections come from.
    let node = ranges(&["10.0.0.0/24"]);
    assert_eq!(set(&node, SetKind::Ranges), format!("{W},10.0.0.0/24 {W},192.0.3.1"));
}

#[test]
fn endpoints_at_the_node_are_no_hairpin() {
    let own = Endpoint { ip: [10, 0, 0, 7].into(), port: 8080 };
    let plan = plan(|port| port.on_node.push(own));
    assert_eq!(set(&plan, SetKind::Hairpin), "10.244.0.1,tcp:8080,10.244.0.1");
}

#[test]
fn node_ports_are_not_at_loopback_or_link_local_addresses() {
    let mut facts = facts();
    facts.local = ["::1", "fe80::1", "fd00::7"].map(|ip| ip.parse().unwrap()).into();
    assert_eq!(facts.node_port_addresses(), ["fd00::7".parse::<IpAddr>().unwrap()]);
}

#[test]
fn an_address_goes_before_a_node_port() {
    let mut plan = plan(|_| {});
    let mut other = web(2);
    (other.external_ips, other.port) = (vec![[10, 0, 0, 7].into()], 30_001);
    other.cluster = vec![endpoint(9)];
    plan.set(&name(2), vec![other]);
    let socket = Socket { ip: [10, 0, 0, 7].into(), protocol: Protocol::Tcp, port: 30_001 };
    assert_eq!(plan.server(ServerKey::Socket(socket)).unwrap().endpoints, [endpoint(9)]);
    plan.set(&name(2), Vec::new());
    assert_eq!(plan.server(ServerKey::Socket(socket)).unwrap().endpoints.len(), 2);
}

#[test]
fn the_number_of_rules_is_constant() {
    let rules = |plan: &Plan| {
        let wanted = plan.wanted();
        Table::ALL.map(|table| wanted.chains(table).values().map(|text| text.lines().count()).sum::<usize>())
    };
    let mut many = plan(|_| {});
    let few = rules(&many);
    for number in 2..200 {
        let mut port = web(number);
        port.external_local = number % 2 == 0;
        port.source_ranges = vec!["198.51.100.0/24".parse().unwrap()];
        many.set(&name(number), vec![port]);
    }
    assert_eq!(rules(&many), few);
    assert_eq!(few, [9, 13, 6], "nat, filter, mangle");
}

/// The entries of all sets after changes.
fn apply(entries: &mut BTreeSet<(String, String)>, changes: &Changes) {
    for (set, entry) in &changes.add_entries {
        entries.retain(|(of, with)| (of.as_str(), key_of(with)) != (set.as_str(), key_of(entry)));
        entries.insert((set.to_string(), entry.clone()));
    }
    for (set, entry) in &changes.delete_entries {
        entries.retain(|(of, with)| (of.as_str(), key_of(with)) != (set.as_str(), key_of(entry)));
    }
}

fn all(plan: &Plan) -> BTreeSet<(String, String)> {
    let sets = plan.wanted().sets;
    sets.iter().flat_map(|(set, all)| all.iter().map(move |entry| (set.to_string(), entry.clone()))).collect()
}

#[derive(Debug, Clone)]
struct Step {
    service: u8,
    kind: u8,
    endpoints: u8,
    address: u8,
}

fn step() -> impl Strategy<Value = Step> {
    (1..5_u8, 0..8_u8, 0..4_u8, 0..3_u8).prop_map(|(service, kind, endpoints, address)| Step {
        service,
        kind,
        endpoints,
        address,
    })
}

fn ports(step: &Step) -> Vec<ServicePort> {
    let mut port = web(step.service);
    port.cluster = (1..=step.endpoints).map(endpoint).collect();
    port.has_any = step.endpoints > 0;
    port.local = port.cluster.iter().take(1).copied().collect();
    port.on_node.clone_from(&port.local);
    // Addresses of other Services, too.
    port.external_ips = vec![[192, 0, 2, step.address].into()];
    match step.kind {
        0 => return Vec::new(),
        1 => port.external_local = true,
        2 => (port.external_local, port.local) = (true, Vec::new()),
        3 => port.source_ranges = vec!["198.51.100.0/24".parse().unwrap()],
        4 => port.affinity_seconds = 60,
        5 => port.node_port = 30_000,
        6 => port.internal_local = true,
        _ => {}
    }
    vec![port]
}

proptest! {
    #[test]
    fn changes_lead_to_what_is_wanted(steps in prop::collection::vec(step(), 1..24)) {
        let mut plan = Plan::new(Family::V4, facts());
        plan.take_wanted();
        let (mut entries, mut servers, mut bound) = (all(&plan), plan.servers(), plan.bound());
        for step in &steps {
            let former: std::collections::BTreeMap<_, _> = servers
                .iter()
                .map(|key| (*key, plan.server(*key).map(|server| server.endpoints.to_vec())))
                .collect();
            plan.set(&name(step.service), ports(step));
            let changed = plan.take_changed();
            let changes = plan.take_changes().unwrap();
            apply(&mut entries, &changes);
            prop_assert_eq!(&entries, &all(&plan));
            // What is not among the changed has not changed.
            let now = plan.servers();
            for key in now.union(&servers).filter(|key| !changed.servers.contains(key)) {
                let endpoints = plan.server(*key).map(|server| server.endpoints.to_vec());
                prop_assert_eq!(former.get(key), Some(&endpoints));
            }
            let is_changed = |ip: &&IpAddr| !changed.addresses.contains(*ip);
            prop_assert_eq!(plan.bound().symmetric_difference(&bound).filter(is_changed).count(), 0);
            prop_assert!(!plan.has_changes());
            (servers, bound) = (now, plan.bound());
        }
    }
}
