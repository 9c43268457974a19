//! Agent, runtime, or either of them killed at random moments while thirty images are pulled three at a time by callers
//! that retry like a kubelet.
//!
//! On containerd nothing is fetched twice: leases keep what has arrived. CRI-O has none, and a pull that dies with the
//! agent or with CRI-O itself begins again; there a layer is requested again only after a kill.

use crate::common::{MIB, idle, no_lease_left, pull_like_kubelet, start_pull};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::Kind;
use keelson_harness::cri::{Cri, Pull};
use keelson_harness::images::{Image, ImageSpec};
use keelson_harness::node::Node;
use keelson_harness::registry::{ALICE, Access, Registry};
use keelson_harness::registry_proxy::{Fault, Kind as What, Match, RegistryProxy, Seen};
use keelson_harness::util::{Seeded, until};
use keelson_harness::{on_both_runtimes, on_crio};
use rand::RngExt as _;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

on_both_runtimes!(
    thirty_images_are_pulled_through_fifty_kills_of_the_agent,
    thirty_images_are_pulled_through_ten_kills_of_the_runtime,
    thirty_images_are_pulled_through_twenty_kills_of_either_or_both,
);

on_crio!(
    thirty_images_are_pulled_through_fifty_kills_of_the_agent,
    thirty_images_are_pulled_through_ten_kills_of_the_runtime,
    thirty_images_are_pulled_through_twenty_kills_of_either_or_both,
);

const LIMIT: usize = 3;
const IMAGES: usize = 30;
/// Bytes per second for one blob: a layer then takes as long as a life or two.
const RATE: u64 = 6 * MIB;
/// Maximum bytes lost by an interruption: the step of 1 MiB in which containerd writes, and buffers of the proxy and of both sockets
/// while such a write takes long (together 2.1 MiB were seen).
const LOST: u64 = 5 * MIB / 2;
/// Timeout of all callers together.
const PATIENCE: Duration = Duration::from_secs(240);

async fn thirty_images_are_pulled_through_fifty_kills_of_the_agent(kind: Kind) -> Result<()> {
    let mut show = Show::start(kind).await?;
    for _ in 0..50 {
        show.start_all().await?;
        let since = show.count_hit();
        show.kill_agent().await?;
        show.kills.push((since, Instant::now()));
    }
    show.finish().await
}

async fn thirty_images_are_pulled_through_ten_kills_of_the_runtime(kind: Kind) -> Result<()> {
    let mut show = Show::start(kind).await?;
    for _ in 0..10 {
        show.start_all().await?;
        let since = show.count_hit();
        show.node.runtime.kill9()?;
        show.node.runtime.start_again().await?;
        show.kills.push((since, Instant::now()));
    }
    show.finish().await
}

async fn thirty_images_are_pulled_through_twenty_kills_of_either_or_both(kind: Kind) -> Result<()> {
    let mut show = Show::start(kind).await?;
    for _ in 0..20 {
        show.start_all().await?;
        let (runtime, agent) = *[(true, false), (false, true), (true, true)]
            .get(show.random.rng().random_range(0..3))
            .context("one of three")?;
        let since = show.count_hit();
        if runtime {
            show.node.runtime.kill9()?;
        }
        if agent {
            show.kill_agent().await?;
        }
        if runtime {
            show.node.runtime.start_again().await?;
        }
        show.kills.push((since, Instant::now()));
    }
    show.finish().await
}

struct Show {
    callers: JoinSet<Result<usize>>,
    /// Number of callers that have their image.
    arrived: Arc<AtomicUsize>,
    agent: Agent,
    running: bool,
    /// Index of the first record of the agent's life: in the open proxy and in the private one.
    life: (usize, usize),
    /// Each from the decision to the end of all its effects.
    kills: Vec<(Instant, Instant)>,
    /// Kills while layers were being sent.
    hits: usize,
    most_at_once: usize,
    random: Seeded,
    open: Vec<Image>,
    private: Vec<Image>,
    private_proxy: RegistryProxy,
    _private: Registry,
    node: Node,
}

impl Show {
    async fn start(kind: Kind) -> Result<Self> {
        let random = Seeded::new()?;
        let node = Node::start(kind).await?;
        let private = Registry::start(&node.scratch, Access::Users).await?;
        let private_proxy = RegistryProxy::start(private.address()).await?;
        node.runtime.configure_registry(private_proxy.address(), private_proxy.address())?;
        // One layer or two, from 3 to 11 MiB.
        let spec = |repo: &str, n: u64| match n % 3 {
            0 => ImageSpec::new(&format!("{repo}/{n}"), &[(3 + n % 5) * MIB, (4 + n % 3) * MIB]),
            _ => ImageSpec::single(&format!("{repo}/{n}"), (4 + n % 8) * MIB),
        };
        let open: Vec<_> = (0..24).map(|n| spec("open", n)).collect();
        let closed: Vec<_> = (0..6).map(|n| spec("private", n)).collect();
        let open = node.push(&open).await?;
        let closed = keelson_harness::images::push_all(&closed, &private).await?;
        node.proxy.throttle(Some(RATE));
        private_proxy.throttle(Some(RATE));

        let limit = i64::try_from(LIMIT)?;
        let agent = Agent::new(&node.scratch, &node.runtime.endpoint(), &Settings::limit(limit))?;
        let (mut callers, arrived) = (JoinSet::new(), Arc::new(AtomicUsize::new(0)));
        let pulls = open.iter().map(|image| Pull::new(&node.name(image)));
        let private_pulls =
            closed.iter().map(|image| Pull::new(&image.at(private_proxy.address())).user(&ALICE));
        for pull in pulls.chain(private_pulls) {
            // Each has a separate connection, like the pods of several kubelets.
            let cri = Cri::lazy(&agent.socket())?;
            let arrived = arrived.clone();
            callers.spawn(async move {
                let failures = pull_like_kubelet(&cri, &pull, PATIENCE).await;
                arrived.fetch_add(1, Ordering::Relaxed);
                failures
            });
        }
        Ok(Self {
            callers,
            arrived,
            agent,
            running: false,
            life: (0, 0),
            kills: Vec::new(),
            hits: 0,
            most_at_once: 0,
            random,
            open,
            private: closed,
            private_proxy,
            _private: private,
            node,
        })
    }

    async fn pause(&mut self, most: u64) {
        let pause = self.random.rng().random_range(0..most);
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }

    /// Lets agent and runtime live until a random moment: one time in five soon after the start of the agent, otherwise
    /// after pulls have begun.
    async fn start_all(&mut self) -> Result<()> {
        let starts = !self.running;
        self.running = true;
        if starts {
            self.life = (self.node.proxy.records().count(), self.private_proxy.records().count());
            if self.random.rng().random_ratio(1, 5) {
                let soon = Duration::from_millis(self.random.rng().random_range(0..400));
                // A timeout is fine; an exit by itself is an error.
                return match tokio::time::timeout(soon, self.agent.start_live()).await {
                    Ok(started) => started,
                    Err(_) => Ok(()),
                };
            }
            self.agent.start_live().await?;
        }
        let done = || self.arrived.load(Ordering::Relaxed) == IMAGES;
        until("pulls are under way", || done() || !self.no_requests_in_flight()).await?;
        self.pause(600).await;
        Ok(())
    }

    fn no_requests_in_flight(&self) -> bool {
        [&self.node.proxy, &self.private_proxy].iter().all(|proxy| proxy.records().active_repos().is_empty())
    }

    fn count_hit(&mut self) -> Instant {
        self.hits += usize::from(!self.no_requests_in_flight());
        Instant::now()
    }

    async fn kill_agent(&mut self) -> Result<()> {
        let ended = self.agent.ended()?;
        ensure!(ended.is_none(), "the agent ended by itself with {ended:?}");
        self.agent.kill9()?;
        self.running = false;
        until("the runtime has stopped pulls without callers", || self.no_requests_in_flight()).await?;
        self.end_of_life()
    }

    /// Checks the limit at the registries for all of this life.
    fn end_of_life(&mut self) -> Result<()> {
        let mut seen = self.node.proxy.records().since(self.life.0);
        seen.extend(self.private_proxy.records().since(self.life.1));
        let most = most_repos_at_once(&seen);
        self.most_at_once = self.most_at_once.max(most);
        ensure!(most <= LIMIT, "{most} images were fetched at once, the limit is {LIMIT}");
        Ok(())
    }

    async fn finish(mut self) -> Result<()> {
        if !self.running {
            self.start_all().await?;
        }
        self.agent.ready().await?;
        self.node.proxy.throttle(None);
        self.private_proxy.throttle(None);
        let mut failures = 0;
        while let Some(caller) = self.callers.join_next().await {
            failures += caller??;
        }
        self.end_of_life()?;
        ensure!(self.most_at_once == LIMIT, "the limit was never reached: {} at once", self.most_at_once);
        let kills = self.kills.len();
        ensure!(self.hits >= 5, "of {kills} kills only {} hit a pull: nothing was tested", self.hits);

        let cri = self.node.runtime.cri().await?;
        for name in self.names() {
            ensure!(cri.image_status(&name).await?.is_some(), "{name} did not arrive");
        }
        let lost = match self.node.runtime.kind() {
            Kind::Debian16 | Kind::V2 => self.fetched_once()?,
            Kind::Crio => self.fetched_again_after_kills_only()?,
        };
        eprintln!(
            "{kills} kills, {} of them in mid-pull; {failures} answers were failures; {lost:.1} MiB were fetched again",
            self.hits
        );
        self.nothing_is_left().await
    }

    fn names(&self) -> Vec<String> {
        let private = self.private.iter().map(|image| image.at(self.private_proxy.address()));
        self.open.iter().map(|image| self.node.name(image)).chain(private).collect()
    }

    fn images(&self) -> impl Iterator<Item = (&RegistryProxy, &Image)> {
        let open = self.open.iter().map(|image| (&self.node.proxy, image));
        open.chain(self.private.iter().map(|image| (&self.private_proxy, image)))
    }

    /// Between two GETs of a layer agent or runtime was killed. Returns the MiB that were sent again.
    fn fetched_again_after_kills_only(&self) -> Result<f64> {
        let mut lost = 0.0;
        for (proxy, image) in self.images() {
            for layer in &image.layers {
                let gets = proxy.records().gets(&layer.digest);
                for pair in gets.windows(2) {
                    let killed = |(since, until)| since <= pair[1].started && pair[0].started <= until;
                    ensure!(
                        self.kills.iter().copied().any(killed),
                        "a layer of {} was asked for again without a kill: {pair:#?} {:#?}",
                        image.repo,
                        self.kills
                    );
                }
                let sent = proxy.records().bytes_sent(&layer.digest);
                ensure!(sent >= layer.size, "{}: {sent} bytes of {} were sent", image.repo, layer.size);
                lost += (sent - layer.size) as f64 / MIB as f64;
            }
        }
        Ok(lost)
    }

    /// Every GET continued where the one before had stopped. Returns the MiB that were sent again.
    fn fetched_once(&self) -> Result<f64> {
        let mut lost = 0.0;
        for (proxy, image) in self.images() {
            for layer in &image.layers {
                let gets = proxy.records().gets(&layer.digest);
                let span = |seen: &Seen| {
                    let from = seen.range_start.unwrap_or(0);
                    (from, from + seen.bytes)
                };
                for pair in gets.windows(2) {
                    let ((_, end), (from, _)) = (span(&pair[0]), span(&pair[1]));
                    ensure!(
                        from + LOST >= end,
                        "{} was at {end} and resumed at {from}: {gets:#?}",
                        image.repo
                    );
                }
                let full = proxy.records().full_fetches(layer);
                ensure!(full <= 1, "{} was fetched {full} times in full: {gets:#?}", image.repo);
                let sent = proxy.records().bytes_sent(&layer.digest);
                ensure!(sent >= layer.size, "{}: {sent} bytes of {} were sent", image.repo, layer.size);
                lost += (sent - layer.size) as f64 / MIB as f64;
            }
        }
        let all: u64 = self.open.iter().chain(&self.private).map(Image::size).sum();
        ensure!(lost * (MIB as f64) < all as f64, "{lost} MiB were fetched again");
        Ok(lost)
    }

    /// Checks that no slot, lease or damage is left.
    async fn nothing_is_left(self) -> Result<()> {
        idle(&self.agent).await?;
        if self.node.runtime.kind() != Kind::Crio {
            no_lease_left(&self.node.runtime).await?;
        }
        let more = self.node.push_many("more", LIMIT + 1, 2 * MIB).await?;
        let hold = self.node.proxy.rule(Match::layers(), Fault::StallAfter(MIB));
        let cri = self.agent.cri().await?;
        let calls: Vec<_> =
            more.iter().map(|image| start_pull(&cri, Pull::new(&self.node.name(image)))).collect();
        let active = || self.node.proxy.records().active_repos();
        until("every slot is free", || active().len() == LIMIT).await?;
        crate::common::metric_is(&self.agent, "keelson_image_pull_queue_depth", 1.0).await?;
        self.node.proxy.remove(hold);
        for call in calls {
            call.await??;
        }
        let log = self.agent.log()?;
        // One that is killed before it has written anything leaves nothing to its successor.
        let before_pulls = log.split("restored from the journal").next().unwrap_or_default();
        let (early, all) =
            (before_pulls.matches("state store created").count(), log.matches("state store created").count());
        // A process may be killed after it has created the store, and before it says so.
        ensure!(log.contains("state store open") && early == all, "a state with pulls was lost: {log}");
        for word in ["damage", "panic", "ERROR"] {
            let line = log.lines().find(|line| line.contains(word));
            ensure!(line.is_none(), "the agent's log contains {line:?}");
        }
        Ok(())
    }
}

/// Maximum number of repositories that layers were sent from at the same time.
fn most_repos_at_once(seen: &[Seen]) -> usize {
    let layers = seen.iter().filter(|seen| seen.kind == What::Layer && seen.method == http::Method::GET);
    // (moment, begins, repository): an end sorts before a beginning at the same moment.
    let mut moments: BTreeSet<_> = BTreeSet::new();
    for (at, seen) in layers.enumerate() {
        let repo = seen.repo.clone().unwrap_or_default();
        moments.insert((seen.started, true, at, repo.clone()));
        if let Some(finished) = seen.finished {
            moments.insert((finished, false, at, repo));
        }
    }
    let (mut open, mut most): (BTreeMap<String, usize>, usize) = (BTreeMap::new(), 0);
    for (_, begins, _, repo) in moments {
        let count = open.entry(repo.clone()).or_default();
        if begins {
            *count += 1;
        } else {
            *count -= 1;
            if *count == 0 {
                open.remove(&repo);
            }
        }
        most = most.max(open.len());
    }
    most
}
