//! Decisions about pulls, without I/O and without a clock.
//!
//! Owns: [`Core`], the state of all pulls. In: [`PullEvent`]s with their times. Out: [`Effect`]s in the order to
//! perform them, and [`Core::next_tick`].
//!
//! A pull is *queued* until a slot is free, then *running* until the runtime answers. Running pulls hold a slot of a
//! *lane*: counted (under the limit) or present (beside it, for images that the runtime has). A running pull whose
//! runtime died keeps its slot and waits; one without callers keeps its slot for the grace period. A pull from the
//! journal whose credentials are gone is *held*: it keeps its place, and starts only when a caller brings credentials.

mod claims;
mod deleted_pods;
mod failure;
mod finish;
mod handover;
mod notice;
mod presence;
mod reasons;
mod reconcile;
mod reentry;
mod requests;
mod restore;
mod retained;
mod schedule;
mod types;
mod view;

mod queue;

#[cfg(test)]
mod claims_tests;
#[cfg(test)]
mod deleted_pods_tests;
#[cfg(test)]
mod handover_tests;
#[cfg(test)]
mod life_tests;
#[cfg(test)]
mod limit_tests;
#[cfg(test)]
mod namespace_tests;
#[cfg(test)]
mod presence_tests;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod reasons_tests;
#[cfg(test)]
mod reconcile_tests;
#[cfg(test)]
mod retained_tests;
#[cfg(test)]
mod stall_tests;
#[cfg(test)]
mod table_tests;
#[cfg(test)]
mod testing;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

pub(in crate::coordinator) use deleted_pods::DeletedPods;
pub(crate) use failure::FailureClass;
use keelson_actor_system::clock::Now;
use queue::{Place, Queue};
use reentry::Reentry;
use retained::{RetainedLease, Space};
pub use types::{Answer, CallerId, Policy, PullEvent, Refusal};
pub(crate) use types::{
    Effect, EndReason, FinishedPull, Note, PodNotice, PullEnd, Release, ReleaseReason, Tally,
};
pub(crate) use view::Counts;

use super::record::Write;
use crate::{
    request::{Pod, PullCall, PullId, PullKey},
    runtime::{Capabilities, Progress, PullReply, RuntimeEvent},
};

/// Maximum number of finished pulls in the debug view.
const HISTORY: usize = 20;
/// A pull in the present lane that takes longer than this is treated as a download.
const PRESENT_LANE_MAX: Duration = Duration::from_secs(10);
/// Pause of a pull that the runtime refused because of its own limit (`enforce = "runtime"`): the runtime has already
/// waited 30 s by then.
const RUNTIME_FULL_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lane {
    Counted,
    Present,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Unasked,
    Asked,
    /// Not answered in time.
    Late,
    Present,
    Absent,
}

#[derive(Debug, Clone)]
enum Stage {
    Queued {
        presence: Presence,
    },
    Running,
    /// Runs in the predecessor, which handed it over.
    Predecessor,
    /// Lost with its runtime; keeps its slot, and the reply in case the runtime does not return.
    Lost {
        reply: Arc<PullReply>,
        until: Duration,
    },
    /// Refused because of the runtime's own limit; keeps its (uncounted) slot.
    Pausing {
        until: Duration,
    },
    Held {
        until: Duration,
    },
}

#[derive(Debug)]
struct Pull {
    id: PullId,
    order: u64,
    call: Arc<PullCall>,
    callers: BTreeSet<CallerId>,
    stage: Stage,
    lane: Option<Lane>,
    attempts: u32,
    /// Losses with its runtime, or failures with another, cancelled pull, since its last answer of its own.
    losses: u32,
    requested: Now,
    started: Option<Now>,
    /// Number of callers by pull option.
    options: BTreeMap<Option<u32>, usize>,
    lease: Option<String>,
    /// Until when the content of other pulls in its lease is retained: a denied pull does not release it.
    inherited: Option<Duration>,
    with_credentials: bool,
    resumed: bool,
    /// From the journal, and not requested since: it comes after all pulls that callers wait for.
    unclaimed: bool,
    /// When a caller last wanted it, Unix milliseconds.
    wanted_unix_ms: i64,
    /// The agent's refusal of its last callers, if any.
    refused: Option<Refusal>,
    /// The end reason, if known in advance.
    reason: Option<&'static str>,
    spent: reasons::PhaseTimes,
    /// When it is cancelled because it has no callers.
    cancel_at: Option<Duration>,
    /// Deadline of the presence check.
    presence_until: Option<Duration>,
    /// Its deadline (`pulls.max_pull_time`).
    give_up_at: Option<Duration>,
    /// Until when it may run in the present lane.
    lane_until: Option<Duration>,
    progress: Option<Progress>,
    asked: Duration,
    progressed: Duration,
    /// Since when it downloads without a new byte, as far as is known; while it does not download, the time of the last
    /// reading.
    idle_since: Duration,
    rate: view::Rate,
}

impl Pull {
    fn place(&self) -> Place {
        let order = if self.unclaimed { self.order.saturating_add(claims::UNCLAIMED) } else { self.order };
        (order, self.id)
    }

    fn is_queued(&self) -> bool {
        matches!(self.stage, Stage::Queued { .. })
    }

    /// The loosest pull option among its callers; `None`: a caller has none, or there is no caller.
    fn cap(&self) -> Option<u32> {
        if self.options.contains_key(&None) {
            None
        } else {
            self.options.keys().next_back().copied().flatten()
        }
    }

    /// Without those of its callers.
    fn timers(&self) -> impl Iterator<Item = (Duration, Timer)> + use<> {
        let of_stage = match self.stage {
            Stage::Lost { until, .. } => Some((until, Timer::Lost(self.id))),
            Stage::Pausing { until } => Some((until, Timer::Pause(self.id))),
            Stage::Held { until } => Some((until, Timer::Held(self.id))),
            Stage::Queued { .. } | Stage::Running | Stage::Predecessor => None,
        };
        [
            of_stage,
            self.cancel_at.map(|at| (at, Timer::Grace(self.id))),
            self.presence_until.map(|at| (at, Timer::Presence(self.id))),
            self.give_up_at.map(|at| (at, Timer::PullTime(self.id))),
            self.lane_until.map(|at| (at, Timer::PresentLane(self.id))),
        ]
        .into_iter()
        .flatten()
    }
}

#[derive(Debug)]
struct Caller {
    pull: PullId,
    since: Duration,
    pod: Option<Pod>,
    option: Option<u32>,
    deadline: Option<Duration>,
    /// In reject mode, or with `max_queue_time`: until when it waits in the queue.
    give_up: Option<(Duration, GiveUp)>,
    /// Until when it is held, if the runtime was unavailable when it came.
    hold: Option<Duration>,
    noticed: notice::NoticeState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GiveUp {
    Rejected,
    QueueTime,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Deadline(CallerId),
    GiveUp(CallerId),
    Hold(CallerId),
    Notice(CallerId),
    Grace(PullId),
    Held(PullId),
    Lost(PullId),
    Pause(PullId),
    Presence(PullId),
    PullTime(PullId),
    PresentLane(PullId),
    LeaseExpiry(String),
    /// Read the free space of the image file system.
    Space,
    RenewLeases,
    /// Delete the leases that nothing needs, once more.
    Reap,
    /// Rewrite the records of wanted pulls.
    Wanted,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Health {
    Unknown,
    Up(Capabilities),
    Down(String),
}

#[derive(Debug)]
pub(crate) struct Core {
    policy: Policy,
    /// Set by hand; takes precedence over the policy's.
    limit_override: Option<u32>,
    health: Health,
    draining: bool,
    /// Set once everything is handed over to a successor: the pulls that continue here.
    handed: Option<BTreeSet<PullId>>,
    /// Whether pulls of different namespaces are different pulls: true until the runtime is known to ignore namespaces.
    /// What is known of a runtime holds while it is unavailable.
    namespaces_matter: bool,
    pulls: HashMap<PullId, Pull>,
    callers: HashMap<CallerId, Caller>,
    /// Pulls that a new caller with this key, as [`Core::key_of`] makes it, joins.
    by_key: HashMap<PullKey, PullId>,
    by_image: HashMap<Arc<str>, Vec<PullId>>,
    queue: Queue,
    /// Queued pulls of present images, waiting for a slot beside the limit.
    present: BTreeSet<Place>,
    /// Pulls that hold a slot, of either lane.
    slots: BTreeSet<Place>,
    /// Places kept for callers with credentials.
    held: BTreeSet<Place>,
    counted: u32,
    present_running: u32,
    by_registry: HashMap<Arc<str>, u32>,
    timers: BTreeSet<(Duration, Timer)>,
    /// When [`Timer::Wanted`] is due.
    wanted_at: Option<Duration>,
    /// When [`Timer::Reap`] is due.
    reap_at: Option<Duration>,
    reentry: Reentry,
    notices: notice::Budget,
    deleted_pods: DeletedPods,
    /// Since when the runtime is unavailable, on the monotonic clock.
    away_since: Option<Duration>,
    /// When a pull last made progress or ended, on the monotonic clock.
    last_progress: Option<Duration>,
    kept: BTreeMap<String, RetainedLease>,
    space: Space,
    /// Newest first: the last [`HISTORY`], and all that ended in the last event.
    finished: VecDeque<FinishedPull>,
    ended: u64,
    next_id: u64,
    /// Prefix of lease names; one per state folder.
    owner: String,
    /// Set until the journal has been read.
    unread: Option<reconcile::UnreadChanges>,
}

impl Core {
    /// `owner` is the state folder ID; lease names begin with it.
    #[must_use]
    pub(crate) fn new(policy: Policy, owner: &str) -> Self {
        Self {
            policy,
            limit_override: None,
            health: Health::Unknown,
            draining: false,
            handed: None,
            namespaces_matter: true,
            pulls: HashMap::new(),
            callers: HashMap::new(),
            by_key: HashMap::new(),
            by_image: HashMap::new(),
            queue: Queue::default(),
            present: BTreeSet::new(),
            slots: BTreeSet::new(),
            held: BTreeSet::new(),
            counted: 0,
            present_running: 0,
            by_registry: HashMap::new(),
            timers: BTreeSet::new(),
            wanted_at: None,
            reap_at: None,
            reentry: Reentry::default(),
            notices: notice::Budget::default(),
            deleted_pods: DeletedPods::default(),
            away_since: None,
            last_progress: None,
            kept: BTreeMap::new(),
            space: Space::default(),
            finished: VecDeque::new(),
            ended: 0,
            next_id: 1,
            owner: owner.to_owned(),
            unread: None,
        }
    }

    pub(crate) fn handle(&mut self, event: PullEvent, now: Now) -> Vec<Effect> {
        let mut fx = Vec::new();
        self.finished.truncate(HISTORY);
        self.deleted_pods.expire(now.mono);
        match event {
            PullEvent::Request { caller, call, timeout } => self.request(caller, call, timeout, now, &mut fx),
            PullEvent::CallerLeft(caller) => self.caller_left(caller, now, &mut fx),
            PullEvent::Runtime(event) => self.runtime_event(event, now, &mut fx),
            PullEvent::PodGone { uid, pod } => self.pod_gone(uid, pod, now, &mut fx),
            PullEvent::PodsSynced(live) => self.pods_synced(&live, now, &mut fx),
            PullEvent::PodForgotten(uid) => self.pod_forgotten(&uid, now),
            PullEvent::Configure(policy) => self.configure(*policy, now, &mut fx),
            PullEvent::SetLimit(limit) => self.set_limit(limit, &mut fx),
            PullEvent::PredecessorEnded { pull, how } => self.predecessor_ended(pull, how, now, &mut fx),
            PullEvent::PredecessorGone => self.predecessor_gone(now, &mut fx),
            PullEvent::DiskPressure(is_true) => self.disk_pressure(is_true, &mut fx),
            PullEvent::Tick => self.tick(now, &mut fx),
            PullEvent::Drain => self.drain(&mut fx),
        }
        self.schedule(now, &mut fx);
        self.watch_kept(now);
        fx
    }

    fn runtime_event(&mut self, event: RuntimeEvent, now: Now, fx: &mut Vec<Effect>) {
        match event {
            RuntimeEvent::PullPresence { pull, present } => self.presence(pull, present, now, fx),
            RuntimeEvent::PullFinished { pull, attempt, outcome } => {
                self.attempt_ended(pull, attempt, outcome, now, fx)
            }
            RuntimeEvent::PullProgress { pull, progress } => self.progressed(pull, progress, now, fx),
            RuntimeEvent::RuntimeChanged(Ok(capabilities)) => self.runtime_up(capabilities, now, fx),
            RuntimeEvent::RuntimeChanged(Err(reason)) => self.runtime_down(reason, now, fx),
            RuntimeEvent::LeaseMeasured { lease, until, bytes } => {
                self.lease_measured(&lease, until, bytes, fx)
            }
            RuntimeEvent::LeasesLeft => self.reap_later(now),
            RuntimeEvent::ImageFsRead(image_fs) => self.image_fs_read(image_fs, fx),
        }
    }

    /// On the monotonic clock.
    #[must_use]
    pub(crate) fn next_tick(&self) -> Option<Duration> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Whether a stopping agent has nothing to wait for.
    #[must_use]
    pub(crate) fn is_idle(&self) -> bool {
        self.slots.is_empty()
    }

    fn tick(&mut self, now: Now, fx: &mut Vec<Effect>) {
        while let Some((at, _)) = self.timers.first()
            && *at <= now.mono
        {
            let Some((_, timer)) = self.timers.pop_first() else { return };
            match timer {
                Timer::Deadline(caller) => self.deadline_passed(caller, now, fx),
                Timer::GiveUp(caller) => self.give_up(caller, now, fx),
                Timer::Hold(caller) => self.held_caller_expired(caller, now, fx),
                Timer::Notice(caller) => self.notice_due(caller, now, fx),
                Timer::Grace(pull) => self.grace_over(pull, now, fx),
                Timer::Held(pull) => self.held_pull_expired(pull, now, fx),
                Timer::Lost(pull) => self.lost_over(pull, now, fx),
                Timer::Pause(pull) => self.pause_over(pull, now, fx),
                Timer::Presence(pull) => self.presence_late(pull, now, fx),
                Timer::PullTime(pull) => self.pull_time_over(pull, now, fx),
                Timer::PresentLane(pull) => self.present_lane_over(pull, now, fx),
                Timer::LeaseExpiry(lease) => self.release(&lease, ReleaseReason::Expired, fx),
                Timer::Space => self.space_due(fx),
                Timer::RenewLeases => self.renewal_due(fx),
                Timer::Reap => {
                    self.reap_at = None;
                    self.reap(fx);
                }
                Timer::Wanted => self.write_wanted(now, fx),
            }
        }
    }

    fn configure(&mut self, policy: Policy, now: Now, fx: &mut Vec<Effect>) {
        if let Some(unread) = self.unread.as_mut().filter(|_| policy.limit != self.policy.limit) {
            unread.limit_changed = true;
        }
        if policy.limit != self.policy.limit && self.limit_override.take().is_some() {
            // The newest value counts, from the settings or set by hand.
            fx.push(Effect::Persist(Write::Limit(None)));
        }
        let reclass = (policy.per_registry > 0) != (self.policy.per_registry > 0);
        let watch = policy.max_pull_time != self.policy.max_pull_time;
        self.policy = policy;
        self.keep_space(fx);
        self.keep_budget(fx);
        if watch {
            let slots: Vec<PullId> = self.slots.iter().map(|(_, id)| *id).collect();
            for id in slots {
                self.watch_pull_time(id, now);
            }
        }
        if reclass {
            let queued: Vec<PullId> = self.queue.places().map(|(_, id)| id).collect();
            for id in queued {
                self.enqueue(id);
            }
        }
    }

    fn set_limit(&mut self, limit: Option<u32>, fx: &mut Vec<Effect>) {
        self.limit_override = limit;
        if let Some(unread) = &mut self.unread {
            unread.limit_changed = true;
        }
        fx.extend([Effect::Persist(Write::Limit(limit)), Effect::LimitStored]);
        let text = match limit {
            Some(limit) => format!("limit set to {limit} at runtime"),
            None => format!("limit reset to the settings: {}", self.policy.limit),
        };
        fx.push(Effect::Note(Note { warn: false, text }));
    }

    fn drain(&mut self, fx: &mut Vec<Effect>) {
        self.draining = true;
        let waiting: Vec<CallerId> = self
            .callers
            .iter()
            .filter(|(_, caller)| self.pulls.get(&caller.pull).is_none_or(|pull| pull.lane.is_none()))
            .map(|(id, _)| *id)
            .collect();
        for caller in waiting {
            self.refuse(caller, Refusal::Stopping, fx);
        }
        let waiting = self.queue.len() + self.held.len();
        let text = format!("stopping: {} pulls continue, {waiting} keep their place", self.slots.len());
        fx.push(Effect::Note(Note { warn: false, text }));
    }

    fn limit(&self) -> u32 {
        self.limit_override.unwrap_or(self.policy.limit)
    }

    fn runtime_enforces(&self) -> bool {
        self.policy.enforce_by_runtime
            && matches!(self.health, Health::Up(Capabilities { pull_option: true, .. }))
    }

    /// The limit that the agent itself enforces; 0: none.
    fn own_limit(&self) -> u32 {
        if self.runtime_enforces() { 0 } else { self.limit() }
    }

    fn arm(&mut self, at: Duration, timer: Timer) {
        self.timers.insert((at, timer));
    }

    fn disarm(&mut self, at: Duration, timer: Timer) {
        self.timers.remove(&(at, timer));
    }

    /// Stops the timers of a pull, but not those of its callers.
    fn disarm_pull(&mut self, id: PullId) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        for timer in pull.timers() {
            self.timers.remove(&timer);
        }
        (pull.cancel_at, pull.give_up_at, pull.lane_until) = (None, None, None);
        pull.presence_until = None;
    }

    fn lease_in_use(&self, image: &Arc<str>, lease: &str) -> bool {
        self.by_image.get(image).is_some_and(|ids| {
            ids.iter().any(|id| self.pulls.get(id).is_some_and(|p| p.lease.as_deref() == Some(lease)))
        })
    }
}
