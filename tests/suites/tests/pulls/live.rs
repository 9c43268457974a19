//! The limit changed while pulls run and wait: in the settings and with the command.

use crate::common::{TestEnv, all_succeed, most_at_once, spans};
use anyhow::{Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::images::TINY;
use serde_json::Value;

#[tokio::test(flavor = "multi_thread")]
async fn sighup_raises_lowers_and_removes_the_limit() -> Result<()> {
    // At the end four downloads are held at once, one more than the runtime's default.
    let mut env = TestEnv::start_with_many_downloads(Kind::V2, &Settings::limit(1)).await?;
    let images = env.node.push_many("live", 8, TINY).await?;
    let holds = env.hold_each(&images);
    let going = env.begin_in_order(&images).await?;
    env.wait_for_active(&images[..1]).await?;

    env.agent.configure(&Settings::limit(3))?;
    env.agent.sighup()?;
    env.wait_for_active(&images[..3]).await?;

    // Lowered: running pulls continue, and none starts until fewer run than the new limit.
    env.agent.configure(&Settings::new().set("pulls.serialize_image_pulls", true))?;
    env.agent.sighup()?;
    env.wait_for_pulls("the limit is 1", |pulls| pulls.limit.max_parallel_image_pulls == 1).await?;
    let mut going = going.into_iter();
    for n in 0..3 {
        assert_eq!(env.records().order().len(), 3, "one was begun while {} ran", 3 - n);
        env.node.proxy.remove(holds[n]);
        all_succeed(going.next(), &images[n..]).await?;
    }
    env.wait_for_active(&images[3..4]).await?;
    env.node.proxy.remove(holds[3]);
    all_succeed(going.next(), &images[3..]).await?;
    env.wait_for_active(&images[4..5]).await?;

    env.agent.configure(&Settings::limit(0))?;
    env.agent.sighup()?;
    env.wait_for_active(&images[4..]).await?;
    env.node.proxy.clear_rules();
    all_succeed(going, &images[4..]).await?;

    let mut spans = spans(&env.records().all());
    assert_eq!(most_at_once(&spans), 4, "the last four");
    spans.retain(|repo, _| images[..4].iter().any(|image| image.repo == *repo));
    assert_eq!(most_at_once(&spans), 3, "the first three, and never the fourth beside them");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn keelson_limit_sets_and_resets_the_limit() -> Result<()> {
    let env = TestEnv::start(Kind::Debian16, &Settings::limit(1)).await?;
    let images = env.node.push_many("hand", 5, TINY).await?;
    let holds = env.hold_each(&images);
    let mut going = env.begin_in_order(&images).await?.into_iter();
    env.wait_for_active(&images[..1]).await?;

    let message = limit(&env, &["2"]).await?;
    ensure!(message["max_parallel_image_pulls"] == 2 && message["overridden"] == true, "{message}");
    env.wait_for_active(&images[..2]).await?;
    let message = limit(&env, &["--reset"]).await?;
    ensure!(message["max_parallel_image_pulls"] == 1 && message["overridden"] == false, "{message}");
    env.node.proxy.remove(holds[0]);
    all_succeed(going.next(), &images).await?;
    assert_eq!(env.records().order().len(), 2, "a third was begun over the limit of 1");
    let message = limit(&env, &["0"]).await?;
    ensure!(message["max_parallel_image_pulls"] == 0 && message["configured"] == 1, "{message}");
    env.wait_for_active(&images[1..]).await?;
    env.node.proxy.clear_rules();
    all_succeed(going, &images[1..]).await
}

/// Runs `keelson limit` for the agent and returns the effective limit.
async fn limit(env: &TestEnv, args: &[&str]) -> Result<Value> {
    env.agent.keelson_by_config(&[&["limit", "-o", "json"], args].concat()).await?.json()
}
