//! The Services of a family, as a backend is told to serve them.
//!
//! Owns: [`WantedServices`] and their [`ServiceCounts`]. In: the ports of a Service. Out: service ports by Service, by name and
//! by frontend; conflicts.

use std::collections::{BTreeMap, BTreeSet};

use keelson_client::ServiceName;

use super::{Claims, Conflict, Endpoint, Frontend, FrontendKind, PortName, ServicePort};

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ServiceCounts {
    pub services: usize,
    pub service_ports: usize,
    /// Of each service port, those that some frontend leads to ([`ServicePort::reachable`]).
    pub endpoints: usize,
}

#[derive(Debug, Default)]
pub struct WantedServices {
    services: BTreeMap<ServiceName, Vec<ServicePort>>,
    claims: Claims,
    counts: ServiceCounts,
}

impl WantedServices {
    /// Sets the ports of a Service; empty: it is deleted. Returns the former ports; `None`: nothing has changed.
    pub fn set(&mut self, service: &ServiceName, mut ports: Vec<ServicePort>) -> Option<Vec<ServicePort>> {
        // Of ports with the same name and protocol, which no Service has, only the first.
        ports.sort_by(|a, b| a.name.cmp(&b.name));
        ports.dedup_by(|later, first| later.name == first.name);
        let old = self.services.remove(service).unwrap_or_default();
        if old == ports {
            if !old.is_empty() {
                self.services.insert(service.clone(), old);
            }
            return None;
        }
        for port in &old {
            self.claims.remove(port);
            self.counts.endpoints -= port.count_reachable();
        }
        for port in &ports {
            self.claims.add(port, &());
            self.counts.endpoints += port.count_reachable();
        }
        self.counts.service_ports = self.counts.service_ports + ports.len() - old.len();
        if !ports.is_empty() {
            self.services.insert(service.clone(), ports);
        }
        self.counts.services = self.services.len();
        Some(old)
    }

    /// Ordered by name; empty: there is no such Service.
    #[must_use]
    pub fn ports_of(&self, service: &ServiceName) -> &[ServicePort] {
        self.services.get(service).map_or(&[], Vec::as_slice)
    }

    pub fn ports(&self) -> impl Iterator<Item = &ServicePort> {
        self.services.values().flatten()
    }

    #[must_use]
    pub fn port(&self, name: &PortName) -> Option<&ServicePort> {
        self.ports_of(&name.service).iter().find(|port| port.name == *name)
    }

    /// The service port that gets a frontend.
    #[must_use]
    pub fn lookup(&self, frontend: Frontend) -> Option<(FrontendKind, &ServicePort)> {
        let (kind, name, ()) = self.claims.owner(frontend)?;
        Some((kind, self.port(name)?))
    }

    /// All frontends, ordered.
    pub fn frontends(&self) -> impl Iterator<Item = Frontend> + '_ {
        self.claims.frontends()
    }

    #[must_use]
    pub fn frontend_count(&self) -> usize {
        self.claims.len()
    }

    /// Frontends that more than one service port claims, ordered.
    #[must_use]
    pub fn conflicts(&self) -> Vec<Conflict> {
        self.claims.conflicts()
    }

    #[must_use]
    pub fn counts(&self) -> ServiceCounts {
        self.counts
    }
}

impl ServicePort {
    /// The endpoints that some frontend leads to.
    #[must_use]
    pub fn reachable(&self) -> BTreeSet<Endpoint> {
        let cluster = self.cluster.iter().filter(|_| self.uses_cluster());
        let local = self.local.iter().filter(|_| self.uses_local());
        cluster.chain(local).copied().collect()
    }

    /// Their number, without making a set where one of the two is empty.
    #[must_use]
    pub fn count_reachable(&self) -> usize {
        match (self.uses_cluster(), self.uses_local() && !self.local.is_empty()) {
            (true, false) => self.cluster.len(),
            _ => self.reachable().len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::service_port;

    fn port(service: &ServiceName, name: &str, ip: [u8; 4], endpoints: u8) -> ServicePort {
        let endpoint = |last| Endpoint { ip: [10, 244, 1, last].into(), port: 8080 };
        let cluster = (1..=endpoints).map(endpoint).collect();
        ServicePort { cluster, ..service_port(service, name, ip.into(), 80) }
    }

    #[test]
    fn counts_and_frontends_follow_every_change() {
        let (web, db) = (ServiceName::new("default", "web"), ServiceName::new("default", "db"));
        let mut services = WantedServices::default();
        let counts =
            |services, service_ports, endpoints| ServiceCounts { services, service_ports, endpoints };
        let first = vec![port(&web, "http", [10, 96, 0, 1], 3)];
        assert_eq!(services.set(&web, first.clone()), Some(Vec::new()));
        assert_eq!(services.set(&web, first.clone()), None, "nothing has changed");
        assert_eq!(services.set(&db, vec![port(&db, "", [10, 96, 0, 2], 1)]), Some(Vec::new()));
        assert_eq!((services.counts(), services.frontend_count()), (counts(2, 2, 4), 2));

        let frontend = first[0].frontends().next().unwrap().0;
        assert_eq!(services.lookup(frontend), Some((FrontendKind::ClusterIp, &first[0])));
        assert_eq!(services.set(&web, Vec::new()), Some(first), "the former ports");
        assert_eq!((services.lookup(frontend), services.ports_of(&web)), (None, &[][..]));
        assert_eq!((services.counts(), services.frontend_count()), (counts(1, 1, 1), 1));
        assert_eq!(services.set(&web, Vec::new()), None, "there is none");
    }

    #[test]
    fn of_equal_names_the_first_stays_and_a_frontend_has_one_owner() {
        let (web, other) = (ServiceName::new("default", "web"), ServiceName::new("default", "other"));
        let mut services = WantedServices::default();
        let twice = vec![port(&web, "http", [10, 96, 0, 1], 1), port(&web, "http", [10, 96, 0, 9], 2)];
        services.set(&web, twice.clone());
        assert_eq!(services.ports_of(&web), &twice[..1]);
        services.set(&other, vec![port(&other, "http", [10, 96, 0, 1], 2)]);
        let frontend = twice[0].frontends().next().unwrap().0;
        assert_eq!(services.lookup(frontend).map(|(_, port)| &port.name.service), Some(&other));
        assert_eq!(services.conflicts().len(), 1);
        services.set(&other, Vec::new());
        assert_eq!(services.lookup(frontend).map(|(_, port)| &port.name.service), Some(&web));
    }
}
