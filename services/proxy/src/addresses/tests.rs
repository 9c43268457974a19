use std::{net::IpAddr, process::Command, time::Duration};

use super::*;

const N: &str = "192.0.2.1";
const N2: &str = "198.51.100.7";
const V6: &str = "2001:db8::1";
const V6_OTHER: &str = "2001:db8:1::1";

fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn of(setting: &[&str], node_ips: &[&str], family: Family) -> Match {
    let setting = match setting {
        [] | ["primary"] => NodePortAddresses::Primary,
        networks => {
            NodePortAddresses::Cidrs(networks.iter().map(|network| network.parse().unwrap()).collect())
        }
    };
    let local = ips(&["127.0.0.1", "127.0.0.53", N2, N, "::1", V6, V6_OTHER]);
    node_port_addresses(&setting, &ips(node_ips), &local, family)
}

#[test]
fn case_45_node_ports_answer_at_the_nodes_ip_or_at_the_addresses_listed() {
    use Family::{V4, V6 as F6};
    let both = &[N, V6][..];
    let addresses = |texts: &[&str]| Match::Addresses(ips(texts));
    for (setting, node_ips, family, expected) in [
        // Unset and `primary`: the node's IP only.
        (&[][..], both, V4, addresses(&[N])),
        (&["primary"], both, V4, addresses(&[N])),
        (&["primary"], both, F6, addresses(&[V6])),
        (&["198.51.100.0/24"], both, V4, addresses(&[N2])),
        (&["198.51.100.7/32", "192.0.2.0/24", "192.0.2.0/28"], both, V4, addresses(&[N, N2])),
        // A list of IPv4 networks only: every IPv6 address. And vice versa.
        (&["198.51.100.0/24"], both, F6, Match::AllLocal),
        (&["2001:db8::/64"], both, F6, addresses(&[V6])),
        (&["2001:db8::/64"], both, V4, Match::AllLocal),
        // A network that contains the whole family makes the others of that family redundant.
        (&["192.0.2.0/24", "0.0.0.0/0"], both, V4, Match::AllLocal),
        (&["::/0", "192.0.2.0/24"], both, V4, addresses(&[N])),
        (&["203.0.113.0/24"], both, V4, addresses(&[])),
        (&["primary"], &["203.0.113.1"], V4, addresses(&[])),
        // P4: no IP of the family, or a loopback one: nowhere.
        (&["primary"], &[N], F6, addresses(&[])),
        (&["primary"], &["127.0.0.1", V6], V4, addresses(&[])),
    ] {
        assert_eq!(of(setting, node_ips, family), expected, "{setting:?} of {node_ips:?}, {family}");
    }
}

#[test]
fn case_46_loopback_addresses_never_answer() {
    assert_eq!(of(&["127.0.0.0/8"], &[N], Family::V4), Match::Addresses(Vec::new()));
    assert_eq!(of(&["127.0.0.0/8", "192.0.2.0/24"], &[N], Family::V4), Match::Addresses(ips(&[N])));
    assert_eq!(of(&["::1/128"], &[V6], Family::V6), Match::Addresses(Vec::new()));
    assert_eq!(of(&["::/1"], &[V6], Family::V6), Match::Addresses(ips(&[V6, V6_OTHER])));
}

#[test]
fn address_changes_are_followed() {
    crate::testing::in_namespace(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let watch = watch(WatchScope::Addresses).await.unwrap();
            let mut receiver = watch.receiver();
            let added: IpAddr = "192.0.2.99".parse().unwrap();
            assert!(!receiver.borrow_and_update().as_slice().contains(&added));
            for (change, there) in [("add", true), ("del", false)] {
                let status =
                    Command::new("ip").args(["address", change, "192.0.2.99/32", "dev", "lo"]).status();
                assert!(status.unwrap().success());
                let seen = receiver.wait_for(|addresses| addresses.as_slice().contains(&added) == there);
                tokio::time::timeout(Duration::from_secs(60), seen)
                    .await
                    .expect("the change is received")
                    .unwrap();
                assert_eq!(LocalAddresses::now().unwrap().of(Family::V4).any(|ip| ip == added), there);
            }
        });
    });
}

#[test]
fn interfaces_are_matched_by_name_or_prefix() {
    let interfaces: Vec<Interface> = ["lo", "eth0", "eth0.7", "veth1", "veth2", "cni0"]
        .iter()
        .enumerate()
        .map(|(index, name)| Interface { name: (*name).to_owned(), index })
        .collect();
    for (patterns, expected) in [
        (vec![], vec![]),
        (vec!["eth0"], vec!["eth0"]),
        (vec!["eth0*", "cni0"], vec!["cni0", "eth0", "eth0.7"]),
        (vec!["veth*", "veth1"], vec!["veth1", "veth2"]),
        (vec!["*"], vec!["cni0", "eth0", "eth0.7", "veth1", "veth2"]),
        (vec!["lo", "eth"], vec![]),
    ] {
        let parsed: Vec<InterfacePattern> =
            patterns.iter().map(|pattern| InterfacePattern::parse(pattern)).collect();
        let names: Vec<String> = matching(&parsed, &interfaces).into_iter().collect();
        assert_eq!(names, expected, "{patterns:?}");
    }
}

#[test]
fn interfaces_without_a_link_layer_address_are_listed() {
    crate::testing::in_namespace(|| {
        let status = Command::new("ip").args(["tuntap", "add", "dev", "tun7", "mode", "tun"]).status();
        assert!(status.unwrap().success());
        let interfaces = LocalAddresses::now().unwrap().interfaces;
        let names: Vec<&str> = interfaces.iter().map(|interface| interface.name.as_str()).collect();
        assert_eq!(names, ["lo", "tun7"]);
        assert!(interfaces.iter().all(|interface| interface.index > 0), "{interfaces:?}");
    });
}

/// Covers an interface without addresses, and one that is created again under the same name.
#[test]
fn interface_changes_are_followed() {
    crate::testing::in_namespace(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let ip = |arguments: &str| {
                assert!(Command::new("ip").args(arguments.split(' ')).status().unwrap().success());
            };
            let watch = watch(WatchScope::AddressesAndInterfaces).await.unwrap();
            let mut receiver = watch.receiver();
            let index = |addresses: &LocalAddresses| {
                let found = addresses.interfaces().iter().find(|interface| interface.name == "veth7");
                found.map(|interface| interface.index)
            };
            assert_eq!(index(&receiver.borrow_and_update()), None);
            let add = "link add veth7 type veth peer name veth8";
            ip(add);
            let mut wait = async |wanted: &dyn Fn(Option<usize>) -> bool| {
                let seen = receiver.wait_for(|addresses| wanted(index(addresses)));
                let seen = tokio::time::timeout(Duration::from_secs(60), seen).await;
                index(&seen.expect("the change is received").unwrap())
            };
            let first = wait(&|index| index.is_some()).await;
            ip("link delete veth7");
            ip(add);
            let second = wait(&|index| index.is_some() && index != first).await;
            assert_ne!(first, second);
            ip("link delete veth7");
            assert_eq!(wait(&|index| index.is_none()).await, None);
        });
    });
}
