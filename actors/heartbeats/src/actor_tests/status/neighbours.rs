//! The StatusReporter's neighbours: a server with one Node, a machine, a runtime, pulls; and [`World`], the actor among
//! them.

use std::{
    cell::Cell,
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use k8s_openapi::api::core::v1::Node;
use keelson_actor_system::{
    clock::Clock,
    cluster::{ApiError, ApiErrorKind, JobHealth, NodeApi, Written},
    file_system::FileSystem,
    inspect::{Mailbox, Recorder},
    reports::{EndpointsView, NETWORK_READY, PullsView, RUNTIME_READY, RuntimeCondition, RuntimeReport},
    supervise,
    test_support::FakeStore,
};
use keelson_storage::{StateStore as _, Table};
use serde_json::{Value, json};
use tokio::{sync::watch, time::Instant};

use crate::{
    host::{Host, HostFacts, HostQuery, HostReadings},
    status::{
        ClearCondition, ConditionRefused, ConditionStatus, ExternalCondition, NodeChanged, PullsSource, Role,
        RuntimeSource, SetCondition, StatusMetrics, StatusPolicy, StatusReporter, StatusReporterParts,
        StatusState, apply_patch, idle,
    },
};

const SOCKET: &str = "unix:///run/fake.sock";

thread_local! {
    /// When the wall clock was last set, and its value.
    static WALL: Cell<Option<(Instant, i64)>> = const { Cell::new(None) };
}

/// 2026-01-01T00:00:00Z.
pub(super) const NEW_YEAR: i64 = 1_767_225_600_000;

pub(super) fn wall() -> i64 {
    let (at, was) = WALL.get().unwrap_or((Instant::now(), NEW_YEAR));
    WALL.set(Some((at, was)));
    was + i64::try_from(at.elapsed().as_millis()).expect("small")
}

pub(super) fn step_wall(by: i64) {
    WALL.set(Some((Instant::now(), wall() + by)));
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Fault {
    Says(ApiErrorKind),
    Hangs,
}

#[derive(Debug, Default)]
pub(super) struct Script {
    pub(super) node: Option<Value>,
    pub(super) version: u64,
    pub(super) faults: VecDeque<Fault>,
    pub(super) always: Option<Fault>,
    pub(super) requests: Vec<(Instant, &'static str, Value)>,
    pub(super) closed: usize,
}

#[derive(Debug, Default)]
pub(super) struct FakeApi(Mutex<Script>);

impl FakeApi {
    pub(super) fn script(&self) -> MutexGuard<'_, Script> {
        self.0.lock().expect("unharmed")
    }

    pub(super) fn verbs(&self) -> Vec<&'static str> {
        self.script().requests.iter().map(|(_, verb, _)| *verb).collect()
    }

    pub(super) fn forget(&self) {
        self.script().requests.clear();
    }

    pub(super) fn make(&self) {
        let mut script = self.script();
        script.version += 1;
        let version = script.version.to_string();
        script.node = Some(json!({"metadata": {"name": "n1", "uid": "uid-1", "resourceVersion": version}}));
    }

    pub(super) fn condition(&self, kind: &str) -> Value {
        let node = self.script().node.clone().expect("a Node");
        let list = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        list.into_iter().find(|of| of["type"] == kind).unwrap_or(Value::Null)
    }

    fn request<T: Send + 'static>(
        &self,
        verb: &'static str,
        body: Value,
        serve: impl FnOnce(&mut Script) -> Result<T, ApiErrorKind>,
    ) -> BoxFuture<'static, Result<T, ApiError>> {
        let mut script = self.script();
        script.requests.push((Instant::now(), verb, body));
        let result = match script.faults.pop_front().or(script.always) {
            None => serve(&mut script),
            Some(Fault::Says(kind)) => Err(kind),
            Some(Fault::Hangs) => return std::future::pending().boxed(),
        };
        let error =
            |kind: ApiErrorKind| ApiError { server: "https://api".into(), kind, reason: kind.name().into() };
        async move { result.map_err(error) }.boxed()
    }

    fn patch(&self, verb: &'static str, patch: Value) -> BoxFuture<'static, Result<Written, ApiError>> {
        self.request(verb, patch.clone(), |script| {
            let version = script.version + 1;
            let node = script.node.as_mut().ok_or(ApiErrorKind::NotFound)?;
            apply_patch(node, &patch);
            node["metadata"]["resourceVersion"] = version.to_string().into();
            script.version = version;
            Ok(Written { uid: "uid-1".into(), resource_version: version.to_string() })
        })
    }
}

pub(super) fn typed(node: &Value) -> Box<Node> {
    Box::new(serde_json::from_value(node.clone()).expect("a Node"))
}

impl NodeApi for FakeApi {
    fn server(&self) -> String {
        "https://api".into()
    }

    fn get_node(&self, _: &str) -> BoxFuture<'static, Result<Box<Node>, ApiError>> {
        self.request("get", Value::Null, |script| {
            script.node.as_ref().map(typed).ok_or(ApiErrorKind::NotFound)
        })
    }

    fn create_node(&self, node: Box<Node>) -> BoxFuture<'static, Result<Box<Node>, ApiError>> {
        let mut body = serde_json::to_value(&*node).expect("JSON");
        self.request("create", body.clone(), |script| {
            script.version += 1;
            body["metadata"]["uid"] = "uid-1".into();
            body["metadata"]["resourceVersion"] = script.version.to_string().into();
            let node = typed(&body);
            script.node = Some(body);
            Ok(node)
        })
    }

    fn patch_node(&self, _: &str, patch: Value) -> BoxFuture<'static, Result<Written, ApiError>> {
        self.patch("repair", patch)
    }

    fn patch_status(&self, _: &str, patch: Value) -> BoxFuture<'static, Result<Written, ApiError>> {
        self.patch("patch", patch)
    }

    fn close_connections(&self) {
        self.script().closed += 1;
    }
}

pub(super) struct FakeHost {
    pub(super) booted: Instant,
    pub(super) hangs: Mutex<bool>,
}

impl Host for FakeHost {
    fn facts(&self) -> HostFacts {
        HostFacts {
            boot_id: "boot-1".into(),
            operating_system: "linux".into(),
            architecture: "amd64".into(),
            ..HostFacts::default()
        }
    }

    fn read(&self, ask: HostQuery) -> BoxFuture<'static, HostReadings> {
        assert_eq!(ask.node_fs, std::path::Path::new("/var/lib/kubelet"));
        let fs = FileSystem {
            capacity_bytes: 100 << 30,
            available_bytes: 60 << 30,
            inodes: 1000,
            inodes_free: 900,
        };
        let readings = HostReadings {
            cpus: Some(4),
            memory_capacity_bytes: Some(8 << 30),
            memory_available_bytes: Some(6 << 30),
            node_fs: Some(fs),
            image_fs: ask.image_fs.map(|_| fs),
            addresses: vec![[10, 0, 0, 7].into()],
            ..HostReadings::default()
        };
        if *self.hangs.lock().expect("unharmed") {
            return std::future::pending().boxed();
        }
        async move { readings }.boxed()
    }

    fn since_boot(&self) -> Duration {
        Duration::from_secs(3600) + self.booted.elapsed()
    }
}

pub(super) struct FakeSource {
    pub(super) report: Mutex<Result<RuntimeReport, String>>,
    down: watch::Sender<Option<String>>,
    pub(super) pulls_view: Mutex<PullsView>,
    /// Reports of DiskPressure to the pulls.
    pub(super) pressure: Mutex<Vec<bool>>,
}

impl RuntimeSource for FakeSource {
    fn report(&self) -> BoxFuture<'static, Result<RuntimeReport, String>> {
        let report = self.report.lock().expect("unharmed").clone();
        async move { report }.boxed()
    }

    fn down_reason(&self) -> Option<String> {
        self.down.borrow().clone()
    }

    fn changed(&self) -> BoxFuture<'static, bool> {
        let mut down = self.down.subscribe();
        let was_down = down.borrow_and_update().is_some();
        async move { down.wait_for(|down| down.is_some() != was_down).await.is_ok() }.boxed()
    }
}

impl PullsSource for FakeSource {
    fn pulls_view(&self) -> BoxFuture<'static, Result<PullsView, String>> {
        let pulls_view = self.pulls_view.lock().expect("unharmed").clone();
        async move { Ok(pulls_view) }.boxed()
    }

    fn disk_pressure(&self, is_true: bool) {
        self.pressure.lock().expect("unharmed").push(is_true);
    }
}

fn report() -> RuntimeReport {
    let ok = |kind: &str| RuntimeCondition { kind: kind.into(), ok: true, ..RuntimeCondition::default() };
    RuntimeReport {
        version: "containerd://v2.4.2".into(),
        conditions: vec![ok(RUNTIME_READY), ok(NETWORK_READY)],
        image_fs: Some("/var/lib/containerd".into()),
        ..RuntimeReport::default()
    }
}

pub(super) struct World {
    pub(super) api: Arc<FakeApi>,
    pub(super) host: Arc<FakeHost>,
    pub(super) source: Arc<FakeSource>,
    pub(super) store: Arc<FakeStore>,
    pub(super) metrics: StatusMetrics,
    pub(super) endpoints: watch::Sender<EndpointsView>,
    pub(super) health: watch::Receiver<JobHealth>,
    pub(super) changes: watch::Receiver<u64>,
    pub(super) reporter: Mailbox<StatusReporter>,
    pub(super) role: Role,
}

impl World {
    pub(super) fn start(role: Role) -> Self {
        let api = Arc::new(FakeApi::default());
        if role == Role::Companion {
            api.make();
        }
        let source = FakeSource {
            report: Mutex::new(Ok(report())),
            down: watch::Sender::default(),
            pulls_view: Mutex::new(idle()),
            pressure: Mutex::default(),
        };
        let host = FakeHost { booted: Instant::now(), hangs: Mutex::new(false) };
        Self::with(role, api, Arc::new(host), Arc::new(source), FakeStore::new())
    }

    fn with(
        role: Role,
        api: Arc<FakeApi>,
        host: Arc<FakeHost>,
        source: Arc<FakeSource>,
        store: Arc<FakeStore>,
    ) -> Self {
        let (endpoints, endpoints_seen) = watch::channel(EndpointsView::Disabled);
        let (health, healths) = watch::channel(JobHealth::Pending);
        let (changes, changed) = watch::channel(0);
        let metrics = StatusMetrics::default();
        let recorder = Recorder::new("StatusReporter", 100);
        let parts = StatusReporterParts {
            api: api.clone(),
            host: host.clone(),
            runtime: source.clone(),
            pulls: source.clone(),
            endpoints: endpoints_seen,
            contention: watch::Sender::default().subscribe(),
            store: store.clone(),
            clock: Clock::start(),
            wall,
            policy: StatusPolicy::new(role, "n1"),
            metrics: metrics.clone(),
            health,
            changes,
            recorder: recorder.clone(),
        };
        let reporter = supervise::start(None, recorder, |_| StatusReporter::new(parts));
        let (health, changes) = (healths, changed);
        Self { api, host, source, store, metrics, endpoints, health, changes, reporter, role }
    }

    /// Another process with the same server, machine and disk.
    pub(super) fn successor(&self) -> Self {
        let (api, host) = (self.api.clone(), self.host.clone());
        Self::with(self.role, api, host, self.source.clone(), self.store.clone())
    }

    pub(super) fn runtime_dies(&self) {
        let reason = format!("{SOCKET}: connection refused");
        *self.source.report.lock().expect("unharmed") = Err(reason.clone());
        self.source.down.send_replace(Some(reason));
    }

    pub(super) fn runtime_returns(&self) {
        *self.source.report.lock().expect("unharmed") = Ok(report());
        self.source.down.send_replace(None);
    }

    pub(super) fn send_node(&self) {
        let node = self.api.script().node.as_ref().map(|node| Arc::from(typed(node)));
        self.reporter.offer(NodeChanged { node }).expect("room");
    }

    pub(super) async fn set(&self, kind: &str, status: ConditionStatus) -> Result<bool, ConditionRefused> {
        let condition = ExternalCondition {
            kind: kind.into(),
            status,
            reason: "Told".into(),
            message: "m".into(),
            ttl: Some(Duration::from_secs(3600)),
        };
        self.reporter.ask(SetCondition { condition }).await.expect("the reporter answers")
    }

    pub(super) async fn clear(&self, kind: &str) -> Result<(), ConditionRefused> {
        self.reporter.ask(ClearCondition { kind: kind.into() }).await.expect("the reporter answers")
    }

    pub(super) async fn state(&self) -> Value {
        let text = self.reporter.ask(StatusState {}).await.expect("the reporter answers");
        serde_json::from_str(&text).expect("JSON")
    }

    pub(super) fn records(&self) -> Vec<String> {
        let records = self.store.scan(Table::Heartbeats).expect("readable");
        records.into_iter().map(|(key, _)| String::from_utf8(key).expect("text")).collect()
    }
}
