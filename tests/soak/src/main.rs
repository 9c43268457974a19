//! `make soak MINUTES=n`: random image pulls and random faults for n minutes, with invariants that are checked throughout.
//!
//! Owns: the run. In: duration, a seed, a runtime. Out: a report as text and JSON, a timeline of everything that was
//! done, and exit code 1 if an invariant was violated.
//!
//! The environment ([`test_env`]) is real: a runtime, registries, an API server, a stock kubelet, the agent in front of
//! the runtime. Callers ([`callers`], [`pods`]) pull images from a supply ([`supply`]) that never runs dry; faults
//! ([`faults`]) are drawn from the seed and always undone. [`monitor`] watches the agent meanwhile, [`audit`] then
//! checks what the registries sent. All of them write to [`timeline`].

#![allow(clippy::print_stdout, clippy::print_stderr)]

mod audit;
mod callers;
mod deck;
mod faults;
mod monitor;
mod pods;
mod report;
mod supply;
mod test_env;
mod timeline;

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use keelson_harness::containerd::Kind;
use rand::RngExt as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use test_env::TestEnv;
use timeline::Timeline;
use tokio::sync::watch;

/// Pull random images under random faults and check invariants
#[derive(Debug, Parser)]
#[command(name = "keelson-soak")]
struct Args {
    /// Duration of fault injection in minutes
    #[arg(long, default_value_t = 3.0)]
    minutes: f64,
    /// Seed of the random choices, to repeat an earlier run [default: random]
    #[arg(long)]
    seed: Option<u64>,
    /// Container runtime to pull with
    #[arg(long, value_enum, default_value = "containerd-2")]
    runtime: Runtime,
    /// Maximum number of image pulls in flight
    #[arg(long, default_value_t = 3)]
    limit: usize,
    /// Directory for the report, the timeline and, after a violation, the logs
    #[arg(long, default_value = "soak")]
    out: PathBuf,
    /// Inject only these faults (default: all)
    #[arg(long, value_delimiter = ',')]
    faults: Vec<faults::Fault>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Runtime {
    #[value(name = "containerd-2")]
    Containerd2,
    #[value(name = "containerd-1.6")]
    Containerd16,
    #[value(name = "crio")]
    Crio,
}

impl Runtime {
    fn kind(self) -> Kind {
        match self {
            Self::Containerd2 => Kind::V2,
            Self::Containerd16 => Kind::Debian16,
            Self::Crio => Kind::Crio,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Faults are injected and images are wanted.
    Faults,
    /// No faults and no new wants: everything wanted must arrive.
    Settle,
    Done,
}

/// Time without any arrival after the last fault, after which the missing images are a violation.
const SETTLE_PATIENCE: Duration = Duration::from_secs(150);

#[tokio::main(flavor = "multi_thread", worker_threads = 4)]
async fn main() -> Result<ExitCode> {
    let args = Args::parse();
    keelson_harness::process::quiet();
    let seed = args.seed.unwrap_or_else(|| rand::rng().random());
    println!("seed {seed}: repeat with --seed {seed}");
    let timeline = Timeline::create(&args.out, seed)?;
    let env = Arc::new(TestEnv::start(args.runtime.kind(), args.limit, &timeline).await?);
    println!("started; injecting faults for {} minutes", args.minutes);
    let outcome = run(&args, seed, &env, &timeline).await;
    if outcome.is_err() || timeline.violations() > 0 {
        env.keep_logs(&args.out).await?;
    }
    let report = outcome?;
    report.write(&args.out)?;
    println!("{report}");
    Ok(if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn run(args: &Args, seed: u64, env: &Arc<TestEnv>, timeline: &Timeline) -> Result<report::Report> {
    let (phase, phases) = watch::channel(Phase::Faults);
    let supply = supply::Supply::new(env, timeline, seed);
    let monitor = monitor::Monitor::start(env, timeline, phases.clone()).await?;
    let producer = tokio::spawn(supply::produce(supply.clone(), phases.clone()));
    let mut workers = callers::start(&supply, env, timeline, seed, &phases);
    workers.extend(pods::start(&supply, env, timeline, seed, &phases));
    let lanes = faults::start(env, timeline, seed, &args.faults, &phases);

    tokio::select! {
        () = tokio::time::sleep(Duration::from_secs_f64(args.minutes * 60.0)) => {}
        interrupted = tokio::signal::ctrl_c() => interrupted.context("cannot wait for SIGINT")?,
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
    Ok(report::Report::new(args, seed, timeline, &supply, seen, sent))
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
