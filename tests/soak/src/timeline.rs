//! Owns: the events of a run. In: notes, values over time, windows in which something was broken on purpose, violations. Out: a
//! file with one JSON object per line, series, and whether a fault excuses a moment.

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) enum Broken {
    /// From `kill -9` of the agent until the next one is live.
    AgentKilled,
    /// From SIGTERM of the agent until the next one serves.
    AgentRestarted,
    /// From the end of the runtime until it serves again.
    Runtime,
    /// The state disk is full or hangs.
    StateDisk,
    /// The image disk is full.
    ImageDisk,
    /// A registry is broken or slow.
    Registry,
    /// The proxy's process is down, or being replaced, until its pod is ready.
    Proxy,
    /// A proxy with another backend takes over.
    Backend,
    /// Rules were removed, until the proxy has repaired them.
    Rules,
    /// The agent that is a node without a kubelet is down.
    NodeAgent,
    /// The kubelet is down.
    Kubelet,
    /// The API server is down, hangs or cannot be reached well.
    Api,
    /// An EndpointSlice has a pod as ready that ends or has ended: the controllers are late.
    Controllers,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) what: Broken,
    pub(crate) from: Instant,
    pub(crate) to: Option<Instant>,
}

/// A pull that a caller saw end without success.
#[derive(Clone, Debug)]
pub(crate) struct Unsuccessful {
    pub(crate) image: String,
    pub(crate) at: Instant,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Violation {
    pub(crate) at_seconds: f64,
    pub(crate) invariant: String,
    pub(crate) what: String,
}

/// Values of one quantity, each with its time in seconds.
pub(crate) type Series = BTreeMap<String, Vec<(f64, f64)>>;

/// Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Timeline(Arc<TimelineState>);

#[derive(Debug)]
struct TimelineState {
    began: Instant,
    began_unix: Duration,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    windows: Vec<Window>,
    unsuccessful: Vec<Unsuccessful>,
    counts: BTreeMap<String, u64>,
    violations: Vec<Violation>,
    series: Series,
}

/// Maximum number of listed violations per invariant; the others are counted.
const LISTED: usize = 20;

impl Timeline {
    /// Begins a new file in `out`.
    pub(crate) fn create(out: &Path, seed: u64) -> Result<Self> {
        fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
        let path = out.join("timeline.jsonl");
        let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let (windows, unsuccessful) = (Vec::new(), Vec::new());
        let (counts, series) = (BTreeMap::new(), BTreeMap::new());
        let inner = Inner { file, windows, unsuccessful, counts, violations: Vec::new(), series };
        let began_unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let shared = TimelineState { began: Instant::now(), began_unix, inner: Mutex::new(inner) };
        let timeline = Self(Arc::new(shared));
        timeline.record("seed", &seed.to_string());
        Ok(timeline)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn seconds(&self, at: Instant) -> f64 {
        at.saturating_duration_since(self.0.began).as_secs_f64()
    }

    pub(crate) fn moment(&self, unix_millis: u64) -> Instant {
        self.0.began + Duration::from_millis(unix_millis).saturating_sub(self.0.began_unix)
    }

    pub(crate) fn wall_clock(&self, at: Instant) -> SystemTime {
        UNIX_EPOCH + self.0.began_unix + at.saturating_duration_since(self.0.began)
    }

    pub(crate) fn record(&self, kind: &str, what: &str) {
        self.write(&mut self.lock(), kind, what);
    }

    fn write(&self, inner: &mut Inner, kind: &str, what: &str) {
        let line = json!({"seconds": self.seconds(Instant::now()), "kind": kind, "what": what});
        if let Err(error) = writeln!(inner.file, "{line}") {
            eprintln!("cannot write the timeline: {error}");
        }
    }

    pub(crate) fn count(&self, what: &str) {
        *self.lock().counts.entry(what.to_owned()).or_default() += 1;
    }

    pub(crate) fn counts(&self) -> BTreeMap<String, u64> {
        self.lock().counts.clone()
    }

    pub(crate) fn violation(&self, invariant: &str, what: &str) {
        let mut inner = self.lock();
        self.write(&mut inner, "violation", &format!("{invariant}: {what}"));
        *inner.counts.entry(format!("violation: {invariant}")).or_default() += 1;
        let at_seconds = self.seconds(Instant::now());
        eprintln!("violation after {at_seconds:.1} s: {invariant}: {what}");
        if inner.violations.iter().filter(|known| known.invariant == invariant).count() < LISTED {
            let (invariant, what) = (invariant.to_owned(), what.to_owned());
            inner.violations.push(Violation { at_seconds, invariant, what });
        }
    }

    pub(crate) fn violations(&self) -> usize {
        self.lock().violations.len()
    }

    pub(crate) fn listed_violations(&self) -> Vec<Violation> {
        self.lock().violations.clone()
    }

    /// Adds a value to a series, whose name is `PART: QUANTITY (UNIT)`; the report page has one plot for a quantity.
    pub(crate) fn sample(&self, series: &str, value: f64) {
        let at = self.seconds(Instant::now());
        let mut inner = self.lock();
        match inner.series.get_mut(series) {
            Some(values) => values.push((at, value)),
            None => {
                inner.series.insert(series.to_owned(), vec![(at, value)]);
            }
        }
    }

    pub(crate) fn series(&self) -> Series {
        self.lock().series.clone()
    }

    /// Records that a pull ended without success: its caller left or got an error.
    pub(crate) fn unsuccessful(&self, image: &str) {
        let ended = Unsuccessful { image: image.to_owned(), at: Instant::now() };
        self.lock().unsuccessful.push(ended);
    }

    pub(crate) fn all_unsuccessful(&self) -> Vec<Unsuccessful> {
        self.lock().unsuccessful.clone()
    }

    /// Opens a window, which ends when the guard is dropped.
    pub(crate) fn open(&self, what: Broken) -> OpenWindow {
        let mut inner = self.lock();
        inner.windows.push(Window { what, from: Instant::now(), to: None });
        OpenWindow { timeline: self.clone(), at: inner.windows.len() - 1 }
    }

    pub(crate) fn windows(&self) -> Vec<Window> {
        self.lock().windows.clone()
    }

    /// Whether one of these was broken at some moment from `from` to `to`, or ended within `after` before.
    pub(crate) fn excused(&self, broken: &[Broken], from: Instant, to: Instant, after: Duration) -> bool {
        overlaps(&self.lock().windows, broken, from, to, after)
    }
}

fn overlaps(windows: &[Window], broken: &[Broken], from: Instant, to: Instant, after: Duration) -> bool {
    windows.iter().any(|window| {
        broken.contains(&window.what) && window.from <= to && window.to.is_none_or(|end| end + after >= from)
    })
}

#[derive(Debug)]
pub(crate) struct OpenWindow {
    timeline: Timeline,
    at: usize,
}

impl Drop for OpenWindow {
    fn drop(&mut self) {
        let mut inner = self.timeline.lock();
        let at = self.at;
        if let Some(window) = inner.windows.get_mut(at) {
            window.to = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_excuses_failures_that_overlap_or_follow_shortly() {
        let base = Instant::now();
        let at = |seconds| base + Duration::from_secs(seconds);
        let windows = [Window { what: Broken::Runtime, from: at(10), to: Some(at(20)) }];
        let check = |broken, from, to, after| {
            overlaps(&windows, &[broken], at(from), at(to), Duration::from_secs(after))
        };
        assert!(check(Broken::Runtime, 0, 10, 0), "ends when the window begins");
        assert!(check(Broken::Runtime, 15, 16, 0), "within");
        assert!(check(Broken::Runtime, 22, 30, 5), "begins soon after");
        assert!(!check(Broken::Runtime, 0, 9, 5), "before");
        assert!(!check(Broken::Runtime, 26, 30, 5), "long after");
        assert!(!check(Broken::Registry, 15, 16, 0), "something else was broken");
    }
}
