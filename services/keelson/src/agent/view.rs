//! The agent in the debug API.
//!
//! Owns: nothing; it asks the actors, the store and the settings. In: calls of the debug API. Out: its messages. An
//! actor that does not answer in time is shown as "not answering" with the content of its recorder, and delays no other
//! answer.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use keelson_actor_system::{
    clock::unix_ms,
    inspect::{Mailbox, Recorder, Status},
};
use keelson_config::{Gate, Loaded};
use keelson_debug::{AgentView, Check, ConditionError, ViewError};
use keelson_metrics::ProcessMetrics;
use keelson_proto::{debug as pb, endpoints, node};
use keelson_pulls::{
    coordinator::{CountNow, LimitView, ListPulls, PullCoordinator, SetLimit},
    metrics::{HandoverResult, Metrics, ResultLabel},
    runtime::Health,
};
use keelson_serve::history::History;
use keelson_storage::{DeferredStore, StateStore as _, StoreState};
use prometheus_client::registry::Registry;
use tokio::sync::{oneshot, watch};

use super::{
    actor_handle::{ActorHandle, ask_with_timeout},
    cluster::Cluster,
    cri_path,
    endpoints::{Endpoints, EndpointsServing},
    heartbeats::Heartbeats,
    history,
    jobs::JobMetrics,
    node_facts::NodeFacts,
};

/// Number of actors on the CRI path, which are the first ones: PullCoordinator and RuntimeClient.
const CRI_PATH_ACTORS: usize = 2;

pub(super) struct ViewParts {
    pub(super) cri_socket: PathBuf,
    pub(super) pulls: Mailbox<PullCoordinator>,
    /// In display order.
    pub(super) actors: Vec<ActorHandle>,
    pub(super) heartbeats: Heartbeats,
    pub(super) endpoints: Endpoints,
    pub(super) cluster: Option<Cluster>,
    /// The thread of the credentials' jobs.
    pub(super) credentials: Option<actix::ArbiterHandle>,
    pub(super) health: watch::Receiver<Health>,
    pub(super) changes: watch::Sender<u64>,
    pub(super) store: Arc<DeferredStore>,
    pub(super) state_folder_id: String,
    pub(super) loaded: watch::Receiver<Arc<Loaded>>,
    pub(super) metrics: Metrics,
    /// Users who may make changes through the debug socket.
    pub(super) control_users: BTreeSet<u32>,
}

struct Inner {
    parts: ViewParts,
    registry: Registry,
    history: History,
    started_unix_ms: i64,
    stopping: AtomicBool,
    cri_path: Mutex<Vec<Check>>,
    /// The limit after it was last set by a user of the debug API, in this process.
    set_limit: Mutex<Option<pb::Limit>>,
}

/// Cheap to clone.
#[derive(Clone)]
pub(super) struct View(Arc<Inner>);

impl View {
    pub(super) fn new(parts: ViewParts) -> Self {
        let mut registry = Registry::default();
        parts.metrics.register(&mut registry);
        registry.register_collector(Box::new(ProcessMetrics::new()));
        parts.heartbeats.register(&mut registry);
        parts.endpoints.register(&mut registry);
        let recorders = parts.actors.iter().map(|actor| actor.recorder().clone()).collect();
        registry.register_collector(Box::new(JobMetrics(recorders)));
        if let Some(cluster) = &parts.cluster {
            cluster.register(&mut registry);
        }
        let inner = Inner {
            parts,
            registry,
            history: History::new(history::SERIES),
            started_unix_ms: unix_ms(),
            stopping: AtomicBool::new(false),
            cri_path: Mutex::default(),
            set_limit: Mutex::default(),
        };
        Self(Arc::new(inner))
    }

    /// Stops every actor but those of image pulls.
    pub(super) fn stop_reports(&self) {
        self.0.parts.heartbeats.stop();
        self.0.parts.endpoints.stop();
        if let Some(credentials) = &self.0.parts.credentials {
            credentials.stop();
        }
    }

    /// Removes the agent's conditions from the Node, if the settings request it.
    pub(super) async fn leave(&self) {
        self.0.parts.heartbeats.leave().await;
    }

    /// Counts how this agent's start beside a stopping one ended.
    pub(super) fn count_handover(&self, result: HandoverResult) {
        self.0.parts.metrics.handovers.get_or_create(&result).inc();
    }

    /// From now on not ready.
    pub(super) fn stopping(&self) {
        self.0.stopping.store(true, Ordering::Relaxed);
        self.0.parts.changes.send_modify(|count| *count += 1);
    }

    /// Serves the Endpoints API, if it is enabled.
    pub(super) async fn serve_endpoints(&self) -> Option<EndpointsServing> {
        let settings = self.0.parts.loaded.borrow().settings.clone();
        self.0.parts.endpoints.serve(&settings).await
    }

    pub(super) fn node_name(&self) -> String {
        self.0.parts.loaded.borrow().settings.agent.node_name.clone()
    }

    /// What Events on the Node are about; `None` while the agent stops: its successor writes them.
    pub(super) async fn node_facts(&self) -> Option<NodeFacts> {
        if self.0.stopping.load(Ordering::Relaxed) {
            return None;
        }
        let parts = &self.0.parts;
        let node_name = self.node_name();
        let limit = self.0.set_limit.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let runtime = parts.health.borrow().clone();
        Some(NodeFacts {
            runtime,
            is_passing_through: parts.metrics.passing_through.get() != 0,
            conditions: parts
                .heartbeats
                .show(node_name)
                .await
                .map(|shown| shown.conditions)
                .unwrap_or_default(),
            backends: parts.endpoints.backends(),
            limit,
        })
    }

    /// Counts an Event that found the queue of the writer full.
    pub(super) fn count_dropped_event(&self) {
        self.0.parts.metrics.events.get_or_create(&ResultLabel { result: "dropped" }).inc();
    }

    fn recorders(&self) -> impl Iterator<Item = &Arc<Recorder>> {
        self.0.parts.actors.iter().map(ActorHandle::recorder)
    }

    /// Checks the whole CRI path, and stores the result.
    pub(super) async fn check_cri_path(&self) -> Vec<Check> {
        let parts = &self.0.parts;
        let on_path = parts.actors.iter().take(CRI_PATH_ACTORS);
        let mut checks = cri_path::check_path(&parts.cri_socket, on_path).await;
        if checks.iter().any(|check| check.ok && check.name == parts.pulls.recorder().name())
            && parts.pulls.recorder().current_status() == Status::Running
        {
            parts.metrics.passing_through.set(0);
        }
        let mut last = self.0.cri_path.lock().unwrap_or_else(PoisonError::into_inner);
        for check in checks.iter_mut().filter(|check| !check.ok) {
            let since = last.iter().find(|last| !last.ok && last.name == check.name);
            check.since_unix_ms = since.map_or_else(unix_ms, |since| since.since_unix_ms);
        }
        last.clone_from(&checks);
        checks
    }

    /// Everything that readiness depends on.
    fn checks(&self) -> Vec<Check> {
        let stopping = self.0.stopping.load(Ordering::Relaxed);
        let agent = stopping.then(|| ("the agent is stopping".to_owned(), 0));
        let runtime = match &*self.0.parts.health.borrow() {
            Health::Up { .. } => None,
            Health::Unknown => Some(("the container runtime has not answered yet".to_owned(), 0)),
            Health::Down { reason, since_unix_ms } => Some((reason.clone(), *since_unix_ms)),
        };
        let state = (self.0.parts.metrics.store_durable.get() == 0).then(|| {
            let error = self.0.parts.store.stats().last_error.unwrap_or_default();
            (format!("cannot write the state store: {error}"), 0)
        });
        let mut checks: Vec<Check> = [("agent", agent), ("runtime", runtime), ("state", state)]
            .into_iter()
            .map(|(name, wrong)| {
                let ok = wrong.is_none();
                let (message, since_unix_ms) = wrong.unwrap_or_else(|| ("ok".to_owned(), 0));
                Check { name: name.to_owned(), ok, message, since_unix_ms }
            })
            .collect();
        checks.extend(self.0.parts.heartbeats.checks());
        checks.extend(self.0.parts.endpoints.checks());
        let path = self.0.cri_path.lock().unwrap_or_else(PoisonError::into_inner);
        checks.extend(path.iter().filter(|check| !check.ok).cloned());
        drop(path);
        if self.0.parts.metrics.passing_through.get() != 0 {
            let total = self.0.parts.metrics.passed_through_total();
            let message = format!(
                "image pulls are passed through to the runtime without admission or limit ({total} so far); \
                 run keelson actors PullCoordinator"
            );
            checks.push(Check { name: "pulls".into(), ok: false, message, since_unix_ms: 0 });
        }
        checks.extend(self.recorders().filter_map(|recorder| job_check(recorder)));
        checks
    }
}

/// The problem of a job that does not run; `None` while it does.
fn job_check(recorder: &Recorder) -> Option<Check> {
    let failure = recorder.failure()?;
    let message = match recorder.current_status() {
        Status::Stopped => failure.reason.clone(),
        _ => failure.text(unix_ms()),
    };
    Some(Check { name: recorder.name().into(), ok: false, message, since_unix_ms: failure.since_unix_ms })
}

/// Why the store is not open; empty if it is.
#[derive(Default)]
struct NotOpen {
    reason: String,
    since_unix_ms: i64,
    next_try_unix_ms: i64,
}

impl NotOpen {
    fn of(state: &StoreState) -> Self {
        if state.is_open() {
            return Self::default();
        }
        let unix_ms = |time: Option<SystemTime>| {
            let since_epoch = time.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
            since_epoch.and_then(|time| i64::try_from(time.as_millis()).ok()).unwrap_or_default()
        };
        let next_try = match state {
            StoreState::Unavailable { next_try, .. } => *next_try,
            _ => None,
        };
        Self {
            reason: state.reason().unwrap_or_default().to_owned(),
            since_unix_ms: unix_ms(state.since()),
            next_try_unix_ms: unix_ms(next_try),
        }
    }
}

impl AgentView for View {
    async fn version(&self) -> pb::GetVersionResponse {
        let settings = self.0.parts.loaded.borrow().settings.clone();
        let (runtime_name, runtime_version) = match &*self.0.parts.health.borrow() {
            Health::Up { info, .. } => (info.name.clone(), info.version.clone()),
            _ => Default::default(),
        };
        // One server that does not answer is one reason, even if several parts report it.
        let mut reasons: Vec<String> = Vec::new();
        for check in self.checks().into_iter().filter(|check| !check.ok) {
            if !reasons.contains(&check.message) {
                reasons.push(check.message);
            }
        }
        pb::GetVersionResponse {
            version: crate::build_info::VERSION.into(),
            node_name: settings.agent.node_name.clone(),
            state_folder_id: self.0.parts.state_folder_id.clone(),
            started_unix_ms: self.0.started_unix_ms,
            runtime_name,
            runtime_version,
            runtime_endpoint: settings.cri.runtime_endpoint.to_string(),
            ready: reasons.is_empty(),
            not_ready_reasons: reasons,
        }
    }

    async fn actors(&self) -> Vec<pb::Actor> {
        self.recorders().map(|recorder| recorder.overview()).collect()
    }

    async fn actor(&self, name: &str) -> Option<pb::Actor> {
        let handle = self.0.parts.actors.iter().find(|actor| actor.recorder().name() == name)?;
        let state = ask_with_timeout(handle.state()).await;
        let mut actor = handle.recorder().detail();
        match state {
            Ok(json) => actor.state_json = json,
            Err(error) => {
                actor.status = "not answering".into();
                actor.summary = error.to_string();
            }
        }
        Some(actor)
    }

    fn actor_names(&self) -> Vec<String> {
        self.recorders().map(|recorder| recorder.name().to_owned()).collect()
    }

    async fn pulls(&self, max_queued: u32) -> Result<pb::PullList, ViewError> {
        let metrics = &self.0.parts.metrics;
        let list =
            ask_with_timeout(self.0.parts.pulls.ask(ListPulls { max_queued: max_queued as usize })).await;
        match list {
            Ok(list) => Ok(pb::PullList { passed_through: metrics.passed_through_total(), ..list }),
            Err(ViewError::Unavailable(reason)) if metrics.passing_through.get() != 0 => {
                let total = metrics.passed_through_total();
                Err(ViewError::Unavailable(format!(
                    "{reason}; image pulls are passed through to the runtime without admission ({total} so far)"
                )))
            }
            Err(error) => Err(error),
        }
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.0.parts.changes.subscribe()
    }

    fn may_change(&self, uid: u32) -> bool {
        self.0.parts.control_users.contains(&uid)
    }

    async fn limit(&self) -> Result<pb::Limit, ViewError> {
        ask_with_timeout(self.0.parts.pulls.ask(LimitView {})).await
    }

    async fn set_limit(&self, limit: Option<u32>) -> Result<pb::Limit, ViewError> {
        /// As for `pulls.max_parallel_image_pulls`.
        const MAX_LIMIT: u32 = 10_000;
        if let Some(limit) = limit.filter(|limit| *limit > MAX_LIMIT) {
            return Err(ViewError::Invalid(format!(
                "invalid limit {limit}: use 1 to {MAX_LIMIT}, or 0 for no limit"
            )));
        }
        /// A caller does not wait longer for a disk that hangs: the limit is in effect, and is stored when the disk answers.
        const STORED_WITHIN: Duration = Duration::from_secs(2);
        let (stored, is_stored) = oneshot::channel();
        let set = ask_with_timeout(self.0.parts.pulls.ask(SetLimit { limit, stored })).await?;
        // What was answered survives `kill -9`.
        let _ = tokio::time::timeout(STORED_WITHIN, is_stored).await;
        *self.0.set_limit.lock().unwrap_or_else(PoisonError::into_inner) = Some(set.clone());
        Ok(set)
    }

    async fn storage(&self) -> Result<pb::Storage, ViewError> {
        let store = self.0.parts.store.clone();
        let not_open = NotOpen::of(&store.state());
        let stats = tokio::task::spawn_blocking(move || store.stats()).await;
        let stats = stats
            .map_err(|error| ViewError::Unavailable(format!("the state store did not answer: {error}")))?;
        let shown = |path: Option<std::path::PathBuf>| {
            path.map(|path| path.display().to_string()).unwrap_or_default()
        };
        Ok(pb::Storage {
            backend: stats.backend,
            path: shown(stats.path),
            schema_version: stats.schema_version,
            size_bytes: stats.size_bytes,
            last_error: stats.last_error.filter(|_| not_open.reason.is_empty()).unwrap_or_default(),
            not_open_reason: not_open.reason,
            not_open_since_unix_ms: not_open.since_unix_ms,
            next_try_unix_ms: not_open.next_try_unix_ms,
            damaged_moved_to: shown(stats.damaged_moved_to),
            tables: stats
                .tables
                .into_iter()
                .map(|(name, records)| pb::StorageTable { name, records })
                .collect(),
        })
    }

    async fn config(&self) -> pb::Config {
        let loaded = self.0.parts.loaded.borrow().clone();
        let setting = |entry: &keelson_config::Entry| pb::Setting {
            key: entry.key.clone(),
            value: entry.value.to_string(),
            origin: entry.origin.to_string(),
            live: entry.live,
        };
        let gate = |gate: Gate| pb::FeatureGate {
            name: gate.name().into(),
            stage: gate.spec().stage.to_string(),
            enabled: loaded.settings.feature_gates.enabled(gate),
            default: gate.spec().stage.default_on(),
            description: gate.spec().description.into(),
        };
        pb::Config {
            settings: loaded.entries.iter().map(setting).collect(),
            feature_gates: Gate::ALL.into_iter().map(gate).collect(),
        }
    }

    async fn heartbeats(&self) -> Result<node::Heartbeats, ViewError> {
        self.0.parts.heartbeats.show(self.node_name()).await
    }

    async fn set_condition(&self, condition: node::SetConditionRequest) -> Result<bool, ConditionError> {
        self.0.parts.heartbeats.set_condition(condition).await
    }

    async fn clear_condition(&self, kind: &str) -> Result<(), ConditionError> {
        self.0.parts.heartbeats.clear_condition(kind).await
    }

    async fn endpoints(&self, namespace: &str, max_services: u32) -> Result<endpoints::State, ViewError> {
        self.0.parts.endpoints.show(namespace, max_services).await
    }

    async fn explain(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<endpoints::Explanation>, ViewError> {
        self.0.parts.endpoints.explain(namespace, name).await
    }

    fn history(&self) -> History {
        self.0.history.clone()
    }

    async fn livez(&self) -> Vec<Check> {
        self.check_cri_path().await
    }

    async fn readyz(&self) -> Vec<Check> {
        self.checks()
    }

    async fn metrics(&self) -> String {
        // A coordinator that does not answer must not hide the metrics that show it.
        let _ = ask_with_timeout(self.0.parts.pulls.ask(CountNow {})).await;
        self.0.parts.heartbeats.count_now();
        self.0.parts.metrics.store_open.set(self.0.parts.store.state().is_open().into());
        let mut text = String::new();
        // Encoding into a string cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.0.registry);
        text
    }
}
