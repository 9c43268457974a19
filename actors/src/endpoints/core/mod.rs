//! Which state readers see, when, and under which identity: pure.
//!
//! Owns: the newest state, the one that is being written, and what follows from changes, failures and time. In:
//! [`SourceEvent`]s, [`Event`]s and `now`. Out: an [`Answer`], [`Effect`]s.
//!
//! * A revision comes of a difference in bytes, never of an event alone.
//! * A revision is on disk before anybody sees it, so that no revision is ever used for two contents: an agent that is
//!   killed goes on from what is on disk, which is what was seen last, or the one revision after it.
//! * When that cannot be written (a full disk), readers still get it, but under a new identity. The one on disk could
//!   not go on after a restart: it would use the same revisions for other content. So readers are told everything
//!   anew, once then and once after a restart that finds the disk still full, and nothing is ever taken for what it
//!   is not. From then on revisions are made in memory, and the whole state is written again and again, ever
//!   more rarely, until it is on disk.
//! * While some kind of object is being listed nothing new is published: part of what is known would be of before the
//!   listing and part of after it.
//! * A state from disk is shown at once, as stale. When the sources turn out to say the same it becomes current as it
//!   is, and nobody sees anything new.

mod deleted;
mod fresh;
mod report;
mod types;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod restart_tests;
#[cfg(test)]
mod table_tests;
#[cfg(test)]
mod testing;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use keelson_proto::localnetv1::NextItem;
use prost::Message as _;
use rpds::RedBlackTreeMapSync;

use self::deleted::Deleted;
pub use self::types::EndpointsPolicy;
pub(super) use self::types::{Counted, Effect, Event, Revision};
use super::{
    Answer, Freshness, Item, NodeView, Published, ServiceName, SourceEvent, SourceKind,
    inputs::{Dirty, Inputs},
    record::{Change, Meta, Restored, Write, endpoints_in},
};
use crate::{clock::Now, cluster::ChoreHealth, status::EndpointsView};

/// How long after a failed write the whole state is written again: doubled with each failure, up to the second.
const REWRITE_AFTER: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));

/// What is on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Disk {
    /// What readers see.
    Same,
    /// Nothing that is of use: the next state is written whole.
    Other,
    /// Not what readers see, since a write failed.
    Behind {
        /// When the next try comes.
        retry: Duration,
        /// How many have failed.
        failures: u32,
    },
}

/// A write that is under way.
#[derive(Debug)]
struct Coming {
    number: u64,
    /// What is published afterwards; none: the write is of what readers see already.
    state: Option<(Published, Revision)>,
}

/// What an actor that starts anew keeps of its former self.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// The Node, as last heard.
    pub(super) node: Option<NodeView>,
    /// How the watches fared, as last heard.
    pub(super) health: BTreeMap<SourceKind, ChoreHealth>,
    /// What readers see, if that is not what is on disk.
    pub(super) memory: Option<Restored>,
}

/// Where a core begins.
#[derive(Debug)]
pub(super) struct Start {
    /// The state to go on from.
    pub(super) restored: Option<Restored>,
    /// What is on disk.
    pub(super) disk: Disk,
    /// What readers see, from a former self of the actor.
    pub(super) shown: Option<Arc<Published>>,
    /// What else is left of it.
    pub(super) kept: Kept,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Core {
    policy: EndpointsPolicy,
    inputs: Inputs,
    health: BTreeMap<SourceKind, ChoreHealth>,
    started: Now,
    /// Whether what readers see was compared with what the sources say.
    heard: bool,
    shown: Option<Arc<Published>>,
    /// When it was made, in Unix milliseconds, and at which revision its node became so.
    shown_unix_ms: i64,
    node_rev: u64,
    /// Endpoints of all Services in `shown`, or in the state that is being written.
    endpoints: u64,
    deleted: Deleted,
    disk: Disk,
    coming: Option<Coming>,
    writes: u64,
    /// When the newest revision was made.
    last_revision: Option<Duration>,
    view: Option<EndpointsView>,
}

/// Encodes a Service as both APIs send it.
fn encode(service: keelson_proto::localnetv1::ServiceEndpoints) -> Bytes {
    NextItem { endpoints: Some(service), ..NextItem::default() }.encode_to_vec().into()
}

/// A random identity that is neither 0 nor `former`.
fn identity(random: u64, former: Option<u64>) -> u64 {
    [random, random.wrapping_add(1), random.wrapping_add(2)]
        .into_iter()
        .find(|id| *id != 0 && Some(*id) != former)
        .unwrap_or(1)
}

/// The revisions after `since` that a state shows.
fn revisions(restored: &Restored, since: u64) -> Vec<Revision> {
    let mut by_rev = BTreeMap::<u64, (Vec<ServiceName>, bool)>::new();
    let set = restored.services.iter().map(|(name, item)| (item.rev, name));
    for (rev, name) in set.chain(restored.deleted.iter().map(|(name, rev)| (*rev, name))) {
        if rev > since {
            by_rev.entry(rev).or_default().0.push(name.clone());
        }
    }
    if restored.meta.node_rev > since {
        by_rev.entry(restored.meta.node_rev).or_default().1 = true;
    }
    let revision = |(rev, (mut services, node)): (u64, (Vec<ServiceName>, bool))| {
        services.sort_unstable();
        Revision { rev, services, node }
    };
    by_rev.into_iter().map(revision).collect()
}

impl Core {
    /// A core, and what it does first.
    pub(super) fn new(policy: EndpointsPolicy, start: Start, now: Now) -> (Self, Vec<Effect>) {
        let Start { restored, mut disk, shown, kept } = start;
        let later =
            |shown: &Published, meta: &Meta| shown.instance_id == meta.instance_id && shown.rev > meta.rev;
        // What readers have seen must not be taken back: that cannot be, unless something else writes to the disk.
        let restored = restored.filter(|restored| {
            let usable = !shown.as_ref().is_some_and(|shown| later(shown, &restored.meta));
            if !usable {
                disk = Disk::Other;
            }
            usable
        });
        let mut core = Self {
            policy,
            inputs: Inputs::new(now.unix_ms),
            health: kept.health,
            started: now,
            heard: false,
            shown: None,
            shown_unix_ms: 0,
            node_rev: 0,
            endpoints: 0,
            deleted: Deleted::default(),
            disk,
            coming: None,
            writes: 0,
            last_revision: None,
            view: None,
        };
        if let Some(node) = kept.node {
            core.inputs.node(node);
        }
        let mut effects = Vec::new();
        if let Some(restored) = restored {
            core.restore(restored, shown.as_deref(), &mut effects);
        }
        core.tell(now, &mut effects);
        (core, effects)
    }

    /// Shows what was there before.
    fn restore(&mut self, restored: Restored, shown: Option<&Published>, effects: &mut Vec<Effect>) {
        let meta = &restored.meta;
        let going_on = shown.filter(|shown| shown.instance_id == meta.instance_id && shown.rev <= meta.rev);
        let restart = if going_on.is_some() { None } else { Some(meta.since) };
        let revisions = revisions(&restored, going_on.map_or(meta.since, |shown| shown.rev));
        let published = Arc::new(Published {
            instance_id: meta.instance_id,
            rev: meta.rev,
            services: restored.services,
            node: Arc::new(meta.node.clone().unwrap_or_default()),
            freshness: self.freshness(),
            triggered_unix_ms: None,
        });
        self.shown_unix_ms = meta.published_unix_ms;
        self.node_rev = meta.node_rev;
        self.endpoints = restored.endpoints;
        self.deleted = Deleted::new(restored.deleted, meta.since);
        self.shown = Some(published.clone());
        effects.push(Effect::Publish { restart, revisions, published });
    }

    /// What the actor's next self shall know.
    pub(super) fn keep(&self) -> Kept {
        let memory = match (&self.shown, self.disk) {
            (Some(shown), Disk::Behind { .. }) => Some(Restored {
                meta: self.meta(shown, self.shown_unix_ms),
                services: shown.services.clone(),
                deleted: self.deleted.by_name().clone(),
                endpoints: self.endpoints,
            }),
            _ => None,
        };
        Kept { node: self.inputs.current_node().cloned(), health: self.health.clone(), memory }
    }

    fn meta(&self, published: &Published, unix_ms: i64) -> Meta {
        Meta {
            instance_id: published.instance_id,
            rev: published.rev,
            node_name: self.policy.node_name.clone(),
            node: Some((*published.node).clone()),
            node_rev: self.node_rev,
            since: self.deleted.since(),
            services: published.services.size() as u64,
            deleted: self.deleted.len() as u64,
            published_unix_ms: unix_ms,
            ..Meta::default()
        }
    }

    /// Takes what a source says. `random` is used where an identity is made.
    pub(super) fn take(&mut self, event: SourceEvent, now: Now, random: u64) -> (Answer, Vec<Effect>) {
        let answer = match event {
            SourceEvent::Services(seen) => self.inputs.services(seen),
            SourceEvent::EndpointSlices(seen) => self.inputs.slices(seen),
            SourceEvent::ServiceCidrs(seen) => self.inputs.service_cidrs(seen),
            SourceEvent::Node(mut node) => {
                if node.name.is_empty() {
                    node.name.clone_from(&self.policy.node_name);
                }
                self.inputs.node(node);
                Answer::Taken
            }
            SourceEvent::Health(kind, health) => {
                self.health.insert(kind, health);
                Answer::Taken
            }
        };
        let mut effects = Vec::new();
        self.advance(now, random, &mut effects);
        (answer, effects)
    }

    /// Takes what happened.
    pub(super) fn handle(&mut self, event: Event, now: Now, random: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        if let Event::Written { number, result } = event {
            self.written(number, result, now, random, &mut effects);
        }
        self.advance(now, random, &mut effects);
        effects
    }

    /// Does what can be done now.
    fn advance(&mut self, now: Now, random: u64, effects: &mut Vec<Effect>) {
        if self.coming.is_none() && self.rewrite_at().is_some_and(|at| at <= now.mono) {
            self.rewrite(effects);
        }
        if self.revise_at().is_some_and(|at| at <= now.mono) {
            self.revise(now, random, effects);
        }
        self.tell(now, effects);
    }

    /// When something is to be done though nothing happens; monotonic.
    pub(super) fn next_tick(&self) -> Option<Duration> {
        let rewrite = self.rewrite_at().filter(|_| self.coming.is_none());
        [rewrite, self.revise_at(), self.grace_ends()].into_iter().flatten().min()
    }

    /// When the next revision may be made; none: there is nothing to make one of, or it may not be.
    fn revise_at(&self) -> Option<Duration> {
        let wanted = self.inputs.is_dirty() || !self.heard;
        let possible = self.coming.is_none() && self.inputs.synced();
        let at = self.last_revision.map_or(Duration::ZERO, |last| last + self.policy.min_interval);
        (wanted && possible).then_some(at)
    }

    fn rewrite_at(&self) -> Option<Duration> {
        match self.disk {
            Disk::Behind { retry, .. } if self.shown.is_some() => Some(retry),
            _ => None,
        }
    }

    /// Works out what may have changed, and makes a revision of what has.
    fn revise(&mut self, now: Now, random: u64, effects: &mut Vec<Effect>) {
        let mut dirty = self.inputs.take_dirty();
        let former = self.shown.clone();
        if !self.heard
            && let Some(former) = &former
        {
            for name in former.services.keys() {
                dirty.services.entry(name.clone()).or_default();
            }
        }
        let mut services = former.as_ref().map_or_else(RedBlackTreeMapSync::new_sync, |f| f.services.clone());
        let rev = former.as_ref().map_or(1, |former| former.rev + 1);
        effects.push(Effect::Count(Counted::Worked(dirty.services.len() as u64)));
        let (changes, triggered) = self.work_out(&dirty, rev, &mut services);
        let node = former.as_ref().map(|former| former.node.clone());
        let new_node = (dirty.node || !self.heard).then(|| self.inputs.node_info());
        let new_node = new_node.filter(|new| node.as_deref() != Some(new));
        if changes.is_empty() && new_node.is_none() && former.is_some() {
            self.heard = true;
            return;
        }
        let node_changed = new_node.is_some();
        let published = Published {
            instance_id: former.as_ref().map_or_else(|| identity(random, None), |f| f.instance_id),
            rev,
            services,
            node: new_node.map(Arc::new).or(node).unwrap_or_default(),
            freshness: Freshness::Current,
            triggered_unix_ms: triggered,
        };
        let names = changes.iter().map(|change| change.name.clone()).collect();
        let revision = Revision { rev, services: names, node: node_changed };
        if node_changed {
            self.node_rev = rev;
        }
        self.last_revision = Some(now.mono);
        let forgotten = self.bury(&changes, &published);
        self.write_or_publish(published, revision, (changes, forgotten), now, effects);
    }

    /// Brings `services` up to date; what changed, in order, and when the oldest change was made.
    fn work_out(
        &mut self,
        dirty: &Dirty,
        rev: u64,
        services: &mut RedBlackTreeMapSync<ServiceName, Item>,
    ) -> (Vec<Change>, Option<i64>) {
        let (mut changes, mut oldest) = (Vec::new(), None::<i64>);
        for (name, triggered) in &dirty.services {
            let message = self.inputs.view(name).map(|service| {
                let count = service.endpoints.len() as u64;
                (encode(service), count)
            });
            let former = services.get(name).map(|item| item.message.clone());
            if former.as_ref() == message.as_ref().map(|(message, _)| message) {
                continue;
            }
            let former_bytes = former.as_ref().map_or(0, Bytes::len);
            self.endpoints -= former.as_ref().map_or(0, endpoints_in).min(self.endpoints);
            let item = message.map(|(message, count)| {
                self.endpoints += count;
                Item { message, rev }
            });
            match item {
                Some(item) => services.insert_mut(name.clone(), item),
                None => drop(services.remove_mut(name)),
            }
            oldest = oldest.into_iter().chain(*triggered).min();
            changes.push(Change { name: name.clone(), former_bytes });
        }
        changes.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        (changes, oldest)
    }

    /// Remembers what was deleted; the names that are forgotten for it.
    fn bury(&mut self, changes: &[Change], published: &Published) -> Vec<ServiceName> {
        let mut added = 0;
        for Change { name, .. } in changes {
            if published.services.contains_key(name) {
                self.deleted.remove(name);
            } else {
                self.deleted.add(name.clone(), published.rev);
                added += 1;
            }
        }
        self.deleted.forget(published.rev, self.policy.history, added)
    }

    fn write_or_publish(
        &mut self,
        published: Published,
        revision: Revision,
        (changes, forgotten): (Vec<Change>, Vec<ServiceName>),
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let meta = Box::new(self.meta(&published, now.unix_ms));
        let write = match self.disk {
            Disk::Same => Write::Changes { meta, services: published.services.clone(), changes, forgotten },
            Disk::Other => self.whole(meta, &published),
            Disk::Behind { .. } => return self.publish(published, None, revision, now, effects),
        };
        self.start_write(write, Some((published, revision)), effects);
    }

    fn whole(&self, meta: Box<Meta>, published: &Published) -> Write {
        Write::Whole { meta, services: published.services.clone(), deleted: self.deleted.by_name().clone() }
    }

    fn start_write(&mut self, write: Write, state: Option<(Published, Revision)>, effects: &mut Vec<Effect>) {
        self.writes += 1;
        self.coming = Some(Coming { number: self.writes, state });
        effects.push(Effect::Write { number: self.writes, write });
    }

    /// Writes what readers see.
    fn rewrite(&mut self, effects: &mut Vec<Effect>) {
        let Some(shown) = self.shown.clone() else { return };
        let write = self.whole(Box::new(self.meta(&shown, self.shown_unix_ms)), &shown);
        self.start_write(write, None, effects);
    }

    fn written(
        &mut self,
        number: u64,
        result: Result<(), String>,
        now: Now,
        random: u64,
        effects: &mut Vec<Effect>,
    ) {
        let Some(Coming { state, .. }) = self.coming.take_if(|coming| coming.number == number) else {
            return;
        };
        let failures = match self.disk {
            Disk::Behind { failures, .. } => failures,
            Disk::Same | Disk::Other => 0,
        };
        if let Err(error) = result {
            let pause = REWRITE_AFTER.0.saturating_mul(1 << failures.min(16)).min(REWRITE_AFTER.1);
            self.disk = Disk::Behind { retry: now.mono + pause, failures: failures + 1 };
            effects.push(Effect::Count(Counted::WriteFailed));
            let text = format!(
                "the endpoints could not be written; readers get them from memory, under a new identity, \
                 and they are written again in {pause:?}: {error}"
            );
            effects.push(Effect::Note { warn: true, text });
            if let Some((published, revision)) = state {
                let instance_id = identity(random, Some(published.instance_id));
                let published = Published { instance_id, ..published };
                self.publish(published, Some(revision.rev), revision, now, effects);
            }
            return;
        }
        self.disk = Disk::Same;
        if failures > 0 {
            let text = "the endpoints are on disk again".to_owned();
            effects.push(Effect::Note { warn: false, text });
        }
        if let Some((published, revision)) = state {
            let restart = self.shown.is_none().then_some(0);
            self.publish(published, restart, revision, now, effects);
        }
    }

    fn publish(
        &mut self,
        published: Published,
        restart: Option<u64>,
        revision: Revision,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        self.heard = true;
        self.shown_unix_ms = now.unix_ms;
        let freshness = self.freshness();
        let published = Arc::new(Published { freshness, ..published });
        let delay_ms = published.triggered_unix_ms.map(|triggered| now.unix_ms.saturating_sub(triggered));
        self.shown = Some(published.clone());
        // A history that begins at this revision or later has nothing to note of it.
        let revisions = if restart >= Some(revision.rev) { Vec::new() } else { vec![revision] };
        effects.push(Effect::Publish { restart, revisions, published });
        effects.push(Effect::Count(Counted::Revision { delay_ms }));
    }
}
