//! Routes in the kernel (rtnetlink).
//!
//! Owns: the requests [`add`], [`remove`] and [`list`], and their encoding. In: addresses. Out: routes. Each request has a
//! socket of its own, in the network namespace of the calling thread.

use std::{collections::BTreeSet, io, net::IpAddr};

use keelson_proxy::model::Family;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use super::RouteError;

/// `rtm_protocol` of our routes: not in /etc/iproute2/rt_protos.
const PROTOCOL: u8 = 107;

// linux/netlink.h and linux/rtnetlink.h.
const HEADER_BYTES: usize = 16;
const ROUTE_BYTES: usize = 12;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_GETROUTE: u16 = 26;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_CREATE_EXCL: u16 = 0x600;
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

/// Succeeds if the route exists.
pub(crate) fn add(ip: IpAddr) -> Result<(), RouteError> {
    change(RTM_NEWROUTE, NLM_F_CREATE_EXCL, ip, EEXIST)
}

/// Succeeds if there is no such route.
pub(crate) fn remove(ip: IpAddr) -> Result<(), RouteError> {
    change(RTM_DELROUTE, 0, ip, ESRCH)
}

/// The addresses of our routes.
pub(crate) fn list(family: Family) -> Result<BTreeSet<IpAddr>, RouteError> {
    let mut ours = BTreeSet::new();
    let request = request(RTM_GETROUTE, NLM_F_DUMP, &route(family, 0, 0), &[]);
    exchange(&request, |kind, body| {
        if kind == RTM_NEWROUTE {
            ours.extend(parse(family, body));
        }
    })?;
    Ok(ours)
}

fn change(kind: u16, flags: u16, ip: IpAddr, no_error: i32) -> Result<(), RouteError> {
    let octets = octets(ip);
    let bits = u8::try_from(octets.len() * 8).unwrap_or_default();
    let body = route(Family::of(ip), bits, PROTOCOL);
    let attributes = [(RTA_DST, octets.as_slice()), (RTA_OIF, &LOOPBACK.to_ne_bytes())];
    match exchange(&request(kind, flags | NLM_F_ACK, &body, &attributes), |_, _| {}) {
        Err(error) if error.raw_os_error() == Some(no_error) => Ok(()),
        changed => Ok(changed?),
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

fn request(kind: u16, flags: u16, body: &[u8], attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut message = vec![0; 4];
    message.extend(kind.to_ne_bytes());
    message.extend((flags | NLM_F_REQUEST).to_ne_bytes());
    // Sequence number and port ID: a socket has one request.
    message.extend([1, 0, 0, 0, 0, 0, 0, 0]);
    message.extend(body);
    for (kind, value) in attributes {
        let length = u16::try_from(4 + value.len()).unwrap_or_default();
        message.extend(length.to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(*value);
    }
    let length = u32::try_from(message.len()).unwrap_or_default();
    message[..4].copy_from_slice(&length.to_ne_bytes());
    message
}

/// Sends a request, and passes type and body of each answer.
fn exchange(request: &[u8], mut answer: impl FnMut(u16, &[u8])) -> io::Result<()> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(request, 0)?;
    loop {
        let (datagram, _) = socket.recv_from_full()?;
        let mut rest = datagram.as_slice();
        while let Some((kind, body, next)) = split(rest) {
            match kind {
                NLMSG_DONE => return Ok(()),
                NLMSG_ERROR => return acknowledged(body),
                kind => answer(kind, body),
            }
            rest = next;
        }
    }
}

/// The first message: type, body, and what follows.
fn split(messages: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(*messages.first_chunk()?);
    let length = usize::try_from(length).ok().filter(|length| *length >= HEADER_BYTES)?;
    let kind = u16::from_ne_bytes(*messages.get(4..)?.first_chunk()?);
    let next = messages.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((kind, messages.get(HEADER_BYTES..length)?, next))
}

fn acknowledged(body: &[u8]) -> io::Result<()> {
    match body.first_chunk().map(|code| i32::from_ne_bytes(*code)) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(-code)),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// The destination, if the route is ours.
fn parse(family: Family, body: &[u8]) -> Option<IpAddr> {
    let route: &[u8; ROUTE_BYTES] = body.first_chunk()?;
    let expected = self::route(family, route[1], PROTOCOL);
    if (route[0], route[4], route[5], route[7]) != (expected[0], TABLE_LOCAL, PROTOCOL, TYPE_LOCAL) {
        return None;
    }
    let mut rest = body.get(ROUTE_BYTES..)?;
    loop {
        let length = usize::from(u16::from_ne_bytes(*rest.first_chunk()?));
        let kind = u16::from_ne_bytes(*rest.get(2..)?.first_chunk()?);
        let value = rest.get(4..length)?;
        if kind == RTA_DST {
            return match family {
                Family::V4 => <[u8; 4]>::try_from(value).ok().map(IpAddr::from),
                Family::V6 => <[u8; 16]>::try_from(value).ok().map(IpAddr::from),
            };
        }
        rest = rest.get(length.next_multiple_of(4)..)?;
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
    exchange(&request(RTM_NEWLINK, NLM_F_ACK, &body, &[]), |_, _| {})
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
        let message = request(RTM_NEWROUTE, 0, &route(Family::V4, 32, PROTOCOL), &[(RTA_DST, &octets(ip))]);
        let (kind, body, rest) = split(&message).unwrap();
        assert_eq!((kind, parse(Family::V4, body), rest.len()), (RTM_NEWROUTE, Some(ip), 0));
        for length in 0..body.len() {
            assert_eq!(parse(Family::V4, &body[..length]), None);
            assert!(split(&message[..length]).is_none());
        }
        assert_eq!(parse(Family::V6, body), None);
    }
}
