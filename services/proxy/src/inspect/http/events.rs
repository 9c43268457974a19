//! `/debug/events`: what the page shows, as server-sent events.
//!
//! Owns: the event `state`, `{now_unix_ms, state, state_error}`: at once, on every change (at most twice a second), and every
//! five seconds even without one, so that a reader knows a quiet proxy from a lost connection. In: the view and its
//! changes. Out: a stream that ends when the proxy stops.

use std::{convert::Infallible, time::Duration};

use axum::{
    extract::State,
    http::StatusCode,
    response::{
        IntoResponse as _, Response, Sse,
        sse::{Event, KeepAlive},
    },
};
use futures_util::{Stream, stream};
use keelson_debug::serving::{Due, Failure, Follower, now_unix_ms};
use keelson_proto::proxy as pb;
use serde::Serialize;

use super::Shared;
use crate::inspect::{ProxyView, view::answer};

const INTERVAL: Duration = Duration::from_millis(500);
const REFRESH: Duration = Duration::from_secs(5);
/// Comments show the connection to be alive even while the proxy does not answer.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// What a browser is told to wait before it comes back.
const RETRY: Duration = Duration::from_secs(2);

/// An event `state`.
#[derive(Serialize)]
struct Now {
    /// The proxy's clock, so that ages are right on a machine whose clock differs.
    now_unix_ms: i64,
    /// `null`: see `state_error`.
    state: Option<pb::State>,
    state_error: String,
}

pub(super) async fn events<V: ProxyView>(State(shared): State<Shared<V>>) -> Response {
    let Ok(slot) = shared.event_streams.clone().try_acquire_owned() else {
        let text = "too many event streams are open; close another page of this proxy";
        return Failure::new(StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    };
    let follower = Follower::new(shared.view.changes(), shared.stop.clone(), INTERVAL, Some(REFRESH));
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE).text("alive");
    Sse::new(follow(shared.view, follower, slot)).keep_alive(keep_alive).into_response()
}

/// Documents are made when there is room for them; `slot` is held as long as somebody reads.
fn follow<V: ProxyView>(
    view: V,
    follower: Follower,
    slot: impl Send,
) -> impl Stream<Item = Result<Event, Infallible>> + Send {
    stream::unfold((view, follower, slot), |(view, mut follower, slot)| async move {
        match follower.due().await {
            Due::Stopping | Due::Gone => return None,
            Due::Changed | Due::Refresh => {}
        }
        let state = answer(view.state()).await;
        if state.is_err() {
            follower.again();
        }
        let state_error = state.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let now = Now { now_unix_ms: now_unix_ms(), state: state.ok(), state_error };
        let event = Event::default().event("state").retry(RETRY).json_data(now);
        // Nothing in the document can fail to be JSON; a comment keeps the stream whole if it did.
        let event = event.unwrap_or_else(|_| Event::default().comment("cannot encode the state"));
        Some((Ok(event), (view, follower, slot)))
    })
}
