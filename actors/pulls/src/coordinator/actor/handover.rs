//! The PullCoordinator in a hand-over: to a successor, and from a predecessor.
//!
//! In: `HandOver` from a successor, or the state of a predecessor. Out: the state, and the ends of pulls that continue
//! here.

use std::sync::Arc;

use actix::{AsyncContext as _, Context};
use keelson_actor_system::inspect::{Mailbox, Status};
use tokio::sync::oneshot;

use super::{PullCoordinator, summary};
use crate::{
    coordinator::{
        handover::HandedState,
        messages::{HandOver, HandedOver},
    },
    runtime::{RuntimeCommand, Subscribe},
};

impl PullCoordinator {
    /// The actor then starts with the predecessor's state and not with the journal.
    #[must_use]
    pub fn with_handed(mut self, state: Option<HandedState>) -> Self {
        self.taken_over = state;
        self
    }

    /// As [`PullCoordinator::restored`], with the predecessor's state in place of the journal.
    pub(super) fn take_over(&mut self, state: HandedState, ctx: &mut Context<Self>) {
        self.metrics.resumed.inc_by(state.pulls.len() as u64);
        self.is_journal_unread = state.unread.is_some();
        let effects = self.core.take_over(state, self.clock.now());
        let me = Mailbox::new(ctx.address(), self.recorder().clone());
        self.runtime.deliver(RuntimeCommand::CancelAll);
        self.runtime.deliver(Subscribe { to: Arc::new(me) });
        // The journal may lack records, if the predecessor's disk was full. It may also have more, if the predecessor
        // has not read it: then it is read before it is rewritten.
        self.is_journal_outdated = true;
        self.metrics.store_durable.set(0);
        self.perform(effects, ctx);
        // The store is most likely still being opened, which is no failure: wait for it.
        let is_open = self.journal.store().subscribe().borrow().is_open();
        if is_open {
            self.catch_up(ctx);
        } else {
            self.rewrite_later(ctx);
        }
        self.watch_store(is_open, ctx);
        self.recorder().status(Status::Running, summary(self.core.counts()));
    }

    pub(super) fn hand_over(&mut self, message: HandOver, ctx: &mut Context<Self>) {
        let (state, effects) = self.core.hand_over(self.clock.now());
        self.runtime.deliver(RuntimeCommand::LeaveLeases);
        self.successor = Some(message.ends);
        let (written_tx, written) = oneshot::channel();
        let (ended_tx, ended) = oneshot::channel();
        (self.flushed, self.draining) = (Some(written_tx), Some(ended_tx));
        // Before the callers are answered: the successor must know their pulls when they ask it.
        let _ = message.state.send(HandedOver { state, written, ended });
        self.perform(effects, ctx);
        self.finish_flush();
    }
}
