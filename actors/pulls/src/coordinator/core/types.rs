//! Input and output of the core of pulls.
//!
//! Owns: [`Policy`], [`PullEvent`], [`Effect`] and the answers to callers. In and out: declarations.

use std::{collections::HashSet, sync::Arc, time::Duration};

use keelson_actor_system::messages;
use keelson_proto::Code;

use super::{
    super::{
        handover::{HandedEnd, HandedOutcome},
        record::Write,
    },
    failure::FailureClass,
};
use crate::{
    request::{Pod, PullCall, PullId},
    runtime::{Progress, PullReply, RuntimeCommand, RuntimeEvent},
};

/// Unique while the process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallerId(pub u64);

/// The settings of section `[pulls]`, and `cri.hold_timeout`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Maximum number of pulls in flight; 0: no limit; 1 is `serialize_image_pulls`.
    pub limit: u32,
    /// `when_full = "reject"`.
    pub reject: bool,
    /// `enforce = "runtime"`: pass the limit to a runtime that obeys it.
    pub enforce_by_runtime: bool,
    /// Maximum number of pulls in flight from one registry; 0: no limit.
    pub per_registry: u32,
    /// Maximum number of pulls of present images beside the limit.
    pub present_slots: u32,
    pub max_queue_time: Option<Duration>,
    pub max_callers: usize,
    /// How long a running pull continues without callers.
    pub cancel_grace: Duration,
    /// How long a place is kept, after a restart, for a caller with credentials; and how long the list of pods is
    /// awaited.
    pub resume_window: Duration,
    /// Records that no caller has wanted for longer are not restored.
    pub record_max_age: Duration,
    /// Pulls from the journal wait for the list of pods, for `resume_window` at most.
    pub await_pods: bool,
    /// Retain what a cancelled or failed pull has fetched.
    pub keep_progress: bool,
    pub progress_retention: Duration,
    /// Maximum number of bytes retained of unfinished pulls; 0 retains nothing.
    pub retained_bytes_max: u64,
    /// Below this share of free bytes or inodes of the image file system nothing is retained; 0: no such check.
    pub retain_min_free_percent: u32,
    /// A pull that downloads without a new byte for this long is cancelled.
    pub stall_timeout: Option<Duration>,
    /// A pull that runs for this long is cancelled, whatever it does.
    pub max_pull_time: Option<Duration>,
    /// In reject mode a caller waits for a slot for this many intervals (KEP-3673: retries).
    pub reject_retries: u32,
    pub reject_interval: Duration,
    /// Retries of a pull that was lost with its runtime.
    pub runtime_retries: u32,
    /// How long a place in the queue is kept for a caller that returns.
    pub reentry_window: Duration,
    /// The pod gets an Event after this time in the queue; `None`: never.
    pub queued_event_after: Option<Duration>,
    /// How long callers wait for an unavailable runtime.
    pub hold: Duration,
    /// Gate `PullDeduplication`.
    pub deduplicate: bool,
    /// Gate `PresentImageFastLane`.
    pub fast_lane: bool,
    /// Gate `ResumePulls`.
    pub resume: bool,
    /// Gate `PullOption`.
    pub obey_option: bool,
}

impl Default for Policy {
    fn default() -> Self {
        let second = Duration::from_secs(1);
        Self {
            limit: 0,
            reject: false,
            enforce_by_runtime: false,
            per_registry: 0,
            present_slots: 10,
            max_queue_time: None,
            max_callers: 20_000,
            cancel_grace: 10 * second,
            resume_window: 120 * second,
            record_max_age: 3600 * second,
            await_pods: false,
            keep_progress: true,
            progress_retention: 3 * 3600 * second,
            retained_bytes_max: 2 << 30,
            retain_min_free_percent: 20,
            stall_timeout: Some(600 * second),
            max_pull_time: None,
            reject_retries: 3,
            reject_interval: 10 * second,
            runtime_retries: 2,
            reentry_window: 30 * second,
            queued_event_after: Some(30 * second),
            hold: 100 * second,
            deduplicate: true,
            fast_lane: true,
            resume: true,
            obey_option: true,
        }
    }
}

messages! {
    #[derive(Debug, Clone)]
    pub enum PullEvent {
        /// To be sent as [`RequestPull`](crate::coordinator::RequestPull).
        Request {
            /// [`Effect::Reply`] answers this ID.
            caller: CallerId,
            call: Arc<PullCall>,
            /// The caller's gRPC deadline.
            timeout: Option<Duration>,
        },
        /// The caller cancelled, or its connection is closed.
        CallerLeft(CallerId),
        Runtime(RuntimeEvent),
        /// A pod is deleted or terminating: its waiting calls fail with ABORTED, running ones continue. Matched by the
        /// uid in the call's sandbox config. For a static pod that is the uid of its manifest and not of its mirror
        /// pod, so static pods are never reported here.
        PodGone {
            /// `metadata.uid`.
            uid: String,
            pod: String,
        },
        /// The object of the pod with this uid is deleted, after [`Self::PodGone`] or without it. Its calls are refused
        /// for another ten minutes, then the pod is forgotten.
        PodForgotten(String),
        /// The uids of all pods of the node that exist and have not ended, for static pods those of their manifests.
        /// Sent after each list of the pods.
        PodsSynced(Arc<HashSet<String>>),
        /// While True, no content of unfinished pulls is retained.
        DiskPressure(bool),
        Configure(Box<Policy>),
        /// Set by hand; `None` resets it to the settings. To be sent as [`SetLimit`](crate::coordinator::SetLimit).
        SetLimit(Option<u32>),
        /// A pull that continued in the predecessor ended there. IDs are the same in both processes.
        PredecessorEnded { pull: PullId, how: HandedOutcome },
        PredecessorGone,
        /// Due at [`Core::next_tick`](super::Core::next_tick).
        Tick,
        /// To be sent as [`Drain`](crate::coordinator::Drain).
        Drain,
    }
}

impl From<RuntimeEvent> for PullEvent {
    fn from(event: RuntimeEvent) -> Self {
        Self::Runtime(event)
    }
}

/// To be performed in order.
#[derive(Debug, Clone)]
pub(crate) enum Effect {
    /// Write to the journal; what follows in the list waits until it is durable.
    Persist(Write),
    Runtime(RuntimeCommand),
    Start {
        pull: PullId,
        /// Counts from 1.
        attempt: u32,
        call: Arc<PullCall>,
        lease: Option<String>,
        option: Option<u32>,
        /// In the present lane: a download must be noticed at once.
        present: bool,
    },
    /// Needs no durability before it: a record that outlives its pull costs one query for a present image.
    Reply {
        caller: CallerId,
        answer: Answer,
    },
    Released(Release),
    /// The limit that was set is on disk. To be performed after the write.
    LimitStored,
    /// Report the end of a pull that was handed over while it ran.
    ReportToSuccessor(HandedEnd),
    /// Nothing waits for it, and it may be lost. Ignored without an API server.
    Notice(PodNotice),
    Count(Tally),
    Note(Note),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Note {
    pub warn: bool,
    /// Shown in logs and on the page: contains no secrets.
    pub text: String,
}

#[derive(Debug, Clone)]
pub enum Answer {
    /// The runtime's own answer, success or error, shared by all callers of the pull.
    Runtime(Arc<PullReply>),
    Refused(Refusal),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// KEP-3673: the limit was reached at every try.
    #[error(
        "TooManyPullingInParallel: {running} image pulls are in flight and the limit is {limit}, {queued} \
         more are queued; no slot was free within {waited:?}"
    )]
    TooMany {
        running: u32,
        /// The limit that applies to this pull.
        limit: u32,
        queued: usize,
        /// Since the caller asked.
        waited: Duration,
    },
    #[error(
        "keelson is busy: {0} callers already wait for image pulls (pulls.max_queued_callers); retry later"
    )]
    TooManyCallers(usize),
    #[error("keelson is busy: the mailbox of {0} is full; retry later")]
    Busy(&'static str),
    #[error(
        "the pull waited {0:?} in the queue, the maximum (pulls.max_queue_time); {1} pulls are ahead of it"
    )]
    QueueTime(Duration, usize),
    /// The caller's own deadline.
    #[error("the caller's deadline expired after {0:?} while the pull was {1}")]
    Deadline(Duration, &'static str),
    #[error("the container runtime is down and did not recover within {held:?} (cri.hold_timeout): {reason}")]
    RuntimeAway {
        held: Duration,
        /// Names the socket.
        reason: String,
    },
    #[error(
        "no data from registry {registry} for {idle:?} (pulls.stall_timeout); the pull was cancelled{kept}"
    )]
    Stalled {
        registry: String,
        /// Since the last byte.
        idle: Duration,
        /// Says whether the bytes are kept.
        kept: &'static str,
    },
    #[error(
        "the container runtime did not finish the pull within {limit:?} (pulls.max_pull_time); the pull was \
         cancelled while {phase}{kept}"
    )]
    PullTime {
        limit: Duration,
        /// Phase of the last reading.
        phase: &'static str,
        /// Says whether the bytes are kept.
        kept: &'static str,
    },
    /// The pod of a waiting caller is deleted or terminating.
    #[error("pod {pod} was deleted while its image pull was queued: {image}")]
    PodGone {
        /// `namespace/name`.
        pod: String,
        /// As the caller wrote it.
        image: String,
    },
    #[error("keelson is stopping; the pull keeps its place for the next start; retry")]
    Stopping,
    /// The CRI front does not show this to callers: it asks the successor instead.
    #[error("the image pull was handed over to the successor of this agent; retry")]
    Moved,
    #[error("the pull coordinator is restarting and the pull continues; retry")]
    Restarting,
    #[error("{0}")]
    Invalid(String),
}

impl Refusal {
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::TooMany { .. } | Self::TooManyCallers(_) | Self::Busy(_) | Self::QueueTime(..) => {
                Code::ResourceExhausted
            }
            Self::Deadline(..) | Self::Stalled { .. } | Self::PullTime { .. } => Code::DeadlineExceeded,
            Self::RuntimeAway { .. } | Self::Stopping | Self::Moved | Self::Restarting => Code::Unavailable,
            // Not CANCELLED, which would say that the caller itself gave up. The kubelet retries neither within
            // the call, and tries its next credential with either.
            Self::PodGone { .. } => Code::Aborted,
            Self::Invalid(_) => Code::InvalidArgument,
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct FinishedPull {
    pub id: PullId,
    /// As the caller wrote it.
    pub image: Arc<str>,
    /// `host[:port]`.
    pub registry: Arc<str>,
    /// Empty: the default.
    pub handler: Arc<str>,
    /// Who asked first.
    pub pod: Option<Pod>,
    pub with_credentials: bool,
    /// Number of requests to the runtime.
    pub attempts: u32,
    /// Restored from the journal or a predecessor.
    pub resumed: bool,
    /// When the first caller asked.
    pub requested_unix_ms: i64,
    /// When the runtime was first asked, Unix milliseconds; `None`: never.
    pub started_unix_ms: Option<i64>,
    /// When its last caller was answered or left, Unix milliseconds.
    pub finished_unix_ms: i64,
    pub progress: Option<Progress>,
    pub queue_wait: Duration,
    /// Time with a slot; `None`: it never had one.
    pub pull_time: Option<Duration>,
    pub end: PullEnd,
    pub why: EndReason,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PullEnd {
    Succeeded,
    /// Answer of the runtime or the agent, without secrets.
    Failed(String),
    /// The agent refused the waiting callers, or their time was over; the agent's text.
    Refused(String),
    Cancelled,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EndReason {
    /// `succeeded`, `failed`, `refused`, `timed_out` or `cancelled`.
    pub result: &'static str,
    /// For example `Pulled`, `NotFound`, `TooManyPullingInParallel`, `CallerLeft`.
    pub reason: &'static str,
}

/// Counts of metrics beside the pulls that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tally {
    /// A request joined a pull in this state.
    Joined(&'static str),
    /// A pull was taken back and is retried for this reason.
    Retried(&'static str),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodNotice {
    pub pod: Pod,
    /// `metadata.name` of the Event: the same for each update.
    pub name: String,
    /// `reason` of the Event, in CamelCase.
    pub reason: &'static str,
    pub message: String,
    /// Counts from 1. Above 1 the Event is updated.
    pub count: u32,
    /// When the caller first qualified for an Event, Unix milliseconds.
    pub first_unix_ms: i64,
    pub last_unix_ms: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum ReleaseReason {
    /// A retry cannot use the bytes.
    Failure(FailureClass),
    /// `pulls.progress_retention` has passed.
    Expired,
    /// More than `pulls.retained_bytes_max` is retained.
    Budget,
    Count,
    /// Less than `pulls.retain_min_free_percent` of the image file system is free.
    LowSpace,
    DiskPressure,
    Disabled,
    /// The lease holds no bytes.
    Empty,
}

impl ReleaseReason {
    /// Whether other data needs the space now.
    pub(super) fn is_for_space(self) -> bool {
        matches!(self, Self::LowSpace | Self::DiskPressure | Self::Failure(FailureClass::NoSpace))
    }

    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Failure(class) => class.name(),
            Self::Expired => "expired",
            Self::Budget => "budget",
            Self::Count => "count",
            Self::LowSpace => "low_space",
            Self::DiskPressure => "disk_pressure",
            Self::Disabled => "disabled",
            Self::Empty => "empty",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Release {
    /// The normalized reference whose pull did not finish.
    pub image: Arc<str>,
    /// `None`: not measured.
    pub bytes: Option<u64>,
    pub reason: ReleaseReason,
}
