//! The PullCoordinator: performs what the core of pulls decides.
//!
//! Owns: the core, the callers' reply channels, the one timer, the journal's pipeline. In: verbs from
//! the CRI front, the RuntimeClient and people. Out: calls on the RuntimeClient, answers, journal
//! writes. When the store fails it goes on in memory and says so: pods must start even on a full
//! disk (decision 0003).

mod durability;
mod ended;
mod handover;
mod node;
mod retained;

use std::{collections::HashMap, fmt, sync::Arc, time::Duration};

use actix::{
    Actor, ActorFutureExt as _, AsyncContext as _, Context, Handler, SpawnHandle, Supervised,
    fut::wrap_future,
};
use ended::tell_end;
use keelson_actor_system::{
    clock::Clock,
    durable::LoggedFailure,
    inspect::{Mailbox, Recorder, Status},
    supervise::Supervision,
};
use keelson_storage::StateStore;
use tokio::sync::{mpsc, oneshot, watch};

use super::{
    core::{Answer, CallerId, Core, Counts, Effect, Event, PodNotice, Policy, Refusal},
    handover::{HandedEnd, HandedState},
    journal::{JournalIo, Pipeline},
    messages::{
        AnswerTo, CallerLeft, Configure, CountNow, Drain, Inspected, LimitView, ListPulls, RequestPull,
        SetLimit, Tick,
    },
};
use crate::{
    metrics::Metrics,
    runtime::{
        CancelPull, CheckImageFs, CheckPresent, DropLease, MeasureLease, Pull, PullFinished, PullPresence,
        PullProgress, ReapLeases, RenewLeases, RuntimeChanged, RuntimeClient, RuntimePull,
    },
};

/// How long the records of ended pulls wait for another write to go with.
const FLUSH_ENDED_AFTER: Duration = Duration::from_secs(1);

/// What the PullCoordinator needs.
pub struct PullCoordinatorParts {
    /// The settings it decides by.
    pub policy: Policy,
    /// The state folder's random id: lease names begin with it.
    pub owner: String,
    /// Where the journal is.
    pub store: Arc<dyn StateStore>,
    /// Wall and monotonic time.
    pub clock: Clock,
    /// Who asks the runtime.
    pub runtime: Mailbox<RuntimeClient>,
    /// Families that are shared with the other actors.
    pub metrics: Metrics,
    /// Who writes Events on pods; none without an API server. What finds no room is lost.
    pub notices: Option<mpsc::Sender<PodNotice>>,
    /// Raised by one with each change that people could see.
    pub changes: watch::Sender<u64>,
    /// Events, errors and latencies, for `keelson actors`.
    pub recorder: Arc<Recorder>,
}

/// The actor that decides which pulls run, wait or end. It restarts from the journal.
pub struct PullCoordinator {
    core: Core,
    policy: Policy,
    owner: String,
    journal: JournalIo,
    pipeline: Pipeline,
    /// A write failed: the journal lags behind, and nothing is written, until it is rewritten.
    behind: bool,
    /// The journal has not been read: the store was not open in time.
    unread: bool,
    /// It is being read.
    reading: bool,
    /// The next attempt to read or rewrite it has a time.
    catch_up_planned: bool,
    logged: LoggedFailure,
    /// It is time to try that.
    rewrite: bool,
    /// The last try before the end.
    rewrote_last: bool,
    answers: HashMap<CallerId, AnswerTo>,
    clock: Clock,
    runtime: Mailbox<RuntimeClient>,
    metrics: Metrics,
    notices: Option<mpsc::Sender<PodNotice>>,
    changes: watch::Sender<u64>,
    supervision: Supervision,
    timer: Option<(Duration, SpawnHandle)>,
    draining: Option<oneshot::Sender<()>>,
    /// What a predecessor handed over, until it is taken over.
    taken_over: Option<HandedState>,
    /// Who is told of pulls that were handed over and go on here.
    successor: Option<mpsc::UnboundedSender<HandedEnd>>,
    /// Told when the last journal write before a hand-over is done.
    flushed: Option<oneshot::Sender<()>>,
    newest_finished: u64,
    /// A write of the records of ended pulls is planned.
    flush_planned: bool,
    /// What the summary was made from.
    shown: Option<Counts>,
}

impl fmt::Debug for PullCoordinator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PullCoordinator").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl PullCoordinator {
    /// An actor that has not started yet.
    #[must_use]
    pub fn new(parts: PullCoordinatorParts) -> Self {
        Self {
            core: Core::new(parts.policy.clone(), &parts.owner),
            policy: parts.policy,
            owner: parts.owner,
            journal: JournalIo::new(parts.store),
            pipeline: Pipeline::default(),
            behind: false,
            unread: false,
            reading: false,
            catch_up_planned: false,
            logged: LoggedFailure::default(),
            rewrite: false,
            rewrote_last: false,
            answers: HashMap::new(),
            clock: parts.clock,
            runtime: parts.runtime,
            metrics: parts.metrics,
            notices: parts.notices,
            changes: parts.changes,
            supervision: Supervision::new(parts.recorder),
            timer: None,
            draining: None,
            taken_over: None,
            successor: None,
            flushed: None,
            newest_finished: 0,
            flush_planned: false,
            shown: None,
        }
    }

    fn recorder(&self) -> &Arc<Recorder> {
        self.supervision.recorder()
    }

    /// One event through the core, and everything that follows from it.
    fn step(&mut self, event: Event, ctx: &mut Context<Self>) {
        let effects = self.core.handle(event, self.clock.now());
        self.perform(effects, ctx);
    }

    fn perform(&mut self, effects: Vec<Effect>, ctx: &mut Context<Self>) {
        let handed_over = self.core.is_handed_over();
        for effect in effects {
            if handed_over && effect.is_the_successors() {
                continue;
            }
            if let Some(effect) = self.pipeline.admit(effect) {
                self.act(effect);
            }
        }
        self.write(ctx);
        self.arm(ctx);
        self.count();
        self.finish_drain(ctx);
        self.changes.send_modify(|count| *count += 1);
    }

    fn act(&mut self, effect: Effect) {
        match effect {
            // The pipeline keeps these.
            Effect::Persist(_) => {}
            Effect::CheckPresent { pull, call } => self.runtime.deliver(CheckPresent { pull, call }),
            Effect::Start { pull, attempt, call, lease, option, present } => {
                let waited = self.core.waited(pull, self.clock.now());
                if attempt == 1 {
                    self.metrics.wait.observe(waited.as_secs_f64());
                }
                let request = RuntimePull { call, lease, option };
                self.runtime.deliver(Pull { pull, attempt, request, waited, present });
            }
            Effect::Cancel { pull, attempt } => self.runtime.deliver(CancelPull { pull, attempt }),
            Effect::Reply { caller, answer } => {
                self.metrics.answered(&answer);
                if let Some(to) = self.answers.remove(&caller) {
                    // A caller that has just left does not read it.
                    let _ = to.send(answer);
                }
            }
            Effect::TellSuccessor(end) => {
                if let Some(successor) = &self.successor {
                    // One that is gone will ask the runtime.
                    let _ = successor.send(end);
                }
            }
            Effect::DropLease { lease, collect } => self.runtime.deliver(DropLease { lease, collect }),
            Effect::MeasureLease(lease) => self.runtime.deliver(MeasureLease { lease }),
            Effect::CheckImageFs => self.runtime.deliver(CheckImageFs {}),
            Effect::RenewLeases(leases) => self.runtime.deliver(RenewLeases { leases }),
            Effect::Released(release) => self.released(&release),
            Effect::ReapLeases(keep) => self.runtime.deliver(ReapLeases { keep: keep.into_iter().collect() }),
            Effect::Count(tally) => self.metrics.tally(tally),
            Effect::Notice(notice) => self.notify(notice),
            Effect::Note(note) if note.warn => {
                tracing::warn!(actor = "PullCoordinator", "{}", note.text);
                self.recorder().error(note.text);
            }
            Effect::Note(note) => {
                tracing::info!(actor = "PullCoordinator", "{}", note.text);
                self.recorder().event(note.text);
            }
        }
    }

    /// Starts the next write, if there is one and none is under way.
    fn write(&mut self, ctx: &mut Context<Self>) {
        if self.draining.is_some() {
            self.pipeline.flush_ended();
        } else if self.pipeline.has_ended() && !self.flush_planned {
            self.flush_planned = true;
            ctx.run_later(FLUSH_ENDED_AFTER, |actor, ctx| {
                actor.flush_planned = false;
                actor.pipeline.flush_ended();
                actor.write(ctx);
            });
        }
        while let Some(writes) = self.pipeline.next_write() {
            let rewrite = std::mem::take(&mut self.rewrite);
            if self.behind && !rewrite {
                // In memory only: the rewrite, when it is due, will say all of it.
                for effect in self.pipeline.written() {
                    self.act(effect);
                }
                continue;
            }
            let journal = self.journal.clone();
            let truth = self.behind.then(|| self.core.truth(self.clock.now()));
            let write = tokio::task::spawn_blocking(move || match truth {
                Some(truth) => journal.rewrite(&truth),
                None => journal.write(&writes),
            });
            ctx.spawn(wrap_future::<_, Self>(write).map(|result, actor, ctx| match result {
                Ok(result) => actor.written(result, ctx),
                Err(error) => actor.fail(&error.to_string(), ctx),
            }));
        }
    }

    /// After a hand-over: tells when the journal is left alone.
    fn finish_flush(&mut self) {
        if self.pipeline.is_idle()
            && let Some(flushed) = self.flushed.take()
        {
            let _ = flushed.send(());
        }
    }

    fn fail(&mut self, reason: &str, ctx: &mut Context<Self>) {
        tracing::error!(actor = "PullCoordinator", reason, "stopping; restarting from the journal");
        self.recorder().error(reason.to_owned());
        actix::ActorContext::stop(ctx);
    }

    fn arm(&mut self, ctx: &mut Context<Self>) {
        let next = self.core.next_tick();
        if self.timer.as_ref().map(|(at, _)| *at) == next {
            return;
        }
        if let Some((_, handle)) = self.timer.take() {
            ctx.cancel_future(handle);
        }
        if let Some(at) = next {
            let pause = at.saturating_sub(self.clock.now().mono);
            self.timer = Some((at, ctx.notify_later(Tick {}, pause)));
        }
    }

    /// Brings metrics and summary up to date.
    fn count(&mut self) {
        let counts = self.core.counts();
        if self.shown != Some(counts) {
            self.shown = Some(counts);
            self.recorder().status(Status::Running, summary(counts));
        }
        let metrics = &self.metrics;
        metrics.in_flight.set(counts.running.into());
        metrics.in_flight_present.set(counts.present.into());
        metrics.queue_depth.set(counts.queued.into());
        metrics.held.set(counts.held.into());
        metrics.callers.set(counts.callers.into());
        metrics.limit.set(counts.limit.into());
        metrics.retained.set(counts.retained.into());
        metrics.retained_bytes.set(i64::try_from(counts.retained_bytes).unwrap_or(i64::MAX));
        let oldest = self.core.oldest_wait(self.clock.now()).unwrap_or_default();
        metrics.oldest_wait.set(oldest.as_secs_f64());
        let ended = self.core.ended();
        for finished in self.core.finished_since(self.newest_finished) {
            tell_end(metrics, finished);
        }
        self.newest_finished = ended;
    }

    fn finish_drain(&mut self, ctx: &mut Context<Self>) {
        if self.draining.is_none() || self.reading || !self.core.is_idle() || !self.pipeline.is_idle() {
            return;
        }
        if self.behind && !self.rewrote_last && !self.core.is_handed_over() {
            self.rewrote_last = true;
            self.catch_up(ctx);
        } else if let Some(done) = self.draining.take() {
            // Who asked may have stopped waiting.
            let _ = done.send(());
        }
    }
}

/// What the coordinator does, in a few words.
fn summary(counts: Counts) -> String {
    let Counts { running, present, queued, held, limit, .. } = counts;
    let mut text = match limit {
        0 => format!("{running} running without a limit, {queued} queued"),
        limit => format!("{running} of {limit} running, {queued} queued"),
    };
    if present > 0 {
        text.push_str(&format!(", {present} of present images"));
    }
    if held > 0 {
        text.push_str(&format!(", {held} waiting for credentials"));
    }
    text
}

impl Actor for PullCoordinator {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.supervision.resume(ctx, Self::reload);
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        self.recorder().status(Status::Stopped, "");
    }
}

impl Supervised for PullCoordinator {
    fn restarting(&mut self, _: &mut Context<Self>) {
        self.supervision.restarting();
        // Nobody tells again of pods that are gone.
        let gone = self.core.take_gone();
        let pressure = self.core.has_disk_pressure();
        self.core = Core::new(self.policy.clone(), &self.owner);
        self.core.set_gone(gone);
        self.core.set_disk_pressure(pressure);
        self.journal = self.journal.next_life();
        (self.reading, self.catch_up_planned) = (false, false);
        self.pipeline = self.pipeline.next_life();
        self.rewrite = false;
        self.timer = None;
        self.newest_finished = 0;
        self.flush_planned = false;
        self.shown = None;
        for (_, to) in self.answers.drain() {
            let _ = to.send(Answer::Refused(Refusal::Restarting));
        }
    }
}

impl Handler<RequestPull> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, message: RequestPull, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<RequestPull>();
        let RequestPull { caller, call, patience, claim, answer } = message;
        if !claim.acknowledge() {
            return;
        }
        self.answers.insert(caller, answer);
        self.step(Event::Request { caller, call, patience }, ctx);
    }
}

impl Handler<CallerLeft> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, message: CallerLeft, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<CallerLeft>();
        if self.answers.remove(&message.caller).is_some() {
            self.step(Event::CallerLeft(message.caller), ctx);
        }
    }
}

impl Handler<PullFinished> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, message: PullFinished, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<PullFinished>();
        let PullFinished { pull, attempt, outcome } = message;
        self.step(Event::Finished { pull, attempt, outcome }, ctx);
    }
}

impl Handler<PullPresence> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, message: PullPresence, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<PullPresence>();
        self.step(Event::Presence { pull: message.pull, present: message.present }, ctx);
    }
}

impl Handler<PullProgress> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, message: PullProgress, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<PullProgress>();
        self.step(Event::Progress { pull: message.pull, progress: message.progress }, ctx);
    }
}

impl Handler<RuntimeChanged> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, message: RuntimeChanged, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<RuntimeChanged>();
        let event = match message.state {
            Ok(capabilities) => Event::RuntimeUp(capabilities),
            Err(reason) => Event::RuntimeDown(reason),
        };
        self.step(event, ctx);
    }
}

impl Handler<SetLimit> for PullCoordinator {
    type Result = actix::MessageResult<SetLimit>;

    fn handle(&mut self, message: SetLimit, ctx: &mut Context<Self>) -> Self::Result {
        let _handling = self.recorder().handling::<SetLimit>();
        self.step(Event::SetLimit(message.limit), ctx);
        actix::MessageResult(self.core.limit_view())
    }
}

impl Handler<LimitView> for PullCoordinator {
    type Result = actix::MessageResult<LimitView>;

    fn handle(&mut self, _: LimitView, _: &mut Context<Self>) -> Self::Result {
        let _handling = self.recorder().handling::<LimitView>();
        actix::MessageResult(self.core.limit_view())
    }
}

impl Handler<Configure> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, message: Configure, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<Configure>();
        self.policy = message.policy.clone();
        self.step(Event::Configure(Box::new(message.policy)), ctx);
    }
}

impl Handler<Drain> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, message: Drain, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<Drain>();
        self.draining = Some(message.done);
        self.step(Event::Drain, ctx);
    }
}

impl Handler<ListPulls> for PullCoordinator {
    type Result = actix::MessageResult<ListPulls>;

    fn handle(&mut self, message: ListPulls, _: &mut Context<Self>) -> Self::Result {
        let _handling = self.recorder().handling::<ListPulls>();
        actix::MessageResult(self.core.list(message.max_queued, self.clock.now()))
    }
}

impl Handler<CountNow> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, _: CountNow, _: &mut Context<Self>) {
        let _handling = self.recorder().handling::<CountNow>();
        self.count();
    }
}

impl Handler<Inspected> for PullCoordinator {
    type Result = String;

    fn handle(&mut self, _: Inspected, _: &mut Context<Self>) -> String {
        let _handling = self.recorder().handling::<Inspected>();
        let counts = self.core.counts();
        serde_json::json!({
            "limit": counts.limit,
            "running": counts.running,
            "running_present": counts.present,
            "queued": counts.queued,
            "held": counts.held,
            "callers": counts.callers,
            "oldest_wait_ms": self.core.oldest_wait(self.clock.now()).map(|wait| wait.as_millis() as u64),
            "kept_leases": self.core.kept_leases(),
            "retained_bytes": self.core.retained_bytes(),
            "pods_gone": self.core.pods_gone(),
            "journal_behind": self.behind,
            "journal_unread": self.unread,
            "draining": self.draining.is_some(),
        })
        .to_string()
    }
}

keelson_actor_system::handles_restart!(PullCoordinator);

impl Handler<Tick> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, _: Tick, ctx: &mut Context<Self>) {
        self.timer = None;
        self.step(Event::Tick, ctx);
    }
}
