//! From a change at the API server to its consumer.
//!
//! Owns: the measurement. In: an agent that serves all Services, a consumer, single changes. Out: a table. The figure
//! is the delay of the agent's consumer against a plain watch of the API server in this process, which is what the
//! consumer would have without the agent.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use futures_util::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use keelson_client::{
    Api, BoxError, CancellationToken, Client, DiffStore, Handlers, Options, Position, ServiceEndpoints,
    ServiceName,
};
use keelson_cluster::endpoints::{Kind, Writer, bulk, port};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::util::eventually;
use kube::api::{ListParams, WatchEvent, WatchParams};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::json;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

use super::MANY;
use super::test_env::{PATIENCE, Role, TestEnv, metric, serves};
use crate::figures::{self, Key, Measured};
use crate::quantile;

/// Measured changes of each kind.
const SAMPLES: u16 = 400;
/// Range of the interval between two changes, in milliseconds.
const PAUSE: std::ops::Range<u64> = 60..140;
/// Changes of other Services per second meanwhile.
const BACKGROUND: u32 = 20;
/// Measured changes are identified by their port number, from this on; other changes have smaller ones.
const FIRST: u16 = 20_000;

pub(super) async fn latency(env: &TestEnv, services: usize) -> Result<()> {
    let mut agent = env.agent(Role::Companion, Settings::new().set("endpoints.watch", "always"))?;
    agent.start_live().await?;
    serves(&agent, services).await?;
    println!(
        "| a change among {services} Services: beyond a plain watch event | p50 | p99 | most | write to disk, mean | target (p99) |"
    );
    println!("|---|---|---|---|---|---|");
    // Other numbers in each run: writing an existing number is no change.
    let mut firsts = (FIRST..).step_by(usize::from(SAMPLES));
    for (api, name) in [(Api::Watch, "Watch"), (Api::Next, "Next")] {
        for background in [false, true] {
            let first = firsts.next().context("there are ports enough")?;
            let run = Run { env, agent: &agent, services, api, background, first };
            let found = run.measure().await?;
            let busy = if background { format!(", {BACKGROUND} others a second") } else { String::new() };
            let target = if api == Api::Watch { "10 ms" } else { "" };
            found.row(&format!("`{name}`{busy}"), target);
            if (api, background, services) == (Api::Watch, false, MANY) {
                figures::record(&[Measured::alone(Key::ChangeToClient, found.milliseconds(0.99))])?;
            }
        }
    }
    env.end(agent).await
}

/// When a change was seen, by its number.
#[derive(Default)]
struct Seen {
    watched: HashMap<u16, Instant>,
    delivered: HashMap<u16, Instant>,
    /// Number of complete states that the consumer received.
    states: usize,
}

type SharedSeen = Arc<Mutex<Seen>>;

fn lock(seen: &SharedSeen) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Run<'a> {
    env: &'a TestEnv,
    agent: &'a Agent,
    services: usize,
    api: Api,
    background: bool,
    first: u16,
}

impl Run<'_> {
    async fn measure(&self) -> Result<Found> {
        let seen = SharedSeen::default();
        let watch = watch(self.env, seen.clone()).await?;
        let consumer = Consumer::start(self.agent, self.api, seen.clone())?;
        eventually(PATIENCE, "the consumer has the first state", || async {
            ensure!(lock(&seen).states > 0, "it has none");
            Ok(())
        })
        .await?;
        let writer = Writer::new(&self.env.cluster.admin, bulk::NAMESPACE).await?;
        let stop = Arc::new(Notify::new());
        let others = self
            .background
            .then(|| tokio::spawn(write_background(writer.clone(), self.services, stop.clone())));
        let before = self.written().await?;
        let mut random = SmallRng::seed_from_u64(2);
        for number in self.first..self.first + SAMPLES {
            tokio::time::sleep(Duration::from_millis(random.random_range(PAUSE))).await;
            // Background changes use the second half.
            change(&writer, random.random_range(0..self.services / 2), number).await?;
        }
        eventually(PATIENCE, "the consumer has all changes", || async {
            // Of two changes of a Service the first may be missed, but not the last of all.
            let last = self.first + SAMPLES - 1;
            let seen = lock(&seen);
            ensure!(seen.delivered.contains_key(&last) && seen.watched.contains_key(&last), "it has not");
            Ok(())
        })
        .await?;
        let after = self.written().await?;
        stop.notify_one();
        if let Some(others) = others {
            others.await.context("the other writer panicked")??;
        }
        ensure!(!watch.is_finished(), "the plain watch ended: {:?}", watch.await);
        watch.abort();
        drop(consumer);
        let seen = lock(&seen);
        Found::new(&seen, (after.0 - before.0) / (after.1 - before.1).max(1.0))
    }

    /// Total seconds of state writes, and their number.
    async fn written(&self) -> Result<(f64, f64)> {
        let name = "keelson_endpoints_persist_duration_seconds";
        Ok((
            metric(self.agent, &format!("{name}_sum")).await?,
            metric(self.agent, &format!("{name}_count")).await?,
        ))
    }
}

async fn change(writer: &Writer, service: usize, number: u16) -> Result<()> {
    let name = format!("{}-a", bulk::name(service));
    writer.patch(Kind::Slice, &name, &json!({"ports": [port("http", number)]})).await.map(drop)
}

async fn write_background(writer: Writer, services: usize, stop: Arc<Notify>) -> Result<()> {
    let mut random = SmallRng::seed_from_u64(3);
    let mut turn = tokio::time::interval(Duration::from_secs(1) / BACKGROUND);
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.notified() => return Ok(()),
            _ = turn.tick() => {}
        }
        let number = random.random_range(1024..FIRST);
        change(&writer, random.random_range(services / 2..services), number).await?;
    }
}

/// A plain watch: JSON, with the client library of Kubernetes.
async fn watch(env: &TestEnv, seen: SharedSeen) -> Result<JoinHandle<Result<()>>> {
    let api: kube::Api<EndpointSlice> = kube::Api::namespaced(env.cluster.admin.client(), bulk::NAMESPACE);
    let listed = api.list(&ListParams::default().limit(1)).await.context("cannot list")?;
    let version = listed.metadata.resource_version.context("a list has a version")?;
    Ok(tokio::spawn(async move {
        let mut events = api.watch(&WatchParams::default().timeout(290), &version).await?.boxed();
        while let Some(event) = events.try_next().await? {
            let at = Instant::now();
            if let WatchEvent::Added(slice) | WatchEvent::Modified(slice) = event {
                let ports = slice.ports.unwrap_or_default();
                if let Some(number) = ports.iter().find_map(|port| measured(port.port?)) {
                    lock(&seen).watched.entry(number).or_insert(at);
                }
            }
        }
        bail!("the API server ended it")
    }))
}

/// The number of a measured change.
fn measured(port: i32) -> Option<u16> {
    u16::try_from(port).ok().filter(|number| *number >= FIRST)
}

/// Records when each change is part of a complete state.
struct Collector {
    seen: SharedSeen,
    numbers: Vec<u16>,
}

impl Handlers for Collector {
    fn delete(&mut self, _: &ServiceName) {}

    fn set(&mut self, _: &ServiceName, service: ServiceEndpoints) {
        let port = service.endpoints.first().and_then(|endpoint| endpoint.ports.first());
        self.numbers.extend(port.and_then(|port| measured(port.port)));
    }

    async fn sync(&mut self, _: &Position) -> Result<(), BoxError> {
        let at = Instant::now();
        let mut seen = lock(&self.seen);
        seen.states += 1;
        // The first state holds no changes of this run.
        if seen.states > 1 {
            for number in self.numbers.drain(..) {
                seen.delivered.entry(number).or_insert(at);
            }
        }
        self.numbers.clear();
        Ok(())
    }
}

/// A consumer of the agent. Disconnects on drop.
struct Consumer(CancellationToken);

impl Consumer {
    fn start(agent: &Agent, api: Api, seen: SharedSeen) -> Result<Self> {
        let target = agent.endpoints_target().parse().context("no target")?;
        let mut client = Client::new(Options { target, api, ..Options::default() });
        let cancel = client.cancellation();
        let mut collector = Collector { seen, numbers: Vec::new() };
        tokio::spawn(async move {
            if api == Api::Watch {
                client.run(&mut collector).await;
                return;
            }
            let mut store = DiffStore::new(Vec::new());
            while let Some(state) = client.next().await {
                if let Err(error) = store.deliver(state, &mut collector).await {
                    eprintln!("a state that cannot be compared: {error}");
                }
            }
        });
        Ok(Self(cancel))
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

struct Found {
    /// Milliseconds, sorted; negative if the consumer was first.
    beyond: Vec<f64>,
    /// Seconds per write.
    written: f64,
}

impl Found {
    fn new(seen: &Seen, written: f64) -> Result<Self> {
        let mut beyond: Vec<f64> = Vec::new();
        for (number, watched) in &seen.watched {
            let Some(delivered) = seen.delivered.get(number) else { continue };
            let after = delivered.saturating_duration_since(*watched).as_secs_f64();
            let before = watched.saturating_duration_since(*delivered).as_secs_f64();
            beyond.push((after - before) * 1e3);
        }
        // A change that another one of the same Service replaced is never seen.
        ensure!(beyond.len() * 20 >= usize::from(SAMPLES) * 19, "only {} changes were seen", beyond.len());
        beyond.sort_unstable_by(f64::total_cmp);
        eprintln!("{} changes were measured, {} states came", beyond.len(), seen.states);
        Ok(Self { beyond, written })
    }

    fn milliseconds(&self, q: f64) -> f64 {
        quantile(&self.beyond, q).unwrap_or_default()
    }

    fn row(&self, what: &str, target: &str) {
        let ms = |q: f64| self.milliseconds(q);
        println!(
            "| {what} | {:.1} ms | {:.1} ms | {:.1} ms | {:.2} ms | {target} |",
            ms(0.5),
            ms(0.99),
            ms(1.0),
            self.written * 1e3
        );
    }
}
