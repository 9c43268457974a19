//! Entries of IP sets by netlink, without the program `ipset`.
//!
//! Owns: [`change`]. In: lines of `ipset restore` that add or delete entries. Out: netlink requests (linux/netfilter/ipset/ip_set.h).
//!
//! A change of endpoints is a few entries, and a program takes longer to start than they take. What is not known here is left to the
//! program: sets that are created or destroyed, options of entries besides a mark, errors.

use std::net::IpAddr;

use keelson_proxy::{
    model::Family,
    netlink::{Attributes, Connection, NETLINK_NETFILTER, Request},
};

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const SUBSYSTEM: u16 = 6;
const COMMAND_ADD: u16 = 9;
const COMMAND_DELETE: u16 = 10;
/// The lowest version that kernels know, and that has all of this.
const PROTOCOL_VERSION: u8 = 6;

// Attributes of a command.
const PROTOCOL: u16 = 1;
const SET_NAME: u16 = 2;
const DATA: u16 = 7;
// Attributes of an entry.
const IP: u16 = 1;
const PREFIX: u16 = 3;
const PORT: u16 = 4;
const IP_PROTOCOL: u16 = 7;
const IP_2: u16 = 20;
const PREFIX_2: u16 = 21;
const MARK: u16 = 27;
// Attributes of an address.
const IPV4: u16 = 1;
const IPV6: u16 = 2;
/// The value has the order of the network.
const NETWORK_ORDER: u16 = 1 << 14;

/// Changes entries as `ipset restore -exist` does. `false`: at least one line was not done, and the program has to do all of them, as it
/// may: an entry that is there is no failure.
pub(crate) fn change(family: Family, input: &str) -> bool {
    let requests: Option<Vec<Request>> = input.lines().map(|line| request(family, line)).collect();
    let Some(requests) = requests.filter(|requests| !requests.is_empty()) else { return false };
    let done = Connection::open(NETLINK_NETFILTER).and_then(|mut kernel| kernel.send_all(&requests));
    match done {
        Ok(refused) => refused.is_empty(),
        Err(error) => {
            tracing::debug!(%error, "cannot change IP sets by netlink");
            false
        }
    }
}

fn request(family: Family, line: &str) -> Option<Request> {
    let (command, rest) = line.split_once(' ')?;
    let command = match command {
        "add" => COMMAND_ADD,
        "del" => COMMAND_DELETE,
        _ => return None,
    };
    let (set, entry) = rest.split_once(' ')?;
    let address_family = match family {
        Family::V4 => AF_INET,
        Family::V6 => AF_INET6,
    };
    let body = Attributes::after(&[address_family, 0, 0, 0])
        .bytes(PROTOCOL, &[PROTOCOL_VERSION])
        .text(SET_NAME, set)
        .nested(DATA, data(entry)?);
    // Without NLM_F_EXCL, what is there already is no failure.
    Some(Request { kind: SUBSYSTEM << 8 | command, flags: 0, body: body.into_bytes() })
}

/// `ADDRESS`, `ADDRESS,PROTOCOL:PORT` or `ADDRESS,PROTOCOL:PORT,ADDRESS`, of which addresses may be networks, and `skbmark MARK/MASK`.
fn data(entry: &str) -> Option<Attributes> {
    let mut words = entry.split(' ');
    let mut fields = words.next()?.split(',');
    let mut data = address(Attributes::default(), fields.next()?, (IP, PREFIX))?;
    if let Some(port) = fields.next() {
        let (protocol, port) = port.split_once(':')?;
        let protocol: u8 = match protocol {
            "tcp" => 6,
            "udp" => 17,
            "sctp" => 132,
            _ => return None,
        };
        data = data.bytes(IP_PROTOCOL, &[protocol]).be16(PORT | NETWORK_ORDER, port.parse().ok()?);
    }
    if let Some(second) = fields.next() {
        data = address(data, second, (IP_2, PREFIX_2))?;
    }
    match (words.next(), words.next()) {
        (None, _) => {}
        (Some("skbmark"), Some(mark)) => {
            let (mark, mask) = mark.split_once('/')?;
            data = data.bytes(
                MARK | NETWORK_ORDER,
                &[hexadecimal(mark)?.to_be_bytes(), hexadecimal(mask)?.to_be_bytes()].concat(),
            );
        }
        _ => return None,
    }
    (fields.next().is_none() && words.next().is_none()).then_some(data)
}

fn hexadecimal(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

fn address(data: Attributes, text: &str, (address, prefix): (u16, u16)) -> Option<Attributes> {
    let (ip, length) = match text.split_once('/') {
        Some((ip, length)) => (ip, Some(length.parse::<u8>().ok()?)),
        None => (text, None),
    };
    let inner = match ip.parse().ok()? {
        IpAddr::V4(ip) => Attributes::default().bytes(IPV4 | NETWORK_ORDER, &ip.octets()),
        IpAddr::V6(ip) => Attributes::default().bytes(IPV6 | NETWORK_ORDER, &ip.octets()),
    };
    let data = data.nested(address, inner);
    Some(match length {
        Some(length) => data.bytes(prefix, &[length]),
        None => data,
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::{
        names::{SetKind, SetName},
        testing::in_namespace,
    };

    fn ipset(arguments: &[&str]) -> String {
        let done = Command::new("ipset").args(arguments).output().expect("ipset is not installed");
        let errors = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{arguments:?}: {errors}");
        String::from_utf8(done.stdout).unwrap()
    }

    /// The lines `add` of `ipset save`, sorted.
    fn entries(set: &SetName) -> Vec<String> {
        let saved = ipset(&["save", set.as_str()]);
        let mut found: Vec<String> =
            saved.lines().filter(|line| line.starts_with("add ")).map(str::to_owned).collect();
        found.sort();
        found
    }

    /// What the kernel has by netlink is what it has by the program, for each kind of set.
    #[test]
    fn entries_are_those_that_the_program_makes() {
        in_namespace(|| {
            for (family, one, net, all) in [
                (Family::V4, "10.0.0.7", "10.1.0.0/16", ["0.0.0.0/1", "128.0.0.0/1"]),
                (Family::V6, "fd00::7", "fd01::/32", ["::/1", "8000::/1"]),
            ] {
                let port = format!("{one},tcp:80");
                let cases: [(SetKind, Vec<String>); 6] = [
                    (SetKind::Addresses, vec![one.to_owned()]),
                    (SetKind::External, vec![port.clone(), format!("{one},udp:53"), format!("{one},sctp:9")]),
                    (SetKind::Local, vec![format!("{port} skbmark 0x4000/0xffffffff")]),
                    (SetKind::Hairpin, vec![format!("{port},{one}")]),
                    (SetKind::Ranges, vec![format!("{port},{net}"), format!("{port},{one}")]),
                    (SetKind::RejectNodePorts, all.map(|half| format!("{half},tcp:30080")).into()),
                ];
                for (kind, wanted) in cases {
                    let set = SetName::fixed(family, kind);
                    let create = set.create(family);
                    ipset(&create.split(' ').collect::<Vec<_>>());
                    let text = |command: &str| {
                        wanted.iter().map(|entry| format!("{command} {set} {entry}\n")).collect::<String>()
                    };
                    assert!(change(family, &text("add")), "{kind:?} {family}");
                    let by_netlink = entries(&set);
                    assert_eq!(by_netlink.len(), wanted.len(), "{by_netlink:?}");
                    // A second time is no failure.
                    assert!(change(family, &text("add")), "{kind:?} {family}");
                    ipset(&["flush", set.as_str()]);
                    for entry in &wanted {
                        let mut arguments = vec!["add", set.as_str()];
                        arguments.extend(entry.split(' '));
                        ipset(&arguments);
                    }
                    assert_eq!(by_netlink, entries(&set));
                    let keys = text("del").replace(" skbmark 0x4000/0xffffffff", "");
                    assert!(change(family, &keys) && entries(&set).is_empty(), "{kind:?} {family}");
                    assert!(change(family, &keys), "{kind:?} {family}: a second time");
                }
            }
            let missing = SetName::fixed(Family::V4, SetKind::Drop);
            assert!(
                !change(Family::V4, &format!("add {missing} 10.0.0.7,tcp:80\n")),
                "{missing} does not exist"
            );
        });
    }

    #[test]
    fn what_is_not_known_is_left_to_the_program() {
        for line in [
            "create KEELSON-4-DROP hash:ip,port family inet",
            "flush KEELSON-4-DROP",
            "add KEELSON-4-DROP",
            "add KEELSON-4-A-1 10.0.0.1 timeout 5",
            "add KEELSON-4-DROP 10.0.0.1,icmp:1",
            "add KEELSON-4-DROP 10.0.0.1,tcp:http",
            "add KEELSON-4-DROP 10.0.0.1,tcp:80,10.0.0.2,10.0.0.3",
            "add KEELSON-4-DROP name,tcp:80",
            "add KEELSON-4-LOCAL 10.0.0.1,tcp:80 skbmark 4000",
            "add KEELSON-4-LOCAL 10.0.0.1,tcp:80 skbmark 0x1/0x1 skbprio 1:1",
            "",
        ] {
            assert!(request(Family::V4, line).is_none(), "{line}");
        }
        assert!(!change(Family::V4, ""));
    }
}
