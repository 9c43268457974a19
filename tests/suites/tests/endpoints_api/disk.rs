//! P6: a state disk that hangs.

use crate::common::{TestEnv, eventually_slow, plain};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::Followers;
use keelson_harness::disk::LoopDisk;

const DISK: u64 = 32 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn p6_services_change_while_the_state_disk_hangs_and_are_durable_when_it_answers() -> Result<()> {
    let mut env = TestEnv::new()?;
    env.agent.set("endpoints.write_timeout", "1s")?;
    let disk = LoopDisk::mount(&env.scratch.path().join("state.ext4"), &env.agent.state_dir(), DISK)?;
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.1"]))?;
    env.agent.start_live().await?;
    let before = env.wait_for_rev(1).await?;
    let followers = Followers::start(&env.target(), |_| Ok(()))?;
    let arrives = |address: &'static str| {
        followers.until("the change arrives", move |full_state| {
            let service = full_state.service("ns/web").context("no Service")?;
            let ips = service.endpoints[0].i_ps.as_ref().context("no address")?;
            ensure!(ips.v4 == [address], "{service:?}");
            Ok(())
        })
    };
    arrives("10.1.0.1").await?;
    let frozen = disk.freeze_until_dropped()?;
    for address in ["10.1.0.2", "10.1.0.3"] {
        env.manifests.put("web.json", &plain("web", "10.96.0.1", &[address]))?;
        arrives(address).await?;
    }
    let state = env.state().await?;
    ensure!(state["durable"] == false && state["state"] == "synced", "{state}");
    drop(frozen);
    eventually_slow("it is on disk", || async {
        let state = env.state().await?;
        ensure!(state["durable"] == true, "{state}");
        Ok(())
    })
    .await?;
    let (instance, rev) = followers.pair().await?;
    ensure!(instance != before, "what was not on disk needs an identity of its own");
    followers.check_invariants()?;
    env.agent.kill9()?;
    env.agent.start_live().await?;
    ensure!(env.wait_for_rev(rev).await? == instance, "a restart continues at the last revision");
    Ok(())
}
