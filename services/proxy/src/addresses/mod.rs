//! The node's own addresses, and those of them at which node ports answer.
//!
//! Owns: [`LocalAddresses`] and their [`watch`], the setting [`NodePortAddresses`], and what it matches
//! ([`node_port_addresses`]). In: the kernel's list of addresses (`getifaddrs`) and its notices of changes (rtnetlink). Out:
//! values; nothing is changed.
//!
//! Use: [`watch()`] once; at every state of its receiver, [`node_port_addresses`] for each family gives what the backend
//! puts into its rules and where [`crate::health::HealthChecks`] listens.

mod setting;
#[cfg(test)]
mod tests;
mod watch;

use std::{io, net::IpAddr};

pub use setting::{Match, NodePortAddresses, SettingError, node_port_addresses};
pub use watch::{AddressWatch, watch};

use crate::model::Family;

/// The kernel could not be asked for the node's addresses.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// `getifaddrs` failed.
    #[error("the addresses of this node's interfaces cannot be listed (getifaddrs): {0}")]
    List(#[source] nix::Error),
    /// No socket that hears of changes.
    #[error("changes of this node's addresses cannot be followed (rtnetlink socket): {0}")]
    Socket(#[source] io::Error),
    /// A thread that was to ask the kernel was stopped.
    #[error("the addresses of this node's interfaces cannot be listed: the runtime is stopping")]
    Stopping,
}

/// The addresses of all interfaces, whatever state these are in; ordered, no two equal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LocalAddresses(Vec<IpAddr>);

impl LocalAddresses {
    /// Asks the kernel.
    ///
    /// # Errors
    /// [`AddressError::List`].
    pub fn now() -> Result<Self, AddressError> {
        let address = |entry: nix::ifaddrs::InterfaceAddress| {
            let storage = entry.address?;
            let v4 = storage.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
            v4.or_else(|| storage.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
        };
        Ok(nix::ifaddrs::getifaddrs().map_err(AddressError::List)?.filter_map(address).collect())
    }

    /// All of them.
    #[must_use]
    pub fn as_slice(&self) -> &[IpAddr] {
        &self.0
    }

    /// Those of a family.
    pub fn of(&self, family: Family) -> impl Iterator<Item = IpAddr> + '_ {
        self.0.iter().copied().filter(move |ip| family.has(ip))
    }
}

impl FromIterator<IpAddr> for LocalAddresses {
    fn from_iter<T: IntoIterator<Item = IpAddr>>(addresses: T) -> Self {
        let mut addresses: Vec<IpAddr> = addresses.into_iter().collect();
        addresses.sort_unstable();
        addresses.dedup();
        Self(addresses)
    }
}

/// The addresses of a family that the node's interfaces have now.
///
/// # Errors
/// [`AddressError::List`].
pub fn local(family: Family) -> Result<Vec<IpAddr>, AddressError> {
    Ok(LocalAddresses::now()?.of(family).collect())
}
