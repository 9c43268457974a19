//! Owns: the faults of the soak of pulls. In: a lane's choices. Out: a fault, undone.
//!
//! One lane breaks processes: the agent is killed or restarted, the runtime killed or restarted. The other breaks their
//! environment: the registries and the disks.

use super::test_env::TestEnv;
use crate::lanes::{Fault, Inject, Lane, LaneSpec};
use crate::timeline::Broken;
use anyhow::{Context as _, Result, bail};
use keelson_harness::registry_proxy::{Fault as RegistryFault, Match};
use rand::RngExt as _;

pub(crate) const LANES: [LaneSpec<'static>; 2] = [
    (
        "processes",
        &[Fault::AgentKill, Fault::AgentRestart, Fault::RuntimeKill, Fault::RuntimeRestart],
        (3.0, 12.0),
    ),
    (
        "surroundings",
        &[
            Fault::RegistryDown,
            Fault::RegistryErrors,
            Fault::RegistryHangs,
            Fault::RegistryStalls,
            Fault::RegistryCuts,
            Fault::RegistrySlow,
            Fault::StateDiskFull,
            Fault::StateDiskHangs,
            Fault::ImageDiskFull,
        ],
        (1.0, 6.0),
    ),
];

impl Inject for TestEnv {
    async fn inject(&self, fault: Fault, lane: &mut Lane) -> Result<()> {
        let timeline = lane.timeline.clone();
        match fault {
            Fault::AgentKill => self.agent.kill(&timeline).await,
            Fault::AgentRestart => self.agent.restart(&timeline).await,
            Fault::RuntimeKill | Fault::RuntimeRestart => {
                self.runtime(fault == Fault::RuntimeKill, lane).await
            }
            Fault::RegistryDown => self.registry(Match::any(), RegistryFault::ResetAfter(0), lane).await,
            Fault::RegistryErrors => {
                let code = [500, 503, 429][lane.rng.random_range(0..3)];
                self.registry(Match::any(), RegistryFault::status(code), lane).await
            }
            Fault::RegistryHangs => self.registry(Match::any(), RegistryFault::Hang, lane).await,
            Fault::RegistryStalls => {
                let bytes = lane.rng.random_range(0..2 << 20);
                self.registry(Match::layers(), RegistryFault::StallAfter(bytes), lane).await
            }
            Fault::RegistryCuts => {
                let bytes = lane.rng.random_range(0..2 << 20);
                self.registry(Match::layers(), RegistryFault::ResetAfter(bytes), lane).await
            }
            Fault::RegistrySlow => self.slow(lane).await,
            Fault::StateDiskFull => self.agent.fill_state_disk(lane).await,
            Fault::StateDiskHangs => self.agent.freeze_state_disk(lane).await,
            Fault::ImageDiskFull => {
                let _window = timeline.open(Broken::ImageDisk);
                let left = lane.rng.random_range(0..4 << 20);
                let _full = self.image_disk.fill(left)?;
                lane.pass_random(3.0, 10.0).await;
                Ok(())
            }
            other => bail!("{other:?} is a fault of the whole node"),
        }
    }
}

impl TestEnv {
    async fn runtime(&self, kill: bool, lane: &mut Lane) -> Result<()> {
        let mut runtime = self.runtime.lock().await;
        let _window = lane.timeline.open(Broken::Runtime);
        if kill {
            runtime.kill9()?;
        } else {
            runtime.terminate().await?;
        }
        lane.pass_random(0.01, 6.0).await;
        runtime.start_again().await.context("the runtime does not start again")
    }

    /// Breaks one of the registries, or both, for some time.
    async fn registry(&self, matches: Match, fault: RegistryFault, lane: &mut Lane) -> Result<()> {
        let which = lane.rng.random_range(0..3);
        let _window = lane.timeline.open(Broken::Registry);
        let broken: Vec<_> = self.sources.iter().enumerate().filter(|(n, _)| *n != which).collect();
        let rules: Vec<_> =
            broken.iter().map(|(_, source)| (source, source.proxy.rule(matches.clone(), fault))).collect();
        lane.pass_random(0.5, 8.0).await;
        for (source, rule) in rules {
            source.proxy.remove(rule);
        }
        Ok(())
    }

    async fn slow(&self, lane: &mut Lane) -> Result<()> {
        let _window = lane.timeline.open(Broken::Registry);
        let rate = lane.rng.random_range(64 << 10..512 << 10);
        let throttle = |rate| self.sources.iter().for_each(|source| source.proxy.throttle(Some(rate)));
        throttle(rate);
        lane.pass_random(3.0, 12.0).await;
        throttle(super::test_env::RATE);
        Ok(())
    }
}
