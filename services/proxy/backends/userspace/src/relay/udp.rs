//! UDP: receives, and relays the datagrams of each session.
//!
//! Owns: [`receive`]. In: datagrams of clients and endpoints. Out: datagrams,
//! replies from the frontend's own address.
//!
//! A session has a socket of its own to its endpoint. It ends after the idle timeout, when the endpoint is gone, and when
//! the endpoint's host reports its port closed; with one exchange only, such as a DNS lookup, also when there are too
//! many. A datagram that a socket does not take at once is lost, as in a router.

use std::{
    cell::RefCell,
    io,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use keelson_proxy::model::{Endpoint, ServicePort};
use socket2::SockRef;
use tokio::{
    io::Interest,
    net::UdpSocket,
    task::yield_now,
    time::{sleep, timeout},
};

use super::{
    SessionKind,
    socket::connect_udp,
    state::{ListenerState, Watched},
    udp_sessions::Session,
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
    Ok(Some(Arc::new(Session::new(state.shared.next_id(), endpoint, socket, count))))
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
