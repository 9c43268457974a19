//! Slow and stuck readers affect only themselves: others get every revision, and the agent's memory does not grow.

use crate::common::{TestEnv, plain};
use crate::wire::{self, Connection, NEXT, WATCH};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::Followers;
use serde_json::Value;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

const SERVICES: usize = 1_500;
const ENDPOINTS: usize = 20;
const CHANGES: u64 = 30;
/// Maximum growth of the agent's memory, in bytes: very generous, but less than a copy of the state for each stuck
/// reader and change.
const MAX_GROWTH: u64 = 200 << 20;

/// Services that never change: much more than the buffers of a connection hold.
fn many() -> Vec<Value> {
    let all = (0..SERVICES).flat_map(|n| {
        let addresses: Vec<_> =
            (1..=ENDPOINTS).map(|m| format!("10.{}.{}.{m}", 2 + n / 250, n % 250)).collect();
        let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
        plain(&format!("bulk-{n}"), &format!("10.96.{}.{}", 1 + n / 250, n % 250), &addresses)
    });
    all.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_and_stuck_readers_do_not_delay_others() -> Result<()> {
    let env = {
        let mut env = TestEnv::new()?;
        env.manifests.put("bulk.json", &many())?;
        env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.1"]))?;
        env.agent.start_live().await?;
        env
    };
    env.wait_for_rev(1).await?;
    let followers = Followers::start(&env.target(), |_| Ok(()))?;
    followers
        .until("the first state", |full_state| {
            ensure!(full_state.services.len() == SERVICES + 1, "{}", full_state.services.len());
            Ok(())
        })
        .await?;
    let before = env.memory()?;

    // Five of each API that read nothing at all, and answer no ping.
    let mut stuck = Vec::new();
    for number in 0..10 {
        let mut stream = UnixStream::connect(env.socket()).await.context("cannot connect")?;
        stream.write_all(&wire::unary_call(if number % 2 == 0 { NEXT } else { WATCH })).await?;
        stuck.push(stream);
    }
    // As many whose library answers pings, but whose program does not read the stream.
    let mut forgotten = Vec::new();
    for number in 0..10 {
        let mut connection = Connection::open(&env.socket()).await?;
        let response = connection.response(wire::ask(if number % 2 == 0 { NEXT } else { WATCH })?).await?;
        forgotten.push((connection, response));
    }
    // One that reads one byte per second.
    let mut stream = UnixStream::connect(env.socket()).await.context("cannot connect")?;
    stream.write_all(&wire::unary_call(WATCH)).await?;
    let slow = tokio::spawn(async move {
        let mut bytes = 0;
        while stream.read_u8().await.is_ok() {
            bytes += 1;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        bytes
    });

    // Others get every single revision.
    for rev in 2..2 + CHANGES {
        env.manifests.put("web.json", &plain("web", "10.96.0.1", &[&format!("10.1.{rev}.1")]))?;
        followers
            .until(&format!("revision {rev}"), |full_state| {
                ensure!(full_state.position.rev == rev, "{:?}", full_state.position);
                let web = full_state.service("ns/web").context("no web")?;
                let ips = web.endpoints[0].i_ps.as_ref().context("no address")?;
                ensure!(ips.v4 == [format!("10.1.{rev}.1")], "{ips:?}");
                Ok(())
            })
            .await?;
    }
    followers.check_invariants()?;
    for follower in followers.both() {
        let revs: Vec<_> = follower.seen().iter().map(|seen| seen.rev).collect();
        ensure!(revs == (1..2 + CHANGES).collect::<Vec<_>>(), "{revs:?}");
        ensure!(follower.errors().is_empty(), "{:?}", follower.errors());
    }

    // They are still connected and behind, and are shown as such.
    let state = env.state().await?;
    let watchers = state["watchers"].as_array().context("no watchers")?;
    let behind = watchers.iter().filter(|watcher| watcher["behind"].as_u64() > Some(0)).count();
    eprintln!("{behind} of {} watchers are behind", watchers.len());
    ensure!(behind >= 20, "{watchers:?}");
    let after = env.memory()?;
    eprintln!("memory of the agent: {} MB, {} MB after {CHANGES} changes", before >> 20, after >> 20);
    ensure!(after < before + MAX_GROWTH, "the agent has grown from {before} to {after} bytes");

    // One that reads again gets the latest state.
    let (_connection, response) = forgotten.pop().context("there are ten")?;
    let newest = crate::crowd::newest(response.into_body(), 1 + CHANGES).await?;
    ensure!(newest == (1 + CHANGES, SERVICES + 1), "{newest:?}");
    slow.abort();
    drop((stuck, forgotten));
    env.wait_for_watchers(2, 1 + CHANGES).await
}
