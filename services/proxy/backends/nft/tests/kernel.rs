//! The netlink side of the nftables backend with the real kernel, as root, in network namespaces of the tests' own.
//!
//! A namespace belongs to the thread of its test, and ends with it in any case.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../../../src/testing.rs"]
mod testing;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    process::Command,
    thread,
};

use keelson_proxy::{
    model::{Endpoint, Family, Protocol},
    options::Detector,
};
use keelson_proxy_nft::{
    chain::{Chain, Choice, PrefixLengths},
    element::{Element, Key, Number, Op, SetName, Value, Verdict},
    kernel::{Change, Elements, ErrorKind, Found, KernelError, Netlink},
    ruleset::{Base, NodePortMatch, rules},
};
use nix::errno::Errno;

use testing::in_namespace;

/// Runs `nft` in the namespace of the thread.
fn nft(command: &str) -> String {
    let output = Command::new("nft").arg(command).output().expect("nft is installed");
    assert!(output.status.success(), "nft {command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn base(family: Family) -> Base {
    Base {
        family,
        masquerade_all: false,
        mark: 0x4000,
        detector: Some(Detector::Cidr(match family {
            Family::V4 => "10.244.0.0/16".parse().expect("a network"),
            Family::V6 => "fd00:10:244::/57".parse().expect("a network"),
        })),
        node_ports: NodePortMatch::Addresses,
        untracked_pods: false,
    }
}

fn sources() -> Chain {
    Chain::Sources { protocol: Protocol::Tcp, lengths: PrefixLengths::new([8, 24]) }
}

/// Counted chains of every kind; those that others refer to come first.
fn counted() -> Vec<Chain> {
    [Choice::Cluster, Choice::Local]
        .into_iter()
        .flat_map(|choice| {
            let affinity = Chain::Affinity { choice, count: 3, seconds: 10_800, group: 0 };
            let mut chains = affinity.companions();
            chains.extend([affinity, Chain::LoadBalance { choice, count: 2 }]);
            chains
        })
        .chain([sources()])
        .collect()
}

fn all_chains() -> Vec<Chain> {
    Chain::FIXED.into_iter().chain(counted()).collect()
}

/// The whole table without elements.
fn structure(family: Family) -> Vec<Change> {
    let mut changes = vec![Change::MakeTable];
    changes.extend(SetName::ALL.map(Change::MakeSet));
    changes.extend(all_chains().into_iter().map(Change::MakeChain));
    changes.extend(all_chains().into_iter().map(|chain| Change::Rules(chain, rules(&base(family), chain))));
    changes
}

fn address(family: Family, last: u8) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)),
        Family::V6 => IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, u16::from(last))),
    }
}

/// Elements of every set that we write.
fn every_kind(family: Family) -> Vec<Element> {
    let ip = |last| address(family, last);
    let number = |value| Key::new().number(Number(value));
    let v = |last, protocol, port| Key::new().ip(ip(last)).protocol(protocol).port(port);
    let slot = |value, index| number(value).index(index);
    let endpoint = Key::new().endpoint(Endpoint { ip: ip(77), port: 8080 });
    let data = |set, key, value| Element { set, key, key_end: None, value: Value::Data(value) };
    let verdict = |set, key, verdict| Element { set, key, key_end: None, value: Value::Verdict(verdict) };
    let member = |set, key| Element { set, key, key_end: None, value: Value::None };
    let goto = Verdict::Goto;
    let load_balance = Chain::LoadBalance { choice: Choice::Cluster, count: 2 };
    let local_affinity = Chain::Affinity { choice: Choice::Local, count: 3, seconds: 10_800, group: 0 };
    vec![
        data(SetName::ClusterIpPorts, v(1, Protocol::Tcp, 80), number(7)),
        data(SetName::ClusterIpPorts, v(1, Protocol::Udp, 80), number(8)),
        data(SetName::ClusterIpPorts, v(1, Protocol::Sctp, 80), number(0x8001_0000)),
        data(SetName::ExternalPorts, v(2, Protocol::Tcp, 443), number(7)),
        data(SetName::NodePorts, Key::new().protocol(Protocol::Tcp).port(30080), number(7)),
        member(SetName::NodePortAddresses, Key::new().ip(ip(200))),
        verdict(SetName::Counts, number(0x4020_0000), goto(load_balance)),
        verdict(SetName::InternalChoice, number(7), goto(load_balance)),
        verdict(SetName::InternalChoice, number(0x8001_0000), goto(local_affinity)),
        verdict(SetName::ExternalPolicy, number(7), goto(Chain::ExternalLocal)),
        verdict(SetName::ExternalChoice, number(7), goto(load_balance)),
        verdict(SetName::LocalChoice, number(7), Verdict::Drop),
        data(SetName::Slots, slot(7, 0), endpoint),
        data(SetName::Slots, slot(7, 1), Key::new().endpoint(Endpoint { ip: ip(78), port: 8080 })),
        data(SetName::LocalSlots, slot(7, 0), endpoint),
        data(SetName::AffinitySlots, slot(0x8001_0000, 0), number(0x8001_0001)),
        data(SetName::LocalAffinitySlots, slot(0x8001_0000, 0), number(0x8001_0001)),
        data(SetName::AffinityEndpoints, number(0x8001_0001), endpoint),
        data(SetName::LocalAffinityEndpoints, number(0x8001_0001), endpoint),
        member(SetName::Hairpin, Key::new().ip(ip(77)).ip(ip(77)).protocol(Protocol::Tcp).port(8080)),
        member(SetName::ClusterIps, Key::new().ip(ip(1))),
        verdict(SetName::Refused, v(3, Protocol::Tcp, 1), goto(Chain::Reject)),
        verdict(SetName::Refused, v(3, Protocol::Udp, 1), Verdict::Drop),
        verdict(
            SetName::RefusedNodePorts,
            Key::new().protocol(Protocol::Udp).port(30081),
            goto(Chain::Reject),
        ),
        verdict(SetName::Filtered, v(9, Protocol::Tcp, 443), goto(sources())),
        member(SetName::SourceRanges, Key::new().ip(ip(9)).port(443).ip(ip(0)).index(0x618)),
        member(SetName::SourceRanges, Key::new().ip(ip(9)).port(443).ip(ip(64)).index(0x680)),
    ]
    .into_iter()
    .chain(cidrs(family))
    .collect()
}

/// Networks: a single one, two adjacent ones, and one that ends with the highest address.
fn cidrs(family: Family) -> Vec<Element> {
    let networks: [(&str, &str); 4] = match family {
        Family::V4 => [
            ("10.96.0.0", "10.111.255.255"),
            ("172.16.0.0", "172.16.0.255"),
            ("172.16.1.0", "172.16.1.255"),
            ("240.0.0.0", "255.255.255.255"),
        ],
        Family::V6 => [
            ("fd00:10:96::", "fd00:10:96::ffff"),
            ("fd01::", "fd01::ff"),
            ("fd01::100", "fd01::1ff"),
            ("ff00::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
        ],
    };
    let key = |text: &str| Key::new().ip(text.parse().expect("an address"));
    networks
        .iter()
        .map(|(first, last)| Element {
            set: SetName::ServiceCidrs,
            key: key(first),
            key_end: Some(key(last)),
            value: Value::None,
        })
        .collect()
}

fn added(elements: &[Element]) -> Vec<Change> {
    elements.iter().map(|element| Change::Element(Op::Add(*element))).collect()
}

fn as_found(elements: &[Element]) -> Elements {
    elements.iter().map(|element| ((element.set, element.key), (element.key_end, element.value))).collect()
}

fn full_table(family: Family) -> (Netlink, Vec<Element>) {
    let mut netlink = Netlink::open().expect("a socket");
    let elements = every_kind(family);
    let mut changes = structure(family);
    changes.extend(added(&elements));
    netlink.commit(family, &changes).expect("committed");
    (netlink, elements)
}

fn found(netlink: &mut Netlink, family: Family) -> Found {
    netlink.read(family).expect("read").expect("a table")
}

/// Everything that differs from what we would create.
fn differences(found: &Found, family: Family) -> Vec<String> {
    let mut wrong: Vec<String> = SetName::ALL
        .into_iter()
        .filter(|set| !found.set_is(family, *set))
        .map(|set| set.to_string())
        .collect();
    let chain_is = |chain: &Chain| found.chain_is(family, *chain, &rules(&base(family), *chain));
    wrong.extend(all_chains().iter().filter(|chain| !chain_is(chain)).map(ToString::to_string));
    wrong.extend(found.unknown_chains().map(ToOwned::to_owned));
    wrong.extend(found.unknown_sets().map(ToOwned::to_owned));
    wrong
}

#[test]
fn tables_survive_a_round_trip() {
    for family in Family::ALL {
        in_namespace(move || {
            let mut netlink = Netlink::open().expect("a socket");
            assert_eq!(netlink.read(family).expect("read"), None, "no table yet");
            let (mut netlink, elements) = full_table(family);
            let mut found = found(&mut netlink, family);
            assert_eq!(differences(&found, family), Vec::<String>::new());
            let mut chains: Vec<Chain> = found.chains().collect();
            chains.sort_unstable();
            let mut expected = all_chains();
            expected.sort_unstable();
            assert_eq!(chains, expected);
            let read = found.take_elements();
            for (key, value) in &as_found(&elements) {
                assert_eq!(read.get(key), Some(value), "{key:?}");
            }
            assert_eq!(read.len(), elements.len());
        });
    }
}

/// The rest of the key is the number.
fn slot(family: Family, number: u32, index: u32, last: u8) -> Element {
    Element {
        set: SetName::Slots,
        key: Key::new().number(Number(number)).index(index),
        key_end: None,
        value: Value::Data(Key::new().endpoint(Endpoint { ip: address(family, last), port: 8080 })),
    }
}

fn assert_elements(netlink: &mut Netlink, family: Family, expected: &[Element]) {
    let read = found(netlink, family).take_elements();
    let expected = as_found(expected);
    let mut differ: Vec<_> =
        expected.iter().filter(|(key, value)| read.get(key) != Some(value)).map(|(key, _)| *key).collect();
    differ.extend(read.keys().filter(|key| !expected.contains_key(key)));
    assert!(differ.is_empty(), "{differ:?}");
}

#[test]
fn every_element_can_be_deleted_and_restored() {
    for family in Family::ALL {
        in_namespace(move || {
            let (mut netlink, elements) = full_table(family);
            // One by one, so that neighbours stay; then all of them.
            for (place, element) in elements.iter().enumerate() {
                netlink.commit(family, &[Change::Element(Op::Delete(*element))]).expect("deleted");
                let mut rest = elements.clone();
                rest.remove(place);
                assert_elements(&mut netlink, family, &rest);
                netlink.commit(family, &[Change::Element(Op::Add(*element))]).expect("added");
            }
            let deletes: Vec<Change> =
                elements.iter().map(|element| Change::Element(Op::Delete(*element))).collect();
            netlink.commit(family, &deletes).expect("deleted");
            assert_elements(&mut netlink, family, &[]);
            netlink.commit(family, &added(&elements)).expect("added");
            assert_elements(&mut netlink, family, &elements);
        });
    }
}

#[test]
fn elements_are_replaced_in_one_transaction() {
    for family in Family::ALL {
        in_namespace(move || {
            let (mut netlink, mut elements) = full_table(family);
            elements.retain(|element| element.set != SetName::Slots);
            let (old, new) = (slot(family, 7, 0, 77), slot(family, 7, 0, 99));
            let before = netlink.generation().expect("a generation").id;
            netlink
                .commit(
                    family,
                    &[
                        Change::Element(Op::Replace(old, new)),
                        // An element that was added in the same transaction can be replaced and deleted again.
                        Change::Element(Op::Replace(slot(family, 7, 1, 78), slot(family, 7, 1, 100))),
                        Change::Element(Op::Replace(slot(family, 7, 1, 100), slot(family, 7, 1, 101))),
                        Change::Element(Op::Add(slot(family, 7, 2, 102))),
                        Change::Element(Op::Delete(slot(family, 7, 2, 102))),
                    ],
                )
                .expect("replaced");
            assert_eq!(netlink.generation().expect("a generation").id, before + 1, "one transaction");
            elements.extend([new, slot(family, 7, 1, 101)]);
            assert_elements(&mut netlink, family, &elements);
        });
    }
}

#[test]
fn a_refused_change_is_named_and_rolled_back() {
    in_namespace(|| {
        let family = Family::V4;
        let (mut netlink, elements) = full_table(family);
        let generation = netlink.generation().expect("a generation");
        let mut changes: Vec<Change> =
            (0..2000).map(|index| Change::Element(Op::Add(slot(family, 9, index, 5)))).collect();
        changes.insert(0, Change::Rules(Chain::Reject, Vec::new()));
        // This element already exists.
        changes[1500] = Change::Element(Op::Add(slot(family, 7, 1, 5)));
        changes.push(Change::MakeChain(Chain::LoadBalance { choice: Choice::Cluster, count: 9 }));
        let error = netlink.commit(family, &changes).expect_err("refused");
        let KernelError::Refused { index, ref change, errno, .. } = error else { panic!("{error:?}") };
        assert_eq!((index, errno), (1500, Errno::EEXIST), "{error}");
        assert!(change.contains("slots"), "{error}");
        assert_eq!(error.kind(), ErrorKind::Resync);
        // The kernel has applied nothing.
        assert_elements(&mut netlink, family, &elements);
        let found = found(&mut netlink, family);
        assert_eq!(differences(&found, family), Vec::<String>::new());
        assert_eq!(netlink.generation().expect("a generation"), generation);

        let missing = Change::Element(Op::Delete(slot(family, 99, 0, 5)));
        let in_use = Change::DeleteChain(Chain::Reject);
        let overlap = Element {
            set: SetName::ServiceCidrs,
            key: Key::new().ip("10.97.0.0".parse().expect("an address")),
            key_end: Some(Key::new().ip("10.120.0.0".parse().expect("an address"))),
            value: Value::None,
        };
        for (change, errno) in [
            (missing, Errno::ENOENT),
            (in_use, Errno::EBUSY),
            (Change::DeleteSetNamed(SetName::Slots.to_string()), Errno::EBUSY),
            (Change::MakeSet(SetName::Slots), Errno::EEXIST),
            (Change::MakeChain(Chain::Services), Errno::EEXIST),
            (Change::DeleteChainNamed("nobody".to_owned()), Errno::ENOENT),
            (Change::Element(Op::Add(overlap)), Errno::EEXIST),
        ] {
            let error = netlink.commit(family, std::slice::from_ref(&change)).expect_err("refused");
            let KernelError::Refused { errno: message, .. } = error else { panic!("{change:?}: {error:?}") };
            assert_eq!((message, error.kind()), (errno, ErrorKind::Resync), "{change:?}: {error}");
        }
    });
}

#[test]
fn manual_changes_are_detected() {
    for (family, ip) in [(Family::V4, "ip"), (Family::V6, "ip6")] {
        in_namespace(move || {
            let (mut netlink, elements) = full_table(family);
            let mut expect = |command: &str, wrong: &[&str]| {
                nft(&command.replace("TABLE", &format!("{ip} keelson")));
                let found = netlink.read(family).expect("read").expect("a table");
                assert_eq!(differences(&found, family), wrong, "{command}");
            };
            expect("add rule TABLE lb-2 counter", &["lb-2"]);
            expect("flush chain TABLE lb-2", &["lb-2"]);
            expect("insert rule TABLE filter-input accept", &["filter-input", "lb-2"]);
            expect("chain TABLE nat-output { policy drop; }", &["nat-output", "filter-input", "lb-2"]);
            expect("add chain TABLE stranger", &["nat-output", "filter-input", "lb-2", "stranger"]);
            expect(
                "add set TABLE theirs { type mark; }",
                &["nat-output", "filter-input", "lb-2", "stranger", "theirs"],
            );
            let repair = [
                Change::Rules(
                    Chain::LoadBalance { choice: Choice::Cluster, count: 2 },
                    rules(&base(family), Chain::LoadBalance { choice: Choice::Cluster, count: 2 }),
                ),
                Change::Rules(Chain::FilterInput, rules(&base(family), Chain::FilterInput)),
                Change::DeleteChainNamed("stranger".to_owned()),
                Change::DeleteSetNamed("theirs".to_owned()),
            ];
            netlink.commit(family, &repair).expect("repaired");
            nft(&format!("chain {ip} keelson nat-output {{ policy accept; }}"));
            assert_eq!(differences(&found(&mut netlink, family), family), Vec::<String>::new());

            // A set of another kind, and elements that were added, deleted and changed.
            nft(&format!("delete element {ip} keelson cluster-ips {{ {} }}", address(family, 1)));
            nft(&format!("add element {ip} keelson cluster-ips {{ {} }}", address(family, 50)));
            nft(&format!("delete element {ip} keelson node-ports {{ tcp . 30080 }}"));
            nft(&format!("add element {ip} keelson node-ports {{ tcp . 30080 : 3:4 }}"));
            nft(&format!("add element {ip} keelson refused {{ {} . tcp . 9 : accept }}", address(family, 3)));
            let read = found(&mut netlink, family).take_elements();
            let expected = as_found(&elements);
            let node_port = (SetName::NodePorts, Key::new().protocol(Protocol::Tcp).port(30080));
            assert!(!read.contains_key(&(SetName::ClusterIps, Key::new().ip(address(family, 1)))));
            assert!(read.contains_key(&(SetName::ClusterIps, Key::new().ip(address(family, 50)))));
            assert_eq!(read[&node_port].1, Value::Data(Key::new().number(Number(0x3_0004))));
            assert_ne!(read[&node_port], expected[&node_port]);
            let accepted = Key::new().ip(address(family, 3)).protocol(Protocol::Tcp).port(9);
            assert_eq!(read[&(SetName::Refused, accepted)].1, Value::None, "a verdict that is none of ours");
            let foreign = Element { set: SetName::Refused, key: accepted, key_end: None, value: Value::None };
            netlink.commit(family, &[Change::Element(Op::Delete(foreign))]).expect("deleted");

            nft(&format!("add table {ip} keelson {{ flags dormant; }}"));
            let found = found(&mut netlink, family);
            assert!(!found.hook_is(Chain::NatOutput), "nothing of a dormant table is called");
            assert!(found.hook_is(Chain::Services));
        });
    }
}

#[test]
fn sets_of_another_type_are_detected() {
    in_namespace(|| {
        let family = Family::V4;
        nft("add table ip keelson; add set ip keelson cluster-ips { type ipv4_addr; flags timeout; }; \
             add map ip keelson slots { type ipv6_addr : ipv6_addr; elements = { ::1 : ::2 } }; \
             add set ip keelson service-cidrs { type ipv4_addr; flags interval; elements = { 10.0.0.0/24, 10.0.1.0/24 } }; \
             add set ip keelson filtered { type ipv6_addr . ipv6_addr . ipv6_addr; elements = { ::1 . ::1 . ::1 } }");
        let mut netlink = Netlink::open().expect("a socket");
        let found = found(&mut netlink, family);
        assert!(!found.set_is(family, SetName::ClusterIps));
        assert!(!found.set_is(family, SetName::Slots));
        assert!(!found.set_is(family, SetName::Filtered));
        assert!(!found.has_set(SetName::Refused) && !found.set_is(family, SetName::Refused));
        // nft may omit the end of an interval if the next one begins there.
        let cidr = |first: &str, last: &str| {
            let key = |text: &str| Key::new().ip(text.parse().expect("an address"));
            found.elements().get(&(SetName::ServiceCidrs, key(first)))
                == Some(&(Some(key(last)), Value::None))
        };
        assert!(cidr("10.0.0.0", "10.0.0.255") && cidr("10.0.1.0", "10.0.1.255"), "{:?}", found.elements());
    });
}

#[test]
fn foreign_tables_are_listed_and_not_changed() {
    in_namespace(|| {
        nft(
            "add table ip kube-proxy; add chain ip kube-proxy cluster-ips; add table ip6 kube-proxy; add table inet other; \
             add set ip kube-proxy slots { type ipv4_addr; elements = { 10.0.0.1 } }",
        );
        let before = nft("list ruleset");
        let mut netlink = Netlink::open().expect("a socket");
        for family in Family::ALL {
            assert_eq!(netlink.read(family).expect("read"), None);
            let (mut other, _) = full_table(family);
            assert_eq!(differences(&found(&mut other, family), family), Vec::<String>::new());
        }
        let mut tables = netlink.tables().expect("tables");
        tables.sort_unstable();
        let names: Vec<String> = tables.iter().map(|(family, name)| format!("{family} {name}")).collect();
        assert_eq!(names, ["IPv4 keelson", "IPv4 kube-proxy", "IPv6 keelson", "IPv6 kube-proxy"]);
        for family in Family::ALL {
            netlink.commit(family, &[Change::DeleteTable]).expect("deleted");
        }
        assert_eq!(nft("list ruleset"), before);
        netlink.delete_table(Family::V4, "kube-proxy").expect("deleted");
        assert_eq!(nft("list tables ip"), "");
        assert_eq!(nft("list tables ip6"), "table ip6 kube-proxy\n");
        let error = netlink.delete_table(Family::V4, "kube-proxy").expect_err("gone");
        assert_eq!(error.kind(), ErrorKind::Resync, "{error}");
        assert!(error.to_string().contains("kube-proxy"), "{error}");
    });
}

#[test]
fn a_transaction_of_120_000_elements() {
    in_namespace(|| {
        // The family with the larger messages.
        let family = Family::V6;
        let mut netlink = Netlink::open().expect("a socket");
        let elements: Vec<Element> =
            (0..120_000).map(|index| slot(family, 1 + index / 10, index % 10, (index % 200) as u8)).collect();
        let mut changes = structure(family);
        changes.extend(added(&elements));
        let before = netlink.generation().expect("a generation").id;
        netlink.commit(family, &changes).expect("committed");
        assert_eq!(netlink.generation().expect("a generation").id, before + 1);
        assert_elements(&mut netlink, family, &elements);
        assert_eq!(found(&mut netlink, family).set(SetName::Slots).map(|set| set.count), Some(120_000));
        let other = Endpoint { ip: address(family, 201), port: 9090 };
        let value = Value::Data(Key::new().endpoint(other));
        let replaced: Vec<Change> = elements
            .iter()
            .map(|old| Change::Element(Op::Replace(*old, Element { value, ..*old })))
            .collect();
        netlink.commit(family, &replaced).expect("replaced");
        assert_eq!(found(&mut netlink, family).elements().len(), 120_000);
    });
}

#[test]
fn every_message_that_fails_of_a_large_transaction_is_answered() {
    in_namespace(|| {
        let family = Family::V4;
        let (mut netlink, _) = full_table(family);
        // Each change is a message, and each is rejected.
        let changes = vec![Change::MakeSet(SetName::Slots); 20_000];
        let error = netlink.commit(family, &changes).expect_err("refused");
        assert!(matches!(error, KernelError::Refused { index: 0, .. }), "{error}");
        // No answers are left over for the next request.
        netlink.generation().expect("a generation");
        netlink.commit(family, &[Change::MakeTable]).expect("committed");
    });
}

#[test]
fn two_writers_detect_each_other() {
    in_namespace(|| {
        let family = Family::V4;
        let (mut one, mut elements) = full_table(family);
        let mut other = Netlink::open().expect("a socket");
        let before = one.generation().expect("a generation").id;
        let mine = slot(family, 11, 0, 1);
        other.commit(family, &[Change::Element(Op::Add(mine))]).expect("added");
        assert_eq!(one.generation().expect("a generation").id, before + 1, "another program has committed");
        let error = one.commit(family, &[Change::Element(Op::Add(mine))]).expect_err("it is there");
        assert_eq!(error.kind(), ErrorKind::Resync, "{error}");
        elements.push(mine);

        // One reads while the other writes: every read is of one generation, with both elements of a pair or none.
        let writer = thread::spawn(move || {
            for round in 0..200 {
                let pair = [slot(family, 12, 0, 1), slot(family, 12, 1, 1)];
                let changes: Vec<Change> = match round % 2 {
                    0 => pair.into_iter().map(|slot| Change::Element(Op::Add(slot))).collect(),
                    _ => pair.into_iter().map(|slot| Change::Element(Op::Delete(slot))).collect(),
                };
                other.commit(family, &changes).expect("committed");
            }
        });
        let mut reads = 0;
        while !writer.is_finished() || reads == 0 {
            match one.read(family) {
                Ok(found) => {
                    reads += 1;
                    let read = found.expect("a table").take_elements();
                    let half = |index| read.contains_key(&(SetName::Slots, slot(family, 12, index, 1).key));
                    assert_eq!(half(0), half(1));
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::Retry, "{error}"),
            }
        }
        writer.join().expect("the writer");
        assert_elements(&mut one, family, &elements);
    });
}

#[test]
fn a_growing_table_is_read_completely() {
    in_namespace(|| {
        let family = Family::V6;
        let (mut netlink, _) = full_table(family);
        // The kernel enlarges its hash tables after the transaction, during the read.
        for round in 0..30 {
            let elements: Vec<Element> =
                (0..4096).map(|index| slot(family, 1000 + round, index, 1)).collect();
            netlink.commit(family, &added(&elements)).expect("committed");
            let read = found(&mut netlink, family);
            let missed =
                elements.iter().filter(|element| !read.elements().contains_key(&(element.set, element.key)));
            assert_eq!(missed.count(), 0, "round {round}");
            let deletes: Vec<Change> =
                elements.iter().map(|element| Change::Element(Op::Delete(*element))).collect();
            netlink.commit(family, &deletes).expect("deleted");
        }
    });
}

#[test]
fn without_cap_net_admin_the_error_names_the_capability() {
    let this = std::env::current_exe().expect("the test's own path");
    let output = Command::new("setpriv")
        .args(["--bounding-set=-net_admin", "--inh-caps=-net_admin", "--"])
        .arg("unshare")
        .arg("--net")
        .arg(this)
        .args(["--ignored", "--exact", "child_without_cap_net_admin", "--nocapture"])
        .output()
        .expect("setpriv (util-linux) is installed");
    let message = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && message.contains("1 passed"),
        "{message}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Run by the test above, without the capability.
#[test]
#[ignore = "is a part of without_cap_net_admin_the_error_names_the_capability"]
fn child_without_cap_net_admin() {
    let error = Netlink::open().expect_err("no capability");
    assert_eq!(error, KernelError::NotPermitted);
    assert_eq!(error.kind(), ErrorKind::Fatal);
    assert!(error.to_string().contains("CAP_NET_ADMIN"), "{error}");
}
