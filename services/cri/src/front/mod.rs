//! The CRI front: the socket that kubelets use as image and runtime endpoint.
//!
//! Owns: the connections of CRI clients. In: HTTP/2 connections. Out: for each, one connection of its
//! own to the runtime, on which its calls go on unchanged ([`pass`]); `ImageService/PullImage` goes to
//! the PullCoordinator instead ([`pull`]).
//!
//! Everything here is meant to run on one thread with a current-thread tokio runtime: a call then
//! crosses the agent without waking another thread, which is most of what it costs.

mod cork;
mod forward;
mod operation;
mod pass;
mod ping;
mod pull;
mod refusal;
mod upstream;

use std::{
    fmt,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::poll_fn;
use h2::{RecvStream, server::SendResponse};
use http::Request;
use keelson_actor_system::inspect::Mailbox;
use keelson_pulls::{
    coordinator::{CallerId, PullCoordinator},
    metrics::{Metrics, PassReason},
    request::CredentialsSalt,
};
use keelson_serve::{ACCEPT_PAUSE, AcceptFailures, LogLimit};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::UnixListener,
    sync::watch,
};

pub use ping::{PingError, ping};

use cork::Corked;
use upstream::Upstream;

const PULL_IMAGE: &str = "/runtime.v1.ImageService/PullImage";
/// The same call before `v1`, which containerd 1.6 still serves: the same messages under another name. Its pulls count
/// like all others and are sent to the runtime by `v1`.
const PULL_IMAGE_V1ALPHA2: &str = "/runtime.v1alpha2.ImageService/PullImage";
/// Large enough that lists of many megabytes do not wait for it.
const STREAM_WINDOW: u32 = 1024 * 1024;
const CONNECTION_WINDOW: u32 = 8 * 1024 * 1024;
/// How long a client may take for the HTTP/2 handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// The same while the agent stops.
const LEAVING_HANDSHAKE: Duration = Duration::from_secs(5);
/// The largest block of headers, as in grpc-go.
pub(crate) const MAX_HEADERS: u32 = 16 * 1024 * 1024;

/// Cancelled calls that are remembered, so that frames which arrive after the cancellation are recognized as late.
const LATE_CALLS: usize = 1024;
/// Calls that may be cancelled before this thread has seen them.
const UNSEEN_CALLS: usize = 100_000;

/// What can change while the front runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrontSettings {
    /// How long a call is held while the runtime is away (`cri.hold_timeout`).
    pub hold: Duration,
    /// How long a pull waits for the coordinator's acknowledgement (`cri.decision_timeout`).
    pub decision: Duration,
    /// Say in `Version` responses that the pull option is obeyed (gate `PullOption`).
    pub offer_pull_option: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Serving,
    /// No connection is accepted, and clients get GOAWAY; running calls continue.
    Leaving,
    /// As [`Phase::Leaving`]; calls that pass through are cut off, pulls continue.
    Cut,
}

#[derive(Clone)]
pub struct FrontParts {
    pub runtime_socket: std::path::PathBuf,
    pub pulls: Mailbox<PullCoordinator>,
    pub metrics: Metrics,
    pub settings: watch::Receiver<FrontSettings>,
    pub salt: CredentialsSalt,
    /// Path of this front's socket, where a successor answers for pulls that were handed over.
    pub own_socket: std::path::PathBuf,
    /// Client connections since the start.
    pub clients: Arc<AtomicUsize>,
}

/// Shared by all connections.
struct Front {
    parts: FrontParts,
    /// Connections to the agent that replaces this one.
    successor: Upstream,
    phase: watch::Receiver<Phase>,
    callers: AtomicU64,
    /// Of pulls that are passed through.
    log: Mutex<LogLimit>,
}

impl fmt::Debug for Front {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Front").field("runtime_socket", &self.parts.runtime_socket).finish_non_exhaustive()
    }
}

impl Front {
    fn next_caller(&self) -> CallerId {
        CallerId(self.callers.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns when calls that pass through are to be cut off.
    async fn wait_for_cut_off(&self) {
        reached(self.phase.clone(), Phase::Cut).await;
    }

    fn hold(&self) -> Duration {
        self.parts.settings.borrow().hold
    }

    fn decision(&self) -> Duration {
        self.parts.settings.borrow().decision
    }

    /// Counts a pull that is passed through, and logs it if none was logged lately.
    fn passes_through(&self, reason: PassReason, image: &str) {
        let metrics = &self.parts.metrics;
        metrics.passed_through.get_or_create(&reason).inc();
        metrics.passing_through.set(1);
        if self.log.lock().unwrap_or_else(PoisonError::into_inner).is_due() {
            let total = metrics.passed_through_total();
            tracing::warn!(
                image,
                reason = reason.reason,
                total,
                "image pull passed through without admission"
            );
        }
    }
}

/// Serves while `phase` is [`Phase::Serving`], then lets running calls end; returns when the last connection is closed.
pub async fn serve(listener: UnixListener, parts: FrontParts, phase: watch::Receiver<Phase>) {
    let successor = Upstream::new(parts.own_socket.clone());
    let front = Arc::new(Front {
        parts,
        successor,
        phase: phase.clone(),
        callers: AtomicU64::new(1),
        log: Mutex::default(),
    });
    // Dropped by each connection at its end; the last one wakes the receiver.
    let (alive, mut gone) = tokio::sync::mpsc::channel::<()>(1);
    let listener = Arc::new(listener);
    restarted(|| accept(listener.clone(), front.clone(), phase.clone(), alive.clone())).await;
    drop((listener, alive));
    gone.recv().await;
}

/// Runs a task until it ends by itself, and starts it again if it panics: the connections and the listener, which it
/// shares, stay open.
async fn restarted<T: Future<Output = ()> + Send + 'static>(task: impl Fn() -> T) {
    // The panic hook has logged and counted it.
    while tokio::spawn(task()).await.is_err() {
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

/// Accepts connections while `phase` is [`Phase::Serving`].
async fn accept(
    listener: Arc<UnixListener>,
    front: Arc<Front>,
    phase: watch::Receiver<Phase>,
    alive: tokio::sync::mpsc::Sender<()>,
) {
    let stopped = reached(phase.clone(), Phase::Leaving);
    tokio::pin!(stopped);
    let mut failures = AcceptFailures::new("CRI");
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stopped => return,
        };
        match accepted {
            Ok((stream, _)) => {
                let connection = connection(stream, front.clone(), phase.clone());
                let alive = alive.clone();
                front.parts.clients.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(async move {
                    connection.await;
                    drop(alive);
                });
            }
            Err(error) => failures.pause(&error).await,
        }
    }
}

async fn reached(mut phase: watch::Receiver<Phase>, wanted: Phase) {
    // An error means that the sender is gone, which also means stop.
    let _ = phase.wait_for(|phase| *phase >= wanted).await;
}

/// The limits of a connection to a client.
///
/// The defaults of h2 are for clients on the internet. Several count over the life of a connection, which is months
/// with a kubelet, so that harmless events would end it some day. A process that can open this socket can do worse than
/// waste memory. Not limited: concurrent calls (a kubelet has two for each pod, and queued pulls) and protocol errors
/// of streams. Raised: calls that are cancelled before this thread has seen them, as after a node was suspended for a
/// while.
fn limits() -> h2::server::Builder {
    let mut builder = h2::server::Builder::new();
    builder
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(MAX_HEADERS)
        .max_concurrent_reset_streams(LATE_CALLS)
        .max_local_error_reset_streams(None)
        .max_pending_accept_reset_streams(UNSEEN_CALLS);
    builder
}

async fn connection<T>(io: T, front: Arc<Front>, phase: watch::Receiver<Phase>)
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let stopped = reached(phase.clone(), Phase::Leaving);
    let cut = reached(phase.clone(), Phase::Cut);
    tokio::pin!(stopped, cut);
    let io = Corked::new(io);
    let mut handshake = limits().handshake::<_, Bytes>(io.clone());
    let handshake = poll_fn(|cx| io.drive(cx, |cx| Pin::new(&mut handshake).poll(cx)));
    // A client whose connection is closed before GOAWAY fails its calls and backs off.
    let left = async {
        stopped.as_mut().await;
        tokio::time::sleep(LEAVING_HANDSHAKE).await;
    };
    let shaken = tokio::select! {
        shaken = tokio::time::timeout(HANDSHAKE, handshake) => shaken,
        () = left => return,
        () = &mut cut => return,
    };
    let mut connection = match shaken {
        Ok(Ok(connection)) => connection,
        // Garbage, HTTP/1 or silence: of interest only to a person who debugs that client.
        Ok(Err(error)) => return tracing::debug!(%error, "CRI client did not use HTTP/2"),
        Err(_) => return tracing::debug!(timeout = ?HANDSHAKE, "CRI client sent nothing"),
    };
    let upstream = Arc::new(Upstream::new(front.parts.runtime_socket.clone()));
    // The future of the phase may have ended during the handshake.
    let stopped = reached(phase, Phase::Leaving);
    tokio::pin!(stopped);
    let mut draining = false;
    // Dropped by each call at its end. `None`: the connection ends with its last call, whether the client answers or
    // not.
    let (alive, mut gone) = tokio::sync::mpsc::channel::<()>(1);
    let mut alive = Some(alive);
    loop {
        let accepted = tokio::select! {
            biased;
            accepted = poll_fn(|cx| io.drive(cx, |cx| connection.poll_accept(cx))) => accepted,
            () = &mut stopped, if !draining => {
                connection.graceful_shutdown();
                draining = true;
                continue;
            }
            () = &mut cut, if alive.is_some() => {
                alive = None;
                continue;
            }
            _ = gone.recv(), if alive.is_none() => return,
        };
        match accepted {
            Some(Ok((request, respond))) => {
                let Some(alive) = alive.clone() else { continue };
                start_call(request, respond, front.clone(), upstream.clone(), alive);
            }
            Some(Err(error)) => return tracing::debug!(%error, "CRI connection failed"),
            None => return,
        }
    }
}

/// Starts the task of one call, which drops `alive` at its end. Thousands of callers may wait for their images, so the
/// task of a pull is smaller than one that passes a call through.
fn start_call(
    request: Request<RecvStream>,
    respond: SendResponse<Bytes>,
    front: Arc<Front>,
    upstream: Arc<Upstream>,
    alive: tokio::sync::mpsc::Sender<()>,
) {
    if matches!(request.uri().path(), PULL_IMAGE | PULL_IMAGE_V1ALPHA2) {
        tokio::spawn(async move {
            pull::handle(request, respond, &front, &upstream).await;
            drop(alive);
        });
    } else {
        tokio::spawn(async move {
            pass::handle(request, Bytes::new(), respond, &front, &upstream).await;
            drop(alive);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::UnixStream,
    };

    use super::*;

    /// I9: connections stay open, and those that wait in the backlog are accepted.
    #[tokio::test]
    async fn i9_an_accept_loop_that_panics_is_started_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let listener = Arc::new(UnixListener::bind(&path).expect("listens"));
        let rounds = Arc::new(AtomicU32::new(0));
        let accepting = {
            let rounds = rounds.clone();
            restarted(move || {
                let (listener, round) = (listener.clone(), rounds.fetch_add(1, Ordering::Relaxed));
                async move {
                    let (mut stream, _) = listener.accept().await.expect("accepts");
                    tokio::spawn(async move {
                        let mut byte = [0];
                        while stream.read_exact(&mut byte).await.is_ok() {
                            stream.write_all(&byte).await.expect("echoes");
                        }
                    });
                    assert!(round == 2, "for a test");
                }
            })
        };
        let clients = async {
            let mut clients = Vec::new();
            for _ in 0..3 {
                clients.push(UnixStream::connect(&path).await.expect("connects"));
            }
            for client in clients.iter_mut().rev() {
                client.write_all(b"x").await.expect("writes");
                let mut byte = [0];
                client.read_exact(&mut byte).await.expect("is served, by a loop that has panicked too");
            }
        };
        tokio::join!(accepting, clients);
        assert_eq!(rounds.load(Ordering::Relaxed), 3, "one that ends by itself is not started again");
    }
}
