//! Owns: a proxy before an API server, inside the test process, which ends TLS and so knows the requests.
//! In: the API server's address, and rules that may change while requests run. Out: refused, late, lost or broken
//! answers where a rule says so, and a record of every request.
//!
//! Clients speak HTTP/2 or HTTP/1.1 to it and trust the cluster's authority, which has signed its certificate too.
//! Headers pass through, and so do tokens; a client's certificate does not. Each connection of a client has its own
//! to the API server, and ends when the API server breaks that one off. Watches stream through.

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

/// A running proxy. It takes no connection any more when it is dropped, and breaks those that it has.
#[derive(Debug)]
pub struct ApiProxy {
    address: String,
    shared: Arc<Shared>,
    server: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
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
        let shared = Arc::new(Shared {
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

    /// Where it listens, as the address of an API server: `https://127.0.0.1:PORT`.
    pub fn endpoint(&self) -> String {
        format!("https://{}", self.address)
    }

    /// From now on, does this to matching requests. The first rule that matches decides.
    pub fn rule(&self, matches: ApiMatch, fault: ApiFault) -> ApiRule {
        self.shared.rules.add(matches, fault, None)
    }

    /// Does this to the next `times` matching requests.
    pub fn rule_times(&self, matches: ApiMatch, fault: ApiFault, times: usize) -> ApiRule {
        self.shared.rules.add(matches, fault, Some(times))
    }

    /// Removes a rule; requests that it holds go on.
    pub fn remove(&self, rule: ApiRule) {
        self.shared.rules.remove(rule);
    }

    /// Removes all rules; requests that they hold go on.
    pub fn clear_rules(&self) {
        self.shared.rules.clear();
    }

    /// How many requests a rule that was not removed has applied to.
    pub fn hits(&self, rule: ApiRule) -> usize {
        self.shared.rules.hits(rule)
    }

    /// The requests so far that `filter` takes, in the order in which they came.
    pub fn seen(&self, filter: impl Fn(&ApiSeen) -> bool) -> Vec<ApiSeen> {
        self.shared.records.all().into_iter().filter(filter).collect()
    }

    /// How many connections were ever taken.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Closes every connection.
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

async fn accept(listener: TcpListener, tls: TlsAcceptor, shared: Arc<Shared>) {
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

/// One connection of a client.
struct Connection {
    number: usize,
    shared: Arc<Shared>,
    client: Upstream,
    /// Set once it is to be closed.
    close: watch::Sender<bool>,
}

/// Serves one connection until the client, a rule or the proxy ends it.
async fn serve(
    client: TcpStream,
    number: usize,
    tls: TlsAcceptor,
    shared: Arc<Shared>,
    mut closes: watch::Receiver<usize>,
) {
    let stream = match tls.accept(client).await {
        Ok(stream) => stream,
        // A client that leaves or distrusts is no event: it will say so itself.
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
    // Dropping what serves it closes it, whatever runs on it.
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
            return self.closed(ticket).await;
        };
        ticket.change(|seen| seen.body = body.clone());

        let mut ruling = self.shared.rules.judge(&head.method, &path);
        let fault = ruling.as_ref().map_or(ApiFault::Pass, |ruling| ruling.fault.clone());
        match &fault {
            ApiFault::Status { code, reason, headers } => return refuse(&ticket, *code, reason, headers),
            ApiFault::Text { code, body } => return answer_with(&ticket, *code, body.clone(), &[]),
            ApiFault::Delay(duration) => tokio::time::sleep(*duration).await,
            ApiFault::Hold => {
                if let Some(ruling) = &mut ruling {
                    ruling.removed().await;
                }
            }
            ApiFault::Swallow => return self.lost(ticket).await,
            ApiFault::Close => return self.closed(ticket).await,
            ApiFault::Pass | ApiFault::LoseAnswer | ApiFault::CloseAfter => {}
        }
        let onward = self.onward(&head, &path, body);
        ticket.change(|seen| seen.forwarded = true);
        let Ok(answer) = self.client.request(onward).await else {
            // The API server is not there or has broken off: its client is to see the same.
            return self.closed(ticket).await;
        };
        match fault {
            ApiFault::LoseAnswer => self.lost(ticket).await,
            ApiFault::CloseAfter => self.closed(ticket).await,
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

    fn onward(&self, head: &http::request::Parts, path: &str, body: Bytes) -> Request<Full<Bytes>> {
        let mut onward = Request::new(Full::new(body));
        *onward.method_mut() = head.method.clone();
        let uri = format!("https://{}{path}", self.shared.upstream);
        // It was a path of a request already.
        *onward.uri_mut() = uri.parse().unwrap_or_default();
        pass_headers(&head.headers, onward.headers_mut());
        onward
    }

    /// Closes the connection, which drops this future.
    async fn closed(&self, ticket: Ticket) -> Response<AnyBody> {
        ticket.end(Outcome::Broken);
        self.close.send_replace(true);
        std::future::pending().await
    }

    /// Answers never. The future is dropped with the request or with the connection.
    async fn lost(&self, ticket: Ticket) -> Response<AnyBody> {
        let _held = ticket;
        std::future::pending().await
    }
}

/// Answers with a `Status` object.
fn refuse(ticket: &Ticket, code: u16, reason: &str, headers: &[(String, String)]) -> Response<AnyBody> {
    let object = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "metadata": {},
        "code": code, "reason": reason, "message": "refused by a rule of the test",
    });
    answer_with(ticket, code, object.to_string(), headers)
}

/// Answers with a text of the proxy's own, as JSON.
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

/// Passes an answer on as it comes.
fn pass(ticket: Ticket, answer: Response<Incoming>) -> Response<AnyBody> {
    let (head, body) = answer.into_parts();
    ticket.answered(head.status.as_u16());
    let mut response = Response::new(Counted { body, ticket }.boxed_unsync());
    *response.status_mut() = head.status;
    pass_headers(&head.headers, response.headers_mut());
    response
}

/// Copies the headers that are not about one connection only.
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

/// The body of an answer, counted on its way.
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
        // A server does not ask for more when it knows that there is none, so the end is seen here.
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
