//! What the backend ipvs does in its own way, and the text of its steps.

use keelson_proxy::{backend::Driver, options::NodeConfig};

use self::cases::{HOST, LOOPBACK, OUTSIDE, POD, V, W, case, node};

#[path = "../../../../src/explain/cases.rs"]
mod cases;

const DRIVER: &dyn Driver = &crate::Ipvs;

#[test]
fn case_14_17_other_protocols_and_ports_of_an_address_are_rejected() {
    let case = case(node(), |_| {});
    case.expect(&[
        (POD, "10.96.0.1:80/UDP", "rejected"),
        (POD, "10.96.0.1:81", "rejected"),
        (OUTSIDE, "192.0.2.2:81", "rejected"),
        (OUTSIDE, "10.0.0.7:80", "untouched"),
        (POD, "10.96.0.2:80", "untouched"),
    ]);
}

#[test]
fn case_36_without_a_detector_only_the_node_itself_is_masqueraded() {
    case(NodeConfig { detector: None, ..node() }, |_| {}).expect(&[(HOST, V, "LR+M")]);
}

#[test]
fn case_42_ranges_come_before_refusals() {
    case(node(), |port| {
        (port.has_any, port.cluster) = (false, Vec::new());
        port.source_ranges = vec!["198.51.100.0/25".parse().unwrap()];
    })
    .expect(&[("198.51.100.200", W, "dropped")]);
}

#[test]
fn case_46_loopback_has_no_node_ports() {
    case(node(), |_| {}).expect(&[(HOST, LOOPBACK, "untouched")]);
}

#[test]
fn case_47_affinity_is_part_of_the_choice() {
    let affine = case(node(), |port| port.affinity_seconds = 60);
    affine.expect(&[(POD, V, "LR"), (OUTSIDE, W, "LR+M")]);
    let steps = affine.steps("pod", V);
    assert!(steps.contains("the endpoint of the last 60 s, otherwise scheduler rr"), "{steps}");
}

#[test]
fn steps_name_chains_sets_and_virtual_servers() {
    let plain = case(node(), |_| {});
    assert_eq!(
        plain.steps("outside", V),
        "KEELSON-SERVICES: not from a pod: marked for masquerading\n\
         virtual server 10.96.0.1:80/TCP, scheduler rr: one of 2: 10.244.0.1:8080, 10.244.9.1:8080\n\
         KEELSON-POSTROUTING: masqueraded: the endpoint sees an address of the node"
    );
    let local = case(node(), |port| (port.external_local, port.local) = (true, Vec::new()));
    assert_eq!(local.steps("outside", W), "KEELSON-MANGLE: in set KEELSON-4-DROP: dropped");
    let steps = local.steps("pod", W);
    assert!(steps.starts_with("KEELSON-MANGLE: from a pod or the node, in set KEELSON-4-LOCAL\n"), "{steps}");
    assert!(steps.contains("virtual server by mark"), "{steps}");
    let steps = plain.steps("pod", "10.96.0.1:81");
    assert!(steps.contains("KEELSON-ADDRESSES: no set of frontends has the port: rejected"), "{steps}");
}
