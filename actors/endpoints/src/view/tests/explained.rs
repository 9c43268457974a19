use super::*;

/// IPv4 of the first port.
fn family(scene: &Scene) -> pb::FamilyExplanation {
    scene.explain().ports[0].families[0].clone()
}

/// Each endpoint of the first port with its reason, as `R1: reason`.
fn reasons(scene: &Scene) -> Vec<String> {
    family(scene).endpoints.into_iter().map(|it| format!("{}: {}", word(&it.address), it.reason)).collect()
}

fn topology(scene: &Scene) -> (String, String) {
    let family = family(scene);
    (family.topology, family.topology_reason)
}

fn rows(scene: &Scene) -> Vec<String> {
    let row = |it: pb::TrafficExplanation| format!("{} -> {}: {}: {}", it.from, it.to, it.verdict, it.reason);
    family(scene).traffic.into_iter().map(row).collect()
}

#[test]
fn zone_hints_are_explained() {
    let found = scene(svc(), [http("a", "R1@a R2@b,c R3~ R4! R5- R6s")]);
    let zone = "all ready endpoints have zone hints, 1 of them for zone a of this node";
    assert_eq!(topology(&found), ("zone".to_owned(), zone.to_owned()));
    let expected = [
        "R1: selected: ready, with a hint for zone a of this node",
        "R2: not selected: all ready endpoints have hints for zones, and its hints are [b, c], not zone a of \
         this node",
        "R3: not selected: terminating, and 2 endpoints are ready",
        "R4: not selected: neither ready nor serving",
        "R5: not selected: terminating and no longer serving",
        "R6: not selected: not ready and not terminating",
    ];
    assert_eq!(reasons(&found), expected);
}

#[test]
fn node_hints_are_explained() {
    let found = scene(svc(), [http("a", "L1#n1 R1#n2,n3")]);
    let node = "all ready endpoints have node hints, 1 of them for this node";
    assert_eq!(topology(&found), ("node".to_owned(), node.to_owned()));
    let expected = [
        "L1: selected: ready, with a hint for this node, n1",
        "R1: not selected: all ready endpoints have hints for nodes, and its hints are [n2, n3], not this \
         node, n1",
    ];
    assert_eq!(reasons(&found), expected);
}

#[test]
fn the_reason_for_ignored_hints_is_explained() {
    let none = |endpoints: &str, zone: Option<&str>| {
        let (mode, reason) = topology(&scene(svc(), [http("a", endpoints)]).zone(zone));
        assert_eq!(mode, "none");
        reason
    };
    assert_eq!(none("R1 R2", Some("a")), "no ready endpoint has hints");
    assert_eq!(none("R1! R2~@a", Some("a")), "no endpoint is ready, so hints are not used");
    let missing = "1 of 3 ready endpoints has no hints for zones, so hints for zones are not used";
    assert_eq!(none("R1@a R2@a R3", Some("a")), missing);
    assert_eq!(none("R1@b R2@c", Some("a")), "no zone hint is for zone a of this node");
    assert_eq!(none("R1@b R2@c", None), "this node has no label topology.kubernetes.io/zone");
    let both = "no node hint is for this node; 2 of 3 ready endpoints have no hints for zones, so hints for \
                zones are not used";
    assert_eq!(none("R1@a#n2 R2#n2 R3#n2", Some("a")), both);
    let (mode, reason) = topology(&scene(svc(), [http("a", "R1@a#n2 R2@b#n2")]));
    assert_eq!(mode, "zone");
    assert!(reason.starts_with("no node hint is for this node; all ready endpoints have zone hints"));
    let inner = scene(internal().port("http", "TCP", 80).internal_local(), [http("a", "L1@a")]);
    assert!(topology(&inner).1.starts_with("no traffic of this port can go to other nodes"));
}

#[test]
fn both_sets_are_explained_when_they_differ() {
    let found = scene(svc().external_local(), [http("a", "L1@b L2~@b R1@a R2!")]);
    let expected = [
        "L1: cluster set: not selected: all ready endpoints have hints for zones, and its hints are [b], not \
         zone a of this node; local set: selected: ready",
        "L2: cluster set: not selected: terminating, and 2 endpoints are ready; local set: not selected: \
         terminating, and 1 endpoint is ready on this node",
        "R1: cluster set: selected: ready, with a hint for zone a of this node; local set: not selected: not \
         on this node",
        "R2: not selected: neither ready nor serving",
    ];
    assert_eq!(reasons(&found), expected);
    // If both sets contain the terminating ones, one sentence is enough.
    let found = scene(svc().external_local(), [http("a", "L1~ R1~")]);
    let expected = [
        "L1: selected: terminating and still serving, because no endpoint is ready",
        "R1: cluster set: selected: terminating and still serving, because no endpoint is ready; local set: \
         not selected: not on this node",
    ];
    assert_eq!(reasons(&found), expected);
    let inner = scene(internal().port("http", "TCP", 80).internal_local(), [http("a", "L1 R1")]);
    assert_eq!(reasons(&inner), ["L1: selected: ready", "R1: not selected: not on this node"]);
}

#[test]
fn copies_are_explained() {
    let found = scene(svc(), [http("a", "R1 R2~ R3! R4! R5+"), http("b", "R1 R2 R3 R4s")]);
    let expected = [
        "R1: selected: ready",
        "R1: not selected: slice b has the same address and port, and its endpoint has the same conditions \
         and the later name",
        "R2: selected: ready",
        "R2: not selected: slice b has the same address and port, and its endpoint is not terminating",
        "R3: selected: ready",
        "R3: not selected: slice b has the same address and port, and its endpoint is ready",
        "R4: not selected: not ready and not terminating",
        "R4: not selected: slice b has the same address and port, and its endpoint is serving",
        "R5: selected: ready and terminating",
    ];
    assert_eq!(reasons(&found), expected);
    let slices: Vec<_> = found.explain().slices.into_iter().map(|it| (it.name, it.used, it.reason)).collect();
    assert_eq!(slices, [("a".to_owned(), true, String::new()), ("b".to_owned(), true, String::new())]);
    let copied =
        scene(svc(), [http("b", "R1"), http("a", "R1"), http("c", ""), slice("d").words("R1")]).explain();
    let slices: Vec<_> =
        copied.slices.iter().map(|it| (it.name.as_str(), it.used, it.reason.as_str())).collect();
    let expected = [
        ("a", false, "other slices have copies of all its endpoints, which are used instead"),
        ("b", true, ""),
        ("c", false, "it has no endpoints"),
        ("d", false, "it has no ports"),
    ];
    assert_eq!(slices, expected);
}

#[test]
fn traffic_is_explained() {
    let service = svc().external_ip(X).external_local().source_ranges(&["192.0.2.0/24", "10.0.0.0/8"]);
    let found = scene(service, [http("a", "L1 R1")]);
    let local = "externalTrafficPolicy is Local: to every ready endpoint on this node";
    let ranges =
        "; only sources in 10.0.0.0/8, 192.0.2.0/24 are allowed, all others are dropped, including pods";
    let expected = [
        format!("anyone -> {V}:80: forwarded: to every ready endpoint"),
        format!("outside -> {X}:80: forwarded: {local}"),
        format!("pods and the node -> {X}:80: forwarded: to every ready endpoint"),
        format!("outside -> {W}:80: forwarded: {local}{ranges}"),
        format!("pods and the node -> {W}:80: forwarded: to every ready endpoint{ranges}"),
        format!("outside -> node port 30080: forwarded: {local}"),
        "pods and the node -> node port 30080: forwarded: to every ready endpoint".to_owned(),
    ];
    assert_eq!(rows(&found), expected);
    let endpoints = family(&found).traffic[1].endpoints.clone();
    assert_eq!(endpoints, ["10.1.0.1:8080"]);

    let far = scene(svc().internal_local(), [http("a", "R1@a R2@b")]);
    let expected = [
        format!(
            "anyone -> {V}:80: dropped: internalTrafficPolicy is Local, and this node has no endpoint for it"
        ),
        format!("anyone -> {W}:80: forwarded: to 1 of 2 ready endpoints, selected by hints"),
        "anyone -> node port 30080: forwarded: to 1 of 2 ready endpoints, selected by hints".to_owned(),
    ];
    assert_eq!(rows(&far), expected);

    let leaving = scene(svc().internal_local(), [http("a", "L1~ R1~")]);
    let reasons: Vec<_> =
        rows(&leaving).into_iter().map(|row| row.rsplit(": ").next().unwrap().to_owned()).collect();
    let those = "to terminating endpoints that still serve";
    assert_eq!(reasons, ["to local terminating endpoints that still serve", those, those]);

    let nothing = scene(svc().external_local(), []);
    assert!(
        rows(&nothing).iter().all(|row| row.contains("rejected: no endpoint on any node is ready")),
        "{:?}",
        rows(&nothing)
    );
}

#[test]
fn an_endpoint_is_identified() {
    let slice = http("a", "L1 R2").edit(|slice| {
        slice.endpoints[0].zone = Some("z".to_owned());
        slice.endpoints[1].target_ref =
            Some(ObjectReference { kind: "VirtualMachine".to_owned(), name: "vm".to_owned() });
    });
    let endpoints = family(&scene(svc(), [slice])).endpoints;
    let first = &endpoints[0];
    let explained = [&first.address, &first.pod, &first.node, &first.zone, &first.slice];
    assert_eq!(explained, ["10.1.0.1", "pod-l1", "n1", "z", "a"]);
    assert_eq!(
        (first.port, first.local, first.ready, first.serving, first.terminating),
        (8080, true, true, true, false)
    );
    assert_eq!(endpoints[1].pod, "VirtualMachine/vm");
}

#[test]
fn the_service_is_described() {
    let service = svc().dual_stack().external_ip(X).affinity(Some(60)).external_local();
    let explained = scene(service.edit(|spec| spec.health_check_node_port = 32000), []).explain();
    assert_eq!(
        (explained.namespace.as_str(), explained.name.as_str(), explained.served),
        ("ns", "web", true)
    );
    assert_eq!(
        (explained.cluster_ips, explained.external_ips),
        (vec![V.to_owned(), V6.to_owned()], vec![X.to_owned()])
    );
    assert_eq!(explained.load_balancer_ips, [W]);
    assert_eq!(
        (explained.affinity.as_str(), explained.health_check_node_port, explained.rev),
        ("ClientIP, 60 s", 32000, 0)
    );
    assert!(explained.internal_traffic_policy.starts_with("Cluster: "));
    assert!(explained.external_traffic_policy.starts_with("Local: "));
    let families: Vec<_> = explained.ports[0].families.iter().map(|it| it.family.as_str()).collect();
    assert_eq!(families, ["IPv4", "IPv6"]);
    assert_eq!((explained.ports[0].protocol.as_str(), explained.ports[0].node_port), ("TCP", 30080));
    let to = explained.ports[0].families[1].traffic.iter().map(|row| row.to.clone()).collect::<Vec<_>>();
    assert_eq!(to, [format!("[{V6}]:80"), "node port 30080".to_owned(), "node port 30080".to_owned()]);
}

#[test]
fn slices_without_their_service_are_explained() {
    let slices = [http("b", "L1").build(), http("a", "L1").edit(|slice| slice.metadata = None).build()];
    let explained = explain(None, &slices, &n1());
    assert_eq!(
        (explained.namespace.as_str(), explained.name.as_str(), explained.served),
        ("ns", "web", false)
    );
    assert_eq!(explained.reason, "the Service does not exist, only EndpointSlices of it");
    let reasons: Vec<_> = explained.slices.iter().map(|it| it.reason.as_str()).collect();
    assert_eq!(reasons, ["it has no label kubernetes.io/service-name", "the Service is not served"]);
    assert_eq!(explain(None, &[], &n1()).slices.len(), 0);
}

#[test]
fn many_faults_are_counted() {
    let slice = (0..8).fold(http("a", "R1"), |slice, number| slice.endpoint(&format!("x{number}"), None));
    let explained = scene(svc(), [slice]).explain().slices[0].clone();
    assert!(explained.used);
    assert!(
        explained.reason.starts_with("ignored: endpoint address \"x0\" is not an IP address; "),
        "{explained:?}"
    );
    assert!(explained.reason.ends_with("; and 3 more"), "{explained:?}");
}
