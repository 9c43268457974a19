//! The agent restarted, with and without its state.

use crate::common::{Lane, TestEnv, run};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::{Followers, FullState, Kind, endpoint, port, service, slice};
use serde_json::json;
use std::fs;
use std::path::Path;

type Loss = fn(&Path) -> Result<()>;

async fn write_some(env: &TestEnv) -> Result<()> {
    let ports = [port("p", 80)];
    for number in 1..=5 {
        let name = format!("svc-{number}");
        env.writer.create(Kind::Service, &service(&name, &ports, &json!({}))).await?;
        let ready = [endpoint(&format!("10.200.8.{number}"), &env.name, &json!({}))];
        env.writer.create(Kind::Slice, &slice(&name, "a", &ports, &ready)).await?;
    }
    Ok(())
}

/// An agent that serves these Services, its consumers, and the instance and revision that they have.
async fn stage_with_services(name: &str) -> Result<(TestEnv, Followers, (u64, u64))> {
    let mut env = TestEnv::new(Lane::Calm, name).await?;
    write_some(&env).await?;
    env.agent.start_live().await?;
    let followers = env.followers()?;
    let pair = env.settled(&followers).await?;
    Ok((env, followers, pair))
}

#[test]
fn restarts_without_changes_keep_the_revision() -> Result<()> {
    run(async {
        let (mut env, followers, pair) = stage_with_services("no-news").await?;
        let (watch, next) = (followers.watch.seen().len(), followers.next.seen().len());
        for peaceful in [true, false, true, false] {
            if peaceful {
                env.terminate().await?;
            } else {
                env.agent.kill9()?;
            }
            env.agent.start_live().await?;
            env.wait_until_current().await?;
            let connected = || async {
                let watchers = env.state().await?["watchers"].as_array().map_or(0, Vec::len);
                ensure!(watchers == 2, "{watchers} consumers are connected");
                Ok(())
            };
            crate::common::eventually_slow("both consumers are back", connected).await?;
            ensure!(env.settled(&followers).await? == pair);
            let state = env.state().await?;
            ensure!(
                state["instance_id"].as_str() == Some(&*pair.0.to_string()) && state["rev"] == pair.1,
                "{pair:?} {state}"
            );
            let resets = env.metric("keelson_endpoints_resets_total").await?;
            ensure!(resets == 0.0, "{resets} consumers were sent everything");
        }
        // At most that the state is confirmed, or not yet; to a waiting Next call only if that takes long.
        for (follower, before) in [(&followers.watch, watch), (&followers.next, next)] {
            let news = follower.seen().split_off(before);
            ensure!(news.iter().all(|seen| (seen.instance_id, seen.rev) == pair), "{news:?}");
        }
        Ok(())
    })
}

#[test]
fn changes_during_a_restart_arrive_as_deltas() -> Result<()> {
    run(async {
        let (mut env, mut followers, pair) = stage_with_services("away").await?;
        for (round, peaceful) in [true, false].into_iter().enumerate() {
            if peaceful {
                env.terminate().await?;
            } else {
                env.agent.kill9()?;
            }
            let ports = [port("p", 90)];
            env.writer.delete(Kind::Service, &format!("svc-{}", round + 1)).await?;
            env.writer
                .patch(Kind::Slice, "svc-5-a", &json!({"ports": [port("p", 91 + u16::try_from(round)?)]}))
                .await?;
            env.writer.create(Kind::Service, &service(&format!("new-{round}"), &ports, &json!({}))).await?;
            if !peaceful {
                // Consumers that restart too, and kept their state.
                followers.restart().await?;
            }
            env.agent.start_live().await?;
            let after = env.settled(&followers).await?;
            let wanted = (pair.0, pair.1 + 1 + round as u64);
            ensure!(after == wanted, "what was missed is one revision: {wanted:?} {after:?}");
            let resets = env.metric("keelson_endpoints_resets_total").await?;
            ensure!(resets == 0.0, "{resets} consumers were sent everything");
        }
        Ok(())
    })
}

#[test]
fn a_lost_store_starts_a_new_instance() -> Result<()> {
    run(async {
        let (mut env, followers, mut pair) = stage_with_services("lost").await?;
        let losses: [(&str, Loss); 2] = [("lost", lose), ("damaged", damage)];
        for (round, (how, lose)) in losses.into_iter().enumerate() {
            env.terminate().await?;
            match how {
                "lost" => lose(&env.agent.state_dir())?,
                _ => damage(&env.agent.state_dir())?,
            }
            // A deletion meanwhile: a consumer that treats the new state as changes of the old one would keep the
            // object.
            env.writer.delete(Kind::Service, &format!("svc-{}", round + 1)).await?;
            env.agent.start_live().await?;
            let other = |full_state: &FullState| {
                ensure!(full_state.position.instance_id != pair.0, "{:?}", full_state.position);
                Ok(())
            };
            followers.until(&format!("there is another instance, the store being {how}"), other).await?;
            let after = env.settled(&followers).await?;
            ensure!(after.1 == 1, "a new instance begins with revision 1: {after:?}");
            let resets = env.metric("keelson_endpoints_resets_total").await?;
            ensure!(resets >= 1.0, "Watch was reset {resets} times");
            env.wait_until_current().await?;
            pair = after;
        }
        ensure!(
            env.agent.log()?.contains("state store damaged"),
            "the damage is reported:\n{}",
            env.agent.log()?
        );
        // The present state survives again.
        env.kill_and_start().await?;
        env.wait_until_current().await?;
        ensure!(env.settled(&followers).await? == pair);
        Ok(())
    })
}

fn lose(state: &Path) -> Result<()> {
    fs::remove_dir_all(state).context("cannot lose the state")
}

/// Overwrites the largest file of the store's database.
fn damage(state: &Path) -> Result<()> {
    let mut folders = vec![state.join("state")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())?.flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.ends_with("db") {
                found.push((entry.metadata()?.len(), path));
            }
        }
    }
    let (length, path) = found.into_iter().max().context("the store has no file db")?;
    fs::write(path, vec![0xa5; usize::try_from(length)?]).context("cannot damage the store")
}

#[test]
fn the_state_of_another_node_is_not_used() -> Result<()> {
    run(async {
        let (mut env, followers, pair) = stage_with_services("renamed").await?;
        env.terminate().await?;
        "renamed-2".clone_into(&mut env.name);
        env.agent.set("agent.node_name", "renamed-2")?;
        env.agent.start_live().await?;
        let other = |full_state: &FullState| {
            let node = full_state.node.as_ref().context("a node")?;
            ensure!(
                full_state.position.instance_id != pair.0 && node.name == "renamed-2" && !node.exists,
                "{node:?}"
            );
            // Its endpoints were local to the node with the former name.
            let local = full_state.services.values().flat_map(|service| &service.endpoints);
            let local =
                local.filter_map(|endpoint| endpoint.conditions).filter(|conditions| conditions.local);
            ensure!(local.count() == 0, "local endpoints are left");
            Ok(())
        };
        followers.until("the state is of the other node", other).await?;
        env.settled(&followers).await.map(drop)
    })
}
