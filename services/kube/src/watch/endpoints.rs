//! The source of Services that is an API server.
//!
//! Owns: [`watch_endpoints`]. In: events of Services, EndpointSlices and ServiceCIDRs, in protobuf. Out:
//! [`SourceEvent`]s to an [`EventSink`]. [`watch_node`](crate::watch_node) watches the Node, once for all readers;
//! [`node_view`](crate::node_view) is the part of it that endpoints need.
//!
//! The requests select the same objects as kube-proxy: Services without the label of another proxy (unless several proxies
//! serve the node, see [`ServiceSelection`]) and not headless, slices that are not of headless Services. For a Service that gets the label, the server sends a deletion. An API
//! server before 1.31 does not support the field selector for headless Services: they are then filtered here.

use std::{marker::PhantomData, sync::Arc};

use futures_util::future::join3;
use keelson_actor_system::cluster::JobHealth;
use keelson_endpoint_publisher::{
    Ack, EndpointSlice, EventSink, ObjectEvent, Service, ServiceCidr, ServiceName, SourceEvent, SourceKind,
    view,
};
use keelson_proto::kubernetes::ObjectMeta;

use super::{
    follow::follow,
    protobuf::{ApiObject, Protobuf},
    subject::{Change, Selectors, Subject},
};
use crate::{
    bodies::{ACCEPT_PROTOBUF, ACCEPT_PROTOBUF_WATCH},
    server::ApiServer,
};

/// A kind of objects that is watched as a whole.
pub(crate) trait Collected: ApiObject {
    const OF: SourceKind;
    const RESOURCE: &'static str;
    const PATH: &'static str;
    const LABELS: Option<&'static str>;
    const FIELDS: Option<&'static str> = None;
    const OPTIONAL: bool = false;

    fn event(seen: Vec<ObjectEvent<Self>>) -> SourceEvent;

    /// Whether [`Collected::FIELDS`] select it.
    fn is_selected(&self) -> bool {
        true
    }
}

impl Collected for Service {
    const OF: SourceKind = SourceKind::Services;
    const RESOURCE: &'static str = "services";
    const PATH: &'static str = "/api/v1/services";
    const LABELS: Option<&'static str> = Some("!service.kubernetes.io/service-proxy-name");
    // Since 1.31.
    const FIELDS: Option<&'static str> = Some("spec.clusterIP!=None");

    fn event(seen: Vec<ObjectEvent<Self>>) -> SourceEvent {
        SourceEvent::Services(seen)
    }

    fn is_selected(&self) -> bool {
        self.spec.as_ref().is_none_or(|spec| spec.cluster_ip != "None")
    }
}

impl Collected for EndpointSlice {
    const OF: SourceKind = SourceKind::EndpointSlices;
    const RESOURCE: &'static str = "endpointslices";
    const PATH: &'static str = "/apis/discovery.k8s.io/v1/endpointslices";
    const LABELS: Option<&'static str> = Some("!service.kubernetes.io/headless");

    fn event(seen: Vec<ObjectEvent<Self>>) -> SourceEvent {
        SourceEvent::EndpointSlices(seen)
    }
}

impl Collected for ServiceCidr {
    const OF: SourceKind = SourceKind::ServiceCidrs;
    const RESOURCE: &'static str = "servicecidrs";
    const PATH: &'static str = "/apis/networking.k8s.io/v1/servicecidrs";
    const LABELS: Option<&'static str> = None;
    // Since 1.33.
    const OPTIONAL: bool = true;

    fn event(seen: Vec<ObjectEvent<Self>>) -> SourceEvent {
        SourceEvent::ServiceCidrs(seen)
    }
}

macro_rules! api_object {
    ($($of:ty, $kind:literal;)*) => {
        $(impl ApiObject for $of {
            const KIND: &'static str = $kind;

            fn metadata(&mut self) -> &mut Option<ObjectMeta> {
                &mut self.metadata
            }

            fn reduce(&mut self) {
                view::reduce(&mut self.metadata);
            }
        })*
    };
}

api_object! {
    Service, "Service";
    EndpointSlice, "EndpointSlice";
    ServiceCidr, "ServiceCIDR";
}

/// Which Services are watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceSelection {
    /// Those without the label of another proxy, as kube-proxy.
    Unlabelled,
    All,
}

/// All objects of a kind, for a sink.
struct Collection<T> {
    sink: Arc<dyn EventSink>,
    labels: Option<&'static str>,
    /// The server does not support the field selector.
    is_wide: bool,
    of: PhantomData<fn() -> T>,
}

impl<T: Collected> Subject for Collection<T> {
    type Encoding = Protobuf<T>;
    const RESOURCE: &'static str = T::RESOURCE;
    const ACCEPT: &'static str = ACCEPT_PROTOBUF_WATCH;
    const ACCEPT_LIST: &'static str = ACCEPT_PROTOBUF;
    const OPTIONAL: bool = T::OPTIONAL;

    fn path(&self) -> &'static str {
        T::PATH
    }

    fn selectors(&self) -> Selectors {
        let fields = T::FIELDS.filter(|_| !self.is_wide);
        Selectors { labels: self.labels.map(str::to_owned), fields: fields.map(str::to_owned) }
    }

    fn widen(&mut self) -> bool {
        T::FIELDS.is_some() && !std::mem::replace(&mut self.is_wide, true)
    }

    async fn deliver(&mut self, changes: Vec<Change<T>>) -> Ack {
        let is_wide = self.is_wide;
        let changes = changes.into_iter().map(|change| match change {
            Change::Upsert(object) if is_wide && !object.is_selected() => Change::Deleted(*object),
            change => change,
        });
        let seen = changes.map(to_event).collect();
        self.sink.send(T::event(seen)).await
    }

    async fn health(&mut self, health: JobHealth) -> Ack {
        self.sink.send(SourceEvent::Health(T::OF, health)).await
    }
}

fn to_event<T: ApiObject>(change: Change<T>) -> ObjectEvent<T> {
    match change {
        Change::Listing => ObjectEvent::Listing,
        Change::Upsert(object) => ObjectEvent::Upsert(object),
        Change::Deleted(mut object) => {
            let meta = object.metadata().take().unwrap_or_default();
            ObjectEvent::Deleted(ServiceName::new(&meta.namespace, &meta.name))
        }
        Change::ListComplete => ObjectEvent::ListComplete,
        Change::Refused => ObjectEvent::Refused,
    }
}

/// Watches Services, EndpointSlices and ServiceCIDRs until dropped. The sink gets the existing objects in batches of up
/// to 200 as soon as they arrive, and each change after that without delay; of the metadata it gets name, namespace,
/// and the few labels and annotations that are read. The next batch is read when the sink has answered. A sink that
/// answers [`Ack::Relist`] gets everything of that kind again. About once a minute, with the server's bookmark,
/// it gets an empty batch, so that it can give that answer when nothing happens.
///
/// The health of each watch is an event too, the first when it is healthy or has failed. A server without ServiceCIDRs,
/// such as one before 1.33, is healthy, and is asked again every ten minutes. If it refuses to list them (403), those
/// known before are kept, and only this watch fails: an API server that starts refuses for a moment.
pub async fn watch_endpoints(api: &ApiServer, sink: Arc<dyn EventSink>, services: ServiceSelection) {
    let labels = Service::LABELS.filter(|_| services == ServiceSelection::Unlabelled);
    let services = Box::pin(collect_selected::<Service>(api, Arc::clone(&sink), labels));
    let slices = Box::pin(collect::<EndpointSlice>(api, Arc::clone(&sink)));
    let cidrs = Box::pin(collect::<ServiceCidr>(api, sink));
    join3(services, slices, cidrs).await;
}

pub(crate) async fn collect<T: Collected>(api: &ApiServer, sink: Arc<dyn EventSink>) {
    collect_selected::<T>(api, sink, T::LABELS).await;
}

async fn collect_selected<T: Collected>(
    api: &ApiServer,
    sink: Arc<dyn EventSink>,
    labels: Option<&'static str>,
) {
    follow(api, &mut Collection::<T> { sink, labels, is_wide: false, of: PhantomData }).await;
}
