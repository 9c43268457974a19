//! Keys and values against bytes, and against the structures of the programs.

use std::process::Command;

use keelson_proxy::model::Protocol;

use super::*;

fn remote(text: &str) -> Remote {
    let at: std::net::SocketAddr = text.parse().unwrap();
    Remote { address: at.ip().into(), port: at.port() }
}

#[test]
fn values_are_what_their_bytes_say() {
    fn same<const N: usize, T: Layout<N> + Copy + PartialEq + std::fmt::Debug>(value: T) {
        assert_eq!(T::from_bytes(value.to_bytes()), value);
    }
    for text in ["10.0.0.1:80", "[fd00::1]:65535"] {
        let remote = remote(text);
        same(remote);
        same(remote.address);
        assert_eq!(remote.endpoint().to_string(), text);
        same(SlotValue { remote, number: 7 });
        same(MemberKey { number: u32::MAX, remote });
        same(FlowKey { socket: u64::MAX - 1, remote });
        same(FlowValue { number: 9, other: remote });
        same(DirectKey { client: remote, other: remote, protocol: 17 });
        same(DirectFlow { number: 2, endpoint: remote, is_remote: true, is_handed_over: false });
        same(DirectReply { used_ns: u64::MAX - 2, service: remote, is_handed_over: true, state: 9 });
        same(FrontendKey { address: remote.address, port: 53, protocol: 17, is_node_port: true });
    }
    same(SetKey::new(3, SetKind::Local).with_ranges(true));
    same(SetValue { first: 1, count: 2, affinity_seconds: 3 });
}

#[test]
fn networks_of_ipv4_are_mapped() {
    let (bits, address) = network_key("10.244.1.7/16".parse().unwrap());
    assert_eq!((bits, address), (112, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 244, 0, 0]));
    let (bits, address) = network_key("fd00::/56".parse().unwrap());
    assert_eq!((bits, address[0]), (56, 0xfd));
}

#[test]
fn the_bits_of_a_range_include_the_number_of_the_service_port() {
    let range = RangeKey::new(7, "192.0.2.0/24".parse().unwrap());
    let (bits, bytes) = range.to_trie();
    assert_eq!((bits, RangeKey::from_trie(bits, bytes)), (32 + 96 + 24, range));
    assert_eq!((u32::from_bytes(bytes[..4].try_into().unwrap()), bytes[16]), (7, 192));
}

#[test]
fn a_frontend_is_in_the_order_of_the_network() {
    let ip = "10.96.0.10".parse().unwrap();
    let frontend = Frontend::Address { ip, protocol: Protocol::Udp, port: 0x1234 };
    let bytes = FrontendKey::of(frontend, Family::V4).to_bytes();
    assert_eq!(bytes, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 96, 0, 10, 0x12, 0x34, 17, 0]);
    let node_port = Frontend::NodePort { protocol: Protocol::Tcp, port: 1 };
    let bytes = FrontendKey::of(node_port, Family::V6).to_bytes();
    assert_eq!(bytes, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 6, 1]);
}

/// The compiler of the programs compares the sizes and the number of counters with [`MAPS`].
#[test]
fn the_programs_have_the_same_sizes() {
    let types = [
        ("frontends", "struct frontend_key", "struct set_key"),
        ("sets", "struct set_key", "struct set"),
        ("slots", "__u32", "struct slot"),
        ("members", "struct member_key", "__u32"),
        ("node_addresses", "struct address", "__u32"),
        ("affinity", "struct affinity_key", "struct affinity"),
        ("udp_flows", "struct flow_key", "struct flow"),
        ("udp_replies", "struct flow_key", "struct flow"),
        ("tcp_peers", "struct flow_key", "struct flow"),
        ("counters", "__u32", "__u64"),
    ];
    assert_eq!((MapName::Frontends.as_str(), MapName::Members.as_str()), ("frontends", "members"));
    assert_eq!((MapName::Affinity.as_str(), MapName::Counters.as_str()), ("affinity", "counters"));
    let facts = [format!("COUNTERS == {}", Counter::ALL.len()), format!("MEMBER_SERVES == {MEMBER_SERVES}")];
    assert_sizes("layout.h", &MAPS, &types, &facts);
}

/// Compiles what must hold for the types of a header: sizes of keys and values, and other facts.
pub(crate) fn assert_sizes(
    header: &str,
    maps: &[MapDefinition],
    types: &[(&str, &str, &str)],
    facts: &[String],
) {
    assert_eq!(maps.len(), types.len());
    let mut text = format!("#include \"{header}\"\n");
    for (definition, (name, key, value)) in maps.iter().zip(types) {
        assert_eq!(definition.name, *name);
        let MapDefinition { key_size, value_size, .. } = definition;
        text += &format!(
            "_Static_assert(sizeof({key}) == {key_size} && sizeof({value}) == {value_size}, \"{name}\");\n"
        );
    }
    for fact in facts {
        text += &format!("_Static_assert({fact}, \"{fact}\");\n");
    }
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("sizes.c");
    std::fs::write(&source, text).unwrap();
    let checked = Command::new("clang")
        .args(["-target", "bpf", "-fsyntax-only", "-Iprograms"])
        .arg(format!("-I/usr/include/{}-linux-gnu", std::env::consts::ARCH))
        .arg(&source)
        .output()
        .expect("clang (package clang)");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}
