//! A scripted server, down to the bytes.
//!
//! Owns: [`Server`], which listens on a unix socket and passes every call to the test as a [`Call`]; the test answers
//! with messages, trailers, or breaks the connection. In: calls of the client under test. Out: [`Call`]s.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

use std::{
    convert::Infallible,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::stream::unfold;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::{
    Request, Response,
    body::{Frame, Incoming},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use keelson_client::{Options, Target, localnetv1 as local};
use keelson_proto::endpoints as pb;
use prost::Message;
use tokio::{net::UnixListener, sync::mpsc, task::JoinSet};

/// Timeout for a state; only a failing test waits this long.
pub(crate) const LONG: Duration = Duration::from_secs(60);

type BodyFrame = Result<Frame<Bytes>, Infallible>;

pub(crate) struct Call {
    /// `Next`, `Watch` or `Report`.
    pub(crate) method: String,
    pub(crate) instance_id: u64,
    pub(crate) rev: u64,
    /// Of `Next`: whether a change of staleness alone is answered, and what the client knows of it.
    pub(crate) follow_stale: Option<bool>,
    pub(crate) required: Option<local::EndpointConditions>,
    /// Of `Report`.
    pub(crate) backend: Option<pb::Backend>,
    frames: mpsc::Sender<BodyFrame>,
}

impl Call {
    /// Sends bytes without framing; false when the client has left.
    pub(crate) async fn raw(&self, bytes: impl Into<Bytes>) -> bool {
        self.frames.send(Ok(Frame::data(bytes.into()))).await.is_ok()
    }

    /// Sends bytes as one message.
    pub(crate) async fn bytes(&self, message: &[u8]) -> bool {
        let mut frame = BytesMut::new();
        frame.put_u8(0);
        frame.put_u32(message.len() as u32);
        frame.put_slice(message);
        self.raw(frame.freeze()).await
    }

    pub(crate) async fn send(&self, message: &impl Message) -> bool {
        self.bytes(&message.encode_to_vec()).await
    }

    /// Ends the stream with a status; 0 is OK.
    pub(crate) async fn status(self, code: i32) {
        let mut trailers = http::HeaderMap::new();
        trailers.insert("grpc-status", code.into());
        let _ = self.frames.send(Ok(Frame::trailers(trailers))).await;
    }

    pub(crate) async fn next(&self, instance_id: u64, rev: u64) {
        let next = local::NextFilter { instance_id, rev, ..Default::default() };
        let node = local::NodeInfo { name: "node".into(), ..Default::default() };
        self.send(&local::NextItem { next: Some(next), node: Some(node), ..Default::default() }).await;
    }

    pub(crate) async fn item(&self, name: &str, version: i32) {
        self.send(&local::NextItem { endpoints: Some(service(name, version)), ..Default::default() }).await;
    }

    /// The beginning of an answer of `Next`.
    pub(crate) async fn partial(&self, instance_id: u64, rev: u64, services: &[(&str, i32)]) {
        self.next(instance_id, rev).await;
        for (name, version) in services {
            self.item(name, *version).await;
        }
    }

    pub(crate) async fn state(self, instance_id: u64, rev: u64, services: &[(&str, i32)]) {
        self.partial(instance_id, rev, services).await;
        self.status(0).await;
    }

    pub(crate) async fn watch(&self, item: pb::watch_item::Item) -> bool {
        self.send(&pb::WatchItem { item: Some(item) }).await
    }

    pub(crate) async fn reset(&self) {
        self.watch(pb::watch_item::Item::Reset(pb::Reset {})).await;
    }

    pub(crate) async fn set(&self, name: &str, version: i32) {
        self.watch(pb::watch_item::Item::Set(service(name, version))).await;
    }

    /// Deltas of `Watch` up to this position.
    pub(crate) async fn changes(&self, instance_id: u64, rev: u64, services: &[(&str, i32)]) {
        for (name, version) in services {
            self.set(name, *version).await;
        }
        self.sync(instance_id, rev).await;
    }

    /// A full state of `Watch`.
    pub(crate) async fn full(&self, instance_id: u64, rev: u64, services: &[(&str, i32)]) {
        self.reset().await;
        self.changes(instance_id, rev, services).await;
    }

    pub(crate) async fn delete(&self, name: &str) {
        let name = pb::ServiceName { namespace: "ns".into(), name: name.into() };
        self.watch(pb::watch_item::Item::Delete(name)).await;
    }

    pub(crate) async fn sync(&self, instance_id: u64, rev: u64) -> bool {
        let sync = pb::Sync { instance_id, rev, ..Default::default() };
        self.watch(pb::watch_item::Item::Sync(sync)).await
    }

    /// Waits until the client leaves.
    pub(crate) async fn closed(&self) {
        self.frames.closed().await;
    }
}

/// A Service that encodes a version.
pub(crate) fn service(name: &str, version: i32) -> local::ServiceEndpoints {
    local::ServiceEndpoints {
        namespace: "ns".into(),
        name: name.into(),
        r#type: "ClusterIP".into(),
        health_check_node_port: version,
        ..Default::default()
    }
}

/// Listens until it is dropped, which breaks every connection.
pub(crate) struct Server {
    path: PathBuf,
    folder: Option<tempfile::TempDir>,
    calls: mpsc::Receiver<Call>,
    /// They end with it.
    tasks: JoinSet<()>,
}

impl Server {
    pub(crate) fn start(path: PathBuf) -> Self {
        let (calls, tasks) = listen(&path);
        Self { path, folder: None, calls, tasks }
    }

    /// Breaks every connection and listens again.
    pub(crate) fn restart(&mut self) {
        (self.calls, self.tasks) = listen(&self.path);
    }

    pub(crate) async fn call(&mut self) -> Call {
        tokio::time::timeout(LONG, self.calls.recv()).await.expect("the client calls").unwrap()
    }

    /// Expects the next call to be of this method, from this state on.
    pub(crate) async fn expect(&mut self, method: &str, instance_id: u64, rev: u64) -> Call {
        let call = self.call().await;
        assert_eq!((&*call.method, call.instance_id, call.rev), (method, instance_id, rev));
        call
    }

    /// Expects the next call to be of this method.
    pub(crate) async fn expect_method(&mut self, method: &str) -> Call {
        let call = self.call().await;
        assert_eq!(call.method, method);
        call
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn listen(path: &Path) -> (mpsc::Receiver<Call>, JoinSet<()>) {
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).unwrap();
    let (calls, received) = mpsc::channel(1);
    let mut tasks = JoinSet::new();
    tasks.spawn(accept(listener, calls));
    (received, tasks)
}

async fn accept(listener: UnixListener, calls: mpsc::Sender<Call>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let calls = calls.clone();
        connections.spawn(async move {
            let service = service_fn(move |request| answer(request, calls.clone()));
            let http2 = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            let _ = http2.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    calls: mpsc::Sender<Call>,
) -> Result<Response<StreamBody<impl futures_util::Stream<Item = BodyFrame>>>, Infallible> {
    let path = request.uri().path().to_owned();
    let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let (frames, received) = mpsc::channel(1);
    let message = body.get(5..).unwrap_or_default();
    let mut call = Call {
        method: path.rsplit('/').next().unwrap().into(),
        instance_id: 0,
        rev: 0,
        follow_stale: None,
        required: None,
        backend: None,
        frames,
    };
    match &*path {
        "/localnetv1.Endpoints/Next" => {
            let asked = local::NextFilter::decode(message).unwrap();
            (call.instance_id, call.rev) = (asked.instance_id, asked.rev);
            call.follow_stale = asked.follow_stale.then_some(asked.stale);
            call.required = asked.required_endpoint_conditions;
        }
        "/keelson.endpoints.v1.Endpoints/Watch" => {
            let asked = pb::WatchRequest::decode(message).unwrap();
            (call.instance_id, call.rev) = (asked.instance_id, asked.rev);
            call.required = asked.required_endpoint_conditions;
        }
        "/keelson.endpoints.v1.Endpoints/Report" => {
            let backend = pb::Backend::decode(message).unwrap();
            (call.instance_id, call.rev) = (backend.instance_id, backend.rev);
            call.backend = Some(backend);
        }
        other => panic!("a call of {other}"),
    }
    let _ = calls.send(call).await;
    let frames = unfold(received, |mut received| async { Some((received.recv().await?, received)) });
    let answer = Response::builder().header("content-type", "application/grpc");
    Ok(answer.body(StreamBody::new(frames)).unwrap())
}

/// A server, and options with its address.
pub(crate) fn started() -> (Server, Options) {
    let (folder, path, options) = place();
    let mut server = Server::start(path);
    server.folder = Some(folder);
    (server, options)
}

/// A folder for a socket, and options with its address and short delays.
pub(crate) fn place() -> (tempfile::TempDir, PathBuf, Options) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("endpoints.sock");
    let target: Target = format!("unix://{}", path.display()).parse().unwrap();
    let options = Options { target, error_delay: Duration::from_millis(16), ..Options::default() };
    (folder, path, options)
}
