//! The model of Services for backends, by service port and family.
//!
//! Owns: [`ServicePort`] and its parts, and the conversion of messages of the Endpoints API. In:
//! `localnetv1.ServiceEndpoints`. Out: values; nothing here depends on a kernel. As in kube-proxy, the IP families are
//! independent: a [`ServicePort`] belongs to one.

mod claims;
mod convert;
mod frontend;
mod services;

use std::{fmt, net::IpAddr, sync::Arc};

use ipnet::IpNet;
use keelson_client::ServiceName;

pub use claims::{Claims, FrontendKind};
pub use convert::service_ports;
pub use frontend::{Conflict, Frontend};
pub use keelson_proto::family::Family;
pub use services::{ServiceCounts, WantedServices};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

impl Protocol {
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// The number in IP headers (IANA).
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }

    /// The name in nft.
    #[must_use]
    pub const fn keyword(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }

    #[must_use]
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            6 => Some(Self::Tcp),
            17 => Some(Self::Udp),
            132 => Some(Self::Sctp),
            _ => None,
        }
    }

    /// `TCP`, `UDP` or `SCTP`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    pub ip: IpAddr,
    /// Never 0.
    pub port: u16,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::net::SocketAddr::new(self.ip, self.port).fmt(f)
    }
}

/// Identifies a service port: a Service may have several, even with the same number.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortName {
    pub service: ServiceName,
    /// `spec.ports[].name`, which may be empty.
    pub port: Arc<str>,
    pub protocol: Protocol,
}

impl fmt::Display for PortName {
    /// As in kube-proxy: `namespace/name:port` or `namespace/name`, and the protocol if it is not TCP.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.service.fmt(f)?;
        if !self.port.is_empty() {
            write!(f, ":{}", self.port)?;
        }
        match self.protocol {
            Protocol::Tcp => Ok(()),
            other => write!(f, "/{other}"),
        }
    }
}

/// A service port in one family: the result of service-semantics 1 and 2 for Service and slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicePort {
    pub name: PortName,
    /// The port of cluster IP, external and load-balancer addresses; never 0.
    pub port: u16,
    /// V.
    pub cluster_ip: IpAddr,
    /// X, without those that are V or W; without duplicates.
    pub external_ips: Vec<IpAddr>,
    /// W, without those that are V; without duplicates.
    pub load_balancer_ips: Vec<IpAddr>,
    /// NP; 0: none.
    pub node_port: u16,
    /// internalTrafficPolicy Local.
    pub internal_local: bool,
    /// externalTrafficPolicy Local, if it has an effect.
    pub external_local: bool,
    /// Timeout of sessionAffinity ClientIP; 0: no affinity.
    pub affinity_seconds: u32,
    /// The networks that may reach W: disjoint, ordered, of the family. Empty: any source.
    pub source_ranges: Vec<IpNet>,
    /// Some endpoint could serve it, here or elsewhere: if a set is empty, traffic is dropped when this is true and
    /// rejected when it is false.
    pub has_any: bool,
    /// ClusterSet, ordered, without duplicates.
    pub cluster: Vec<Endpoint>,
    /// LocalSet, ordered, without duplicates. Empty if no policy uses it.
    pub local: Vec<Endpoint>,
    /// Endpoints of both sets on this node: a pod may reach itself through the Service (hairpin).
    pub on_node: Vec<Endpoint>,
    /// Every serving endpoint, in a set or not: a UDP flow to any other is stale. Empty for other protocols.
    pub serving: Vec<Endpoint>,
}

impl ServicePort {
    /// Whether it has any of X, W and NP.
    #[must_use]
    pub fn is_external(&self) -> bool {
        self.node_port != 0 || !self.external_ips.is_empty() || !self.load_balancer_ips.is_empty()
    }

    /// Whether some traffic may go to ClusterSet (service-semantics 2).
    #[must_use]
    pub fn uses_cluster(&self) -> bool {
        !self.internal_local || self.is_external()
    }

    /// Whether some traffic must stay in LocalSet (service-semantics 2).
    #[must_use]
    pub fn uses_local(&self) -> bool {
        self.internal_local || (self.external_local && self.is_external())
    }
}
