//! A full disk.

use crate::rig::{Lane, Stage, run};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::{FullState, Kind, endpoint, port, service, slice};
use keelson_harness::disk::{fill_up, mount_tmpfs};
use keelson_harness::util::eventually;
use serde_json::json;
use std::fs;
use std::time::Duration;

/// After a full disk the store's database may hang when it is closed, written and opened: each has a timeout, at most a
/// minute, and then the store continues with a copy.
const REPAIR_LIMIT: Duration = Duration::from_secs(300);

/// Writes a Service with a large slice.
async fn write_one(stage: &Stage, number: usize) -> Result<()> {
    let (name, ports) = (format!("svc-{number:03}"), [port("p", 80)]);
    stage.writer.create(Kind::Service, &service(&name, &ports, &json!({}))).await?;
    let endpoints: Vec<_> = (0..250)
        .map(|at| {
            let host = json!({"hostname": format!("host-{at}-{number}")});
            endpoint(&format!("10.201.{}.{at}", number % 250), "elsewhere", &host)
        })
        .collect();
    stage.writer.create(Kind::Slice, &slice(&name, "a", &ports, &endpoints)).await.map(drop)
}

#[test]
fn on_a_full_disk_states_are_served_as_a_new_instance_until_space_is_freed() -> Result<()> {
    run(async {
        let mut stage = Stage::new(Lane::Calm, "full-disk").await?;
        let disk = stage.agent.state_dir();
        mount_tmpfs(&disk, "32m")?;
        write_one(&stage, 0).await?;
        stage.agent.start_live().await?;
        let mut followers = stage.followers()?;
        let durable = stage.settled(&followers).await?;
        ensure!(stage.state().await?["durable"] == true);

        let ballast = fill_up(&disk)?;
        let mut written = 0;
        // The store still has some space in its files.
        while stage.state().await?["durable"] == true {
            written += 1;
            ensure!(written < 400, "the store is never full");
            write_one(&stage, written).await?;
            let name = stage.qualified_name(&format!("svc-{written:03}"));
            followers.until("it is seen", |whole| whole.service(&name).map(drop).context("no")).await?;
        }
        eprintln!("the disk took {written} Services more");
        let memory = stage.settled(&followers).await?;
        ensure!(memory.0 != durable.0, "what is not on disk is of another instance: {durable:?} {memory:?}");
        ensure!(stage.metric("keelson_endpoints_durable").await? == 0.0);
        ensure!(stage.metric("keelson_endpoints_persist_failures_total").await? >= 1.0);
        ensure!(
            stage.endpoints_output(&["--max", "0"]).await?.contains("not on disk"),
            "{}",
            stage.endpoints_output(&[]).await?
        );
        // Changes continue, within that instance.
        stage.writer.delete(Kind::Service, "svc-000").await?;
        let name = stage.qualified_name("svc-000");
        let gone = |whole: &FullState| {
            ensure!(whole.service(&name).is_none(), "it is there");
            Ok(())
        };
        followers.until("it is gone", gone).await?;
        let later = stage.settled(&followers).await?;
        ensure!(later.0 == memory.0 && later.1 > memory.1, "{memory:?} {later:?}");

        fs::remove_file(&ballast)?;
        eventually(REPAIR_LIMIT, "it is on disk again", || async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let state = stage.state().await?;
            ensure!(state["durable"] == true, "{state}");
            Ok(())
        })
        .await?;
        ensure!(stage.metric("keelson_endpoints_durable").await? == 1.0);
        let repaired = stage.settled(&followers).await?;
        ensure!(repaired == later, "to write it down is no news: {later:?} {repaired:?}");
        stage.kill_and_start().await?;
        stage.wait_until_current().await?;
        ensure!(stage.settled(&followers).await? == repaired, "what is on disk survives");

        // Killed while its state is not on disk, the agent continues with the state on disk. No pair of instance and
        // revision may be reused with other contents, which the consumers check.
        let ballast = fill_up(&disk)?;
        while stage.state().await?["durable"] == true {
            written += 1;
            ensure!(written < 400, "the store is never full");
            write_one(&stage, written).await?;
            stage.settled(&followers).await?;
        }
        let memory = stage.settled(&followers).await?;
        ensure!(memory.0 != repaired.0, "{repaired:?} {memory:?}");
        stage.agent.kill9()?;
        fs::remove_file(&ballast)?;
        write_one(&stage, 500).await?;
        followers.restart().await?;
        stage.agent.start_live().await?;
        let after = stage.settled(&followers).await?;
        ensure!(
            after.0 == repaired.0 && after.1 > repaired.1,
            "it continues from the disk: {repaired:?} {after:?}"
        );
        ensure!(stage.state().await?["durable"] == true);
        Ok(())
    })
}
