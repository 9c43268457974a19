//! One write for everything that a connection has to say at a time.
//!
//! Owns: a socket's bytes that are not written yet. In: the writes of h2, of which an answer makes two
//! or three: head, payload, trailers. Out: one `write` of all of them, when whoever polls the
//! connection has polled it, so that the peer is woken once. h2 flushes after every payload; only its
//! poller knows when it is done, and so [`Corked::drive`] does the flushing.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// More than this is written before more is taken: four DATA frames.
const ENOUGH: usize = 64 * 1024;
/// A buffer that has grown larger is given back when it is empty.
const KEEP: usize = 16 * 1024;

#[derive(Debug)]
struct Inner<T> {
    io: T,
    out: BytesMut,
}

/// See the module. Clones share the socket: h2 has one, its poller the other.
#[derive(Debug)]
pub(super) struct Corked<T>(Arc<Mutex<Inner<T>>>);

impl<T> Clone for Corked<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Corked<T> {
    pub(super) fn new(io: T) -> Self {
        Self(Arc::new(Mutex::new(Inner { io, out: BytesMut::new() })))
    }

    /// Both run in one task, so this never waits.
    fn inner(&self) -> MutexGuard<'_, Inner<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls the connection, then writes what it had to say. An error of the socket is left for the
    /// connection, which finds it when it reads.
    pub(super) fn drive<R>(
        &self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<R>,
    ) -> Poll<R> {
        let polled = poll(cx);
        // Pending: the socket wakes this task when it has room, and the rest is written then.
        let _ = self.inner().poll_drain(cx);
        polled
    }
}

impl<T: AsyncWrite + Unpin> Inner<T> {
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.out.is_empty() {
            let written = ready!(Pin::new(&mut self.io).poll_write(cx, &self.out))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.out.advance(written);
        }
        if self.out.capacity() > KEEP {
            self.out = BytesMut::new();
        } else {
            // Gives back the room of what was written.
            self.out.clear();
        }
        Poll::Ready(Ok(()))
    }

    fn poll_take(&mut self, cx: &mut Context<'_>, slices: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        if self.out.len() >= ENOUGH {
            ready!(self.poll_drain(cx))?;
        }
        let mut taken = 0;
        for slice in slices {
            self.out.extend_from_slice(slice);
            taken += slice.len();
        }
        Poll::Ready(Ok(taken))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Corked<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner().io).poll_read(cx, buf)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Corked<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.inner().poll_take(cx, &[io::IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.inner().poll_take(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Not yet: see the module.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.inner();
        ready!(inner.poll_drain(cx))?;
        Pin::new(&mut inner.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// Notes every write.
    #[derive(Clone, Default)]
    struct Writes(Arc<Mutex<Vec<Vec<u8>>>>);

    impl Writes {
        fn seen(&self) -> Vec<Vec<u8>> {
            self.0.lock().expect("writes").clone()
        }
    }

    impl AsyncRead for Writes {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    impl AsyncWrite for Writes {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
            self.0.lock().expect("writes").push(buf.to_vec());
            Poll::Ready(Ok(buf.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn writes_wait_for_the_end_of_the_poll_and_go_out_as_one() {
        let writes = Writes::default();
        let corked = Corked::new(writes.clone());
        let mut io = corked.clone();
        poll_fn(|cx| {
            corked.drive(cx, |cx| {
                for piece in [&b"head "[..], b"payload ", b"trailers"] {
                    assert!(matches!(Pin::new(&mut io).poll_write(cx, piece), Poll::Ready(Ok(n)) if n == piece.len()));
                    assert!(matches!(Pin::new(&mut io).poll_flush(cx), Poll::Ready(Ok(()))));
                }
                assert!(writes.seen().is_empty());
                Poll::Ready(())
            })
        })
        .await;
        assert_eq!(writes.seen(), [b"head payload trailers"]);
    }

    #[tokio::test]
    async fn a_peer_that_does_not_read_stops_the_writer_and_loses_nothing() {
        let (near, mut far) = tokio::io::duplex(1000);
        let corked = Corked::new(near);
        let mut io = corked.clone();
        let all: Vec<u8> = (0..1_000_000_u32).map(|i| (i % 251) as u8).collect();
        let mut sent = 0;
        let mut most = 0;
        let expected = all.clone();
        let reading = tokio::spawn(async move {
            // Not before the writer is stuck.
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            let mut came = Vec::new();
            far.read_to_end(&mut came).await.expect("reads");
            came == expected
        });
        poll_fn(|cx| {
            corked.drive(cx, |cx| {
                while sent < all.len() {
                    let end = all.len().min(sent + 16_384);
                    sent += ready!(Pin::new(&mut io).poll_write(cx, &all[sent..end])).expect("writes");
                    most = most.max(corked.inner().out.len());
                }
                Poll::Ready(())
            })
        })
        .await;
        io.shutdown().await.expect("shuts down");
        assert!(most < ENOUGH + 16_384, "{most} bytes were kept");
        assert!(corked.inner().out.capacity() <= KEEP);
        assert!(reading.await.expect("reads"));
    }
}
