//! What Services mean on this node.
//!
//! Owns: the meaning of one Service ([`view`]), the inputs it is made of and the revisions that come of their changes
//! ([`core`]), and [`EndpointPublisher`], the actor that takes changes from a source, keeps state and identity
//! on disk and publishes.
//! In: [`SourceEvent`]s of a source, by an [`EventSink`]. Out: an [`EndpointsFeed`] that any number of readers follow
//! without troubling the actor, and [`EndpointsView`](keelson_actor_system::reports::EndpointsView) for the node's
//! condition. No sockets are opened here.
//!
//! ```text
//!  source ──events──► inputs ──(what changed)──► view ──(bytes differ)──► revision ──► on disk ──► feed
//! ```

mod actor;
mod core;
mod feed;
mod inputs;
mod marker;
mod messages;
mod metrics;
mod model;
mod record;
mod sink;
pub mod view;

pub use actor::{EndpointPublisher, EndpointPublisherParts};
pub use core::EndpointsPolicy;
pub use feed::{Changes, EndpointsFeed, Freshness, History, Item, Published};
pub use marker::Marker;
pub use messages::{ClientEvent, EndpointsCount, ExplainService, InspectEndpoints, ListServices};
pub use metrics::{EndpointMetrics, Resource};
pub use model::{
    Answer, EndpointSlice, EventSink, NodeView, Seen, Service, ServiceCidr, ServiceName, SourceEvent,
    SourceKind,
};

#[cfg(test)]
mod actor_tests;
