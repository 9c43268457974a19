//! The limit as a pull option: an annotation on the image of a request.

use crate::common::{TestEnv, all_succeed};
use anyhow::{Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::failed;
use keelson_harness::driver::Driver;
use keelson_harness::images::TINY;
use keelson_harness::{on_both_runtimes, on_crio};
use keelson_proto::PULL_OPTION_ANNOTATION;
use tonic::Code;

on_both_runtimes!(a_request_with_the_option_waits_under_the_limit);

on_crio!(a_request_with_the_option_waits_under_the_limit);

fn patient() -> Settings {
    Settings::new().set("pulls.reject_retries", 100).set("pulls.reject_retry_interval", "5s")
}

async fn a_request_with_the_option_waits_under_the_limit(kind: Kind) -> Result<()> {
    // No limit of the agent's own.
    let env = TestEnv::start(kind, &patient()).await?;
    let images = env.node.push_many("option", 4, TINY).await?;
    let holds = env.hold_each(&images);
    let first = env.begin(&images[0]);
    env.wait_for_active(&images[..1]).await?;

    let one = env.begin_with(env.pull_of(&images[1]).annotation(PULL_OPTION_ANNOTATION, "1"));
    let seen = env.wait_for_callers(2).await?;
    ensure!((seen.running, seen.queued) == (1, 1), "{seen:?}");
    let driver = Driver::new(&env.agent.endpoint())?;
    let (option, name) = (format!("{PULL_OPTION_ANNOTATION}=2"), env.node.name(&images[2]));
    let two = tokio::spawn(async move { driver.run(&["pull", "--annotation", &option, &name]).await });
    env.wait_for_pulls("two of two run", |pulls| (pulls.running, pulls.callers) == (2, 3)).await?;
    let none = env.begin(&images[3]);
    env.wait_for_pulls("who has no option runs", |pulls| (pulls.running, pulls.queued) == (3, 1)).await?;
    env.wait_for_active(&[images[0].clone(), images[2].clone(), images[3].clone()]).await?;

    // The first must be alone: it starts when the last of the others is done.
    env.node.proxy.remove(holds[0]);
    all_succeed([first], &images).await?;
    env.node.proxy.remove(holds[3]);
    all_succeed([none], &images[3..]).await?;
    let seen = env.wait_for_callers(2).await?;
    ensure!((seen.running, seen.queued) == (1, 1), "{seen:?}");
    env.node.proxy.remove(holds[2]);
    assert_eq!(two.await??.success()?["imageRef"], env.node.reference(&images[2]));
    env.wait_for_active(&images[1..2]).await?;
    env.node.proxy.remove(holds[1]);
    all_succeed([one], &images[1..]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_with_the_option_is_rejected_while_the_limit_stays_reached() -> Result<()> {
    let settings = Settings::new().set("pulls.reject_retries", 2).set("pulls.reject_retry_interval", "100ms");
    let env = TestEnv::start(Kind::V2, &settings).await?;
    let images = env.node.push_many("heard", 2, TINY).await?;
    let hold = env.hold(&images[0]);
    let first = env.begin(&images[0]);
    env.wait_for_active(&images[..1]).await?;
    let pull = env.pull_of(&images[1]).annotation(PULL_OPTION_ANNOTATION, "1");
    let status = failed(env.begin_with(pull.clone()).await?, "its limit is reached")?;
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    ensure!(status.message().starts_with("TooManyPullingInParallel"), "{status}");
    env.node.proxy.remove(hold);
    all_succeed([first], &images).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_option_is_an_invalid_argument() -> Result<()> {
    let env = TestEnv::start(Kind::V2, &patient()).await?;
    let image = &env.node.push_many("wrong", 1, TINY).await?[0];
    for value in ["", "-1", "x", "1.5", "70000", "99999999999999999999"] {
        let pull = env.pull_of(image).annotation(PULL_OPTION_ANNOTATION, value);
        let status = failed(env.begin_with(pull.clone()).await?, "the option is no number")?;
        assert_eq!(status.code(), Code::InvalidArgument, "{value:?}: {status}");
        ensure!(status.message().contains(PULL_OPTION_ANNOTATION), "{value:?}: {status}");
    }
    env.idle().await?;
    assert_eq!(env.records().count(), 0, "a pull was begun");
    // 0 is no limit.
    let pull = env.pull_of(image).annotation(PULL_OPTION_ANNOTATION, "0");
    assert_eq!(env.begin_with(pull.clone()).await??, env.node.reference(image));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_feature_the_option_is_ignored() -> Result<()> {
    let env = TestEnv::start(Kind::V2, &patient().set("feature_gates.PullOption", false)).await?;
    let images = env.node.push_many("off", 2, TINY).await?;
    let holds = env.hold_each(&images);
    let first = env.begin(&images[0]);
    env.wait_for_active(&images[..1]).await?;
    let second = env.begin_with(env.pull_of(&images[1]).annotation(PULL_OPTION_ANNOTATION, "1"));
    env.wait_for_active(&images).await?;
    for hold in holds {
        env.node.proxy.remove(hold);
    }
    all_succeed([first, second], &images).await
}
