//! Conditions for problems of image pulls, service endpoints and the state store.
//!
//! Owns: their types and reasons, and when a change of one is reported on the Node. In: the status of image pulls,
//! service endpoints and the state store. Out: the Node's conditions. False is healthy, as with the kubelet's
//! pressures.
//!
//! Each reason is one of a closed set and has one message. The text of an error is in the log, in `keelson endpoints`
//! and in `/readyz`: in a condition it would cost the API server a write with each change, most of all while it is
//! failing itself. For the same reason a problem is reported only when it has lasted for [`ONSET`] or longer, and stays
//! until it has been absent for `node.eviction_pressure_transition_period` (5 min), as the kubelet's pressures do.

use std::time::Duration;

use k8s_openapi::api::core::v1::{NodeCondition, NodeStatus};
use keelson_actor_system::{
    clock::Now,
    reports::{EndpointsView, PullsView, RuntimeAvailability, StaleCause},
};
use keelson_storage::StoreState;

use super::{Text, put};
use crate::status::{
    compute::{Inputs, Memory, Moment, millis, moment},
    kinds::{ConditionStatus, ENDPOINTS, PULLS, STATE},
    policy::{EndpointsOrigin, StatusPolicy},
};

/// How long a problem lasts before it is reported, in milliseconds: longer than a restart of the API server, of the
/// runtime or of the agent.
pub(in crate::status) const ONSET: i64 = 30_000;
/// As [`ONSET`], for an API server that does not answer the watches: longer than its restart and the reconnection of
/// the watches, because the condition is not read before that. Then the server is asked, and gets the same time again.
const UNAVAILABLE_ONSET: i64 = 75_000;

const SOURCE_UNAVAILABLE: &str = "SourceUnavailable";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Finding {
    status: ConditionStatus,
    reason: &'static str,
    message: &'static str,
}

impl Finding {
    fn healthy(reason: &'static str, message: &'static str) -> Self {
        Self { status: ConditionStatus::False, reason, message }
    }

    fn problem(reason: &'static str, message: &'static str) -> Self {
        Self { status: ConditionStatus::True, reason, message }
    }

    fn onset(&self) -> i64 {
        if self.reason == SOURCE_UNAVAILABLE { UNAVAILABLE_ONSET } else { ONSET }
    }

    fn unknown(reason: &'static str, message: &'static str) -> Self {
        Self { status: ConditionStatus::Unknown, reason, message }
    }
}

/// An uninterrupted finding of the passes, and since when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FindingPeriod {
    status: ConditionStatus,
    status_since: Moment,
    reason: &'static str,
    reason_since: Moment,
}

impl FindingPeriod {
    fn new(finding: Finding, now: Moment) -> Self {
        let Finding { status, reason, .. } = finding;
        Self { status, status_since: now, reason, reason_since: now }
    }

    fn extend(self, finding: Finding, now: Moment) -> Self {
        let new = Self::new(finding, now);
        match (self.status == new.status, self.reason == new.reason) {
            (true, true) => self,
            (true, false) => Self { status_since: self.status_since, ..new },
            (false, _) => new,
        }
    }
}

/// Sets the conditions of enabled parts. That of a disabled part is removed from the Node.
pub(super) fn set(
    list: &mut Vec<NodeCondition>,
    inputs: &Inputs,
    policy: &StatusPolicy,
    memory: &mut Memory,
    now: Now,
) {
    let stalled_after = millis(policy.pulls_stalled_after);
    report(list, PULLS, pulls(&inputs.pulls_view, stalled_after), policy, memory, now);
    match &inputs.endpoints {
        EndpointsView::Disabled => list.retain(|condition| condition.type_ != ENDPOINTS),
        EndpointsView::Pending => {}
        view => report(list, ENDPOINTS, endpoints(view, policy.endpoints_origin), policy, memory, now),
    }
    if let Some(state) = state(&inputs.store, &inputs.pulls_view) {
        report(list, STATE, state, policy, memory, now);
    }
}

/// Reports the finding if it has lasted for long enough; otherwise the Node's condition stands.
fn report(
    list: &mut Vec<NodeCondition>,
    kind: &'static str,
    found: Finding,
    policy: &StatusPolicy,
    memory: &mut Memory,
    now: Now,
) {
    let at = moment(now);
    let period =
        memory.periods.get(kind).map_or(FindingPeriod::new(found, at), |period| period.extend(found, at));
    memory.periods.insert(kind, period);
    let known = list.iter().find(|condition| condition.type_ == kind);
    let shown = match known {
        // A healthy state is reported at once: this is the first status of a node or of a version.
        None if found.status == ConditionStatus::False => None,
        None if at.saturating_sub(period.status_since) >= found.onset() => None,
        None => return,
        Some(known) => kept_condition(known, found, &period, millis(policy.pressure_transition), at),
    };
    let (status, reason, message) = shown.unwrap_or_else(|| {
        let Finding { status, reason, message } = found;
        (status, reason.to_owned(), message.to_owned())
    });
    put(list, (kind, status, reason, message), &Text::Always, now);
}

/// The Node's condition, if that stands.
fn kept_condition(
    known: &NodeCondition,
    found: Finding,
    period: &FindingPeriod,
    transition: i64,
    now: Moment,
) -> Option<(ConditionStatus, String, String)> {
    let status: ConditionStatus = known.status.parse().ok()?;
    let reason = known.reason.clone().unwrap_or_default();
    let is_same = status == found.status && reason == found.reason;
    let since = if status == found.status { period.reason_since } else { period.status_since };
    let pause = if status == ConditionStatus::True { transition } else { found.onset() };
    let stands = is_same || now.saturating_sub(since) < pause;
    stands.then(|| (status, reason, known.message.clone().unwrap_or_default()))
}

fn endpoints_of(status: &NodeStatus) -> Option<&NodeCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_ == ENDPOINTS)
}

fn becomes_stale<'a>(old: &NodeStatus, new: &'a NodeStatus) -> Option<&'a NodeCondition> {
    let was_stale = endpoints_of(old).is_some_and(|known| known.status == "True");
    endpoints_of(new).filter(|new| new.status == "True" && !was_stale)
}

/// Whether [`ENDPOINTS`] becomes True because the API server does not answer.
pub(in crate::status) fn would_be_unavailable(old: &NodeStatus, new: &NodeStatus) -> bool {
    becomes_stale(old, new).is_some_and(|new| new.reason.as_deref() == Some(SOURCE_UNAVAILABLE))
}

/// Leaves [`ENDPOINTS`] as on the Node, if it would become True.
pub(in crate::status) fn withhold_stale_endpoints(status: &mut NodeStatus, old: &NodeStatus) {
    if becomes_stale(old, status).is_some() {
        let list = status.conditions.get_or_insert_default();
        list.retain(|condition| condition.type_ != ENDPOINTS);
        list.extend(endpoints_of(old).cloned());
    }
}

/// Whether image pulls are stalled. Those that only wait for each other are not.
fn pulls(pulls_view: &Result<PullsView, String>, stalled_after: i64) -> Finding {
    let Ok(pulls_view) = pulls_view else {
        return Finding::unknown(
            "PullsUnknown",
            "the queue of image pulls does not answer; see the agent's log",
        );
    };
    if matches!(pulls_view.runtime, RuntimeAvailability::Down { .. })
        && (pulls_view.queued > 0 || pulls_view.running > 0)
    {
        let message = "image pulls wait for the container runtime, which does not answer";
        return Finding::problem("RuntimeUnavailable", message);
    }
    let long = |time: Option<Duration>| time.is_some_and(|time| millis(time) >= stalled_after);
    if pulls_view.queued > 0 && long(pulls_view.oldest_wait) && long(pulls_view.since_progress) {
        let message = "image pulls are queued, and no running pull receives data";
        return Finding::problem("PullsStalled", message);
    }
    Finding::healthy("PullsNotStalled", "no image pull is stalled")
}

fn endpoints(view: &EndpointsView, origin: EndpointsOrigin) -> Finding {
    let cause = match view {
        EndpointsView::Stale { cause, .. } => Some(*cause),
        EndpointsView::NotWatched => {
            let message = "no client is connected to the Endpoints API, so the agent does not watch Services";
            return Finding::unknown("NotWatched", message);
        }
        EndpointsView::Disabled | EndpointsView::Pending | EndpointsView::Synced => None,
    };
    match (cause, origin) {
        (None, EndpointsOrigin::ApiServer) => {
            Finding::healthy("EndpointsSynced", "the service endpoints are synced with the API server")
        }
        (None, EndpointsOrigin::Manifests) => Finding::healthy(
            "EndpointsSynced",
            "the service endpoints are synced with the manifests directory",
        ),
        (Some(StaleCause::NotSynced), EndpointsOrigin::ApiServer) => {
            let message =
                "the service endpoints are not synced with the API server yet; see keelson endpoints";
            Finding::problem("NotSynced", message)
        }
        (Some(StaleCause::NotSynced), EndpointsOrigin::Manifests) => {
            let message = "the service endpoints are not synced with the manifests directory yet; see \
                           keelson endpoints";
            Finding::problem("NotSynced", message)
        }
        (Some(StaleCause::SourceUnavailable), EndpointsOrigin::ApiServer) => {
            let message = "the API server does not answer correctly; the last synced service endpoints stay \
                           in use; see keelson endpoints";
            Finding::problem(SOURCE_UNAVAILABLE, message)
        }
        (Some(StaleCause::SourceRefused), EndpointsOrigin::ApiServer) => {
            let message = "the API server does not allow the agent to watch Services or EndpointSlices; the \
                           last synced service endpoints stay in use; see keelson endpoints";
            Finding::problem("SourceRefused", message)
        }
        (Some(_), EndpointsOrigin::Manifests) => {
            let message = "the manifests directory cannot be read; the last synced service endpoints stay in \
                           use; see keelson endpoints";
            Finding::problem(SOURCE_UNAVAILABLE, message)
        }
    }
}

/// `None` while the store is being opened or has been closed, so that a restart is no transition.
fn state(store: &StoreState, pulls_view: &Result<PullsView, String>) -> Option<Finding> {
    let is_behind = matches!(pulls_view, Ok(PullsView { durable: false, .. }));
    let not_open = || {
        let message = "the state store is not open; a restart loses the image pull queue; see /readyz";
        Finding::problem("StoreNotOpen", message)
    };
    match store {
        StoreState::Open => {
            Some(Finding::healthy("StateDurable", "the state store is open and its last write succeeded"))
        }
        StoreState::Failing { .. } => {
            let message = "the last write of the state store failed; see /readyz";
            Some(Finding::problem("StoreFailing", message))
        }
        StoreState::Unavailable { .. } => Some(not_open()),
        // Opening takes longer than the PullCoordinator waits.
        StoreState::Opening { .. } if is_behind => Some(not_open()),
        _ => None,
    }
}
