//! What the debug endpoint may see and do.
//!
//! Owns: nothing; it asks the actors, the store and the settings. In: calls of the debug service.
//! Out: the debug API's messages. An actor that does not answer within a moment is shown as that,
//! with what its note-book says, and delays nobody.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use keelson_actors::{
    clock::unix_ms,
    inspect::{Mailbox, MailboxError, Recorder},
    metrics::Metrics,
    pulls::{CountNow, Inspected, LimitView, ListPulls, PullCoordinator, SetLimit},
    runtime::{RuntimeClient, RuntimeState, core::Health},
};
use keelson_config::{Gate, Loaded};
use keelson_debug::{AgentView, Check, ViewError};
use keelson_proto::debug as pb;
use keelson_storage::{SledStore, StateStore as _};
use prometheus_client::registry::Registry;
use tokio::sync::watch;

/// An actor that takes longer to answer is said not to.
const PATIENCE: Duration = Duration::from_secs(2);
/// The liveness probe is slower to judge: it ends in a restart.
const LIVE_PATIENCE: Duration = Duration::from_secs(5);

/// What the view looks at.
pub(super) struct ViewParts {
    pub(super) pulls: Mailbox<PullCoordinator>,
    pub(super) runtime: Mailbox<RuntimeClient>,
    pub(super) health: watch::Receiver<Health>,
    pub(super) changes: watch::Sender<u64>,
    pub(super) store: Arc<SledStore>,
    pub(super) instance: String,
    pub(super) loaded: watch::Receiver<Arc<Loaded>>,
    pub(super) metrics: Metrics,
}

struct Inner {
    parts: ViewParts,
    registry: Registry,
    started_unix_ms: i64,
    stopping: AtomicBool,
}

/// Cheap to clone.
#[derive(Clone)]
pub(super) struct View(Arc<Inner>);

impl View {
    pub(super) fn new(parts: ViewParts) -> Self {
        let mut registry = Registry::default();
        parts.metrics.register(&mut registry);
        let inner = Inner { parts, registry, started_unix_ms: unix_ms(), stopping: AtomicBool::new(false) };
        Self(Arc::new(inner))
    }

    /// From now on not ready.
    pub(super) fn stopping(&self) {
        self.0.stopping.store(true, Ordering::Relaxed);
        self.0.parts.changes.send_modify(|count| *count += 1);
    }

    fn recorders(&self) -> [&Arc<Recorder>; 2] {
        [self.0.parts.pulls.recorder(), self.0.parts.runtime.recorder()]
    }

    /// The first actor that does not answer, if any.
    pub(super) async fn stuck(&self) -> Option<&'static str> {
        let (pulls, runtime) = (&self.0.parts.pulls, &self.0.parts.runtime);
        // A full mailbox is busy, not stuck: what is in it is being worked on, or its own check fails.
        let answers = |outcome: Result<Result<_, MailboxError>, _>| {
            !matches!(outcome, Err(_) | Ok(Err(MailboxError::Closed(_))))
        };
        let pulls_answer =
            tokio::time::timeout(LIVE_PATIENCE, async { pulls.ask(LimitView {}).await.map(drop) });
        let runtime_answer =
            tokio::time::timeout(LIVE_PATIENCE, async { runtime.ask(RuntimeState {}).await.map(drop) });
        let (pulls_answer, runtime_answer) = tokio::join!(pulls_answer, runtime_answer);
        if !answers(pulls_answer) {
            return Some(pulls.recorder().name());
        }
        (!answers(runtime_answer)).then(|| runtime.recorder().name())
    }

    async fn state_of(&self, name: &str) -> Option<Result<String, ViewError>> {
        let parts = &self.0.parts;
        if name == parts.pulls.recorder().name() {
            return Some(asked(parts.pulls.ask(Inspected {})).await);
        }
        if name == parts.runtime.recorder().name() {
            return Some(asked(parts.runtime.ask(RuntimeState {})).await);
        }
        None
    }

    fn not_ready(&self) -> Vec<(&'static str, String)> {
        let mut reasons = Vec::new();
        if self.0.stopping.load(Ordering::Relaxed) {
            reasons.push(("agent", "the agent is stopping".to_owned()));
        }
        match &*self.0.parts.health.borrow() {
            Health::Up { .. } => {}
            Health::Unknown => {
                reasons.push(("runtime", "the container runtime has not answered yet".to_owned()))
            }
            Health::Down { reason, .. } => reasons.push(("runtime", reason.clone())),
        }
        if self.0.parts.metrics.store_durable.get() == 0 {
            let error = self.0.parts.store.stats().last_error.unwrap_or_default();
            reasons.push(("state", format!("the state cannot be written: {error}")));
        }
        reasons
    }
}

/// Bounds a question to an actor.
async fn asked<T>(question: impl Future<Output = Result<T, MailboxError>>) -> Result<T, ViewError> {
    match tokio::time::timeout(PATIENCE, question).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(MailboxError::Full(actor))) => Err(ViewError::Busy(format!("the mailbox of {actor} is full"))),
        Ok(Err(error @ MailboxError::Closed(_))) => Err(ViewError::Unavailable(error.to_string())),
        Err(_) => Err(ViewError::Unavailable(format!("the actor did not answer within {PATIENCE:?}"))),
    }
}

impl AgentView for View {
    async fn version(&self) -> pb::GetVersionResponse {
        let settings = self.0.parts.loaded.borrow().settings.clone();
        let (runtime_name, runtime_version) = match &*self.0.parts.health.borrow() {
            Health::Up { info, .. } => (info.name.clone(), info.version.clone()),
            _ => Default::default(),
        };
        let reasons = self.not_ready();
        pb::GetVersionResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            node_name: settings.agent.node_name.clone(),
            instance_id: self.0.parts.instance.clone(),
            started_unix_ms: self.0.started_unix_ms,
            runtime_name,
            runtime_version,
            runtime_endpoint: settings.cri.runtime_endpoint.to_string(),
            ready: reasons.is_empty(),
            not_ready_reasons: reasons.into_iter().map(|(_, reason)| reason).collect(),
        }
    }

    async fn actors(&self) -> Vec<pb::Actor> {
        self.recorders().into_iter().map(|recorder| recorder.overview()).collect()
    }

    async fn actor(&self, name: &str) -> Option<pb::Actor> {
        let recorder = self.recorders().into_iter().find(|recorder| recorder.name() == name)?;
        let state = self.state_of(name).await?;
        let mut actor = recorder.detail();
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
        self.recorders().into_iter().map(|recorder| recorder.name().to_owned()).collect()
    }

    async fn pulls(&self, max_queued: u32) -> Result<pb::PullList, ViewError> {
        asked(self.0.parts.pulls.ask(ListPulls { max_queued: max_queued as usize })).await
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.0.parts.changes.subscribe()
    }

    async fn limit(&self) -> Result<pb::Limit, ViewError> {
        asked(self.0.parts.pulls.ask(LimitView {})).await
    }

    async fn set_limit(&self, limit: Option<u32>) -> Result<pb::Limit, ViewError> {
        /// As for `pulls.max_parallel_image_pulls`.
        const MOST: u32 = 10_000;
        if let Some(limit) = limit.filter(|limit| *limit > MOST) {
            return Err(ViewError::Invalid(format!(
                "{limit} is no sensible limit: use 0 for none, or 1 to {MOST}"
            )));
        }
        asked(self.0.parts.pulls.ask(SetLimit { limit })).await
    }

    async fn storage(&self) -> Result<pb::Storage, ViewError> {
        let store = self.0.parts.store.clone();
        let stats = tokio::task::spawn_blocking(move || store.stats()).await;
        let stats =
            stats.map_err(|error| ViewError::Unavailable(format!("the store did not answer: {error}")))?;
        let shown = |path: Option<std::path::PathBuf>| {
            path.map(|path| path.display().to_string()).unwrap_or_default()
        };
        Ok(pb::Storage {
            backend: stats.backend,
            path: shown(stats.path),
            schema_version: stats.schema_version,
            size_bytes: stats.size_bytes,
            last_error: stats.last_error.unwrap_or_default(),
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

    async fn livez(&self) -> Vec<Check> {
        let stuck = self.stuck().await;
        let check = |recorder: &Arc<Recorder>| {
            let ok = stuck != Some(recorder.name());
            let message = if ok { "answers" } else { "does not answer" };
            Check { name: recorder.name().into(), ok, message: message.into(), since_unix_ms: 0 }
        };
        self.recorders().into_iter().map(check).collect()
    }

    async fn readyz(&self) -> Vec<Check> {
        let reasons = self.not_ready();
        let since = match &*self.0.parts.health.borrow() {
            Health::Down { since_unix_ms, .. } => *since_unix_ms,
            _ => 0,
        };
        let check = |name: &'static str| match reasons.iter().find(|(of, _)| *of == name) {
            None => Check { name: name.into(), ok: true, message: "ok".into(), since_unix_ms: 0 },
            Some((_, reason)) => Check {
                name: name.into(),
                ok: false,
                message: reason.clone(),
                since_unix_ms: if name == "runtime" { since } else { 0 },
            },
        };
        ["agent", "runtime", "state"].map(check).into()
    }

    async fn metrics(&self) -> String {
        // A coordinator that does not answer must not hide the metrics that say so.
        let _ = asked(self.0.parts.pulls.ask(CountNow {})).await;
        let mut text = String::new();
        // Into a string, encoding cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.0.registry);
        text
    }
}
