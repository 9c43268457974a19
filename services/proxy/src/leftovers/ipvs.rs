//! Virtual servers, sets and the interface of kube-proxy's mode ipvs.

use std::{
    collections::BTreeSet,
    fs,
    net::{Ipv4Addr, Ipv6Addr},
};

use super::{
    INTERFACE, Places, Removal, ServerOwner,
    netlink::{self, VirtualSocket},
};
use crate::model::Family;

/// Sets of the mode ipvs; those of IPv6 have `KUBE-6-` instead of `KUBE-`. Source: `pkg/proxy/ipvs/ipset.go` of 1.36.3.
const SETS: [&str; 17] = [
    "LOOP-BACK",
    "CLUSTER-IP",
    "EXTERNAL-IP",
    "EXTERNAL-IP-LOCAL",
    "LOAD-BALANCER",
    "LOAD-BALANCER-FW",
    "LOAD-BALANCER-LOCAL",
    "LOAD-BALANCER-SOURCE-IP",
    "LOAD-BALANCER-SOURCE-CIDR",
    "NODE-PORT-TCP",
    "NODE-PORT-LOCAL-TCP",
    "NODE-PORT-UDP",
    "NODE-PORT-LOCAL-UDP",
    "NODE-PORT-SCTP-HASH",
    "NODE-PORT-LOCAL-SCTP-HASH",
    "HEALTH-CHECK-NODE-PORT",
    "IPVS-IPS",
];

// Protocol numbers (linux/in.h).
const TCP: u16 = 6;
const UDP: u16 = 17;
const SCTP: u16 = 132;

/// Longer names are truncated. Source: kube-proxy.
const SET_NAME_MAX: usize = 31;

/// Virtual servers, and the interface that identifies them as kube-proxy's.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct IpvsState {
    /// By family.
    pub(super) servers: [usize; 2],
    pub(super) has_interface: bool,
}

impl IpvsState {
    pub(super) fn now(places: &Places) -> Self {
        let read = |file: &str| fs::read_to_string(places.proc_net.join(file)).unwrap_or_default();
        Self::of(&read("ip_vs"), &read("dev"))
    }

    /// Parses `/proc/net/ip_vs` and `/proc/net/dev`.
    pub(super) fn of(servers: &str, interfaces: &str) -> Self {
        let mut seen = Self::default();
        for line in servers.lines() {
            let mut words = line.split_whitespace();
            let (Some("TCP" | "UDP" | "SCTP"), Some(address)) = (words.next(), words.next()) else {
                continue;
            };
            let family = if address.starts_with('[') { Family::V6 } else { Family::V4 };
            seen.servers[family as usize] += 1;
        }
        seen.has_interface = exists(interfaces, INTERFACE);
        seen
    }

    pub(super) fn describe(self) -> Vec<(Family, String)> {
        if !self.has_interface {
            // The virtual servers belong to another program.
            return Vec::new();
        }
        let mut all = vec![(Family::V4, format!("interface {INTERFACE} of a kube-proxy (mode ipvs)"))];
        all.extend(Family::ALL.into_iter().filter_map(|family| {
            let servers = self.servers[family as usize];
            (servers > 0).then(|| (family, format!("{servers} virtual servers of a kube-proxy (mode ipvs)")))
        }));
        all
    }
}

/// Whether `/proc/net/dev` lists an interface.
pub(super) fn exists(interfaces: &str, name: &str) -> bool {
    interfaces
        .lines()
        .any(|line| line.trim_start().strip_prefix(name).is_some_and(|rest| rest.starts_with(':')))
}

/// Whether packets of the client are still to come, which the kernel drops without the virtual server: of a connection that is
/// being opened, is established or is closed on one side, and of a UDP flow that has not ended. Source: the kernel's names of
/// states. Templates of session affinity are no connections and have NONE or ASSURED.
fn is_open(protocol: u16, state: &str) -> bool {
    match protocol {
        UDP => state == "UDP",
        SCTP => !matches!(state, "NONE" | "ASSURED" | "REJECTED" | "CLOSED"),
        _ => matches!(state, "SYN_SENT" | "SYN_RECV" | "SYNACK" | "ESTABLISHED" | "FIN_WAIT" | "CLOSE_WAIT"),
    }
}

/// Parses `/proc/net/ip_vs_conn`: the connections to real servers that [`is_open`]; those to a socket of this node go on without the
/// virtual server. `others`: where virtual servers of other programs receive packets; `None`: unknown, and every connection counts.
pub(super) fn connections(
    listed: &str,
    others: Option<&BTreeSet<VirtualSocket>>,
    owner: ServerOwner,
) -> usize {
    // Columns of `/proc/net/ip_vs_conn`.
    const TO: std::ops::Range<usize> = 3..5;
    const DESTINATION: std::ops::Range<usize> = 5..7;
    const STATE: usize = 7;
    let counts = |line: &&str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let state = words.get(STATE).copied().unwrap_or_default();
        let Some(to) = virtual_socket(&words) else { return false };
        if words.get(TO) == words.get(DESTINATION) {
            return false;
        }
        let is_other = |others: &BTreeSet<VirtualSocket>| others.contains(&to);
        is_open(to.0, state) && others.is_none_or(|others| is_other(others) == (owner == ServerOwner::Other))
    };
    listed.lines().filter(counts).count()
}

/// The virtual server of a line of `/proc/net/ip_vs_conn`.
fn virtual_socket(words: &[&str]) -> Option<VirtualSocket> {
    let [protocol, _, _, ip, port, ..] = words else { return None };
    let protocol = match *protocol {
        "TCP" => TCP,
        "UDP" => UDP,
        "SCTP" => SCTP,
        _ => return None,
    };
    let ip = match ip.contains(':') {
        true => ip.parse::<Ipv6Addr>().ok()?.into(),
        false => Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?).into(),
    };
    Some((protocol, ip, u16::from_str_radix(port, 16).ok()?))
}

/// As in kube-proxy: removes the virtual servers of any program, but only if its interface exists. Those of the backend ipvs
/// stay: it may have taken over.
pub(super) fn remove(places: &Places, removal: &mut Removal) {
    let seen = IpvsState::now(places);
    let servers: usize = seen.servers.iter().sum();
    if seen.has_interface {
        if servers > 0 {
            match netlink::delete_virtual_servers() {
                Ok(0) => {}
                Ok(deleted) => removal.removed.push(format!("{deleted} virtual servers of ipvs")),
                Err(error) => removal.failed.push(format!("virtual servers of ipvs: {error}")),
            }
        }
        record(removal, format!("interface {INTERFACE}"), netlink::delete_interface(INTERFACE));
    } else if servers > 0 {
        removal.notes.push(format!(
            "{servers} virtual servers of ipvs kept: interface {INTERFACE} does not exist, so they belong to \
             another program"
        ));
    }
    // The rules that refer to them were removed before.
    for mut set in SETS.iter().flat_map(|name| [format!("KUBE-{name}"), format!("KUBE-6-{name}")]) {
        set.truncate(SET_NAME_MAX);
        match netlink::destroy_set(&set) {
            Ok(true) => removal.removed.push(format!("ipset {set}")),
            Ok(false) => {}
            Err(error) => removal.failed.push(format!("ipset {set}: {error}")),
        }
    }
}

fn record(removal: &mut Removal, what: String, result: std::io::Result<()>) {
    match result {
        Ok(()) => removal.removed.push(what),
        Err(error) => removal.failed.push(format!("{what}: {error}")),
    }
}
