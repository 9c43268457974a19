//! `make bench`: cost of the agent, beside direct containerd in the same run.
//!
//! Owns: the measurements of image pulls, heartbeats, service endpoints and a proxy's rules. In: the release build,
//! containerd, a registry and its own cluster.
//! Out: tables for `docs/performance.md` on standard output, and the figures of the repository ([`figures`]). Every
//! figure with a peer alternates with it, so that other load on the machine affects both. No measurement fails because
//! it is slow.

#![allow(clippy::print_stdout, clippy::print_stderr)]

mod calls;
mod cost;
mod endpoints;
mod figures;
mod fleet;
mod heartbeat;
mod memory;
mod proxy;
mod pulls;
mod restart;
mod store;
mod storm;

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use keelson_harness::containerd::Kind;

struct Row {
    what: String,
    direct: String,
    agent: String,
    ratio: Option<f64>,
    target: &'static str,
}

impl Row {
    fn print(&self) {
        let ratio = self.ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        println!("| {} | {} | {} | {ratio} | {} |", self.what, self.direct, self.agent, self.target);
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<ExitCode> {
    keelson_harness::process::quiet();
    // Names on the command line select measurements: calls, pulls, memory, restart, heartbeat, hour, fleet, storm,
    // store DIR, endpoints, and endpoints-revisions, -start, -full, -latency, -memory; proxy, followed by its own
    // flags.
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let run = |name: &str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name);
    if ["calls", "pulls", "memory", "restart"].into_iter().any(run) {
        println!("| what | direct | through the agent | ratio | target |");
        println!("|---|---|---|---|---|");
    }
    for kind in Kind::ALL {
        if run("calls") {
            calls::image_status(kind).await?.iter().for_each(Row::print);
        }
        if run("pulls") {
            pulls::small_images(kind).await?.print();
        }
    }
    if run("memory") {
        memory::idle().await?.print();
        memory::queued().await?.iter().for_each(Row::print);
    }
    if run("restart") {
        restart::kill_to_serving().await?.iter().for_each(Row::print);
        restart::planned_under_load().await?.iter().for_each(Row::print);
    }
    if run("heartbeat") {
        println!();
        heartbeat::heartbeat().await?;
    }
    // Only if it is named: it takes an hour.
    if wanted.iter().any(|wanted| wanted == "hour") {
        heartbeat::hour().await?;
    }
    // Only if it is named, with a folder on the disk to measure.
    if let [store, folder] = &wanted[..]
        && store == "store"
    {
        store::store(folder.as_ref())?;
        return Ok(ExitCode::SUCCESS);
    }
    if run("fleet") {
        println!();
        fleet::fleet().await?;
    }
    if run("storm") {
        println!();
        storm::storm().await?;
    }
    endpoints::endpoints(&wanted).await?;
    proxy::proxy(&wanted).await?;
    Ok(ExitCode::SUCCESS)
}

fn number(variable: &str, otherwise: usize) -> Result<usize> {
    match std::env::var(variable) {
        Ok(text) => text.parse().with_context(|| format!("{variable} is {text:?}, not a number")),
        Err(_) => Ok(otherwise),
    }
}

/// The value below which the share `q` of `sorted` lies.
fn quantile<T: Copy>(sorted: &[T], q: f64) -> Option<T> {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    let index = ((sorted.len() as f64 - 1.0) * q).round() as usize;
    sorted.get(index).copied()
}

/// Resident memory in MB.
fn megabytes(pid: u32) -> Result<f64> {
    Ok(keelson_harness::process::resident_kib(pid)? as f64 / 1024.0)
}
