//! The EndpointPublisher: performs the effects of the core.
//!
//! Owns: the core, the timer, the pending write. In: messages. Out: notes, records, the [`EndpointsFeed`] that readers
//! follow, the view for the node's condition.
//!
//! [`EndpointsFeed`]: super::EndpointsFeed

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use actix::{ActorFutureExt as _, AsyncContext as _, Context, Supervised, fut::wrap_future};
use keelson_actor_system::{
    clock::Clock,
    durable::read_at_start,
    handlers,
    inspect::{Recorder, Status},
    reports::EndpointsView,
    supervise::{Supervision, chain},
    supervised,
    timer::Timer,
};
use keelson_proto::endpoints as pb;
use keelson_storage::StateStore;
use tokio::{sync::watch, time::Instant};

use super::{
    Ack, ClientEvent, EndpointMetrics, EndpointsCount, ExplainService, History, InspectEndpoints,
    ListServices, Marker, ObjectEvent, Published, Resource, SourceEvent, SourceKind,
    core::{CarriedState, Core, Counted, DiskState, Effect, EndpointsPolicy, Event, Start, identity},
    record::{self, Loaded, Restored, Write},
};

pub struct EndpointPublisherParts {
    pub store: Arc<dyn StateStore>,
    /// State outside of the store, to detect a restored backup. `None`: the store is trusted.
    pub marker: Option<Marker>,
    pub clock: Clock,
    pub policy: EndpointsPolicy,
    pub metrics: EndpointMetrics,
    /// The sender of [`super::EndpointsFeed::published`].
    pub published: watch::Sender<Option<Arc<Published>>>,
    pub history: Arc<History>,
    pub endpoints_view: watch::Sender<EndpointsView>,
    /// Incremented with each change of the inspected state.
    pub changes: watch::Sender<u64>,
    pub recorder: Arc<Recorder>,
}

pub struct EndpointPublisher {
    /// `None` until the disk is read.
    core: Option<Core>,
    /// What the previous instance of the actor left behind.
    kept: CarriedState,
    policy: EndpointsPolicy,
    store: Arc<dyn StateStore>,
    /// Held while the store is used: a write of the previous instance ends before its successor reads.
    store_turn: Arc<Mutex<()>>,
    marker: Option<Marker>,
    clock: Clock,
    metrics: EndpointMetrics,
    published: watch::Sender<Option<Arc<Published>>>,
    history: Arc<History>,
    endpoints_view: watch::Sender<EndpointsView>,
    changes: watch::Sender<u64>,
    supervision: Supervision,
    timer: Timer,
}

impl EndpointPublisher {
    #[must_use]
    pub fn new(parts: EndpointPublisherParts) -> Self {
        Self {
            core: None,
            kept: CarriedState::default(),
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
            timer: Timer::default(),
        }
    }

    fn source(&mut self, event: SourceEvent, ctx: &mut Context<Self>) -> Ack {
        let (kind, objects, marks) = match &event {
            SourceEvent::Services(seen) => of_kind(SourceKind::Services, seen),
            SourceEvent::EndpointSlices(seen) => of_kind(SourceKind::EndpointSlices, seen),
            SourceEvent::ServiceCidrs(seen) => of_kind(SourceKind::ServiceCidrs, seen),
            SourceEvent::Node(_) => (SourceKind::Node, 1, true),
            SourceEvent::Health(kind, _) => (*kind, 0, false),
        };
        let is_health = matches!(event, SourceEvent::Health(..));
        if !is_health {
            self.count(kind, objects);
        }
        let now = self.clock.now();
        // The actor handles no message before the disk is read.
        let Some(core) = &mut self.core else { return Ack::Relist };
        let (answer, effects) = core.handle_source_event(event, now, rand::random());
        self.perform(effects, ctx);
        if marks {
            self.show_sources();
        } else if is_health {
            self.update_metrics();
        }
        answer
    }

    fn client(&mut self, event: ClientEvent, ctx: &mut Context<Self>) {
        let is_first = matches!(event, ClientEvent::Followed);
        self.step(Event::Client(event), ctx);
        if is_first {
            self.update_metrics();
        }
    }

    fn count(&self, kind: SourceKind, events: u64) {
        self.metrics.events.get_or_create(&Resource { resource: kind.resource() }).inc_by(events);
    }

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
        self.publish_noted(ctx);
        self.arm(ctx);
        if news {
            self.update_metrics();
        }
    }

    /// Publishes what is being written once it is noted, without waiting for the disk.
    fn publish_noted(&mut self, ctx: &mut Context<Self>) {
        let (Some(marker), Some(core)) = (&mut self.marker, &self.core) else { return };
        let Some((number, (instance_id, rev))) = core.unpublished() else { return };
        if marker.note(instance_id, rev) {
            self.step(Event::Noted { number }, ctx);
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
            Effect::Count(Counted::Worked(services)) => drop(self.metrics.computed.inc_by(services)),
            Effect::Count(Counted::WriteFailed) => drop(self.metrics.persist_failures.inc()),
            Effect::Note { warn, text } => self.note(warn, text),
        }
    }

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
        self.timer.set(next, &self.clock, ctx, |actor, ctx| {
            actor.timer.clear();
            actor.step(Event::Tick, ctx);
        });
    }

    fn update_metrics(&self) {
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

    /// Reads the disk on another thread, before any message is handled.
    fn reload(&mut self, ctx: &mut Context<Self>) {
        let mut kept = std::mem::take(&mut self.kept);
        if let Some(memory) = kept.memory.take() {
            return self.begin_from_memory(Some(memory), kept, ctx);
        }
        let (store, turn) = (self.store.clone(), self.store_turn.clone());
        let node_name = self.policy.node_name.clone();
        let load = read_at_start(store, move |store| {
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            record::load(&**store, &node_name)
        });
        // At process start, wait for the disk without limit, because readers see nothing yet.
        let limit = if kept.is_restart { self.policy.write_timeout } else { Duration::MAX };
        let load = tokio::time::timeout(limit, load);
        ctx.wait(wrap_future::<_, Self>(load).map(move |loaded, actor, ctx| {
            let loaded = match loaded {
                Ok(Ok(Ok(loaded))) => loaded,
                Ok(Ok(Err(error))) => Loaded::Lost(chain(&error)),
                Ok(Err(error)) => Loaded::Lost(error.to_string()),
                Err(_) => {
                    let fallback = kept.fallback.take();
                    return actor.begin_from_memory(fallback, kept, ctx);
                }
            };
            let (restored, disk) = match loaded {
                Loaded::Full(restored) => (Some(*restored), DiskState::Synced),
                Loaded::Nothing => (None, DiskState::Unusable),
                Loaded::Lost(reason) => {
                    let text = format!(
                        "the endpoints on disk are not used; clients receive the full state: {reason}"
                    );
                    actor.note(true, text);
                    (None, DiskState::Unusable)
                }
            };
            let shown = actor.shown();
            let (restored, is_renamed) = match restored {
                Some(restored) => actor.checked(restored),
                None => (None, false),
            };
            actor.begin(Start { restored, disk, is_renamed, shown, kept }, ctx);
        }));
    }

    /// Gives the state on disk a new instance ID if it may be older than the last one served. Returns whether it did.
    fn checked(&self, mut restored: Restored) -> (Option<Restored>, bool) {
        let meta = &mut restored.meta;
        let Some(reason) =
            self.marker.as_ref().and_then(|marker| marker.mismatch(meta.instance_id, meta.rev))
        else {
            return (Some(restored), false);
        };
        meta.instance_id = identity(rand::random(), Some(meta.instance_id));
        let text = format!("the endpoints on disk get a new instance ID: {reason}");
        self.note(false, text);
        (Some(restored), true)
    }

    /// Begins with the published state if the disk has another one or does not answer.
    fn begin_from_memory(&mut self, restored: Option<Restored>, kept: CarriedState, ctx: &mut Context<Self>) {
        let disk = DiskState::Behind { retry: self.clock.now().mono, failures: 1 };
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
        self.update_metrics();
        self.show_sources();
    }

    fn state(&self, namespace: &str, max: usize) -> pb::State {
        let state = self.core.as_ref().map(|core| core.state(namespace, max)).unwrap_or_default();
        pb::State { events: self.metrics.events(), revisions: self.metrics.revisions.get(), ..state }
    }
}

/// Number of objects, and whether `seen` contains marks of a list as well.
fn of_kind<T>(kind: SourceKind, seen: &[ObjectEvent<T>]) -> (SourceKind, u64, bool) {
    let objects =
        seen.iter().filter(|seen| matches!(seen, ObjectEvent::Upsert(_) | ObjectEvent::Deleted(_))).count();
    (kind, objects as u64, seen.len() > objects)
}

supervised!(EndpointPublisher);

impl Supervised for EndpointPublisher {
    fn restarting(&mut self, _: &mut Context<Self>) {
        self.supervision.restarting();
        // Listed objects are dropped: the next event of each source is answered with `Relist`. The Node and the
        // health of watches are kept, because sources send them only when they change.
        if let Some(core) = self.core.take() {
            self.kept = core.carry_over(rand::random());
        }
        self.timer.clear();
    }
}

handlers! { EndpointPublisher, self, ctx;
    SourceEvent(event) => self.source(event, ctx),
    ClientEvent(event) => self.client(event, ctx),
    InspectEndpoints(_) => {
        let state = self.state("", 0);
        self.core.as_ref().map(|core| core.inspect(&state).to_string()).unwrap_or_default()
    },
    EndpointsCount(_) => self.core.as_ref().map_or(0, |core| core.services() as u64),
    ListServices(message) => self.state(&message.namespace, message.max),
    ExplainService(message) => self.core.as_ref().and_then(|core| core.explain(&message.name)),
}
