//! Messages of rtnetlink about the dummy interface and its addresses.
//!
//! Owns: their encoding and decoding. In and out: values. Source: linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h.
//!
//! No connection of the node to other addresses gets an address of a Service as its source: IPv4 addresses have the scope
//! of the host, and IPv6 addresses are deprecated. The interface stays down; addresses of a dummy interface are local all
//! the same.

use std::net::IpAddr;

use keelson_proxy::{addresses::SERVICE_INTERFACES, model::Family};

use keelson_proxy::netlink::{Attributes, Request, attributes};

pub(crate) const INTERFACE: &str = SERVICE_INTERFACES[0];

const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;
const NLM_F_CREATE_EXCL: u16 = 0x600;
const NLM_F_CREATE_REPLACE: u16 = 0x500;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_CACHEINFO: u16 = 6;
const IFA_F_NODAD: u8 = 2;
const SCOPE_HOST: u8 = 254;
const LINK_BYTES: usize = 16;
const ADDRESS_BYTES: usize = 8;

const fn number(family: Family) -> u8 {
    match family {
        Family::V4 => 2,
        Family::V6 => 10,
    }
}

fn by_name() -> Attributes {
    Attributes::after(&[0; LINK_BYTES]).text(IFLA_IFNAME, INTERFACE)
}

pub(crate) fn create() -> Request {
    let kind = Attributes::default().text(IFLA_INFO_KIND, "dummy");
    let body = by_name().nested(IFLA_LINKINFO, kind).into_bytes();
    Request { kind: RTM_NEWLINK, flags: NLM_F_CREATE_EXCL, body }
}

pub(crate) fn delete() -> Request {
    Request { kind: RTM_DELLINK, flags: 0, body: by_name().into_bytes() }
}

pub(crate) fn get() -> Request {
    Request { kind: RTM_GETLINK, flags: 0, body: by_name().into_bytes() }
}

/// The index of the interface in an answer.
pub(crate) fn parse_index(body: &[u8]) -> Option<u32> {
    body.get(4..)?.first_chunk().map(|index| u32::from_ne_bytes(*index)).filter(|index| *index != 0)
}

/// `struct ifaddrmsg`, and the address.
fn of_address(index: u32, ip: IpAddr) -> Attributes {
    let family = Family::of(ip);
    let (bits, flags, scope) = match family {
        Family::V4 => (32, 0, SCOPE_HOST),
        Family::V6 => (128, IFA_F_NODAD, 0),
    };
    let mut header = vec![number(family), bits, flags, scope];
    header.extend(index.to_ne_bytes());
    let attributes = Attributes::after(&header);
    match ip {
        IpAddr::V4(ip) => attributes.bytes(IFA_LOCAL, &ip.octets()).bytes(IFA_ADDRESS, &ip.octets()),
        IpAddr::V6(ip) => attributes.bytes(IFA_ADDRESS, &ip.octets()),
    }
}

pub(crate) fn add_address(index: u32, ip: IpAddr) -> Request {
    let mut attributes = of_address(index, ip);
    if ip.is_ipv6() {
        // Preferred for 0 seconds, valid forever.
        let times: Vec<u8> = [0, u32::MAX, 0, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
        attributes = attributes.bytes(IFA_CACHEINFO, &times);
    }
    Request { kind: RTM_NEWADDR, flags: NLM_F_CREATE_REPLACE, body: attributes.into_bytes() }
}

pub(crate) fn delete_address(index: u32, ip: IpAddr) -> Request {
    Request { kind: RTM_DELADDR, flags: 0, body: of_address(index, ip).into_bytes() }
}

pub(crate) fn get_addresses(family: Family) -> Request {
    let mut body = vec![0; ADDRESS_BYTES];
    body[0] = number(family);
    Request { kind: RTM_GETADDR, flags: 0, body }
}

/// The address of an answer, if the interface has it. Link-local addresses are the kernel's.
pub(crate) fn parse_address(index: u32, body: &[u8]) -> Option<IpAddr> {
    let header: &[u8; ADDRESS_BYTES] = body.first_chunk()?;
    if header.get(4..)? != index.to_ne_bytes().as_slice() {
        return None;
    }
    let wanted = match header[0] {
        2 => IFA_LOCAL,
        _ => IFA_ADDRESS,
    };
    let (_, value) = attributes(body.get(ADDRESS_BYTES..)?).find(|(kind, _)| *kind == wanted)?;
    let ip: IpAddr = match header[0] {
        2 => (*value.first_chunk::<4>()?).into(),
        10 => (*value.first_chunk::<16>()?).into(),
        _ => return None,
    };
    let is_link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    (!is_link_local).then_some(ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_written() {
        for ip in ["10.96.0.1", "fd00:96::1"] {
            let ip: IpAddr = ip.parse().unwrap();
            let body = add_address(7, ip).body;
            assert_eq!(parse_address(7, &body), Some(ip));
            assert_eq!(parse_address(8, &body), None, "of another interface");
            for length in 0..ADDRESS_BYTES + 8 {
                assert_eq!(parse_address(7, &body[..length]), None, "{length}");
            }
        }
        assert_eq!(parse_address(7, &add_address(7, "fe80::1".parse().unwrap()).body), None);
    }

    #[test]
    fn an_index_is_read() {
        let mut body = vec![0; LINK_BYTES];
        assert_eq!(parse_index(&body), None);
        body[4..8].copy_from_slice(&9_u32.to_ne_bytes());
        assert_eq!(parse_index(&body), Some(9));
    }
}
