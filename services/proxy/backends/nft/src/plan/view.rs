//! Looking into a plan.
//!
//! Owns: [`PortView`], [`Found`], [`Conflict`], [`Counts`]. In: the plan. Out: values to read.

use std::net::IpAddr;

use ipnet::IpNet;
use keelson_client::ServiceName;
use keelson_proxy::model::{Endpoint, Frontend, PortName, Protocol};

use super::{Kind, NodeFacts, Target, frontend::admitted, port::Port};
use crate::{
    chain::Chain,
    element::{Number, SetName},
};

/// A service port as it is planned.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PortView<'a> {
    pub(super) service: &'a ServiceName,
    pub(super) port: &'a Port,
}

impl<'a> PortView<'a> {
    /// Which one.
    pub(crate) fn name(&self) -> PortName {
        PortName { service: self.service.clone(), port: self.port.name.clone(), protocol: self.port.protocol }
    }

    /// The Service.
    pub(crate) fn service(&self) -> &'a ServiceName {
        self.service
    }

    /// The protocol.
    pub(crate) fn protocol(&self) -> Protocol {
        self.port.protocol
    }

    /// The number at which V, X and W answer.
    pub(crate) fn port(&self) -> u16 {
        self.port.port
    }

    /// V.
    pub(crate) fn cluster_ip(&self) -> IpAddr {
        self.port.cluster_ip
    }

    /// X.
    pub(crate) fn external_ips(&self) -> &'a [IpAddr] {
        &self.port.external_ips
    }

    /// W.
    pub(crate) fn load_balancer_ips(&self) -> &'a [IpAddr] {
        &self.port.load_balancer_ips
    }

    /// NP; 0: none.
    pub(crate) fn node_port(&self) -> u16 {
        self.port.node_port
    }

    /// Everything that it claims, whether it has it or another does.
    pub(crate) fn frontends(&self) -> impl Iterator<Item = (Frontend, Kind)> + use<'a> {
        self.port.frontends()
    }

    /// internalTrafficPolicy Local.
    pub(crate) fn internal_local(&self) -> bool {
        self.port.internal_local
    }

    /// externalTrafficPolicy Local, where it has an effect.
    pub(crate) fn external_local(&self) -> bool {
        self.port.external_local
    }

    /// Whether something could serve it, here or elsewhere.
    pub(crate) fn has_any(&self) -> bool {
        self.port.has_any
    }

    /// sessionAffinity ClientIP: for how many seconds it is asked for; 0: not at all.
    pub(crate) fn affinity_seconds(&self) -> u32 {
        self.port.affinity_seconds
    }

    /// Whether affinity is asked for and not given: more than 32,768 service ports have it, or more than 65,535 endpoints
    /// would need a number.
    pub(crate) fn lacks_affinity(&self) -> bool {
        lacks_affinity(self.port)
    }

    /// Who may reach W, as the Service says it; empty: anyone.
    pub(crate) fn source_ranges(&self) -> &'a [IpNet] {
        self.port.source_ranges.as_deref().unwrap_or_default()
    }

    /// Its number; none where no traffic goes to endpoints.
    pub(crate) fn number(&self) -> Option<Number> {
        self.port.number
    }

    /// ClusterSet in the order of slots; empty where it is not used.
    pub(crate) fn cluster(&self) -> &'a [Endpoint] {
        &self.port.cluster.endpoints
    }

    /// LocalSet in the order of slots; empty where it is not used.
    pub(crate) fn local(&self) -> &'a [Endpoint] {
        &self.port.local.endpoints
    }

    /// Those of both sets that are on this node.
    pub(crate) fn on_node(&self) -> &'a [Endpoint] {
        &self.port.on_node
    }

    /// UDP: every serving endpoint. Others: empty.
    pub(crate) fn serving(&self) -> &'a [Endpoint] {
        &self.port.serving
    }

    /// Where its frontends of a kind lead, if it has them.
    pub(crate) fn target(&self, kind: Kind) -> Target {
        self.port.target(kind)
    }

    /// The chain that chooses for traffic to V.
    pub(crate) fn internal_chain(&self) -> Option<Chain> {
        self.port.internal_chain()
    }

    /// The chain that chooses from ClusterSet for traffic to X, W and NP.
    pub(crate) fn external_chain(&self) -> Option<Chain> {
        self.port.external_chain()
    }

    /// The chain that chooses from LocalSet for traffic to X, W and NP where externalTrafficPolicy is Local.
    pub(crate) fn local_chain(&self) -> Option<Chain> {
        self.port.local_chain()
    }
}

pub(super) fn lacks_affinity(port: &Port) -> bool {
    port.affinity_seconds != 0 && port.number.is_some_and(|number| !number.has_affinity())
}

/// What a frontend is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found<'a> {
    /// Which.
    pub(crate) frontend: Frontend,
    /// What it is to its service port.
    pub(crate) kind: Kind,
    /// Where it leads.
    pub(crate) target: Target,
    /// Whose it is.
    pub(crate) port: PortView<'a>,
    pub(super) facts: &'a NodeFacts,
}

impl Found<'_> {
    /// Who may reach it, disjoint and ordered: loadBalancerSourceRanges, and the node itself where they hold it. None:
    /// anyone.
    pub(crate) fn admitted(&self) -> Option<Vec<IpNet>> {
        match (self.kind, self.frontend, &self.port.port.source_ranges) {
            (Kind::LoadBalancerIp, Frontend::Address { ip, .. }, Some(ranges)) => {
                Some(admitted(ranges, ip, self.facts))
            }
            _ => None,
        }
    }

    /// Whether a source may reach it.
    pub(crate) fn admits(&self, source: IpAddr) -> bool {
        self.admitted().is_none_or(|ranges| ranges.iter().any(|range| range.contains(&source)))
    }
}

/// How much there is in a plan.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Services that have a service port of the family.
    pub(crate) services: usize,
    /// Service ports.
    pub(crate) service_ports: usize,
    /// Endpoints that traffic goes to, by service port: those of ClusterSet and of LocalSet, each once.
    pub(crate) endpoints: usize,
    /// Service ports that ask for affinity and do not get it: see [`PortView::lacks_affinity`].
    pub(crate) without_affinity: usize,
    pub(super) elements: [usize; SetName::ALL.len()],
}

impl Counts {
    /// How many elements a set has; 0 for the one that the kernel writes.
    pub(crate) fn elements(&self, set: SetName) -> usize {
        self.elements.get(set as usize).copied().unwrap_or_default()
    }
}
