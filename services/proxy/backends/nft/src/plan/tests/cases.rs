//! The cases of service-semantics 8 that the maps decide: from messages of the API to the results of packets. The
//! traversed chain tells whether a packet is masqueraded.

use keelson_proto::localnetv1::{
    self, EndpointConditions, EndpointPort, IpSet, PortMapping, ServiceEndpoints, ServiceIPs,
};
use keelson_proxy::model::service_ports;

use super::*;

const V: &str = "10.96.0.10";
const V6: &str = "fd00:96::10";
const W: &str = "203.0.113.9";
const X: &str = "198.51.100.7";
const NODE: &str = "192.168.0.1";
const CLIENT: &str = "192.0.2.1";
const OTHER_CLIENT: &str = "192.0.2.200";
const POD: &str = "10.244.9.9";

/// An endpoint in a message: last byte, on this node, in ClusterSet, in LocalSet.
type Sent = (u8, bool, bool, bool);
const L1: u8 = 1;
const L2: u8 = 2;
const R1: u8 = 11;
const R2: u8 = 12;

fn v4(texts: &[&str]) -> Option<IpSet> {
    Some(IpSet { v4: texts.iter().map(|text| (*text).to_owned()).collect(), v6: vec![] })
}

/// Type LoadBalancer with V, X, W and NP; both policies Cluster; one port.
fn shop(endpoints: &[Sent]) -> ServiceEndpoints {
    let endpoint = |(last, local, in_cluster, in_local): &Sent| localnetv1::Endpoint {
        conditions: Some(EndpointConditions {
            ready: true,
            serving: true,
            local: *local,
            ..Default::default()
        }),
        i_ps: v4(&[&format!("10.244.0.{last}")]),
        ports: vec![EndpointPort { index: 0, port: 8080, cluster: *in_cluster, local: *in_local }],
        ..Default::default()
    };
    ServiceEndpoints {
        namespace: "default".to_owned(),
        name: "shop".to_owned(),
        r#type: "LoadBalancer".to_owned(),
        i_ps: Some(ServiceIPs {
            cluster_ip: V.to_owned(),
            cluster_i_ps: v4(&[V]),
            external_i_ps: v4(&[X]),
            load_balancer_i_ps: v4(&[W]),
        }),
        ports: vec![mapping("http", localnetv1::Protocol::Tcp, 80, 30_080, !endpoints.is_empty())],
        endpoints: endpoints.iter().map(endpoint).collect(),
        ..Default::default()
    }
}

fn mapping(name: &str, protocol: localnetv1::Protocol, port: i32, node_port: i32, any: bool) -> PortMapping {
    PortMapping {
        name: name.to_owned(),
        protocol: protocol.into(),
        port,
        node_port,
        has_any_v4: any,
        ..Default::default()
    }
}

struct Scene {
    plan: Plan,
    table: Table,
}

fn scene(services: &[ServiceEndpoints]) -> Scene {
    let mut plan = Plan::new(Family::V4, Existing::default());
    plan.record(true);
    plan.facts(NodeFacts {
        service_cidrs: vec!["10.96.0.0/16".parse().unwrap()],
        node_ips: vec![ip(NODE)],
        node_port_addresses: vec![ip(NODE)],
    });
    let mut scene = Scene { plan, table: Table::default() };
    services.iter().for_each(|service| scene.set(service));
    scene
}

/// Results in short form: `1 11` (endpoints), `DROP`, `REJECT`, `-`.
impl Scene {
    fn set(&mut self, service: &ServiceEndpoints) {
        let name = ServiceName::new(&service.namespace, &service.name);
        self.plan.set(&name, service_ports(service, Family::V4));
        self.table.apply_all(self.plan.take_ops());
        assert_eq!(self.table, Table::of(self.plan.elements()));
    }

    fn send(&self, source: Source, from: &str, to: &str, port: u16) -> String {
        self.send_by(Protocol::Tcp, source, from, to, port)
    }

    fn send_by(&self, protocol: Protocol, source: Source, from: &str, to: &str, port: u16) -> String {
        let to = To { ip: ip(to), protocol, port };
        match send(&self.table, Family::V4, (source, ip(from)), to) {
            Outcome::Endpoints { chosen, .. } => {
                let last =
                    |endpoint: &Endpoint| endpoint.ip.to_string().rsplit('.').next().unwrap().to_owned();
                chosen.iter().map(last).collect::<Vec<_>>().join(" ")
            }
            Outcome::Drop => "DROP".to_owned(),
            Outcome::Reject => "REJECT".to_owned(),
            Outcome::Passes => "-".to_owned(),
            Outcome::Miss(map) => panic!("{map} has nothing"),
        }
    }

    /// To V, W, X and NP.
    fn to_all(&self, source: Source) -> [String; 4] {
        let from = match source {
            Source::Pod => POD,
            Source::Host => NODE,
            Source::Outside => CLIENT,
        };
        [(V, 80), (W, 80), (X, 80), (NODE, 30_080)].map(|(to, port)| self.send(source, from, to, port))
    }

    #[track_caller]
    fn expect(&self, source: Source, v: &str, external: &str) {
        assert_eq!(self.to_all(source), [v, external, external, external], "from {source:?}");
    }

    fn count(&self, set: SetName) -> usize {
        self.table.0.keys().filter(|(other, _)| *other == set).count()
    }
}

#[test]
fn case_1_without_a_cluster_ip_there_is_no_frontend() {
    let mut headless = shop(&[(R1, false, true, false)]);
    headless.i_ps.as_mut().unwrap().cluster_i_ps = v4(&[]);
    let scene = scene(&[headless]);
    scene.expect(Source::Outside, "DROP", "-");
    assert_eq!(scene.plan.counts().services, 0);
}

#[test]
fn case_2_a_service_is_deleted_and_recreated() {
    let service = shop(&[(R1, false, true, false)]);
    let mut scene = scene(std::slice::from_ref(&service));
    scene.plan.set(&ServiceName::new("default", "shop"), Vec::new());
    scene.table.apply_all(scene.plan.take_ops());
    scene.expect(Source::Outside, "DROP", "-");
    assert_eq!(scene.table.0.len(), 2, "ServiceCIDR and node address");
    scene.set(&service);
    scene.expect(Source::Outside, "11", "11");
}

#[test]
fn case_3_families_are_separate() {
    let mut service = shop(&[(R1, false, true, false)]);
    let ips = service.i_ps.as_mut().unwrap();
    ips.cluster_i_ps.as_mut().unwrap().v6.push(V6.to_owned());
    let mut plan = Plan::new(Family::V6, Existing::default());
    plan.set(&ServiceName::new("default", "shop"), service_ports(&service, Family::V6));
    let table = Table::of(plan.elements());
    let to = To { ip: ip(V6), protocol: Protocol::Tcp, port: 80 };
    assert_eq!(send(&table, Family::V6, (Source::Pod, ip("fd00::9")), to), Outcome::Reject);
    scene(&[service]).expect(Source::Pod, "11", "11");
}

#[test]
fn case_3_ipv6_is_served_as_ipv4_is() {
    for affinity in [0, 10] {
        let mut port = service_port(&ServiceName::new("default", "shop"), "http", V6, 80);
        port.load_balancer_ips = vec![ip("2001:db8::9")];
        port.source_ranges = vec!["2001:db8:1::/48".parse().unwrap()];
        port.affinity_seconds = affinity;
        let endpoint = Endpoint { ip: ip("fd00:244::1"), port: 8080 };
        (port.has_any, port.cluster, port.on_node) = (true, vec![endpoint], vec![endpoint]);
        let name = port.name.service.clone();
        let mut plan = Plan::new(Family::V6, Existing::default());
        plan.set(&name, vec![port.clone()]);
        let table = Table::of(plan.elements());
        let meets = |to: &str, from: &str| {
            let to = To { ip: ip(to), protocol: Protocol::Tcp, port: 80 };
            send(&table, Family::V6, (Source::Outside, ip(from)), to)
        };
        assert_eq!(meets(V6, "2001:db8:2::1").served(), Some(BTreeSet::from([endpoint])));
        assert_eq!(meets("2001:db8::9", "2001:db8:1::1").served(), Some(BTreeSet::from([endpoint])));
        assert_eq!(meets("2001:db8::9", "2001:db8:2::1"), Outcome::Drop);
        let mut again = Plan::new(Family::V6, Existing::new(Family::V6, plan.elements()));
        again.set(&name, vec![port]);
        assert_eq!(again.difference(table.0), []);
    }
}

#[test]
fn case_9_each_endpoint_on_its_own_number() {
    let mut service = shop(&[(R1, false, true, false), (R2, false, true, false)]);
    service.endpoints[1].ports[0].port = 9090;
    let scene = scene(&[service]);
    let to = To { ip: ip(V), protocol: Protocol::Tcp, port: 80 };
    let served = send(&scene.table, Family::V4, (Source::Pod, ip(POD)), to).served().unwrap();
    assert_eq!(served.iter().map(|endpoint| endpoint.port).collect::<Vec<_>>(), [8080, 9090]);
}

#[test]
fn case_14_protocols_are_independent() {
    let mut service = shop(&[(R1, false, true, false), (R2, false, true, false)]);
    service.ports.push(mapping("sctp", localnetv1::Protocol::Sctp, 80, 0, true));
    service.endpoints[1].ports[0].index = 1;
    let mut scene = scene(&[service.clone()]);
    let from_pod = |scene: &Scene, protocol| scene.send_by(protocol, Source::Pod, POD, V, 80);
    assert_eq!(
        Protocol::ALL.map(|protocol| from_pod(&scene, protocol)),
        ["11", "REJECT", "12"],
        "without a UDP port, UDP is rejected"
    );
    service.ports.push(mapping("dns", localnetv1::Protocol::Udp, 80, 0, true));
    service.endpoints[0].ports.push(EndpointPort { index: 2, port: 53, cluster: true, local: false });
    scene.set(&service);
    assert_eq!(Protocol::ALL.map(|protocol| from_pod(&scene, protocol)), ["11", "11", "12"]);
}

#[test]
fn case_17_undefined_ports_reject_and_unallocated_addresses_drop() {
    let scene = scene(&[shop(&[(R1, false, true, false)])]);
    let from_pod = |to, port| scene.send(Source::Pod, POD, to, port);
    assert_eq!(from_pod(V, 81), "REJECT");
    assert_eq!(from_pod("10.96.3.3", 80), "DROP");
    assert_eq!(
        (from_pod(W, 81), from_pod(X, 81), from_pod(NODE, 30_081)),
        ("-".into(), "-".into(), "-".into())
    );
}

#[test]
fn case_17_a_cluster_ip_is_deleted_with_its_last_port() {
    let mut service = shop(&[(R1, false, true, false)]);
    service.ports.push(mapping("other", localnetv1::Protocol::Tcp, 443, 0, false));
    let mut scene = scene(&[service.clone()]);
    assert_eq!(scene.count(SetName::ClusterIps), 1);
    service.ports.truncate(1);
    scene.set(&service);
    assert_eq!(scene.count(SetName::ClusterIps), 1);
    service.ports.clear();
    scene.set(&service);
    assert_eq!(scene.count(SetName::ClusterIps), 0);
}

#[test]
fn case_20_and_33_external_local_with_endpoints_here() {
    let mut service = shop(&[(L1, true, true, true), (R1, false, true, false)]);
    service.external_traffic_to_local = true;
    let scene = scene(&[service]);
    scene.expect(Source::Outside, "1 11", "1");
    scene.expect(Source::Pod, "1 11", "1 11");
    scene.expect(Source::Host, "1 11", "1 11");
}

#[test]
fn case_21_and_34_external_local_without_endpoints_here() {
    let mut service = shop(&[(R1, false, true, false)]);
    service.external_traffic_to_local = true;
    let scene = scene(&[service]);
    scene.expect(Source::Outside, "11", "DROP");
    scene.expect(Source::Pod, "11", "11");
    scene.expect(Source::Host, "11", "11");
}

#[test]
fn case_22_and_39_no_endpoints_reject_whatever_the_policies() {
    for (internal, external) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut service = shop(&[]);
        (service.internal_traffic_to_local, service.external_traffic_to_local) = (internal, external);
        let scene = scene(&[service]);
        for source in [Source::Pod, Source::Host, Source::Outside] {
            scene.expect(source, "REJECT", "REJECT");
        }
        assert!(scene.plan.service_ports().all(|port| port.number.is_none()));
        assert!(scene.plan.chains().is_empty());
    }
}

#[test]
fn case_29_hints_leave_the_local_set_alone() {
    let mut service = shop(&[(L1, true, false, true), (R1, false, true, false), (R2, false, false, false)]);
    service.external_traffic_to_local = true;
    let scene = scene(&[service]);
    scene.expect(Source::Outside, "11", "1");
    scene.expect(Source::Pod, "11", "11");
}

#[test]
fn case_31_internal_local_does_not_concern_external_traffic() {
    let mut service = shop(&[(L1, true, true, true), (R1, false, true, false)]);
    service.internal_traffic_to_local = true;
    let scene = scene(&[service.clone()]);
    for source in [Source::Pod, Source::Host, Source::Outside] {
        scene.expect(source, "1", "1 11");
    }
    // Internal only: the external policy has no effect, and ClusterSet is not kept.
    let ips = service.i_ps.as_mut().unwrap();
    (ips.external_i_ps, ips.load_balancer_i_ps) = (None, None);
    (service.ports[0].node_port, service.external_traffic_to_local) = (0, true);
    let scene = self::scene(&[service]);
    assert_eq!(scene.send(Source::Pod, POD, V, 80), "1");
    assert_eq!((scene.count(SetName::Slots), scene.count(SetName::ExternalPolicy)), (0, 0));
}

#[test]
fn case_32_internal_local_without_endpoints_here() {
    let mut service = shop(&[(R1, false, true, false)]);
    service.internal_traffic_to_local = true;
    let mut scene = scene(&[service.clone()]);
    for source in [Source::Pod, Source::Host, Source::Outside] {
        scene.expect(source, "DROP", "11");
    }
    service.endpoints.clear();
    service.ports[0].has_any_v4 = false;
    scene.set(&service);
    scene.expect(Source::Pod, "REJECT", "REJECT");
}

#[test]
fn cases_33_and_37_which_chain_decides_about_masquerading() {
    let mut service = shop(&[(L1, true, true, true)]);
    let external = |scene: &Scene, to: &str, port| {
        let to = To { ip: ip(to), protocol: Protocol::Tcp, port };
        match send(&scene.table, Family::V4, (Source::Outside, ip(CLIENT)), to) {
            Outcome::Endpoints { external, .. } => external,
            other => panic!("{other:?}"),
        }
    };
    let mut scene = scene(&[service.clone()]);
    let all = |scene: &Scene| {
        [(V, 80), (W, 80), (X, 80), (NODE, 30_080)].map(|(to, port)| external(scene, to, port))
    };
    assert_eq!(all(&scene), [false, true, true, true]);
    assert_eq!(scene.count(SetName::ExternalPolicy), 0, "case 37: the chain that always masquerades");
    service.external_traffic_to_local = true;
    scene.set(&service);
    assert_eq!(all(&scene), [false, true, true, true]);
    assert_eq!(scene.count(SetName::ExternalPolicy), 1, "case 33: the chain that knows pods and the node");
}

#[test]
fn case_38_hairpin_is_known_of_endpoints_on_this_node() {
    let mut scene =
        scene(&[shop(&[(L1, true, true, false), (L2, true, false, false), (R1, false, true, false)])]);
    let of = |last: u8| {
        let it = endpoint(last);
        (SetName::Hairpin, Key::new().ip(it.ip).ip(it.ip).protocol(Protocol::Tcp).port(it.port))
    };
    assert!(scene.table.0.contains_key(&of(L1)));
    assert_eq!(scene.count(SetName::Hairpin), 1, "L2 is in no set, R1 is not here");
    let mut second = shop(&[(L1, true, true, false)]);
    second.name = "second".to_owned();
    second.i_ps = Some(ServiceIPs { cluster_i_ps: v4(&["10.96.0.11"]), ..Default::default() });
    scene.set(&second);
    scene.set(&shop(&[(R1, false, true, false)]));
    assert!(scene.table.0.contains_key(&of(L1)), "the second Service has it still");
}

#[test]
fn case_40_source_ranges() {
    let mut service = shop(&[(R1, false, true, false)]);
    service.source_ranges = v4(&["192.0.2.0/25", "192.168.0.0/24"]);
    let mut scene = scene(&[service]);
    assert_eq!(scene.send(Source::Outside, CLIENT, W, 80), "11");
    assert_eq!(scene.send(Source::Outside, OTHER_CLIENT, W, 80), "DROP");
    assert_eq!(scene.send(Source::Pod, POD, W, 80), "DROP");
    assert_eq!(scene.send(Source::Outside, OTHER_CLIENT, NODE, 30_080), "11");
    assert_eq!(scene.send(Source::Outside, OTHER_CLIENT, X, 80), "11");
    assert_eq!(scene.send(Source::Host, NODE, W, 80), "11");
    assert_eq!(scene.send(Source::Host, W, W, 80), "11", "the range holds the node's address");
    let found =
        scene.plan.lookup(Frontend::Address { ip: ip(W), protocol: Protocol::Tcp, port: 80 }).unwrap();
    let ranges = found.port.source_ranges.as_deref().unwrap();
    let ranges = frontend::admitted(ranges, ip(W), scene.plan.node_facts());
    let admits = |source| ranges.iter().any(|range| range.contains(&ip(source)));
    assert!(admits(CLIENT) && admits(W) && !admits(OTHER_CLIENT));

    scene.plan.facts(NodeFacts { node_ips: vec![ip("192.168.7.1")], ..scene.plan.node_facts().clone() });
    scene.table.apply_all(scene.plan.take_ops());
    assert_eq!(scene.send(Source::Host, W, W, 80), "DROP", "no range holds it any more");
}

#[test]
fn case_41_ranges_of_another_family_or_of_everything_filter_nothing() {
    for ranges in [&["0.0.0.0/0", "192.0.2.0/25"][..], &["0.0.0.0/1", "128.0.0.0/1"], &[]] {
        let mut service = shop(&[(R1, false, true, false)]);
        service.source_ranges = v4(ranges);
        service.source_ranges.as_mut().unwrap().v6.push("fd00::/16".to_owned());
        let scene = scene(&[service]);
        assert_eq!(scene.send(Source::Outside, OTHER_CLIENT, W, 80), "11", "{ranges:?}");
        assert_eq!(scene.count(SetName::Filtered), 0);
    }
}

#[test]
fn case_42_ranges_without_endpoints_filter_first() {
    let mut service = shop(&[]);
    service.source_ranges = v4(&["192.0.2.0/25"]);
    let scene = scene(&[service]);
    assert_eq!(scene.send(Source::Outside, CLIENT, W, 80), "REJECT");
    assert_eq!(scene.send(Source::Outside, OTHER_CLIENT, W, 80), "DROP");
    assert_eq!(scene.send(Source::Outside, OTHER_CLIENT, X, 80), "REJECT");
}

#[test]
fn cases_43_and_44_frontends_that_are_absent() {
    let mut service = shop(&[(R1, false, true, false)]);
    service.i_ps.as_mut().unwrap().load_balancer_i_ps = v4(&[]);
    let mut scene = scene(&[service.clone()]);
    assert_eq!(scene.to_all(Source::Outside), ["11", "-", "11", "11"]);
    service.i_ps.as_mut().unwrap().load_balancer_i_ps = v4(&[W]);
    service.ports[0].node_port = 0;
    scene.set(&service);
    assert_eq!(scene.to_all(Source::Outside), ["11", "11", "11", "-"]);
}

#[test]
fn case_45_node_ports_answer_at_the_configured_addresses() {
    let mut scene = scene(&[shop(&[(R1, false, true, false)])]);
    assert_eq!(scene.send(Source::Outside, CLIENT, "192.168.0.2", 30_080), "-");
    let facts = scene.plan.node_facts().clone();
    let both = vec![ip("192.168.0.2"), ip(NODE)];
    scene.plan.facts(NodeFacts { node_port_addresses: both, ..facts });
    scene.table.apply_all(scene.plan.take_ops());
    assert_eq!(scene.send(Source::Outside, CLIENT, "192.168.0.2", 30_080), "11");
    assert_eq!(scene.send(Source::Outside, CLIENT, NODE, 30_080), "11");
}

#[test]
fn case_47_frontends_of_a_service_port_share_affinity_and_ports_do_not() {
    let mut service = shop(&[(L1, true, true, true), (R1, false, true, false)]);
    service.client_ip_affinity_seconds = 10;
    service.external_traffic_to_local = true;
    service.ports.push(mapping("other", localnetv1::Protocol::Tcp, 443, 0, true));
    for endpoint in &mut service.endpoints {
        endpoint.ports.push(EndpointPort { index: 1, port: 8443, cluster: true, local: false });
    }
    let scene = scene(&[service]);
    let numbers = |set: SetName| -> BTreeSet<Key> {
        let of = |((other, _), (_, value)): (&(SetName, Key), &(Option<Key>, Value))| match value {
            Value::Data(number) if *other == set => Some(*number),
            _ => None,
        };
        scene.table.0.iter().filter_map(of).collect()
    };
    assert_eq!(numbers(SetName::ClusterIpPorts).len(), 2, "a number for each service port");
    assert_eq!(numbers(SetName::NodePorts).len(), 1);
    assert!(numbers(SetName::NodePorts).is_subset(&numbers(SetName::ExternalPorts)));
    assert_eq!(numbers(SetName::ExternalPorts), numbers(SetName::ClusterIpPorts));
    let local: Vec<&Key> = scene
        .table
        .0
        .keys()
        .filter(|(set, _)| *set == SetName::LocalAffinityEndpoints)
        .map(|(_, key)| key)
        .collect();
    assert_eq!(local.len(), 1);
    let shared = (SetName::AffinityEndpoints, *local[0]);
    assert_eq!(scene.table.0[&shared], scene.table.0[&(SetName::LocalAffinityEndpoints, *local[0])]);
}

#[test]
fn cases_48_to_50_conntrack_cleanup_finds_every_serving_endpoint_of_udp() {
    let mut service = shop(&[(L1, true, true, true), (R1, false, false, false)]);
    service.ports[0].protocol = localnetv1::Protocol::Udp.into();
    let conditions = service.endpoints[1].conditions.as_mut().unwrap();
    (conditions.ready, conditions.terminating) = (false, true);
    service.external_traffic_to_local = true;
    let scene = scene(&[service]);
    let port = scene.plan.service_ports().next().unwrap();
    assert_eq!(port.serving[..], [endpoint(L1), endpoint(R1)]);
    assert_eq!(port.frontends().count(), 4);
}

#[test]
fn a_shared_frontend_belongs_to_the_first_service_by_name() {
    let mut first = shop(&[(R1, false, true, false)]);
    first.name = "a-shop".to_owned();
    first.i_ps.as_mut().unwrap().cluster_i_ps = v4(&["10.96.0.11"]);
    let mut second = shop(&[(R2, false, true, false)]);
    second.source_ranges = v4(&["192.0.2.0/25"]);
    for order in [[&first, &second], [&second, &first]] {
        let mut scene = scene(&[order[0].clone(), order[1].clone()]);
        scene.expect(Source::Outside, "12", "11");
        assert_eq!(scene.count(SetName::Filtered), 0, "who does not have a frontend does not filter it");
        let conflicts = scene.plan.conflicts();
        assert_eq!(conflicts.len(), 3, "X, W and NP");
        for conflict in conflicts {
            assert_eq!(conflict.owner.to_string(), "default/a-shop:http");
            assert_eq!(
                conflict.others.iter().map(ToString::to_string).collect::<Vec<_>>(),
                ["default/shop:http"]
            );
        }
        scene.plan.set(&ServiceName::new("default", "a-shop"), Vec::new());
        let ops = scene.plan.take_ops();
        let moved = ops.iter().filter(|op| matches!(op, Op::Replace(..))).count();
        assert_eq!(moved, 3, "X, W and NP go over: {ops:?}");
        scene.table.apply_all(ops);
        scene.expect(Source::Outside, "12", "12");
        assert_eq!(scene.send(Source::Outside, OTHER_CLIENT, W, 80), "DROP");
        assert_eq!(scene.plan.conflicts(), []);
    }
}

#[test]
fn a_cluster_ip_takes_precedence_over_an_external_ip_without_a_gap() {
    let mut first = shop(&[(R1, false, true, false)]);
    first.name = "a-shop".to_owned();
    first.i_ps =
        Some(ServiceIPs { cluster_i_ps: v4(&["10.96.0.11"]), external_i_ps: v4(&[V]), ..Default::default() });
    first.ports[0].node_port = 0;
    let mut scene = scene(&[shop(&[(R2, false, true, false)]), first]);
    // The smaller name does not help: a cluster IP cannot be taken over.
    assert_eq!(scene.send(Source::Pod, POD, V, 80), "12");
    scene.plan.set(&ServiceName::new("default", "shop"), Vec::new());
    for op in in_order(scene.plan.take_ops()).into_iter().flatten() {
        scene.table.apply(op);
        let served = scene.send(Source::Pod, POD, V, 80);
        assert!(served == "11" || served == "12", "{served} after {op:?}");
    }
    assert_eq!(scene.send(Source::Pod, POD, V, 80), "11");
}
