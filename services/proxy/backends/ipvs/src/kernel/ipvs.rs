//! Messages of the generic netlink family IPVS.
//!
//! Owns: their encoding and decoding. In and out: values. Source: linux/ip_vs.h and linux/genetlink.h.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use keelson_proxy::model::{Endpoint, Family, Protocol};

use crate::servers::{FoundDestination, ServerChange, ServerKey, Socket, Spec};
use keelson_proxy::netlink::{Attributes, Connection, Request, attributes, number};

const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const GENERIC_HEADER: usize = 4;
const VERSION: u8 = 1;

const NEW_SERVICE: u8 = 1;
const SET_SERVICE: u8 = 2;
const DEL_SERVICE: u8 = 3;
const GET_SERVICE: u8 = 4;
const NEW_DEST: u8 = 5;
const SET_DEST: u8 = 6;
const DEL_DEST: u8 = 7;
const GET_DEST: u8 = 8;
const SET_CONFIG: u8 = 12;
const GET_CONFIG: u8 = 13;

const ATTR_SERVICE: u16 = 1;
const ATTR_DEST: u16 = 2;
const ATTR_TIMEOUT_TCP: u16 = 4;
const ATTR_TIMEOUT_TCP_FIN: u16 = 5;
const ATTR_TIMEOUT_UDP: u16 = 6;

const SVC_AF: u16 = 1;
const SVC_PROTOCOL: u16 = 2;
const SVC_ADDR: u16 = 3;
const SVC_PORT: u16 = 4;
const SVC_FWMARK: u16 = 5;
const SVC_SCHED_NAME: u16 = 6;
const SVC_FLAGS: u16 = 7;
const SVC_TIMEOUT: u16 = 8;
const SVC_NETMASK: u16 = 9;

const DEST_ADDR: u16 = 1;
const DEST_PORT: u16 = 2;
const DEST_FWD_METHOD: u16 = 3;
const DEST_WEIGHT: u16 = 4;
const DEST_U_THRESH: u16 = 5;
const DEST_L_THRESH: u16 = 6;
const DEST_ACTIVE_CONNS: u16 = 7;
const DEST_INACT_CONNS: u16 = 8;
const DEST_PERSIST_CONNS: u16 = 9;

/// Destinations are translated (`IP_VS_CONN_F_MASQ`).
const FORWARD_NAT: u32 = 0;
const FORWARD_MASK: u32 = 7;
/// The kernel sets it (`IP_VS_SVC_F_HASHED`).
const FLAG_HASHED: u32 = 2;

/// Seconds; 0: the kernel's value stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Timeouts {
    pub(crate) tcp: u32,
    pub(crate) tcp_fin: u32,
    pub(crate) udp: u32,
}

/// The number of the family; the kernel loads the module if it can.
pub(crate) fn family_id(connection: &mut Connection) -> io::Result<u16> {
    let header = [CTRL_CMD_GETFAMILY, VERSION, 0, 0];
    let body = Attributes::after(&header).text(CTRL_ATTR_FAMILY_NAME, "IPVS").into_bytes();
    let answer = connection.get(&Request { kind: GENL_ID_CTRL, flags: 0, body })?;
    let found = attributes(answer.get(GENERIC_HEADER..).unwrap_or_default())
        .find(|(kind, _)| *kind == CTRL_ATTR_FAMILY_ID)
        .and_then(|(_, value)| value.first_chunk().map(|id| u16::from_ne_bytes(*id)));
    found.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn request(id: u16, command: u8, body: impl FnOnce(Attributes) -> Attributes) -> Request {
    let body = body(Attributes::after(&[command, VERSION, 0, 0])).into_bytes();
    Request { kind: id, flags: 0, body }
}

const fn address_family(family: Family) -> u16 {
    match family {
        Family::V4 => 2,
        Family::V6 => 10,
    }
}

/// `union nf_inet_addr`.
fn address(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&ip.octets());
            bytes
        }
        IpAddr::V6(ip) => ip.octets(),
    }
}

fn parse_address(family: Family, value: &[u8]) -> Option<IpAddr> {
    match family {
        Family::V4 => value.first_chunk::<4>().map(|octets| Ipv4Addr::from(*octets).into()),
        Family::V6 => value.first_chunk::<16>().map(|octets| Ipv6Addr::from(*octets).into()),
    }
}

/// What identifies a virtual server.
fn key_attributes(family: Family, key: ServerKey) -> Attributes {
    let base = Attributes::default().u16(SVC_AF, address_family(family));
    match key {
        ServerKey::Socket(Socket { ip, protocol, port }) => base
            .u16(SVC_PROTOCOL, protocol.number().into())
            .bytes(SVC_ADDR, &address(ip))
            .be16(SVC_PORT, port),
        ServerKey::Mark(mark) => base.u32(SVC_FWMARK, mark),
    }
}

fn server_attributes(family: Family, key: ServerKey, spec: &Spec) -> Attributes {
    // Persistence is by the whole address of the client.
    let netmask = match family {
        Family::V4 => u32::MAX,
        Family::V6 => 128,
    };
    let flags: Vec<u8> = [spec.flags, u32::MAX].iter().flat_map(|word| word.to_ne_bytes()).collect();
    key_attributes(family, key)
        .text(SVC_SCHED_NAME, &spec.scheduler)
        .bytes(SVC_FLAGS, &flags)
        .u32(SVC_TIMEOUT, spec.timeout)
        .u32(SVC_NETMASK, netmask)
}

fn destination_attributes(Endpoint { ip, port }: Endpoint) -> Attributes {
    Attributes::default().bytes(DEST_ADDR, &address(ip)).be16(DEST_PORT, port)
}

fn weighted(endpoint: Endpoint, weight: u32) -> Attributes {
    destination_attributes(endpoint)
        .u32(DEST_FWD_METHOD, FORWARD_NAT)
        .u32(DEST_WEIGHT, weight)
        .u32(DEST_U_THRESH, 0)
        .u32(DEST_L_THRESH, 0)
}

pub(crate) fn change(id: u16, family: Family, change: &ServerChange) -> Request {
    let key = |key: ServerKey| key_attributes(family, key);
    let with = |server: Attributes, destination: Option<Attributes>| {
        move |body: Attributes| {
            let body = body.nested(ATTR_SERVICE, server);
            match destination {
                Some(destination) => body.nested(ATTR_DEST, destination),
                None => body,
            }
        }
    };
    match change {
        ServerChange::AddServer(of, spec) => {
            request(id, NEW_SERVICE, with(server_attributes(family, *of, spec), None))
        }
        ServerChange::SetServer(of, spec) => {
            request(id, SET_SERVICE, with(server_attributes(family, *of, spec), None))
        }
        ServerChange::DeleteServer(of) => request(id, DEL_SERVICE, with(key(*of), None)),
        ServerChange::AddDestination(of, endpoint) => {
            request(id, NEW_DEST, with(key(*of), Some(weighted(*endpoint, 1))))
        }
        ServerChange::SetWeight(of, endpoint, weight) => {
            request(id, SET_DEST, with(key(*of), Some(weighted(*endpoint, *weight))))
        }
        ServerChange::DeleteDestination(of, endpoint) => {
            request(id, DEL_DEST, with(key(*of), Some(destination_attributes(*endpoint))))
        }
    }
}

pub(crate) fn get_servers(id: u16) -> Request {
    request(id, GET_SERVICE, |body| body)
}

pub(crate) fn get_destinations(id: u16, family: Family, key: ServerKey) -> Request {
    request(id, GET_DEST, |body| body.nested(ATTR_SERVICE, key_attributes(family, key)))
}

pub(crate) fn set_timeouts(id: u16, timeouts: Timeouts) -> Request {
    request(id, SET_CONFIG, |body| {
        body.u32(ATTR_TIMEOUT_TCP, timeouts.tcp)
            .u32(ATTR_TIMEOUT_TCP_FIN, timeouts.tcp_fin)
            .u32(ATTR_TIMEOUT_UDP, timeouts.udp)
    })
}

pub(crate) fn get_timeouts(id: u16) -> Request {
    request(id, GET_CONFIG, |body| body)
}

pub(crate) fn parse_timeouts(body: &[u8]) -> Timeouts {
    let mut timeouts = Timeouts::default();
    for (kind, value) in attributes(body.get(GENERIC_HEADER..).unwrap_or_default()) {
        let seconds = number(value).unwrap_or_default();
        match kind {
            ATTR_TIMEOUT_TCP => timeouts.tcp = seconds,
            ATTR_TIMEOUT_TCP_FIN => timeouts.tcp_fin = seconds,
            ATTR_TIMEOUT_UDP => timeouts.udp = seconds,
            _ => {}
        }
    }
    timeouts
}

/// Attributes below the one of a kind.
fn nested(body: &[u8], of: u16) -> Option<&[u8]> {
    attributes(body.get(GENERIC_HEADER..)?).find(|(kind, _)| *kind == of).map(|(_, value)| value)
}

/// A virtual server of an answer.
pub(crate) fn parse_server(body: &[u8]) -> Option<(Family, ServerKey, Spec)> {
    let (mut family, mut protocol, mut ip, mut port, mut mark) = (None, None, None, None, None);
    let mut spec = Spec { scheduler: String::new(), flags: 0, timeout: 0 };
    for (kind, value) in attributes(nested(body, ATTR_SERVICE)?) {
        match kind {
            SVC_AF => {
                family = Family::ALL
                    .into_iter()
                    .find(|family| number(value) == Some(address_family(*family).into()));
            }
            SVC_PROTOCOL => {
                protocol = number(value).and_then(|number| u8::try_from(number).ok());
            }
            SVC_ADDR => ip = parse_address(family?, value),
            SVC_PORT => port = value.first_chunk().map(|port| u16::from_be_bytes(*port)),
            SVC_FWMARK => mark = number(value),
            SVC_SCHED_NAME => {
                let text = value.split(|byte| *byte == 0).next().unwrap_or_default();
                spec.scheduler = String::from_utf8_lossy(text).into_owned();
            }
            SVC_FLAGS => {
                spec.flags = value.first_chunk().map(|flags| u32::from_ne_bytes(*flags))? & !FLAG_HASHED
            }
            SVC_TIMEOUT => spec.timeout = number(value)?,
            _ => {}
        }
    }
    let key = match mark {
        Some(mark) => ServerKey::Mark(mark),
        None => {
            ServerKey::Socket(Socket { ip: ip?, protocol: Protocol::from_number(protocol?)?, port: port? })
        }
    };
    Some((family?, key, spec))
}

/// A real server of an answer.
pub(crate) fn parse_destination(family: Family, body: &[u8]) -> Option<FoundDestination> {
    let (mut ip, mut port, mut weight, mut forward) = (None, None, None, FORWARD_NAT);
    let (mut connections, mut clients) = (0_u32, 0);
    for (kind, value) in attributes(nested(body, ATTR_DEST)?) {
        match kind {
            DEST_ADDR => ip = parse_address(family, value),
            DEST_PORT => port = value.first_chunk().map(|port| u16::from_be_bytes(*port)),
            DEST_FWD_METHOD => forward = number(value)? & FORWARD_MASK,
            DEST_WEIGHT => weight = number(value),
            DEST_ACTIVE_CONNS | DEST_INACT_CONNS => connections = connections.saturating_add(number(value)?),
            DEST_PERSIST_CONNS => clients = number(value)?,
            _ => {}
        }
    }
    // A weight that is never wanted: the method is set together with the weight.
    let weight = if forward == FORWARD_NAT { weight? } else { u32::MAX };
    Some(FoundDestination { endpoint: Endpoint { ip: ip?, port: port? }, weight, connections, clients })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> Spec {
        Spec { scheduler: "rr".into(), flags: 0x4b06_0001, timeout: 10_800 }
    }

    fn keys() -> [(Family, ServerKey); 4] {
        let socket =
            |ip: &str, protocol, port| ServerKey::Socket(Socket { ip: ip.parse().unwrap(), protocol, port });
        [
            (Family::V4, socket("10.96.0.1", Protocol::Tcp, 80)),
            (Family::V6, socket("fd00:96::1", Protocol::Sctp, 65_535)),
            (Family::V4, ServerKey::Mark(7)),
            (Family::V6, ServerKey::Mark(0x4007)),
        ]
    }

    #[test]
    fn servers_are_read_as_written() {
        for (family, key) in keys() {
            let body = change(26, family, &ServerChange::AddServer(key, spec())).body;
            assert_eq!(parse_server(&body), Some((family, key, spec())));
            // The kernel adds a flag of its own.
            let hashed = Spec { flags: spec().flags | FLAG_HASHED, ..spec() };
            let body = change(26, family, &ServerChange::SetServer(key, hashed)).body;
            assert_eq!(parse_server(&body), Some((family, key, spec())));
            for length in 0..GENERIC_HEADER + 12 {
                assert_eq!(parse_server(&body[..length]), None, "{length}");
            }
        }
    }

    #[test]
    fn destinations_are_read_as_written() {
        for (family, key) in keys() {
            let ip = if family == Family::V4 { "10.244.0.1" } else { "fd00:244::1" }.parse().unwrap();
            let endpoint = Endpoint { ip, port: 8080 };
            let body = change(26, family, &ServerChange::SetWeight(key, endpoint, 0)).body;
            let found = FoundDestination { endpoint, weight: 0, connections: 0, clients: 0 };
            assert_eq!(parse_destination(family, &body), Some(found));
            assert_eq!(parse_destination(family, &body[..GENERIC_HEADER]), None);
        }
    }

    #[test]
    fn connections_are_summed_and_other_methods_are_never_wanted() {
        let endpoint = Endpoint { ip: [10, 244, 0, 1].into(), port: 80 };
        let destination = |method| {
            let inner = destination_attributes(endpoint)
                .u32(DEST_FWD_METHOD, method)
                .u32(DEST_WEIGHT, 1)
                .u32(DEST_ACTIVE_CONNS, 2)
                .u32(DEST_INACT_CONNS, 3)
                .u32(DEST_PERSIST_CONNS, 4);
            let body = request(26, GET_DEST, |body| body.nested(ATTR_DEST, inner)).body;
            parse_destination(Family::V4, &body).unwrap()
        };
        let found = FoundDestination { endpoint, weight: 1, connections: 5, clients: 4 };
        assert_eq!(destination(0), found);
        // Direct routing.
        assert_eq!(destination(3).weight, u32::MAX);
    }

    #[test]
    fn timeouts_are_read_as_written() {
        let timeouts = Timeouts { tcp: 900, tcp_fin: 120, udp: 300 };
        assert_eq!(parse_timeouts(&set_timeouts(26, timeouts).body), timeouts);
    }

    /// The bytes that the kernel expects, as in linux/ip_vs.h.
    #[test]
    fn a_request_has_the_layout_of_the_kernel() {
        let key = keys()[0].1;
        let endpoint = Endpoint { ip: [10, 244, 0, 1].into(), port: 0x1f90 };
        let request = change(26, Family::V4, &ServerChange::DeleteDestination(key, endpoint));
        assert_eq!(request.kind, 26);
        let expected: Vec<u8> = [
            vec![DEL_DEST, 1, 0, 0],
            [48_u16, 0x8001].iter().flat_map(|word| word.to_ne_bytes()).collect(),
            [6_u16, 1, 2, 0].iter().flat_map(|word| word.to_ne_bytes()).collect(),
            [6_u16, 2, 6, 0].iter().flat_map(|word| word.to_ne_bytes()).collect(),
            [20_u16, 3].iter().flat_map(|word| word.to_ne_bytes()).collect(),
            vec![10, 96, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            [6_u16, 4].iter().flat_map(|word| word.to_ne_bytes()).collect(),
            vec![0, 80, 0, 0],
            [32_u16, 0x8002].iter().flat_map(|word| word.to_ne_bytes()).collect(),
            [20_u16, 1].iter().flat_map(|word| word.to_ne_bytes()).collect(),
            vec![10, 244, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            [6_u16, 2].iter().flat_map(|word| word.to_ne_bytes()).collect(),
            vec![0x1f, 0x90, 0, 0],
        ]
        .concat();
        assert_eq!(request.body, expected);
    }
}
