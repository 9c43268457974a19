//! Frontends, and the service ports that get them.
//!
//! Owns: [`Claims`]. In: the service ports of a Service. Out: for each frontend, the service port that gets it.

use std::collections::{BTreeMap, BTreeSet};

use keelson_proxy::model::{Conflict, Frontend, PortName, ServicePort};

/// Ordered by right: cluster IPs are assigned by the API server, load-balancer addresses by a controller, and any
/// author of a Service can put any address into its `externalIPs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FrontendKind {
    /// V.
    ClusterIp,
    /// W.
    LoadBalancerIp,
    /// X.
    ExternalIp,
    /// NP.
    NodePort,
}

#[derive(Debug, Default)]
pub(super) struct Claims(BTreeMap<Frontend, BTreeSet<(FrontendKind, PortName)>>);

impl Claims {
    pub(super) fn add(&mut self, port: &ServicePort) {
        for (frontend, kind) in frontends(port) {
            self.0.entry(frontend).or_default().insert((kind, port.name.clone()));
        }
    }

    pub(super) fn remove(&mut self, port: &ServicePort) {
        for (frontend, kind) in frontends(port) {
            if let Some(claims) = self.0.get_mut(&frontend) {
                claims.remove(&(kind, port.name.clone()));
                if claims.is_empty() {
                    self.0.remove(&frontend);
                }
            }
        }
    }

    pub(super) fn owner(&self, frontend: Frontend) -> Option<&(FrontendKind, PortName)> {
        self.0.get(&frontend)?.first()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = Frontend> + '_ {
        self.0.keys().copied()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Frontends that more than one service port claims, ordered.
    pub(super) fn conflicts(&self) -> Vec<Conflict> {
        let conflict = |(frontend, claims): (&Frontend, &BTreeSet<(FrontendKind, PortName)>)| {
            let mut names = claims.iter().map(|(_, name)| name);
            let owner = names.next()?.clone();
            let others: BTreeSet<PortName> = names.filter(|name| **name != owner).cloned().collect();
            let others: Vec<PortName> = others.into_iter().collect();
            (!others.is_empty()).then_some(Conflict { frontend: *frontend, owner, others })
        };
        self.0.iter().filter_map(conflict).collect()
    }
}

pub(crate) fn frontends(port: &ServicePort) -> impl Iterator<Item = (Frontend, FrontendKind)> + '_ {
    let protocol = port.name.protocol;
    let address = move |kind| {
        move |ip: &std::net::IpAddr| (Frontend::Address { ip: *ip, protocol, port: port.port }, kind)
    };
    let node_port = Frontend::NodePort { protocol, port: port.node_port };
    std::iter::once(&port.cluster_ip)
        .map(address(FrontendKind::ClusterIp))
        .chain(port.load_balancer_ips.iter().map(address(FrontendKind::LoadBalancerIp)))
        .chain(port.external_ips.iter().map(address(FrontendKind::ExternalIp)))
        .chain((port.node_port != 0).then_some((node_port, FrontendKind::NodePort)))
}
