//! Questions about packets, which a backend answers with an explanation.
//!
//! Owns: [`Question`], and the parsing of addresses, ports, protocols and sources. In: texts and numbers of a request.
//! Out: values or errors. Names are never resolved: an explanation is for one address. [`source`] has the packets that a
//! question is about.

pub mod source;

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use keelson_proto::proxy as pb;

use crate::model::{Endpoint, Family, Frontend, Protocol};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// An IPv4-mapped IPv6 address counts as IPv4.
    pub address: IpAddr,
    /// Never 0.
    pub port: u16,
    pub protocol: Protocol,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Every other variant in turn.
    Any,
    Pod,
    /// A process of the node itself, or a pod in the node's network.
    Node,
    /// Neither a pod of this node nor the node.
    Outside,
    Address(IpAddr),
}

/// Asks which rules the first packet of a connection meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    pub target: Target,
    /// An address is of the target's family.
    pub from: Source,
}

/// Each error says what would be valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuestionError {
    #[error(
        "{0:?} is not ADDRESS:PORT or ADDRESS:PORT/PROTOCOL, such as 10.96.0.10:80, [fd00:96::a]:53/UDP; \
         names are not resolved"
    )]
    Target(String),
    #[error("{0:?} is not an IP address; names are not resolved")]
    Address(String),
    #[error("{0} is not a port; ports are 1 to 65535")]
    Port(u32),
    /// Not a protocol that Services can have.
    #[error("{0:?} is not a protocol of Services; use TCP, UDP or SCTP")]
    Protocol(String),
    #[error("{0:?} is not a source; use an IP address, pod, node or outside")]
    Source(String),
    #[error("{from} cannot send to {to}: the IP families differ")]
    Families { from: IpAddr, to: IpAddr },
}

impl Target {
    #[must_use]
    pub fn family(&self) -> Family {
        Family::of(self.address)
    }

    /// The frontends that a packet may be for: the first one that a service port has gets it.
    #[must_use]
    pub fn frontends(&self) -> [Frontend; 2] {
        let Self { address: ip, port, protocol } = *self;
        [Frontend::Address { ip, protocol, port }, Frontend::NodePort { protocol, port }]
    }
}

impl fmt::Display for Target {
    /// In the form that is parsed: `10.96.0.10:80/TCP`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", SocketAddr::new(self.address, self.port), self.protocol)
    }
}

impl FromStr for Target {
    type Err = QuestionError;

    /// Parses `10.96.0.10:80`, `10.96.0.10:53/udp`, `[fd00:96::a]:80`.
    fn from_str(text: &str) -> Result<Self, QuestionError> {
        let (socket, named) = text.split_once('/').unwrap_or((text, ""));
        let socket: SocketAddr = socket.parse().map_err(|_| QuestionError::Target(text.into()))?;
        if socket.port() == 0 {
            return Err(QuestionError::Port(0));
        }
        let protocol = protocol(named)?;
        Ok(Self { address: socket.ip().to_canonical(), port: socket.port(), protocol })
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => Ok(()),
            Self::Pod => f.write_str("pod"),
            Self::Node => f.write_str("node"),
            Self::Outside => f.write_str("outside"),
            Self::Address(address) => address.fmt(f),
        }
    }
}

impl FromStr for Source {
    type Err = QuestionError;

    fn from_str(text: &str) -> Result<Self, QuestionError> {
        match text.to_ascii_lowercase().as_str() {
            "" => Ok(Self::Any),
            "pod" => Ok(Self::Pod),
            "node" => Ok(Self::Node),
            "outside" => Ok(Self::Outside),
            address => match address.parse::<IpAddr>() {
                Ok(address) => Ok(Self::Address(address.to_canonical())),
                Err(_) => Err(QuestionError::Source(text.into())),
            },
        }
    }
}

impl Question {
    /// # Errors
    /// Source and destination are of different families.
    pub fn new(target: Target, from: Source) -> Result<Self, QuestionError> {
        match from {
            Source::Address(from) if !target.family().has(&from) => {
                Err(QuestionError::Families { from, to: target.address })
            }
            _ => Ok(Self { target, from }),
        }
    }
}

impl TryFrom<pb::ExplainRequest> for Question {
    type Error = QuestionError;

    fn try_from(request: pb::ExplainRequest) -> Result<Self, QuestionError> {
        let address: IpAddr =
            request.address.parse().map_err(|_| QuestionError::Address(request.address.clone()))?;
        let port = u16::try_from(request.port).ok().filter(|&port| port != 0);
        let port = port.ok_or(QuestionError::Port(request.port))?;
        let protocol = protocol(&request.protocol)?;
        Self::new(Target { address: address.to_canonical(), port, protocol }, request.from.parse()?)
    }
}

impl From<Question> for pb::ExplainRequest {
    fn from(question: Question) -> Self {
        let Target { address, port, protocol } = question.target;
        Self {
            address: address.to_string(),
            port: port.into(),
            protocol: protocol.as_str().into(),
            from: question.from.to_string(),
        }
    }
}

/// Number of endpoints that [`list`] names.
const NAMED: usize = 4;

/// `10.244.0.2:8080, 10.244.1.2:8080 and 3 more`.
#[must_use]
pub fn list(endpoints: &[Endpoint]) -> String {
    let named: Vec<String> = endpoints.iter().take(NAMED).map(ToString::to_string).collect();
    match endpoints.len().checked_sub(NAMED) {
        Some(more @ 1..) => format!("{} and {more} more", named.join(", ")),
        _ => named.join(", "),
    }
}

/// Parses a name in any case; empty: TCP.
fn protocol(name: &str) -> Result<Protocol, QuestionError> {
    if name.is_empty() {
        return Ok(Protocol::Tcp);
    }
    let found = Protocol::ALL.into_iter().find(|protocol| protocol.as_str().eq_ignore_ascii_case(name));
    found.ok_or_else(|| QuestionError::Protocol(name.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_parsed() {
        for (text, read) in [
            ("10.96.0.10:80", "10.96.0.10:80/TCP"),
            ("10.96.0.10:53/udp", "10.96.0.10:53/UDP"),
            ("[fd00:96::a]:80/SCTP", "[fd00:96::a]:80/SCTP"),
            ("[::ffff:10.96.0.10]:80", "10.96.0.10:80/TCP"),
            ("10.96.0.10:80/", "10.96.0.10:80/TCP"),
        ] {
            let target: Target = text.parse().unwrap();
            assert_eq!(target.to_string(), read);
            assert_eq!(target.to_string().parse(), Ok(target), "what is shown can be read");
        }
        for text in [
            "",
            "10.96.0.10",
            "web:80",
            "fd00:96::a:80",
            "10.96.0.10:80:80",
            "10.96.0.10:65536",
            "10.96.0.010:80",
        ] {
            assert_eq!(text.parse::<Target>(), Err(QuestionError::Target(text.into())));
        }
        assert_eq!("10.96.0.10:0".parse::<Target>(), Err(QuestionError::Port(0)));
        assert_eq!("10.96.0.10:1/icmp".parse::<Target>(), Err(QuestionError::Protocol("icmp".into())));
    }

    #[test]
    fn invalid_requests_are_explained() {
        let request = |address: &str, port, protocol: &str, from: &str| pb::ExplainRequest {
            address: address.into(),
            port,
            protocol: protocol.into(),
            from: from.into(),
        };
        let good = Question::try_from(request("::ffff:10.0.0.1", 80, "", "POD")).unwrap();
        assert_eq!((good.target.to_string().as_str(), good.from), ("10.0.0.1:80/TCP", Source::Pod));
        for from in ["", "node", "outside", "192.0.2.1", "::ffff:192.0.2.1"] {
            let question = Question::try_from(request("10.0.0.1", 1, "udp", from)).unwrap();
            assert_eq!(Question::try_from(pb::ExplainRequest::from(question)), Ok(question));
        }
        for (wrong, says) in [
            (request("web", 80, "", ""), "\"web\" is not an IP address"),
            (request("10.0.0.1", 0, "", ""), "0 is not a port"),
            (request("10.0.0.1", 65_536, "", ""), "65536 is not a port"),
            (request("10.0.0.1", 80, "GRE", ""), "\"GRE\" is not a protocol"),
            (request("10.0.0.1", 80, "", "me"), "\"me\" is not a source"),
            (request("10.0.0.1", 80, "", "fd00::1"), "fd00::1 cannot send to 10.0.0.1"),
        ] {
            let error = Question::try_from(wrong).unwrap_err();
            assert!(error.to_string().starts_with(says), "{error}");
        }
    }
}
