//! A journal that is read late, after pulls began from memory.
//!
//! Owns: what must not happen before the journal has been read (leases that it names are not reaped), and how its
//! records join the pulls of this process. In: the records. Out: pulls in the order running, new, journal. No pull is
//! lost, and none that runs or has succeeded meanwhile is started again.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use keelson_actor_system::clock::Now;

use super::{Core, Effect, Health, Timer};
use crate::{
    coordinator::{
        handover::UnreadJournal,
        record::{KeptLease, PullRecord, RecordState, Write},
    },
    request::{PullCall, PullId, PullKey},
    runtime::{Capabilities, RuntimeCommand},
};

/// Maximum number of images remembered as pulled while the journal is unread. Beyond it a record costs one query to the
/// runtime, which answers that the image is present.
const MAX_SUCCEEDED: usize = 4096;
/// When leases that nothing needs are deleted once more, after the runtime came up or did not delete them.
const REAP_AGAIN: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub(super) struct UnreadChanges {
    /// The limit was changed, so the journal's is outdated.
    pub(super) limit_changed: bool,
    /// Image and handler.
    succeeded: HashSet<(Arc<str>, Arc<str>)>,
}

/// Running pulls first, each in its old order, which is then written into the records.
fn in_queue_order(mut records: Vec<PullRecord>) -> Vec<PullRecord> {
    let order = |record: &PullRecord| (record.order.unwrap_or(record.id), record.id);
    records.sort_by_key(|record| (record.state != RecordState::Running, order(record)));
    if !records.is_sorted_by_key(order) {
        for (index, record) in records.iter_mut().enumerate() {
            record.order = Some(index as u64);
        }
    }
    records
}

impl Core {
    /// To be called once, on an empty core.
    pub(crate) fn begin_unread(&mut self, now: Now) {
        self.unread = Some(UnreadChanges::default());
        // Above every ID and order in the journal, unless the clock has stepped back.
        self.next_id = self.next_id.max(u64::try_from(now.unix_ms).unwrap_or(1));
    }

    /// As [`Core::begin_unread`], after a predecessor that has not read the journal either. Its successes are unknown
    /// here: a record of one costs one query to the runtime.
    pub(super) fn take_over_unread(&mut self, unread: UnreadJournal, now: Now) {
        self.begin_unread(now);
        self.unread = Some(UnreadChanges { limit_changed: unread.limit_changed, ..UnreadChanges::default() });
    }

    /// Takes over the journal of an earlier process, read after pulls of this one began.
    pub(crate) fn reconcile(
        &mut self,
        records: Vec<PullRecord>,
        leases: Vec<KeptLease>,
        limit_override: Option<u32>,
        now: Now,
    ) -> Vec<Effect> {
        let unread = self.unread.take().unwrap_or_default();
        let limit = if unread.limit_changed { self.limit_override } else { limit_override };
        let in_use = |kept: &KeptLease| {
            self.kept.contains_key(&kept.lease) || self.lease_in_use(&kept.image.as_str().into(), &kept.lease)
        };
        let leases = leases.into_iter().filter(|kept| !in_use(kept)).collect();
        let mut fx = Vec::new();
        let mut taken = HashMap::new();
        let mut rest = Vec::new();
        for mut record in in_queue_order(records) {
            let Some(call) = PullCall::rebuild(&record.image, &record.runtime_handler, None).ok() else {
                rest.push(record);
                continue;
            };
            if let Some(id) = self.same_pull(&record, &call.key).filter(|id| !taken.contains_key(id)) {
                fx.push(Effect::Persist(Write::DeletePull(record.id)));
                taken.insert(id, record.order.unwrap_or(record.id));
            } else if unread.succeeded.contains(&(call.key.image.clone(), call.key.handler.clone())) {
                fx.push(Effect::Persist(Write::DeletePull(record.id)));
            } else {
                if self.pulls.contains_key(&PullId(record.id)) {
                    record.order.get_or_insert(record.id);
                    record.id = self.next_id;
                    self.next_id += 1;
                }
                rest.push(record);
            }
        }
        for (id, order) in taken {
            self.move_up(id, order);
        }
        let restored: Vec<PullId> = rest.iter().map(|record| PullId(record.id)).collect();
        fx.extend(self.restore(rest, leases, limit, now));
        self.reap(&mut fx);
        if matches!(self.health, Health::Up(_)) {
            for id in restored {
                self.ask_presence(id, now, &mut fx);
            }
            self.schedule(now, &mut fx);
        }
        fx
    }

    /// The pull of this process that does what a record asks for.
    fn same_pull(&self, record: &PullRecord, key: &PullKey) -> Option<PullId> {
        let same = |id: &&PullId| {
            self.pulls.get(id).is_some_and(|pull| {
                pull.with_credentials == record.with_credentials && pull.call.key.handler == key.handler
            })
        };
        self.by_image.get(&key.image)?.iter().find(same).copied()
    }

    fn move_up(&mut self, id: PullId, order: u64) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        if !pull.is_queued() || pull.order <= order {
            return;
        }
        let before = pull.place();
        pull.order = order;
        let after = pull.place();
        self.queue.remove(before);
        if self.present.remove(&before) {
            self.present.insert(after);
        }
        self.enqueue(id);
    }

    pub(super) fn succeeded_unread(&mut self, key: &PullKey) {
        if let Some(unread) = &mut self.unread
            && unread.succeeded.len() < MAX_SUCCEEDED
        {
            unread.succeeded.insert((key.image.clone(), key.handler.clone()));
        }
    }

    pub(super) fn reap_later(&mut self, now: Now) {
        if self.reap_at.is_none() {
            let at = now.mono + REAP_AGAIN;
            self.reap_at = Some(at);
            self.arm(at, Timer::Reap);
        }
    }

    /// Deletes the leases that no pull and no record needs. Not before the journal has been read.
    pub(super) fn reap(&self, fx: &mut Vec<Effect>) {
        if self.unread.is_none() && matches!(self.health, Health::Up(Capabilities { leases: true, .. })) {
            let mut keep: std::collections::BTreeSet<String> = self.kept.keys().cloned().collect();
            keep.extend(self.pulls.values().filter_map(|pull| pull.lease.clone()));
            fx.push(Effect::Runtime(RuntimeCommand::ReapLeases(keep.into_iter().collect())));
        }
    }
}
