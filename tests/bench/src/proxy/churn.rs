//! A hundred changes per second.
//!
//! Owns: the measurement. In: a subject that is in sync. Out: a row: resources used, and the lag at the end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::options::Options;
use super::report::{ChurnRow, Report, Resident};
use super::subject::{PATIENCE, Subject};
use super::test_env::{POLL_INTERVAL, TestEnv, touch};
use super::usage::Children;

/// Changes per second.
const A_SECOND: u32 = 100;
/// Maximum number of concurrent writes, if the API server is slow.
const AT_ONCE: usize = 16;
const PORTS: std::ops::Range<u16> = 1024..8000;

pub(super) async fn churn(
    env: &TestEnv,
    subject: &Subject,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    let generations = subject.watch(env)?;
    let programs = Children::watch(subject.pid()?, subject.program());
    ensure!(generations.rests(subject.kind.pause(), PATIENCE).await?, "the rules change all the time");
    let (usage, before) = (subject.usage()?, subject.memory()?);
    let begun = Instant::now();
    let written = write(env, options.churn).await?;
    let lasted = begun.elapsed();
    env.switch().await?;
    let acknowledged = Instant::now();
    let lag = in_effect(env, subject, acknowledged).await?;
    let until = Instant::now();
    // Work afterwards is part of the cost.
    ensure!(generations.rests(2 * subject.kind.pause(), PATIENCE).await?, "the rules change all the time");
    let after = subject.memory()?;
    let usage: Vec<_> =
        subject.usage()?.into_iter().zip(usage).map(|(after, before)| after.since(before)).collect();
    let transactions = generations.after(begun)?.iter().filter(|at| **at <= until).count();
    let transactions = subject.backend.has_generations().then_some(transactions);
    report.memory.push(Resident {
        size: env.size,
        kind: subject.kind,
        when: "after very many changes",
        memory: after.clone(),
        children: programs.max(),
    });
    let (size, kind) = (env.size, subject.kind);
    report.churn.push(ChurnRow { size, kind, written, lasted, transactions, lag, usage, before, after });
    subject.check_complete(env)
}

/// Changes slices at random; returns the number of changes.
pub(super) async fn write(env: &TestEnv, long: Duration) -> Result<usize> {
    let mut random = SmallRng::seed_from_u64(1);
    let mut turn = tokio::time::interval(Duration::from_secs(1) / A_SECOND);
    let (at_once, mut writes) = (Arc::new(Semaphore::new(AT_ONCE)), JoinSet::new());
    let (begun, mut written) = (Instant::now(), 0);
    while begun.elapsed() < long {
        turn.tick().await;
        let (service, number) = (random.random_range(0..env.size.services), random.random_range(PORTS));
        let (writer, turn) = (env.writer.clone(), at_once.clone().acquire_owned().await?);
        writes.spawn(async move {
            let done = touch(&writer, service, number).await;
            drop(turn);
            done
        });
        written += 1;
        while let Some(done) = writes.try_join_next() {
            done.context("a writer panicked")??;
        }
    }
    while let Some(done) = writes.join_next().await {
        done.context("a writer panicked")??;
    }
    Ok(written)
}

/// Time from the last change, of a real Service, until a new connection is answered by the new endpoints; None if that
/// never happens.
async fn in_effect(env: &TestEnv, subject: &Subject, acknowledged: Instant) -> Result<Option<Duration>> {
    while acknowledged.elapsed() < PATIENCE {
        let asked = Instant::now();
        if subject.answers(env).await? {
            // The request followed the change; the response took longer.
            return Ok(Some(asked.saturating_duration_since(acknowledged)));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(None)
}
