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
/// A successor that had a call for longer than this was an agent that answers. One that only ends sends every call back
/// at once, and the wait for the next goes on.
const ANSWERS: Duration = Duration::from_secs(1);

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
    Again(Unanswered),
}

/// Why a call is to be sent again.
struct Unanswered {
    reason: String,
    /// For how long the successor had it, before it was gone or replaced.
    had_for: Duration,
}

/// Since when no agent has had the call, or only agents that end.
struct Wait {
    since: Instant,
}

impl Wait {
    /// Whether the call is sent again.
    fn goes_on(&mut self, had_for: Duration, now: Instant) -> bool {
        if had_for > ANSWERS {
            self.since = now;
        }
        now.duration_since(self.since) <= MAX_WAIT
    }
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
        Err(reason) => {
            let socket = front.successor.socket().display();
            let text = format!(
                "the image pull was handed over, but the agent at unix://{socket} does not answer: {reason}; \
                 retry"
            );
            refuse(respond, Code::Unavailable, &text);
        }
    }
}

/// An error is the reason of the last attempt.
async fn until_answered(call: &HeldCall, front: &Front) -> Result<Response<RecvStream>, String> {
    let mut wait = Wait { since: Instant::now() };
    loop {
        match attempt(call, front).await {
            ForwardResult::Answered(response) => return Ok(response),
            ForwardResult::Again(Unanswered { reason, had_for }) => {
                if !wait.goes_on(had_for, Instant::now()) {
                    return Err(reason);
                }
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn attempt(call: &HeldCall, front: &Front) -> ForwardResult {
    let mut sender = match front.successor.get(MAX_WAIT).await {
        Ok(sender) => sender,
        Err(away) => {
            return ForwardResult::Again(Unanswered { reason: away.reason(), had_for: Duration::ZERO });
        }
    };
    let sent = Instant::now();
    let again = |reason| ForwardResult::Again(Unanswered { reason, had_for: sent.elapsed() });
    let (response, mut body) = match sender.send_request(head(call), false) {
        Ok(sent) => sent,
        Err(error) => return again(error.to_string()),
    };
    if let Err(error) = body.send_data(call.body.clone(), true) {
        return again(error.to_string());
    }
    match response.await {
        Ok(response) if response.headers().contains_key(&MOVED) => again("it was replaced".into()),
        Ok(response) => ForwardResult::Answered(response),
        Err(error) => again(error.to_string()),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// When each attempt ended, for how long a successor had the call, and whether it is sent again.
    fn check(attempts: &[(u64, u64, bool)]) {
        let began = Instant::now();
        let mut wait = Wait { since: began };
        for &(at, had_for, goes_on) in attempts {
            let now = began + Duration::from_secs(at);
            assert_eq!(wait.goes_on(Duration::from_secs(had_for), now), goes_on, "{at} s in {attempts:?}");
        }
    }

    #[test]
    fn i8_a_call_that_waited_for_long_in_one_successor_goes_to_the_next() {
        check(&[(126, 126, true), (150, 0, true), (186, 0, true), (400, 200, true), (800, 400, true)]);
    }

    #[test]
    fn a_call_that_no_successor_answers_is_given_up() {
        check(&[(3, 0, true), (60, 0, true), (61, 0, false)]);
        check(&[(61, 0, false)]);
        // One that ends sends it back until the next one is there.
        check(&[(126, 126, true), (186, 1, true), (187, 1, false)]);
    }
}
