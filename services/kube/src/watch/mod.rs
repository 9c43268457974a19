//! The watches of the agent: its own Node, the pods bound to it, and what Services are made of.
//!
//! Owns: [`watch_node`], [`watch_pods`] and [`watch_endpoints`], and the loop that all run. In: an
//! [`ApiServer`](crate::ApiServer). Out: what is seen, handed to a sink, and a
//! [`ChoreHealth`](keelson_actor_system::cluster::ChoreHealth). All run until they are dropped; no error ends them.
//!
//! kube-runtime's watcher is not used: it begins a watch again at once and for ever when the server closes it at
//! once, never comes back from an HTTP 410 at the start of a watch, and does not know `Retry-After`. What is sent
//! is what client-go's reflector sends: one request that lists and watches where the server can do that, and a
//! list and a watch where it cannot.

mod endpoints;
mod events;
mod follow;
mod json;
mod node;
mod pods;
mod protobuf;
mod reflect;
mod subject;

#[cfg(test)]
pub(crate) use {endpoints::collect, reflect::MAX_WATCH};

pub use endpoints::watch_endpoints;
pub use node::{NodeSink, node_view, watch_node};
pub use pods::{KnownPods, PodEvent, PodRef, PodSink, watch_pods};
