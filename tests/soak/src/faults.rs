//! Owns: the schedule of faults. In: a seed. Out: faults in two lanes, so that a process may die while a disk is full.
//!
//! One lane breaks processes: the agent is killed or restarted, the runtime killed or restarted. The other breaks their
//! environment: the registries and the disks. In a lane one fault follows the other, every fault once before one is
//! repeated. Each is undone before its lane continues or ends.

use crate::Phase;
use crate::deck::{Deck, chooser, seconds};
use crate::test_env::TestEnv;
use crate::timeline::{Broken, Timeline};
use anyhow::{Context as _, Result};
use clap::ValueEnum;
use keelson_harness::registry_proxy::{Fault as RegistryFault, Match};
use rand::RngExt as _;
use rand::rngs::SmallRng;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fault {
    /// Kill the agent (SIGKILL) and start it
    AgentKill,
    /// Restart the agent (planned restart)
    AgentRestart,
    /// Kill the runtime (SIGKILL) and start it
    RuntimeKill,
    /// Stop the runtime (SIGTERM) and start it
    RuntimeRestart,
    /// Close every connection at a registry
    RegistryDown,
    /// Answer 500, 503 or 429 at a registry
    RegistryErrors,
    /// Send no answers from a registry
    RegistryHangs,
    /// Stall within layers at a registry
    RegistryStalls,
    /// Close connections within layers at a registry
    RegistryCuts,
    /// Slow down a registry
    RegistrySlow,
    /// Fill the disk of the agent's state
    StateDiskFull,
    /// Block the disk of the agent's state
    StateDiskHangs,
    /// Fill the disk of the runtime's images
    ImageDiskFull,
}

const PROCESSES: [Fault; 4] =
    [Fault::AgentKill, Fault::AgentRestart, Fault::RuntimeKill, Fault::RuntimeRestart];

pub(crate) fn name(fault: Fault) -> String {
    fault.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Starts both lanes; they end when no more faults are wanted.
pub(crate) fn start(
    env: &Arc<TestEnv>,
    timeline: &Timeline,
    seed: u64,
    only: &[Fault],
    phases: &watch::Receiver<Phase>,
) -> Vec<JoinHandle<Result<()>>> {
    let chosen = |fault: &&Fault| only.is_empty() || only.contains(fault);
    let (processes, surroundings): (Vec<_>, Vec<_>) =
        Fault::value_variants().iter().filter(chosen).copied().partition(|fault| PROCESSES.contains(fault));
    let start = |name, faults, pause| {
        let lane = Lane {
            rng: chooser(seed, name),
            env: env.clone(),
            timeline: timeline.clone(),
            phases: phases.clone(),
        };
        tokio::spawn(lane.run(Deck::new(faults), pause))
    };
    vec![start("processes", processes, (3.0, 12.0)), start("surroundings", surroundings, (1.0, 6.0))]
}

struct Lane {
    rng: SmallRng,
    env: Arc<TestEnv>,
    timeline: Timeline,
    phases: watch::Receiver<Phase>,
}

impl Lane {
    async fn run(mut self, mut deck: Deck<Fault>, pause: (f64, f64)) -> Result<()> {
        while *self.phases.borrow() == Phase::Faults {
            let pause = seconds(&mut self.rng, pause.0, pause.1);
            self.pass(pause).await;
            let Some(fault) = deck.draw(&mut self.rng) else { return Ok(()) };
            if *self.phases.borrow() != Phase::Faults {
                break;
            }
            let what = name(fault);
            self.timeline.record("fault", &what);
            self.timeline.count(&format!("fault: {what}"));
            self.inject(fault).await.with_context(|| format!("the fault {what}"))?;
            self.timeline.record("fault", &format!("{what} is undone"));
        }
        Ok(())
    }

    /// Waits, but not beyond the end of the faults.
    async fn pass(&mut self, time: Duration) {
        let mut phases = self.phases.clone();
        tokio::select! {
            () = tokio::time::sleep(time) => {}
            _ = phases.wait_for(|phase| *phase != Phase::Faults) => {}
        }
    }

    async fn inject(&mut self, fault: Fault) -> Result<()> {
        let env = self.env.clone();
        match fault {
            Fault::AgentKill => env.kill_agent(&self.timeline).await,
            Fault::AgentRestart => env.restart_agent(&self.timeline).await,
            Fault::RuntimeKill | Fault::RuntimeRestart => self.runtime(fault == Fault::RuntimeKill).await,
            Fault::RegistryDown => self.registry(Match::any(), RegistryFault::ResetAfter(0)).await,
            Fault::RegistryErrors => {
                let code = [500, 503, 429][self.rng.random_range(0..3)];
                self.registry(Match::any(), RegistryFault::status(code)).await
            }
            Fault::RegistryHangs => self.registry(Match::any(), RegistryFault::Hang).await,
            Fault::RegistryStalls => {
                let bytes = self.rng.random_range(0..2 << 20);
                self.registry(Match::layers(), RegistryFault::StallAfter(bytes)).await
            }
            Fault::RegistryCuts => {
                let bytes = self.rng.random_range(0..2 << 20);
                self.registry(Match::layers(), RegistryFault::ResetAfter(bytes)).await
            }
            Fault::RegistrySlow => self.slow().await,
            Fault::StateDiskFull => {
                let _window = self.timeline.open(Broken::StateDisk);
                let _full = env.state_disk.fill(0)?;
                let time = seconds(&mut self.rng, 3.0, 12.0);
                self.pass(time).await;
                Ok(())
            }
            Fault::StateDiskHangs => {
                let _window = self.timeline.open(Broken::StateDisk);
                env.state_disk.freeze(seconds(&mut self.rng, 3.0, 15.0)).await
            }
            Fault::ImageDiskFull => {
                let _window = self.timeline.open(Broken::ImageDisk);
                let left = self.rng.random_range(0..4 << 20);
                let _full = env.image_disk.fill(left)?;
                let time = seconds(&mut self.rng, 3.0, 10.0);
                self.pass(time).await;
                Ok(())
            }
        }
    }

    async fn runtime(&mut self, kill: bool) -> Result<()> {
        let env = self.env.clone();
        let mut runtime = env.runtime.lock().await;
        let _window = self.timeline.open(Broken::Runtime);
        if kill {
            runtime.kill9()?;
        } else {
            runtime.terminate().await?;
        }
        let time = seconds(&mut self.rng, 0.01, 6.0);
        self.pass(time).await;
        runtime.start_again().await.context("the runtime does not start again")
    }

    /// Breaks one of the registries, or both, for some time.
    async fn registry(&mut self, matches: Match, fault: RegistryFault) -> Result<()> {
        let env = self.env.clone();
        let which = self.rng.random_range(0..3);
        let _window = self.timeline.open(Broken::Registry);
        let broken: Vec<_> = env.sources.iter().enumerate().filter(|(n, _)| *n != which).collect();
        let rules: Vec<_> =
            broken.iter().map(|(_, source)| (source, source.proxy.rule(matches.clone(), fault))).collect();
        let time = seconds(&mut self.rng, 0.5, 8.0);
        self.pass(time).await;
        for (source, rule) in rules {
            source.proxy.remove(rule);
        }
        Ok(())
    }

    async fn slow(&mut self) -> Result<()> {
        let env = self.env.clone();
        let _window = self.timeline.open(Broken::Registry);
        let rate = self.rng.random_range(64 << 10..512 << 10);
        let throttle = |rate| env.sources.iter().for_each(|source| source.proxy.throttle(Some(rate)));
        throttle(rate);
        let time = seconds(&mut self.rng, 3.0, 12.0);
        self.pass(time).await;
        throttle(crate::test_env::RATE);
        Ok(())
    }
}
