//! Owns: continuous checks from outside. In: the agent's process, its `/livez`, its CRI socket. Out: memory and open
//! files of every life, and violations if a call fails or the agent does not answer.

use crate::Phase;
use crate::images::test_env::TestEnv;
use crate::lives::{Growth, Life, Lives, Usage};
use crate::timeline::{Broken, Timeline};
use anyhow::{Context as _, Result};
use keelson_harness::load::{FailedCall, Load, LoadResult};
use keelson_harness::util::{eventually, http_get};
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Pass-through calls per second, with the client library of the kubelet.
const CALLS_PER_SECOND: u32 = 20;

/// Maximum resident memory of the agent, in MiB.
const MAX_MEMORY: f64 = 128.0;
/// Maximum number of open files of the agent: each caller has a connection, and each call in flight may have one.
const MAX_FILES: f64 = 256.0;
/// Maximum number of open files at the end, without pulls.
const MAX_FILES_AT_REST: f64 = 96.0;
/// Samples are taken every second. Open files and threads follow the number of callers.
const GROWTH: Growth = Growth { shortest: 120, factor: 1.5, least: 8.0 };

/// Timeout of `/livez` on a busy machine.
const LIVEZ_PATIENCE: Duration = Duration::from_secs(10);

/// Time after a death in which calls may fail: grpc-go waits up to 3 s before it reconnects.
const BACK_OFF: Duration = Duration::from_secs(6);

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Observed {
    pub(crate) lives: usize,
    pub(crate) max_memory_mib: f64,
    pub(crate) max_open_files: f64,
    pub(crate) at_rest: Usage,
    pub(crate) longest_life_seconds: usize,
    pub(crate) calls: u64,
    pub(crate) calls_failed_in_windows: u64,
    pub(crate) longest_call_seconds: f64,
}

pub(crate) struct Monitor {
    env: Arc<TestEnv>,
    timeline: Timeline,
    load: Load,
    samples: JoinHandle<Vec<Life>>,
    livez: JoinHandle<()>,
}

impl Monitor {
    pub(crate) async fn start(
        env: &Arc<TestEnv>,
        timeline: &Timeline,
        phases: watch::Receiver<Phase>,
    ) -> Result<Self> {
        let endpoint = format!("unix://{}", env.socket.display());
        let load = Load::start(&endpoint, CALLS_PER_SECOND, 2, "localhost/none:v1").await?;
        let samples = tokio::spawn(sample(env.clone(), timeline.clone(), phases.clone()));
        let livez = tokio::spawn(livez(env.clone(), timeline.clone(), phases));
        Ok(Self { env: env.clone(), timeline: timeline.clone(), load, samples, livez })
    }

    /// Stops watching when the agent is idle, and checks the results.
    pub(crate) async fn stop(self) -> Result<Observed> {
        self.rests().await;
        let left =
            eventually(Duration::from_secs(90), "every agent that was restarted has ended", || async {
                let left = self.env.agent.lock().await.predecessors();
                anyhow::ensure!(left == 0, "{left} have not");
                Ok(())
            });
        if let Err(error) = left.await {
            self.timeline.violation("nothing is left when all is done", &format!("{error:#}"));
        }
        let at_rest = self.env.agent.pid().and_then(Usage::of).unwrap_or_default();
        if at_rest.files > MAX_FILES_AT_REST {
            let what = format!("{} at rest, at most {MAX_FILES_AT_REST} expected", at_rest.files);
            self.timeline.violation("open files stay flat", &what);
        }
        self.livez.await.context("the probe of /livez panicked")?;
        let lives = self.samples.await.context("the sampler panicked")?;
        let timeline = self.timeline;
        let load = self.load.stop().await.context("the load of pass-through calls")?;
        let excused = load.failures.iter().filter(|call| is_excused(call, &timeline)).count();
        let by = |of: fn(&Life) -> f64| lives.iter().map(of).fold(0.0, f64::max);
        Ok(Observed {
            lives: lives.len(),
            max_memory_mib: by(|life| life.max.memory),
            max_open_files: by(|life| life.max.files),
            at_rest,
            longest_life_seconds: lives.iter().map(|life| life.samples).max().unwrap_or(0),
            calls: load.result.calls,
            calls_failed_in_windows: u64::try_from(excused)?,
            longest_call_seconds: seconds(&load.result),
        })
    }

    async fn rests(&self) {
        let url = format!("{}/debug/pulls", self.env.url);
        let rests = eventually(Duration::from_secs(90), "the agent has no pulls left", || async {
            let answer = http_get(&url).await?.success()?;
            let pulls: serde_json::Value = serde_json::from_slice(&answer.body)?;
            let left = ["running", "queued", "callers"].map(|field| pulls[field].as_u64());
            anyhow::ensure!(left == [Some(0); 3], "running, queued and callers are {left:?}");
            Ok(())
        });
        if let Err(error) = rests.await {
            self.timeline.violation("nothing is left when all is done", &format!("{error:#}"));
        }
    }
}

/// Whether a fault excuses a failed call; otherwise it is a violation.
fn is_excused(call: &FailedCall, timeline: &Timeline) -> bool {
    let (from, to) = (timeline.moment(call.started_millis), timeline.moment(call.ended_millis));
    let excuses = [Broken::AgentKilled, Broken::Runtime];
    let excused = timeline.excused(&excuses, from, to, BACK_OFF);
    if !excused {
        let error = &call.error;
        let at = timeline.seconds(from);
        let what = format!("{} after {at:.1} s: {}: {}", call.call, error.code, error.message);
        timeline.violation("pass-through calls succeed", &what);
    }
    excused
}

fn seconds(result: &LoadResult) -> f64 {
    Duration::from_micros(result.longest_micros).as_secs_f64()
}

async fn sample(env: Arc<TestEnv>, timeline: Timeline, phases: watch::Receiver<Phase>) -> Vec<Life> {
    let mut lives = Lives::new("agent");
    while *phases.borrow() != Phase::Done {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let Some(usage) = lives.sample(env.agent.pid(), &timeline) else { continue };
        if usage.memory > MAX_MEMORY {
            let what = format!("{:.1} MiB, at most {MAX_MEMORY:.0} MiB expected", usage.memory);
            timeline.violation("memory stays flat", &what);
        }
        if usage.files > MAX_FILES {
            let what = format!("{} open, at most {MAX_FILES} expected", usage.files);
            timeline.violation("open files stay flat", &what);
        }
    }
    lives.finish(GROWTH, &timeline)
}

async fn livez(env: Arc<TestEnv>, timeline: Timeline, phases: watch::Receiver<Phase>) {
    let url = format!("{}/livez", env.url);
    while *phases.borrow() != Phase::Done {
        let began = Instant::now();
        let answer = tokio::time::timeout(LIVEZ_PATIENCE, http_get(&url)).await;
        let failed = match answer {
            Ok(Ok(answer)) if answer.status.is_success() => None,
            Ok(Ok(answer)) => Some(format!("{}: {}", answer.status, answer.text())),
            Ok(Err(error)) => Some(format!("{error:#}")),
            Err(_) => Some(format!("no answer in {LIVEZ_PATIENCE:?}")),
        };
        if let Some(failed) = failed {
            let excuses = [Broken::AgentKilled, Broken::AgentRestarted];
            if !timeline.excused(&excuses, began, Instant::now(), Duration::from_secs(1)) {
                timeline.violation("/livez answers", &failed);
            }
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}
