//! `/debug/events`: what the page shows, as server-sent events.
//!
//! Owns: two kinds of events, each a document. `state`, `{now_unix_ms, version, pulls, pulls_error, heartbeats,
//! heartbeats_error, actors}`, comes at once, on every change (at most twice a second), and every five seconds even
//! without one, so that a reader knows a quiet agent from a lost connection. `endpoints`, `{endpoints,
//! endpoints_error, watchers, faults}`, comes after the first `state` and then only when it has changed; it holds no
//! Services, which `/debug/endpoints` lists.
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
use futures_util::{Stream, StreamExt as _, stream};
use keelson_proto::{debug as pb, endpoints, node};
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

/// How many watchers and faults an event names: a page shows no more, and there may be a thousand of each.
const NAMED: usize = 100;

/// An event `state`.
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

/// An event `endpoints`. Ages in it are times, so that it stays the same while nothing happens.
#[derive(Serialize, PartialEq)]
struct Endpoints {
    /// `null`: see `endpoints_error`.
    endpoints: Option<endpoints::State>,
    endpoints_error: String,
    /// How many there are, named or not.
    watchers: usize,
    /// The same.
    faults: usize,
}

impl Endpoints {
    fn new(state: Result<endpoints::State, ViewError>) -> Self {
        let endpoints_error = why_not(&state);
        let mut endpoints = state.ok();
        let (mut watchers, mut faults) = (0, 0);
        if let Some(state) = &mut endpoints {
            (watchers, faults) = (state.watchers.len(), state.faults.len());
            state.watchers.truncate(NAMED);
            state.faults.truncate(NAMED);
        }
        Self { endpoints, endpoints_error, watchers, faults }
    }
}

/// Empty where there is an answer.
fn why_not<T>(answer: &Result<T, ViewError>) -> String {
    answer.as_ref().err().map(ToString::to_string).unwrap_or_default()
}

pub(super) async fn events<V: AgentView>(State(shared): State<Shared<V>>) -> Response {
    let Ok(slot) = shared.event_streams.clone().try_acquire_owned() else {
        let text = "too many event streams are open; close another page of this agent";
        return Failure::new(StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    };
    let follower = Follower::new(shared.view.changes(), shared.stop.clone(), INTERVAL, Some(REFRESH));
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE).text("alive");
    let reader = Reader { view: shared.view, follower, told: None, _slot: slot };
    Sse::new(reader.follow()).keep_alive(keep_alive).into_response()
}

/// One who reads the events.
struct Reader<V> {
    view: V,
    follower: Follower,
    /// What was sent of endpoints last.
    told: Option<Endpoints>,
    _slot: OwnedSemaphorePermit,
}

impl<V: AgentView> Reader<V> {
    /// Documents are made when there is room for them.
    fn follow(self) -> impl Stream<Item = Result<Event, Infallible>> + Send {
        let due = stream::unfold(self, |mut reader| async move {
            match reader.follower.due().await {
                Due::Stopping | Due::Gone => None,
                Due::Changed | Due::Refresh => Some((reader.news().await, reader)),
            }
        });
        due.flat_map(|events| stream::iter(events.into_iter().map(Ok)))
    }

    async fn news(&mut self) -> Vec<Event> {
        let (now, endpoints) = tokio::join!(Now::of(&self.view), answer(self.view.endpoints("", 0)));
        let endpoints = Endpoints::new(endpoints);
        if now.pulls.is_none() || now.heartbeats.is_none() || endpoints.endpoints.is_none() {
            self.follower.again();
        }
        let mut events = vec![event("state", &now)];
        if self.told.as_ref() != Some(&endpoints) {
            events.push(event("endpoints", &endpoints));
            self.told = Some(endpoints);
        }
        events
    }
}

fn event(name: &str, document: &impl Serialize) -> Event {
    let event = Event::default().event(name).retry(RETRY).json_data(document);
    // Nothing in the documents can fail to be JSON; a comment keeps the stream whole if it did.
    event.unwrap_or_else(|_| Event::default().comment("cannot encode the state"))
}
