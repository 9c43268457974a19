//! The RuntimeClient: makes the calls and watches the runtime's health.
//!
//! Owns: the probe timer, the progress readings, the deletions of leases; [`pulls`] has the tasks of running pulls. In:
//! verbs from the PullCoordinator and the StatusReporter. Out: what the runtime said, to the actor that subscribed.

mod pulls;

use std::{cell::Cell, collections::HashMap, fmt, rc::Rc, sync::Arc, time::Duration};

use actix::{
    Actor, ActorFutureExt as _, AsyncContext as _, Context, Handler, SpawnHandle, Supervised,
    fut::wrap_future,
};
use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use keelson_actor_system::{
    clock::Clock, file_system::FileSystemReader, inspect::Recorder, supervise::Supervision,
};
use tokio::{
    sync::{Semaphore, watch},
    task::AbortHandle,
    time::Instant,
};

use super::{
    core::{Core, Effect, Event, Health},
    downloads::{DownloadTracker, RunningPull},
    messages::{
        CheckPresent, DropLease, Probe, PullPresence, PullProgress, ReapLeases, RuntimeChanged, RuntimeState,
    },
    report::ImageCache,
    retained::ImageFsCheck,
    subscriber::{Subscribe, Subscriber},
    types::{PROBE_BACKOFF, ProbeFailure, Progress, Readings, Runtime, RuntimeInfo},
};
use crate::{metrics::Metrics, request::PullId};

/// Presence checks that run at once; the others wait their turn, so that a burst of ten thousand
/// callers does not become a burst of ten thousand calls.
const PRESENCE_CHECKS: usize = 16;
/// A pull is not looked at before it is this old: most small images are done by then, and nobody
/// has had the time to look.
const PROGRESS_AFTER: Duration = Duration::from_millis(1500);
/// What the RuntimeClient needs.
pub struct RuntimeClientParts {
    /// containerd, CRI-O, or another agent.
    pub runtime: Arc<dyn Runtime>,
    /// Wall and monotonic time.
    pub clock: Clock,
    /// Who reads the size of the image file system.
    pub file_systems: Arc<dyn FileSystemReader>,
    /// Families that are shared with the other actors.
    pub metrics: Metrics,
    /// How often the progress of running pulls is read (`pulls.progress_interval`).
    pub progress_interval: watch::Receiver<Duration>,
    /// What the last probe said, for readiness and the page.
    pub health: watch::Sender<Health>,
    /// Events, errors and latencies, for `keelson actors`.
    pub recorder: Arc<Recorder>,
}

/// The actor that makes the calls. Its state does not survive a restart: the subscriber asks again.
pub struct RuntimeClient {
    core: Core,
    runtime: Arc<dyn Runtime>,
    file_systems: Arc<dyn FileSystemReader>,
    clock: Clock,
    metrics: Metrics,
    interval: watch::Receiver<Duration>,
    health: watch::Sender<Health>,
    supervision: Supervision,
    subscriber: Option<Arc<dyn Subscriber>>,
    running: HashMap<(PullId, u32), Running>,
    /// Deletions of leases that may still be under way.
    dropping: HashMap<String, Shared<BoxFuture<'static, ()>>>,
    presence: Arc<Semaphore>,
    probe: Option<SpawnHandle>,
    pub(super) images: ImageCache,
    pub(super) image_fs_check: ImageFsCheck,
    downloads: DownloadTracker,
}

struct Running {
    task: AbortHandle,
    /// Whether the subscriber wants to hear how it ends.
    wanted: Rc<Cell<bool>>,
    lease: Option<String>,
    since: Instant,
}

impl fmt::Debug for RuntimeClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RuntimeClient").field("endpoint", &self.runtime.endpoint()).finish_non_exhaustive()
    }
}

impl RuntimeClient {
    /// An actor that has not started yet.
    #[must_use]
    pub fn new(parts: RuntimeClientParts) -> Self {
        Self {
            core: Core::default(),
            runtime: parts.runtime,
            file_systems: parts.file_systems,
            clock: parts.clock,
            metrics: parts.metrics,
            interval: parts.progress_interval,
            health: parts.health,
            supervision: Supervision::new(parts.recorder),
            subscriber: None,
            running: HashMap::new(),
            dropping: HashMap::new(),
            presence: Arc::new(Semaphore::new(PRESENCE_CHECKS)),
            probe: None,
            images: ImageCache::default(),
            image_fs_check: ImageFsCheck::default(),
            downloads: DownloadTracker::default(),
        }
    }

    pub(super) fn runtime(&self) -> &Arc<dyn Runtime> {
        &self.runtime
    }

    pub(super) fn file_systems(&self) -> &Arc<dyn FileSystemReader> {
        &self.file_systems
    }

    pub(super) fn subscriber(&self) -> Option<&Arc<dyn Subscriber>> {
        self.subscriber.as_ref()
    }

    pub(super) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    pub(super) fn health_changes(&self) -> watch::Receiver<Health> {
        self.health.subscribe()
    }

    pub(super) fn recorder(&self) -> &Arc<Recorder> {
        self.supervision.recorder()
    }

    fn perform(&mut self, effects: Vec<Effect>, ctx: &mut Context<Self>) {
        for effect in effects {
            match effect {
                Effect::ProbeAfter(pause) => self.probe_after(pause, ctx),
                Effect::Announce => self.announce(),
                Effect::Warn(reason) => {
                    tracing::warn!(reason, "container runtime did not answer a probe; it stays in use");
                    self.recorder().error(format!("stays in use: {reason}"));
                }
            }
        }
    }

    fn probe_after(&mut self, pause: Duration, ctx: &mut Context<Self>) {
        if let Some(planned) = self.probe.take() {
            ctx.cancel_future(planned);
        }
        let runtime = self.runtime.clone();
        let probe = async move {
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
            runtime.probe().await
        };
        let then = |result: Result<RuntimeInfo, ProbeFailure>, actor: &mut Self, ctx: &mut Context<Self>| {
            actor.probe = None;
            let effects = actor.core.handle(Event::Probed(result), actor.clock.now());
            actor.perform(effects, ctx);
        };
        self.probe = Some(ctx.spawn(wrap_future::<_, Self>(probe).map(then)));
    }

    /// Probes when a connection has closed, but no more often than a runtime that is away is probed.
    fn watch_connection(&mut self, ctx: &mut Context<Self>) {
        let closed = self.runtime.connection_closed();
        let closed = async move {
            closed.await;
            tokio::time::sleep(PROBE_BACKOFF.0).await;
        };
        ctx.spawn(wrap_future::<_, Self>(closed).map(|(), actor, ctx| {
            let effects = actor.core.handle(Event::ConnectionClosed, actor.clock.now());
            actor.perform(effects, ctx);
            actor.watch_connection(ctx);
        }));
    }

    fn announce(&mut self) {
        let health = self.core.health().clone();
        match &health {
            Health::Up { info, .. } => {
                self.metrics.runtime_up.set(1);
                let text = format!("{} {} serves at {}", info.name, info.version, self.runtime.endpoint());
                tracing::info!(runtime = info.name, version = info.version, "container runtime up");
                self.recorder().status(keelson_actor_system::inspect::Status::Running, text.clone());
                self.recorder().event(text);
            }
            Health::Down { reason, .. } => {
                self.images.outdate();
                self.metrics.runtime_up.set(0);
                tracing::warn!(reason, "container runtime down");
                self.recorder()
                    .status(keelson_actor_system::inspect::Status::Running, format!("no runtime: {reason}"));
                self.recorder().error(reason.clone());
            }
            Health::Unknown => {}
        }
        self.health.send_replace(health);
        self.tell_state();
    }

    fn tell_state(&self) {
        let state = match self.core.health() {
            Health::Unknown => return,
            Health::Up { info, .. } => Ok(info.capabilities),
            Health::Down { reason, .. } => Err(reason.clone()),
        };
        if let Some(subscriber) = &self.subscriber {
            subscriber.runtime_changed(RuntimeChanged { state });
        }
    }

    fn read_progress(&mut self, ctx: &mut Context<Self>) {
        let pause = *self.interval.borrow();
        let content = matches!(self.core.health(), Health::Up { info, .. } if info.capabilities.content);
        let due = if content { self.due() } else { Vec::new() };
        let runtime = self.runtime.clone();
        let read = async move {
            let read = if due.is_empty() {
                Ok(Readings::default())
            } else {
                let leases = due.iter().map(|pull| pull.lease.clone()).collect();
                runtime.progress(leases).await
            };
            tokio::time::sleep(pause).await;
            (due, read)
        };
        ctx.spawn(wrap_future::<_, Self>(read).map(|(due, read), actor, ctx| {
            match read {
                Ok(read) => actor.tell_progress(&due, &read),
                Err(error) => tracing::debug!(%error, "no progress reading"),
            }
            actor.read_progress(ctx);
        }));
    }

    /// The pulls to read now, those that started first at the front.
    fn due(&self) -> Vec<RunningPull> {
        let now_unix_ms = self.clock.now().unix_ms;
        let mut due: Vec<(Instant, RunningPull)> = self
            .running
            .iter()
            .filter(|(_, running)| running.since.elapsed() >= PROGRESS_AFTER)
            .filter_map(|(key, running)| {
                let age = i64::try_from(running.since.elapsed().as_millis()).unwrap_or(i64::MAX);
                let started_unix_ms = now_unix_ms.saturating_sub(age);
                let lease = running.lease.clone()?;
                Some((running.since, RunningPull { key: *key, lease, started_unix_ms }))
            })
            .collect();
        due.sort_by_key(|(since, pull)| (*since, pull.key));
        due.into_iter().map(|(_, pull)| pull).collect()
    }

    fn tell_progress(&mut self, due: &[RunningPull], read: &Readings) {
        let downloads = self.downloads.observe(due, read, self.clock.now().mono);
        let Some(subscriber) = &self.subscriber else { return };
        for (pull, download) in due.iter().zip(downloads) {
            if let Some(reading) = read.pulls.get(&pull.lease) {
                let progress = Progress { download, ..reading.progress };
                subscriber.pull_progress(PullProgress { pull: pull.key.0, progress });
            }
        }
    }

    fn reload(&mut self, ctx: &mut Context<Self>) {
        self.probe_after(Duration::ZERO, ctx);
        self.watch_connection(ctx);
        self.read_progress(ctx);
    }
}

impl Actor for RuntimeClient {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.supervision.resume(ctx, Self::reload);
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        self.recorder().status(keelson_actor_system::inspect::Status::Stopped, "");
    }
}

impl Supervised for RuntimeClient {
    fn restarting(&mut self, _: &mut Context<Self>) {
        self.supervision.restarting();
        self.core = Core::default();
        self.probe = None;
        self.image_fs_check = ImageFsCheck::default();
        // Each task's guard tells the subscriber that its pull is lost.
        for (_, running) in self.running.drain() {
            running.task.abort();
        }
    }
}

impl Handler<CheckPresent> for RuntimeClient {
    type Result = ();

    fn handle(&mut self, message: CheckPresent, _: &mut Context<Self>) {
        let _handling = self.recorder().handling::<CheckPresent>();
        let Some(subscriber) = self.subscriber.clone() else { return };
        let (runtime, turns) = (self.runtime.clone(), self.presence.clone());
        actix::spawn(async move {
            let _turn = turns.acquire_owned().await;
            let present = runtime.image_size(message.call).await.ok().map(|size| size.is_some());
            subscriber.pull_presence(PullPresence { pull: message.pull, present });
        });
    }
}

impl Handler<DropLease> for RuntimeClient {
    type Result = ();

    fn handle(&mut self, message: DropLease, _: &mut Context<Self>) {
        let _handling = self.recorder().handling::<DropLease>();
        let deletion = self.runtime.drop_lease(message.lease.clone(), message.collect);
        let (lease, notes) = (message.lease.clone(), self.recorder().clone());
        let dropping = async move {
            if let Err(error) = deletion.await {
                // It is reaped when the runtime is back, or expires.
                notes.error(format!("cannot delete lease {lease}: {error}"));
            }
        };
        let dropping = dropping.boxed().shared();
        self.dropping.retain(|_, dropping| dropping.peek().is_none());
        self.dropping.insert(message.lease, dropping.clone());
        actix::spawn(dropping);
    }
}

impl Handler<ReapLeases> for RuntimeClient {
    type Result = ();

    fn handle(&mut self, message: ReapLeases, _: &mut Context<Self>) {
        let recorder = self.recorder().clone();
        let _handling = recorder.handling::<ReapLeases>();
        let reaping = self.runtime.reap_leases(message.keep);
        actix::spawn(async move {
            match reaping.await {
                Ok(reaped) if reaped.is_empty() => {}
                Ok(reaped) => {
                    tracing::info!(leases = ?reaped, "orphan leases deleted");
                    recorder.event(format!("orphan leases deleted: {}", reaped.join(", ")));
                }
                Err(error) => recorder.error(format!("cannot list orphan leases: {error}")),
            }
        });
    }
}

impl Handler<Probe> for RuntimeClient {
    type Result = ();

    fn handle(&mut self, _: Probe, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<Probe>();
        self.probe_after(Duration::ZERO, ctx);
    }
}

keelson_actor_system::handles_restart!(RuntimeClient);

impl Handler<Subscribe> for RuntimeClient {
    type Result = ();

    fn handle(&mut self, message: Subscribe, _: &mut Context<Self>) {
        let _handling = self.recorder().handling::<Subscribe>();
        self.subscriber = Some(message.to);
        self.tell_state();
    }
}

/// Answer to [`RuntimeState`]: what the actor holds, as JSON for people.
impl Handler<RuntimeState> for RuntimeClient {
    type Result = String;

    fn handle(&mut self, _: RuntimeState, _: &mut Context<Self>) -> String {
        let _handling = self.recorder().handling::<RuntimeState>();
        let (health, runtime, reason, since) = match self.core.health() {
            Health::Unknown => ("unknown", None, None, None),
            Health::Up { info, since_unix_ms } => ("up", Some(info), None, Some(*since_unix_ms)),
            Health::Down { reason, since_unix_ms } => ("down", None, Some(reason), Some(*since_unix_ms)),
        };
        serde_json::json!({
            "endpoint": self.runtime.endpoint(),
            "health": health,
            "since_unix_ms": since,
            "reason": reason,
            "probe_error": self.core.degraded(),
            "runtime_name": runtime.map(|info| &info.name),
            "runtime_version": runtime.map(|info| &info.version),
            "pull_option": runtime.map(|info| info.capabilities.pull_option),
            "leases": runtime.map(|info| info.capabilities.leases),
            "content": runtime.map(|info| info.capabilities.content),
            "calls_in_flight": self.running.len(),
        })
        .to_string()
    }
}
