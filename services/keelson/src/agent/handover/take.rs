//! Handover in the agent that starts: takes over from one that is stopping.
//!
//! Owns: the search for a predecessor, and the connection to it. In: the path of the handover socket. Out:
//! [`Predecessor`] with its pulls and sockets, `None` if there is none, or an error if one runs that does not stop.

use std::{
    io,
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::Path,
    time::Duration,
};

use keelson_actor_system::inspect::Mailbox;
use keelson_pulls::{
    coordinator::{HandedState, PullCoordinator, PullEvent},
    metrics::HandoverResult,
    request::PullId,
};
use tokio::{
    net::UnixStream,
    time::{Instant, timeout},
};

use super::{
    super::sockets::{CRI, DEBUG, TIMEOUT},
    HANDOVER,
    wire::{self, Frame, VERSION},
};

/// Interval of checks.
const PAUSE: Duration = Duration::from_millis(50);
/// Timeout of one answer.
const ANSWER: Duration = Duration::from_secs(2);
/// Timeout of the state: the predecessor finishes journal writes first.
const STATE: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub(crate) struct Predecessor {
    pub(crate) state: HandedState,
    pub(crate) cri: Option<UnixListener>,
    pub(crate) debug: Option<UnixListener>,
    pub(crate) handover: Option<UnixListener>,
    pub(crate) link: Link,
}

#[derive(Debug)]
pub(crate) struct Search {
    pub(crate) predecessor: Option<Predecessor>,
    /// For the metric; `None` if no agent was stopping.
    pub(crate) result: Option<HandoverResult>,
}

#[derive(Debug)]
pub(crate) struct Link(UnixStream);

/// The result of a check of the socket.
enum SocketCheck {
    NoListener,
    /// It does not answer, or not yet.
    Unclear(String),
    Running(u32),
    /// It is stopping, and has another version: it ends by itself.
    Foreign,
    Taken(Box<Predecessor>),
}

#[derive(Debug, thiserror::Error)]
#[error("another agent (pid {pid}) is using this CRI socket; stop it or set cri.listen")]
pub(crate) struct StillRunning {
    pid: u32,
}

/// Takes over if there is an agent that is stopping.
pub(crate) async fn take_over(path: &Path) -> Result<Search, StillRunning> {
    let mut until = Instant::now() + TIMEOUT;
    let (mut is_logged, mut was_foreign) = (false, false);
    loop {
        let seen = check_socket(path).await;
        let over = Instant::now() >= until;
        match &seen {
            SocketCheck::NoListener => {
                let result = was_foreign.then_some(HandoverResult::OTHER_VERSION);
                return Ok(Search { predecessor: None, result });
            }
            SocketCheck::Running(pid) if over => return Err(StillRunning { pid: *pid }),
            SocketCheck::Unclear(reason) if over => {
                tracing::warn!(socket = %path.display(), reason, "cannot take over from the previous agent");
                return Ok(Search { predecessor: None, result: Some(HandoverResult::FAILED) });
            }
            SocketCheck::Foreign => {
                if !std::mem::replace(&mut was_foreign, true) {
                    tracing::warn!(
                        socket = %path.display(),
                        version = VERSION,
                        "the previous agent uses another version of the handover protocol; waiting until it exits"
                    );
                }
                until = Instant::now() + TIMEOUT;
            }
            SocketCheck::Running(_) | SocketCheck::Unclear(_) => {}
            SocketCheck::Taken(_) => {}
        }
        if let SocketCheck::Taken(predecessor) = seen {
            let result = Some(HandoverResult::TAKEN_OVER);
            return Ok(Search { predecessor: Some(*predecessor), result });
        }
        if !std::mem::replace(&mut is_logged, true) {
            tracing::info!(socket = %path.display(), patience = ?TIMEOUT, "waiting for the previous agent");
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn check_socket(path: &Path) -> SocketCheck {
    let stream = match UnixStream::connect(path).await {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return SocketCheck::NoListener;
        }
        Err(error) => return SocketCheck::Unclear(error.to_string()),
    };
    match request_state(stream).await {
        Ok(seen) => seen,
        Err(error) => SocketCheck::Unclear(error.to_string()),
    }
}

async fn request_state(mut stream: UnixStream) -> io::Result<SocketCheck> {
    let hello = Frame::Hello { version: VERSION, pid: std::process::id() };
    timeout(ANSWER, wire::write(&mut stream, &hello)).await??;
    match timeout(ANSWER, wire::read_greeting(&mut stream)).await?? {
        Frame::Status { pid, is_stopping: false, .. } => return Ok(SocketCheck::Running(pid)),
        Frame::Status { version, .. } if version != VERSION => return Ok(SocketCheck::Foreign),
        Frame::Status { .. } => {}
        _ => return Err(io::ErrorKind::InvalidData.into()),
    }
    timeout(ANSWER, wire::write(&mut stream, &Frame::Take)).await??;
    let Frame::State { state, sockets } = timeout(STATE, wire::read(&mut stream)).await?? else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let (mut cri, mut debug, mut handover) = (None, None, None);
    for name in sockets {
        let socket: OwnedFd = timeout(ANSWER, wire::receive_socket(&stream)).await??;
        match name.as_str() {
            CRI => cri = Some(socket.into()),
            DEBUG => debug = Some(socket.into()),
            HANDOVER => handover = Some(socket.into()),
            // Of a newer agent: not needed here.
            _ => {}
        }
    }
    Ok(SocketCheck::Taken(Box::new(Predecessor { state: *state, cri, debug, handover, link: Link(stream) })))
}

impl Link {
    /// Tells the predecessor that connections are accepted here, then passes the ends of pulls that continue
    /// in the predecessor to the coordinator; returns when the predecessor has exited.
    pub(crate) async fn follow(self, pulls: Mailbox<PullCoordinator>) {
        // A separate task: if it panics, the pulls must not wait for a process that is not read from any more.
        let _ = actix::spawn(self.receive_ends(pulls.clone())).await;
        pulls.deliver(PullEvent::PredecessorGone);
    }

    async fn receive_ends(mut self, pulls: Mailbox<PullCoordinator>) {
        if let Err(error) = wire::write(&mut self.0, &Frame::Serving).await {
            tracing::warn!(%error, "the previous agent exited");
        }
        loop {
            match wire::read(&mut self.0).await {
                Ok(Frame::Ended(end)) => {
                    pulls.deliver(PullEvent::PredecessorEnded { pull: PullId(end.pull), how: end.how });
                }
                Ok(_) => {}
                Err(error) => {
                    if error.kind() != io::ErrorKind::UnexpectedEof {
                        tracing::warn!(%error, "lost the connection to the previous agent");
                    }
                    return;
                }
            }
        }
    }
}
