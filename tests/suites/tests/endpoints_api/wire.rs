//! Owns: calls with any body, and HTTP/2 written by hand, for clients that do what no library does.
//! In: sockets, bytes. Out: how calls end; connections.

use anyhow::{Context as _, Result};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, Request, header};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;
use tonic::{Code, Status};

pub(crate) const NEXT: &str = "/localnetv1.Endpoints/Next";
pub(crate) const WATCH: &str = "/keelson.endpoints.v1.Endpoints/Watch";

/// Bytes that may be sent on a stream whose body is not read: HTTP/2's default.
const WINDOW: u32 = 65_535;

/// A connection on which requests with any body are made. Clones share it.
#[derive(Clone)]
pub(crate) struct Connection(SendRequest<Full<Bytes>>);

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: Option<Status>,
    /// The messages before it, with their prefixes.
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn code(&self) -> Option<Code> {
        self.status.as_ref().map(Status::code)
    }
}

impl Connection {
    pub(crate) async fn open(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).await.context("cannot connect")?;
        let (sender, connection) = Builder::new(TokioExecutor::new())
            .initial_stream_window_size(WINDOW)
            .handshake(TokioIo::new(stream))
            .await?;
        tokio::spawn(async move {
            // Requests report how it ends.
            let _ = connection.await;
        });
        Ok(Self(sender))
    }

    pub(crate) async fn call(&mut self, path: &str, body: impl Into<Bytes>) -> Result<Answer> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("http://localhost{path}"))
            .header(header::CONTENT_TYPE, "application/grpc")
            .header(header::TE, "trailers");
        self.request(request.body(Full::new(body.into()))?).await
    }

    /// Any request, to its end.
    pub(crate) async fn request(&mut self, request: Request<Full<Bytes>>) -> Result<Answer> {
        let response = self.response(request).await?;
        let (head, mut body) = response.into_parts();
        let (mut bytes, mut trailers) = (BytesMut::new(), HeaderMap::new());
        while let Some(frame) = body.frame().await {
            match frame.context("the answer broke off")?.into_data() {
                Ok(data) => bytes.extend_from_slice(&data),
                Err(frame) => trailers.extend(frame.into_trailers().unwrap_or_default()),
            }
        }
        let status = Status::from_header_map(&trailers).or_else(|| Status::from_header_map(&head.headers));
        Ok(Answer { status, body: bytes.freeze() })
    }

    /// Any request, up to the head of its response.
    pub(crate) async fn response(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<http::Response<hyper::body::Incoming>> {
        self.0.ready().await.context("the connection is closed")?;
        let answer = tokio::time::timeout(Duration::from_secs(120), self.0.send_request(request)).await;
        answer.context("no answer")?.context("the call failed")
    }
}

pub(crate) fn ask(path: &str) -> Result<Request<Full<Bytes>>> {
    let request = Request::builder()
        .method(Method::POST)
        .uri(format!("http://localhost{path}"))
        .header(header::CONTENT_TYPE, "application/grpc")
        .header(header::TE, "trailers");
    request.body(Full::new(framed(&[]))).context("no request")
}

/// A message with its prefix.
pub(crate) fn framed(message: &[u8]) -> Bytes {
    prefixed(0, message.len(), message)
}

/// A message with another prefix.
pub(crate) fn prefixed(flag: u8, length: usize, message: &[u8]) -> Bytes {
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    [&[flag], &length.to_be_bytes()[..], message].concat().into()
}

/// The first bytes of a client.
pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;

/// An HTTP/2 frame (RFC 9113, section 4.1).
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The opening of a client with the largest flow control windows on its connection and on each stream.
pub(crate) fn opening() -> Vec<u8> {
    let most = (i32::MAX as u32).to_be_bytes();
    let settings = frame(4, 0, 0, &[&[0, 4], &most[..]].concat());
    // The initial window of a connection is 65,535.
    let window = frame(8, 0, 0, &(i32::MAX as u32 - 65_535).to_be_bytes());
    [PREFACE, &settings, &window].concat()
}

/// The HEADERS of a call (RFC 7541, only method and scheme indexed).
pub(crate) fn head(stream: u32, path: &str) -> Vec<u8> {
    // POST, http.
    let mut block = vec![0x83, 0x86];
    // Names 4 and 1 of the static table.
    for (name, value) in [(0x04, path), (0x01, "localhost")] {
        block.push(name);
        literal(&mut block, value);
    }
    for (name, value) in [("content-type", "application/grpc"), ("te", "trailers")] {
        block.push(0);
        literal(&mut block, name);
        literal(&mut block, value);
    }
    frame(1, END_HEADERS, stream, &block)
}

fn literal(block: &mut Vec<u8>, text: &str) {
    // Shorter than 127, and without Huffman coding.
    block.push(u8::try_from(text.len()).unwrap_or(126));
    block.extend_from_slice(text.as_bytes());
}

/// The body of a call, and its end.
pub(crate) fn body(stream: u32, bytes: &[u8]) -> Vec<u8> {
    frame(0, END_STREAM, stream, bytes)
}

/// All bytes of a client that requests the complete state once.
pub(crate) fn unary_call(path: &str) -> Vec<u8> {
    [opening(), head(1, path), body(1, &framed(&[]))].concat()
}
