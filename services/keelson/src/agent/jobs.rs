//! Jobs that serve a socket beside the CRI: the debug socket, the HTTP page, the Endpoints API.
//!
//! Owns: [`Job`], which listens at one or more addresses and keeps trying for as long as the agent lives. In: what to do
//! at one address. Out: the job's state in its recorder, for `keelson actors`, `/readyz`, the page and the metrics.
//!
//! An address that cannot be had, a server that ends and one that panics are all the same: the address is `failing`, with
//! the reason, and is tried again with back-off. Nothing else of the agent notices.

use std::{
    collections::BTreeMap,
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use keelson_actors::{
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

/// A server that has served for as long as this begins with the shortest pause when it fails.
const QUIET: Duration = Duration::from_secs(60);
/// How long the start of the agent waits for the first try of each address.
const FIRST_TRY: Duration = Duration::from_secs(2);

/// A thread for actors, with a name that `top -H` shows.
pub(super) fn arbiter(name: &'static std::ffi::CStr) -> actix::Arbiter {
    let arbiter = actix::Arbiter::new();
    arbiter.spawn_fn(move || {
        if let Err(error) = nix::sys::prctl::set_name(name) {
            tracing::debug!(%error, "cannot name a thread");
        }
    });
    arbiter
}

/// How one address is.
enum Place {
    Serves(String),
    Failing { reason: String, next: Instant },
}

/// One job, at any number of addresses. Cheap to clone.
#[derive(Clone)]
pub(super) struct Job(Arc<Inner>);

struct Inner {
    recorder: Arc<Recorder>,
    changes: watch::Sender<u64>,
    places: Mutex<BTreeMap<usize, Place>>,
}

impl Job {
    pub(super) fn new(name: &'static str, changes: watch::Sender<u64>) -> Self {
        Self(Arc::new(Inner { recorder: Recorder::new(name, 0), changes, places: Mutex::default() }))
    }

    pub(super) fn recorder(&self) -> &Arc<Recorder> {
        &self.0.recorder
    }

    /// The addresses that are served.
    pub(super) fn listens(&self) -> Vec<String> {
        let places = self.0.places.lock().unwrap_or_else(PoisonError::into_inner);
        let serves = |place: &Place| match place {
            Place::Serves(label) => Some(label.clone()),
            Place::Failing { .. } => None,
        };
        places.values().filter_map(serves).collect()
    }

    fn set(&self, index: usize, place: Place) {
        let mut places = self.0.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.insert(index, place);
        let (mut serves, mut failures, mut soonest) = (Vec::new(), Vec::new(), None::<Instant>);
        for place in places.values() {
            match place {
                Place::Serves(label) => serves.push(label.as_str()),
                Place::Failing { reason, next } => {
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
            None => self.0.recorder.status(Status::Running, format!("listens on {}", serves.join(", "))),
        }
        drop(places);
        self.0.changes.send_modify(|count| *count += 1);
    }
}

/// One try at one address.
pub(super) struct Attempt {
    job: Job,
    index: usize,
    first: Option<mpsc::Sender<()>>,
    /// Told when the job is to end.
    pub(super) stop: watch::Receiver<bool>,
}

impl Attempt {
    /// The address is served from now on.
    pub(super) fn serves(&mut self, label: String) {
        tracing::info!(job = self.job.recorder().name(), address = label, "listening");
        self.job.set(self.index, Place::Serves(label));
        self.first = None;
    }

    /// When the job is to end.
    pub(super) async fn stopped(&mut self) {
        // An error means that the sender is gone, which also means stop.
        let _ = self.stop.wait_for(|stop| *stop).await;
    }
}

/// Runs jobs until it is told to stop.
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

    /// Does `attempt` at one address of `job`, again and again.
    pub(super) fn keep<F, T>(&mut self, job: &Job, index: usize, attempt: F)
    where
        F: Fn(Attempt) -> T + 'static,
        T: Future<Output = anyhow::Result<()>> + 'static,
    {
        let (job, stop, first) = (job.clone(), self.stop.clone(), self.first.clone());
        self.tasks.push(actix::spawn(keep(job, index, stop, first, attempt)));
    }

    /// Waits for the first try of each address, for a moment: an agent that says that it is ready listens, if it can.
    pub(super) async fn tried(self) -> Vec<JoinHandle<()>> {
        let Self { first, mut tried, tasks, .. } = self;
        drop(first);
        if tokio::time::timeout(FIRST_TRY, tried.recv()).await.is_err() {
            tracing::warn!("a socket takes long to be made; the agent goes on without it");
        }
        tasks
    }
}

async fn keep<F, T>(job: Job, index: usize, stop: watch::Receiver<bool>, first: mpsc::Sender<()>, attempt: F)
where
    F: Fn(Attempt) -> T + 'static,
    T: Future<Output = anyhow::Result<()>> + 'static,
{
    let (mut first, mut tries, mut said) = (Some(first), 0, String::new());
    loop {
        let began = Instant::now();
        let this = Attempt { job: job.clone(), index, first: first.take(), stop: stop.clone() };
        // A task of its own, so that a panic is an error like any other.
        let ended = actix::spawn(attempt(this)).await;
        if *stop.borrow() || stop.has_changed().is_err() {
            return;
        }
        let reason = match ended {
            Ok(Ok(())) => "the server ended by itself".to_owned(),
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
        let pause = supervise::backoff(tries);
        let recorder = job.recorder();
        recorder.restarted();
        if said != reason {
            tracing::error!(job = recorder.name(), reason, "the job fails and is retried");
            recorder.error(reason.clone());
            said.clone_from(&reason);
        }
        job.set(index, Place::Failing { reason, next: began.max(Instant::now()) + pause });
        let mut stop = stop.clone();
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
}

/// Label of the metrics of jobs.
#[derive(Debug, Clone, PartialEq, Eq, Hash, prometheus_client::encoding::EncodeLabelSet)]
struct JobLabel {
    job: &'static str,
}

/// Whether each job runs, and how often it was restarted: actors and servers alike.
#[derive(Debug)]
pub(super) struct JobMetrics(pub(super) Vec<Arc<Recorder>>);

impl Collector for JobMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let up = Family::<JobLabel, Gauge>::default();
        let restarts = Family::<JobLabel, prometheus_client::metrics::counter::Counter>::default();
        for recorder in self.0.iter().filter(|recorder| recorder.current_status() != Status::Off) {
            let label = JobLabel { job: recorder.name() };
            up.get_or_create(&label).set(recorder.failure().is_none().into());
            restarts.get_or_create(&label).inc_by(recorder.restarts());
        }
        let help = "1 while the job runs, 0 while it waits to be retried or is disabled";
        up.encode(encoder.encode_descriptor("keelson_job_up", help, None, up.metric_type())?)?;
        let help = "Restarts of the job, after an error or a panic";
        let descriptor =
            encoder.encode_descriptor("keelson_job_restarts", help, None, restarts.metric_type())?;
        restarts.encode(descriptor)?;
        let panics = ConstCounter::new(supervise::panics());
        let help = "Panics in the process";
        panics.encode(encoder.encode_descriptor("keelson_panics", help, None, panics.metric_type())?)
    }
}
