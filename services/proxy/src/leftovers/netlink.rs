//! Netlink requests to remove leftovers of the mode ipvs.
//!
//! Owns: messages of three kinds of netlink, each of a few bytes, which `netlink-packet-*` does not have. In: names.
//! Out: the kernel's answer.

use std::io;

use netlink_sys::{
    Socket, SocketAddr,
    protocols::{NETLINK_GENERIC, NETLINK_NETFILTER, NETLINK_ROUTE},
};

use super::{OUR_SERVERS, OUR_SERVERS_MASK};

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const HEADER: usize = 16;
const RECEIVE_BYTES: usize = 64 * 1024;

/// Of a message of generic netlink, before its attributes.
const GENERIC_HEADER: usize = 4;
/// `IPVS_CMD_ATTR_SERVICE` (linux/ip_vs.h).
const SERVICE: u16 = 1;

/// Deletes the virtual servers of the network namespace, but not those of the backend ipvs. Returns how many.
pub(super) fn delete_virtual_servers() -> io::Result<usize> {
    /// `GENL_ID_CTRL`, `CTRL_CMD_GETFAMILY`, `CTRL_ATTR_FAMILY_NAME`, `CTRL_ATTR_FAMILY_ID` (linux/genetlink.h).
    const CONTROL: u16 = 0x10;
    const GET_FAMILY: u8 = 3;
    const FAMILY_NAME: u16 = 2;
    const FAMILY_ID: u16 = 1;
    /// `IPVS_CMD_DEL_SERVICE`, `IPVS_CMD_GET_SERVICE` (linux/ip_vs.h).
    const DELETE: u8 = 3;
    const GET: u8 = 4;
    let generic = |command: u8| vec![command, 1, 0, 0];
    let mut question = generic(GET_FAMILY);
    question.extend(attribute(FAMILY_NAME, b"IPVS\0"));
    let answer = request(NETLINK_GENERIC, CONTROL, 0, &question)?;
    let id = find(answer.get(GENERIC_HEADER..).unwrap_or_default(), FAMILY_ID)
        .and_then(|value| value.first_chunk().copied().map(u16::from_ne_bytes))
        .ok_or_else(|| io::Error::other("the kernel did not return the generic netlink ID of IPVS"))?;
    let others = virtual_servers_of_others(&request(NETLINK_GENERIC, id, NLM_F_DUMP, &generic(GET))?);
    for server in &others {
        request(NETLINK_GENERIC, id, 0, &[generic(DELETE), attribute(SERVICE, server)].concat())?;
    }
    Ok(others.len())
}

/// What identifies the listed virtual servers that are not marked as those of the backend ipvs: attributes.
fn virtual_servers_of_others(mut listed: &[u8]) -> Vec<Vec<u8>> {
    /// `IPVS_SVC_ATTR_AF`, `_PROTOCOL`, `_ADDR`, `_PORT` and `_FWMARK`, and the one with the flags.
    const KEYS: std::ops::RangeInclusive<u16> = 1..=5;
    const FLAGS: u16 = 7;
    let mut others = Vec::new();
    // Each message has one attribute.
    while let Some(message) = listed.get(GENERIC_HEADER..)
        && let Some(server) = find(message, SERVICE)
    {
        listed = message.get((4 + server.len()).next_multiple_of(4)..).unwrap_or_default();
        let flags = find(server, FLAGS).and_then(|value| value.first_chunk().copied());
        if flags.map_or(0, u32::from_ne_bytes) & OUR_SERVERS_MASK == OUR_SERVERS {
            continue;
        }
        let keys = KEYS.filter_map(|kind| find(server, kind).map(|value| attribute(kind, value)));
        others.push(keys.collect::<Vec<_>>().concat());
    }
    others
}

/// Deletes an interface of the network namespace.
pub(super) fn delete_interface(name: &str) -> io::Result<()> {
    /// `RTM_DELLINK`, `IFLA_IFNAME` (linux/rtnetlink.h, linux/if_link.h).
    const DELETE_LINK: u16 = 17;
    const NAME: u16 = 3;
    // ifinfomsg: by name, not by index.
    let mut message = vec![0; 16];
    message.extend(attribute(NAME, &terminated(name)));
    request(NETLINK_ROUTE, DELETE_LINK, 0, &message).map(drop)
}

/// Deletes an ipset set. Returns `false` if there is none of the name.
pub(super) fn destroy_set(name: &str) -> io::Result<bool> {
    /// `NFNL_SUBSYS_IPSET` and `IPSET_CMD_DESTROY`; `IPSET_ATTR_PROTOCOL`, `IPSET_ATTR_SETNAME` (linux/netfilter/ipset/ip_set.h).
    const DESTROY: u16 = 6 << 8 | 3;
    const PROTOCOL: (u16, u8) = (1, 6);
    const NAME: u16 = 2;
    const AF_INET: u8 = 2;
    let mut message = vec![AF_INET, 0, 0, 0];
    message.extend(attribute(PROTOCOL.0, &[PROTOCOL.1]));
    // Without a name the kernel would destroy every set.
    message.extend(attribute(NAME, &terminated(name)));
    // Without the flag, the kernel reports success for a set that does not exist.
    match request(NETLINK_NETFILTER, DESTROY, NLM_F_EXCL, &message) {
        Ok(_) => Ok(true),
        Err(error) => match error.raw_os_error().map(nix::errno::Errno::from_raw) {
            // nfnetlink answers EINVAL if the kernel has no ipset.
            Some(nix::errno::Errno::ENOENT | nix::errno::Errno::EINVAL) => Ok(false),
            _ => Err(error),
        },
    }
}

fn terminated(name: &str) -> Vec<u8> {
    name.bytes().chain([0]).collect()
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = 4 + value.len();
    let mut bytes = Vec::with_capacity(length.next_multiple_of(4));
    bytes.extend(u16::try_from(length).unwrap_or(u16::MAX).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(length.next_multiple_of(4), 0);
    bytes
}

fn find(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let (length, rest) = bytes.split_first_chunk::<2>()?;
        let (kind, _) = rest.split_first_chunk::<2>()?;
        let length = usize::from(u16::from_ne_bytes(*length));
        let value = bytes.get(4..length)?;
        if u16::from_ne_bytes(*kind) == wanted {
            return Some(value);
        }
        bytes = bytes.get(length.next_multiple_of(4)..)?;
    }
}

/// Sends a request that is acknowledged or answered by a list, and returns the payloads of what came before the end.
fn request(protocol: isize, kind: u16, flags: u16, payload: &[u8]) -> io::Result<Vec<u8>> {
    let mut socket = Socket::new(protocol)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let length = HEADER + payload.len();
    let mut request = Vec::with_capacity(length);
    request.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
    request.extend(kind.to_ne_bytes());
    request.extend((NLM_F_REQUEST | NLM_F_ACK | flags).to_ne_bytes());
    request.extend([0; 8]);
    request.extend(payload);
    socket.send(&request, 0)?;
    let mut answer = Vec::new();
    let mut buffer = Vec::with_capacity(RECEIVE_BYTES);
    loop {
        buffer.clear();
        socket.recv(&mut buffer, 0)?;
        let mut rest = buffer.as_slice();
        while let Some((kind, payload, next)) = message(rest) {
            if kind == NLMSG_DONE {
                return Ok(answer);
            }
            if kind == NLMSG_ERROR {
                let code = payload.first_chunk().copied().map_or(0, i32::from_ne_bytes);
                return if code == 0 {
                    Ok(answer)
                } else {
                    Err(io::Error::from_raw_os_error(code.saturating_abs()))
                };
            }
            answer.extend(payload);
            rest = next;
        }
    }
}

/// Kind and payload of the first message, and the remaining bytes.
fn message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = usize::try_from(u32::from_ne_bytes(*bytes.first_chunk()?)).ok()?;
    let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
    let payload = bytes.get(HEADER..length)?;
    Some((kind, payload, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_servers_of_others_are_those_without_our_mark() {
        let server = |port: u16, flags: u32| {
            let flags = [flags.to_ne_bytes(), [0xff; 4]].concat();
            let keys = [
                attribute(1, &2_u16.to_ne_bytes()),
                attribute(2, &6_u16.to_ne_bytes()),
                attribute(3, &[10, 96, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
                attribute(4, &port.to_be_bytes()),
            ]
            .concat();
            let rest = [attribute(6, b"rr\0"), attribute(7, &flags), attribute(8, &[0; 4])].concat();
            (keys.clone(), [vec![1, 1, 0, 0], attribute(SERVICE, &[keys, rest].concat())].concat())
        };
        let [ours, persistent, kube_proxy, other] = [
            server(80, OUR_SERVERS | 6),
            server(81, OUR_SERVERS | 1),
            server(82, 2),
            server(83, 0x4a00_0001),
        ];
        let listed = [ours.1, kube_proxy.1, persistent.1, other.1].concat();
        assert_eq!(virtual_servers_of_others(&listed), [kube_proxy.0, other.0]);
        assert_eq!(virtual_servers_of_others(&[]), [[0; 0]; 0]);
        // A list that ends too soon.
        assert_eq!(virtual_servers_of_others(&listed[..10]), [[0; 0]; 0]);
    }
}
