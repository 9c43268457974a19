//! Progress of a pull.

use crate::common::{Progress, TestEnv};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::images::{ImageSpec, LARGE, TINY};
use keelson_harness::on_both_runtimes;
use keelson_harness::registry_proxy::{Fault, Match};
use std::cell::RefCell;

on_both_runtimes!(progress_is_shown_and_only_grows);

async fn progress_is_shown_and_only_grows(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::new().set("pulls.progress_interval", "50ms")).await?;
    let image = ImageSpec::new("seen", &[LARGE, 1 << 20, TINY]).push(&env.node.registry).await?;
    let name = env.node.name(&image);
    let [large, small, _] = image.layers.as_slice() else { unreachable!("it has three layers") };
    let half = env.node.proxy.rule(Match::digest(&large.digest), Fault::StallAfter(5 << 20));
    let hold = env.node.proxy.rule(Match::digest(&small.digest), Fault::Hang);
    let going = env.begin(&image);

    // Half of the large layer and all of the tiny one; then the small one as well.
    let mut seen = Vec::new();
    let at_half = |now: &Progress| now.bytes_done >= 4 << 20 && now.layers_done == 1;
    let first = watch(&env, &name, &mut seen, at_half).await?;
    ensure!(
        first.bytes_done <= (5 << 20) + (16 << 10),
        "{first:?}, though no more than 5 MiB and a bit were sent"
    );
    env.node.proxy.remove(hold);
    let second = watch(&env, &name, &mut seen, |now| now.layers_done == 2).await?;
    ensure!(second.bytes_done >= first.bytes_done + small.size, "{second:?} after {first:?} and a layer");
    ensure!(!going.is_finished());
    env.node.proxy.remove(half);
    assert_eq!(going.await??, image.config.0);

    // The layers and the config, which is small.
    for progress in &seen {
        let config = progress.bytes_total.checked_sub(image.size()).context("less than the layers in all")?;
        ensure!(config < 4096, "{progress:?}, though the layers have {}", image.size());
        assert_eq!(progress.layers_total, 3);
    }
    for pair in seen.windows(2) {
        ensure!(
            pair[0].bytes_done <= pair[1].bytes_done && pair[0].layers_done <= pair[1].layers_done,
            "it went back: {pair:?}"
        );
    }
    let done = env
        .wait_for_pulls("it has ended", |pulls| pulls.finished.iter().any(|pull| pull.image == name))
        .await?;
    let done = done.finished.iter().find(|pull| pull.image == name).context("it was there")?;
    ensure!(done.state == "succeeded" && done.error.is_empty(), "{done:?}");
    Ok(())
}

/// Collects the progress of a pull, from when its size is known until `enough`.
async fn watch(
    env: &TestEnv,
    name: &str,
    seen: &mut Vec<Progress>,
    enough: impl Fn(&Progress) -> bool,
) -> Result<Progress> {
    let collected = RefCell::new(Vec::new());
    env.wait_for_pulls("the pull is so far", |pulls| {
        let progress = pulls.of_image(name).and_then(|pull| pull.progress).filter(|it| it.bytes_total > 0);
        collected.borrow_mut().extend(progress);
        progress.is_some_and(|progress| enough(&progress))
    })
    .await?;
    seen.append(&mut collected.borrow_mut());
    seen.last().copied().context("nothing was seen")
}
