//! What the task of a listener and its connections share.
//!
//! Owns: [`ListenerState`], and [`Watched`], a socket whose end an [`OpenSocket`] tells. In: a rule. Out: decisions about
//! clients.

use std::{
    net::{IpAddr, SocketAddr},
    ops::Deref,
    sync::{Arc, PoisonError, RwLock, Weak},
};

use keelson_proxy::model::Family;
use tokio_util::sync::CancellationToken;

use super::{Shared, descriptors::ListeningSlot, udp_sessions::UdpSessions};
use crate::plan::{Decision, Rule, SocketKey};

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
    pub(super) fn new(socket: T, slot: ListeningSlot) -> Self {
        Self { socket, open: Arc::new(slot) }
    }

    pub(super) fn watch(&self) -> OpenSocket {
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

impl ListenerState {
    pub(super) fn new(shared: Arc<Shared>, place: SocketKey, rule: Arc<Rule>) -> Self {
        Self {
            shared,
            place,
            rule: RwLock::new(rule),
            removed: CancellationToken::new(),
            udp: UdpSessions::default(),
        }
    }

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

    pub(super) fn set_rule(&self, rule: Arc<Rule>) {
        *self.rule.write().unwrap_or_else(PoisonError::into_inner) = rule;
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
