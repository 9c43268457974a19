//! Service endpoints of a large cluster: latency, revisions, memory.
//!
//! Owns: the choice of measurements. In: its own cluster; `KEELSON_BENCH_SERVICES` (10000), each with ten endpoints.
//! Out: tables. API server, etcd, containerd and agent are real; an administrator writes the objects, and no controller
//! runs.

mod full;
mod latency;
mod memory;
mod raw;
mod revisions;
mod start;
mod test_env;

use std::env;

use anyhow::{Context as _, Result};
use keelson_cluster::endpoints::bulk;

use test_env::{EACH, TestEnv};

/// Names of the measurements; on the command line they have the prefix `endpoints-`.
const PARTS: [&str; 5] = ["revisions", "start", "full", "latency", "memory"];
/// Number of Services of the smaller start.
const FEW: usize = 1_000;
/// Number of Services of all other measurements; figures of another number are not kept.
const MANY: usize = 10_000;

/// Runs the measurements named in `wanted` (`endpoints` means all of them).
pub(super) async fn endpoints(wanted: &[String]) -> Result<()> {
    let all = wanted.is_empty() || wanted.iter().any(|wanted| wanted == "endpoints");
    let run = |part: &str| all || wanted.iter().any(|name| name.strip_prefix("endpoints-") == Some(part));
    if !PARTS.into_iter().any(run) {
        return Ok(());
    }
    let services = match env::var("KEELSON_BENCH_SERVICES") {
        Ok(text) => {
            text.parse().with_context(|| format!("KEELSON_BENCH_SERVICES is {text:?}, not a number"))?
        }
        Err(_) => MANY,
    };
    let env = TestEnv::new().await?;
    if run("revisions") {
        println!();
        revisions::revisions(&env).await?;
    }
    if run("start") {
        println!();
        start::head();
        if services > FEW {
            create_services(&env, FEW).await?;
            start::start(&env, FEW).await?;
            bulk::remove(&env.cluster, FEW).await?;
        }
    }
    if !PARTS.into_iter().any(|part| part != "revisions" && run(part)) {
        return Ok(());
    }
    create_services(&env, services).await?;
    if run("start") {
        start::start(&env, services).await?;
    }
    if run("full") {
        println!();
        full::full(&env, services).await?;
    }
    if run("latency") {
        println!();
        latency::latency(&env, services).await?;
    }
    if run("memory") {
        println!();
        memory::memory(&env, services).await?;
    }
    Ok(())
}

async fn create_services(env: &TestEnv, services: usize) -> Result<()> {
    let made = bulk::make(&env.cluster, services, EACH).await?;
    eprintln!(
        "{services} Services with {EACH} endpoints each were created in {:.0} s",
        made.took.as_secs_f64()
    );
    Ok(())
}
