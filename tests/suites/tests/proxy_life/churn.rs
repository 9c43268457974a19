//! A hundred changes per second, of which clients only notice that other endpoints answer.

use crate::common::{LONG, TestEnv, family_of};
use crate::kernel;
use crate::model::{PORT, Service, pool};
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, anyhow, ensure};
use keelson_cluster::manifests::ManifestFolder;
use keelson_cluster::net::{Family, Flow, Outcome, Transport, World};
use keelson_harness::util::Seeded;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Duration in seconds; `KEELSON_CHURN_SECONDS` overrides it.
const SECONDS: u64 = 20;
/// Changes per second.
const RATE: u32 = 100;
/// One change in this number is of a Service with clients.
const ASKED_EVERY: usize = 5;
/// Numbers of Services that change and have no clients.
const NOISE: std::ops::Range<u16> = 100..140;
/// Minimum number of syncs, and of versions of Services with clients, even on a busy machine.
const MIN_SYNCS: u64 = 20;
/// Maximum number of clients.
const MAX_CLIENTS: usize = 160;
/// Interval between two checks of the versions in the kernel.
const POLL_INTERVAL: Duration = Duration::from_millis(60);

/// A Service without clients, with random fields; nothing serves at its endpoints.
pub(crate) fn noise(random: &mut SmallRng, number: u16) -> Service {
    let family = Family::ALL[usize::from(number % 2)];
    let port = random.random_range(8080..8084);
    let address = |n: u16| -> IpAddr {
        let [high, low] = (number * 8 + n).to_be_bytes();
        match family {
            Family::V4 => Ipv4Addr::new(10, 250, high, low).into(),
            Family::V6 => Ipv6Addr::new(0xfd00, 0x250, 0, 0, 0, 0, 0, number * 8 + n).into(),
        }
    };
    let endpoints: Vec<SocketAddr> =
        (0..8).filter(|_| random.random_ratio(2, 5)).map(|n| SocketAddr::new(address(n), port)).collect();
    let mut service = Service::new(number, family, &endpoints);
    if random.random_ratio(1, 2) {
        service.transports.push(Transport::Udp);
    }
    if random.random_ratio(1, 3) {
        service.affinity = Some(*[60, 600, 10_800].get(random.random_range(0..3)).unwrap_or(&60));
    }
    if random.random_ratio(1, 3) {
        service.external.push(service.own_external());
    }
    if random.random_ratio(1, 3) {
        service.node_port = Some(30_000 + number);
    }
    service
}

/// Writes manifests continuously. Stopped on drop.
pub(crate) struct Author {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Vec<Service>>>>,
    writes: Arc<AtomicUsize>,
}

impl Author {
    /// Writes Services of [`NOISE`] at this rate per second. `every.0` writes something else once in `every.1` writes.
    pub(crate) fn start(
        manifests: &ManifestFolder,
        seed: u64,
        per_second: u32,
        mut every: (impl FnMut() -> Result<()> + Send + 'static, usize),
    ) -> Self {
        let (stop, writes) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let (stopped, count, manifests) = (stop.clone(), writes.clone(), manifests.clone());
        let thread = std::thread::spawn(move || {
            let mut random = SmallRng::seed_from_u64(seed);
            let mut all = BTreeMap::<_, Service>::new();
            let mut next = std::time::Instant::now();
            while !stopped.load(Ordering::Relaxed) {
                let written = count.fetch_add(1, Ordering::Relaxed) + 1;
                if written.is_multiple_of(every.1) {
                    every.0()?;
                } else {
                    let number = random.random_range(NOISE);
                    match all.get(&number) {
                        Some(service) if random.random_ratio(1, 10) => {
                            service.delete(&manifests)?;
                            all.remove(&number);
                        }
                        _ => {
                            let service = noise(&mut random, number);
                            service.write(&manifests)?;
                            all.insert(number, service);
                        }
                    }
                }
                // A late write is caught up.
                next += Duration::from_secs(1) / per_second;
                std::thread::sleep(next.saturating_duration_since(std::time::Instant::now()));
            }
            Ok(all.into_values().collect())
        });
        Self { stop, thread: Some(thread), writes }
    }

    pub(crate) fn writes(&self) -> usize {
        self.writes.load(Ordering::Relaxed)
    }

    /// Stops it, and returns the Services as written.
    pub(crate) fn stop(mut self) -> Result<Vec<Service>> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("it was stopped already")?;
        thread.join().map_err(|_| anyhow!("the author panicked"))?
    }
}

impl Drop for Author {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// A Service whose endpoints change, with clients all the time.
struct Moving {
    number: u16,
    family: Family,
    pool: Vec<SocketAddr>,
    /// The version that is being written, or was last.
    written: AtomicU16,
    /// A version that the tables of nftables had at the last check.
    seen: AtomicU16,
    /// The one that was seen before. What a sync programs after the tables may still be at this one.
    seen_before: AtomicU16,
}

impl Moving {
    fn new(number: u16, family: Family, port: u16) -> Arc<Self> {
        let [written, seen, seen_before] = [1, 0, 0].map(AtomicU16::new);
        Arc::new(Self { number, family, pool: pool(family, port), written, seen, seen_before })
    }

    /// Up to four endpoints. Three consecutive versions have endpoints in common only by chance.
    fn endpoints(&self, version: u16) -> Vec<SocketAddr> {
        let (first, count) = (usize::from(version) * 3, 1 + usize::from(version) * 7 % 4);
        (first..first + count).map(|index| self.pool[index % self.pool.len()]).collect()
    }

    fn service(&self, version: u16) -> Service {
        let mut service = Service::new(self.number, self.family, &self.endpoints(version));
        service.transports.push(Transport::Udp);
        service.external.push(service.marker(version));
        service
    }

    fn write(&self, manifests: &ManifestFolder) -> Result<()> {
        let version = self.written.fetch_add(1, Ordering::SeqCst) + 1;
        self.service(version).write(manifests)
    }

    /// Whether a connection that began when the kernel had version `from` may be answered by this endpoint now.
    fn is_valid(&self, by: SocketAddr, from: u16) -> bool {
        let to = self.written.load(Ordering::SeqCst);
        (from..=to).any(|version| self.endpoints(version).contains(&by))
    }

    fn look(&self, external: &[IpAddr]) {
        let service = Service::new(self.number, self.family, &[]);
        let newest = (0..=self.written.load(Ordering::SeqCst)).rev();
        if let Some(version) = newest.into_iter().find(|version| external.contains(&service.marker(*version)))
        {
            let before = self.seen.load(Ordering::SeqCst);
            if version > before {
                self.seen_before.store(before, Ordering::SeqCst);
                self.seen.store(version, Ordering::SeqCst);
            }
        }
    }
}

fn watch(world: &Arc<World>, moving: &[Arc<Moving>], stop: &Arc<AtomicBool>) -> JoinHandle<Result<usize>> {
    let (world, moving, stop) = (world.clone(), moving.to_vec(), stop.clone());
    std::thread::spawn(move || {
        let mut looks = 0;
        while !stop.load(Ordering::Relaxed) {
            for family in Family::ALL {
                let external = kernel::addresses(world.node(), family, "external-ports")?;
                moving
                    .iter()
                    .filter(|moving| moving.family == family)
                    .for_each(|moving| moving.look(&external));
            }
            looks += 1;
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(looks)
    })
}

/// A UDP flow to a Service whose endpoints change: it is moved to another when its endpoint is removed, and ends with
/// one of the last.
async fn moving_udp(mut flow: Flow, moving: Arc<Moving>, stop: Arc<AtomicBool>) -> Result<Flow> {
    while !stop.load(Ordering::Relaxed) {
        // The moment between the end of the old flow and the first packet of the new one loses a response.
        if let Outcome::Answered { by, .. } = flow.ask(Duration::from_secs(2)).await? {
            ensure!(moving.pool.contains(&by), "{by} answers, which belongs to another Service");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(flow)
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_continue_under_a_hundred_changes_per_second() -> Result<()> {
    let (moving, staying) = services();
    let env = TestEnv::started(&first_versions(&moving, &staying)).await?;
    survives_churn(env, moving, staying).await
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_continue_under_a_hundred_changes_per_second_with_ebpf() -> Result<()> {
    let (moving, staying) = services();
    let env = TestEnv::started_at_sockets(&first_versions(&moving, &staying)).await?;
    survives_churn(env, moving, staying).await
}

fn first_versions(moving: &[Arc<Moving>], staying: &[Service]) -> Vec<Service> {
    moving.iter().map(|moving| moving.service(1)).chain(staying.iter().cloned()).collect()
}

async fn survives_churn(env: TestEnv, moving: Vec<Arc<Moving>>, staying: Vec<Service>) -> Result<()> {
    let seconds = match std::env::var("KEELSON_CHURN_SECONDS") {
        Ok(text) => {
            text.parse().with_context(|| format!("KEELSON_CHURN_SECONDS is {text:?}, not a number"))?
        }
        Err(_) => SECONDS,
    };
    let mut random = Seeded::new()?;
    let is_at_sockets = !env.is_nft();
    let (world, stop) = (env.world.clone(), Arc::<AtomicBool>::default());
    let watch = watch(&world, &moving, &stop);

    let mut traffic = Traffic::start(&world, &staying)?;
    let mut flows = Vec::new();
    for moving in &moving {
        for client in [world.pod(), world.client(), world.host()] {
            let (of, before) = (moving.clone(), moving.clone());
            let valid = move |by, from| of.is_valid(by, from);
            let to = moving.service(1).at();
            let from = move || match is_at_sockets {
                true => before.seen_before.load(Ordering::SeqCst),
                false => before.seen.load(Ordering::SeqCst),
            };
            traffic.open_connections(client.clone(), to, valid, from)?;
            let flow = client.open(to, Transport::Udp)?;
            flows.push(tokio::spawn(moving_udp(flow, moving.clone(), stop.clone())));
        }
    }
    let (turns, manifests, mut turn) = (moving.clone(), env.manifests.clone(), 0);
    let write = move || {
        turn += 1;
        turns[turn % turns.len()].write(&manifests)
    };
    let before = env.synced().await?;
    let author = Author::start(&env.manifests, random.rng().random(), RATE, (write, ASKED_EVERY));
    // Connections begin at all times, and stay: if an endpoint is removed, its connections continue.
    for _ in 0..seconds {
        for moving in &moving {
            if traffic.clients() < MAX_CLIENTS {
                traffic.open_flow(world.pod(), moving.service(1).at(), Transport::Tcp, moving.pool.clone());
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        traffic.check_healthy().with_context(|| env.logs())?;
    }
    let writes = author.writes();
    let mut last = author.stop()?;
    traffic.wait_for_answers().await.with_context(|| env.logs())?;
    last.extend(staying);
    last.extend(moving.iter().map(|moving| moving.service(moving.written.load(Ordering::SeqCst))));
    env.wait_for_exact_services(&last).await?;
    udp_is_with_the_last(&moving, flows, &stop).await?;
    let looks = watch.join().map_err(|_| anyhow!("the watch panicked"))??;
    traffic.finish().await.with_context(|| env.logs())?;

    let after = env.synced().await?;
    for family in Family::ALL {
        let (before, after) = (family_of(&before, family)?, family_of(&after, family)?);
        let syncs =
            after["syncs"].as_u64().context("no syncs")? - before["syncs"].as_u64().context("no syncs")?;
        eprintln!("{}: {writes} writes, {syncs} syncs, {looks} looks", family.as_str());
        // The proxy's own changes are not mistaken for another program's.
        ensure!(after["failures"] == 0 && after["repaired"] == 0, "{after}");
        ensure!(syncs >= MIN_SYNCS, "{syncs} syncs of {writes} writes: nothing was tested");
    }
    let versions: u16 = moving.iter().map(|moving| moving.written.load(Ordering::SeqCst)).sum();
    ensure!(u64::from(versions) >= MIN_SYNCS, "{versions} versions of what is asked");
    ensure!(looks >= 10, "{looks} looks at the kernel");
    Ok(())
}

/// Checks that every UDP flow uses a present endpoint.
async fn udp_is_with_the_last(
    moving: &[Arc<Moving>],
    flows: Vec<tokio::task::JoinHandle<Result<Flow>>>,
    stop: &AtomicBool,
) -> Result<()> {
    stop.store(true, Ordering::Relaxed);
    for (index, flow) in flows.into_iter().enumerate() {
        let mut flow = flow.await.context("a client panicked")??;
        let moving = &moving[index / 3];
        let valid = moving.endpoints(moving.written.load(Ordering::SeqCst));
        let (until, mut last) = (tokio::time::Instant::now() + LONG, None);
        while !matches!(last, Some(Outcome::Answered { by, .. }) if valid.contains(&by)) {
            ensure!(tokio::time::Instant::now() < until, "{last:?} is none of {valid:?}");
            last = Some(flow.ask(Duration::from_secs(2)).await?);
        }
    }
    Ok(())
}

/// Services whose endpoints change, and ones whose endpoints stay, with affinity or not. No two share an endpoint.
fn services() -> (Vec<Arc<Moving>>, Vec<Service>) {
    let (mut moving, mut staying) = (Vec::new(), Vec::new());
    for (index, family) in (0..).zip(Family::ALL) {
        moving.push(Moving::new(1 + index, family, 8080));
        moving.push(Moving::new(3 + index, family, 8081));
        let rest = pool(family, 8082);
        let mut plain = Service::new(10 + index, family, &rest[1..5]);
        plain.transports.push(Transport::Udp);
        plain.node_port = Some(31_000 + index);
        let mut affine = Service::new(12 + index, family, &[rest[0], rest[5], rest[6], rest[7]]);
        affine.affinity = Some(600);
        staying.extend([plain, affine]);
    }
    debug_assert!(staying.iter().all(|service| service.at().port() == PORT));
    (moving, staying)
}
