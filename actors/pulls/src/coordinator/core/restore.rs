//! Pulls from the journal after a restart.
//!
//! Owns: how a record becomes a pull of an agent that has just started. Running pulls come first, then the queue, each
//! in its old order. An anonymous pull continues by itself; one with credentials is held for a caller with credentials.
//! Records that no caller has wanted for `pulls.record_max_age` are dropped, and where pods are watched a pull
//! continues by itself only once its pod is known to exist. Leases without a record are left to the first reaping. The
//! order in the records stays, unless running pulls have to overtake; changes are written.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use keelson_actor_system::clock::Now;

use super::{Core, Effect, Note, Presence, Pull, Stage, Timer, view::Rate};
use crate::{
    coordinator::record::{KeptLease, PullRecord, RecordState, Write},
    request::{PullCall, PullId},
};

/// Higher ones are not IDs of an agent: the journal was written by another program.
const MAX_ID: u64 = u64::MAX / 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// The disk: callers may never return.
    Journal,
    /// A stopping agent: its callers are about to ask here.
    Predecessor,
}

impl Core {
    /// To be called once, on an empty core.
    pub(crate) fn restore(
        &mut self,
        records: Vec<PullRecord>,
        leases: Vec<KeptLease>,
        limit_override: Option<u32>,
        now: Now,
    ) -> Vec<Effect> {
        self.restore_from(Source::Journal, records, leases, limit_override, now)
    }

    pub(super) fn restore_from(
        &mut self,
        source: Source,
        mut records: Vec<PullRecord>,
        leases: Vec<KeptLease>,
        limit_override: Option<u32>,
        now: Now,
    ) -> Vec<Effect> {
        let mut fx = Vec::new();
        self.limit_override = limit_override;
        for kept in leases {
            let left = kept.expires_unix_ms.saturating_sub(now.unix_ms).max(0);
            // A wall clock that stepped back must not keep bytes longer than a new failure would.
            let left = Duration::from_millis(left.unsigned_abs()).min(self.policy.progress_retention);
            self.keep_lease(kept.lease, kept.image.into(), now.mono + left);
        }
        records.sort_by_key(|record| {
            (record.state != RecordState::Running, record.order.unwrap_or(record.id), record.id)
        });
        let order = |record: &PullRecord| record.order.unwrap_or(record.id);
        let in_order = records.is_sorted_by_key(|record| (order(record), record.id));
        let (mut continues_after_handover, mut held) = (0_u32, 0_u32);
        for (index, record) in records.into_iter().enumerate() {
            // Counted from 0, an order is below the first ID of a new pull.
            let order = if in_order { order(&record) } else { index as u64 };
            match self.restore_one(&record, order, source, now, &mut fx) {
                Some(true) => continues_after_handover += 1,
                Some(false) => held += 1,
                None => {
                    fx.push(Effect::Persist(Write::DeletePull(record.id)));
                    let text = format!("pull {} of the journal is not restored", record.id);
                    fx.push(Effect::Note(Note { warn: true, text }));
                }
            }
        }
        self.keep_space(&mut fx);
        if continues_after_handover + held > 0 {
            let text = format!(
                "restored from the journal: {continues_after_handover} pulls continue, {held} wait for credentials"
            );
            fx.push(Effect::Note(Note { warn: false, text }));
        }
        fx
    }

    /// `None`: refused; else whether it continues without a caller.
    fn restore_one(
        &mut self,
        record: &PullRecord,
        order: u64,
        source: Source,
        now: Now,
        fx: &mut Vec<Effect>,
    ) -> Option<bool> {
        if !self.policy.resume || record.id.max(order) > MAX_ID {
            return None;
        }
        if self.is_too_old(record, now, fx) {
            return None;
        }
        if record.pod.as_ref().is_some_and(|pod| self.deleted_pods.pod(&pod.uid).is_some()) {
            return None;
        }
        let call = PullCall::rebuild(&record.image, &record.runtime_handler, record.pod.clone()).ok()?;
        let id = PullId(record.id);
        if self.pulls.contains_key(&id) {
            return None;
        }
        let asks_pods = source == Source::Journal
            && self.policy.await_pods
            && record.pod.is_some()
            && !self.deleted_pods.is_synced();
        let stage = if record.with_credentials || asks_pods {
            let until = now.mono + self.policy.resume_window;
            self.arm(until, Timer::Held(id));
            Stage::Held { until }
        } else {
            Stage::Queued { presence: Presence::Unasked }
        };
        // Above every ID and order: no ID is used twice, and pulls that callers request again stay before all new ones.
        self.next_id = self.next_id.max(record.id.max(order) + 1);
        self.insert(Pull {
            id,
            order,
            callers: BTreeSet::new(),
            stage,
            lane: None,
            attempts: record.attempts,
            losses: 0,
            requested: Now { mono: now.mono, unix_ms: record.requested_unix_ms },
            started: None,
            options: BTreeMap::new(),
            lease: record.lease.clone(),
            // The caller that takes its place may have other credentials.
            inherited: record.lease.as_ref().map(|_| now.mono + self.policy.progress_retention),
            with_credentials: record.with_credentials,
            resumed: true,
            unclaimed: source == Source::Journal,
            wanted_unix_ms: record.wanted(),
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
            rate: Rate::default(),
            call: Arc::new(call),
        });
        if matches!(self.pulls.get(&id).map(|pull| &pull.stage), Some(Stage::Queued { .. })) {
            self.enqueue(id);
        }
        if self.pulls.get(&id).is_some_and(|pull| pull.record() != *record) {
            self.persist(id, fx);
        }
        Some(!record.with_credentials)
    }
}
