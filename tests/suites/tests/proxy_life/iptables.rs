//! The life of a proxy with the backend iptables, in both variants: kills, changes, rules of another version or variant, and
//! rules that another program removes.

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

const KILLS: usize = 18;
/// Changes per second, and for how many seconds.
const RATE: u32 = 100;
const SECONDS: u64 = 12;

async fn started(variant: &str, services: &[Service]) -> Result<TestEnv> {
    let settings = [("proxy.backend", "iptables"), ("proxy.iptables_variant", variant)];
    TestEnv::started_with(services, |options| {
        settings.into_iter().fold(options, |options, (name, value)| options.set(name, value))
    })
    .await
}

async fn kills(variant: &str) -> Result<()> {
    let staying = staying();
    let env = started(variant, &staying).await?;
    let (proxies, agents) = survives_kills(env, staying, KILLS).await?;
    ensure!(proxies >= 4 && agents >= 2, "{proxies} kills of the proxy, {agents} of the agent");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn eighteen_kills_with_iptables_legacy_leave_the_rules_of_a_fresh_start() -> Result<()> {
    kills("legacy").await
}

#[tokio::test(flavor = "multi_thread")]
async fn eighteen_kills_with_iptables_nft_leave_the_rules_of_a_fresh_start() -> Result<()> {
    kills("nft").await
}

/// A hundred changes per second, of which clients of other Services notice nothing.
async fn changes(variant: &str) -> Result<()> {
    let mut random = Seeded::new()?;
    let staying = staying();
    let env = started(variant, &staying).await?;
    let traffic = Traffic::start(&env.world, &staying)?;
    let before = env.synced().await?;
    let author = Author::start(&env.manifests, random.rng().random(), RATE, (|| Ok(()), usize::MAX));
    for _ in 0..SECONDS {
        tokio::time::sleep(Duration::from_secs(1)).await;
        traffic.check_healthy().with_context(|| env.logs())?;
    }
    let mut last = author.stop()?;
    last.extend(staying);
    env.wait_for_exact_services(&last).await?;
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

#[tokio::test(flavor = "multi_thread")]
async fn connections_continue_under_changes_with_iptables_legacy() -> Result<()> {
    changes("legacy").await
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_continue_under_changes_with_iptables_nft() -> Result<()> {
    changes("nft").await
}

/// Rules and sets that this version does not make: they are replaced, and connections continue.
async fn upgrade(variant: &str) -> Result<()> {
    let staying = staying();
    let mut env = started(variant, &staying).await?;
    let world = env.world.clone();
    let traffic = Traffic::start(&world, &staying)?;
    traffic.wait_for_answers().await?;
    let iptables = peers::system(&format!("iptables-{variant}"), "iptables")?;
    let ipset = peers::system("ipset", "ipset")?;
    let older: [(&std::path::Path, &str); 5] = [
        (&iptables, "-w 5 -t nat -N KEELSON-OLD"),
        (&iptables, "-w 5 -t nat -I KEELSON-SERVICES -p udp"),
        (&iptables, "-w 5 -t filter -I KEELSON-FORWARD -p tcp"),
        (&iptables, "-w 5 -t nat -D POSTROUTING -j KEELSON-POSTROUTING"),
        (&ipset, "create KEELSON-4-OLD hash:ip"),
    ];
    for (program, args) in older {
        env.proxy.kill9()?;
        world.node().command(program, &args.split(' ').collect::<Vec<_>>())?;
        let lines = env.dry_run().await?;
        ensure!(lines != ["no changes"], "{args} is not noticed");
        env.proxy.start_again(world.node()).await?;
        env.wait_for_exact_services(&staying).await.context(args)?;
        traffic.wait_for_answers().await.with_context(|| format!("{args} is put right"))?;
    }
    traffic.finish().await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_of_another_version_are_replaced_with_iptables_legacy() -> Result<()> {
    upgrade("legacy").await
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_of_another_version_are_replaced_with_iptables_nft() -> Result<()> {
    upgrade("nft").await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_variant_is_switched_under_load() -> Result<()> {
    let staying = staying();
    let mut env = started("legacy", &staying).await?;
    let world = env.world.clone();
    let traffic = Traffic::start(&world, &staying)?;
    traffic.wait_for_answers().await?;
    let rules = |variant: &str| {
        let save = peers::system(&format!("iptables-{variant}-save"), "iptables")?;
        world.node().command(&save, &[])
    };
    for (from, to) in [("legacy", "nft"), ("nft", "legacy")] {
        ensure!(env.proxy.terminate().await?.success(), "it exits with success after SIGTERM");
        env.options = env.options.clone().set("proxy.iptables_variant", to);
        env.proxy.configure(&env.options)?;
        env.proxy.start_again(world.node()).await?;
        env.wait_for_exact_services(&staying).await?;
        traffic.wait_for_answers().await.with_context(|| format!("from {from} to {to}"))?;
        ensure!(rules(to)?.contains("KEELSON-"), "{to} has no rules");
        ensure!(!rules(from)?.contains("KEELSON-"), "{from} has rules");
    }
    traffic.finish().await.map(drop)
}

/// Another program empties the table nat, and then every IP set.
async fn drift(variant: &str) -> Result<()> {
    let staying = staying();
    let env = started(variant, &staying).await?;
    let node = env.world.node();
    let iptables = peers::system(&format!("iptables-{variant}"), "iptables")?;
    let ipset = peers::system("ipset", "ipset")?;
    let service = staying.iter().find(|service| service.family == Family::V4).context("one of IPv4")?;
    let repaired = async || env.family(Family::V4).await?["repaired"].as_u64().context("no count");
    for (program, args) in [(&iptables, &["-t", "nat", "-F"][..]), (&ipset, &["flush"])] {
        let before = repaired().await?;
        node.command(program, args)?;
        eventually_slow("the rules are repaired", || async {
            let now = repaired().await?;
            ensure!(now > before, "{now} repairs");
            let outcome = env.world.pod().ask(service.at(), Transport::Tcp, PATIENCE).await?;
            ensure!(matches!(outcome, Outcome::Answered { .. }), "{outcome:?}");
            Ok(())
        })
        .await
        .with_context(|| env.logs())?;
    }
    env.wait_for_exact_services(&staying).await?;
    Traffic::start(&env.world, &staying)?.finish().await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_rules_are_repaired_with_iptables_legacy() -> Result<()> {
    drift("legacy").await
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_rules_are_repaired_with_iptables_nft() -> Result<()> {
    drift("nft").await
}
