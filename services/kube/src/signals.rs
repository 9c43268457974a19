//! Signals between the connections to one API server.
//!
//! Owns: [`ServerSignals`], and the pure [`History`] that detects a rollback of the store. In: the resource versions in
//! answers, recoveries of watches, and versions that the server finds too old. Out: a signal for watches that wait, and
//! one for watches that have to list again.
//!
//! An etcd that was restored from a backup continues with the revisions of the backup. For the API server a watch from
//! a version that the store has not reached yet is no error: the watch receives nothing until the store reaches the
//! version, and misses what happened meanwhile. The watch or write that sees a version lower than possible therefore
//! signals all. Versions are compared as numbers, which KEP-5504 guarantees since Kubernetes 1.35 and etcd always
//! provided; a version that is not a number is not compared.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

/// After an event that all agents see at the same moment (the server answers again, the store was rolled back, a
/// `Retry-After`), each acts at a random time within this period.
pub(crate) const SPREAD: Duration = Duration::from_secs(30);
/// A server that has just started fills its watch caches, and refuses requests to them before this time.
const WARM_UP: Duration = Duration::from_secs(10);
/// For how long a version that was refused as too old also counts for older ones.
const TOO_OLD_FOR: Duration = Duration::from_secs(60);

/// The store behind the API server has an older state than was seen before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rollback {
    /// The object or collection that revealed it, as a path.
    pub of: String,
    /// The resource version that was seen before.
    pub seen: u64,
    pub now: u64,
}

/// The versions that were seen of objects. Only of objects that the agent writes, so there are few.
#[derive(Debug, Default)]
struct History {
    rollbacks: u64,
    versions: BTreeMap<String, u64>,
}

/// What is known of an object when a request is sent, so that answers may arrive in any order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Expected {
    rollbacks: u64,
    at_least: Option<u64>,
}

impl History {
    fn expected(&self, object: &str) -> Expected {
        Expected { rollbacks: self.rollbacks, at_least: self.versions.get(object).copied() }
    }

    /// Records the version in the answer to a write or a consistent read of `object`.
    fn answered(&mut self, object: &str, expected: Expected, version: &str) -> Option<Rollback> {
        let now: u64 = version.parse().ok()?;
        if expected.rollbacks != self.rollbacks {
            // The request was sent before the last rollback was detected.
            return None;
        }
        if let Some(seen) = expected.at_least.filter(|seen| now < *seen) {
            self.roll_back();
            self.versions.insert(object.to_owned(), now);
            return Some(Rollback { of: object.to_owned(), seen, now });
        }
        let known = self.versions.entry(object.to_owned()).or_insert(now);
        *known = now.max(*known);
        None
    }

    fn roll_back(&mut self) {
        self.rollbacks += 1;
        self.versions.clear();
    }
}

/// What one watch has learned for all.
#[derive(Debug, Default)]
struct SharedKnowledge {
    /// When this agent's watches continue after an outage; the times of agents differ.
    turn: Option<Instant>,
    /// The latest version that the server refused as too old, and when.
    too_old: Option<(u64, Instant)>,
}

impl SharedKnowledge {
    /// The server answers again. `random` is in [0, 1).
    fn answers_again(&mut self, now: Instant, random: f64) {
        if self.turn.is_none_or(|turn| turn < now) {
            self.turn = Some(now + WARM_UP + SPREAD.mul_f64(random));
        }
    }

    /// A watch from `version` was refused with this text.
    fn refused(&mut self, version: &str, words: &str, now: Instant) {
        let Ok(version) = version.parse::<u64>() else { return };
        let version = before_the_oldest(words).map_or(version, |newest| version.max(newest));
        let before = self.too_old.filter(|(_, at)| now.duration_since(*at) < TOO_OLD_FOR);
        self.too_old = Some((before.map_or(version, |(before, _)| version.max(before)), now));
    }

    /// All caches of a server begin when it starts, so a version that is too old for one is too old for the others. If
    /// the cause is different, one watch is replaced by a list once.
    fn is_too_old(&self, version: &str, now: Instant) -> bool {
        let version = version.parse::<u64>();
        let covers = |(newest, at)| {
            now.duration_since(at) < TOO_OLD_FOR && version.is_ok_and(|version| version <= newest)
        };
        self.too_old.is_some_and(covers)
    }
}

/// The latest version that is too old, from `too old resource version: 100 (200)`: the server knows the events after
/// 200.
fn before_the_oldest(words: &str) -> Option<u64> {
    let (_, numbers) = words.split_once("too old resource version: ")?;
    let (oldest, _) = numbers.split_once('(')?.1.split_once(')')?;
    Some(oldest.parse::<u64>().ok()?.saturating_sub(1))
}

struct Signals {
    answers_again: Notify,
    knowledge: Mutex<SharedKnowledge>,
    history: Mutex<History>,
    rollbacks: watch::Sender<u64>,
    on_rollback: Box<dyn Fn(&Rollback) + Send + Sync>,
}

/// Shared by the connections to one API server; clones share state.
#[derive(Clone)]
pub struct ServerSignals(Arc<Signals>);

impl fmt::Debug for ServerSignals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerSignals").field("rollbacks", &*self.0.rollbacks.borrow()).finish()
    }
}

impl Default for ServerSignals {
    fn default() -> Self {
        Self::new(|_| {})
    }
}

impl ServerSignals {
    /// `on_rollback` is called for each rollback and must not block.
    pub fn new(on_rollback: impl Fn(&Rollback) + Send + Sync + 'static) -> Self {
        Self(Arc::new(Signals {
            answers_again: Notify::new(),
            knowledge: Mutex::default(),
            history: Mutex::default(),
            rollbacks: watch::channel(0).0,
            on_rollback: Box::new(on_rollback),
        }))
    }

    fn history(&self) -> MutexGuard<'_, History> {
        self.0.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn knowledge(&self) -> MutexGuard<'_, SharedKnowledge> {
        self.0.knowledge.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the back-off of watches at this agent's time.
    pub(crate) fn wake(&self) {
        self.knowledge().answers_again(Instant::now(), rand::random());
        self.0.answers_again.notify_waiters();
    }

    /// Waits for the next [`ServerSignals::wake`]. Returns how long it is until this agent's time.
    pub(crate) async fn woken(&self) -> Duration {
        self.0.answers_again.notified().await;
        let turn = self.knowledge().turn;
        turn.map_or(Duration::ZERO, |turn| turn.saturating_duration_since(Instant::now()))
    }

    /// A watch from `version` was refused, because it is too old.
    pub(crate) fn refused_as_too_old(&self, version: &str, words: &str) {
        self.knowledge().refused(version, words, Instant::now());
    }

    /// Whether a watch from `version` would be refused, as far as known.
    pub(crate) fn is_too_old(&self, version: &str) -> bool {
        self.knowledge().is_too_old(version, Instant::now())
    }

    /// What the answer to a request for `object` has to satisfy, if it is sent now.
    pub(crate) fn expected(&self, object: &str) -> Expected {
        self.history().expected(object)
    }

    /// Records the version of the answer.
    pub(crate) fn answered(&self, object: &str, expected: Expected, version: &str) {
        let rollback = self.history().answered(object, expected, version);
        if let Some(rollback) = rollback {
            self.tell(&rollback);
        }
    }

    pub(crate) fn rolled_back(&self, rollback: &Rollback) {
        self.history().roll_back();
        self.tell(rollback);
    }

    pub(crate) fn rollbacks(&self) -> watch::Receiver<u64> {
        self.0.rollbacks.subscribe()
    }

    fn tell(&self, rollback: &Rollback) {
        let Rollback { of, seen, now } = rollback;
        tracing::warn!(
            object = %of, seen, now,
            "API server store rolled back, for example by a restore of etcd; relisting"
        );
        (self.0.on_rollback)(rollback);
        self.0.rollbacks.send_modify(|count| *count += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: &str = "/leases/n1";

    fn rolled(seen: u64, now: u64) -> Option<Rollback> {
        Some(Rollback { of: LEASE.into(), seen, now })
    }

    #[test]
    fn e11_an_object_that_is_older_than_it_was_shows_a_rollback() {
        let mut history = History::default();
        for (version, outcome) in [
            ("100", None),
            ("105", None),
            // Read again, unchanged.
            ("105", None),
            ("no number", None),
            ("90", rolled(105, 90)),
            // From there on the count restarts.
            ("91", None),
            ("107", None),
            ("106", rolled(107, 106)),
        ] {
            let expected = history.expected(LEASE);
            assert_eq!(history.answered(LEASE, expected, version), outcome, "{version}");
        }
        assert_eq!(history.rollbacks, 2);
    }

    #[test]
    fn e11_objects_are_compared_with_themselves_only() {
        let mut history = History::default();
        let expected = history.expected(LEASE);
        history.answered(LEASE, expected, "100");
        // It may be in another etcd (--etcd-servers-overrides).
        let expected = history.expected("/nodes/n1");
        assert_eq!(history.answered("/nodes/n1", expected, "7"), None);
    }

    #[test]
    fn e11_answers_may_come_in_any_order() {
        let mut history = History::default();
        let (first, second) = (history.expected(LEASE), history.expected(LEASE));
        assert_eq!(history.answered(LEASE, second, "101"), None);
        assert_eq!(history.answered(LEASE, first, "100"), None, "it was sent before 101 was known");
        assert_eq!(history.expected(LEASE).at_least, Some(101));
        // A request that was sent before a rollback reveals nothing after it.
        let late = history.expected(LEASE);
        history.roll_back();
        assert_eq!(history.answered(LEASE, late, "50"), None);
        assert_eq!(history.expected(LEASE).at_least, None);
    }

    #[test]
    fn e2_an_agent_has_one_turn_after_an_outage() {
        let (mut knowledge, now) = (SharedKnowledge::default(), Instant::now());
        knowledge.answers_again(now, 0.5);
        let turn = now + WARM_UP + SPREAD / 2;
        assert_eq!(knowledge.turn, Some(turn));
        knowledge.answers_again(now + SPREAD / 4, 0.0);
        assert_eq!(knowledge.turn, Some(turn), "the second watch that succeeds changes nothing");
        knowledge.answers_again(now + 2 * SPREAD, 0.0);
        assert_eq!(knowledge.turn, Some(now + 2 * SPREAD + WARM_UP), "the next outage");
    }

    #[test]
    fn e2_a_refused_version_refuses_older_ones_for_a_minute() {
        let (mut knowledge, now) = (SharedKnowledge::default(), Instant::now());
        assert!(!knowledge.is_too_old("1", now));
        knowledge.refused("100", "The resourceVersion for the provided watch is too old. (Expired)", now);
        knowledge.refused("90", "", now);
        knowledge.refused("no number", "", now);
        for (version, too_old) in [("100", true), ("99", true), ("101", false), ("no number", false)] {
            assert_eq!(knowledge.is_too_old(version, now), too_old, "{version}");
        }
        let later = now + TOO_OLD_FOR;
        assert!(!knowledge.is_too_old("100", later));
        knowledge.refused("50", "", later);
        assert!(!knowledge.is_too_old("60", later), "an old refusal is ignored");
        knowledge.refused("50", "too old resource version: 50 (80) (Expired)", later);
        assert!(
            knowledge.is_too_old("79", later) && !knowledge.is_too_old("80", later),
            "as the server requests"
        );
    }

    #[test]
    fn e11_each_rollback_is_reported_once() {
        let reported = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&reported);
        let signals = ServerSignals::new(move |rollback| to.lock().unwrap().push(rollback.clone()));
        let mut seen = signals.rollbacks();
        for version in ["5", "3", "4"] {
            let expected = signals.expected(LEASE);
            signals.answered(LEASE, expected, version);
        }
        assert_eq!(*seen.borrow_and_update(), 1);
        assert_eq!(reported.lock().unwrap().as_slice(), [rolled(5, 3).unwrap()]);
    }
}
