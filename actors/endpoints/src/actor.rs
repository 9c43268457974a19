//! The EndpointPublisher: performs what the core decides.
//!
//! Owns: the core, the one timer, the one write under way. In: verbs. Out: records, the [`EndpointsFeed`] that readers
//! follow, the view for the node's condition.
//!
//! [`EndpointsFeed`]: super::EndpointsFeed

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use actix::{
    Actor, ActorFutureExt as _, AsyncContext as _, Context, Handler, MessageResult, SpawnHandle, Supervised,
    fut::wrap_future,
};
use keelson_actor_system::{
    clock::Clock,
    durable::read_at_start,
    inspect::{Recorder, Status},
    reports::EndpointsView,
    supervise::{Supervision, chain},
};
use keelson_proto::endpoints as pb;
use keelson_storage::StateStore;
use tokio::{sync::watch, time::Instant};

use super::{
    Answer, CidrChanged, EndpointMetrics, EndpointsCount, ExplainService, Followed, History,
    InspectEndpoints, LaterRevision, ListServices, Marker, NodeChanged, Published, Resource, Seen,
    ServiceChanged, SliceChanged, SourceEvent, SourceHealthChanged, SourceKind,
    core::{Core, Counted, Disk, Effect, EndpointsPolicy, Event, Kept, Start, identity},
    record::{self, Loaded, Restored, Write},
};

/// What the EndpointPublisher needs.
pub struct EndpointPublisherParts {
    /// Where state and identity are kept.
    pub store: Arc<dyn StateStore>,
    /// What is remembered outside of the store. None: the store is trusted to be where it was left.
    pub marker: Option<Marker>,
    /// Time.
    pub clock: Clock,
    /// The settings it decides by.
    pub policy: EndpointsPolicy,
    /// What is counted.
    pub metrics: EndpointMetrics,
    /// Where readers find the newest state: the other end of [`super::EndpointsFeed::published`].
    pub published: watch::Sender<Option<Arc<Published>>>,
    /// What changed lately, of the same feed.
    pub history: Arc<History>,
    /// How the chore fares, for the node's condition.
    pub endpoints_view: watch::Sender<EndpointsView>,
    /// Raised by one with each change that people could see.
    pub changes: watch::Sender<u64>,
    /// The note-book.
    pub recorder: Arc<Recorder>,
}

/// The actor.
pub struct EndpointPublisher {
    /// None until the disk was read.
    core: Option<Core>,
    /// What a former self left behind.
    kept: Kept,
    policy: EndpointsPolicy,
    store: Arc<dyn StateStore>,
    /// Held by whoever uses the store: a write of a former self ends before its successor reads.
    store_turn: Arc<Mutex<()>>,
    marker: Option<Marker>,
    clock: Clock,
    metrics: EndpointMetrics,
    published: watch::Sender<Option<Arc<Published>>>,
    history: Arc<History>,
    endpoints_view: watch::Sender<EndpointsView>,
    changes: watch::Sender<u64>,
    supervision: Supervision,
    timer: Option<(Duration, SpawnHandle)>,
}

impl fmt::Debug for EndpointPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointPublisher").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl EndpointPublisher {
    /// An actor that has not started yet.
    #[must_use]
    pub fn new(parts: EndpointPublisherParts) -> Self {
        Self {
            core: None,
            kept: Kept::default(),
            policy: parts.policy,
            store: parts.store,
            store_turn: Arc::default(),
            marker: parts.marker,
            clock: parts.clock,
            metrics: parts.metrics,
            published: parts.published,
            history: parts.history,
            endpoints_view: parts.endpoints_view,
            changes: parts.changes,
            supervision: Supervision::new(parts.recorder),
            timer: None,
        }
    }

    fn recorder(&self) -> &Arc<Recorder> {
        self.supervision.recorder()
    }

    /// What a source says, through the core, and everything that follows from it.
    fn source(&mut self, event: SourceEvent, ctx: &mut Context<Self>) -> Answer {
        let now = self.clock.now();
        // Messages wait until the disk was read.
        let Some(core) = &mut self.core else { return Answer::ListAgain };
        let (answer, effects) = core.take(event, now, rand::random());
        self.perform(effects, ctx);
        answer
    }

    /// The same for one of the listed kinds, which is counted by objects.
    fn seen<T>(
        &mut self,
        kind: SourceKind,
        seen: Vec<Seen<T>>,
        event: fn(Vec<Seen<T>>) -> SourceEvent,
        ctx: &mut Context<Self>,
    ) -> Answer {
        let objects = seen.iter().filter(|seen| matches!(seen, Seen::Put(_) | Seen::Gone(_))).count();
        let marks = seen.len() > objects;
        self.count(kind, objects as u64);
        let answer = self.source(event(seen), ctx);
        if marks {
            self.show_sources();
        }
        answer
    }

    fn count(&self, kind: SourceKind, events: u64) {
        self.metrics.events.get_or_create(&Resource { resource: kind.resource() }).inc_by(events);
    }

    /// One event through the core, and everything that follows from it.
    fn step(&mut self, event: Event, ctx: &mut Context<Self>) {
        let now = self.clock.now();
        let Some(core) = &mut self.core else { return };
        let effects = core.handle(event, now, rand::random());
        self.perform(effects, ctx);
    }

    fn perform(&mut self, effects: Vec<Effect>, ctx: &mut Context<Self>) {
        let news = !effects.is_empty();
        if let (Some(marker), Some((instance_id, rev))) =
            (&mut self.marker, self.core.as_ref().and_then(Core::on_disk))
        {
            marker.note(instance_id, rev);
        }
        for effect in effects {
            self.act(effect, ctx);
        }
        self.arm(ctx);
        if news {
            self.show();
        }
    }

    fn act(&mut self, effect: Effect, ctx: &mut Context<Self>) {
        match effect {
            Effect::Write { number, write } => self.write(number, write, ctx),
            Effect::Publish { restart, revisions, published } => {
                if let Some(since) = restart {
                    self.history.restart(published.instance_id, since);
                }
                for revision in revisions {
                    self.history.note(revision.rev, revision.services, revision.node);
                }
                self.published.send_replace(Some(published));
            }
            Effect::View(view) => drop(self.endpoints_view.send_replace(view)),
            Effect::Count(Counted::Revision { delay_ms }) => {
                self.metrics.revisions.inc();
                if let Some(delay_ms) = delay_ms {
                    let delay = Duration::from_millis(delay_ms.max(0).unsigned_abs());
                    self.metrics.publish_delay.observe(delay.as_secs_f64());
                }
            }
            Effect::Count(Counted::Worked(services)) => drop(self.metrics.worked_out.inc_by(services)),
            Effect::Count(Counted::WriteFailed) => drop(self.metrics.persist_failures.inc()),
            Effect::Note { warn: true, text } => {
                tracing::warn!(actor = "EndpointPublisher", "{text}");
                self.recorder().error(text);
            }
            Effect::Note { warn: false, text } => {
                tracing::info!(actor = "EndpointPublisher", "{text}");
                self.recorder().event(text);
            }
        }
    }

    /// Writes, off this thread.
    fn write(&self, number: u64, write: Write, ctx: &mut Context<Self>) {
        let (store, turn, began) = (self.store.clone(), self.store_turn.clone(), Instant::now());
        let written = tokio::task::spawn_blocking(move || {
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            record::write(&*store, &write)
        });
        ctx.spawn(wrap_future::<_, Self>(written).map(move |written, actor, ctx| {
            actor.metrics.persist_duration.observe(began.elapsed().as_secs_f64());
            let result = match written {
                Ok(result) => result.map_err(|error| chain(&error)),
                Err(error) => Err(error.to_string()),
            };
            actor.step(Event::Written { number, result }, ctx);
        }));
    }

    fn arm(&mut self, ctx: &mut Context<Self>) {
        let next = self.core.as_ref().and_then(Core::next_tick);
        if self.timer.as_ref().map(|(at, _)| *at) == next {
            return;
        }
        if let Some((_, handle)) = self.timer.take() {
            ctx.cancel_future(handle);
        }
        if let Some(at) = next {
            let pause = at.saturating_sub(self.clock.now().mono);
            let handle = ctx.run_later(pause, |actor, ctx| {
                actor.timer = None;
                actor.step(Event::Tick, ctx);
            });
            self.timer = Some((at, handle));
        }
    }

    /// Brings metrics and summary up to date.
    fn show(&self) {
        let Some(core) = &self.core else { return };
        let gauge = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        self.metrics.services.set(gauge(core.services() as u64));
        self.metrics.endpoints.set(gauge(core.endpoints()));
        self.metrics.rev.set(gauge(core.rev()));
        self.metrics.stale.set(core.is_stale().into());
        self.metrics.watched.set(core.is_watched().into());
        self.metrics.durable.set(core.durable().into());
        self.recorder().status(Status::Running, core.summary());
        self.changes.send_modify(|count| *count += 1);
    }

    fn show_sources(&self) {
        let Some(core) = &self.core else { return };
        for (kind, synced, objects) in core.sources() {
            let label = Resource { resource: kind.resource() };
            self.metrics.synced.get_or_create(&label).set(synced.into());
            self.metrics.objects.get_or_create(&label).set(i64::try_from(objects).unwrap_or(i64::MAX));
        }
        self.changes.send_modify(|count| *count += 1);
    }

    /// Reads what is on disk, off this thread and before any message is handled.
    fn reload(&mut self, ctx: &mut Context<Self>) {
        let mut kept = std::mem::take(&mut self.kept);
        if let Some(memory) = kept.memory.take() {
            return self.begin_behind(Some(memory), kept, ctx);
        }
        let (store, turn) = (self.store.clone(), self.store_turn.clone());
        let node_name = self.policy.node_name.clone();
        let load = read_at_start(store, move |store| {
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            record::load(&**store, &node_name)
        });
        // The disk of a process that starts is waited for, readers see nothing yet.
        let limit = if kept.is_restart { self.policy.write_timeout } else { Duration::MAX };
        let load = tokio::time::timeout(limit, load);
        ctx.wait(wrap_future::<_, Self>(load).map(move |loaded, actor, ctx| {
            let loaded = match loaded {
                Ok(Ok(Ok(loaded))) => loaded,
                Ok(Ok(Err(error))) => Loaded::Lost(chain(&error)),
                Ok(Err(error)) => Loaded::Lost(error.to_string()),
                Err(_) => {
                    let fallback = kept.fallback.take();
                    return actor.begin_behind(fallback, kept, ctx);
                }
            };
            let (restored, disk) = match loaded {
                Loaded::Whole(restored) => (Some(*restored), Disk::Same),
                Loaded::Nothing => (None, Disk::Other),
                Loaded::Lost(reason) => {
                    let text = format!(
                        "the endpoints on disk are not used; clients receive the full state: {reason}"
                    );
                    tracing::warn!(actor = "EndpointPublisher", "{text}");
                    actor.recorder().error(text);
                    (None, Disk::Other)
                }
            };
            let shown = actor.shown();
            let (restored, is_renamed) = match restored {
                // A former self of the actor has looked already.
                Some(restored) if !kept.is_restart => actor.checked(restored),
                restored => (restored, false),
            };
            actor.begin(Start { restored, disk, is_renamed, shown, kept }, ctx);
        }));
    }

    /// The state on disk, under a new instance ID if it may be older than what was served last. Whether it is.
    fn checked(&self, mut restored: Restored) -> (Option<Restored>, bool) {
        let meta = &mut restored.meta;
        let Some(reason) = self.marker.as_ref().and_then(|marker| marker.doubt(meta.instance_id, meta.rev))
        else {
            return (Some(restored), false);
        };
        meta.instance_id = identity(rand::random(), Some(meta.instance_id));
        let text = format!("the endpoints on disk get a new instance ID: {reason}");
        tracing::info!(actor = "EndpointPublisher", "{text}");
        self.recorder().event(text);
        (Some(restored), true)
    }

    /// Begins with what readers see, where the disk has something else or does not answer.
    fn begin_behind(&mut self, restored: Option<Restored>, kept: Kept, ctx: &mut Context<Self>) {
        let disk = Disk::Behind { retry: self.clock.now().mono, failures: 1 };
        let shown = self.shown();
        self.begin(Start { restored, disk, is_renamed: false, shown, kept }, ctx);
    }

    fn shown(&self) -> Option<Arc<Published>> {
        self.published.borrow().clone()
    }

    fn begin(&mut self, start: Start, ctx: &mut Context<Self>) {
        let (core, effects) = Core::new(self.policy.clone(), start, self.clock.now());
        self.core = Some(core);
        self.perform(effects, ctx);
        self.show();
        self.show_sources();
    }

    fn state(&self, namespace: &str, max: usize) -> pb::State {
        let state = self.core.as_ref().map(|core| core.state(namespace, max)).unwrap_or_default();
        pb::State { events: self.metrics.events(), revisions: self.metrics.revisions.get(), ..state }
    }
}

impl Actor for EndpointPublisher {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.supervision.resume(ctx, Self::reload);
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        self.recorder().status(Status::Stopped, "");
    }
}

impl Supervised for EndpointPublisher {
    fn restarting(&mut self, _: &mut Context<Self>) {
        self.supervision.restarting();
        // What sources said is forgotten, which they learn with what they say next; what is not said again unless it
        // changes is kept.
        if let Some(core) = self.core.take() {
            self.kept = core.keep(rand::random());
        }
        self.timer = None;
    }
}

impl Handler<ServiceChanged> for EndpointPublisher {
    type Result = MessageResult<ServiceChanged>;

    fn handle(&mut self, message: ServiceChanged, ctx: &mut Context<Self>) -> Self::Result {
        let _handling = self.recorder().handling::<ServiceChanged>();
        MessageResult(self.seen(SourceKind::Services, message.seen, SourceEvent::Services, ctx))
    }
}

impl Handler<SliceChanged> for EndpointPublisher {
    type Result = MessageResult<SliceChanged>;

    fn handle(&mut self, message: SliceChanged, ctx: &mut Context<Self>) -> Self::Result {
        let _handling = self.recorder().handling::<SliceChanged>();
        MessageResult(self.seen(SourceKind::EndpointSlices, message.seen, SourceEvent::EndpointSlices, ctx))
    }
}

impl Handler<CidrChanged> for EndpointPublisher {
    type Result = MessageResult<CidrChanged>;

    fn handle(&mut self, message: CidrChanged, ctx: &mut Context<Self>) -> Self::Result {
        let _handling = self.recorder().handling::<CidrChanged>();
        MessageResult(self.seen(SourceKind::ServiceCidrs, message.seen, SourceEvent::ServiceCidrs, ctx))
    }
}

impl Handler<NodeChanged> for EndpointPublisher {
    type Result = MessageResult<NodeChanged>;

    fn handle(&mut self, message: NodeChanged, ctx: &mut Context<Self>) -> Self::Result {
        let _handling = self.recorder().handling::<NodeChanged>();
        self.count(SourceKind::Node, 1);
        let answer = self.source(SourceEvent::Node(message.node), ctx);
        self.show_sources();
        MessageResult(answer)
    }
}

impl Handler<SourceHealthChanged> for EndpointPublisher {
    type Result = MessageResult<SourceHealthChanged>;

    fn handle(&mut self, message: SourceHealthChanged, ctx: &mut Context<Self>) -> Self::Result {
        let _handling = self.recorder().handling::<SourceHealthChanged>();
        let answer = self.source(SourceEvent::Health(message.kind, message.health), ctx);
        self.show();
        MessageResult(answer)
    }
}

impl Handler<Followed> for EndpointPublisher {
    type Result = ();

    fn handle(&mut self, _: Followed, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<Followed>();
        self.step(Event::Followed, ctx);
        self.show();
    }
}

impl Handler<LaterRevision> for EndpointPublisher {
    type Result = ();

    fn handle(&mut self, message: LaterRevision, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<LaterRevision>();
        self.step(Event::Later { instance_id: message.instance_id, rev: message.rev }, ctx);
    }
}

impl Handler<InspectEndpoints> for EndpointPublisher {
    type Result = String;

    fn handle(&mut self, _: InspectEndpoints, _: &mut Context<Self>) -> String {
        let _handling = self.recorder().handling::<InspectEndpoints>();
        let state = self.state("", 0);
        self.core.as_ref().map(|core| core.inspect(&state).to_string()).unwrap_or_default()
    }
}

impl Handler<EndpointsCount> for EndpointPublisher {
    type Result = u64;

    fn handle(&mut self, _: EndpointsCount, _: &mut Context<Self>) -> u64 {
        let _handling = self.recorder().handling::<EndpointsCount>();
        self.core.as_ref().map_or(0, |core| core.services() as u64)
    }
}

impl Handler<ListServices> for EndpointPublisher {
    type Result = MessageResult<ListServices>;

    fn handle(&mut self, message: ListServices, _: &mut Context<Self>) -> Self::Result {
        let _handling = self.recorder().handling::<ListServices>();
        MessageResult(self.state(&message.namespace, message.max))
    }
}

impl Handler<ExplainService> for EndpointPublisher {
    type Result = Option<pb::Explanation>;

    fn handle(&mut self, message: ExplainService, _: &mut Context<Self>) -> Self::Result {
        let _handling = self.recorder().handling::<ExplainService>();
        self.core.as_ref()?.explain(&message.name)
    }
}

keelson_actor_system::handles_restart!(EndpointPublisher);
