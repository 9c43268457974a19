//! Where traffic to Services arrives.
//!
//! Owns: [`Frontend`] and [`Conflict`]. In and out: values.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use super::{PortName, Protocol};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Frontend {
    /// A cluster IP, external IP or load-balancer IP.
    Address { ip: IpAddr, protocol: Protocol, port: u16 },
    /// A node port, at the addresses at which node ports are served.
    NodePort { protocol: Protocol, port: u16 },
}

impl fmt::Display for Frontend {
    /// `10.0.0.1:80/TCP`, `[fd00::1]:80/TCP` or `node port 30080/TCP`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Address { ip, protocol, port } => write!(f, "{}/{protocol}", SocketAddr::new(ip, port)),
            Self::NodePort { protocol, port } => write!(f, "node port {port}/{protocol}"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    pub frontend: Frontend,
    /// The service port that gets it: the one with the address as its cluster IP, otherwise as a load-balancer IP,
    /// otherwise as an external IP; of several, the one with the smallest name.
    pub owner: PortName,
    /// The service ports that do not get it, ordered.
    pub others: Vec<PortName>,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { frontend, owner, others } = self;
        let others: Vec<String> = others.iter().map(ToString::to_string).collect();
        write!(f, "{frontend} is claimed by {owner} and by {}; the first one gets it", others.join(", "))
    }
}
