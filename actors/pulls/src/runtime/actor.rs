//! The RuntimeClient: calls the runtime and watches its health.
//!
//! Owns: the probe timer, the progress readings, the deletions of leases; [`pulls`] has the tasks of running pulls. In:
//! messages from the PullCoordinator and the StatusReporter. Out: the runtime's answers, to the subscriber.

mod pulls;
mod report;
mod retained;

use std::{cell::Cell, collections::HashMap, rc::Rc, sync::Arc, time::Duration};

use actix::{ActorFutureExt as _, AsyncContext as _, Context, SpawnHandle, Supervised, fut::wrap_future};
use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use keelson_actor_system::{
    clock::Clock,
    durable::LoggedFailure,
    file_system::FileSystemReader,
    handlers,
    inspect::{Recorder, Status},
    supervise::Supervision,
    supervised,
};
use tokio::{
    sync::{Semaphore, watch},
    task::AbortHandle,
    time::Instant,
};

use super::{
    core::{Core, Effect, Event, Health},
    downloads::{DownloadTracker, RunningPull},
    images::ImageCache,
    messages::{CallEnded, RuntimeCommand, RuntimeEvent, RuntimeState, Subscribe, Subscriber},
    types::{PROBES, ProbeFailure, Progress, Readings, Runtime, RuntimeInfo},
};
use crate::{
    metrics::Metrics,
    request::{PullCall, PullId},
};

/// Maximum number of concurrent presence checks: a burst of ten thousand callers must not become a burst of ten
/// thousand calls.
const PRESENCE_CHECKS: usize = 16;
/// Minimum age of a pull before its progress is read: most small images are done by then.
const PROGRESS_AFTER: Duration = Duration::from_millis(1500);
pub struct RuntimeClientParts {
    /// containerd, CRI-O, or another agent.
    pub runtime: Arc<dyn Runtime>,
    pub clock: Clock,
    pub file_systems: Arc<dyn FileSystemReader>,
    pub metrics: Metrics,
    /// How often the progress of running pulls is read (`pulls.progress_interval`).
    pub progress_interval: watch::Receiver<Duration>,
    /// Result of the last probe, for readiness and the page.
    pub health: watch::Sender<Health>,
    pub recorder: Arc<Recorder>,
}

/// Its state does not survive a restart: the subscriber asks again.
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
    images: ImageCache,
    is_reading_image_fs: bool,
    image_fs_failure: LoggedFailure,
    downloads: DownloadTracker,
}

struct Running {
    task: AbortHandle,
    /// Whether the subscriber is notified of its end.
    wanted: Rc<Cell<bool>>,
    lease: Option<String>,
    since: Instant,
}

impl RuntimeClient {
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
            is_reading_image_fs: false,
            image_fs_failure: LoggedFailure::default(),
            downloads: DownloadTracker::default(),
        }
    }

    fn publish(&self, event: RuntimeEvent) {
        if let Some(subscriber) = &self.subscriber {
            subscriber.send(event);
        }
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

    /// Probes when a connection has closed, at most as often as an unavailable runtime is probed.
    fn watch_connection(&mut self, ctx: &mut Context<Self>) {
        let closed = self.runtime.connection_closed();
        let closed = async move {
            closed.await;
            tokio::time::sleep(PROBES.first).await;
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
                self.recorder().status(Status::Running, text.clone());
                self.recorder().event(text);
            }
            Health::Down { reason, .. } => {
                self.images.outdate();
                self.metrics.runtime_up.set(0);
                tracing::warn!(reason, "container runtime down");
                self.recorder().status(Status::Running, format!("no runtime: {reason}"));
                self.recorder().error(reason.clone());
            }
            Health::Unknown => {}
        }
        // The coordinator knows the runtime before anyone is told that it is up, and before the pulls that this admits.
        self.publish_state();
        self.health.send_replace(health);
    }

    fn publish_state(&self) {
        let state = match self.core.health() {
            Health::Unknown => return,
            Health::Up { info, .. } => Ok(info.capabilities),
            Health::Down { reason, .. } => Err(reason.clone()),
        };
        self.publish(RuntimeEvent::RuntimeChanged(state));
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
                Ok(read) => actor.publish_progress(&due, &read),
                Err(error) => tracing::debug!(%error, "no progress reading"),
            }
            actor.read_progress(ctx);
        }));
    }

    /// The pulls to read now, oldest first.
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

    fn publish_progress(&mut self, due: &[RunningPull], read: &Readings) {
        let downloads = self.downloads.observe(due, read, self.clock.now().mono);
        for (pull, download) in due.iter().zip(downloads) {
            if let Some(reading) = read.pulls.get(&pull.lease) {
                let progress = Progress { download, ..reading.progress };
                self.publish(RuntimeEvent::PullProgress { pull: pull.key.0, progress });
            }
        }
    }

    fn reload(&mut self, ctx: &mut Context<Self>) {
        self.probe_after(Duration::ZERO, ctx);
        self.watch_connection(ctx);
        self.read_progress(ctx);
    }
}

supervised!(RuntimeClient);

impl Supervised for RuntimeClient {
    fn restarting(&mut self, _: &mut Context<Self>) {
        self.supervision.restarting();
        self.core = Core::default();
        self.probe = None;
        self.is_reading_image_fs = false;
        self.image_fs_failure.clear();
        // Each task's guard reports to the subscriber that its pull is lost.
        for (_, running) in self.running.drain() {
            running.task.abort();
        }
    }
}

impl RuntimeClient {
    fn command(&mut self, command: RuntimeCommand, ctx: &mut Context<Self>) {
        match command {
            RuntimeCommand::Pull { pull, attempt, request, waited, present } => {
                self.pull(pull, attempt, request, waited, present, ctx);
            }
            RuntimeCommand::CancelPull { pull, attempt } => self.forget(pull, attempt),
            RuntimeCommand::CancelAll => {
                let all: Vec<(PullId, u32)> = self.running.keys().copied().collect();
                for (pull, attempt) in all {
                    self.forget(pull, attempt);
                }
            }
            RuntimeCommand::CheckPresent { pull, call } => self.check_present(pull, call),
            RuntimeCommand::DropLease { lease, collect } => self.drop_lease(lease, collect),
            RuntimeCommand::ReapLeases(keep) => self.reap_leases(keep),
            RuntimeCommand::LeaveLeases => self.runtime.leave_leases(),
            RuntimeCommand::MeasureLease { lease, until } => self.measure_lease(lease, until),
            RuntimeCommand::CheckImageFs => self.check_image_fs(ctx),
            RuntimeCommand::RenewLeases(leases) => self.renew_leases(leases),
            RuntimeCommand::Probe => self.probe_after(Duration::ZERO, ctx),
        }
    }

    fn check_present(&self, pull: PullId, call: Arc<PullCall>) {
        let Some(subscriber) = self.subscriber.clone() else { return };
        let (runtime, turns) = (self.runtime.clone(), self.presence.clone());
        actix::spawn(async move {
            let _turn = turns.acquire_owned().await;
            let present = runtime.image_size(call).await.ok().map(|size| size.is_some());
            subscriber.send(RuntimeEvent::PullPresence { pull, present });
        });
    }

    fn drop_lease(&mut self, lease: String, collect: bool) {
        let deletion = self.runtime.drop_lease(lease.clone(), collect);
        let (deleted, notes, subscriber) = (lease.clone(), self.recorder().clone(), self.subscriber.clone());
        let dropping = async move {
            if let Err(error) = deletion.await {
                notes.error(format!("cannot delete lease {deleted}: {error}"));
                subscriber.inspect(|subscriber| subscriber.send(RuntimeEvent::LeasesLeft));
            }
        };
        let dropping = dropping.boxed().shared();
        self.dropping.retain(|_, dropping| dropping.peek().is_none());
        self.dropping.insert(lease, dropping.clone());
        actix::spawn(dropping);
    }

    fn reap_leases(&self, keep: Vec<String>) {
        let (recorder, subscriber) = (self.recorder().clone(), self.subscriber.clone());
        let reaping = self.runtime.reap_leases(keep.into_iter().collect());
        actix::spawn(async move {
            match reaping.await {
                Ok(reaped) if reaped.is_empty() => {}
                Ok(reaped) => {
                    tracing::info!(leases = ?reaped, "orphan leases deleted");
                    recorder.event(format!("orphan leases deleted: {}", reaped.join(", ")));
                }
                Err(error) => {
                    recorder.error(format!("cannot delete orphan leases: {error}"));
                    subscriber.inspect(|subscriber| subscriber.send(RuntimeEvent::LeasesLeft));
                }
            }
        });
    }

    fn inspect(&self) -> String {
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

handlers! { RuntimeClient, self, ctx;
    RuntimeCommand(command) => self.command(command, ctx),
    Subscribe(message) => {
        self.subscriber = Some(message.to);
        self.publish_state();
    },
    CallEnded(message) => self.call_ended(message, ctx),
    RuntimeState(_) => self.inspect(),
}
