//! Ten thousand Services with ten endpoints each.

use crate::common::{Lane, TestEnv, run};
use anyhow::{Context as _, Result, ensure};
use keelson_client::Api;
use keelson_cluster::endpoints::{Follower, FullState, Kind, Objects, bulk};
use serde_json::json;
use std::fs;
use std::time::Instant;

const SERVICES: usize = 10_000;
const EACH: usize = 10;
/// Number of Services that are created while the agent follows.
const LATER: usize = 100;

/// Present and maximum memory of a process, in MiB.
fn memory(pid: u32) -> Result<(u64, u64)> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let mib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).context("no such line")?;
        let kib: u64 = line.split_whitespace().next().context("no number")?.parse()?;
        anyhow::Ok(kib / 1024)
    };
    Ok((mib("VmRSS:")?, mib("VmHWM:")?))
}

#[test]
fn ten_thousand_services_with_ten_endpoints_each() -> Result<()> {
    run(async {
        let mut env = TestEnv::new(Lane::Large, "bulk-node-007").await?;
        let made = bulk::make(&env.cluster, SERVICES - LATER, EACH).await?;
        eprintln!("{made:?}");
        let started = Instant::now();
        env.agent.start_live().await?;
        // Only with Watch: `Next` would send the complete state repeatedly while they are created.
        let early = Follower::start(&env.agent.endpoints_target(), Api::Watch)?;
        early
            .until("the first Services are there", |full_state| {
                let count = full_state.services.len();
                ensure!(count >= SERVICES - LATER, "there are {count}");
                Ok(())
            })
            .await?;
        eprintln!("a new agent and its consumer had all after {:.1} s", started.elapsed().as_secs_f64());
        // The last are created one by one.
        let made = bulk::make_more(&env.cluster, SERVICES - LATER..SERVICES, EACH).await?;
        eprintln!("{made:?}");
        let objects = Objects::of(&env.cluster).await?;
        let expected = objects.on(&env.cluster, &env.name).await?;
        ensure!(expected.services.len() >= SERVICES && expected.endpoints() >= SERVICES * EACH);
        let written = Instant::now();
        early.settled(&expected).await?;
        early.check_invariants()?;
        eprintln!(
            "its consumer had the expected state {:.1} s after the last write",
            written.elapsed().as_secs_f64()
        );
        let pid = env.agent.pid().context("it runs")?;
        let pair = early.pair();
        eprintln!("{:?} MiB now and at most, at revision {}", memory(pid)?, pair.1);

        // Another client, which gets everything at once.
        let asked = Instant::now();
        let late = env.followers()?;
        late.settled(&expected).await?;
        eprintln!("newcomers had it after {:.1} s", asked.elapsed().as_secs_f64());
        ensure!(env.settled_as(&late, &expected).await? == pair);
        let (watch, next) = (late.watch.seen().len(), late.next.seen().len());

        // From disk, and compared with all objects of the API server.
        for peaceful in [true, false] {
            if peaceful {
                env.terminate().await?;
            } else {
                env.agent.kill9()?;
            }
            let started = Instant::now();
            env.agent.start_live().await?;
            let live = started.elapsed();
            env.wait_until_current().await?;
            let pid = env.agent.pid().context("it runs")?;
            eprintln!(
                "started again: live after {:.2} s, current after {:.1} s, {:?} MiB",
                live.as_secs_f64(),
                started.elapsed().as_secs_f64(),
                memory(pid)?
            );
            ensure!(late.pair().await? == pair);
        }
        for (follower, before) in [(&late.watch, watch), (&late.next, next)] {
            let news = follower.seen().split_off(before);
            ensure!(news.iter().all(|seen| (seen.instance_id, seen.rev) == pair), "{news:?}");
        }

        // Another zone: changes the endpoints of a tenth of the Services, all in one revision.
        let zone = json!({"metadata": {"labels": {"topology.kubernetes.io/zone": "zone-c"}}});
        env.writer.patch(Kind::Node, "bulk-node-007", &zone).await?;
        let moved = Instant::now();
        let expected = objects.on(&env.cluster, &env.name).await?;
        for follower in [&early, &late.watch, &late.next] {
            follower.settled(&expected).await?;
            follower.check_invariants()?;
            ensure!(follower.pair() == (pair.0, pair.1 + 1));
        }
        eprintln!("another zone took {:.1} s at most", moved.elapsed().as_secs_f64());

        // One change of one Service is one revision, and reaches all clients.
        bulk::touch(&env.cluster, 4711, 9999).await?;
        let name = format!("{}/{}", bulk::NAMESPACE, bulk::name(4711));
        let changed = |full_state: &FullState| {
            let service = full_state.service(&name).context("it is there")?;
            ensure!(service.endpoints.iter().all(|endpoint| endpoint.ports[0].port == 9999), "{service:?}");
            Ok(())
        };
        for follower in [&early, &late.watch, &late.next] {
            follower.until("the change is seen", changed).await?;
            ensure!(follower.pair() == (pair.0, pair.1 + 2));
        }
        Ok(())
    })
}
