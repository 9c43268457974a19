//! When to send which request to the API server, without I/O and without a clock.
//!
//! Owns: [`Core`], what is known of the Lease and its Node. In: [`Event`]s with the time and a random number. Out:
//! [`Effect`]s in the order to perform them, and [`Core::next_tick`].
//!
//! ```text
//!            ┌──────────────── interval, jitter ◄────────────────┐
//!            ▼                                                   │
//!  waiting ─┬─(Lease known)──► renew ──ok────────────────────────┤
//!           │                   │ ▲ └─fails 5 times──► read, or  │
//!           │                   │ │  where there is no server    │
//!           │                   │ │  renew after a back-off      │
//!           │          conflict │ │                              │
//!           │                   ▼ │                              │
//!           ├─(not known)────► read ──404──► Node? ──► create ───┤
//!           │                   │ ▲            └─gone: alarm ────┘
//!           │                   ▼ │
//!           │               backing off 0.2 s .. 7 s
//!           └─(known not to be there)──► Node?
//! ```
//!
//! A *sync* is the activity between two waits. It renews at most five times with what it knew, and at most five times
//! more after a read. While the server cannot be reached, renewal is retried with a back-off. Waits use the monotonic
//! clock only; the wall clock is written to the Lease, and read for the age of the Lease after a start.

mod answers;
mod contest;
mod types;
mod view;

#[cfg(test)]
mod case_tests;
#[cfg(test)]
mod contest_tests;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod table_tests;
#[cfg(test)]
pub(crate) mod testing;

use std::time::Duration;

pub use contest::Contention;
pub use types::LeasePolicy;
pub(crate) use types::{Answer, Counted, Effect, Event, Renewed, Request};

use keelson_actor_system::{
    clock::Now,
    cluster::{ApiError, ApiErrorKind, LeaseCreate, LeaseHolder, LeasePatch, Owner},
};

use keelson_proto::backoff::Backoff;

use self::contest::Contest;
use super::record::LeaseRecord;

/// Maximum number of renewals in a row without a read other than after a conflict (kubelet: `maxUpdateRetries`).
const MAX_TRIES: u32 = 5;
/// Pauses of a failing sync (kubelet: 100 ms, doubled first, `maxBackoff`).
const PAUSES: Backoff = Backoff { first: Duration::from_millis(200), longest: Duration::from_secs(7) };
/// The pause after a 429 without `Retry-After`.
const TOO_MANY_PAUSE: Duration = Duration::from_secs(1);
/// Maximum jitter, as a fraction of the interval (kubelet: `wait.JitterUntil` with 0.04).
const JITTER: f64 = 0.04;
/// Maximum addition to a server's `Retry-After`, as a fraction of the interval, so that agents that were refused
/// together do not return together.
const SPREAD: f64 = 0.25;
/// A difference of the two clocks that is a step of the wall clock and not slewing, milliseconds.
const STEP_MS: i64 = 1000;

/// The Lease as the next patch finds it, unless another process writes it.
#[derive(Debug, Clone, Default)]
struct Held {
    uid: String,
    resource_version: String,
    owner_uid: Option<String>,
    holder: Option<String>,
    duration_seconds: Option<i32>,
    transitions: i32,
    acquired_unix_us: Option<i64>,
    managers_forgotten: bool,
}

/// The Node as last watched or read.
#[derive(Debug, Clone, PartialEq, Eq)]
enum NodeSeen {
    Unknown,
    Known(String),
    Gone { since_unix_ms: i64 },
}

#[derive(Debug, Clone)]
enum Phase {
    /// Between two syncs.
    Waiting {
        until: Duration,
    },
    /// Within a sync.
    BackingOff {
        until: Duration,
    },
    Reading,
    AskingNode {
        to_create: bool,
    },
    Creating(LeaseCreate),
    Renewing(LeasePatch),
}

#[derive(Debug, Default)]
struct Sync {
    tries: u32,
    /// The half after the read.
    is_after_read: bool,
    node_asked: bool,
    pauses: u32,
    read_timeouts: u32,
}

#[derive(Debug, Clone)]
struct LeaseFailure {
    /// The failing request, and the error: a change is reported.
    kind: (&'static str, &'static str),
    reason: String,
    since_unix_ms: i64,
}

struct EventContext {
    now: Now,
    random: f64,
    fx: Vec<Effect>,
}

impl EventContext {
    fn note(&mut self, warn: bool, text: String) {
        self.fx.push(Effect::Note { warn, text });
    }

    fn count(&mut self, result: &'static str) {
        self.fx.push(Effect::Count(Counted::Result(result)));
    }
}

#[derive(Debug)]
pub(crate) struct Core {
    policy: LeasePolicy,
    node: NodeSeen,
    lease: Option<Held>,
    /// The Lease is known not to exist: another read would say nothing new.
    missing: bool,
    record: Option<LeaseRecord>,
    /// The server rejects the patch that drops the managers.
    forget_refused: bool,
    phase: Phase,
    number: u64,
    sync: Sync,
    contest: Contest,
    /// The Lease has not been read since the start.
    first: bool,
    /// The uid of the last Lease that was reported as replaced.
    reported_uid: String,
    /// `Retry-After` of the server: no request before this time.
    not_before: Duration,
    /// When a change of the Node last started a sync early.
    early: Option<Duration>,
    renewed: Option<Renewed>,
    settled: bool,
    failures: u64,
    failure: Option<LeaseFailure>,
    last_error: Option<(i64, String)>,
    /// Wall clock less monotonic clock, milliseconds.
    offset: Option<i64>,
}

impl Core {
    /// `record` is of an earlier process.
    #[must_use]
    pub(crate) fn new(policy: LeasePolicy, record: Option<LeaseRecord>) -> Self {
        Self {
            record: record.filter(|record| record.name == policy.name),
            contest: Contest::new(policy.may_stand_back, policy.interval(), policy.duration()),
            policy,
            node: NodeSeen::Unknown,
            lease: None,
            missing: false,
            forget_refused: false,
            phase: Phase::Waiting { until: Duration::ZERO },
            number: 0,
            sync: Sync::default(),
            first: true,
            reported_uid: String::new(),
            not_before: Duration::ZERO,
            early: None,
            renewed: None,
            settled: false,
            failures: 0,
            failure: None,
            last_error: None,
            offset: None,
        }
    }

    /// Handles one event. `random` is in [0, 1). Returns the effects to perform.
    pub(crate) fn handle(&mut self, event: Event, now: Now, random: f64) -> Vec<Effect> {
        let mut cx = EventContext { now, random, fx: Vec::new() };
        self.watch_clock(&mut cx);
        match event {
            Event::Tick => match self.phase {
                Phase::Waiting { until } if until <= now.mono => self.begin(&mut cx),
                Phase::BackingOff { until } if until <= now.mono => self.continue_sync(&mut cx),
                _ => {}
            },
            Event::Answered { request, answer } if request == self.number => self.answered(answer, &mut cx),
            Event::Answered { .. } => {}
            Event::NodeChanged(uid) => self.node_changed(uid, &mut cx),
        }
        cx.fx
    }

    /// On the monotonic clock; `None` while a request is under way.
    #[must_use]
    pub(crate) fn next_tick(&self) -> Option<Duration> {
        match self.phase {
            Phase::Waiting { until } | Phase::BackingOff { until } => Some(until),
            _ => None,
        }
    }

    /// Detects steps of the wall clock. No plan depends on it, so nothing else has to be done.
    fn watch_clock(&mut self, cx: &mut EventContext) {
        let offset = cx.now.unix_ms.saturating_sub(mono_ms(cx.now));
        let step = self.offset.map_or(0, |before| offset.saturating_sub(before));
        if step.saturating_abs() >= STEP_MS {
            let forward = step > 0;
            cx.fx.push(Effect::Count(Counted::ClockStep { forward }));
            let by = Duration::from_millis(step.unsigned_abs());
            let direction = if forward { "forward" } else { "back" };
            cx.note(
                true,
                format!("the wall clock stepped {direction} by {by:?}; renewals continue as scheduled"),
            );
        }
        // Slewing must not add up to a step.
        self.offset = Some(offset);
    }

    fn begin(&mut self, cx: &mut EventContext) {
        self.sync = Sync { is_after_read: self.lease.is_none(), ..Sync::default() };
        self.continue_sync(cx);
    }

    fn continue_sync(&mut self, cx: &mut EventContext) {
        if self.lease.is_some() {
            self.renew(cx);
        } else if self.missing {
            self.ask_node(true, cx);
        } else {
            self.read(cx);
        }
    }

    fn ask(&mut self, phase: Phase, request: Request, cx: &mut EventContext) {
        self.phase = phase;
        self.number += 1;
        cx.fx.push(Effect::Ask { number: self.number, request });
    }

    fn read(&mut self, cx: &mut EventContext) {
        self.ask(Phase::Reading, Request::Read, cx);
    }

    fn ask_node(&mut self, to_create: bool, cx: &mut EventContext) {
        self.sync.node_asked = true;
        self.ask(Phase::AskingNode { to_create }, Request::Node, cx);
    }

    fn create(&mut self, uid: String, cx: &mut EventContext) {
        let lease = LeaseCreate {
            name: self.policy.name.clone(),
            owner: Some(Owner { name: self.policy.node.clone(), uid }),
            holder: self.policy.holder.clone(),
            duration_seconds: self.policy.duration_seconds(),
            now_unix_us: unix_us(cx.now),
            transitions: 0,
        };
        self.contest.sends(lease.now_unix_us);
        self.ask(Phase::Creating(lease.clone()), Request::Create(lease), cx);
    }

    fn renew(&mut self, cx: &mut EventContext) {
        let Some(held) = &self.lease else { return self.read(cx) };
        let known = matches!(self.node, NodeSeen::Known(_));
        if held.owner_uid.is_none() && !known && !self.sync.node_asked {
            return self.ask_node(false, cx);
        }
        let owner = match &self.node {
            NodeSeen::Known(uid) if held.owner_uid.as_ref() != Some(uid) => {
                Some(Owner { name: self.policy.node.clone(), uid: uid.clone() })
            }
            _ => None,
        };
        let ours = held.holder.as_ref() == Some(&self.policy.holder);
        let claim = self.contest.claim(unix_us(cx.now), held.acquired_unix_us);
        // Also without a holder before: leader election (client-go) counts in the same way.
        let acquire = (!ours || claim.is_some()).then(|| LeaseHolder {
            holder: self.policy.holder.clone(),
            acquire_unix_us: claim.unwrap_or_else(|| unix_us(cx.now)),
            transitions: if ours { held.transitions } else { held.transitions.saturating_add(1) },
        });
        let duration = self.policy.duration_seconds();
        let patch = LeasePatch {
            name: self.policy.name.clone(),
            resource_version: held.resource_version.clone(),
            renew_unix_us: unix_us(cx.now),
            duration_seconds: (held.duration_seconds != Some(duration)).then_some(duration),
            owner,
            acquire,
            drop_managed_fields: self.policy.drops_managed_fields
                && !held.managers_forgotten
                && !self.forget_refused,
        };
        self.sync.tries += 1;
        self.contest.sends(patch.renew_unix_us);
        self.ask(Phase::Renewing(patch.clone()), Request::Renew(patch), cx);
    }

    /// Ends the sync: the next one starts after the interval and up to 4 % jitter.
    fn end_sync(&mut self, cx: &EventContext) {
        self.wait_for(self.jittered(cx), cx);
    }

    fn wait_for(&mut self, pause: Duration, cx: &EventContext) {
        self.phase = Phase::Waiting { until: cx.now.mono.saturating_add(pause).max(self.not_before) };
    }

    fn jittered(&self, cx: &EventContext) -> Duration {
        self.policy.interval() + self.part_of_interval(JITTER, cx)
    }

    /// A random part of the interval, up to `most`.
    fn part_of_interval(&self, most: f64, cx: &EventContext) -> Duration {
        let random = if (0.0..=1.0).contains(&cx.random) { cx.random } else { 0.0 };
        self.policy.interval().mul_f64(most * random)
    }

    fn back_off(&mut self, at_least: Duration, cx: &EventContext) {
        self.sync.pauses = self.sync.pauses.saturating_add(1);
        let pause = PAUSES.pause(self.sync.pauses).max(at_least);
        self.phase = Phase::BackingOff { until: cx.now.mono.saturating_add(pause).max(self.not_before) };
    }

    /// The pause that the server asked for, if any: an interval at most, so that tries remain before the Lease expires,
    /// plus a random part of an interval.
    fn wanted_pause(&self, error: &ApiError, cx: &EventContext) -> Option<Duration> {
        let asked = error.kind.retry_after().filter(|pause| !pause.is_zero());
        let asked = match error.kind {
            ApiErrorKind::TooManyRequests { .. } => Some(asked.unwrap_or(TOO_MANY_PAUSE)),
            _ => asked,
        }?;
        Some(asked.min(self.policy.interval()) + self.part_of_interval(SPREAD, cx))
    }

    /// Tries once more when the server's pause has passed.
    fn hold_off(&mut self, pause: Duration, cx: &EventContext) {
        self.sync.is_after_read = true;
        self.sync.tries = MAX_TRIES - 1;
        self.not_before = cx.now.mono.saturating_add(pause);
        self.back_off(pause, cx);
    }

    /// The Lease is healthy from now on.
    fn set_healthy(&mut self, cx: &mut EventContext) {
        self.settled = true;
        if let Some(failure) = self.failure.take() {
            let millis = cx.now.unix_ms.saturating_sub(failure.since_unix_ms).max(0).unsigned_abs();
            let (name, failures) = (&self.policy.name, self.failures);
            let after = Duration::from_millis(millis);
            cx.note(
                false,
                format!("Lease {name} renewed again after {after:?}, failed requests: {failures}"),
            );
        }
        self.failures = 0;
        self.remember(cx);
    }

    /// Writes the Lease's identity to the store if it changed.
    fn remember(&mut self, cx: &mut EventContext) {
        let Some(held) = &self.lease else { return };
        let record = LeaseRecord {
            name: self.policy.name.clone(),
            uid: held.uid.clone(),
            transitions: held.transitions,
            holder: held.holder.clone().unwrap_or_default(),
            managers_forgotten: held.managers_forgotten,
            acquired_unix_us: held.acquired_unix_us.filter(|_| self.policy.may_stand_back),
            stood_back: false,
        };
        if self.record.as_ref() != Some(&record) {
            self.record = Some(record.clone());
            cx.fx.push(Effect::Persist(record));
        }
    }

    /// The tries are used up, or a pause begins.
    fn fail(&mut self, kind: (&'static str, &'static str), reason: String, cx: &mut EventContext) {
        let since = self.failure.as_ref().map_or(cx.now.unix_ms, |failure| failure.since_unix_ms);
        if self.failure.as_ref().is_none_or(|failure| failure.kind != kind) {
            cx.note(true, reason.clone());
        }
        self.last_error = Some((cx.now.unix_ms, reason.clone()));
        self.failure = Some(LeaseFailure { kind, reason, since_unix_ms: since });
    }

    fn node_changed(&mut self, uid: Option<String>, cx: &mut EventContext) {
        let node = &self.policy.node;
        match uid.filter(|uid| !uid.is_empty()) {
            None => {
                if !matches!(self.node, NodeSeen::Gone { .. }) {
                    // Before a Node is registered there is no Lease to lose.
                    if self.lease.is_some() {
                        cx.note(true, format!("Node {node} was deleted; its Lease is garbage collected"));
                    }
                    self.node = NodeSeen::Gone { since_unix_ms: cx.now.unix_ms };
                }
            }
            Some(uid) => {
                if matches!(&self.node, NodeSeen::Known(known) if *known == uid) {
                    return;
                }
                if self.node != NodeSeen::Unknown {
                    cx.note(false, format!("Node {node} exists, uid {uid}"));
                }
                self.node = NodeSeen::Known(uid);
                self.sync_early(cx);
            }
        }
    }

    /// The Lease is missing because its Node was, or belongs to an earlier Node and will be deleted with it: the next
    /// sync does not wait. At most once per interval, and not before the server's pause has passed.
    fn sync_early(&mut self, cx: &mut EventContext) {
        let NodeSeen::Known(uid) = &self.node else { return };
        let other_owner = |held: &Held| held.owner_uid.as_ref().is_some_and(|owner| owner != uid);
        let needed = self.missing || self.lease.as_ref().is_some_and(other_owner);
        let now = cx.now.mono;
        let allowed = self.early.is_none_or(|early| early + self.policy.interval() <= now);
        if let Phase::Waiting { .. } = self.phase
            && needed
            && allowed
            && self.not_before <= now
        {
            self.early = Some(now);
            self.begin(cx);
        }
    }
}

fn is_final(kind: ApiErrorKind) -> bool {
    matches!(
        kind,
        ApiErrorKind::Unauthorized
            | ApiErrorKind::Forbidden
            | ApiErrorKind::Invalid
            | ApiErrorKind::Credentials
    )
}

fn mono_ms(now: Now) -> i64 {
    i64::try_from(now.mono.as_millis()).unwrap_or(i64::MAX)
}

fn unix_us(now: Now) -> i64 {
    now.unix_ms.saturating_mul(1000)
}
