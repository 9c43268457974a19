//! Callers: they come, they wait, they leave.
//!
//! Owns: joining and making pulls, the patience of callers, and what their leaving means.

use std::{cmp::Ordering, sync::Arc, time::Duration};

use super::{
    Caller, CallerId, Core, Effect, End, GiveUp, Health, Presence, Pull, PullId, Refusal, Stage, Timer, types::Answer,
};
use crate::{
    clock::Now,
    pulls::{record::Write, request::PullCall},
};

impl Core {
    pub(super) fn request(
        &mut self,
        caller: CallerId,
        call: Arc<PullCall>,
        patience: Option<Duration>,
        now: Now,
        fx: &mut Vec<Effect>,
    ) {
        let refusal = if self.draining {
            Some(Refusal::Stopping)
        } else if self.callers.len() >= self.policy.max_callers {
            Some(Refusal::TooManyCallers(self.callers.len()))
        } else {
            None
        };
        if let Some(refusal) = refusal {
            fx.push(Effect::Reply { caller, answer: Answer::Refused(refusal) });
            return;
        }
        let option = if self.policy.obey_option { call.option } else { None };
        let pod = call.pod.clone();
        let (pull, new) = match self.joinable(&call) {
            Some(pull) => {
                self.join(pull, call, option);
                (pull, false)
            }
            None => (self.create(call, option, now), true),
        };
        self.add_caller(caller, pull, pod, option, patience, now);
        self.schedule(now, fx);
        if new {
            self.settle_new(pull, fx);
        }
    }

    /// The pull that a caller with this call waits for: one with the same key, or a held one whose
    /// credentials are gone (there is no result to share yet, so any credentials may take it up).
    fn joinable(&self, call: &PullCall) -> Option<PullId> {
        if let Some(id) = self.by_key.get(&call.key)
            && let Some(pull) = self.pulls.get(id)
            && (self.policy.deduplicate || (pull.resumed && pull.callers.is_empty()))
        {
            return Some(*id);
        }
        let held = |id: &&PullId| {
            self.pulls.get(id).is_some_and(|pull| {
                matches!(pull.stage, Stage::Held { .. }) && pull.call.key.handler == call.key.handler
            })
        };
        call.key.credentials?;
        self.by_image.get(&call.key.image)?.iter().find(held).copied()
    }

    fn join(&mut self, id: PullId, call: Arc<PullCall>, option: Option<u32>) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        if let Some(at) = pull.cancel_at.take() {
            self.timers.remove(&(at, Timer::Grace(id)));
        }
        pull.cap = match (pull.cap, option) {
            (Some(a), Some(b)) if !pull.callers.is_empty() => Some(a.max(b)),
            (_, option) if pull.callers.is_empty() => option,
            _ => None,
        };
        if let Stage::Held { until } = pull.stage {
            pull.stage = Stage::Queued { presence: Presence::Unasked };
            pull.call = call;
            let key = pull.call.key.clone();
            self.timers.remove(&(until, Timer::Held(id)));
            self.by_key.insert(key, id);
        }
        if self.pulls.get(&id).is_some_and(Pull::is_queued) {
            self.enqueue(id);
        }
    }

    fn create(&mut self, call: Arc<PullCall>, option: Option<u32>, now: Now) -> PullId {
        let id = PullId(self.next_id);
        self.next_id += 1;
        // Ids start above every order that was ever given, so that id and order compare.
        let order = self.reentry_order(&call, now).unwrap_or(id.0);
        let pull = Pull {
            id,
            order,
            with_credentials: call.key.credentials.is_some(),
            callers: std::collections::BTreeSet::new(),
            stage: Stage::Queued { presence: Presence::Unasked },
            lane: None,
            attempts: 0,
            losses: 0,
            requested: now,
            started: None,
            cap: option,
            lease: None,
            resumed: false,
            cancel_at: None,
            progress: None,
            progressed: now.mono,
            rate: super::view::Rate::default(),
            call,
        };
        self.insert(pull);
        self.enqueue(id);
        id
    }

    pub(super) fn insert(&mut self, pull: Pull) {
        let id = pull.id;
        self.by_image.entry(pull.call.key.image.clone()).or_default().push(id);
        if !matches!(pull.stage, Stage::Held { .. }) {
            self.by_key.entry(pull.call.key.clone()).or_insert(id);
        }
        self.pulls.insert(id, pull);
    }

    fn reentry_order(&mut self, call: &PullCall, now: Now) -> Option<u64> {
        let uid = call.pod.as_ref()?.uid.clone();
        let (order, until) = self.reentry.remove(&(uid, call.key.image.clone()))?;
        (until.cmp(&now.mono) == Ordering::Greater).then_some(order)
    }

    fn add_caller(
        &mut self,
        id: CallerId,
        pull: PullId,
        pod: Option<crate::pulls::Pod>,
        option: Option<u32>,
        patience: Option<Duration>,
        now: Now,
    ) {
        let give_up = if self.policy.reject || option.is_some() {
            Some((now.mono + self.policy.reject_interval * self.policy.reject_retries, GiveUp::Rejected))
        } else {
            self.policy.max_queue_time.map(|most| (now.mono + most, GiveUp::QueueTime))
        };
        let hold = (!matches!(self.health, Health::Up(_))).then(|| now.mono + self.policy.hold);
        let deadline = patience.map(|patience| now.mono + patience);
        if let Some(at) = deadline {
            self.arm(at, Timer::Deadline(id));
        }
        if let Some((at, _)) = give_up {
            self.arm(at, Timer::GiveUp(id));
        }
        if let Some(at) = hold {
            self.arm(at, Timer::Hold(id));
        }
        self.callers.insert(id, Caller { pull, since: now.mono, pod, deadline, give_up, hold });
        if let Some(pull) = self.pulls.get_mut(&pull) {
            pull.callers.insert(id);
        }
    }

    /// A new pull that could not start: write it down, and see whether its image is there already.
    fn settle_new(&mut self, id: PullId, fx: &mut Vec<Effect>) {
        if self.pulls.get(&id).is_some_and(Pull::is_queued) {
            self.persist(id, fx);
            self.ask_presence(id, fx);
        }
    }

    pub(super) fn ask_presence(&mut self, id: PullId, fx: &mut Vec<Effect>) {
        if !self.policy.fast_lane || !matches!(self.health, Health::Up(_)) {
            return;
        }
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        if let Stage::Queued { presence } = &mut pull.stage
            && matches!(presence, Presence::Unasked | Presence::Absent)
        {
            *presence = Presence::Asked;
            fx.push(Effect::CheckPresent { pull: id, call: pull.call.clone() });
        }
    }

    pub(super) fn presence(&mut self, id: PullId, present: Option<bool>, fx: &mut Vec<Effect>) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let place = pull.place();
        if let Stage::Queued { presence } = &mut pull.stage
            && *presence == Presence::Asked
        {
            *presence = match present {
                Some(true) => Presence::Present,
                Some(false) => Presence::Absent,
                None => Presence::Unasked,
            };
            if *presence == Presence::Present {
                self.present.insert(place);
            }
        }
        let _ = fx;
    }

    pub(super) fn caller_left(&mut self, id: CallerId, now: Now, fx: &mut Vec<Effect>) {
        if let Some(pull) = self.remove_caller(id) {
            self.after_leaving(pull, now, fx);
        }
    }

    /// Forgets a caller and its timers; says which pull it waited for.
    pub(super) fn remove_caller(&mut self, id: CallerId) -> Option<PullId> {
        let caller = self.callers.remove(&id)?;
        if let Some(at) = caller.deadline {
            self.disarm(at, Timer::Deadline(id));
        }
        if let Some((at, _)) = caller.give_up {
            self.disarm(at, Timer::GiveUp(id));
        }
        if let Some(at) = caller.hold {
            self.disarm(at, Timer::Hold(id));
        }
        if let Some(pull) = self.pulls.get_mut(&caller.pull) {
            pull.callers.remove(&id);
        }
        Some(caller.pull)
    }

    /// The last caller gone: a waiting pull is forgotten, a running one gets the grace period.
    fn after_leaving(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        if !pull.callers.is_empty() {
            return;
        }
        match pull.stage {
            Stage::Running if !self.policy.cancel_grace.is_zero() => {
                let at = now.mono + self.policy.cancel_grace;
                pull.cancel_at = Some(at);
                self.arm(at, Timer::Grace(id));
            }
            _ => self.cancel(id, now, fx),
        }
    }

    pub(super) fn grace_over(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        if self.pulls.get(&id).is_some_and(|pull| pull.cancel_at.is_some() && pull.callers.is_empty()) {
            self.cancel(id, now, fx);
        }
    }

    fn cancel(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        if let Some(pull) = self.pulls.get(&id)
            && matches!(pull.stage, Stage::Running)
        {
            fx.push(Effect::Cancel { pull: id, attempt: pull.attempts });
        }
        self.end(id, End::Cancelled, now, fx);
    }

    pub(super) fn deadline_passed(&mut self, id: CallerId, now: Now, fx: &mut Vec<Effect>) {
        let Some(caller) = self.callers.get(&id) else { return };
        let waited = now.mono.saturating_sub(caller.since);
        let doing = match self.pulls.get(&caller.pull).map(|pull| &pull.stage) {
            Some(Stage::Running) => "running",
            Some(Stage::Lost { .. }) => "waiting for the container runtime",
            _ => "queued",
        };
        self.refuse_and_leave(id, Refusal::Deadline(waited, doing), now, fx);
    }

    pub(super) fn give_up(&mut self, id: CallerId, now: Now, fx: &mut Vec<Effect>) {
        let Some(caller) = self.callers.get(&id) else { return };
        let Some(pull) = self.pulls.get(&caller.pull) else { return };
        // Time spent waiting for an absent runtime is not time spent in a full queue.
        if !pull.is_queued() || !matches!(self.health, Health::Up(_)) {
            return;
        }
        let waited = now.mono.saturating_sub(caller.since);
        let refusal = match caller.give_up {
            Some((_, GiveUp::QueueTime)) => Refusal::QueueTime(waited, self.queue.before(pull.place())),
            _ => Refusal::TooMany {
                running: self.counted,
                limit: pull.cap.map_or(self.own_limit(), |cap| match self.own_limit() {
                    0 => cap,
                    own => own.min(cap),
                }),
                queued: self.queue.len(),
                tries: self.policy.reject_retries + 1,
                waited,
            },
        };
        self.refuse_and_leave(id, refusal, now, fx);
    }

    pub(super) fn hold_over(&mut self, id: CallerId, now: Now, fx: &mut Vec<Effect>) {
        let Some(caller) = self.callers.get(&id) else { return };
        let reason = match &self.health {
            Health::Up(_) => return,
            Health::Down(reason) => reason.clone(),
            Health::Unknown => "it has not answered since the agent started".to_owned(),
        };
        let held = now.mono.saturating_sub(caller.since);
        self.refuse_and_leave(id, Refusal::RuntimeAway { held, reason }, now, fx);
    }

    fn refuse_and_leave(&mut self, id: CallerId, refusal: Refusal, now: Now, fx: &mut Vec<Effect>) {
        if let Some(pull) = self.remove_caller(id) {
            fx.push(Effect::Reply { caller: id, answer: Answer::Refused(refusal) });
            self.after_leaving(pull, now, fx);
        }
    }

    /// Answers a caller but leaves its pull as it is.
    pub(super) fn refuse(&mut self, id: CallerId, refusal: Refusal, fx: &mut Vec<Effect>) {
        if self.remove_caller(id).is_some() {
            fx.push(Effect::Reply { caller: id, answer: Answer::Refused(refusal) });
        }
    }

    pub(super) fn persist(&self, id: PullId, fx: &mut Vec<Effect>) {
        if let Some(pull) = self.pulls.get(&id) {
            fx.push(Effect::Persist(Write::PutPull(pull.record())));
        }
    }
}
