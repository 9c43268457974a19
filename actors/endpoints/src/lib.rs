//! The endpoints of Services on this node.
//!
//! Owns: the view of one Service ([`view`]), its inputs and the revisions made of their changes ([`core`]), and
//! [`EndpointPublisher`], the actor that receives changes from a source, keeps state and instance ID on disk and
//! publishes.
//! In: [`SourceEvent`]s of a source, by an [`EventSink`]. Out: an [`EndpointsFeed`] that any number of readers follow
//! without messages to the actor, and [`EndpointsView`](keelson_actor_system::reports::EndpointsView) for the node's
//! condition. This crate opens no sockets.
//!
//! ```text
//!  source ──events──► inputs ──(what changed)──► view ──(bytes differ)──► revision ──► noted ──► feed
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
    Ack, EndpointSlice, EventSink, NodeView, ObjectEvent, Service, ServiceCidr, ServiceName, SourceEvent,
    SourceKind,
};

#[cfg(test)]
mod actor_tests;
