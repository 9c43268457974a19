//! What a watch holds while it runs.
//!
//! Owns: why a step ends ([`Stop`]), what is about to be handed over ([`Batch`]), a watch that was opened ([`Open`]), and what it
//! waits for ([`Turn`]). In: nothing. Out: values of the loop in [`follow`](super).

use std::time::Duration;

use futures_util::future::BoxFuture;
use keelson_actor_system::cluster::{ApiError, ApiErrorKind};
use keelson_endpoint_publisher::Answer;
use tokio::time::{Instant, sleep_until};

use crate::watch::{reflect::SHORT_WATCH, subject::Change};

/// A listing that is not complete, or a watch that is not answered, after this time is shown as a failure while it goes on.
pub(super) const SLOW: Duration = Duration::from_secs(10);

/// Why a step did not succeed.
pub(super) enum Stop {
    /// An error, and whether health shows it. A connection that broke is no failure of the chore before it cannot be
    /// made again. `cut_off`: a streaming list had begun.
    Broken { err: ApiError, tell: bool, cut_off: bool },
    /// What the server sends cannot be read. What was seen of it is not to be built upon.
    Senseless(ApiError),
    /// The sink has forgotten what it was told.
    Forgotten,
    /// The store was rolled back.
    RolledBack,
}

impl From<ApiError> for Stop {
    fn from(err: ApiError) -> Self {
        Self::Broken { err, tell: true, cut_off: false }
    }
}

/// What is about to be handed over.
pub(super) struct Batch<T> {
    pub(super) changes: Vec<Change<T>>,
    pub(super) bytes: usize,
    /// What is known when it was taken.
    pub(super) reached: Option<Reached>,
}

impl<T> Default for Batch<T> {
    fn default() -> Self {
        Self { changes: Vec::new(), bytes: 0, reached: None }
    }
}

/// A resourceVersion.
pub(super) enum Reached {
    /// Of a complete listing.
    Listed(String),
    /// Of an event.
    Saw(String),
}

/// A deadline after which health says that a step takes too long.
pub(super) struct Slow {
    pub(super) since: Instant,
    pub(super) what: &'static str,
}

/// A watch that the server has begun to answer.
pub(super) struct Open {
    pub(super) since: Instant,
    /// When something came last.
    pub(super) heard: Instant,
    /// After this time the server is to end it.
    pub(super) asked: Duration,
    /// What comes is what there is.
    pub(super) initial: bool,
    /// Something came after that, or nothing came for long enough.
    pub(super) seen: bool,
}

/// What a watch waits for.
pub(super) enum Turn<T> {
    Frame(T),
    /// Open for a second without an error: it works, though nothing happens.
    Calm,
    /// Open for longer than it was asked to be.
    Stuck,
    /// Nothing comes of a streaming list.
    Silent,
    Slow,
    RolledBack,
    Checked(Result<(), ApiError>),
}

impl Open {
    pub(super) fn new(initial: bool, asked_seconds: u64) -> Self {
        let now = Instant::now();
        let asked = Duration::from_secs(asked_seconds);
        Self { since: now, heard: now, asked, initial, seen: false }
    }

    /// Nothing shows yet that it works.
    pub(super) fn is_untried(&self) -> bool {
        !self.initial && !self.seen
    }

    pub(super) fn lasted(&self) -> bool {
        self.seen || self.since.elapsed() >= SHORT_WATCH
    }
}

/// Whether the server has answered and will not list this kind of objects, as far as one can tell. An error that concerns every
/// request, such as a lost connection, is none.
pub(super) fn is_refusal(kind: ApiErrorKind) -> bool {
    matches!(kind, ApiErrorKind::Forbidden | ApiErrorKind::Invalid | ApiErrorKind::Server { .. })
}

pub(super) fn taken(answer: Answer) -> Result<(), Stop> {
    match answer {
        Answer::Taken => Ok(()),
        Answer::ListAgain => Err(Stop::Forgotten),
    }
}

/// Waits for `work`, if there is any.
pub(super) async fn if_any<T>(work: Option<&mut BoxFuture<'_, T>>) -> T {
    match work {
        Some(work) => work.await,
        None => std::future::pending().await,
    }
}

pub(super) async fn too_slow(slow: Option<&Slow>) {
    match slow {
        Some(slow) => sleep_until(slow.since + SLOW).await,
        None => std::future::pending().await,
    }
}
