//! Descriptions of addresses and ports.

use super::*;

fn describes(world: &World, target: &str) -> (String, String) {
    let explanation = world.explain(target, "pod");
    (explanation.frontend, explanation.service_port)
}

#[test]
fn addresses_and_ports_are_described() {
    let mut other = web(&["R2"]);
    other.name.service = ServiceName::new("shop", "api");
    (other.cluster_ip, other.node_port) = (ip("10.96.0.11"), 0);
    (other.external_ips, other.load_balancer_ips) = (vec![], vec![]);
    let world = World::new(vec![local(web(&["R1"]), true, true), other]);
    let why = "no endpoint on this node, and internalTrafficPolicy is Local";
    for (target, says_, service_port) in [
        (
            V,
            format!(
                "10.96.0.10:80/TCP is the cluster IP of default/web:http, internalTrafficPolicy Local: {why}"
            ),
            "default/web:http",
        ),
        (
            X,
            "198.51.100.10:80/TCP is an external IP of default/web:http, externalTrafficPolicy Local".into(),
            "default/web:http",
        ),
        (
            W,
            "203.0.113.10:80/TCP is a load-balancer IP of default/web:http, externalTrafficPolicy Local"
                .into(),
            "default/web:http",
        ),
        (
            NP,
            "192.168.0.1:30080/TCP is the node port of default/web:http, externalTrafficPolicy Local".into(),
            "default/web:http",
        ),
        ("10.96.0.11:80", "10.96.0.11:80/TCP is the cluster IP of shop/api:http".into(), "shop/api:http"),
        ("10.96.0.10:81", "10.96.0.10 is the cluster IP of default/web, which has no port 81/TCP".into(), ""),
        (
            "10.96.0.10:80/UDP",
            "10.96.0.10 is the cluster IP of default/web, which has no port 80/UDP".into(),
            "",
        ),
        (
            "203.0.113.10:81",
            "203.0.113.10 is an external address of default/web, which has no port 81/TCP".into(),
            "",
        ),
        ("10.96.7.7:80", "10.96.7.7 is in the ServiceCIDR 10.96.0.0/16, but no Service uses it".into(), ""),
        (
            "192.168.0.2:30080",
            "default/web:http has the node port 30080/TCP, but node ports are served at 192.168.0.1, not at \
             192.168.0.2"
                .into(),
            "",
        ),
        (
            "192.168.0.1:31000",
            "192.168.0.1 is an address of this node, but no Service has the node port 31000/TCP"
                .into(),
            "",
        ),
        (
            "8.8.8.8:30080",
            "8.8.8.8:30080/TCP is not a frontend: 8.8.8.8 belongs to no Service, no IPv4 ServiceCIDR and not \
             to this node"
                .into(),
            "",
        ),
    ] {
        assert_eq!(describes(&world, target), (says_, service_port.to_owned()), "{target}");
    }
    let refused = World::new(vec![web(&[])]);
    let (frontend, _) = describes(&refused, NP);
    assert!(frontend.ends_with("default/web:http: no usable endpoint on any node"), "{frontend}");
}

#[test]
fn sources_of_a_question() {
    let world = World::new(vec![web(&["R1"])]);
    let labels = |target: &str, from: &str| -> Vec<String> {
        world.explain(target, from).ways.into_iter().map(|way| way.from).collect()
    };
    assert_eq!(labels(V, ""), ["a pod (10.244.0.0/16)", "the node itself (192.168.0.1)", "outside"]);
    assert_eq!(labels(V, "192.168.0.2"), ["192.168.0.2, the node itself"]);
    assert_eq!(labels(V, "10.244.0.9"), ["10.244.0.9, a pod (10.244.0.0/16)"]);
    assert_eq!(labels(V, C), ["192.0.2.1, outside"]);
    assert_eq!(labels("192.168.0.2:80", "node"), ["the node itself (192.168.0.2)"]);
    let mut port = web(&["R1"]);
    port.source_ranges = vec![net("192.0.2.0/25")];
    let world = World::new(vec![port]);
    let labels: Vec<String> = world.explain(W, "outside").ways.into_iter().map(|way| way.from).collect();
    assert_eq!(
        labels,
        ["outside, in the source ranges (192.0.2.0/25)", "outside, not in the source ranges (192.0.2.0/25)"]
    );
}
