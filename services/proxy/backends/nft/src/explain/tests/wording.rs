//! The text of the steps.

use super::*;

fn steps(world: &World, target: &str, from: &str) -> Vec<String> {
    world.explain(target, from).ways.swap_remove(0).steps
}

#[test]
fn from_a_pod_to_a_cluster_ip() {
    let world = World::new(vec![web(&["R1", "R2"])]);
    assert_eq!(
        steps(&world, V, "pod"),
        [
            "services: 10.96.0.10 . tcp . 80 is in cluster-ip-ports: number 4020:1",
            "internal: the source is in 10.244.0.0/16, so it is a pod: not marked for masquerading",
            "internal: 4020:0 is in counts: goto lb-2",
            "lb-2: the destination becomes a random one of 2 endpoints in slots",
        ]
    );
}

#[test]
fn from_outside_to_a_load_balancer_with_ranges_and_policy() {
    let mut port = local(web(&["L2", "R1"]), false, true);
    port.source_ranges = vec![net("192.0.2.0/25")];
    let world = World::new(vec![port]);
    assert_eq!(
        steps(&world, W, C),
        [
            "filter-prerouting: 203.0.113.10 . tcp . 80 is in filtered: goto sources-tcp-25",
            "sources-tcp-25: source-ranges allow the source (192.0.2.0/25)",
            "services: 203.0.113.10 . tcp . 80 is in external-ports: number 6000:1",
            "external: 6000:1 is in external-policy: goto external-local (externalTrafficPolicy Local)",
            "external-local: the source is not in 10.244.0.0/16, so it is not a pod",
            "external-local: the source is not an address of the node",
            "external-local: 6000:1 is in local-choice: goto local-lb-1",
            "local-lb-1: the destination becomes 10.244.0.2:8080, the only endpoint in local-slots",
        ]
    );
    assert_eq!(
        steps(&world, W, B),
        [
            "filter-prerouting: 203.0.113.10 . tcp . 80 is in filtered: goto sources-tcp-25",
            "sources-tcp-25: source-ranges do not allow the source (only 192.0.2.0/25), dropped"
        ]
    );
}

#[test]
fn from_the_node_to_a_node_port() {
    let world = World::new(vec![web(&["R1"])]);
    assert_eq!(
        steps(&world, NP, "node"),
        [
            "services: 192.168.0.1 is in node-port-addresses, tcp . 30080 is in node-ports: number 4010:1",
            "external: marked for masquerading",
            "external: 4010:0 is in counts: goto lb-1",
            "lb-1: the destination becomes 10.244.1.1:8080, the only endpoint in slots",
            "nat-postrouting: the mark 0x4000 is set, masqueraded: the endpoint sees an address of the node",
        ]
    );
}

#[test]
fn refused_and_unclaimed_targets() {
    let world = World::new(vec![web(&[])]);
    assert_eq!(
        steps(&world, V, "pod"),
        [
            "services: 10.96.0.10 . tcp . 80 is not in cluster-ip-ports and not in external-ports, and its \
             port is not in node-ports",
            "cluster-ips-check: 10.96.0.10 . tcp . 80 is in refused: goto reject-it: no usable endpoint on \
             any node",
            "reject-it: rejected with ICMP port unreachable",
        ]
    );
    let refused = steps(&world, NP, "node").join("\n");
    assert!(
        refused.contains("filter-input: 192.168.0.1 is in node-port-addresses, tcp . 30080 is in refused-node-ports: goto reject-it: no usable endpoint"),
        "{refused}"
    );
    let undefined = steps(&world, "10.96.0.10:81", "node");
    assert_eq!(
        undefined[1],
        "cluster-ips-check: 10.96.0.10 is in cluster-ips, rejected with ICMP port unreachable"
    );
    let unallocated = steps(&world, "10.96.0.99:80", "node");
    assert_eq!(unallocated[1], "cluster-ips-check: 10.96.0.99 is in service-cidrs, dropped");
    let elsewhere = steps(&world, "192.168.0.2:30080", "outside");
    assert_eq!(elsewhere.last().unwrap(), "no rule matches; other tables and routes decide");
    assert!(
        elsewhere.iter().any(|step| step
            .contains("is in refused-node-ports, but node ports are served at 192.168.0.1, not at")),
        "{elsewhere:?}"
    );
}

#[test]
fn affinity_is_explained_as_a_choice() {
    let mut port = web(&["R1", "R2"]);
    port.affinity_seconds = 60;
    let world = World::new(vec![port]);
    assert_eq!(
        steps(&world, V, "pod")[2..],
        [
            "internal: 8000:0 is in internal-choice: goto affinity-2-60-0",
            "affinity-2-60-0: a client in affinity-0 keeps its endpoint if it is still selectable; a new \
             client gets one now",
            "affinity-new-2-60-0: random selection from 2 endpoint numbers in affinity-slots",
            "affinity-new-2-60-0: session affinity keeps this endpoint for the client for 60 s",
            "affinity-new-2-60-0: the destination becomes that endpoint, by affinity-endpoints",
        ]
    );
}
