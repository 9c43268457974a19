//! Owns: a node with an agent before it, and views of its pulls. In: settings. Out: calls, views and measurements.

use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::{Kind, MANY_DOWNLOADS, Options};
use keelson_harness::cri::{Cri, Pull};
use keelson_harness::images::Image;
use keelson_harness::node::Node;
use keelson_harness::registry::Access;
use keelson_harness::registry_proxy::{Fault, Match, Records, RuleId, Seen};
use keelson_harness::util::{PATIENCE, eventually};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;
use tokio::task::JoinHandle;
use tonic::Status;

pub(crate) struct TestEnv {
    pub(crate) cri: Cri,
    pub(crate) agent: Agent,
    pub(crate) node: Node,
}

/// A pull in a separate task. Aborting it is a cancellation by the client.
pub(crate) type RunningPull = JoinHandle<Result<String, Status>>;

impl TestEnv {
    pub(crate) async fn start(kind: Kind, settings: &Settings) -> Result<Self> {
        Self::before(Node::start(kind).await?, settings).await
    }

    pub(crate) async fn start_with(kind: Kind, options: &Options, settings: &Settings) -> Result<Self> {
        Self::before(Node::start_with(kind, Access::Anonymous, options).await?, settings).await
    }

    /// With a runtime that downloads far more at once than its default: for tests that hold more pulls at the registry
    /// than the default allows.
    pub(crate) async fn start_with_many_downloads(kind: Kind, settings: &Settings) -> Result<Self> {
        let options = Options { max_concurrent_downloads: MANY_DOWNLOADS, ..Options::default() };
        Self::start_with(kind, &options, settings).await
    }

    pub(crate) async fn with_users(kind: Kind, settings: &Settings) -> Result<Self> {
        Self::before(Node::start_with(kind, Access::Users, &Options::default()).await?, settings).await
    }

    pub(crate) async fn before(node: Node, settings: &Settings) -> Result<Self> {
        let agent = node.agent(settings).await?;
        Ok(Self { cri: agent.cri().await?, agent, node })
    }

    pub(crate) fn records(&self) -> &Records {
        self.node.proxy.records()
    }

    pub(crate) fn pull_of(&self, image: &Image) -> Pull {
        Pull::new(&self.node.name(image))
    }

    /// Begins a pull without credentials.
    pub(crate) fn begin(&self, image: &Image) -> RunningPull {
        self.begin_with(self.pull_of(image))
    }

    pub(crate) fn begin_with(&self, pull: Pull) -> RunningPull {
        begin(&self.cri, pull)
    }

    /// Begins pulls one by one, each when the agent has the one before, so that their order is known.
    pub(crate) async fn begin_in_order(&self, images: &[Image]) -> Result<Vec<RunningPull>> {
        let before = self.pulls().await?.callers;
        let mut going = Vec::new();
        for (n, image) in (1..).zip(images) {
            going.push(self.begin(image));
            self.wait_for_callers(before + n).await?;
        }
        Ok(going)
    }

    pub(crate) fn hold(&self, image: &Image) -> RuleId {
        self.node.proxy.rule(Match::layers().repo(&image.repo), Fault::Hang)
    }

    pub(crate) fn hold_each(&self, images: &[Image]) -> Vec<RuleId> {
        images.iter().map(|image| self.hold(image)).collect()
    }

    pub(crate) async fn pulls(&self) -> Result<Pulls> {
        Pulls::of(&self.agent).await
    }

    pub(crate) async fn wait_for_pulls(&self, what: &str, holds: impl Fn(&Pulls) -> bool) -> Result<Pulls> {
        wait_for_pulls(&self.agent, what, holds).await
    }

    pub(crate) async fn wait_for_callers(&self, count: u32) -> Result<Pulls> {
        self.wait_for_pulls(&format!("{count} callers wait"), |pulls| pulls.callers == count).await
    }

    /// Waits until layers of exactly these images are being sent.
    pub(crate) async fn wait_for_active(&self, images: &[Image]) -> Result<()> {
        let wanted: BTreeSet<String> = images.iter().map(|image| image.repo.clone()).collect();
        eventually(PATIENCE, "the registry is asked for the layers of these images", || {
            let now = self.records().active_repos();
            let wanted = &wanted;
            async move {
                ensure!(now == *wanted, "of {now:?}, not of {wanted:?}");
                Ok(())
            }
        })
        .await
    }

    /// Waits until no pull is left, in the agent and in flight.
    pub(crate) async fn idle(&self) -> Result<()> {
        self.wait_for_pulls("no pull is left", |pulls| {
            pulls.pulls.is_empty() && pulls.running == 0 && pulls.callers == 0
        })
        .await?;
        self.wait_for_active(&[]).await
    }

    /// Number of pulls of this name in the runtime's log.
    pub(crate) fn runtime_calls(&self, name: &str) -> Result<usize> {
        let message = match self.node.runtime.kind() {
            Kind::Crio => format!("Pulling image: {name}\""),
            Kind::Debian16 | Kind::V2 => format!("PullImage \\\"{name}\\\""),
        };
        let log = self.node.runtime.log()?;
        Ok(log.lines().filter(|line| line.contains(&message) && is_question(line)).count())
    }
}

/// containerd logs a request, and then its success or failure with the same prefix.
fn is_question(line: &str) -> bool {
    !line.contains("returns image reference") && !line.contains("level=error")
}

pub(crate) fn begin(cri: &Cri, pull: Pull) -> RunningPull {
    let cri = cri.clone();
    tokio::spawn(async move {
        let pulling = tokio::time::timeout(PATIENCE, cri.pull(&pull)).await;
        pulling.unwrap_or_else(|_| Err(Status::aborted("the test has lost its patience with this pull")))
    })
}

pub(crate) async fn wait_for_pulls(
    agent: &Agent,
    what: &str,
    holds: impl Fn(&Pulls) -> bool,
) -> Result<Pulls> {
    eventually(PATIENCE, what, || async {
        let pulls = Pulls::of(agent).await?;
        ensure!(holds(&pulls), "it is {pulls:?}");
        Ok(pulls)
    })
    .await
}

pub(crate) async fn all_succeed(
    going: impl IntoIterator<Item = RunningPull>,
    images: &[Image],
) -> Result<()> {
    for (going, image) in going.into_iter().zip(images) {
        let reference = going.await?.with_context(|| format!("the pull of {}", image.repo))?;
        // containerd answers with the image's id, CRI-O with its name by digest.
        let by_digest = format!("/{}@{}", image.repo, image.manifest);
        let is_it = reference == image.config.0 || reference.ends_with(&by_digest);
        ensure!(is_it, "{} is {} or {by_digest}, not {reference}", image.repo, image.config);
    }
    Ok(())
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Pulls {
    pub(crate) limit: Limit,
    pub(crate) running: u32,
    pub(crate) queued: u32,
    pub(crate) callers: u32,
    pub(crate) pulls: Vec<Shown>,
    pub(crate) finished: Vec<Shown>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Limit {
    pub(crate) max_parallel_image_pulls: u32,
    pub(crate) enforced_by: String,
    pub(crate) enforce_note: String,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Shown {
    pub(crate) image: String,
    pub(crate) state: String,
    pub(crate) position: u32,
    pub(crate) callers: u32,
    pub(crate) progress: Option<Progress>,
    pub(crate) error: String,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Progress {
    pub(crate) bytes_done: u64,
    pub(crate) bytes_total: u64,
    pub(crate) layers_done: u32,
    pub(crate) layers_total: u32,
    pub(crate) idle_ms: u64,
    pub(crate) phase: PhaseName,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PhaseName {
    Resolving,
    Downloading,
    Unpacking,
}

impl Pulls {
    pub(crate) async fn of(agent: &Agent) -> Result<Self> {
        let json = agent.pulls_json().await?;
        serde_json::from_value(json.clone()).with_context(|| format!("not the pulls of an agent: {json}"))
    }

    /// The state of the only pull of this image that has not ended.
    pub(crate) fn state(&self, name: &str) -> Option<&str> {
        self.of_image(name).map(|pull| pull.state.as_str())
    }

    pub(crate) fn of_image(&self, name: &str) -> Option<&Shown> {
        self.pulls.iter().find(|pull| pull.image == name)
    }
}

/// When the registry served each repository: from the first request that names it to the end of the last. A pull lasts
/// longer than that, so pulls that overlap here did run together.
pub(crate) fn spans(seen: &[Seen]) -> BTreeMap<String, (Instant, Instant)> {
    let mut spans = BTreeMap::new();
    for seen in seen {
        let (Some(repo), Some(end)) = (&seen.repo, seen.finished) else { continue };
        let span = spans.entry(repo.clone()).or_insert((seen.started, end));
        *span = (span.0.min(seen.started), span.1.max(end));
    }
    spans
}

/// Maximum number of overlapping spans. Only for repositories that were pulled once.
pub(crate) fn most_at_once(spans: &BTreeMap<String, (Instant, Instant)>) -> usize {
    let within = |at: Instant| spans.values().filter(|(from, to)| *from <= at && at < *to).count();
    // The maximum is reached where one begins.
    spans.values().map(|(from, _)| within(*from)).max().unwrap_or(0)
}

#[test]
fn overlaps_are_counted() {
    let base = Instant::now();
    let at = |ms| base + std::time::Duration::from_millis(ms);
    let span = |name: &str, from, to| (name.to_owned(), (at(from), at(to)));
    let spans = BTreeMap::from([span("a", 0, 10), span("b", 5, 20), span("c", 10, 12), span("d", 30, 40)]);
    assert_eq!(most_at_once(&spans), 2, "a and b, b and c: c begins when a has ended");
}
