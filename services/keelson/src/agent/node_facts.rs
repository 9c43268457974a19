//! What Events on the Node are about.
//!
//! Owns: [`NodeFacts`]. In and out: values; the view reads them, the writer of Events judges them.

use keelson_proto::{debug as pb, endpoints::Backend, node::Condition};
use keelson_pulls::runtime::Health;

pub(super) struct NodeFacts {
    pub(super) runtime: Health,
    /// Image pulls are passed through to the runtime without admission.
    pub(super) is_passing_through: bool,
    /// Empty while they are not known.
    pub(super) conditions: Vec<Condition>,
    pub(super) backends: Vec<Backend>,
    /// As it was last set on the node; `None`: not by this process.
    pub(super) limit: Option<pb::Limit>,
}
