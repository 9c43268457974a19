//! P14: programs that read nftables beside a busy proxy.

use crate::churn::Author;
use crate::common::{LONG, TestEnv};
use crate::kernel;
use crate::model::{Service, pool};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::net::Family;
use keelson_harness::peers;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::process::Command;

/// Services of a folder, each with ten endpoints; a program needs some tens of milliseconds to read their rules.
const SERVICES: u16 = 500;
/// Changes per second.
const RATE: u32 = 100;
/// Minimum number of reads, one after the other.
const READS: usize = 5;
const ALONE: usize = 3;
/// The longest period that kube-proxy has by default.
const PERIOD: Duration = Duration::from_secs(1);
/// Time after which the commits of a burst have been made.
const BURST: Duration = Duration::from_secs(3);
/// Commits in a burst after a quiet time, and those outside the pace: retries, chains that have rested.
const SPARE: u32 = 10 + 5;

fn services() -> Vec<Service> {
    let endpoint = |number: u16, index: u8| {
        let [high, low] = number.to_be_bytes();
        SocketAddr::new(Ipv4Addr::new(10, 200 + high, low, index).into(), 8080)
    };
    let of = |number| (0..10).map(|index| endpoint(number, index)).collect::<Vec<_>>();
    (0..SERVICES).map(|number| Service::new(1_000 + number, Family::V4, &of(number))).collect()
}

/// Duration of `nft list ruleset` in milliseconds. It restarts its read while others commit.
async fn read(env: &TestEnv) -> Result<u64> {
    let begun = Instant::now();
    let mut command = Command::new(peers::system("ip", "iproute2")?);
    command.args(["netns", "exec", env.node().name(), "nft", "list", "ruleset"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
    let status = tokio::time::timeout(LONG, command.status()).await;
    ensure!(status.with_context(|| format!("nft list ruleset does not end in {LONG:?}"))??.success());
    Ok(begun.elapsed().as_millis().try_into()?)
}

/// Single changes do not wait for the period. At least one of them has to be faster, because the machine may be busy.
async fn alone(env: &TestEnv, others: &[Service], moving: &mut Service) -> Result<()> {
    let mut took = Vec::new();
    let endpoints = pool(Family::V4, 8080);
    for round in 0..ALONE {
        let first = round % 2;
        moving.endpoints = endpoints[first..first + 2].to_vec();
        let (begun, before) = (Instant::now(), kernel::generation(env.node())?);
        moving.write(&env.manifests)?;
        while kernel::generation(env.node())? == before {
            ensure!(begun.elapsed() < LONG, "{}", env.logs());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        took.push(begun.elapsed());
        tokio::time::sleep(PERIOD).await;
    }
    let all: Vec<_> = others.iter().chain([&*moving]).cloned().collect();
    env.wait_for_services(&all).await?;
    eprintln!("changes that came alone were in the kernel after {took:?}");
    ensure!(took.iter().any(|took| *took < PERIOD), "every change waited for a period: {took:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn p14_another_program_reads_the_ruleset_during_a_hundred_changes_per_second() -> Result<()> {
    let period = format!("{}s", PERIOD.as_secs());
    let mut env = TestEnv::with(|options| options.set("proxy.min_sync_period", period))?;
    let all = services();
    let objects: Vec<_> = all.iter().flat_map(Service::objects).collect();
    env.manifests.put("many.json", &objects)?;
    env.agent.start_live().await?;
    env.proxy.start_again(env.world.node()).await?;
    env.wait_for_services(&all).await?;

    let mut moving = Service::new(20, Family::V4, &pool(Family::V4, 8080)[..2]);
    alone(&env, &all, &mut moving).await?;

    let nothing = (|| Ok(()), usize::MAX);
    let author = Author::start(&env.manifests, 7, RATE, nothing);
    let (begun, before) = (Instant::now(), kernel::generation(env.node())?);
    tokio::time::sleep(BURST).await;
    let mut took = Vec::new();
    loop {
        took.push(read(&env).await?);
        let commits = kernel::generation(env.node())?.wrapping_sub(before);
        let seconds = u32::try_from(begun.elapsed().as_secs())?;
        let written = u32::try_from(author.writes())?;
        // One per second, of each family; the changes are of both.
        let most = 2 * (seconds + 1 + SPARE);
        ensure!(commits <= most, "{commits} commits in {seconds} s");
        // Without a pace there would be about as many commits as changes.
        if took.len() >= READS && written >= 4 * most {
            eprintln!(
                "reads took {took:?} ms, beside {commits} commits and {written} changes in {seconds} s"
            );
            break;
        }
        ensure!(begun.elapsed() < LONG, "{written} changes in {seconds} s are too few to count commits");
    }

    let mut now = author.stop()?;
    moving.endpoints.rotate_left(1);
    moving.write(&env.manifests)?;
    now.push(moving);
    now.extend(all);
    env.wait_for_services(&now).await
}
