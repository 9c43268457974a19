//! Messages of the EndpointPublisher, beside [`SourceEvent`](super::SourceEvent).

use keelson_actor_system::messages;
use keelson_proto::endpoints as pb;

use super::ServiceName;

messages! {
    #[derive(Debug)]
    pub enum ClientEvent {
        /// The first client follows: the sources are about to be watched.
        Followed,
        /// A client has a revision of an instance that it did not get from this process.
        LaterRevision { instance_id: u64, rev: u64 },
    }
}

messages! {
    /// The actor's state as JSON, for people.
    InspectEndpoints => String {}
    /// Number of Services that clients see. An answer says that the actor is at work.
    EndpointsCount => u64 {}
    /// Sync status, and a summary of some Services. What the actor does not know is left empty: the source and its place,
    /// files, listeners, watchers.
    ListServices => pb::State {
        /// Only Services of this namespace; empty: of all.
        namespace: String,
        max: usize,
    }
    /// Why a Service means what it means; `None`: neither it nor a slice of it is known.
    ExplainService => Option<pb::Explanation> {
        name: ServiceName,
    }
}
