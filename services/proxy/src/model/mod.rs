//! What a backend needs to know of Services, by service port and family.
//!
//! Owns: [`ServicePort`] and its parts, and how they come of the messages of the Endpoints API. In:
//! `localnetv1.ServiceEndpoints`. Out: values; nothing here knows of any kernel. Each IP family is a proxy of its own, as it
//! is in kube-proxy: a [`ServicePort`] belongs to one.

mod convert;
mod frontend;

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use ipnet::IpNet;
use keelson_client::ServiceName;

pub use convert::service_ports;
pub use frontend::{Conflict, Frontend};

/// An IP family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address.
    #[must_use]
    pub const fn of(ip: &IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// Whether an address is of this family.
    #[must_use]
    pub const fn has(self, ip: &IpAddr) -> bool {
        matches!((self, ip), (Self::V4, IpAddr::V4(_)) | (Self::V6, IpAddr::V6(_)))
    }

    /// The length of an address, in bytes.
    #[must_use]
    pub const fn address_len(self) -> usize {
        match self {
            Self::V4 => 4,
            Self::V6 => 16,
        }
    }

    /// `0.0.0.0` or `::`.
    #[must_use]
    pub const fn unspecified(self) -> IpAddr {
        match self {
            Self::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            Self::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        }
    }

    /// `IPv4` or `IPv6`, as Kubernetes writes it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A transport protocol that Services can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Protocol {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// The number of the protocol in IP headers (IANA).
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }

    /// The name of the protocol in nft.
    #[must_use]
    pub const fn keyword(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }

    /// The protocol of a number.
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

/// Where an endpoint listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// Its address.
    pub ip: IpAddr,
    /// Its port, never 0.
    pub port: u16,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::net::SocketAddr::new(self.ip, self.port).fmt(f)
    }
}

/// Which service port: a Service may have several, even of one number.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortName {
    /// Namespace and name of the Service.
    pub service: ServiceName,
    /// `spec.ports[].name`, which may be empty.
    pub port: Arc<str>,
    /// The protocol.
    pub protocol: Protocol,
}

impl fmt::Display for PortName {
    /// As kube-proxy writes it: `namespace/name:port` or `namespace/name`, and the protocol where it is not TCP.
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

/// A service port in one family: what service-semantics 1 and 2 leave of Service and slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicePort {
    /// Which one.
    pub name: PortName,
    /// The number at which cluster IP, external and load-balancer addresses answer; never 0.
    pub port: u16,
    /// V.
    pub cluster_ip: IpAddr,
    /// X, without those that are V or W; no two are equal.
    pub external_ips: Vec<IpAddr>,
    /// W, without those that are V; no two are equal.
    pub load_balancer_ips: Vec<IpAddr>,
    /// NP; 0: none.
    pub node_port: u16,
    /// internalTrafficPolicy Local.
    pub internal_local: bool,
    /// externalTrafficPolicy Local, where it has an effect.
    pub external_local: bool,
    /// sessionAffinity ClientIP: for how many seconds; 0: no affinity.
    pub affinity_seconds: u32,
    /// Who may reach W: disjoint and ordered networks of the family. Empty: anyone.
    pub source_ranges: Vec<IpNet>,
    /// Some endpoint could serve it, here or elsewhere: where a set is empty, traffic is dropped when this is true and
    /// rejected when it is false.
    pub has_any: bool,
    /// ClusterSet, ordered; no two are equal.
    pub cluster: Vec<Endpoint>,
    /// LocalSet, ordered; no two are equal. Empty where no policy uses it.
    pub local: Vec<Endpoint>,
    /// Those of both sets that are on this node: a pod may reach itself through the Service (hairpin).
    pub on_node: Vec<Endpoint>,
    /// Every serving endpoint, whatever the sets: a UDP flow to any other is stale. Empty for other protocols.
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
