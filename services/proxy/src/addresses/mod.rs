//! The node's own addresses, and those of them at which node ports are served.
//!
//! Owns: [`LocalAddresses`] and their [`watch`], the setting [`NodePortAddresses`], and what it matches
//! ([`node_port_addresses`]). In: the kernel's list of addresses (`getifaddrs`) and its notifications (rtnetlink). Out:
//! values; nothing is changed.
//!
//! Use: call [`watch()`] once. For each state of its receiver, [`node_port_addresses`] returns, per family, the
//! addresses for the backend's rules and for [`crate::health::HealthChecks`] to listen on.

mod interfaces;
mod setting;
#[cfg(test)]
mod tests;
#[cfg(unix)]
mod watch;

#[cfg(unix)]
use std::io;
use std::net::IpAddr;

pub use interfaces::{Interface, InterfacePattern, matching};
pub use setting::{Match, NodePortAddresses, node_port_addresses};
#[cfg(unix)]
pub use watch::{AddressWatch, WatchScope, watch};

use crate::model::Family;

#[cfg(unix)]
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    #[error("cannot list the addresses of this node's interfaces (getifaddrs, if_nameindex): {0}")]
    List(#[source] nix::Error),
    #[error("cannot watch the addresses of this node (rtnetlink socket): {0}")]
    Socket(#[source] io::Error),
    /// The thread that lists the addresses was stopped.
    #[error("cannot list the addresses of this node's interfaces: the runtime is stopping")]
    Stopping,
}

/// Dummy interfaces that have the addresses of Services, of our backend ipvs and of kube-proxy's mode ipvs. Their addresses
/// are not the node's.
pub const SERVICE_INTERFACES: [&str; 2] = ["keelson-ipvs0", "kube-ipvs0"];

/// The addresses of all interfaces but [`SERVICE_INTERFACES`], whether up or down, and the interfaces; ordered, without
/// duplicates.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LocalAddresses {
    addresses: Vec<IpAddr>,
    interfaces: Vec<Interface>,
}

impl LocalAddresses {
    #[cfg(unix)]
    pub fn now() -> Result<Self, AddressError> {
        let mut addresses = Vec::new();
        for entry in nix::ifaddrs::getifaddrs().map_err(AddressError::List)? {
            let Some(storage) = entry.address else { continue };
            if SERVICE_INTERFACES.contains(&entry.interface_name.as_str()) {
                continue;
            }
            if let Some(address) = storage.as_sockaddr_in() {
                addresses.push(IpAddr::V4(address.ip()));
            } else if let Some(address) = storage.as_sockaddr_in6() {
                addresses.push(IpAddr::V6(address.ip()));
            }
        }
        // `getifaddrs` has no entry for interfaces without a link-layer address and without an IP address, such as
        // those of WireGuard.
        let named = nix::net::if_::if_nameindex().map_err(AddressError::List)?;
        let mut interfaces: Vec<Interface> = named
            .iter()
            .map(|interface| Interface {
                name: interface.name().to_string_lossy().into_owned(),
                index: interface.index() as usize,
            })
            .collect();
        interfaces.sort_unstable();
        Ok(Self { interfaces, ..addresses.into_iter().collect() })
    }

    #[must_use]
    pub fn as_slice(&self) -> &[IpAddr] {
        &self.addresses
    }

    #[must_use]
    pub fn interfaces(&self) -> &[Interface] {
        &self.interfaces
    }

    pub fn of(&self, family: Family) -> impl Iterator<Item = IpAddr> + '_ {
        self.addresses.iter().copied().filter(move |ip| family.has(ip))
    }
}

impl FromIterator<IpAddr> for LocalAddresses {
    fn from_iter<T: IntoIterator<Item = IpAddr>>(addresses: T) -> Self {
        let mut addresses: Vec<IpAddr> = addresses.into_iter().collect();
        addresses.sort_unstable();
        addresses.dedup();
        Self { addresses, interfaces: Vec::new() }
    }
}
