//! Writes everything that a connection sends in one poll with one system call.
//!
//! Owns: the bytes of a socket that are not written yet. In: the writes of h2, two or three per answer (head, payload,
//! trailers). Out: one `write` of all of them after the task of the connection has polled it, so that the peer is woken
//! once. h2 flushes after every payload; only its poller knows when it is done, so [`Corked::drive`] flushes. What a
//! connection sends right after a read is mostly protocol (the runtime's gRPC library sends a PING with every answer).
//! It is written after the tasks that wait for what was read have run: a write costs as much as the rest of passing an
//! answer.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Above this size the buffer is written before more is taken: four DATA frames.
const MAX_BUFFERED: usize = 64 * 1024;
/// A buffer larger than this is freed when it is empty.
const KEEP: usize = 16 * 1024;

/// How many times other tasks run first after a read: the task of a call, then the other connection that it writes to.
const TURNS: u8 = 2;

#[derive(Debug)]
struct Inner<T> {
    io: T,
    out: BytesMut,
    /// Something was read since the last write.
    has_read: bool,
    /// How many times other tasks ran first since then.
    turns: u8,
}

/// Clones share the socket: h2 has one, its poller the other.
#[derive(Debug)]
pub(super) struct Corked<T>(Arc<Mutex<Inner<T>>>);

impl<T> Clone for Corked<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Corked<T> {
    pub(super) fn new(io: T) -> Self {
        Self(Arc::new(Mutex::new(Inner { io, out: BytesMut::new(), has_read: false, turns: 0 })))
    }

    /// Both run in one task, so this never waits.
    fn inner(&self) -> MutexGuard<'_, Inner<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls the connection, then writes what it has sent. The connection finds an error of the socket when it reads.
    pub(super) fn drive<R>(
        &self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<R>,
    ) -> Poll<R> {
        let polled = poll(cx);
        let mut inner = self.inner();
        if polled.is_pending() && inner.yields_turn() {
            cx.waker().wake_by_ref();
            return polled;
        }
        // Pending: the socket wakes this task when it has room, and the rest is written then.
        let _ = inner.poll_drain(cx);
        polled
    }
}

impl<T: AsyncWrite + Unpin> Inner<T> {
    fn yields_turn(&mut self) -> bool {
        let first = self.has_read && self.turns < TURNS && !self.out.is_empty();
        self.has_read &= first;
        self.turns = if first { self.turns + 1 } else { 0 };
        first
    }

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
        if self.out.len() >= MAX_BUFFERED {
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
        let mut inner = self.inner();
        let before = buf.filled().len();
        let read = Pin::new(&mut inner.io).poll_read(cx, buf);
        inner.has_read |= buf.filled().len() > before;
        read
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

    /// Does nothing: [`Corked::drive`] flushes.
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

    /// The tasks that wait for what was read go first, but not indefinitely.
    #[tokio::test]
    async fn read_bytes_are_handled_before_writes_go_out() {
        let (near, mut far) = tokio::io::duplex(1024);
        let corked = Corked::new(near);
        let order = Arc::new(Mutex::new(Vec::new()));
        let (has_read, mut hears) = tokio::sync::mpsc::unbounded_channel();
        let connection = tokio::spawn({
            let mut io = corked.clone();
            async move {
                poll_fn(|cx| {
                    corked.drive(cx, |cx| {
                        let mut byte = [0];
                        let mut buf = ReadBuf::new(&mut byte);
                        while Pin::new(&mut io).poll_read(cx, &mut buf).is_ready() && !buf.filled().is_empty()
                        {
                            has_read.send(buf.filled()[0]).expect("a call waits");
                            buf.clear();
                            assert!(Pin::new(&mut io).poll_write(cx, b"p").is_ready());
                        }
                        Poll::<()>::Pending
                    })
                })
                .await;
            }
        });
        let call = tokio::spawn({
            let order = order.clone();
            async move {
                while let Some(byte) = hears.recv().await {
                    let order = order.clone();
                    // As a call wakes the connection to its client.
                    tokio::spawn(async move { order.lock().expect("order").push(byte) });
                }
            }
        });
        for _ in 0..3 {
            far.write_all(b"a").await.expect("writes");
            let mut answer = [0];
            far.read_exact(&mut answer).await.expect("reads");
            order.lock().expect("order").push(answer[0]);
        }
        assert_eq!(order.lock().expect("order").as_slice(), b"apapap");
        connection.abort();
        call.abort();
    }

    /// A peer that sends without pause is answered.
    #[test]
    fn a_write_waits_for_two_turns_at_most() {
        let mut inner = Inner { io: Writes::default(), out: BytesMut::from("x"), has_read: false, turns: 0 };
        assert!(!inner.yields_turn(), "nothing was read");
        let waits: Vec<bool> = std::iter::repeat_with(|| {
            inner.has_read = true;
            inner.yields_turn()
        })
        .take(6)
        .collect();
        assert_eq!(waits, [true, true, false, true, true, false]);
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
            // Only once the writer is stuck.
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
        assert!(most < MAX_BUFFERED + 16_384, "{most} bytes were kept");
        assert!(corked.inner().out.capacity() <= KEEP);
        assert!(reading.await.expect("reads"));
    }
}
