//! The LeaseRenewer: requests, timer, record, restarts, inspection.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicI64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use keelson_actor_system::{
    clock::Clock,
    cluster::{ApiError, ApiErrorKind, JobHealth, LeaseApi, LeaseCreate, LeasePatch, ObservedLease, Written},
    inspect::{Mailbox, Recorder},
    supervise::{self, PANIC, Restart},
    test_support::{FakeStore, handled, pass, run, settle},
};
use keelson_metrics::ResultLabel;
use keelson_storage::{Batch, StateStore as _, StateStoreExt as _, Table};
use tokio::{sync::watch, time::Instant};

use crate::lease::{
    ClockStep, LeaseMetrics, LeaseRecord, LeaseRenewer, LeaseRenewerParts, LeaseState, NodeChanged,
    WallClock,
    core::{
        Answer, Request,
        testing::{START_MS, Server, name_of, policy, seconds},
    },
};

struct FakeApi {
    server: Mutex<Server>,
    hang: std::sync::atomic::AtomicBool,
    log: Mutex<Vec<(Instant, &'static str)>>,
    /// Requests under way, and their maximum.
    under_way: AtomicUsize,
    most: AtomicUsize,
    closes: AtomicUsize,
    me: std::sync::Weak<FakeApi>,
}

struct InFlight(Arc<FakeApi>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::SeqCst);
    }
}

impl FakeApi {
    fn new(server: Server) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            server: Mutex::new(server),
            hang: false.into(),
            log: Mutex::default(),
            under_way: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            closes: AtomicUsize::new(0),
            me: me.clone(),
        })
    }

    fn server(&self) -> std::sync::MutexGuard<'_, Server> {
        self.server.lock().expect("unharmed")
    }

    fn serve(&self, request: Request) -> BoxFuture<'static, Answer> {
        let me = self.me.upgrade().expect("alive");
        async move {
            me.log.lock().expect("unharmed").push((Instant::now(), name_of(&request)));
            let under_way = me.under_way.fetch_add(1, Ordering::SeqCst) + 1;
            me.most.fetch_max(under_way, Ordering::SeqCst);
            let _under_way = InFlight(me.clone());
            if me.hang.load(Ordering::SeqCst) {
                std::future::pending::<()>().await;
            }
            tokio::task::yield_now().await;
            me.server().serve(&request)
        }
        .boxed()
    }

    fn log(&self) -> Vec<&'static str> {
        self.log.lock().expect("unharmed").drain(..).map(|(_, name)| name).collect()
    }

    fn times(&self) -> Vec<Instant> {
        self.log.lock().expect("unharmed").iter().map(|(at, _)| *at).collect()
    }
}

macro_rules! served {
    ($self:ident, $request:expr, $kind:ident) => {{
        let answer = $self.serve($request);
        async move {
            match answer.await {
                Answer::$kind(result) => result,
                other => panic!("{other:?} is another request's"),
            }
        }
        .boxed()
    }};
}

impl LeaseApi for FakeApi {
    fn server(&self) -> String {
        "https://api.example".into()
    }

    fn get_lease(&self, name: &str) -> BoxFuture<'static, Result<ObservedLease, ApiError>> {
        assert_eq!(name, "web-1");
        served!(self, Request::Read, Read)
    }

    fn create_lease(&self, lease: LeaseCreate) -> BoxFuture<'static, Result<Written, ApiError>> {
        served!(self, Request::Create(lease), Created)
    }

    fn renew_lease(&self, patch: LeasePatch) -> BoxFuture<'static, Result<Written, ApiError>> {
        served!(self, Request::Renew(patch), Renewed)
    }

    fn node_uid(&self, node: &str) -> BoxFuture<'static, Result<String, ApiError>> {
        assert_eq!(node, "web-1");
        served!(self, Request::Node, Node)
    }

    fn close_connections(&self) {
        self.closes.fetch_add(1, Ordering::SeqCst);
    }
}

struct Cluster {
    api: Arc<FakeApi>,
    store: Arc<FakeStore>,
    renewer: Mailbox<LeaseRenewer>,
    metrics: LeaseMetrics,
    clock: Clock,
    step: Arc<AtomicI64>,
    health: watch::Receiver<JobHealth>,
    changes: watch::Receiver<u64>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.store.block(false);
    }
}

impl Cluster {
    fn start(server: Server) -> Self {
        let (api, store) = (FakeApi::new(server), FakeStore::new());
        let (clock, step, begin) = (Clock::start(), Arc::new(AtomicI64::new(0)), Instant::now());
        let wall: WallClock = {
            let step = step.clone();
            Arc::new(move || {
                let passed = i64::try_from(begin.elapsed().as_millis()).expect("small");
                START_MS + passed + step.load(Ordering::SeqCst)
            })
        };
        let (health, healths) = watch::channel(JobHealth::Pending);
        let (changes, changed) = watch::channel(0);
        let recorder = Recorder::new("LeaseRenewer", 100);
        let metrics = LeaseMetrics::default();
        let parts = LeaseRenewerParts {
            api: api.clone(),
            store: store.clone(),
            clock,
            wall,
            policy: policy(),
            metrics: metrics.clone(),
            health,
            contention: watch::Sender::default(),
            changes,
            recorder: recorder.clone(),
        };
        let renewer = supervise::start(None, recorder, |_| LeaseRenewer::new(parts));
        Self { api, store, renewer, metrics, clock, step, health: healths, changes: changed }
    }

    async fn state(&self) -> serde_json::Value {
        let text = self.renewer.ask(LeaseState {}).await.expect("the renewer answers");
        serde_json::from_str(&text).expect("JSON")
    }

    fn record(&self) -> Option<LeaseRecord> {
        let store: &FakeStore = &self.store;
        store.get_json(Table::Heartbeats, b"lease").expect("read")
    }

    fn writes(&self) -> u64 {
        self.store.writes.load(Ordering::SeqCst)
    }

    fn health(&self) -> JobHealth {
        self.health.borrow().clone()
    }

    #[track_caller]
    fn failure(&self) -> String {
        match self.health() {
            JobHealth::Failing { reason, .. } => reason,
            other => panic!("{other:?}"),
        }
    }

    fn counted(&self, result: &'static str) -> u64 {
        self.metrics.renewals.get_or_create(&ResultLabel { result }).get()
    }

    fn stop(&self) {
        self.renewer.deliver(Restart { reason: "a test wants it".into() });
    }
}

#[test]
fn case_22_the_lease_is_created_and_renewed_every_interval() {
    run(async {
        let cluster = Cluster::start(Server::with_node());
        pass(105_000).await;
        let times = cluster.api.times();
        let names = cluster.api.log();
        assert_eq!(names[..3], ["GET", "GET node", "POST"]);
        assert!(
            (12..=13).contains(&names.len()) && names[3..].iter().all(|name| *name == "PATCH"),
            "{names:?}"
        );
        for two in times[2..].windows(2) {
            let pause = (two[1] - two[0]).as_millis();
            // Timers have a granularity of a millisecond.
            assert!((10_000..=10_403).contains(&pause), "{pause}");
        }
        assert_eq!((cluster.health(), cluster.counted("created")), (JobHealth::Healthy, 1));
        assert_eq!(cluster.counted("renewed") as usize, names.len() - 3);
        let record = cluster.record().expect("written");
        assert_eq!((&*record.uid, &*record.holder, record.managers_forgotten), ("uid-1", "web-1", true));
        assert_eq!(cluster.writes(), 2, "made, and managers forgotten; no renewal is written down");
    });
}

#[test]
fn case_24_and_25_refusals_and_a_black_hole_end_by_themselves() {
    run(async {
        let cluster = Cluster::start(Server::with_node());
        pass(1_000).await;
        cluster.api.log();
        cluster.api.server().down = Some((ApiErrorKind::Unreachable, Duration::ZERO));
        pass(180_000).await;
        assert!(cluster.failure().contains("api.example"));
        cluster.api.server().down = None;
        pass(7_000).await;
        assert_eq!(cluster.health(), JobHealth::Healthy);
        assert!(cluster.api.closes.swap(0, Ordering::SeqCst) >= 4);
        cluster.api.log();

        cluster.api.hang.store(true, Ordering::SeqCst);
        pass(120_000).await;
        let times = cluster.api.times();
        assert!(times.len() >= 8, "{times:?}");
        for two in times.windows(2) {
            let took = two[1] - two[0];
            assert!(took >= seconds(10) && took < seconds(17) + Duration::from_millis(10), "{took:?}");
        }
        assert!(cluster.api.closes.load(Ordering::SeqCst) >= 4);
        assert!(cluster.failure().contains("no answer within 10s"));
        cluster.api.hang.store(false, Ordering::SeqCst);
        pass(17_100).await;
        assert_eq!(cluster.health(), JobHealth::Healthy);
        assert_eq!(cluster.api.most.load(Ordering::SeqCst), 1, "one request at a time");
    });
}

#[test]
fn case_26_no_lease_without_its_node() {
    run(async {
        let cluster = Cluster::start(Server::with_node());
        pass(1_000).await;
        {
            let mut server = cluster.api.server();
            (server.lease, server.node) = (None, None);
        }
        cluster.renewer.offer(NodeChanged { uid: None }).expect("room");
        pass(60_000).await;
        let log = cluster.api.log();
        assert_eq!(log.iter().filter(|name| **name == "POST").count(), 1, "{log:?}");
        assert!(cluster.failure().contains("web-1 does not exist"));
        let state = cluster.state().await;
        assert_eq!((&state["node_state"], &state["health"]), (&"gone".into(), &"failing".into()));
        cluster.api.server().node = Some("second".into());
        cluster.renewer.offer(NodeChanged { uid: Some("second".into()) }).expect("room");
        settle().await;
        assert_eq!(cluster.api.log(), ["GET node", "POST"], "at once");
        assert_eq!(cluster.health(), JobHealth::Healthy);
    });
}

#[test]
fn case_28_and_29_steps_of_the_wall_clock_are_counted_and_change_no_plan() {
    run(async {
        let cluster = Cluster::start(Server::with_node());
        pass(5_000).await;
        cluster.api.log();
        for (step, direction) in [(-3_600_000, "back"), (7_200_000, "forward"), (-3_600_000, "back")] {
            cluster.step.fetch_add(step, Ordering::SeqCst);
            let counted = || cluster.metrics.clock_steps.get_or_create(&ClockStep { direction }).get();
            let before = counted();
            pass(10_500).await;
            assert!((1..=2).contains(&cluster.api.log().len()));
            assert_eq!((counted() - before, cluster.health()), (1, JobHealth::Healthy));
        }
        let events = cluster.renewer.recorder().detail().events;
        assert_eq!(events.iter().filter(|event| event.text.contains("wall clock stepped")).count(), 3);
        assert_eq!(cluster.counted("created"), 1);
    });
}

#[test]
fn a_restart_writes_nothing_that_a_running_agent_would_not() {
    run(async {
        let cluster = Cluster::start(Server::with_node());
        pass(24_000).await;
        let (writes, on_disk) = (cluster.api.server().writes, cluster.writes());
        cluster.api.log();
        cluster.stop();
        pass(1_000).await;
        assert_eq!((cluster.api.log(), cluster.renewer.recorder().restarts()), (vec!["GET"], 1));
        assert_eq!((cluster.api.server().writes, cluster.writes()), (writes, on_disk));
        pass(6_500).await;
        assert_eq!(cluster.api.log(), ["PATCH"], "at the time of the one before");
        let detail = cluster.renewer.recorder().detail();
        assert!(detail.last_error.contains("a test wants it"), "{}", detail.last_error);
    });
}

#[test]
fn a_restart_drops_the_request_under_way() {
    run(async {
        let cluster = Cluster::start(Server::with_node());
        cluster.api.hang.store(true, Ordering::SeqCst);
        pass(1_000).await;
        assert_eq!(cluster.api.under_way.load(Ordering::SeqCst), 1);
        cluster.stop();
        settle().await;
        assert_eq!(cluster.api.under_way.load(Ordering::SeqCst), 0);
        cluster.api.hang.store(false, Ordering::SeqCst);
        pass(1_000).await;
        assert_eq!((cluster.health(), cluster.api.most.load(Ordering::SeqCst)), (JobHealth::Healthy, 1));
    });
}

#[test]
fn panics_and_stops_are_retried_for_as_long_as_they_last() {
    run(async {
        // I9: neither stops the process.
        let cluster = Cluster::start(Server::with_node());
        for restart in 0..20 {
            if restart % 2 == 0 {
                cluster.stop();
            } else {
                cluster.renewer.deliver(Restart { reason: PANIC.into() });
            }
            pass(60_000).await;
        }
        assert_eq!(cluster.renewer.recorder().restarts(), 20);
        assert_eq!((cluster.health(), cluster.api.most.load(Ordering::SeqCst)), (JobHealth::Healthy, 1));
    });
}

#[test]
fn a_store_that_fails_does_not_stop_the_heartbeat() {
    run(async {
        let cluster = Cluster::start(Server::with_node());
        cluster.store.fail(true);
        pass(25_000).await;
        assert_eq!((cluster.health(), cluster.counted("renewed")), (JobHealth::Healthy, 2));
        assert_eq!(cluster.state().await["identity_on_disk"], false);
        let events = cluster.renewer.recorder().detail().events;
        assert!(events.iter().any(|event| event.text.contains("cannot read")));
        assert!(events.iter().any(|event| event.text.contains("cannot write")));
        cluster.store.fail(false);
        pass(31_000).await;
        assert_eq!(cluster.record().map(|record| record.managers_forgotten), Some(true), "the newest one");
        assert_eq!(cluster.state().await["identity_on_disk"], true);
    });
}

#[test]
fn a_record_that_was_not_written_is_written_later() {
    run(async {
        let cluster = Cluster::start(Server::with_lease("other", seconds(3)));
        cluster.store.fail(true);
        pass(5_000).await;
        assert_eq!(cluster.writes(), 1);
        cluster.store.fail(false);
        assert_eq!(cluster.record(), None);
        pass(31_000).await;
        assert_eq!(cluster.record().map(|record| record.transitions), Some(4));
        assert_eq!(cluster.writes(), 2);
    });
}

#[test]
fn a_restart_does_not_forget_the_node() {
    run(async {
        let cluster = Cluster::start(Server::with_lease("web-1", seconds(20)));
        pass(1_000).await;
        cluster.renewer.offer(NodeChanged { uid: Some("second".into()) }).expect("room");
        let owner = || cluster.api.server().lease.as_ref().and_then(|lease| lease.owner_uid.clone());
        pass(1_000).await;
        assert_eq!(owner().as_deref(), Some("second"));
        cluster.stop();
        if let Some(lease) = &mut cluster.api.server().lease {
            (lease.owner_uid, lease.renew_unix_us) = (Some("first".into()), None);
        }
        pass(1_000).await;
        assert_eq!(owner().as_deref(), Some("second"));
    });
}

#[test]
fn a_store_that_hangs_does_not_stop_the_heartbeat() {
    run(async {
        let cluster = Cluster::start(Server::with_node());
        pass(1_000).await;
        // Another Lease: its identity has to be written, but the store is blocked.
        cluster.store.block(true);
        cluster.api.server().lease = None;
        cluster.step.fetch_add(5_000, Ordering::SeqCst);
        cluster.renewer.offer(NodeChanged { uid: Some("second".into()) }).expect("room");
        settle().await;
        assert_eq!(cluster.api.log(), ["GET", "GET node", "POST", "PATCH", "GET node", "POST"]);
        assert_eq!(cluster.health(), JobHealth::Healthy);
        cluster.store.block(false);
        pass(1_000).await;
        let uid = cluster.api.server().lease.as_ref().map(|lease| lease.written.uid.clone());
        assert_eq!(cluster.record().map(|record| record.uid), uid);
    });
}

#[test]
fn an_invalid_record_is_reported_and_replaced() {
    run(async {
        let cluster = Cluster::start(Server::with_lease("web-1", seconds(3)));
        let mut batch = Batch::new();
        batch.put(Table::Heartbeats, b"lease".to_vec(), b"{".to_vec());
        cluster.store.apply(&batch).expect("written");
        pass(1_000).await;
        assert_eq!(cluster.health(), JobHealth::Healthy);
        assert!(cluster.renewer.recorder().overview().last_error.contains("cannot decode"));
        assert_eq!(cluster.record().map(|record| record.uid), Some("lease-uid".into()));
    });
}

#[test]
fn inspection_shows_the_state() {
    run(async {
        let mut cluster = Cluster::start(Server::with_lease("other", seconds(3)));
        pass(1_000).await;
        cluster.changes.mark_unchanged();
        pass(25_000).await;
        assert!(cluster.changes.has_changed().expect("alive"));
        let state = cluster.state().await;
        assert_eq!((&state["holder"], &state["transitions"]), (&"web-1".into(), &4.into()));
        assert!(state["next_request_in_ms"].as_u64().is_some_and(|ms| ms <= 10_400), "{state:#}");
        let detail = cluster.renewer.recorder().detail();
        assert_eq!((&*detail.status, &*detail.summary), ("running", "renews Lease web-1 every 10s"));
        assert!(handled(cluster.renewer.recorder(), "LeaseTick") >= 2);
        assert_eq!(cluster.renewer.recorder().depth(), 0);
        assert_eq!((cluster.metrics.transitions.get(), cluster.metrics.takeovers.get()), (4, 1));
        cluster.metrics.now_gauges(cluster.clock.now());
        let age = cluster.metrics.age.get();
        assert!((4.0..7.0).contains(&age), "{age}");
    });
}

#[test]
fn an_hour_of_faults_leaves_one_request_at_a_time_and_a_renewed_lease() {
    run(async {
        let cluster = Cluster::start(Server::with_node());
        let faults = [
            Some(ApiErrorKind::Conflict),
            Some(ApiErrorKind::Unreachable),
            Some(ApiErrorKind::TooManyRequests { retry_after: Some(seconds(3)) }),
            None,
            Some(ApiErrorKind::Server { retry_after: None }),
            Some(ApiErrorKind::NotFound),
            None,
            Some(ApiErrorKind::Unauthorized),
            Some(ApiErrorKind::Gone),
            Some(ApiErrorKind::Forbidden),
            None,
        ];
        for round in 0..180_usize {
            let next = (0..round % 23).map(|n| faults[(round * 7 + n) % faults.len()]);
            cluster.api.server().next = next.collect();
            cluster.api.hang.store(round % 17 == 0, Ordering::SeqCst);
            if round % 29 == 0 {
                cluster.stop();
            }
            pass(20_000).await;
        }
        cluster.api.hang.store(false, Ordering::SeqCst);
        cluster.api.server().next.clear();
        pass(28_000).await;
        assert_eq!((cluster.health(), cluster.api.most.load(Ordering::SeqCst)), (JobHealth::Healthy, 1));
    });
}
