//! What is wanted of a family: its frontends, and the service port that gets each.
//!
//! Owns: [`Plan`]. In: Services. Out: [`Rule`]s by frontend, and the frontends that changed. Pure.

mod policy;
mod sockets;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use keelson_client::ServiceName;
use keelson_proxy::model::{Claims, Conflict, Endpoint, Frontend, FrontendKind, Protocol, ServicePort};

pub(crate) use policy::{Decision, NodeFacts, Origin};
pub(crate) use sockets::{MappedPorts, SocketKey, wanted_sockets};

/// What is served at a frontend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) frontend: Frontend,
    pub(crate) kind: FrontendKind,
    pub(crate) port: Arc<ServicePort>,
}

/// Who is served, as what, and where connections go.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = &self.port;
        let is_internal = matches!(self.frontend, Frontend::Address { ip, .. } if ip == port.cluster_ip);
        write!(f, "{} ({})", port.name, self.kind.as_str())?;
        if port.affinity_seconds != 0 {
            write!(f, " affinity {}s", port.affinity_seconds)?;
        }
        if !self.ranges().is_empty() {
            let ranges: Vec<String> = self.ranges().iter().map(ToString::to_string).collect();
            write!(f, " from {}", ranges.join(","))?;
        }
        let target = |set: &[Endpoint]| match (set.is_empty(), port.has_any) {
            (false, _) => set.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
            (true, true) => "drop".into(),
            (true, false) => "reject".into(),
        };
        match (is_internal, port.internal_local, port.external_local) {
            (true, true, _) => write!(f, " -> {}", target(&port.local)),
            (false, _, true) => {
                write!(f, " -> {}; outside -> {}", target(&port.cluster), target(&port.local))
            }
            _ => write!(f, " -> {}", target(&port.cluster)),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Plan {
    services: BTreeMap<ServiceName, Vec<Arc<ServicePort>>>,
    claims: Claims<Arc<ServicePort>>,
    changed: BTreeSet<Frontend>,
    counts: PlanCounts,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlanCounts {
    pub(crate) services: usize,
    pub(crate) service_ports: usize,
    pub(crate) endpoints: usize,
    pub(crate) frontends: usize,
}

impl Plan {
    /// Sets all ports of a Service; empty: it is deleted.
    pub(crate) fn set(&mut self, service: &ServiceName, ports: Vec<ServicePort>) {
        let ports: Vec<Arc<ServicePort>> = ports.into_iter().map(Arc::new).collect();
        let before = match ports.is_empty() {
            true => self.services.remove(service),
            false => self.services.insert(service.clone(), ports.clone()),
        };
        let before = before.unwrap_or_default();
        if before == ports {
            return;
        }
        for port in &before {
            self.claims.remove(port);
        }
        for port in &ports {
            self.claims.add(port, port);
        }
        let endpoints =
            |ports: &[Arc<ServicePort>]| ports.iter().map(|port| reachable(port).len()).sum::<usize>();
        self.counts.services = self.services.len();
        self.counts.service_ports = self.counts.service_ports - before.len() + ports.len();
        self.counts.endpoints = self.counts.endpoints - endpoints(&before) + endpoints(&ports);
        self.counts.frontends = self.claims.len();
        let changed = before.iter().chain(&ports).flat_map(|port| port.frontends());
        self.changed.extend(changed.map(|(frontend, _)| frontend));
    }

    /// The frontends whose rule may have changed since the last call.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<Frontend> {
        std::mem::take(&mut self.changed)
    }

    pub(crate) fn has_changes(&self) -> bool {
        !self.changed.is_empty()
    }

    pub(crate) fn rule(&self, frontend: Frontend) -> Option<Rule> {
        let (kind, _, port) = self.claims.owner(frontend)?;
        Some(Rule { frontend, kind, port: port.clone() })
    }

    pub(crate) fn rules(&self) -> impl Iterator<Item = Rule> {
        self.claims.frontends().filter_map(|frontend| self.rule(frontend))
    }

    pub(crate) fn service_ports(&self) -> impl Iterator<Item = &Arc<ServicePort>> {
        self.services.values().flatten()
    }

    pub(crate) fn conflicts(&self) -> Vec<Conflict> {
        self.claims.conflicts()
    }

    pub(crate) fn counts(&self) -> PlanCounts {
        self.counts
    }
}

/// Endpoints of both sets, each once.
pub(crate) fn reachable(port: &ServicePort) -> BTreeSet<Endpoint> {
    port.cluster.iter().chain(&port.local).copied().collect()
}

/// Sockets of SCTP are not relayed: see the limitations of the backend.
pub(crate) const fn is_served(protocol: Protocol) -> bool {
    !matches!(protocol, Protocol::Sctp)
}
