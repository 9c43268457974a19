//! Connections that end when their peer does not read.
//!
//! Owns: [`Guarded`], a connection that holds its slot, and whose writes fail when its peer reads nothing for
//! [`STALL`].

use std::{
    future::Future as _,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::OwnedSemaphorePermit,
    time::{Instant, Sleep},
};

/// Maximum time that a peer may leave written data unread.
pub(crate) const STALL: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Guarded<IO> {
    io: IO,
    stalled: Option<Pin<Box<Sleep>>>,
    _slot: Option<OwnedSemaphorePermit>,
}

impl<IO> Guarded<IO> {
    pub(crate) fn new(io: IO, slot: Option<OwnedSemaphorePermit>) -> Self {
        Self { io, stalled: None, _slot: slot }
    }

    /// Returns a finished write, and fails a pending one when its time is up.
    fn watched<T>(&mut self, cx: &mut Context<'_>, write: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if write.is_ready() {
            self.stalled = None;
            return write;
        }
        let stalled =
            self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + STALL)));
        ready!(stalled.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer does not read")))
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Guarded<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Guarded<IO> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.io).poll_write(cx, buf);
        self.watched(cx, write)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flush = Pin::new(&mut self.io).poll_flush(cx);
        self.watched(cx, flush)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shutdown = Pin::new(&mut self.io).poll_shutdown(cx);
        self.watched(cx, shutdown)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.watched(cx, write)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_does_not_read_is_closed() {
        let (ours, _theirs) = duplex(16);
        let mut guarded = Guarded::new(ours, None);
        let start = Instant::now();
        let error = guarded.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(start.elapsed(), STALL);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_reads_slowly_is_served() {
        let (ours, mut theirs) = duplex(1);
        let mut guarded = Guarded::new(ours, None);
        let reader = tokio::spawn(async move {
            let mut read = Vec::new();
            let mut byte = [0];
            while theirs.read(&mut byte).await.unwrap() == 1 {
                read.push(byte[0]);
                tokio::time::sleep(STALL - Duration::from_secs(1)).await;
            }
            read
        });
        guarded.write_all(b"slowly").await.unwrap();
        drop(guarded);
        assert_eq!(reader.await.unwrap(), b"slowly");
    }
}
