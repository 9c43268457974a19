//! Which socket is whose.
//!
//! Owns: [`Wanted`] and the sockets that follow from it, a function of values. In: Services with a health check node port, the
//! matching addresses, who has which socket now. Out: [`Plan`].

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
};

use keelson_client::ServiceName;

use crate::{addresses::Match, model::Family};

/// A Service that has a health check node port: type LoadBalancer, externalTrafficPolicy Local, `healthCheckNodePort` not 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServiceHealthCheck {
    /// The Service.
    pub(crate) name: ServiceName,
    /// `spec.healthCheckNodePort`, not 0.
    pub(crate) port: u16,
    /// How many different IPs of ready endpoints on this node it has in IPv4, over all its ports. `None`: the Service has no
    /// cluster IP of the family, and no socket either.
    pub local_v4: Option<u32>,
    /// The same in IPv6.
    pub local_v6: Option<u32>,
}

impl ServiceHealthCheck {
    /// The count of a family.
    pub(crate) fn local(&self, family: Family) -> Option<u32> {
        match family {
            Family::V4 => self.local_v4,
            Family::V6 => self.local_v6,
        }
    }
}

/// Where health check node ports listen: at the addresses at which node ports are served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListenOn {
    /// In IPv4. All local ones: `0.0.0.0`.
    pub v4: Match,
    /// In IPv6. All local ones: `[::]`, IPv6 alone.
    pub v6: Match,
}

impl ListenOn {
    fn addresses(&self, family: Family) -> Vec<IpAddr> {
        let of_family = match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        };
        match of_family {
            Match::AllLocal => vec![family.unspecified()],
            Match::Addresses(addresses) => addresses.clone(),
        }
    }
}

/// What is wanted.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) checks: Vec<ServiceHealthCheck>,
    pub(super) listen_on: ListenOn,
}

impl Default for Wanted {
    fn default() -> Self {
        let nowhere = || Match::Addresses(Vec::new());
        Self { checks: Vec::new(), listen_on: ListenOn { v4: nowhere(), v6: nowhere() } }
    }
}

/// Which socket is to be whose.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    pub(super) sockets: BTreeMap<SocketAddr, &'a ServiceHealthCheck>,
    /// Sockets that a Service wants and another has: address, the Service, the other.
    pub(super) conflicts: Vec<(SocketAddr, ServiceName, ServiceName)>,
}

impl Wanted {
    /// One that has a socket keeps it; else the Service that comes first by name gets it.
    pub(super) fn plan(&self, holders: &HashMap<SocketAddr, &ServiceName>) -> Plan<'_> {
        let mut plan = Plan { sockets: BTreeMap::new(), conflicts: Vec::new() };
        let mut claims: BTreeMap<SocketAddr, Vec<&ServiceHealthCheck>> = BTreeMap::new();
        for family in Family::ALL {
            let addresses = self.listen_on.addresses(family);
            for check in self.checks.iter().filter(|check| check.port != 0 && check.local(family).is_some()) {
                for ip in &addresses {
                    claims.entry(SocketAddr::new(*ip, check.port)).or_default().push(check);
                }
            }
        }
        for (address, mut claimants) in claims {
            let holder = holders.get(&address).copied();
            claimants.sort_by_key(|check| (Some(&check.name) != holder, check.name.clone()));
            claimants.dedup_by_key(|check| check.name.clone());
            let Some((first, others)) = claimants.split_first() else { continue };
            plan.sockets.insert(address, first);
            let conflict = |check: &&ServiceHealthCheck| (address, check.name.clone(), first.name.clone());
            plan.conflicts.extend(others.iter().map(conflict));
        }
        plan
    }
}
