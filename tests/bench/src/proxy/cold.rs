//! From no rules to all of them.
//!
//! Owns: the measurement. In: a cluster with all objects. Out: rows: the time from the start of a process until the
//! last transaction of the sync.

use std::time::Instant;

use anyhow::Result;

use super::options::Options;
use super::report::{Cold, Report, Resident};
use super::subject::{Kind, Subject};
use super::test_env::TestEnv;
use super::usage::{Children, Usage};

/// Another round is run only if all so far took less in total, in seconds.
const ROUNDS_WITHIN: f64 = 30.0;

/// Measures cold syncs. Afterwards the subject runs in sync; if the sync took too long, it is stopped and false is
/// returned.
pub(super) async fn cold(
    env: &TestEnv,
    subject: &mut Subject,
    options: &Options,
    report: &mut Report,
) -> Result<bool> {
    // Last without the agent's start, so that it keeps running.
    let ways: &[bool] = if subject.kind.is_keelson() { &[true, false] } else { &[true] };
    for both in ways {
        let mut row = Cold {
            size: env.size,
            service_ports: env.service_ports(),
            endpoints: env.endpoints(),
            kind: subject.kind,
            both: *both,
            took: Vec::new(),
            patience: options.patience,
            processor: Vec::new(),
            transactions: Vec::new(),
            own: None,
        };
        let mut is_complete = true;
        let mut all = 0.0;
        while is_complete && row.took.len() < options.rounds && (row.took.is_empty() || all < ROUNDS_WITHIN) {
            is_complete = one(env, subject, options, &mut row, report).await?;
            all += row.took.iter().flatten().last().map_or(0.0, std::time::Duration::as_secs_f64);
        }
        report.cold.push(row);
        if !is_complete {
            subject.stop(true).await?;
            return Ok(false);
        }
    }
    Ok(true)
}

async fn one(
    env: &TestEnv,
    subject: &mut Subject,
    options: &Options,
    row: &mut Cold,
    report: &mut Report,
) -> Result<bool> {
    subject.stop(row.both).await?;
    subject.flush().await?;
    if !row.both {
        subject.start_agent(env).await?;
    }
    let generations = subject.watch(env)?;
    // Usage of the agent so far; a process that is started now has none yet.
    let before = total(&subject.usage()?);
    let begun = Instant::now();
    subject.start().await?;
    let programs = Children::watch(subject.pid()?, subject.program());
    let last = subject.synced(env, &generations, begun, options.patience).await?;
    row.took.push(last.map(|last| last.duration_since(begun)));
    let Some(last) = last else { return Ok(false) };
    row.processor.push(total(&subject.usage()?) - before);
    if subject.backend.has_generations() {
        row.transactions.push(generations.after(begun)?.iter().filter(|at| **at <= last).count());
    }
    row.own = subject.own_figure().await?;
    subject.wait_for_answers(env).await?;
    if row.took.len() == 1 && (subject.kind == Kind::KubeProxy || !row.both) {
        report.memory.push(Resident {
            size: env.size,
            kind: subject.kind,
            when: "all is in the kernel",
            memory: subject.memory()?,
            children: programs.max(),
        });
    }
    Ok(true)
}

pub(super) fn total(usage: &[Usage]) -> f64 {
    usage.iter().copied().map(Usage::all).sum()
}
