//! Service endpoints on the wire and in files.
//!
//! Owns: [`server`], the Endpoints API for any process of the node, and [`files`], the source that reads manifests from
//! a folder. In: an [`EndpointsFeed`](keelson_endpoint_publisher::EndpointsFeed) and bound listeners; a folder. Out:
//! the published states; [`SourceEvent`](keelson_endpoint_publisher::SourceEvent)s. [`keelson_endpoint_publisher`]
//! computes the state of this node from the events.

pub mod files;
pub mod server;
