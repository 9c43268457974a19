//! UDP: sessions by client.
//!
//! Owns: [`receive`], [`UdpSessions`] and [`ShortSessions`]. In: datagrams of clients and endpoints. Out: datagrams,
//! replies from the frontend's own address.
//!
//! A session has a socket of its own to its endpoint. It ends after the idle timeout, when the endpoint is gone, and when
//! the endpoint's host reports its port closed; with one exchange only, such as a DNS lookup, also when there are too
//! many. A datagram that a socket does not take at once is lost, as in a router.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use keelson_proxy::model::{Endpoint, ServicePort};
use socket2::SockRef;
use tokio::{
    io::Interest,
    net::UdpSocket,
    task::yield_now,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    SessionCount, SessionKind,
    listener::{ListenerState, Watched},
    socket::connect_udp,
};
use crate::plan::Decision;

/// The longest datagram.
const DATAGRAM_BYTES: usize = 65_535;

/// After this many datagrams, other tasks of the thread have their turn.
const BATCH: usize = 64;

/// Pause after an error of the listening socket, which may repeat.
const ERROR_PAUSE: Duration = Duration::from_millis(10);

const READABLE: Interest = Interest::READABLE.add(Interest::ERROR);

thread_local! {
    // In use only between two await points.
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; DATAGRAM_BYTES]);
}

/// The sessions of a listener.
#[derive(Debug, Default)]
pub(super) struct UdpSessions(Mutex<HashMap<SocketAddr, Arc<Session>>>);

#[derive(Debug)]
struct Session {
    id: u64,
    endpoint: Endpoint,
    socket: UdpSocket,
    begun: Instant,
    /// Milliseconds after `begun` of the last datagram, in either direction.
    last: AtomicU64,
    has_reply: AtomicBool,
    /// The client has sent another datagram after a reply.
    is_long: AtomicBool,
    ended: CancellationToken,
    _count: SessionCount,
}

impl UdpSessions {
    fn lock(&self) -> MutexGuard<'_, HashMap<SocketAddr, Arc<Session>>> {
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

    fn remove(&self, client: SocketAddr, id: u64) {
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
    fn add(&self, session: &Arc<Session>, max: usize) {
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
    fn touch(&self) {
        let elapsed = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(elapsed, Ordering::Relaxed);
    }

    fn idle(&self) -> Duration {
        let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
        self.begun.elapsed().saturating_sub(last)
    }

    /// Without tokio, which does not know yet that a new socket is writable. False: the endpoint's host reported the port
    /// closed, after an earlier datagram.
    fn send(&self, datagram: &[u8]) -> bool {
        self.touch();
        let sent = SockRef::from(&self.socket).send(datagram);
        !sent.is_err_and(|error| is_closed(&error))
    }
}

fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset)
}

pub(super) async fn receive(state: Arc<ListenerState>, socket: Arc<Watched<UdpSocket>>) {
    loop {
        let ready = tokio::select! {
            biased;
            () = state.closed() => break,
            ready = socket.readable() => ready,
        };
        let received = ready.and_then(|()| receive_batch(&state, &socket));
        match received {
            Ok(()) => yield_now().await,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                // An ICMP error of a client that is gone is reported here, too (Windows).
                tracing::debug!(place = %state.place, %error, "cannot receive datagrams of a Service");
                sleep(ERROR_PAUSE).await;
            }
        }
    }
    // The next datagrams of clients would be lost.
    state.udp.end_where(|_| true);
}

fn receive_batch(state: &Arc<ListenerState>, socket: &Arc<Watched<UdpSocket>>) -> io::Result<()> {
    BUFFER.with_borrow_mut(|buffer| {
        for _ in 0..BATCH {
            let (length, client) = socket.try_recv_from(buffer)?;
            forward(state, socket, client, buffer.get(..length).unwrap_or_default());
        }
        Ok(())
    })
}

fn forward(
    state: &Arc<ListenerState>,
    socket: &Arc<Watched<UdpSocket>>,
    client: SocketAddr,
    datagram: &[u8],
) {
    let known = state.udp.lock().get(&client).cloned();
    if let Some(session) = known.filter(|session| !session.ended.is_cancelled()) {
        if session.has_reply.load(Ordering::Relaxed) {
            session.is_long.store(true, Ordering::Relaxed);
        }
        if session.send(datagram) {
            return;
        }
        session.ended.cancel();
    }
    match open(state, client) {
        Ok(Some(session)) => {
            session.send(datagram);
            state.udp.lock().insert(client, session.clone());
            state.shared.short_sessions.add(&session, state.shared.options.max_sessions);
            // A rule that was set in the meantime did not meet this session.
            if state.removed.is_cancelled() || !serves(&state.rule().port, session.endpoint) {
                session.ended.cancel();
            }
            tokio::spawn(reply(state.clone(), socket.clone(), client, session));
        }
        // Dropped or rejected: the client of a UDP socket cannot be told.
        Ok(None) => {}
        Err(error) => {
            if state.shared.may_warn("udp") {
                tracing::warn!(place = %state.place, %error, "cannot open a socket to an endpoint");
            }
        }
    }
}

/// Whether a session to the endpoint may continue: it serves, wherever new sessions go.
pub(super) fn serves(port: &ServicePort, endpoint: Endpoint) -> bool {
    [&port.serving, &port.cluster, &port.local].into_iter().any(|set| set.contains(&endpoint))
}

/// A new session; `None` if the rule or the limit of sessions does not permit it.
fn open(state: &ListenerState, client: SocketAddr) -> io::Result<Option<Arc<Session>>> {
    let rule = state.rule();
    let source = client.ip().to_canonical();
    let Decision::Relay(set) = state.decide(&rule, source, state.place.address.ip()) else { return Ok(None) };
    let Some(choice) = state.shared.choose(&rule.port, source, set, &[]) else { return Ok(None) };
    let endpoint = choice.endpoint;
    let Some(count) = state.shared.count_session(SessionKind::Udp) else { return Ok(None) };
    let socket = connect_udp(SocketAddr::new(endpoint.ip, endpoint.port), state.transparent_source(client))?;
    state.shared.remember(&rule.port, source, endpoint);
    Ok(Some(Arc::new(Session {
        id: state.shared.next_id(),
        endpoint,
        socket,
        begun: Instant::now(),
        last: AtomicU64::new(0),
        has_reply: AtomicBool::new(false),
        is_long: AtomicBool::new(false),
        ended: CancellationToken::new(),
        _count: count,
    })))
}

/// Sends the endpoint's datagrams to the client, until the session ends.
async fn reply(
    state: Arc<ListenerState>,
    frontend: Arc<Watched<UdpSocket>>,
    client: SocketAddr,
    session: Arc<Session>,
) {
    let idle_timeout = state.shared.options.udp_timeout;
    loop {
        let idle = session.idle();
        if idle >= idle_timeout {
            break;
        }
        let ready = tokio::select! {
            biased;
            () = session.ended.cancelled() => break,
            ready = timeout(idle_timeout - idle, session.socket.ready(READABLE)) => ready,
        };
        let Ok(ready) = ready else { continue };
        // An error makes a socket ready without making it readable.
        if ready.as_ref().is_ok_and(|ready| ready.is_error()) {
            break;
        }
        match ready.and_then(|_| reply_batch(&frontend, client, &session)) {
            Ok(()) => yield_now().await,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
    }
    state.udp.remove(client, session.id);
}

fn reply_batch(frontend: &UdpSocket, client: SocketAddr, session: &Session) -> io::Result<()> {
    BUFFER.with_borrow_mut(|buffer| {
        for _ in 0..BATCH {
            let length = session.socket.try_recv(buffer)?;
            session.touch();
            session.has_reply.store(true, Ordering::Relaxed);
            let datagram = buffer.get(..length).unwrap_or_default();
            let _ = SockRef::from(frontend).send_to(datagram, &client.into());
        }
        Ok(())
    })
}
