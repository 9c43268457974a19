//! The PullCoordinator and its journal: read at the start or late, written, and rewritten after a failure.
//!
//! Owns: the reaction to a store that is not open, fails or recovers. In: results of reads and writes, the store's
//! state. Out: pulls from the journal, a complete journal. While the store is unavailable, pulls are decided from
//! memory.

use std::{sync::Arc, time::Duration};

use actix::{ActorFutureExt as _, AsyncContext as _, Context, fut::wrap_future};
use keelson_actor_system::{
    durable::wait_for_store,
    inspect::{Mailbox, Status},
    supervise::chain,
};
use keelson_storage::{StoreError, StoreState};

use super::{PullCoordinator, summary};
use crate::{
    coordinator::{
        core::{Effect, PullEvent},
        journal::Restored,
    },
    runtime::{RuntimeCommand, Subscribe},
};

/// Delay between a failed write and the rewrite of the whole journal.
const REWRITE_AFTER: Duration = Duration::from_secs(5);

impl PullCoordinator {
    /// Reads the journal, off this thread and before any message is handled. Waits no longer than the store usually
    /// takes to open.
    pub(super) fn reload(&mut self, ctx: &mut Context<Self>) {
        if let Some(state) = self.taken_over.take() {
            return self.take_over(state, ctx);
        }
        let journal = self.journal.clone();
        let ended = self.pipeline.take_ended();
        let load = async move {
            wait_for_store(&**journal.store()).await;
            let read = move || {
                // If not written: ended pulls are resumed, which costs one query each.
                let _ = journal.write(&ended);
                journal.load()
            };
            tokio::task::spawn_blocking(read).await
        };
        ctx.wait(wrap_future::<_, Self>(load).map(|loaded, actor, ctx| {
            match loaded {
                Ok(Ok(restored)) => actor.restored(restored, ctx),
                Ok(Err(error)) => actor.begin_unread(&chain(&error), ctx),
                Err(error) => actor.begin_unread(&error.to_string(), ctx),
            }
            actor.watch_store(!actor.is_journal_unread, ctx);
        }));
    }

    fn restored(&mut self, restored: Restored, ctx: &mut Context<Self>) {
        self.is_journal_unread = false;
        let Restored { pulls, leases, limit, .. } = self.note_restored(restored);
        let now = self.clock.now();
        let effects = self.core.restore(pulls, leases, limit, now);
        self.begin(effects, ctx);
        if self.is_journal_outdated {
            self.rewrite_later(ctx);
        }
    }

    /// Starts from memory: pods must start without a disk. The journal is read when the store opens.
    fn begin_unread(&mut self, reason: &str, ctx: &mut Context<Self>) {
        self.is_journal_unread = true;
        self.not_durable("cannot read the journal yet; using memory only", reason);
        self.core.begin_unread(self.clock.now());
        self.begin(Vec::new(), ctx);
        self.rewrite_later(ctx);
    }

    fn begin(&mut self, effects: Vec<Effect>, ctx: &mut Context<Self>) {
        let me = Mailbox::new(ctx.address(), self.recorder().clone());
        // Attempts of a previous life are no longer known.
        self.runtime.deliver(RuntimeCommand::CancelAll);
        self.runtime.deliver(Subscribe { to: Arc::new(me) });
        self.perform(effects, ctx);
        if self.draining.is_some() {
            self.step(PullEvent::Drain, ctx);
        }
        self.recorder().status(Status::Running, summary(self.core.counts()));
    }

    fn note_restored(&self, mut restored: Restored) -> Restored {
        for text in restored.unreadable.drain(..) {
            tracing::error!(actor = "PullCoordinator", reason = %text, "cannot read a record of the journal");
            self.recorder().error(text);
        }
        self.metrics.resumed.inc_by(restored.pulls.len() as u64);
        restored
    }

    /// Catches up as soon as the store is open (again), without waiting for the next attempt. `was_open`: at its last
    /// use.
    pub(super) fn watch_store(&self, was_open: bool, ctx: &mut Context<Self>) {
        let mut state = self.journal.store().subscribe();
        let opened = async move {
            if was_open {
                state.wait_for(|state| !state.is_open()).await.ok()?;
            }
            state.wait_for(StoreState::is_open).await.ok().map(drop)
        };
        ctx.spawn(wrap_future::<_, Self>(opened).map(|opened, actor, ctx| {
            // A store that never closes has no state changes to report.
            if opened.is_some() {
                actor.watch_store(true, ctx);
                actor.catch_up(ctx);
            }
        }));
    }

    pub(super) fn written(&mut self, result: Result<(), StoreError>, ctx: &mut Context<Self>) {
        match result {
            Ok(()) if self.is_journal_outdated => {
                self.is_journal_outdated = false;
                self.logged.clear();
                self.metrics.store_durable.set(1);
                tracing::info!("the journal is durable again");
                self.recorder().event("the journal is durable again");
            }
            Ok(()) => {}
            Err(error) => {
                self.metrics.store_errors.inc();
                self.not_durable("cannot write the journal; pulls are kept in memory only", &chain(&error));
                self.rewrite_later(ctx);
            }
        }
        for effect in self.pipeline.written() {
            self.act(effect);
        }
        self.write(ctx);
        self.finish_flush();
        self.finish_drain(ctx);
    }

    fn not_durable(&mut self, what: &str, reason: &str) {
        if self.logged.is_new(reason) {
            tracing::error!(actor = "PullCoordinator", reason, effect = what, "the journal is not durable");
            self.recorder().error(format!("{what}: {reason}"));
        }
        self.metrics.store_durable.set(0);
        self.is_journal_outdated = true;
    }

    pub(super) fn rewrite_later(&mut self, ctx: &mut Context<Self>) {
        if !std::mem::replace(&mut self.catch_up_planned, true) {
            ctx.run_later(REWRITE_AFTER, |actor, ctx| {
                actor.catch_up_planned = false;
                actor.catch_up(ctx);
            });
        }
    }

    /// Reads the journal if it is unread, else rewrites it.
    pub(super) fn catch_up(&mut self, ctx: &mut Context<Self>) {
        if self.core.is_handed_over() {
            // The journal belongs to the successor.
        } else if self.is_journal_unread {
            self.read_late(ctx);
        } else if self.is_journal_outdated {
            self.rewrite = true;
            self.pipeline.ask_for_write();
            self.perform(Vec::new(), ctx);
        }
    }

    fn read_late(&mut self, ctx: &mut Context<Self>) {
        if std::mem::replace(&mut self.reading, true) {
            return;
        }
        let journal = self.journal.clone();
        let load = tokio::task::spawn_blocking(move || journal.load());
        ctx.spawn(wrap_future::<_, Self>(load).map(|loaded, actor, ctx| {
            actor.reading = false;
            match loaded {
                // The successor was told that the journal is unread, and reads it.
                Ok(_) if actor.core.is_handed_over() => actor.finish_drain(ctx),
                Ok(Ok(restored)) => actor.reconcile(restored, ctx),
                Ok(Err(_)) if actor.draining.is_some() => actor.finish_drain(ctx),
                Ok(Err(_)) => actor.rewrite_later(ctx),
                Err(error) => actor.fail(&error.to_string(), ctx),
            }
        }));
    }

    fn reconcile(&mut self, restored: Restored, ctx: &mut Context<Self>) {
        self.is_journal_unread = false;
        let Restored { pulls, leases, limit, .. } = self.note_restored(restored);
        tracing::info!(actor = "PullCoordinator", pulls = pulls.len(), "journal read after a delay");
        self.recorder().event(format!("journal read after a delay: {} pulls", pulls.len()));
        let now = self.clock.now();
        let effects = self.core.reconcile(pulls, leases, limit, now);
        self.perform(effects, ctx);
        self.catch_up(ctx);
    }
}
