//! The rules sent to the kernel are those that nft makes of their text: both are loaded, each into a network namespace
//! of its own, and nft has to list the same for both, expressions included. Needs root and nft.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../../../src/testing.rs"]
mod testing;

use std::{
    io::Write,
    net::IpAddr,
    process::{Command, Stdio},
};

use keelson_proxy::{
    model::{Endpoint, Family, Protocol},
    options::Detector,
};
use keelson_proxy_nft::{
    chain::{Chain, Choice, PrefixLengths},
    element::{Element, Key, Number, SetName, Value, Verdict},
    ruleset::{self, Base, NodePortMatch, Rule, SetData, SetDefinition, definition},
};
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
    nftables::{
        ChainAttribute, ChainMessage, DataAttribute, Hook, HookNumber, InetHookNumber, ListAttribute,
        NfTablesMessage, RuleAttribute, RuleMessage, SetAttribute, SetDescription, SetElementAttribute,
        SetElementFlags, SetElementList, SetElementMessage, SetFlags, SetMessage, TableAttribute,
        TableMessage, VerdictAttribute,
    },
    none::ControlMessage,
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use testing::in_namespace;

/// Output of nft in the namespace of the thread.
fn nft(arguments: &[&str], input: &str) -> String {
    let mut child = Command::new("nft")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("nft is not installed");
    // nft reads all input before it writes.
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "nft {arguments:?}: {}: {errors}\n{input}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Whether nft can read the affinity chains of IPv6.
fn nft_reads_large_keys() -> bool {
    let version = nft(&["--version"], "");
    let version: Vec<u32> = version
        .split_whitespace()
        .find_map(|word| word.strip_prefix('v'))
        .unwrap_or_else(|| panic!("the version of nft: {version}"))
        .split('.')
        .map(|part| part.parse().unwrap())
        .collect();
    version >= vec![1, 0, 7]
}

/// nft's listing of the table, expressions included, without what depends on the order of events.
fn listed(family: Family) -> Vec<String> {
    let listing = nft(&["--debug=netlink", "list", "table", keyword(family), "keelson"], "");
    let words = family.address_len() / 4;
    let mut lines = Vec::new();
    let mut elements = Vec::new();
    for line in listing.lines() {
        if let Some(element) = line.strip_prefix("\telement ") {
            // nft adds an interval end at the lowest address, which the kernel lists.
            let is_lowest_end =
                element.ends_with(" : 1 [end]") && element.starts_with(&"00000000 ".repeat(words));
            if !is_lowest_end {
                elements.push(line.to_owned());
            }
            continue;
        }
        // The kernel lists elements in any order.
        elements.sort();
        lines.append(&mut elements);
        // nft sends this for one byte, where it has no effect.
        if line.contains("[ byteorder ") {
            assert!(line.ends_with(", 2, 1) ]"), "{line}");
            continue;
        }
        // Strip the handles of rules.
        let head = line.trim_end_matches(|c: char| c.is_ascii_digit() || c == ' ');
        let is_head = line.starts_with(&format!("{} keelson ", keyword(family)));
        lines.push(if is_head { head } else { line }.to_owned());
    }
    assert!(lines.len() > 100, "{lines:#?}");
    lines
}

fn keyword(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}

/// Sends messages for tables, as one transaction or as a request.
struct Netlink {
    socket: Socket,
    family: Family,
    bytes: Vec<u8>,
    sequence: u32,
}

impl Netlink {
    fn new(family: Family) -> Self {
        let mut socket = Socket::new(NETLINK_NETFILTER).unwrap();
        socket.bind_auto().unwrap();
        socket.connect(&SocketAddr::new(0, 0)).unwrap();
        Self { socket, family, bytes: Vec::new(), sequence: 0 }
    }

    fn header(&self) -> NetfilterHeader {
        let family = match self.family {
            Family::V4 => NetfilterProtoFamily::IPv4,
            Family::V6 => NetfilterProtoFamily::IPv6,
        };
        NetfilterHeader::new(family, 0, 0)
    }

    fn push(&mut self, flags: u16, header: NetfilterHeader, message: impl Into<NetfilterMessageInner>) {
        self.sequence += 1;
        let mut netlink = NetlinkHeader::default();
        netlink.flags = NLM_F_REQUEST | flags;
        netlink.sequence_number = self.sequence;
        let mut message =
            NetlinkMessage::new(netlink, NetlinkPayload::from(NetfilterMessage::new(header, message)));
        message.finalize();
        let start = self.bytes.len();
        self.bytes.resize(start + message.buffer_len(), 0);
        message.serialize(&mut self.bytes[start..]);
    }

    fn commit(mut self, messages: Vec<NfTablesMessage>) {
        // Only this message names the subsystem, nftables.
        let control = NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, 10);
        self.push(0, control.clone(), ControlMessage::BatchBegin);
        let last = messages.len() - 1;
        let described: Vec<String> = messages.iter().map(|message| format!("{message:#?}")).collect();
        for (index, message) in messages.into_iter().enumerate() {
            let ack = if index == last { NLM_F_ACK } else { 0 };
            self.push(NLM_F_CREATE | NLM_F_APPEND | ack, self.header(), message);
        }
        self.push(0, control, ControlMessage::BatchEnd);
        self.socket.send(&self.bytes, 0).unwrap();
        let (answer, _) = self.socket.recv_from_full().unwrap();
        let answer = NetlinkMessage::<NetfilterMessage>::deserialize(&answer).unwrap();
        let NetlinkPayload::Error(error) = answer.payload else { panic!("{answer:?}") };
        // The first message is the beginning of the batch.
        let of = described.get(answer.header.sequence_number as usize - 2);
        assert!(error.code.is_none(), "{}: {}", error.to_io(), of.unwrap());
        assert_eq!(answer.header.sequence_number as usize, last + 2);
    }

    fn sets(mut self) -> Vec<Vec<SetAttribute>> {
        let table = vec![SetAttribute::Table(ruleset::TABLE.to_owned())];
        self.push(NLM_F_DUMP, self.header(), NfTablesMessage::GetSet(SetMessage { attributes: table }));
        self.socket.send(&self.bytes, 0).unwrap();
        let mut sets = Vec::new();
        loop {
            let (bytes, _) = self.socket.recv_from_full().unwrap();
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let message = NetlinkMessage::<NetfilterMessage>::deserialize(rest).unwrap();
                rest = &rest[(message.header.length as usize).next_multiple_of(4).min(rest.len())..];
                match message.payload {
                    NetlinkPayload::Done(_) => return sets,
                    NetlinkPayload::InnerMessage(NetfilterMessage {
                        inner: NetfilterMessageInner::NfTables(NfTablesMessage::NewSet(set)),
                        ..
                    }) => sets.push(set.attributes),
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

/// The attributes of a set that matter to the kernel.
fn essence(attributes: &[SetAttribute]) -> Vec<&SetAttribute> {
    let matters = |attribute: &&SetAttribute| {
        matches!(
            attribute,
            SetAttribute::Name(_)
                | SetAttribute::Flags(_)
                | SetAttribute::KeyLen(_)
                | SetAttribute::DataLen(_)
                | SetAttribute::Description(_)
        ) || matches!(attribute, SetAttribute::DataType(0xffff_ff00))
    };
    attributes.iter().filter(matters).collect()
}

fn messages(base: &Base, chains: &[Chain], elements: &[Element]) -> Vec<NfTablesMessage> {
    let table = || ruleset::TABLE.to_owned();
    let mut messages =
        vec![NfTablesMessage::NewTable(TableMessage { attributes: vec![TableAttribute::Name(table())] })];
    for (set, id) in SetName::ALL.into_iter().zip(1..) {
        let mut attributes =
            vec![SetAttribute::Table(table()), SetAttribute::Name(set.to_string()), SetAttribute::Id(id)];
        attributes.extend(definition(base.family, set).attributes());
        messages.push(NfTablesMessage::NewSet(SetMessage { attributes }));
    }
    for chain in chains {
        let mut attributes = vec![ChainAttribute::Table(table()), ChainAttribute::Name(chain.to_string())];
        if let Some(hook) = ruleset::hook(*chain) {
            attributes.push(ChainAttribute::Hook(vec![
                Hook::Number(HookNumber::Inet(InetHookNumber::from(hook.hook))),
                Hook::Priority(hook.priority as u32),
            ]));
            attributes.push(ChainAttribute::Policy(1));
            attributes.push(ChainAttribute::Type(hook.kind.to_owned()));
        }
        messages.push(NfTablesMessage::NewChain(ChainMessage { attributes }));
    }
    for chain in chains {
        for rule in ruleset::rules(base, *chain) {
            messages.push(NfTablesMessage::NewRule(RuleMessage {
                attributes: vec![
                    RuleAttribute::Table(table()),
                    RuleAttribute::Chain(chain.to_string()),
                    RuleAttribute::Expressions(rule.expressions(base.family)),
                ],
            }));
        }
    }
    messages.extend(elements.iter().map(|element| {
        NfTablesMessage::NewSetElement(SetElementMessage {
            attributes: vec![
                SetElementList::Table(table()),
                SetElementList::Set(element.set.to_string()),
                SetElementList::Elements(element_messages(base.family, element)),
            ],
        })
    }));
    messages
}

/// As documented at [`SetDefinition`].
fn element_messages(family: Family, element: &Element) -> Vec<ListAttribute<SetElementAttribute>> {
    let SetDefinition { data, .. } = definition(family, element.set);
    let mut attributes =
        vec![SetElementAttribute::Key(DataAttribute::Value(element.key.as_slice().to_vec()))];
    match element.value {
        Value::None => assert_eq!(data, None),
        Value::Data(bytes) => {
            let SetData::Data { len, .. } = data.unwrap() else { panic!("{element:?}") };
            assert_eq!(bytes.as_slice().len(), len as usize);
            attributes.push(SetElementAttribute::Data(DataAttribute::Value(bytes.as_slice().to_vec())));
        }
        Value::Verdict(verdict) => {
            use netlink_packet_netfilter::nftables::Verdict as Code;
            assert_eq!(data, Some(SetData::Verdict));
            let verdict = match verdict {
                Verdict::Drop => vec![VerdictAttribute::Code(Code::Other(0))],
                Verdict::Goto(chain) => {
                    vec![VerdictAttribute::Code(Code::Goto), VerdictAttribute::Chain(chain.to_string())]
                }
            };
            attributes.push(SetElementAttribute::Data(DataAttribute::Verdict(verdict)));
        }
    }
    let mut list = vec![ListAttribute::Element(attributes)];
    if let Some(end) = element.key_end {
        let bits = end.as_slice().iter().fold(0_u128, |bits, byte| bits << 8 | u128::from(*byte)) + 1;
        let after = bits.to_be_bytes()[16 - end.as_slice().len()..].to_vec();
        list.push(ListAttribute::Element(vec![
            SetElementAttribute::Key(DataAttribute::Value(after)),
            SetElementAttribute::Flags(SetElementFlags::IntervalEnd),
        ]));
    }
    list
}

fn ip(family: Family, last: u8) -> IpAddr {
    match family {
        Family::V4 => format!("10.96.0.{last}"),
        Family::V6 => format!("fd00:10:96::{last:x}"),
    }
    .parse()
    .unwrap()
}

const AFFINITY: Chain = Chain::Affinity { choice: Choice::Cluster, count: 2, seconds: 10_800, group: 6 };
const LOAD_BALANCE: Chain = Chain::LoadBalance { choice: Choice::Cluster, count: 2 };
const LOCAL_LOAD_BALANCE: Chain = Chain::LoadBalance { choice: Choice::Local, count: 70_000 };

/// Whole bytes and parts of them, full addresses of either family, and of IPv6 only.
fn sources() -> [Chain; 2] {
    [[8, 27, 32, 128], [1, 24, 64, 127]]
        .map(|lengths| Chain::Sources { protocol: Protocol::Tcp, lengths: PrefixLengths::new(lengths) })
}

/// All kinds of chains, in order of creation.
fn chains() -> Vec<Chain> {
    let mut chains = Chain::FIXED.to_vec();
    let single = Chain::LoadBalance { choice: Choice::Cluster, count: 1 };
    chains.extend([single, LOAD_BALANCE, LOCAL_LOAD_BALANCE, Chain::RawPrerouting]);
    chains.extend(sources());
    for affinity in [AFFINITY, Chain::Affinity { choice: Choice::Local, count: 1, seconds: 1, group: 6 }] {
        chains.extend(affinity.companions());
        chains.push(affinity);
    }
    chains
}

fn is_affinity(chain: &Chain) -> bool {
    matches!(chain, Chain::Affinity { .. } | Chain::AffinityKept { .. } | Chain::AffinityNew { .. })
}

/// Some elements of every set.
fn elements(family: Family) -> Vec<Element> {
    let plain = Number(7);
    let counted = plain.with_count(Choice::Cluster, 2);
    let sticky = Number(0x8001_0000);
    let sticky_endpoint = Number(0x8001_0001);
    let endpoint = Endpoint { ip: ip(family, 200), port: 8080 };
    let key = Key::new();
    let number = |number| Value::Data(Key::new().number(number));
    let to = Value::Data(Key::new().endpoint(endpoint));
    let verdict = |chain| Value::Verdict(Verdict::Goto(chain));
    let frontend = |last, protocol, port| key.ip(ip(family, last)).protocol(protocol).port(port);
    let element = |set, key, value| Element { set, key, key_end: None, value };
    let mut elements = vec![
        element(SetName::ClusterIpPorts, frontend(1, Protocol::Tcp, 80), number(plain)),
        element(SetName::ClusterIpPorts, frontend(1, Protocol::Udp, 53), number(sticky)),
        element(SetName::ExternalPorts, frontend(2, Protocol::Sctp, 65_535), number(plain)),
        element(SetName::NodePorts, key.protocol(Protocol::Tcp).port(30_080), number(plain)),
        element(SetName::NodePortAddresses, key.ip(ip(family, 3)), Value::None),
        element(SetName::ClusterIpPorts, frontend(1, Protocol::Tcp, 81), number(counted)),
        element(SetName::Counts, key.number(counted.class()), verdict(LOAD_BALANCE)),
        element(SetName::InternalChoice, key.number(plain), verdict(LOAD_BALANCE)),
        element(SetName::InternalChoice, key.number(sticky), verdict(AFFINITY)),
        element(SetName::ExternalPolicy, key.number(plain), verdict(Chain::ExternalLocal)),
        element(SetName::ExternalChoice, key.number(plain), verdict(LOAD_BALANCE)),
        element(SetName::LocalChoice, key.number(plain), verdict(LOCAL_LOAD_BALANCE)),
        element(SetName::Slots, key.number(plain).index(0), to),
        element(SetName::Slots, key.number(plain).index(1), to),
        element(SetName::LocalSlots, key.number(plain).index(69_999), to),
        element(SetName::AffinitySlots, key.number(sticky).index(1), number(sticky_endpoint)),
        element(SetName::LocalAffinitySlots, key.number(sticky).index(0), number(sticky_endpoint)),
        element(SetName::AffinityEndpoints, key.number(sticky_endpoint), to),
        element(SetName::LocalAffinityEndpoints, key.number(sticky_endpoint), to),
        element(SetName::ClusterIps, key.ip(ip(family, 1)), Value::None),
        element(SetName::Refused, frontend(4, Protocol::Tcp, 80), Value::Verdict(Verdict::Drop)),
        element(SetName::Refused, frontend(5, Protocol::Udp, 80), verdict(Chain::Reject)),
        element(SetName::RefusedNodePorts, key.protocol(Protocol::Sctp).port(30_081), verdict(Chain::Reject)),
        element(SetName::Filtered, frontend(2, Protocol::Tcp, 443), verdict(sources()[0])),
    ];
    let pod = ip(family, 200);
    elements.push(element(
        SetName::Hairpin,
        key.ip(pod).ip(pod).protocol(Protocol::Udp).port(53),
        Value::None,
    ));
    // Two adjacent ones, and one apart.
    for (first, last) in [(0, 127), (128, 129), (200, 200)] {
        let key_end = Some(key.ip(ip(family, last)));
        elements.push(Element {
            key_end,
            ..element(SetName::ServiceCidrs, key.ip(ip(family, first)), Value::None)
        });
    }
    for length in [27, 32] {
        let kind = SetName::range_kind(Protocol::Tcp, length);
        let key = key.ip(ip(family, 2)).port(443).ip(ip(family, 32)).index(kind);
        elements.push(element(SetName::SourceRanges, key, Value::None));
    }
    for set in SetName::ALL {
        assert!(set.is_dynamic() || elements.iter().any(|element| element.set == set), "{set}");
    }
    elements
}

fn bases() -> Vec<Base> {
    let mut bases = Vec::new();
    for family in Family::ALL {
        let cidrs = match family {
            Family::V4 => [
                "10.244.0.0/16",
                "10.244.0.0/14",
                "10.244.0.1/32",
                "0.0.0.0/0",
                "10.0.0.0/8",
                "10.244.1.7/23",
            ],
            Family::V6 => [
                "fd00:10:244::/64",
                "fd00:10:244::/57",
                "fd00::1/128",
                "::/0",
                "fc00::/7",
                "fd00:10:244::/48",
            ],
        };
        let mut detectors = vec![
            None,
            Some(Detector::Bridge("cbr0".to_owned())),
            Some(Detector::Bridge("a-name-of-15-by".to_owned())),
            Some(Detector::InterfacePrefix("veth".to_owned())),
            Some(Detector::InterfacePrefix("c".to_owned())),
            Some(Detector::InterfacePrefix("azv-12345".to_owned())),
        ];
        detectors.extend(cidrs.map(|cidr| Some(Detector::Cidr(cidr.parse().unwrap()))));
        for (index, detector) in detectors.into_iter().enumerate() {
            for masquerade_all in [false, true] {
                let node_ports =
                    if index % 2 == 0 { NodePortMatch::AllLocal } else { NodePortMatch::Addresses };
                let mark = 1 << ((index * 7 + 14) % 32);
                let untracked_pods = index % 3 != 0;
                let detector = detector.clone();
                bases.push(Base { family, masquerade_all, mark, detector, node_ports, untracked_pods });
            }
        }
    }
    bases
}

fn print(base: &Base, chains: &[Chain], elements: &[Element]) -> String {
    let mut text = String::new();
    ruleset::print_with_flowtable(&mut text, base, None, chains.iter().copied(), elements.iter().copied())
        .unwrap();
    text
}

/// The chains and elements that this version of nft can read.
fn readable(base: &Base) -> (Vec<Chain>, Vec<Element>) {
    let (mut chains, mut elements) = (chains(), elements(base.family));
    if base.family == Family::V6 && !nft_reads_large_keys() {
        chains.retain(|chain| !is_affinity(chain));
        elements.retain(
            |element| !matches!(element.value, Value::Verdict(Verdict::Goto(chain)) if is_affinity(&chain)),
        );
    }
    (chains, elements)
}

#[test]
fn encoded_rules_equal_those_of_nft() {
    for base in bases() {
        let (chains, elements) = readable(&base);
        let (by_text, sets_by_text) = in_namespace(|| {
            nft(&["-f", "-"], &print(&base, &chains, &elements));
            (listed(base.family), Netlink::new(base.family).sets())
        });
        let (by_netlink, sets_by_netlink) = in_namespace(|| {
            Netlink::new(base.family).commit(messages(&base, &chains, &elements));
            (listed(base.family), Netlink::new(base.family).sets())
        });
        for (number, (text, netlink)) in by_text.iter().zip(&by_netlink).enumerate() {
            let around = by_text[number.saturating_sub(6)..number].join("\n");
            assert_eq!(netlink, text, "{base:?}, after:\n{around}");
        }
        assert_eq!(by_netlink.len(), by_text.len(), "{base:?}");
        assert_eq!(sets_by_netlink.len(), SetName::ALL.len());
        for (text, netlink) in sets_by_text.iter().zip(&sets_by_netlink) {
            assert_eq!(essence(netlink), essence(text), "{base:?}");
        }
    }
}

/// If nft cannot read a chain, its listing of the messages has to be the text.
#[test]
fn nft_lists_the_affinity_chains_as_their_text() {
    for family in Family::ALL {
        let base = Base {
            family,
            masquerade_all: false,
            mark: 1 << 14,
            detector: None,
            node_ports: NodePortMatch::Addresses,
            untracked_pods: false,
        };
        in_namespace(|| {
            Netlink::new(family).commit(messages(&base, &chains(), &elements(family)));
            for chain in chains().into_iter().filter(is_affinity) {
                let listing = nft(&["list", "chain", keyword(family), "keelson", &chain.to_string()], "");
                let listed: Vec<&str> =
                    listing.lines().skip(2).map(str::trim).filter(|line| *line != "}").collect();
                let text = |rule: &Rule| rule.text(family).replace("10800s", "3h");
                let rules: Vec<String> = ruleset::rules(&base, chain).iter().map(text).collect();
                assert_eq!(listed, rules, "{chain}");
            }
        });
    }
}

#[test]
fn the_text_replaces_the_table_whatever_it_was() {
    for base in bases().into_iter().step_by(5) {
        let (chains, elements) = readable(&base);
        let text = print(&base, &chains, &elements);
        in_namespace(|| {
            nft(&["-c", "-f", "-"], &text);
            nft(&["-f", "-"], &text);
            let once = listed(base.family);
            nft(&["-c", "-f", "-"], &text);
            nft(&["-f", "-"], &text);
            assert_eq!(listed(base.family), once);
            let other = format!(
                "add rule {0} keelson services drop; delete set {0} keelson hairpin",
                keyword(base.family)
            );
            nft(&["flush", "chain", keyword(base.family), "keelson", "nat-postrouting"], "");
            nft(&[other.as_str()], "");
            assert_ne!(listed(base.family), once);
            nft(&["-f", "-"], &text);
            assert_eq!(listed(base.family), once);
        });
    }
}

#[test]
fn many_elements_are_read() {
    let base = Base {
        family: Family::V4,
        masquerade_all: false,
        mark: 1 << 14,
        detector: None,
        node_ports: NodePortMatch::Addresses,
        untracked_pods: false,
    };
    let slots = (0..2_500).map(|index| Element {
        set: SetName::Slots,
        key: Key::new().number(Number(1)).index(index),
        key_end: None,
        value: Value::Data(Key::new().endpoint(Endpoint { ip: ip(base.family, 1), port: 80 })),
    });
    let mut text = String::new();
    ruleset::print_with_flowtable(&mut text, &base, None, Chain::FIXED, slots).unwrap();
    in_namespace(|| {
        nft(&["-f", "-"], &text);
        let listing = nft(&["list", "map", "ip", "keelson", "slots"], "");
        assert_eq!(listing.matches(" : ").count(), 2_501, "the elements, and the types");
    });
}

/// The flags in the kernel: a set that rules write has both.
#[test]
fn affinity_is_written_by_rules_and_forgets() {
    let affinity = definition(Family::V6, SetName::Affinity0);
    assert_eq!(affinity.flags, SetFlags::Map | SetFlags::Timeout | SetFlags::Eval);
    assert_eq!((affinity.key_len, affinity.size), (20, Some(131_072)));
    assert!(affinity.attributes().contains(&SetAttribute::Description(vec![SetDescription::Size(131_072)])));
}
