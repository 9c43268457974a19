//! A full disk.

use crate::common::{Lane, TestEnv, run};
use anyhow::{Result, ensure};
use keelson_cluster::endpoints::{Kind, endpoint, port, service, slice};
use keelson_harness::disk::{fill_up, mount_tmpfs};
use keelson_harness::util::eventually;
use serde_json::json;
use std::fs;
use std::time::Duration;

/// After a full disk the store's database may hang when it is closed, written and opened: each has a timeout, at most a
/// minute, and then the store continues with a copy.
const REPAIR_LIMIT: Duration = Duration::from_secs(300);

/// Writes a Service with a large slice.
async fn write_one(env: &TestEnv, number: usize) -> Result<()> {
    let (name, ports) = (format!("svc-{number:03}"), [port("p", 80)]);
    env.writer.create(Kind::Service, &service(&name, &ports, &json!({}))).await?;
    let endpoints: Vec<_> = (0..250)
        .map(|at| {
            let host = json!({"hostname": format!("host-{at}-{number}")});
            endpoint(&format!("10.201.{}.{at}", number % 250), "elsewhere", &host)
        })
        .collect();
    env.writer.create(Kind::Slice, &slice(&name, "a", &ports, &endpoints)).await.map(drop)
}

#[test]
fn on_a_full_disk_states_are_served_as_a_new_instance_until_space_is_freed() -> Result<()> {
    run(async {
        let mut env = TestEnv::new(Lane::Calm, "full-disk").await?;
        let disk = env.agent.state_dir();
        mount_tmpfs(&disk, "32m")?;
        write_one(&env, 0).await?;
        env.agent.start_live().await?;
        let mut followers = env.followers()?;
        let durable = env.settled(&followers).await?;
        ensure!(env.state().await?["durable"] == true);

        let ballast = fill_up(&disk)?;
        let mut written = 0;
        // The store still has some space in its files.
        while env.state().await?["durable"] == true {
            written += 1;
            ensure!(written < 400, "the store is never full");
            write_one(&env, written).await?;
            let name = env.qualified_name(&format!("svc-{written:03}"));
            followers.until_service(&name).await?;
        }
        eprintln!("the disk took {written} Services more");
        let memory = env.settled(&followers).await?;
        ensure!(memory.0 != durable.0, "what is not on disk is of another instance: {durable:?} {memory:?}");
        ensure!(env.metric("keelson_endpoints_durable").await? == 0.0);
        ensure!(env.metric("keelson_endpoints_persist_failures_total").await? >= 1.0);
        ensure!(
            env.endpoints_output(&["--max", "0"]).await?.contains("not on disk"),
            "{}",
            env.endpoints_output(&[]).await?
        );
        // Changes continue, within that instance.
        env.writer.delete(Kind::Service, "svc-000").await?;
        let name = env.qualified_name("svc-000");
        followers.until_no_service(&name).await?;
        let later = env.settled(&followers).await?;
        ensure!(later.0 == memory.0 && later.1 > memory.1, "{memory:?} {later:?}");

        fs::remove_file(&ballast)?;
        eventually(REPAIR_LIMIT, "it is on disk again", || async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let state = env.state().await?;
            ensure!(state["durable"] == true, "{state}");
            Ok(())
        })
        .await?;
        ensure!(env.metric("keelson_endpoints_durable").await? == 1.0);
        let repaired = env.settled(&followers).await?;
        ensure!(repaired == later, "to write it down is no news: {later:?} {repaired:?}");
        env.kill_and_start().await?;
        env.wait_until_current().await?;
        ensure!(env.settled(&followers).await? == repaired, "what is on disk survives");

        // Killed while its state is not on disk, the agent continues with the state on disk, as a new instance: a later
        // revision was served. No pair of instance and revision may be reused with other contents, which the consumers check.
        let ballast = fill_up(&disk)?;
        while env.state().await?["durable"] == true {
            written += 1;
            ensure!(written < 400, "the store is never full");
            write_one(&env, written).await?;
            env.settled(&followers).await?;
        }
        let memory = env.settled(&followers).await?;
        ensure!(memory.0 != repaired.0, "{repaired:?} {memory:?}");
        env.agent.kill9()?;
        fs::remove_file(&ballast)?;
        write_one(&env, 500).await?;
        followers.restart().await?;
        env.agent.start_live().await?;
        let after = env.settled(&followers).await?;
        ensure!(after.0 != repaired.0 && after.0 != memory.0, "{repaired:?} {memory:?} {after:?}");
        ensure!(after.1 > repaired.1, "it continues from the disk: {repaired:?} {after:?}");
        ensure!(env.state().await?["durable"] == true);
        Ok(())
    })
}
