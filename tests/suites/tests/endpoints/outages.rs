//! The API server stopped, restarted, or without the version at which a watch was.

use crate::rig::{Lane, Stage, eventually_slow, run};
use anyhow::{Result, bail, ensure};
use keelson_cluster::endpoints::{Follower, Followers, FullState, Kind, endpoint, port, service, slice};
use keelson_cluster::kube::{ApiFault, ApiMatch};
use serde_json::json;

/// Writes three Services with a slice each.
async fn write_some(stage: &Stage) -> Result<()> {
    for name in ["one", "two", "three"] {
        let ports = [port("p", 80)];
        stage.writer.create(Kind::Service, &service(name, &ports, &json!({}))).await?;
        let ready = [
            endpoint("10.200.7.1", &stage.name, &json!({})),
            endpoint("10.200.7.2", "elsewhere", &json!({})),
        ];
        stage.writer.create(Kind::Slice, &slice(name, "a", &ports, &ready)).await?;
    }
    Ok(())
}

/// Changes one, deletes one, creates one.
async fn change_some(stage: &Stage, port_number: u16) -> Result<()> {
    let ports = [port("p", port_number)];
    stage.writer.patch(Kind::Slice, "one-a", &json!({"ports": ports})).await?;
    stage.writer.delete(Kind::Service, "two").await?;
    let name = format!("made-{port_number}");
    stage.writer.create(Kind::Service, &service(&name, &ports, &json!({}))).await?;
    stage.writer.create(Kind::Service, &service("two", &[port("q", port_number)], &json!({}))).await.map(drop)
}

/// Waits until a consumer of `Watch` is told that the state is stale, or that it is not.
async fn wait_for_staleness(follower: &Follower, stale: bool) -> Result<()> {
    let message = |whole: &FullState| {
        let position = &whole.position;
        ensure!(position.stale == stale && position.stale_reason.is_empty() != stale, "{position:?}");
        Ok(())
    };
    follower.until(if stale { "it is stale" } else { "it is current" }, message).await
}

/// All states after a consumer's first `from` must have the same revision.
fn check_same_revision(followers: &Followers, from: usize, next_from: usize, pair: (u64, u64)) -> Result<()> {
    for (follower, from) in [(&followers.watch, from), (&followers.next, next_from)] {
        let seen = follower.seen();
        let news: Vec<_> = seen[from..].iter().filter(|seen| (seen.instance_id, seen.rev) != pair).collect();
        ensure!(news.is_empty(), "after {pair:?}: {news:?}");
    }
    Ok(())
}

#[test]
fn a_restarted_api_server_keeps_the_revision() -> Result<()> {
    run(async {
        let mut stage = Stage::new(Lane::Rough, "api-restart").await?;
        write_some(&stage).await?;
        stage.agent.start_live().await?;
        let followers = stage.followers()?;
        let pair = stage.settled(&followers).await?;
        stage.wait_until_current().await?;
        let (watch, next) = (followers.watch.seen().len(), followers.next.seen().len());

        stage.cluster.api.terminate().await?;
        wait_for_staleness(&followers.watch, true).await?;
        stage.wait_until_stale("").await?;
        stage.cluster.api.start_again().await?;
        wait_for_staleness(&followers.watch, false).await?;
        stage.wait_until_current().await?;
        ensure!(stage.settled(&followers).await? == pair);
        check_same_revision(&followers, watch, next, pair)?;

        // Killed, and back at once: whether anything notices is random.
        stage.cluster.api.kill9()?;
        stage.cluster.api.start_again().await?;
        change_some(&stage, 8001).await?;
        let after = stage.settled(&followers).await?;
        ensure!(after.0 == pair.0 && after.1 > pair.1, "{pair:?} {after:?}");
        Ok(())
    })
}

#[test]
fn changes_during_an_expired_watch_are_sent_afterwards() -> Result<()> {
    run(async {
        let mut stage = Stage::new(Lane::Rough, "expired").await?;
        write_some(&stage).await?;
        let proxy = stage.cluster.proxy().await?;
        stage.via(&proxy.endpoint())?;
        stage.agent.start_live().await?;
        let followers = stage.followers()?;
        let pair = stage.settled(&followers).await?;
        let lists = |of: &str| {
            let of = format!("/{of}");
            proxy.seen(|seen| {
                let lists = !seen.query.contains("watch") || seen.query.contains("sendInitialEvents");
                seen.path.ends_with(&of) && lists && seen.status == Some(200)
            })
        };
        let listed = (lists("services").len(), lists("endpointslices").len());

        proxy.rule(ApiMatch::any(), ApiFault::Close);
        proxy.close_all();
        wait_for_staleness(&followers.watch, true).await?;
        change_some(&stage, 8001).await?;
        let cluster = &mut *stage.cluster;
        cluster.api.terminate().await?;
        cluster.etcd.compact().await?;
        cluster.api.start_again().await?;
        change_some(&stage, 8002).await?;
        stage.cluster.etcd.compact().await?;
        ensure!(followers.pair().await? == pair, "nobody can know");

        proxy.clear_rules();
        let after = stage.settled(&followers).await?;
        ensure!(after.0 == pair.0 && after.1 > pair.1, "{pair:?} {after:?}");
        let now = (lists("services").len(), lists("endpointslices").len());
        ensure!(
            now.0 > listed.0 && now.1 > listed.1,
            "the watches were to expire: lists {listed:?}, then {now:?}"
        );
        let resets = stage.metric("keelson_endpoints_resets_total").await?;
        ensure!(resets == 0.0, "consumers get what changed, not everything: {resets} resets");
        stage.wait_until_current().await
    })
}

#[test]
fn the_stored_state_is_served_while_the_api_server_is_unreachable_at_the_start() -> Result<()> {
    run(async {
        let mut stage = Stage::new(Lane::Rough, "unreachable").await?;
        write_some(&stage).await?;
        stage.agent.start_live().await?;
        let followers = stage.followers()?;
        let pair = stage.settled(&followers).await?;
        let truth = stage.truth().await?;
        stage.terminate().await?;
        stage.cluster.api.terminate().await?;
        let (watch, next) = (followers.watch.seen().len(), followers.next.seen().len());

        stage.agent.start_live().await?;
        let newcomers = stage.followers()?;
        for follower in newcomers.both() {
            let whole_and_stale = |whole: &FullState| {
                whole.ensure_equals(&truth)?;
                ensure!(whole.pair() == pair && whole.position.stale, "{:?}", whole.position);
                Ok(())
            };
            follower.until("what was there before is served", whole_and_stale).await?;
        }
        stage.wait_until_stale("").await?;
        stage.cluster.api.start_again().await?;
        wait_for_staleness(&newcomers.watch, false).await?;
        wait_for_staleness(&followers.watch, false).await?;
        stage.wait_until_current().await?;
        ensure!(stage.settled(&newcomers).await? == pair && stage.settled(&followers).await? == pair);
        check_same_revision(&followers, watch, next, pair)?;
        check_same_revision(&newcomers, 0, 1, pair)?;

        // The same with changes meanwhile: no consumer sees them before all objects are known, and then all at once.
        stage.terminate().await?;
        change_some(&stage, 8001).await?;
        stage.cluster.api.terminate().await?;
        stage.agent.start_live().await?;
        wait_for_staleness(&followers.watch, true).await?;
        for follower in [&newcomers.watch, &newcomers.next, &followers.watch, &followers.next] {
            ensure!(follower.pair() == pair, "{:?}", follower.pair());
        }
        stage.cluster.api.start_again().await?;
        let after = stage.settled(&followers).await?;
        ensure!(after == (pair.0, pair.1 + 1), "what was missed is one revision: {pair:?} {after:?}");
        stage.settled(&newcomers).await.map(drop)
    })
}

#[test]
fn nothing_is_served_before_every_kind_was_listed() -> Result<()> {
    run(async {
        let mut stage = Stage::new(Lane::Rough, "unlisted").await?;
        write_some(&stage).await?;
        let proxy = stage.cluster.proxy().await?;
        stage.via(&proxy.endpoint())?;
        for missing in ["/services", "/endpointslices", "/servicecidrs", "/nodes"] {
            let held = proxy.rule(ApiMatch::path_if(move |path| is_of(path, missing)), ApiFault::Hold);
            stage.agent.start_live().await?;
            let followers = stage.followers()?;
            eventually_slow("everything else was listed", || async {
                let state = stage.state().await?;
                let synced = |synced: bool| {
                    let sources = state["sources"].as_array().into_iter().flatten();
                    sources.filter(|source| source["synced"] == synced).count()
                };
                ensure!(state["state"] == "pending" && synced(true) == 3 && synced(false) == 1, "{state}");
                Ok(())
            })
            .await?;
            for follower in followers.both() {
                ensure!(follower.seen().is_empty(), "{missing} were not listed: {:?}", follower.seen());
            }
            proxy.remove(held);
            stage.settled(&followers).await?;
            let seen = followers.next.seen();
            if seen.len() != 1 || seen[0].rev != 1 {
                bail!("the first state is complete: {seen:?}");
            }
            stage.agent.kill9()?;
            std::fs::remove_dir_all(stage.agent.state_dir())?;
        }
        Ok(())
    })
}

/// Whether a request is for a collection, or for an object in it.
fn is_of(path: &str, collection: &str) -> bool {
    path.split('?').next().is_some_and(|path| path.contains(collection))
}
