//! Owns: the work of the cluster: Deployments and Services that come, change and go at random, beside some that never change. In: a
//! seed. Out: writes to the API server as long as work is wanted; what must be there when it ends.

use super::env::NodeEnv;
use crate::Phase;
use crate::deck::{chooser, seconds};
use crate::timeline::Timeline;
use anyhow::{Context as _, Result};
use keelson_cluster::endpoints::{RandomWriter, Writer};
use keelson_cluster::one_node::NODE;
use keelson_harness::images::{ImageSpec, LayerSpec};
use keelson_harness::peers;
use keelson_harness::util::PATIENCE;
use rand::RngExt as _;
use rand::rngs::SmallRng;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Deployments that change.
const MOVING: usize = 4;
/// The one that always has two servers or more, so that a client must not notice changes.
const GRACEFUL: usize = 0;
/// Pods of one of them.
const MOST_REPLICAS: u32 = 4;
/// Writes of Services and slices per second: always, and in a burst.
const WRITES: u32 = 15;
const BURST_WRITES: u32 = 150;

/// What never changes: servers behind Services of several kinds, and a client. Unready servers stay endpoints, so that nothing but
/// the proxy can interrupt connections to them.
const STEADY: &str = include_str!("steady.yaml");
const MOVING_POD: &str = include_str!("moving.yaml");
const MOVING_SERVICE: &str = include_str!("moving-service.yaml");

/// Applies what never changes, and waits for it.
pub(super) async fn start_steady(env: &NodeEnv) -> Result<()> {
    env.admin.apply(&STEADY.replace("IMAGE", &env.operator.image("app"))).await?;
    for name in ["deploy/steady", "deploy/client"] {
        env.operator.rolled_out("default", name).await?;
    }
    let patch = r#"{"spec":{"publishNotReadyAddresses":true}}"#;
    let patch = ["-n", "kube-system", "patch", "service", "kube-dns", "--type", "merge", "-p", patch];
    env.operator.kubectl(&patch).await?.success().map(drop)
}

pub(super) struct Workload {
    mover: JoinHandle<Result<()>>,
    burster: JoinHandle<Result<()>>,
    writer: RandomWriter,
}

impl Workload {
    pub(super) async fn start(
        env: &Arc<NodeEnv>,
        timeline: &Timeline,
        seed: u64,
        phases: &watch::Receiver<Phase>,
    ) -> Result<Self> {
        let writer = Writer::new(&env.admin, "churn").await?;
        let burst_writer = Writer::new(&env.admin, "burst").await?;
        let mut mover = Mover {
            env: env.clone(),
            timeline: timeline.clone(),
            phases: phases.clone(),
            rng: chooser(seed, "deployments"),
            images: 0,
        };
        for n in 0..MOVING {
            mover.try_apply(n).await?;
        }
        for n in 0..MOVING {
            env.operator.rolled_out("default", &format!("deploy/moving-{n}")).await?;
        }
        Ok(Self {
            mover: tokio::spawn(mover.run()),
            burster: tokio::spawn(bursts(burst_writer, timeline.clone(), seed, phases.clone())),
            writer: RandomWriter::start(&writer, NODE, seed, WRITES),
        })
    }

    /// Nothing is written while the guard lives. (Deployments and bursts stop by themselves when the faults do.)
    pub(super) async fn pause(&self) -> Result<keelson_cluster::endpoints::Paused> {
        self.writer.pause().await
    }

    /// Returns the number of random writes.
    pub(super) async fn stop(self) -> Result<usize> {
        self.mover.await.context("the work panicked")??;
        self.burster.await.context("the bursts panicked")??;
        let writes = self.writer.writes();
        drop(self.writer);
        Ok(writes)
    }
}

/// Waits until there are faults again; false when the run is over.
async fn is_wanted(phases: &mut watch::Receiver<Phase>) -> bool {
    phases.wait_for(|phase| *phase != Phase::Settle).await.is_ok_and(|phase| *phase == Phase::Faults)
}

/// Waits, but not beyond the end of the faults.
async fn pass(phases: &watch::Receiver<Phase>, time: Duration) {
    let mut phases = phases.clone();
    tokio::select! {
        () = tokio::time::sleep(time) => {}
        _ = phases.wait_for(|phase| *phase != Phase::Faults) => {}
    }
}

/// Now and then many changes in a few seconds.
async fn bursts(
    writer: Writer,
    timeline: Timeline,
    seed: u64,
    mut phases: watch::Receiver<Phase>,
) -> Result<()> {
    let mut rng = chooser(seed, "bursts");
    while is_wanted(&mut phases).await {
        pass(&phases, seconds(&mut rng, 10.0, 40.0)).await;
        if *phases.borrow() != Phase::Faults {
            continue;
        }
        let burst = RandomWriter::start(&writer, NODE, rng.random(), BURST_WRITES);
        pass(&phases, seconds(&mut rng, 2.0, 8.0)).await;
        // Ends after the write at hand, which may wait for the API server.
        match tokio::time::timeout(2 * PATIENCE, burst.stop()).await {
            Ok(Ok(writes)) => timeline.record("work", &format!("a burst of {writes} writes")),
            Ok(Err(error)) => timeline.violation("the work goes on", &format!("{error:#}")),
            Err(_) => timeline.record("work", "a burst that does not end"),
        }
        timeline.count("work: burst");
    }
    Ok(())
}

struct Mover {
    env: Arc<NodeEnv>,
    timeline: Timeline,
    phases: watch::Receiver<Phase>,
    rng: SmallRng,
    /// Images made so far.
    images: usize,
}

impl Mover {
    async fn run(mut self) -> Result<()> {
        while is_wanted(&mut self.phases).await {
            let n = self.rng.random_range(0..MOVING);
            let (what, done) = self.act(n).await;
            self.timeline.count(&format!("work: {what}"));
            if let Err(error) = done {
                // The API server may be broken, or the object gone.
                let error = format!("{error:#}");
                self.timeline
                    .record("work", &format!("{what} moving-{n}: {}", error.lines().next().unwrap_or("")));
                self.timeline.count("work: refused");
            }
            let burst = self.rng.random_bool(0.2);
            let pause = if burst { 0.1..0.5 } else { 1.5..8.0 };
            pass(&self.phases, seconds(&mut self.rng, pause.start, pause.end)).await;
        }
        Ok(())
    }

    async fn act(&mut self, n: usize) -> (&'static str, Result<()>) {
        let name = format!("moving-{n}");
        if n == GRACEFUL {
            return match self.rng.random_bool(0.3) {
                true => ("new image", self.roll_out(&name).await),
                false => ("scale", self.scale(&name, 2).await),
            };
        }
        match self.rng.random_range(0..20) {
            0..7 => ("scale", self.scale(&name, 0).await),
            7..10 => ("new image", self.roll_out(&name).await),
            10..12 => {
                let label = format!("app={name}");
                ("delete pods", self.kubectl(&["delete", "pods", "-l", &label, "--wait=false"]).await)
            }
            12 => ("delete deployment", self.kubectl(&["delete", "deploy", &name, "--wait=false"]).await),
            13 => ("delete service", self.kubectl(&["delete", "service", &name, "--wait=false"]).await),
            14 | 15 => {
                let kind = ["ClusterIP", "NodePort", "LoadBalancer"][self.rng.random_range(0..3)];
                let affinity = ["None", "ClientIP"][self.rng.random_range(0..2)];
                let patch = format!(r#"{{"spec":{{"type":"{kind}","sessionAffinity":"{affinity}"}}}}"#);
                (
                    "change service",
                    self.kubectl(&["patch", "service", &name, "--type", "merge", "-p", &patch]).await,
                )
            }
            _ => ("apply", self.try_apply(n).await),
        }
    }

    async fn kubectl(&self, args: &[&str]) -> Result<()> {
        let done = tokio::time::timeout(Duration::from_secs(30), self.env.operator.kubectl(args)).await;
        done.context("no answer in time")??.success().map(drop)
    }

    async fn scale(&mut self, name: &str, least: u32) -> Result<()> {
        let replicas = format!("--replicas={}", self.rng.random_range(least..=MOST_REPLICAS));
        self.kubectl(&["scale", &format!("deploy/{name}"), &replicas]).await
    }

    /// Pushes an image that no node has, and has the Deployment run it.
    async fn roll_out(&mut self, name: &str) -> Result<()> {
        self.images += 1;
        let mut image = ImageSpec::program(&format!("apps/{}", self.images), &peers::cri_driver()?, &[]);
        let bytes = self.rng.random_range(64 << 10..2 << 20);
        image.layers.push(LayerSpec::random(bytes, self.rng.random()));
        self.env.operator.push(&image).await?;
        let set = format!("server={}", self.env.operator.image(&image.repo));
        self.kubectl(&["set", "image", &format!("deploy/{name}"), &set]).await
    }

    async fn try_apply(&mut self, n: usize) -> Result<()> {
        let replicas = self.rng.random_range(2..=MOST_REPLICAS).to_string();
        let of = |text: &str| {
            let text = text.replace("NAME", &format!("moving-{n}")).replace("REPLICAS", &replicas);
            text.replace("IMAGE", &self.env.operator.image("app"))
        };
        let both = format!("{}---\n{}", of(MOVING_POD), of(MOVING_SERVICE));
        let done = tokio::time::timeout(Duration::from_secs(30), self.env.admin.apply(&both)).await;
        done.context("no answer in time")?.map(drop)
    }
}
