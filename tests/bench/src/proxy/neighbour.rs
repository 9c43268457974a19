//! Beside another program that commits to nf_tables 50 times per second, as some CNIs do.
//!
//! Owns: the measurement, and that program ([`Neighbour`]). In: a subject that is in sync. Out: rows: single changes, a
//! restart with a change meanwhile, and the repair of an element that was removed, each alone and beside the neighbour.
//! Commits are received from the kernel, which names their process ([`Commits`]).

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use keelson_cluster::net::Namespace;
use netlink_packet_core::{NetlinkBuffer, NlasIterator};
use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{Socket, SocketAddr};

use super::options::Options;
use super::report::{NeighbourResult, Report};
use super::subject::{PATIENCE, Subject};
use super::test_env::TestEnv;

/// Commit interval of the neighbour.
const EVERY: Duration = Duration::from_millis(20);
const RESTARTS: usize = 3;
/// Name of the neighbour's thread, which identifies its commits, and of its table.
const NAME: &str = "neighbour";
/// `NFNLGRP_NFTABLES`.
const GROUP: u32 = 7;
/// Size in bytes of the receive buffer: a full sync of kube-proxy is one commit.
const BUFFER: usize = 256 << 20;
/// Interval at which a thread checks whether to end.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

const NFTABLES: u16 = 10;
const NEWTABLE: u16 = NFTABLES << 8;
const DELTABLE: u16 = (NFTABLES << 8) | 2;
const NEWGEN: u16 = (NFTABLES << 8) | 15;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const REQUEST: u16 = 1;
const CREATE: u16 = 0x400;
const INET: u8 = 1;
/// `NFTA_TABLE_NAME`.
const TABLE_NAME: u16 = 1;
/// `NFTA_GEN_PROC_NAME`.
const PROC_NAME: u16 = 3;

pub(super) async fn neighbour(
    env: &TestEnv,
    subject: &mut Subject,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    for with in [false, true] {
        let neighbour = if with { Some(Neighbour::start(subject.namespace())?) } else { None };
        let begun = Instant::now();
        let changes = changes(env, subject, options).await?;
        let mut restarts = Vec::new();
        while restarts.len() < RESTARTS && restarts.last() != Some(&None) {
            restarts.push(restart(env, subject).await?);
        }
        let repair = repair(env, subject).await?;
        let rate = match &neighbour {
            Some(neighbour) => neighbour.commits()? as f64 / begun.elapsed().as_secs_f64(),
            None => 0.0,
        };
        drop(neighbour);
        report.neighbour.push(NeighbourResult {
            size: env.size,
            kind: subject.kind,
            rate,
            changes,
            restarts,
            repair,
        });
    }
    Ok(())
}

/// Milliseconds from the API server's response to a change until its commit, sorted.
async fn changes(env: &TestEnv, subject: &Subject, options: &Options) -> Result<Vec<f64>> {
    let commits = Commits::watch(subject)?;
    let (mut took, begun) = (Vec::new(), Instant::now());
    while took.len() < options.changes && (took.len() < 3 || begun.elapsed() < options.changing) {
        commits.wait_for_quiet(subject.kind.pause()).await?;
        let sent = Instant::now();
        env.touch(took.len() % env.size.services, env.new_port()?).await?;
        let acknowledged = Instant::now();
        // One that never comes is not awaited again.
        let Some(committed) = commits.first_after(sent).await? else { break };
        took.push(committed.saturating_duration_since(acknowledged).as_secs_f64() * 1e3);
    }
    took.sort_unstable_by(f64::total_cmp);
    Ok(took)
}

/// Time from the start of a proxy until the commit of a change made while it was stopped; None if that does not happen.
async fn restart(env: &TestEnv, subject: &mut Subject) -> Result<Option<Duration>> {
    subject.stop(false).await?;
    env.touch(1, env.new_port()?).await?;
    if subject.kind.is_keelson() {
        // The agent runs, and has the change before the proxy starts.
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let commits = Commits::watch(subject)?;
    let begun = Instant::now();
    subject.start().await?;
    let Some(first) = commits.first_after(begun).await? else { return Ok(None) };
    commits.wait_for_quiet(2 * subject.kind.pause()).await?;
    Ok(Some(first.duration_since(begun)))
}

/// Time until a removed element is restored. kube-proxy does not check.
async fn repair(env: &TestEnv, subject: &Subject) -> Result<Option<Duration>> {
    if !subject.kind.is_keelson() {
        return Ok(None);
    }
    let commits = Commits::watch(subject)?;
    let (asked, _) = env.asked()?;
    let element = format!("{{ {} . tcp . {} }}", asked.ip(), asked.port());
    subject.namespace().nft(&["delete", "element", "ip", "keelson", "cluster-ip-ports", &element])?;
    let begun = Instant::now();
    let first = commits.first_after(begun).await?.context("the element was not restored")?;
    subject.wait_for_answers(env).await?;
    Ok(Some(first.duration_since(begun)))
}

struct Commits {
    received: Arc<Mutex<ReceivedCommits>>,
    stop: Arc<AtomicBool>,
}

#[derive(Default)]
struct ReceivedCommits {
    at: Vec<Instant>,
    failed: Option<String>,
}

impl Commits {
    fn watch(subject: &Subject) -> Result<Self> {
        let socket = open(subject.namespace())?;
        // kube-proxy commits with `nft`; beside Keelson it is the bench that does.
        let others: &'static [&str] = if subject.kind.is_keelson() { &[NAME, "nft"] } else { &[NAME] };
        socket.set_rx_buf_sz(i32::try_from(BUFFER)?).context("cannot set the receive buffer")?;
        socket.add_membership(GROUP).context("cannot subscribe to commits")?;
        socket.set_non_blocking(true)?;
        let (received, stop) = (Arc::<Mutex<ReceivedCommits>>::default(), Arc::<AtomicBool>::default());
        let (noted, stopped) = (received.clone(), stop.clone());
        thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if let Err(error) = receive(&socket, others, &noted) {
                    lock(&noted).failed = Some(format!("{error:#}"));
                    return;
                }
            }
        });
        Ok(Self { received, stop })
    }

    fn with_commits<T>(&self, look: impl FnOnce(&[Instant]) -> T) -> Result<T> {
        let received = lock(&self.received);
        match &received.failed {
            Some(error) => Err(anyhow!("commit notifications were lost: {error}")),
            None => Ok(look(&received.at)),
        }
    }

    /// None if it did not come within [`PATIENCE`].
    async fn first_after(&self, time: Instant) -> Result<Option<Instant>> {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(first) = self.with_commits(|at| at.iter().find(|at| **at > time).copied())? {
                return Ok(Some(first));
            }
            if Instant::now() > until {
                return Ok(None);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits until no commit has come for `long`.
    async fn wait_for_quiet(&self, long: Duration) -> Result<()> {
        let started = Instant::now();
        loop {
            let last = self.with_commits(|at| at.last().copied())?.unwrap_or(started).max(started);
            if last.elapsed() >= long {
                return Ok(());
            }
            ensure!(started.elapsed() < PATIENCE, "there are commits all the time");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Commits {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn lock(received: &Mutex<ReceivedCommits>) -> std::sync::MutexGuard<'_, ReceivedCommits> {
    received.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records the next commits, if any come soon.
fn receive(socket: &Socket, others: &[&str], received: &Mutex<ReceivedCommits>) -> Result<()> {
    let mut bytes = Vec::with_capacity(1 << 20);
    match socket.recv(&mut bytes, 0) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            thread::sleep(Duration::from_micros(200));
            return Ok(());
        }
        Err(error) => return Err(error).context("cannot receive"),
    }
    let at = Instant::now();
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        let message = NetlinkBuffer::new_checked(rest).context("no message")?;
        rest = rest.get((message.length() as usize).next_multiple_of(4)..).unwrap_or_default();
        let is_new = message.message_type() == NEWGEN;
        if is_new && !others.contains(&&*made_by(message.payload().get(4..).unwrap_or_default())?) {
            lock(received).at.push(at);
        }
    }
    Ok(())
}

/// Name of the thread that made this generation.
fn made_by(attributes: &[u8]) -> Result<String> {
    for attribute in NlasIterator::new(attributes) {
        let attribute = attribute.context("an attribute that is none")?;
        if attribute.kind() == PROC_NAME {
            return Ok(String::from_utf8_lossy(attribute.value()).trim_end_matches('\0').to_owned());
        }
    }
    Ok(String::new())
}

fn open(namespace: &Namespace) -> Result<Socket> {
    let socket = namespace.run(|| {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        Ok::<_, io::Error>(socket)
    })?;
    socket.context("cannot open a netlink socket")
}

/// Creates and deletes its own table 50 times per second, until it is dropped.
pub(super) struct Neighbour {
    stop: Arc<AtomicBool>,
    commits: Arc<Mutex<Result<u64>>>,
    thread: Option<JoinHandle<()>>,
}

impl Neighbour {
    pub(super) fn start(namespace: &Namespace) -> Result<Self> {
        let socket = open(namespace)?;
        let (stop, commits) = (Arc::<AtomicBool>::default(), Arc::new(Mutex::new(Ok(0))));
        let (stopped, counted) = (stop.clone(), commits.clone());
        let body = move || {
            let mut due = Instant::now();
            while !stopped.load(Ordering::Relaxed) {
                let sent = socket.send_to(&batch(), &SocketAddr::new(0, 0), 0);
                let mut count = counted.lock().unwrap_or_else(PoisonError::into_inner);
                match (sent, count.as_mut()) {
                    (Ok(_), Ok(count)) => *count += 1,
                    (Err(error), Ok(_)) => *count = Err(anyhow!("the neighbour cannot commit: {error}")),
                    (_, Err(_)) => return,
                }
                drop(count);
                due += EVERY;
                thread::sleep(due.saturating_duration_since(Instant::now()).min(POLL_INTERVAL));
            }
        };
        let thread = thread::Builder::new().name(NAME.to_owned()).spawn(body).context("no thread")?;
        Ok(Self { stop, commits, thread: Some(thread) })
    }

    pub(super) fn commits(&self) -> Result<u64> {
        let commits = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
        commits.as_ref().copied().map_err(|error| anyhow!("{error}"))
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Errors are in the count.
            let _ = thread.join();
        }
    }
}

/// A transaction that creates a table and deletes it.
fn batch() -> Vec<u8> {
    let mut all = message(BATCH_BEGIN, REQUEST, 0, NFTABLES, &[]);
    let mut name = NAME.as_bytes().to_vec();
    name.push(0);
    all.extend(message(NEWTABLE, REQUEST | CREATE, INET, 0, &attribute(TABLE_NAME, &name)));
    all.extend(message(DELTABLE, REQUEST, INET, 0, &attribute(TABLE_NAME, &name)));
    all.extend(message(BATCH_END, REQUEST, 0, NFTABLES, &[]));
    all
}

fn message(kind: u16, flags: u16, family: u8, resource: u16, attributes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(20 + attributes.len()).unwrap_or(u32::MAX);
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend([family, 0]);
    bytes.extend(resource.to_be_bytes());
    bytes.extend(attributes);
    bytes
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}
