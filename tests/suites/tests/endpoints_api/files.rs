//! Broken manifests, and a missing folder: valid objects stay in use, and the state is reported as stale.

use crate::common::{TestEnv, ensure_contains, eventually_slow, plain};
use crate::python::Generated;
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::Followers;
use serde_json::json;
use std::fs;

/// Waits until the agent reports a stale state with a reason that contains these words.
async fn stale(env: &TestEnv, words: &[&str]) -> Result<()> {
    eventually_slow("the agent reports stale endpoints", || async {
        let state = env.state().await?;
        ensure!(state["state"] == "stale", "{state}");
        ensure_contains(state["reason"].as_str().unwrap_or_default(), words)?;
        ensure_contains(&env.endpoints(&[]).await?.success()?.out, &["STALE"])?;
        let metrics = env.agent.http_get("/metrics").await?.success()?.text();
        ensure_contains(&metrics, &["keelson_endpoints_stale 1"])
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_manifest_is_reported_and_its_last_valid_version_stays() -> Result<()> {
    let env = TestEnv::started().await?;
    let instance_id = env.wait_for_rev(1).await?;
    // The file itself becomes invalid, and another one appears that never was valid.
    env.manifests
        .write("web.json", "{\"apiVersion\": \"v1\",\n\"kind\": \"Service\",\n\"metadata\": oops}")?;
    env.manifests.write("new.yaml", "apiVersion: v1\nkind: Service\nmetadata:\n  name: [\n")?;
    eventually_slow("both faults are reported", || async {
        let state = env.state().await?;
        let faults = state["faults"].as_array().context("no faults")?;
        ensure!(faults.len() == 2 && state["rev"] == 1, "{state}");
        let fault = |name: &str| {
            faults.iter().find(|fault| fault["file"].as_str().is_some_and(|f| f.ends_with(name)))
        };
        let (web, new) = (fault("web.json").context("web.json")?, fault("new.yaml").context("new.yaml")?);
        ensure!(web["earlier_in_use"] == true && web["line"] == 3, "{web}");
        ensure!(new["earlier_in_use"] == false && new["line"].as_u64() >= Some(4), "{new}");
        Ok(())
    })
    .await?;
    let output = env.endpoints(&[]).await?.success()?.out;
    ensure_contains(
        &output,
        &["web.json:3: ", "(the last valid version stays in use)", "new.yaml:", "ns         web"],
    )?;
    let log = env.agent.log()?;
    ensure_contains(&log, &["web.json", "new.yaml"])?;
    // Other files still apply, and so does this one once it is valid again.
    env.manifests.put("other.json", &plain("other", "10.96.0.2", &[]))?;
    ensure!(env.wait_for_rev(2).await? == instance_id);
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.2"]))?;
    env.manifests.remove("new.yaml")?;
    ensure!(env.wait_for_rev(3).await? == instance_id);
    eventually_slow("no fault is left", || async {
        let state = env.state().await?;
        ensure!(state["faults"] == json!([]), "{state}");
        Ok(())
    })
    .await
}

/// E20: with either API of a client.
#[tokio::test(flavor = "multi_thread")]
async fn e20_a_missing_folder_makes_the_state_stale_at_the_same_revision() -> Result<()> {
    let mut env = TestEnv::started().await?;
    let instance_id = env.wait_for_rev(1).await?;
    let followers = Followers::start(&env.target(), |_| Ok(()))?;
    env.wait_for_watchers(2, 1).await?;
    let (folder, away) = (env.manifests.path().to_owned(), env.scratch.path().join("away"));
    fs::rename(&folder, &away).context("cannot rename the folder")?;
    let place = folder.display().to_string();
    stale(&env, &[&place]).await?;
    // Watching clients are told, and so are clients that poll with the client library.
    followers
        .until("the state is stale", |full_state| {
            ensure!(
                full_state.position.stale && full_state.position.rev == 1 && full_state.services.len() == 1,
                "{:?}",
                full_state.position
            );
            Ok(())
        })
        .await?;
    followers.check_invariants()?;
    let output = env.watch(&["--once"]).await?.success()?;
    ensure_contains(&output.out, &["ns/web"])?;
    ensure_contains(&output.err, &["this state is stale since ", &place])?;

    // A restart and a kill change nothing: the state on disk is served, and is stale.
    for kill in [false, true] {
        match kill {
            true => env.agent.kill9()?,
            false => ensure!(env.agent.terminate().await?.success()),
        }
        env.agent.start_live().await?;
        stale(&env, &[&place]).await?;
        let state = env.state().await?;
        ensure!(state["instance_id"] == json!(instance_id.to_string()) && state["rev"] == 1, "{state}");
        env.wait_for_watchers(2, 1).await?;
        let generated = Generated::generate(&env.scratch).await?;
        let mut client = generated.client("stale", &env.target(), &["--count", "1"])?;
        let state = client.state().await?;
        ensure!((state.instance_id, state.rev) == (instance_id, 1), "{state:?}");
        ensure!(state.addresses("web") == Some(vec!["10.1.0.1"]), "{state:?}");
    }

    // The folder is back: unchanged, and then with a new object.
    fs::rename(&away, &folder).context("cannot rename the folder back")?;
    ensure!(env.wait_for_rev(1).await? == instance_id);
    followers
        .until("the state is current", |full_state| {
            ensure!(!full_state.position.stale && full_state.position.rev == 1, "{:?}", full_state.position);
            Ok(())
        })
        .await?;
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.2"]))?;
    ensure!(env.wait_for_rev(2).await? == instance_id);
    followers
        .until("the next state", |full_state| {
            ensure!(!full_state.position.stale && full_state.position.rev == 2, "{:?}", full_state.position);
            Ok(())
        })
        .await?;
    followers.check_invariants()?;
    // Current, stale, current again, and the new state: the restarts in between sent nothing.
    ensure!(followers.next.seen().len() == 4, "{:?}", followers.next.seen());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_served_before_the_folder_was_read() -> Result<()> {
    let mut env = TestEnv::new()?;
    fs::remove_dir(env.manifests.path())?;
    env.agent.start_live().await?;
    let followers = Followers::start(&env.target(), |_| Ok(()))?;
    let place = env.manifests.path().display().to_string();
    eventually_slow("callers wait for the first state", || async {
        let state = env.state().await?;
        ensure!(state["state"] == "pending" && state["rev"] == 0, "{state}");
        ensure!(state["watchers"].as_array().is_some_and(|all| all.len() == 2), "{state}");
        ensure_contains(&state.to_string(), &[&place])?;
        ensure_contains(&env.endpoints(&[]).await?.success()?.out, &["PENDING", &place])
    })
    .await?;
    ensure!(followers.watch.seen().is_empty() && followers.next.seen().is_empty());
    fs::create_dir(env.manifests.path())?;
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.1"]))?;
    followers
        .until("the first state with the Service", |full_state| {
            ensure!(
                full_state.service("ns/web").is_some_and(|web| web.endpoints.len() == 1),
                "{:?}",
                full_state.services
            );
            Ok(())
        })
        .await?;
    followers.check_invariants()
}
