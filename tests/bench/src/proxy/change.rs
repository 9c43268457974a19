//! From a change at the API server to the rules, and with the backend ebpf to its maps.
//!
//! Owns: the measurement, and a plain watch of the API server beside it. In: a subject that is in sync; single changes,
//! each after a rest. Out: a row for each kind of change.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use futures_util::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use keelson_cluster::endpoints::bulk;
use kube::api::{ListParams, WatchEvent, WatchParams};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::task::JoinHandle;

use super::cold::total;
use super::options::Options;
use super::report::{Change, Report, Resident};
use super::subject::{PATIENCE, Subject};
use super::test_env::TestEnv;
use super::usage::Children;

/// Minimum number of changes, however long they take.
const MIN_CHANGES: usize = 3;
/// Maximum jitter added to the required pause, in milliseconds: prevents resonance with timers of the subject.
const JITTER: u64 = 80;
/// Names of rows.
pub(super) const ENDPOINT: &str = "another endpoint";
pub(super) const AFTER_CHANGES: &str = "after changes one by one";

/// When a plain watch reported a change, by the resource version of the slice.
type Seen = Arc<Mutex<HashMap<String, Instant>>>;

struct Written {
    version: String,
    acknowledged: Instant,
    moved: Instant,
}

#[derive(Clone, Copy, Debug)]
enum Changed {
    Endpoint,
    /// Adds an endpoint, and removes it the next time.
    Count,
    /// Every endpoint of the Service that answers.
    Answering,
}

impl Changed {
    fn title(self) -> &'static str {
        match self {
            Self::Endpoint => ENDPOINT,
            Self::Count => "one endpoint more or less",
            Self::Answering => "other endpoints of the Service that answers",
        }
    }
}

pub(super) async fn change(
    env: &TestEnv,
    subject: &Subject,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    // Without generations, only changes of the Service that answers are seen.
    let all: &[Changed] = match subject.backend.has_generations() {
        true => &[Changed::Endpoint, Changed::Count],
        false => &[Changed::Answering],
    };
    for &changed in all {
        one_by_one(env, subject, options, changed, report).await?;
    }
    Ok(())
}

async fn one_by_one(
    env: &TestEnv,
    subject: &Subject,
    options: &Options,
    changed: Changed,
    report: &mut Report,
) -> Result<()> {
    let generations = subject.watch(env)?;
    let programs = Children::watch(subject.pid()?, subject.program());
    let seen = Seen::default();
    let watch = watch(env, seen.clone()).await?;
    let maps = subject.maps()?;
    let mut random = SmallRng::seed_from_u64(2);
    let (mut written, begun) = (Vec::new(), Instant::now());
    let before = total(&subject.usage()?);
    // The Service that has one endpoint more than the others.
    let mut scaled = None;
    while scaled.is_some()
        || written.len() < options.changes
            && (written.len() < MIN_CHANGES || begun.elapsed() < options.changing)
    {
        let pause = subject.kind.pause() + Duration::from_millis(random.random_range(0..JITTER));
        ensure!(generations.rests(pause, PATIENCE).await?, "the rules change all the time");
        let (any, number) = (random.random_range(0..env.size.services), env.new_port()?);
        let former = scaled.take();
        let service = former.unwrap_or(any);
        let watched = match &maps {
            Some(maps) => Some(maps.watch(env.frontend(service).await?, PATIENCE)?),
            None => None,
        };
        let sent = Instant::now();
        let version = match (changed, former) {
            (Changed::Answering, _) => env.switch().await?,
            (Changed::Endpoint, _) => env.touch(service, number).await?,
            (Changed::Count, None) => {
                scaled = Some(service);
                env.scale(service, true).await?
            }
            (Changed::Count, Some(_)) => env.scale(service, false).await?,
        };
        let acknowledged = Instant::now();
        let moved = generations.first_after(sent, PATIENCE).await?;
        let moved = moved.with_context(|| format!("no rule changed within {PATIENCE:?}"))?;
        let moved = match watched {
            None => moved,
            Some(watched) => {
                let moved = watched.await??;
                moved.with_context(|| format!("no map changed within {PATIENCE:?}"))?
            }
        };
        written.push(Written { version, acknowledged, moved });
    }
    // Transactions that belong to the last change.
    ensure!(generations.rests(subject.kind.pause(), PATIENCE).await?, "the rules change all the time");
    let processor = total(&subject.usage()?) - before;
    ensure!(!watch.is_finished(), "the plain watch ended: {:?}", watch.await);
    watch.abort();
    let count = written.len() as f64;
    let mut row = Change {
        size: env.size,
        kind: subject.kind,
        what: changed.title(),
        acknowledged: written.iter().map(|one| after(one.moved, one.acknowledged)).collect(),
        watched: Vec::new(),
        processor: processor * 1e3 / count,
        transactions: (subject.backend.has_generations())
            .then_some(generations.after(begun)?.len() as f64 / count),
    };
    {
        let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        for one in &written {
            let output = seen.get(&one.version).context("the plain watch missed a change")?;
            row.watched.push(after(one.moved, *output));
        }
    }
    row.acknowledged.sort_unstable_by(f64::total_cmp);
    row.watched.sort_unstable_by(f64::total_cmp);
    report.change.push(row);
    report.memory.push(Resident {
        size: env.size,
        kind: subject.kind,
        when: match changed {
            Changed::Endpoint | Changed::Answering => AFTER_CHANGES,
            Changed::Count => "after scaling one by one",
        },
        memory: subject.memory()?,
        children: programs.max(),
    });
    subject.check_complete(env)?;
    subject.wait_for_answers(env).await
}

/// Milliseconds; negative if `later` was earlier.
fn after(later: Instant, earlier: Instant) -> f64 {
    let after = later.saturating_duration_since(earlier).as_secs_f64();
    let before = earlier.saturating_duration_since(later).as_secs_f64();
    (after - before) * 1e3
}

/// A plain watch: JSON, with the client library of Kubernetes. Records the time of every event.
async fn watch(env: &TestEnv, seen: Seen) -> Result<JoinHandle<Result<()>>> {
    let api: kube::Api<EndpointSlice> = kube::Api::namespaced(env.cluster.admin.client(), bulk::NAMESPACE);
    let listed = api.list(&ListParams::default().limit(1)).await.context("cannot list")?;
    let mut version = listed.metadata.resource_version.context("a list has a version")?;
    Ok(tokio::spawn(async move {
        loop {
            let mut events = api.watch(&WatchParams::default().timeout(290), &version).await?.boxed();
            // It ends after its timeout, and is resumed at its version.
            while let Some(event) = events.try_next().await? {
                let at = Instant::now();
                match event {
                    WatchEvent::Added(slice) | WatchEvent::Modified(slice) => {
                        version = slice.metadata.resource_version.unwrap_or(version);
                        seen.lock().unwrap_or_else(PoisonError::into_inner).insert(version.clone(), at);
                    }
                    WatchEvent::Error(status) => bail!("{status:?}"),
                    WatchEvent::Deleted(_) | WatchEvent::Bookmark(_) => {}
                }
            }
        }
    }))
}
