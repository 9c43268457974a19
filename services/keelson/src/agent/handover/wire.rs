//! The protocol of the handover socket.
//!
//! Owns: frames (a length of four bytes, then JSON) and the passing of listening sockets. In: one connection. Out:
//! [`Frame`]s, and file descriptors, each with a byte of its own.
//!
//! ```text
//! new agent   Hello ─►            Take ─►                                Serving ─►
//! old agent          ◄─ Status           ◄─ State, one byte per socket              ◄─ Ended ... (until it exits)
//! ```

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use keelson_pulls::coordinator::{HandedEnd, HandedState};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, Interest},
    net::UnixStream,
};

/// Increased when an older agent cannot process the frames of a newer one. Added fields do not require that.
pub(super) const VERSION: u32 = 1;
/// Ten thousand pulls take some 4 MB.
const MAX_FRAME: usize = 256 * 1024 * 1024;
/// For the frames before the state, which come from processes that have not identified themselves yet.
const MAX_GREETING: usize = 4096;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Frame {
    Hello {
        version: u32,
        pid: u32,
    },
    Status {
        version: u32,
        pid: u32,
        is_stopping: bool,
    },
    Take,
    /// The complete state. One byte with a descriptor follows for each socket.
    State {
        state: Box<HandedState>,
        sockets: Vec<String>,
    },
    /// The successor accepts connections: nothing is handed to another one any more.
    Serving,
    /// A pull that continued in the old agent ended there.
    Ended(HandedEnd),
}

pub(super) async fn write(stream: &mut UnixStream, frame: &Frame) -> io::Result<()> {
    let body = serde_json::to_vec(frame)?;
    let length = u32::try_from(body.len()).map_err(|_| invalid("the frame is too large"))?;
    stream.write_all(&length.to_be_bytes()).await?;
    stream.write_all(&body).await
}

/// The next frame.
///
/// # Errors
/// The connection ended (`UnexpectedEof`) or broke, or the data is not a frame (`InvalidData`).
pub(super) async fn read(stream: &mut UnixStream) -> io::Result<Frame> {
    read_at_most(stream, MAX_FRAME).await
}

/// As [`read`], for one of the frames before the state.
pub(super) async fn read_greeting(stream: &mut UnixStream) -> io::Result<Frame> {
    read_at_most(stream, MAX_GREETING).await
}

async fn read_at_most(stream: &mut UnixStream, limit: usize) -> io::Result<Frame> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).await?;
    let length = u32::from_be_bytes(length) as usize;
    if length > limit {
        return Err(invalid("the frame is too large"));
    }
    // Grown as bytes arrive: the length may be false.
    let mut body = Vec::new();
    (&mut *stream).take(length as u64).read_to_end(&mut body).await?;
    if body.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    serde_json::from_slice(&body).map_err(io::Error::from)
}

fn invalid(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

pub(super) async fn send_socket(stream: &UnixStream, socket: BorrowedFd<'_>) -> io::Result<()> {
    stream
        .async_io(Interest::WRITABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let sockets = [socket];
            control.push(SendAncillaryMessage::ScmRights(&sockets));
            sendmsg(stream.as_fd(), &[IoSlice::new(b"s")], &mut control, SendFlags::empty())?;
            Ok(())
        })
        .await
}

/// Receives one socket. Must be called exactly where one was sent: other reads would lose it.
pub(super) async fn receive_socket(stream: &UnixStream) -> io::Result<OwnedFd> {
    stream
        .async_io(Interest::READABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut byte = [0];
            let received = recvmsg(
                stream.as_fd(),
                &mut [IoSliceMut::new(&mut byte)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            )?;
            if received.bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let sockets = control.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut sockets) => sockets.next(),
                _ => None,
            });
            sockets.ok_or_else(|| invalid("an announced socket was not received"))
        })
        .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_and_sockets_come_in_order() {
        let (mut near, mut far) = UnixStream::pair().expect("a pair");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("binds");
        let sender = async {
            let state = Frame::State { state: Box::default(), sockets: vec!["cri".into(), "debug".into()] };
            write(&mut near, &state).await.expect("writes");
            send_socket(&near, listener.as_fd()).await.expect("sends");
            send_socket(&near, listener.as_fd()).await.expect("sends");
            write(&mut near, &Frame::Serving).await.expect("writes");
        };
        let receiver = async {
            assert!(matches!(read(&mut far).await, Ok(Frame::State { sockets, .. }) if sockets.len() == 2));
            let first = receive_socket(&far).await.expect("a socket");
            receive_socket(&far).await.expect("another");
            assert!(matches!(read(&mut far).await, Ok(Frame::Serving)));
            std::os::unix::net::UnixListener::from(first)
        };
        let ((), received) = tokio::join!(sender, receiver);
        drop(listener);
        let _client = std::os::unix::net::UnixStream::connect(&path).expect("the received socket listens");
        received.accept().expect("and accepts");
    }

    #[tokio::test]
    async fn garbage_is_an_error_and_takes_no_memory() {
        for garbage in [&b"\xff\xff\xff\xffx"[..], b"\x00\x00\x00\x02{}", b"\x0f\x00\x00\x00abc", b"\x00"] {
            let (mut near, mut far) = UnixStream::pair().expect("a pair");
            near.write_all(garbage).await.expect("writes");
            drop(near);
            assert!(read(&mut far).await.is_err(), "{garbage:?}");
        }
    }

    /// I8: the first frame of an unknown process is small, or refused by its length alone.
    #[tokio::test]
    async fn i8_a_greeting_is_small() {
        let (mut near, mut far) = UnixStream::pair().expect("a pair");
        write(&mut near, &Frame::Hello { version: u32::MAX, pid: u32::MAX }).await.expect("writes");
        assert!(matches!(read_greeting(&mut far).await, Ok(Frame::Hello { version: u32::MAX, .. })));
        near.write_all(&4097_u32.to_be_bytes()).await.expect("writes");
        let refused = read_greeting(&mut far).await.expect_err("too large");
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "nothing more was waited for");
    }
}
