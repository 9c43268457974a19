//! A CRI client on raw HTTP/2.

use std::path::Path;

use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::future::poll_fn;
use h2::{RecvStream, SendStream, client::ResponseFuture, client::SendRequest};
use http::{HeaderMap, Request, response};
use prost::Message;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    task::AbortHandle,
};

use super::{Frame, Frames, PULL_IMAGE, Tap, pull_request};

/// An empty message with its prefix.
pub(crate) const EMPTY: Bytes = Bytes::from_static(&[0; 5]);

/// A gRPC message with its prefix.
pub(crate) fn frame(message: &impl Message) -> Bytes {
    frame_bytes(&message.encode_to_vec())
}

pub(crate) fn frame_bytes(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).expect("fits"));
    framed.put_slice(message);
    framed.freeze()
}

pub(crate) fn unframe<M: Message + Default>(body: &[u8]) -> M {
    let length = u32::from_be_bytes(body[1..5].try_into().expect("a prefix")) as usize;
    assert_eq!((body[0], body.len()), (0, length + 5));
    M::decode(&body[5..]).expect("decodes")
}

#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) head: response::Parts,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

impl Reply {
    /// The trailers, or the head of a trailers-only response.
    pub(crate) fn status(&self) -> &HeaderMap {
        self.trailers.as_ref().unwrap_or(&self.head.headers)
    }

    pub(crate) fn code(&self) -> i32 {
        self.status()["grpc-status"].to_str().expect("ascii").parse().expect("a number")
    }

    /// Fails with the error's text unless the call succeeded.
    #[track_caller]
    pub(crate) fn assert_ok(&self) {
        assert_eq!(self.code(), 0, "{}", self.text());
    }

    /// `grpc-message` as sent on the wire.
    pub(crate) fn text(&self) -> &str {
        self.status().get("grpc-message").map_or("", |value| value.to_str().expect("ascii"))
    }
}

/// A call whose request is not finished.
pub(crate) struct Sending {
    pub(crate) response: ResponseFuture,
    pub(crate) body: SendStream<Bytes>,
}

impl Sending {
    /// The answer; the request's body stays open until it is complete.
    pub(crate) async fn reply(self) -> Result<Reply, h2::Error> {
        let (head, mut body) = self.response.await?.into_parts();
        let bytes = read(&mut body).await?;
        let trailers = poll_fn(|cx| body.poll_trailers(cx)).await?;
        Ok(Reply { head, body: bytes, trailers })
    }
}

/// Everything until trailers or the end.
pub(crate) async fn read(body: &mut RecvStream) -> Result<Bytes, h2::Error> {
    let mut bytes = BytesMut::new();
    while let Some(data) = poll_fn(|cx| body.poll_data(cx)).await {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
        bytes.put(data);
    }
    Ok(bytes.freeze())
}

/// Sends everything, as fast as the windows allow.
pub(crate) async fn write(to: &mut SendStream<Bytes>, mut data: Bytes, end: bool) -> Result<(), h2::Error> {
    while !data.is_empty() {
        to.reserve_capacity(data.len());
        let room = poll_fn(|cx| to.poll_capacity(cx)).await.expect("an open stream")?;
        let piece = data.split_to(room.min(data.len()));
        to.send_data(piece, end && data.is_empty())?;
    }
    Ok(())
}

pub(crate) struct Client {
    sender: SendRequest<Bytes>,
    pub(crate) frames: Frames,
    connection: AbortHandle,
}

impl Client {
    pub(crate) async fn connect(socket: &Path) -> Self {
        let mut builder = h2::client::Builder::new();
        // As grpc-go, which has no such limits.
        builder.max_local_error_reset_streams(None).data_frame_budget(usize::MAX);
        Self::connect_with(socket, &builder).await
    }

    pub(crate) async fn connect_with(socket: &Path, builder: &h2::client::Builder) -> Self {
        let stream = UnixStream::connect(socket).await.expect("the front listens");
        let (tap, frames) = Tap::new(stream, false);
        let (sender, connection) = builder.handshake(tap).await.expect("HTTP/2");
        let connection = tokio::spawn(async move { drop(connection.await) }).abort_handle();
        Self { sender, frames, connection }
    }

    /// Drops the connection as a killed process does.
    pub(crate) fn kill(&self) {
        self.connection.abort();
    }

    /// Whether the server still holds the connection.
    pub(crate) fn is_open(&self) -> bool {
        !self.connection.is_finished()
    }

    pub(crate) async fn send(&self, path: &str, headers: &[(&str, &str)], body: Option<Bytes>) -> Sending {
        let mut request = Request::post(format!("http://localhost{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut sender = self.sender.clone().ready().await.expect("an open connection");
        let (response, mut stream) =
            sender.send_request(request.body(()).expect("a request"), false).expect("sends");
        if let Some(body) = body {
            if body.is_empty() {
                stream.send_data(body, true).expect("sends");
            } else {
                write(&mut stream, body, true).await.expect("sends");
            }
        }
        Sending { response, body: stream }
    }

    /// A unary call with its answer, or the error that broke it.
    pub(crate) async fn try_call(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> Result<Reply, h2::Error> {
        self.send(path, headers, Some(body)).await.reply().await
    }

    pub(crate) async fn call(&self, path: &str, body: Bytes) -> Reply {
        self.try_call(path, &[], body).await.expect("an answer")
    }

    pub(crate) async fn pull(&self, image: &str) -> Reply {
        self.call(PULL_IMAGE, frame(&pull_request(image))).await
    }

    /// A pull whose answer is awaited later.
    pub(crate) async fn start_pull(&self, image: &str) -> Sending {
        self.send(PULL_IMAGE, &[], Some(frame(&pull_request(image)))).await
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A client that writes its frames by hand.
pub(crate) struct RawClient {
    stream: Tap<UnixStream>,
    frames: Frames,
}

impl RawClient {
    pub(crate) async fn connect(socket: &Path) -> Self {
        let (mut stream, frames) = Tap::new(UnixStream::connect(socket).await.expect("listens"), false);
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("writes");
        stream.write_all(&Self::frame(4, 0, 0, b"")).await.expect("writes");
        Self { stream, frames }
    }

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).expect("fits").to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    }

    /// POST, http and a path, without an authority; END_STREAM is set.
    pub(crate) fn request(stream: u32, path: &str) -> Vec<u8> {
        let length = u8::try_from(path.len()).ok().filter(|length| *length < 127).expect("fits");
        let block = [&[0x83, 0x86, 0x04, length], path.as_bytes()].concat();
        Self::frame(1, 5, stream, &block)
    }

    /// Only POST: not a valid request.
    pub(crate) fn malformed(stream: u32) -> Vec<u8> {
        Self::frame(1, 5, stream, &[0x83])
    }

    pub(crate) fn cancel(stream: u32) -> Vec<u8> {
        Self::frame(3, 0, stream, &8_u32.to_be_bytes())
    }

    pub(crate) async fn write(&mut self, frames: &[u8]) {
        self.stream.write_all(frames).await.expect("writes");
    }

    /// Reads until the stream has ended; returns whether it was answered.
    pub(crate) async fn answered(&mut self, stream: u32) -> bool {
        loop {
            let of = |kind| self.frames.of_kind(kind).into_iter().filter(move |frame| frame.stream == stream);
            if of(1).any(|frame| frame.flags & 1 == 1) {
                return true;
            }
            if of(Frame::RST_STREAM).next().is_some() || self.stream.read_u8().await.is_err() {
                return false;
            }
        }
    }
}
