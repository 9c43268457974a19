//! Netlink requests about leftovers of the mode ipvs.
//!
//! Owns: the content of requests to three kinds of netlink. In: names. Out: the kernel's answer.

mod sockets;

use std::{collections::BTreeSet, io, net::IpAddr};

pub(super) use sockets::serve_by_sockets;

use super::{OUR_SERVERS, OUR_SERVERS_MASK, ServerOwner};
use crate::netlink::{
    Attributes, Connection, NETLINK_GENERIC, NETLINK_NETFILTER, NETLINK_ROUTE, Request, attributes, number,
};

const NLM_F_EXCL: u16 = 0x200;

/// Of a message of generic netlink, before its attributes.
const GENERIC_HEADER: usize = 4;
/// `IPVS_CMD_ATTR_SERVICE` (linux/ip_vs.h).
const SERVICE: u16 = 1;
/// `IPVS_SVC_ATTR_AF`, `_PROTOCOL`, `_ADDR`, `_PORT`, `_FLAGS` (linux/ip_vs.h).
const FAMILY: u16 = 1;
const PROTOCOL: u16 = 2;
const ADDRESS: u16 = 3;
const PORT: u16 = 4;
const FLAGS: u16 = 7;
const AF_INET: u32 = 2;

/// Where a virtual server receives packets: protocol number, address, port.
pub(super) type VirtualSocket = (u16, IpAddr, u16);

/// Generic netlink of IPVS.
struct Ipvs {
    connection: Connection,
    id: u16,
}

impl Ipvs {
    fn open() -> io::Result<Self> {
        /// `GENL_ID_CTRL`, `CTRL_CMD_GETFAMILY`, `CTRL_ATTR_FAMILY_NAME`, `CTRL_ATTR_FAMILY_ID` (linux/genetlink.h).
        const CONTROL: u16 = 0x10;
        const GET_FAMILY: u8 = 3;
        const FAMILY_NAME: u16 = 2;
        const FAMILY_ID: u16 = 1;
        let mut connection = Connection::open(NETLINK_GENERIC)?;
        let question = Attributes::after(&generic(GET_FAMILY)).text(FAMILY_NAME, "IPVS");
        let answer = connection.get(&Request { kind: CONTROL, flags: 0, body: question.into_bytes() })?;
        let id = nested(&answer, FAMILY_ID)
            .and_then(|value| value.first_chunk().copied().map(u16::from_ne_bytes))
            .ok_or_else(|| io::Error::other("the kernel did not return the generic netlink ID of IPVS"))?;
        Ok(Self { connection, id })
    }

    /// The attributes of each virtual server of an owner.
    fn servers(&mut self, owner: ServerOwner) -> io::Result<Vec<Vec<u8>>> {
        /// `IPVS_CMD_GET_SERVICE` (linux/ip_vs.h).
        const GET: u8 = 4;
        let mut servers = Vec::new();
        let list = Request { kind: self.id, flags: 0, body: generic(GET).to_vec() };
        self.connection
            .dump(&list, |message| servers.extend(nested(message, SERVICE).map(<[u8]>::to_vec)))?;
        servers.retain(|server| owner_of(server) == owner);
        Ok(servers)
    }

    fn delete(&mut self, server: &[u8]) -> io::Result<()> {
        /// `IPVS_CMD_DEL_SERVICE` (linux/ip_vs.h).
        const DELETE: u8 = 3;
        self.command(DELETE, Attributes::default().bytes(SERVICE, &keys(server)))
    }

    fn command(&mut self, command: u8, attributes: Attributes) -> io::Result<()> {
        let body = [&generic(command)[..], &attributes.into_bytes()].concat();
        self.connection.get(&Request { kind: self.id, flags: 0, body }).map(drop)
    }
}

fn generic(command: u8) -> [u8; GENERIC_HEADER] {
    [command, 1, 0, 0]
}

/// Deletes the virtual servers of the network namespace, but not those of the backend ipvs. Returns how many.
pub(super) fn delete_virtual_servers() -> io::Result<usize> {
    let mut ipvs = Ipvs::open()?;
    let others = ipvs.servers(ServerOwner::Other)?;
    others.iter().try_for_each(|server| ipvs.delete(server))?;
    Ok(others.len())
}

/// Where the virtual servers of the network namespace receive packets, without those of the backend ipvs. `None`: there is
/// one by mark, which may receive any packet.
pub(super) fn sockets_of_others() -> io::Result<Option<BTreeSet<VirtualSocket>>> {
    Ok(Ipvs::open()?.servers(ServerOwner::Other)?.iter().map(|server| socket(server)).collect())
}

/// `server`: its attributes. `None`: it has a mark instead of an address.
fn socket(server: &[u8]) -> Option<VirtualSocket> {
    let ip = address(server, find(server, ADDRESS)?)?;
    let port = u16::from_be_bytes(*find(server, PORT)?.first_chunk()?);
    Some((u16::try_from(number(find(server, PROTOCOL)?)?).ok()?, ip, port))
}

/// Of the server's family.
fn address(server: &[u8], value: &[u8]) -> Option<IpAddr> {
    Some(match number(find(server, FAMILY)?)? {
        AF_INET => IpAddr::from(*value.first_chunk::<4>()?),
        _ => IpAddr::from(*value.first_chunk::<16>()?),
    })
}

/// The attributes that identify a virtual server.
fn keys(server: &[u8]) -> Vec<u8> {
    /// Those above and `IPVS_SVC_ATTR_FWMARK`.
    const KEYS: std::ops::RangeInclusive<u16> = FAMILY..=5;
    KEYS.filter_map(|kind| find(server, kind).map(|value| attribute(kind, value)))
        .collect::<Vec<_>>()
        .concat()
}

fn flags(server: &[u8]) -> u32 {
    find(server, FLAGS).and_then(|value| value.first_chunk().copied()).map_or(0, u32::from_ne_bytes)
}

fn owner_of(server: &[u8]) -> ServerOwner {
    match flags(server) & OUR_SERVERS_MASK == OUR_SERVERS {
        true => ServerOwner::Keelson,
        false => ServerOwner::Other,
    }
}

/// The content of the attribute of a message of generic netlink.
fn nested(message: &[u8], wanted: u16) -> Option<&[u8]> {
    find(message.get(GENERIC_HEADER..)?, wanted)
}

/// Deletes an interface of the network namespace.
pub(super) fn delete_interface(name: &str) -> io::Result<()> {
    /// `RTM_DELLINK`, `IFLA_IFNAME` (linux/rtnetlink.h, linux/if_link.h).
    const DELETE_LINK: u16 = 17;
    const NAME: u16 = 3;
    // ifinfomsg: by name, not by index.
    let body = Attributes::after(&[0; 16]).text(NAME, name).into_bytes();
    Connection::open(NETLINK_ROUTE)?.get(&Request { kind: DELETE_LINK, flags: 0, body }).map(drop)
}

/// Deletes an ipset set. Returns `false` if there is none of the name.
pub(super) fn destroy_set(name: &str) -> io::Result<bool> {
    /// `NFNL_SUBSYS_IPSET` and `IPSET_CMD_DESTROY`; `IPSET_ATTR_PROTOCOL`, `IPSET_ATTR_SETNAME` (linux/netfilter/ipset/ip_set.h).
    const DESTROY: u16 = 6 << 8 | 3;
    const PROTOCOL: (u16, u8) = (1, 6);
    const NAME: u16 = 2;
    const AF_INET: u8 = 2;
    let message = Attributes::after(&[AF_INET, 0, 0, 0]).bytes(PROTOCOL.0, &[PROTOCOL.1]);
    // Without a name the kernel would destroy every set.
    let body = message.text(NAME, name).into_bytes();
    // Without the flag, the kernel reports success for a set that does not exist.
    let destroy = Request { kind: DESTROY, flags: NLM_F_EXCL, body };
    match Connection::open(NETLINK_NETFILTER)?.get(&destroy) {
        Ok(_) => Ok(true),
        Err(error) => match error.raw_os_error().map(nix::errno::Errno::from_raw) {
            // nfnetlink answers EINVAL if the kernel has no ipset.
            Some(nix::errno::Errno::ENOENT | nix::errno::Errno::EINVAL) => Ok(false),
            _ => Err(error),
        },
    }
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    Attributes::default().bytes(kind, value).into_bytes()
}

fn find(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys_of(port: u16) -> Vec<u8> {
        [
            attribute(1, &2_u16.to_ne_bytes()),
            attribute(2, &6_u16.to_ne_bytes()),
            attribute(3, &[10, 96, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            attribute(4, &port.to_be_bytes()),
        ]
        .concat()
    }

    pub(super) fn server(port: u16, scheduler: &[u8], flags: u32) -> Vec<u8> {
        let flags = [flags.to_ne_bytes(), [0xff; 4]].concat();
        let rest =
            [attribute(6, scheduler), attribute(7, &flags), attribute(8, &[0; 4]), attribute(9, &[0xff; 4])];
        [keys_of(port), rest.concat()].concat()
    }

    #[test]
    fn virtual_servers_of_others_are_those_without_our_mark() {
        for (flags, owner) in [
            (OUR_SERVERS | 6, ServerOwner::Keelson),
            (OUR_SERVERS | 1, ServerOwner::Keelson),
            (2, ServerOwner::Other),
            (0x4a00_0001, ServerOwner::Other),
        ] {
            assert_eq!(owner_of(&server(80, b"rr\0", flags)), owner, "{flags:x}");
        }
        assert_eq!(owner_of(&[]), ServerOwner::Other);
        assert_eq!(keys(&server(82, b"rr\0", 2)), keys_of(82));
        assert_eq!(keys(&[]), [0; 0]);
    }

    #[test]
    fn a_virtual_server_receives_packets_at_its_address_or_by_mark() {
        assert_eq!(socket(&server(82, b"rr\0", 2)), Some((6, [10, 96, 0, 1].into(), 82)));
        let v6 = [
            attribute(1, &10_u16.to_ne_bytes()),
            attribute(2, &17_u16.to_ne_bytes()),
            attribute(3, &[0xfd; 16]),
            attribute(4, &[0, 53]),
        ];
        assert_eq!(socket(&v6.concat()), Some((17, [0xfd; 16].into(), 53)));
        assert_eq!(socket(&[attribute(1, &2_u16.to_ne_bytes()), attribute(5, &[7, 0, 0, 0])].concat()), None);
        let message = [vec![1, 1, 0, 0], attribute(SERVICE, &v6.concat())].concat();
        assert_eq!(nested(&message, SERVICE), Some(&v6.concat()[..]));
        // One that ends too soon.
        assert_eq!((nested(&message[..10], SERVICE), nested(&message[..2], SERVICE)), (None, None));
    }
}
