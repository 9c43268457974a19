//! `ImageService/PullImage`: decoded, and handed to the PullCoordinator.
//!
//! Owns: a caller, from its request to its answer. In: a client's stream. Out: a `RequestPull`, and a
//! `CallerLeft` if the client leaves before the answer; then the runtime's answer, unchanged.
//! When the coordinator restarts, the request is sent again. When the coordinator acknowledges none within
//! `cri.decision_timeout`, or restarts on each, the call is passed through to the runtime.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::poll_fn;
use h2::{RecvStream, server::SendResponse};
use http::{HeaderMap, HeaderName, HeaderValue, Request};
use keelson_actor_system::inspect::{Mailbox, MailboxError};
use keelson_proto::Code;
use keelson_pulls::{
    coordinator::{Answer, CallerId, Claim, PullCoordinator, PullEvent, Refusal, RequestPull},
    metrics::{PassReason, ReasonLabel},
    request::PullCall,
    runtime::PullReply,
};
use keelson_serve::grpc::frame::{self, FrameError, MAX_MESSAGE, PREFIX};
use tokio::{sync::oneshot, time::Instant};

use super::{
    Front,
    forward::{FORWARDED, HeldCall, forward, send_back},
    pass::{self, Collect, collect},
    refusal::refuse,
    upstream::Upstream,
};

/// Maximum number of requests for one call, if the coordinator restarts on each of them.
const MAX_REQUESTS: u32 = 4;

/// Sends `CallerLeft` when dropped, unless the answer came first.
struct LeaveOnDrop {
    pulls: Mailbox<PullCoordinator>,
    caller: Option<CallerId>,
}

impl Drop for LeaveOnDrop {
    fn drop(&mut self) {
        if let Some(caller) = self.caller.take() {
            self.pulls.deliver(PullEvent::CallerLeft(caller));
        }
    }
}

enum Decided {
    Answer(Answer),
    Left,
    Refused(Refusal),
    /// The coordinator restarted after it had acknowledged the request.
    Lost,
    /// The request is withdrawn; the coordinator will not start it.
    Undecided(PassReason),
}

pub(super) async fn handle(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    front: &Front,
    upstream: &Upstream,
) {
    let since = Instant::now();
    let timeout = frame::timeout(request.headers());
    let deadline = timeout.map(|timeout| since + timeout);
    let (mut parts, mut body) = request.into_parts();
    let collected = tokio::select! {
        biased;
        collected = collect(&mut body, MAX_MESSAGE + PREFIX) => collected,
        _ = poll_fn(|cx| respond.poll_reset(cx)) => return,
    };
    let collected = match collected {
        Ok(collected) => collected,
        Err(Collect::Client) => return,
        Err(Collect::TooLarge(_)) => {
            return refuse(&mut respond, FrameError::TooLarge.code(), &FrameError::TooLarge.to_string());
        }
    };
    let call = match decode(collected.clone(), &parts.headers, front) {
        Ok(call) => Arc::new(call),
        Err((code, text)) => return refuse(&mut respond, code, &text),
    };
    let mut requests = 0;
    let reason = loop {
        requests += 1;
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match decide(&call, left, &mut respond, front).await {
            Decided::Answer(Answer::Runtime(reply)) => return send_reply(&mut respond, &reply),
            Decided::Answer(Answer::Refused(Refusal::Moved)) if parts.headers.contains_key(FORWARDED) => {
                return send_back(&mut respond);
            }
            Decided::Answer(Answer::Refused(Refusal::Moved)) => {
                // On the heap, so that the task of a waiting caller is small.
                let held = HeldCall { headers: parts.headers, body: collected, deadline };
                return Box::pin(forward(held, &mut respond, front)).await;
            }
            Decided::Answer(Answer::Refused(refusal)) | Decided::Refused(refusal) => {
                return refuse(&mut respond, refusal.code(), &refusal.to_string());
            }
            Decided::Left => return,
            // This request may be what makes the coordinator fail.
            Decided::Lost if requests == MAX_REQUESTS => break PassReason::COORDINATOR_FAILED,
            Decided::Lost => {}
            Decided::Undecided(reason) => break reason,
        }
    };
    front.passes_through(reason, &call.image);
    parts.headers.remove(FORWARDED);
    // On the heap, as above.
    Box::pin(pass::handle(Request::from_parts(parts, body), collected, respond, front, upstream)).await;
}

/// Sends one request to the coordinator, and waits until it is answered, lost, or not acknowledged in time.
async fn decide(
    call: &Arc<PullCall>,
    timeout: Option<Duration>,
    respond: &mut SendResponse<Bytes>,
    front: &Front,
) -> Decided {
    let (caller, claim) = (front.next_caller(), Claim::default());
    let (answer, mut answered) = oneshot::channel();
    let pulls = &front.parts.pulls;
    let request = RequestPull { caller, call: call.clone(), timeout, claim: claim.clone(), answer };
    match pulls.offer(request) {
        Ok(()) => {}
        Err(MailboxError::Full(actor)) => {
            let refusal = Refusal::Busy(actor);
            front.parts.metrics.refused.get_or_create(&ReasonLabel { reason: refusal.reason() }).inc();
            return Decided::Refused(refusal);
        }
        Err(MailboxError::Closed(_)) => return Decided::Undecided(PassReason::COORDINATOR_DISABLED),
    }
    let mut leave = LeaveOnDrop { pulls: pulls.clone(), caller: Some(caller) };
    let late = tokio::time::sleep(front.decision());
    tokio::pin!(late);
    let mut acknowledged = false;
    let answer = loop {
        tokio::select! {
            biased;
            answer = &mut answered => break answer,
            _ = poll_fn(|cx| respond.poll_reset(cx)) => {
                // A request that was not handled yet must not start any more.
                let _ = claim.withdraw();
                return Decided::Left;
            }
            () = &mut late, if !acknowledged => {
                if claim.withdraw() {
                    leave.caller = None;
                    return Decided::Undecided(PassReason::NO_DECISION);
                }
                acknowledged = true;
            }
        }
    };
    leave.caller = None;
    match answer {
        Ok(Answer::Refused(Refusal::Restarting)) | Err(_) => Decided::Lost,
        Ok(answer) => Decided::Answer(answer),
    }
}

fn decode(body: Bytes, headers: &HeaderMap, front: &Front) -> Result<PullCall, (Code, String)> {
    let message = frame::unframe(body).map_err(|error| (error.code(), error.to_string()))?;
    let call = PullCall::decode(message, &front.parts.salt).map_err(|error| {
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
        (Code::InvalidArgument, format!("{error}{cause}"))
    })?;
    Ok(call.with_metadata(custom_metadata(headers)))
}

/// The caller's metadata that is passed on to the runtime: everything but the protocol's own headers and
/// `containerd-*`, with which a client could choose a lease.
fn custom_metadata(headers: &HeaderMap) -> Vec<(String, Bytes)> {
    let own = |name: &str| {
        name.starts_with("grpc-")
            || name.starts_with("containerd-")
            || name == FORWARDED.as_str()
            || matches!(name, "te" | "content-type" | "user-agent" | "content-length")
    };
    let copy = |(name, value): (&HeaderName, &HeaderValue)| {
        (name.as_str().to_owned(), Bytes::copy_from_slice(value.as_bytes()))
    };
    headers.iter().filter(|(name, _)| !own(name.as_str())).map(copy).collect()
}

fn send_reply(respond: &mut SendResponse<Bytes>, reply: &PullReply) {
    let mut metadata = HeaderMap::new();
    for (name, value) in &reply.metadata {
        if let (Ok(name), Ok(value)) =
            (HeaderName::try_from(name), HeaderValue::from_maybe_shared(value.clone()))
        {
            metadata.append(name, value);
        }
    }
    match &reply.result {
        Ok(message) => {
            let Ok(mut stream) = respond.send_response(frame::response_headers(), false) else { return };
            // Small enough for any window; h2 keeps what does not fit and sends it when it does.
            if stream.send_data(frame::frame(message), false).is_ok() {
                let mut trailers = frame::status(Code::Ok, "", &[]);
                trailers.extend(metadata);
                let _ = stream.send_trailers(trailers);
            }
        }
        Err(status) => {
            let mut trailers = frame::status(status.code, &status.message, &status.details);
            trailers.extend(metadata);
            let _ = respond.send_response(frame::trailers_only(trailers), true);
        }
    }
}
