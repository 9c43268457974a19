//! Messages of the EndpointPublisher, besides [`SourceEvent`](super::SourceEvent).

use keelson_actor_system::messages;
use keelson_proto::endpoints as pb;

use super::ServiceName;

messages! {
    #[derive(Debug)]
    pub enum ClientEvent {
        /// The first client connected: the sources are about to be watched.
        Followed,
        /// A client has a later revision of an instance ID, which it did not get from this process.
        LaterRevision { instance_id: u64, rev: u64 },
    }
}

messages! {
    InspectEndpoints => String {}
    /// Number of published Services. A response proves that the actor runs.
    EndpointsCount => u64 {}
    /// Sync status, and a summary of some Services. Fields that the actor does not know stay empty: the source and
    /// its place, files, listeners, watchers.
    ListServices => pb::State {
        /// Empty: all namespaces.
        namespace: String,
        max: usize,
    }
    /// `None`: neither the Service nor a slice of it is known.
    ExplainService => Option<pb::Explanation> {
        name: ServiceName,
    }
}
