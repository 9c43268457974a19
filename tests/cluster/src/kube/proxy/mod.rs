//! Owns: a proxy before an API server, inside the test process, which terminates TLS and so reads the requests.
//! In: the API server's address, and rules that may change while requests run. Out: refused, late, lost or broken
//! responses where a rule says so, and a record of every request.
//!
//! Clients use HTTP/2 or HTTP/1.1 and trust the cluster's authority, which has also signed its certificate. Headers and
//! tokens pass through; a client's certificate does not. Each client connection has a separate connection to the API
//! server, and ends when the API server closes that one. Watches stream through.

mod record;
mod rules;

pub use record::ApiSeen;
pub use rules::{ApiFault, ApiMatch, ApiRule};

use super::pki::Pki;
use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, Version, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use keelson_harness::registry_proxy::Outcome;
use record::{Records, Ticket};
use rules::Rules;
use rustls::ClientConfig;
use serde_json::json;
use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Poll, ready};
use std::time::Instant;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

type Upstream = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;
type AnyBody = UnsyncBoxBody<Bytes, hyper::Error>;

/// On drop it accepts no more connections and breaks the existing ones.
#[derive(Debug)]
pub struct ApiProxy {
    address: String,
    shared: Arc<ProxyState>,
    server: JoinHandle<()>,
}

#[derive(Debug)]
struct ProxyState {
    upstream: String,
    tls: ClientConfig,
    rules: Rules,
    records: Records,
    connections: AtomicUsize,
    /// Counts calls of [`ApiProxy::close_all`].
    closes: watch::Sender<usize>,
}

impl ApiProxy {
    /// Starts a proxy before the API server at `upstream` (`127.0.0.1:PORT`) on a free port of loopback.
    pub async fn start(upstream: &str, pki: &Pki) -> Result<Self> {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("cannot listen on loopback")?;
        let address = listener.local_addr().context("a listener has an address")?.to_string();
        let shared = Arc::new(ProxyState {
            upstream: upstream.to_owned(),
            tls: pki.client_tls()?,
            rules: Rules::default(),
            records: Records::default(),
            connections: AtomicUsize::new(0),
            closes: watch::Sender::new(0),
        });
        let server = tokio::spawn(accept(listener, TlsAcceptor::from(pki.server_tls()?), shared.clone()));
        Ok(Self { address, shared, server })
    }

    /// `https://127.0.0.1:PORT`.
    pub fn endpoint(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Applies a fault to matching requests. The first rule that matches decides.
    pub fn rule(&self, matches: ApiMatch, fault: ApiFault) -> ApiRule {
        self.shared.rules.add(matches, fault, None)
    }

    /// Applies a fault to the next `times` matching requests.
    pub fn rule_times(&self, matches: ApiMatch, fault: ApiFault, times: usize) -> ApiRule {
        self.shared.rules.add(matches, fault, Some(times))
    }

    /// Removes a rule; requests that it holds continue.
    pub fn remove(&self, rule: ApiRule) {
        self.shared.rules.remove(rule);
    }

    /// Removes all rules; requests that they hold continue.
    pub fn clear_rules(&self) {
        self.shared.rules.clear();
    }

    /// Number of requests that a rule that is still there has applied to.
    pub fn hits(&self, rule: ApiRule) -> usize {
        self.shared.rules.hits(rule)
    }

    /// The requests that match `filter`, in the order in which they came.
    pub fn seen(&self, filter: impl Fn(&ApiSeen) -> bool) -> Vec<ApiSeen> {
        self.shared.records.all().into_iter().filter(filter).collect()
    }

    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    pub fn close_all(&self) {
        self.shared.closes.send_modify(|closes| *closes += 1);
    }
}

impl Drop for ApiProxy {
    fn drop(&mut self) {
        self.server.abort();
        self.close_all();
    }
}

async fn accept(listener: TcpListener, tls: TlsAcceptor, shared: Arc<ProxyState>) {
    loop {
        match listener.accept().await {
            Ok((client, _)) => {
                let number = shared.connections.fetch_add(1, Ordering::Relaxed);
                let closes = shared.closes.subscribe();
                tokio::spawn(serve(client, number, tls.clone(), shared.clone(), closes));
            }
            Err(error) => {
                eprintln!("the proxy before the API server ended: {error}");
                return;
            }
        }
    }
}

struct Connection {
    number: usize,
    shared: Arc<ProxyState>,
    client: Upstream,
    /// Set to close it.
    close: watch::Sender<bool>,
}

/// Serves one connection until the client, a rule or the proxy ends it.
async fn serve(
    client: TcpStream,
    number: usize,
    tls: TlsAcceptor,
    shared: Arc<ProxyState>,
    mut closes: watch::Receiver<usize>,
) {
    let stream = match tls.accept(client).await {
        Ok(stream) => stream,
        // A client that disconnects or distrusts the proxy reports that itself.
        Err(_) => return,
    };
    let connector = HttpsConnectorBuilder::new()
        .with_tls_config(shared.tls.clone())
        .https_only()
        .enable_all_versions()
        .build();
    let close = watch::Sender::new(false);
    let mut closing = close.subscribe();
    let connection = Arc::new(Connection {
        number,
        shared,
        client: Client::builder(TokioExecutor::new()).build(connector),
        close,
    });
    let service = service_fn(move |request| {
        let connection = connection.clone();
        async move { Ok::<_, Infallible>(connection.answer(request).await) }
    });
    let server = auto::Builder::new(TokioExecutor::new());
    let served = server.serve_connection(TokioIo::new(stream), service);
    // Dropping the server closes the connection with everything on it.
    tokio::select! {
        _ = served => {}
        _ = closing.wait_for(|close| *close) => {}
        _ = closes.changed() => {}
    }
}

impl Connection {
    /// Answers one request, or never.
    async fn answer(&self, request: Request<Incoming>) -> Response<AnyBody> {
        let (head, body) = request.into_parts();
        let path = head.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        let ticket = self.shared.records.open(self.describe(&head));
        let Ok(body) = body.collect().await.map(http_body_util::Collected::to_bytes) else {
            return self.close_connection(ticket).await;
        };
        ticket.change(|seen| seen.body = body.clone());

        let mut applied = self.shared.rules.matching_rule(&head.method, &path);
        let fault = applied.as_ref().map_or(ApiFault::Pass, |applied| applied.fault.clone());
        match &fault {
            ApiFault::Status { code, reason, headers } => return refuse(&ticket, *code, reason, headers),
            ApiFault::Text { code, body } => return answer_with(&ticket, *code, body.clone(), &[]),
            ApiFault::Delay(duration) => tokio::time::sleep(*duration).await,
            ApiFault::Hold => {
                if let Some(applied) = &mut applied {
                    applied.removed().await;
                }
            }
            ApiFault::Swallow => return self.never_answer(ticket).await,
            ApiFault::Close => return self.close_connection(ticket).await,
            ApiFault::Pass | ApiFault::LoseAnswer | ApiFault::CloseAfter => {}
        }
        let forwarded = self.forwarded_request(&head, &path, body);
        ticket.change(|seen| seen.forwarded = true);
        let Ok(answer) = self.client.request(forwarded).await else {
            // The API server is down or has closed the connection: the client must see the same.
            return self.close_connection(ticket).await;
        };
        match fault {
            ApiFault::LoseAnswer => self.never_answer(ticket).await,
            ApiFault::CloseAfter => self.close_connection(ticket).await,
            _ => pass(ticket, answer),
        }
    }

    fn describe(&self, head: &http::request::Parts) -> ApiSeen {
        let text = |name| {
            let value = head.headers.get(name).and_then(|value: &http::HeaderValue| value.to_str().ok());
            value.unwrap_or_default().to_owned()
        };
        ApiSeen {
            connection: self.number,
            http2: head.version == Version::HTTP_2,
            method: head.method.clone(),
            path: head.uri.path().to_owned(),
            query: head.uri.query().unwrap_or_default().to_owned(),
            user_agent: text(header::USER_AGENT),
            content_type: text(header::CONTENT_TYPE),
            accept: text(header::ACCEPT),
            body: Bytes::new(),
            status: None,
            forwarded: false,
            response_bytes: 0,
            started: Instant::now(),
            answered: None,
            finished: None,
            outcome: Outcome::Open,
        }
    }

    fn forwarded_request(
        &self,
        head: &http::request::Parts,
        path: &str,
        body: Bytes,
    ) -> Request<Full<Bytes>> {
        let mut forwarded = Request::new(Full::new(body));
        *forwarded.method_mut() = head.method.clone();
        let uri = format!("https://{}{path}", self.shared.upstream);
        // It was the path of a request already.
        *forwarded.uri_mut() = uri.parse().unwrap_or_default();
        pass_headers(&head.headers, forwarded.headers_mut());
        forwarded
    }

    async fn close_connection(&self, ticket: Ticket) -> Response<AnyBody> {
        ticket.end(Outcome::Broken);
        self.close.send_replace(true);
        std::future::pending().await
    }

    /// Never answers. The future is dropped with the request or with the connection.
    async fn never_answer(&self, ticket: Ticket) -> Response<AnyBody> {
        let _held = ticket;
        std::future::pending().await
    }
}

fn refuse(ticket: &Ticket, code: u16, reason: &str, headers: &[(String, String)]) -> Response<AnyBody> {
    let object = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "metadata": {},
        "code": code, "reason": reason, "message": "refused by a rule of the test",
    });
    answer_with(ticket, code, object.to_string(), headers)
}

/// Answers with a text of the proxy, as JSON.
fn answer_with(ticket: &Ticket, code: u16, body: String, headers: &[(String, String)]) -> Response<AnyBody> {
    let body = Full::new(Bytes::from(body));
    let mut response = Response::new(body.map_err(|never| match never {}).boxed_unsync());
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let json = http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    for (name, value) in headers {
        if let (Ok(name), Ok(value)) =
            (http::HeaderName::from_bytes(name.as_bytes()), http::HeaderValue::from_str(value))
        {
            response.headers_mut().append(name, value);
        }
    }
    ticket.answered(response.status().as_u16());
    ticket.end(Outcome::Complete);
    response
}

fn pass(ticket: Ticket, answer: Response<Incoming>) -> Response<AnyBody> {
    let (head, body) = answer.into_parts();
    ticket.answered(head.status.as_u16());
    let mut response = Response::new(Counted { body, ticket }.boxed_unsync());
    *response.status_mut() = head.status;
    pass_headers(&head.headers, response.headers_mut());
    response
}

/// Copies the headers that are not specific to one connection.
fn pass_headers(from: &HeaderMap, to: &mut HeaderMap) {
    let own = [
        header::CONNECTION,
        header::TRANSFER_ENCODING,
        header::CONTENT_LENGTH,
        header::HOST,
        header::UPGRADE,
        header::TE,
    ];
    for (name, value) in from.iter().filter(|(name, _)| !own.contains(name)) {
        to.append(name, value.clone());
    }
}

/// A response body whose bytes are counted.
struct Counted {
    body: Incoming,
    ticket: Ticket,
}

impl Body for Counted {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        match &frame {
            Some(Ok(frame)) => {
                let length = frame.data_ref().map_or(0, Bytes::len);
                self.ticket.change(|seen| seen.response_bytes += length as u64);
            }
            Some(Err(_)) => self.ticket.end(Outcome::Broken),
            None => self.ticket.end(Outcome::Complete),
        }
        // A server does not ask for more after the known end, so the end is detected here.
        if self.body.is_end_stream() {
            self.ticket.end(Outcome::Complete);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
