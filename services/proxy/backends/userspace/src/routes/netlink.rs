//! Routes in the kernel (rtnetlink).
//!
//! Owns: the requests [`add`], [`remove`] and [`list`], and their content. In: addresses. Out: routes. Each request has a
//! socket of its own, in the network namespace of the calling thread.

use std::{collections::BTreeSet, io, net::IpAddr};

use keelson_proxy::{
    model::Family,
    netlink::{Attributes, Connection, NETLINK_ROUTE, Request, attributes},
};

use super::RouteError;

/// `rtm_protocol` of our routes: not in /etc/iproute2/rt_protos.
const PROTOCOL: u8 = 107;

// linux/netlink.h and linux/rtnetlink.h.
const ROUTE_BYTES: usize = 12;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_GETROUTE: u16 = 26;
const NLM_F_CREATE: u16 = 0x400;
const NLM_F_APPEND: u16 = 0x800;
const TABLE_LOCAL: u8 = 255;
const SCOPE_HOST: u8 = 254;
const TYPE_LOCAL: u8 = 2;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
/// The loopback interface has this index in every network namespace.
const LOOPBACK: u32 = 1;

// Errors of linux/errno.h.
const ESRCH: i32 = 3;
const EPERM: i32 = 1;
const EEXIST: i32 = 17;

impl From<io::Error> for RouteError {
    fn from(error: io::Error) -> Self {
        if error.raw_os_error() == Some(EPERM) { Self::NotPermitted } else { Self::Kernel(error) }
    }
}

/// Succeeds if the route exists. A route of an interface that has the address goes with the interface: ours is added
/// after it.
pub(crate) fn add(ip: IpAddr) -> Result<(), RouteError> {
    change(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_APPEND, ip, EEXIST)
}

/// Succeeds if there is no such route.
pub(crate) fn remove(ip: IpAddr) -> Result<(), RouteError> {
    change(RTM_DELROUTE, 0, ip, ESRCH)
}

/// The addresses of our routes.
pub(crate) fn list(family: Family) -> Result<BTreeSet<IpAddr>, RouteError> {
    let mut ours = BTreeSet::new();
    let request = Request { kind: RTM_GETROUTE, flags: 0, body: route(family, 0, 0).to_vec() };
    Connection::open(NETLINK_ROUTE)?.dump(&request, |body| ours.extend(parse(family, body)))?;
    Ok(ours)
}

fn change(kind: u16, flags: u16, ip: IpAddr, no_error: i32) -> Result<(), RouteError> {
    let request = Request { kind, flags, body: route_to(ip) };
    match Connection::open(NETLINK_ROUTE)?.get(&request) {
        Err(error) if error.raw_os_error() == Some(no_error) => Ok(()),
        changed => Ok(changed.map(drop)?),
    }
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// `struct rtmsg`.
fn route(family: Family, bits: u8, protocol: u8) -> [u8; ROUTE_BYTES] {
    let (family, scope) = match family {
        Family::V4 => (2, SCOPE_HOST),
        Family::V6 => (10, 0),
    };
    [family, bits, 0, 0, TABLE_LOCAL, protocol, scope, TYPE_LOCAL, 0, 0, 0, 0]
}

/// Our route to an address: `struct rtmsg` and attributes.
fn route_to(ip: IpAddr) -> Vec<u8> {
    let octets = octets(ip);
    let bits = u8::try_from(octets.len() * 8).unwrap_or_default();
    let header = route(Family::of(ip), bits, PROTOCOL);
    Attributes::after(&header).bytes(RTA_DST, &octets).u32(RTA_OIF, LOOPBACK).into_bytes()
}

/// The destination, if the route is ours.
fn parse(family: Family, body: &[u8]) -> Option<IpAddr> {
    let route: &[u8; ROUTE_BYTES] = body.first_chunk()?;
    let expected = self::route(family, route[1], PROTOCOL);
    if (route[0], route[4], route[5], route[7]) != (expected[0], TABLE_LOCAL, PROTOCOL, TYPE_LOCAL) {
        return None;
    }
    let (_, destination) = attributes(body.get(ROUTE_BYTES..)?).find(|(kind, _)| *kind == RTA_DST)?;
    match family {
        Family::V4 => <[u8; 4]>::try_from(destination).ok().map(IpAddr::from),
        Family::V6 => <[u8; 16]>::try_from(destination).ok().map(IpAddr::from),
    }
}

/// Brings the loopback interface up without starting a program.
#[cfg(test)]
pub(crate) fn set_loopback_up() -> io::Result<()> {
    const RTM_NEWLINK: u16 = 16;
    const IFF_UP: u32 = 1;
    // `struct ifinfomsg`: family and type, then index, flags, and which flags change.
    let mut body = [0; 16];
    for (place, value) in [(4, LOOPBACK), (8, IFF_UP), (12, IFF_UP)] {
        body[place..place + 4].copy_from_slice(&value.to_ne_bytes());
    }
    let request = Request { kind: RTM_NEWLINK, flags: 0, body: body.to_vec() };
    Connection::open(NETLINK_ROUTE)?.get(&request).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isolation::isolated;

    #[test]
    fn routes_are_added_listed_and_removed() {
        isolated(|| {
            for (family, ip) in [(Family::V4, "10.96.0.10"), (Family::V6, "fd00:96::a")] {
                let ip: IpAddr = ip.parse().unwrap();
                assert!(list(family).unwrap().is_empty(), "the kernel's own routes are not ours");
                add(ip).unwrap();
                add(ip).unwrap();
                assert_eq!(list(family).unwrap(), [ip].into());
                remove(ip).unwrap();
                remove(ip).unwrap();
                assert!(list(family).unwrap().is_empty());
            }
        });
    }

    #[test]
    fn truncated_messages_are_no_routes() {
        let ip: IpAddr = "10.96.0.10".parse().unwrap();
        let body =
            Attributes::after(&route(Family::V4, 32, PROTOCOL)).bytes(RTA_DST, &octets(ip)).into_bytes();
        assert_eq!(parse(Family::V4, &body), Some(ip));
        for length in 0..body.len() {
            assert_eq!(parse(Family::V4, &body[..length]), None);
        }
        assert_eq!(parse(Family::V6, &body), None);
    }
}
