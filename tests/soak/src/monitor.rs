//! Owns: continuous checks from outside. In: the agent's process, its `/livez`, its CRI socket. Out: memory and open
//! files of every life, and violations if a call fails or the agent does not answer.

use crate::Phase;
use crate::test_env::TestEnv;
use crate::timeline::{Broken, Timeline};
use anyhow::{Context as _, Result};
use keelson_harness::load::{FailedCall, Load, LoadResult};
use keelson_harness::util::{eventually, http_get};
use serde::Serialize;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Pass-through calls per second, with the client library of the kubelet.
const CALLS_PER_SECOND: u32 = 20;

/// Maximum resident memory of the agent, in MiB.
const MAX_MEMORY: f64 = 128.0;
/// Maximum number of open files of the agent: each caller has a connection, and each call in flight may have one.
const MAX_FILES: usize = 256;
/// Maximum number of open files at the end, without pulls.
const MAX_FILES_AT_REST: usize = 96;
/// Growth is not computed for a life shorter than this.
const LONG_LIFE: usize = 120;

/// Timeout of `/livez` on a busy machine.
const LIVEZ_PATIENCE: Duration = Duration::from_secs(10);

/// Time after a death in which calls may fail: grpc-go waits up to 3 s before it reconnects.
const BACK_OFF: Duration = Duration::from_secs(6);

/// One life of the agent: one process.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Life {
    pid: u32,
    pub(crate) seconds: usize,
    pub(crate) max_memory_mib: f64,
    pub(crate) max_open_files: usize,
    /// Memory of the last third over memory of the middle third, of a life that is long enough.
    pub(crate) growth: Option<f64>,
    #[serde(skip)]
    memory: Vec<f64>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Observed {
    pub(crate) lives: usize,
    pub(crate) max_memory_mib: f64,
    pub(crate) max_open_files: usize,
    pub(crate) memory_at_rest_mib: f64,
    pub(crate) open_files_at_rest: usize,
    pub(crate) longest_life_seconds: usize,
    pub(crate) worst_growth: Option<f64>,
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
        let at_rest = usage(self.env.agent_pid.load(Ordering::Relaxed)).unwrap_or_default();
        if at_rest.1 > MAX_FILES_AT_REST {
            let what = format!("{} at rest, at most {MAX_FILES_AT_REST} expected", at_rest.1);
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
            max_memory_mib: by(|life| life.max_memory_mib),
            max_open_files: lives.iter().map(|life| life.max_open_files).max().unwrap_or(0),
            memory_at_rest_mib: at_rest.0,
            open_files_at_rest: at_rest.1,
            longest_life_seconds: lives.iter().map(|life| life.seconds).max().unwrap_or(0),
            worst_growth: lives.iter().filter_map(|life| life.growth).reduce(f64::max),
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

/// Resident memory in MiB and open files of a process.
fn usage(pid: u32) -> Option<(f64, usize)> {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count();
    Some((keelson_harness::process::resident_kib(pid).ok()? as f64 / 1024.0, files))
}

async fn sample(env: Arc<TestEnv>, timeline: Timeline, phases: watch::Receiver<Phase>) -> Vec<Life> {
    let mut lives: Vec<Life> = Vec::new();
    while *phases.borrow() != Phase::Done {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let pid = env.agent_pid.load(Ordering::Relaxed);
        let Some((memory, files)) = usage(pid) else { continue };
        if lives.last().is_none_or(|life| life.pid != pid) {
            lives.push(Life::new(pid));
        }
        let Some(life) = lives.last_mut() else { continue };
        life.add(memory, files);
        if memory > MAX_MEMORY {
            let what = format!("{memory:.1} MiB, at most {MAX_MEMORY:.0} MiB expected");
            timeline.violation("memory stays flat", &what);
        }
        if files > MAX_FILES {
            let what = format!("{files} open, at most {MAX_FILES} expected");
            timeline.violation("open files stay flat", &what);
        }
    }
    for life in &mut lives {
        life.growth = growth(&life.memory);
        if let Some(growth) = life.growth
            && growth > 1.5
        {
            let what = format!("{growth:.2} times as much in the last third of a life of {} s", life.seconds);
            timeline.violation("memory stays flat", &what);
        }
    }
    lives
}

impl Life {
    fn new(pid: u32) -> Self {
        Self { pid, seconds: 0, max_memory_mib: 0.0, max_open_files: 0, growth: None, memory: Vec::new() }
    }

    fn add(&mut self, memory: f64, files: usize) {
        self.seconds += 1;
        self.max_memory_mib = self.max_memory_mib.max(memory);
        self.max_open_files = self.max_open_files.max(files);
        self.memory.push(memory);
    }
}

/// The median of the last third over that of the middle third; the first third warms up.
fn growth(memory: &[f64]) -> Option<f64> {
    if memory.len() < LONG_LIFE {
        return None;
    }
    let third = memory.len() / 3;
    let median = |part: &[f64]| {
        let mut sorted = part.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    };
    Some(median(&memory[2 * third..])? / median(&memory[third..2 * third])?)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_compares_the_last_third_of_a_long_life_with_the_middle_one() {
        assert_eq!(growth(&[1.0; 60]), None, "too short");
        assert_eq!(growth(&[20.0; 300]), Some(1.0));
        let warm: Vec<_> = (0..300).map(|n| if n < 90 { 1.0 } else { 20.0 }).collect();
        assert_eq!(growth(&warm), Some(1.0), "the first third warms up");
        let leaky: Vec<_> = (0..300).map(|n| 10.0 + f64::from(n)).collect();
        assert!(growth(&leaky).is_some_and(|growth| growth > 1.5));
    }
}
