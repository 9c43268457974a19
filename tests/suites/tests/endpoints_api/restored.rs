//! E12: a state folder that is restored from a backup.

use crate::common::{TestEnv, ensure_contains, plain};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::Followers;
use std::fs;
use std::path::Path;

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("no {}", from.display()))? {
        let path = entry?.path();
        let target = to.join(path.file_name().context("it has a name")?);
        if path.is_dir() {
            copy(&path, &target)?;
        } else if path.is_file() {
            fs::copy(&path, &target).with_context(|| format!("cannot copy {}", path.display()))?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn e12_a_restored_state_folder_reuses_no_revision() -> Result<()> {
    let mut env = TestEnv::started().await?;
    let followers = Followers::start(&env.target(), |_| Ok(()))?;
    let arrives = async |address: &str| {
        let check = |full_state: &keelson_cluster::endpoints::FullState| {
            let service = full_state.service("ns/web").context("no Service")?;
            let ips = service.endpoints[0].i_ps.as_ref().context("no address")?;
            ensure!(ips.v4 == [address], "{service:?}");
            Ok(())
        };
        followers.until("the change arrives", check).await
    };
    arrives("10.1.0.1").await?;
    ensure!(env.agent.terminate().await?.success());
    let (state, backup) = (env.agent.state_dir(), env.scratch.path().join("backup"));
    copy(&state, &backup)?;

    // A restart makes no revision; then there are revisions that the backup does not have.
    env.agent.start_live().await?;
    let instance = env.wait_for_rev(1).await?;
    for (rev, address) in [(2, "10.1.0.2"), (3, "10.1.0.3")] {
        env.manifests.put("web.json", &plain("web", "10.96.0.1", &[address]))?;
        arrives(address).await?;
        ensure!(env.wait_for_rev(rev).await? == instance);
    }
    env.agent.kill9()?;
    fs::remove_dir_all(&state).context("cannot remove the state folder")?;
    copy(&backup, &state)?;

    // Two other revisions, with the same numbers.
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.8"]))?;
    env.agent.start_live().await?;
    arrives("10.1.0.8").await?;
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.9"]))?;
    arrives("10.1.0.9").await?;
    let anew = env.wait_for_rev(3).await?;
    ensure!(anew != instance, "the numbers are used again");
    // The followers check that the contents of a pair never change.
    followers.check_invariants()?;
    ensure_contains(&env.agent.log()?, &["it was restored from a backup"])?;

    // It continues from there.
    env.agent.kill9()?;
    env.agent.start_live().await?;
    ensure!(env.wait_for_rev(3).await? == anew);
    followers.check_invariants()
}
