//! A listener at a place of a frontend.
//!
//! Owns: [`Listener`]. In: a socket, rules. Out: accepted connections and datagrams, handed to `tcp` and `udp`.

use std::{io, net::SocketAddr, sync::Arc};

use tokio::task::JoinHandle;

use super::{
    Shared,
    descriptors::ListeningSlot,
    socket::ListeningSocket,
    state::{ListenerState, OpenSocket, Watched},
    tcp, udp,
};
use crate::plan::{Rule, SocketKey};

/// Stops listening when it is dropped: TCP connections drain, UDP sessions end.
#[derive(Debug)]
pub(crate) struct Listener {
    state: Arc<ListenerState>,
    /// Where it listens: not the place, if that cannot be bound.
    address: SocketAddr,
    task: JoinHandle<()>,
    socket: OpenSocket,
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
        let state = Arc::new(ListenerState::new(shared, place, rule));
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
        self.state.set_rule(rule);
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
