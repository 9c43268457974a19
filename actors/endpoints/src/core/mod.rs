//! Which state is published, when, and under which instance ID. Pure.
//!
//! Owns: the published state, the one that is being written, and the reactions to changes, failures and time. In:
//! [`SourceEvent`]s, [`Event`]s and `now`. Out: an [`Ack`], [`Effect`]s.
//!
//! * A revision is made if bytes differ, never because of an event alone.
//! * A revision is published once it is noted outside of the store ([`Marker`](super::Marker)) or on disk, so that no
//!   revision number ever has two contents. An agent that is killed continues from the state on disk, or under a new
//!   instance ID if a later revision was noted.
//! * If a revision cannot be written (full disk), it is published under a new instance ID. The instance ID on disk
//!   cannot continue after a restart, because it would use the same revision numbers for other content. Clients
//!   therefore receive the full state, once then, and once after a restart that finds the disk still full. From then on
//!   revisions are made in memory, and writing the full state is retried with back-off until it is on disk.
//! * Nothing is published while a kind of object is being listed: the state would mix objects from before and after
//!   the listing.
//! * A state from disk is published at once, as stale. If the listed sources equal it, it becomes current without a
//!   new revision.
//! * A state from disk is not published if the node has booted since it was last current and that is too long ago:
//!   other pods may have its addresses.

#[cfg(test)]
mod age_tests;
mod deleted;
#[cfg(test)]
mod demand_tests;
mod disk;
mod freshness;
mod pace;
mod report;
mod types;

#[cfg(test)]
mod disk_tests;
#[cfg(test)]
mod note_tests;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod restart_tests;
#[cfg(test)]
mod table_tests;
#[cfg(test)]
pub(crate) mod testing;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use keelson_actor_system::{clock::Now, cluster::JobHealth, reports::EndpointsView};
use keelson_proto::localnetv1::NextItem;
use prost::Message as _;
use rpds::RedBlackTreeMapSync;

use self::deleted::Deleted;
pub(super) use self::disk::DiskState;
use self::disk::PendingWrite;
use self::pace::Pace;
pub use self::types::EndpointsPolicy;
pub(super) use self::types::{Counted, Effect, Event, Revision};
use super::{
    Ack, ClientEvent, Freshness, Item, NodeView, Published, ServiceName, SourceEvent, SourceKind,
    feed::proxy_name,
    inputs::{Dirty, Inputs},
    record::{Change, Meta, Restored, endpoints_in},
};

/// What a restarted actor keeps of its previous instance.
#[derive(Debug, Default)]
pub(super) struct CarriedState {
    pub(super) node: Option<NodeView>,
    pub(super) health: BTreeMap<SourceKind, JobHealth>,
    /// The published state, if it differs from the one on disk.
    pub(super) memory: Option<Restored>,
    /// The published state under a new instance ID, used if the disk does not answer.
    pub(super) fallback: Option<Restored>,
    /// When the first client connected, monotonic.
    pub(super) followed: Option<Duration>,
    pub(super) is_restart: bool,
}

#[derive(Debug)]
pub(super) struct Start {
    pub(super) restored: Option<Restored>,
    pub(super) disk: DiskState,
    /// `restored` has a new instance ID, which is not on disk.
    pub(super) is_renamed: bool,
    /// The state published by the previous instance of the actor.
    pub(super) shown: Option<Arc<Published>>,
    pub(super) kept: CarriedState,
}

#[derive(Debug)]
pub(super) struct Core {
    policy: EndpointsPolicy,
    inputs: Inputs,
    health: BTreeMap<SourceKind, JobHealth>,
    started: Now,
    /// When the published state was last current, in Unix milliseconds.
    current_unix_ms: i64,
    /// When a write last started, monotonic. `None`: write now.
    stamped: Option<Duration>,
    rejected_reason: Option<String>,
    /// Whether the published state was compared with the listed sources.
    is_compared: bool,
    shown: Option<Arc<Published>>,
    /// When `shown` was made, in Unix milliseconds, and the revision of its last change of the node.
    shown_unix_ms: i64,
    node_rev: u64,
    /// Endpoints of all Services in `shown`, or in the state that is being written.
    endpoints: u64,
    deleted: Deleted,
    disk: DiskState,
    on_disk: Option<(u64, u64)>,
    pending_write: Option<PendingWrite>,
    writes: u64,
    pace: Pace,
    /// When the first client connected, monotonic; used only if sources are watched on demand.
    followed: Option<Duration>,
    /// A later revision reported by a client, until a new instance ID is made for it. This happens at most once per
    /// process, because its only cause is a state folder restored before the start.
    later: LaterRevision,
    replaced: u64,
    view: Option<EndpointsView>,
}

/// Whether a client revealed that the state on disk was restored from a backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LaterRevision {
    NotSeen,
    Reported { rev: u64 },
    Renamed,
}

/// Encodes a Service as in both APIs.
fn encode(service: keelson_proto::localnetv1::ServiceEndpoints) -> Bytes {
    NextItem { endpoints: Some(service), ..NextItem::default() }.encode_to_vec().into()
}

/// An instance ID that is neither 0 nor `former`.
pub(super) fn identity(random: u64, former: Option<u64>) -> u64 {
    [random, random.wrapping_add(1), random.wrapping_add(2)]
        .into_iter()
        .find(|id| *id != 0 && Some(*id) != former)
        .unwrap_or(1)
}

/// The revisions after `since` that can be derived from a state.
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
    pub(super) fn new(policy: EndpointsPolicy, start: Start, now: Now) -> (Self, Vec<Effect>) {
        let Start { restored, mut disk, is_renamed, shown, kept } = start;
        let later =
            |shown: &Published, meta: &Meta| shown.instance_id == meta.instance_id && shown.rev > meta.rev;
        // A published revision must not be taken back. This occurs only if another program writes to the disk.
        let restored = restored.filter(|restored| {
            let usable = !shown.as_ref().is_some_and(|shown| later(shown, &restored.meta));
            if !usable {
                disk = DiskState::Unusable;
            }
            usable
        });
        let mut core = Self {
            pace: Pace::new(policy.min_interval),
            inputs: Inputs::new(now.unix_ms, policy.service_proxy_names.clone()),
            policy,
            health: kept.health,
            started: now,
            current_unix_ms: now.unix_ms,
            stamped: Some(now.mono),
            rejected_reason: None,
            is_compared: false,
            shown: None,
            shown_unix_ms: 0,
            node_rev: 0,
            endpoints: 0,
            deleted: Deleted::default(),
            disk,
            on_disk: None,
            pending_write: None,
            writes: 0,
            followed: kept.followed,
            later: LaterRevision::NotSeen,
            replaced: shown.as_ref().map_or(0, |shown| shown.replaced + shown.bytes),
            view: None,
        };
        if let Some(node) = kept.node {
            core.inputs.node(node);
        }
        let mut effects = Vec::new();
        if let Some(restored) = restored {
            match core.too_old(&restored.meta, now).filter(|_| shown.is_none()) {
                Some(reason) => core.discard_restored(restored.meta.node.as_ref(), reason, &mut effects),
                None => core.restore(restored, shown.as_deref(), is_renamed, &mut effects),
            }
        }
        core.publish_freshness(now, &mut effects);
        (core, effects)
    }

    fn restore(
        &mut self,
        restored: Restored,
        shown: Option<&Published>,
        is_renamed: bool,
        effects: &mut Vec<Effect>,
    ) {
        let meta = &restored.meta;
        if let Some(node) = &meta.node {
            self.inputs.remember_node(node);
        }
        let going_on = shown.filter(|shown| shown.instance_id == meta.instance_id && shown.rev <= meta.rev);
        let restart = if going_on.is_some() { None } else { Some(meta.since) };
        let revisions = revisions(&restored, going_on.map_or(meta.since, |shown| shown.rev));
        self.current_unix_ms = meta.last_current();
        if meta.boot_id != self.policy.boot_id || is_renamed {
            // A state that was served in this boot is served until the next one, so write the boot ID; a new instance
            // ID is written too.
            self.stamped = None;
        }
        if self.disk == DiskState::Synced && !is_renamed {
            self.on_disk = Some((meta.instance_id, meta.rev));
        }
        let published = Arc::new(Published {
            instance_id: meta.instance_id,
            rev: meta.rev,
            bytes: restored.services.values().map(|item| item.message.len() as u64).sum(),
            replaced: self.replaced,
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
            current_unix_ms: self.current_unix_ms,
            boot_id: self.policy.boot_id.clone(),
            ..Meta::default()
        }
    }

    /// `random` makes an instance ID if one is needed.
    pub(super) fn handle_source_event(
        &mut self,
        event: SourceEvent,
        now: Now,
        random: u64,
    ) -> (Ack, Vec<Effect>) {
        let answer = match event {
            SourceEvent::Services(seen) => self.inputs.services(seen),
            SourceEvent::EndpointSlices(seen) => self.inputs.slices(seen),
            SourceEvent::ServiceCidrs(seen) => self.inputs.service_cidrs(seen),
            SourceEvent::Node(mut node) => {
                if node.name.is_empty() {
                    node.name.clone_from(&self.policy.node_name);
                }
                self.inputs.node(node);
                Ack::Accepted
            }
            SourceEvent::Health(kind, health) => {
                self.source_health(kind, health, now);
                Ack::Accepted
            }
        };
        let mut effects = Vec::new();
        self.advance(now, random, &mut effects);
        (answer, effects)
    }

    pub(super) fn handle(&mut self, event: Event, now: Now, random: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        match event {
            Event::Tick => {}
            Event::Client(ClientEvent::Followed) => drop(self.followed.get_or_insert(now.mono)),
            Event::Client(ClientEvent::LaterRevision { instance_id, rev }) => {
                self.note_later(instance_id, rev);
            }
            Event::Noted { number } => self.noted(number, now, &mut effects),
            Event::Written { number, result } => self.written(number, result, now, random, &mut effects),
        }
        self.advance(now, random, &mut effects);
        effects
    }

    fn advance(&mut self, now: Now, random: u64, effects: &mut Vec<Effect>) {
        self.confirm(now.unix_ms);
        if self.overdue_at().is_some_and(|at| at <= now.mono) {
            self.give_up(now, random, effects);
        }
        self.rename(random, effects);
        if self.pending_write.is_none() && self.rewrite_at().is_some_and(|at| at <= now.mono) {
            self.rewrite(now, effects);
        }
        if self.revise_at().is_some_and(|at| at <= now.mono) {
            self.revise(now, random, effects);
        }
        if self.stamp_at().is_some_and(|at| at <= now.mono) {
            self.stamp(now, effects);
        }
        self.publish_freshness(now, effects);
    }

    /// When the core needs a tick if no event occurs; monotonic.
    pub(super) fn next_tick(&self) -> Option<Duration> {
        let rewrite = self.rewrite_at().filter(|_| self.pending_write.is_none());
        [self.overdue_at(), rewrite, self.revise_at(), self.stamp_at(), self.grace_ends()]
            .into_iter()
            .flatten()
            .min()
    }

    /// When the next revision may be made; `None`: nothing changed, a write is pending, or the sources are not
    /// synced.
    fn revise_at(&self) -> Option<Duration> {
        let wanted = self.inputs.is_dirty() || !self.is_compared;
        let is_free = self.pending_write.as_ref().is_none_or(|pending_write| pending_write.is_overdue);
        let possible = is_free && self.inputs.synced();
        (wanted && possible).then_some(self.pace.next())
    }

    /// Computes what may have changed, and makes a revision if anything has.
    fn revise(&mut self, now: Now, random: u64, effects: &mut Vec<Effect>) {
        let mut dirty = self.inputs.take_dirty();
        let former = self.shown.clone();
        if !self.is_compared
            && let Some(former) = &former
        {
            for name in former.services.keys() {
                dirty.services.entry(name.clone()).or_default();
            }
        }
        let mut services = former.as_ref().map_or_else(RedBlackTreeMapSync::new_sync, |f| f.services.clone());
        let rev = former.as_ref().map_or(1, |former| former.rev + 1);
        effects.push(Effect::Count(Counted::Worked(dirty.services.len() as u64)));
        let (changes, triggered) = self.compute_dirty(&dirty, rev, &mut services);
        let node = former.as_ref().map(|former| former.node.clone());
        let new_node = (dirty.node || !self.is_compared).then(|| self.inputs.node_info());
        let new_node = new_node.filter(|new| node.as_deref() != Some(new));
        if changes.is_empty() && new_node.is_none() && former.is_some() {
            self.note_first_sync(now);
            return;
        }
        let node_changed = new_node.is_some();
        let replaced: u64 = changes.iter().map(|change| change.former_bytes as u64).sum();
        let set = changes.iter().filter_map(|change| services.get(&change.name));
        let set: u64 = set.map(|item| item.message.len() as u64).sum();
        let bytes = former.as_ref().map_or(0, |former| former.bytes).saturating_sub(replaced) + set;
        self.replaced += replaced;
        let published = Published {
            instance_id: former.as_ref().map_or_else(|| identity(random, None), |f| f.instance_id),
            rev,
            services,
            node: new_node.map(Arc::new).or(node).unwrap_or_default(),
            freshness: Freshness::Synced,
            triggered_unix_ms: triggered,
            bytes,
            replaced: self.replaced,
        };
        let names = changes.iter().map(|change| change.name.clone()).collect();
        let revision = Revision { rev, services: names, node: node_changed };
        if node_changed {
            self.node_rev = rev;
        }
        self.pace.made(now.mono);
        let forgotten = self.record_deletions(&changes, &published);
        self.write_or_publish(published, revision, (changes, forgotten), now, random, effects);
    }

    /// Updates `services`. Returns the changes, sorted by name, and when the oldest was made.
    fn compute_dirty(
        &mut self,
        dirty: &Dirty,
        rev: u64,
        services: &mut RedBlackTreeMapSync<ServiceName, Item>,
    ) -> (Vec<Change>, Option<i64>) {
        let (mut changes, mut oldest) = (Vec::new(), None::<i64>);
        for (name, triggered) in &dirty.services {
            let message = self.inputs.view(name).map(|service| {
                let count = service.endpoints.len() as u64;
                let proxy_name = proxy_name(&service.service_proxy_name);
                (encode(service), count, proxy_name)
            });
            let former = services.get(name).map(|item| item.message.clone());
            if former.as_ref() == message.as_ref().map(|(message, ..)| message) {
                continue;
            }
            let former_bytes = former.as_ref().map_or(0, Bytes::len);
            self.endpoints -= former.as_ref().map_or(0, endpoints_in).min(self.endpoints);
            let item = message.map(|(message, count, proxy_name)| {
                self.endpoints += count;
                Item { message, rev, proxy_name }
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

    /// Remembers deleted Services. Returns the names that are forgotten in exchange.
    fn record_deletions(&mut self, changes: &[Change], published: &Published) -> Vec<ServiceName> {
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

    fn publish(
        &mut self,
        published: Published,
        restart: Option<u64>,
        revision: Revision,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        // A state that was published already may only have a new instance ID.
        self.is_compared |= self.shown.as_ref().is_none_or(|shown| shown.rev < published.rev);
        self.shown_unix_ms = now.unix_ms;
        let freshness = self.freshness();
        let published = Arc::new(Published { freshness, ..published });
        let delay_ms = published.triggered_unix_ms.map(|triggered| now.unix_ms.saturating_sub(triggered));
        self.shown = Some(published.clone());
        // A history that begins at this revision or later does not contain it.
        let revisions = if restart >= Some(revision.rev) { Vec::new() } else { vec![revision] };
        effects.push(Effect::Publish { restart, revisions, published });
        effects.push(Effect::Count(Counted::Revision { delay_ms }));
    }
}
