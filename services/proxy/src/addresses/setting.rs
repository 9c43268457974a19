//! At which addresses node ports are served.
//!
//! Owns: the setting `proxy.nodeport_addresses` and its meaning (kube-proxy's `--nodeport-addresses`). In: the setting, the
//! node's IPs, the addresses of its interfaces. Out: [`Match`], a function of these.

use std::{net::IpAddr, str::FromStr as _};

use ipnet::IpNet;

use crate::model::Family;

/// What `primary` is written as.
const PRIMARY: &str = "primary";

/// The setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// `primary`: the node's IP of each family.
    Primary,
    /// Networks of both families; none at all: every address.
    Cidrs(Vec<IpNet>),
}

/// The setting cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingError {
    /// Neither `primary` nor a network.
    #[error(
        "nodeport_addresses: {value:?} is neither a network such as 192.0.2.0/24 nor \"primary\"{}",
        hint(value)
    )]
    NotANetwork {
        /// What was given.
        value: String,
    },
    /// `primary` stands for a list of its own.
    #[error("nodeport_addresses: \"primary\" cannot be combined with networks; set one or the other")]
    PrimaryBesideNetworks,
}

/// An address alone is the usual mistake.
fn hint(value: &str) -> String {
    match value.parse::<IpAddr>() {
        Ok(address) => format!("; for one address write {}", IpNet::from(address)),
        Err(_) => String::new(),
    }
}

impl NodePortAddresses {
    /// Reads the setting. An empty list is one that was not set: `unset` says what that means to the backend (nftables:
    /// [`Self::Primary`]; iptables and ipvs: no networks, so every address).
    ///
    /// # Errors
    /// [`SettingError`]: a value is neither `primary` nor a network, or `primary` is not alone.
    pub fn parse<S: AsRef<str>>(values: &[S], unset: Self) -> Result<Self, SettingError> {
        match values {
            [] => Ok(unset),
            [only] if only.as_ref() == PRIMARY => Ok(Self::Primary),
            _ => {
                values.iter().map(|value| network(value.as_ref())).collect::<Result<_, _>>().map(Self::Cidrs)
            }
        }
    }
}

fn network(value: &str) -> Result<IpNet, SettingError> {
    if value == PRIMARY {
        return Err(SettingError::PrimaryBesideNetworks);
    }
    IpNet::from_str(value.trim()).map_err(|_| SettingError::NotANetwork { value: value.to_owned() })
}

/// Where the node ports of a family answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Match {
    /// At every local address of the family but loopback ones.
    AllLocal,
    /// At these local addresses: ordered, no two equal, none of them loopback. There may be none.
    Addresses(Vec<IpAddr>),
}

/// Where the node ports of `family` answer, as kube-proxy's nftables mode has it: at the local addresses in the networks of
/// the family. Where there are none of the family, or one of them is the whole family, every local address matches. Loopback
/// addresses never do.
///
/// With `primary`, a node that has no IP of the family (or a loopback one) answers nowhere. kube-proxy answers at every
/// address then, which opens node ports to networks they were kept from.
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
