//! The EndpointPublisher: writes, timer, restarts, events of sources, and published states.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use keelson_actor_system::{
    clock::Clock,
    cluster::JobHealth,
    inspect::{Mailbox, Recorder},
    reports::EndpointsView,
    supervise::{self, PANIC, Restart},
    test_support::{FakeStore, pass, run, settle, until},
};
use keelson_proto::endpoints::State;
use keelson_storage::{Batch, MemoryStore, StateStore, Table, open};
use tokio::sync::watch;

use crate::{
    Ack, EndpointMetrics, EndpointPublisher, EndpointPublisherParts, EndpointSlice, EndpointsCount,
    EndpointsFeed, EndpointsPolicy, EventSink, ExplainService, Freshness, History, InspectEndpoints,
    ListServices, Marker, Published, Resource, Service, ServiceName, SourceEvent, SourceKind,
    core::testing::{listing, many, named, put, slice_of},
    view::tests::n1,
};

struct Publisher {
    mailbox: Mailbox<EndpointPublisher>,
    feed: EndpointsFeed,
    view: watch::Receiver<EndpointsView>,
    changes: watch::Receiver<u64>,
    metrics: EndpointMetrics,
}

impl Publisher {
    fn start(store: Arc<dyn StateStore>) -> Self {
        Self::with(store, 100, None)
    }

    /// With its first revision.
    async fn synced(store: Arc<dyn StateStore>, services: &[Service], slices: &[EndpointSlice]) -> Self {
        let publisher = Self::start(store);
        publisher.tell_all(services, slices).await;
        publisher.reaches(1).await;
        publisher
    }

    fn with(store: Arc<dyn StateStore>, capacity: usize, marker: Option<Marker>) -> Self {
        let (published, shown) = watch::channel(None);
        let history = History::new(1000, 10_000);
        let (endpoints_view, view) = watch::channel(EndpointsView::Disabled);
        let (changes, changed) = watch::channel(0);
        let metrics = EndpointMetrics::default();
        let recorder = Recorder::new("EndpointPublisher", capacity);
        let parts = EndpointPublisherParts {
            store,
            marker,
            clock: Clock::start(),
            policy: EndpointsPolicy { node_name: "n1".into(), ..EndpointsPolicy::default() },
            metrics: metrics.clone(),
            published,
            history: history.clone(),
            endpoints_view,
            changes,
            recorder: recorder.clone(),
        };
        let mailbox = supervise::start(None, recorder, |_| EndpointPublisher::new(parts));
        Self { mailbox, feed: EndpointsFeed { published: shown, history }, view, changes: changed, metrics }
    }

    fn shown(&self) -> Option<Arc<Published>> {
        self.feed.published.borrow().clone()
    }

    fn id(&self) -> Option<(u64, u64)> {
        self.shown().map(|shown| (shown.instance_id, shown.rev))
    }

    fn rev(&self) -> u64 {
        self.shown().map_or(0, |shown| shown.rev)
    }

    fn names(&self) -> Vec<String> {
        self.shown().iter().flat_map(|shown| shown.services.keys()).map(ToString::to_string).collect()
    }

    fn stale(&self) -> bool {
        self.shown().is_some_and(|shown| shown.freshness != Freshness::Synced)
    }

    async fn send_event(&self, event: SourceEvent) -> Ack {
        self.mailbox.send(event).await
    }

    async fn put(&self, service: &Service) -> Ack {
        self.send_event(SourceEvent::Services(vec![put(service)])).await
    }

    async fn tell_all(&self, services: &[Service], slices: &[EndpointSlice]) {
        for event in [
            SourceEvent::Node(n1()),
            SourceEvent::ServiceCidrs(listing(&[])),
            SourceEvent::Services(listing(services)),
            SourceEvent::EndpointSlices(listing(slices)),
        ] {
            assert_eq!(self.send_event(event).await, Ack::Accepted);
        }
    }

    async fn reaches(&self, rev: u64) {
        let mut published = self.feed.published.clone();
        let reached = published.wait_for(|shown| shown.as_ref().is_some_and(|shown| shown.rev >= rev));
        reached.await.expect("the publisher answers");
    }

    async fn current(&self) {
        let mut published = self.feed.published.clone();
        let current = |shown: &Option<Arc<Published>>| {
            shown.as_ref().is_some_and(|shown| shown.freshness == Freshness::Synced)
        };
        published.wait_for(current).await.expect("the publisher answers");
    }

    fn restart(&self) {
        self.mailbox.deliver(Restart { reason: "a test wants it".into() });
    }

    async fn list(&self, namespace: &str, max: usize) -> State {
        self.mailbox.ask(ListServices { namespace: namespace.into(), max }).await.expect("it answers")
    }
}

#[test]
fn source_objects_are_published_and_survive_a_restart_in_any_store() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let memory: Arc<dyn StateStore> = Arc::new(MemoryStore::new());
        let sled: Arc<dyn StateStore> = open(folder.path()).expect("opens").store;
        for store in [memory, sled] {
            let (services, slices) = (many(300), [slice_of("a", "s0001", "L1 R1")]);
            let publisher = Publisher::synced(store.clone(), &services, &slices).await;
            publisher.put(&named("late")).await;
            publisher.reaches(2).await;
            let (id, shown) = (publisher.id(), publisher.shown().expect("published"));
            assert_eq!((shown.services.size(), publisher.stale()), (301, false));
            drop(publisher);

            let publisher = Publisher::start(store);
            publisher.reaches(1).await;
            assert_eq!((publisher.id(), publisher.stale()), (id, true));
            let restored = publisher.shown().expect("published");
            assert!(restored.services == shown.services && restored.node == shown.node);
            assert_eq!(*publisher.view.borrow(), EndpointsView::Synced);
            let services: Vec<Service> = services.into_iter().chain([named("late")]).collect();
            publisher.tell_all(&services, &slices).await;
            publisher.current().await;
            assert_eq!((publisher.id(), publisher.metrics.revisions.get()), (id, 0));
        }
    });
}

#[test]
fn a_revision_is_on_disk_before_it_is_published() {
    run(async {
        let store = FakeStore::new();
        let publisher = Publisher::synced(store.clone(), &[named("a")], &[]).await;
        pass(100).await;
        store.block(true);
        let writes = store.writes.load(Ordering::SeqCst);
        publisher.put(&named("b")).await;
        until("the write is under way", || store.writes.load(Ordering::SeqCst) > writes).await;
        publisher.put(&named("c")).await;
        settle().await;
        assert_eq!((publisher.rev(), publisher.names()), (1, vec!["ns/a".into()]));
        store.block(false);
        publisher.reaches(3).await;
        assert_eq!(publisher.names(), ["ns/a", "ns/b", "ns/c"]);
        assert_eq!(store.writes.load(Ordering::SeqCst), writes + 2);
    });
}

/// E12: it is published while the disk is slow, and a kill before the write means a new instance ID.
#[test]
fn e12_a_noted_revision_is_published_before_it_is_on_disk() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let marker = || Some(Marker::new(folder.path().join("endpoints-revision"), "b".into()));
        let store = FakeStore::new();
        let publisher = Publisher::with(store.clone(), 100, marker());
        publisher.tell_all(&[named("a")], &[]).await;
        publisher.reaches(1).await;
        pass(100).await;
        let backup = copy(&*store);
        store.block(true);
        publisher.put(&named("b")).await;
        publisher.reaches(2).await;
        assert_eq!(publisher.names(), ["ns/a", "ns/b"]);
        let published = publisher.id().expect("published");
        // What a process has on disk that is killed now.
        let next = Publisher::with(backup, 100, marker());
        next.reaches(1).await;
        assert_ne!(next.id().expect("published").0, published.0);
        store.block(false);
    });
}

/// E19: each revision is a sync of the disk. A single change is not delayed.
#[test]
fn e19_two_hundred_changes_a_second_are_ten_revisions_a_second() {
    run(async {
        let publisher = Publisher::synced(Arc::new(MemoryStore::new()), &[], &[]).await;
        pass(2_000).await;
        let began = tokio::time::Instant::now();
        publisher.put(&named("first")).await;
        publisher.reaches(2).await;
        assert!(began.elapsed() < Duration::from_millis(100), "{:?}", began.elapsed());
        for number in 0..1000 {
            publisher.put(&named(&format!("s{number}"))).await;
            pass(5).await;
        }
        pass(100).await;
        assert_eq!(publisher.names().len(), 1001);
        // 5 s at 10 per second, the ten of the burst, and some tolerance.
        let revisions = publisher.metrics.revisions.get() - 2;
        assert!((55..=66).contains(&revisions), "{revisions} revisions of 1000 changes in 5 s");
        let changed = publisher.feed.history.between(publisher.id().expect("one").0, 1, publisher.rev());
        assert_eq!(changed.map(|changed| changed.services.len()), Some(1001));
        pass(2_000).await;
        let (began, rev) = (tokio::time::Instant::now(), publisher.rev());
        publisher.put(&named("alone")).await;
        publisher.reaches(rev + 1).await;
        assert!(began.elapsed() < Duration::from_millis(100), "{:?}", began.elapsed());
    });
}

fn copy(of: &dyn StateStore) -> Arc<MemoryStore> {
    let (to, mut batch) = (MemoryStore::new(), Batch::new());
    for (key, value) in of.scan(Table::Endpoints).expect("memory reads") {
        batch.put(Table::Endpoints, key, value);
    }
    to.apply(&batch).expect("memory writes");
    Arc::new(to)
}

/// E12: a state folder restored from a backup must not reuse the numbers of later revisions.
#[test]
fn e12_a_state_that_was_restored_from_a_backup_gets_a_new_instance_id() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let marker = |boot: &str| Some(Marker::new(folder.path().join("endpoints-revision"), boot.into()));
        let start = |store: &Arc<MemoryStore>, boot: &str| Publisher::with(store.clone(), 100, marker(boot));
        let store = Arc::new(MemoryStore::new());
        let first = start(&store, "b");
        first.tell_all(&[named("a")], &[]).await;
        first.reaches(1).await;
        // Published before it is on disk.
        pass(100).await;
        let (instance_id, _) = first.id().expect("one");
        let backup = copy(&*store);
        first.put(&named("b")).await;
        first.reaches(2).await;
        pass(100).await;
        drop(first);

        // A restart continues.
        let second = start(&store, "b");
        second.reaches(2).await;
        assert_eq!(second.id(), Some((instance_id, 2)));
        second.tell_all(&[named("a"), named("b")], &[]).await;
        second.put(&named("c")).await;
        second.reaches(3).await;
        pass(100).await;
        drop(second);

        // The backup has revision 1: revisions 2 and 3 would be used again.
        let restored = start(&backup, "b");
        restored.reaches(1).await;
        let (new_id, rev) = restored.id().expect("one");
        assert!(new_id != instance_id && rev == 1, "{new_id} {rev}");
        assert_eq!(restored.names(), ["ns/a"]);
        restored.tell_all(&[named("a"), named("x")], &[]).await;
        restored.reaches(2).await;
        assert_eq!(restored.id(), Some((new_id, 2)));
        pass(100).await;
        drop(restored);

        // The new instance ID is on disk and is kept until the node boots.
        let again = start(&backup, "b");
        again.reaches(2).await;
        assert_eq!(again.id(), Some((new_id, 2)));
        pass(100).await;
        drop(again);
        let booted = start(&backup, "c");
        booted.reaches(2).await;
        let id = booted.id().expect("one");
        assert!(id.0 != new_id && id.1 == 2, "{id:?}");
        // The instance ID is written without any other change.
        pass(1_000).await;
        drop(booted);
        let after = start(&backup, "c");
        after.reaches(2).await;
        assert_eq!(after.id(), Some(id));
    });
}

#[test]
fn a_full_disk_changes_only_the_instance_id() {
    run(async {
        let store = FakeStore::new();
        let publisher = Publisher::synced(store.clone(), &many(3), &[]).await;
        let before = publisher.id().expect("published");
        store.fail(true);
        pass(100).await;
        publisher.put(&named("new")).await;
        publisher.reaches(2).await;
        let after = publisher.id().expect("published");
        assert!(after.0 != before.0);
        assert_eq!((publisher.metrics.durable.get(), publisher.metrics.persist_failures.get()), (0, 1));
        assert!(publisher.mailbox.recorder().overview().last_error.contains("under a new instance ID"));
        publisher.restart();
        pass(200).await;
        assert_eq!((publisher.id(), publisher.names().len()), (Some(after), 4), "kept in memory");
        publisher.tell_all(&many(3), &[]).await;
        publisher.reaches(3).await;
        store.fail(false);
        pass(120_000).await;
        assert_eq!(publisher.metrics.durable.get(), 1);
        let id = publisher.id();
        drop(publisher);
        let publisher = Publisher::start(store);
        publisher.reaches(1).await;
        assert_eq!((publisher.id(), publisher.names().len()), (id, 3));
    });
}

#[test]
fn a_restart_of_the_actor_relists_and_publishes_the_same() {
    // I9: a panic is a restart like any other.
    for reason in ["a test wants it", PANIC] {
        restarts_and_shows_the_same(reason);
    }
}

fn restarts_and_shows_the_same(reason: &str) {
    run(async {
        let publisher = Publisher::start(Arc::new(MemoryStore::new()));
        let services = many(3);
        publisher.tell_all(&services, &[]).await;
        publisher.reaches(1).await;
        let (id, shows) = (publisher.id(), *publisher.changes.borrow());
        publisher.mailbox.deliver(Restart { reason: reason.into() });
        // An event sent during the restart waits for it.
        assert_eq!(publisher.put(&named("new")).await, Ack::Relist);
        assert_eq!((publisher.id(), publisher.stale()), (id, true));
        assert_eq!(*publisher.view.borrow(), EndpointsView::Synced);
        publisher.send_event(SourceEvent::Services(listing(&services))).await;
        publisher.send_event(SourceEvent::EndpointSlices(listing(&[]))).await;
        publisher.send_event(SourceEvent::ServiceCidrs(listing(&[]))).await;
        publisher.current().await;
        assert_eq!(publisher.id(), id);
        assert_eq!(publisher.mailbox.recorder().restarts(), 1);
        assert!(*publisher.changes.borrow() > shows);
    });
}

#[test]
fn a_completed_write_without_acknowledgement_is_found_after_a_restart() {
    run(async {
        let store = FakeStore::new();
        let publisher = Publisher::synced(store.clone(), &[named("a")], &[]).await;
        pass(100).await;
        store.block(true);
        let writes = store.writes.load(Ordering::SeqCst);
        // More than one batch.
        publisher.send_event(SourceEvent::Services(listing(&many(500)))).await;
        until("the write is under way", || store.writes.load(Ordering::SeqCst) > writes).await;
        publisher.restart();
        settle().await;
        store.block(false);
        publisher.reaches(2).await;
        assert_eq!((publisher.rev(), publisher.names().len()), (2, 500));
        assert!(publisher.stale());
    });
}

#[test]
fn sources_wait_for_a_full_mailbox() {
    run(async {
        let publisher = Publisher::with(Arc::new(MemoryStore::new()), 1, None);
        publisher.tell_all(&[], &[]).await;
        let puts = (0..20).map(|number| {
            let (mailbox, service) = (publisher.mailbox.clone(), named(&format!("s{number}")));
            let event = SourceEvent::Services(vec![put(&service)]);
            tokio::task::spawn_local(async move { mailbox.send(event).await })
        });
        for put in puts.collect::<Vec<_>>() {
            assert_eq!(put.await.expect("it ends"), Ack::Accepted);
        }
        // Changes that came late wait for the interval between two revisions.
        pass(1_000).await;
        until("all of them are published", || publisher.names().len() == 20).await;
        let busy: u64 =
            publisher.mailbox.recorder().overview().messages.iter().map(|of| of.rejected_busy).sum();
        assert!(busy > 0, "it was full");
    });
}

#[test]
fn an_unreadable_disk_means_a_new_instance_id_and_no_restart() {
    run(async {
        let store = FakeStore::new();
        store.fail(true);
        let publisher = Publisher::synced(store.clone(), &[named("a")], &[]).await;
        assert_eq!((publisher.names(), publisher.mailbox.recorder().restarts()), (vec!["ns/a".into()], 0));
        assert_eq!(publisher.metrics.durable.get(), 0);
        store.fail(false);
        pass(10_000).await;
        assert_eq!(publisher.metrics.durable.get(), 1);
    });
}

#[test]
fn inspection_and_metrics_show_the_status() {
    run(async {
        let publisher = Publisher::start(Arc::new(MemoryStore::new()));
        let state = publisher.list("", 9).await;
        assert_eq!((&*state.state, state.rev), ("pending", 0));
        publisher.tell_all(&many(3), &[slice_of("a", "s0001", "L1")]).await;
        publisher.send_event(SourceEvent::Health(SourceKind::Services, JobHealth::Healthy)).await;
        publisher.reaches(1).await;
        assert_eq!(publisher.mailbox.ask(EndpointsCount {}).await.expect("it answers"), 3);
        let state = publisher.list("ns", 2).await;
        assert_eq!((&*state.state, state.rev, state.list.len()), ("synced", 1, 2));
        assert_eq!((state.events, state.revisions, state.endpoints), (5, 1, 1), "the Node counts too");
        let name = ServiceName::new("ns", "s0001");
        let why = publisher.mailbox.ask(ExplainService { name }).await.expect("it answers");
        assert!(why.is_some_and(|why| why.served && why.rev == 1));
        let text = publisher.mailbox.ask(InspectEndpoints {}).await.expect("it answers");
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((&json["state"], &json["sources"][0]["health"]), (&"synced".into(), &"healthy".into()));
        let metrics = &publisher.metrics;
        assert_eq!((metrics.services.get(), metrics.endpoints.get(), metrics.rev.get()), (3, 1, 1));
        assert_eq!((metrics.stale.get(), metrics.durable.get(), metrics.computed.get()), (0, 1, 3));
        let slices = Resource { resource: "endpointslices" };
        assert_eq!(metrics.objects.get(&slices).map(|objects| objects.get()), Some(1));
        assert_eq!(metrics.synced.get(&slices).map(|synced| synced.get()), Some(1));
        let failing = JobHealth::Failing { reason: "gone".into(), since_unix_ms: 5, refused: false };
        publisher.send_event(SourceEvent::Health(SourceKind::Services, failing)).await;
        assert_eq!((metrics.stale.get(), publisher.stale()), (1, true));
        assert!(publisher.mailbox.recorder().overview().summary.ends_with("stale: services: gone"));
    });
}
