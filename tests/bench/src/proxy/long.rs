//! A long run: changes, a neighbour that commits, kills, and connections that are checked one by one.
//!
//! Owns: the run and its verdict. In: a subject that is in sync. Out: a row. The endpoints of some Services
//! ([`Moving`]) change all the time; each connection to them must be answered by one of theirs, and by a removed one
//! only while the proxy may not have the change yet.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::endpoints::{Kind as Object, Writer, endpoint, port, service, slice};
use keelson_cluster::net::plan::{self, SERVED};
use keelson_cluster::net::{NetClient, Outcome, Transport};
use keelson_harness::util::eventually;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::churn;
use super::neighbour::Neighbour;
use super::options::Options;
use super::report::{Long, Report};
use super::subject::{self, Kind, Subject};
use super::test_env::{NODE, TestEnv};
use super::usage::Memory;

/// Connections per second.
const CONNECTIONS: u32 = 200;
/// Interval between two changes of one Moving.
const MOVE: Duration = Duration::from_millis(500);
/// Interval between two kills.
const KILL: Duration = Duration::from_secs(60);
/// Time before a killed process is restarted.
const AWAY: Duration = Duration::from_secs(1);
/// Timeout of one request.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time after which a removed endpoint must not answer any more, kills included. For kube-proxy it is only reported.
const STALE: Duration = Duration::from_secs(10);
/// Number of violations that are described.
const WORDS: usize = 20;

/// Sends requests and makes changes for as long as the options say. Everything runs again afterwards.
pub(super) async fn long(
    env: &TestEnv,
    subject: &mut Subject,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    let mut moving = Vec::new();
    for number in 0..SERVED.len() {
        moving.push(Arc::new(Moving::make(&env.writer, number).await?));
    }
    tokio::time::sleep(4 * MOVE).await;
    let neighbour = Neighbour::start(subject.namespace())?;
    let found = Arc::<Mutex<Found>>::default();
    let stop = CancellationToken::new();
    let mut others = JoinSet::new();
    for moving in &moving {
        others.spawn(moving.clone().keep_moving(env.writer.clone(), stop.clone()));
    }
    others.spawn(send_requests(subject.clients(), moving.clone(), found.clone(), stop.clone()));
    let began = Instant::now();
    let killing = kill(subject, options.long);
    let changing = churn::write(env, options.long);
    let (killed, written) = tokio::try_join!(killing, changing)?;
    let lasted = began.elapsed();
    stop.cancel();
    while let Some(ended) = others.join_next().await {
        ended.context("a part of the long run panicked")??;
    }
    let neighbour_rate = neighbour.commits()? as f64 / lasted.as_secs_f64();
    drop(neighbour);
    for moving in &moving {
        moving.remove(&env.writer).await?;
    }
    eventually(subject::PATIENCE, "everything is as before", || async { subject.check_complete(env) })
        .await?;
    let found = std::mem::take(&mut *lock(&found));
    let violations = found.violations(subject.kind);
    for violation in &found.words {
        eprintln!("violation: {violation}");
    }
    report.long.push(Long {
        size: env.size,
        kind: subject.kind,
        lasted,
        written,
        neighbour: neighbour_rate,
        kills: killed.kills,
        memory: killed.memory,
        connections: found.connections,
        wrong: found.wrong,
        failed: found.failed,
        stalest: found.stalest,
    });
    ensure!(violations == 0, "{violations} violations in the long run of {}", subject.kind.name());
    Ok(())
}

/// A Service whose endpoints change all the time; no other endpoints listen at its port.
struct Moving {
    name: String,
    ip: IpAddr,
    port: u16,
    history: Mutex<History>,
}

/// When each endpoint was removed; None while it exists.
type History = BTreeMap<IpAddr, Option<Instant>>;

impl Moving {
    async fn make(writer: &Writer, number: usize) -> Result<Self> {
        let port_of_pods = *SERVED.get(number).context("a port for each")?;
        let name = format!("moving-{number}");
        let made = writer.create(Object::Service, &service(&name, &[port("http", 80)], &json!({}))).await?;
        let ip = made["spec"]["clusterIP"].as_str().context("a Service has a cluster IP")?.parse()?;
        let first = pods(0);
        let objects = slice(&name, "a", &[port("http", port_of_pods)], &endpoints(&first));
        writer.create(Object::Slice, &objects).await?;
        let history = first.into_iter().map(|pod| (pod, None)).collect();
        Ok(Self { name, ip, port: port_of_pods, history: Mutex::new(history) })
    }

    async fn remove(&self, writer: &Writer) -> Result<()> {
        writer.delete(Object::Service, &self.name).await?;
        writer.delete(Object::Slice, &format!("{}-a", self.name)).await
    }

    async fn keep_moving(self: Arc<Self>, writer: Writer, stop: CancellationToken) -> Result<()> {
        let mut random = SmallRng::seed_from_u64(self.port.into());
        let mut turn = interval(MOVE);
        turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(turn.tick()).await.is_some() {
            let next = pods(random.random());
            // An addition counts before it can be seen, a removal after it is written.
            lock(&self.history).extend(next.iter().map(|pod| (*pod, None)));
            let patch = json!({"endpoints": endpoints(&next)});
            writer.patch(Object::Slice, &format!("{}-a", self.name), &patch).await?;
            let now = Instant::now();
            for (pod, removed) in lock(&self.history).iter_mut() {
                if !next.contains(pod) {
                    removed.get_or_insert(now);
                }
            }
        }
        Ok(())
    }

    /// Time between the removal of the endpoint and the start of a connection; None if it never was an endpoint.
    fn staleness(&self, by: SocketAddr, began: Instant) -> Option<Duration> {
        let removed = *lock(&self.history).get(&by.ip()).filter(|_| by.port() == self.port)?;
        Some(removed.map_or(Duration::ZERO, |removed| began.saturating_duration_since(removed)))
    }
}

/// At least one pod, of both nodes.
fn pods(version: u32) -> Vec<IpAddr> {
    let all = (1..=plan::LOCALS).map(plan::local).chain((1..=plan::REMOTES).map(plan::remote));
    let chosen: Vec<IpAddr> = all
        .clone()
        .zip(0..)
        .filter(|(_, bit)| version >> bit & 1 == 1)
        .map(|(pod, _)| pod.v4.into())
        .collect();
    if chosen.is_empty() { all.take(1).map(|pod| pod.v4.into()).collect() } else { chosen }
}

fn endpoints(pods: &[IpAddr]) -> Vec<Value> {
    let local = |pod: &IpAddr| (1..=plan::LOCALS).any(|number| IpAddr::from(plan::local(number).v4) == *pod);
    pods.iter()
        .map(|pod| endpoint(&pod.to_string(), if local(pod) { NODE } else { "elsewhere" }, &json!({})))
        .collect()
}

/// Results of connections.
#[derive(Default)]
struct Found {
    connections: usize,
    /// Answered by a pod that never was an endpoint.
    wrong: usize,
    /// Refused or not answered.
    failed: usize,
    /// Answered by an endpoint removed for longer than [`STALE`].
    stale: usize,
    stalest: Duration,
    words: Vec<String>,
}

impl Found {
    fn violations(&self, kind: Kind) -> usize {
        self.wrong + self.failed + if kind.is_keelson() { self.stale } else { 0 }
    }

    fn note(&mut self, moving: &Moving, outcome: &Outcome, began: Instant) {
        self.connections += 1;
        let staleness = match outcome {
            Outcome::Answered { by, .. } => moving.staleness(*by, began),
            _ => {
                self.failed += 1;
                return self.print(format!("{}: {outcome:?}", moving.name));
            }
        };
        let Some(staleness) = staleness else {
            self.wrong += 1;
            return self.print(format!("{}: {outcome:?} is none of its endpoints", moving.name));
        };
        self.stalest = self.stalest.max(staleness);
        if staleness > STALE {
            self.stale += 1;
            self.print(format!("{}: {outcome:?} was removed {staleness:?} before", moving.name));
        }
    }

    fn print(&mut self, violation: String) {
        if self.words.len() < WORDS {
            self.words.push(violation);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens connections from all clients, in turn.
async fn send_requests(
    clients: Vec<NetClient>,
    moving: Vec<Arc<Moving>>,
    found: Arc<Mutex<Found>>,
    stop: CancellationToken,
) -> Result<()> {
    let mut turn = interval(Duration::from_secs(1) / CONNECTIONS);
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut going = JoinSet::new();
    let ways: Vec<(NetClient, Arc<Moving>)> = clients
        .iter()
        .flat_map(|client| moving.iter().map(move |moving| (client.clone(), moving.clone())))
        .collect();
    for (client, moving) in ways.into_iter().cycle() {
        if stop.run_until_cancelled(turn.tick()).await.is_none() {
            break;
        }
        let found = found.clone();
        going.spawn(async move {
            let began = Instant::now();
            let to = SocketAddr::new(moving.ip, 80);
            let outcome = client.ask(to, Transport::Tcp, PATIENCE).await?;
            lock(&found).note(&moving, &outcome, began);
            anyhow::Ok(())
        });
        while let Some(ended) = going.try_join_next() {
            ended.context("a connection panicked")??;
        }
    }
    while let Some(ended) = going.join_next().await {
        ended.context("a connection panicked")??;
    }
    Ok(())
}

/// The number of kills, and the memory before each.
struct Killed {
    kills: usize,
    memory: Vec<Vec<Memory>>,
}

/// Kills agent and proxy in turn, and restarts them.
async fn kill(subject: &mut Subject, long: Duration) -> Result<Killed> {
    let began = Instant::now();
    let mut killed = Killed { kills: 0, memory: Vec::new() };
    loop {
        let left = long.saturating_sub(began.elapsed());
        tokio::time::sleep(left.min(KILL)).await;
        killed.memory.push(subject.memory()?);
        if left <= KILL {
            return Ok(killed);
        }
        // No kills in the last minute, so that everything runs at the end.
        if left > 2 * KILL {
            subject.kill(killed.kills.is_multiple_of(2))?;
            killed.kills += 1;
            tokio::time::sleep(AWAY).await;
            subject.start().await?;
        }
        if began.elapsed() > 2 * long {
            bail!("the long run takes too long: a process does not start");
        }
    }
}
