//! A pod that tries one credential after the other keeps its place.

use crate::common::TestEnv;
use anyhow::{Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::failed;
use keelson_harness::images::{ImageSpec, TINY};
use keelson_harness::registry::{ALICE, BOB};
use keelson_harness::registry_proxy;
use keelson_harness::{on_both_runtimes, on_crio};

on_both_runtimes!(case_21_the_third_credential_succeeds_while_the_queue_is_busy);

on_crio!(case_21_the_third_credential_succeeds_while_the_queue_is_busy,);

async fn case_21_the_third_credential_succeeds_while_the_queue_is_busy(kind: Kind) -> Result<()> {
    let env = TestEnv::with_users(kind, &Settings::limit(1)).await?;
    let specs: Vec<_> = ["first", "tried", "y1", "y2", "y3"].map(|name| ImageSpec::single(name, TINY)).into();
    let images = env.node.push(&specs).await?;
    let [first, tried, others @ ..] = images.as_slice() else { unreachable!("five were pushed") };
    let hold = env.hold(first);
    let holds = env.hold_each(others);
    let of_pod = |image, name: &str, password: &str| {
        env.pull_of(image).credentials(name, password).pod("web", "uid-1")
    };

    let going_first = env.begin_with(env.pull_of(first).user(&ALICE));
    env.wait_for_active(std::slice::from_ref(first)).await?;
    let mut try_one = env.begin_with(of_pod(tried, ALICE.name, "wrong"));
    env.wait_for_callers(2).await?;
    let mut going = Vec::new();
    for (n, image) in (3..).zip(others) {
        going.push(env.begin_with(env.pull_of(image).user(&ALICE).pod("other", &format!("uid-{n}"))));
        env.wait_for_callers(n).await?;
    }

    let name = env.node.name(tried);
    let mut release = Some(hold);
    // After each failure, the next of the others has the slot; the pod comes back before the rest of them.
    let tries = [of_pod(tried, BOB.name, "wrong too"), of_pod(tried, ALICE.name, ALICE.password)];
    for (n, pull) in tries.into_iter().enumerate() {
        if let Some(hold) = release.replace(holds[n]) {
            env.node.proxy.remove(hold);
        }
        failed(try_one.await?, "its credentials are not good")?;
        env.wait_for_active(&others[n..=n]).await?;
        try_one = env.begin_with(pull);
        let seen = env
            .wait_for_pulls("it is back in the queue", |pulls| pulls.state(&name) == Some("queued"))
            .await?;
        let shown = seen.of_image(&name).map(|pull| pull.position);
        ensure!(shown == Some(1), "it is at {shown:?}: {seen:?}");
        ensure!(seen.running == 1, "it takes a slot twice: {seen:?}");
    }
    env.node.proxy.clear_rules();
    assert_eq!(try_one.await??, env.node.reference(tried));
    assert_eq!(going_first.await??, env.node.reference(first));
    crate::common::all_succeed(going, others).await?;

    // The order at the registry, one entry for each pull.
    let manifests =
        env.records().all().into_iter().filter(|seen| seen.kind == registry_proxy::Kind::Manifest);
    let mut order: Vec<_> = manifests.filter_map(|seen| seen.repo).collect();
    order.dedup();
    assert_eq!(order, ["first", "tried", "y1", "tried", "y2", "tried", "y3"]);
    assert_eq!(env.records().max_concurrent_repos(), 1);
    env.idle().await
}
