//! The text of the ruleset. `tests/ruleset.rs` checks with nft that the kernel gets the same rules.

use super::*;
use crate::element::{Element, Key, Number, Value, Verdict};

fn base(family: Family) -> Base {
    let cidr = match family {
        Family::V4 => "10.244.0.0/16",
        Family::V6 => "fd00:10:244::/56",
    };
    Base {
        family,
        masquerade_all: false,
        mark: 0x4000,
        detector: Some(Detector::Cidr(cidr.parse().unwrap())),
        node_ports: NodePortMatch::Addresses,
        untracked_pods: false,
    }
}

fn texts(base: &Base, chain: Chain) -> Vec<String> {
    rules(base, chain).iter().map(|rule| rule.text(base.family)).collect()
}

#[track_caller]
fn assert_chain(base: &Base, chain: Chain, expected: &str) {
    let expected: Vec<&str> = expected.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert_eq!(texts(base, chain), expected, "{chain}");
}

#[test]
fn the_fixed_chains_of_ipv4() {
    let base = base(Family::V4);
    let table = [
        (
            Chain::Services,
            "meta priority set ip daddr . meta l4proto . th dport map @cluster-ip-ports goto internal
             meta priority set ip daddr . meta l4proto . th dport map @external-ports goto external
             ip daddr @node-port-addresses meta priority set meta l4proto . th dport map @node-ports goto external",
        ),
        (
            Chain::Internal,
            "ip saddr != 10.244.0.0/16 meta mark set meta mark | 0x00004000
             meta priority & fff0:0 vmap @counts
             meta priority vmap @internal-choice
             drop",
        ),
        (
            Chain::External,
            "meta priority & e000:0 == 4000:0 meta mark set meta mark | 0x00004000
             meta priority & fff0:0 vmap @counts
             meta priority vmap @external-policy
             meta mark set meta mark | 0x00004000
             meta priority vmap @external-choice
             drop",
        ),
        (
            Chain::ExternalLocal,
            "ip saddr 10.244.0.0/16 meta priority vmap @external-choice
             fib saddr type local meta mark set meta mark | 0x00004000 meta priority vmap @external-choice
             meta priority vmap @local-choice
             drop",
        ),
        (Chain::NatPrerouting, "jump services"),
        (Chain::NatOutput, "jump services"),
        (
            Chain::NatPostrouting,
            "ct status dnat meta priority & c000:0 != none meta priority set none
             meta mark & 0x00004000 == 0x00004000 meta mark set meta mark ^ 0x00004000 masquerade fully-random
             ct status dnat ip saddr . ip daddr . meta l4proto . th dport @hairpin masquerade fully-random",
        ),
        (Chain::FilterPrerouting, "ct state new ip daddr . meta l4proto . th dport vmap @filtered"),
        (Chain::FilterOutputFirst, "ct state new ip daddr . meta l4proto . th dport vmap @filtered"),
        (
            Chain::FilterInput,
            "ct state new ip daddr @node-port-addresses meta l4proto . th dport vmap @refused-node-ports
             ct state new ip daddr . meta l4proto . th dport vmap @refused",
        ),
        (
            Chain::FilterForward,
            "ct state new ct status ! dnat jump cluster-ips-check",
        ),
        (
            Chain::FilterOutput,
            "ct state new ct status ! dnat jump cluster-ips-check",
        ),
        (
            Chain::ClusterIpsCheck,
            "ip daddr . meta l4proto . th dport vmap @refused
             ip daddr @cluster-ips reject
             ip daddr @service-cidrs drop",
        ),
        (Chain::Reject, "reject"),
        (
            Chain::FilterForwardOffload,
            "ct state established ct status dnat meta l4proto tcp flow add @service-flows
             ct state established ct status dnat meta l4proto udp flow add @service-flows",
        ),
        (
            Chain::FilterForwardOffloadTcp,
            "ct state established ct status dnat meta l4proto tcp flow add @service-flows",
        ),
    ];
    for (chain, expected) in table {
        assert_chain(&base, chain, expected);
    }
    assert!(Chain::FIXED.iter().all(|chain| table.iter().any(|(tested, _)| tested == chain)));
}

#[test]
fn the_counted_chains() {
    let base = base(Family::V4);
    assert_chain(
        &base,
        Chain::LoadBalance { choice: Choice::Cluster, count: 3 },
        "meta l4proto tcp dnat ip to meta priority & f:ffff . numgen random mod 3 map @slots
         meta l4proto udp dnat ip to meta priority & f:ffff . numgen random mod 3 map @slots
         meta l4proto sctp dnat ip to meta priority & f:ffff . numgen random mod 3 map @slots
         drop",
    );
    assert_chain(
        &base,
        Chain::Sources { protocol: Protocol::Udp, lengths: PrefixLengths::new([32, 9]) },
        "ip daddr . th dport . ip saddr & 255.128.0.0 . numgen random mod 1 offset 4361 @source-ranges return
         ip daddr . th dport . ip saddr . numgen random mod 1 offset 4384 @source-ranges return
         drop",
    );
    let (choice, count, seconds, group) = (Choice::Local, 2, 10_800, 3);
    assert_chain(
        &base,
        Chain::Affinity { choice, count, seconds, group },
        "meta priority set ip saddr . meta priority map @affinity-3 goto local-affinity-kept-2-10800-3
         goto local-affinity-new-2-10800-3",
    );
    assert_chain(
        &base,
        Chain::AffinityKept { choice, count, seconds, group },
        "update @affinity-3 { ip saddr . meta priority & ffff:0 timeout 10800s : meta priority }
         meta l4proto tcp dnat ip to meta priority map @local-affinity-endpoints
         meta l4proto udp dnat ip to meta priority map @local-affinity-endpoints
         meta l4proto sctp dnat ip to meta priority map @local-affinity-endpoints
         delete @affinity-3 { ip saddr . meta priority & ffff:0 : meta priority }
         meta priority set meta priority & ffff:0
         goto local-affinity-new-2-10800-3",
    );
    assert_chain(
        &base,
        Chain::AffinityNew { choice: Choice::Cluster, count, seconds, group },
        "meta priority set meta priority . numgen random mod 2 map @affinity-slots
         update @affinity-3 { ip saddr . meta priority & ffff:0 timeout 10800s : meta priority }
         meta l4proto tcp dnat ip to meta priority map @affinity-endpoints
         meta l4proto udp dnat ip to meta priority map @affinity-endpoints
         meta l4proto sctp dnat ip to meta priority map @affinity-endpoints
         drop",
    );
}

#[test]
fn ipv6_rules_differ_only_in_keywords() {
    let (v4, v6) = (base(Family::V4), base(Family::V6));
    let translated = |text: &str| {
        text.replace("ip saddr", "ip6 saddr")
            .replace("ip daddr", "ip6 daddr")
            .replace("dnat ip to", "dnat ip6 to")
            .replace("10.244.0.0/16", "fd00:10:244::/56")
    };
    let affinity = Chain::Affinity { choice: Choice::Cluster, count: 2, seconds: 10, group: 0 };
    let counted = [Chain::LoadBalance { choice: Choice::Local, count: 2 }, affinity];
    for chain in Chain::FIXED.into_iter().chain(counted).chain(affinity.companions()) {
        let expected: Vec<String> = texts(&v4, chain).iter().map(|text| translated(text)).collect();
        assert_eq!(texts(&v6, chain), expected, "{chain}");
    }
}

/// Case 36: to V, a pod is not masqueraded, the host and outside sources are; without a detector, no source; with
/// masqueradeAll, all. Cases 33 and 35: the short-circuit of a pod, which needs a detector and is not masqueraded by
/// masqueradeAll.
#[test]
fn case_33_35_36_detectors() {
    let mark = "meta mark set meta mark | 0x00004000";
    let cidr = |text: &str| Some(Detector::Cidr(text.parse().unwrap()));
    let table = [
        (None, None, None),
        (cidr("10.244.0.0/14"), Some("ip saddr != 10.244.0.0/14 "), Some("ip saddr 10.244.0.0/14 ")),
        (cidr("10.244.7.7/14"), Some("ip saddr != 10.244.0.0/14 "), Some("ip saddr 10.244.0.0/14 ")),
        (cidr("10.1.1.1/32"), Some("ip saddr != 10.1.1.1 "), Some("ip saddr 10.1.1.1 ")),
        // Every source is a pod.
        (cidr("0.0.0.0/0"), None, Some("")),
        (cidr("fd00::/64"), None, None),
        (Some(Detector::Bridge("cbr0".to_owned())), Some("iifname != \"cbr0\" "), Some("iifname \"cbr0\" ")),
        (
            Some(Detector::InterfacePrefix("veth".to_owned())),
            Some("iifname != \"veth*\" "),
            Some("iifname \"veth*\" "),
        ),
        (
            Some(Detector::Bridge("more-than-15-bytes".to_owned())),
            Some("iifname != \"more-than-15-by\" "),
            Some("iifname \"more-than-15-by\" "),
        ),
        (Some(Detector::Bridge(String::new())), None, None),
        (Some(Detector::InterfacePrefix(String::new())), None, None),
    ];
    for (detector, not_pod, pod) in table {
        let base = Base { detector, ..base(Family::V4) };
        let internal = texts(&base, Chain::Internal);
        let first = not_pod.map(|matched| format!("{matched}{mark}"));
        assert_eq!(internal.len(), 3 + usize::from(first.is_some()), "{base:?}");
        assert!(first.is_none_or(|first| internal[0] == first), "{base:?}: {internal:?}");

        let local = texts(&base, Chain::ExternalLocal);
        let first = pod.map(|matched| format!("{matched}meta priority vmap @external-choice"));
        assert_eq!(local.len(), 3 + usize::from(first.is_some()), "{base:?}");
        assert!(first.is_none_or(|first| local[0] == first), "{base:?}: {local:?}");

        let all = Base { masquerade_all: true, ..base };
        assert_eq!(texts(&all, Chain::Internal)[0], mark);
        assert_eq!(texts(&all, Chain::ExternalLocal), local);
    }
}

/// Case 46: never on loopback.
#[test]
fn case_46_node_ports_on_all_local_addresses() {
    for (family, matched) in [
        (Family::V4, "fib daddr type local ip daddr != 127.0.0.0/8 "),
        (Family::V6, "fib daddr type local ip6 daddr != ::1 "),
    ] {
        let base = Base { node_ports: NodePortMatch::AllLocal, ..base(family) };
        let services = texts(&base, Chain::Services);
        assert!(services[2].starts_with(matched), "{services:?}");
        let input = texts(&base, Chain::FilterInput);
        assert!(input[0].starts_with(&format!("ct state new {matched}")), "{input:?}");
    }
}

#[test]
fn elements_are_written_as_nft_reads_them() {
    let v4 = |text: &str| -> IpAddr { text.parse().unwrap() };
    let frontend = Key::new().ip(v4("10.96.0.10")).protocol(Protocol::Tcp).port(80);
    let number = Value::Data(Key::new().number(Number(7)));
    let element = |set, key, value| Element { set, key, key_end: None, value };
    let slot = Key::new().number(Number(0x8001_0000)).index(69_999);
    let endpoint = Value::Data(Key::new().ip(v4("fd00::1")).port(8080));
    let goto = Value::Verdict(Verdict::Goto(Chain::LoadBalance { choice: Choice::Local, count: 2 }));
    let range = |first: &str, last: &str| Element {
        key_end: Some(Key::new().ip(v4(last))),
        ..element(SetName::ServiceCidrs, Key::new().ip(v4(first)), Value::None)
    };
    let source = element(
        SetName::SourceRanges,
        Key::new()
            .ip(v4("10.96.0.10"))
            .port(80)
            .ip(v4("10.0.0.0"))
            .index(SetName::range_kind(Protocol::Tcp, 9)),
        Value::None,
    );
    for (family, element, expected) in [
        (Family::V4, element(SetName::ClusterIpPorts, frontend, number), "10.96.0.10 . tcp . 80 : 0:7"),
        (
            Family::V4,
            element(SetName::Refused, frontend, Value::Verdict(Verdict::Drop)),
            "10.96.0.10 . tcp . 80 : drop",
        ),
        (
            Family::V4,
            element(SetName::LocalChoice, Key::new().number(Number(7)), goto),
            "0:7 : goto local-lb-2",
        ),
        (Family::V6, element(SetName::Slots, slot, endpoint), "8001:0 . 69999 : fd00::1 . 8080"),
        (Family::V4, source, "10.96.0.10 . 80 . 10.0.0.0 . 1545"),
        (Family::V4, range("10.0.0.0", "10.0.0.0"), "10.0.0.0"),
        (Family::V4, range("10.0.0.0", "10.255.255.255"), "10.0.0.0/8"),
        (Family::V4, range("10.0.0.1", "10.0.0.2"), "10.0.0.1-10.0.0.2"),
        (Family::V4, range("0.0.0.0", "255.255.255.255"), "0.0.0.0/0"),
    ] {
        assert_eq!(element_text(family, &element), expected);
    }
}

#[test]
fn invalid_keys_are_shown_in_part() {
    for (len, expected) in [
        (0, ""),
        (3, ""),
        (4, "255.255.255.255"),
        (8, "255.255.255.255 . 255"),
        (12, "255.255.255.255 . 255 . 65535"),
        (40, "255.255.255.255 . 255 . 65535"),
    ] {
        let key = Key::from_slice(&vec![0xff; len]).unwrap();
        let element = Element { set: SetName::Filtered, key, key_end: None, value: Value::None };
        assert_eq!(element_text(Family::V4, &element), expected);
        for set in SetName::ALL {
            let shorter = Element { set, key_end: Some(Key::new()), ..element };
            assert_eq!(element_text(Family::V6, &shorter), "");
        }
    }
}

#[test]
fn the_printed_ruleset_recreates_the_table_in_dependency_order() {
    let base = base(Family::V6);
    let key = |number| Key::new().number(Number(number));
    let choice = |number| Element {
        set: SetName::InternalChoice,
        key: key(number),
        key_end: None,
        value: Value::Verdict(Verdict::Drop),
    };
    let mut text = String::new();
    print_with_flowtable(&mut text, &base, None, Chain::FIXED, (1..=2_001).map(choice)).unwrap();
    assert!(
        text.starts_with("table ip6 keelson {}\ndelete table ip6 keelson\ntable ip6 keelson {\n"),
        "{text}"
    );
    assert!(text.contains("\tset service-cidrs {\n\t\ttype ipv6_addr\n\t\tflags interval\n\t}\n"), "{text}");
    let affinity = "\tmap affinity-0 {\n\t\ttype ipv6_addr . classid : classid\n\t\tsize 131072\n\t\tflags dynamic,timeout\n\t}\n";
    assert!(text.contains(affinity), "{text}");
    let slots = "\tmap slots {\n\t\ttypeof meta priority . numgen random mod 2 : ip6 daddr . th dport\n\t}\n";
    assert!(text.contains(slots), "{text}");
    let forward = "\tchain filter-forward {\n\t\ttype filter hook forward priority filter; policy accept;\n\t\tct state new ct status ! dnat jump";
    assert!(text.contains(forward), "{text}");
    assert_eq!(text.matches("add element ip6 keelson internal-choice {").count(), 3, "1,000 in one command");
    assert!(text.ends_with("add element ip6 keelson internal-choice {\n\t0:7d1 : drop\n}\n"), "{text}");
}

/// Only base chains have hooks, and text and numbers match.
#[test]
fn hooks() {
    let names = [(0, "prerouting"), (1, "input"), (2, "forward"), (3, "output"), (4, "postrouting")];
    let hooked: Vec<Hook> = Chain::FIXED.into_iter().filter_map(hook).collect();
    assert_eq!(hooked.len(), 8);
    for hook in hooked {
        let (_, name) = names[hook.hook as usize];
        let priority = match hook.priority {
            -101 if name == "prerouting" => "dstnat - 1".to_owned(),
            -110 if name == "prerouting" => "dstnat - 10".to_owned(),
            99 => "srcnat - 1".to_owned(),
            0 => "filter".to_owned(),
            other => other.to_string(),
        };
        assert_eq!(hook.text, format!("type {} hook {name} priority {priority}; policy accept;", hook.kind));
    }
}

#[test]
fn a_flowtable_without_devices_has_no_list_of_them() {
    let text = |devices: &[&str]| flowtable_text(&devices.iter().map(|name| (*name).to_owned()).collect());
    assert_eq!(
        text(&[]),
        "\tflowtable service-flows {\n\t\thook ingress priority filter\n\t\tcounter\n\t}\n"
    );
    assert!(text(&["b", "a"]).contains("\n\t\tdevices = { \"a\", \"b\" }\n"));
}

#[test]
fn where_pods_are_not_tracked_their_translated_flows_are_masqueraded() {
    let untracked = |family| Base { untracked_pods: true, ..base(family) };
    assert_chain(
        &untracked(Family::V4),
        Chain::RawPrerouting,
        "ip saddr 10.244.0.0/16 ip daddr 10.244.0.0/16 meta l4proto tcp fib daddr type != local notrack
         ip saddr 10.244.0.0/16 ip daddr 10.244.0.0/16 meta l4proto udp fib daddr type != local notrack",
    );
    assert_chain(
        &untracked(Family::V6),
        Chain::NatPostrouting,
        "ct status dnat meta priority & c000:0 != none meta priority set none
         meta mark & 0x00004000 == 0x00004000 meta mark set meta mark ^ 0x00004000 masquerade fully-random
         ct status dnat ip6 saddr fd00:10:244::/56 ip6 daddr fd00:10:244::/56 meta l4proto tcp masquerade fully-random
         ct status dnat ip6 saddr fd00:10:244::/56 ip6 daddr fd00:10:244::/56 meta l4proto udp masquerade fully-random
         ct status dnat ip6 saddr . ip6 daddr . meta l4proto . th dport @hairpin masquerade fully-random",
    );
    // Pods that are not known by a network of their own are tracked, all of them.
    for detector in [
        None,
        Some(Detector::Bridge("cbr0".into())),
        Some(Detector::InterfacePrefix("veth".into())),
        Some(Detector::Cidr("0.0.0.0/0".parse().unwrap())),
        Some(Detector::Cidr("fd00:10:244::/56".parse().unwrap())),
    ] {
        let base = Base { detector, ..untracked(Family::V4) };
        assert_eq!(rules(&base, Chain::RawPrerouting), []);
        let tracked = Base { untracked_pods: false, ..base.clone() };
        assert_eq!(rules(&base, Chain::NatPostrouting), rules(&tracked, Chain::NatPostrouting));
    }
}
