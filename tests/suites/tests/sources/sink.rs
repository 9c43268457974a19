//! Owns: a sink that folds the events of a source into a state, and records violations of a source's guarantees.
//! In: events. Out: the state at any moment.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Result, ensure};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use keelson_actor_system::cluster::JobHealth;
use keelson_endpoint_publisher::{
    Ack, EndpointSlice, EventSink, NodeView, ObjectEvent, Service, ServiceCidr, SourceEvent, SourceKind,
};
use keelson_proto::kubernetes::ObjectMeta;

use crate::objects::PROXY_NAME;

/// Objects by their names, abbreviated.
pub(crate) type Short = BTreeMap<String, String>;

pub(crate) trait Named {
    fn meta(&self) -> ObjectMeta;
}

macro_rules! named {
    ($($of:ty),*) => {
        $(impl Named for $of {
            fn meta(&self) -> ObjectMeta {
                self.metadata.clone().unwrap_or_default()
            }
        })*
    };
}

named!(Service, EndpointSlice, ServiceCidr);

#[derive(Debug)]
pub(crate) struct Known<T> {
    pub(crate) objects: BTreeMap<String, T>,
    /// Names received in the present listing.
    listing: Option<BTreeSet<String>>,
    /// Nothing is known, and a listing must follow.
    unknown: bool,
    /// Set by the sink itself.
    forgotten: bool,
    pub(crate) listings: usize,
    /// Names of all objects ever received.
    pub(crate) ever: BTreeSet<String>,
    pub(crate) largest_batch: usize,
}

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self {
            objects: BTreeMap::new(),
            listing: None,
            unknown: true,
            forgotten: false,
            listings: 0,
            ever: BTreeSet::new(),
            largest_batch: 0,
        }
    }
}

impl<T: Named> Known<T> {
    fn forget(&mut self) {
        self.objects.clear();
        self.listing = None;
        self.unknown = true;
        self.forgotten = true;
    }

    fn take(&mut self, seen: Vec<ObjectEvent<T>>, faults: &mut Vec<String>) -> Ack {
        self.largest_batch = self.largest_batch.max(seen.len());
        for seen in seen {
            if matches!(seen, ObjectEvent::Listing) {
                self.listing = Some(BTreeSet::new());
                self.unknown = false;
                self.forgotten = false;
                continue;
            }
            if self.unknown {
                if !self.forgotten {
                    faults.push("something was received before a listing had begun".to_owned());
                }
                return Ack::Relist;
            }
            match seen {
                ObjectEvent::Upsert(object) => {
                    let meta = object.meta();
                    let name = format!("{}/{}", meta.namespace, meta.name);
                    self.ever.insert(name.clone());
                    if let Some(listing) = &mut self.listing {
                        listing.insert(name.clone());
                    }
                    self.objects.insert(name, *object);
                }
                ObjectEvent::Deleted(name) => {
                    self.objects.remove(name.as_str());
                    if let Some(listing) = &mut self.listing {
                        listing.remove(name.as_str());
                    }
                }
                ObjectEvent::ListComplete => match self.listing.take() {
                    Some(listing) => {
                        self.objects.retain(|name, _| listing.contains(name));
                        self.listings += 1;
                    }
                    None => faults.push("a listing ended that had not begun".to_owned()),
                },
                // The previous state stays.
                ObjectEvent::Refused => {
                    if self.listing.take().is_none() {
                        faults.push("a listing was refused that had not begun".to_owned());
                    }
                }
                ObjectEvent::Listing => {}
            }
        }
        if self.unknown { Ack::Relist } else { Ack::Accepted }
    }

    /// The relevant objects of a namespace, abbreviated; fails during a listing.
    fn short(&self, of: &str, text: impl Fn(&T) -> Option<String>) -> Result<Short> {
        ensure!(!self.unknown && self.listing.is_none() && self.listings > 0, "no complete listing is known");
        let those = self.objects.iter().filter(|(name, _)| name.starts_with(of));
        Ok(those.filter_map(|(name, object)| Some((name[of.len()..].to_owned(), text(object)?))).collect())
    }
}

/// The state after a source's events.
#[derive(Debug, Default)]
pub(crate) struct SinkState {
    pub(crate) services: Known<Service>,
    pub(crate) slices: Known<EndpointSlice>,
    pub(crate) cidrs: Known<ServiceCidr>,
    pub(crate) node: Option<NodeView>,
    /// Health reports of each kind's watch, in order.
    pub(crate) health: BTreeMap<SourceKind, Vec<JobHealth>>,
    /// Violated guarantees.
    faults: Vec<String>,
}

impl SinkState {
    /// Relevant Services of a namespace: name, cluster IP and ports.
    pub(crate) fn services(&self, namespace: &str) -> Result<Short> {
        self.services.short(&format!("{namespace}/"), |service| {
            let spec = service.spec.clone().unwrap_or_default();
            let counts = !service.meta().labels.contains_key(PROXY_NAME)
                && spec.r#type != "ExternalName"
                && !["", "None"].contains(&spec.cluster_ip.as_str());
            let ports: Vec<_> = spec.ports.iter().map(|port| port.port.to_string()).collect();
            counts.then(|| format!("{} {}", spec.cluster_ip, ports.join(",")))
        })
    }

    /// Slices of a namespace: name, Service and addresses.
    pub(crate) fn slices(&self, namespace: &str) -> Result<Short> {
        self.slices.short(&format!("{namespace}/"), |slice| {
            let of = slice.meta().labels.get("kubernetes.io/service-name").cloned().unwrap_or_default();
            let addresses: Vec<_> = slice.endpoints.iter().flat_map(|e| e.addresses.clone()).collect();
            Some(format!("{of}: {}", addresses.join(",")))
        })
    }

    pub(crate) fn cidrs(&self, prefix: &str) -> Result<Short> {
        let of = format!("/{prefix}");
        self.cidrs.short(&of, |cidr| Some(cidr.spec.clone().unwrap_or_default().cidrs.join(",")))
    }

    /// Latest health of a kind's watch.
    pub(crate) fn latest_health(&self, kind: SourceKind) -> Option<&JobHealth> {
        self.health.get(&kind)?.last()
    }

    /// Fails unless the watch of each of these kinds is healthy.
    pub(crate) fn check_healthy(&self, kinds: &[SourceKind]) -> Result<()> {
        for kind in kinds {
            ensure!(
                self.latest_health(*kind) == Some(&JobHealth::Healthy),
                "{kind:?}: {:?}",
                self.latest_health(*kind)
            );
        }
        Ok(())
    }

    pub(crate) fn check_failing(&self, kind: SourceKind, with: &str) -> Result<()> {
        match self.latest_health(kind) {
            Some(JobHealth::Failing { reason, .. }) if reason.contains(with) => Ok(()),
            other => anyhow::bail!("{kind:?}: {other:?}"),
        }
    }

    fn take(&mut self, event: SourceEvent) -> Ack {
        let faults = &mut self.faults;
        match event {
            SourceEvent::Services(seen) => self.services.take(seen, faults),
            SourceEvent::EndpointSlices(seen) => self.slices.take(seen, faults),
            SourceEvent::ServiceCidrs(seen) => self.cidrs.take(seen, faults),
            SourceEvent::Node(node) => {
                self.node = Some(node);
                Ack::Accepted
            }
            SourceEvent::Health(kind, health) => {
                self.health.entry(kind).or_default().push(health);
                Ack::Accepted
            }
        }
    }
}

/// A sink. Events of one kind must come one after the other, which it checks.
#[derive(Default)]
pub(crate) struct Collector {
    state: Mutex<SinkState>,
    busy: Mutex<BTreeSet<SourceKind>>,
    /// Time it takes for each event.
    pause: Duration,
}

fn kind_of(event: &SourceEvent) -> SourceKind {
    match event {
        SourceEvent::Services(_) => SourceKind::Services,
        SourceEvent::EndpointSlices(_) => SourceKind::EndpointSlices,
        SourceEvent::ServiceCidrs(_) => SourceKind::ServiceCidrs,
        SourceEvent::Node(_) => SourceKind::Node,
        SourceEvent::Health(kind, _) => *kind,
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Collector {
    pub(crate) fn slow(pause: Duration) -> Self {
        Self { pause, ..Self::default() }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, SinkState> {
        locked(&self.state)
    }

    pub(crate) fn forget(&self) {
        let mut state = self.state();
        state.services.forget();
        state.slices.forget();
    }

    /// Fails if the source violated a guarantee.
    pub(crate) fn check_guarantees(&self) -> Result<()> {
        let state = self.state();
        ensure!(state.faults.is_empty(), "{:?}", state.faults);
        Ok(())
    }
}

impl EventSink for Collector {
    fn send(&self, event: SourceEvent) -> BoxFuture<'_, Ack> {
        async move {
            let kind = kind_of(&event);
            if !locked(&self.busy).insert(kind) {
                self.state().faults.push(format!("two events of {kind:?} at once"));
            }
            if !self.pause.is_zero() {
                tokio::time::sleep(self.pause).await;
            }
            let answer = self.state().take(event);
            locked(&self.busy).remove(&kind);
            answer
        }
        .boxed()
    }
}
