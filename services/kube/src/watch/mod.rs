//! The watches of the agent: its own Node, the pods bound to it, and the objects of Services.
//!
//! Owns: [`watch_node`], [`watch_pods`] and [`watch_endpoints`], and the loop of all. In: an
//! [`ApiServer`](crate::ApiServer). Out: objects, handed to a sink, and a
//! [`JobHealth`](keelson_actor_system::cluster::JobHealth). All run until they are dropped; no error ends them.
//!
//! kube-runtime's watcher is not used: it restarts a watch at once and endlessly when the server closes it at
//! once, never recovers from an HTTP 410 at the start of a watch, and ignores `Retry-After`. The requests
//! are those of client-go's reflector: one request that lists and watches if the server supports it, else a
//! list and a watch.

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
pub(crate) use {
    endpoints::{Collected, collect},
    reflect::MAX_WATCH,
};

pub use endpoints::{ServiceSelection, watch_endpoints};
pub use node::{NodeSink, node_view, watch_node};
pub use pods::{KnownPods, PodEvent, PodRef, PodSink, watch_pods};
