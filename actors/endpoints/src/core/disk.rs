//! What is written to the disk and when, and how failed or hanging writes are handled.
//!
//! Owns: [`DiskState`], the pending write. In: states to write, notes of them, results of writes, time. Out: writes, and states that
//! are published because they are noted or on disk, or although the disk does not take them.

use std::{sync::Arc, time::Duration};

use keelson_actor_system::clock::Now;
use keelson_proto::backoff::Backoff;

use super::{CarriedState, Core, Counted, Effect, LaterRevision, Revision, identity};
use crate::{
    Published, ServiceName,
    record::{Change, Meta, Restored, Write, endpoints_in},
};

/// Pauses before the full state is written again after a failed write.
const REWRITES: Backoff = Backoff { first: Duration::from_secs(5), longest: Duration::from_secs(60) };

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskState {
    Synced,
    /// Nothing usable: the next state is written in full.
    Unusable,
    /// Older than the published state, because a write failed.
    Behind {
        retry: Duration,
        failures: u32,
    },
}

#[derive(Debug)]
pub(super) struct PendingWrite {
    pub(super) number: u64,
    /// Monotonic.
    pub(super) since: Duration,
    /// The write took longer than the limit; nothing waits for it.
    pub(super) is_overdue: bool,
    identity: (u64, u64),
    /// Published after the write; `None`: the written state is already published.
    pub(super) state: Option<(Published, Revision)>,
    /// Published because it was noted, before it was on disk.
    is_early: bool,
}

impl Core {
    /// State for the next instance of the actor. `random` makes an instance ID.
    pub(crate) fn carry_over(&self, random: u64) -> CarriedState {
        let mut kept = CarriedState {
            node: self.inputs.current_node().cloned(),
            health: self.health.clone(),
            followed: self.followed,
            is_restart: true,
            ..CarriedState::default()
        };
        let Some(shown) = &self.shown else { return kept };
        let mut restored = Restored {
            meta: self.meta(shown, self.shown_unix_ms),
            services: shown.services.clone(),
            deleted: self.deleted.by_name().clone(),
            endpoints: shown.services.values().map(|item| endpoints_in(&item.message)).sum(),
        };
        if matches!(self.disk, DiskState::Behind { .. }) {
            kept.memory = Some(restored);
            return kept;
        }
        // The pending revision may reach the disk, and the next instance would use its number for other content.
        restored.meta.instance_id = identity(random, Some(shown.instance_id));
        restored.meta.since = shown.rev;
        restored.deleted.clear();
        kept.fallback = Some(restored);
        kept
    }

    pub(super) fn overdue_at(&self) -> Option<Duration> {
        let pending_write = self.pending_write.as_ref().filter(|pending_write| !pending_write.is_overdue)?;
        Some(pending_write.since.saturating_add(self.policy.write_timeout))
    }

    pub(super) fn rewrite_at(&self) -> Option<Duration> {
        match self.disk {
            DiskState::Behind { retry, .. } if self.shown.is_some() => Some(retry),
            _ => None,
        }
    }

    pub(super) fn write_or_publish(
        &mut self,
        published: Published,
        revision: Revision,
        (changes, forgotten): (Vec<Change>, Vec<ServiceName>),
        now: Now,
        random: u64,
        effects: &mut Vec<Effect>,
    ) {
        let mut meta = Box::new(self.meta(&published, now.unix_ms));
        // Only the state that is written is current now; the published one is not.
        if self.failing().is_none() {
            meta.current_unix_ms = now.unix_ms;
        }
        let write = match self.disk {
            DiskState::Synced => {
                Write::Changes { meta, services: published.services.clone(), changes, forgotten }
            }
            DiskState::Unusable => self.full_write(meta, &published),
            // An earlier revision with this instance ID may still reach the disk, and a restart would reuse the
            // number of this revision.
            DiskState::Behind { .. } if self.is_writing(published.instance_id) => {
                return self.publish_with_new_instance_id(Some((published, revision)), now, random, effects);
            }
            DiskState::Behind { .. } => {
                let restart = self.shown.is_none().then_some(revision.rev);
                return self.publish(published, restart, revision, now, effects);
            }
        };
        self.start_write(write, Some((published, revision)), now, effects);
    }

    fn is_writing(&self, instance_id: u64) -> bool {
        self.pending_write.as_ref().is_some_and(|pending_write| pending_write.identity.0 == instance_id)
    }

    fn full_write(&self, meta: Box<Meta>, published: &Published) -> Write {
        Write::Full { meta, services: published.services.clone(), deleted: self.deleted.by_name().clone() }
    }

    pub(super) fn start_write(
        &mut self,
        write: Write,
        state: Option<(Published, Revision)>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        self.writes += 1;
        self.stamped = Some(now.mono);
        let identity = write.identity();
        self.pending_write = Some(PendingWrite {
            number: self.writes,
            since: now.mono,
            is_overdue: false,
            identity,
            state,
            is_early: false,
        });
        effects.push(Effect::Write { number: self.writes, write });
    }

    pub(super) fn rewrite(&mut self, now: Now, effects: &mut Vec<Effect>) {
        let Some(shown) = self.shown.clone() else { return };
        let write = self.full_write(Box::new(self.meta(&shown, self.shown_unix_ms)), &shown);
        self.start_write(write, None, now, effects);
    }

    /// Continues without the pending write, as if it had failed.
    pub(super) fn give_up(&mut self, now: Now, random: u64, effects: &mut Vec<Effect>) {
        let Some(pending_write) = &mut self.pending_write else { return };
        pending_write.is_overdue = true;
        let (state, is_early) = (pending_write.state.take(), pending_write.is_early);
        let state = state.or_else(|| self.newest_on_disk(is_early));
        let is_first = self.failures() == 0;
        self.fall_behind(now);
        if let (true, DiskState::Behind { retry, .. }) = (is_first, &mut self.disk) {
            // Write the published state as soon as the disk answers.
            *retry = now.mono;
        }
        effects.push(Effect::Count(Counted::WriteFailed));
        let text = format!(
            "the disk has not completed a write of the endpoints for {:?}; clients are served from memory \
             until it answers",
            self.policy.write_timeout
        );
        effects.push(Effect::Note { warn: true, text });
        self.publish_with_new_instance_id(state, now, random, effects);
    }

    /// The write whose state is published once it ends, or once its instance ID and revision are noted.
    pub(crate) fn unpublished(&self) -> Option<(u64, (u64, u64))> {
        let waits = |write: &&PendingWrite| write.state.is_some() && !write.is_overdue;
        self.pending_write.as_ref().filter(waits).map(|write| (write.number, write.identity))
    }

    /// Publishes the state that is being written: a restart that does not find it on disk gets a new instance ID.
    pub(super) fn noted(&mut self, number: u64, now: Now, effects: &mut Vec<Effect>) {
        let Some(pending_write) = self.pending_write.as_mut().filter(|write| write.number == number) else {
            return;
        };
        let Some((published, revision)) = pending_write.state.take() else { return };
        pending_write.is_early = true;
        self.on_disk = None;
        let restart = self.shown.is_none().then_some(0);
        self.publish(published, restart, revision, now, effects);
    }

    /// Instance ID and revision on disk, complete, unless a later one was noted; they are published, or about to be.
    pub(crate) fn on_disk(&self) -> Option<(u64, u64)> {
        self.on_disk
    }

    /// A client reports that it has this revision.
    pub(super) fn note_later(&mut self, instance_id: u64, rev: u64) {
        let is_later =
            self.shown.as_ref().is_some_and(|shown| shown.instance_id == instance_id && shown.rev < rev);
        if is_later && self.later == LaterRevision::NotSeen {
            self.later = LaterRevision::Reported { rev };
        }
    }

    /// Publishes the state under a new instance ID if a client has a later revision of this one. Other clients may
    /// have such revisions too, and would consider themselves up to date once this instance ID reaches them.
    pub(super) fn rename(&mut self, random: u64, effects: &mut Vec<Effect>) {
        let (LaterRevision::Reported { rev }, None, Some(shown)) =
            (self.later, &self.pending_write, self.shown.clone())
        else {
            return;
        };
        self.later = LaterRevision::Renamed;
        let text = format!(
            "a client has revision {rev} of this instance, but the newest is {}: the state directory was \
             restored from a backup; starting a new instance ID",
            shown.rev
        );
        effects.push(Effect::Note { warn: true, text });
        let instance_id = identity(random, Some(shown.instance_id));
        let published = Arc::new(Published { instance_id, ..(*shown).clone() });
        self.shown = Some(published.clone());
        // Write it next.
        self.stamped = None;
        effects.push(Effect::Publish { restart: Some(published.rev), revisions: Vec::new(), published });
    }

    /// Publishes a state that is not on disk, under a new instance ID.
    fn publish_with_new_instance_id(
        &mut self,
        state: Option<(Published, Revision)>,
        now: Now,
        random: u64,
        effects: &mut Vec<Effect>,
    ) {
        if let Some((published, revision)) = state {
            let instance_id = identity(random, Some(published.instance_id));
            let published = Published { instance_id, ..published };
            self.publish(published, Some(revision.rev), revision, now, effects);
        }
    }

    /// The published state, if it is on disk or may get there: if the disk fails now, it needs another instance ID.
    fn newest_on_disk(&self, is_early: bool) -> Option<(Published, Revision)> {
        let shown = self.shown.as_ref().filter(|_| is_early || self.disk == DiskState::Synced)?;
        let revision = Revision { rev: shown.rev, services: Vec::new(), node: false };
        Some(((**shown).clone(), revision))
    }

    /// Records that the disk is behind the published state. Returns the pause before the next write.
    fn fall_behind(&mut self, now: Now) -> Duration {
        let failures = self.failures().saturating_add(1);
        let pause = REWRITES.pause(failures);
        self.disk = DiskState::Behind { retry: now.mono + pause, failures };
        pause
    }

    /// Number of failed writes in a row.
    fn failures(&self) -> u32 {
        match self.disk {
            DiskState::Behind { failures, .. } => failures,
            DiskState::Synced | DiskState::Unusable => 0,
        }
    }

    pub(super) fn written(
        &mut self,
        number: u64,
        result: Result<(), String>,
        now: Now,
        random: u64,
        effects: &mut Vec<Effect>,
    ) {
        let Some(PendingWrite { state, is_overdue, since, identity, is_early, .. }) =
            self.pending_write.take_if(|pending_write| pending_write.number == number)
        else {
            return;
        };
        let is_shown = self.shown.as_ref().is_some_and(|shown| (shown.instance_id, shown.rev) == identity);
        let failures = self.failures();
        match result {
            Ok(()) if is_overdue && !is_shown => {
                let text = format!("the disk answers again after {:?}", now.mono.saturating_sub(since));
                return effects.push(Effect::Note { warn: false, text });
            }
            Ok(()) => {}
            Err(error) if is_overdue => {
                let text = format!("cannot write the endpoints to disk: {error}");
                return effects.push(Effect::Note { warn: true, text });
            }
            Err(error) => {
                let state = state.or_else(|| self.newest_on_disk(is_early));
                let pause = self.fall_behind(now);
                effects.push(Effect::Count(Counted::WriteFailed));
                let text = format!(
                    "cannot write the endpoints to disk; clients are served from memory under a new instance \
                     ID, retrying in {pause:?}: {error}"
                );
                effects.push(Effect::Note { warn: true, text });
                return self.publish_with_new_instance_id(state, now, random, effects);
            }
        }
        self.disk = DiskState::Synced;
        self.on_disk = Some(identity);
        if failures > 0 {
            let text = "the endpoints are on disk again".to_owned();
            effects.push(Effect::Note { warn: false, text });
        }
        if let Some((published, revision)) = state {
            let restart = self.shown.is_none().then_some(0);
            self.publish(published, restart, revision, now, effects);
        }
    }
}
