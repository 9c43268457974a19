//! Address of the server.
//!
//! Owns: [`Target`]. In: `unix:///PATH` or `tcp://HOST:PORT`, as docker writes such addresses. Out: an address, or an
//! error.

use std::{fmt, str::FromStr};

/// Where an agent listens by default.
pub const DEFAULT_TARGET: &str = "unix:///run/keelson-endpoints/endpoints.sock";

/// Maximum length of the path of a unix socket in bytes (`sun_path` without its terminator).
const MAX_PATH_LEN: usize = 107;

/// Address of a server: `unix:///run/keelson-endpoints/endpoints.sock` or `tcp://127.0.0.1:12345`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Target(Kind);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Kind {
    Unix(String),
    Tcp { host: String, port: u16 },
}

/// The text is not a valid target.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a valid target: {reason}; write unix:///PATH or tcp://HOST:PORT")]
pub struct TargetError {
    text: String,
    reason: &'static str,
}

impl Target {
    /// The path of a unix socket; `None` for TCP.
    #[must_use]
    pub fn unix_path(&self) -> Option<&str> {
        match &self.0 {
            Kind::Unix(path) => Some(path),
            Kind::Tcp { .. } => None,
        }
    }

    /// The address in tonic's form.
    pub(crate) fn uri(&self) -> String {
        match &self.0 {
            Kind::Unix(path) => format!("unix://{path}"),
            Kind::Tcp { host, port } => format!("http://{host}:{port}"),
        }
    }
}

impl Default for Target {
    fn default() -> Self {
        Self(Kind::Unix(DEFAULT_TARGET.trim_start_matches("unix://").to_owned()))
    }
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        let fault = |reason| TargetError { text: text.to_owned(), reason };
        if let Some(path) = text.strip_prefix("unix://") {
            let path = unix_path(path).map_err(fault)?;
            return Ok(Self(Kind::Unix(path.to_owned())));
        }
        let Some(address) = text.strip_prefix("tcp://") else {
            return Err(fault("it starts with neither unix:// nor tcp://"));
        };
        let (host, port) = address.rsplit_once(':').ok_or_else(|| fault("the port is missing"))?;
        let port = port
            .parse()
            .ok()
            .filter(|port| *port != 0)
            .ok_or_else(|| fault("the port is not a number from 1 to 65535"))?;
        check_host(host).map_err(fault)?;
        Ok(Self(Kind::Tcp { host: host.to_owned(), port }))
    }
}

fn unix_path(path: &str) -> Result<&str, &'static str> {
    match path {
        "" | "/" => Err("the path is missing"),
        _ if !path.starts_with('/') => Err("the path is not absolute"),
        _ if path.len() > MAX_PATH_LEN => {
            Err("the path is longer than 107 bytes, the limit of a unix socket")
        }
        _ if path.contains('\0') => Err("the path contains a NUL byte"),
        _ => Ok(path),
    }
}

/// A name or an address; an IPv6 address is in brackets.
fn check_host(host: &str) -> Result<(), &'static str> {
    if let Some(inner) = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        return inner.parse::<std::net::Ipv6Addr>().map(|_| ()).map_err(|_| "the IPv6 address is invalid");
    }
    if host.is_empty() {
        return Err("the host is missing");
    }
    if host.contains(':') {
        return Err("an IPv6 address needs brackets");
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if host.chars().all(plain) { Ok(()) } else { Err("the host has an invalid character") }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Unix(path) => write!(f, "unix://{path}"),
            Kind::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_as_docker_writes_them() {
        for (text, uri) in [
            (DEFAULT_TARGET, DEFAULT_TARGET),
            ("unix:///a b/%41#?.sock", "unix:///a b/%41#?.sock"),
            ("tcp://127.0.0.1:12345", "http://127.0.0.1:12345"),
            ("tcp://[::1]:12345", "http://[::1]:12345"),
            ("tcp://node-7.example:1", "http://node-7.example:1"),
        ] {
            let target: Target = text.parse().unwrap();
            assert_eq!(target.to_string(), text);
            assert_eq!(target.uri(), uri);
            assert_eq!(target.unix_path().is_some(), text.starts_with("unix"));
        }
        assert_eq!(Target::default().to_string(), DEFAULT_TARGET);
    }

    #[test]
    fn invalid_targets_are_refused_with_a_reason() {
        for (text, reason) in [
            ("", "neither unix:// nor tcp://"),
            ("/run/x.sock", "neither unix:// nor tcp://"),
            ("http://127.0.0.1:1", "neither unix:// nor tcp://"),
            ("unix://", "the path is missing"),
            ("unix://run/x.sock", "not absolute"),
            ("unix:///a\0b", "a NUL byte"),
            (&format!("unix:///{}", "x".repeat(107)), "longer than 107 bytes"),
            ("tcp://127.0.0.1", "the port is missing"),
            ("tcp://:80", "the host is missing"),
            ("tcp://a:0", "the port is not a number from 1 to 65535"),
            ("tcp://a:65536", "the port is not a number from 1 to 65535"),
            ("tcp://::1:80", "needs brackets"),
            ("tcp://[::g]:80", "the IPv6 address is invalid"),
            ("tcp://user@host:80", "an invalid character"),
            ("tcp://host/path:80", "an invalid character"),
        ] {
            let said = text.parse::<Target>().unwrap_err().to_string();
            assert!(said.contains(reason) && said.contains("write unix:///PATH"), "{text}: {said}");
        }
        assert!(format!("unix:///{}", "x".repeat(106)).parse::<Target>().is_ok());
    }
}
