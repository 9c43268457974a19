//! Passes a call through, undecoded.
//!
//! Owns: the two pumps of a call, one for each direction. In: a client's stream. Out: a stream to the runtime
//! with the same headers, bytes and trailers, including back-pressure and cancellation. Three things
//! are not passed unchanged: `containerd-*` metadata on CRI calls (a client must not choose leases
//! or namespaces for the runtime), connection-level headers, and an early UNAVAILABLE to the two
//! calls on whose failure a starting kubelet exits, which are retried within the hold time.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::future::poll_fn;
use h2::{Reason, RecvStream, SendStream, client::ResponseFuture, server::SendResponse};
use http::{HeaderName, HeaderValue, Request, Response, Uri, Version};
use keelson_proto::{Code, PULL_OPTION_MAX_PARALLEL, PULL_OPTIONS_HEADER};
use keelson_serve::grpc::frame::{self, MAX_MESSAGE};
use tokio::time::Instant;

use super::{
    Front,
    operation::operation,
    refusal::refuse,
    upstream::{BACKOFF, Upstream},
};

/// What a starting kubelet calls first. It exits if one fails.
const START_UP: [&str; 2] = ["/runtime.v1.RuntimeService/Version", "/runtime.v1.ImageService/ImageFsInfo"];
/// Bodies of start-up calls are a few bytes; a larger one is passed through without the retry.
const START_UP_BODY: usize = 64 * 1024;

/// How much of a request's body is sent with its head: a DATA frame.
const FIRST_BODY_BYTES: usize = 16 * 1024;

pub(super) enum CallError {
    /// The client is gone, so there is no answer.
    Client,
    Reset(Reason),
    Runtime(String),
    /// The agent is ending and does not wait any longer.
    Cut,
}

/// `begun`: the part of the request's body that was read already.
pub(super) async fn handle(
    request: Request<RecvStream>,
    begun: Bytes,
    mut respond: SendResponse<Bytes>,
    front: &Front,
    upstream: &Upstream,
) {
    let operation = operation(request.uri().path());
    let since = Instant::now();
    let ended = tokio::select! {
        biased;
        ended = exchange(request, begun, &mut respond, front, upstream) => ended,
        () = front.wait_for_cut_off() => Err(CallError::Cut),
    };
    let failed = match ended {
        Ok(code) => code != Some(0),
        Err(CallError::Client) => true,
        Err(CallError::Reset(reason)) => {
            respond.send_reset(reason);
            true
        }
        Err(CallError::Runtime(text)) => {
            refuse(&mut respond, Code::Unavailable, &text);
            true
        }
        Err(CallError::Cut) => {
            let text = "keelson is stopping and the call did not end within agent.drain_timeout; retry";
            let trailers = frame::status(Code::Unavailable, text, &[]);
            if respond.send_response(frame::trailers_only(trailers), true).is_err() {
                // A stream that has begun.
                respond.send_reset(Reason::CANCEL);
            }
            true
        }
    };
    front.parts.metrics.operation(operation, since.elapsed(), failed);
}

/// Returns the status that the runtime sent.
async fn exchange(
    request: Request<RecvStream>,
    begun: Bytes,
    respond: &mut SendResponse<Bytes>,
    front: &Front,
    upstream: &Upstream,
) -> Result<Option<i32>, CallError> {
    let path = request.uri().path();
    let start_up = START_UP.contains(&path);
    // Sent even if no option is obeyed: another agent recognizes this one by it.
    let offer = (path == START_UP[0]).then(|| match front.parts.settings.borrow().offer_pull_option {
        true => PULL_OPTION_MAX_PARALLEL,
        false => "",
    });
    let (head, body) = forward_head(request);
    let opening = async {
        match start_up {
            // On the heap: other calls need no room for it.
            true => Box::pin(open_start_up(head, body, upstream, front.hold())).await,
            false => open(head, begun, body, upstream, front.hold()).await,
        }
    };
    let (response, rest) = tokio::select! {
        biased;
        opened = opening => opened?,
        _ = poll_fn(|cx| respond.poll_reset(cx)) => return Err(CallError::Client),
    };
    // One future for the whole of the request's body: bytes that it holds must not be dropped when
    // the answer begins.
    let upload = upload(rest);
    tokio::pin!(upload);
    let response = match response {
        OpenCall::Answered(response) => response,
        OpenCall::Sent(response) => tokio::select! {
            biased;
            response = response => response.map_err(|error| call_error(&error, upstream))?,
            () = &mut upload => return Err(CallError::Client),
            _ = poll_fn(|cx| respond.poll_reset(cx)) => return Err(CallError::Client),
        },
    };
    let answer = answer(response, respond, offer, upstream);
    tokio::select! {
        biased;
        ended = answer => ended,
        () = upload => Err(CallError::Client),
    }
}

struct Upload {
    begun: Bytes,
    body: RecvStream,
    to: SendStream<Bytes>,
}

/// Pumps the rest of the request's body, if any. Ends only if the client aborts it.
async fn upload(rest: Option<Upload>) {
    if let Some(Upload { begun, mut body, mut to }) = rest {
        let sent = match begun.is_empty() {
            true => Ok(()),
            false => send_all(&mut to, begun, false).await,
        };
        let pumped = match sent {
            Ok(()) => pump(&mut body, &mut to, true).await.map(drop),
            Err(side) => Err(side),
        };
        if let Err(Side::From(ended)) = pumped {
            to.send_reset(ended.unwrap_or(Reason::CANCEL));
            return;
        }
        // A runtime that stopped reading can still answer. The handle stays: without it the stream would be
        // cancelled.
        std::future::pending::<()>().await;
    }
    std::future::pending().await
}

/// The client's head without the headers that are not passed on.
fn forward_head(request: Request<RecvStream>) -> (Request<()>, RecvStream) {
    let (mut parts, body) = request.into_parts();
    if parts.uri.path().starts_with("/runtime.") {
        let strip: Vec<HeaderName> =
            parts.headers.keys().filter(|name| name.as_str().starts_with("containerd-")).cloned().collect();
        for name in strip {
            parts.headers.remove(name);
        }
    }
    if parts.uri.authority().is_none() || parts.uri.scheme().is_none() {
        // Both are required of a request; gRPC over unix sockets says localhost.
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        parts.uri = Uri::builder()
            .scheme("http")
            .authority("localhost")
            .path_and_query(path)
            .build()
            .unwrap_or_else(|_| Uri::from_static("http://localhost/"));
    }
    parts.version = Version::HTTP_2;
    (Request::from_parts(parts, ()), body)
}

enum OpenCall {
    Sent(ResponseFuture),
    Answered(Response<RecvStream>),
}

/// The call, and the rest of the request's body.
type Opened = (OpenCall, Option<Upload>);

async fn open(
    head: Request<()>,
    begun: Bytes,
    body: RecvStream,
    upstream: &Upstream,
    hold: Duration,
) -> Result<Opened, CallError> {
    let mut sender = upstream.get(hold).await.map_err(|error| CallError::Runtime(error.to_string()))?;
    let ended = begun.is_empty() && body.is_end_stream();
    let (response, to) = sender.send_request(head, ended).map_err(|error| call_error(&error, upstream))?;
    Ok((OpenCall::Sent(response), (!ended).then_some(Upload { begun, body, to })))
}

/// Retries the two start-up calls while the runtime returns UNAVAILABLE, which containerd does between listening and
/// being ready.
async fn open_start_up(
    head: Request<()>,
    mut body: RecvStream,
    upstream: &Upstream,
    hold: Duration,
) -> Result<Opened, CallError> {
    let since = Instant::now();
    let collected = match collect(&mut body, START_UP_BODY).await {
        Ok(collected) => collected,
        Err(Collect::Client) => return Err(CallError::Client),
        Err(Collect::TooLarge(begun)) => return open(head, begun, body, upstream, hold).await,
    };
    let mut failures = 0;
    loop {
        failures += 1;
        let pause = BACKOFF.pause(failures);
        let left = hold.saturating_sub(since.elapsed());
        let mut sender = upstream.get(left).await.map_err(|error| CallError::Runtime(error.to_string()))?;
        let again = left > pause;
        match attempt(&mut sender, &head, &collected).await {
            Ok(response) if again && is_unavailable(&response) => {}
            Ok(response) => return Ok((OpenCall::Answered(response), None)),
            // The runtime went away in between. These calls change nothing, so they are sent again.
            Err(error) if again && !error.is_reset() => {}
            Err(error) => return Err(call_error(&error, upstream)),
        }
        tokio::time::sleep(pause).await;
    }
}

async fn attempt(
    sender: &mut h2::client::SendRequest<Bytes>,
    head: &Request<()>,
    body: &Bytes,
) -> Result<Response<RecvStream>, h2::Error> {
    let (response, mut send) = sender.send_request(head.clone(), false)?;
    send.send_data(body.clone(), true)?;
    response.await
}

fn is_unavailable(response: &Response<RecvStream>) -> bool {
    response.body().is_end_stream() && frame::code_of(response.headers()) == Some(Code::Unavailable as i32)
}

pub(super) async fn answer(
    response: Response<RecvStream>,
    respond: &mut SendResponse<Bytes>,
    offer: Option<&'static str>,
    upstream: &Upstream,
) -> Result<Option<i32>, CallError> {
    let (mut parts, mut from) = response.into_parts();
    if let Some(options) = offer {
        let name = HeaderName::from_static(PULL_OPTIONS_HEADER);
        parts.headers.insert(name, HeaderValue::from_static(options));
    }
    let code = frame::code_of(&parts.headers);
    let ended = from.is_end_stream();
    let gone = |_| CallError::Client;
    let mut to = respond.send_response(Response::from_parts(parts, ()), ended).map_err(gone)?;
    if ended {
        return Ok(code);
    }
    match pump(&mut from, &mut to, false).await {
        Ok(trailers) => Ok(trailers.or(code)),
        Err(Side::To) => Err(CallError::Client),
        Err(Side::From(Some(reason))) => {
            to.send_reset(reason);
            Err(CallError::Client)
        }
        Err(Side::From(None)) => {
            // The headers are sent already; a status can still follow them.
            let socket = upstream.socket().display();
            let text = format!("the container runtime at unix://{socket} closed the connection");
            let _ = to.send_trailers(frame::status(Code::Unavailable, &text, &[]));
            Ok(Some(Code::Unavailable as i32))
        }
    }
}

enum Side {
    /// The sender reset the stream for this reason; without one, its connection broke.
    From(Option<Reason>),
    To,
}

impl Side {
    fn from(error: &h2::Error) -> Self {
        // The end of a connection has a reason too, but it is not the stream's.
        Self::From(error.reason().filter(|_| error.is_reset()))
    }
}

/// Moves bytes and trailers, never faster than the receiver takes them. Returns the status of the trailers.
///
/// A stream that was just opened has no room until its connection has been polled, which would split a request's head
/// and body into two writes. `eager`: the first piece does not wait for room.
async fn pump(
    from: &mut RecvStream,
    to: &mut SendStream<Bytes>,
    mut eager: bool,
) -> Result<Option<i32>, Side> {
    while let Some(data) = next_data(from, to).await? {
        let length = data.len();
        // Read once: the end may arrive while the receiver makes room, and is then still to be sent.
        let last = from.is_end_stream();
        if std::mem::take(&mut eager) && length <= FIRST_BODY_BYTES {
            to.send_data(data, last).map_err(|_| Side::To)?;
        } else {
            send_all(to, data, last).await?;
        }
        // The sender may send as much again.
        from.flow_control().release_capacity(length).map_err(|error| Side::from(&error))?;
        if last {
            return Ok(None);
        }
    }
    let trailers = poll_fn(|cx| from.poll_trailers(cx)).await.map_err(|error| Side::from(&error))?;
    match trailers {
        Some(trailers) => {
            let code = frame::code_of(&trailers);
            to.send_trailers(trailers).map_err(|_| Side::To)?;
            Ok(code)
        }
        None => {
            to.send_data(Bytes::new(), true).map_err(|_| Side::To)?;
            Ok(None)
        }
    }
}

/// The next piece, unless the receiver resets the stream first.
async fn next_data(from: &mut RecvStream, to: &mut SendStream<Bytes>) -> Result<Option<Bytes>, Side> {
    tokio::select! {
        biased;
        data = poll_fn(|cx| from.poll_data(cx)) => match data {
            None => Ok(None),
            Some(Ok(data)) => Ok(Some(data)),
            Some(Err(error)) => Err(Side::from(&error)),
        },
        _ = poll_fn(|cx| to.poll_reset(cx)) => Err(Side::To),
    }
}

async fn send_all(to: &mut SendStream<Bytes>, mut data: Bytes, end: bool) -> Result<(), Side> {
    while !data.is_empty() {
        to.reserve_capacity(data.len());
        let mut room = to.capacity();
        if room == 0 {
            room = match poll_fn(|cx| to.poll_capacity(cx)).await {
                Some(Ok(room)) => room,
                Some(Err(_)) => return Err(Side::To),
                None => return Err(Side::To),
            };
        }
        let piece = data.split_to(room.min(data.len()));
        let last = end && data.is_empty();
        to.send_data(piece, last).map_err(|_| Side::To)?;
        if last {
            return Ok(());
        }
    }
    if end {
        to.send_data(Bytes::new(), true).map_err(|_| Side::To)?;
    }
    Ok(())
}

fn call_error(error: &h2::Error, upstream: &Upstream) -> CallError {
    match error.reason() {
        Some(reason) if error.is_reset() => CallError::Reset(reason),
        _ => {
            let socket = upstream.socket().display();
            CallError::Runtime(format!(
                "the container runtime at unix://{socket} closed the connection: {error}"
            ))
        }
    }
}

pub(super) enum Collect {
    Client,
    /// What was received so far.
    TooLarge(Bytes),
}

/// `most`: maximum size in bytes.
pub(super) async fn collect(body: &mut RecvStream, most: usize) -> Result<Bytes, Collect> {
    // Nearly every body comes in one piece, which needs no copy.
    let mut first = Bytes::new();
    let mut collected = BytesMut::new();
    while let Some(data) = poll_fn(|cx| body.poll_data(cx)).await {
        let data = data.map_err(|_| Collect::Client)?;
        body.flow_control().release_capacity(data.len()).map_err(|_| Collect::Client)?;
        if first.is_empty() && collected.is_empty() {
            first = data;
        } else {
            collected.extend_from_slice(&std::mem::take(&mut first));
            collected.extend_from_slice(&data);
        }
        if first.len() + collected.len() > most {
            let came = if collected.is_empty() { first } else { collected.freeze() };
            return Err(Collect::TooLarge(came));
        }
    }
    Ok(if collected.is_empty() { first } else { collected.freeze() })
}

const _: () = assert!(START_UP_BODY < MAX_MESSAGE);
