//! Checks that a CRI socket is served.
//!
//! In: the path of a socket. Out: an answer from the front's own thread, which accepts a connection and answers an
//! HTTP/2 ping on it. The runtime is not involved.

use std::{future::poll_fn, io, path::Path, pin::pin, task::Poll};

use h2::Ping;
use tokio::net::UnixStream;

#[derive(Debug, thiserror::Error)]
pub enum PingError {
    #[error("cannot connect")]
    Connect(#[source] io::Error),
    #[error("connection closed: {0}")]
    Ended(String),
}

/// Sends a ping to the front behind `socket`. There is no timeout: with a stuck front it does not return.
pub async fn ping(socket: &Path) -> Result<(), PingError> {
    let stream = UnixStream::connect(socket).await.map_err(PingError::Connect)?;
    let ended = |error: Option<h2::Error>| {
        PingError::Ended(error.map_or_else(|| "the front closed it".to_owned(), |error| error.to_string()))
    };
    let (_calls, mut connection) = h2::client::handshake(stream).await.map_err(|error| ended(Some(error)))?;
    let Some(mut pings) = connection.ping_pong() else { return Err(ended(None)) };
    let mut answer = pin!(pings.ping(Ping::opaque()));
    let mut connection = pin!(connection);
    poll_fn(|cx| {
        // The connection moves the frames; it is polled first, so that the ping finds its answer.
        if let Poll::Ready(result) = connection.as_mut().poll(cx) {
            return Poll::Ready(Err(ended(result.err())));
        }
        answer.as_mut().poll(cx).map_err(|error| ended(Some(error))).map_ok(drop)
    })
    .await
}
