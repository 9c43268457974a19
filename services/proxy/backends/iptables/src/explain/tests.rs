//! What the backend iptables does in its own way, and the text of its steps.

use keelson_proxy::{backend::Driver, options::NodeConfig};

use self::cases::{HOST, LOOPBACK, NP2, OUTSIDE, POD, V, W, case, case_with, node, settings};

#[path = "../../../../src/explain/cases.rs"]
mod cases;

const DRIVER: &dyn Driver = &crate::Iptables;

#[test]
fn case_14_17_other_protocols_and_ports_are_untouched() {
    let case = case(node(), |_| {});
    case.expect(&[
        (POD, "10.96.0.1:80/UDP", "untouched"),
        (POD, "10.96.0.1:81", "untouched"),
        (OUTSIDE, "192.0.2.2:81", "untouched"),
        (OUTSIDE, "10.0.0.7:80", "untouched"),
        (POD, "10.96.0.2:80", "untouched"),
    ]);
}

#[test]
fn case_36_without_a_detector_nothing_is_masqueraded() {
    case(NodeConfig { detector: None, ..node() }, |_| {}).expect(&[(HOST, V, "LR")]);
}

#[test]
fn case_42_without_endpoints_every_source_is_rejected() {
    case(node(), |port| {
        (port.has_any, port.cluster) = (false, Vec::new());
        port.source_ranges = vec!["198.51.100.0/25".parse().unwrap()];
    })
    .expect(&[("198.51.100.200", W, "rejected")]);
}

#[test]
fn case_46_only_the_node_itself_reaches_node_ports_at_loopback() {
    case(node(), |_| {}).expect(&[(HOST, LOOPBACK, "LR+M"), ("198.51.100.1", LOOPBACK, "dropped")]);
    let mut without = settings();
    without.iptables.localhost_node_ports = false;
    case_with(&without, node(), |_| {}).expect(&[(HOST, LOOPBACK, "untouched"), (OUTSIDE, NP2, "LR+M")]);
}

#[test]
fn case_47_affinity_is_shared_by_all_frontends() {
    let affine = case(node(), |port| port.affinity_seconds = 60);
    affine.expect(&[(POD, V, "LR"), (OUTSIDE, W, "LR+M")]);
    let steps = affine.steps(POD, V);
    assert!(steps.contains("a client that is remembered gets its endpoint again"), "{steps}");
}

#[test]
fn steps_name_chains_and_rules() {
    let explained = case(node(), |_| {}).explain(OUTSIDE, V);
    assert_eq!(explained.frontend, "10.96.0.1:80/TCP is the cluster IP of default/web");
    assert_eq!(explained.service_port, "default/web");
    let steps = &explained.ways[0].steps;
    assert_eq!(steps[0], "KEELSON-SERVICES: -j KEELSON-A-00000000-0");
    assert!(steps[1].starts_with(
        "KEELSON-A-00000000-0: ! -s 10.244.0.0/16 -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j MARK"
    ));
    assert!(
        steps.iter().any(|step| step.ends_with("one of 2, at random: 10.244.0.1:8080, 10.244.9.1:8080")),
        "{steps:#?}"
    );
    assert!(steps.iter().any(|step| step.contains("masqueraded")), "{steps:#?}");
}
