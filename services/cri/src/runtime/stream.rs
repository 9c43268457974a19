//! The stream to the runtime, with a notification when it is closed.
//!
//! Owns: [`Watched`]. In: a connected socket. Out: the same, and a notification when it is dropped: the HTTP/2
//! connection that owns it drops it as soon as the peer closes it, whether a call runs or not.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
    sync::Notify,
};

/// A socket that notifies when it is dropped.
#[derive(Debug)]
pub(super) struct Watched {
    stream: UnixStream,
    closed: Arc<Notify>,
}

impl Watched {
    /// Wraps `stream` for the HTTP/2 client.
    pub(super) fn new(stream: UnixStream, closed: Arc<Notify>) -> TokioIo<Self> {
        TokioIo::new(Self { stream, closed })
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // Stored if no task waits at this moment.
        self.closed.notify_one();
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, to)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, from)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, from)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
