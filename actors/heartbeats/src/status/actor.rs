//! The StatusReporter: performs the effects of the status core.
//!
//! Owns: the core, the timer, the requests and readings under way; [`saving`] has the writes to the store. In:
//! messages. Out: requests to the API server, one at a time; records. When the store fails it continues and reports
//! that; the cost is one extra report after a restart.

mod saving;

use std::{future::Future, path::PathBuf, sync::Arc, time::Duration};

use actix::{
    ActorFutureExt as _, AsyncContext as _, Context, Handler, ResponseActFuture, SpawnHandle, Supervised,
    fut::wrap_future,
};
use futures_util::future::{BoxFuture, join3};
use k8s_openapi::api::core::v1::Node;
use keelson_actor_system::{
    clock::{Clock, Now},
    cluster::{ApiError, ApiErrorKind, JobHealth, NodeApi},
    durable::LoggedFailure,
    handlers,
    inspect::{Recorder, Status},
    reports::EndpointsView,
    supervise::Supervision,
    supervised,
    timer::Timer,
};
use keelson_storage::{StateStore, StoreState};
use tokio::{
    sync::{oneshot, watch},
    time::{sleep, timeout},
};

use super::{
    compute::conditions::takes_pods,
    core::{Collected, Core, Counted, Effect, Event},
    external::ConditionRefused,
    kinds::DISK_PRESSURE,
    messages::{
        ClearCondition, ConditionChanged, CountNow, EndReports, ListConditions, NodeChanged, ReportNow,
        SetCondition, StatusState,
    },
    metrics::StatusMetrics,
    policy::{Role, StatusPolicy},
    sources::{PullsSource, RuntimeSource},
    state::Unsaved,
};
use crate::{
    host::{Host, HostQuery, HostReadings},
    lease::Contention,
};

/// Milliseconds since the Unix epoch: [`keelson_actor_system::clock::unix_ms`] outside tests.
pub type WallClock = fn() -> i64;

const RUNTIME_TIMEOUT: Duration = Duration::from_secs(5);
const PULLS_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum wait for the host's answer, which is never late.
const HOST_TIMEOUT: Duration = Duration::from_secs(10);
/// For a request that the API's implementation does not end by itself.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(150);
/// Interval and duration of the queries, after the start, of a runtime that does not take pods yet (kubelet).
const FIRST_READY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(120));

pub struct StatusReporterParts {
    pub api: Arc<dyn NodeApi>,
    pub host: Arc<dyn Host>,
    /// Also notifies at once when the runtime comes up or goes down.
    pub runtime: Arc<dyn RuntimeSource>,
    pub pulls: Arc<dyn PullsSource>,
    pub endpoints: watch::Receiver<EndpointsView>,
    pub contention: watch::Receiver<Contention>,
    pub store: Arc<dyn StateStore>,
    /// For plans.
    pub clock: Clock,
    /// For the Node.
    pub wall: WallClock,
    pub policy: StatusPolicy,
    pub metrics: StatusMetrics,
    /// For readiness and the debug API.
    pub health: watch::Sender<JobHealth>,
    /// Incremented with each visible change.
    pub changes: watch::Sender<u64>,
    pub recorder: Arc<Recorder>,
}

pub struct StatusReporter {
    core: Core,
    policy: StatusPolicy,
    api: Arc<dyn NodeApi>,
    host: Arc<dyn Host>,
    runtime: Arc<dyn RuntimeSource>,
    pulls: Arc<dyn PullsSource>,
    endpoints: watch::Receiver<EndpointsView>,
    contention: watch::Receiver<Contention>,
    store: Arc<dyn StateStore>,
    clock: Clock,
    wall: WallClock,
    metrics: StatusMetrics,
    health: watch::Sender<JobHealth>,
    changes: watch::Sender<u64>,
    supervision: Supervision,
    timer: Timer,
    unsaved: Unsaved,
    logged: LoggedFailure,
    /// Callers that wait until it is on disk.
    waiting: Vec<oneshot::Sender<()>>,
    saving: bool,
    save_again: Option<SpawnHandle>,
    /// The store could not be read at the start.
    unread: bool,
    summary: String,
    /// The status of the condition DiskPressure that was last reported to the pulls.
    disk_pressure: Option<bool>,
    /// The last event of the watch, kept across a restart of the actor.
    node: Option<Option<Arc<Node>>>,
    /// Callers of [`EndReports`].
    ending: Vec<oneshot::Sender<Vec<String>>>,
    /// No pass begins any more.
    has_ended: bool,
}

impl StatusReporter {
    #[must_use]
    pub fn new(parts: StatusReporterParts) -> Self {
        Self {
            core: Core::new(parts.policy.clone()),
            policy: parts.policy,
            api: parts.api,
            host: parts.host,
            runtime: parts.runtime,
            pulls: parts.pulls,
            endpoints: parts.endpoints,
            contention: parts.contention,
            store: parts.store,
            clock: parts.clock,
            wall: parts.wall,
            metrics: parts.metrics,
            health: parts.health,
            changes: parts.changes,
            supervision: Supervision::new(parts.recorder),
            timer: Timer::default(),
            unsaved: Unsaved::default(),
            logged: LoggedFailure::default(),
            waiting: Vec::new(),
            saving: false,
            save_again: None,
            unread: false,
            summary: String::new(),
            disk_pressure: None,
            node: None,
            ending: Vec::new(),
            has_ended: false,
        }
    }

    fn now(&self) -> Now {
        Now { unix_ms: (self.wall)(), ..self.clock.now() }
    }

    fn step(&mut self, event: Event, ctx: &mut Context<Self>) {
        if self.has_ended && !self.core.is_in_pass() {
            return;
        }
        let effects = self.core.handle(event, self.now(), rand::random());
        let visible = !effects.is_empty();
        for effect in effects {
            self.act(effect, ctx);
        }
        self.arm(ctx);
        self.answer_ended();
        self.metrics.age(self.core.report_age(self.now()));
        self.metrics.contested.set(i64::try_from(self.core.contested_conditions()).unwrap_or(i64::MAX));
        let summary = self.core.summary();
        if self.summary != summary {
            self.recorder().status(Status::Running, summary.clone());
            self.summary = summary;
        }
        if visible {
            self.changes.send_modify(|count| *count += 1);
        }
    }

    fn act(&mut self, effect: Effect, ctx: &mut Context<Self>) {
        let (api, name) = (self.api.clone(), self.policy.node_name.clone());
        match effect {
            Effect::Collect { image_fs } => {
                let collect = self.collect(image_fs);
                Self::then(collect, |collected| Event::Collected(Box::new(collected)), ctx);
            }
            Effect::Get => Self::then(in_time(&api, api.get_node(&name)), Event::Got, ctx),
            Effect::Create(node) => Self::then(in_time(&api, api.create_node(node)), Event::Created, ctx),
            Effect::PatchNode(patch) => {
                Self::then(in_time(&api, api.patch_node(&name, patch)), Event::Repaired, ctx);
            }
            Effect::PatchStatus(patch) => {
                Self::then(in_time(&api, api.patch_status(&name, patch)), Event::Patched, ctx);
            }
            Effect::CloseConnections => api.close_connections(),
            Effect::Save(write) => self.save(write, ctx),
            Effect::Health(health) => drop(self.health.send_replace(health)),
            Effect::Computed(conditions) => {
                self.metrics.computations.inc();
                self.metrics.show(&conditions);
                self.report_disk_pressure(&conditions);
            }
            Effect::Count(Counted::Sent) => self.metrics.report("sent"),
            Effect::Count(Counted::Failed) => self.metrics.report("failed"),
            Effect::Count(Counted::Registered) => self.metrics.report("registered"),
            Effect::Count(Counted::ClockStep) => drop(self.metrics.clock_steps.inc()),
            Effect::Count(Counted::ForeignWrite) => drop(self.metrics.foreign_writes.inc()),
            Effect::Note { warn, text } => self.note(warn, text),
        }
    }

    /// A companion does not compute DiskPressure: its kubelet does, and the watch of the Node reports it.
    fn report_disk_pressure(&mut self, conditions: &[(&'static str, String)]) {
        let Some((_, status)) = conditions.iter().find(|(kind, _)| *kind == DISK_PRESSURE) else { return };
        let is_true = status == "True";
        if self.disk_pressure != Some(is_true) {
            self.disk_pressure = Some(is_true);
            self.pulls.disk_pressure(is_true);
        }
    }

    /// Waits for a future, and continues with the event made of its output.
    fn then<T: 'static>(
        wait: impl Future<Output = T> + 'static,
        event: impl FnOnce(T) -> Event + 'static,
        ctx: &mut Context<Self>,
    ) {
        ctx.spawn(wrap_future::<_, Self>(wait).map(|result, actor, ctx| actor.step(event(result), ctx)));
    }

    fn collect(&self, image_fs: Option<PathBuf>) -> impl Future<Output = Collected> + use<> {
        let node = self.policy.role == Role::Node;
        let (facts, since_boot) = (self.host.facts(), self.host.since_boot());
        let ask = HostQuery { node_fs: self.policy.root_dir.clone(), image_fs };
        let readings = node.then(|| self.host.read(ask));
        let runtime = node.then(|| self.runtime.report());
        let pulls_view = self.pulls.pulls_view();
        let source = self.runtime.clone();
        let endpoints = self.endpoints.borrow().clone();
        let store = self.store.subscribe().borrow().clone();
        let readings = async move {
            let Some(readings) = readings else { return HostReadings::default() };
            timeout(HOST_TIMEOUT, readings).await.unwrap_or_else(|_| HostReadings {
                errors: vec![format!("the host was not read within {HOST_TIMEOUT:?}")],
                ..HostReadings::default()
            })
        };
        let runtime = async move {
            let Some(report) = runtime else { return Err(String::new()) };
            let late = || Err(format!("no answer within {RUNTIME_TIMEOUT:?}"));
            timeout(RUNTIME_TIMEOUT, report).await.unwrap_or_else(|_| late())
        };
        let pulls_view = async move {
            let late = || Err(format!("no answer within {PULLS_TIMEOUT:?}"));
            timeout(PULLS_TIMEOUT, pulls_view).await.unwrap_or_else(|_| late())
        };
        async move {
            let (readings, runtime, pulls_view) = join3(readings, runtime, pulls_view).await;
            let runtime_down = source.down_reason();
            Collected { facts, readings, since_boot, runtime, runtime_down, pulls_view, endpoints, store }
        }
    }

    fn answer_ended(&mut self) {
        if self.has_ended && !self.core.is_in_pass() {
            for caller in self.ending.drain(..) {
                // The caller may have given up.
                let _ = caller.send(self.core.removable_conditions());
            }
        }
    }

    fn arm(&mut self, ctx: &mut Context<Self>) {
        if self.has_ended {
            return;
        }
        self.timer.set(self.core.due(), &self.clock, ctx, |actor, ctx| {
            actor.timer.clear();
            actor.step(Event::Due, ctx);
        });
    }

    fn watch_runtime(&mut self, ctx: &mut Context<Self>) {
        ctx.spawn(wrap_future::<_, Self>(self.runtime.changed()).map(|changed, actor, ctx| {
            // Otherwise the RuntimeClient is gone, and with it the process.
            if changed {
                // Watched again first, so that no change during the step is missed.
                actor.watch_runtime(ctx);
                actor.step(Event::Changed, ctx);
            }
        }));
    }

    fn watch_contention(&mut self, before: Contention, ctx: &mut Context<Self>) {
        let mut contention = self.contention.clone();
        let changed = async move {
            let changed = contention.wait_for(|now| *now != before).await;
            changed.ok().map(|now| *now)
        };
        ctx.spawn(wrap_future::<_, Self>(changed).map(move |changed, actor, ctx| match changed {
            Some(now) => {
                actor.watch_contention(now, ctx);
                actor.step(Event::Contention(now), ctx);
            }
            // The LeaseRenewer is gone, and a status does not wait for one.
            None if before == Contention::Undecided => {
                actor.step(Event::Contention(Contention::Uncontested), ctx);
            }
            None => {}
        }));
    }

    fn watch_store(&mut self, ctx: &mut Context<Self>) {
        let mut state = self.store.subscribe();
        let shown = |state: &StoreState| (state.is_durable(), state.is_open());
        let before = shown(&state.borrow_and_update());
        let changed = async move { state.wait_for(|state| shown(state) != before).await.is_ok() };
        ctx.spawn(wrap_future::<_, Self>(changed).map(|changed, actor, ctx| {
            // A store that never closes has no state changes to report.
            if changed {
                actor.watch_store(ctx);
                if actor.unread && actor.store.subscribe().borrow().is_open() {
                    actor.save_next(ctx);
                }
                actor.step(Event::Changed, ctx);
            }
        }));
    }

    /// The status of a new node is reported as soon as its runtime takes pods.
    fn watch_first_ready(&mut self, ctx: &mut Context<Self>) {
        if self.policy.role != Role::Node {
            return;
        }
        let runtime = self.runtime.clone();
        let ready = async move {
            loop {
                let report = timeout(RUNTIME_TIMEOUT, runtime.report()).await;
                if matches!(report, Ok(Ok(report)) if takes_pods(&report)) {
                    return;
                }
                sleep(FIRST_READY.0).await;
            }
        };
        let ready = async move { timeout(FIRST_READY.1, ready).await.is_ok() };
        ctx.spawn(wrap_future::<_, Self>(ready).map(|ready, actor, ctx| {
            if ready {
                actor.step(Event::RuntimeReady, ctx);
            }
        }));
    }
}

/// Bounds the wait for a request, whatever the implementation does.
fn in_time<T>(
    api: &Arc<dyn NodeApi>,
    request: BoxFuture<'static, Result<T, ApiError>>,
) -> impl Future<Output = Result<T, ApiError>> + use<T> {
    let server = api.server();
    async move {
        timeout(REQUEST_TIMEOUT, request).await.unwrap_or_else(|_| {
            let reason = format!("no answer within {REQUEST_TIMEOUT:?}");
            Err(ApiError { server, kind: ApiErrorKind::Timeout, reason })
        })
    }
}

supervised!(StatusReporter);

impl Supervised for StatusReporter {
    fn restarting(&mut self, _: &mut Context<Self>) {
        self.supervision.restarting();
        self.core = Core::new(self.policy.clone());
        self.ending.clear();
        self.timer.clear();
        (self.saving, self.save_again) = (false, None);
        self.summary.clear();
    }
}

handlers! { StatusReporter, self, ctx;
    NodeChanged(message) => {
        self.node = Some(message.node.clone());
        self.step(Event::Node(message.node), ctx);
    },
    ConditionChanged(_) => self.step(Event::Changed, ctx),
    ReportNow(_) => self.step(Event::ReportNow, ctx),
    ListConditions(_) => self.core.list_conditions(self.now()),
    StatusState(_) => self.core.view(self.now()).to_string(),
    CountNow(_) => self.metrics.age(self.core.report_age(self.now())),
}

impl Handler<SetCondition> for StatusReporter {
    type Result = ResponseActFuture<Self, Result<bool, ConditionRefused>>;

    fn handle(&mut self, message: SetCondition, ctx: &mut Context<Self>) -> Self::Result {
        let _handling = self.recorder().handling(&message);
        let now = self.now();
        let saved = match self.core.set_condition(message.condition, now) {
            Ok(write) => Ok(write.map(|write| self.save_condition(write, ctx))),
            Err(refused) => Err(refused),
        };
        Box::pin(wrap_future(answer(saved)))
    }
}

impl Handler<ClearCondition> for StatusReporter {
    type Result = ResponseActFuture<Self, Result<(), ConditionRefused>>;

    fn handle(&mut self, message: ClearCondition, ctx: &mut Context<Self>) -> Self::Result {
        let _handling = self.recorder().handling(&message);
        let now = self.now();
        let saved = match self.core.clear_condition(&message.kind, now) {
            Ok(write) => Ok(Some(self.save_condition(write, ctx))),
            Err(refused) => Err(refused),
        };
        Box::pin(wrap_future(async move { answer(saved).await.map(drop) }))
    }
}

impl Handler<EndReports> for StatusReporter {
    type Result = ResponseActFuture<Self, Vec<String>>;

    fn handle(&mut self, message: EndReports, _: &mut Context<Self>) -> Self::Result {
        let _handling = self.recorder().handling(&message);
        let (caller, answer) = oneshot::channel();
        self.ending.push(caller);
        self.has_ended = true;
        self.answer_ended();
        // Without an answer the actor restarts, and reports nothing.
        Box::pin(wrap_future(async move { answer.await.unwrap_or_default() }))
    }
}

/// Waits until the change, if any, is saved; returns whether there was one.
async fn answer(
    saved: Result<Option<oneshot::Receiver<()>>, ConditionRefused>,
) -> Result<bool, ConditionRefused> {
    let Some(saved) = saved? else { return Ok(false) };
    // Without an answer the actor restarts, and writes first.
    let _ = saved.await;
    Ok(true)
}
