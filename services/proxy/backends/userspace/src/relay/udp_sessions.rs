//! Sessions of UDP, by client.
//!
//! Owns: [`Session`], [`UdpSessions`] of one listener and [`ShortSessions`] of all. In: sessions that begin. Out: sessions
//! that end, because their endpoint is gone or for new ones.

use std::{
    collections::{HashMap, VecDeque},
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use keelson_proxy::model::Endpoint;
use socket2::SockRef;
use tokio::net::UdpSocket;
use tokio_util::sync::CancellationToken;

use super::SessionCount;

/// The sessions of a listener.
#[derive(Debug, Default)]
pub(super) struct UdpSessions(Mutex<HashMap<SocketAddr, Arc<Session>>>);

/// A client's way to one endpoint.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: u64,
    pub(super) endpoint: Endpoint,
    pub(super) socket: UdpSocket,
    begun: Instant,
    /// Milliseconds after `begun` of the last datagram, in either direction.
    last: AtomicU64,
    pub(super) has_reply: AtomicBool,
    /// The client has sent another datagram after a reply.
    pub(super) is_long: AtomicBool,
    pub(super) ended: CancellationToken,
    _count: SessionCount,
}

impl UdpSessions {
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<SocketAddr, Arc<Session>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn end_where(&self, is_gone: impl Fn(Endpoint) -> bool) {
        self.lock().retain(|_, session| {
            let is_gone = is_gone(session.endpoint);
            if is_gone {
                session.ended.cancel();
            }
            !is_gone
        });
    }

    pub(super) fn remove(&self, client: SocketAddr, id: u64) {
        let mut sessions = self.lock();
        if sessions.get(&client).is_some_and(|session| session.id == id) {
            sessions.remove(&client);
        }
    }
}

/// The sessions of all listeners that may end for new ones, the oldest first: those with one exchange, as by conntrack's
/// early drop.
#[derive(Debug, Default)]
pub(super) struct ShortSessions(Mutex<VecDeque<Weak<Session>>>);

impl ShortSessions {
    /// `max`: of all sessions.
    pub(super) fn add(&self, session: &Arc<Session>, max: usize) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= 2 * max.max(1) {
            all.retain(|session| session.strong_count() > 0);
        }
        all.push_back(Arc::downgrade(session));
    }

    /// Ends the oldest one. Its place is free a moment later.
    pub(super) fn end_oldest(&self) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(oldest) = all.pop_front() {
            let session = oldest.upgrade();
            let is_short = |session: &Arc<Session>| {
                !session.is_long.load(Ordering::Relaxed) && !session.ended.is_cancelled()
            };
            if let Some(session) = session.filter(is_short) {
                session.ended.cancel();
                return;
            }
        }
    }
}

impl Session {
    pub(super) fn new(id: u64, endpoint: Endpoint, socket: UdpSocket, count: SessionCount) -> Self {
        Self {
            id,
            endpoint,
            socket,
            begun: Instant::now(),
            last: AtomicU64::new(0),
            has_reply: AtomicBool::new(false),
            is_long: AtomicBool::new(false),
            ended: CancellationToken::new(),
            _count: count,
        }
    }

    pub(super) fn touch(&self) {
        let elapsed = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(elapsed, Ordering::Relaxed);
    }

    pub(super) fn idle(&self) -> Duration {
        let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
        self.begun.elapsed().saturating_sub(last)
    }

    /// Without tokio, which does not know yet that a new socket is writable. False: the endpoint's host reported the port
    /// closed, after an earlier datagram.
    pub(super) fn send(&self, datagram: &[u8]) -> bool {
        self.touch();
        let sent = SockRef::from(&self.socket).send(datagram);
        !sent.is_err_and(|error| is_closed(&error))
    }
}

fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset)
}
