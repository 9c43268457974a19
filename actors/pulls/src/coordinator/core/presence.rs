//! Presence checks: whether the runtime already has an image, asked before a pull takes a counted slot.
//!
//! Owns: the check, its result and its time limit. In: pulls under a limit, the runtime's answers. Out: `CheckPresent`,
//! and pulls that may run beside the limit. KEP-3673: an image that exists succeeds before anything is counted.
//!
//! During a check, no pull behind the checked one takes a counted slot, so that the order of arrival holds. After a
//! late answer or an error the pull counts.

use std::time::Duration;

use keelson_actor_system::clock::Now;

use super::{Core, Effect, Health, Presence, Stage, Timer, queue::Class};
use crate::request::PullId;
use crate::runtime::RuntimeCommand;

/// How long a pull and those behind it wait for the answer. ImageStatus is a local lookup of a millisecond.
pub(super) const PRESENCE_TIMEOUT: Duration = Duration::from_secs(3);

impl Core {
    /// Whether any limit applies to pulls of this class. Otherwise no pull is counted, and there is nothing to check.
    fn is_limited(&self, class: &Class) -> bool {
        self.own_limit() > 0 || class.cap.is_some() || self.policy.per_registry > 0
    }

    /// Checks whether the image of a queued pull is present, if that matters and is not known.
    pub(super) fn ask_presence(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        if !self.policy.fast_lane || self.draining || !matches!(self.health, Health::Up(_)) {
            return;
        }
        let Some(class) = self.class_of(id) else { return };
        let limited = self.is_limited(&class);
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let Stage::Queued { presence } = &mut pull.stage else { return };
        if limited && matches!(presence, Presence::Unasked | Presence::Absent) {
            *presence = Presence::Asked;
            let until = now.mono + PRESENCE_TIMEOUT;
            pull.presence_until = Some(until);
            fx.push(Effect::Runtime(RuntimeCommand::CheckPresent { pull: id, call: pull.call.clone() }));
            self.arm(until, Timer::Presence(id));
        }
    }

    /// The runtime's answer; `None`: unknown, and the pull counts.
    pub(super) fn presence(&mut self, id: PullId, present: Option<bool>, now: Now, fx: &mut Vec<Effect>) {
        self.stop_presence_timer(id);
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let place = pull.place();
        if let Stage::Queued { presence } = &mut pull.stage
            && matches!(presence, Presence::Asked | Presence::Late)
        {
            *presence = match present {
                Some(true) => Presence::Present,
                Some(false) => Presence::Absent,
                None => Presence::Unasked,
            };
            if *presence == Presence::Present {
                self.present.insert(place);
                self.enqueue(id);
            }
            self.schedule(now, fx);
        }
    }

    /// The answer is late: the pull counts from now on, unless the answer arrives while it waits.
    pub(super) fn presence_late(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        pull.presence_until = None;
        if let Stage::Queued { presence } = &mut pull.stage
            && *presence == Presence::Asked
        {
            *presence = Presence::Late;
            self.schedule(now, fx);
        }
    }

    /// Forgets checks that will not be answered: the runtime is unavailable.
    pub(super) fn forget_presence(&mut self) {
        let queued: Vec<PullId> = self.queue.places().map(|(_, id)| id).collect();
        for id in queued {
            self.stop_presence_timer(id);
            if let Some(pull) = self.pulls.get_mut(&id) {
                pull.stage = Stage::Queued { presence: Presence::Unasked };
            }
            self.enqueue(id);
        }
        self.present.clear();
    }

    fn stop_presence_timer(&mut self, id: PullId) {
        if let Some(at) = self.pulls.get_mut(&id).and_then(|pull| pull.presence_until.take()) {
            self.disarm(at, Timer::Presence(id));
        }
    }

    /// Whether a queued pull waits for the answer before it may take a counted slot.
    pub(super) fn awaits_presence(&self, id: PullId) -> bool {
        self.pulls.get(&id).is_some_and(|pull| {
            pull.presence_until.is_some() && matches!(pull.stage, Stage::Queued { presence: Presence::Asked })
        })
    }
}
