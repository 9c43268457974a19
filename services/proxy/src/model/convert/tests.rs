//! Messages as the agent sends them, and messages that it never sends.

use keelson_proto::localnetv1::{EndpointConditions, EndpointPort, ServiceIPs};
use proptest::prelude::*;

use super::*;

fn set(v4: &[&str], v6: &[&str]) -> Option<IpSet> {
    let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
    Some(IpSet { v4: texts(v4), v6: texts(v6) })
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn at(text: &str, port: u16) -> Endpoint {
    Endpoint { ip: ip(text), port }
}

fn mapping(name: &str, protocol: localnetv1::Protocol, port: i32, node_port: i32) -> PortMapping {
    PortMapping {
        name: name.to_owned(),
        protocol: protocol.into(),
        port,
        node_port,
        has_any_v4: true,
        ..Default::default()
    }
}

fn endpoint(of: &str, local: bool, ports: &[(u32, i32, bool, bool)]) -> localnetv1::Endpoint {
    let family = if of.contains(':') { set(&[], &[of]) } else { set(&[of], &[]) };
    let port = |(index, port, cluster, local): &(u32, i32, bool, bool)| EndpointPort {
        index: *index,
        port: *port,
        cluster: *cluster,
        local: *local,
    };
    localnetv1::Endpoint {
        conditions: Some(EndpointConditions { ready: true, serving: true, local, ..Default::default() }),
        i_ps: family,
        ports: ports.iter().map(port).collect(),
        ..Default::default()
    }
}

fn service(ports: Vec<PortMapping>, endpoints: Vec<localnetv1::Endpoint>) -> ServiceEndpoints {
    ServiceEndpoints {
        namespace: "default".to_owned(),
        name: "shop".to_owned(),
        i_ps: Some(ServiceIPs { cluster_i_ps: set(&["10.96.0.1"], &["fd00::1"]), ..Default::default() }),
        ports,
        endpoints,
        ..Default::default()
    }
}

fn tcp(ports: &[(i32, i32)]) -> Vec<PortMapping> {
    ports
        .iter()
        .map(|(port, node_port)| mapping("http", localnetv1::Protocol::Tcp, *port, *node_port))
        .collect()
}

#[test]
fn case_1_a_service_without_a_cluster_ip_has_no_port() {
    let mut none = service(tcp(&[(80, 30_080)]), vec![]);
    none.i_ps = None;
    assert_eq!(service_ports(&none, Family::V4), []);
    none.i_ps = Some(ServiceIPs {
        cluster_ip: "None".to_owned(),
        external_i_ps: set(&["198.51.100.1"], &[]),
        ..Default::default()
    });
    assert_eq!(service_ports(&none, Family::V4), []);
}

#[test]
fn cases_3_and_4_families_have_their_own_addresses() {
    let mut both =
        service(tcp(&[(80, 30_080)]), vec![endpoint("10.244.0.1", false, &[(0, 8080, true, false)])]);
    both.i_ps.as_mut().unwrap().external_i_ps = set(&["198.51.100.1"], &["2001:db8::1"]);
    let [v4] = &service_ports(&both, Family::V4)[..] else { panic!("one port") };
    let [v6] = &service_ports(&both, Family::V6)[..] else { panic!("one port") };
    assert_eq!((v4.cluster_ip, v6.cluster_ip), (ip("10.96.0.1"), ip("fd00::1")));
    assert_eq!(
        (&v4.external_ips[..], &v6.external_ips[..]),
        (&[ip("198.51.100.1")][..], &[ip("2001:db8::1")][..])
    );
    assert_eq!((v4.has_any, v6.has_any), (true, false));
    assert_eq!((v4.cluster.len(), v6.cluster.len()), (1, 0));
    assert_eq!(v4.name.to_string(), "default/shop:http");
}

#[test]
fn cases_10_and_44_invalid_ports_are_skipped() {
    let mut ports = tcp(&[(0, 1), (70_000, 1), (-1, 1), (80, -5), (81, 70_000), (82, 30_082)]);
    ports.push(mapping("what", localnetv1::Protocol::Unknown, 83, 0));
    ports[5].protocol = localnetv1::Protocol::Sctp.into();
    let served = [(3, 0, true, false), (3, 65_536, true, false), (3, -1, true, false), (5, 9, true, false)];
    let out_of_place = [(6, 1, true, false), (7, 1, true, false), (u32::MAX, 1, true, false)];
    let endpoints = vec![endpoint("10.244.0.1", false, &served), endpoint("10.244.0.2", true, &out_of_place)];
    let ports = service_ports(&service(ports, endpoints), Family::V4);
    let output: Vec<_> = ports.iter().map(|port| (port.port, port.node_port, port.cluster.len())).collect();
    assert_eq!(output, [(80, 0, 0), (81, 0, 0), (82, 30_082, 1)]);
    assert_eq!(ports[2].name.protocol, Protocol::Sctp);
}

#[test]
fn case_12_invalid_addresses_are_skipped() {
    let mut odd = service(
        tcp(&[(80, 0)]),
        vec![
            endpoint("10.244.0.900", false, &[(0, 8080, true, false)]),
            endpoint("", false, &[(0, 8080, true, false)]),
            endpoint("10.244.0.2", false, &[(0, 8080, true, false)]),
        ],
    );
    odd.endpoints[1].i_ps = None;
    odd.i_ps.as_mut().unwrap().external_i_ps = set(&["fd00::1", "nothing", "198.51.100.1"], &[]);
    let ports = service_ports(&odd, Family::V4);
    assert_eq!(ports[0].cluster, [at("10.244.0.2", 8080)]);
    assert_eq!(ports[0].external_ips, [ip("198.51.100.1")]);
}

#[test]
fn no_address_is_two_kinds_of_frontend_and_one_with_ranges_is_filtered() {
    let mut double = service(tcp(&[(80, 0)]), vec![]);
    let ips = double.i_ps.as_mut().unwrap();
    ips.external_i_ps = set(&["10.96.0.1", "198.51.100.1", "198.51.100.1", "192.0.2.1"], &[]);
    ips.load_balancer_i_ps = set(&["198.51.100.1", "10.96.0.1", "203.0.113.1", "203.0.113.1"], &[]);
    let ports = service_ports(&double, Family::V4);
    assert_eq!(ports[0].external_ips, [ip("192.0.2.1")]);
    assert_eq!(ports[0].load_balancer_ips, [ip("198.51.100.1"), ip("203.0.113.1")]);
}

#[test]
fn endpoints_are_ordered_without_duplicates() {
    let twice = [(0, 9000, true, true), (0, 8080, true, true)];
    let endpoints = vec![
        endpoint("10.244.0.9", true, &twice),
        endpoint("10.244.0.1", true, &twice),
        endpoint("10.244.0.9", true, &twice),
    ];
    let mut internal = service(tcp(&[(80, 30_080)]), endpoints);
    internal.internal_traffic_to_local = true;
    let ports = service_ports(&internal, Family::V4);
    let all =
        [at("10.244.0.1", 8080), at("10.244.0.1", 9000), at("10.244.0.9", 8080), at("10.244.0.9", 9000)];
    assert_eq!(ports[0].cluster, all);
    assert_eq!(ports[0].local, all);
    assert_eq!(ports[0].on_node, all);
    assert!(ports[0].serving.is_empty(), "TCP");
}

#[test]
fn case_31_sets_that_no_policy_uses_are_empty() {
    let endpoints = || vec![endpoint("10.244.0.1", true, &[(0, 8080, true, true)])];
    let sets = |message: &ServiceEndpoints| {
        let port = service_ports(message, Family::V4).remove(0);
        (port.cluster.len(), port.local.len(), port.external_local)
    };
    let mut internal_only = service(tcp(&[(80, 0)]), endpoints());
    internal_only.external_traffic_to_local = true;
    assert_eq!(sets(&internal_only), (1, 0, false), "the external policy has no effect");
    internal_only.internal_traffic_to_local = true;
    assert_eq!(sets(&internal_only), (0, 1, false));
    let mut external = service(tcp(&[(80, 30_080)]), endpoints());
    assert_eq!(sets(&external), (1, 0, false));
    external.external_traffic_to_local = true;
    assert_eq!(sets(&external), (1, 1, true));
    external.internal_traffic_to_local = true;
    assert_eq!(sets(&external), (1, 1, true));
}

#[test]
fn case_38_on_node_are_the_local_ones_of_either_set() {
    let endpoints = vec![
        endpoint("10.244.0.1", true, &[(0, 8080, true, false)]),
        endpoint("10.244.0.2", true, &[(0, 8080, false, true)]),
        endpoint("10.244.0.3", true, &[(0, 8080, false, false)]),
        endpoint("10.244.0.4", false, &[(0, 8080, true, false)]),
    ];
    let mut external = service(tcp(&[(80, 30_080)]), endpoints);
    external.external_traffic_to_local = true;
    let ports = service_ports(&external, Family::V4);
    assert_eq!(ports[0].on_node, [at("10.244.0.1", 8080), at("10.244.0.2", 8080)]);
}

#[test]
fn cases_40_and_41_source_ranges_are_disjoint_and_a_range_of_everything_is_none() {
    let mut filtered = service(tcp(&[(80, 0)]), vec![]);
    let mut ranges = |v4: &[&str]| {
        filtered.source_ranges = set(v4, &["fd00::/16"]);
        let output = |family| -> Vec<String> {
            service_ports(&filtered, family)[0].source_ranges.iter().map(ToString::to_string).collect()
        };
        assert_eq!(output(Family::V6), ["fd00::/16"]);
        output(Family::V4)
    };
    let cut = ["203.0.113.0/24", "192.0.2.0/24", "192.0.2.128/25", "what", "fd00::/8", "203.0.112.0/24"];
    assert_eq!(ranges(&cut), ["192.0.2.0/24", "203.0.112.0/23"]);
    assert!(ranges(&["192.0.2.0/24", "0.0.0.0/0"]).is_empty());
    assert!(ranges(&["0.0.0.0/1", "128.0.0.0/1"]).is_empty());
    assert!(ranges(&[]).is_empty());
}

#[test]
fn case_47_affinity_is_a_count_of_seconds() {
    let mut kept = service(tcp(&[(80, 0)]), vec![]);
    kept.client_ip_affinity_seconds = 10_800;
    assert_eq!(service_ports(&kept, Family::V4)[0].affinity_seconds, 10_800);
    kept.client_ip_affinity_seconds = -1;
    assert_eq!(service_ports(&kept, Family::V4)[0].affinity_seconds, 0);
}

#[test]
fn cases_48_to_50_serving_are_all_of_udp_whatever_the_sets() {
    let mut endpoints = vec![
        endpoint("10.244.0.1", false, &[(0, 53, false, false), (1, 53, true, false)]),
        endpoint("10.244.0.2", false, &[(0, 53, true, false)]),
        endpoint("10.244.0.3", false, &[(0, 53, false, false)]),
        endpoint("10.244.0.4", false, &[(0, 53, false, false)]),
    ];
    endpoints[0].conditions.as_mut().unwrap().ready = false;
    endpoints[2].conditions.as_mut().unwrap().serving = false;
    endpoints[3].conditions = None;
    let ports = vec![
        mapping("dns", localnetv1::Protocol::Udp, 53, 0),
        mapping("dns-tcp", localnetv1::Protocol::Tcp, 53, 0),
    ];
    let ports = service_ports(&service(ports, endpoints), Family::V4);
    assert_eq!(ports[0].serving, [at("10.244.0.1", 53), at("10.244.0.2", 53), at("10.244.0.3", 53)]);
    assert!(ports[1].serving.is_empty());
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("10.244.0.1".to_owned()),
        Just("fd00::1".to_owned()),
        Just("10.0.0.0/8".to_owned()),
        "[0-9a-f:./]{0,20}",
    ]
}

prop_compose! {
    fn texts()(v4 in prop::collection::vec(text(), 0..4), v6 in prop::collection::vec(text(), 0..4)) -> IpSet {
        IpSet { v4, v6 }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// No message causes a panic, and the result keeps the invariants of [`ServicePort`].
    #[test]
    fn any_message_is_converted(
        cluster in texts(), external in texts(), load_balancer in texts(), ranges in texts(),
        ports in prop::collection::vec((any::<i32>(), 0..5_i32, -1..100_000_i32), 0..4),
        endpoints in prop::collection::vec((texts(), any::<bool>(), 0..5_u32, -1..70_000_i32, any::<(bool, bool)>()), 0..5),
        (internal, outer, seconds) in any::<(bool, bool, i32)>(),
    ) {
        let ports = ports.into_iter().map(|(port, protocol, node_port)| PortMapping { port, protocol, node_port, ..Default::default() });
        let endpoints = endpoints.into_iter().map(|(ips, local, index, port, (cluster, in_local))| localnetv1::Endpoint {
            i_ps: Some(ips),
            ..endpoint("", local, &[(index, port, cluster, in_local)])
        });
        let mut message = service(ports.collect(), endpoints.collect());
        message.i_ps = Some(ServiceIPs {
            cluster_ip: String::new(),
            cluster_i_ps: Some(cluster),
            external_i_ps: Some(external),
            load_balancer_i_ps: Some(load_balancer),
        });
        message.source_ranges = Some(ranges);
        (message.internal_traffic_to_local, message.external_traffic_to_local) = (internal, outer);
        message.client_ip_affinity_seconds = seconds;
        for family in Family::ALL {
            for port in service_ports(&message, family) {
                prop_assert!(port.port != 0 && family.has(&port.cluster_ip));
                for set in [&port.cluster, &port.local, &port.on_node, &port.serving] {
                    prop_assert!(set.is_sorted_by(|a, b| a < b));
                    prop_assert!(set.iter().all(|endpoint| endpoint.port != 0 && family.has(&endpoint.ip)));
                }
                prop_assert!(port.source_ranges.is_sorted_by(|a, b| a.broadcast() < b.network()));
            }
        }
    }
}
