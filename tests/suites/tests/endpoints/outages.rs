//! The API server stopped, restarted, or without the version at which a watch was.

use crate::common::{Lane, TestEnv, eventually_slow, run};
use anyhow::{Result, bail, ensure};
use keelson_cluster::endpoints::{Follower, Followers, FullState, Kind, endpoint, port, service, slice};
use keelson_cluster::kube::{ApiFault, ApiMatch};
use serde_json::json;

/// Writes three Services with a slice each.
async fn write_some(env: &TestEnv) -> Result<()> {
    for name in ["one", "two", "three"] {
        let ports = [port("p", 80)];
        env.writer.create(Kind::Service, &service(name, &ports, &json!({}))).await?;
        let ready =
            [endpoint("10.200.7.1", &env.name, &json!({})), endpoint("10.200.7.2", "elsewhere", &json!({}))];
        env.writer.create(Kind::Slice, &slice(name, "a", &ports, &ready)).await?;
    }
    Ok(())
}

/// Changes one, deletes one, creates one.
async fn change_some(env: &TestEnv, port_number: u16) -> Result<()> {
    let ports = [port("p", port_number)];
    env.writer.patch(Kind::Slice, "one-a", &json!({"ports": ports})).await?;
    env.writer.delete(Kind::Service, "two").await?;
    let name = format!("made-{port_number}");
    env.writer.create(Kind::Service, &service(&name, &ports, &json!({}))).await?;
    env.writer.create(Kind::Service, &service("two", &[port("q", port_number)], &json!({}))).await.map(drop)
}

/// Waits until a consumer of `Watch` is told that the state is stale, or that it is not.
async fn wait_for_staleness(follower: &Follower, stale: bool) -> Result<()> {
    let message = |full_state: &FullState| {
        let position = &full_state.position;
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
        let mut env = TestEnv::new(Lane::Rough, "api-restart").await?;
        write_some(&env).await?;
        env.agent.start_live().await?;
        let followers = env.followers()?;
        let pair = env.settled(&followers).await?;
        env.wait_until_current().await?;
        let (watch, next) = (followers.watch.seen().len(), followers.next.seen().len());

        env.cluster.api.terminate().await?;
        wait_for_staleness(&followers.watch, true).await?;
        env.wait_until_stale("").await?;
        env.cluster.api.start_again().await?;
        wait_for_staleness(&followers.watch, false).await?;
        env.wait_until_current().await?;
        ensure!(env.settled(&followers).await? == pair);
        check_same_revision(&followers, watch, next, pair)?;

        // Killed, and back at once: whether anything notices is random.
        env.cluster.api.kill9()?;
        env.cluster.api.start_again().await?;
        change_some(&env, 8001).await?;
        let after = env.settled(&followers).await?;
        ensure!(after.0 == pair.0 && after.1 > pair.1, "{pair:?} {after:?}");
        Ok(())
    })
}

#[test]
fn changes_during_an_expired_watch_are_sent_afterwards() -> Result<()> {
    run(async {
        let mut env = TestEnv::new(Lane::Rough, "expired").await?;
        write_some(&env).await?;
        let proxy = env.cluster.proxy().await?;
        env.via(&proxy.endpoint())?;
        env.agent.start_live().await?;
        let followers = env.followers()?;
        let pair = env.settled(&followers).await?;
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
        change_some(&env, 8001).await?;
        let cluster = &mut *env.cluster;
        cluster.api.terminate().await?;
        cluster.etcd.compact().await?;
        cluster.api.start_again().await?;
        change_some(&env, 8002).await?;
        env.cluster.etcd.compact().await?;
        ensure!(followers.pair().await? == pair, "nobody can know");

        proxy.clear_rules();
        let after = env.settled(&followers).await?;
        ensure!(after.0 == pair.0 && after.1 > pair.1, "{pair:?} {after:?}");
        let now = (lists("services").len(), lists("endpointslices").len());
        ensure!(
            now.0 > listed.0 && now.1 > listed.1,
            "the watches were to expire: lists {listed:?}, then {now:?}"
        );
        let resets = env.metric("keelson_endpoints_resets_total").await?;
        ensure!(resets == 0.0, "consumers get what changed, not everything: {resets} resets");
        env.wait_until_current().await
    })
}

#[test]
fn the_stored_state_is_served_while_the_api_server_is_unreachable_at_the_start() -> Result<()> {
    run(async {
        let mut env = TestEnv::new(Lane::Rough, "unreachable").await?;
        write_some(&env).await?;
        env.agent.start_live().await?;
        let followers = env.followers()?;
        let pair = env.settled(&followers).await?;
        let expected = env.expected().await?;
        env.terminate().await?;
        env.cluster.api.terminate().await?;
        let (watch, next) = (followers.watch.seen().len(), followers.next.seen().len());

        env.agent.start_live().await?;
        let newcomers = env.followers()?;
        for follower in newcomers.both() {
            let whole_and_stale = |full_state: &FullState| {
                full_state.ensure_equals(&expected)?;
                ensure!(full_state.pair() == pair && full_state.position.stale, "{:?}", full_state.position);
                Ok(())
            };
            follower.until("what was there before is served", whole_and_stale).await?;
        }
        env.wait_until_stale("").await?;
        env.cluster.api.start_again().await?;
        wait_for_staleness(&newcomers.watch, false).await?;
        wait_for_staleness(&followers.watch, false).await?;
        env.wait_until_current().await?;
        ensure!(env.settled(&newcomers).await? == pair && env.settled(&followers).await? == pair);
        check_same_revision(&followers, watch, next, pair)?;
        check_same_revision(&newcomers, 0, 1, pair)?;

        // The same with changes meanwhile: no consumer sees them before all objects are known, and then all at once.
        env.terminate().await?;
        change_some(&env, 8001).await?;
        env.cluster.api.terminate().await?;
        env.agent.start_live().await?;
        wait_for_staleness(&followers.watch, true).await?;
        for follower in [&newcomers.watch, &newcomers.next, &followers.watch, &followers.next] {
            ensure!(follower.pair() == pair, "{:?}", follower.pair());
        }
        env.cluster.api.start_again().await?;
        let after = env.settled(&followers).await?;
        ensure!(after == (pair.0, pair.1 + 1), "what was missed is one revision: {pair:?} {after:?}");
        env.settled(&newcomers).await.map(drop)
    })
}

#[test]
fn nothing_is_served_before_every_kind_was_listed() -> Result<()> {
    run(async {
        let mut env = TestEnv::new(Lane::Rough, "unlisted").await?;
        write_some(&env).await?;
        let proxy = env.cluster.proxy().await?;
        env.via(&proxy.endpoint())?;
        for missing in ["/services", "/endpointslices", "/servicecidrs", "/nodes"] {
            let held = proxy.rule(ApiMatch::path_if(move |path| is_of(path, missing)), ApiFault::Hold);
            env.agent.start_live().await?;
            let followers = env.followers()?;
            eventually_slow("everything else was listed", || async {
                let state = env.state().await?;
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
            env.settled(&followers).await?;
            let seen = followers.next.seen();
            if seen.len() != 1 || seen[0].rev != 1 {
                bail!("the first state is complete: {seen:?}");
            }
            env.agent.kill9()?;
            std::fs::remove_dir_all(env.agent.state_dir())?;
        }
        Ok(())
    })
}

/// Whether a request is for a collection, or for an object in it.
fn is_of(path: &str, collection: &str) -> bool {
    path.split('?').next().is_some_and(|path| path.contains(collection))
}
