//! The handover socket of a running agent.
//!
//! Owns: that socket. In: agents that start. Out: the status of this agent (running, stopping), and, once it stops, the
//! connection of an agent that wants to take over.

use std::{
    io,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixListener as StdUnixListener,
    },
    path::Path,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use keelson_serve::unix::{Bound, SocketFile};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{mpsc, watch},
    time::timeout,
};

use super::{
    super::{
        jobs::{Job, Jobs},
        sockets::TIMEOUT,
    },
    wire::{self, Frame, VERSION},
};

/// Timeout of one message of the other agent.
const ANSWER: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Offer {
    // Dropped first: an agent that finds no file creates its own.
    file: Option<SocketFile>,
    /// A duplicate of the listener for a successor.
    socket: OwnedFd,
    /// Dropping it ends the answers.
    _serving: watch::Sender<bool>,
    is_stopping: Arc<AtomicBool>,
    successors: mpsc::Receiver<UnixStream>,
}

impl Offer {
    /// Listens at `path`, with the listener of the previous agent if there is one; waits until one that was killed has
    /// left the path.
    /// Another process listens there, or the system refuses.
    pub(crate) async fn bind(
        path: &Path,
        adopted: Option<StdUnixListener>,
        job: &Job,
    ) -> anyhow::Result<Self> {
        let bound = match adopted {
            Some(listener) => Bound::adopted(listener, path)?,
            None => Bound::bind_within(path, 0o600, TIMEOUT).await?,
        };
        let (listener, file) = bound.into_parts();
        let socket = listener.as_fd().try_clone_to_owned()?;
        let is_stopping = Arc::new(AtomicBool::new(false));
        // One at a time: the next one sees the result of the first.
        let (to_main, successors) = mpsc::channel(1);
        let (serving, stop) = watch::channel(false);
        let (listener, label, stopping) =
            (Rc::new(listener), format!("unix://{}", path.display()), is_stopping.clone());
        Jobs::new(stop).keep(job, 0, move |mut attempt| {
            let (listener, stopping, to_main) = (listener.clone(), stopping.clone(), to_main.clone());
            attempt.serves(label.clone());
            async move {
                tokio::select! {
                    biased;
                    () = attempt.stopped() => {}
                    () = serve(&listener, stopping, to_main) => {}
                }
                Ok(())
            }
        });
        Ok(Self { file: Some(file), socket, _serving: serving, is_stopping, successors })
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Leaves the socket file to the successor that has the socket.
    pub(super) fn leave(mut self) {
        self.file.take().into_iter().for_each(SocketFile::disown);
    }

    /// From now on an agent that asks may take over.
    pub(crate) fn stopping(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }

    /// The connection of the next agent that wants to take over.
    pub(crate) async fn successor(&mut self) -> UnixStream {
        match self.successors.recv().await {
            Some(stream) => stream,
            // The job does not end by itself.
            None => std::future::pending().await,
        }
    }
}

async fn serve(listener: &UnixListener, is_stopping: Arc<AtomicBool>, to_main: mpsc::Sender<UnixStream>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let (is_stopping, to_main) = (is_stopping.clone(), to_main.clone());
                tokio::task::spawn_local(async move {
                    if let Err(error) = answer(stream, &is_stopping, &to_main).await {
                        tracing::info!(%error, "process on the handover socket did not take over");
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection on the handover socket");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

async fn answer(
    mut stream: UnixStream,
    is_stopping: &AtomicBool,
    to_main: &mpsc::Sender<UnixStream>,
) -> io::Result<()> {
    let Frame::Hello { version, .. } = timeout(ANSWER, wire::read_greeting(&mut stream)).await?? else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let is_stopping = is_stopping.load(Ordering::Relaxed);
    let status = Frame::Status { version: VERSION, pid: std::process::id(), is_stopping };
    timeout(ANSWER, wire::write(&mut stream, &status)).await??;
    // An agent of another version waits until this one has ended as without a successor.
    if !is_stopping || version != VERSION {
        return Ok(());
    }
    let Frame::Take = timeout(ANSWER, wire::read_greeting(&mut stream)).await?? else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    // Full: another agent is taking over. Closed: one has.
    let _ = to_main.try_send(stream);
    Ok(())
}
