//! Slots: who starts when.
//!
//! Owns: the two lanes, starting and re-starting pulls, and turning a pull of a present image that
//! proves to be a download back into a counted one.

use std::{sync::Arc, time::Duration};

use sha2::{Digest as _, Sha256};

use super::{
    Core, Effect, End, Health, Lane, Note, PRESENT_LANE_MAX, Presence, Pull, PullId, Refusal, Stage, Tally,
    Timer, queue::Class,
};
use crate::{
    clock::Now,
    pulls::record::{PullRecord, RecordState},
    runtime::{Phase, Progress},
};

/// The least pause between two looks at whether a pull stalls.
const STALL_PAUSE: Duration = Duration::from_millis(100);

impl Core {
    /// Starts every queued pull that may start.
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

    /// Puts a pull into the queue at its own place, in the class that the policy gives it.
    pub(super) fn enqueue(&mut self, id: PullId) {
        if let (Some(pull), Some(class)) = (self.pulls.get(&id), self.class_of(id)) {
            self.queue.insert(pull.place(), class);
        }
    }

    /// The limits that apply to a pull.
    pub(super) fn class_of(&self, id: PullId) -> Option<Class> {
        let pull = self.pulls.get(&id)?;
        let registry =
            if self.policy.per_registry > 0 { pull.call.name.registry().clone() } else { Arc::from("") };
        let present = matches!(pull.stage, Stage::Queued { presence: Presence::Present });
        Some(Class { registry, cap: pull.cap(), present })
    }

    fn start(&mut self, id: PullId, lane: Lane, now: Now, fx: &mut Vec<Effect>) {
        let lease = self.lease_name(id);
        if let Some(lease) = &lease {
            self.take_kept(lease, fx);
        }
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        self.queue.remove(pull.place());
        self.present.remove(&pull.place());
        if let Some(at) = pull.presence_until.take() {
            self.timers.remove(&(at, Timer::Presence(id)));
        }
        pull.spent.start(now.mono);
        pull.stage = Stage::Running;
        pull.lease = lease;
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

    /// Asks the runtime for a pull that holds a slot, for the first time or again.
    pub(super) fn ask_runtime(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        self.disarm_pull(id);
        let option = self.option_to_pass(id);
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        pull.stage = Stage::Running;
        pull.attempts += 1;
        pull.progressed = now.mono;
        let (attempt, call, lease) = (pull.attempts, pull.call.clone(), pull.lease.clone());
        let present = pull.lane == Some(Lane::Present);
        if present {
            let until = now.mono + PRESENT_LANE_MAX;
            pull.lane_until = Some(until);
            self.timers.insert((until, Timer::PresentLane(id)));
        }
        self.persist(id, fx);
        fx.push(Effect::Start { pull: id, attempt, call, lease, option, present });
        self.watch_stall(id, now);
    }

    /// Sets the time to see whether a running pull stalls, as the settings want it now.
    pub(super) fn watch_stall(&mut self, id: PullId, now: Now) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        if let Some(at) = pull.stall_at.take() {
            self.timers.remove(&(at, Timer::Stall(id)));
        }
        if let (Stage::Running, Some(limit)) = (&pull.stage, self.policy.stall_timeout) {
            let from = if pull.expects_bytes() { pull.progressed } else { now.mono };
            let at = (from + limit).max(now.mono + STALL_PAUSE);
            pull.stall_at = Some(at);
            self.timers.insert((at, Timer::Stall(id)));
        }
    }

    /// The limit for a runtime that keeps it, no looser than what the callers themselves asked for.
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

    /// One lease for an image and handler: whoever pulls it next finds the bytes there.
    fn lease_name(&self, id: PullId) -> Option<String> {
        let Health::Up(capabilities) = &self.health else { return None };
        // Even where nothing is to be kept: without a lease nothing is known of a pull's progress,
        // and one that stalls could not be told from one that works.
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

    /// Gives back the slot that a pull holds.
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
        if pull.progress.is_none_or(|last| last != progress) {
            pull.progressed = now.mono;
            self.moved = Some(now.mono);
        }
        pull.rate.add(now.mono, progress.bytes_done);
        pull.progress = Some(progress);
        if pull.lane == Some(Lane::Present) && progress.phase == Phase::Downloading {
            self.leave_present_lane(id, now, fx);
        }
    }

    pub(super) fn present_lane_over(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        let still = |pull: &Pull| pull.lane == Some(Lane::Present) && matches!(pull.stage, Stage::Running);
        if self.pulls.get(&id).is_some_and(still) {
            self.leave_present_lane(id, now, fx);
        }
    }

    /// The image was there, but its tag has moved on and layers are being fetched: it needs a slot
    /// like any other. None free: it goes back to its place; the lease keeps what it has.
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
            fx.push(Effect::Cancel { pull: id, attempt });
            let text = format!("{name} was present but is being fetched again; it waits for a slot");
            fx.push(Effect::Note(Note { warn: false, text }));
            fx.push(Effect::Count(Tally::Retried("TagMoved")));
            self.back_to_queue(id, now, fx);
        }
    }

    /// Takes the slot from a pull that does not run and puts it back at its place. Its callers' time
    /// in the queue begins again: they did not spend it there.
    pub(super) fn back_to_queue(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        if self.is_handed_over() {
            return self.give_away(id, fx);
        }
        self.disarm_pull(id);
        self.release_slot(id);
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        pull.spent.stop(now.mono);
        // Not asked again: the answer would be the same and would bring it back here.
        pull.stage = Stage::Queued { presence: Presence::Absent };
        let mut gone = false;
        for caller in pull.callers.clone() {
            if self.draining {
                self.refuse(caller, Refusal::Stopping, fx);
            } else if let Some(refusal) = self.refusal_for_gone(caller) {
                gone = true;
                self.refuse(caller, refusal, fx);
            } else {
                self.renew_patience(caller, now);
            }
        }
        if gone && self.pulls.get(&id).is_some_and(|pull| pull.callers.is_empty()) {
            return self.end(id, End::Cancelled, now, fx);
        }
        self.persist(id, fx);
        self.enqueue(id);
    }

    pub(super) fn stall_due(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        let (Some(pull), Some(limit)) = (self.pulls.get(&id), self.policy.stall_timeout) else { return };
        let idle = now.mono.saturating_sub(pull.progressed);
        if !matches!(pull.stage, Stage::Running) || !pull.expects_bytes() || idle < limit {
            self.watch_stall(id, now);
            return;
        }
        let keeps = pull.lease.is_some() && self.retains();
        let kept = if keeps { "; what has arrived is kept for the next try" } else { "" };
        let refusal = Refusal::Stalled { registry: pull.call.name.registry().to_string(), idle, kept };
        fx.push(Effect::Cancel { pull: id, attempt: pull.attempts });
        fx.push(Effect::Note(Note { warn: true, text: format!("{}: {refusal}", pull.call.name.full()) }));
        for caller in pull.callers.clone() {
            self.refuse(caller, refusal.clone(), fx);
        }
        self.end(id, End::Failed(refusal.to_string()), now, fx);
    }
}

impl Pull {
    /// The runtime was asked, by this agent or by the one before it.
    pub(super) fn is_asked(&self) -> bool {
        matches!(self.stage, Stage::Running | Stage::Predecessor)
    }

    /// Without readings nothing is known; while it unpacks no byte is expected.
    fn expects_bytes(&self) -> bool {
        self.progress.is_some_and(|progress| progress.phase != Phase::Unpacking)
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
