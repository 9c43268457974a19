//! Feature gates that are changed on a node that ran before.

use crate::{
    common::{TestEnv, all_succeed},
    settings,
};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::{containerd::Kind, images::TINY};

/// Each gate at its default, changed, and back: the agent starts on what the other left when it was killed with a pull that ran, and
/// one that waited, and pulls.
#[tokio::test(flavor = "multi_thread")]
async fn every_gate_can_be_changed_and_changed_back_over_the_same_state() -> Result<()> {
    let mut env = TestEnv::start(Kind::V2, &settings(1)).await?;
    let gates = gates(&env).await?;
    ensure!(gates.len() > 10, "gates are missing: {gates:?}");
    for (gate, default) in gates {
        for value in [!default, default] {
            let context = || format!("{gate}={value}");
            let images = env.node.push_many(&format!("{}-{value}", gate.to_lowercase()), 2, TINY).await?;
            let holds = env.hold_each(&images);
            let _abandoned = env.begin_in_order(&images).await.with_context(context)?;
            env.agent.set(&format!("feature_gates.{gate}"), value)?;
            env.agent.kill9_and_start().await.with_context(context)?;
            for hold in holds {
                env.node.proxy.remove(hold);
            }
            env.cri = env.agent.cri().await?;
            let going = images.iter().map(|image| env.begin(image)).collect::<Vec<_>>();
            all_succeed(going, &images).await.with_context(context)?;
            env.idle().await.with_context(context)?;
            let log = env.agent.log()?;
            ensure!(!log.contains("panicked") && !log.contains("damaged"), "{gate}={value}: {log}");
        }
    }
    Ok(())
}

/// Names and defaults, as the program lists them: `NAME=true|false (STAGE - default=true): what it does`.
async fn gates(env: &TestEnv) -> Result<Vec<(String, bool)>> {
    let listed = env.agent.keelson_by_config(&["config", "gates"]).await?.success()?.out;
    let of = |line: &str| Some((line.split_once('=')?.0.to_owned(), line.contains("default=true")));
    listed.lines().map(|line| of(line).with_context(|| format!("another form: {line}"))).collect()
}
