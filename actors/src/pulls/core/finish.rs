//! Ends: answers, losses, and the runtime's coming and going.
//!
//! Owns: what the runtime's word means for a pull and its callers, how long a lost pull waits, and
//! which leases live on.

use std::{sync::Arc, time::Duration};

use keelson_proto::Code;

use super::{
    Answer, Core, Effect, End, FinishedPull, HISTORY, Health, Note, Outcome, Presence, PullId,
    RUNTIME_FULL_PAUSE, Stage, Timer,
};
use crate::{
    clock::Now,
    pulls::record::{KeptLease, Write},
    runtime::{Capabilities, PullReply},
};

/// How many places of failed pulls are kept for another try.
const REENTRY_MAX: usize = 4096;

impl Core {
    pub(super) fn attempt_ended(
        &mut self,
        id: PullId,
        attempt: u32,
        outcome: Outcome,
        now: Now,
        fx: &mut Vec<Effect>,
    ) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        if pull.attempts != attempt || !matches!(pull.stage, Stage::Running) {
            return;
        }
        match outcome {
            Outcome::Lost(reply) if pull.losses < self.policy.runtime_retries && !pull.callers_gone() => {
                pull.losses += 1;
                let until = now.mono + self.policy.hold;
                pull.stage = Stage::Lost { reply, until };
                self.arm(until, Timer::Lost(id));
                let text = format!("{} lost its runtime; it goes on when that is back", self.name_of(id));
                fx.push(Effect::Note(Note { warn: true, text }));
            }
            Outcome::Answered(reply) if self.is_runtime_full(&reply) && !self.policy.reject => {
                let until = now.mono + RUNTIME_FULL_PAUSE;
                if let Some(pull) = self.pulls.get_mut(&id) {
                    pull.stage = Stage::Pausing { until };
                    self.arm(until, Timer::Pause(id));
                }
            }
            Outcome::Answered(reply) | Outcome::Lost(reply) => self.conclude(id, &reply, now, fx),
        }
    }

    /// Whether the runtime refused for the limit that it was handed.
    fn is_runtime_full(&self, reply: &PullReply) -> bool {
        self.runtime_enforces()
            && reply.result.as_ref().is_err_and(|status| {
                status.code == Code::ResourceExhausted && status.message.starts_with("TooManyPullingInParallel")
            })
    }

    /// Answers every caller with the runtime's words and forgets the pull.
    fn conclude(&mut self, id: PullId, reply: &Arc<PullReply>, now: Now, fx: &mut Vec<Effect>) {
        let Some(pull) = self.pulls.get(&id) else { return };
        let end = match &reply.result {
            Ok(_) => End::Succeeded,
            Err(status) => {
                End::Failed(format!("{:?}: {}", status.code, pull.call.scrub(&status.message)))
            }
        };
        let order = pull.order;
        let image = pull.call.key.image.clone();
        for caller in pull.callers.clone() {
            if end != End::Succeeded
                && let Some(pod) = self.callers.get(&caller).and_then(|caller| caller.pod.as_ref())
            {
                let until = now.mono + self.policy.reentry_window;
                self.reentry.insert((pod.uid.clone(), image.clone()), (order, until));
            }
            self.remove_caller(caller);
            fx.push(Effect::Reply { caller, answer: Answer::Runtime(reply.clone()) });
        }
        if self.reentry.len() > REENTRY_MAX {
            self.reentry.retain(|_, (_, until)| *until > now.mono);
        }
        let succeeded = end == End::Succeeded;
        self.end(id, end, now, fx);
        if succeeded {
            // Others who want it with other credentials need not wait for a slot any more.
            for other in self.of_image(&image) {
                self.ask_presence(other, fx);
            }
        }
    }

    /// Forgets a pull: slot, indexes, journal; and settles what becomes of its lease.
    pub(super) fn end(&mut self, id: PullId, end: End, now: Now, fx: &mut Vec<Effect>) {
        self.release_slot(id);
        let Some(pull) = self.pulls.remove(&id) else { return };
        self.queue.remove(pull.place());
        self.present.remove(&pull.place());
        for caller in &pull.callers {
            self.callers.remove(caller);
        }
        if let Some(at) = pull.cancel_at {
            self.disarm(at, Timer::Grace(id));
        }
        if let Stage::Held { until } = pull.stage {
            self.disarm(until, Timer::Held(id));
        }
        if let Some(stall) = self.policy.stall_timeout {
            // Only the common case; one armed under another setting finds nothing to do.
            self.disarm(pull.progressed + stall, Timer::Stall(id));
        }
        let key = &pull.call.key;
        if let Some(ids) = self.by_image.get_mut(&key.image) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.by_image.remove(&key.image);
            }
        }
        if self.by_key.get(key) == Some(&id) {
            self.by_key.remove(key);
        }
        fx.push(Effect::Persist(Write::DeletePull(id.0)));
        if let Some(lease) = pull.lease.clone() {
            self.settle_lease(&key.image, lease, end == End::Succeeded, now, fx);
        }
        self.ended += 1;
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
            end,
        });
        self.finished.truncate(HISTORY);
    }

    fn settle_lease(&mut self, image: &Arc<str>, lease: String, done: bool, now: Now, fx: &mut Vec<Effect>) {
        if self.lease_in_use(image, &lease) {
            return;
        }
        if done {
            fx.push(Effect::DropLease(lease));
            return;
        }
        let at = now.mono + self.policy.progress_retention;
        self.keep_lease(lease.clone(), at);
        let expires_unix_ms = now.unix_ms_at(at);
        fx.push(Effect::Persist(Write::PutLease(KeptLease { lease, image: image.to_string(), expires_unix_ms })));
    }

    pub(super) fn keep_lease(&mut self, lease: String, at: Duration) {
        if let Some(before) = self.kept.insert(lease.clone(), at) {
            self.disarm(before, Timer::LeaseExpiry(lease.clone()));
        }
        self.arm(at, Timer::LeaseExpiry(lease));
    }

    pub(super) fn lease_expired(&mut self, lease: String, fx: &mut Vec<Effect>) {
        if self.kept.remove(&lease).is_some() {
            fx.push(Effect::DropLease(lease.clone()));
            fx.push(Effect::Persist(Write::DeleteLease(lease)));
        }
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
        if matches!(self.pulls.get(&id).map(|pull| &pull.stage), Some(Stage::Pausing { until }) if *until <= now.mono)
        {
            self.ask_runtime(id, now, fx);
        }
    }

    pub(super) fn held_over(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        if matches!(self.pulls.get(&id).map(|pull| &pull.stage), Some(Stage::Held { .. })) {
            let text = format!("nobody came back with credentials for {}; its place is given up", self.name_of(id));
            fx.push(Effect::Note(Note { warn: true, text }));
            self.end(id, End::Cancelled, now, fx);
        }
    }

    pub(super) fn runtime_up(&mut self, capabilities: Capabilities, now: Now, fx: &mut Vec<Effect>) {
        let was_up = matches!(self.health, Health::Up(_));
        self.health = Health::Up(capabilities);
        if !was_up && capabilities.leases {
            let mut keep: std::collections::BTreeSet<String> = self.kept.keys().cloned().collect();
            keep.extend(self.pulls.values().filter_map(|pull| pull.lease.clone()));
            fx.push(Effect::ReapLeases(keep.into_iter().collect()));
        }
        let mut lost: Vec<(u64, PullId, Duration)> = self
            .pulls
            .values()
            .filter_map(|pull| match pull.stage {
                Stage::Lost { until, .. } => Some((pull.order, pull.id, until)),
                _ => None,
            })
            .collect();
        lost.sort_unstable();
        for (_, id, until) in lost {
            self.disarm(until, Timer::Lost(id));
            self.ask_runtime(id, now, fx);
        }
        if !was_up {
            self.forget_outage(now, fx);
        }
    }

    /// Callers who were held for the runtime wait like all others from now on, and presence, which
    /// could not be asked for, can be.
    fn forget_outage(&mut self, now: Now, fx: &mut Vec<Effect>) {
        let again = now.mono + self.policy.reject_interval * self.policy.reject_retries;
        let mut timers = Vec::new();
        for (id, caller) in &mut self.callers {
            if let Some(at) = caller.hold.take() {
                self.timers.remove(&(at, Timer::Hold(*id)));
            }
            if let Some((at, why)) = &mut caller.give_up {
                self.timers.remove(&(*at, Timer::GiveUp(*id)));
                let until = match why {
                    super::GiveUp::Rejected => again,
                    super::GiveUp::QueueTime => now.mono + self.policy.max_queue_time.unwrap_or_default(),
                };
                *at = until;
                timers.push((until, Timer::GiveUp(*id)));
            }
        }
        self.timers.extend(timers);
        self.schedule(now, fx);
        let queued: Vec<PullId> = self.queue.places().map(|(_, id)| id).collect();
        for id in queued {
            self.ask_presence(id, fx);
        }
    }

    pub(super) fn runtime_down(&mut self, reason: String, now: Now, fx: &mut Vec<Effect>) {
        if matches!(self.health, Health::Up(_)) {
            fx.push(Effect::Note(Note { warn: true, text: format!("the container runtime is away: {reason}") }));
        }
        self.health = Health::Down(reason);
        // Answers about presence will not come any more.
        for pull in self.pulls.values_mut() {
            if let Stage::Queued { presence } = &mut pull.stage {
                *presence = Presence::Unasked;
            }
        }
        self.present.clear();
        let _ = now;
    }

    fn name_of(&self, id: PullId) -> String {
        self.pulls.get(&id).map_or_else(String::new, |pull| pull.call.name.full().to_string())
    }
}

impl super::Pull {
    /// Nobody waits, and nobody will: it is within its grace period.
    fn callers_gone(&self) -> bool {
        self.cancel_at.is_some()
    }
}
