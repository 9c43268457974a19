//! `/debug/events`: what the page shows, as server-sent events.
//!
//! Owns: one document an event, `{now_unix_ms, version, pulls, pulls_error, heartbeats, heartbeats_error,
//! actors}`, sent at once, on every change (at most twice a second), and every five seconds even without
//! one, so that a reader knows a quiet agent from a lost connection.
//! In: the view and its changes. Out: a stream that ends when the agent stops.

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
use keelson_proto::{debug as pb, node};
use serde::Serialize;
use tokio::sync::OwnedSemaphorePermit;

use super::{Shared, documents::Failure, probes::now_unix_ms};
use crate::{
    AgentView, ViewError,
    follow::{Due, Follower},
    grpc::DEFAULT_QUEUED,
    view::{answer, within},
};

const INTERVAL: Duration = Duration::from_millis(500);
const REFRESH: Duration = Duration::from_secs(5);
/// Comments show the connection to be alive even while the agent does not answer.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// What a browser is told to wait before it comes back.
const RETRY: Duration = Duration::from_secs(2);

/// One event.
#[derive(Serialize)]
struct Now {
    /// The agent's clock, so that waits are right on a machine whose clock differs.
    now_unix_ms: i64,
    version: Option<pb::GetVersionResponse>,
    /// `null`: see `pulls_error`.
    pulls: Option<pb::PullList>,
    pulls_error: String,
    /// `null`: see `heartbeats_error`.
    heartbeats: Option<node::Heartbeats>,
    heartbeats_error: String,
    actors: Vec<pb::Actor>,
}

impl Now {
    async fn of(view: &impl AgentView) -> Self {
        let (version, pulls, heartbeats, actors) = tokio::join!(
            within(view.version()),
            answer(view.pulls(DEFAULT_QUEUED)),
            answer(view.heartbeats()),
            within(view.actors())
        );
        Self {
            now_unix_ms: now_unix_ms(),
            version: version.ok(),
            pulls_error: why_not(&pulls),
            pulls: pulls.ok(),
            heartbeats_error: why_not(&heartbeats),
            heartbeats: heartbeats.ok(),
            actors: actors.unwrap_or_default(),
        }
    }
}

/// Empty where there is an answer.
fn why_not<T>(answer: &Result<T, ViewError>) -> String {
    answer.as_ref().err().map(ToString::to_string).unwrap_or_default()
}

pub(super) async fn events<V: AgentView>(State(shared): State<Shared<V>>) -> Response {
    let Ok(slot) = shared.event_streams.clone().try_acquire_owned() else {
        let text = "too many event streams are open; close a page that shows this agent";
        return Failure::new(StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    };
    let follower = Follower::new(shared.view.changes(), shared.stop.clone(), INTERVAL, Some(REFRESH));
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE).text("alive");
    Sse::new(follow(shared.view, follower, slot)).keep_alive(keep_alive).into_response()
}

/// Each document is made when the reader has room for it.
fn follow<V: AgentView>(
    view: V,
    follower: Follower,
    slot: OwnedSemaphorePermit,
) -> impl Stream<Item = Result<Event, Infallible>> + Send {
    stream::unfold((view, follower, slot), |(view, mut follower, slot)| async move {
        match follower.due().await {
            Due::Stopping | Due::Gone => None,
            Due::Changed | Due::Refresh => {
                let now = Now::of(&view).await;
                if now.pulls.is_none() || now.heartbeats.is_none() {
                    follower.again();
                }
                let event = Event::default().event("state").retry(RETRY).json_data(&now);
                // Nothing in the document can fail to be JSON; a comment keeps the stream whole if it did.
                let event =
                    event.unwrap_or_else(|_| Event::default().comment("the state could not be written"));
                Some((Ok(event), (view, follower, slot)))
            }
        }
    })
}
