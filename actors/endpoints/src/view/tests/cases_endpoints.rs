//! Cases: how slices become the endpoints of a port.

use super::*;

/// The endpoints of each port: `http: {R1:8080}`.
fn ports(scene: &Scene) -> Vec<String> {
    let served = scene.served();
    let of = |(index, port): (usize, &localnetv1::PortMapping)| {
        let numbers = served.endpoints.iter().flat_map(|endpoint| {
            let of_port = endpoint.ports.iter().filter(move |port| port.index as usize == index);
            of_port.map(|port| format!("{}:{}", word(&addresses(endpoint, false)[0]), port.port))
        });
        format!("{}: {}", port.name, numbers.collect::<Vec<_>>().join(" "))
    };
    served.ports.iter().enumerate().map(of).collect()
}

#[test]
fn case_06_slices_add_up() {
    let both = [http("a", "R1 R2"), http("b", "R3")];
    scene(svc(), both.clone()).expect("{R1 R2 R3}", "{R1 R2 R3}", "{R1 R2 R3}");
    let [_, b] = both;
    scene(svc(), [b]).expect("{R3}", "{R3}", "{R3}");
}

#[test]
fn case_07_an_endpoint_in_two_slices_is_one() {
    let both = scene(svc(), [http("a", "R1"), http("b", "R1")]);
    assert_eq!(ports(&both), ["http: R1:8080"]);
    let one = scene(svc(), [http("b", "R1")]);
    assert_eq!(one.served(), both.served());
}

#[test]
fn case_08_of_two_copies_one_that_is_not_terminating_holds() {
    for (a, b) in [("R1~", "R1"), ("R1", "R1~"), ("R1", "R1+"), ("R1-", "R1")] {
        let scene = scene(svc(), [http("a", a), http("b", b)]);
        scene.expect("{R1}", "{R1}", "{R1}");
        let conditions = scene.served().endpoints[0].conditions.unwrap();
        assert!(conditions.ready && !conditions.terminating, "{a} {b}");
    }
    // Even if it is not ready, which kube-proxy does not check.
    scene(svc(), [http("a", "R1+"), http("b", "R1!")]).expect("REJECT", "REJECT", "REJECT");
}

#[test]
fn where_kube_proxy_leaves_it_open_the_better_copy_holds_then_the_later_slice() {
    for (a, b, ready) in
        [("R1", "R1!", true), ("R1!", "R1", true), ("R1s", "R1!", false), ("R1+", "R1~", true)]
    {
        let served = scene(svc(), [http("a", a), http("b", b)]).served();
        let conditions = served.endpoints[0].conditions.unwrap();
        assert_eq!((conditions.ready, conditions.serving), (ready, true), "{a} {b}");
    }
    let local =
        |name: &str, node: &str| slice(name).port("http", "TCP", 8080).endpoint("10.1.0.1", Some(node));
    let is_local = |slices: [Slice; 2]| scene(svc(), slices).served().endpoints[0].conditions.unwrap().local;
    assert!(is_local([local("a", "n2"), local("b", "n1")]));
    assert!(!is_local([local("a", "n1"), local("b", "n2")]));
    // Within a slice, the content decides, not the order.
    let twice = |first: &str, second: &str| {
        [
            slice("a")
                .port("http", "TCP", 8080)
                .endpoint("10.1.0.1", Some(first))
                .endpoint("10.1.0.1", Some(second)),
            slice("b"),
        ]
    };
    assert!(is_local(twice("n1", "n2")) && is_local(twice("n2", "n1")));
}

#[test]
fn case_09_every_slice_has_its_own_number() {
    let slices =
        [slice("a").port("p", "TCP", 80).words("R1"), slice("b").port("p", "TCP", 8080).words("R2 R3")];
    let found = scene(balanced().port("p", "TCP", 80), slices);
    assert_eq!(ports(&found), ["p: R1:80 R2:8080 R3:8080"]);
    assert_eq!(found.served().ports[0].target_port, 8080);
    // Equally frequent: the lower number.
    let even = [slice("b").port("p", "TCP", 8080).words("R1"), slice("a").port("p", "TCP", 80).words("R2")];
    assert_eq!(scene(balanced().port("p", "TCP", 80), even).served().ports[0].target_port, 80);
    // An address with two numbers is two endpoints.
    let same = [slice("a").port("p", "TCP", 80).words("R1"), slice("b").port("p", "TCP", 8080).words("R1~")];
    let same = scene(balanced().port("p", "TCP", 80), same);
    assert_eq!(ports(&same), ["p: R1:80 R1:8080"]);
    assert_eq!(same.served().endpoints.len(), 2);
}

#[test]
fn case_10_slice_ports_without_name_or_number_are_skipped() {
    let slice = slice("a")
        .any_port(None, Some("TCP"), Some(1))
        .any_port(Some("p"), Some("TCP"), None)
        .port("p", "TCP", 0)
        .port("p", "TCP", -1)
        .port("p", "TCP", 65536)
        .any_port(Some(""), None, Some(9))
        .port("q", "TCP", 8080)
        .words("R1");
    let service = balanced().port("p", "TCP", 80).port("q", "TCP", 81).port("", "TCP", 82);
    let scene = scene(service, [slice]);
    assert_eq!(ports(&scene), ["p: ", "q: R1:8080", ": R1:9"]);
    let reason = scene.explain().slices[0].reason.clone();
    assert!(reason.starts_with("ignored: a port has no name (number 1); port \"p\": no number"), "{reason}");
}

#[test]
fn case_11_ports_are_matched_by_protocol_too() {
    let slices = [slice("a").port("p", "UDP", 80).words("R1")];
    let scene = scene(balanced().port("p", "TCP", 80), slices);
    scene.expect("REJECT", "REJECT", "REJECT");
    let slice = scene.explain().slices[0].clone();
    assert_eq!(
        (slice.used, slice.reason.as_str()),
        (false, "ignored: port \"p\"/UDP: the Service has no such port")
    );
}

#[test]
fn case_12_only_the_first_address_counts_and_only_a_node_name_makes_an_endpoint_local() {
    let slice = slice("a")
        .port("http", "TCP", 8080)
        .endpoint("10.1.0.1", None)
        .edit(|slice| slice.endpoints[0].addresses.push("10.1.0.2".to_owned()))
        .endpoint("10.1.0.3", Some("n1"))
        .edit(|slice| slice.endpoints[1].addresses.clear())
        .endpoint("10.1.0.4", Some(""))
        .endpoint("10.1.0.5", Some("n1"))
        .endpoint("fd00::1", Some("n1"))
        .endpoint("ten", Some("n1"));
    let found = scene(svc().external_local(), [slice.clone()]);
    found.expect("{L1 L4 L5}", "{L5}", "{L1 L4 L5}");
    // Nor is any endpoint local on a node without a name.
    let mut nameless = scene(svc().external_local(), [slice]);
    nameless.node.name.clear();
    nameless.expect("{L1 L4 L5}", "DROP", "{L1 L4 L5}");
    let reason = found.explain().slices[0].reason.clone();
    assert!(reason.contains("an endpoint has no address; endpoint address fd00::1"), "{reason}");
}

#[test]
fn case_13_what_conditions_mean() {
    let with = |ready, serving, terminating| {
        let slice = slice("a").port("http", "TCP", 8080).endpoint("10.1.0.1", Some("n1"));
        let scene = scene(svc(), [slice.conditions(ready, serving, terminating)]);
        (
            scene.outcome(To::ClusterIp),
            scene.served().endpoints.first().and_then(|endpoint| endpoint.conditions),
        )
    };
    let conditions = |ready, serving, terminating, selected| {
        Some(localnetv1::EndpointConditions { ready, serving, terminating, selected, local: true })
    };
    let chosen = "{L1}".to_owned();
    assert_eq!(with(None, None, None), (chosen.clone(), conditions(true, true, false, true)));
    assert_eq!(with(Some(true), None, Some(true)), (chosen.clone(), conditions(true, true, true, true)));
    assert_eq!(with(Some(true), Some(false), None), (chosen.clone(), conditions(true, false, false, true)));
    assert_eq!(
        with(Some(false), Some(true), None),
        ("REJECT".to_owned(), conditions(false, true, false, false))
    );
    assert_eq!(with(Some(false), None, Some(true)), (chosen, conditions(false, true, true, true)));
    assert_eq!(with(Some(false), Some(false), Some(true)), ("REJECT".to_owned(), None));
    let no_conditions = scene(svc(), [slice("a").port("http", "TCP", 8080).endpoint("10.1.0.1", None)]);
    assert_eq!(no_conditions.outcome(To::ClusterIp), "{L1}");
}

#[test]
fn case_14_protocols_are_independent() {
    let service = balanced().port("t", "TCP", 53).port("u", "UDP", 53).port("s", "SCTP", 53);
    let slices = [
        slice("a").port("t", "TCP", 53).words("R1"),
        slice("b").port("u", "UDP", 53).words("R2"),
        slice("c").port("s", "SCTP", 53).words("R3"),
    ];
    let found = scene(service, slices.clone());
    assert_eq!(ports(&found), ["t: R1:53", "u: R2:53", "s: R3:53"]);
    let found = scene(balanced().port("t", "TCP", 53), slices);
    assert_eq!(ports(&found), ["t: R1:53"]);
    assert_eq!(sent(&found.served()), "{R1}");
}

#[test]
fn endpoints_are_ordered_by_family_and_number() {
    let slices =
        [http("a", "R63 R61").kind("IPv6"), http("b", "R10 R9 L1 R2"), http("c", "L62").kind("IPv6")];
    let served = scene(svc().dual_stack(), slices).served();
    let order: Vec<_> = served
        .endpoints
        .iter()
        .flat_map(|endpoint| [addresses(endpoint, false), addresses(endpoint, true)].concat())
        .map(|address| word(&address))
        .collect();
    assert_eq!(order, ["L1", "R2", "R9", "R10", "L62", "R61", "R63"]);
}

#[test]
fn ports_of_an_address_share_an_endpoint_unless_they_differ() {
    let service = balanced().port("p", "TCP", 1).port("q", "TCP", 2).port("r", "TCP", 3);
    let slices = [
        slice("a").port("q", "TCP", 12).port("p", "TCP", 11).words("R1"),
        slice("b").port("r", "TCP", 13).words("R1~"),
    ];
    let served = scene(service, slices).served();
    let ports: Vec<Vec<_>> = served
        .endpoints
        .iter()
        .map(|endpoint| endpoint.ports.iter().map(|port| (port.index, port.port, port.cluster)).collect())
        .collect();
    assert_eq!(ports, [vec![(0, 11, true), (1, 12, true)], vec![(2, 13, true)]]);
    assert!(served.endpoints.iter().all(|endpoint| endpoint.conditions.unwrap().selected));
}

#[test]
fn hostnames_are_kept() {
    let slice = http("a", "R1").edit(|slice| slice.endpoints[0].hostname = Some("web-0".to_owned()));
    assert_eq!(scene(svc(), [slice]).served().endpoints[0].hostname, "web-0");
}

#[test]
fn cases_48_and_49_conntrack_keeps_serving_endpoints_and_a_port_without_any_is_marked() {
    for (words, expected) in
        [("L1 R2 R3", "{L1 R2 R3}"), ("L1 R3", "{L1 R3}"), ("", "{}"), ("L1- R1!", "{}"), ("L1", "{L1}")]
    {
        let dns = slice("a").port("dns", "UDP", 53).words(words);
        assert_eq!(sent(&scene(internal().port("dns", "UDP", 53), [dns]).served()), expected, "{words:?}");
    }
}

#[test]
fn case_50_endpoints_that_are_not_chosen_are_sent_while_they_serve() {
    let scene = scene(svc().internal_local().external_local(), [http("a", "L1 L2~ R1@b R2~ R3s R4! R5-")]);
    assert_eq!((scene.cluster_set(), scene.local_set()), ("{L1 R1}".to_owned(), "{L1}".to_owned()));
    assert_eq!(sent(&scene.served()), "{L1 L2 R1 R2 R3}");
    let number = |number| {
        let slice = slice("a").port("http", "TCP", number).words("L1");
        super::scene(svc(), [slice]).served().endpoints[0].ports[0].port
    };
    assert_eq!((number(53), number(54)), (53, 54));
}
