//! What the EndpointPublisher is told and asked.
//!
//! Owns: its messages. In: sources, people. Out: nothing but types; what they do is in the actor.

use keelson_actor_system::{cluster::ChoreHealth, verbs};
use keelson_proto::endpoints as pb;

use super::{Answer, EndpointSlice, NodeView, Seen, Service, ServiceCidr, ServiceName, SourceKind};

verbs! {
    /// Something was seen of Services.
    ServiceChanged => Answer {
        /// In order.
        seen: Vec<Seen<Service>>,
    }
    /// Something was seen of EndpointSlices.
    SliceChanged => Answer {
        /// In order.
        seen: Vec<Seen<EndpointSlice>>,
    }
    /// Something was seen of ServiceCIDRs.
    CidrChanged => Answer {
        /// In order.
        seen: Vec<Seen<ServiceCidr>>,
    }
    /// The Node as it is now.
    NodeChanged => Answer {
        /// It.
        node: NodeView,
    }
    /// How the watch of a kind fares.
    SourceHealthChanged => Answer {
        /// The kind.
        kind: SourceKind,
        /// How it fares.
        health: ChoreHealth,
    }
    /// Somebody follows: the sources are about to be asked.
    Followed => () {}
    /// A reader has a revision of an instance that it was not given by this process.
    LaterRevision => () {
        /// The instance.
        instance_id: u64,
        /// The revision.
        rev: u64,
    }
    /// The actor's state as JSON, for people.
    InspectEndpoints => String {}
    /// How many Services readers see. An answer says that the actor is at work.
    EndpointsCount => u64 {}
    /// How the chore fares, and a line for each of some Services. What the actor does not know is left empty: the
    /// source and its place, files, listeners, watchers.
    ListServices => pb::State {
        /// Only Services of this namespace; empty: of all.
        namespace: String,
        /// At most so many.
        max: usize,
    }
    /// Why a Service means what it means; none when neither it nor a slice of it is known.
    ExplainService => Option<pb::Explanation> {
        /// Which.
        name: ServiceName,
    }
}
