//! Assigns sockets to Services.
//!
//! Owns: [`WantedSockets`] and the sockets that follow from it. In: Services with a health check node port, the matching
//! addresses, the current holder of each socket. Out: [`Plan`]. Pure.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
};

use keelson_client::ServiceName;

use crate::{addresses::Match, model::Family};

/// A Service that has a health check node port: type LoadBalancer, externalTrafficPolicy Local, `healthCheckNodePort` not 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServiceHealthCheck {
    pub(crate) name: ServiceName,
    /// `spec.healthCheckNodePort`, not 0.
    pub(crate) port: u16,
    /// Number of different IPs of ready IPv4 endpoints on this node, over all ports. `None`: the Service has no cluster
    /// IP of the family, and no socket either.
    pub local_v4: Option<u32>,
    /// The same for IPv6.
    pub local_v6: Option<u32>,
}

impl ServiceHealthCheck {
    pub(crate) fn local_mut(&mut self, family: Family) -> &mut Option<u32> {
        match family {
            Family::V4 => &mut self.local_v4,
            Family::V6 => &mut self.local_v6,
        }
    }

    pub(crate) fn local(&self, family: Family) -> Option<u32> {
        match family {
            Family::V4 => self.local_v4,
            Family::V6 => self.local_v6,
        }
    }
}

/// Listen addresses of health check node ports: those at which node ports are served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListenAddresses {
    /// All local ones: `0.0.0.0`.
    pub v4: Match,
    /// All local ones: `[::]`, IPv6 only.
    pub v6: Match,
}

impl ListenAddresses {
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

#[derive(Debug, PartialEq, Eq)]
pub(super) struct WantedSockets {
    pub(super) checks: Vec<ServiceHealthCheck>,
    pub(super) listen: ListenAddresses,
}

impl Default for WantedSockets {
    fn default() -> Self {
        let nowhere = || Match::Addresses(Vec::new());
        Self { checks: Vec::new(), listen: ListenAddresses { v4: nowhere(), v6: nowhere() } }
    }
}

#[derive(Debug)]
pub(super) struct Plan<'a> {
    pub(super) sockets: BTreeMap<SocketAddr, &'a ServiceHealthCheck>,
    /// Sockets that a Service wants and another holds: address, the Service, the holder.
    pub(super) conflicts: Vec<(SocketAddr, ServiceName, ServiceName)>,
}

impl WantedSockets {
    /// A holder keeps its socket; otherwise the Service that is first by name gets it.
    pub(super) fn plan(&self, holders: &HashMap<SocketAddr, &ServiceName>) -> Plan<'_> {
        let mut plan = Plan { sockets: BTreeMap::new(), conflicts: Vec::new() };
        let mut claims: BTreeMap<SocketAddr, Vec<&ServiceHealthCheck>> = BTreeMap::new();
        for family in Family::ALL {
            let addresses = self.listen.addresses(family);
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
