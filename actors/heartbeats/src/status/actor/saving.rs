//! Records of the StatusReporter on disk.
//!
//! Owns: the order of writes, the retry of failed ones, and the reading of an earlier process's records. In: writes of
//! the core, the state of the store. Out: the records; [`Event::Started`], and [`Event::Adopted`] if the store could be
//! read only after that.

use std::time::Duration;

use actix::{ActorFutureExt as _, AsyncContext as _, Context, fut::wrap_future};
use keelson_actor_system::{durable::read_at_start, supervise::chain};
use tokio::sync::oneshot;

use super::StatusReporter;
use crate::status::{
    core::Event,
    external::ExternalWrite,
    state::{Restored, Stamp, Unsaved, Write, load},
};

/// Delay of the retry after a failed write.
const SAVE_RETRY: Duration = Duration::from_secs(30);

impl StatusReporter {
    pub(super) fn save(&mut self, write: Write, ctx: &mut Context<Self>) {
        self.unsaved.add(write);
        self.save_next(ctx);
    }

    /// Writes one batch at a time. If the store could not be read at the start, it is read after the write, so that the
    /// result is not older than the state of this process.
    pub(super) fn save_next(&mut self, ctx: &mut Context<Self>) {
        if self.saving || (self.unsaved.is_empty() && !self.unread) {
            return;
        }
        self.saving = true;
        let (unsaved, waiting) = (std::mem::take(&mut self.unsaved), std::mem::take(&mut self.waiting));
        let (store, reads) = (self.store.clone(), self.unread);
        let written = tokio::task::spawn_blocking(move || {
            let result = unsaved.save(&store);
            let found = reads.then(|| load(&store));
            (result, found, unsaved)
        });
        ctx.spawn(wrap_future::<_, Self>(written).map(|written, actor, ctx| {
            actor.saving = false;
            for waiting in waiting {
                // The requester may have stopped waiting.
                let _ = waiting.send(());
            }
            match written {
                Ok((Ok(()), found, _)) => {
                    actor.logged.clear();
                    match found {
                        Some(Ok(found)) => actor.adopt(found, ctx),
                        // The store reports when it can be read; this is for one that does not.
                        Some(Err(_)) if actor.unsaved.is_empty() => return actor.save_later(ctx),
                        Some(Err(_)) | None => {}
                    }
                    actor.save_next(ctx);
                }
                Ok((Err(error), _, unsaved)) => actor.not_saved(&chain(&error), unsaved, ctx),
                Err(error) => actor.not_saved(&error.to_string(), Unsaved::default(), ctx),
            }
        }));
    }

    fn not_saved(&mut self, error: &str, unsaved: Unsaved, ctx: &mut Context<Self>) {
        if self.logged.is_new(error) {
            tracing::error!(actor = "StatusReporter", %error, "cannot write the last report; keeping it in memory");
            self.recorder().error(format!("cannot write the last report; keeping it in memory: {error}"));
        }
        self.unsaved.put_back(unsaved);
        if self.waiting.is_empty() {
            self.save_later(ctx);
        } else {
            self.save_next(ctx);
        }
    }

    fn save_later(&mut self, ctx: &mut Context<Self>) {
        if let Some(planned) = self.save_again.take() {
            ctx.cancel_future(planned);
        }
        let again = ctx.run_later(SAVE_RETRY, |actor, ctx| {
            actor.save_again = None;
            actor.save_next(ctx);
        });
        self.save_again = Some(again);
    }

    /// Passes the conditions of an earlier process to the core, except those with a newer report.
    fn adopt(&mut self, found: Restored, ctx: &mut Context<Self>) {
        self.unread = false;
        let mut conditions = found.conditions;
        conditions.retain(|(kind, _)| !self.unsaved.has_condition(kind));
        self.step(Event::Adopted { conditions, unreadable: found.unreadable }, ctx);
    }

    /// Off this thread and before any message is handled.
    pub(super) fn reload(&mut self, ctx: &mut Context<Self>) {
        let unsaved = self.unsaved.clone();
        let load = read_at_start(self.store.clone(), move |store| {
            // Failed writes of the previous life.
            let saved = unsaved.save(store).is_ok();
            Ok((load(store)?, saved))
        });
        ctx.wait(wrap_future::<_, Self>(load).map(|loaded, actor, ctx| {
            actor.unread = !matches!(loaded, Ok(Ok(_)));
            let restored = match loaded {
                Ok(Ok((restored, saved))) => {
                    if saved {
                        actor.unsaved = Unsaved::default();
                    }
                    restored
                }
                Ok(Err(error)) => actor.without_records(&chain(&error)),
                Err(error) => actor.without_records(&error.to_string()),
            };
            let stamp = Stamp::new(&actor.host.facts().boot_id, actor.host.since_boot(), actor.now());
            let contention = *actor.contention.borrow();
            actor.step(Event::Contention(contention), ctx);
            actor.step(Event::Started { restored, stamp }, ctx);
            if let Some(node) = actor.node.clone() {
                actor.step(Event::Node(node), ctx);
            }
            actor.watch_runtime(ctx);
            actor.watch_store(ctx);
            actor.watch_contention(contention, ctx);
            actor.watch_first_ready(ctx);
            if actor.unread {
                actor.save_later(ctx);
            }
        }));
    }

    /// Without its last report the agent compares with the status at the API server.
    fn without_records(&self, error: &str) -> Restored {
        tracing::error!(actor = "StatusReporter", %error, "cannot read the last report; starting without it");
        self.recorder().error(format!("cannot read the last report; starting without it: {error}"));
        Restored::default()
    }

    pub(super) fn save_condition(
        &mut self,
        write: ExternalWrite,
        ctx: &mut Context<Self>,
    ) -> oneshot::Receiver<()> {
        let (done, saved) = oneshot::channel();
        self.waiting.push(done);
        self.save(Write::Conditions(vec![write]), ctx);
        self.changes.send_modify(|count| *count += 1);
        saved
    }
}
