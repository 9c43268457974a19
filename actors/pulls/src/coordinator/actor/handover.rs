//! The PullCoordinator between two agents: handing over to a successor, and taking over from a predecessor.
//!
//! In: `HandOver` when a successor asks, or the state of a predecessor. Out: the state, and the ends of pulls that go on here.

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
    /// An actor that starts with what a predecessor handed over, and not with the journal.
    #[must_use]
    pub fn with_handed(mut self, state: Option<HandedState>) -> Self {
        self.taken_over = state;
        self
    }

    /// As [`PullCoordinator::restored`], with the predecessor's word in place of the journal's.
    pub(super) fn take_over(&mut self, state: HandedState, ctx: &mut Context<Self>) {
        self.metrics.resumed.inc_by(state.pulls.len() as u64);
        self.unread = state.unread.is_some();
        let effects = self.core.take_over(state, self.clock.now());
        let me = Mailbox::new(ctx.address(), self.recorder().clone());
        self.runtime.deliver(RuntimeCommand::CancelAll);
        self.runtime.deliver(Subscribe { to: Arc::new(me) });
        // The journal may say less, if the predecessor's disk was full. It may also say more, if the predecessor
        // has not read it: then it is read before it is rewritten.
        self.behind = true;
        self.metrics.store_durable.set(0);
        self.perform(effects, ctx);
        // The store is still being opened, most likely, which is no failure: its opening is waited for.
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
        self.successor = Some(message.ends);
        let (written_tx, written) = oneshot::channel();
        let (ended_tx, ended) = oneshot::channel();
        (self.flushed, self.draining) = (Some(written_tx), Some(ended_tx));
        // Before the callers are answered: the successor must know of their pulls when they ask it.
        let _ = message.state.send(HandedOver { state, written, ended });
        self.perform(effects, ctx);
        self.finish_flush();
    }
}
