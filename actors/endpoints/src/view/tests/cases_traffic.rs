//! Cases: which endpoints take which traffic.
//!
//! Each case is derived from the published state by the table in section 2. Masquerading, node addresses and timing
//! belong to the proxy; such cases are covered here as far as the sets go.

use super::*;

/// `fates`: of traffic to the cluster IP, from outside, and from pods and the node.
#[track_caller]
fn check(case: &str, service: Svc, endpoints: &str, fates: [&str; 3]) {
    let scene = scene(service, [http("a", endpoints)]);
    assert_eq!(scene.fates(), fates, "{case}: {endpoints}: {:#?}", scene.explain());
}

#[test]
fn cases_18_to_24_conditions_and_zone_hints_choose() {
    for (case, service, endpoints, fates) in [
        ("18: only ready endpoints", svc(), "L1 R1!", ["{L1}"; 3]),
        ("18: only ready endpoints", svc(), "L1 R1s R2~", ["{L1}"; 3]),
        ("19: terminating ones when none is ready", svc(), "L1~ R1~ R2-", ["{L1 R1}"; 3]),
        ("19: terminating ones when none is ready", svc(), "L1~ R1~ R2- R3!", ["{L1 R1}"; 3]),
        ("20: the sets fall back independently", svc().external_local(), "R1 L1~", ["{R1}", "{L1}", "{R1}"]),
        (
            "21: remote terminating endpoints do not serve outside traffic",
            svc().external_local(),
            "R1~",
            ["{R1}", "DROP", "{R1}"],
        ),
        ("22: nothing serves anywhere", svc().external_local(), "L1! R1- R2s", ["REJECT"; 3]),
        ("23: zone hints choose", svc(), "R1@a R2@b R3@c R4@a,b", ["{R1 R4}"; 3]),
        ("24: a ready endpoint without hint turns hints off", svc(), "R1@a R2@b R3", ["{R1 R2 R3}"; 3]),
        ("24: one that is not ready does not", svc(), "R1@a R2@b R3! R4~ R5s", ["{R1}"; 3]),
    ] {
        check(case, service, endpoints, fates);
    }
}

#[test]
fn case_25_no_zone_or_no_hint_for_it() {
    for zone in [None, Some(""), Some("z")] {
        let found = scene(svc(), [http("a", "R1@a R2@b")]).zone(zone);
        found.expect("{R1 R2}", "{R1 R2}", "{R1 R2}");
    }
    check("no hint for it", svc(), "R1@b R2@c R3!@a", ["{R1 R2}"; 3]);
    // A hint for a zone with an empty name matches no zone.
    let nameless = scene(svc(), [http("a", "R1@ R2@b")]).zone(None);
    nameless.expect("{R1 R2}", "{R1 R2}", "{R1 R2}");
}

#[test]
fn cases_26_to_29_hints_for_nodes_come_first_and_hints_alone_decide() {
    for (case, service, endpoints, fates) in [
        ("26: node hints come first", svc(), "L1@a#n1 R1@a#n2 R2@a#n3", ["{L1}"; 3]),
        ("26: node hints come first", svc(), "L1#n1 R1#n2 R2#n2,n1", ["{L1 R2}"; 3]),
        ("27: node hints that do not apply leave it to zones", svc(), "R1@a#n2 R2@b#n3", ["{R1}"; 3]),
        ("27: nor do those that an endpoint lacks", svc(), "L1@a#n1 R1@a R2@b#n2", ["{L1 R1}"; 3]),
        ("27: nor zones that an endpoint lacks", svc(), "L1@a#n1 R1 R2@b#n2", ["{L1 R1 R2}"; 3]),
        // trafficDistribution has no effect: it is not read.
        ("28: hints alone decide", svc(), "L1 R1", ["{L1 R1}"; 3]),
        ("28: hints alone decide", svc(), "L1@b R1@a", ["{R1}"; 3]),
        (
            "29: hints do not choose among local endpoints",
            svc().external_local(),
            "L1@b R1@a R2@b",
            ["{R1}", "{L1}", "{R1}"],
        ),
    ] {
        check(case, service, endpoints, fates);
    }
}

#[test]
fn case_30_hints_do_not_choose_among_terminating_endpoints_and_zones_may_change() {
    check("terminating", svc(), "R1~@a R2~@b", ["{R1 R2}"; 3]);
    let found = scene(svc(), [http("a", "R1@a R2@b")]);
    found.expect("{R1}", "{R1}", "{R1}");
    let moved = found.zone(Some("b"));
    moved.expect("{R2}", "{R2}", "{R2}");
}

#[test]
fn case_31_internal_policy_local() {
    check("with frontends", svc().internal_local(), "L1 R1", ["{L1}", "{L1 R1}", "{L1 R1}"]);
    // Without frontends for outside traffic, the cluster set is not used.
    let inner = scene(internal().port("http", "TCP", 80).internal_local(), [http("a", "L1 R1")]);
    assert_eq!((inner.outcome(To::ClusterIp), inner.cluster_set()), ("{L1}".to_owned(), "{}".to_owned()));
    let selected: Vec<_> =
        inner.served().endpoints.iter().map(|it| it.conditions.unwrap().selected).collect();
    assert_eq!(selected, [true, false]);
    // externalTrafficPolicy has no effect on a Service without frontends for outside traffic.
    let inner = scene(internal().port("http", "TCP", 80).external_local(), [http("a", "L1 R1")]);
    let served = inner.served();
    assert_eq!((served.external_traffic_to_local, inner.local_set()), (false, "{}".to_owned()));
    assert_eq!(inner.outcome(To::ClusterIp), "{L1 R1}");
    assert_eq!(inner.explain().ignored.len(), 1);
}

#[test]
fn external_policy_has_an_effect_with_external_ips_also() {
    let service = internal().port("http", "TCP", 80).external_ip(X).external_local();
    let node_port = internal().kind("NodePort").port("http", "TCP", 80).node_port(30080).external_local();
    for (case, service) in
        [("external IP", service.clone()), ("no type", service.kind("")), ("node port", node_port)]
    {
        check(case, service, "L1 R1", ["{L1 R1}", "{L1}", "{L1 R1}"]);
    }
    // The type has such frontends, but this family has none.
    let bare = internal().kind("LoadBalancer").port("http", "TCP", 80).external_local();
    let bare = scene(bare, [http("a", "L1 R1")]);
    assert_eq!((bare.served().external_traffic_to_local, bare.local_set()), (true, "{}".to_owned()));
}

#[test]
fn cases_32_to_37_policies() {
    let both = || svc().internal_local().external_local();
    for (case, service, endpoints, fates) in [
        ("32: internal Local, no local endpoint", svc().internal_local(), "R1", ["DROP", "{R1}", "{R1}"]),
        ("32: internal Local, no endpoint", svc().internal_local(), "", ["REJECT"; 3]),
        (
            "33: external Local",
            svc().external_ip(X).external_local(),
            "L1 R1",
            ["{L1 R1}", "{L1}", "{L1 R1}"],
        ),
        ("34: external Local, no local endpoint", svc().external_local(), "R1", ["{R1}", "DROP", "{R1}"]),
        ("37: external Cluster, the same for all clients", svc().external_ip(X), "L1 R1", ["{L1 R1}"; 3]),
        ("both Local", both(), "L1 R1", ["{L1}", "{L1}", "{L1 R1}"]),
        ("both Local, no local endpoint", both(), "R1", ["DROP", "DROP", "{R1}"]),
        ("both Local, the local one terminating", both(), "L1~ R1", ["{L1}", "{L1}", "{R1}"]),
    ] {
        check(case, service, endpoints, fates);
    }
}

#[test]
fn case_35_both_sets_are_published_for_proxies_that_cannot_detect_pods() {
    let found = scene(svc().external_local(), [http("a", "L1 R1")]);
    assert_eq!((found.local_set(), found.cluster_set()), ("{L1}".to_owned(), "{L1 R1}".to_owned()));
}

#[test]
fn case_39_no_endpoints() {
    let both = svc().internal_local().external_local();
    for service in [svc(), svc().internal_local(), svc().external_local(), both] {
        check("an empty slice", service.clone(), "", ["REJECT"; 3]);
        scene(service, []).expect("REJECT", "REJECT", "REJECT");
    }
}

#[test]
fn ports_are_decided_one_by_one() {
    let service = internal()
        .kind("NodePort")
        .internal_local()
        .port("http", "TCP", 80)
        .node_port(30080)
        .port("admin", "TCP", 81);
    let slices =
        [http("a", "L1 R1").port("admin", "TCP", 9090), slice("b").port("admin", "TCP", 9091).words("R2@a")];
    let served = scene(service, slices).served();
    let of = |index| [To::ClusterIp, To::Inside].map(|to| outcome(&served, index, false, to));
    assert_eq!(of(0), ["{L1}", "{L1 R1}"]);
    assert_eq!(outcome(&served, 1, false, To::ClusterIp), "{L1}");
    assert_eq!(
        list(members(&served, 1, false, |port| port.cluster)),
        "{}",
        "nothing of it is reached from outside"
    );
}

fn health(scene: &Scene) -> (i32, u32, u32) {
    let served = scene.served();
    (served.health_check_node_port, served.local_ready_v4, served.local_ready_v6)
}

fn checked(service: Svc) -> Svc {
    service.external_local().edit(|spec| spec.health_check_node_port = 32000)
}

#[test]
fn case_51_local_ready_addresses_are_counted_once() {
    let service = checked(svc().port("admin", "TCP", 81)).dual_stack();
    let slices = [
        http("a", "L1 L2 L3! L4~ R1").port("admin", "TCP", 9090),
        http("b", "L1 L2"),
        http("c", "L61 R61").kind("IPv6"),
    ];
    assert_eq!(health(&scene(service, slices)), (32000, 2, 1));
    // Ports that the Service does not have count as well: kube-proxy counts the ports of slices.
    let other = [slice("a").port("other", "TCP", 1).words("L1"), http("b", "L2")];
    assert_eq!(health(&scene(checked(svc()), other)), (32000, 2, 0));
    let copies =
        [slice("a").port("other", "TCP", 1).words("L1~"), slice("b").port("other", "TCP", 1).words("L1")];
    assert_eq!(health(&scene(checked(svc()), copies)), (32000, 1, 0));
    // A family without cluster IP has no health check.
    assert_eq!(health(&scene(checked(svc()), [http("c", "L61").kind("IPv6")])), (32000, 0, 0));
}

#[test]
fn case_52_terminating_endpoints_do_not_count_as_ready_and_still_serve() {
    let found = scene(checked(svc()), [http("a", "L1~")]);
    assert_eq!(health(&found), (32000, 0, 0));
    assert_eq!(found.outcome(To::Outside), "{L1}");
    // An endpoint that is not ready but published (publishNotReadyAddresses) counts.
    assert_eq!(health(&scene(checked(svc()), [http("a", "L1+")])), (32000, 1, 0));
}

#[test]
fn case_53_the_health_check_port_needs_external_policy_local_on_a_load_balancer() {
    let asked = |port| move |spec: &mut ServiceSpec| spec.health_check_node_port = port;
    let local = [http("a", "L1")];
    assert_eq!(health(&scene(svc().edit(asked(32000)), local.clone())), (0, 0, 0));
    assert_eq!(health(&scene(checked(svc()).kind("NodePort"), local.clone())), (0, 1, 0));
    assert_eq!(health(&scene(checked(svc()).edit(asked(32001)), local.clone())), (32001, 1, 0));
    for odd in [-1, 65536, 0] {
        assert_eq!(health(&scene(checked(svc()).edit(asked(odd)), local.clone())), (0, 1, 0));
    }
}

/// Whether a proxy counts the port as one without local endpoints: internal, external.
fn without_local(scene: &Scene) -> [bool; 2] {
    let served = scene.served();
    let nothing_local = list(members(&served, 0, false, |port| port.local)) == "{}";
    let lacks = |policy: bool| policy && nothing_local && served.ports[0].has_any_v4;
    [lacks(served.internal_traffic_to_local), lacks(served.external_traffic_to_local)]
}

#[test]
fn case_60_ports_without_local_endpoints_can_be_counted() {
    assert_eq!(without_local(&scene(svc().internal_local(), [http("a", "R1")])), [true, false]);
    assert_eq!(without_local(&scene(svc().external_local(), [http("a", "R1")])), [false, true]);
    assert_eq!(without_local(&scene(svc().external_local(), [])), [false, false]);
}
