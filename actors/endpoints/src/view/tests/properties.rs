//! Properties that hold for every input.

use std::collections::BTreeSet;

use keelson_proto::kubernetes::ServicePort;
use proptest::{collection::vec, option, prelude::*, sample::select};
use prost::Message as _;

use super::{
    reference::{self, Place, Sets},
    *,
};

/// Few names, so that many coincide.
fn dense_endpoint(six: bool) -> impl Strategy<Value = Endpoint> {
    let bit = || option::of(any::<bool>());
    let names = |of: &'static [&'static str]| vec(select(of), 0..3);
    (
        1..6_u8,
        select(&[Some("n1"), Some("n2"), None][..]),
        option::of((bit(), bit(), bit())),
        option::weighted(0.8, (names(&["a", "b", ""]), names(&["n1", "n2"]))),
        any::<bool>(),
    )
        .prop_map(move |(number, node, conditions, hints, addressed)| Endpoint {
            addresses: if addressed || number > 1 {
                vec![if six { format!("fd00:1::{number}") } else { format!("10.1.0.{number}") }]
            } else {
                Vec::new()
            },
            conditions: conditions.map(|(ready, serving, terminating)| EndpointConditions {
                ready,
                serving,
                terminating,
            }),
            node_name: node.map(str::to_owned),
            hints: hints.map(|(zones, nodes)| super::hints(zones, nodes)),
            ..Endpoint::default()
        })
}

fn dense_port() -> impl Strategy<Value = EndpointPort> {
    let name = select(&[Some("p"), Some("q"), Some(""), None][..]);
    let protocol = select(&[Some("TCP"), Some("UDP"), None][..]);
    let number = select(&[Some(80), Some(8080), Some(0), Some(-1), None][..]);
    (name, protocol, number).prop_map(|(name, protocol, port)| EndpointPort {
        name: name.map(str::to_owned),
        protocol: protocol.map(str::to_owned),
        port,
    })
}

fn dense_slice() -> impl Strategy<Value = Slice> {
    let labels =
        select(&[("ns", "web"), ("ns", "web"), ("ns", "web"), ("ns", "other"), ("other", "web")][..]);
    let kind = select(&["IPv4", "IPv4", "IPv6", "FQDN"][..]);
    (labels, kind, proptest::bool::weighted(0.1), vec(dense_port(), 1..4)).prop_flat_map(
        |((namespace, service), kind, headless, ports)| {
            vec(dense_endpoint(kind == "IPv6"), 0..6).prop_map(move |mut endpoints| {
                // Two copies in one slice are covered by another test.
                let mut seen = BTreeSet::new();
                endpoints.retain(|endpoint| seen.insert(endpoint.addresses.clone()));
                let made = slice("").of(namespace, service).kind(kind);
                let made = if headless { made.label("service.kubernetes.io/headless", "") } else { made };
                made.edit(|slice| (slice.endpoints, slice.ports) = (endpoints, ports.clone()))
            })
        },
    )
}

fn dense_slices() -> impl Strategy<Value = Vec<EndpointSlice>> {
    vec(dense_slice(), 0..5).prop_map(|slices| {
        let named = slices.into_iter().zip('a'..).map(|(slice, name)| {
            slice.edit(|slice| slice.metadata.as_mut().unwrap().name = name.to_string()).build()
        });
        named.collect()
    })
}

fn dense_service() -> impl Strategy<Value = Service> {
    let kind = select(&["ClusterIP", "NodePort", "LoadBalancer"][..]);
    let ips = |of: &'static [&'static str]| vec(select(of), 0..3);
    let nodes = (select(&[0, 30080][..]), select(&[0, 30081][..]));
    let mode = select(&[None, Some("VIP"), Some("Proxy")][..]);
    (kind, any::<[bool; 3]>(), ips(&[X, "fd00:9::1"]), ips(&[W, "fd00:9::2"]), mode, nodes, 0..4_usize)
        .prop_map(|(kind, [internal_local, external_local, dual], external, vips, mode, (p, q), ports)| {
            let made = internal().kind(kind);
            let made = if dual { made.dual_stack() } else { made };
            let made = if internal_local { made.internal_local() } else { made };
            let made = if external_local { made.external_local() } else { made };
            let made = external.into_iter().fold(made, |made, ip| made.external_ip(ip));
            let made = vips.into_iter().fold(made, |made, ip| made.ingress(ip, mode));
            let all = [("p", "TCP", 1, p), ("q", "UDP", 2, q), ("", "TCP", 3, 0), ("q", "TCP", 4, 0)];
            let all = all.into_iter().take(ports + 1);
            all.fold(made, |made, (name, protocol, port, node)| {
                made.port(name, protocol, port).node_port(node)
            })
            .build()
        })
}

fn dense_node() -> impl Strategy<Value = NodeView> {
    select(&[Some("a"), Some("b"), Some(""), None][..])
        .prop_map(|zone| NodeView { zone: zone.map(str::to_owned), ..n1() })
}

fn published(of: &ServiceEndpoints, index: usize, six: bool) -> Sets {
    let port = &of.ports[index];
    let has_any = if six { port.has_any_v6 } else { port.has_any_v4 };
    let mut sets = Sets { has_any, ..Sets::default() };
    for endpoint in &of.endpoints {
        for port in endpoint.ports.iter().filter(|port| port.index as usize == index) {
            for address in addresses(endpoint, six) {
                let place: Place = (ip(&address), port.port);
                assert!(sets.sent.insert(place), "{place:?} is there twice");
                let _ = !port.cluster || sets.cluster.insert(place);
                let _ = !port.local || sets.local.insert(place);
            }
        }
    }
    sets
}

fn explained(
    family: &pb::FamilyExplanation,
    is_in: impl Fn(&pb::EndpointExplanation) -> bool,
) -> BTreeSet<Place> {
    let members = family.endpoints.iter().filter(|endpoint| is_in(endpoint));
    members.map(|endpoint| (ip(&endpoint.address), endpoint.port)).collect()
}

fn check_traffic(of: &ServiceEndpoints, sets: &Sets, row: &pb::TrafficExplanation) {
    let to_cluster_ip = of.i_ps.clone().unwrap().cluster_i_ps.unwrap();
    let to_cluster_ip = [to_cluster_ip.v4, to_cluster_ip.v6].concat();
    let address = row.to.rsplit_once(':').map_or("", |(address, _)| address.trim_matches(['[', ']']));
    let local = match (row.from.as_str(), to_cluster_ip.iter().any(|ip| ip == address)) {
        ("anyone", true) => of.internal_traffic_to_local,
        ("anyone", false) => of.external_traffic_to_local,
        ("outside", false) => true,
        ("pods and the node", false) => false,
        other => panic!("{other:?}: {row:?}"),
    };
    let set = if local { &sets.local } else { &sets.cluster };
    let verdict = match (set.is_empty(), sets.has_any) {
        (false, _) => "forwarded",
        (true, true) => "dropped",
        (true, false) => "rejected",
    };
    assert_eq!(row.verdict, verdict, "{row:?} {sets:?}");
    let places = row.endpoints.iter().map(|text| text.parse::<std::net::SocketAddr>().unwrap());
    let places: BTreeSet<Place> = places.map(|place| (place.ip(), place.port().into())).collect();
    assert_eq!(&places, set, "{row:?}");
}

fn check_explanation(view: Option<&ServiceEndpoints>, explained_as: &pb::Explanation) {
    assert_eq!(explained_as.served, view.is_some());
    assert_eq!(explained_as.reason.is_empty(), view.is_some());
    let Some(view) = view else { return };
    assert_eq!(explained_as.ports.len(), view.ports.len());
    for (index, (port, explanation)) in view.ports.iter().zip(&explained_as.ports).enumerate() {
        assert_eq!(
            (&port.name, port.port, port.node_port),
            (&explanation.name, explanation.port, explanation.node_port)
        );
        for six in [false, true] {
            let sets = published(view, index, six);
            let family = explanation.families.iter().find(|family| (family.family == "IPv6") == six);
            let Some(family) = family else {
                assert_eq!(sets, Sets::default());
                continue;
            };
            assert_eq!(explained(family, |it| it.cluster_set), sets.cluster);
            assert_eq!(explained(family, |it| it.local_set), sets.local);
            assert!(family.endpoints.iter().all(|it| it.reason.len() > 10), "{family:?}");
            assert!(!family.topology_reason.is_empty());
            for row in &family.traffic {
                check_traffic(view, &sets, row);
            }
        }
    }
}

fn check_always(service: &Service, slices: &[EndpointSlice], node: &NodeView, seed: u64) {
    let found = view(service, slices, node);
    let explanation = explain(Some(service), slices, node);
    check_explanation(found.as_ref(), &explanation);

    let mut shuffled = slices.to_vec();
    shuffle(&mut shuffled, seed);
    for (slice, seed) in shuffled.iter_mut().zip(seed..) {
        shuffle(&mut slice.endpoints, seed);
        shuffle(&mut slice.ports, seed.wrapping_mul(3));
    }
    let bytes = |view: &Option<ServiceEndpoints>| view.as_ref().map(prost::Message::encode_to_vec);
    assert_eq!(bytes(&found), bytes(&view(service, &shuffled, node)), "another order");

    let trimmed: Vec<_> = slices.iter().cloned().map(trim_slice).collect();
    let kept = trim_service(service.clone());
    assert_eq!(found, view(&kept, &trimmed, node), "trimmed");
    assert_eq!(explanation, explain(Some(&kept), &trimmed, node), "trimmed");
    assert_eq!(
        (trim_service(kept.clone()), trimmed.iter().cloned().map(trim_slice).collect()),
        (kept, trimmed)
    );

    let alone = explain(None, slices, node);
    assert!(!alone.served && alone.slices.len() == slices.len() && alone.ports.is_empty());
}

fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut state = seed;
    for place in (1..items.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        items.swap(place, usize::try_from(state >> 33).unwrap() % (place + 1));
    }
}

/// Any text, with enough valid parts that not everything is rejected at once.
fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![
        ".{0,8}",
        "[0-9]{1,4}(\\.[0-9]{1,4}){3}(/[0-9]{1,3})?",
        "[0-9a-f:.]{0,20}(/[0-9]{1,3})?",
        select(
            &["", "None", "Local", "ClientIP", "web", "ns", "IPv4", "IPv6", "TCP", "p", V, V6, "10.1.0.1"][..]
        )
        .prop_map(str::to_owned),
    ]
}

fn any_number() -> impl Strategy<Value = i32> {
    prop_oneof![any::<i32>(), -2..3_i32, 65534..65538_i32, Just(80)]
}

prop_compose! {
    fn any_metadata()(
        name in any_text(),
        namespace in any_text(),
        resource_version in any_text(),
        labels in proptest::collection::btree_map(prop_oneof![
            any_text(),
            Just("kubernetes.io/service-name".to_owned()),
            Just("service.kubernetes.io/service-proxy-name".to_owned()),
        ], any_text(), 0..2),
        annotations in proptest::collection::btree_map(any_text(), any_text(), 0..2),
    ) -> ObjectMeta {
        ObjectMeta { name, namespace, resource_version, labels, annotations }
    }
}

prop_compose! {
    fn any_spec()(
        ports in vec((any_text(), any_text(), any_number(), any_number()), 0..4),
        cluster in (any_text(), vec(any_text(), 0..3), vec(any_text(), 0..3)),
        words in (any_text(), any_text(), any_text(), option::of(any_text())),
        lists in (vec(any_text(), 0..3), vec(any_text(), 0..3)),
        health_check_node_port in any_number(),
        timeout_seconds in option::of(option::of(option::of(any_number()))),
    ) -> ServiceSpec {
        let (cluster_ip, cluster_ips, ip_families) = cluster;
        let (kind, session_affinity, external_traffic_policy, internal_traffic_policy) = words;
        let (external_ips, load_balancer_source_ranges) = lists;
        let port = |(name, protocol, port, node_port)| ServicePort { name, protocol, port, node_port };
        ServiceSpec {
            ports: ports.into_iter().map(port).collect(),
            cluster_ip,
            cluster_ips,
            ip_families,
            r#type: kind,
            session_affinity,
            external_traffic_policy,
            internal_traffic_policy,
            external_ips,
            load_balancer_source_ranges,
            health_check_node_port,
            session_affinity_config: timeout_seconds.map(|client_ip| SessionAffinityConfig {
                client_ip: client_ip.map(|timeout_seconds| ClientIpConfig { timeout_seconds }),
            }),
        }
    }
}

prop_compose! {
    fn any_service()(
        metadata in option::weighted(0.9, any_metadata()),
        spec in option::weighted(0.9, any_spec()),
        ingress in option::of(vec((any_text(), option::of(any_text())), 0..3)),
    ) -> Service {
        let ingress = ingress.map(|ingress| LoadBalancerStatus {
            ingress: ingress.into_iter().map(|(ip, ip_mode)| LoadBalancerIngress { ip, ip_mode }).collect(),
        });
        Service { metadata, spec, status: ingress.map(|it| ServiceStatus { load_balancer: Some(it) }) }
    }
}

prop_compose! {
    fn any_endpoint()(
        addresses in vec(any_text(), 0..3),
        conditions in option::of(any::<[Option<bool>; 3]>()),
        hostname in option::of(any_text()),
        node_name in option::of(prop_oneof![any_text(), Just("n1".to_owned())]),
        zone in option::of(any_text()),
        hints in option::of((vec(any_text(), 0..2), vec(any_text(), 0..2))),
        target in option::of((any_text(), any_text())),
    ) -> Endpoint {
        Endpoint {
            addresses,
            conditions: conditions
                .map(|[ready, serving, terminating]| EndpointConditions { ready, serving, terminating }),
            hostname,
            target_ref: target.map(|(kind, name)| ObjectReference { kind, name }),
            node_name,
            zone,
            hints: hints.map(|(zones, nodes)| super::hints(zones, nodes)),
        }
    }
}

prop_compose! {
    fn any_slice()(
        metadata in option::weighted(0.9, any_metadata()),
        endpoints in vec(any_endpoint(), 0..4),
        ports in vec((option::of(any_text()), option::of(any_text()), option::of(any_number())), 0..3),
        address_type in any_text(),
    ) -> EndpointSlice {
        let port = |(name, protocol, port)| EndpointPort { name, protocol, port };
        EndpointSlice { metadata, endpoints, ports: ports.into_iter().map(port).collect(), address_type }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn sets_match_the_reference(service in dense_service(), slices in dense_slices(), node in dense_node()) {
        let found = view(&service, &slices, &node).unwrap();
        for (index, port) in service.spec.as_ref().unwrap().ports.iter().enumerate() {
            for six in [false, true] {
                let expected = reference::sets(&service, port, &slices, &node, six);
                prop_assert_eq!(published(&found, index, six), expected, "{:?} {}", port, six);
            }
        }
        let local_ready = [false, true].map(|six| reference::local_ready(&service, &slices, &node, six));
        prop_assert_eq!([found.local_ready_v4 as usize, found.local_ready_v6 as usize], local_ready);
    }

    #[test]
    fn order_and_trimming_change_nothing_and_explanations_agree(
        service in dense_service(),
        slices in dense_slices(),
        node in dense_node(),
        seed in any::<u64>(),
    ) {
        check_always(&service, &slices, &node, seed);
    }

    /// Copies within one slice, and several slices of one name, which the API server does not allow.
    #[test]
    fn order_changes_nothing_even_when_slices_contradict_themselves(
        service in dense_service(),
        endpoints in vec(dense_endpoint(false), 0..10),
        more in vec(dense_endpoint(false), 0..4),
        node in dense_node(),
        seed in any::<u64>(),
    ) {
        let of = |endpoints: Vec<Endpoint>| {
            slice("a").port("p", "TCP", 80).port("p", "TCP", 81).edit(|slice| slice.endpoints = endpoints).build()
        };
        check_always(&service, &[of(endpoints), of(more)], &node, seed);
    }

    #[test]
    fn nothing_in_the_inputs_is_fatal(
        service in any_service(),
        sound in dense_service(),
        slices in vec(any_slice(), 0..4),
        labelled in any::<bool>(),
        zone in option::of(any_text()),
        seed in any::<u64>(),
    ) {
        let node = NodeView { zone, ..n1() };
        check_always(&service, &slices, &node, seed);
        let mut slices = slices;
        for slice in &mut slices {
            if labelled {
                let (ports, endpoints) = (std::mem::take(&mut slice.ports), std::mem::take(&mut slice.endpoints));
                let made = super::slice("a").edit(|made| (made.ports, made.endpoints) = (ports, endpoints));
                *slice = made.port("p", "TCP", 80).build();
            }
            let _ = (super::super::owner(slice), super::super::triggered_unix_ms(slice));
        }
        check_always(&sound, &slices, &node, seed);
    }

    #[test]
    fn cidrs_of_any_text_are_parsed_or_refused(texts in vec(any_text(), 0..6)) {
        let cidr = crate::ServiceCidr {
            spec: Some(keelson_proto::kubernetes::ServiceCidrSpec { cidrs: texts.clone() }),
            ..Default::default()
        };
        let node = NodeView { pod_cidrs: texts, ..n1() };
        let info = super::super::node_info(&node, [&cidr, &cidr]);
        let mut expected = info.pod_cid_rs.clone();
        expected.sort();
        expected.dedup();
        let mut found = info.service_cid_rs.clone();
        found.sort();
        prop_assert_eq!(found, expected);
        prop_assert!(info.encoded_len() > 0);
    }
}
