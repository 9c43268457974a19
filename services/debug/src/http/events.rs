//! `/debug/events`: the content of the page, as server-sent events.
//!
//! Owns: two kinds of events, each a document. `state`, `{now_unix_ms, version, pulls, pulls_error, heartbeats,
//! heartbeats_error, actors}`, is sent each time. `endpoints`, `{endpoints, endpoints_error, watchers, faults}`, is
//! sent after the first `state` and then only when it has changed; it holds no Services, which `/debug/endpoints`
//! lists. In: the view and its changes. Out: a stream that ends when the agent stops.

use axum::{
    extract::State,
    response::{Response, sse::Event},
};
use keelson_proto::{debug as pb, endpoints, node, unix_ms};
use keelson_serve::http::{EventReader, event};
use serde::Serialize;

use super::Shared;
use crate::{
    AgentView, ViewError,
    grpc::DEFAULT_QUEUED,
    view::{answer, with_timeout},
};

/// Maximum number of watchers and of faults in an event: a page shows no more, and there may be a thousand of each.
const NAMED: usize = 100;

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
            with_timeout(view.version()),
            answer(view.pulls(DEFAULT_QUEUED)),
            answer(view.heartbeats()),
            with_timeout(view.actors())
        );
        Self {
            now_unix_ms: unix_ms(),
            version: version.ok(),
            pulls_error: why_not(&pulls),
            pulls: pulls.ok(),
            heartbeats_error: why_not(&heartbeats),
            heartbeats: heartbeats.ok(),
            actors: actors.unwrap_or_default(),
        }
    }
}

/// Ages are times, so that an event does not change while nothing happens.
#[derive(Serialize, PartialEq)]
struct Endpoints {
    /// `null`: see `endpoints_error`.
    endpoints: Option<endpoints::State>,
    endpoints_error: String,
    /// Number of watchers, listed or not.
    watchers: usize,
    /// Number of faults, listed or not.
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

/// The error; empty if there is an answer.
fn why_not<T>(answer: &Result<T, ViewError>) -> String {
    answer.as_ref().err().map(ToString::to_string).unwrap_or_default()
}

pub(super) async fn events<V: AgentView>(State(shared): State<Shared<V>>) -> Response {
    shared.event_streams.open("agent", shared.view.changes(), Reader { view: shared.view, sent: None })
}

struct Reader<V> {
    view: V,
    /// The last event `endpoints`.
    sent: Option<Endpoints>,
}

impl<V: AgentView> EventReader for Reader<V> {
    async fn read(&mut self) -> (Vec<Event>, bool) {
        let (now, endpoints) = tokio::join!(Now::of(&self.view), answer(self.view.endpoints("", 0)));
        let endpoints = Endpoints::new(endpoints);
        let is_complete = now.pulls.is_some() && now.heartbeats.is_some() && endpoints.endpoints.is_some();
        let mut events = vec![event("state", &now)];
        if self.sent.as_ref() != Some(&endpoints) {
            events.push(event("endpoints", &endpoints));
            self.sent = Some(endpoints);
        }
        (events, is_complete)
    }
}
