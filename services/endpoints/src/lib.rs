//! Service endpoints on the wire and in files.
//!
//! Owns: [`server`], the Endpoints API that any process of the node may follow, and [`files`], the source that reads
//! manifests from a folder.
//! In: an [`EndpointsFeed`](keelson_endpoint_publisher::EndpointsFeed) and bound listeners; a folder. Out: states as
//! they are published; [`SourceEvent`](keelson_endpoint_publisher::SourceEvent)s. What a Service means on this node is
//! decided between the two, by [`keelson_endpoint_publisher`].

pub mod files;
pub mod server;
