//! Requests that share one pull, and requests that do not.

use crate::common::{TestEnv, begin};
use anyhow::{Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::failed;
use keelson_harness::driver::Driver;
use keelson_harness::images::{Image, ImageSpec, TINY};
use keelson_harness::registry::{ALICE, BOB};
use keelson_harness::registry_proxy::Seen;
use keelson_harness::util::until;
use keelson_harness::{on_both_runtimes, on_crio};

on_both_runtimes!(case_03_equal_pulls_are_shared, case_04_other_credentials_never_share);

on_crio!(case_03_equal_pulls_are_shared, case_04_other_credentials_never_share,);

/// The requests for one image, without what differs between images.
fn shape(seen: &[Seen], image: &Image) -> Vec<String> {
    let about = seen.iter().filter(|seen| seen.repo.as_ref() == Some(&image.repo));
    about.map(|seen| format!("{} {:?} by tag: {}", seen.method, seen.kind, seen.digest.is_none())).collect()
}

async fn case_03_equal_pulls_are_shared(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::new()).await?;
    let images = env.node.push_many("twice", 3, TINY).await?;
    let direct = env.node.runtime.cri().await?;
    let (alone, shared, apart) = (&images[0], &images[1], &images[2]);

    // The requests of one pull; and that two unshared pulls look different.
    direct.pull_image(&env.node.name(alone)).await?;
    assert_eq!(env.runtime_calls(&env.node.name(alone))?, 1);
    let hold = env.hold(apart);
    let two = [begin(&direct, env.pull_of(apart)), begin(&direct, env.pull_of(apart))];
    env.wait_for_active(std::slice::from_ref(apart)).await?;
    until("both have asked the runtime", || {
        env.runtime_calls(&env.node.name(apart)).is_ok_and(|count| count == 2)
    })
    .await?;
    env.node.proxy.remove(hold);
    for going in two {
        going.await??;
    }

    let hold = env.hold(shared);
    let name = env.node.name(shared);
    let other = env.agent.cri().await?;
    let tonic = [
        begin(&env.cri, env.pull_of(shared).pod("app", "uid-0")),
        begin(&other, env.pull_of(shared).pod("web", "uid-1")),
    ];
    let driver = Driver::new(&env.agent.endpoint())?;
    let go = tokio::spawn({
        let name = name.clone();
        async move { driver.run(&["pull", "--pod", "default/go/uid-2", &name]).await }
    });
    let seen = env.wait_for_callers(3).await?;
    ensure!(seen.pulls.len() == 1 && seen.pulls[0].callers == 3 && seen.running == 1, "{seen:?}");
    env.node.proxy.remove(hold);
    for going in tonic {
        assert_eq!(going.await??, env.node.reference(shared));
    }
    assert_eq!(go.await??.success()?["imageRef"], env.node.reference(shared));

    let seen = env.records().all();
    assert_eq!(shape(&seen, shared), shape(&seen, alone), "three callers made other requests than one");
    assert_eq!(env.records().gets(&shared.layers[0].digest).len(), 1);
    assert_eq!(env.runtime_calls(&name)?, 1);
    Ok(())
}

async fn case_04_other_credentials_never_share(kind: Kind) -> Result<()> {
    let env = TestEnv::with_users(kind, &Settings::new()).await?;
    let image = ImageSpec::single("secret", TINY).push(&env.node.registry).await?;
    let direct = env.node.runtime.cri().await?;
    let bad = env.pull_of(&image).credentials(ALICE.name, BOB.password);
    let expected = failed(direct.pull(&bad).await, "the password is wrong")?;
    let nobody = failed(direct.pull(&env.pull_of(&image)).await, "it came without credentials")?;
    let before = env.runtime_calls(&env.node.name(&image))?;

    let hold = env.hold(&image);
    let good = env.begin_with(env.pull_of(&image).user(&ALICE));
    env.wait_for_active(std::slice::from_ref(&image)).await?;
    // While the valid one runs, the invalid ones fail separately.
    for (pull, expected) in [(bad.clone(), &expected), (env.pull_of(&image), &nobody)] {
        let status = failed(env.begin_with(pull.clone()).await?, "its credentials are not good")?;
        assert_eq!((status.code(), status.message()), (expected.code(), expected.message()));
    }
    let other = env.begin_with(env.pull_of(&image).user(&BOB));
    env.wait_for_callers(2).await?;
    env.node.proxy.remove(hold);
    assert_eq!(good.await??, env.node.reference(&image));
    assert_eq!(other.await??, env.node.reference(&image));
    assert_eq!(env.runtime_calls(&env.node.name(&image))? - before, 4, "one call upstream for each");
    let used: Vec<_> = env.records().all().into_iter().filter_map(|seen| seen.authorization).collect();
    for user in [ALICE, BOB] {
        ensure!(used.iter().any(|header| header == user.basic), "{} never came to the registry", user.name);
    }

    // The image is present now. Invalid credentials get the runtime's own error.
    let expected = direct.pull(&bad).await;
    let got = env.begin_with(bad.clone()).await?;
    let text = |result: Result<String, tonic::Status>| result.map_err(|s| (s.code(), s.message().to_owned()));
    assert_eq!(text(got), text(expected));
    env.idle().await
}
