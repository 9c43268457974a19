//! `make bench-proxy`: Services in the kernel, with `keelson proxy` and with the real kube-proxy in the same mode and
//! run.
//!
//! Owns: the selection and order of measurements. In: its own cluster for each size, one API server for both; flags
//! ([`options`]). Out: tables, and figures ([`figures`]). Each of the two has a separate network ([`World`](keelson_cluster::net::World)) with its
//! rules in the namespace of the node, and runs alone while it is measured. The state of the kernel is observed from
//! outside, in the same way for both ([`kernel`]).

mod change;
mod churn;
mod cold;
mod connections;
mod established;
mod figures;
mod kernel;
mod long;
mod maps;
mod neighbour;
mod options;
mod report;
mod subject;
mod test_env;
mod usage;
mod vm;

use anyhow::{Context as _, Result};
use keelson_harness::agent::no_runtime;
use keelson_harness::containerd::{self, Containerd};
use keelson_harness::scratch::Scratch;

use options::{Options, Part, Size};
use report::Report;
use subject::{Backend, Subject};
use test_env::TestEnv;

/// Runs the measurements that the command line names. Prints the results even if a later one fails.
pub(super) async fn proxy(wanted: &[String]) -> Result<()> {
    let Some(options) = Options::of(wanted)? else { return Ok(()) };
    if options.backend == Backend::Ipvs && !vm::is_inside() {
        return vm::measure(&options, wanted).await;
    }
    let mut report = Report::default();
    let measured = measure(&options, &mut report).await;
    report.print();
    let recorded = crate::figures::record(&figures::figures(&report, &options));
    measured.and(recorded)
}

async fn measure(options: &Options, report: &mut Report) -> Result<()> {
    let scratch = Scratch::new()?;
    // The agent has all services enabled, as on a node; in a virtual machine there is no runtime.
    let mut containerd = None;
    let runtime = if vm::is_inside() {
        no_runtime(&scratch)
    } else {
        let options = containerd::Options::default();
        let started = Containerd::start(&scratch, containerd::Kind::V2, &options).await?;
        containerd.insert(started).endpoint()
    };
    for size in &options.sizes {
        at_size(*size, &runtime, options, report).await.with_context(|| format!("at {size}"))?;
    }
    Ok(())
}

/// All measurements at one size, in a cluster that ends with it.
async fn at_size(size: Size, runtime: &str, options: &Options, report: &mut Report) -> Result<()> {
    let mut env = TestEnv::new(size).await?;
    let mut subjects = Vec::new();
    for kind in options.subjects() {
        subjects.push(Subject::new(&env, runtime, kind, options.backend).await?);
    }
    let ranges = if options.has_connections(size) { options.ranges } else { 0 };
    env.fill(ranges).await?;
    let mut complete = Vec::new();
    for mut subject in subjects {
        eprintln!("{size}: {}", subject.kind.name());
        if one(&env, &mut subject, options, report).await? {
            complete.push(subject);
        }
    }
    if options.has_connections(size) {
        eprintln!("{size}: connections");
        for subject in complete.iter_mut().filter(|_| !options.backend.outlives_process()) {
            subject.start_agent(&env).await?;
            subject.start().await?;
            subject.wait_for_answers(&env).await?;
        }
        connections::connections(&env, &complete, options, report).await?;
    }
    for mut subject in complete {
        subject.stop(true).await?;
    }
    Ok(())
}

/// Measures one of the two. Afterwards it has exited, and rules in the kernel are still there; returns false if it did
/// not complete.
async fn one(env: &TestEnv, subject: &mut Subject, options: &Options, report: &mut Report) -> Result<bool> {
    let ready = if options.has(Part::Cold) {
        cold::cold(env, subject, options, report).await?
    } else {
        subject.start_agent(env).await?;
        let generations = subject.watch(env)?;
        let begun = std::time::Instant::now();
        subject.start().await?;
        subject.synced(env, &generations, begun, options.patience).await?.is_some()
    };
    if !ready {
        subject.stop(true).await?;
        return Ok(false);
    }
    if options.has(Part::Change) {
        change::change(env, subject, options, report).await?;
    }
    if options.has_churn(env.size) {
        churn::churn(env, subject, options, report).await?;
    }
    if options.has_neighbour(env.size) {
        neighbour::neighbour(env, subject, options, report).await?;
    }
    if options.is_main(env.size) && options.has(Part::Long) {
        long::long(env, subject, options, report).await?;
    }
    subject.stop(true).await?;
    if options.backend.outlives_process() {
        subject.check_complete(env).context("rules went when it ended")?;
    }
    Ok(true)
}
