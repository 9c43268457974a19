//! Server-sent events.
//!
//! Owns: the number of streams, their rate and their end. An event is sent at once, on every change (at most twice a
//! second), and every five seconds even without one, so that a client can tell a quiet process from a lost connection.
//! In: a counter of changes, and an [`EventReader`]. Out: a response that ends when the process stops.

use std::{convert::Infallible, future::Future, sync::Arc, time::Duration};

use axum::{
    http::StatusCode,
    response::{
        IntoResponse as _, Response, Sse,
        sse::{Event, KeepAlive},
    },
};
use futures_util::{StreamExt as _, stream};
use serde::Serialize;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use super::Failure;
use crate::{Due, Follower};

/// Maximum number of concurrent event streams; less than that of connections, so that probes always find a free one.
const STREAMS: usize = 64;
const INTERVAL: Duration = Duration::from_millis(500);
const REFRESH: Duration = Duration::from_secs(5);
/// Interval of comments, which show that the connection is open while the process does not answer.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// The delay that a browser is asked for before it reconnects.
const RETRY: Duration = Duration::from_secs(2);

pub trait EventReader: Send + 'static {
    /// The current events; `false`: they are not complete, so that events are due again after the interval.
    fn read(&mut self) -> impl Future<Output = (Vec<Event>, bool)> + Send;
}

/// The event streams of one server.
#[derive(Debug, Clone)]
pub struct EventStreams {
    slots: Arc<Semaphore>,
    stop: CancellationToken,
}

impl EventStreams {
    #[must_use]
    pub fn new(stop: CancellationToken) -> Self {
        Self { slots: Arc::new(Semaphore::new(STREAMS)), stop }
    }

    /// A stream of the process `what` (`agent`), or 503 if there are too many. Events are made when the client has room
    /// for them.
    pub fn open(&self, what: &str, changes: watch::Receiver<u64>, reader: impl EventReader) -> Response {
        let Ok(slot) = self.slots.clone().try_acquire_owned() else {
            let text = format!("too many event streams are open; close another page of this {what}");
            return Failure::new(StatusCode::SERVICE_UNAVAILABLE, text).into_response();
        };
        let follower = Follower::new(changes, self.stop.clone(), INTERVAL, Some(REFRESH));
        // The slot is held as long as the stream.
        let events =
            stream::unfold((reader, follower, slot), |(mut reader, mut follower, slot)| async move {
                match follower.due().await {
                    Due::Stopping | Due::Gone => return None,
                    Due::Changed | Due::Refresh => {}
                }
                let (events, is_complete) = reader.read().await;
                if !is_complete {
                    follower.retry();
                }
                Some((stream::iter(events.into_iter().map(Ok::<_, Infallible>)), (reader, follower, slot)))
            });
        let keep_alive = KeepAlive::new().interval(KEEP_ALIVE).text("alive");
        Sse::new(events.flatten()).keep_alive(keep_alive).into_response()
    }
}

pub fn event(name: &str, document: &impl Serialize) -> Event {
    let event = Event::default().event(name).retry(RETRY).json_data(document);
    // Encoding fails only for a map with keys that are not strings; a comment then keeps the stream open.
    event.unwrap_or_else(|_| Event::default().comment("cannot encode the state"))
}
