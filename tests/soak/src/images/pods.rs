//! Owns: pods, whose images a stock kubelet pulls. In: wants. Out: arrivals, one for each pod that runs.

use crate::Phase;
use crate::deck::{chooser, seconds};
use crate::images::supply::{Supply, Want};
use crate::images::test_env::{NODE, TestEnv};
use crate::timeline::Timeline;
use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use rand::RngExt as _;
use rand::rngs::SmallRng;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Pods that start at the same time.
const WORKERS: usize = 2;

/// Starts workers that create pods until the run is over.
pub(crate) fn start(
    supply: &Supply,
    env: &Arc<TestEnv>,
    timeline: &Timeline,
    seed: u64,
    phases: &watch::Receiver<Phase>,
) -> Vec<JoinHandle<Result<()>>> {
    let start = |n: usize| {
        let user = User {
            name: n,
            made: 0,
            rng: chooser(seed, &format!("pods {n}")),
            supply: supply.clone(),
            env: env.clone(),
            timeline: timeline.clone(),
            phases: phases.clone(),
        };
        tokio::spawn(user.run())
    };
    (0..WORKERS).map(start).collect()
}

struct User {
    name: usize,
    made: usize,
    rng: SmallRng,
    supply: Supply,
    env: Arc<TestEnv>,
    timeline: Timeline,
    phases: watch::Receiver<Phase>,
}

impl User {
    fn phase(&self) -> Phase {
        *self.phases.borrow()
    }

    async fn run(mut self) -> Result<()> {
        while self.phase() != Phase::Done {
            match self.supply.take_pod() {
                Some(want) => self.serve(&want).await?,
                None => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
        Ok(())
    }

    /// Creates pods of this image until one runs. A new pod each time, because the kubelet's back-off is per pod.
    async fn serve(&mut self, want: &Want) -> Result<()> {
        while self.phase() != Phase::Done {
            self.made += 1;
            let pod = format!("soak-{}-{}", self.name, self.made);
            let patience = match self.phase() {
                // Some are deleted while their image is being pulled.
                Phase::Faults if self.rng.random_bool(0.1) => seconds(&mut self.rng, 0.5, 3.0),
                Phase::Faults => Duration::from_secs(30),
                Phase::Settle | Phase::Done => Duration::from_secs(60),
            };
            let always = self.rng.random_bool(0.5);
            let runs = self.runs(&pod, &want.name, always, patience).await;
            let deleted = self.env.cluster.admin.delete_pod("default", &pod).await;
            if let Err(error) = deleted {
                self.timeline.record("pod", &format!("cannot delete {pod}: {error:#}"));
            }
            match runs {
                Ok(true) => {
                    self.timeline.count("pod: ran");
                    return self.supply.arrived(want).await;
                }
                Ok(false) => self.timeline.count("pod: deleted before it ran"),
                Err(error) => self.timeline.record("pod", &format!("{pod}: {error:#}")),
            }
        }
        Ok(())
    }

    /// Creates a pod and returns whether it runs within `patience`.
    async fn runs(&self, name: &str, image: &str, always: bool, patience: Duration) -> Result<bool> {
        let pods = self.env.cluster.admin.pods("default");
        let policy = if always { "Always" } else { "IfNotPresent" };
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {
                "hostNetwork": true, "automountServiceAccountToken": false, "nodeName": NODE,
                "tolerations": [{"operator": "Exists"}], "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "app", "image": image, "imagePullPolicy": policy}],
            },
        }))?;
        pods.create(&PostParams::default(), &pod).await.context("cannot create the pod")?;
        let (began, mut last) = (Instant::now(), String::new());
        while began.elapsed() < patience && self.phase() != Phase::Done {
            let status = pods.get(name).await.context("cannot get the pod")?.status.unwrap_or_default();
            if status.phase.as_deref() == Some("Running") {
                return Ok(true);
            }
            let states = status.container_statuses.unwrap_or_default();
            let reason = states.first().and_then(|one| one.state.as_ref()?.waiting.as_ref()?.reason.clone());
            let reason = reason.unwrap_or_default();
            if reason != last {
                self.timeline.count(&format!("pod: waits, {reason}"));
                last = reason;
            }
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        self.timeline.record("pod", &format!("{name} ({image}) does not run after {patience:?}: {last}"));
        Ok(false)
    }
}
