//! The PullCoordinator: performs the effects of the core of pulls.
//!
//! Owns: the core, the callers' reply channels, the timer, the journal's pipeline. In: messages from the CRI front, the
//! RuntimeClient and people. Out: calls on the RuntimeClient, answers, journal writes. When the store fails it
//! continues in memory and reports that: pods must start even on a full disk (decision 0003).

mod durability;
mod handover;
mod outcomes;
mod retained;

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use actix::{ActorFutureExt as _, AsyncContext as _, Context, Supervised, fut::wrap_future};
use keelson_actor_system::{
    clock::Clock,
    cluster::ClusterEvent,
    durable::LoggedFailure,
    handlers,
    inspect::{Mailbox, Recorder, Status},
    supervise::Supervision,
    supervised,
    timer::Timer,
};
use keelson_storage::StateStore;
use outcomes::report_end;
use tokio::sync::{mpsc, oneshot, watch};

use super::{
    core::{Answer, CallerId, Core, Counts, Effect, Policy, PullEvent, Refusal},
    handover::{HandedEnd, HandedState},
    journal::{JournalIo, Pipeline},
    messages::{
        AnswerTo, CountNow, Drain, HandOver, Inspected, LimitView, ListPulls, PullsFlow, RequestPull,
        SetLimit,
    },
};
use crate::{
    metrics::Metrics,
    runtime::{RuntimeClient, RuntimeCommand, RuntimeEvent, RuntimePull},
};

/// How long the records of ended pulls wait for another write to go with.
const FLUSH_ENDED_AFTER: Duration = Duration::from_secs(1);

pub struct PullCoordinatorParts {
    pub policy: Policy,
    /// State folder ID: lease names begin with it.
    pub owner: String,
    pub store: Arc<dyn StateStore>,
    pub clock: Clock,
    pub runtime: Mailbox<RuntimeClient>,
    pub metrics: Metrics,
    /// The writer of Events; `None` without an API server. Events that find the channel full are lost.
    pub events: Option<mpsc::Sender<ClusterEvent>>,
    /// Incremented with each visible change.
    pub changes: watch::Sender<u64>,
    pub recorder: Arc<Recorder>,
}

/// Restarts from the journal.
pub struct PullCoordinator {
    core: Core,
    policy: Policy,
    owner: String,
    journal: JournalIo,
    pipeline: Pipeline,
    /// A write failed: the journal is outdated, and nothing is written until it is rewritten.
    is_journal_outdated: bool,
    /// The journal has not been read: the store was not open in time.
    is_journal_unread: bool,
    reading: bool,
    /// The next attempt to read or rewrite the journal is scheduled.
    catch_up_planned: bool,
    logged: LoggedFailure,
    /// The rewrite is due.
    rewrite: bool,
    /// The last attempt before the agent stops.
    has_tried_final_rewrite: bool,
    answers: HashMap<CallerId, AnswerTo>,
    clock: Clock,
    runtime: Mailbox<RuntimeClient>,
    metrics: Metrics,
    events: Option<mpsc::Sender<ClusterEvent>>,
    changes: watch::Sender<u64>,
    supervision: Supervision,
    timer: Timer,
    draining: Option<oneshot::Sender<()>>,
    /// One for each `Effect::LimitStored` to come.
    limits_to_store: VecDeque<oneshot::Sender<()>>,
    /// Handed over by a predecessor, until it is taken over.
    taken_over: Option<HandedState>,
    /// Receives the ends of handed-over pulls that continue here.
    successor: Option<mpsc::UnboundedSender<HandedEnd>>,
    /// Notified when the last journal write before a hand-over is done.
    flushed: Option<oneshot::Sender<()>>,
    newest_finished: u64,
    /// A write of the records of ended pulls is scheduled.
    flush_planned: bool,
    shown: Option<Counts>,
}

impl PullCoordinator {
    #[must_use]
    pub fn new(parts: PullCoordinatorParts) -> Self {
        Self {
            core: Core::new(parts.policy.clone(), &parts.owner),
            policy: parts.policy,
            owner: parts.owner,
            journal: JournalIo::new(parts.store),
            pipeline: Pipeline::default(),
            is_journal_outdated: false,
            is_journal_unread: false,
            reading: false,
            catch_up_planned: false,
            logged: LoggedFailure::default(),
            rewrite: false,
            has_tried_final_rewrite: false,
            answers: HashMap::new(),
            clock: parts.clock,
            runtime: parts.runtime,
            metrics: parts.metrics,
            events: parts.events,
            changes: parts.changes,
            supervision: Supervision::new(parts.recorder),
            timer: Timer::default(),
            draining: None,
            limits_to_store: VecDeque::new(),
            taken_over: None,
            successor: None,
            flushed: None,
            newest_finished: 0,
            flush_planned: false,
            shown: None,
        }
    }

    fn step(&mut self, event: PullEvent, ctx: &mut Context<Self>) {
        let effects = self.core.handle(event, self.clock.now());
        self.perform(effects, ctx);
    }

    fn request(&mut self, message: RequestPull, ctx: &mut Context<Self>) {
        let RequestPull { caller, call, timeout, claim, answer } = message;
        if claim.acknowledge() {
            self.answers.insert(caller, answer);
            self.step(PullEvent::Request { caller, call, timeout }, ctx);
        }
    }

    fn event(&mut self, event: PullEvent, ctx: &mut Context<Self>) {
        match &event {
            // Already answered or refused.
            PullEvent::CallerLeft(caller) if self.answers.remove(caller).is_none() => return,
            PullEvent::Configure(policy) => self.policy = (**policy).clone(),
            _ => {}
        }
        self.step(event, ctx);
    }

    fn perform(&mut self, effects: Vec<Effect>, ctx: &mut Context<Self>) {
        let handed_over = self.core.is_handed_over();
        for effect in effects {
            if handed_over && effect.is_left_to_successor() {
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
            // Kept by the pipeline.
            Effect::Persist(_) => {}
            Effect::Runtime(command) => self.runtime.deliver(command),
            Effect::Start { pull, attempt, call, lease, option, present } => {
                let waited = self.core.first_wait(pull, self.clock.now());
                if attempt == 1 {
                    self.metrics.wait.observe(waited.as_secs_f64());
                }
                let request = RuntimePull { call, lease, option };
                self.runtime.deliver(RuntimeCommand::Pull { pull, attempt, request, waited, present });
            }
            Effect::Reply { caller, answer } => {
                self.metrics.answered(&answer);
                if let Some(to) = self.answers.remove(&caller) {
                    // A caller that has just left does not read it.
                    let _ = to.send(answer);
                }
            }
            Effect::ReportToSuccessor(end) => {
                if let Some(successor) = &self.successor {
                    // A successor that is gone asks the runtime itself.
                    let _ = successor.send(end);
                }
            }
            Effect::LimitStored => {
                if let Some(stored) = self.limits_to_store.pop_front() {
                    // The requester may have stopped waiting.
                    let _ = stored.send(());
                }
            }
            Effect::Released(release) => self.released(&release),
            Effect::Count(tally) => self.metrics.tally(tally),
            Effect::Notice(notice) => self.notify(notice),
            Effect::Note(note) => self.note(note.warn, note.text),
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
            if self.is_journal_outdated && !rewrite {
                // In memory only: the scheduled rewrite covers all of it.
                for effect in self.pipeline.written() {
                    self.act(effect);
                }
                continue;
            }
            let journal = self.journal.clone();
            let journal_writes = self.is_journal_outdated.then(|| self.core.journal_writes(self.clock.now()));
            let write = tokio::task::spawn_blocking(move || match journal_writes {
                Some(journal_writes) => journal.rewrite(&journal_writes),
                None => journal.write(&writes),
            });
            ctx.spawn(wrap_future::<_, Self>(write).map(|result, actor, ctx| match result {
                Ok(result) => actor.written(result, ctx),
                Err(error) => actor.fail(&error.to_string(), ctx),
            }));
        }
    }

    /// After a hand-over: notifies when the last journal write is done.
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
        self.timer.set(self.core.next_tick(), &self.clock, ctx, |actor, ctx| {
            actor.timer.clear();
            actor.step(PullEvent::Tick, ctx);
        });
    }

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
            report_end(metrics, finished);
        }
        self.newest_finished = ended;
    }

    fn inspect(&self) -> String {
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
            "journal_behind": self.is_journal_outdated,
            "journal_unread": self.is_journal_unread,
            "draining": self.draining.is_some(),
        })
        .to_string()
    }

    fn finish_drain(&mut self, ctx: &mut Context<Self>) {
        if self.draining.is_none() || self.reading || !self.core.is_idle() || !self.pipeline.is_idle() {
            return;
        }
        if self.is_journal_outdated && !self.has_tried_final_rewrite && !self.core.is_handed_over() {
            self.has_tried_final_rewrite = true;
            self.catch_up(ctx);
        } else if let Some(done) = self.draining.take() {
            // The requester may have stopped waiting.
            let _ = done.send(());
        }
    }
}

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

supervised!(PullCoordinator);

impl Supervised for PullCoordinator {
    fn restarting(&mut self, _: &mut Context<Self>) {
        self.supervision.restarting();
        // Deleted pods are not reported again.
        let gone = self.core.take_deleted_pods();
        let pressure = self.core.has_disk_pressure();
        self.core = Core::new(self.policy.clone(), &self.owner);
        self.core.set_deleted_pods(gone);
        self.core.set_disk_pressure(pressure);
        self.journal = self.journal.next_life();
        (self.reading, self.catch_up_planned) = (false, false);
        self.pipeline = self.pipeline.next_life();
        self.rewrite = false;
        self.timer.clear();
        self.newest_finished = 0;
        self.flush_planned = false;
        self.limits_to_store.clear();
        self.shown = None;
        for (_, to) in self.answers.drain() {
            let _ = to.send(Answer::Refused(Refusal::Restarting));
        }
    }
}

handlers! { PullCoordinator, self, ctx;
    RequestPull(message) => self.request(message, ctx),
    PullEvent(event) => self.event(event, ctx),
    RuntimeEvent(event) => self.step(event.into(), ctx),
    SetLimit(message) => {
        self.limits_to_store.push_back(message.stored);
        self.step(PullEvent::SetLimit(message.limit), ctx);
        self.core.limit_view()
    },
    LimitView(_) => self.core.limit_view(),
    Drain(message) => {
        self.draining = Some(message.done);
        self.step(PullEvent::Drain, ctx);
    },
    HandOver(message) => self.hand_over(message, ctx),
    ListPulls(message) => self.core.list(message.max_queued, self.clock.now()),
    PullsFlow(_) => self.core.pulls_view(!self.is_journal_outdated, self.clock.now()),
    CountNow(_) => self.count(),
    Inspected(_) => self.inspect(),
}
