//! Finds stale flows.
//!
//! Owns: [`UdpFrontends`], which checks a flow in constant time. In: UDP service ports, flows. Out: whether a flow is
//! stale. Pure.

use std::{
    collections::{HashMap, HashSet},
    net::IpAddr,
};

use super::Flow;
use crate::model::{Endpoint, Protocol, ServicePort};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UdpFrontend {
    /// V, X and W.
    pub addresses: Vec<IpAddr>,
    pub port: u16,
    /// NP; 0: none.
    pub node_port: u16,
    /// Every serving endpoint, regardless of topology, policies and readiness.
    pub serving: Vec<Endpoint>,
}

impl UdpFrontend {
    /// `None`: not a UDP port, or no endpoint serves.
    #[must_use]
    pub fn of(port: &ServicePort) -> Option<Self> {
        let others = port.external_ips.iter().chain(&port.load_balancer_ips).copied();
        (port.name.protocol == Protocol::Udp && !port.serving.is_empty()).then(|| Self {
            addresses: std::iter::once(port.cluster_ip).chain(others).collect(),
            port: port.port,
            node_port: port.node_port,
            serving: port.serving.clone(),
        })
    }
}

/// The UDP service ports of a family that have a serving endpoint.
#[derive(Debug, Default)]
pub struct UdpFrontends {
    by_address: HashMap<(IpAddr, u16), HashSet<Endpoint>>,
    by_node_port: HashMap<u16, HashSet<Endpoint>>,
}

impl UdpFrontends {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_address.is_empty() && self.by_node_port.is_empty()
    }

    /// Whether a UDP flow goes to a frontend and not to a serving endpoint of it. Its original destination is V, X or W
    /// with the port, or any address with port NP; its replies come from no serving endpoint. A flow that was never
    /// translated is answered by its destination, which is no endpoint.
    #[must_use]
    pub fn is_stale(&self, flow: &Flow) -> bool {
        if flow.protocol != Protocol::Udp.number() {
            return false;
        }
        let (address, port) = (flow.original.destination, flow.original.destination_port);
        let served_by = Endpoint { ip: flow.reply.source, port: flow.reply.source_port };
        let of_address = self.by_address.get(&(address, port));
        let of_node_port = self.by_node_port.get(&port);
        [of_address, of_node_port].into_iter().flatten().any(|serving| !serving.contains(&served_by))
    }
}

impl FromIterator<UdpFrontend> for UdpFrontends {
    /// If Services claim the same frontend, the endpoints of each count as serving.
    fn from_iter<T: IntoIterator<Item = UdpFrontend>>(frontends: T) -> Self {
        let mut all = Self::default();
        for frontend in frontends.into_iter().filter(|frontend| !frontend.serving.is_empty()) {
            for address in frontend.addresses {
                all.by_address.entry((address, frontend.port)).or_default().extend(&frontend.serving);
            }
            if frontend.node_port != 0 {
                all.by_node_port.entry(frontend.node_port).or_default().extend(&frontend.serving);
            }
        }
        all
    }
}
