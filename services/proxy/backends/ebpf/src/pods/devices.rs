//! The devices of pods, on the node's side.
//!
//! Owns: [`find`]. In: names, the kernel's list of links (rtnetlink). Out: pairs of veth whose other end is in another network
//! namespace, and what routes their packets.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use keelson_proxy::netlink::{Attributes, Connection, NETLINK_ROUTE, Request, attributes, number};

use super::layout::HardwareAddress;

const RTM_GETLINK: u16 = 18;
/// `struct ifinfomsg`.
const LINK_MESSAGE: usize = 16;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_EXT_MASK: u16 = 29;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_INFO_KIND: u16 = 1;
const RTEXT_FILTER_SKIP_STATS: u32 = 8;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodDevice {
    pub(crate) name: String,
    /// The bridge that it is a port of, or itself.
    pub(crate) router: u32,
    pub(crate) router_address: HardwareAddress,
}

/// By number; and the names of those whose packets cannot be handed over.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) devices: BTreeMap<u32, PodDevice>,
    pub(crate) unsuitable: Vec<String>,
}

#[derive(Debug, Default)]
struct Link {
    name: String,
    address: Option<HardwareAddress>,
    master: Option<u32>,
    kind: Vec<u8>,
    /// The other end is in another network namespace.
    has_foreign_peer: bool,
}

/// The devices of these names.
pub(crate) fn find(names: &BTreeSet<String>) -> io::Result<Found> {
    let mut links = BTreeMap::new();
    let request = Request {
        kind: RTM_GETLINK,
        flags: 0,
        body: Attributes::after(&[0; LINK_MESSAGE]).u32(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS).into_bytes(),
    };
    Connection::open(NETLINK_ROUTE)?.dump(&request, |body| links.extend(parse(body)))?;
    Ok(choose(names, &links))
}

fn parse(body: &[u8]) -> Option<(u32, Link)> {
    let index = number(body.get(4..8)?)?;
    let mut link = Link::default();
    for (kind, value) in attributes(body.get(LINK_MESSAGE..)?) {
        match kind {
            IFLA_IFNAME => link.name = text(value),
            IFLA_ADDRESS => link.address = value.try_into().ok(),
            IFLA_MASTER => link.master = number(value),
            IFLA_LINK_NETNSID => link.has_foreign_peer = true,
            IFLA_LINKINFO => {
                let kind = attributes(value).find(|(kind, _)| *kind == IFLA_INFO_KIND);
                link.kind = kind.map(|(_, value)| text(value).into_bytes()).unwrap_or_default();
            }
            _ => {}
        }
    }
    Some((index, link))
}

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value).trim_end_matches('\0').to_owned()
}

/// What a bridge does not have, its ports do not get: that of another device is not known here.
fn choose(names: &BTreeSet<String>, links: &BTreeMap<u32, Link>) -> Found {
    let mut found = Found::default();
    for (index, link) in links.iter().filter(|(_, link)| names.contains(&link.name)) {
        let router = link.master.unwrap_or(*index);
        let address = links.get(&router).and_then(|router| router.address);
        match address.filter(|_| link.kind == b"veth" && link.has_foreign_peer) {
            Some(router_address) => {
                let device = PodDevice { name: link.name.clone(), router, router_address };
                found.devices.insert(*index, device);
            }
            None => found.unsuitable.push(link.name.clone()),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(name: &str, index: u32, master: Option<u32>, kind: &str, is_foreign: bool) -> Vec<u8> {
        let mut header = [0; LINK_MESSAGE];
        header[4..8].copy_from_slice(&index.to_ne_bytes());
        let address = [2, 0, 0, 0, 0, u8::try_from(index).unwrap()];
        let mut body = Attributes::after(&header).text(IFLA_IFNAME, name).bytes(IFLA_ADDRESS, &address);
        if let Some(master) = master {
            body = body.u32(IFLA_MASTER, master);
        }
        if is_foreign {
            body = body.u32(IFLA_LINK_NETNSID, 0);
        }
        body.nested(IFLA_LINKINFO, Attributes::default().text(IFLA_INFO_KIND, kind)).into_bytes()
    }

    #[test]
    fn devices_of_pods_are_pairs_with_another_namespace() {
        let links: BTreeMap<u32, Link> = [
            link("cni0", 2, None, "bridge", false),
            link("veth1", 3, Some(2), "veth", true),
            link("veth2", 4, None, "veth", true),
            link("veth3", 5, None, "veth", false),
            link("veth4", 6, None, "dummy", false),
            link("veth5", 7, Some(99), "veth", true),
            link("other", 8, None, "veth", true),
        ]
        .iter()
        .filter_map(|body| parse(body))
        .collect();
        let names = (1..=5).map(|n| format!("veth{n}")).collect();
        let found = choose(&names, &links);
        let device = |name: &str, router: u32| PodDevice {
            name: name.into(),
            router,
            router_address: [2, 0, 0, 0, 0, u8::try_from(router).unwrap()],
        };
        assert_eq!(found.devices, BTreeMap::from([(3, device("veth1", 2)), (4, device("veth2", 4))]));
        assert_eq!(found.unsuitable, ["veth3", "veth4", "veth5"]);
        let body = link("veth1", 3, Some(2), "veth", true);
        for length in 0..LINK_MESSAGE {
            assert!(parse(&body[..length]).is_none(), "{length} bytes");
        }
    }
}
