//! Lets the sockets of this node serve what arrives for virtual servers, which receive packets before any socket does.
//!
//! Owns: how a virtual server is changed for that. In: the owner of virtual servers. Out: requests to IPVS.
//!
//! A real server at the address and port of its virtual server is the socket that listens there: IPVS translates the packet to what
//! it is, and the node receives it. The other real servers get weight 0, so that they serve the connections that they have and
//! no new one. Where `net.ipv4.vs.expire_nodest_conn` is 1, as kube-proxy and the backend ipvs set it, connections to the socket
//! outlive the virtual server; at most one packet of each is sent again.
//!
//! The forwarding method is NAT. With direct routing, IPVS keeps a route of IPv6 that refers to the interface of the address, and
//! the interface cannot be deleted until the kernel has forgotten the real server, for minutes (Linux 6.1).

use std::io;

use super::{
    super::ServerOwner, ADDRESS, Attributes, FLAGS, Ipvs, PORT, Request, SERVICE, address, attribute, find,
    flags, generic, keys, nested, number, socket,
};

// linux/ip_vs.h. `IPVS_CMD_`: SET_SERVICE, NEW_DEST, SET_DEST, GET_DEST.
const SET_SERVER: u8 = 2;
const ADD_DESTINATION: u8 = 5;
const SET_DESTINATION: u8 = 6;
const GET_DESTINATIONS: u8 = 8;
/// `IPVS_CMD_ATTR_DEST`.
const DESTINATION: u16 = 2;
/// `IPVS_SVC_ATTR_SCHED_NAME`, `_TIMEOUT`, `_NETMASK`.
const SCHEDULER: u16 = 6;
const TIMEOUT: u16 = 8;
const NETMASK: u16 = 9;
/// `IP_VS_SVC_F_PERSISTENT`.
const PERSISTENT: u32 = 1;
/// `IPVS_DEST_ATTR_ADDR`, `_PORT`, `_FWD_METHOD`, `_WEIGHT`, `_U_THRESH`, `_L_THRESH`.
const DESTINATION_ADDRESS: u16 = 1;
const DESTINATION_PORT: u16 = 2;
const METHOD: u16 = 3;
const WEIGHT: u16 = 4;
const UPPER_THRESHOLD: u16 = 5;
const LOWER_THRESHOLD: u16 = 6;
/// `IP_VS_CONN_F_MASQ`.
const NAT: u32 = 0;

/// They choose by a hash, and drop what belongs to a real server of weight 0.
const HASHING: [&[u8]; 5] = [b"sh", b"mh", b"dh", b"lblc", b"lblcr"];

/// From now on, new connections to the virtual servers of an owner go to the sockets of this node that listen there.
/// Established ones go on. Virtual servers by mark stay as they are. What has been changed before is not changed again.
pub(in super::super) fn serve_by_sockets(owner: ServerOwner) -> io::Result<()> {
    let mut ipvs = Ipvs::open()?;
    for server in ipvs.servers(owner)? {
        let destinations = ipvs.destinations(&server)?;
        for (command, attributes) in changes(&server, &destinations) {
            ipvs.command(command, attributes)?;
        }
    }
    Ok(())
}

impl Ipvs {
    /// The attributes of each real server.
    fn destinations(&mut self, server: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        let mut destinations = Vec::new();
        let body = Attributes::after(&generic(GET_DESTINATIONS)).bytes(SERVICE, &keys(server)).into_bytes();
        let list = Request { kind: self.id, flags: 0, body };
        let each = |message: &[u8]| destinations.extend(nested(message, DESTINATION).map(<[u8]>::to_vec));
        self.connection.dump(&list, each)?;
        Ok(destinations)
    }
}

/// The requests for a virtual server, in their order. The socket comes first: a connection that is opened meanwhile has a real server.
fn changes(server: &[u8], destinations: &[Vec<u8>]) -> Vec<(u8, Attributes)> {
    let Some((_, ip, port)) = socket(server) else { return Vec::new() };
    let of_server = || Attributes::default().bytes(SERVICE, &keys(server));
    let mut changes = Vec::new();
    let is_socket = |destination: &&Vec<u8>| {
        find(destination, DESTINATION_ADDRESS).and_then(|value| address(server, value)) == Some(ip)
            && find(destination, DESTINATION_PORT) == Some(&port.to_be_bytes())
    };
    if !destinations.iter().any(|destination| is_socket(&destination)) {
        let place = [(ADDRESS, DESTINATION_ADDRESS), (PORT, DESTINATION_PORT)];
        let place =
            place.map(|(kind, of_destination)| (of_destination, find(server, kind).unwrap_or_default()));
        changes.push((ADD_DESTINATION, of_server().nested(DESTINATION, weighted(&place, NAT, 1))));
    }
    let scheduler = find(server, SCHEDULER).unwrap_or_default();
    let is_hashing = HASHING.contains(&scheduler.strip_suffix(b"\0").unwrap_or(scheduler));
    if is_hashing || flags(server) & PERSISTENT != 0 {
        let flags = [(flags(server) & !PERSISTENT).to_ne_bytes(), [0xff; 4]].concat();
        let kept = [TIMEOUT, NETMASK].map(|kind| attribute(kind, find(server, kind).unwrap_or_default()));
        let new = [
            keys(server),
            attribute(SCHEDULER, if is_hashing { b"rr\0" } else { scheduler }),
            attribute(FLAGS, &flags),
            kept.concat(),
        ];
        changes.push((SET_SERVER, Attributes::default().bytes(SERVICE, &new.concat())));
    }
    let value = |destination: &[u8], kind| find(destination, kind).and_then(number).unwrap_or_default();
    for destination in destinations.iter().filter(|destination| !is_socket(destination)) {
        if value(destination, WEIGHT) > 0 {
            let place = [DESTINATION_ADDRESS, DESTINATION_PORT]
                .map(|kind| (kind, find(destination, kind).unwrap_or_default()));
            let weighted = weighted(&place, value(destination, METHOD), 0);
            changes.push((SET_DESTINATION, of_server().nested(DESTINATION, weighted)));
        }
    }
    changes
}

/// `place`: address and port of a real server.
fn weighted(place: &[(u16, &[u8])], method: u32, weight: u32) -> Attributes {
    let place = place.iter().fold(Attributes::default(), |all, (kind, value)| all.bytes(*kind, value));
    place.u32(METHOD, method).u32(WEIGHT, weight).u32(UPPER_THRESHOLD, 0).u32(LOWER_THRESHOLD, 0)
}

#[cfg(test)]
mod tests {
    use super::{super::tests::server, *};

    fn destination(ip: u8, port: u16, method: u32, weight: u32) -> Vec<u8> {
        let mut address = [0; 16];
        address[..4].copy_from_slice(&[10, 96, 0, ip]);
        weighted(&[(1, &address), (2, &port.to_be_bytes())], method, weight).into_bytes()
    }

    fn asked(server: &[u8], destinations: &[Vec<u8>]) -> Vec<(u8, Vec<u8>)> {
        changes(server, destinations)
            .into_iter()
            .map(|(command, body)| (command, body.into_bytes()))
            .collect()
    }

    #[test]
    fn a_socket_serves_new_connections_and_real_servers_the_established_ones() {
        let plain = server(80, b"rr\0", 2);
        let to = |destination: &[u8]| [attribute(1, &keys(&plain)), nested_attribute(destination)].concat();
        let socket = destination(1, 80, 0, 1);
        let found = [destination(7, 8080, 0, 5), destination(8, 8080, 0, 0), destination(1, 8080, 2, 1)];
        let expected = vec![
            (ADD_DESTINATION, to(&socket)),
            (SET_DESTINATION, to(&destination(7, 8080, 0, 0))),
            (SET_DESTINATION, to(&destination(1, 8080, 2, 0))),
        ];
        assert_eq!(asked(&plain, &found), expected);
        // Again, and one that had been added meanwhile.
        let done = [destination(7, 8080, 0, 0), socket.clone()];
        assert_eq!(asked(&plain, &done), []);
        let late = [socket, destination(9, 8080, 0, 1)];
        assert_eq!(asked(&plain, &late), [(SET_DESTINATION, to(&destination(9, 8080, 0, 0)))]);
        // By mark.
        assert_eq!(asked(&attribute(5, &[7, 0, 0, 0]), &found), []);
    }

    fn nested_attribute(destination: &[u8]) -> Vec<u8> {
        let outer = Attributes::default().nested(DESTINATION, Attributes::after(destination));
        outer.into_bytes()
    }

    #[test]
    fn a_client_or_a_hash_chooses_no_real_server_any_more() {
        let socket = [destination(1, 80, 0, 1)];
        for (before, after) in [
            ((&b"sh\0"[..], 2), Some((&b"rr\0"[..], 2))),
            ((b"mh\0", 0x4b00_0003), Some((b"rr\0", 0x4b00_0002))),
            ((b"wrr\0", 3), Some((b"wrr\0", 2))),
            ((b"wrr\0", 2), None),
        ] {
            let expected = after
                .map(|(scheduler, flags)| (SET_SERVER, attribute(SERVICE, &server(80, scheduler, flags))));
            assert_eq!(asked(&server(80, before.0, before.1), &socket), Vec::from_iter(expected));
        }
    }
}
