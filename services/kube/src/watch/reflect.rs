//! When a watch lists, watches and waits.
//!
//! Owns: [`Reflector`], the pure core of a watch, and its back-off. In: events and `now`. Out: the next
//! step and how long to wait before it. The constants are those of client-go's reflector.

use std::time::Duration;

use keelson_actor_system::cluster::ApiErrorKind as Kind;
use keelson_proto::backoff::Backoff;
use tokio::time::Instant;

use crate::signals::SPREAD;

const BACKOFF: Backoff = Backoff { first: Duration::from_millis(800), longest: Duration::from_secs(30) };
/// After this time without a failure, the back-off starts again.
const BACKOFF_RESET: Duration = Duration::from_secs(120);
/// A sink that loses its state more often than this has to wait.
const AGAIN_CALM: Duration = Duration::from_secs(60);
/// A relist after the first 410 is sent within this time, at random, because every agent may have got one.
const RELIST_SPREAD: Duration = Duration::from_millis(1600);
/// At an agent's time, its watches continue at random within this period, so that one learns from another.
const STAGGER: Duration = Duration::from_secs(2);
/// A server without streaming lists is asked for one again after this time. It may have been upgraded.
const STREAMING_RETRY: Duration = Duration::from_secs(3600);
/// Maximum `Retry-After` that is obeyed.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// A watch is requested to end after 5 to 10 minutes.
const WATCH_SECONDS: f64 = 300.0;
/// A watch that is open for longer than any requested time is stuck.
pub(crate) const MAX_WATCH: Duration = Duration::from_secs(630);
/// A watch that ends sooner without an event has failed.
pub(crate) const SHORT_WATCH: Duration = Duration::from_secs(1);
/// When the version of an interrupted watch is checked: after the first minute, in which all agents reconnect, and
/// before the server ends the watch.
const CHECK_FIRST: Duration = Duration::from_secs(60);
const CHECK_SPREAD: Duration = Duration::from_secs(180);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// List everything. `exact`: the current state of the store, not of the server's cache. `paged`: in parts.
    List { exact: bool, paged: bool },
    /// Watch from a resourceVersion, or from none: the existing objects come first (a streaming list).
    Watch { from: Option<String> },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum ListMode {
    /// As the beginning of a watch.
    #[default]
    Streaming,
    Paged,
    Full,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pause {
    pub(crate) wait: Duration,
    pub(crate) is_failure: bool,
    /// Whether a signal that the server answers again ends it.
    pub(crate) can_be_interrupted: bool,
}

impl Pause {
    /// Another way is tried at once.
    const NONE: Self = Self { wait: Duration::ZERO, is_failure: false, can_be_interrupted: false };
}

/// A version that is lower than an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VersionRegression {
    pub(crate) seen: u64,
    pub(crate) now: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Reflector {
    /// Everything up to this version is known.
    version: Option<String>,
    mode: ListMode,
    /// When the server refused a streaming list; the list that replaced it has not failed.
    streaming_refused: Option<Instant>,
    /// Something was listed or found too old, so the server's cache may be too old.
    exact: bool,
    /// The highest version seen since the last rollback of the store.
    newest: Option<u64>,
    /// The watch was interrupted, so the store may have been rolled back; when to check that.
    check_at: Option<Instant>,
    /// The last wait was ended by a signal.
    was_interrupted: bool,
    backoff: Failures,
    /// For sinks that lose their state, and versions that are too old.
    again: Failures,
    again_at: Option<Instant>,
}

impl Reflector {
    pub(crate) fn next(&mut self, now: Instant) -> Step {
        if self.version.is_none()
            && self.mode == ListMode::Streaming
            && self.streaming_refused.is_some_and(|at| now.duration_since(at) < STREAMING_RETRY)
        {
            self.mode = ListMode::Paged;
        }
        match (&self.version, self.mode) {
            (None, ListMode::Paged) => Step::List { exact: self.exact, paged: true },
            (None, ListMode::Full) => Step::List { exact: self.exact, paged: false },
            (version, _) => Step::Watch { from: version.clone() },
        }
    }

    pub(crate) fn synced(&self) -> bool {
        self.version.is_some()
    }

    /// The version from which the watch continues; `None` before a complete listing.
    pub(crate) fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// Everything is known at `version`. `exact`: it is no older than the store was when the listing began.
    pub(crate) fn listed(&mut self, version: String, exact: bool) -> Option<VersionRegression> {
        let now = version.parse().ok();
        let back = self.went_back(&version).filter(|_| exact);
        self.newest = if exact { now } else { self.newest.max(now) };
        self.version = Some(version);
        self.exact = true;
        self.mode = ListMode::Streaming;
        self.check_at = None;
        self.was_interrupted = false;
        back
    }

    /// Whether this version is lower than an earlier one.
    pub(crate) fn went_back(&self, version: &str) -> Option<VersionRegression> {
        let (seen, now) = self.newest.zip(version.parse().ok())?;
        (now < seen).then_some(VersionRegression { seen, now })
    }

    pub(crate) fn saw(&mut self, version: String) {
        self.newest = self.newest.max(version.parse().ok());
        self.version = Some(version);
        self.was_interrupted = false;
    }

    /// Nothing is known any more: list next.
    pub(crate) fn forget(&mut self) {
        self.version = None;
    }

    /// The store was rolled back: earlier versions have no meaning. Returns how long to wait before the relist.
    /// `random` is in [0, 1).
    pub(crate) fn roll_back(&mut self, random: f64) -> Duration {
        self.version = None;
        self.newest = None;
        self.mode = ListMode::Streaming;
        self.exact = true;
        self.check_at = None;
        SPREAD.mul_f64(random)
    }

    /// Everything has to be sent again. Returns how long to wait before that: zero, unless it was just sent again.
    /// `random` is in [0, 1).
    pub(crate) fn again(&mut self, now: Instant, random: f64) -> Duration {
        let before = self.again_at.replace(now);
        match before {
            Some(at) if now.duration_since(at) <= AGAIN_CALM => self.again.next(now, random),
            _ => Duration::ZERO,
        }
    }

    /// The watch ended early, so the server may have another store behind it. `random` is in [0, 1).
    pub(crate) fn interrupted(&mut self, now: Instant, random: f64) {
        self.check_at.get_or_insert_with(|| now + CHECK_FIRST + CHECK_SPREAD.mul_f64(random));
    }

    /// When to check that the server knows the version of the watch.
    pub(crate) fn check_at(&self) -> Option<Instant> {
        self.check_at
    }

    /// Records the result of the check; if the version is not known, it is checked again later.
    pub(crate) fn checked(&mut self, is_known: bool, now: Instant, random: f64) {
        self.check_at = None;
        if !is_known {
            self.interrupted(now, random);
        }
    }

    /// A step failed. `cut_off`: a streaming list had begun. `random` is in [0, 1).
    pub(crate) fn failed(&mut self, kind: Kind, cut_off: bool, now: Instant, random: f64) -> Pause {
        self.interrupted(now, random);
        // After a signal that was too early, one wait is not interrupted.
        let can_be_interrupted = !std::mem::take(&mut self.was_interrupted) && kind.retry_after().is_none();
        match (&self.version, self.mode) {
            // An etcd too old for streaming lists makes the server answer 500. Whatever the reason, client-go lists.
            (None, ListMode::Streaming) if cut_off || is_refusal(kind) => {
                self.mode = ListMode::Paged;
                self.streaming_refused = Some(now).filter(|_| kind == Kind::Invalid);
                return Pause::NONE;
            }
            // The version of the pages was compacted meanwhile.
            (None, ListMode::Paged) if kind == Kind::Gone => {
                self.mode = ListMode::Full;
                return Pause::NONE;
            }
            // A failed list says nothing about the next one.
            (None, _) => {
                self.mode = ListMode::Streaming;
                self.streaming_refused = None;
            }
            (Some(_), _) if kind == Kind::Gone => {
                self.version = None;
                // The server works: back-off from an earlier outage does not apply. A server that finds every version
                // too old still gets pauses.
                let wait = self.again(now, random);
                if wait.is_zero() {
                    let wait = RELIST_SPREAD.mul_f64(random);
                    return Pause { wait, is_failure: false, can_be_interrupted: false };
                }
                return Pause { wait, is_failure: true, can_be_interrupted };
            }
            // The version is not from this server.
            (Some(_), _) if kind == Kind::Invalid => self.version = None,
            (Some(_), _) => {}
        }
        let asked = kind.retry_after().unwrap_or_default().min(RETRY_AFTER_MAX);
        let asked = asked + asked.min(SPREAD).mul_f64(random);
        Pause { wait: self.backoff.next(now, random).max(asked), is_failure: true, can_be_interrupted }
    }

    /// A signal that the server answers again ended a wait `rest` before its end; this agent's time is `turn` from now.
    /// Returns how long to wait nevertheless. `random` is in [0, 1).
    pub(crate) fn interrupt_wait(&mut self, rest: Duration, turn: Duration, random: f64) -> Duration {
        self.was_interrupted = true;
        rest.min(turn + STAGGER.mul_f64(random))
    }
}

/// Whether the server has answered and does not do what was requested.
fn is_refusal(kind: Kind) -> bool {
    matches!(kind, Kind::Invalid | Kind::Server { retry_after: None })
}

/// The requested duration of a watch in seconds; `random` is in [0, 1).
pub(crate) fn watch_seconds(random: f64) -> u64 {
    // At most 600, so the conversion is exact.
    Duration::from_secs_f64(WATCH_SECONDS * (1.0 + random)).as_secs()
}

/// Consecutive failures, and the time of the last one.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    last: Option<(Instant, u32)>,
}

impl Failures {
    /// The pause after a failure at `now`, lengthened at random by up to its own length.
    pub(crate) fn next(&mut self, now: Instant, random: f64) -> Duration {
        let failures = match self.last {
            Some((at, failures)) if now.duration_since(at) <= BACKOFF_RESET => failures.saturating_add(1),
            _ => 1,
        };
        self.last = Some((now, failures));
        BACKOFF.pause(failures).mul_f64(1.0 + random.clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests;
