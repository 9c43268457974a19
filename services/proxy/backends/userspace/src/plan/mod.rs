//! What is wanted of a family: its frontends, and the service port that gets each.
//!
//! Owns: [`Plan`]. In: Services. Out: [`Rule`]s by frontend, and the frontends that changed. Pure.

mod policy;
mod sockets;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use keelson_client::ServiceName;
use keelson_proxy::model::{Conflict, Frontend, PortName, Protocol, ServicePort};

pub(crate) use policy::{Decision, NodeFacts, Origin};
pub(crate) use sockets::{MappedPorts, SocketKey, wanted_sockets};

/// Ordered as claims are: cluster IPs are assigned by the API server, load-balancer IPs by a controller, and external IPs
/// by any author of a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum FrontendKind {
    ClusterIp,
    LoadBalancerIp,
    ExternalIp,
    NodePort,
}

impl FrontendKind {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::ClusterIp => "cluster IP",
            Self::LoadBalancerIp => "load-balancer IP",
            Self::ExternalIp => "external IP",
            Self::NodePort => "node port",
        }
    }
}

/// What is served at a frontend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) frontend: Frontend,
    pub(crate) kind: FrontendKind,
    pub(crate) port: Arc<ServicePort>,
}

/// The first claim, by kind and name, gets the frontend.
type Claims = BTreeMap<(FrontendKind, PortName), Arc<ServicePort>>;

#[derive(Debug, Default)]
pub(crate) struct Plan {
    services: BTreeMap<ServiceName, Vec<Arc<ServicePort>>>,
    claims: BTreeMap<Frontend, Claims>,
    changed: BTreeSet<Frontend>,
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
            for (frontend, kind) in frontends(port) {
                if let Some(claims) = self.claims.get_mut(&frontend) {
                    claims.remove(&(kind, port.name.clone()));
                    if claims.is_empty() {
                        self.claims.remove(&frontend);
                    }
                }
                self.changed.insert(frontend);
            }
        }
        for port in &ports {
            for (frontend, kind) in frontends(port) {
                self.claims.entry(frontend).or_default().insert((kind, port.name.clone()), port.clone());
                self.changed.insert(frontend);
            }
        }
    }

    /// The frontends whose rule may have changed since the last call.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<Frontend> {
        std::mem::take(&mut self.changed)
    }

    pub(crate) fn has_changes(&self) -> bool {
        !self.changed.is_empty()
    }

    pub(crate) fn rule(&self, frontend: Frontend) -> Option<Rule> {
        let ((kind, _), port) = self.claims.get(&frontend)?.first_key_value()?;
        Some(Rule { frontend, kind: *kind, port: port.clone() })
    }

    pub(crate) fn rules(&self) -> impl Iterator<Item = Rule> {
        self.claims.keys().filter_map(|frontend| self.rule(*frontend))
    }

    pub(crate) fn service_ports(&self) -> impl Iterator<Item = &Arc<ServicePort>> {
        self.services.values().flatten()
    }

    pub(crate) fn conflicts(&self) -> Vec<Conflict> {
        let conflict = |(frontend, claims): (&Frontend, &Claims)| {
            let mut names = claims.keys().map(|(_, name)| name.clone());
            let owner = names.next()?;
            let others: BTreeSet<PortName> = names.filter(|name| *name != owner).collect();
            (!others.is_empty()).then(|| Conflict {
                frontend: *frontend,
                owner,
                others: others.into_iter().collect(),
            })
        };
        self.claims.iter().filter_map(conflict).collect()
    }

    pub(crate) fn counts(&self) -> PlanCounts {
        let endpoints = |port: &Arc<ServicePort>| reachable(port).len();
        PlanCounts {
            services: self.services.len(),
            service_ports: self.services.values().map(Vec::len).sum(),
            endpoints: self.service_ports().map(endpoints).sum(),
            frontends: self.claims.len(),
        }
    }
}

/// Endpoints of both sets, each once.
pub(crate) fn reachable(port: &ServicePort) -> BTreeSet<keelson_proxy::model::Endpoint> {
    port.cluster.iter().chain(&port.local).copied().collect()
}

/// Sockets of SCTP are not relayed: see the limitations of the backend.
pub(crate) const fn is_served(protocol: Protocol) -> bool {
    !matches!(protocol, Protocol::Sctp)
}

fn frontends(port: &ServicePort) -> impl Iterator<Item = (Frontend, FrontendKind)> {
    let (protocol, number) = (port.name.protocol, port.port);
    let address =
        move |kind| move |ip: &IpAddr| (Frontend::Address { ip: *ip, protocol, port: number }, kind);
    let node_port = Frontend::NodePort { protocol, port: port.node_port };
    std::iter::once(&port.cluster_ip)
        .map(address(FrontendKind::ClusterIp))
        .chain(port.load_balancer_ips.iter().map(address(FrontendKind::LoadBalancerIp)))
        .chain(port.external_ips.iter().map(address(FrontendKind::ExternalIp)))
        .chain((port.node_port != 0).then_some((node_port, FrontendKind::NodePort)))
}
