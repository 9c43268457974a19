//! States.
//!
//! Owns: [`State`], a full state whose Services are still encoded, [`Position`], which identifies it, and
//! [`ServiceName`]. In: items of the wire. Out: values; a [`State`] is always complete.

use bytes::Bytes;
use keelson_proto::{
    endpoints::Sync,
    localnetv1::{NextFilter, NodeInfo, ServiceEndpoints},
};
use prost::Message as _;

use crate::Error;

pub use keelson_proto::names::ServiceName;

/// As [`ServiceName::new`], for names that a server sent.
pub(crate) fn checked_name(namespace: &str, name: &str) -> Result<ServiceName, Error> {
    if name.is_empty() {
        return Err(Error::malformed("a Service has no name"));
    }
    if namespace.contains('/') || name.contains('/') {
        return Err(Error::malformed(format!("a Service name contains a slash: {namespace:?}, {name:?}")));
    }
    Ok(ServiceName::new(namespace, name))
}

/// Identifies a state, and describes its freshness.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Position {
    /// Random, made with the server's state; 0: none.
    pub instance_id: u64,
    /// Increases with each change of the state of an instance; 0: none.
    pub rev: u64,
    /// The server cannot reach its source now; this is the last known state.
    pub stale: bool,
    /// Why it is stale.
    pub stale_reason: String,
    /// When it was last current, in Unix milliseconds, if it is stale and the server knows.
    pub stale_since_unix_ms: Option<i64>,
    /// When the oldest change that led to this state was made, in Unix milliseconds (from the annotation
    /// `endpoints.kubernetes.io/last-change-trigger-time`), if it is known.
    pub triggered_unix_ms: Option<i64>,
}

fn known(unix_ms: i64) -> Option<i64> {
    (unix_ms != 0).then_some(unix_ms)
}

impl From<NextFilter> for Position {
    fn from(next: NextFilter) -> Self {
        Self {
            instance_id: next.instance_id,
            rev: next.rev,
            stale: next.stale,
            stale_reason: next.stale_reason,
            stale_since_unix_ms: known(next.stale_since_unix_ms),
            triggered_unix_ms: known(next.triggered_unix_ms),
        }
    }
}

impl From<Sync> for Position {
    fn from(sync: Sync) -> Self {
        Self {
            instance_id: sync.instance_id,
            rev: sync.rev,
            stale: sync.stale,
            stale_reason: sync.stale_reason,
            stale_since_unix_ms: known(sync.stale_since_unix_ms),
            triggered_unix_ms: known(sync.triggered_unix_ms),
        }
    }
}

/// A Service as received; the holder decides whether to decode it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawService {
    pub(crate) name: ServiceName,
    pub(crate) bytes: Bytes,
}

impl RawService {
    /// Name of the Service.
    #[must_use]
    pub fn name(&self) -> &ServiceName {
        &self.name
    }

    /// The encoded `localnetv1.ServiceEndpoints`. Equal Services have equal bytes. The bytes are a part of the received
    /// message, which stays in memory as long as they do; copy them to keep single ones for long.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Decodes the Service.
    ///
    /// # Errors
    /// [`Error::Undecodable`].
    pub fn decode(&self) -> Result<ServiceEndpoints, Error> {
        decode(&self.name, &self.bytes)
    }
}

pub(crate) fn decode(name: &ServiceName, bytes: &Bytes) -> Result<ServiceEndpoints, Error> {
    let decoded = ServiceEndpoints::decode(bytes.clone());
    decoded.map_err(|source| Error::Undecodable { name: name.clone(), source })
}

/// A full state: every Service at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    pub(crate) position: Position,
    pub(crate) node: Option<NodeInfo>,
    /// In the order of their names, which are unique.
    pub(crate) services: Vec<RawService>,
}

impl State {
    /// # Errors
    /// A Service occurs twice.
    pub(crate) fn new(
        position: Position,
        node: Option<NodeInfo>,
        mut services: Vec<RawService>,
    ) -> Result<Self, Error> {
        if !services.is_sorted_by(|one, other| one.name < other.name) {
            services.sort_unstable_by(|one, other| one.name.cmp(&other.name));
            if let Some(pair) = services.windows(2).find(|pair| pair[0].name == pair[1].name) {
                return Err(Error::malformed(format!("duplicate Service {}", pair[0].name)));
            }
        }
        Ok(Self { position, node, services })
    }

    /// Identifies the state; the next one is requested from it.
    #[must_use]
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// The node, if the server sent it.
    #[must_use]
    pub fn node(&self) -> Option<&NodeInfo> {
        self.node.as_ref()
    }

    /// All Services in the order of their names.
    #[must_use]
    pub fn services(&self) -> &[RawService] {
        &self.services
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(name: &str) -> RawService {
        RawService { name: ServiceName::new("ns", name), bytes: Bytes::new() }
    }

    #[test]
    fn names_have_two_parts() {
        let name = checked_name("ns", "web").unwrap();
        assert_eq!((name.namespace(), name.name(), name.as_str()), ("ns", "web", "ns/web"));
        assert_eq!(format!("{name} {name:?}"), "ns/web \"ns/web\"");
        assert!(checked_name("ns", "").is_err());
        assert!(checked_name("n/s", "a").is_err());
        assert!(checked_name("ns", "a/b").is_err());
    }

    #[test]
    fn a_state_is_ordered_and_names_no_service_twice() {
        let state = State::new(Position::default(), None, vec![raw("c"), raw("a"), raw("b")]).unwrap();
        let names: Vec<_> = state.services().iter().map(|raw| raw.name().name().to_owned()).collect();
        assert_eq!(names, ["a", "b", "c"]);
        for twice in [vec![raw("a"), raw("a")], vec![raw("a"), raw("b"), raw("a")]] {
            let error = State::new(Position::default(), None, twice).unwrap_err();
            assert!(error.to_string().contains("duplicate Service ns/a"), "{error}");
        }
    }
}
