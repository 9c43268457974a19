//! What the sink is told.
//!
//! Owns: [`Teller`]: which events are sent and in which order, so that who takes them sees whole moments. In: changes, by
//! kind. Out: [`SourceEvent`]s.
//!
//! A change of one kind is one event. A change of several kinds is told within a listing of ServiceCIDRs, of which there
//! are few: as long as a listing is open nothing is published, so that no state mixes the Services of one moment with
//! the endpoints of another.

use std::{collections::BTreeMap, collections::BTreeSet, sync::Arc, time::Duration};

use keelson_actor_system::cluster::ChoreHealth;
use keelson_endpoint_publisher::{Answer, EventSink, SourceEvent, SourceKind};
use tokio::time::sleep;

use super::object::{self, Say};

/// Objects in one event of a listing.
const CHUNK: usize = 500;

/// The kind whose listing holds the others together.
const HOLDER: SourceKind = SourceKind::ServiceCidrs;

/// A sink that keeps asking for a listing is not given one more often than this.
const LEAST_PAUSE: Duration = Duration::from_millis(50);
const MOST_PAUSE: Duration = Duration::from_secs(5);

/// Everything of a kind as it is now.
pub(super) type All<'a> = &'a (dyn Fn(SourceKind) -> Vec<Say> + Send + Sync);

/// See the module.
pub(super) struct Teller {
    sink: Arc<dyn EventSink>,
    node_name: String,
    /// Kinds that the sink knows everything of.
    listed: BTreeSet<SourceKind>,
}

impl std::fmt::Debug for Teller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Teller").field("listed", &self.listed).finish_non_exhaustive()
    }
}

impl Teller {
    pub(super) fn new(sink: Arc<dyn EventSink>, node_name: String) -> Self {
        Self { sink, node_name, listed: BTreeSet::new() }
    }

    async fn send(&mut self, kind: SourceKind, event: SourceEvent) -> bool {
        let taken = self.sink.send(event).await == Answer::Taken;
        if !taken {
            self.listed.remove(&kind);
        }
        taken
    }

    async fn say(&mut self, kind: SourceKind, say: Vec<Say>) -> bool {
        let event = object::event(kind, &self.node_name, say);
        self.send(kind, event).await
    }

    async fn list_once(&mut self, kind: SourceKind, all: All<'_>) -> bool {
        if kind == SourceKind::Node {
            return self.say(kind, all(kind)).await;
        }
        let mut objects = all(kind).into_iter().peekable();
        let mut first = true;
        loop {
            let mut say = Vec::new();
            if std::mem::take(&mut first) {
                say.push(Say::Listing);
            }
            say.extend(objects.by_ref().take(CHUNK));
            let last = objects.peek().is_none();
            if last {
                say.push(Say::Listed);
            }
            if !self.say(kind, say).await {
                return false;
            }
            if last {
                return true;
            }
        }
    }

    /// Tells everything of every kind that the sink does not know.
    pub(super) async fn catch_up(&mut self, all: All<'_>) {
        let mut pause = LEAST_PAUSE;
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
                sleep(pause).await;
                pause = (pause * 2).min(MOST_PAUSE);
            }
        }
    }

    /// Tells what has changed; `all` is what is so after it.
    pub(super) async fn tell(&mut self, mut changes: BTreeMap<SourceKind, Vec<Say>>, all: All<'_>) {
        // What is not known to the sink is told whole, change and all.
        changes.retain(|kind, _| self.listed.contains(kind));
        let held = changes.len() > 1 && self.listed.contains(&HOLDER);
        if held {
            changes.remove(&HOLDER);
            let mut say = vec![Say::Listing];
            say.extend(all(HOLDER));
            self.say(HOLDER, say).await;
        }
        for (kind, say) in changes {
            self.say(kind, say).await;
        }
        if held && self.listed.contains(&HOLDER) {
            self.say(HOLDER, vec![Say::Listed]).await;
        }
        self.catch_up(all).await;
    }

    /// Tells nothing new: a sink that has forgotten everything asks for it then, and need not wait for a change.
    pub(super) async fn remind(&mut self, all: All<'_>) {
        for kind in SourceKind::ALL {
            if kind != SourceKind::Node && self.listed.contains(&kind) {
                self.say(kind, Vec::new()).await;
            }
        }
        self.catch_up(all).await;
    }

    /// Tells how the folder fares.
    pub(super) async fn health(&mut self, health: &ChoreHealth) {
        for kind in SourceKind::ALL {
            let event = SourceEvent::Health(kind, health.clone());
            self.send(kind, event).await;
        }
    }
}
