//! `make soak MINUTES=n`: random work and random faults for n minutes, with invariants that are checked throughout.
//!
//! Owns: the run. In: duration, a seed. Out: a report as text, JSON and a page, a timeline of everything that was
//! done, and exit code 1 if an invariant was violated.
//!
//! There are two soaks: image pulls before one runtime ([`images`]), and a whole cluster of one node ([`node`]). Both inject
//! faults in [`lanes`], follow processes in [`lives`] and write to [`timeline`], from which [`report`] and [`page`] are made.

#![allow(clippy::print_stdout, clippy::print_stderr)]

mod agent_host;
mod deck;
mod images;
mod interrupt;
mod lanes;
mod lives;
mod node;
mod page;
mod report;
mod timeline;

use anyhow::{Context as _, Result};
use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, ValueEnum};
use keelson_harness::containerd::Kind;
use rand::RngExt as _;
use std::path::PathBuf;
use std::process::ExitCode;
use timeline::Timeline;

/// Work at random under random faults and check invariants
#[derive(Debug, Parser)]
#[command(name = "keelson-soak")]
struct Args {
    /// Duration of fault injection in minutes
    #[arg(long, default_value_t = 3.0)]
    minutes: f64,
    /// Soak a whole cluster of one node instead of image pulls alone
    #[arg(long, conflicts_with_all = ["runtime", "limit"])]
    whole_node: bool,
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
    faults: Vec<lanes::Fault>,
}

impl Args {
    fn has(&self, fault: lanes::Fault) -> bool {
        let lanes = if self.whole_node { &node::LANES[..] } else { &images::LANES[..] };
        lanes.iter().any(|(_, faults, _)| faults.contains(&fault))
    }
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
    /// Faults are injected and work is done.
    Faults,
    /// No faults and no new work: everything wanted must come.
    Settle,
    Done,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    if let Some(wrong) = args.faults.iter().find(|fault| !args.has(**fault)) {
        let what = format!("{} is not a fault of this soak\n", lanes::name(*wrong));
        Args::command().error(ErrorKind::InvalidValue, what).exit();
    }
    if args.whole_node {
        // Before the runtime has threads, which would stay outside.
        node::enter_place()?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build();
    runtime.context("cannot start a runtime")?.block_on(run(&args))
}

async fn run(args: &Args) -> Result<ExitCode> {
    keelson_harness::process::quiet();
    let seed = args.seed.unwrap_or_else(|| rand::rng().random());
    println!("seed {seed}: repeat with --seed {seed}");
    let timeline = Timeline::create(&args.out, seed)?;
    let finished = match args.whole_node {
        true => node::run(args, seed, &timeline).await?,
        false => images::run(args, seed, &timeline).await?,
    };
    finished.write(&timeline, &args.out)?;
    println!("{}", finished.text());
    Ok(if timeline.violations() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
