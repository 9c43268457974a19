//! A gRPC client's connection.
//!
//! Owns: [`Peer`], the process at the other end, and [`serve`], HTTP/2 on one connection. In: an accepted stream. Out:
//! its requests, to the services; for anything but HTTP/2 a short answer and the end.

use std::{
    fs, io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::Request;
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    net::{TcpStream, UnixStream},
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tower::Service as _;

use super::api::GrpcApi;

/// What an HTTP/2 client sends first (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Maximum time until a client has sent the preface.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// A peer that does not answer a ping is gone, though its socket may be open (a broken network, a stopped process).
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes that a connection buffers for a client that does not read.
pub const SEND_BUFFER: usize = 128 * 1024;
/// Maximum size of the headers of a request.
const HEADERS: u32 = 16 * 1024;
/// Time for an HTTP/1 client (a browser, curl) to read its answer.
const HTTP1_ANSWER_TIME: Duration = Duration::from_secs(1);

/// The process at the other end of a connection. Every request has it as an extension, in an [`Arc`].
#[derive(Debug, Default)]
pub struct Peer {
    /// `pid 1234 (name)` or an address.
    pub name: String,
    /// Name of the listener.
    pub listener: Arc<str>,
    /// The process ID in this process's PID namespace.
    pub pid: Option<u32>,
    /// The user, over a unix socket only.
    pub uid: Option<u32>,
    /// Closes the connection.
    pub close: CancellationToken,
}

impl Peer {
    /// From SO_PEERCRED: the process that connected; another process may hold the connection by now.
    #[must_use]
    pub fn of_unix(stream: &UnixStream, listener: Arc<str>) -> Self {
        let peer = stream.peer_cred().ok();
        let pid = peer.and_then(|peer| peer.pid()).filter(|pid| *pid > 0);
        let name = match pid {
            Some(pid) => match command(pid) {
                Some(command) => format!("pid {pid} ({command})"),
                None => format!("pid {pid}"),
            },
            // A process of another PID namespace has no number here.
            None => "process in another pid namespace".to_owned(),
        };
        let pid = pid.and_then(|pid| u32::try_from(pid).ok());
        Self { name, listener, pid, uid: peer.map(|peer| peer.uid()), ..Self::default() }
    }

    #[must_use]
    pub fn of_tcp(stream: &TcpStream, listener: Arc<str>) -> Self {
        let name = stream.peer_addr().map_or_else(|_| "gone".to_owned(), |address| address.to_string());
        Self { name, listener, ..Self::default() }
    }
}

/// The process's name, sanitized for a terminal.
fn command(pid: i32) -> Option<String> {
    let name = fs::read(format!("/proc/{pid}/comm")).ok()?;
    let name = String::from_utf8_lossy(name.trim_ascii_end()).into_owned();
    let name: String = name.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    (!name.is_empty()).then_some(name)
}

/// Serves one connection until it ends; after `stop` it accepts no new calls.
pub(super) async fn serve<T>(
    mut io: T,
    peer: Arc<Peer>,
    api: GrpcApi,
    routes: Routes,
    stop: CancellationToken,
) where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let GrpcApi { name: server, .. } = api;
    // Errors of a client's connection are of interest only to a person who debugs that client.
    tokio::select! {
        met = timeout(HANDSHAKE, preface(&mut io, api)) => match met {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                return tracing::debug!(server, peer = peer.name, %error, "gRPC client did not use HTTP/2");
            }
            Err(_) => return tracing::debug!(server, peer = peer.name, "gRPC client sent nothing"),
        },
        () = stop.cancelled() => return,
    }
    let of = peer.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(of.clone());
        routes.clone().call(request)
    });
    let connection =
        builder(api.calls).serve_connection(TokioIo::new(Prefaced { io, first: PREFACE }), service);
    let mut connection = Box::pin(connection);
    let serving = async {
        tokio::select! {
            ended = &mut connection => ended,
            () = stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        }
    };
    // Data that waits for a peer that does not read is dropped with the connection.
    let Some(ended) = peer.close.run_until_cancelled(serving).await else { return };
    if let Err(error) = ended {
        tracing::debug!(server, peer = peer.name, %error, "gRPC connection failed");
    }
}

fn builder(calls: u32) -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIMEOUT)
        .max_concurrent_streams(calls)
        .max_header_list_size(HEADERS)
        .max_send_buf_size(SEND_BUFFER);
    builder
}

/// Reads the preface, and answers a client that sends something else.
async fn preface<T: AsyncRead + AsyncWrite + Unpin>(io: &mut T, api: GrpcApi) -> io::Result<()> {
    let mut first = [0; PREFACE.len()];
    let mut length = 0;
    while length < first.len() {
        match io.read(&mut first[length..]).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            more => length += more,
        }
        if !PREFACE.starts_with(&first[..length]) {
            // An HTTP/1 request begins with a method.
            if first[0].is_ascii_uppercase() {
                let _ = timeout(HTTP1_ANSWER_TIME, answer_http1(io, api)).await;
            }
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer does not use HTTP/2"));
        }
    }
    Ok(())
}

/// Answers, and reads on for a short time: closing with unread bytes would discard the answer.
async fn answer_http1<T: AsyncRead + AsyncWrite + Unpin>(io: &mut T, api: GrpcApi) -> io::Result<()> {
    let text =
        format!("This is the {} of keelson: gRPC over HTTP/2 ({}).\n", api.name, api.services.join(", "));
    let head = "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close";
    let answer = format!("{head}\r\nContent-Length: {}\r\n\r\n{text}", text.len());
    io.write_all(answer.as_bytes()).await?;
    io.shutdown().await?;
    let mut rest = [0; 1024];
    let mut left = 64 * 1024_usize;
    while left > 0 {
        match io.read(&mut rest).await? {
            0 => break,
            more => left = left.saturating_sub(more),
        }
    }
    Ok(())
}

/// A connection whose first bytes were read already and are returned again.
#[derive(Debug)]
struct Prefaced<T> {
    io: T,
    first: &'static [u8],
}

impl<T: AsyncRead + Unpin> AsyncRead for Prefaced<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.first.is_empty() {
            return Pin::new(&mut self.io).poll_read(cx, buf);
        }
        let (now, later) = self.first.split_at(self.first.len().min(buf.remaining()));
        buf.put_slice(now);
        self.first = later;
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Prefaced<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_named_by_its_user_agent() {
        let own = i32::try_from(std::process::id()).expect("a pid");
        assert!(command(own).is_some_and(|name| !name.contains('\n')));
        assert_eq!(command(i32::MAX), None);
    }
}
