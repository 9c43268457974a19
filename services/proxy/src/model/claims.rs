//! Which service port gets a frontend that several claim.
//!
//! Owns: [`FrontendKind`], the frontends of a [`ServicePort`], and [`Claims`]. In: service ports. Out: for each frontend, the
//! service port that gets it, and conflicts. All backends decide by the same order.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::{Conflict, Frontend, PortName, ServicePort};

/// Ordered by right: cluster IPs are assigned by the API server, load-balancer addresses by a controller, and any
/// author of a Service can put any address into its `externalIPs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FrontendKind {
    /// `spec.clusterIPs`.
    ClusterIp,
    /// `status.loadBalancer.ingress` with an IP and ipMode VIP.
    LoadBalancerIp,
    /// `spec.externalIPs`.
    ExternalIp,
    /// `spec.ports[].nodePort`.
    NodePort,
}

impl FrontendKind {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ClusterIp => "cluster IP",
            Self::LoadBalancerIp => "load-balancer IP",
            Self::ExternalIp => "external IP",
            Self::NodePort => "node port",
        }
    }
}

impl ServicePort {
    /// Where its traffic arrives: no frontend twice.
    pub fn frontends(&self) -> impl Iterator<Item = (Frontend, FrontendKind)> + '_ {
        let (protocol, port) = (self.name.protocol, self.port);
        let address = move |kind| move |ip: &IpAddr| (Frontend::Address { ip: *ip, protocol, port }, kind);
        let node_port = Frontend::NodePort { protocol, port: self.node_port };
        std::iter::once(&self.cluster_ip)
            .map(address(FrontendKind::ClusterIp))
            .chain(self.load_balancer_ips.iter().map(address(FrontendKind::LoadBalancerIp)))
            .chain(self.external_ips.iter().map(address(FrontendKind::ExternalIp)))
            .chain((self.node_port != 0).then_some((node_port, FrontendKind::NodePort)))
    }
}

/// The claims to each frontend, ordered and never empty: the first one gets it. `T` is what a backend keeps for a claim.
#[derive(Debug, Clone)]
pub struct Claims<T = ()>(BTreeMap<Frontend, Vec<Claim<T>>>);

type Claim<T> = ((FrontendKind, PortName), T);

impl<T> Default for Claims<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: Clone> Claims<T> {
    pub fn add(&mut self, port: &ServicePort, value: &T) {
        for (frontend, kind) in port.frontends() {
            let claims = self.0.entry(frontend).or_default();
            let key = (kind, port.name.clone());
            match claims.binary_search_by(|(other, _)| other.cmp(&key)) {
                Ok(place) => claims[place].1 = value.clone(),
                Err(place) => {
                    // Nearly all frontends have one claim.
                    claims.reserve_exact(1);
                    claims.insert(place, (key, value.clone()));
                }
            }
        }
    }

    pub fn remove(&mut self, port: &ServicePort) {
        for (frontend, kind) in port.frontends() {
            if let Some(claims) = self.0.get_mut(&frontend) {
                claims.retain(|((other, name), _)| (*other, name) != (kind, &port.name));
                if claims.is_empty() {
                    self.0.remove(&frontend);
                }
            }
        }
    }

    #[must_use]
    pub fn owner(&self, frontend: Frontend) -> Option<(FrontendKind, &PortName, &T)> {
        let ((kind, name), value) = self.0.get(&frontend)?.first()?;
        Some((*kind, name, value))
    }

    /// All frontends, ordered.
    pub fn frontends(&self) -> impl Iterator<Item = Frontend> + '_ {
        self.0.keys().copied()
    }

    /// Number of frontends.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Frontends that more than one service port claims, ordered.
    #[must_use]
    pub fn conflicts(&self) -> Vec<Conflict> {
        let conflict = |(frontend, claims): (&Frontend, &Vec<Claim<T>>)| {
            let mut names = claims.iter().map(|((_, name), _)| name);
            let owner = names.next()?.clone();
            let others: BTreeSet<&PortName> = names.filter(|name| **name != owner).collect();
            let others: Vec<PortName> = others.into_iter().cloned().collect();
            (!others.is_empty()).then_some(Conflict { frontend: *frontend, owner, others })
        };
        self.0.iter().filter_map(conflict).collect()
    }
}
