//! Addresses at which node ports are served.
//!
//! Owns: the setting `proxy.nodeport_addresses` and its meaning (kube-proxy's `--nodeport-addresses`). In: the setting, the
//! node's IPs, the addresses of its interfaces. Out: [`Match`], a function of these.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::Family;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// `primary`: the node's IP of each family.
    Primary,
    /// Networks of both families; empty: every address.
    Cidrs(Vec<IpNet>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Match {
    /// Every local address of the family except loopback ones.
    AllLocal,
    /// These local addresses: ordered, without duplicates, none of them loopback. May be empty.
    Addresses(Vec<IpAddr>),
}

/// The addresses at which node ports of `family` are served, as in kube-proxy's nftables mode: the local addresses in
/// the networks of the family. Without networks of the family, or with one that contains the whole family, every local
/// address matches. Loopback addresses never match.
///
/// With `primary`, a node without an IP of the family (or with a loopback one) serves node ports nowhere. kube-proxy
/// serves them at every address then, which opens node ports to networks that should not reach them.
#[must_use]
pub fn node_port_addresses(
    setting: &NodePortAddresses,
    node_ips: &[IpAddr],
    local: &[IpAddr],
    family: Family,
) -> Match {
    let networks: Vec<IpNet> = match setting {
        NodePortAddresses::Primary => {
            let usable = |ip: &&IpAddr| family.has(ip) && !ip.is_loopback() && !ip.is_unspecified();
            match node_ips.iter().find(usable) {
                Some(ip) => vec![IpNet::from(*ip)],
                None => return Match::Addresses(Vec::new()),
            }
        }
        NodePortAddresses::Cidrs(cidrs) => {
            cidrs.iter().filter(|cidr| family.has(&cidr.addr())).copied().collect()
        }
    };
    if networks.is_empty() || networks.iter().any(|network| network.prefix_len() == 0) {
        return Match::AllLocal;
    }
    let matches = |ip: &&IpAddr| {
        family.has(ip) && !ip.is_loopback() && networks.iter().any(|network| network.contains(*ip))
    };
    let mut addresses: Vec<IpAddr> = local.iter().filter(matches).copied().collect();
    addresses.sort_unstable();
    addresses.dedup();
    Match::Addresses(addresses)
}
