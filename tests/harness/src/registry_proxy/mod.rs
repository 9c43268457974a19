//! Owns: an HTTP proxy before a registry, inside the test process.
//! In: the registry's address, and rules that may change while requests run. Out: slow, hanging, broken or refused
//! responses where a rule says so, and a record of every request.
//!
//! This is where the suites measure limits and repeated bytes: outside the agent and outside the runtime.

mod record;
mod rules;

pub use record::{Kind, Outcome, Records, Seen};
pub use rules::{Fault, Match, RuleId, SIGNATURE};

use crate::images::BlobDigest;
use crate::util::{HttpClient, http_client};
use anyhow::{Context as _, Result};
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::serve::ListenerExt as _;
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use record::Ticket;
use rules::{AppliedFault, Rules, Target};
use socket2::SockRef;
use std::collections::VecDeque;
use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Bytes that the kernel may buffer for one connection.
const SEND_BUFFER: usize = 64 << 10;

/// Accepts no more connections after drop.
#[derive(Debug)]
pub struct RegistryProxy {
    address: String,
    shared: Shared,
    server: JoinHandle<()>,
}

#[derive(Clone, Debug)]
struct Shared {
    upstream: Arc<str>,
    client: HttpClient,
    rules: Rules,
    records: Records,
    /// Bytes per second for one blob; 0 is no limit.
    rate: Arc<AtomicU64>,
}

impl RegistryProxy {
    /// Starts a proxy before the registry at `upstream` (`127.0.0.1:PORT`) on a free port of loopback.
    pub async fn start(upstream: &str) -> Result<Self> {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("cannot listen on loopback")?;
        let address = listener.local_addr().context("a listener has an address")?.to_string();
        let shared = Shared {
            upstream: upstream.into(),
            client: http_client(),
            rules: Rules::default(),
            records: Records::default(),
            rate: Arc::default(),
        };
        let router = axum::Router::new().fallback(serve).with_state(shared.clone());
        // Bytes in a socket buffer count as sent in the record, but may never arrive.
        let listener = listener.tap_io(|connection| {
            let _ = SockRef::from(&*connection).set_send_buffer_size(SEND_BUFFER);
        });
        let server = tokio::spawn(async move {
            if let Err(e) = axum::serve(listener, router).await {
                eprintln!("the proxy before the registry ended: {e}");
            }
        });
        Ok(Self { address, shared, server })
    }

    /// `127.0.0.1:PORT`, which is also the registry part of names of images pulled through it.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Limits every blob to this many bytes per second, also those that are being sent; `None` is no limit.
    pub fn throttle(&self, bytes_a_second: Option<u64>) {
        self.shared.rate.store(bytes_a_second.unwrap_or(0), Ordering::Relaxed);
    }

    /// Applies a fault to matching requests. The first rule that matches decides.
    pub fn rule(&self, matches: Match, fault: Fault) -> RuleId {
        self.shared.rules.add(matches, fault, None)
    }

    /// Applies a fault to the next `times` matching requests.
    pub fn rule_times(&self, matches: Match, fault: Fault, times: usize) -> RuleId {
        self.shared.rules.add(matches, fault, Some(times))
    }

    /// Removes a rule; requests that it holds continue.
    pub fn remove(&self, rule: RuleId) {
        self.shared.rules.remove(rule);
    }

    /// Removes all rules; requests that they hold continue.
    pub fn clear_rules(&self) {
        self.shared.rules.clear();
    }

    pub fn records(&self) -> &Records {
        &self.shared.records
    }
}

impl Drop for RegistryProxy {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn serve(State(shared): State<Shared>, request: Request<Body>) -> Response {
    let (target, seen) = describe(&shared.records, &request);
    let ticket = shared.records.open(seen);
    let mut applied = shared.rules.matching_rule(&target);
    match applied.as_mut().map(|applied| applied.fault) {
        Some(Fault::Hang) => {
            if let Some(mut applied) = applied.take() {
                applied.removed().await;
            }
        }
        Some(Fault::Status { code, retry_after }) => return refuse(ticket, code, retry_after),
        Some(Fault::SignedRedirect) => return redirect(ticket),
        _ => {}
    }
    match forward(&shared, target, request, applied, ticket).await {
        Ok(response) => response,
        Err(error) => {
            let mut response = Response::new(Body::from(format!("{error:#}")));
            *response.status_mut() = StatusCode::BAD_GATEWAY;
            response
        }
    }
}

fn describe(records: &Records, request: &Request<Body>) -> (Target, Seen) {
    let path = request.uri().path().to_owned();
    let (repo, kind, digest) = match path.strip_prefix("/v2/") {
        Some("") => (None, Kind::Ping, None),
        Some(rest) => {
            if let Some((repo, name)) = rest.rsplit_once("/manifests/") {
                (Some(repo), Kind::Manifest, name.starts_with("sha256:").then_some(name))
            } else if let Some((repo, name)) = rest.rsplit_once("/blobs/") {
                (Some(repo), Kind::Blob, name.starts_with("sha256:").then_some(name))
            } else {
                (None, Kind::Other, None)
            }
        }
        None => (None, Kind::Other, None),
    };
    let digest = digest.map(|digest| BlobDigest(digest.to_owned()));
    let kind = match &digest {
        Some(digest) if kind == Kind::Blob && records.is_layer(digest) => Kind::Layer,
        _ => kind,
    };
    let text = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
    let range_start = text(header::RANGE)
        .and_then(|range| range.strip_prefix("bytes="))
        .and_then(|range| range.split('-').next()?.parse().ok());
    let target = Target { method: request.method().clone(), kind, repo: repo.map(str::to_owned), digest };
    let seen = Seen {
        method: target.method.clone(),
        kind,
        repo: target.repo.clone(),
        digest: target.digest.clone(),
        authorization: text(header::AUTHORIZATION).map(str::to_owned),
        range_start,
        status: None,
        bytes: 0,
        started: Instant::now(),
        finished: None,
        outcome: Outcome::Open,
        path,
    };
    (target, seen)
}

fn refuse(ticket: Ticket, code: u16, retry_after: Option<u32>) -> Response {
    let mut response = Response::new(Body::from("refused by a rule of the test"));
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    if let Some(seconds) = retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if code == StatusCode::UNAUTHORIZED.as_u16() {
        let realm = HeaderValue::from_static("Basic realm=\"keelson-tests\"");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, realm);
    }
    ticket.status(response.status().as_u16());
    ticket.end(Outcome::Complete);
    response
}

/// A pre-signed URL at a port where nothing listens.
fn redirect(ticket: Ticket) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::TEMPORARY_REDIRECT;
    let location = format!("http://127.0.0.1:1/store/layer?X-Amz-Signature={SIGNATURE}&x=1");
    if let Ok(location) = HeaderValue::try_from(location) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    ticket.status(response.status().as_u16());
    ticket.end(Outcome::Complete);
    response
}

async fn forward(
    shared: &Shared,
    target: Target,
    request: Request<Body>,
    applied: Option<AppliedFault>,
    ticket: Ticket,
) -> Result<Response> {
    let (head, body) = request.into_parts();
    let query = head.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut onward = Request::builder().method(head.method).uri(format!("http://{}{query}", shared.upstream));
    if let Some(headers) = onward.headers_mut() {
        pass_headers(&head.headers, headers);
        if applied.as_ref().is_some_and(|applied| applied.fault == Fault::IgnoreRange) {
            headers.remove(header::RANGE);
        }
    }
    let body = body.collect().await.context("the request broke off")?.to_bytes();
    let onward = onward.body(Full::new(body)).context("cannot pass the request on")?;
    let answer = match shared.client.request(onward).await {
        Ok(answer) => answer,
        Err(error) => {
            ticket.end(Outcome::Broken);
            return Err(error).context("the registry does not answer");
        }
    };

    let (head, body) = answer.into_parts();
    ticket.status(head.status.as_u16());
    let manifest = target.kind == Kind::Manifest && target.method == Method::GET && head.status.is_success();
    let source = if manifest {
        let content = body.collect().await.context("the manifest broke off")?.to_bytes();
        shared.records.learn_layers(layers_of(&content));
        Source { upstream: None, ready: VecDeque::from([content]) }
    } else {
        Source { upstream: Some(Body::new(body)), ready: VecDeque::new() }
    };
    let throttled = matches!(target.kind, Kind::Layer | Kind::Blob);
    let length = head.headers.get(header::CONTENT_LENGTH).cloned();
    let expected = match target.method {
        Method::HEAD => Some(0),
        _ => length.as_ref().and_then(|length| length.to_str().ok()?.parse().ok()),
    };
    let mut sending = Sending {
        source,
        applied,
        rate: throttled.then(|| shared.rate.clone()),
        sent: 0,
        expected,
        ticket: Some(ticket),
    };
    sending.end_if_complete();
    let body = stream::try_unfold(sending, |mut sending| async move {
        Ok::<_, io::Error>(sending.next().await?.map(|part| (part, sending)))
    });
    let mut response = Response::new(Body::from_stream(body));
    *response.status_mut() = head.status;
    pass_headers(&head.headers, response.headers_mut());
    // HEAD has no body, so its length has to be passed on; otherwise it is the length of the body.
    if let Some(length) = length {
        response.headers_mut().insert(header::CONTENT_LENGTH, length);
    }
    Ok(response)
}

/// Copies the headers that are not specific to one connection.
fn pass_headers(from: &HeaderMap, to: &mut HeaderMap) {
    let own = [header::CONNECTION, header::TRANSFER_ENCODING, header::CONTENT_LENGTH, header::HOST];
    for (name, value) in from.iter().filter(|(name, _)| !own.contains(name)) {
        to.append(name, value.clone());
    }
}

/// Digests of the layers in a manifest.
fn layers_of(manifest: &[u8]) -> Vec<BlobDigest> {
    let manifest: serde_json::Value = serde_json::from_slice(manifest).unwrap_or_default();
    let layers = manifest["layers"].as_array().cloned().unwrap_or_default();
    layers.iter().filter_map(|layer| Some(BlobDigest(layer["digest"].as_str()?.to_owned()))).collect()
}

struct Source {
    upstream: Option<Body>,
    ready: VecDeque<Bytes>,
}

struct Sending {
    source: Source,
    applied: Option<AppliedFault>,
    rate: Option<Arc<AtomicU64>>,
    sent: u64,
    /// Length of the whole response in bytes, if known.
    expected: Option<u64>,
    /// Taken when the response ends; dropped with the rest when the client disconnects.
    ticket: Option<Ticket>,
}

impl Sending {
    async fn next(&mut self) -> io::Result<Option<Bytes>> {
        if let Some(limit) = self.obey_rule().await? {
            return self.send(limit).await;
        }
        self.send(u64::MAX).await
    }

    /// Applies the rule at this offset, and returns how many bytes may be sent before it is asked again.
    async fn obey_rule(&mut self) -> io::Result<Option<u64>> {
        let Some(applied) = &mut self.applied else { return Ok(None) };
        match applied.fault {
            Fault::StallAfter(limit) if self.sent < limit => Ok(Some(limit - self.sent)),
            Fault::ResetAfter(limit) if self.sent < limit => Ok(Some(limit - self.sent)),
            Fault::StallAfter(_) => {
                applied.removed().await;
                self.applied = None;
                Ok(None)
            }
            Fault::ResetAfter(_) => {
                self.end(Outcome::Broken);
                Err(io::Error::from(io::ErrorKind::ConnectionReset))
            }
            Fault::Hang | Fault::Status { .. } | Fault::IgnoreRange | Fault::SignedRedirect => Ok(None),
        }
    }

    async fn send(&mut self, limit: u64) -> io::Result<Option<Bytes>> {
        let rate = self.rate.as_ref().map_or(0, |rate| rate.load(Ordering::Relaxed));
        // Twenty parts per second are smooth, and apply a change of the rate soon.
        let part = if rate == 0 { 64 << 10 } else { (rate / 20).clamp(1, 64 << 10) };
        let part = usize::try_from(part.min(limit)).unwrap_or(usize::MAX);
        let Some(bytes) = self.source.take(part).await.inspect_err(|_| self.end(Outcome::Broken))? else {
            self.end(Outcome::Complete);
            return Ok(None);
        };
        if rate != 0 {
            tokio::time::sleep(Duration::from_secs_f64(bytes.len() as f64 / rate as f64)).await;
        }
        self.sent += bytes.len() as u64;
        if let Some(ticket) = &self.ticket {
            ticket.sent(bytes.len());
        }
        self.end_if_complete();
        Ok(Some(bytes))
    }

    /// A server asks for no more data after the promised length, so the end is detected here.
    fn end_if_complete(&mut self) {
        if self.expected == Some(self.sent) {
            self.end(Outcome::Complete);
        }
    }

    fn end(&mut self, outcome: Outcome) {
        if let Some(ticket) = self.ticket.take() {
            ticket.end(outcome);
        }
    }
}

impl Source {
    async fn take(&mut self, limit: usize) -> io::Result<Option<Bytes>> {
        loop {
            if let Some(mut first) = self.ready.pop_front() {
                if first.len() > limit {
                    let rest = first.split_off(limit);
                    self.ready.push_front(rest);
                }
                if !first.is_empty() {
                    return Ok(Some(first));
                }
                continue;
            }
            let Some(upstream) = &mut self.upstream else { return Ok(None) };
            match upstream.frame().await {
                Some(Ok(frame)) => self.ready.extend(frame.into_data().ok()),
                Some(Err(error)) => return Err(io::Error::other(error)),
                None => self.upstream = None,
            }
        }
    }
}
