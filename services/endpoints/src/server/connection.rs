//! A caller's connection.
//!
//! Owns: [`Peer`], who is at the other end, and [`serve`], HTTP/2 on one connection. In: a stream that was just
//! accepted. Out: its requests, to the services; for anything but HTTP/2 a short answer and the end.

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

/// What an HTTP/2 client says first (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// How long a client may take to say it.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// A peer that does not answer a ping is gone, though its socket may be open (a cut network, a stopped process).
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// Calls at once on one connection.
const STREAMS: u32 = 1024;
/// What may wait for a caller that does not read, beside the chunk at hand.
pub(super) const SEND_BUFFER: usize = 128 * 1024;
/// Headers of a request.
const HEADERS: u32 = 16 * 1024;
/// To whom speaks HTTP/1: a browser, curl.
const HTTP1_ANSWER: &[u8] = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n\
Content-Length: 91\r\nConnection: close\r\n\r\n\
This is the Endpoints API of keelson: gRPC over HTTP/2 (localnetv1, keelson.endpoints.v1).\n";
/// How long such a client may take to read it.
const FAREWELL: Duration = Duration::from_secs(1);

/// Who is at the other end of a connection.
#[derive(Debug, Default)]
pub(super) struct Peer {
    /// `pid 1234 (name)` or an address.
    pub(super) name: String,
    /// The listener's label.
    pub(super) listener: Arc<str>,
    /// The number of the process, as this one numbers processes.
    pub(super) pid: Option<u32>,
    /// Closes the connection.
    pub(super) cut: CancellationToken,
}

impl Peer {
    /// Of a unix socket, by SO_PEERCRED: who connected, though another process may hold the connection by now.
    pub(super) fn of_unix(stream: &UnixStream, listener: Arc<str>) -> Self {
        let pid = stream.peer_cred().ok().and_then(|peer| peer.pid()).filter(|pid| *pid > 0);
        let name = match pid {
            Some(pid) => match command(pid) {
                Some(command) => format!("pid {pid} ({command})"),
                None => format!("pid {pid}"),
            },
            // One of another pid namespace has no number in ours.
            None => "process in another pid namespace".to_owned(),
        };
        let pid = pid.and_then(|pid| u32::try_from(pid).ok());
        Self { name, listener, pid, cut: CancellationToken::new() }
    }

    /// Of a TCP connection.
    pub(super) fn of_tcp(stream: &TcpStream, listener: Arc<str>) -> Self {
        let name = stream.peer_addr().map_or_else(|_| "gone".to_owned(), |address| address.to_string());
        Self { name, listener, pid: None, cut: CancellationToken::new() }
    }
}

/// The name that a process gives itself, made fit for a terminal.
fn command(pid: i32) -> Option<String> {
    let name = fs::read(format!("/proc/{pid}/comm")).ok()?;
    let name = String::from_utf8_lossy(name.trim_ascii_end()).into_owned();
    let name: String = name.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    (!name.is_empty()).then_some(name)
}

/// Serves one connection, to its end; after `stop` it takes no new calls.
pub(super) async fn serve<T>(mut io: T, peer: Arc<Peer>, routes: Routes, stop: CancellationToken)
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    // What is wrong with a stranger's connection is worth no more than a line for who looks for it.
    tokio::select! {
        met = timeout(HANDSHAKE, preface(&mut io)) => match met {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return tracing::debug!(peer = peer.name, %error, "client of the Endpoints API \
                                                                                did not use HTTP/2"),
            Err(_) => return tracing::debug!(peer = peer.name, "client of the Endpoints API sent nothing"),
        },
        () = stop.cancelled() => return,
    }
    let of = peer.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(of.clone());
        routes.clone().call(request)
    });
    let connection = builder().serve_connection(TokioIo::new(Prefaced { io, said: PREFACE }), service);
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
    // What waits for a peer that does not read is given up with the connection.
    let Some(ended) = peer.cut.run_until_cancelled(serving).await else { return };
    if let Err(error) = ended {
        tracing::debug!(peer = peer.name, %error, "connection to the Endpoints API failed");
    }
}

fn builder() -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIMEOUT)
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(HEADERS)
        .max_send_buf_size(SEND_BUFFER);
    builder
}

/// Reads what an HTTP/2 client says first, and answers one that says something else.
async fn preface<T: AsyncRead + AsyncWrite + Unpin>(io: &mut T) -> io::Result<()> {
    let mut said = [0; PREFACE.len()];
    let mut length = 0;
    while length < said.len() {
        match io.read(&mut said[length..]).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            more => length += more,
        }
        if !PREFACE.starts_with(&said[..length]) {
            // An HTTP/1 request begins with a method.
            if said[0].is_ascii_uppercase() {
                let _ = timeout(FAREWELL, farewell(io)).await;
            }
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer does not use HTTP/2"));
        }
    }
    Ok(())
}

/// Answers, and reads on for a little: closing over unread bytes would take the answer back.
async fn farewell<T: AsyncRead + AsyncWrite + Unpin>(io: &mut T) -> io::Result<()> {
    io.write_all(HTTP1_ANSWER).await?;
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

/// A connection whose first bytes were read already and are read again.
#[derive(Debug)]
struct Prefaced<T> {
    io: T,
    said: &'static [u8],
}

impl<T: AsyncRead + Unpin> AsyncRead for Prefaced<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.said.is_empty() {
            return Pin::new(&mut self.io).poll_read(cx, buf);
        }
        let (now, later) = self.said.split_at(self.said.len().min(buf.remaining()));
        buf.put_slice(now);
        self.said = later;
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
    fn the_answer_to_http1_is_as_long_as_it_says() {
        let answer = std::str::from_utf8(HTTP1_ANSWER).expect("text");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{} in {head}", body.len());
    }

    #[test]
    fn a_process_is_named_by_what_it_calls_itself() {
        let own = i32::try_from(std::process::id()).expect("a pid");
        assert!(command(own).is_some_and(|name| !name.contains('\n')));
        assert_eq!(command(i32::MAX), None);
    }
}
