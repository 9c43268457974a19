//! Lists and destroys UDP sockets of the calling thread's network namespace.
//!
//! Owns: the messages of `sock_diag` (linux/sock_diag.h, linux/inet_diag.h). In: sockets by their cookie and peer. Out: the
//! number of sockets that were destroyed.

use std::{collections::HashMap, io, net::IpAddr};

use keelson_proxy::model::Family;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_SOCK_DIAG};
use nix::libc;

use crate::layout::{Address, Remote};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const HEADER: usize = 16;
/// `struct inet_diag_sockid`.
const SOCKET_ID: usize = 48;
const BUFFER: usize = 32 * 1024;
const ALL_STATES: u32 = u32::MAX;

/// Destroys those sockets of `wanted` (cookie : peer) that still have this peer.
pub(super) fn destroy(family: Family, wanted: &HashMap<u64, Remote>) -> io::Result<u64> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    let mut destroyed = 0;
    for id in list(&socket, family)? {
        let is_wanted = wanted.get(&cookie(&id)).is_some_and(|remote| *remote == peer(&id, family));
        if is_wanted && destroy_one(&socket, family, &id)? {
            destroyed += 1;
        }
    }
    Ok(destroyed)
}

/// Whether UDP sockets can be listed and destroyed here. Destroys none: no socket has the address that it names.
pub(super) fn probe() -> io::Result<()> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    list(&socket, Family::V4)?;
    destroy_one(&socket, Family::V4, &[0; SOCKET_ID]).map(drop)
}

type SocketId = [u8; SOCKET_ID];

fn list(socket: &Socket, family: Family) -> io::Result<Vec<SocketId>> {
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_DUMP;
    send(socket, &request(SOCK_DIAG_BY_FAMILY, flags, family, &[0; SOCKET_ID]))?;
    let mut found = Vec::new();
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        buffer.clear();
        socket.recv(&mut buffer, 0)?;
        for (kind, body) in messages(&buffer) {
            match i32::from(kind) {
                libc::NLMSG_DONE => return Ok(found),
                libc::NLMSG_ERROR => return error_of(body).map_or(Ok(found), Err),
                _ => found.extend(body.get(4..4 + SOCKET_ID).and_then(|id| SocketId::try_from(id).ok())),
            }
        }
    }
}

/// False: it has ended meanwhile.
fn destroy_one(socket: &Socket, family: Family, id: &SocketId) -> io::Result<bool> {
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK;
    send(socket, &request(SOCK_DESTROY, flags, family, id))?;
    let mut buffer = Vec::with_capacity(BUFFER);
    socket.recv(&mut buffer, 0)?;
    let failed = messages(&buffer).into_iter().find_map(|(_, body)| error_of(body));
    match failed {
        None => Ok(true),
        Some(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Some(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            let reason = "the kernel cannot destroy sockets (CONFIG_INET_DIAG_DESTROY)";
            Err(io::Error::new(io::ErrorKind::Unsupported, reason))
        }
        Some(error) => Err(error),
    }
}

fn send(socket: &Socket, message: &[u8]) -> io::Result<()> {
    socket.send_to(message, &SocketAddr::new(0, 0), 0).map(drop)
}

/// `struct inet_diag_req_v2` behind the header of netlink.
fn request(kind: u16, flags: i32, family: Family, id: &SocketId) -> Vec<u8> {
    let family = match family {
        Family::V4 => libc::AF_INET,
        Family::V6 => libc::AF_INET6,
    };
    let length = HEADER + 8 + SOCKET_ID;
    let mut message = Vec::with_capacity(length);
    message.extend(u32::try_from(length).unwrap_or_default().to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(u16::try_from(flags).unwrap_or_default().to_ne_bytes());
    message.extend([0; 8]);
    message.extend([u8::try_from(family).unwrap_or_default(), 17, 0, 0]);
    message.extend(ALL_STATES.to_ne_bytes());
    message.extend(id);
    message
}

/// The messages of a datagram: kind and body. What is cut off is left out.
fn messages(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    while let Some(header) = bytes.get(..HEADER) {
        let length =
            usize::try_from(u32::from_ne_bytes([header[0], header[1], header[2], header[3]])).unwrap_or(0);
        let Some(body) = bytes.get(HEADER..length) else { break };
        found.push((u16::from_ne_bytes([header[4], header[5]]), body));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

/// The error of an NLMSG_ERROR; `None`: an acknowledgement.
fn error_of(body: &[u8]) -> Option<io::Error> {
    let code = body.get(..4).and_then(|bytes| <[u8; 4]>::try_from(bytes).ok()).map(i32::from_ne_bytes)?;
    (code != 0).then(|| io::Error::from_raw_os_error(-code))
}

fn cookie(id: &SocketId) -> u64 {
    let [.., a, b, c, d, e, f, g, h] = *id;
    let (low, high) = (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]));
    u64::from(high) << 32 | u64::from(low)
}

/// Ports are at 0 and 2, addresses at 4 and 20, in network order.
fn peer(id: &SocketId, family: Family) -> Remote {
    let mut address = [0; 16];
    address.copy_from_slice(&id[20..36]);
    let address = match family {
        Family::V4 => Address::from(IpAddr::from([address[0], address[1], address[2], address[3]])),
        Family::V6 => Address(address),
    };
    Remote { address, port: u16::from_be_bytes([id[2], id[3]]) }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;
    use crate::testing::in_namespace;

    fn remote(of: &UdpSocket) -> Remote {
        let at = of.peer_addr().unwrap();
        Remote { address: at.ip().into(), port: at.port() }
    }

    /// `family`: of the socket.
    fn socket_cookie(of: &UdpSocket) -> u64 {
        socket2::SockRef::from(of).cookie().unwrap()
    }

    #[test]
    fn only_the_sockets_that_are_meant_end() {
        in_namespace(|| {
            let server = UdpSocket::bind("[::]:0").unwrap();
            let port = server.local_addr().unwrap().port();
            for (own, to, family) in [
                ("127.0.0.1:0", format!("127.0.0.1:{port}"), Family::V4),
                ("[::1]:0", format!("[::1]:{port}"), Family::V6),
                ("[::]:0", format!("[::ffff:127.0.0.1]:{port}"), Family::V6),
            ] {
                let connected = || {
                    let socket = UdpSocket::bind(own).unwrap();
                    socket.connect(&to).unwrap();
                    socket
                };
                let (meant, other, moved) = (connected(), connected(), connected());
                let elsewhere = Remote { port: 1, ..remote(&moved) };
                let wanted = HashMap::from([
                    (
                        socket_cookie(&meant),
                        Remote { address: Address::from(remote(&meant).address.ip()), port },
                    ),
                    (socket_cookie(&moved), elsewhere),
                ]);
                assert_eq!(destroy(family, &wanted).unwrap(), 1, "{to}");
                let error = meant.recv(&mut [0; 1]).unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::ECONNABORTED), "{to}");
                for alive in [other, moved] {
                    assert_eq!(alive.send(b"?").unwrap(), 1, "{to}");
                }
                assert_eq!(destroy(family, &wanted).unwrap(), 0, "{to}: it is gone");
            }
        });
    }

    #[test]
    fn a_probe_ends_no_socket() {
        in_namespace(|| {
            let server = UdpSocket::bind("127.0.0.1:0").unwrap();
            let client = UdpSocket::bind("127.0.0.1:0").unwrap();
            client.connect(server.local_addr().unwrap()).unwrap();
            probe().unwrap();
            assert_eq!(client.send(b"?").unwrap(), 1);
        });
    }

    #[test]
    fn messages_that_are_cut_off_are_left_out() {
        let whole = request(SOCK_DIAG_BY_FAMILY, 0, Family::V4, &[7; SOCKET_ID]);
        let two = [whole.clone(), whole.clone()].concat();
        assert_eq!(messages(&two).len(), 2);
        for length in 0..two.len() {
            let expected = length / whole.len();
            assert_eq!(messages(&two[..length]).len(), expected, "{length}");
        }
        assert_eq!(messages(&[0; 64]).len(), 0, "a length of zero ends it");
    }
}
