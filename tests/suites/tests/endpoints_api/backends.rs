//! Status reports of backends, and where they are shown.

use crate::common::{TestEnv, ensure_contains, eventually_slow, plain};
use anyhow::{Result, ensure};
use keelson_client::{Backend, Reported, Reporter};

/// The report of a backend that has applied this state.
fn synced(instance_id: u64, rev: u64) -> Backend {
    Backend {
        name: "nft".into(),
        pid: std::process::id(),
        version: "9.9.9".into(),
        debug: "unix:///run/elsewhere/proxy.sock".into(),
        http: "http://127.0.0.1:9/".into(),
        instance_id,
        rev,
        state: "synced".into(),
        last_sync_unix_ms: 1_700_000_000_000,
        service_ports: 1,
        ..Backend::default()
    }
}

async fn reported(reporter: &mut Reporter, backend: Backend) -> Result<()> {
    ensure!(reporter.report(backend).await? == Reported::Accepted, "the agent knows no reports");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn backend_reports_are_shown_by_command_json_and_metrics() -> Result<()> {
    let env = TestEnv::started().await?;
    let instance_id = env.wait_for_rev(1).await?;
    ensure!(env.state().await?["backends"].as_array().is_some_and(Vec::is_empty), "no backend has reported");
    let mut reporter = Reporter::new(env.target().parse()?);
    reported(&mut reporter, synced(instance_id, 1)).await?;
    let output = env.endpoints(&["--max", "0"]).await?.success()?;
    let who = format!("nft (pid {}, 9.9.9), synced, revision 1, last sync ", std::process::id());
    ensure_contains(
        &output.out,
        &[&format!("\nBackend:  {who}"), "1 service port; unix:///run/elsewhere/proxy.sock, http://"],
    )?;
    ensure!(output.out.starts_with("State:    synced\n"), "nothing is wrong: {}", output.out);

    // It falls behind, and reports a failure; a second one connects to the other listener.
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.2"]))?;
    env.wait_for_rev(2).await?;
    let failing =
        Backend { state: "failing".into(), reason: "no such\nset".into(), ..synced(instance_id, 1) };
    reported(&mut reporter, failing).await?;
    let second = Backend { name: "other".into(), pid: 1, ..synced(instance_id + 1, 7) };
    ensure!(keelson_client::report(&env.tcp.parse()?, second).await? == Reported::Accepted);
    let state = env.state().await?;
    let [nft, other] = state["backends"].as_array().map_or(&[][..], Vec::as_slice) else {
        anyhow::bail!("{}", state["backends"])
    };
    ensure!(nft["behind"] == 1 && nft["state"] == "failing" && nft["reason"] == "no such set", "{nft}");
    ensure!(nft["silent"] == false && nft["seen_unix_ms"].as_i64() > Some(1_700_000_000_000), "{nft}");
    ensure!(other["behind"] == 2 && other["rev"] == 7, "revisions of another instance do not count: {other}");
    let output = env.endpoints(&["--max", "0"]).await?.success()?;
    let wrong = format!("backend nft (pid {}) is failing: no such set\n\nState: ", std::process::id());
    ensure!(output.out.starts_with(&wrong), "{}", output.out);
    ensure_contains(
        &output.out,
        &["failing: no such set, revision 1, 1 behind", "revision 7 of another instance"],
    )?;
    let page = env.agent.json("/debug/endpoints?max=0").await?;
    ensure!(page["backends"][0]["reason"] == "no such set", "{page}");
    let metrics = env.agent.http_get("/metrics").await?.success()?.text();
    ensure_contains(
        &metrics,
        &[
            "keelson_endpoints_backends{name=\"nft\",state=\"failing\"} 1\n",
            "keelson_endpoints_backends{name=\"nft\",state=\"synced\"} 0\n",
            "keelson_endpoints_backends{name=\"other\",state=\"synced\"} 1\n",
            "keelson_endpoints_backends_behind{name=\"nft\"} 1\n",
            "keelson_endpoints_backends_behind{name=\"other\"} 2\n",
        ],
    )?;

    // An invalid report is refused with a message, and changes nothing.
    let odd = Backend { state: "splendid".into(), ..synced(instance_id, 2) };
    let refused =
        reporter.report(odd).await.map_or_else(|error| error.to_string(), |taken| format!("{taken:?}"));
    ensure_contains(&refused, &["\"splendid\" is not a state; use one of pending, synced, failing"])?;
    ensure!(env.state().await?["backends"][0]["state"] == "failing");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_agent_receives_backend_reports_again() -> Result<()> {
    let mut env = TestEnv::started().await?;
    let instance_id = env.wait_for_rev(1).await?;
    let mut reporter = Reporter::new(env.target().parse()?);
    reported(&mut reporter, synced(instance_id, 1)).await?;
    ensure!(env.agent.terminate().await?.success());
    let away = reporter.report(synced(instance_id, 1)).await;
    ensure!(away.is_err(), "no backend runs, but: {away:?}");
    // Reports do not need the delta API.
    env.agent.set("feature_gates.EndpointDeltas", false)?;
    env.agent.start_live().await?;
    env.wait_for_rev(1).await?;
    ensure!(env.state().await?["backends"].as_array().is_some_and(Vec::is_empty), "it remembers none");
    eventually_slow("the backend reports again", || async {
        // A new one each time, like one that is dropped during a call.
        let mut reporter = Reporter::new(env.target().parse()?);
        reported(&mut reporter, synced(instance_id, 1)).await
    })
    .await?;
    reported(&mut reporter, synced(instance_id, 1)).await?;
    let state = env.state().await?;
    ensure!(state["backends"].as_array().is_some_and(|all| all.len() == 1), "{}", state["backends"]);
    ensure!(state["backends"][0]["behind"] == 0, "{}", state["backends"]);
    Ok(())
}
