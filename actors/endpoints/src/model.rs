//! Events of sources.
//!
//! Owns: [`SourceEvent`] and its parts, and [`EventSink`], which receives events. In: objects, reduced to the fields
//! that are read. Out: nothing; these are values.

use std::net::IpAddr;

use futures_util::future::BoxFuture;
use keelson_actor_system::{cluster::JobHealth, inspect::ActorMessage};

pub use keelson_proto::{
    kubernetes::{EndpointSlice, Service, ServiceCidr},
    names::ServiceName,
};

/// Observations of a kind of objects, in order. Objects are identified by the namespace and name in their metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectEvent<T, G = ServiceName> {
    /// A listing begins. Nothing is published until it is complete, so that no state mixes two moments.
    Listing,
    /// A new or changed object, or an object of the listing.
    Upsert(Box<T>),
    /// A deleted object, or one that the source no longer selects.
    Deleted(G),
    /// The listing is complete: objects that it did not contain do not exist.
    ListComplete,
    /// The listing was refused, and nothing waits for it: known objects stay, including those from an earlier
    /// process.
    Refused,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SourceKind {
    Services,
    EndpointSlices,
    ServiceCidrs,
    Node,
}

impl SourceKind {
    pub const ALL: [Self; 4] = [Self::Services, Self::EndpointSlices, Self::ServiceCidrs, Self::Node];

    /// Resource name in the API, for labels and JSON.
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

/// The fields of the Node that the view and its readers use. Changes of other fields are ignored.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeView {
    pub name: String,
    pub exists: bool,
    /// The label `topology.kubernetes.io/zone`.
    pub zone: Option<String>,
    /// InternalIPs, then ExternalIPs, in the order of the status.
    pub ips: Vec<IpAddr>,
    /// `spec.podCIDRs`.
    pub pod_cidrs: Vec<String>,
    /// Not being deleted, and without the taint `ToBeDeletedByClusterAutoscaler`. Of a deleted Node: the last known
    /// value.
    pub eligible: bool,
}

impl NodeView {
    /// Fills missing facts from `last`.
    ///
    /// A deleted Node keeps its last facts, and a Node without addresses its last addresses, because facts that are
    /// temporarily missing must not change what the node serves. Source: kube-proxy, which keeps the last Node it has
    /// seen, and the addresses that it found at its start.
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

#[derive(Debug, Clone, PartialEq)]
pub enum SourceEvent {
    /// The source may omit Services that have the label `service.kubernetes.io/service-proxy-name` or are headless,
    /// as kube-proxy's watch does.
    Services(Vec<ObjectEvent<Service>>),
    EndpointSlices(Vec<ObjectEvent<EndpointSlice>>),
    ServiceCidrs(Vec<ObjectEvent<ServiceCidr>>),
    Node(NodeView),
    Health(SourceKind, JobHealth),
}

impl actix::Message for SourceEvent {
    type Result = Ack;
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ack {
    Accepted,
    /// Not taken, because the receiver has lost the earlier events. The source must send everything of this kind
    /// again, beginning with a listing.
    Relist,
}

pub trait EventSink: Send + Sync + 'static {
    /// Takes one event. The future completes when there is room for the next, so a source that waits for it cannot
    /// fill memory. Events of one kind are sent one after the other.
    fn send(&self, event: SourceEvent) -> BoxFuture<'_, Ack>;
}
