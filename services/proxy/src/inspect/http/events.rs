//! `/debug/events`: the state for the page, as server-sent events.
//!
//! Owns: the event `state`, `{now_unix_ms, state, state_error}`. In: the view and its changes. Out: a stream that ends when
//! the proxy stops.

use axum::{
    extract::State,
    response::{Response, sse::Event},
};
use keelson_proto::{proxy as pb, unix_ms};
use keelson_serve::http::{EventReader, event};
use serde::Serialize;

use super::Shared;
use crate::inspect::{ProxyView, view::answer};

#[derive(Serialize)]
struct Now {
    /// The proxy's clock, so that ages are right on a machine with another clock.
    now_unix_ms: i64,
    /// `null`: see `state_error`.
    state: Option<pb::State>,
    state_error: String,
}

struct Reader<V>(V);

impl<V: ProxyView> EventReader for Reader<V> {
    async fn read(&mut self) -> (Vec<Event>, bool) {
        let state = answer(self.0.state()).await;
        let state_error = state.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let now = Now { now_unix_ms: unix_ms(), state: state.ok(), state_error };
        (vec![event("state", &now)], now.state.is_some())
    }
}

pub(super) async fn events<V: ProxyView>(State(shared): State<Shared<V>>) -> Response {
    shared.event_streams.open("proxy", shared.view.changes(), Reader(shared.view))
}
