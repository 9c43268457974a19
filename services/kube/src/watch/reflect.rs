//! When a watch lists, watches and waits.
//!
//! Owns: [`Reflector`], the pure core of a watch, and its [`Backoff`]. In: what happened and `now`. Out: the next
//! step and how long to wait before it. The figures are those of client-go's reflector.

use std::time::Duration;

use keelson_actors::cluster::ApiErrorKind as Kind;
use tokio::time::Instant;

const BACKOFF_FIRST: Duration = Duration::from_millis(800);
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// Nothing failed for so long: the next failure is a first one.
const BACKOFF_RESET: Duration = Duration::from_secs(120);
/// A sink that forgets more often than this is made to wait.
const AGAIN_CALM: Duration = Duration::from_secs(60);
/// A server is asked to end a watch after 5 to 10 minutes.
const WATCH_SECONDS: f64 = 300.0;
/// A watch that is open for longer than any was asked to be is stuck.
pub(crate) const MAX_WATCH: Duration = Duration::from_secs(630);
/// A watch that ends sooner with nothing seen has failed.
pub(crate) const SHORT_WATCH: Duration = Duration::from_secs(1);

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// List everything; `exact`: not what the server has at hand, but what there is.
    List { exact: bool },
    /// Watch from a resourceVersion, or from none: the objects there are come first.
    Watch { from: Option<String> },
}

/// Where a watch stands.
#[derive(Debug, Default)]
pub(crate) struct Reflector {
    /// Everything up to this version is known.
    version: Option<String>,
    /// The server cannot list in a watch.
    lists_apart: bool,
    /// A version was too old, so what the server has at hand may be too.
    exact: bool,
    backoff: Backoff,
    /// For sinks that forget.
    again: Backoff,
    again_at: Option<Instant>,
}

impl Reflector {
    pub(crate) fn next(&self) -> Step {
        match (&self.version, self.lists_apart) {
            (None, true) => Step::List { exact: self.exact },
            (version, _) => Step::Watch { from: version.clone() },
        }
    }

    pub(crate) fn synced(&self) -> bool {
        self.version.is_some()
    }

    /// Everything is known at `version`.
    pub(crate) fn listed(&mut self, version: String) {
        self.version = Some(version);
        self.exact = true;
    }

    /// An event of `version` was seen.
    pub(crate) fn saw(&mut self, version: String) {
        self.version = Some(version);
    }

    /// Nothing is known any more: list next.
    pub(crate) fn forget(&mut self) {
        self.version = None;
    }

    /// Everything is to be said again. Returns how long to wait before that: not at all, unless it was just said
    /// again. `random` is in [0, 1).
    pub(crate) fn again(&mut self, now: Instant, random: f64) -> Duration {
        let before = self.again_at.replace(now);
        match before {
            Some(at) if now.duration_since(at) <= AGAIN_CALM => self.again.next(now, random),
            _ => Duration::ZERO,
        }
    }

    /// A step failed. Returns how long to wait before the next. `random` is in [0, 1).
    pub(crate) fn failed(&mut self, kind: Kind, now: Instant, random: f64) -> Duration {
        // A server whose etcd is too old for it says 500. Whatever the reason, client-go lists from then on, too.
        let refused = matches!(kind, Kind::Invalid | Kind::Server { retry_after: None });
        if refused && self.version.is_none() && !self.lists_apart {
            self.lists_apart = true;
            return Duration::ZERO;
        }
        if kind == Kind::Gone && self.version.take().is_some() {
            // The server is there and well: what an outage before this has added to the back-off says nothing. One that
            // finds everything too old, again and again, is waited for all the same.
            return self.again(now, random);
        }
        if kind == Kind::Invalid {
            // Not a version of this server's.
            self.version = None;
        }
        let wait = self.backoff.next(now, random);
        wait.max(kind.retry_after().unwrap_or_default())
    }
}

/// The seconds after which the server is to end a watch; `random` is in [0, 1).
pub(crate) fn watch_seconds(random: f64) -> u64 {
    // At most 600, so nothing is cut off.
    Duration::from_secs_f64(WATCH_SECONDS * (1.0 + random)).as_secs()
}

/// Doubling waits with jitter.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    last: Option<(Instant, Duration)>,
}

impl Backoff {
    /// The wait after a failure at `now`: 0.8 s doubling to 30 s, lengthened by up to as much again.
    pub(crate) fn next(&mut self, now: Instant, random: f64) -> Duration {
        let base = match self.last {
            Some((at, base)) if now.duration_since(at) <= BACKOFF_RESET => (base * 2).min(BACKOFF_MAX),
            _ => BACKOFF_FIRST,
        };
        self.last = Some((now, base));
        base.mul_f64(1.0 + random.clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const DOWN: Kind = Kind::Unreachable;

    #[tokio::test(start_paused = true)]
    async fn waits_double_to_thirty_seconds_and_begin_anew_after_two_minutes_of_peace() {
        let mut backoff = Backoff::default();
        let mut now = Instant::now();
        let mut waits = Vec::new();
        for _ in 0..8 {
            let wait = backoff.next(now, 0.0);
            waits.push(wait.as_millis());
            now += wait;
        }
        assert_eq!(waits, [800, 1600, 3200, 6400, 12800, 25600, 30000, 30000]);
        assert_eq!(backoff.next(now, 0.999_999).as_secs(), 59, "jitter up to as much again");
        now += BACKOFF_RESET + SECOND;
        assert_eq!(backoff.next(now, 0.0), BACKOFF_FIRST);
    }

    #[tokio::test(start_paused = true)]
    async fn one_request_lists_and_watches() {
        let mut reflector = Reflector::default();
        assert_eq!(reflector.next(), Step::Watch { from: None });
        reflector.listed("5".into());
        assert_eq!(reflector.next(), Step::Watch { from: Some("5".into()) });
        reflector.saw("6".into());
        assert_eq!(reflector.next(), Step::Watch { from: Some("6".into()) });
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_cannot_list_in_a_watch_is_asked_for_a_list_at_once() {
        let mut reflector = Reflector::default();
        let now = Instant::now();
        for kind in [Kind::Invalid, Kind::Server { retry_after: None }] {
            let mut reflector = Reflector::default();
            assert_eq!(reflector.failed(kind, now, 0.5), Duration::ZERO);
            assert_eq!(reflector.next(), Step::List { exact: false });
        }
        let busy = Kind::Server { retry_after: Some(SECOND) };
        assert!(reflector.failed(busy, now, 0.5) >= SECOND, "busy is not unable");
        assert_eq!(reflector.next(), Step::Watch { from: None });
        assert_eq!(reflector.failed(Kind::Invalid, now, 0.5), Duration::ZERO);
        assert!(!reflector.failed(Kind::Invalid, now, 0.5).is_zero(), "but not again and again");
        reflector.listed("5".into());
        assert_eq!(reflector.next(), Step::Watch { from: Some("5".into()) });
        reflector.failed(Kind::Gone, now, 0.5);
        assert_eq!(reflector.next(), Step::List { exact: true }, "what is at hand may be too old as well");
    }

    #[tokio::test(start_paused = true)]
    async fn a_break_goes_on_from_the_last_version() {
        let mut reflector = Reflector::default();
        reflector.listed("5".into());
        let now = Instant::now();
        for kind in [DOWN, Kind::Timeout, Kind::Forbidden, Kind::Server { retry_after: None }] {
            assert!(reflector.failed(kind, now, 0.0) >= BACKOFF_FIRST);
            assert_eq!(reflector.next(), Step::Watch { from: Some("5".into()) });
        }
        reflector.failed(Kind::Gone, now, 0.0);
        assert_eq!(reflector.next(), Step::Watch { from: None });
        assert!(!reflector.synced());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_too_old_is_listed_at_once_though_the_server_was_away_but_not_again_and_again() {
        let mut reflector = Reflector::default();
        let now = Instant::now();
        reflector.listed("5".into());
        for _ in 0..6 {
            reflector.failed(DOWN, now, 0.0);
        }
        assert_eq!(reflector.failed(Kind::Gone, now, 0.0), Duration::ZERO);
        assert_eq!(reflector.next(), Step::Watch { from: None });
        reflector.listed("9".into());
        assert_eq!(reflector.failed(Kind::Gone, now, 0.0), BACKOFF_FIRST);
        assert!(
            reflector.failed(Kind::Gone, now, 0.0) > BACKOFF_FIRST,
            "a list that is too old is a failure like any"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn the_server_says_how_long_to_leave_it_alone() {
        let mut reflector = Reflector::default();
        let busy = Kind::TooManyRequests { retry_after: Some(17 * SECOND) };
        assert_eq!(reflector.failed(busy, Instant::now(), 0.0), 17 * SECOND);
        let less = Kind::Server { retry_after: Some(Duration::ZERO) };
        assert_eq!(reflector.failed(less, Instant::now(), 0.0), 2 * BACKOFF_FIRST);
    }

    #[tokio::test(start_paused = true)]
    async fn a_sink_that_forgets_again_and_again_waits() {
        let mut reflector = Reflector::default();
        let mut now = Instant::now();
        reflector.listed("5".into());
        reflector.forget();
        assert!(!reflector.synced());
        assert_eq!(reflector.next(), Step::Watch { from: None });
        assert_eq!(reflector.again(now, 0.0), Duration::ZERO);
        assert_eq!(reflector.again(now, 0.0), BACKOFF_FIRST);
        assert_eq!(reflector.again(now, 0.0), 2 * BACKOFF_FIRST);
        now += AGAIN_CALM + SECOND;
        assert_eq!(reflector.again(now, 0.0), Duration::ZERO);
    }

    #[test]
    fn a_watch_is_asked_to_end_after_five_to_ten_minutes() {
        assert_eq!(watch_seconds(0.0), 300);
        assert_eq!(watch_seconds(0.5), 450);
        assert!(watch_seconds(0.999_999_9) < MAX_WATCH.as_secs());
    }
}
