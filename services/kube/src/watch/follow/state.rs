//! State of a running watch.
//!
//! Owns: why a step ends ([`Stop`]), the batch to hand over ([`Batch`]), an open watch ([`Open`]), and what it
//! waits for ([`WatchStep`]). In: nothing. Out: values of the loop in [`follow`](super).

use std::time::Duration;

use futures_util::future::BoxFuture;
use keelson_actor_system::cluster::{ApiError, ApiErrorKind};
use keelson_endpoint_publisher::Ack;
use tokio::time::{Instant, sleep_until};

use crate::watch::{reflect::SHORT_WATCH, subject::Change};

/// A listing that is incomplete, or a watch without an answer, after this time is reported as a failure while it
/// continues.
pub(super) const SLOW: Duration = Duration::from_secs(10);

pub(super) enum Stop {
    /// An error, and whether health shows it. A broken connection is no failure of the watch unless reconnecting fails.
    /// `cut_off`: a streaming list had begun.
    Broken {
        err: ApiError,
        is_reported: bool,
        cut_off: bool,
    },
    /// The server sends invalid data. What was read of it must not be used.
    InvalidData(ApiError),
    /// The sink has lost its state.
    Forgotten,
    RolledBack,
}

impl From<ApiError> for Stop {
    fn from(err: ApiError) -> Self {
        Self::Broken { err, is_reported: true, cut_off: false }
    }
}

/// The events to hand over.
pub(super) struct Batch<T> {
    pub(super) changes: Vec<Change<T>>,
    pub(super) bytes: usize,
    /// What is known once it was taken.
    pub(super) reached: Option<Reached>,
}

impl<T> Default for Batch<T> {
    fn default() -> Self {
        Self { changes: Vec::new(), bytes: 0, reached: None }
    }
}

pub(super) enum Reached {
    Listed(String),
    Saw(String),
}

/// A deadline after which health shows that a step takes too long.
pub(super) struct SlowStep {
    pub(super) since: Instant,
    pub(super) what: &'static str,
}

/// A watch whose answer has begun.
pub(super) struct Open {
    pub(super) since: Instant,
    pub(super) last_data: Instant,
    /// Requested time after which the server ends it.
    pub(super) requested: Duration,
    pub(super) initial: bool,
    /// Data arrived after that, or nothing arrived for long enough.
    pub(super) seen: bool,
}

pub(super) enum WatchStep<T> {
    Frame(T),
    /// Open for a second without an error: it works, though nothing happens.
    Calm,
    /// Open for longer than requested.
    Stuck,
    /// No data of a streaming list arrives.
    Silent,
    Slow,
    RolledBack,
    Checked(Result<(), ApiError>),
}

impl Open {
    pub(super) fn new(initial: bool, asked_seconds: u64) -> Self {
        let now = Instant::now();
        let requested = Duration::from_secs(asked_seconds);
        Self { since: now, last_data: now, requested, initial, seen: false }
    }

    pub(super) fn lasted(&self) -> bool {
        self.seen || self.since.elapsed() >= SHORT_WATCH
    }
}

/// Whether the server has answered and will not list this kind of objects. An error that concerns every
/// request, such as a lost connection, is not a refusal.
pub(super) fn is_refusal(kind: ApiErrorKind) -> bool {
    matches!(kind, ApiErrorKind::Forbidden | ApiErrorKind::Invalid | ApiErrorKind::Server { .. })
}

pub(super) fn check_ack(answer: Ack) -> Result<(), Stop> {
    match answer {
        Ack::Accepted => Ok(()),
        Ack::Relist => Err(Stop::Forgotten),
    }
}

pub(super) async fn or_pending<T>(work: Option<&mut BoxFuture<'_, T>>) -> T {
    match work {
        Some(work) => work.await,
        None => std::future::pending().await,
    }
}

pub(super) async fn too_slow(slow: Option<&SlowStep>) {
    match slow {
        Some(slow) => sleep_until(slow.since + SLOW).await,
        None => std::future::pending().await,
    }
}
