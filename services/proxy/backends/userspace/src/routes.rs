//! Routes that lead the addresses of Services to this node.
//!
//! Owns: [`Routes`]. In: addresses of frontends that no interface has. Out: local routes over the loopback interface, in
//! the table `local`, marked with a protocol number of their own; no other route is touched.
//!
//! With such a route, packets of pods and of the node itself to the address are delivered to the sockets of this node
//! (docs/decisions/0063).

#[cfg(target_os = "linux")]
mod netlink;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use keelson_proxy::model::{Family, Frontend};

#[derive(Debug, thiserror::Error)]
pub(crate) enum RouteError {
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only Linux is asked"))]
    #[error("no permission to add routes; CAP_NET_ADMIN is required")]
    NotPermitted,
    #[cfg(target_os = "linux")]
    #[error("the kernel refused a route (rtnetlink): {0}")]
    Kernel(#[source] std::io::Error),
    #[cfg(not(target_os = "linux"))]
    #[error("this system has no local routes")]
    Unsupported,
}

/// The routes of a family.
#[derive(Debug)]
pub(crate) struct Routes {
    family: Family,
    enabled: Result<(), String>,
    /// Those in the kernel that belong to this backend.
    existing: BTreeSet<IpAddr>,
    users: BTreeMap<IpAddr, BTreeSet<Frontend>>,
}

impl Routes {
    pub(crate) fn new(family: Family, redirect: bool) -> Self {
        let enabled = if redirect { Ok(()) } else { Err("not wanted".to_owned()) };
        Self { family, enabled, existing: BTreeSet::new(), users: BTreeMap::new() }
    }

    /// Reads what an earlier run left.
    pub(crate) fn adopt(&mut self) {
        if self.enabled.is_ok() {
            match list(self.family) {
                Ok(existing) => self.existing = existing,
                Err(error) => self.enabled = Err(error.to_string()),
            }
        }
    }

    /// Why there are no routes; `None` if they are added where needed.
    pub(crate) fn disabled_reason(&self) -> Option<&str> {
        self.enabled.as_ref().err().map(String::as_str)
    }

    /// Ensures that packets to an address of a frontend are delivered on this node. `is_local`: an
    /// interface has it that is not one of another backend for addresses of Services, which goes with that backend.
    /// Returns whether a route was added.
    pub(crate) fn add_user(&mut self, ip: IpAddr, frontend: Frontend, is_local: bool) -> bool {
        self.users.entry(ip).or_default().insert(frontend);
        if is_local || self.existing.contains(&ip) || self.enabled.is_err() {
            return false;
        }
        match add(ip) {
            Ok(()) => {
                self.existing.insert(ip);
                true
            }
            Err(error) => {
                if matches!(error, RouteError::NotPermitted) {
                    self.enabled = Err(error.to_string());
                }
                tracing::info!(%ip, %error, "no route to the address of a Service; it is served at another address");
                false
            }
        }
    }

    pub(crate) fn remove_user(&mut self, ip: IpAddr, frontend: Frontend) {
        if let Some(users) = self.users.get_mut(&ip) {
            users.remove(&frontend);
            if users.is_empty() {
                self.users.remove(&ip);
            }
        }
    }

    /// Removes the routes that no frontend uses. Returns their number.
    pub(crate) fn remove_unused(&mut self) -> usize {
        let unused: Vec<IpAddr> =
            self.existing.iter().filter(|ip| !self.users.contains_key(ip)).copied().collect();
        for ip in &unused {
            if let Err(error) = remove(*ip) {
                tracing::warn!(%ip, %error, "cannot remove the route of an address that no Service has");
            }
            self.existing.remove(ip);
        }
        unused.len()
    }

    /// Adds routes that another program removed. Returns their number. `seen`: routes that were listed some time ago; what was
    /// added since then does not count as removed.
    pub(crate) fn repair(&mut self, seen: &BTreeSet<IpAddr>) -> usize {
        if self.existing.is_subset(seen) {
            return 0;
        }
        let present = match list(self.family) {
            Ok(present) => present,
            Err(error) => {
                tracing::warn!(%error, "cannot list routes to check them");
                return 0;
            }
        };
        let missing: Vec<IpAddr> = self.existing.difference(&present).copied().collect();
        for ip in &missing {
            if let Err(error) = add(*ip) {
                tracing::warn!(%ip, %error, "cannot add the route of a Service's address again");
            }
        }
        missing.len()
    }

    pub(crate) fn len(&self) -> usize {
        self.existing.len()
    }

    pub(crate) fn has(&self, ip: IpAddr) -> bool {
        self.existing.contains(&ip)
    }
}

#[cfg(all(test, target_os = "linux"))]
pub(crate) use self::netlink::set_loopback_up;
#[cfg(target_os = "linux")]
pub(crate) use self::netlink::{add, list, remove};

#[cfg(not(target_os = "linux"))]
mod unsupported {
    use super::*;

    pub(crate) fn add(_: IpAddr) -> Result<(), RouteError> {
        Err(RouteError::Unsupported)
    }

    pub(crate) fn remove(_: IpAddr) -> Result<(), RouteError> {
        Err(RouteError::Unsupported)
    }

    pub(crate) fn list(_: Family) -> Result<BTreeSet<IpAddr>, RouteError> {
        Err(RouteError::Unsupported)
    }
}
#[cfg(not(target_os = "linux"))]
pub(crate) use self::unsupported::{add, list, remove};
