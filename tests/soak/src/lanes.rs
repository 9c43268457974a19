//! The schedule of faults.
//!
//! Owns: lanes of faults. In: a seed, and what injects a fault. Out: faults in lanes, so that a process may die while a disk
//! is full.
//!
//! In a lane one fault follows the other, every fault once before one is repeated. Each is undone before its lane continues or
//! ends. A lane pauses while no faults are wanted, and continues with the faults that are left.

use crate::Phase;
use crate::deck::{Deck, chooser, seconds};
use crate::timeline::Timeline;
use anyhow::{Context as _, Result};
use clap::ValueEnum;
use rand::rngs::SmallRng;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// A kind of fault. The pulls have those up to the image disk, the whole node those with `*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Fault {
    /// * Kill the agent (SIGKILL) and start it
    AgentKill,
    /// * Restart the agent (planned restart)
    AgentRestart,
    /// * Kill the runtime (SIGKILL) and start it
    RuntimeKill,
    /// * Stop the runtime (SIGTERM) and start it
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
    /// * Fill the disk of the agent's state
    StateDiskFull,
    /// * Block the disk of the agent's state
    StateDiskHangs,
    /// Fill the disk of the runtime's images
    ImageDiskFull,
    /// * Replace the agent by the former version, and back
    AgentFormer,
    /// * Kill the proxy (SIGKILL); the kubelet starts it
    ProxyKill,
    /// * Delete the proxy's pod
    ProxyRestart,
    /// * Replace the proxy's image by the former version, and back
    ProxyFormer,
    /// * Let a proxy with backend iptables take over, and back
    ProxyBackend,
    /// * Kill the kubelet (SIGKILL) and start it
    KubeletKill,
    /// * Stop the kubelet (SIGTERM) and start it
    KubeletRestart,
    /// * Kill the API server (SIGKILL) and start it
    ApiKill,
    /// * Stop the API server (SIGTERM) and start it
    ApiRestart,
    /// * Stop the API server with SIGSTOP, and continue it
    ApiHangs,
    /// * Drop all packets to the API server
    ApiCut,
    /// * Drop packets to the API server beyond a rate
    ApiSlow,
    /// * Remove rules of the proxy behind its back
    RulesRemoved,
}

pub(crate) fn name(fault: Fault) -> String {
    fault.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// What a lane injects its faults into.
pub(crate) trait Inject: Send + Sync + 'static {
    /// Injects a fault, and undoes it. `lane` has random choices and pauses.
    fn inject(&self, fault: Fault, lane: &mut Lane) -> impl Future<Output = Result<()>> + Send;
}

/// Name, faults and pause between faults in seconds.
pub(crate) type LaneSpec<'a> = (&'static str, &'a [Fault], (f64, f64));

/// Random choices and pauses of one lane.
pub(crate) struct Lane {
    pub(crate) rng: SmallRng,
    pub(crate) timeline: Timeline,
    phases: watch::Receiver<Phase>,
    deck: Deck<Fault>,
    pause: (f64, f64),
}

impl Lane {
    /// `only`: the chosen faults; empty for all.
    pub(crate) fn new(
        (name, faults, pause): LaneSpec<'_>,
        only: &[Fault],
        seed: u64,
        timeline: &Timeline,
        phases: &watch::Receiver<Phase>,
    ) -> Self {
        let chosen = faults.iter().filter(|fault| only.is_empty() || only.contains(fault)).copied();
        Self {
            rng: chooser(seed, name),
            timeline: timeline.clone(),
            phases: phases.clone(),
            deck: Deck::new(chosen.collect()),
            pause,
        }
    }

    /// Injects faults as long as the phase wants them, except those that `left_out` names. Returns the lane, to continue later.
    pub(crate) async fn run<I: Inject>(mut self, target: Arc<I>, left_out: Vec<Fault>) -> Result<Self> {
        while *self.phases.borrow() == Phase::Faults {
            let pause = self.seconds(self.pause.0, self.pause.1);
            self.pass(pause).await;
            let Some(fault) = self.deck.draw(&mut self.rng) else { break };
            if *self.phases.borrow() != Phase::Faults {
                break;
            }
            if left_out.contains(&fault) {
                continue;
            }
            let what = name(fault);
            self.timeline.record("fault", &what);
            self.timeline.count(&format!("fault: {what}"));
            target.inject(fault, &mut self).await.with_context(|| format!("the fault {what}"))?;
            self.timeline.record("fault", &format!("{what} is undone"));
        }
        Ok(self)
    }

    pub(crate) fn seconds(&mut self, from: f64, to: f64) -> Duration {
        seconds(&mut self.rng, from, to)
    }

    /// Waits, but not beyond the end of the faults.
    pub(crate) async fn pass(&mut self, time: Duration) {
        let mut phases = self.phases.clone();
        tokio::select! {
            () = tokio::time::sleep(time) => {}
            _ = phases.wait_for(|phase| *phase != Phase::Faults) => {}
        }
    }

    pub(crate) async fn pass_random(&mut self, from: f64, to: f64) {
        let time = self.seconds(from, to);
        self.pass(time).await;
    }
}
