//! The agent under test, and faults of its process and disk.
//!
//! Owns: the agent under test and the disk of its state. In: faults. Out: its present process, windows in the timeline, and a
//! violation if it does not start.

use crate::lanes::Lane;
use crate::timeline::{Broken, Timeline};
use anyhow::{Context as _, Result};
use keelson_harness::agent::Agent;
use keelson_harness::disk::LoopDisk;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::sync::{Mutex, MutexGuard};

/// Size of the disk of its state.
pub(crate) const STATE_DISK: u64 = 64 << 20;

/// Fields are dropped in this order.
#[derive(Debug)]
pub(crate) struct AgentHost {
    agent: Mutex<Agent>,
    /// Several agents may share it.
    state_disk: Arc<LoopDisk>,
    /// What its kills and its planned restarts are in the timeline.
    broken: [Broken; 2],
    /// 0 while none runs.
    pid: AtomicU32,
}

impl AgentHost {
    /// Of an agent that runs, with its state on `state_disk`. `broken`: what its kills and its planned restarts are in the timeline.
    pub(crate) fn new(agent: Agent, state_disk: &Arc<LoopDisk>, broken: [Broken; 2]) -> Self {
        let pid = AtomicU32::new(agent.pid().unwrap_or_default());
        Self { agent: Mutex::new(agent), state_disk: state_disk.clone(), broken, pid }
    }

    /// None while it does not run.
    pub(crate) fn pid(&self) -> Option<u32> {
        Some(self.pid.load(Ordering::Relaxed)).filter(|pid| *pid != 0)
    }

    /// Held by a fault until the agent runs again.
    pub(crate) async fn lock(&self) -> MutexGuard<'_, Agent> {
        self.agent.lock().await
    }

    pub(crate) async fn log(&self) -> Result<String> {
        self.lock().await.log()
    }

    /// Bytes that its state takes on disk.
    pub(crate) fn state_bytes(&self) -> Result<u64> {
        fn bytes_of(folder: &Path) -> std::io::Result<u64> {
            let mut sum = 0;
            for entry in fs::read_dir(folder)? {
                let entry = entry?;
                // A file may be gone since it was listed.
                let Ok(file) = entry.metadata() else { continue };
                sum += if file.is_dir() { bytes_of(&entry.path())? } else { file.blocks() * 512 };
            }
            Ok(sum)
        }
        let folder = self.state_disk.path().join("state");
        bytes_of(&folder).with_context(|| format!("cannot read {}", folder.display()))
    }

    pub(crate) async fn kill(&self, timeline: &Timeline) -> Result<()> {
        let mut agent = self.lock().await;
        let _window = timeline.open(self.broken[0]);
        self.pid.store(0, Ordering::Relaxed);
        agent.kill9()?;
        self.start(&mut agent, timeline).await
    }

    /// Restarts it as an operator does.
    pub(crate) async fn restart(&self, timeline: &Timeline) -> Result<()> {
        self.replace(timeline, None).await
    }

    /// Restarts it as an upgrade does, with another build of the program.
    pub(crate) async fn replace(&self, timeline: &Timeline, program: Option<&Path>) -> Result<()> {
        let mut agent = self.lock().await;
        let _window = timeline.open(self.broken[1]);
        self.pid.store(0, Ordering::Relaxed);
        if let Some(program) = program {
            agent.set_program(program);
        }
        match agent.restart().await {
            Ok(()) => {
                self.pid.store(agent.pid().unwrap_or_default(), Ordering::Relaxed);
                return Ok(());
            }
            Err(error) => {
                timeline.violation("a planned restart succeeds", &last_lines(&format!("{error:#}")));
            }
        }
        if let Some(pid) = agent.pid() {
            self.pid.store(pid, Ordering::Relaxed);
            return Ok(());
        }
        self.start(&mut agent, timeline).await
    }

    /// Starts it. A failed start is a violation, and is retried as an init system does.
    async fn start(&self, agent: &mut Agent, timeline: &Timeline) -> Result<()> {
        const TRIES: usize = 30;
        for n in 1..=TRIES {
            match agent.start_live().await {
                Ok(()) => break,
                Err(error) if n == TRIES => return Err(error.context("the agent does not start any more")),
                Err(error) => timeline.violation("the agent starts", &last_lines(&format!("{error:#}"))),
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        self.pid.store(agent.pid().unwrap_or_default(), Ordering::Relaxed);
        Ok(())
    }

    pub(crate) async fn fill_state_disk(&self, lane: &mut Lane) -> Result<()> {
        let _window = lane.timeline.open(Broken::StateDisk);
        let _full = self.state_disk.fill(0)?;
        lane.pass_random(3.0, 12.0).await;
        Ok(())
    }

    pub(crate) async fn freeze_state_disk(&self, lane: &mut Lane) -> Result<()> {
        let _window = lane.timeline.open(Broken::StateDisk);
        let time = lane.seconds(3.0, 15.0);
        self.state_disk.freeze(time).await
    }
}

/// The end of a long error, which is the end of a log.
fn last_lines(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(8)..].join(" | ")
}
