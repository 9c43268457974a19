//! Jobs that are not actors: servers of the debug socket, the HTTP page and the Endpoints API; watches, and the writer
//! of Events on pods.
//!
//! Owns: [`Job`], of one or more parts (the addresses of a server, the tasks of a watch) that are retried until the
//! agent ends. In: the work of one part. Out: the job's state in its recorder, for `keelson actors`, `/readyz`, the
//! page and the metrics.
//!
//! An address that cannot be used, a part that ends and one that panics are treated alike: the job is `failing`, with
//! the reason, and the part is retried with back-off. No other part of the agent is affected.

use std::{
    collections::BTreeMap,
    future::Future,
    rc::Rc,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use keelson_actor_system::{
    inspect::{Recorder, Status},
    supervise,
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{counter::ConstCounter, family::Family, gauge::Gauge},
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::Instant,
};

/// A part that has run for this long starts again with the shortest pause when it fails.
const QUIET: Duration = Duration::from_secs(60);
/// Maximum wait of the agent's start for the first attempt of each address.
const FIRST_TRY: Duration = Duration::from_secs(2);

/// A thread for actors, with a name for `top -H`.
pub(super) fn arbiter(name: &'static std::ffi::CStr) -> actix::Arbiter {
    let arbiter = actix::Arbiter::new();
    arbiter.spawn_fn(move || {
        if let Err(error) = nix::sys::prctl::set_name(name) {
            tracing::debug!(%error, "cannot name a thread");
        }
    });
    arbiter
}

enum Part {
    Serves(String),
    /// Works without an address.
    Runs,
    Failing {
        reason: String,
        next: Instant,
    },
}

/// A job of any number of parts. Cheap to clone.
#[derive(Clone)]
pub(super) struct Job(Arc<Inner>);

struct Inner {
    recorder: Arc<Recorder>,
    changes: watch::Sender<u64>,
    parts: Mutex<BTreeMap<usize, Part>>,
}

impl Job {
    pub(super) fn new(name: &'static str, changes: watch::Sender<u64>) -> Self {
        Self(Arc::new(Inner { recorder: Recorder::new(name, 0), changes, parts: Mutex::default() }))
    }

    pub(super) fn recorder(&self) -> &Arc<Recorder> {
        &self.0.recorder
    }

    pub(super) fn listens(&self) -> Vec<String> {
        let parts = self.0.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let serves = |part: &Part| match part {
            Part::Serves(label) => Some(label.clone()),
            Part::Runs | Part::Failing { .. } => None,
        };
        parts.values().filter_map(serves).collect()
    }

    fn set(&self, index: usize, part: Part) {
        let mut parts = self.0.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.insert(index, part);
        let (mut serves, mut failures, mut soonest) = (Vec::new(), Vec::new(), None::<Instant>);
        for part in parts.values() {
            match part {
                Part::Serves(label) => serves.push(label.as_str()),
                Part::Runs => {}
                Part::Failing { reason, next } => {
                    failures.push(reason.as_str());
                    soonest = Some(soonest.map_or(*next, |soonest| soonest.min(*next)));
                }
            }
        }
        match soonest {
            Some(next) => {
                let pause = next.saturating_duration_since(Instant::now());
                self.0.recorder.failed(Status::Failing, failures.join("; "), pause);
            }
            None if serves.is_empty() => self.0.recorder.status(Status::Running, ""),
            None => self.0.recorder.status(Status::Running, format!("listens on {}", serves.join(", "))),
        }
        drop(parts);
        self.0.changes.send_modify(|count| *count += 1);
    }

    /// Keeps `work`, which is not meant to end, running on `arbiter` as part `index` of this job, until the arbiter
    /// ends. `failed` is called with the reason each time it ended or panicked, before the pause.
    pub(super) fn keep_on<F, T>(
        &self,
        arbiter: &actix::ArbiterHandle,
        index: usize,
        failed: impl Fn(&str) + Send + 'static,
        work: F,
    ) where
        F: Fn() -> T + Send + 'static,
        T: Future<Output = ()> + 'static,
    {
        let job = self.clone();
        arbiter.spawn_fn(move || {
            actix::spawn(async move {
                // Not stopped explicitly: it ends with the arbiter.
                let (_stop, stop) = watch::channel(false);
                let attempt = move |attempt: Attempt| {
                    attempt.job.set(index, Part::Runs);
                    let work = work();
                    async move {
                        work.await;
                        Ok(())
                    }
                };
                keep(Attempt { job, index, first: None, stop }, failed, attempt).await;
            });
        });
    }
}

pub(super) struct Attempt {
    job: Job,
    index: usize,
    first: Option<mpsc::Sender<()>>,
    /// True when the job has to end.
    pub(super) stop: watch::Receiver<bool>,
}

impl Attempt {
    /// The address is served from now on.
    pub(super) fn serves(&mut self, label: String) {
        tracing::info!(job = self.job.recorder().name(), address = label, "listening");
        self.job.set(self.index, Part::Serves(label));
        self.first = None;
    }

    /// Returns when the job has to end.
    pub(super) async fn stopped(&mut self) {
        // An error means that the sender is gone, which also means stop.
        let _ = self.stop.wait_for(|stop| *stop).await;
    }
}

/// Runs servers until the watch is true.
pub(super) struct Jobs {
    stop: watch::Receiver<bool>,
    first: mpsc::Sender<()>,
    tried: mpsc::Receiver<()>,
    tasks: Vec<JoinHandle<()>>,
}

impl Jobs {
    pub(super) fn new(stop: watch::Receiver<bool>) -> Self {
        let (first, tried) = mpsc::channel(1);
        Self { stop, first, tried, tasks: Vec::new() }
    }

    /// Repeats `attempt` at one address of `job`.
    pub(super) fn keep<F, T>(&mut self, job: &Job, index: usize, attempt: F)
    where
        F: Fn(Attempt) -> T + 'static,
        T: Future<Output = anyhow::Result<()>> + 'static,
    {
        let (job, stop, first) = (job.clone(), self.stop.clone(), Some(self.first.clone()));
        self.tasks.push(actix::spawn(keep(Attempt { job, index, first, stop }, |_| {}, attempt)));
    }

    /// Waits a short time for the first attempt of each address, so that an agent that reports readiness listens, if it
    /// can.
    pub(super) async fn wait_for_first_tries(self) -> Vec<JoinHandle<()>> {
        let Self { first, mut tried, tasks, .. } = self;
        drop(first);
        if tokio::time::timeout(FIRST_TRY, tried.recv()).await.is_err() {
            tracing::warn!("a socket is not ready yet; the agent continues without it");
        }
        tasks
    }
}

/// Makes attempts until the watch is true; the first one is given.
async fn keep<F, T>(first: Attempt, failed: impl Fn(&str), attempt: F)
where
    F: Fn(Attempt) -> T + 'static,
    T: Future<Output = anyhow::Result<()>> + 'static,
{
    let (job, index, stop) = (first.job.clone(), first.index, first.stop.clone());
    let (mut first, mut tries, mut logged) = (Some(first), 0, String::new());
    let attempt = Rc::new(attempt);
    loop {
        let began = Instant::now();
        let next = || Attempt { job: job.clone(), index, first: None, stop: stop.clone() };
        let (this, attempt) = (first.take().unwrap_or_else(next), attempt.clone());
        // A separate task, so that a panic is an error like any other.
        let ended = actix::spawn(async move { attempt(this).await }).await;
        if *stop.borrow() || stop.has_changed().is_err() {
            return;
        }
        let reason = match ended {
            Ok(Ok(())) => "it exited unexpectedly".to_owned(),
            Ok(Err(error)) => format!("{error:#}"),
            Err(error) => match error.try_into_panic() {
                Ok(payload) => supervise::panic_text(&*payload),
                Err(error) => error.to_string(),
            },
        };
        if began.elapsed() >= QUIET {
            tries = 0;
        }
        tries += 1;
        let pause = supervise::RESTARTS.pause(tries);
        let recorder = job.recorder();
        recorder.restarted();
        if logged != reason {
            tracing::error!(job = recorder.name(), reason, "job failed; retrying");
            recorder.error(reason.clone());
            logged.clone_from(&reason);
        }
        failed(&reason);
        job.set(index, Part::Failing { reason, next: Instant::now() + pause });
        let mut stop = stop.clone();
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, prometheus_client::encoding::EncodeLabelSet)]
struct JobLabel {
    job: &'static str,
}

/// Whether each job runs, and how often it was restarted: actors, servers and watches.
#[derive(Debug)]
pub(super) struct JobMetrics(pub(super) Vec<Arc<Recorder>>);

impl Collector for JobMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let up = Family::<JobLabel, Gauge>::default();
        let restarts = Family::<JobLabel, prometheus_client::metrics::counter::Counter>::default();
        for recorder in self.0.iter().filter(|recorder| recorder.current_status() != Status::Disabled) {
            let label = JobLabel { job: recorder.name() };
            up.get_or_create(&label).set(recorder.failure().is_none().into());
            restarts.get_or_create(&label).inc_by(recorder.restarts());
        }
        let help = "1 while the job is running, 0 while it waits for a retry or is disabled";
        up.encode(encoder.encode_descriptor("keelson_job_up", help, None, up.metric_type())?)?;
        let help = "Restarts of the job after an error or a panic";
        let descriptor =
            encoder.encode_descriptor("keelson_job_restarts", help, None, restarts.metric_type())?;
        restarts.encode(descriptor)?;
        let panics = ConstCounter::new(supervise::panics());
        let help = "Panics in the process";
        panics.encode(encoder.encode_descriptor("keelson_panics", help, None, panics.metric_type())?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// I9: a watch that panics, at once or later, or that ends, is restarted, counted and shown with its reason.
    #[actix::test]
    async fn i9_a_watch_that_panics_is_restarted_and_counted() {
        let arbiter = arbiter(c"test");
        let (changes, _) = watch::channel(0);
        let job = Job::new("TestWatch", changes);
        let (tries, runs) = (Arc::new(AtomicU32::new(0)), Arc::new(tokio::sync::Notify::new()));
        let (seen, mut failures) = mpsc::unbounded_channel();
        let shown = job.clone();
        let failed = move |reason: &str| {
            // Sent before the pause; the job is failing from then on.
            seen.send((reason.to_owned(), shown.recorder().restarts())).expect("the test listens");
        };
        let (count, reached) = (tries.clone(), runs.clone());
        job.keep_on(&arbiter.handle(), 0, failed, move || {
            let number = count.fetch_add(1, Ordering::Relaxed);
            assert!(number != 0, "panics before it has begun");
            let reached = reached.clone();
            async move {
                tokio::task::yield_now().await;
                assert!(number != 1, "panics while it runs");
                if number > 2 {
                    reached.notify_one();
                    std::future::pending::<()>().await;
                }
            }
        });
        let other = Arc::new(AtomicU32::new(0));
        let started = other.clone();
        let begin = move || {
            started.fetch_add(1, Ordering::Relaxed);
            std::future::pending()
        };
        job.keep_on(&arbiter.handle(), 1, |_| {}, begin);
        runs.notified().await;
        for (number, text) in ["panics before", "panics while", "exited unexpectedly"].into_iter().enumerate()
        {
            let (reason, restarts) = failures.recv().await.expect("each failure is reported");
            assert!(reason.contains(text), "{reason}");
            assert_eq!(restarts, number as u64 + 1);
        }
        let recorder = job.recorder();
        assert_eq!((recorder.restarts(), recorder.current_status()), (3, Status::Running));
        assert!(recorder.overview().last_error.contains("exited unexpectedly"));
        assert_eq!(
            (tries.load(Ordering::Relaxed), other.load(Ordering::Relaxed)),
            (4, 1),
            "the other part continues"
        );
        let mut registry = prometheus_client::registry::Registry::default();
        registry.register_collector(Box::new(JobMetrics(vec![recorder.clone()])));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("encodes");
        for line in ["keelson_job_up{job=\"TestWatch\"} 1", "keelson_job_restarts_total{job=\"TestWatch\"} 3"]
        {
            assert!(text.contains(line), "{line}: {text}");
        }
        arbiter.stop();
    }

    /// I9: while one part waits for a retry, the job is failing with the part's reason.
    #[actix::test]
    async fn i9_a_job_is_failing_while_one_of_its_watches_is() {
        let arbiter = arbiter(c"test");
        let (changes, mut changed) = watch::channel(0);
        let job = Job::new("TestWatch", changes);
        job.keep_on(&arbiter.handle(), 0, |_| {}, || async { panic!("for a test") });
        job.keep_on(&arbiter.handle(), 1, |_| {}, std::future::pending);
        while job.recorder().restarts() < 2 || job.recorder().failure().is_none() {
            changed.changed().await.expect("the job runs");
        }
        let failure = job.recorder().failure().expect("it fails");
        assert!(failure.reason.contains("for a test"), "{}", failure.reason);
        arbiter.stop();
    }
}
