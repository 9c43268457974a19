//! One client's connection to the runtime.
//!
//! Owns: the HTTP/2 connection that carries a client's calls; made when the first call needs it, and again after the
//! runtime came back. In: a request for a connection, and how long it may wait. Out: a handle to send on, or what is
//! wrong with the socket.

use std::{io, path::PathBuf, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::poll_fn;
use h2::client::SendRequest;
use keelson_proto::backoff::Backoff;
use tokio::{net::UnixStream, sync::Mutex, time::Instant};

use super::{CONNECTION_WINDOW, LATE_CALLS, MAX_HEADERS, STREAM_WINDOW, cork::Corked};

/// Between attempts. It is short, so that a runtime that is back is found soon.
pub(super) const BACKOFF: Backoff =
    Backoff { first: Duration::from_millis(100), longest: Duration::from_secs(1) };

/// Why there is no connection. The text is sent to the caller.
#[derive(Debug, thiserror::Error)]
pub(super) enum UpstreamError {
    #[error("the container runtime at unix://{socket} did not answer within {waited:?} (cri.hold_timeout): \
             {reason}", socket = .socket.display())]
    Runtime { socket: PathBuf, waited: Duration, reason: String },
    /// No file descriptor is left; the runtime may be healthy.
    #[error(
        "keelson has no file descriptor left for another connection to the container runtime; raise \
         LimitNOFILE of its unit"
    )]
    NoDescriptors,
}

impl UpstreamError {
    /// The cause, without the name of the runtime.
    pub(super) fn reason(&self) -> String {
        match self {
            Self::Runtime { reason, .. } => reason.clone(),
            Self::NoDescriptors => self.to_string(),
        }
    }
}

struct ConnectFailure {
    reason: String,
    /// No file descriptor was left.
    descriptors: bool,
}

impl From<io::Error> for ConnectFailure {
    fn from(error: io::Error) -> Self {
        // EMFILE and ENFILE have no `ErrorKind`.
        Self { reason: error.to_string(), descriptors: matches!(error.raw_os_error(), Some(23 | 24)) }
    }
}

/// Maximum wait for a connection when file descriptors are short: long enough for one to be freed, too short to look
/// like an absent runtime.
const SHORTAGE: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Slot {
    sender: Option<SendRequest<Bytes>>,
}

#[derive(Debug)]
pub(super) struct Upstream {
    socket: PathBuf,
    slot: Arc<Mutex<Slot>>,
}

impl Upstream {
    pub(super) fn new(socket: PathBuf) -> Self {
        Self { socket, slot: Arc::default() }
    }

    pub(super) fn socket(&self) -> &std::path::Path {
        &self.socket
    }

    /// Returns a connection that was alive a moment ago; retries until `hold` is over.
    pub(super) async fn get(&self, hold: Duration) -> Result<SendRequest<Bytes>, UpstreamError> {
        let since = Instant::now();
        let mut failures = 0;
        loop {
            let failed = match self.try_get().await {
                Ok(sender) => return Ok(sender),
                Err(failed) => failed,
            };
            let waited = since.elapsed();
            if failed.descriptors && waited >= SHORTAGE {
                return Err(UpstreamError::NoDescriptors);
            }
            failures += 1;
            let pause = BACKOFF.pause(failures);
            if waited + pause > hold {
                // Uses up the hold time: a second attempt may still succeed.
                tokio::time::sleep(hold.saturating_sub(waited)).await;
                return self.try_get().await.map_err(|failed| match failed.descriptors {
                    true => UpstreamError::NoDescriptors,
                    false => UpstreamError::Runtime {
                        socket: self.socket.clone(),
                        waited: hold,
                        reason: failed.reason,
                    },
                });
            }
            tokio::time::sleep(pause).await;
        }
    }

    async fn try_get(&self) -> Result<SendRequest<Bytes>, ConnectFailure> {
        let mut slot = self.slot.lock().await;
        if let Some(sender) = slot.sender.clone() {
            match sender.ready().await {
                Ok(sender) => return Ok(sender),
                Err(_) => slot.sender = None,
            }
        }
        let sender = self.connect().await?;
        slot.sender = Some(sender.clone());
        drop(slot);
        sender.ready().await.map_err(|error| ConnectFailure { reason: error.to_string(), descriptors: false })
    }

    async fn connect(&self) -> io::Result<SendRequest<Bytes>> {
        let stream = UnixStream::connect(&self.socket).await?;
        let mut builder = h2::client::Builder::new();
        builder
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(MAX_HEADERS)
            // As towards clients: some of these count over the life of a connection.
            .max_concurrent_reset_streams(LATE_CALLS)
            .max_local_error_reset_streams(None)
            .enable_push(false);
        let io = Corked::new(stream);
        let (sender, mut connection) = builder.handshake(io.clone()).await.map_err(io::Error::other)?;
        tokio::spawn(async move {
            if let Err(error) = poll_fn(|cx| io.drive(cx, |cx| Pin::new(&mut connection).poll(cx))).await {
                tracing::debug!(%error, "connection to the container runtime closed");
            }
        });
        Ok(sender)
    }
}
