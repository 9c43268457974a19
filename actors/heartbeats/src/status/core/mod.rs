//! When the status is computed and reported, without I/O.
//!
//! Owns: the plan of passes, what is known of the Node, the last report, and the health of the reports. In: [`Event`]s
//! with the time and a random number in [0, 1). Out: [`Effect`]s, of which at most one is a request to the API server
//! that is under way.
//!
//! One pass reads host and runtime, computes the status, and compares it with the Node. It is sent only if it differs,
//! or if in role node the last report is old, in at most five tries without a pause, as the kubelet does. Plans use the
//! monotonic clock only.

mod contest;
mod end;
mod knowledge;
mod pass;
#[cfg(test)]
mod tests;
mod view;
mod writers;

use std::{collections::BTreeSet, path::PathBuf, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::{Node, NodeCondition};
use keelson_actor_system::{
    clock::Now,
    cluster::{ApiError, JobHealth, Written},
    reports::{EndpointsView, PullsView, RuntimeReport},
};
use keelson_proto::backoff::Backoff;
use keelson_storage::StoreState;
use serde_json::Value;

use super::{
    added_conditions,
    compute::{Inputs, Memory, Moment, millis, moment},
    external::{ConditionRefused, ConditionView, ExternalCondition, ExternalWrite, Externals},
    policy::{Role, StatusPolicy},
    state::{Reported, Restored, Stamp, Write},
};
use crate::{
    host::{HostFacts, HostReadings},
    lease::Contention,
};
use knowledge::Knowledge;
use pass::Pass;
use writers::Writers;

/// Maximum number of tries of one pass (kubelet).
const TRIES: u32 = 5;
/// Maximum jitter between passes, as a fraction (kubelet).
const JITTER: f64 = 0.04;
/// Pauses between attempts to register (kubelet).
const REGISTRATIONS: Backoff = Backoff { first: Duration::from_millis(100), longest: Duration::from_secs(7) };
/// Maximum `Retry-After` that is obeyed, in milliseconds.
const MAX_RETRY_AFTER_MS: i64 = 60_000;
/// Maximum addition to it, as a fraction of the update frequency.
const RETRY_SPREAD: f64 = 0.25;
/// The clocks have stepped if their difference changes by more than this from one pass to the next, in milliseconds.
const STEP: i64 = 2_000;
/// How long the first status of role node waits for the runtime, so that a new node is not reported as not ready only
/// because the runtime was not asked, in milliseconds.
const FIRST_WAIT: i64 = 3_000;
/// Validity of the last answer of the runtime (kubelet) or the pulls, in milliseconds.
const GRACE: i64 = 30_000;

#[derive(Debug)]
pub(crate) enum Event {
    /// The actor has read the records on disk.
    Started {
        restored: Restored,
        /// The present time, in terms that outlive the process.
        stamp: Stamp,
    },
    /// The records of an earlier process could be read only now.
    Adopted {
        conditions: Vec<ExternalWrite>,
        /// One sentence per unreadable record.
        unreadable: Vec<String>,
    },
    Due,
    /// The runtime takes pods for the first time in this process.
    RuntimeReady,
    /// A change that may affect the status.
    Changed,
    ReportNow,
    Contention(Contention),
    /// As watched; `None`: it does not exist.
    Node(Option<Arc<Node>>),
    Collected(Box<Collected>),
    Got(Result<Box<Node>, ApiError>),
    Created(Result<Box<Node>, ApiError>),
    Repaired(Result<Written, ApiError>),
    Patched(Result<Written, ApiError>),
}

#[derive(Debug, Clone)]
pub(crate) struct Collected {
    pub facts: HostFacts,
    pub readings: HostReadings,
    pub since_boot: Duration,
    pub runtime: Result<RuntimeReport, String>,
    pub runtime_down: Option<String>,
    pub pulls_view: Result<PullsView, String>,
    pub endpoints: EndpointsView,
    pub store: StoreState,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Effect {
    Collect {
        image_fs: Option<PathBuf>,
    },
    Get,
    Create(Box<Node>),
    /// Metadata and spec of the Node.
    PatchNode(Value),
    PatchStatus(Value),
    CloseConnections,
    Save(Write),
    Health(JobHealth),
    /// The status of each of the agent's conditions.
    Computed(Vec<(&'static str, String)>),
    Count(Counted),
    Note {
        warn: bool,
        text: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counted {
    Sent,
    Failed,
    Registered,
    ClockStep,
    /// Another process changed a condition of this agent.
    ForeignWrite,
}

#[derive(Debug, Clone, PartialEq)]
struct Failing {
    reason: String,
    since_unix_ms: i64,
    passes: u32,
    /// The server has answered since.
    has_server_answered: bool,
}

#[derive(Debug)]
pub(crate) struct Core {
    policy: StatusPolicy,
    knowledge: Knowledge,
    /// The stored report, until its Node is known.
    restored: Option<Box<Reported>>,
    start: Option<(Stamp, Now)>,
    externals: Externals,
    memory: Memory,
    last_report: Option<Moment>,
    delay: i64,
    pass: Option<Box<Pass>>,
    /// Something changed during the pass.
    is_changed_during_pass: bool,
    /// The next report is made even without a change.
    force: bool,
    /// Labels are to be checked.
    repair: bool,
    /// The Node has existed in this life of the process.
    has_seen_node: bool,
    /// Since when the Node is missing, Unix milliseconds.
    missing: Option<i64>,
    due: Option<Moment>,
    not_before: Option<Moment>,
    registrations: u32,
    /// Requests that were not made in the past, as time: allows immediate reports of changes, but not often.
    credit: (i64, Moment),
    /// Both clocks at the last pass.
    clocks: Option<Now>,
    /// After a step back: when the status is reported once more.
    repeat_at: Option<Moment>,
    steps: u64,
    runtime: Option<(RuntimeReport, Moment)>,
    pulls_view: Option<(PullsView, Moment)>,
    image_fs: Option<PathBuf>,
    failing: Option<Failing>,
    /// When the server answered after failed reports, or was asked because of stale endpoints.
    answered_after_outage: Option<Moment>,
    /// It was asked because of the current staleness of endpoints.
    has_asked_server: bool,
    health: JobHealth,
    contention: Contention,
    /// A pass ended without a request, because it is not known whether another process reports for the node.
    withheld: bool,
    writers: Writers,
    conditions: Vec<(&'static str, String)>,
    /// The agent's conditions and those of other processes, as last computed.
    shown: Vec<NodeCondition>,
    /// Unreadable values, as last reported.
    unread: BTreeSet<String>,
}

impl Core {
    #[must_use]
    pub(crate) fn new(policy: StatusPolicy) -> Self {
        let repair = policy.role == Role::Node;
        Self {
            policy,
            knowledge: Knowledge::default(),
            restored: None,
            start: None,
            externals: Externals::default(),
            memory: Memory::default(),
            last_report: None,
            delay: 0,
            pass: None,
            is_changed_during_pass: false,
            force: false,
            repair,
            has_seen_node: false,
            missing: None,
            due: None,
            not_before: None,
            registrations: 0,
            credit: (0, 0),
            clocks: None,
            repeat_at: None,
            steps: 0,
            runtime: None,
            pulls_view: None,
            image_fs: None,
            failing: None,
            answered_after_outage: None,
            has_asked_server: false,
            health: JobHealth::Pending,
            contention: Contention::default(),
            withheld: false,
            writers: Writers::default(),
            conditions: Vec::new(),
            shown: Vec::new(),
            unread: BTreeSet::new(),
        }
    }

    /// On the monotonic clock.
    #[must_use]
    pub(crate) fn due(&self) -> Option<Duration> {
        let due = self.due.filter(|_| self.pass.is_none())?;
        Some(Duration::from_millis(u64::try_from(due).unwrap_or_default()))
    }

    #[must_use]
    pub(crate) fn report_age(&self, now: Now) -> Option<Duration> {
        let age = moment(now).saturating_sub(self.last_report?);
        u64::try_from(age).ok().map(Duration::from_millis)
    }

    /// Handles every event except conditions of others. `random` is in [0, 1).
    pub(crate) fn handle(&mut self, event: Event, now: Now, random: f64) -> Vec<Effect> {
        let mut effects = Vec::new();
        match event {
            Event::Started { restored, stamp } => self.started(restored, stamp, now, &mut effects),
            Event::Adopted { conditions, unreadable } => {
                self.adopted(conditions, unreadable, now, &mut effects)
            }
            Event::Due => {
                if self.pass.is_none() && self.due.is_some_and(|due| due <= moment(now)) {
                    self.begin(now, &mut effects);
                }
            }
            Event::RuntimeReady => self.report_early(false, now, &mut effects),
            Event::Changed => self.report_early(true, now, &mut effects),
            Event::ReportNow => {
                self.force = true;
                self.report_early(true, now, &mut effects);
            }
            Event::Contention(contention) => self.contended(contention, now, &mut effects),
            Event::Node(node) => self.watched(node, now, &mut effects),
            Event::Collected(collected) => self.handle_collected(*collected, now, random, &mut effects),
            Event::Got(result) => self.handle_read(result, now, random, &mut effects),
            Event::Created(result) => self.created(result, now, random, &mut effects),
            Event::Repaired(result) => self.repaired(result, now, random, &mut effects),
            Event::Patched(result) => self.patched(result, now, random, &mut effects),
        }
        effects
    }

    fn started(&mut self, restored: Restored, stamp: Stamp, now: Now, effects: &mut Vec<Effect>) {
        for text in restored.unreadable {
            effects.push(Effect::Note { warn: true, text });
        }
        self.restored = restored.reported;
        self.externals = Externals::restore(restored.conditions, moment(now));
        self.drop_externals(now, effects);
        self.start = Some((stamp, now));
        self.credit = (2 * self.frequency(), moment(now));
        let wait = if self.policy.role == Role::Node { FIRST_WAIT } else { 0 };
        self.due = Some(moment(now) + wait);
    }

    /// Removes the conditions of others from the Node if the settings do not allow any.
    fn drop_externals(&mut self, now: Now, effects: &mut Vec<Effect>) {
        if !self.policy.external_conditions {
            let writes = self.externals.clear_all(moment(now));
            if !writes.is_empty() {
                effects.push(Effect::Save(Write::Conditions(writes)));
            }
        }
    }

    fn adopted(
        &mut self,
        conditions: Vec<ExternalWrite>,
        unreadable: Vec<String>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        effects.extend(unreadable.into_iter().map(|text| Effect::Note { warn: true, text }));
        let (adopted, dropped) = self.externals.adopt(conditions, moment(now));
        if !dropped.is_empty() {
            let text =
                format!("dropped {} conditions of an earlier process: too many are set", dropped.len());
            effects.extend([Effect::Note { warn: true, text }, Effect::Save(Write::Conditions(dropped))]);
        }
        self.drop_externals(now, effects);
        if adopted > 0 {
            let text = format!("adopted {adopted} conditions of an earlier process after a delay");
            effects.push(Effect::Note { warn: false, text });
            self.report_early(true, now, effects);
        }
    }

    fn frequency(&self) -> i64 {
        millis(self.policy.update_frequency)
    }

    /// Reports a change at once, unless that exceeds the kubelet's rate of requests; then the next pass reports it, at
    /// most one update frequency later.
    fn report_early(&mut self, by_rate: bool, now: Now, effects: &mut Vec<Effect>) {
        if self.start.is_none() {
            return;
        }
        if self.pass.is_some() {
            self.is_changed_during_pass = true;
        } else if !self.must_wait(now) && (!by_rate || self.credit_at(moment(now)) >= self.frequency()) {
            self.begin(now, effects);
        }
    }

    fn must_wait(&self, now: Now) -> bool {
        self.not_before.is_some_and(|at| moment(now) < at)
    }

    fn credit_at(&self, now: Moment) -> i64 {
        self.credit.0.saturating_add(now.saturating_sub(self.credit.1)).min(2 * self.frequency())
    }

    /// The next pass reports the condition to the API server. Returns what has to be written to the store.
    ///
    /// # Errors
    /// Why it is refused.
    pub(crate) fn set_condition(
        &mut self,
        condition: ExternalCondition,
        now: Now,
    ) -> Result<Option<ExternalWrite>, ConditionRefused> {
        self.externals.set(condition, moment(now))
    }

    /// Clears a condition of another process.
    ///
    /// # Errors
    /// It is not set.
    pub(crate) fn clear_condition(
        &mut self,
        kind: &str,
        now: Now,
    ) -> Result<ExternalWrite, ConditionRefused> {
        self.externals.clear(kind, moment(now))
    }

    #[must_use]
    pub(crate) fn list_conditions(&self, now: Now) -> Vec<ConditionView> {
        self.externals.views(moment(now), now.unix_ms)
    }

    pub(crate) fn is_in_pass(&self) -> bool {
        self.pass.is_some()
    }

    /// The types of all conditions that the agent may have added to the Node.
    #[must_use]
    pub(crate) fn removable_conditions(&self) -> Vec<String> {
        added_conditions()
            .map(ToOwned::to_owned)
            .chain(self.externals.kinds().map(ToOwned::to_owned))
            .collect()
    }

    /// The inputs of a status: the last ones replace missing ones, for a while.
    fn inputs(&mut self, collected: Collected, now: Now) -> Inputs {
        let runtime = self.runtime_view(collected.runtime, collected.runtime_down, now);
        let at = moment(now);
        let pulls_view = match collected.pulls_view {
            Ok(mut pulls_view) => {
                // Without progress since the start, the time cannot exceed that since the start.
                let started = self.start.as_ref().map(|(_, start)| now.mono.saturating_sub(start.mono));
                pulls_view.since_progress = pulls_view.since_progress.or(started);
                self.pulls_view = Some((pulls_view.clone(), at));
                Ok(pulls_view)
            }
            Err(reason) => match &self.pulls_view {
                Some((pulls_view, reported_at)) if at - reported_at < GRACE => Ok(pulls_view.clone()),
                _ => Err(reason),
            },
        };
        Inputs {
            facts: collected.facts,
            readings: collected.readings,
            since_boot: collected.since_boot,
            runtime,
            pulls_view,
            endpoints: collected.endpoints,
            store: collected.store,
        }
    }
}
