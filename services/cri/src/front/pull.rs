//! `ImageService/PullImage`: decoded, and handed to the PullCoordinator.
//!
//! Owns: a caller, from its request to its answer. In: a client's stream. Out: a `RequestPull`, and a
//! `CallerLeft` if the client goes before the answer comes; then the answer as the runtime gave it.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::poll_fn;
use h2::{RecvStream, server::SendResponse};
use http::{HeaderMap, HeaderName, HeaderValue, Request};
use keelson_actors::{
    inspect::{Mailbox, MailboxError},
    pulls::{Answer, CallerId, CallerLeft, PullCall, PullCoordinator, Refusal, RequestPull},
    runtime::PullReply,
};
use keelson_proto::Code;
use tokio::{sync::oneshot, time::Instant};

use super::{
    Front,
    forward::{FORWARDED, HeldCall, forward, send_back},
    grpc::{self, FrameError, MAX_MESSAGE, PREFIX},
    pass::{Collect, collect},
};

/// Tells the coordinator that a caller is gone, unless its answer came first.
struct Leave {
    pulls: Mailbox<PullCoordinator>,
    caller: Option<CallerId>,
}

impl Drop for Leave {
    fn drop(&mut self) {
        if let Some(caller) = self.caller.take() {
            self.pulls.deliver(CallerLeft { caller });
        }
    }
}

pub(super) async fn handle(request: Request<RecvStream>, mut respond: SendResponse<Bytes>, front: &Front) {
    let patience = grpc::timeout(request.headers());
    let deadline = patience.map(|patience| Instant::now() + patience);
    let (parts, mut body) = request.into_parts();
    let collected = tokio::select! {
        biased;
        collected = collect(&mut body, MAX_MESSAGE + PREFIX) => collected,
        _ = poll_fn(|cx| respond.poll_reset(cx)) => return,
    };
    let body = match &collected {
        Ok(body) => body.clone(),
        Err(_) => Bytes::new(),
    };
    let call = match collected {
        Ok(body) => decode(body, &parts.headers, front),
        Err(Collect::Client) => return,
        Err(Collect::TooLarge(_)) => Err((FrameError::TooLarge.code(), FrameError::TooLarge.to_string())),
    };
    let call = match call {
        Ok(call) => call,
        Err((code, text)) => return refuse(&mut respond, code, &text),
    };
    let caller = front.next_caller();
    let (answer, answered) = oneshot::channel();
    let pulls = &front.parts.pulls;
    if let Err(error) = pulls.offer(RequestPull { caller, call: Arc::new(call), patience, answer }) {
        front.parts.metrics.refused_busy.inc();
        let refusal = match error {
            MailboxError::Full(actor) => Refusal::Busy(actor),
            MailboxError::Closed(_) => Refusal::Stopping,
        };
        return refuse(&mut respond, refusal.code(), &refusal.to_string());
    }
    let mut leave = Leave { pulls: pulls.clone(), caller: Some(caller) };
    let answer = tokio::select! {
        biased;
        answer = answered => answer,
        _ = poll_fn(|cx| respond.poll_reset(cx)) => return,
    };
    leave.caller = None;
    match answer {
        Ok(Answer::Runtime(reply)) => send_reply(&mut respond, &reply),
        Ok(Answer::Refused(Refusal::Moved)) if parts.headers.contains_key(FORWARDED) => {
            send_back(&mut respond)
        }
        Ok(Answer::Refused(Refusal::Moved)) => {
            forward(HeldCall { headers: parts.headers, body, deadline }, &mut respond, front).await;
        }
        Ok(Answer::Refused(refusal)) => refuse(&mut respond, refusal.code(), &refusal.to_string()),
        Err(_) => refuse(&mut respond, Refusal::Restarting.code(), &Refusal::Restarting.to_string()),
    }
}

fn decode(body: Bytes, headers: &HeaderMap, front: &Front) -> Result<PullCall, (Code, String)> {
    let message = grpc::unframe(body).map_err(|error| (error.code(), error.to_string()))?;
    let call = PullCall::decode(message, &front.parts.salt).map_err(|error| {
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
        (Code::InvalidArgument, format!("{error}{cause}"))
    })?;
    Ok(call.with_metadata(custom_metadata(headers)))
}

/// What of a caller's metadata goes on to the runtime: everything but the protocol's own headers and
/// `containerd-*`, by which a client could choose a lease.
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

pub(super) fn refuse(respond: &mut SendResponse<Bytes>, code: Code, text: &str) {
    // A client that has gone does not read it.
    let _ = respond.send_response(grpc::trailers_only(grpc::status(code, text, &[])), true);
}

/// The runtime's words, as they came.
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
            let Ok(mut stream) = respond.send_response(grpc::response_headers(), false) else { return };
            // Small enough for any window; h2 keeps what does not fit and sends it when it does.
            if stream.send_data(grpc::frame(message), false).is_ok() {
                let mut trailers = grpc::status(Code::Ok, "", &[]);
                trailers.extend(metadata);
                let _ = stream.send_trailers(trailers);
            }
        }
        Err(status) => {
            let mut trailers = grpc::status(status.code, &status.message, &status.details);
            trailers.extend(metadata);
            let _ = respond.send_response(grpc::trailers_only(trailers), true);
        }
    }
}
