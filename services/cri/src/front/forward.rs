//! A `PullImage` call that the agent which replaces this one answers.
//!
//! Owns: a call that was handed over, until its answer. In: a client's call, unchanged. Out: the same call to the
//! successor on this agent's own CRI socket path, and the successor's answer, unchanged. If the successor is replaced
//! in turn, it answers with [`MOVED`] or its connection breaks. The call is then sent again to the agent that listens
//! there by then, so that a call never passes through more than one ending agent.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::poll_fn;
use h2::{RecvStream, server::SendResponse};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri, Version, header};
use keelson_proto::Code;
use keelson_pulls::coordinator::Refusal;
use keelson_serve::grpc::frame;
use tokio::time::Instant;

use super::{Front, PULL_IMAGE, pass, refusal::refuse};

/// Metadata of a call that an ending agent forwards.
pub(super) const FORWARDED: HeaderName = HeaderName::from_static("keelson-forwarded");
/// Trailer of an agent that ends itself: the call is to be sent again.
const MOVED: HeaderName = HeaderName::from_static("keelson-moved");

/// Maximum wait for a successor that does not answer.
const MAX_WAIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(50);
/// A call that was with the successor for longer than this is taken to have reached it.
const REACHED: Duration = Duration::from_secs(1);

/// A call, ready to be sent as often as needed.
#[derive(Debug)]
pub(super) struct HeldCall {
    pub(super) headers: HeaderMap,
    /// With its gRPC prefix.
    pub(super) body: Bytes,
    pub(super) deadline: Option<Instant>,
}

enum ForwardResult {
    Answered(Response<RecvStream>),
    /// The successor is gone or was replaced.
    Again(String),
}

/// Answers another agent that its call is to be sent again.
pub(super) fn send_back(respond: &mut SendResponse<Bytes>) {
    let mut trailers = frame::status(Refusal::Moved.code(), &Refusal::Moved.to_string(), &[]);
    trailers.insert(MOVED, HeaderValue::from_static("1"));
    // A client that has gone does not read it.
    let _ = respond.send_response(frame::trailers_only(trailers), true);
}

pub(super) async fn forward(call: HeldCall, respond: &mut SendResponse<Bytes>, front: &Front) {
    let waiting_since = Instant::now();
    let deadline = async {
        match call.deadline {
            Some(deadline) => tokio::time::sleep_until(deadline).await,
            None => std::future::pending().await,
        }
    };
    let response = tokio::select! {
        biased;
        response = until_answered(&call, front) => response,
        _ = poll_fn(|cx| respond.poll_reset(cx)) => return,
        () = deadline => {
            let refusal = Refusal::Deadline(waiting_since.elapsed(), "with the next agent");
            return refuse(respond, refusal.code(), &refusal.to_string());
        }
    };
    match response {
        Ok(response) => {
            // A broken answer resets the client's stream.
            let _ = pass::answer(response, respond, None, &front.successor).await;
        }
        Err(reason) => refuse(respond, Code::Unavailable, &reason),
    }
}

async fn until_answered(call: &HeldCall, front: &Front) -> Result<Response<RecvStream>, String> {
    let mut lost_since: Option<Instant> = None;
    loop {
        let begun = Instant::now();
        let reason = match attempt(call, front).await {
            ForwardResult::Answered(response) => return Ok(response),
            ForwardResult::Again(reason) => reason,
        };
        if begun.elapsed() > REACHED {
            lost_since = None;
        }
        if lost_since.get_or_insert(begun).elapsed() > MAX_WAIT {
            let socket = front.successor.socket().display();
            return Err(format!(
                "the image pull was handed over, but the agent at unix://{socket} does not answer: {reason}; \
                 retry"
            ));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn attempt(call: &HeldCall, front: &Front) -> ForwardResult {
    let again = |error: h2::Error| ForwardResult::Again(error.to_string());
    let mut sender = match front.successor.get(MAX_WAIT).await {
        Ok(sender) => sender,
        Err(away) => return ForwardResult::Again(away.reason()),
    };
    let (response, mut body) = match sender.send_request(head(call), false) {
        Ok(sent) => sent,
        Err(error) => return again(error),
    };
    if let Err(error) = body.send_data(call.body.clone(), true) {
        return again(error);
    }
    match response.await {
        Ok(response) if response.headers().contains_key(&MOVED) => {
            ForwardResult::Again("it was replaced".into())
        }
        Ok(response) => ForwardResult::Answered(response),
        Err(error) => again(error),
    }
}

/// The client's head, with what is left of its deadline.
fn head(call: &HeldCall) -> Request<()> {
    let mut request = Request::new(());
    *request.method_mut() = Method::POST;
    *request.version_mut() = Version::HTTP_2;
    let uri = Uri::builder().scheme("http").authority("localhost").path_and_query(PULL_IMAGE);
    *request.uri_mut() = uri.build().unwrap_or_default();
    let headers = request.headers_mut();
    headers.clone_from(&call.headers);
    headers.remove(header::CONTENT_LENGTH);
    headers.insert(FORWARDED, HeaderValue::from_static("1"));
    if let Some(deadline) = call.deadline {
        let left = deadline.saturating_duration_since(Instant::now());
        headers.insert(frame::GRPC_TIMEOUT, frame::timeout_value(left));
    }
    request
}
