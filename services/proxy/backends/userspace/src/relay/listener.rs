//! A listener at a place of a frontend.
//!
//! Owns: [`Listener`], and the state that its task and its connections share. In: a socket, rules. Out: accepted
//! connections and datagrams, handed to `tcp` and `udp`.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    ops::Deref,
    sync::{Arc, PoisonError, RwLock, Weak},
};

use keelson_proxy::model::Family;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::{Shared, descriptors::ListeningSlot, socket::ListeningSocket, tcp, udp, udp::UdpSessions};
use crate::plan::{Decision, Rule, SocketKey};

/// Stops listening when it is dropped: TCP connections drain, UDP sessions end.
#[derive(Debug)]
pub(crate) struct Listener {
    state: Arc<ListenerState>,
    /// Where it listens: not the place, if that cannot be bound.
    address: SocketAddr,
    task: JoinHandle<()>,
    socket: OpenSocket,
}

/// Tells whether a socket is still open.
#[derive(Debug, Clone)]
pub(crate) struct OpenSocket(Weak<ListeningSlot>);

impl OpenSocket {
    pub(crate) fn is_closed(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// A socket whose end an [`OpenSocket`] tells.
#[derive(Debug)]
pub(super) struct Watched<T> {
    // In this order: the count is zero only after the socket is closed.
    socket: T,
    open: Arc<ListeningSlot>,
}

impl<T> Watched<T> {
    fn new(socket: T, slot: ListeningSlot) -> Self {
        Self { socket, open: Arc::new(slot) }
    }

    fn watch(&self) -> OpenSocket {
        OpenSocket(Arc::downgrade(&self.open))
    }
}

impl<T> Deref for Watched<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.socket
    }
}

#[derive(Debug)]
pub(super) struct ListenerState {
    pub(super) shared: Arc<Shared>,
    pub(super) place: SocketKey,
    rule: RwLock<Arc<Rule>>,
    /// The frontend is gone.
    pub(super) removed: CancellationToken,
    pub(super) udp: UdpSessions,
}

impl Listener {
    pub(super) fn start(
        shared: Arc<Shared>,
        socket: ListeningSocket,
        slot: ListeningSlot,
        place: SocketKey,
        rule: Arc<Rule>,
    ) -> io::Result<Self> {
        let address = socket.local_addr()?;
        let state = Arc::new(ListenerState {
            shared,
            place,
            rule: RwLock::new(rule),
            removed: CancellationToken::new(),
            udp: UdpSessions::default(),
        });
        let (task, socket) = match socket {
            ListeningSocket::Tcp(socket) => {
                let socket = Watched::new(socket, slot);
                let open = socket.watch();
                (tokio::spawn(tcp::accept(state.clone(), socket)), open)
            }
            ListeningSocket::Udp(socket) => {
                let socket = Watched::new(socket, slot);
                let open = socket.watch();
                (tokio::spawn(udp::receive(state.clone(), Arc::new(socket))), open)
            }
        };
        Ok(Self { state, address, task, socket })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether the task ended by itself.
    pub(crate) fn is_dead(&self) -> bool {
        self.task.is_finished()
    }

    /// Changes what new connections meet. UDP sessions of endpoints that are gone end.
    pub(crate) fn set_rule(&self, rule: Arc<Rule>) {
        let port = rule.port.clone();
        *self.state.rule.write().unwrap_or_else(PoisonError::into_inner) = rule;
        self.state.udp.end_where(|endpoint| !udp::serves(&port, endpoint));
    }

    pub(crate) fn socket(&self) -> OpenSocket {
        self.socket.clone()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.state.removed.cancel();
        self.state.udp.end_where(|_| true);
    }
}

impl ListenerState {
    /// Completes when nothing is to listen any more.
    pub(super) async fn closed(&self) {
        tokio::select! {
            () = self.removed.cancelled() => {}
            () = self.shared.stopping.cancelled() => {}
        }
    }

    pub(super) fn rule(&self) -> Arc<Rule> {
        self.rule.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// `destination`: the address that the client sent to.
    pub(super) fn decide<'a>(&self, rule: &'a Rule, source: IpAddr, destination: IpAddr) -> Decision<'a> {
        let facts = self.shared.facts(Family::of(self.place.address.ip()));
        rule.decide(facts.origin(source, destination), source, &facts)
    }

    /// The address to connect from, if endpoints are to see the client's.
    pub(super) fn transparent_source(&self, client: SocketAddr) -> Option<SocketAddr> {
        (self.shared.options.transparent && !client.ip().is_loopback()).then_some(client)
    }
}
