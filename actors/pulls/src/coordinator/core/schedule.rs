//! Slots and starts of pulls.
//!
//! Owns: the two lanes, starting and restarting pulls, and moving a pull of a present image that turns out to be a
//! download to the counted lane.

use std::sync::Arc;

use keelson_actor_system::clock::Now;
use sha2::{Digest as _, Sha256};

use super::{
    Core, Effect, Health, Lane, Note, PRESENT_LANE_MAX, Presence, Pull, PullEnd, Refusal, Stage, Tally,
    Timer, queue::Class,
};
use crate::{
    coordinator::record::{PullRecord, RecordState},
    request::PullId,
    runtime::{Download, Phase, Progress, RuntimeCommand},
};

impl Core {
    pub(super) fn schedule(&mut self, now: Now, fx: &mut Vec<Effect>) {
        if self.draining || !matches!(self.health, Health::Up(_)) {
            return;
        }
        let limit = self.own_limit();
        while (limit == 0 || self.counted < limit)
            && let Some((_, id)) = self.queue.next(|class| self.slot_free(class))
        {
            if self.awaits_presence(id) {
                break;
            }
            self.start(id, Lane::Counted, now, fx);
        }
        while self.present_running < self.policy.present_slots
            && let Some((_, id)) = self.present.first().copied()
        {
            self.start(id, Lane::Present, now, fx);
        }
    }

    pub(super) fn slot_free(&self, class: &Class) -> bool {
        let limit = self.own_limit();
        let of_registry = || self.by_registry.get(&class.registry).copied().unwrap_or(0);
        !class.present
            && (limit == 0 || self.counted < limit)
            && class.cap.is_none_or(|cap| self.counted < cap)
            && (self.policy.per_registry == 0 || of_registry() < self.policy.per_registry)
    }

    /// Queues a pull at its own place, in the class that the policy gives it.
    pub(super) fn enqueue(&mut self, id: PullId) {
        if let (Some(pull), Some(class)) = (self.pulls.get(&id), self.class_of(id)) {
            self.queue.insert(pull.place(), class);
        }
    }

    pub(super) fn class_of(&self, id: PullId) -> Option<Class> {
        let pull = self.pulls.get(&id)?;
        let registry =
            if self.policy.per_registry > 0 { pull.call.name.registry().clone() } else { Arc::from("") };
        let present = matches!(pull.stage, Stage::Queued { presence: Presence::Present });
        Some(Class { registry, cap: pull.cap(), present })
    }

    fn start(&mut self, id: PullId, lane: Lane, now: Now, fx: &mut Vec<Effect>) {
        let lease = self.lease_name(id);
        let inherited = lease.as_ref().and_then(|lease| self.take_kept(lease, fx));
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        self.queue.remove(pull.place());
        self.present.remove(&pull.place());
        if let Some(at) = pull.presence_until.take() {
            self.timers.remove(&(at, Timer::Presence(id)));
        }
        pull.spent.start(now.mono);
        pull.stage = Stage::Running;
        (pull.lease, pull.inherited) = (lease, inherited.or(pull.inherited));
        pull.started.get_or_insert(now);
        self.take_slot(id, lane);
        self.ask_runtime(id, now, fx);
    }

    pub(super) fn take_slot(&mut self, id: PullId, lane: Lane) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        pull.lane = Some(lane);
        self.slots.insert(pull.place());
        match lane {
            Lane::Counted => {
                self.counted += 1;
                *self.by_registry.entry(pull.call.name.registry().clone()).or_default() += 1;
            }
            Lane::Present => self.present_running += 1,
        }
    }

    /// Requests a pull that holds a slot, for the first time or again.
    pub(super) fn ask_runtime(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        self.disarm_pull(id);
        let option = self.option_to_pass(id);
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        pull.stage = Stage::Running;
        pull.attempts += 1;
        (pull.asked, pull.progressed, pull.idle_since) = (now.mono, now.mono, now.mono);
        let (attempt, call, lease) = (pull.attempts, pull.call.clone(), pull.lease.clone());
        let present = pull.lane == Some(Lane::Present);
        if present {
            let until = now.mono + PRESENT_LANE_MAX;
            pull.lane_until = Some(until);
            self.timers.insert((until, Timer::PresentLane(id)));
        }
        self.persist(id, fx);
        fx.push(Effect::Start { pull: id, attempt, call, lease, option, present });
        self.watch_pull_time(id, now);
    }

    /// Sets the deadline of a running pull by the present settings.
    pub(super) fn watch_pull_time(&mut self, id: PullId, now: Now) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        if let Some(at) = pull.give_up_at.take() {
            self.timers.remove(&(at, Timer::PullTime(id)));
        }
        if let (Stage::Running, Some(limit)) = (&pull.stage, self.policy.max_pull_time) {
            let at = (pull.asked + limit).max(now.mono);
            pull.give_up_at = Some(at);
            self.timers.insert((at, Timer::PullTime(id)));
        }
    }

    /// The limit for a runtime that enforces it, no looser than the callers' own options.
    fn option_to_pass(&self, id: PullId) -> Option<u32> {
        if !self.runtime_enforces() {
            return None;
        }
        let cap = self.pulls.get(&id).and_then(Pull::cap);
        match (self.limit(), cap) {
            (0, cap) => cap,
            (limit, Some(cap)) => Some(limit.min(cap)),
            (limit, None) => Some(limit),
        }
    }

    /// One lease per image and handler: the next pull finds the bytes there.
    fn lease_name(&self, id: PullId) -> Option<String> {
        let Health::Up(capabilities) = &self.health else { return None };
        // Even if nothing is retained: without a lease the progress of a pull is unknown, and a stalled pull cannot be
        // distinguished from a working one.
        if !capabilities.leases {
            return None;
        }
        let key = &self.pulls.get(&id)?.call.key;
        let mut hash = Sha256::new();
        hash.update((key.image.len() as u64).to_be_bytes());
        hash.update(key.image.as_bytes());
        hash.update(key.handler.as_bytes());
        let hex: String = hash.finalize().iter().take(12).map(|byte| format!("{byte:02x}")).collect();
        Some(format!("keelson-{}-{hex}", self.owner))
    }

    pub(super) fn release_slot(&mut self, id: PullId) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        self.slots.remove(&pull.place());
        match pull.lane.take() {
            Some(Lane::Counted) => {
                self.counted = self.counted.saturating_sub(1);
                let registry = pull.call.name.registry().clone();
                if let Some(count) = self.by_registry.get_mut(&registry) {
                    *count = count.saturating_sub(1);
                    if *count == 0 {
                        self.by_registry.remove(&registry);
                    }
                }
            }
            Some(Lane::Present) => self.present_running = self.present_running.saturating_sub(1),
            None => {}
        }
    }

    pub(super) fn progressed(&mut self, id: PullId, progress: Progress, now: Now, fx: &mut Vec<Effect>) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        if !matches!(pull.stage, Stage::Running) {
            return;
        }
        let is_same = |last: Progress| Progress { download: progress.download, ..last } == progress;
        let has_moved = !pull.progress.is_some_and(is_same);
        if has_moved {
            pull.progressed = now.mono;
            self.last_progress = Some(now.mono);
        }
        if has_moved || progress.download != Download::Idle {
            pull.idle_since = now.mono;
        }
        pull.rate.add(now.mono, progress.bytes_done);
        pull.progress = Some(progress);
        if pull.lane == Some(Lane::Present) && progress.phase == Phase::Downloading {
            self.leave_present_lane(id, now, fx);
        }
        self.end_if_stalled(id, now, fx);
    }

    pub(super) fn present_lane_over(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        let still = |pull: &Pull| pull.lane == Some(Lane::Present) && matches!(pull.stage, Stage::Running);
        if self.pulls.get(&id).is_some_and(still) {
            self.leave_present_lane(id, now, fx);
        }
    }

    /// The image was present, but its tag has moved and layers are being fetched: it needs a counted slot. If none is
    /// free, it returns to its place; the lease keeps the bytes.
    fn leave_present_lane(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        if let Some(at) = pull.lane_until.take() {
            self.timers.remove(&(at, Timer::PresentLane(id)));
        }
        let class = Class { registry: pull.call.name.registry().clone(), cap: pull.cap(), present: false };
        let (abandoned, attempt, name) =
            (pull.cancel_at.is_some(), pull.attempts, pull.call.name.full().clone());
        // The successor knows how many slots are taken.
        if self.slot_free(&class) && !self.is_handed_over() {
            self.release_slot(id);
            let Some(pull) = self.pulls.get_mut(&id) else { return };
            pull.lane = Some(Lane::Counted);
            self.slots.insert(pull.place());
            self.counted += 1;
            *self.by_registry.entry(class.registry).or_default() += 1;
        } else if abandoned {
            self.cancel(id, now, fx);
        } else {
            fx.push(Effect::Runtime(RuntimeCommand::CancelPull { pull: id, attempt }));
            let text = format!("{name} was present but is fetched again; it waits for a slot");
            fx.push(Effect::Note(Note { warn: false, text }));
            fx.push(Effect::Count(Tally::Retried("TagMoved")));
            self.back_to_queue(id, now, fx);
        }
    }

    /// Takes the slot from a pull that does not run and puts it back at its place. Its callers' time in the queue
    /// restarts: they did not spend it there.
    pub(super) fn back_to_queue(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        if self.is_handed_over() {
            return self.leave_to_successor(id, fx);
        }
        self.disarm_pull(id);
        self.release_slot(id);
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        pull.spent.stop(now.mono);
        // Not checked again: the answer would be the same, and the pull would return here.
        pull.stage = Stage::Queued { presence: Presence::Absent };
        let mut gone = false;
        for caller in pull.callers.clone() {
            if self.draining {
                self.refuse(caller, Refusal::Stopping, fx);
            } else if let Some(refusal) = self.refusal_for_gone(caller) {
                gone = true;
                self.refuse(caller, refusal, fx);
            } else {
                self.restart_queue_time(caller, now);
            }
        }
        if gone && self.pulls.get(&id).is_some_and(|pull| pull.callers.is_empty()) {
            return self.end(id, PullEnd::Cancelled, now, fx);
        }
        self.persist(id, fx);
        self.enqueue(id);
    }

    /// Cancels a pull that has downloaded without a new byte for too long. Only a reading shows that: waiting for the
    /// runtime, unpacking, and readings that fail or are missing are not stalls.
    fn end_if_stalled(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        let (Some(pull), Some(limit)) = (self.pulls.get(&id), self.policy.stall_timeout) else { return };
        let idle = now.mono.saturating_sub(pull.idle_since);
        if matches!(pull.stage, Stage::Running) && idle >= limit {
            let (registry, kept) = (pull.call.name.registry().to_string(), self.retained_note(pull));
            self.end_running(id, &Refusal::Stalled { registry, idle, kept }, now, fx);
        }
    }

    pub(super) fn pull_time_over(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        let (Some(pull), Some(limit)) = (self.pulls.get(&id), self.policy.max_pull_time) else { return };
        if matches!(pull.stage, Stage::Running) {
            let phase = pull.progress.map_or("pulling", |progress| progress.phase.name());
            let refusal = Refusal::PullTime { limit, phase, kept: self.retained_note(pull) };
            self.end_running(id, &refusal, now, fx);
        }
    }

    fn retained_note(&self, pull: &Pull) -> &'static str {
        let keeps = pull.lease.is_some() && self.retains();
        if keeps { "; the received content is retained for the next attempt" } else { "" }
    }

    fn end_running(&mut self, id: PullId, refusal: &Refusal, now: Now, fx: &mut Vec<Effect>) {
        let Some(pull) = self.pulls.get(&id) else { return };
        fx.push(Effect::Runtime(RuntimeCommand::CancelPull { pull: id, attempt: pull.attempts }));
        fx.push(Effect::Note(Note { warn: true, text: format!("{}: {refusal}", pull.call.name.full()) }));
        for caller in pull.callers.clone() {
            self.refuse(caller, refusal.clone(), fx);
        }
        self.set_end_reason(id, refusal.reason());
        self.end(id, PullEnd::Failed(refusal.to_string()), now, fx);
    }
}

impl Pull {
    /// The runtime was asked, by this agent or its predecessor.
    pub(super) fn is_asked(&self) -> bool {
        matches!(self.stage, Stage::Running | Stage::Predecessor)
    }

    pub(super) fn record(&self) -> PullRecord {
        PullRecord {
            id: self.id.0,
            order: Some(self.order),
            image: self.call.image.to_string(),
            runtime_handler: self.call.key.handler.to_string(),
            requested_unix_ms: self.requested.unix_ms,
            wanted_unix_ms: Some(self.wanted_unix_ms),
            attempts: self.attempts,
            with_credentials: self.with_credentials,
            state: if self.lane.is_some() { RecordState::Running } else { RecordState::Queued },
            pod: self.call.pod.clone(),
            lease: self.lease.clone(),
        }
    }
}
