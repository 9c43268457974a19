//! A runtime that does what a test says.

use std::{
    future::Future,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use futures_util::{
    FutureExt as _,
    future::{BoxFuture, poll_fn},
};
use h2::{Reason, RecvStream, server::SendResponse};
use http::{HeaderMap, Request, Response};
use keelson_proto::cri;
use prost::Message;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::watch,
    task::JoinSet,
};

use super::{Frames, Sockets, Tap, client};

pub(crate) const VERSION: &str = "/runtime.v1.RuntimeService/Version";
pub(crate) const IMAGE_FS_INFO: &str = "/runtime.v1.ImageService/ImageFsInfo";
pub(crate) const PULL_IMAGE: &str = "/runtime.v1.ImageService/PullImage";
pub(crate) const IMAGE_STATUS: &str = "/runtime.v1.ImageService/ImageStatus";

pub(crate) fn grpc_head() -> Response<()> {
    Response::builder().header("content-type", "application/grpc").body(()).expect("a response")
}

pub(crate) fn grpc_ok() -> HeaderMap {
    grpc_status(0, "")
}

pub(crate) fn grpc_status(code: i32, text: &str) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", code.into());
    if !text.is_empty() {
        trailers.insert("grpc-message", text.parse().expect("a header value"));
    }
    trailers
}

pub(crate) struct Call {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: RecvStream,
    pub(crate) respond: SendResponse<Bytes>,
    kill: watch::Sender<bool>,
}

impl Call {
    /// The whole request body; never ends if the caller leaves early.
    pub(crate) async fn read(&mut self) -> Bytes {
        match client::read(&mut self.body).await {
            Ok(body) => body,
            Err(_) => std::future::pending().await,
        }
    }

    pub(crate) async fn message<M: Message + Default>(&mut self) -> M {
        client::unframe(&self.read().await)
    }

    /// A head, a message, trailers.
    pub(crate) async fn answer(mut self, message: &impl Message) {
        self.read().await;
        self.answer_bytes(client::frame(message), grpc_ok()).await;
    }

    pub(crate) async fn answer_bytes(self, body: Bytes, trailers: HeaderMap) {
        self.answer_with(grpc_head(), body, trailers).await;
    }

    /// Sends the request body back once all of it has arrived.
    pub(crate) async fn answer_with_request(mut self) {
        let body = self.read().await;
        self.answer_bytes(body, grpc_ok()).await;
    }

    pub(crate) async fn answer_with(mut self, head: Response<()>, body: Bytes, trailers: HeaderMap) {
        // A caller that has left does not read it.
        let Ok(mut to) = self.respond.send_response(head, false) else { return };
        if client::write(&mut to, body, false).await.is_ok() {
            let _ = to.send_trailers(trailers);
        }
    }

    /// A trailers-only response.
    pub(crate) fn refuse(mut self, trailers: HeaderMap) {
        let mut head = grpc_head();
        head.headers_mut().extend(trailers);
        let _ = self.respond.send_response(head, true);
    }

    /// Returns when the caller resets the stream, or, with `None`, when its connection is gone.
    pub(crate) async fn reset(&mut self) -> Option<Reason> {
        poll_fn(|cx| self.respond.poll_reset(cx)).await.ok()
    }

    /// Closes the connection without GOAWAY.
    pub(crate) fn drop_connection(&self) {
        self.kill.send_replace(true);
    }

    /// Closes the connection when `true` is sent, even after the call.
    pub(crate) fn kill_switch(&self) -> watch::Sender<bool> {
        self.kill.clone()
    }

    /// The answers that every runtime gives.
    pub(crate) async fn standard(self) {
        match &*self.path {
            VERSION => {
                let version = cri::VersionResponse {
                    version: "0.1.0".into(),
                    runtime_name: "fake".into(),
                    runtime_version: "v1".into(),
                    runtime_api_version: "v1".into(),
                };
                self.answer(&version).await;
            }
            IMAGE_FS_INFO => self.answer(&cri::ImageFsInfoResponse::default()).await,
            IMAGE_STATUS => self.answer(&cri::ImageStatusResponse::default()).await,
            PULL_IMAGE => self.answer(&cri::PullImageResponse { image_ref: "sha256:standard".into() }).await,
            path => {
                let text = format!("unknown method {path}");
                self.refuse(grpc_status(12, &text));
            }
        }
    }
}

type Handler = Arc<dyn Fn(Call) -> BoxFuture<'static, ()> + Send + Sync>;

/// Passes calls of `path` to `handler`; all others get the standard answer.
pub(crate) fn on<F, H>(
    path: &'static str,
    handler: H,
) -> impl Fn(Call) -> BoxFuture<'static, ()> + Send + Sync
where
    F: Future<Output = ()> + Send + 'static,
    H: Fn(Call) -> F + Send + Sync + 'static,
{
    move |call| if call.path == path { handler(call).boxed() } else { call.standard().boxed() }
}

#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
}

#[derive(Default)]
struct Log {
    calls: Vec<Seen>,
    connections: Vec<Frames>,
    open: usize,
}

pub(crate) struct FakeRuntime {
    sockets: Sockets,
    handler: Handler,
    log: Arc<Mutex<Log>>,
    serving: JoinSet<()>,
}

impl FakeRuntime {
    pub(crate) fn start<F, H>(sockets: &Sockets, handler: H) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
        H: Fn(Call) -> F + Send + Sync + 'static,
    {
        let handler: Handler = Arc::new(move |call| handler(call).boxed());
        let mut runtime =
            Self { sockets: sockets.clone(), handler, log: Arc::default(), serving: JoinSet::new() };
        runtime.appear();
        runtime
    }

    pub(crate) fn standard(sockets: &Sockets) -> Self {
        Self::start(sockets, Call::standard)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.sockets.runtime()
    }

    pub(crate) fn appear(&mut self) {
        let listener = UnixListener::bind(self.sockets.runtime()).expect("binds");
        let (handler, log) = (self.handler.clone(), self.log.clone());
        self.serving.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.expect("accepts");
                connections.spawn(connection(stream, handler.clone(), log.clone()));
            }
        });
    }

    /// Dies as a killed process does: the socket file stays, and no process listens.
    pub(crate) async fn die(&mut self) {
        self.serving.shutdown().await;
    }

    /// As [`FakeRuntime::die`], and its socket is removed.
    pub(crate) async fn vanish(&mut self) {
        self.die().await;
        std::fs::remove_file(self.sockets.runtime()).expect("removes its socket");
    }

    pub(crate) fn calls(&self, path: &str) -> Vec<Seen> {
        self.log.lock().expect("log").calls.iter().filter(|call| call.path == path).cloned().collect()
    }

    /// Number of frames of a kind that arrived, on all connections.
    pub(crate) fn frames(&self, kind: u8) -> usize {
        self.log.lock().expect("log").connections.iter().map(|frames| frames.of_kind(kind).len()).sum()
    }

    pub(crate) fn open_connections(&self) -> usize {
        self.log.lock().expect("log").open
    }

    /// Connections since the start.
    pub(crate) fn connections(&self) -> usize {
        self.log.lock().expect("log").connections.len()
    }
}

/// Counts a connection while it lives.
struct Open(Arc<Mutex<Log>>);

impl Open {
    fn new(log: Arc<Mutex<Log>>) -> Self {
        log.lock().expect("log").open += 1;
        Self(log)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.lock().expect("log").open -= 1;
    }
}

async fn connection(stream: UnixStream, handler: Handler, log: Arc<Mutex<Log>>) {
    let (tap, frames) = Tap::new(stream, true);
    log.lock().expect("log").connections.push(frames);
    let open = Open::new(log.clone());
    let Ok(mut connection) = h2::server::Builder::new()
        .max_header_list_size(16 << 20)
        .initial_window_size(1 << 20)
        .initial_connection_window_size(8 << 20)
        // As grpc-go, which has no such limits.
        .max_pending_accept_reset_streams(usize::MAX)
        .max_local_error_reset_streams(None)
        .data_frame_budget(usize::MAX)
        .handshake::<_, Bytes>(tap)
        .await
    else {
        return;
    };
    let (kill, mut killed) = watch::channel(false);
    let mut calls = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = connection.accept() => accepted,
            _ = killed.wait_for(|killed| *killed) => break,
        };
        let Some(Ok((request, respond))) = accepted else { break };
        let (head, body) = Request::into_parts(request);
        let path = head.uri.path().to_owned();
        log.lock().expect("log").calls.push(Seen { path: path.clone(), headers: head.headers.clone() });
        let call = Call { path, headers: head.headers, body, respond, kill: kill.clone() };
        calls.spawn(handler(call));
    }
    drop((connection, open));
    // They notice by themselves; some tests check how.
    while calls.join_next().await.is_some() {}
}
