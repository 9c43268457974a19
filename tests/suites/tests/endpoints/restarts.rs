//! The agent restarted, with and without its state.

use crate::rig::{Lane, Stage, run};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::{FullState, Kind, endpoint, port, service, slice};
use serde_json::json;
use std::fs;
use std::path::Path;

type Loss = fn(&Path) -> Result<()>;

async fn write_some(stage: &Stage) -> Result<()> {
    let ports = [port("p", 80)];
    for number in 1..=5 {
        let name = format!("svc-{number}");
        stage.writer.create(Kind::Service, &service(&name, &ports, &json!({}))).await?;
        let ready = [endpoint(&format!("10.200.8.{number}"), &stage.name, &json!({}))];
        stage.writer.create(Kind::Slice, &slice(&name, "a", &ports, &ready)).await?;
    }
    Ok(())
}

#[test]
fn restarts_without_changes_keep_the_revision() -> Result<()> {
    run(async {
        let mut stage = Stage::new(Lane::Calm, "no-news").await?;
        write_some(&stage).await?;
        stage.agent.start_live().await?;
        let followers = stage.followers()?;
        let pair = stage.settled(&followers).await?;
        let (watch, next) = (followers.watch.seen().len(), followers.next.seen().len());
        for peaceful in [true, false, true, false] {
            if peaceful {
                stage.terminate().await?;
            } else {
                stage.agent.kill9()?;
            }
            stage.agent.start_live().await?;
            stage.wait_until_current().await?;
            let connected = || async {
                let watchers = stage.state().await?["watchers"].as_array().map_or(0, Vec::len);
                ensure!(watchers == 2, "{watchers} consumers are connected");
                Ok(())
            };
            crate::rig::eventually_slow("both consumers are back", connected).await?;
            ensure!(stage.settled(&followers).await? == pair);
            let state = stage.state().await?;
            ensure!(
                state["instance_id"].as_str() == Some(&*pair.0.to_string()) && state["rev"] == pair.1,
                "{pair:?} {state}"
            );
            let resets = stage.metric("keelson_endpoints_resets_total").await?;
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
        let mut stage = Stage::new(Lane::Calm, "away").await?;
        write_some(&stage).await?;
        stage.agent.start_live().await?;
        let mut followers = stage.followers()?;
        let pair = stage.settled(&followers).await?;
        for (round, peaceful) in [true, false].into_iter().enumerate() {
            if peaceful {
                stage.terminate().await?;
            } else {
                stage.agent.kill9()?;
            }
            let ports = [port("p", 90)];
            stage.writer.delete(Kind::Service, &format!("svc-{}", round + 1)).await?;
            stage
                .writer
                .patch(Kind::Slice, "svc-5-a", &json!({"ports": [port("p", 91 + u16::try_from(round)?)]}))
                .await?;
            stage.writer.create(Kind::Service, &service(&format!("new-{round}"), &ports, &json!({}))).await?;
            if !peaceful {
                // Consumers that restart too, and kept their state.
                followers.restart().await?;
            }
            stage.agent.start_live().await?;
            let after = stage.settled(&followers).await?;
            let wanted = (pair.0, pair.1 + 1 + round as u64);
            ensure!(after == wanted, "what was missed is one revision: {wanted:?} {after:?}");
            let resets = stage.metric("keelson_endpoints_resets_total").await?;
            ensure!(resets == 0.0, "{resets} consumers were sent everything");
        }
        Ok(())
    })
}

#[test]
fn a_lost_store_starts_a_new_instance() -> Result<()> {
    run(async {
        let mut stage = Stage::new(Lane::Calm, "lost").await?;
        write_some(&stage).await?;
        stage.agent.start_live().await?;
        let followers = stage.followers()?;
        let mut pair = stage.settled(&followers).await?;
        let losses: [(&str, Loss); 2] = [("lost", lose), ("damaged", damage)];
        for (round, (how, lose)) in losses.into_iter().enumerate() {
            stage.terminate().await?;
            match how {
                "lost" => lose(&stage.agent.state_dir())?,
                _ => damage(&stage.agent.state_dir())?,
            }
            // A deletion meanwhile: a consumer that treats the new state as changes of the old one would keep the
            // object.
            stage.writer.delete(Kind::Service, &format!("svc-{}", round + 1)).await?;
            stage.agent.start_live().await?;
            let other = |whole: &FullState| {
                ensure!(whole.position.instance_id != pair.0, "{:?}", whole.position);
                Ok(())
            };
            followers.until(&format!("there is another instance, the store being {how}"), other).await?;
            let after = stage.settled(&followers).await?;
            ensure!(after.1 == 1, "a new instance begins with revision 1: {after:?}");
            let resets = stage.metric("keelson_endpoints_resets_total").await?;
            ensure!(resets >= 1.0, "Watch was reset {resets} times");
            stage.wait_until_current().await?;
            pair = after;
        }
        ensure!(
            stage.agent.log()?.contains("state store damaged"),
            "the damage is reported:\n{}",
            stage.agent.log()?
        );
        // The present state survives again.
        stage.kill_and_start().await?;
        stage.wait_until_current().await?;
        ensure!(stage.settled(&followers).await? == pair);
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
        let mut stage = Stage::new(Lane::Calm, "renamed").await?;
        write_some(&stage).await?;
        stage.agent.start_live().await?;
        let followers = stage.followers()?;
        let pair = stage.settled(&followers).await?;
        stage.terminate().await?;
        "renamed-2".clone_into(&mut stage.name);
        stage.agent.set("agent.node_name", "renamed-2")?;
        stage.agent.start_live().await?;
        let other = |whole: &FullState| {
            let node = whole.node.as_ref().context("a node")?;
            ensure!(
                whole.position.instance_id != pair.0 && node.name == "renamed-2" && !node.exists,
                "{node:?}"
            );
            // Its endpoints were local to the node with the former name.
            let local = whole.services.values().flat_map(|service| &service.endpoints);
            let local =
                local.filter_map(|endpoint| endpoint.conditions).filter(|conditions| conditions.local);
            ensure!(local.count() == 0, "local endpoints are left");
            Ok(())
        };
        followers.until("the state is of the other node", other).await?;
        stage.settled(&followers).await.map(drop)
    })
}
