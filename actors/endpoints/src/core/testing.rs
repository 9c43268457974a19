//! A core with a store, a history and readers, for tests.
//!
//! [`Bench`] performs effects as the actor does and checks the invariants of every published state: within an
//! instance ID revisions never decrease, no revision has two contents, and the history leads from any published state
//! to the newest, or reports that it cannot.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use keelson_actor_system::{
    clock::Now,
    cluster::JobHealth,
    reports::{EndpointsView, StaleCause},
};
use keelson_proto::localnetv1::NodeInfo;
use keelson_storage::{Batch, Keyed, MemoryStore, StateStore, StoreError, StoreStats, Table};
use prost::Message as _;

use super::{CarriedState, Core, DiskState, Effect, EndpointsPolicy, Event, Start, identity};
use crate::{
    Ack, EndpointSlice, Freshness, History, NodeView, ObjectEvent, Published, Service, ServiceCidr,
    ServiceName, SourceEvent, SourceKind,
    record::{self, Loaded, Restored, Write},
    view::tests::{http, n1, svc},
};

pub(crate) const START_MS: i64 = 1_800_000_000_000;

/// A store in memory that fails after a number of batches.
#[derive(Debug)]
pub(crate) struct FailingStore {
    pub(crate) inner: MemoryStore,
    pub(crate) batches: AtomicI64,
}

impl FailingStore {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { inner: MemoryStore::new(), batches: i64::MAX.into() })
    }

    pub(crate) fn fail_after(&self, batches: i64) {
        self.batches.store(batches, Ordering::SeqCst);
    }

    pub(crate) fn repair(&self) {
        self.fail_after(i64::MAX);
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        let records = self.inner.scan(Table::Endpoints).expect("memory reads");
        records.into_iter().map(|(key, _)| String::from_utf8(key).expect("text")).collect()
    }
}

impl StateStore for FailingStore {
    fn apply(&self, batch: &Batch) -> Result<(), StoreError> {
        if self.batches.fetch_sub(1, Ordering::SeqCst) <= 0 {
            let source = std::io::ErrorKind::StorageFull.into();
            return Err(StoreError::Io { operation: "a write", path: "/nowhere".into(), source });
        }
        self.inner.apply(batch)
    }

    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        self.inner.get(table, key)
    }

    fn scan(&self, table: Table) -> Result<Keyed<Vec<u8>>, StoreError> {
        self.inner.scan(table)
    }

    fn stats(&self) -> StoreStats {
        self.inner.stats()
    }
}

/// Stands for the file under `/run`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Marker {
    /// There is none: the store is trusted.
    Missing,
    Works(Option<(u64, u64)>),
    Fails(Option<(u64, u64)>),
}

impl Marker {
    fn note(&mut self, id: (u64, u64)) -> bool {
        let works = matches!(self, Self::Works(_));
        if works {
            *self = Self::Works(Some(id));
        }
        works
    }

    pub(crate) fn fail(&mut self, fails: bool) {
        *self = match *self {
            Self::Missing => Self::Missing,
            Self::Works(noted) | Self::Fails(noted) if fails => Self::Fails(noted),
            Self::Works(noted) | Self::Fails(noted) => Self::Works(noted),
        };
    }

    /// Whether the state on disk may not go on under its instance ID.
    fn is_mismatch(self, instance_id: u64, rev: u64) -> bool {
        match self {
            Self::Missing => false,
            Self::Works(noted) | Self::Fails(noted) => {
                noted.is_none_or(|noted| noted.0 != instance_id || noted.1 > rev)
            }
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Content {
    pub(crate) services: BTreeMap<ServiceName, Vec<u8>>,
    pub(crate) node: NodeInfo,
}

impl Content {
    fn of(published: &Published) -> Self {
        let services = published.services.iter().map(|(name, item)| (name.clone(), item.message.to_vec()));
        Self { services: services.collect(), node: (*published.node).clone() }
    }
}

pub(crate) struct Bench {
    pub(crate) core: Core,
    pub(crate) policy: EndpointsPolicy,
    pub(crate) now: Now,
    pub(crate) store: Arc<FailingStore>,
    pub(crate) history: Arc<History>,
    pub(crate) shown: Option<Arc<Published>>,
    pub(crate) view: Option<EndpointsView>,
    /// Writes are performed only by [`Bench::write`].
    pub(crate) slow: bool,
    pub(crate) writes: Vec<(u64, Write)>,
    /// What is noted outside of the store, and whether it can be.
    pub(crate) marker: Marker,
    pub(crate) notes: Vec<String>,
    /// Number of published states, and of computed Services.
    pub(crate) publications: usize,
    pub(crate) computed: u64,
    pub(crate) delays: Vec<Option<i64>>,
    seen: BTreeMap<(u64, u64), Content>,
    random: u64,
}

pub(crate) fn policy() -> EndpointsPolicy {
    EndpointsPolicy { node_name: "n1".into(), ..EndpointsPolicy::default() }
}

fn start(loaded: Loaded, kept: CarriedState, shown: Option<Arc<Published>>) -> Start {
    let (restored, disk) = match loaded {
        Loaded::Full(restored) => (Some(*restored), DiskState::Synced),
        Loaded::Nothing | Loaded::Lost(_) => (None, DiskState::Unusable),
    };
    Start { restored, disk, is_renamed: false, shown, kept }
}

impl Bench {
    pub(crate) fn new() -> Self {
        Self::with(policy(), FailingStore::new())
    }

    pub(crate) fn with(policy: EndpointsPolicy, store: Arc<FailingStore>) -> Self {
        let now = Now { mono: Duration::ZERO, unix_ms: START_MS };
        let loaded = record::load(&*store, &policy.node_name).expect("memory reads");
        let (core, effects) = Core::new(policy.clone(), start(loaded, CarriedState::default(), None), now);
        let mut bench = Self {
            core,
            policy,
            now,
            store,
            history: History::new(1000, 10_000),
            shown: None,
            view: None,
            slow: false,
            writes: Vec::new(),
            marker: Marker::Missing,
            notes: Vec::new(),
            publications: 0,
            computed: 0,
            delays: Vec::new(),
            seen: BTreeMap::new(),
            random: 7,
        };
        bench.perform(effects);
        bench
    }

    pub(crate) fn synced(services: &[Service], slices: &[EndpointSlice]) -> Self {
        let mut bench = Self::new();
        bench.tell_all(services, slices);
        bench
    }

    /// Synced, and so long ago that the next change is published at once.
    pub(crate) fn idle(services: &[Service], slices: &[EndpointSlice]) -> Self {
        let mut bench = Self::synced(services, slices);
        bench.pass(100);
        bench
    }

    pub(crate) fn tell_all(&mut self, services: &[Service], slices: &[EndpointSlice]) {
        self.node(n1());
        self.list_all(services, slices);
    }

    /// Lists all kinds but the Node, and no ServiceCIDRs.
    pub(crate) fn list_all(&mut self, services: &[Service], slices: &[EndpointSlice]) {
        self.list_cidrs(&[]);
        self.list_services(services);
        self.list_slices(slices);
    }

    fn random(&mut self) -> u64 {
        self.random += 1;
        self.random
    }

    /// Ends the process and starts another.
    pub(crate) fn restart(&mut self) -> Loaded {
        let loaded = record::load(&*self.store, &self.policy.node_name).expect("memory reads");
        self.now = Now { unix_ms: self.now.unix_ms + 1000, ..self.now };
        self.history = History::new(1000, 10_000);
        self.shown = None;
        self.begin(loaded.clone(), CarriedState::default());
        loaded
    }

    pub(crate) fn restart_actor(&mut self) {
        let random = self.random();
        let mut kept = self.core.carry_over(random);
        match kept.memory.take() {
            Some(memory) => self.begin_from_memory(Some(memory), kept),
            None => {
                let loaded = record::load(&*self.store, &self.policy.node_name).expect("memory reads");
                self.begin(loaded, kept);
            }
        }
    }

    /// Restarts the actor while the disk does not answer.
    pub(crate) fn restart_actor_without_disk(&mut self) {
        let random = self.random();
        let mut kept = self.core.carry_over(random);
        let known = kept.memory.take().or(kept.fallback.take());
        self.begin_from_memory(known, kept);
    }

    fn begin_from_memory(&mut self, restored: Option<Restored>, kept: CarriedState) {
        let disk = DiskState::Behind { retry: self.now.mono, failures: 1 };
        self.begin_with(Start { restored, disk, is_renamed: false, shown: self.shown.clone(), kept });
    }

    fn begin(&mut self, loaded: Loaded, kept: CarriedState) {
        let mut start = start(loaded, kept, self.shown.clone());
        let random = self.random();
        if let Some(restored) = &mut start.restored
            && self.marker.is_mismatch(restored.meta.instance_id, restored.meta.rev)
        {
            restored.meta.instance_id = identity(random, Some(restored.meta.instance_id));
            start.is_renamed = true;
        }
        self.begin_with(start);
    }

    fn begin_with(&mut self, start: Start) {
        self.writes.clear();
        let (core, effects) = Core::new(self.policy.clone(), start, self.now);
        self.core = core;
        self.perform(effects);
    }

    pub(crate) fn send_event(&mut self, event: SourceEvent) -> Ack {
        let random = self.random();
        let (answer, effects) = self.core.handle_source_event(event, self.now, random);
        self.perform(effects);
        answer
    }

    pub(crate) fn handle(&mut self, event: Event) {
        let random = self.random();
        let effects = self.core.handle(event, self.now, random);
        self.perform(effects);
    }

    fn perform(&mut self, effects: Vec<Effect>) {
        if let Some(id) = self.core.on_disk() {
            self.marker.note(id);
        }
        for effect in effects {
            match effect {
                Effect::Write { number, write } => self.writes.push((number, write)),
                Effect::Publish { restart, revisions, published } => {
                    if let Some(since) = restart {
                        self.history.restart(published.instance_id, since);
                    }
                    for revision in revisions {
                        assert!(revision.services.is_sorted(), "{revision:?}");
                        self.history.note(revision.rev, revision.services, revision.node);
                    }
                    self.show(published);
                }
                Effect::View(view) => self.view = Some(view),
                Effect::Count(super::Counted::Revision { delay_ms }) => self.delays.push(delay_ms),
                Effect::Count(super::Counted::Worked(services)) => self.computed += services,
                Effect::Count(super::Counted::WriteFailed) => {}
                Effect::Note { text, .. } => self.notes.push(text),
            }
        }
        assert!(self.writes.len() <= 1, "one write at a time");
        if let Some((number, id)) = self.core.unpublished()
            && self.marker.note(id)
        {
            self.handle(Event::Noted { number });
        }
        if !self.slow {
            self.write();
        }
    }

    pub(crate) fn write(&mut self) {
        if let Some((number, write)) = self.writes.pop() {
            let result = record::write(&*self.store, &write).map_err(|error| error.to_string());
            self.handle(Event::Written { number, result });
        }
    }

    /// Begins the pending write, and ends the process after this number of batches.
    pub(crate) fn kill_in_write(&mut self, batches: i64) -> Loaded {
        if let Some((_, write)) = self.writes.pop() {
            self.store.fail_after(batches);
            let _ = record::write(&*self.store, &write);
            self.store.repair();
        }
        self.restart()
    }

    fn show(&mut self, published: Arc<Published>) {
        self.publications += 1;
        let content = Content::of(&published);
        let id = (published.instance_id, published.rev);
        assert!(id.0 != 0 && id.1 != 0);
        if let Some(before) = self.shown.as_ref().filter(|before| before.instance_id == id.0) {
            assert!(before.rev <= id.1, "revisions go back: {} to {}", before.rev, id.1);
        }
        let former = self.seen.entry(id).or_insert_with(|| content.clone());
        assert_eq!(*former, content, "one revision, two contents");
        assert!(self.seen.range((id.0, 0)..=(id.0, u64::MAX)).all(|((_, rev), _)| *rev <= id.1));
        self.shown = Some(published);
        self.check_history(&content);
    }

    /// A reader that has an earlier state of this instance ID and applies the history has the newest state.
    fn check_history(&self, newest: &Content) {
        let Some(shown) = &self.shown else { return };
        let earlier = self.seen.range((shown.instance_id, 0)..=(shown.instance_id, shown.rev));
        for ((instance, rev), content) in earlier {
            let Some(changes) = self.history.between(*instance, *rev, shown.rev) else { continue };
            let mut content = content.clone();
            for name in &changes.services {
                match shown.services.get(name) {
                    Some(item) => drop(content.services.insert(name.clone(), item.message.to_vec())),
                    None => drop(content.services.remove(name)),
                }
            }
            if changes.node {
                content.node = (*shown.node).clone();
            }
            assert_eq!(content, *newest, "from {rev} to {}", shown.rev);
        }
    }

    /// Number of earlier revisions of this instance ID from which the history leads to the newest, and their total.
    pub(crate) fn resumable(&self) -> (usize, usize) {
        let shown = self.shown.as_ref().expect("something is shown");
        let mut earlier = 0;
        let revs =
            self.seen.range((shown.instance_id, 0)..=(shown.instance_id, shown.rev)).map(|((_, rev), _)| rev);
        let known = revs
            .inspect(|_| earlier += 1)
            .filter(|rev| self.history.between(shown.instance_id, **rev, shown.rev).is_some());
        (known.count(), earlier)
    }

    /// Advances time, with the ticks that the core requests.
    pub(crate) fn pass(&mut self, millis: u64) {
        let end = self.now.mono + Duration::from_millis(millis);
        for _ in 0..10_000 {
            let Some(at) = self.core.next_tick().filter(|at| *at <= end) else { break };
            self.advance_to(at.max(self.now.mono));
            self.handle(Event::Tick);
        }
        assert!(self.core.next_tick().is_none_or(|at| at > end), "it does not come to rest");
        self.advance_to(end);
    }

    fn advance_to(&mut self, mono: Duration) {
        let passed = i64::try_from((mono - self.now.mono).as_millis()).expect("small");
        self.now = Now { mono, unix_ms: self.now.unix_ms + passed };
    }

    pub(crate) fn node(&mut self, node: NodeView) {
        assert_eq!(self.send_event(SourceEvent::Node(node)), Ack::Accepted);
    }

    pub(crate) fn list_services(&mut self, services: &[Service]) {
        assert_eq!(self.send_event(SourceEvent::Services(listing(services))), Ack::Accepted);
    }

    pub(crate) fn list_slices(&mut self, slices: &[EndpointSlice]) {
        assert_eq!(self.send_event(SourceEvent::EndpointSlices(listing(slices))), Ack::Accepted);
    }

    pub(crate) fn list_cidrs(&mut self, cidrs: &[ServiceCidr]) {
        assert_eq!(self.send_event(SourceEvent::ServiceCidrs(listing(cidrs))), Ack::Accepted);
    }

    pub(crate) fn services(&mut self, seen: Vec<ObjectEvent<Service>>) -> Ack {
        self.send_event(SourceEvent::Services(seen))
    }

    pub(crate) fn slices(&mut self, seen: Vec<ObjectEvent<EndpointSlice>>) -> Ack {
        self.send_event(SourceEvent::EndpointSlices(seen))
    }

    pub(crate) fn put_service(&mut self, service: &Service) {
        assert_eq!(self.services(vec![put(service)]), Ack::Accepted);
    }

    pub(crate) fn put_slice(&mut self, slice: &EndpointSlice) {
        assert_eq!(self.slices(vec![put(slice)]), Ack::Accepted);
    }

    pub(crate) fn health(&mut self, kind: SourceKind, failing: Option<&str>) {
        let health = match failing {
            Some(reason) => JobHealth::Failing {
                reason: reason.into(),
                since_unix_ms: self.now.unix_ms,
                refused: reason.contains("403"),
            },
            None => JobHealth::Healthy,
        };
        assert_eq!(self.send_event(SourceEvent::Health(kind, health)), Ack::Accepted);
    }

    pub(crate) fn id(&self) -> Option<(u64, u64)> {
        self.shown.as_ref().map(|shown| (shown.instance_id, shown.rev))
    }

    pub(crate) fn rev(&self) -> u64 {
        self.shown.as_ref().map_or(0, |shown| shown.rev)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.shown.iter().flat_map(|shown| shown.services.keys()).map(ToString::to_string).collect()
    }

    pub(crate) fn service(&self, name: &str) -> keelson_proto::localnetv1::ServiceEndpoints {
        let (namespace, name) = name.split_once('/').expect("a name");
        let shown = self.shown.as_ref().expect("something is shown");
        let item = shown.services.get(&ServiceName::new(namespace, name)).expect("the Service is shown");
        keelson_proto::localnetv1::NextItem::decode(item.message.clone())
            .expect("decodes")
            .endpoints
            .expect("one")
    }

    /// Empty: current.
    pub(crate) fn stale(&self) -> String {
        match &self.shown.as_ref().expect("something is shown").freshness {
            Freshness::Synced => String::new(),
            Freshness::Stale { reason, .. } => reason.to_string(),
        }
    }

    pub(crate) fn changed_since(&self, from: u64) -> Option<(Vec<String>, bool)> {
        let shown = self.shown.as_ref()?;
        let changes = self.history.between(shown.instance_id, from, shown.rev)?;
        Some((changes.services.iter().map(ToString::to_string).collect(), changes.node))
    }

    pub(crate) fn content(&self) -> Content {
        Content::of(self.shown.as_ref().expect("something is shown"))
    }

    pub(crate) fn identities(&self) -> usize {
        self.seen.keys().map(|(instance, _)| instance).collect::<BTreeSet<_>>().len()
    }
}

pub(crate) fn named(name: &str) -> Service {
    svc().named("ns", name).build()
}

pub(crate) fn many(count: usize) -> Vec<Service> {
    (0..count).map(|number| named(&format!("s{number:04}"))).collect()
}

/// A slice of a Service in namespace `ns`, with the endpoints in the words.
pub(crate) fn slice_of(name: &str, service: &str, endpoints: &str) -> EndpointSlice {
    http(name, endpoints).of("ns", service).build()
}

pub(crate) fn stale_view(cause: StaleCause, reason: &str) -> Option<EndpointsView> {
    Some(EndpointsView::Stale { cause, reason: reason.into() })
}

pub(crate) fn put<T: Clone>(object: &T) -> ObjectEvent<T> {
    ObjectEvent::Upsert(Box::new(object.clone()))
}

pub(crate) fn listing<T: Clone>(objects: &[T]) -> Vec<ObjectEvent<T>> {
    std::iter::once(ObjectEvent::Listing)
        .chain(objects.iter().map(put))
        .chain([ObjectEvent::ListComplete])
        .collect()
}

pub(crate) fn gone<T>(name: &str) -> ObjectEvent<T> {
    let (namespace, name) = name.split_once('/').expect("a name");
    ObjectEvent::Deleted(ServiceName::new(namespace, name))
}
