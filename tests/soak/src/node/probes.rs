//! Owns: clients of Services: short connections, established ones, and DNS queries, from the node and from a pod. In: an address.
//! Out: counts, and a violation for each failure that no fault excuses.
//!
//! Each is a thread, because a socket belongs to the network namespace of the thread that makes it.

use crate::timeline::{Broken, Timeline};
use anyhow::{Context as _, Result, anyhow, ensure};
use keelson_harness::peers;
use nix::sched::{CloneFlags, setns};
use serde::Serialize;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Timeout of a connection and of an answer: long, because the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(10);
/// Timeout of one DNS query; a resolver asks three times.
const DNS_PATIENCE: Duration = Duration::from_secs(4);
const DNS_TRIES: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A connection for each request.
    Short,
    /// Requests over one connection, as long as it lasts.
    Established,
    /// A query for this name.
    Dns(&'static str),
}

#[derive(Clone, Debug)]
pub(super) struct ProbeSpec {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) to: SocketAddr,
    /// File of the network namespace; None for the node's.
    pub(super) from: Option<PathBuf>,
    /// Faults that may make it fail until this long after their end.
    pub(super) excuses: &'static [Broken],
    pub(super) after: Duration,
    pub(super) pause: Duration,
}

#[derive(Debug, Default)]
struct Counts {
    requests: AtomicU64,
    failed: AtomicU64,
    excused: AtomicU64,
    longest: Mutex<Duration>,
}

/// What a probe has seen.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Probed {
    pub(crate) name: &'static str,
    pub(crate) requests: u64,
    /// Failures that a fault excuses.
    pub(crate) excused: u64,
    /// Failures that are violations.
    pub(crate) failed: u64,
    /// Of those that succeeded.
    pub(crate) longest_seconds: f64,
}

/// Stopped on drop.
#[derive(Debug)]
pub(super) struct Probe {
    name: &'static str,
    counts: Arc<Counts>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Probe {
    pub(super) fn start(spec: ProbeSpec, timeline: &Timeline) -> Result<Self> {
        let (counts, stop) = (Arc::<Counts>::default(), Arc::<AtomicBool>::default());
        let client = Client { spec: spec.clone(), timeline: timeline.clone(), counts: counts.clone() };
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name(format!("probe {}", spec.name));
        let thread = thread.spawn(move || client.run(&stopped)).context("cannot start a thread")?;
        Ok(Self { name: spec.name, counts, stop, thread: Some(thread) })
    }

    pub(super) fn seen(&self) -> Probed {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let longest = *self.counts.longest.lock().unwrap_or_else(PoisonError::into_inner);
        Probed {
            name: self.name,
            requests: get(&self.counts.requests),
            excused: get(&self.counts.excused),
            failed: get(&self.counts.failed),
            longest_seconds: longest.as_secs_f64(),
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A panic is printed where it happens.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct Client {
    spec: ProbeSpec,
    timeline: Timeline,
    counts: Arc<Counts>,
}

impl Client {
    fn run(self, stop: &AtomicBool) {
        if let Err(error) = self.enter() {
            return self.timeline.violation("the probes run", &format!("{}: {error:#}", self.spec.name));
        }
        let mut open = None;
        while !stop.load(Ordering::Relaxed) {
            let began = Instant::now();
            let outcome = match self.spec.kind {
                Kind::Short => connect(self.spec.to).and_then(|mut stream| ask(&mut stream)),
                Kind::Established => self.ask_again(&mut open),
                Kind::Dns(name) => self.resolve(name),
            };
            self.counts.requests.fetch_add(1, Ordering::Relaxed);
            match outcome {
                Ok(()) => {
                    let mut longest = self.counts.longest.lock().unwrap_or_else(PoisonError::into_inner);
                    *longest = (*longest).max(began.elapsed());
                }
                Err(error) => {
                    open = None;
                    self.failed(began, &error);
                }
            }
            std::thread::sleep(self.spec.pause);
        }
    }

    fn enter(&self) -> Result<()> {
        let Some(namespace) = &self.spec.from else { return Ok(()) };
        let file = File::open(namespace).with_context(|| format!("cannot open {}", namespace.display()))?;
        setns(file, CloneFlags::CLONE_NEWNET).context("cannot enter the pod's network namespace")
    }

    fn failed(&self, began: Instant, error: &anyhow::Error) {
        let (name, now) = (self.spec.name, Instant::now());
        let what = format!("{name} to {} after {:.2?}: {error:#}", self.spec.to, now - began);
        if self.timeline.excused(self.spec.excuses, began, now, self.spec.after) {
            self.counts.excused.fetch_add(1, Ordering::Relaxed);
            self.timeline.record("excused", &what);
        } else {
            self.counts.failed.fetch_add(1, Ordering::Relaxed);
            let tracked = tracked(self.spec.to).unwrap_or_else(|error| format!("{error:#}"));
            self.timeline.violation("connections through Services work", &format!("{what}; {tracked}"));
        }
    }

    fn ask_again(&self, open: &mut Option<TcpStream>) -> Result<()> {
        let stream = match open {
            Some(stream) => stream,
            None => open.insert(connect(self.spec.to).context("a new connection")?),
        };
        ask(stream)
    }

    fn resolve(&self, name: &str) -> Result<()> {
        let mut last = anyhow!("not asked");
        for _ in 0..DNS_TRIES {
            match query(self.spec.to, name) {
                Ok(()) => return Ok(()),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// What connection tracking of the node has of attempts that no endpoint has answered: whether the rules have translated them, and to
/// which endpoint.
fn tracked(to: SocketAddr) -> Result<String> {
    let mut list = Command::new(peers::system("nsenter", "util-linux")?);
    // That of the main thread, which is the node's.
    list.arg(format!("--net=/proc/{}/ns/net", std::process::id()));
    list.arg(peers::system("conntrack", "conntrack")?);
    list.args(["-L", "-p", "tcp", "--state", "SYN_SENT", "-d", &to.ip().to_string()]);
    let listed = list.output().context("cannot list what is tracked")?.stdout;
    let listed = String::from_utf8_lossy(&listed);
    Ok(format!("tracked and not answered: {}", listed.lines().collect::<Vec<_>>().join(", ")))
}

fn connect(to: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, PATIENCE).context("cannot connect")?;
    stream.set_read_timeout(Some(PATIENCE)).and_then(|()| stream.set_write_timeout(Some(PATIENCE)))?;
    Ok(stream)
}

/// One HTTP request over a connection that stays open.
fn ask(stream: &mut TcpStream) -> Result<()> {
    stream.write_all(b"GET / HTTP/1.1\r\nHost: probe\r\n\r\n").context("cannot send")?;
    let (mut answer, mut buffer) = (Vec::new(), [0; 1024]);
    loop {
        let count = stream.read(&mut buffer).context("cannot receive")?;
        ensure!(count > 0, "the connection was closed");
        answer.extend_from_slice(&buffer[..count]);
        if is_whole(&answer) {
            ensure!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
            return Ok(());
        }
    }
}

/// Whether an HTTP answer with `Content-Length` is complete.
fn is_whole(answer: &[u8]) -> bool {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    length.is_none_or(|length| body.len() >= length)
}

/// Asks for the IPv4 address of a name. Any answer without an error is good.
fn query(server: SocketAddr, name: &str) -> Result<()> {
    let id: u16 = rand::random();
    let mut question = Vec::new();
    question.extend_from_slice(&id.to_be_bytes());
    // Recursion desired; one question.
    question.extend_from_slice(&[1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in name.split('.') {
        question.push(u8::try_from(label.len())?);
        question.extend_from_slice(label.as_bytes());
    }
    // The root; type A, class IN.
    question.extend_from_slice(&[0, 0, 1, 0, 1]);
    let socket = UdpSocket::bind("0.0.0.0:0").context("cannot make a socket")?;
    socket.set_read_timeout(Some(DNS_PATIENCE))?;
    socket.connect(server).context("cannot connect")?;
    socket.send(&question).context("cannot send")?;
    let mut answer = [0; 512];
    let count = socket.recv(&mut answer).context("no answer")?;
    let answer = &answer[..count];
    ensure!(count >= 12 && answer[..2] == id.to_be_bytes(), "no answer to the query");
    let (code, answers) = (answer[3] & 15, u16::from_be_bytes([answer[6], answer[7]]));
    ensure!(code == 0 && answers > 0, "code {code} with {answers} answers for {name}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_whole_with_all_of_its_body() {
        assert!(!is_whole(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n"));
        assert!(!is_whole(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab"));
        assert!(is_whole(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"));
    }
}
