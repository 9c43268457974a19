//! How many events of the API server become a revision.
//!
//! Owns: the measurement. In: a thousand Services with 1,500 pods, whose slices change as controllers change them;
//! agents side by side with different minimum intervals between revisions. Out: a table.

use std::time::{Duration, Instant};

use anyhow::Result;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use keelson_cluster::endpoints::{Kind, Writer, endpoint, port, service, slice};
use keelson_harness::agent::{Agent, Settings};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

use super::test_env::{NODES, Role, TestEnv, metric, serves};

const SERVICES: usize = 1_000;
/// Every second Service has two, the others one.
const PODS: usize = 1_500;
/// Minimum interval between two revisions: the agent's default, a value in between, and kube-proxy's default.
const INTERVALS: [&str; 3] = ["10ms", "100ms", "1s"];
/// Number of concurrent writers when writing at full speed.
const WRITERS: usize = 32;
/// Pods that are replaced one by one, and events per second.
const STEADY: usize = 100;
const A_SECOND: u32 = 20;
/// Number of writes that do not change endpoints.
const IDLE: usize = 1_000;
/// Time after which every agent has published the present state.
const SETTLE: Duration = Duration::from_secs(4);

pub(super) async fn revisions(env: &TestEnv) -> Result<()> {
    let writer = Writer::new(&env.cluster.admin, "rollout").await?;
    println!(
        "| {SERVICES} Services, {PODS} pods | source events | a second | revisions at 10 ms | at 100 ms | at 1 s |"
    );
    println!("|---|---|---|---|---|---|");
    let agents = start(env, 1).await?;
    let rows = [
        ("all is made, as fast as the API server takes it", Way::Make),
        ("every pod is replaced, as fast as the API server takes it", Way::ReplaceAll),
        ("pods are replaced, 20 events a second", Way::Replace),
        ("annotations of slices and Services change", Way::Annotate),
    ];
    for (what, way) in rows {
        let (before, begun) = (counts(&agents).await?, Instant::now());
        write(&writer, way).await?;
        let took = begun.elapsed();
        tokio::time::sleep(SETTLE).await;
        row(what, &before, &counts(&agents).await?, Some(took));
    }
    for agent in agents {
        env.end(agent).await?;
    }
    let nothing = vec![(0.0, 0.0); INTERVALS.len()];
    let agents = start(env, SERVICES).await?;
    row("an agent starts during the changes", &nothing, &counts(&agents).await?, None);
    for agent in agents {
        env.end(agent).await?;
    }
    at_once(SERVICES, move |number| {
        let writer = writer.clone();
        async move {
            writer.delete(Kind::Slice, &format!("{}-a", name(number))).await?;
            writer.delete(Kind::Service, &name(number)).await
        }
    })
    .await
}

async fn start(env: &TestEnv, services: usize) -> Result<Vec<Agent>> {
    let mut agents = Vec::new();
    for (node, interval) in NODES.into_iter().zip(INTERVALS) {
        let settings =
            Settings::new().set("endpoints.min_interval", interval).set("endpoints.watch", "always");
        let mut agent = env.agent_of(node, Role::Companion, settings)?;
        agent.start_live().await?;
        agents.push(agent);
    }
    for agent in &agents {
        serves(agent, services).await?;
    }
    Ok(agents)
}

/// Events and revisions of each agent so far.
async fn counts(agents: &[Agent]) -> Result<Vec<(f64, f64)>> {
    let mut counts = Vec::new();
    for agent in agents {
        let mut events = 0.0;
        for resource in ["services", "endpointslices"] {
            let name = format!("keelson_endpoints_source_events_total{{resource=\"{resource}\"}}");
            events += metric(agent, &name).await?;
        }
        counts.push((events, metric(agent, "keelson_endpoints_revisions_total").await?));
    }
    Ok(counts)
}

fn row(what: &str, before: &[(f64, f64)], after: &[(f64, f64)], took: Option<Duration>) {
    let of_each: Vec<_> = before.iter().zip(after).map(|(b, a)| (a.0 - b.0, a.1 - b.1)).collect();
    let events = of_each.first().map_or(0.0, |(events, _)| *events);
    let shares: Vec<_> = of_each
        .iter()
        .map(|(events, revisions)| format!("{revisions} ({:.2} %)", revisions / events.max(1.0) * 100.0))
        .collect();
    let a_second = took.map_or_else(String::new, |took| format!("{:.0}", events / took.as_secs_f64()));
    println!("| {what} | {events} | {a_second} | {} |", shares.join(" | "));
}

#[derive(Clone, Copy)]
enum Way {
    Make,
    ReplaceAll,
    Replace,
    Annotate,
}

async fn write(writer: &Writer, way: Way) -> Result<()> {
    let of = writer.clone();
    match way {
        Way::Make => at_once(SERVICES, move |number| create_service(of.clone(), number)).await,
        Way::ReplaceAll => at_once(SERVICES, move |number| replaced(of.clone(), number, 1, None)).await,
        Way::Replace => {
            let mut random = SmallRng::seed_from_u64(4);
            for round in 0..STEADY {
                let number = random.random_range(0..SERVICES / 2) * 2 + 1;
                replaced(writer.clone(), number, round + 2, Some(A_SECOND)).await?;
            }
            Ok(())
        }
        Way::Annotate => at_once(IDLE, move |number| annotated(of.clone(), number)).await,
    }
}

fn name(number: usize) -> String {
    format!("svc-{number:04}")
}

fn pods(number: usize) -> usize {
    1 + (number + 1) % 2
}

#[derive(Clone)]
struct Pod {
    address: String,
    node: String,
    ready: bool,
    terminating: bool,
}

/// A pod with an address that no recent one had.
fn pod(service: usize, pod: usize, age: usize) -> Pod {
    let (at, age) = (service * 2 + pod, age % 128);
    Pod {
        address: format!("10.{}.{}.{}", 128 + age, at >> 8, at & 255),
        node: format!("bulk-node-{:03}", at % 100),
        ready: false,
        terminating: false,
    }
}

fn slice_of(number: usize, pods: &[Pod]) -> Value {
    let endpoints: Vec<_> = pods
        .iter()
        .map(|pod| {
            let conditions = json!({"conditions":
                {"ready": pod.ready && !pod.terminating, "serving": pod.ready, "terminating": pod.terminating}});
            endpoint(&pod.address, &pod.node, &conditions)
        })
        .collect();
    slice(&name(number), "a", &[port("http", 8080)], &endpoints)
}

/// Creates a Service, then its empty slice; its pods get addresses one after the other, and become ready.
async fn create_service(writer: Writer, number: usize) -> Result<()> {
    writer.create(Kind::Service, &service(&name(number), &[port("http", 80)], &json!({}))).await?;
    let mut all = Vec::new();
    writer.create(Kind::Slice, &slice_of(number, &all)).await?;
    for at in 0..pods(number) {
        all.push(pod(number, at, 0));
        writer.replace(Kind::Slice, &slice_of(number, &all)).await?;
        all[at].ready = true;
        writer.replace(Kind::Slice, &slice_of(number, &all)).await?;
    }
    Ok(())
}

/// Replaces the pods of a Service like a Deployment: a new one gets an address and becomes ready, then the old one
/// terminates and is removed. `age` is the generation of the pods.
async fn replaced(writer: Writer, number: usize, age: usize, a_second: Option<u32>) -> Result<()> {
    let old = |at| Pod { ready: true, ..pod(number, at, age - 1) };
    let mut all: Vec<_> = (0..pods(number)).map(old).collect();
    for at in 0..pods(number) {
        let steps: [fn(&mut Vec<Pod>); 3] = [
            |all| all.last_mut().into_iter().for_each(|pod| pod.ready = true),
            |all| all.first_mut().into_iter().for_each(|pod| pod.terminating = true),
            |all| drop(all.remove(0)),
        ];
        all.push(pod(number, at, age));
        writer.replace(Kind::Slice, &slice_of(number, &all)).await?;
        for step in steps {
            if let Some(a_second) = a_second {
                tokio::time::sleep(Duration::from_secs(1) / a_second).await;
            }
            step(&mut all);
            writer.replace(Kind::Slice, &slice_of(number, &all)).await?;
        }
        if let Some(a_second) = a_second {
            tokio::time::sleep(Duration::from_secs(1) / a_second).await;
        }
    }
    Ok(())
}

/// Writes an annotation that does not concern endpoints, as leader elections once did.
async fn annotated(writer: Writer, number: usize) -> Result<()> {
    let patch = json!({"metadata": {"annotations": {"example.org/renewed": number.to_string()}}});
    let of = name(number % SERVICES);
    let (kind, of) =
        if number.is_multiple_of(2) { (Kind::Slice, format!("{of}-a")) } else { (Kind::Service, of) };
    writer.patch(kind, &of, &patch).await.map(drop)
}

/// Runs `each` for every number, [`WRITERS`] at the same time.
async fn at_once<F: Future<Output = Result<()>>>(count: usize, each: impl Fn(usize) -> F) -> Result<()> {
    stream::iter(0..count).map(each).buffer_unordered(WRITERS).try_collect().await
}
