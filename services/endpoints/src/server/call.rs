//! A call, from its request to its end.
//!
//! Owns: [`serve`], which reads a request and makes the response, and [`Call`], the response's chunks. In: HTTP/2
//! requests, and the feed. Out: DATA frames with as many messages as are due, then the status.
//!
//! The messages are encoded already. They are put into frames here and not by a generated server, which
//! would hold a buffer of some ten kilobytes for each waiting caller.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{Request, Response};
use http_body_util::{BodyExt as _, LengthLimitError, Limited, StreamBody};
use hyper::body::Frame;
use keelson_endpoint_publisher::{EndpointsFeed, Published};
use keelson_serve::grpc::{Peer, frame};
use prost::Message;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, body::Body};

use super::{
    ClientHints,
    backends::Backends,
    batch::{Batch, Extent, Frames},
    metrics::{ApiLabel, ServerMetrics, StateLabel},
    plan::{LASTING, Plan, Revision},
    watchers::{Watchers, Watching},
};

/// Maximum size of a request in bytes; a usual one has about 50.
const MAX_REQUEST_BYTES: usize = 64 * 1024;
/// Maximum time until a request has arrived completely.
const REQUEST_TIME: Duration = Duration::from_secs(10);

/// Shared by all calls.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) feed: EndpointsFeed,
    pub(super) watchers: Watchers,
    pub(super) backends: Backends,
    pub(super) metrics: ServerMetrics,
    pub(super) hints: watch::Sender<ClientHints>,
    pub(super) stop: CancellationToken,
    /// When the server first saw its latest revision.
    pub(super) first_seen: Mutex<Option<(Revision, Instant)>>,
}

impl Shared {
    /// When any call first saw this state or a newer one.
    fn first_seen(&self, state: &Published) -> Instant {
        let position = Revision::of(state);
        let mut first_seen = self.first_seen.lock().unwrap_or_else(PoisonError::into_inner);
        match *first_seen {
            Some((known, at)) if known.instance_id == position.instance_id && known.rev >= position.rev => at,
            _ => first_seen.insert((position, Instant::now())).1,
        }
    }
}

/// One of the two APIs.
pub(super) trait Api: Send + Sync + 'static {
    /// Full name of the service.
    const SERVICE: &'static str;
    /// Name of its method; also for logs and metrics.
    const METHOD: &'static str;
    type Request: Message + Default;
    fn plan(request: &Self::Request) -> Plan;
}

pub(super) async fn serve<A, B>(shared: Arc<Shared>, request: Request<B>) -> Response<Body>
where
    A: Api,
    B: hyper::body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<tonic::codegen::StdError>,
{
    match accept::<A, B>(shared, request).await {
        Ok(call) => respond(call),
        Err(status) => status.into_http(),
    }
}

async fn accept<A, B>(shared: Arc<Shared>, request: Request<B>) -> Result<Call, Status>
where
    A: Api,
    B: hyper::body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<tonic::codegen::StdError>,
{
    let (mut head, body) = request.into_parts();
    if head.uri.path().rsplit('/').next() != Some(A::METHOD) {
        return Err(Status::unimplemented(format!(
            "service {} has only the method {}",
            A::SERVICE,
            A::METHOD
        )));
    }
    let deadline = frame::timeout(&head.headers).and_then(|after| Instant::now().checked_add(after));
    let message = message(body).await?;
    let request = A::Request::decode(message).map_err(|error| {
        Status::invalid_argument(format!(
            "the request is not a valid message of {}/{}: {error}",
            A::SERVICE,
            A::METHOD
        ))
    })?;
    let plan = A::plan(&request);
    let peer = head.extensions.remove::<Arc<Peer>>().unwrap_or_default();
    if shared.stop.is_cancelled() {
        return Err(stopping());
    }
    let Some(watching) = shared.watchers.admit(peer, A::METHOD, plan.position()) else {
        let (_, most) = shared.watchers.count();
        return Err(Status::resource_exhausted(format!(
            "{most} clients are already connected, the maximum (endpoints.max_watchers)"
        )));
    };
    shared.hints.send_if_modified(|hints| {
        let newest = shared.feed.published.borrow().as_deref().map(Revision::of);
        hints.add(plan.position(), newest)
    });
    let feed = shared.feed.clone();
    Ok(Call {
        api: A::METHOD,
        plan,
        batch: None,
        first: true,
        staleness_changed_at: None,
        ended: false,
        feed,
        watching,
        deadline,
        shared,
    })
}

/// The only message of a request's body.
pub(super) async fn message<B>(body: B) -> Result<Bytes, Status>
where
    B: hyper::body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<tonic::codegen::StdError>,
{
    let body = match timeout(REQUEST_TIME, Limited::new(body, MAX_REQUEST_BYTES + frame::PREFIX).collect())
        .await
    {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            return Err(Status::resource_exhausted(format!(
                "the request is larger than {MAX_REQUEST_BYTES} bytes"
            )));
        }
        Ok(Err(error)) => return Err(Status::cancelled(format!("the request is incomplete: {error}"))),
        Err(_) => {
            return Err(Status::cancelled(format!("the request was not received within {REQUEST_TIME:?}")));
        }
    };
    frame::unframe(body).map_err(|error| Status::new(error.code(), error.to_string()))
}

fn respond(call: Call) -> Response<Body> {
    let chunks = stream::unfold(call, |mut call| async move {
        let frame = match call.chunk().await {
            Some(Ok(bytes)) => Frame::data(bytes),
            Some(Err(status)) => call.end(status.code(), status.message()),
            None if call.ended => return None,
            None => call.end(Code::Ok, ""),
        };
        Some((Ok::<_, Status>(frame), call))
    });
    frame::response_headers().map(|()| Body::new(StreamBody::new(chunks.boxed())))
}

pub(super) fn stopping() -> Status {
    Status::unavailable("the agent is stopping")
}

fn deadline_exceeded() -> Status {
    Status::deadline_exceeded("the caller's deadline has passed")
}

#[derive(Debug)]
struct Call {
    api: &'static str,
    plan: Plan,
    batch: Option<Sending>,
    /// Nothing was due before.
    first: bool,
    /// Since when staleness differs from the state that the caller has.
    staleness_changed_at: Option<Instant>,
    ended: bool,
    feed: EndpointsFeed,
    watching: Watching,
    deadline: Option<Instant>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Sending {
    batch: Batch,
    /// When the state could first be sent; `None` for the first of a call, which has no such time.
    first_seen: Option<Instant>,
}

impl Call {
    fn end(&mut self, code: Code, message: &str) -> Frame<Bytes> {
        self.ended = true;
        self.batch = None;
        self.watching.hands(true);
        Frame::trailers(frame::status(code, message, &[]))
    }

    /// The next chunk, when there is one; `None`: the call ends with OK.
    async fn chunk(&mut self) -> Option<Result<Bytes, Status>> {
        self.watching.takes();
        loop {
            if self.ended || (self.plan.is_done() && self.batch.is_none()) {
                return None;
            }
            if self.shared.stop.is_cancelled() {
                return Some(Err(stopping()));
            }
            if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Some(Err(deadline_exceeded()));
            }
            if self.batch.is_none()
                && let Err(status) = self.take_newest()
            {
                return Some(Err(status));
            }
            match self.batch.take() {
                Some(sending) => return Some(self.fill(sending)),
                None => {
                    if let Err(status) = self.wait().await {
                        return Some(Err(status));
                    }
                }
            }
        }
    }

    fn take_newest(&mut self) -> Result<(), Status> {
        let Some(state) = self.feed.published.borrow_and_update().clone() else { return Ok(()) };
        if let Some(reason) = self.plan.refusal(&state) {
            return Err(Status::failed_precondition(reason));
        }
        let first_seen = self.shared.first_seen(&state);
        self.staleness_changed_at = self
            .plan
            .has_staleness_changed(&state)
            .then(|| self.staleness_changed_at.unwrap_or_else(Instant::now));
        let lasting = self.staleness_changed_at.is_some_and(|since| since.elapsed() >= LASTING);
        if let Some(batch) = self.plan.due(&state, &self.feed.history, lasting) {
            self.watching.begins(&state);
            self.batch = Some(Sending { batch, first_seen: (!self.first).then_some(first_seen) });
        }
        // From here on the caller counts as following.
        self.first = false;
        Ok(())
    }

    fn fill(&mut self, mut sending: Sending) -> Result<Bytes, Status> {
        let mut frames = Frames::default();
        let is_last = sending.batch.fill(self.plan.filter(), &mut frames).map_err(|error| {
            tracing::error!(%error, "cannot send an item");
            Status::internal(error.to_string())
        })?;
        let items = frames.items();
        let bytes = frames.into_bytes();
        self.count(items, bytes.len() as u64);
        self.watching.hands(is_last);
        if is_last {
            self.reached(&sending);
        } else {
            self.batch = Some(sending);
        }
        Ok(bytes)
    }

    fn count(&self, items: u64, bytes: u64) {
        self.watching.sent(items, bytes);
        let label = ApiLabel { api: self.api };
        self.shared.metrics.items.get_or_create(&label).inc_by(items);
        self.shared.metrics.bytes.get_or_create(&label).inc_by(bytes);
    }

    fn reached(&self, sending: &Sending) {
        self.watching.reached(Revision::of(sending.batch.state()));
        let metrics = &self.shared.metrics;
        let kind = match sending.batch.extent() {
            Extent::Full | Extent::Reset => "full",
            Extent::Delta => "delta",
        };
        metrics.states.get_or_create(&StateLabel { api: self.api, kind }).inc();
        if sending.batch.extent() == Extent::Reset {
            metrics.resets.inc();
        }
        if let Some(first_seen) = sending.first_seen {
            metrics
                .delay
                .get_or_create(&ApiLabel { api: self.api })
                .observe(first_seen.elapsed().as_secs_f64());
        }
    }

    /// Waits until there may be something to send.
    async fn wait(&mut self) -> Result<(), Status> {
        let (deadline, staleness_changed_at) =
            (self.deadline, self.staleness_changed_at.map(|since| since + LASTING));
        let at = |time: Option<Instant>| async move {
            match time {
                Some(time) => sleep_until(time).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.shared.stop.cancelled() => Err(stopping()),
            changed = self.feed.published.changed() => changed.map_err(|_| stopping()),
            () = at(deadline) => Err(deadline_exceeded()),
            () = at(staleness_changed_at) => Ok(()),
        }
    }
}
