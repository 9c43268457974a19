//! P6: a state disk that hangs.

use crate::rig::{Stage, eventually_slow, plain};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::Followers;
use keelson_harness::disk::LoopDisk;

const DISK: u64 = 32 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn p6_services_change_while_the_state_disk_hangs_and_are_durable_when_it_answers() -> Result<()> {
    let mut stage = Stage::new()?;
    stage.agent.set("endpoints.write_timeout", "1s")?;
    let disk = LoopDisk::mount(&stage.scratch.path().join("state.ext4"), &stage.agent.state_dir(), DISK)?;
    stage.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.1"]))?;
    stage.agent.start_live().await?;
    let before = stage.wait_for_rev(1).await?;
    let followers = Followers::start(&stage.target(), |_| Ok(()))?;
    let arrives = |address: &'static str| {
        followers.until("the change arrives", move |whole| {
            let service = whole.service("ns/web").context("no Service")?;
            let ips = service.endpoints[0].i_ps.as_ref().context("no address")?;
            ensure!(ips.v4 == [address], "{service:?}");
            Ok(())
        })
    };
    arrives("10.1.0.1").await?;
    let frozen = disk.freeze_until_dropped()?;
    for address in ["10.1.0.2", "10.1.0.3"] {
        stage.manifests.put("web.json", &plain("web", "10.96.0.1", &[address]))?;
        arrives(address).await?;
    }
    let state = stage.state().await?;
    ensure!(state["durable"] == false && state["state"] == "synced", "{state}");
    drop(frozen);
    eventually_slow("it is on disk", || async {
        let state = stage.state().await?;
        ensure!(state["durable"] == true, "{state}");
        Ok(())
    })
    .await?;
    let (instance, rev) = followers.pair().await?;
    ensure!(instance != before, "what was not on disk needs an identity of its own");
    followers.check_invariants()?;
    stage.agent.kill9()?;
    stage.agent.start_live().await?;
    ensure!(stage.wait_for_rev(rev).await? == instance, "a restart continues at the last revision");
    Ok(())
}
