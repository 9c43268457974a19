//! The node's own addresses, chosen as the kubelet does without `--node-ip`.
//!
//! Owns: the choice among the interfaces' addresses. In: the routing tables, the interfaces. Out: at most one
//! address of each family, IPv4 first.
//!
//! The first interface of a default route with a global unicast address provides the address. If such an
//! interface has link-local addresses only, as in networks that route by BGP over unnumbered links (RFC 5549),
//! a global address of the loopback interface is used. Without a routing table any interface that is up is used.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nix::{ifaddrs::getifaddrs, net::if_::InterfaceFlags};

use crate::tree::{ReadError, Tree};

const V4_ROUTES: &str = "proc/net/route";
const V6_ROUTES: &str = "proc/net/ipv6_route";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) interface: String,
    pub(crate) flags: InterfaceFlags,
    pub(crate) ip: IpAddr,
}

/// The interfaces of IPv4 and of IPv6 default routes, in the kernel's order.
#[derive(Debug, Default, PartialEq, Eq)]
struct DefaultRoutes {
    /// `None`: there is no readable routing table.
    v4: Option<Vec<String>>,
    v6: Vec<String>,
}

/// In the kernel's order.
pub(crate) fn interfaces() -> Result<Vec<Address>, nix::Error> {
    let address = |entry: nix::ifaddrs::InterfaceAddress| {
        let storage = entry.address?;
        let v4 = storage.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        let ip = v4.or_else(|| storage.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))?;
        Some(Address { interface: entry.interface_name, flags: entry.flags, ip })
    };
    Ok(getifaddrs()?.filter_map(address).collect())
}

/// The addresses to report, preferred first. Unreadable files are named in `errors`.
pub(crate) fn choose(tree: &Tree, addresses: &[Address], errors: &mut Vec<String>) -> Vec<IpAddr> {
    let routes = default_routes(tree, errors);
    [false, true].into_iter().filter_map(|v6| choose_of(&routes, addresses, v6)).collect()
}

fn default_routes(tree: &Tree, errors: &mut Vec<String>) -> DefaultRoutes {
    let mut table = |path, parse: fn(&str) -> Option<Vec<String>>| {
        let read = tree
            .text(path)
            .and_then(|text| parse(&text).ok_or_else(|| tree.content(path, "a routing table")));
        match read {
            Ok(routes) => Some(routes),
            Err(ReadError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => {
                errors.push(error.to_string());
                Some(Vec::new())
            }
        }
    };
    let v4 = table(V4_ROUTES, v4_default_routes);
    // A kernel without IPv6 does not have this file.
    DefaultRoutes { v4, v6: table(V6_ROUTES, v6_default_routes).unwrap_or_default() }
}

/// Parses lines of interface, destination and gateway in hex, after a heading.
fn v4_default_routes(text: &str) -> Option<Vec<String>> {
    let mut routes = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with("Iface") && !line.trim().is_empty()) {
        let mut fields = line.split_whitespace();
        let (interface, destination) = (fields.next()?, fields.next()?);
        if u32::from_str_radix(destination, 16).ok()? == 0 {
            routes.push(interface.to_owned());
        }
    }
    Some(routes)
}

/// Parses lines of destination, its prefix, source, its prefix, gateway, four numbers, interface.
fn v6_default_routes(text: &str) -> Option<Vec<String>> {
    let mut routes = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (destination, gateway, interface) = (fields.first()?, fields.get(4)?, fields.get(9)?);
        let destination = u128::from_str_radix(destination, 16).ok()?;
        let gateway = u128::from_str_radix(gateway, 16).ok()?;
        // The kernel's own reject entries have no gateway.
        if destination == 0 && gateway != 0 {
            routes.push((*interface).to_owned());
        }
    }
    Some(routes)
}

fn choose_of(routes: &DefaultRoutes, addresses: &[Address], v6: bool) -> Option<IpAddr> {
    let usable = |address: &&Address| {
        address.flags.contains(InterfaceFlags::IFF_UP)
            && address.ip.is_ipv6() == v6
            && is_global_unicast(address.ip)
    };
    let is_loopback = |address: &Address| address.flags.contains(InterfaceFlags::IFF_LOOPBACK);
    let Some(v4) = &routes.v4 else {
        let beside = |address: &&Address| {
            !is_loopback(address) && !address.flags.contains(InterfaceFlags::IFF_POINTOPOINT)
        };
        return addresses.iter().filter(usable).find(beside).map(|address| address.ip);
    };
    let interfaces = if v6 { &routes.v6 } else { v4 };
    let of_route = |interface: &String| {
        let own = addresses.iter().filter(usable).find(|address| address.interface == *interface);
        own.or_else(|| addresses.iter().filter(usable).find(|address| is_loopback(address)))
    };
    interfaces.iter().find_map(of_route).map(|address| address.ip)
}

/// True for private addresses; false for loopback, link-local, multicast, broadcast and unspecified ones.
fn is_global_unicast(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => {
            ip != Ipv4Addr::BROADCAST
                && !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || ip.is_link_local())
        }
        IpAddr::V6(ip) => {
            ip != Ipv6Addr::UNSPECIFIED
                && !(ip.is_loopback() || ip.is_multicast() || ip.is_unicast_link_local())
        }
    }
}
