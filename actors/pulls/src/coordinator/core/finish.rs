//! Ends of pulls: answers, losses, and outages of the runtime.
//!
//! Owns: the effect of the runtime's answer on a pull and its callers, how long a lost pull waits, and which leases are
//! kept.

use std::{sync::Arc, time::Duration};

use keelson_actor_system::clock::Now;
use keelson_proto::Code;

use super::{
    Answer, CallerId, Core, Effect, FailureClass, FinishedPull, GiveUp, Health, Lane, Note, Pull, PullEnd,
    RUNTIME_FULL_PAUSE, Refusal, Stage, Tally, Timer, reasons,
};
use crate::{
    coordinator::{handover::HandedOutcome, record::Write},
    request::PullId,
    runtime::{Capabilities, Outcome, PullReply},
};

/// A pull that the runtime cancels within this time after the request counts as joined to one that the agent had
/// cancelled: CRI-O makes one pull of equal requests, also while it still stops the first one. Later it may be the
/// runtime's own time limit.
const SHARED_END: Duration = Duration::from_secs(10);

/// Maximum number of pulls of one image whose presence is checked when it has arrived.
const ASK_AT_ONCE: usize = 256;

impl Core {
    pub(super) fn attempt_ended(
        &mut self,
        id: PullId,
        attempt: u32,
        outcome: Outcome,
        now: Now,
        fx: &mut Vec<Effect>,
    ) {
        let Some(pull) = self.pulls.get(&id) else { return };
        if pull.attempts != attempt || !matches!(pull.stage, Stage::Running) {
            return;
        }
        match outcome {
            outcome if self.is_handed_over() && self.is_no_answer(id, &outcome, now) => {
                self.leave_to_successor(id, fx)
            }
            Outcome::Lost(reply) if self.can_ask_again(id) => {
                self.disarm_pull(id);
                let until = now.mono + self.policy.hold;
                if let Some(pull) = self.pulls.get_mut(&id) {
                    pull.losses += 1;
                    pull.stage = Stage::Lost { reply, until };
                    self.arm(until, Timer::Lost(id));
                }
                fx.push(Effect::Count(Tally::Retried("RuntimeLost")));
                let text = format!(
                    "{} interrupted by a runtime outage; it continues when the runtime is up",
                    self.name_of(id)
                );
                fx.push(Effect::Note(Note { warn: true, text }));
            }
            Outcome::Answered(reply) if self.is_runtime_full(&reply) => {
                self.runtime_full(id, &reply, now, fx)
            }
            Outcome::Answered(reply) if self.shared_an_end(id, &reply, now) && self.can_ask_again(id) => {
                if let Some(pull) = self.pulls.get_mut(&id) {
                    pull.losses += 1;
                }
                fx.push(Effect::Count(Tally::Retried("RuntimeCancelled")));
                self.pause(id, now);
            }
            Outcome::Answered(reply) | Outcome::Lost(reply) => self.conclude(id, &reply, now, fx),
        }
    }

    /// Whether the outcome says nothing about this pull itself.
    fn is_no_answer(&self, id: PullId, outcome: &Outcome, now: Now) -> bool {
        match outcome {
            Outcome::Lost(_) => true,
            Outcome::Answered(reply) => self.is_runtime_full(reply) || self.shared_an_end(id, reply, now),
        }
    }

    /// Whether this counts as the end of an earlier pull, which the agent had cancelled.
    fn shared_an_end(&self, id: PullId, reply: &PullReply, now: Now) -> bool {
        reply.result.as_ref().is_err_and(|status| status.code == Code::Cancelled)
            && self.pulls.get(&id).is_some_and(|pull| now.mono.saturating_sub(pull.asked) < SHARED_END)
    }

    fn can_ask_again(&self, id: PullId) -> bool {
        let allowed = |pull: &Pull| pull.losses < self.policy.runtime_retries && !pull.callers_gone();
        self.pulls.get(&id).is_some_and(allowed)
    }

    /// Whether the runtime refused because of the limit that it was passed.
    fn is_runtime_full(&self, reply: &PullReply) -> bool {
        self.runtime_enforces()
            && reply.result.as_ref().is_err_and(|status| {
                status.code == Code::ResourceExhausted
                    && status.message.starts_with("TooManyPullingInParallel")
            })
    }

    /// The runtime enforces the limit, and it is reached. Callers that want a refusal get the runtime's answer; for the
    /// others it is asked again after a pause.
    fn runtime_full(&mut self, id: PullId, reply: &Arc<PullReply>, now: Now, fx: &mut Vec<Effect>) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        pull.losses = 0;
        let (place, resumed, abandoned) = (pull.place(), pull.callers.is_empty(), pull.callers_gone());
        for caller in pull.callers.clone() {
            if let Some(refusal) = self.refusal_for_gone(caller) {
                self.refuse(caller, refusal, fx);
                continue;
            }
            let Some(waiting) = self.callers.get(&caller) else { continue };
            match waiting.give_up {
                Some((_, GiveUp::Rejected)) => self.answer(caller, reply, fx),
                Some((at, GiveUp::QueueTime)) if at <= now.mono => {
                    let waited = now.mono.saturating_sub(waiting.since);
                    self.refuse(caller, Refusal::QueueTime(waited, self.queue.count_before(place)), fx);
                }
                _ => {}
            }
        }
        let wanted = self.pulls.get(&id).is_some_and(|pull| !pull.callers.is_empty());
        if wanted || (resumed && !abandoned && !self.policy.reject) {
            fx.push(Effect::Count(Tally::Retried("RuntimeLimit")));
            self.pause(id, now);
        } else {
            self.conclude(id, reply, now, fx);
        }
    }

    fn pause(&mut self, id: PullId, now: Now) {
        self.disarm_pull(id);
        let until = now.mono + RUNTIME_FULL_PAUSE;
        if let Some(pull) = self.pulls.get_mut(&id) {
            pull.stage = Stage::Pausing { until };
            self.arm(until, Timer::Pause(id));
        }
    }

    fn answer(&mut self, caller: CallerId, reply: &Arc<PullReply>, fx: &mut Vec<Effect>) {
        if self.remove_caller(caller).is_some() {
            fx.push(Effect::Reply { caller, answer: Answer::Runtime(reply.clone()) });
        }
    }

    /// Answers every caller with the runtime's reply, and forgets the pull.
    pub(super) fn conclude(&mut self, id: PullId, reply: &Arc<PullReply>, now: Now, fx: &mut Vec<Effect>) {
        self.report_end(id, HandedOutcome::Answered(reply.as_ref().into()), fx);
        let Some(pull) = self.pulls.get(&id) else { return };
        let end = match &reply.result {
            Ok(_) => PullEnd::Succeeded,
            Err(status) => {
                PullEnd::Failed(format!("{:?}: {}", status.code, pull.call.scrub(&status.message)))
            }
        };
        let failure = reply.result.as_ref().err().map(FailureClass::of);
        let (order, credentials) = (pull.order, pull.call.key.credentials);
        let image = pull.call.key.image.clone();
        for caller in pull.callers.clone() {
            if let Some(pod) = self.callers.get(&caller).and_then(|caller| caller.pod.as_ref()) {
                let until = now.mono + self.policy.reentry_window;
                match end {
                    PullEnd::Succeeded => self.reentry.succeeded(&pod.uid, &image),
                    _ => {
                        let uid = pod.uid.clone();
                        self.reentry.keep_failed(uid, image.clone(), order, credentials, until, now.mono);
                    }
                }
            }
            self.answer(caller, reply, fx);
        }
        if let Some(failure) = failure {
            self.set_end_reason(id, reasons::of_failure(failure));
        }
        let succeeded = end == PullEnd::Succeeded;
        self.end_with(id, end, failure, now, fx);
        if succeeded {
            // Callers with other credentials no longer need a slot. Each success checks more of them, so a few at a
            // time are enough.
            let others: Vec<PullId> =
                self.by_image.get(&image).into_iter().flatten().take(ASK_AT_ONCE).copied().collect();
            for other in others {
                self.ask_presence(other, now, fx);
            }
        }
    }

    pub(super) fn end(&mut self, id: PullId, end: PullEnd, now: Now, fx: &mut Vec<Effect>) {
        self.end_with(id, end, None, now, fx);
    }

    /// Forgets a pull: slot, indexes, journal; and settles its lease.
    fn end_with(
        &mut self,
        id: PullId,
        end: PullEnd,
        failure: Option<FailureClass>,
        now: Now,
        fx: &mut Vec<Effect>,
    ) {
        self.report_end(id, HandedOutcome::Cancelled, fx);
        let (end, why) = self.reason_of(id, end);
        let has_slot = self.pulls.get(&id).is_some_and(|pull| pull.lane.is_some());
        let Some(pull) = self.take_out(id) else { return };
        let key = &pull.call.key;
        fx.push(Effect::Persist(Write::DeletePull(id.0)));
        if end == PullEnd::Succeeded {
            self.succeeded_unread(key);
        }
        self.settle_lease(&pull, &end, failure, now, fx);
        let (queue_wait, pull_time) = pull.spent.total(has_slot, pull.started.is_some(), now.mono);
        self.stop_wanted();
        self.ended += 1;
        self.last_progress = Some(now.mono);
        self.finished.push_front(FinishedPull {
            id,
            image: pull.call.image.clone(),
            registry: pull.call.name.registry().clone(),
            handler: key.handler.clone(),
            pod: pull.call.pod.clone(),
            with_credentials: pull.with_credentials,
            attempts: pull.attempts,
            resumed: pull.resumed,
            requested_unix_ms: pull.requested.unix_ms,
            started_unix_ms: pull.started.map(|at| at.unix_ms),
            finished_unix_ms: now.unix_ms,
            progress: pull.progress,
            queue_wait,
            pull_time,
            end,
            why,
        });
    }

    /// Removes a pull from every list, and frees its slot.
    pub(super) fn take_out(&mut self, id: PullId) -> Option<Pull> {
        self.release_slot(id);
        self.disarm_pull(id);
        let pull = self.pulls.remove(&id)?;
        self.queue.remove(pull.place());
        self.present.remove(&pull.place());
        self.held.remove(&pull.place());
        let key = &pull.call.key;
        if let Some(ids) = self.by_image.get_mut(&key.image) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.by_image.remove(&key.image);
            }
        }
        let joined_by = self.key_of(&pull.call);
        if self.by_key.get(&joined_by) == Some(&id) {
            self.by_key.remove(&joined_by);
        }
        Some(pull)
    }

    pub(super) fn lost_over(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        if let Some(Stage::Lost { reply, until }) = self.pulls.get(&id).map(|pull| &pull.stage)
            && *until <= now.mono
        {
            let reply = reply.clone();
            self.conclude(id, &reply, now, fx);
        }
    }

    pub(super) fn pause_over(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        if !matches!(self.pulls.get(&id).map(|pull| &pull.stage), Some(Stage::Pausing { until }) if *until <= now.mono)
        {
            return;
        }
        if !matches!(self.health, Health::Up(_)) {
            self.pause(id, now);
        } else if self.over_limit(id) {
            self.back_to_queue(id, now, fx);
        } else {
            self.ask_runtime(id, now, fx);
        }
    }

    /// Whether more pulls hold slots than the limit now allows, this one included: the limit was lowered, or the
    /// runtime does not enforce it any more.
    fn over_limit(&self, id: PullId) -> bool {
        let limit = self.own_limit();
        limit > 0
            && self.counted > limit
            && self.pulls.get(&id).is_some_and(|pull| pull.lane == Some(Lane::Counted))
    }

    pub(super) fn held_pull_expired(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        if self.pulls.get(&id).is_some_and(|pull| !pull.with_credentials) {
            // No list of pods arrived. It continues, behind all pulls that callers wait for.
            self.queue_held(id, now, fx);
        } else if matches!(self.pulls.get(&id).map(|pull| &pull.stage), Some(Stage::Held { .. })) {
            let text = format!(
                "no caller returned with credentials for {}; its place is released",
                self.name_of(id)
            );
            fx.push(Effect::Note(Note { warn: true, text }));
            self.set_end_reason(id, "CallerDidNotReturn");
            self.end(id, PullEnd::Cancelled, now, fx);
        }
    }

    pub(super) fn runtime_up(&mut self, capabilities: Capabilities, now: Now, fx: &mut Vec<Effect>) {
        let was_up = matches!(self.health, Health::Up(_));
        let had_leases = matches!(self.health, Health::Up(Capabilities { leases: true, .. }));
        self.health = Health::Up(capabilities);
        self.set_namespaces_matter(!capabilities.ignores_namespace);
        self.away_since = None;
        if !had_leases && capabilities.leases {
            self.reap(fx);
            // The runtime may just now perform what an agent that was killed has asked for.
            self.reap_later(now);
        }
        self.ask_about_kept(fx);
        self.retry_lost(now, fx);
        if !was_up {
            self.forget_outage(now, fx);
        }
    }

    /// Restarts lost pulls in their order; those that exceed the limit (it was lowered, or a different runtime does not
    /// enforce it) wait at their place.
    fn retry_lost(&mut self, now: Now, fx: &mut Vec<Effect>) {
        let is_lost =
            |id: &PullId| self.pulls.get(id).is_some_and(|pull| matches!(pull.stage, Stage::Lost { .. }));
        let lost: Vec<PullId> = self.slots.iter().map(|(_, id)| *id).filter(is_lost).collect();
        let mut again = Vec::new();
        for id in lost.into_iter().rev() {
            if self.over_limit(id) {
                self.back_to_queue(id, now, fx);
            } else {
                again.push(id);
            }
        }
        for id in again.into_iter().rev() {
            self.ask_runtime(id, now, fx);
        }
    }

    /// Callers that were held for the runtime wait in the queue from now on, and presence, which could not be checked,
    /// is checked.
    fn forget_outage(&mut self, now: Now, fx: &mut Vec<Effect>) {
        for (id, caller) in &mut self.callers {
            if let Some(at) = caller.hold.take() {
                self.timers.remove(&(at, Timer::Hold(*id)));
            }
        }
        let callers: Vec<CallerId> = self.callers.keys().copied().collect();
        for id in callers {
            self.restart_queue_time(id, now);
        }
        let queued: Vec<PullId> = self.queue.places().map(|(_, id)| id).collect();
        for id in queued {
            self.ask_presence(id, now, fx);
        }
        self.schedule(now, fx);
    }

    pub(super) fn runtime_down(&mut self, reason: String, now: Now, fx: &mut Vec<Effect>) {
        self.away_since.get_or_insert(now.mono);
        if matches!(self.health, Health::Up(_)) {
            fx.push(Effect::Note(Note {
                warn: true,
                text: format!("the container runtime is down: {reason}"),
            }));
        }
        self.health = Health::Down(reason);
        self.forget_presence();
    }

    fn name_of(&self, id: PullId) -> String {
        self.pulls.get(&id).map_or_else(String::new, |pull| pull.call.name.full().to_string())
    }
}

impl super::Pull {
    fn callers_gone(&self) -> bool {
        self.cancel_at.is_some()
    }
}
