//! Sends changes to the sink.
//!
//! Owns: [`Delivery`]: which events are sent and in which order, so that no state mixes two moments. In: changes, by
//! kind. Out: [`SourceEvent`]s.
//!
//! A change of one kind is one event. A change of several kinds is sent within a listing of ServiceCIDRs, of which
//! there are few: nothing is published while a listing is open, so that no state has the Services of one moment and the
//! endpoints of another.

use std::{collections::BTreeMap, collections::BTreeSet, sync::Arc, time::Duration};

use keelson_actor_system::cluster::JobHealth;
use keelson_endpoint_publisher::{Ack, EventSink, SourceEvent, SourceKind};
use keelson_proto::backoff::Backoff;
use tokio::time::sleep;

use super::object::{self, Change};

/// Objects in one event of a listing.
const CHUNK: usize = 500;

/// The kind whose listing encloses changes of several kinds.
const HOLDER: SourceKind = SourceKind::ServiceCidrs;

/// Between listings for a sink that keeps asking for one.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(50), longest: Duration::from_secs(5) };

/// All current objects of a kind.
pub(super) type All<'a> = &'a (dyn Fn(SourceKind) -> Vec<Change> + Send + Sync);

/// What the sink was sent.
pub(super) struct Delivery {
    sink: Arc<dyn EventSink>,
    node_name: String,
    /// Kinds that the sink has in full.
    listed: BTreeSet<SourceKind>,
}

impl std::fmt::Debug for Delivery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Delivery").field("listed", &self.listed).finish_non_exhaustive()
    }
}

impl Delivery {
    pub(super) fn new(sink: Arc<dyn EventSink>, node_name: String) -> Self {
        Self { sink, node_name, listed: BTreeSet::new() }
    }

    async fn send(&mut self, kind: SourceKind, event: SourceEvent) -> bool {
        let taken = self.sink.send(event).await == Ack::Accepted;
        if !taken {
            self.listed.remove(&kind);
        }
        taken
    }

    async fn changes(&mut self, kind: SourceKind, changes: Vec<Change>) -> bool {
        let event = object::event(kind, &self.node_name, changes);
        self.send(kind, event).await
    }

    async fn list_once(&mut self, kind: SourceKind, all: All<'_>) -> bool {
        if kind == SourceKind::Node {
            return self.changes(kind, all(kind)).await;
        }
        let mut objects = all(kind).into_iter().peekable();
        let mut first = true;
        loop {
            let mut chunk = Vec::new();
            if std::mem::take(&mut first) {
                chunk.push(Change::Listing);
            }
            chunk.extend(objects.by_ref().take(CHUNK));
            let last = objects.peek().is_none();
            if last {
                chunk.push(Change::Listed);
            }
            if !self.changes(kind, chunk).await {
                return false;
            }
            if last {
                return true;
            }
        }
    }

    /// Sends all objects of every kind that the sink does not have.
    pub(super) async fn catch_up(&mut self, all: All<'_>) {
        let mut failures = 0;
        loop {
            let missing: Vec<SourceKind> =
                SourceKind::ALL.into_iter().filter(|kind| !self.listed.contains(kind)).collect();
            if missing.is_empty() {
                return;
            }
            let mut refused = false;
            for kind in missing {
                if self.list_once(kind, all).await {
                    self.listed.insert(kind);
                } else {
                    refused = true;
                }
            }
            if refused {
                failures += 1;
                sleep(BACKOFF.pause(failures)).await;
            }
        }
    }

    /// `all`: the objects after the change.
    pub(super) async fn send_changes(
        &mut self,
        mut changes: BTreeMap<SourceKind, Vec<Change>>,
        all: All<'_>,
    ) {
        // A kind that the sink does not have is listed below, including its changes.
        changes.retain(|kind, _| self.listed.contains(kind));
        let held = changes.len() > 1 && self.listed.contains(&HOLDER);
        if held {
            changes.remove(&HOLDER);
            let mut listing = vec![Change::Listing];
            listing.extend(all(HOLDER));
            self.changes(HOLDER, listing).await;
        }
        for (kind, changes) in changes {
            self.changes(kind, changes).await;
        }
        if held && self.listed.contains(&HOLDER) {
            self.changes(HOLDER, vec![Change::Listed]).await;
        }
        self.catch_up(all).await;
    }

    /// Sends empty changes, so that a sink that has lost its state can request a listing without waiting for a change.
    pub(super) async fn send_empty_changes(&mut self, all: All<'_>) {
        for kind in SourceKind::ALL {
            if kind != SourceKind::Node && self.listed.contains(&kind) {
                self.changes(kind, Vec::new()).await;
            }
        }
        self.catch_up(all).await;
    }

    pub(super) async fn health(&mut self, health: &JobHealth) {
        for kind in SourceKind::ALL {
            let event = SourceEvent::Health(kind, health.clone());
            self.send(kind, event).await;
        }
    }
}
