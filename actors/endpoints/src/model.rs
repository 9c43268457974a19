//! What sources hand over.
//!
//! Owns: [`SourceEvent`] and what it is made of, and [`EventSink`], to whom sources hand events. In: objects, reduced to
//! what is read of them. Out: nothing; these are values.

use std::net::IpAddr;

use futures_util::future::BoxFuture;
use keelson_actor_system::{cluster::ChoreHealth, inspect::ActorMessage};

pub use keelson_proto::{
    kubernetes::{EndpointSlice, Service, ServiceCidr},
    names::ServiceName,
};

/// What was seen of a kind of objects, in the order in which it happened. An object is known by the namespace and the
/// name in its metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen<T, G = ServiceName> {
    /// A listing begins. Until it is whole nothing new is published, so that no state mixes two moments.
    Listing,
    /// This object is new or has changed; or it is, when it comes within a listing.
    Put(Box<T>),
    /// This object was deleted, or is no longer one that the source looks at.
    Gone(G),
    /// The listing is whole: what did not come within it does not exist.
    Listed,
    /// The listing is refused, and nothing waits for it: what was known before stays, also what an earlier process knew.
    Refused,
}

/// The kinds of objects that a source looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SourceKind {
    Services,
    EndpointSlices,
    ServiceCidrs,
    Node,
}

impl SourceKind {
    pub const ALL: [Self; 4] = [Self::Services, Self::EndpointSlices, Self::ServiceCidrs, Self::Node];

    /// As the API names the resource, for labels and JSON.
    #[must_use]
    pub fn resource(self) -> &'static str {
        match self {
            Self::Services => "services",
            Self::EndpointSlices => "endpointslices",
            Self::ServiceCidrs => "servicecidrs",
            Self::Node => "nodes",
        }
    }
}

/// What the view and its readers need of the Node. A change of the Node that changes none of this is none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeView {
    pub name: String,
    /// Whether there is a Node of that name.
    pub exists: bool,
    /// The label `topology.kubernetes.io/zone`.
    pub zone: Option<String>,
    /// InternalIPs, then ExternalIPs, in the order of the status.
    pub ips: Vec<IpAddr>,
    /// `spec.podCIDRs`.
    pub pod_cidrs: Vec<String>,
    /// Not being deleted, and without the taint `ToBeDeletedByClusterAutoscaler`. Of a Node that was deleted: as it was last
    /// seen.
    pub eligible: bool,
}

impl NodeView {
    /// The facts to go by, of which `last` are those so far.
    ///
    /// A Node that was deleted keeps its last facts, and one without addresses its last addresses: what is missing for a while
    /// must not change what answers on the node. Source: kube-proxy, which keeps the last Node it has seen, and the
    /// addresses that it found at its start.
    #[must_use]
    pub fn or_last(mut self, last: Option<&Self>) -> Self {
        let Some(last) = last.filter(|last| last.name == self.name) else { return self };
        if !self.exists {
            return Self { exists: false, ..last.clone() };
        }
        if self.ips.is_empty() {
            self.ips.clone_from(&last.ips);
        }
        self
    }
}

/// An event of a source, and the message that reports it to the EndpointPublisher.
#[derive(Debug, Clone, PartialEq)]
pub enum SourceEvent {
    /// The source may leave out Services that carry the label `service.kubernetes.io/service-proxy-name` or are headless,
    /// as kube-proxy's watch does.
    Services(Vec<Seen<Service>>),
    EndpointSlices(Vec<Seen<EndpointSlice>>),
    ServiceCidrs(Vec<Seen<ServiceCidr>>),
    Node(NodeView),
    /// The status of the watch of a kind.
    Health(SourceKind, ChoreHealth),
}

impl actix::Message for SourceEvent {
    type Result = Answer;
}

impl ActorMessage for SourceEvent {
    fn name(&self) -> &'static str {
        match self {
            Self::Services(_) => "ServiceChanged",
            Self::EndpointSlices(_) => "SliceChanged",
            Self::ServiceCidrs(_) => "CidrChanged",
            Self::Node(_) => "NodeChanged",
            Self::Health(..) => "SourceHealthChanged",
        }
    }
}

/// What becomes of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    Taken,
    /// It was not: who takes events has forgotten what came before it. The source says everything of this kind again,
    /// from a listing on.
    ListAgain,
}

/// Who takes the events of a source.
pub trait EventSink: Send + Sync + 'static {
    /// Takes one event; the answer comes when there is room for the next, so a source that waits for it cannot
    /// fill memory. Events of one kind are sent one after the other.
    fn send(&self, event: SourceEvent) -> BoxFuture<'_, Answer>;
}
