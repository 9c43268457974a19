//! What goes into the core of pulls and what comes out of it.
//!
//! Owns: [`Policy`], [`PullEvent`], [`Effect`] and the answers that callers get. No logic but texts.

use std::{collections::HashSet, sync::Arc, time::Duration};

use keelson_actor_system::messages;
use keelson_proto::Code;

use super::{
    super::{
        handover::{HandedEnd, HandedOutcome},
        record::Write,
    },
    PodNotice, Release, Tally,
};
use crate::{
    request::{Pod, PullCall, PullId},
    runtime::{Progress, PullReply, RuntimeCommand, RuntimeEvent},
};

/// Names one waiting caller for as long as the process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallerId(pub u64);

/// The settings that decisions depend on (section `[pulls]`, and `cri.hold_timeout`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Most pulls in flight; 0: no limit; 1 is `serialize_image_pulls`.
    pub limit: u32,
    /// `when_full = "reject"`.
    pub reject: bool,
    /// `enforce = "runtime"`: hand the limit to a runtime that obeys it.
    pub enforce_by_runtime: bool,
    /// Most pulls in flight from one registry; 0: no such limit.
    pub per_registry: u32,
    /// Most pulls of present images beside the limit.
    pub present_slots: u32,
    pub max_queue_time: Option<Duration>,
    /// Most callers that wait at once.
    pub max_callers: usize,
    /// How long a running pull goes on without callers.
    pub cancel_grace: Duration,
    /// How long a place is kept, after a restart, for a caller who brings credentials; and how long news of pods is
    /// awaited.
    pub resume_window: Duration,
    /// Records that no caller has wanted for longer are not restored.
    pub record_max_age: Duration,
    /// Pulls from the journal wait for news of their pods, for `resume_window` at most.
    pub await_pods: bool,
    /// Keep what a cancelled or failed pull has fetched.
    pub keep_progress: bool,
    /// For how long.
    pub progress_retention: Duration,
    /// Maximum number of bytes retained of unfinished pulls; 0 retains nothing.
    pub retained_bytes_max: u64,
    /// Below this share of free bytes or inodes of the image file system nothing is retained; 0: no such check.
    pub retain_min_free_percent: u32,
    /// A pull that downloads without a new byte for so long is given up.
    pub stall_timeout: Option<Duration>,
    /// A pull that the runtime has not ended after so long is given up, whatever it does.
    pub max_pull_time: Option<Duration>,
    /// In reject mode a caller waits for a slot for this many intervals (KEP-3673: retries).
    pub reject_retries: u32,
    /// Length of such an interval.
    pub reject_interval: Duration,
    /// How often a pull is tried again that was lost with its runtime.
    pub runtime_retries: u32,
    /// How long a place in the queue is kept for a caller that comes back.
    pub reentry_window: Duration,
    /// After this wait in the queue the pod gets an Event; `None`: never.
    pub queued_event_after: Option<Duration>,
    /// How long callers wait for a runtime that is away.
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
    /// What happens to the core, and the message that reports it to the coordinator.
    #[derive(Debug, Clone)]
    pub enum PullEvent {
        /// A caller wants an image. To be sent as [`RequestPull`](crate::coordinator::RequestPull).
        Request {
            /// The ID by which [`Effect::Reply`] answers it.
            caller: CallerId,
            /// Image, credentials, handler and pod.
            call: Arc<PullCall>,
            /// How long the caller waits at most (its gRPC deadline).
            patience: Option<Duration>,
        },
        /// A caller cancelled, or its connection is closed.
        CallerLeft(CallerId),
        Runtime(RuntimeEvent),
        /// A pod is deleted or terminating: its calls that wait fail with ABORTED, those that run continue. Matched by
        /// the uid in the call's sandbox config. That of a static pod is its manifest's and not its mirror pod's, so
        /// that static pods are never reported in this way.
        PodGone {
            /// `metadata.uid`.
            uid: String,
            /// `namespace/name`, for people.
            pod: String,
        },
        /// The object of the pod with this uid is deleted, after [`Self::PodGone`] or without it. Its calls are refused
        /// for ten minutes more, then the pod is forgotten.
        PodForgotten(String),
        /// The uids of all pods of the node that exist and have not ended, of static pods those of their manifests. Sent
        /// after each list of the pods.
        PodsSynced(Arc<HashSet<String>>),
        /// Whether the node condition DiskPressure is True: then nothing is retained of unfinished pulls.
        DiskPressure(bool),
        Configure(Box<Policy>),
        /// A limit set by hand; `None` resets it to the settings. To be sent as
        /// [`SetLimit`](crate::coordinator::SetLimit).
        SetLimit(Option<u32>),
        /// A pull that continued in the predecessor ended there. IDs are the same in both processes.
        PredecessorEnded { pull: PullId, how: HandedOutcome },
        /// The predecessor cannot be reached any more.
        PredecessorGone,
        /// The time of [`Core::next_tick`](super::Core::next_tick).
        Tick,
        /// The agent is stopping. To be sent as [`Drain`](crate::coordinator::Drain).
        Drain,
    }
}

impl From<RuntimeEvent> for PullEvent {
    fn from(event: RuntimeEvent) -> Self {
        Self::Runtime(event)
    }
}

/// What the actor has to do, in this order.
#[derive(Debug, Clone)]
pub(crate) enum Effect {
    /// Write to the journal; what follows in the list waits until it is durable.
    Persist(Write),
    Runtime(RuntimeCommand),
    Start {
        pull: PullId,
        /// Counts from 1.
        attempt: u32,
        /// What it asks for.
        call: Arc<PullCall>,
        /// The lease to pull in.
        lease: Option<String>,
        /// The pull option to pass on.
        option: Option<u32>,
        /// It runs beside the limit: a download has to be noticed at once.
        present: bool,
    },
    /// Answer a caller. Needs no durability before it: a record that outlives its pull costs one
    /// question for an image that is there.
    Reply {
        caller: CallerId,
        answer: Answer,
    },
    /// Bytes of an unfinished pull were given up: for the log and the metrics.
    Released(Release),
    /// Tell the successor of a pull that was handed over while it ran.
    TellSuccessor(HandedEnd),
    /// Write an Event on a pod, if there is an API server. Nothing waits for it, and it may be lost.
    Notice(PodNotice),
    Count(Tally),
    /// Something worth an event in the debug view and a line in the log.
    Note(Note),
}

/// An entry for the log and the actor's list of events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Note {
    pub warn: bool,
    /// For log and page, so without secrets.
    pub text: String,
}

#[derive(Debug, Clone)]
pub enum Answer {
    /// The runtime's own words, success or error, shared by all callers of the pull.
    Runtime(Arc<PullReply>),
    /// The agent's.
    Refused(Refusal),
}

/// Why the agent itself answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// KEP-3673: the limit was reached at every try.
    #[error(
        "TooManyPullingInParallel: {running} image pulls are in flight and the limit is {limit}, {queued} \
         more are queued; no slot was free within {waited:?}"
    )]
    TooMany {
        running: u32,
        /// The limit that this pull is held to.
        limit: u32,
        queued: usize,
        /// Since the caller asked.
        waited: Duration,
    },
    /// `pulls.max_queued_callers` wait already.
    #[error(
        "keelson is busy: {0} callers already wait for image pulls (pulls.max_queued_callers); retry later"
    )]
    TooManyCallers(usize),
    #[error("keelson is busy: the mailbox of {0} is full; retry later")]
    Busy(&'static str),
    /// `pulls.max_queue_time` is over.
    #[error(
        "the pull waited {0:?} in the queue, the maximum (pulls.max_queue_time); {1} pulls are ahead of it"
    )]
    QueueTime(Duration, usize),
    /// The caller's own deadline.
    #[error("the caller's deadline expired after {0:?} while the pull was {1}")]
    Deadline(Duration, &'static str),
    #[error("the container runtime is down and did not recover within {held:?} (cri.hold_timeout): {reason}")]
    RuntimeAway {
        /// For how long the caller was held.
        held: Duration,
        /// Names the socket.
        reason: String,
    },
    /// No byte came.
    #[error(
        "no data from registry {registry} for {idle:?} (pulls.stall_timeout); the pull was cancelled{kept}"
    )]
    Stalled {
        /// Whose fault it seems to be.
        registry: String,
        /// Since the last byte.
        idle: Duration,
        /// Says whether the bytes are kept.
        kept: &'static str,
    },
    /// `pulls.max_pull_time` is over.
    #[error(
        "the container runtime did not finish the pull within {limit:?} (pulls.max_pull_time); the pull was \
         cancelled while {phase}{kept}"
    )]
    PullTime {
        limit: Duration,
        /// What the pull did by its last reading.
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
    /// The agent is on its way out.
    #[error("keelson is stopping; the pull keeps its place for the next start; retry")]
    Stopping,
    /// The pulls were handed over to the agent that replaces this one. The CRI front does not show it to
    /// callers: it asks the successor for them.
    #[error("the image pull was handed over to the successor of this agent; retry")]
    Moved,
    /// The coordinator starts again.
    #[error("the pull coordinator is restarting and the pull continues; retry")]
    Restarting,
    #[error("{0}")]
    Invalid(String),
}

impl Refusal {
    /// The gRPC code that goes with it.
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

/// A pull that ended, for the debug view.
#[derive(Debug, Clone)]
pub(crate) struct FinishedPull {
    /// As it was shown while it waited and ran.
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
    /// How often the runtime was asked.
    pub attempts: u32,
    /// Carried over a restart.
    pub resumed: bool,
    /// When its first caller asked, Unix milliseconds.
    pub requested_unix_ms: i64,
    /// When the runtime was first asked, Unix milliseconds; `None`: never.
    pub started_unix_ms: Option<i64>,
    /// When its last caller was answered or left, Unix milliseconds.
    pub finished_unix_ms: i64,
    /// The last reading.
    pub progress: Option<Progress>,
    pub queue_wait: Duration,
    /// Time with a slot; `None`: it never had one.
    pub pull_time: Option<Duration>,
    pub end: End,
    /// The same for logs and metrics.
    pub why: super::EndReason,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    Succeeded,
    /// The runtime's or the agent's words, without secrets.
    Failed(String),
    /// The agent refused the callers that waited, or their time was over; its words.
    Refused(String),
    Cancelled,
}
