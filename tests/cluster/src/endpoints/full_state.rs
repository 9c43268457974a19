//! Owns: a complete state as a consumer holds it, and the invariants of every state. In: changes. Out: violations.

use super::expected_state::ExpectedState;
use anyhow::{Result, bail};
use keelson_client::{Position, ServiceName};
use keelson_proto::localnetv1::{NodeInfo, ServiceEndpoints};
use prost::Message as _;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex, PoisonError};

pub type Invariant = Arc<dyn Fn(&FullState) -> Result<()> + Send + Sync>;

/// Maximum number of differences that are printed.
const SHOWN: usize = 5;

#[derive(Clone, Debug, Default)]
pub struct FullState {
    pub position: Position,
    pub node: Option<NodeInfo>,
    /// By `namespace/name`.
    pub services: BTreeMap<String, ServiceEndpoints>,
    /// Digest of all fields but the position.
    digest: u64,
}

fn hash(name: &str, bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (name, bytes).hash(&mut hasher);
    hasher.finish()
}

impl FullState {
    /// `name` is `namespace/name`.
    pub fn service(&self, name: &str) -> Option<&ServiceEndpoints> {
        self.services.get(name)
    }

    pub fn pair(&self) -> (u64, u64) {
        (self.position.instance_id, self.position.rev)
    }

    pub(super) fn set(&mut self, name: &ServiceName, service: ServiceEndpoints) {
        self.digest ^= hash(name.as_str(), &service.encode_to_vec());
        if let Some(former) = self.services.insert(name.as_str().to_owned(), service) {
            self.digest ^= hash(name.as_str(), &former.encode_to_vec());
        }
    }

    pub(super) fn delete(&mut self, name: &ServiceName) {
        if let Some(former) = self.services.remove(name.as_str()) {
            self.digest ^= hash(name.as_str(), &former.encode_to_vec());
        }
    }

    pub(super) fn set_node(&mut self, node: NodeInfo) {
        self.digest ^= hash("", &node.encode_to_vec());
        if let Some(former) = self.node.replace(node) {
            self.digest ^= hash("", &former.encode_to_vec());
        }
    }

    /// Fails unless this equals the expected state.
    pub fn ensure_equals(&self, expected: &ExpectedState) -> Result<()> {
        let mut differences = String::new();
        if self.node.as_ref() != Some(&expected.node) {
            let _ = writeln!(differences, "the node is {:?}, not {:?}", self.node, expected.node);
        }
        let (mut count, names) = (0, self.services.keys().chain(expected.services.keys()));
        let names: std::collections::BTreeSet<_> = names.collect();
        for name in names {
            let (here, there) = (self.services.get(name), expected.services.get(name));
            if here != there {
                count += 1;
                if count <= SHOWN {
                    let _ = writeln!(differences, "{name} is {here:?},\n  not {there:?}");
                }
            }
        }
        if differences.is_empty() {
            return Ok(());
        }
        bail!("{:?} differs from the expected state in {count} Services:\n{differences}", self.position)
    }
}

/// Digest of the contents of each pair of instance and revision: the same for every client, at any time, over each API.
/// Cheap to clone; consumers of one agent share it.
#[derive(Clone, Debug, Default)]
pub struct Pairs(Arc<Mutex<HashMap<(u64, u64), u64>>>);

impl Pairs {
    /// Fails if this pair was seen with other contents.
    pub(super) fn record(&self, full_state: &FullState) -> Result<()> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let former = *all.entry(full_state.pair()).or_insert(full_state.digest);
        if former != full_state.digest {
            bail!("{:?} has two meanings", full_state.position);
        }
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_contents_have_equal_digests() {
        let name = |name: &str| ServiceName::new("ns", name);
        let service = |n| ServiceEndpoints { health_check_node_port: n, ..ServiceEndpoints::default() };
        let mut one = FullState::default();
        one.set(&name("a"), service(1));
        one.set(&name("b"), service(2));
        one.set_node(NodeInfo { zone: "z".to_owned(), ..NodeInfo::default() });
        let mut other = FullState::default();
        other.set_node(NodeInfo::default());
        other.set_node(NodeInfo { zone: "z".to_owned(), ..NodeInfo::default() });
        for (name_of, number) in [("c", 3), ("b", 7), ("b", 2), ("a", 1)] {
            other.set(&name(name_of), service(number));
        }
        assert_ne!(one.digest, other.digest);
        other.delete(&name("c"));
        other.delete(&name("never"));
        assert_eq!((one.digest, &one.services), (other.digest, &other.services));

        let pairs = Pairs::default();
        pairs.record(&one).unwrap();
        pairs.record(&other).unwrap();
        other.set(&name("a"), service(9));
        assert!(pairs.record(&other).is_err());
        other.position.rev = 1;
        pairs.record(&other).unwrap();
        assert_eq!(pairs.len(), 2);
    }
}
