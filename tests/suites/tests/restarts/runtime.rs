//! Owns: a CRI server inside the test whose pods start when the test lets them. In: calls. Out: the number of pods that
//! are being started. It answers every other call with an empty message.

use anyhow::{Context as _, Result};
use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::{StreamExt as _, stream};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use keelson_harness::scratch::Scratch;
use keelson_proto::cri::VersionResponse;
use prost::Message as _;
use std::convert::Infallible;
use std::path::PathBuf;
use tokio::{net::UnixListener, sync::watch, task::JoinHandle};

/// Starts a pod; the first field of its response is the pod's id.
pub(crate) const RUN_POD: &str = "/runtime.v1.RuntimeService/RunPodSandbox";
/// Streams events; the first field of each is a container's id.
pub(crate) const EVENTS: &str = "/runtime.v1.RuntimeService/GetContainerEvents";

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// A runtime whose pods start after [`SlowRuntime::open`].
pub(crate) struct SlowRuntime {
    socket: PathBuf,
    shared: RuntimeState,
    server: JoinHandle<()>,
}

#[derive(Clone)]
struct RuntimeState {
    open: watch::Sender<bool>,
    starting: watch::Sender<usize>,
}

impl SlowRuntime {
    pub(crate) fn start(scratch: &Scratch) -> Result<Self> {
        let socket = scratch.dir("slow")?.join("cri.sock");
        let listener = UnixListener::bind(&socket).context("cannot listen")?;
        let shared = RuntimeState { open: watch::Sender::new(false), starting: watch::Sender::new(0) };
        let server = tokio::spawn(serve(listener, shared.clone()));
        Ok(Self { socket, shared, server })
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    pub(crate) async fn starting(&self, count: usize) -> Result<()> {
        self.shared.starting.subscribe().wait_for(|starting| *starting == count).await?;
        Ok(())
    }

    pub(crate) fn open(&self) {
        self.shared.open.send_replace(true);
    }
}

impl Drop for SlowRuntime {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn serve(listener: UnixListener, shared: RuntimeState) {
    while let Ok((stream, _)) = listener.accept().await {
        let shared = shared.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request| answer(request, shared.clone()));
            let builder = auto::Builder::new(TokioExecutor::new()).http2_only();
            let _ended = builder.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

/// Counts a pod as ended on drop, however its call ends.
struct Starting(RuntimeState);

impl Drop for Starting {
    fn drop(&mut self) {
        self.0.starting.send_modify(|starting| *starting -= 1);
    }
}

async fn answer(request: Request<Incoming>, shared: RuntimeState) -> Result<Response<Body>, Infallible> {
    let first = |text: &str| VersionResponse { version: text.to_owned(), ..VersionResponse::default() };
    let (message, goes_on) = match request.uri().path() {
        RUN_POD => {
            shared.starting.send_modify(|starting| *starting += 1);
            let _starting = Starting(shared.clone());
            // The sender is in `shared`.
            let _ = shared.open.subscribe().wait_for(|open| *open).await;
            (first("started"), false)
        }
        EVENTS => (first("first"), true),
        path if path.ends_with("/Version") => {
            let version = VersionResponse {
                runtime_name: "slow".to_owned(),
                runtime_version: "1".to_owned(),
                runtime_api_version: "v1".to_owned(),
                ..first("0.1.0")
            };
            (version, false)
        }
        _ => (VersionResponse::default(), false),
    };
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.encoded_len()).unwrap_or(0));
    framed.put(message.encode_to_vec().as_slice());
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let data = stream::iter([Ok(Frame::data(framed.freeze()))]);
    let body = match goes_on {
        true => UnsyncBoxBody::new(StreamBody::new(data.chain(stream::pending()))),
        false => {
            UnsyncBoxBody::new(StreamBody::new(data.chain(stream::iter([Ok(Frame::trailers(trailers))]))))
        }
    };
    let mut response = Response::new(body);
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    Ok(response)
}
