//! A stream that records the HTTP/2 frames that pass.
//!
//! Owns: the parsing of frame heads. In: bytes read from a peer. Out: the frames that the peer sent.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

const PREFACE: usize = 24;
const HEAD: usize = 9;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) length: usize,
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
}

impl Frame {
    pub(crate) const RST_STREAM: u8 = 3;
    pub(crate) const PING: u8 = 6;
    pub(crate) const GOAWAY: u8 = 7;
}

#[derive(Debug, Default)]
struct Parser {
    skip: usize,
    head: Vec<u8>,
    frames: Vec<Frame>,
}

impl Parser {
    fn feed(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            let taken = bytes.len().min(HEAD - self.head.len());
            self.head.extend_from_slice(&bytes[..taken]);
            bytes = &bytes[taken..];
            if let [a, b, c, kind, flags, d, e, f, g] = *self.head {
                self.skip = u32::from_be_bytes([0, a, b, c]) as usize;
                let stream = u32::from_be_bytes([d & 0x7f, e, f, g]);
                self.frames.push(Frame { length: self.skip, kind, flags, stream });
                self.head.clear();
            }
        }
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Frames(Arc<Mutex<Parser>>);

impl Frames {
    pub(crate) fn of_kind(&self, kind: u8) -> Vec<Frame> {
        self.0.lock().expect("parser").frames.iter().copied().filter(|frame| frame.kind == kind).collect()
    }
}

pub(crate) struct Tap<T> {
    inner: T,
    frames: Frames,
}

impl<T> Tap<T> {
    /// `server`: this side is the server, so the peer begins with the preface.
    pub(crate) fn new(inner: T, server: bool) -> (Self, Frames) {
        let parser = Parser { skip: if server { PREFACE } else { 0 }, ..Parser::default() };
        let frames = Frames(Arc::new(Mutex::new(parser)));
        (Self { inner, frames: frames.clone() }, frames)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Tap<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        self.frames.0.lock().expect("parser").feed(&buf.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Tap<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
