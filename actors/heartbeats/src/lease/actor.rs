//! The LeaseRenewer: performs the effects of the Lease core.
//!
//! Owns: the core, the timer, the current request, the record on disk. In: [`NodeChanged`], queries. Out: requests,
//! health, metrics, the record. A failing store costs only the record: the heartbeat continues without a disk (decision
//! 0003).

use std::{sync::Arc, time::Duration};

use actix::{ActorFutureExt as _, AsyncContext as _, Context, Supervised, fut::wrap_future};
use futures_util::{FutureExt as _, future::BoxFuture};
use keelson_actor_system::{
    clock::{Clock, Now},
    cluster::{ApiError, ApiErrorKind, JobHealth, LeaseApi},
    durable::{LoggedFailure, read_at_start},
    handlers,
    inspect::{Mailbox, Recorder, Status},
    messages,
    supervise::{Supervision, chain},
    supervised,
    timer::Timer,
};
use keelson_metrics::ResultLabel;
use keelson_storage::{StateStore, StateStoreExt as _, Table};
use tokio::sync::watch;

use super::{
    core::{Answer, Contention, Core, Counted, Effect, Event, LeasePolicy, Request},
    metrics::{ClockStep, LeaseMetrics},
    record::{LEASE_KEY, LeaseRecord},
};

/// Delay of the retry after a failed write of the record.
const REWRITE_AFTER: Duration = Duration::from_secs(30);

/// Milliseconds since the Unix epoch: [`keelson_actor_system::clock::unix_ms`], except in tests.
pub type WallClock = Arc<dyn Fn() -> i64 + Send + Sync>;

messages! {
    LeaseTick => () {}
    /// The Node that owns the Lease was created, deleted or recreated.
    NodeChanged => () {
        /// `metadata.uid`; `None`: the Node does not exist.
        uid: Option<String>,
    }
    /// The actor's state as JSON.
    LeaseState => String {}
}

pub struct LeaseRenewerParts {
    pub api: Arc<dyn LeaseApi>,
    pub store: Arc<dyn StateStore>,
    /// For plans.
    pub clock: Clock,
    /// For the Lease.
    pub wall: WallClock,
    pub policy: LeasePolicy,
    pub metrics: LeaseMetrics,
    /// For readiness and the debug API.
    pub health: watch::Sender<JobHealth>,
    /// Read by the StatusReporter.
    pub contention: watch::Sender<Contention>,
    /// Incremented with each visible change.
    pub changes: watch::Sender<u64>,
    pub recorder: Arc<Recorder>,
}

pub struct LeaseRenewer {
    core: Core,
    policy: LeasePolicy,
    api: Arc<dyn LeaseApi>,
    store: Arc<dyn StateStore>,
    clock: Clock,
    wall: WallClock,
    metrics: LeaseMetrics,
    health: watch::Sender<JobHealth>,
    contention: watch::Sender<Contention>,
    changes: watch::Sender<u64>,
    supervision: Supervision,
    timer: Timer,
    /// The newest record that is not on disk.
    unwritten: Option<LeaseRecord>,
    logged: LoggedFailure,
    writing: bool,
    /// The last change of the Node, kept across a restart of the actor.
    node: Option<Option<String>>,
}

impl LeaseRenewer {
    #[must_use]
    pub fn new(parts: LeaseRenewerParts) -> Self {
        Self {
            core: Core::new(parts.policy.clone(), None),
            policy: parts.policy,
            api: parts.api,
            store: parts.store,
            clock: parts.clock,
            wall: parts.wall,
            metrics: parts.metrics,
            health: parts.health,
            contention: parts.contention,
            changes: parts.changes,
            supervision: Supervision::new(parts.recorder),
            timer: Timer::default(),
            unwritten: None,
            logged: LoggedFailure::default(),
            writing: false,
            node: None,
        }
    }

    fn now(&self) -> Now {
        Now { unix_ms: (self.wall)(), ..self.clock.now() }
    }

    fn step(&mut self, event: Event, ctx: &mut Context<Self>) {
        let effects = self.core.handle(event, self.now(), rand::random());
        for effect in effects {
            self.act(effect, ctx);
        }
        self.arm(ctx);
        self.show();
    }

    fn act(&mut self, effect: Effect, ctx: &mut Context<Self>) {
        match effect {
            Effect::Ask { number, request } => self.ask(number, request, ctx),
            Effect::CloseConnections => {
                self.recorder().event("closing the connections to the API server and reconnecting");
                self.api.close_connections();
            }
            Effect::Persist(record) => {
                self.unwritten = Some(record);
                self.write(ctx);
            }
            Effect::Count(Counted::Result(result)) => {
                self.metrics.renewals.get_or_create(&ResultLabel { result }).inc();
            }
            Effect::Count(Counted::Takeover) => {
                self.metrics.takeovers.inc();
            }
            Effect::Count(Counted::ForeignRenewal) => {
                self.metrics.foreign_renewals.inc();
            }
            Effect::Count(Counted::ClockStep { forward }) => {
                let direction = if forward { "forward" } else { "back" };
                self.metrics.clock_steps.get_or_create(&ClockStep { direction }).inc();
            }
            Effect::Note { warn, text } => self.note(warn, text),
        }
    }

    /// The actor's context owns the request: it is dropped when the actor stops.
    fn ask(&self, number: u64, request: Request, ctx: &mut Context<Self>) {
        let (name, limit) = (&self.policy.name, self.policy.request_timeout());
        let server = self.api.server();
        let answer: BoxFuture<'static, Answer> = match request {
            Request::Read => with_timeout(limit, server, self.api.get_lease(name)).map(Answer::Read).boxed(),
            Request::Create(lease) => {
                with_timeout(limit, server, self.api.create_lease(lease)).map(Answer::Created).boxed()
            }
            Request::Renew(patch) => {
                with_timeout(limit, server, self.api.renew_lease(patch)).map(Answer::Renewed).boxed()
            }
            Request::Node => {
                with_timeout(limit, server, self.api.node_uid(&self.policy.node)).map(Answer::Node).boxed()
            }
        };
        ctx.spawn(wrap_future::<_, Self>(answer).map(move |answer, actor, ctx| {
            actor.step(Event::Answered { request: number, answer }, ctx);
        }));
    }

    fn arm(&mut self, ctx: &mut Context<Self>) {
        self.timer.set(self.core.next_tick(), &self.clock, ctx, |actor, ctx| {
            actor.timer.clear();
            Mailbox::new(ctx.address(), actor.recorder().clone()).deliver(LeaseTick {});
        });
    }

    fn show(&self) {
        if let Some(renewed) = self.core.renewed_at() {
            self.metrics.renewed(renewed.mono_ms);
        }
        self.metrics.failures.set(i64::try_from(self.core.failures()).unwrap_or(i64::MAX));
        if let Some(transitions) = self.core.transitions() {
            self.metrics.transitions.set(transitions.into());
        }
        let health = self.core.health();
        let news = *self.health.borrow() != health;
        if news {
            self.health.send_replace(health);
        }
        let contention = self.core.contention();
        let is_contested = matches!(contention, Contention::Contested | Contention::StandingBack);
        self.metrics.contested.set(is_contested.into());
        self.metrics.standing_back.set((contention == Contention::StandingBack).into());
        self.contention.send_if_modified(|shown| std::mem::replace(shown, contention) != contention);
        self.recorder().status(Status::Running, self.core.summary());
        self.changes.send_modify(|count| *count += 1);
    }

    /// Writes the record, off this thread. One write at a time, of the newest record.
    fn write(&mut self, ctx: &mut Context<Self>) {
        if self.writing {
            return;
        }
        let Some(record) = self.unwritten.take() else { return };
        self.writing = true;
        let (store, again) = (self.store.clone(), record.clone());
        let write =
            tokio::task::spawn_blocking(move || store.put_json(Table::Heartbeats, LEASE_KEY, &record));
        ctx.spawn(wrap_future::<_, Self>(write).map(move |result, actor, ctx| {
            actor.writing = false;
            let error = match result {
                Ok(Ok(())) => {
                    actor.logged.clear();
                    return actor.write(ctx);
                }
                Ok(Err(error)) => chain(&error),
                Err(error) => error.to_string(),
            };
            if actor.logged.is_new(&error) {
                actor.note(
                    true,
                    format!("cannot write the identity of the Lease; renewals continue: {error}"),
                );
            }
            actor.unwritten.get_or_insert(again);
            actor.writing = true;
            ctx.run_later(REWRITE_AFTER, |actor, ctx| {
                actor.writing = false;
                actor.write(ctx);
            });
        }));
    }

    /// Reads the record, off this thread and before any message is handled.
    fn reload(&mut self, ctx: &mut Context<Self>) {
        let load = read_at_start(self.store.clone(), |store| {
            store.get_json::<LeaseRecord>(Table::Heartbeats, LEASE_KEY)
        });
        ctx.wait(wrap_future::<_, Self>(load).map(|loaded, actor, ctx| {
            let record = match loaded {
                Ok(Ok(record)) => record,
                Ok(Err(error)) => actor.unread(&chain(&error)),
                Err(error) => actor.unread(&error.to_string()),
            };
            actor.core = Core::new(actor.policy.clone(), record);
            if let Some(uid) = actor.node.clone() {
                actor.step(Event::NodeChanged(uid), ctx);
            }
            actor.step(Event::Tick, ctx);
        }));
    }

    fn unread(&self, error: &str) -> Option<LeaseRecord> {
        tracing::error!(actor = "LeaseRenewer", %error, "cannot read the identity of the Lease; treating it as new");
        self.recorder().error(format!("cannot read the identity of the Lease; treating it as new: {error}"));
        None
    }
}

async fn with_timeout<T>(
    limit: Duration,
    server: String,
    request: BoxFuture<'static, Result<T, ApiError>>,
) -> Result<T, ApiError> {
    match tokio::time::timeout(limit, request).await {
        Ok(result) => result,
        Err(_) => {
            let reason = format!("no answer within {limit:?}");
            Err(ApiError { server, kind: ApiErrorKind::Timeout, reason })
        }
    }
}

supervised!(LeaseRenewer);

impl Supervised for LeaseRenewer {
    fn restarting(&mut self, _: &mut Context<Self>) {
        self.supervision.restarting();
        // A write of the previous life may still be under way. It has the content of the next read, or slightly less,
        // which costs one larger patch.
        self.timer.clear();
        self.unwritten = None;
        self.writing = false;
    }
}

handlers! { LeaseRenewer, self, ctx;
    LeaseTick(_) => self.step(Event::Tick, ctx),
    NodeChanged(message) => {
        self.node = Some(message.uid.clone());
        self.step(Event::NodeChanged(message.uid), ctx);
    },
    LeaseState(_) => {
        let mut view = self.core.view(&self.api.server(), self.now());
        if let Some(fields) = view.as_object_mut() {
            let written = !self.writing && self.unwritten.is_none();
            fields.insert("identity_on_disk".into(), written.into());
        }
        view.to_string()
    },
}
