//! Upgrades and downgrades of the agent in the image path.

use crate::{
    common::{TestEnv, all_succeed},
    programs,
};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::{agent::Settings, containerd::Kind, images::TINY, on_both_runtimes, util::PATIENCE};

on_both_runtimes!(i8_pulls_go_on_through_an_upgrade_and_a_downgrade);

/// This version, the former one and this one again, with two pulls that run and four that wait. No caller notices, and no layer is
/// sent twice.
async fn i8_pulls_go_on_through_an_upgrade_and_a_downgrade(kind: Kind) -> Result<()> {
    let [current, former] = programs()?;
    let settings = Settings::limit(2).set("agent.handover_timeout", "30s");
    let mut env = TestEnv::start(kind, &settings).await?;
    let images = env.node.push_many("skew", 6, TINY).await?;
    let holds = env.hold_each(&images);
    let going = env.begin_in_order(&images).await?;
    env.wait_for_active(&images[..2]).await?;
    let mut replaced = Vec::new();
    for (program, direction) in [(&former, "downgrade"), (&current, "upgrade")] {
        env.agent.set_program(program);
        replaced.push(env.agent.replace().await.context(direction)?);
        env.wait_for_pulls(&format!("the queue is as before the {direction}"), |pulls| {
            pulls.running == 2 && pulls.queued == 4 && pulls.callers == 4
        })
        .await?;
    }
    for hold in holds {
        env.node.proxy.remove(hold);
    }
    all_succeed(going, &images).await?;
    ensure!(env.records().max_concurrent_repos() <= 2, "the limit was exceeded");
    for image in &images {
        let fetches = env.records().max_fetches(image);
        ensure!(fetches == 1.0, "{} was sent {fetches} times", image.repo);
    }
    for mut agent in replaced {
        ensure!(agent.wait(PATIENCE).await?.success(), "an agent that was replaced ends when its calls have");
    }
    env.idle().await
}

/// Each version begins with the state that the other left when it was killed.
#[tokio::test(flavor = "multi_thread")]
async fn the_limit_that_was_set_survives_a_kill_and_a_change_of_the_version() -> Result<()> {
    let [current, former] = programs()?;
    let mut env = TestEnv::start(Kind::V2, &Settings::limit(2)).await?;
    let limits = [(&former, "3"), (&current, "4"), (&former, "5"), (&current, "6")];
    for (program, limit) in limits {
        env.agent.output(&["limit", limit]).await?;
        // A pull is written before the runtime is asked, and the limit before it.
        let images = env.node.push_many(&format!("limit-{limit}"), 1, TINY).await?;
        env.cri = env.agent.cri().await?;
        all_succeed([env.begin(&images[0])], &images).await?;
        env.agent.kill9()?;
        env.agent.set_program(program);
        env.agent.start_again().await.with_context(|| format!("with {}", program.display()))?;
        let kept = env.agent.output(&["limit"]).await?;
        ensure!(kept.contains(limit), "set to {limit} before, and now: {kept}");
        let log = env.agent.log()?;
        ensure!(!log.contains("damaged"), "the state was not understood: {log}");
    }
    Ok(())
}

/// A command of one version asks an agent of the other.
#[tokio::test(flavor = "multi_thread")]
async fn commands_of_one_version_show_an_agent_of_the_other() -> Result<()> {
    let [current, former] = programs()?;
    for (of_agent, of_commands) in [(&former, &current), (&current, &former)] {
        let mut env = TestEnv::start(Kind::V2, &Settings::limit(2)).await?;
        env.agent.kill9()?;
        env.agent.set_program(of_agent);
        env.agent.start_again().await?;
        env.agent.set_program(of_commands);
        for command in [
            &["pulls"] as &[&str],
            &["limit", "7"],
            &["limit"],
            &["actors"],
            &["node"],
            &["endpoints"],
            &["state"],
        ] {
            let shown = env.agent.keelson(command).await?;
            shown.success().with_context(|| format!("{command:?} of {}", of_commands.display()))?;
        }
        ensure!(
            env.agent.output(&["limit"]).await?.contains('7'),
            "the command of the other version changed nothing"
        );
    }
    Ok(())
}
