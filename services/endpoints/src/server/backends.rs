//! The backends that report, and their status.
//!
//! Owns: [`Backends`], the last report of each backend, and when it expires. In: valid reports, the feed. Out: the list
//! for inspection, and two gauges. No answer of the API depends on it.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use keelson_endpoint_publisher::EndpointsFeed;
use keelson_proto::{endpoints::Backend, unix_ms};
use nix::{errno::Errno, sys::signal::kill, unistd::Pid};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
};
use tokio::time::Instant;

use super::plan::{Revision, behind};

/// Maximum number of backends; a node has one or two.
const MAX_BACKENDS: usize = 64;
/// A backend is silent after three times the maximum interval of reports.
const SILENT: Duration = Duration::from_secs(30);
/// Long enough to be seen by an operator who is alerted.
const FORGOTTEN: Duration = Duration::from_secs(3600);
/// The states of a report; the metric has `silent` in addition.
pub(super) const STATES: [&str; 3] = ["pending", "synced", "failing"];

/// The maximum is reached, and every known backend has reported lately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{MAX_BACKENDS} backends have reported in the last {SILENT:?}, which is the maximum; use a constant name per backend"
)]
pub(super) struct TooMany;

/// The backends that have reported. Clones share state.
#[derive(Debug, Clone)]
pub struct Backends {
    feed: EndpointsFeed,
    known: Arc<Mutex<Known>>,
}

impl Backends {
    pub(super) fn new(feed: EndpointsFeed) -> Self {
        Self { feed, known: Arc::default() }
    }

    /// `peer`: the process that sent the report, in this PID namespace.
    pub(super) fn take(&self, mut report: Backend, peer: Option<u32>) -> Result<(), TooMany> {
        report.seen_unix_ms = unix_ms();
        // The reported pid is valid here only if it equals that of the peer: a backend in a container has another PID
        // namespace.
        let known_here = peer == Some(report.pid);
        self.known().take(report, known_here, Instant::now(), ended)
    }

    /// The last reports, by name and pid.
    #[must_use]
    pub fn list(&self) -> Vec<Backend> {
        let newest = self.feed.published.borrow().as_deref().map(Revision::of);
        self.known().show(Instant::now(), newest, ended)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // No update panics half way.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether no process has this number. A reused number only delays the result until the backend is silent.
/// Uses kill(2) and not `/proc`, which may hide the processes of others.
fn ended(pid: u32) -> bool {
    i32::try_from(pid).is_ok_and(|pid| pid > 0 && kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH))
}

/// State without a clock.
#[derive(Debug, Default)]
struct Known {
    all: BTreeMap<(String, u32), KeptReport>,
}

#[derive(Debug)]
struct KeptReport {
    report: Backend,
    at: Instant,
    /// Whether its pid is valid in this PID namespace.
    known_here: bool,
}

impl KeptReport {
    fn is_silent(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) >= SILENT
    }

    fn is_forgotten(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) >= FORGOTTEN
    }

    fn has_ended(&self, ended: impl Fn(u32) -> bool) -> bool {
        self.known_here && ended(self.report.pid)
    }
}

impl Known {
    fn take(
        &mut self,
        report: Backend,
        known_here: bool,
        now: Instant,
        ended: impl Fn(u32) -> bool,
    ) -> Result<(), TooMany> {
        // A backend that was restarted replaces the one that ended.
        let replaced = |kept: &KeptReport| kept.report.name == report.name && kept.has_ended(&ended);
        self.all.retain(|_, kept| !kept.is_forgotten(now) && !replaced(kept));
        let key = (report.name.clone(), report.pid);
        if self.all.len() >= MAX_BACKENDS && !self.all.contains_key(&key) {
            let silent = self.all.iter().filter(|(_, kept)| kept.is_silent(now) || kept.has_ended(&ended));
            let oldest = silent.min_by_key(|(_, kept)| kept.at).map(|(key, _)| key.clone()).ok_or(TooMany)?;
            self.all.remove(&oldest);
        }
        self.all.insert(key, KeptReport { report, at: now, known_here });
        Ok(())
    }

    fn show(&self, now: Instant, newest: Option<Revision>, ended: impl Fn(u32) -> bool) -> Vec<Backend> {
        let remembered = self.all.values().filter(|kept| !kept.is_forgotten(now));
        remembered
            .map(|kept| {
                let mut shown = kept.report.clone();
                let at = Revision::from_request(shown.instance_id, shown.rev);
                shown.behind = behind(at, newest);
                shown.silent = kept.is_silent(now);
                if kept.has_ended(&ended) {
                    shown.silent = true;
                    shown.reason = match kept.report.reason.as_str() {
                        "" => "its process has exited".to_owned(),
                        reason => format!("its process has exited; before: {reason}"),
                    };
                }
                shown
            })
            .collect()
    }
}

impl Collector for Backends {
    /// Made for each scrape: a backend becomes silent without a report. Names are short and few, so there are few
    /// series.
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut by_name: BTreeMap<String, Vec<Backend>> = BTreeMap::new();
        for backend in self.list() {
            by_name.entry(backend.name.clone()).or_default().push(backend);
        }
        let mut family = encoder.encode_descriptor(
            "keelson_endpoints_backends",
            "Backends that reported in the last hour, by name and state",
            None,
            MetricType::Gauge,
        )?;
        for (name, backends) in &by_name {
            for state in STATES.into_iter().chain(["silent"]) {
                let is = |backend: &&Backend| state == if backend.silent { "silent" } else { &backend.state };
                let count = i64::try_from(backends.iter().filter(is).count()).unwrap_or(i64::MAX);
                let labels = [("name", name.as_str()), ("state", state)];
                ConstGauge::new(count).encode(family.encode_family(&labels)?)?;
            }
        }
        let mut family = encoder.encode_descriptor(
            "keelson_endpoints_backends_behind",
            "Revisions between the newest and the one in effect, maximum of the backends of a name",
            None,
            MetricType::Gauge,
        )?;
        for (name, backends) in &by_name {
            let most = backends.iter().map(|backend| backend.behind).max().unwrap_or_default();
            let most = i64::try_from(most).unwrap_or(i64::MAX);
            ConstGauge::new(most).encode(family.encode_family(&[("name", name.as_str())])?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALIVE: fn(u32) -> bool = |_| false;
    const DEAD: fn(u32) -> bool = |_| true;

    fn report(name: &str, pid: u32) -> Backend {
        Backend {
            name: name.into(),
            pid,
            state: "synced".into(),
            instance_id: 7,
            rev: 3,
            ..Backend::default()
        }
    }

    fn names(backends: &[Backend]) -> Vec<(&str, u32)> {
        backends.iter().map(|backend| (backend.name.as_str(), backend.pid)).collect()
    }

    #[test]
    fn a_backend_without_reports_is_silent_and_then_forgotten() {
        let start = Instant::now();
        let mut known = Known::default();
        known.take(report("nft", 1), false, start, ALIVE).unwrap();
        for (after, silent) in
            [(0, Some(false)), (29, Some(false)), (30, Some(true)), (3599, Some(true)), (3600, None)]
        {
            let shown = known.show(start + Duration::from_secs(after), None, DEAD);
            assert_eq!(shown.first().map(|backend| backend.silent), silent, "after {after} s");
        }
        known.take(report("nft", 1), false, start + Duration::from_secs(100), ALIVE).unwrap();
        let shown = known.show(start + Duration::from_secs(120), None, ALIVE);
        assert_eq!((names(&shown), shown[0].silent), (vec![("nft", 1)], false));
    }

    #[test]
    fn the_lag_is_counted_within_an_instance_and_is_the_full_revision_in_another() {
        let now = Instant::now();
        let at = |instance_id, rev| Backend { instance_id, rev, ..report("nft", 1) };
        let newest = Some(Revision { instance_id: 7, rev: 12 });
        for (what, backend, newest, behind) in [
            ("at the newest", at(7, 12), newest, 0),
            ("some behind", at(7, 5), newest, 7),
            ("ahead, as after a state on disk was lost", at(7, 20), newest, 0),
            ("of another instance", at(8, 12), newest, 12),
            ("nothing in effect", at(0, 0), newest, 12),
            ("before the first state", at(7, 5), None, 0),
        ] {
            let mut known = Known::default();
            known.take(backend, false, now, ALIVE).unwrap();
            assert_eq!(known.show(now, newest, ALIVE)[0].behind, behind, "{what}");
        }
    }

    #[test]
    fn an_ended_process_is_detected_only_if_its_pid_is_known() {
        let now = Instant::now();
        let mut known = Known::default();
        known.take(report("here", 5), true, now, ALIVE).unwrap();
        known.take(report("elsewhere", 5), false, now, ALIVE).unwrap();
        let failing = Backend { state: "failing".into(), reason: "no nft".into(), ..report("ill", 6) };
        known.take(failing, true, now, ALIVE).unwrap();
        let shown = known.show(now, None, DEAD);
        let statuses: Vec<_> =
            shown.iter().map(|one| (one.silent, one.state.as_str(), one.reason.as_str())).collect();
        assert_eq!(
            statuses,
            [
                (false, "synced", ""),
                (true, "synced", "its process has exited"),
                (true, "failing", "its process has exited; before: no nft"),
            ]
        );
        assert!(known.show(now, None, ALIVE).iter().all(|backend| !backend.silent));
    }

    #[test]
    fn a_restarted_backend_replaces_the_one_that_ended() {
        let now = Instant::now();
        let mut known = Known::default();
        for (name, pid, known_here) in [("nft", 1, true), ("nft", 2, false), ("other", 3, true)] {
            known.take(report(name, pid), known_here, now, ALIVE).unwrap();
        }
        known.take(report("nft", 4), true, now, DEAD).unwrap();
        assert_eq!(names(&known.show(now, None, ALIVE)), [("nft", 2), ("nft", 4), ("other", 3)]);
    }

    #[test]
    fn backends_above_the_maximum_are_refused_unless_one_is_silent() {
        let start = Instant::now();
        let later = start + SILENT;
        let mut known = Known::default();
        known.take(report("old", 0), false, start, ALIVE).unwrap();
        for pid in 1..64 {
            known.take(report("nft", pid), false, later, ALIVE).unwrap();
        }
        assert_eq!(known.take(report("nft", 64), false, start, ALIVE), Err(TooMany), "none is silent yet");
        known.take(report("old", 0), false, start, ALIVE).expect("reports of known backends are accepted");
        known.take(report("nft", 64), false, later, ALIVE).expect("the silent one makes room");
        let shown = known.show(later, None, ALIVE);
        assert_eq!(shown.len(), MAX_BACKENDS);
        assert!(shown.iter().all(|backend| backend.name == "nft"));
        assert_eq!(known.take(report("nft", 65), false, later, ALIVE), Err(TooMany));
        known.take(report("nft", 65), false, later + FORGOTTEN, ALIVE).unwrap();
        assert_eq!(known.all.len(), 1, "the forgotten are not kept");
    }

    #[test]
    fn processes_are_looked_up_by_pid() {
        assert!(!ended(std::process::id()));
        assert!(!ended(1), "a process of another user exists too");
        // Above the maximum of Linux (PID_MAX_LIMIT).
        assert!(ended(1 << 29));
        assert!(!ended(0) && !ended(u32::MAX), "these name process groups and get no signal");
    }
}
