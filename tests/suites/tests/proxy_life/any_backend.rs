//! What every backend stands besides nft, of which the other tests are: kills, changes, rules of another version, and rules
//! that another program removes.

use crate::churn::Author;
use crate::common::{TestEnv, eventually_slow, family_of};
use crate::kills::{staying, survives_kills};
use crate::model::Service;
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::net::{Family, Outcome, Transport};
use keelson_harness::peers;
use keelson_harness::util::{PATIENCE, Seeded};
use rand::RngExt as _;
use std::time::Duration;

/// The settings that choose it.
pub(crate) type Backend = &'static [(&'static str, &'static str)];

/// A program, its Debian package, its arguments.
pub(crate) type Action = (&'static str, &'static str, &'static str);

/// How long changes are made.
const SECONDS: u64 = 12;

pub(crate) async fn started(backend: Backend, services: &[Service]) -> Result<TestEnv> {
    if backend.contains(&("proxy.backend", "ebpf")) {
        return TestEnv::started_at_sockets(services).await;
    }
    TestEnv::started_with(services, |options| {
        backend.iter().fold(options, |options, (name, value)| options.set(name, *value))
    })
    .await
}

/// Nothing is compared from scratch in user space: another process has no sockets.
async fn has_exactly(env: &TestEnv, backend: Backend, services: &[Service]) -> Result<()> {
    if backend.contains(&("proxy.backend", "userspace")) {
        return env.wait_for_services(services).await;
    }
    env.wait_for_exact_services(services).await
}

/// At least a quarter of the kills are of the proxy, and a ninth of the agent.
pub(crate) async fn kills(backend: Backend, kills: usize) -> Result<()> {
    let staying = staying();
    let env = started(backend, &staying).await?;
    let (proxies, agents) = survives_kills(env, staying, kills).await?;
    ensure!(
        proxies >= kills / 4 && agents >= kills / 9,
        "{proxies} kills of the proxy, {agents} of the agent"
    );
    Ok(())
}

/// `rate` changes per second, of which clients of other Services notice nothing.
pub(crate) async fn changes(backend: Backend, rate: u32) -> Result<()> {
    let mut random = Seeded::new()?;
    let staying = staying();
    let env = started(backend, &staying).await?;
    let traffic = Traffic::start(&env.world, &staying)?;
    let before = env.synced().await?;
    let author = Author::start(&env.manifests, random.rng().random(), rate, (|| Ok(()), usize::MAX));
    for _ in 0..SECONDS {
        tokio::time::sleep(Duration::from_secs(1)).await;
        traffic.check_healthy().with_context(|| env.logs())?;
    }
    let mut last = author.stop()?;
    last.extend(staying);
    has_exactly(&env, backend, &last).await?;
    traffic.finish().await.with_context(|| env.logs())?;
    let after = env.synced().await?;
    for family in Family::ALL {
        let (before, after) = (family_of(&before, family)?, family_of(&after, family)?);
        let syncs = |state: &serde_json::Value| state["syncs"].as_u64().context("no syncs");
        ensure!(syncs(&after)? > syncs(&before)? + 5, "{before}, then {after}: nothing was tested");
        ensure!(after["failures"] == 0 && after["repaired"] == 0, "{after}");
    }
    Ok(())
}

/// Rules and sets that this version does not make are replaced, and connections continue. Each action is done while no proxy
/// runs.
pub(crate) async fn upgrade(backend: Backend, older: &[Action]) -> Result<()> {
    let staying = staying();
    let mut env = started(backend, &staying).await?;
    let world = env.world.clone();
    let traffic = Traffic::start(&world, &staying)?;
    traffic.wait_for_answers().await?;
    for action in older {
        let (_, _, args) = action;
        env.proxy.kill9()?;
        act(&env, action)?;
        let lines = env.dry_run().await?;
        ensure!(lines != ["no changes"], "{args} is not noticed");
        env.proxy.start_again(world.node()).await?;
        env.wait_for_exact_services(&staying).await.with_context(|| (*args).to_owned())?;
        traffic.wait_for_answers().await.with_context(|| format!("{args} is put right"))?;
    }
    traffic.finish().await.map(drop)
}

/// Its output.
pub(crate) fn act(env: &TestEnv, (program, package, args): &Action) -> Result<String> {
    let program = peers::system(program, package)?;
    env.node().command(&program, &args.split(' ').collect::<Vec<_>>())
}

/// What another program removes comes back.
pub(crate) async fn drift(backend: Backend, removals: &[Action]) -> Result<()> {
    let staying = staying();
    let env = started(backend, &staying).await?;
    let service = staying.iter().find(|service| service.family == Family::V4).context("one of IPv4")?;
    let repaired = async || env.family(Family::V4).await?["repaired"].as_u64().context("no count");
    for removal in removals {
        let before = repaired().await?;
        act(&env, removal)?;
        eventually_slow("the rules are repaired", || async {
            let now = repaired().await?;
            ensure!(now > before, "{now} repairs");
            let outcome = env.world.pod().ask(service.at(), Transport::Tcp, PATIENCE).await?;
            ensure!(matches!(outcome, Outcome::Answered { .. }), "{outcome:?}");
            Ok(())
        })
        .await
        .with_context(|| format!("{}: {}", removal.2, env.logs()))?;
    }
    has_exactly(&env, backend, &staying).await?;
    Traffic::start(&env.world, &staying)?.finish().await.map(drop)
}
