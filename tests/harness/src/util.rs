//! Owns: helpers for every suite: waiting, ports, seeds, single HTTP requests.

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use std::env;
use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Timeout of a wait in a test: long, because the machine may be slow and busy.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// How many times as long as elsewhere tests wait: `KEELSON_TEST_PATIENCE`, for machines that are slow, such as virtual ones.
pub fn patience() -> u32 {
    env::var("KEELSON_TEST_PATIENCE").ok().and_then(|times| times.parse().ok()).unwrap_or(1).max(1)
}

const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Repeats `check` until it returns `Ok`, and fails with its last error after `timeout`.
pub async fn eventually<T, F>(timeout: Duration, what: &str, check: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    eventually_every(Duration::from_millis(10), timeout, what, check).await
}

/// Like [`eventually`], for a check that runs processes or reads a large log.
pub async fn eventually_slow<T, F>(what: &str, check: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    eventually_every(Duration::from_millis(100), 2 * PATIENCE, what, check).await
}

/// Like [`eventually`] with another first pause, for a check that is expensive. What has not come soon is asked for less often:
/// a pause is a tenth of the time that has passed, up to half a second.
pub async fn eventually_every<T, F>(
    pause: Duration,
    timeout: Duration,
    what: &str,
    mut check: impl FnMut() -> F,
) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let started = Instant::now();
    let timeout = timeout * patience();
    let mut last = None;
    loop {
        // A check that hangs must not hang the test.
        let left = timeout.saturating_sub(started.elapsed()).max(Duration::from_millis(100));
        match tokio::time::timeout(left, check()).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => last = Some(error),
            Err(_) => {}
        }
        if started.elapsed() >= timeout {
            let error = last.unwrap_or_else(|| anyhow!("the check did not finish"));
            return Err(error.context(format!("timed out after {timeout:?}: {what}")));
        }
        tokio::time::sleep((started.elapsed() / 10).clamp(pause, pause.max(LONGEST_PAUSE))).await;
    }
}

pub async fn until(what: &str, mut condition: impl FnMut() -> bool) -> Result<()> {
    eventually(PATIENCE, what, || {
        let holds = condition();
        async move { if holds { Ok(()) } else { Err(anyhow!("the condition does not hold")) } }
    })
    .await
}

/// Fails unless the text contains every part.
pub fn ensure_contains(text: &str, parts: &[&str]) -> Result<()> {
    for part in parts {
        ensure!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    Ok(())
}

/// Below the range of Linux for outgoing connections (32768 and up) and of API servers for Services (30000 and up), so
/// that a restarted server can use its port again. Above those that programs of a node have by default, such as 10256 for the
/// health of a proxy: the agent refuses one for something else.
const PORTS: Range<u16> = 11_000..30_000;

/// A TCP port on loopback that nothing listens on. It is reserved for this process until it exits: a locked file tells
/// the other suites, which run at the same time.
pub fn free_port() -> Result<u16> {
    static TAKEN: Mutex<Vec<File>> = Mutex::new(Vec::new());
    let folder = ports_folder();
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for _ in 0..100 {
        let port = rand::rng().random_range(PORTS);
        let path = folder.join(port.to_string());
        let lock = File::create(&path).with_context(|| format!("cannot open {}", path.display()))?;
        if lock.try_lock().is_err() || TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_err() {
            continue;
        }
        TAKEN.lock().map_err(|_| anyhow!("another test panicked while it took a port"))?.push(lock);
        return Ok(port);
    }
    bail!("found no free port on loopback in 100 tries")
}

/// Users cannot open the files of each other.
fn ports_folder() -> PathBuf {
    let user = nix::unistd::geteuid();
    std::env::temp_dir().join(if user.is_root() {
        "keelson-ports".to_owned()
    } else {
        format!("keelson-ports-{user}")
    })
}

/// Prints its seed, which `KEELSON_SEED` sets.
#[derive(Debug)]
pub struct Seeded(SmallRng);

impl Seeded {
    pub fn new() -> Result<Self> {
        let seed = match std::env::var("KEELSON_SEED") {
            Ok(text) => text.parse().with_context(|| format!("KEELSON_SEED is {text:?}, not a number"))?,
            Err(_) => rand::rng().random(),
        };
        eprintln!("to repeat this run: KEELSON_SEED={seed}");
        Ok(Self(SmallRng::seed_from_u64(seed)))
    }

    pub fn rng(&mut self) -> &mut SmallRng {
        &mut self.0
    }
}

#[derive(Clone, Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Fails unless the status is 2xx.
    pub fn success(self) -> Result<Self> {
        if !self.status.is_success() {
            bail!("HTTP {}: {}", self.status, self.text());
        }
        Ok(self)
    }
}

pub(crate) type HttpClient = Client<HttpConnector, Full<Bytes>>;

pub(crate) fn http_client() -> HttpClient {
    Client::builder(TokioExecutor::new()).build_http()
}

/// Sends one HTTP request over a new connection.
pub async fn http(method: Method, url: &str, headers: &[(&str, &str)], body: Bytes) -> Result<Answer> {
    let mut request = Request::builder().method(method.clone()).uri(url);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(body)).with_context(|| format!("not a request: {method} {url}"))?;
    let response = http_client().request(request).await.with_context(|| format!("{method} {url}"))?;
    let (head, body) = response.into_parts();
    let body =
        body.collect().await.with_context(|| format!("{method} {url}: the body broke off"))?.to_bytes();
    Ok(Answer { status: head.status, headers: head.headers, body })
}

/// The value of a metric in the text of `/metrics`; `name` includes all labels.
pub fn metric(text: &str, name: &str) -> Result<Option<f64>> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.map(|value| value.trim().parse().with_context(|| format!("{name} is {value:?}"))).transpose()
}

pub async fn http_get(url: &str) -> Result<Answer> {
    http(Method::GET, url, &[], Bytes::new()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// T3: neither this process nor another one that runs suites at the same time is given a port twice.
    #[test]
    fn t3_a_port_belongs_to_one_process() -> Result<()> {
        let ports: Vec<u16> = (0..200).map(|_| free_port()).collect::<Result<_>>()?;
        let distinct: std::collections::HashSet<_> = ports.iter().collect();
        assert_eq!(distinct.len(), ports.len());
        // What another process would find.
        let file = File::create(ports_folder().join(ports[0].to_string()))?;
        assert!(matches!(file.try_lock(), Err(fs::TryLockError::WouldBlock)));
        Ok(())
    }
}
