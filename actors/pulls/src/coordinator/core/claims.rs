//! Which pulls from the journal are still wanted.
//!
//! Owns: the maximum age of a record, the fate of pulls from the journal whose pods are gone, and their place behind
//! pulls that callers wait for. In: records, the pods of the node, callers that ask again. Out: records with the time
//! when a pull was last wanted; pulls that are dropped, or continue.
//!
//! A pull from the journal that no caller has requested since the start is *unclaimed*. It uses slots that no other
//! pull needs. The first caller that requests it claims it, and it gets its old place back.

use std::{collections::HashSet, time::Duration};

use keelson_actor_system::clock::Now;

use super::{Core, Effect, Note, Presence, PullEnd, Stage, Timer};
use crate::{
    coordinator::record::{PullRecord, Write},
    request::PullId,
};

/// Added to the order of unclaimed pulls. Orders are below it.
pub(super) const UNCLAIMED: u64 = u64::MAX / 2 + 1;

impl PullRecord {
    /// When a caller last wanted it, Unix milliseconds.
    pub(super) fn wanted(&self) -> i64 {
        self.wanted_unix_ms.unwrap_or(self.requested_unix_ms)
    }
}

impl Core {
    /// Whether no caller has wanted a record for too long. A wall clock that stepped back makes no record old.
    pub(super) fn is_too_old(&self, record: &PullRecord, now: Now, fx: &mut Vec<Effect>) -> bool {
        let age = now.unix_ms.saturating_sub(record.wanted()).max(0);
        let age = Duration::from_millis(age.unsigned_abs());
        let too_old = age > self.policy.record_max_age;
        if too_old {
            let text = format!(
                "the pull of {} was last requested {}s ago (pulls.record_max_age); it is dropped",
                record.image,
                age.as_secs()
            );
            fx.push(Effect::Note(Note { warn: false, text }));
        }
        too_old
    }

    /// A caller requests a pull from the journal: it gets its old place back.
    pub(super) fn claim(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        let Some(pull) = self.pulls.get_mut(&id).filter(|pull| pull.unclaimed) else { return };
        let unclaimed = pull.place();
        pull.unclaimed = false;
        pull.wanted_unix_ms = now.unix_ms;
        let claimed = pull.place();
        for places in [&mut self.present, &mut self.slots, &mut self.held] {
            if places.remove(&unclaimed) {
                places.insert(claimed);
            }
        }
        if self.queue.remove(unclaimed) {
            self.enqueue(id);
        }
        self.persist(id, fx);
        self.plan_wanted(now);
    }

    /// Queues a held pull that needs no credentials.
    pub(super) fn queue_held(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let Stage::Held { until } = pull.stage else { return };
        pull.stage = Stage::Queued { presence: Presence::Unasked };
        let (place, call) = (pull.place(), pull.call.clone());
        self.held.remove(&place);
        self.disarm(until, Timer::Held(id));
        let key = self.key_of(&call);
        self.by_key.entry(key).or_insert(id);
        self.enqueue(id);
        self.ask_presence(id, now, fx);
    }

    /// `live`: the pods of the node that exist and have not ended. Pulls from the journal of other pods are dropped;
    /// the others continue.
    pub(super) fn pods_synced(&mut self, live: &HashSet<String>, now: Now, fx: &mut Vec<Effect>) {
        self.deleted_pods.set_synced();
        let mut waiting: Vec<PullId> = self
            .pulls
            .values()
            .filter(|pull| pull.unclaimed && pull.callers.is_empty() && pull.has_not_begun())
            .map(|pull| pull.id)
            .collect();
        waiting.sort_unstable();
        for id in waiting {
            let Some(pull) = self.pulls.get(&id) else { continue };
            if pull.call.pod.as_ref().is_some_and(|pod| !live.contains(&pod.uid)) {
                let text = format!("the place of {} is released: its pod was deleted", pull.call.name.full());
                fx.push(Effect::Note(Note { warn: false, text }));
                self.set_end_reason(id, "PodDeleted");
                self.end(id, PullEnd::Cancelled, now, fx);
            } else if !pull.with_credentials {
                self.queue_held(id, now, fx);
            }
        }
    }

    /// Schedules the next update of the records of wanted pulls.
    pub(super) fn plan_wanted(&mut self, now: Now) {
        if self.wanted_at.is_none() {
            let at = now.mono + self.policy.record_max_age / 4;
            self.wanted_at = Some(at);
            self.arm(at, Timer::Wanted);
        }
    }

    pub(super) fn stop_wanted(&mut self) {
        if self.pulls.is_empty()
            && let Some(at) = self.wanted_at.take()
        {
            self.disarm(at, Timer::Wanted);
        }
    }

    /// Callers wait for these pulls now: after a kill, their records are as recent as this write.
    pub(super) fn write_wanted(&mut self, now: Now, fx: &mut Vec<Effect>) {
        self.wanted_at = None;
        for pull in self.pulls.values_mut().filter(|pull| !pull.callers.is_empty()) {
            pull.wanted_unix_ms = now.unix_ms;
            fx.push(Effect::Persist(Write::PutPull(pull.record())));
        }
        if !self.pulls.is_empty() {
            self.plan_wanted(now);
        }
    }
}
