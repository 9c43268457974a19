//! What is known of the Node.
//!
//! Owns: the Node as it was watched, and the Node as it must be since the agent's own last request, until the watch has
//! caught up. In: events of the watch, answers of the server. Out: the Node to compare with.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;

use crate::status::compare::older;

#[derive(Debug, Default)]
pub(super) struct Knowledge {
    /// `None`: no event of the watch yet. `Some(None)`: the Node does not exist.
    watched: Option<Option<Arc<Node>>>,
    /// Newer than `watched`.
    expected: Option<Arc<Node>>,
    /// The uid of the Node that is reported on.
    pub(super) uid: Option<String>,
}

pub(super) fn uid(node: &Node) -> &str {
    node.metadata.uid.as_deref().unwrap_or_default()
}

pub(super) fn version(node: &Node) -> Option<&str> {
    node.metadata.resource_version.as_deref()
}

impl Knowledge {
    pub(super) fn watched(&mut self, node: Option<Arc<Node>>) {
        let behind = match (&node, &self.expected) {
            (Some(node), Some(expected)) => {
                uid(node) == uid(expected) && older(version(node), version(expected).unwrap_or_default())
            }
            _ => false,
        };
        if !behind {
            self.expected = None;
        }
        self.watched = Some(node);
    }

    /// A request has shown this Node, or made it so.
    pub(super) fn expect(&mut self, node: Arc<Node>) {
        let caught_up = match &self.watched {
            Some(Some(watched)) => {
                uid(watched) == uid(&node)
                    && version(watched).is_some_and(|has| {
                        has == version(&node).unwrap_or_default() || older(version(&node), has)
                    })
            }
            _ => false,
        };
        self.expected = (!caught_up).then_some(node);
    }

    /// A request has shown that the known Node is wrong.
    pub(super) fn forget(&mut self) {
        self.watched = None;
        self.expected = None;
    }

    pub(super) fn node(&self) -> Option<Arc<Node>> {
        self.expected.clone().or_else(|| self.watched.clone().flatten())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(of: &str, version: &str) -> Arc<Node> {
        let mut node = Node::default();
        node.metadata.uid = Some(of.into());
        node.metadata.resource_version = Some(version.into());
        Arc::new(node)
    }

    fn known(knowledge: &Knowledge) -> Option<String> {
        knowledge.node().and_then(|node| node.metadata.resource_version.clone())
    }

    #[test]
    fn the_watch_is_used_once_it_has_caught_up() {
        let mut knowledge = Knowledge::default();
        assert_eq!(known(&knowledge), None);
        knowledge.watched(Some(node("u", "5")));
        knowledge.expect(node("u", "9"));
        knowledge.watched(Some(node("u", "7")));
        assert_eq!(known(&knowledge).as_deref(), Some("9"), "the watch is behind");
        knowledge.watched(Some(node("u", "10")));
        assert_eq!(known(&knowledge).as_deref(), Some("10"));
        knowledge.expect(node("u", "10"));
        knowledge.expect(node("u", "8"));
        assert_eq!(known(&knowledge).as_deref(), Some("10"), "the watch was faster than the answer");
    }

    #[test]
    fn non_numeric_versions_are_accepted_in_order_of_arrival() {
        let mut knowledge = Knowledge::default();
        knowledge.expect(node("u", "b"));
        knowledge.watched(Some(node("u", "a")));
        assert_eq!(known(&knowledge).as_deref(), Some("a"));
    }

    #[test]
    fn a_deleted_or_recreated_node_is_never_behind() {
        let mut knowledge = Knowledge::default();
        knowledge.expect(node("u", "9"));
        knowledge.watched(None);
        assert_eq!(known(&knowledge), None);
        knowledge.expect(node("u", "9"));
        knowledge.watched(Some(node("v", "3")));
        assert_eq!(known(&knowledge).as_deref(), Some("3"));
        knowledge.forget();
        assert_eq!(known(&knowledge), None);
    }
}
