//! Broken manifests, and a missing folder: valid objects stay in use, and the state is reported as stale.

use crate::python::Generated;
use crate::rig::{Stage, ensure_contains, eventually_slow, plain};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::Followers;
use serde_json::json;
use std::fs;

/// Waits until the agent reports a stale state with a reason that contains these words.
async fn stale(stage: &Stage, words: &[&str]) -> Result<()> {
    eventually_slow("the agent reports stale endpoints", || async {
        let state = stage.state().await?;
        ensure!(state["state"] == "stale", "{state}");
        ensure_contains(state["reason"].as_str().unwrap_or_default(), words)?;
        ensure_contains(&stage.endpoints(&[]).await?.success()?.out, &["STALE"])?;
        let metrics = stage.agent.http_get("/metrics").await?.success()?.text();
        ensure_contains(&metrics, &["keelson_endpoints_stale 1"])
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_manifest_is_reported_and_its_last_valid_version_stays() -> Result<()> {
    let stage = Stage::started().await?;
    let instance_id = stage.wait_for_rev(1).await?;
    // The file itself becomes invalid, and another one appears that never was valid.
    stage
        .manifests
        .write("web.json", "{\"apiVersion\": \"v1\",\n\"kind\": \"Service\",\n\"metadata\": oops}")?;
    stage.manifests.write("new.yaml", "apiVersion: v1\nkind: Service\nmetadata:\n  name: [\n")?;
    eventually_slow("both faults are reported", || async {
        let state = stage.state().await?;
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
    let output = stage.endpoints(&[]).await?.success()?.out;
    ensure_contains(
        &output,
        &["web.json:3: ", "(the last valid version stays in use)", "new.yaml:", "ns         web"],
    )?;
    let log = stage.agent.log()?;
    ensure_contains(&log, &["web.json", "new.yaml"])?;
    // Other files still apply, and so does this one once it is valid again.
    stage.manifests.put("other.json", &plain("other", "10.96.0.2", &[]))?;
    ensure!(stage.wait_for_rev(2).await? == instance_id);
    stage.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.2"]))?;
    stage.manifests.remove("new.yaml")?;
    ensure!(stage.wait_for_rev(3).await? == instance_id);
    eventually_slow("no fault is left", || async {
        let state = stage.state().await?;
        ensure!(state["faults"] == json!([]), "{state}");
        Ok(())
    })
    .await
}

/// E20: with either API of a client.
#[tokio::test(flavor = "multi_thread")]
async fn e20_a_missing_folder_makes_the_state_stale_at_the_same_revision() -> Result<()> {
    let mut stage = Stage::started().await?;
    let instance_id = stage.wait_for_rev(1).await?;
    let followers = Followers::start(&stage.target(), |_| Ok(()))?;
    stage.wait_for_watchers(2, 1).await?;
    let (folder, away) = (stage.manifests.path().to_owned(), stage.scratch.path().join("away"));
    fs::rename(&folder, &away).context("cannot rename the folder")?;
    let place = folder.display().to_string();
    stale(&stage, &[&place]).await?;
    // Watching clients are told, and so are clients that poll with the client library.
    followers
        .until("the state is stale", |whole| {
            ensure!(
                whole.position.stale && whole.position.rev == 1 && whole.services.len() == 1,
                "{:?}",
                whole.position
            );
            Ok(())
        })
        .await?;
    followers.check_invariants()?;
    let output = stage.watch(&["--once"]).await?.success()?;
    ensure_contains(&output.out, &["ns/web"])?;
    ensure_contains(&output.err, &["this state is stale since ", &place])?;

    // A restart and a kill change nothing: the state on disk is served, and is stale.
    for kill in [false, true] {
        match kill {
            true => stage.agent.kill9()?,
            false => ensure!(stage.agent.terminate().await?.success()),
        }
        stage.agent.start_live().await?;
        stale(&stage, &[&place]).await?;
        let state = stage.state().await?;
        ensure!(state["instance_id"] == json!(instance_id.to_string()) && state["rev"] == 1, "{state}");
        stage.wait_for_watchers(2, 1).await?;
        let generated = Generated::generate(&stage.scratch).await?;
        let mut client = generated.client("stale", &stage.target(), &["--count", "1"])?;
        let state = client.state().await?;
        ensure!((state.instance_id, state.rev) == (instance_id, 1), "{state:?}");
        ensure!(state.addresses("web") == Some(vec!["10.1.0.1"]), "{state:?}");
    }

    // The folder is back: unchanged, and then with a new object.
    fs::rename(&away, &folder).context("cannot rename the folder back")?;
    ensure!(stage.wait_for_rev(1).await? == instance_id);
    followers
        .until("the state is current", |whole| {
            ensure!(!whole.position.stale && whole.position.rev == 1, "{:?}", whole.position);
            Ok(())
        })
        .await?;
    stage.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.2"]))?;
    ensure!(stage.wait_for_rev(2).await? == instance_id);
    followers
        .until("the next state", |whole| {
            ensure!(!whole.position.stale && whole.position.rev == 2, "{:?}", whole.position);
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
    let mut stage = Stage::new()?;
    fs::remove_dir(stage.manifests.path())?;
    stage.agent.start_live().await?;
    let followers = Followers::start(&stage.target(), |_| Ok(()))?;
    let place = stage.manifests.path().display().to_string();
    eventually_slow("callers wait for the first state", || async {
        let state = stage.state().await?;
        ensure!(state["state"] == "pending" && state["rev"] == 0, "{state}");
        ensure!(state["watchers"].as_array().is_some_and(|all| all.len() == 2), "{state}");
        ensure_contains(&state.to_string(), &[&place])?;
        ensure_contains(&stage.endpoints(&[]).await?.success()?.out, &["PENDING", &place])
    })
    .await?;
    ensure!(followers.watch.seen().is_empty() && followers.next.seen().is_empty());
    fs::create_dir(stage.manifests.path())?;
    stage.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.1"]))?;
    followers
        .until("the first state with the Service", |whole| {
            ensure!(
                whole.service("ns/web").is_some_and(|web| web.endpoints.len() == 1),
                "{:?}",
                whole.services
            );
            Ok(())
        })
        .await?;
    followers.check_invariants()
}
