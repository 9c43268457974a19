//! What to send to a caller next.
//!
//! Owns: [`Plan`], a caller's position and request. In: the latest state and the recent changes. Out: the
//! [`Batch`] that is due, or none while the caller has to wait. Pure.

use std::{sync::Arc, time::Duration};

use keelson_endpoint_publisher::{Freshness, History, Published};
use keelson_proto::{
    endpoints::{Reset, Sync, WatchItem, WatchRequest, watch_item},
    localnetv1::{NextFilter, NextItem, NodeInfo},
};
use prost::Message as _;

use super::{
    batch::{Batch, Extent},
    filter::Filter,
};

/// How long a change of staleness must last before it alone is sent to a caller of Next: it costs a full state, and a
/// restarted agent marks its state stale until its sources are listed.
pub(super) const LASTING: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Revision {
    pub(super) instance_id: u64,
    pub(super) rev: u64,
}

impl Revision {
    pub(super) fn of(state: &Published) -> Self {
        Self { instance_id: state.instance_id, rev: state.rev }
    }

    /// The position in a request; instance 0 is none.
    pub(super) fn from_request(instance_id: u64, rev: u64) -> Option<Self> {
        (instance_id != 0).then_some(Self { instance_id, rev })
    }
}

/// How many revisions the newest is ahead of `at`. Revisions of another instance cannot be compared: then, and without
/// any, it is ahead by all of its own.
pub(super) fn behind(at: Option<Revision>, newest: Option<Revision>) -> u64 {
    match (at, newest) {
        (_, None) => 0,
        (Some(at), Some(newest)) if at.instance_id == newest.instance_id => newest.rev.saturating_sub(at.rev),
        (_, Some(newest)) => newest.rev,
    }
}

#[derive(Debug)]
pub(super) enum Plan {
    /// `localnetv1.Endpoints/Next`.
    Next(NextPlan),
    /// `keelson.endpoints.v1.Endpoints/Watch`.
    Watch(WatchPlan),
}

impl Plan {
    pub(super) fn next(request: &NextFilter) -> Self {
        Self::Next(NextPlan {
            has: Revision::from_request(request.instance_id, request.rev),
            known_stale: request.follow_stale.then_some(request.stale),
            filter: Filter::new(request.required_endpoint_conditions).of_proxy(&request.service_proxy_name),
            answered: false,
        })
    }

    pub(super) fn watch(request: &WatchRequest) -> Self {
        Self::Watch(WatchPlan {
            at: Revision::from_request(request.instance_id, request.rev),
            filter: Filter::new(request.required_endpoint_conditions).of_proxy(&request.service_proxy_name),
            sent: None,
        })
    }

    pub(super) fn filter(&self) -> &Filter {
        match self {
            Self::Next(next) => &next.filter,
            Self::Watch(watch) => &watch.filter,
        }
    }

    /// Why a state cannot be sent to the caller; `None`: it can.
    pub(super) fn refusal(&self, state: &Published) -> Option<String> {
        let name = self.filter().proxy_name();
        let is_published =
            name.is_empty() || state.node.service_proxy_names.iter().any(|known| known == name);
        (!is_published).then(|| {
            format!(
                "Services of the service proxy {name:?} are not published; add the name to \
                 endpoints.service_proxy_names of the agent"
            )
        })
    }

    /// From the request or from the last batch.
    pub(super) fn position(&self) -> Option<Revision> {
        match self {
            Self::Next(next) => next.has,
            Self::Watch(watch) => watch.at,
        }
    }

    /// Nothing more is due: the call ends with OK.
    pub(super) fn is_done(&self) -> bool {
        matches!(self, Self::Next(NextPlan { answered: true, .. }))
    }

    /// Whether the caller waits with this state, and has to learn that it has become stale or current since.
    pub(super) fn has_staleness_changed(&self, state: &Published) -> bool {
        matches!(self, Self::Next(next) if next.has_staleness_changed(state))
    }

    /// The batch that is due if `state` is the latest. `lasting`: [its staleness has changed](Self::has_staleness_changed)
    /// since [`LASTING`]. Relies on a batch being sent completely before the next call.
    pub(super) fn due(&mut self, state: &Arc<Published>, history: &History, lasting: bool) -> Option<Batch> {
        match self {
            Self::Next(next) => next.due(state, lasting),
            Self::Watch(watch) => watch.due(state, history),
        }
    }
}

#[derive(Debug)]
pub(super) struct NextPlan {
    has: Option<Revision>,
    /// Whether the caller's state is stale; `None` if it does not request changes of staleness alone.
    known_stale: Option<bool>,
    filter: Filter,
    answered: bool,
}

impl NextPlan {
    fn has_staleness_changed(&self, state: &Published) -> bool {
        let stale = matches!(state.freshness, Freshness::Stale { .. });
        self.has == Some(Revision::of(state)) && self.known_stale.is_some_and(|known| known != stale)
    }

    fn due(&mut self, state: &Arc<Published>, lasting: bool) -> Option<Batch> {
        let newest = Revision::of(state);
        let turned = lasting && self.has_staleness_changed(state);
        if self.answered || (self.has == Some(newest) && !turned) {
            return None;
        }
        self.answered = true;
        self.has = Some(newest);
        let (stale, stale_reason, stale_since_unix_ms) = staleness(&state.freshness);
        let next = NextFilter {
            instance_id: state.instance_id,
            rev: state.rev,
            required_endpoint_conditions: self.filter.required(),
            stale,
            stale_reason: stale_reason.to_owned(),
            triggered_unix_ms: state.triggered_unix_ms.unwrap_or(0),
            stale_since_unix_ms,
            follow_stale: self.known_stale.is_some(),
            service_proxy_name: self.filter.proxy_name().to_owned(),
        };
        let node = Some(NodeInfo::clone(&state.node));
        let first = NextItem { next: Some(next), endpoints: None, node };
        Some(Batch::full(state.clone(), Extent::Full, vec![first.encode_to_vec()], None))
    }
}

#[derive(Debug)]
pub(super) struct WatchPlan {
    /// The state that the caller has, from its request or from the last Sync.
    at: Option<Revision>,
    filter: Filter,
    sent: Option<Sent>,
}

#[derive(Debug, PartialEq, Eq)]
struct Sent {
    position: Revision,
    freshness: Freshness,
}

impl WatchPlan {
    fn due(&mut self, state: &Arc<Published>, history: &History) -> Option<Batch> {
        let position = Revision::of(state);
        let sync_point = Sent { position, freshness: state.freshness.clone() };
        if self.sent.as_ref() == Some(&sync_point) {
            return None;
        }
        let known = self.at.filter(|at| at.instance_id == state.instance_id);
        let changes = known.and_then(|at| history.between(at.instance_id, at.rev, state.rev));
        let moved = changes.is_none() || self.at != Some(position);
        let sync = sync(state, moved);
        let node = || WatchItem { item: Some(watch_item::Item::Node(NodeInfo::clone(&state.node))) };
        let batch = match changes {
            Some(changes) => {
                let first = changes.node.then(|| node().encode_to_vec()).into_iter().collect();
                Batch::delta(state.clone(), first, changes, Some(sync))
            }
            None => {
                let reset = WatchItem { item: Some(watch_item::Item::Reset(Reset {})) };
                let first = vec![reset.encode_to_vec(), node().encode_to_vec()];
                let extent = if self.at.is_some() { Extent::Reset } else { Extent::Full };
                Batch::full(state.clone(), extent, first, Some(sync))
            }
        };
        self.at = Some(position);
        self.sent = Some(sync_point);
        Some(batch)
    }
}

/// The Sync that ends a batch. The trigger of a revision is sent once, with the batch that leads to it.
fn sync(state: &Published, moved: bool) -> Vec<u8> {
    let (stale, stale_reason, stale_since_unix_ms) = staleness(&state.freshness);
    let sync = Sync {
        instance_id: state.instance_id,
        rev: state.rev,
        stale,
        stale_reason: stale_reason.to_owned(),
        triggered_unix_ms: state.triggered_unix_ms.filter(|_| moved).unwrap_or(0),
        stale_since_unix_ms,
    };
    WatchItem { item: Some(watch_item::Item::Sync(sync)) }.encode_to_vec()
}

/// Whether the state is stale, why, and since when in Unix milliseconds.
fn staleness(freshness: &Freshness) -> (bool, &str, i64) {
    match freshness {
        Freshness::Synced => (false, "", 0),
        Freshness::Stale { reason, since_unix_ms } => (true, reason, *since_unix_ms),
    }
}
