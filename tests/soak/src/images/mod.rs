//! The soak of image pulls: random pulls under random faults.
//!
//! Owns: that run. In: a seed, a runtime, a limit. Out: the report.
//!
//! The environment ([`test_env`]) is real: a runtime, registries, an API server, a stock kubelet, the agent in front of
//! the runtime. Callers ([`callers`], [`pods`]) pull images from a supply ([`supply`]) that never runs dry; faults
//! ([`faults`]) are drawn from the seed and always undone. [`monitor`] watches the agent meanwhile, [`audit`] then
//! checks what the registries sent.

mod audit;
mod callers;
mod faults;
mod monitor;
mod pods;
mod report;
mod supply;
mod test_env;

pub(crate) use faults::LANES;

use crate::interrupt::Interrupt;
use crate::lanes::Lane;
use crate::report::Finished;
use crate::timeline::Timeline;
use crate::{Args, Phase};
use anyhow::{Context as _, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};
use test_env::TestEnv;
use tokio::sync::watch;

/// Time without any arrival after the last fault, after which the missing images are a violation.
const SETTLE_PATIENCE: Duration = Duration::from_secs(150);

pub(crate) async fn run(args: &Args, seed: u64, timeline: &Timeline) -> Result<Finished> {
    let env = Arc::new(TestEnv::start(args.runtime.kind(), args.limit, timeline).await?);
    println!("started; injecting faults for {} minutes", args.minutes);
    let outcome = soak(args, seed, &env, timeline).await;
    if outcome.is_err() || timeline.violations() > 0 {
        env.keep_logs(&args.out).await?;
    }
    outcome?.finish()
}

async fn soak(args: &Args, seed: u64, env: &Arc<TestEnv>, timeline: &Timeline) -> Result<report::Report> {
    let (phase, phases) = watch::channel(Phase::Faults);
    let supply = supply::Supply::new(env, timeline, seed);
    let monitor = monitor::Monitor::start(env, timeline, phases.clone()).await?;
    let producer = tokio::spawn(supply::produce(supply.clone(), phases.clone()));
    let mut workers = callers::start(&supply, env, timeline, seed, &phases);
    workers.extend(pods::start(&supply, env, timeline, seed, &phases));
    let lanes = LANES.map(|spec| Lane::new(spec, &args.faults, seed, timeline, &phases));
    let lanes = lanes.map(|lane| tokio::spawn(lane.run(env.clone(), Vec::new())));

    let mut interrupt = Interrupt::watch()?;
    tokio::select! {
        () = tokio::time::sleep(Duration::from_secs_f64(args.minutes * 60.0)) => {}
        () = interrupt.wait() => {}
    }
    phase.send_replace(Phase::Settle);
    for lane in lanes {
        lane.await.context("a lane of faults panicked")??;
    }
    timeline.record("phase", "all faults are undone");
    println!("no more faults; waiting for {} wanted images", supply.missing().len());
    producer.await.context("the supply panicked")??;
    settle(&supply, timeline).await;
    phase.send_replace(Phase::Done);
    for worker in workers {
        worker.await.context("a caller panicked")??;
    }
    let seen = monitor.stop().await?;
    let sent = audit::check(env, timeline, &supply, args.limit);
    for layer in &sent.sent_twice {
        print_surroundings(env, timeline, layer).await?;
    }
    Ok(report::Report::new(args, seed, timeline, &supply, seen, sent))
}

/// Prints what the agent logged around the requests for a layer, without what it says about other images.
async fn print_surroundings(env: &TestEnv, timeline: &Timeline, layer: &audit::SentTwice) -> Result<()> {
    let before = layer.from.checked_sub(Duration::from_secs(20)).unwrap_or(layer.from);
    let [from, to] =
        [before, layer.to].map(|at| humantime::format_rfc3339_micros(timeline.wall_clock(at)).to_string());
    eprintln!(
        "the agent's log from {:.1} s on, as far as it concerns {}:",
        timeline.seconds(before),
        layer.repo
    );
    let image = format!("/{}:", layer.repo);
    for line in env.agent.log().await?.lines() {
        let is_within = line.get(..from.len()).is_some_and(|at| *from <= *at && *at <= *to);
        if is_within && (line.contains(&image) || !line.contains("/soak/")) {
            eprintln!("{line}");
        }
    }
    Ok(())
}

/// Waits until every wanted image has arrived, as long as images keep arriving.
async fn settle(supply: &supply::Supply, timeline: &Timeline) {
    let (mut missing, mut progress) = (supply.missing(), Instant::now());
    while !missing.is_empty() {
        if progress.elapsed() > SETTLE_PATIENCE {
            let what = format!("no image is pulled any more; {} are missing: {missing:?}", missing.len());
            return timeline.violation("every wanted image arrives", &what);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        let now = supply.missing();
        if now.len() < missing.len() {
            progress = Instant::now();
        }
        missing = now;
    }
    timeline.record("phase", "every wanted image has arrived");
}
