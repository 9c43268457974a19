//! Callers: arrival, waiting, leaving.
//!
//! Owns: joining and making pulls, the time limits of callers, and the effect of their leaving.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use keelson_actor_system::clock::Now;

use super::{
    Caller, CallerId, Core, Effect, GiveUp, Health, Presence, Pull, PullEnd, Refusal, Stage, Timer,
    types::Answer,
};
use crate::{
    coordinator::record::Write,
    request::{PullCall, PullId, PullKey},
    runtime::RuntimeCommand,
};

impl Core {
    pub(super) fn request(
        &mut self,
        caller: CallerId,
        call: Arc<PullCall>,
        timeout: Option<Duration>,
        now: Now,
        fx: &mut Vec<Effect>,
    ) {
        let too_many = self.callers.len() >= self.policy.max_callers;
        let too_many = || too_many.then_some(Refusal::TooManyCallers(self.callers.len()));
        if let Some(refusal) = self.refusal_at_the_end().or_else(too_many) {
            fx.push(Effect::Reply { caller, answer: Answer::Refused(refusal) });
            return;
        }
        let option = if self.policy.obey_option { call.option } else { None };
        let pod = call.pod.clone();
        let joinable = self.joinable(&call);
        if let Some(refusal) = self.refusal_to_join(joinable, &call) {
            fx.push(Effect::Reply { caller, answer: Answer::Refused(refusal) });
            return;
        }
        let (pull, news) = match joinable {
            Some(pull) => {
                self.joined(pull, fx);
                self.claim(pull, now, fx);
                (pull, self.join(pull, call))
            }
            None => (self.create(call, now), true),
        };
        self.add_caller(caller, pull, pod, option, timeout, now);
        if news {
            self.ask_presence(pull, now, fx);
        }
        self.schedule(now, fx);
        // A pull that has started has its record. The others get it now, also while they only wait for the presence
        // check: a kill must not let a later pull, whose check was answered first, overtake.
        if news && self.pulls.get(&pull).is_some_and(Pull::is_queued) {
            self.persist(pull, fx);
        }
    }

    /// A caller whose pod is gone starts no pull, and joins none that waits: it might take a place that others have.
    fn refusal_to_join(&self, joinable: Option<PullId>, call: &PullCall) -> Option<Refusal> {
        let pod = self.deleted_pods.pod(&call.pod.as_ref()?.uid)?;
        let waits = joinable.and_then(|id| self.pulls.get(&id)).is_none_or(Pull::has_not_begun);
        waits.then(|| Refusal::PodGone { pod: pod.to_owned(), image: call.image.to_string() })
    }

    /// The pull that this call waits for: one with the same key, or a held one whose credentials are gone (there is no
    /// result to share yet, so any credentials may take it over).
    fn joinable(&self, call: &PullCall) -> Option<PullId> {
        if let Some(id) = self.by_key.get(&self.key_of(call))
            && let Some(pull) = self.pulls.get(id)
            && (self.policy.deduplicate || (pull.resumed && pull.callers.is_empty()))
        {
            return Some(*id);
        }
        let held = |id: &&PullId| {
            self.pulls.get(id).is_some_and(|pull| {
                let (kept, wanted) = (&pull.call.key, &call.key);
                matches!(pull.stage, Stage::Held { .. })
                    && kept.handler == wanted.handler
                    && pull.with_credentials == wanted.credentials.is_some()
                    && (!self.namespaces_matter || kept.namespace == wanted.namespace)
            })
        };
        self.by_image.get(&call.key.image)?.iter().find(held).copied()
    }

    /// The key of a call, as far as the runtime's use of namespaces is known.
    pub(super) fn key_of(&self, call: &PullCall) -> PullKey {
        let mut key = call.key.clone();
        if !self.namespaces_matter {
            key.namespace = Arc::from("");
        }
        key
    }

    /// Sets what the runtime does with namespaces. Separate pulls stay separate; new callers join the first.
    pub(super) fn set_namespaces_matter(&mut self, matter: bool) {
        if self.namespaces_matter == matter {
            return;
        }
        self.namespaces_matter = matter;
        self.by_key.clear();
        let mut places: Vec<_> = self.pulls.values().map(Pull::place).collect();
        places.sort_unstable();
        for (_, id) in places {
            if let Some(pull) = self.pulls.get(&id)
                && !matches!(pull.stage, Stage::Held { .. })
            {
                let key = self.key_of(&pull.call);
                self.by_key.entry(key).or_insert(id);
            }
        }
    }

    /// Returns whether a held place was taken.
    fn join(&mut self, id: PullId, call: Arc<PullCall>) -> bool {
        let Some(pull) = self.pulls.get_mut(&id) else { return false };
        if let Some(at) = pull.cancel_at.take() {
            self.timers.remove(&(at, Timer::Grace(id)));
        }
        if matches!(pull.stage, Stage::Predecessor) {
            // Keeps the caller's credentials, in case the pull has to restart here.
            pull.call = call;
            return false;
        }
        let Stage::Held { until } = pull.stage else { return false };
        pull.stage = Stage::Queued { presence: Presence::Unasked };
        pull.call = call;
        self.held.remove(&pull.place());
        self.timers.remove(&(until, Timer::Held(id)));
        let call = pull.call.clone();
        self.by_key.entry(self.key_of(&call)).or_insert(id);
        self.enqueue(id);
        true
    }

    fn create(&mut self, call: Arc<PullCall>, now: Now) -> PullId {
        let id = PullId(self.next_id);
        self.next_id += 1;
        // IDs start above every order ever given, so that ID and order compare.
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
            options: BTreeMap::new(),
            lease: None,
            inherited: None,
            resumed: false,
            unclaimed: false,
            wanted_unix_ms: now.unix_ms,
            refused: None,
            reason: None,
            spent: super::reasons::PhaseTimes::from(now.mono),
            cancel_at: None,
            presence_until: None,
            give_up_at: None,
            lane_until: None,
            progress: None,
            asked: now.mono,
            progressed: now.mono,
            idle_since: now.mono,
            rate: super::view::Rate::default(),
            call,
        };
        self.insert(pull);
        self.enqueue(id);
        self.plan_wanted(now);
        id
    }

    pub(super) fn insert(&mut self, pull: Pull) {
        let id = pull.id;
        self.by_image.entry(pull.call.key.image.clone()).or_default().push(id);
        if matches!(pull.stage, Stage::Held { .. }) {
            self.held.insert(pull.place());
        } else {
            self.by_key.entry(self.key_of(&pull.call)).or_insert(id);
        }
        self.pulls.insert(id, pull);
    }

    fn reentry_order(&mut self, call: &PullCall, now: Now) -> Option<u64> {
        self.reentry.take(&call.pod.as_ref()?.uid, &call.key.image, call.key.credentials, now.mono)
    }

    fn add_caller(
        &mut self,
        id: CallerId,
        pull: PullId,
        pod: Option<crate::request::Pod>,
        option: Option<u32>,
        timeout: Option<Duration>,
        now: Now,
    ) {
        // A caller with the pull option asked for its own limit, and to be refused when it is reached.
        let give_up = if self.policy.reject || option.is_some() {
            Some((now.mono + self.policy.reject_interval * self.policy.reject_retries, GiveUp::Rejected))
        } else {
            self.policy.max_queue_time.map(|most| (now.mono + most, GiveUp::QueueTime))
        };
        let hold = (!matches!(self.health, Health::Up(_))).then(|| now.mono + self.policy.hold);
        let deadline = timeout.map(|timeout| now.mono + timeout);
        if let Some(at) = deadline {
            self.arm(at, Timer::Deadline(id));
        }
        if let Some((at, _)) = give_up {
            self.arm(at, Timer::GiveUp(id));
        }
        if let Some(at) = hold {
            self.arm(at, Timer::Hold(id));
        }
        let noticed = super::notice::NoticeState::default();
        self.callers
            .insert(id, Caller { pull, since: now.mono, pod, option, deadline, give_up, hold, noticed });
        self.plan_notice(id);
        self.change_callers(pull, |pull| {
            pull.refused = None;
            pull.callers.insert(id);
            *pull.options.entry(option).or_default() += 1;
        });
    }

    pub(super) fn caller_left(&mut self, id: CallerId, now: Now, fx: &mut Vec<Effect>) {
        self.keep_place(id, now);
        if let Some(pull) = self.remove_caller(id) {
            if let Some(pull) = self.pulls.get_mut(&pull) {
                pull.refused = None;
            }
            self.after_leaving(pull, now, fx);
        }
    }

    /// A caller left by itself: its place is kept for a while, in case it returns.
    fn keep_place(&mut self, id: CallerId, now: Now) {
        let Some(caller) = self.callers.get(&id) else { return };
        if let (Some(pod), Some(pull)) = (&caller.pod, self.pulls.get(&caller.pull)) {
            let until = now.mono + self.policy.reentry_window;
            let image = pull.call.key.image.clone();
            self.reentry.keep_left(pod.uid.clone(), image, pull.order, until, now.mono);
        }
    }

    /// Forgets a caller and its timers; returns the pull it waited for.
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
        if let Some(at) = caller.noticed.at {
            self.disarm(at, Timer::Notice(id));
        }
        self.change_callers(caller.pull, |pull| {
            pull.callers.remove(&id);
            if let Some(count) = pull.options.get_mut(&caller.option) {
                *count -= 1;
                if *count == 0 {
                    pull.options.remove(&caller.option);
                }
            }
        });
        Some(caller.pull)
    }

    /// Changes the callers of a pull; its class in the queue follows the option that results.
    fn change_callers(&mut self, id: PullId, change: impl FnOnce(&mut Pull)) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let before = pull.cap();
        change(pull);
        if pull.cap() != before && pull.is_queued() {
            self.enqueue(id);
        }
    }

    /// After the last caller left, a waiting pull is forgotten, and a running one gets the grace period.
    fn after_leaving(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        if !pull.callers.is_empty() {
            return;
        }
        match pull.stage {
            // The predecessor knows whether it has callers there.
            Stage::Predecessor => {}
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

    pub(super) fn cancel(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        if let Some(pull) = self.pulls.get(&id)
            && matches!(pull.stage, Stage::Running)
        {
            fx.push(Effect::Runtime(RuntimeCommand::CancelPull { pull: id, attempt: pull.attempts }));
        }
        self.end(id, PullEnd::Cancelled, now, fx);
    }

    pub(super) fn deadline_passed(&mut self, id: CallerId, now: Now, fx: &mut Vec<Effect>) {
        let Some(caller) = self.callers.get(&id) else { return };
        let waited = now.mono.saturating_sub(caller.since);
        let doing = match self.pulls.get(&caller.pull).map(|pull| &pull.stage) {
            Some(Stage::Running | Stage::Predecessor) => "running",
            Some(Stage::Lost { .. }) => "waiting for the container runtime",
            Some(Stage::Pausing { .. }) => "waiting for the container runtime's own download limit",
            _ => "queued",
        };
        self.keep_place(id, now);
        self.refuse_and_leave(id, Refusal::Deadline(waited, doing), now, fx);
    }

    pub(super) fn give_up(&mut self, id: CallerId, now: Now, fx: &mut Vec<Effect>) {
        let Some(caller) = self.callers.get(&id) else { return };
        let Some(pull) = self.pulls.get(&caller.pull) else { return };
        let waits = pull.is_queued() || matches!(pull.stage, Stage::Pausing { .. });
        // Waiting for an unavailable runtime does not count as time in a full queue.
        if !waits || !matches!(self.health, Health::Up(_)) {
            return;
        }
        let waited = now.mono.saturating_sub(caller.since);
        let refusal = match caller.give_up {
            Some((_, GiveUp::QueueTime)) => Refusal::QueueTime(waited, self.queue.count_before(pull.place())),
            _ => {
                let (running, limit) = self.reached(pull);
                Refusal::TooMany { running, limit, queued: self.queue.len(), waited }
            }
        };
        self.refuse_and_leave(id, refusal, now, fx);
    }

    /// The limit that makes a pull wait, and the number of pulls in flight under it.
    pub(super) fn reached(&self, pull: &Pull) -> (u32, u32) {
        let of_registry = self.by_registry.get(pull.call.name.registry()).copied().unwrap_or(0);
        let limit = match (self.limit(), pull.cap()) {
            (0, cap) => cap,
            (limit, cap) => Some(cap.map_or(limit, |cap| cap.min(limit))),
        };
        match limit {
            Some(limit) if self.counted >= limit => (self.counted, limit),
            _ if self.policy.per_registry > 0 => (of_registry, self.policy.per_registry),
            limit => (self.counted, limit.unwrap_or(0)),
        }
    }

    /// Restarts the time limit of callers whose time in the queue is over, or does not count.
    pub(super) fn restart_queue_time(&mut self, id: CallerId, now: Now) {
        let Some(caller) = self.callers.get_mut(&id) else { return };
        let Some((at, why)) = &mut caller.give_up else { return };
        let all = match why {
            GiveUp::Rejected => self.policy.reject_interval * self.policy.reject_retries,
            GiveUp::QueueTime => self.policy.max_queue_time.unwrap_or_default(),
        };
        self.timers.remove(&(*at, Timer::GiveUp(id)));
        *at = now.mono + all;
        self.timers.insert((*at, Timer::GiveUp(id)));
    }

    pub(super) fn held_caller_expired(&mut self, id: CallerId, now: Now, fx: &mut Vec<Effect>) {
        let Some(caller) = self.callers.get(&id) else { return };
        // The call is under way: the runtime may fail its probes and still pull.
        if self.pulls.get(&caller.pull).is_some_and(Pull::is_asked) {
            return;
        }
        let reason = match &self.health {
            Health::Up(_) => return,
            Health::Down(reason) => reason.clone(),
            Health::Unknown => "no answer since the agent started".to_owned(),
        };
        let held = now.mono.saturating_sub(caller.since);
        self.refuse_and_leave(id, Refusal::RuntimeAway { held, reason }, now, fx);
    }

    pub(super) fn refuse_and_leave(
        &mut self,
        id: CallerId,
        refusal: Refusal,
        now: Now,
        fx: &mut Vec<Effect>,
    ) {
        if let Some(pull) = self.refuse(id, refusal, fx) {
            self.after_leaving(pull, now, fx);
        }
    }

    /// Answers a caller but leaves its pull as it is.
    pub(super) fn refuse(&mut self, id: CallerId, refusal: Refusal, fx: &mut Vec<Effect>) -> Option<PullId> {
        let pull = self.remove_caller(id)?;
        if let Some(pull) = self.pulls.get_mut(&pull) {
            pull.refused = Some(refusal.clone());
        }
        fx.push(Effect::Reply { caller: id, answer: Answer::Refused(refusal) });
        Some(pull)
    }

    pub(super) fn persist(&mut self, id: PullId, fx: &mut Vec<Effect>) {
        if let Some(pull) = self.pulls.get(&id) {
            fx.push(Effect::Persist(Write::PutPull(pull.record())));
        }
    }
}
