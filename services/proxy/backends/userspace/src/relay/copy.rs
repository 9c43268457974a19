//! Copies between two TCP connections, both ways.
//!
//! Owns: [`copy_both`], [`Pipes`]. In: two connections. Out: their data, each end of stream as it came (half-close).
//!
//! On Linux the data stays in the kernel (splice). A pipe is in use only while data passes, so that idle connections
//! hold none.

use std::io;

use socket2::SockRef;
use tokio::net::TcpStream;

#[cfg(target_os = "linux")]
pub(crate) use self::linux::Pipes;
#[cfg(not(target_os = "linux"))]
pub(crate) use self::portable::Pipes;

/// Returns when both sides have ended their stream, or with the first error.
pub(super) async fn copy_both(client: &TcpStream, endpoint: &TcpStream, pipes: &Pipes) -> io::Result<()> {
    tokio::try_join!(copy(client, endpoint, pipes), copy(endpoint, client, pipes))?;
    Ok(())
}

async fn copy(from: &TcpStream, to: &TcpStream, pipes: &Pipes) -> io::Result<()> {
    while pipes.pass(from, to).await? {}
    match SockRef::from(to).shutdown(std::net::Shutdown::Write) {
        // It has ended already.
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
        done => done,
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::{
        io,
        os::fd::OwnedFd,
        sync::{Mutex, PoisonError},
    };

    use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
    use tokio::{io::Interest, net::TcpStream};

    /// Bytes of a pipe, if the kernel permits it (`fs.pipe-user-pages-soft`); 64 KiB otherwise.
    const PIPE_BYTES: usize = 512 * 1024;

    /// Unused pipes that are kept: two file descriptors each.
    const MAX_IDLE: usize = 32;

    #[derive(Debug)]
    struct Pipe {
        read: OwnedFd,
        write: OwnedFd,
    }

    impl Pipe {
        fn new() -> io::Result<Self> {
            let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
            // A smaller pipe works, too.
            let _ = fcntl_setpipe_size(&write, PIPE_BYTES);
            Ok(Self { read, write })
        }
    }

    /// Empty pipes for the next transfer.
    #[derive(Debug, Default)]
    pub(crate) struct Pipes(Mutex<Vec<Pipe>>);

    impl Pipes {
        fn take(&self) -> io::Result<Pipe> {
            let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
            kept.map_or_else(Pipe::new, Ok)
        }

        /// `pipe` is empty.
        fn keep(&self, pipe: Pipe) {
            let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if kept.len() < MAX_IDLE {
                kept.push(pipe);
            }
        }

        /// Waits for data and passes all that has come; false: the stream has ended.
        pub(crate) async fn pass(&self, from: &TcpStream, to: &TcpStream) -> io::Result<bool> {
            from.readable().await?;
            let pipe = self.take()?;
            loop {
                let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
                // The pipe is empty: an error "would block" is the socket's.
                let read = from.try_io(Interest::READABLE, || {
                    Ok(splice(from, None, &pipe.write, None, PIPE_BYTES, flags)?)
                });
                let mut left = match read {
                    Ok(0) => {
                        self.keep(pipe);
                        return Ok(false);
                    }
                    Ok(read) => read,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.keep(pipe);
                        return Ok(true);
                    }
                    Err(error) => return Err(error),
                };
                while left > 0 {
                    // A pipe that still has data is closed with its connection, and never reused.
                    left -= to
                        .async_io(Interest::WRITABLE, || Ok(splice(&pipe.read, None, to, None, left, flags)?))
                        .await?;
                }
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod portable {
    use std::{cell::RefCell, io};

    use tokio::{io::Interest, net::TcpStream};

    const BUFFER_BYTES: usize = 64 * 1024;

    thread_local! {
        static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; BUFFER_BYTES]);
    }

    /// Buffers for the next transfer: one per thread.
    #[derive(Debug, Default)]
    pub(crate) struct Pipes;

    impl Pipes {
        /// Waits for data and passes all that has come; false: the stream has ended.
        pub(crate) async fn pass(&self, from: &TcpStream, to: &TcpStream) -> io::Result<bool> {
            from.readable().await?;
            let (read, rest) = match BUFFER.with_borrow_mut(|buffer| pass_once(from, to, buffer)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                passed => passed?,
            };
            let mut rest = rest.as_slice();
            while !rest.is_empty() {
                let written = to.async_io(Interest::WRITABLE, || to.try_write(rest)).await?;
                rest = rest.get(written..).unwrap_or_default();
            }
            Ok(read != 0)
        }
    }

    /// How much was read, and what could not be written yet.
    fn pass_once(from: &TcpStream, to: &TcpStream, buffer: &mut [u8]) -> io::Result<(usize, Vec<u8>)> {
        let read = from.try_read(buffer)?;
        let data = buffer.get(..read).unwrap_or_default();
        let written = match to.try_write(data) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            written => written?,
        };
        Ok((read, data.get(written..).unwrap_or_default().to_vec()))
    }
}
