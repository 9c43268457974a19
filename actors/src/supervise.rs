//! Supervision: how actors start, stop and start again.
//!
//! Owns: [`Supervision`], each actor's account of its own restarts, [`start`], [`Restart`], and the
//! panic hook, [`end_on_panic`].
//! In: an actor that stops. Out: a restart after a back-off, with state reloaded from storage; or,
//! when an actor panics or keeps failing, the end of the process, so that systemd starts it again.
//!
//! actix restarts a stopped actor with the same value and mailbox, and does not restart one that
//! panicked. So an actor's `restarting` drops what it held, its `started` reloads, and between them
//! the context waits; and a panic anywhere ends the process.

use std::{collections::VecDeque, fmt, sync::Arc, time::Duration};

use actix::{
    Actor, ActorFutureExt as _, Addr, ArbiterHandle, AsyncContext as _, Context, Message, Supervised,
    Supervisor, fut::wrap_future,
};
use tokio::time::Instant;

use crate::inspect::{Recorder, Status, Verb};

/// The first pause before a restart.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// More restarts than this within [`WINDOW`] end the process.
const MOST_RESTARTS: usize = 8;
/// See [`MOST_RESTARTS`]; a quiet window also resets the pause.
const WINDOW: Duration = Duration::from_secs(300);

/// Ends the process with a reason; the binary's is to log and abort, a test's to take notes.
pub type Fatal = Arc<dyn Fn(&str) + Send + Sync>;

/// Stops an actor with this error, so that its supervisor starts it again from storage. Every actor
/// takes it; it is what an actor does to itself when it cannot go on, made available to others.
#[derive(Debug)]
pub struct Restart {
    /// Why.
    pub reason: String,
}

impl Message for Restart {
    type Result = ();
}

impl Verb for Restart {
    const NAME: &'static str = "Restart";
}

/// Ends the process, through `fatal`, when any thread panics: actix does not restart an actor that
/// panicked, and an agent that lost one would look alive and do nothing. Panics that the store catches
/// are left alone. To be called once, before the actors start; the hook that was there runs first.
pub fn end_on_panic(fatal: Fatal) {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        before(info);
        if keelson_storage::panic_is_guarded() {
            return;
        }
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("without a name");
        let place = info.location().map_or_else(String::new, |place| format!(" at {place}"));
        let payload = info.payload();
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text");
        fatal(&format!("panic in thread {thread}{place}: {text}"));
    }));
}

/// An error with its causes, for texts that stand alone.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// One actor's restarts.
pub struct Supervision {
    recorder: Arc<Recorder>,
    fatal: Fatal,
    restarts: VecDeque<Instant>,
}

impl fmt::Debug for Supervision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Supervision").field("actor", &self.recorder.name()).finish_non_exhaustive()
    }
}

impl Supervision {
    /// For the actor that `recorder` belongs to.
    #[must_use]
    pub fn new(recorder: Arc<Recorder>, fatal: Fatal) -> Self {
        Self { recorder, fatal, restarts: VecDeque::new() }
    }

    /// The actor's note-book.
    #[must_use]
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// To be called from `Supervised::restarting`: counts, and ends the process when it is too much.
    pub fn restarting(&mut self) {
        let now = Instant::now();
        self.recorder.restarted();
        self.restarts.push_back(now);
        while self.restarts.front().is_some_and(|at| *at + WINDOW < now) {
            self.restarts.pop_front();
        }
        tracing::warn!(actor = self.recorder.name(), restarts = self.restarts.len(), "actor restarts");
        if self.restarts.len() > MOST_RESTARTS {
            let seconds = WINDOW.as_secs();
            let error = self.recorder.overview().last_error;
            (self.fatal)(&format!(
                "actor {} restarted {} times within {seconds} s; its last error: {error}",
                self.recorder.name(),
                self.restarts.len()
            ));
        }
    }

    /// The pause before the actor may work again: none at the first start, then doubling.
    #[must_use]
    pub fn pause(&self) -> Duration {
        match self.restarts.len() {
            0 => Duration::ZERO,
            n => FIRST_PAUSE.saturating_mul(1 << (n - 1).min(16)).min(LONGEST_PAUSE),
        }
    }

    /// To be called from `Actor::started`: waits out the pause, with the mailbox closed to handling,
    /// then runs `reload`.
    pub fn resume<A>(&self, ctx: &mut Context<A>, reload: fn(&mut A, &mut Context<A>))
    where
        A: Actor<Context = Context<A>> + Supervised,
    {
        // actix bounds each sender of its own and lets every clone of an address in once; the bound
        // that counts is the mailbox's (`inspect::Mailbox`).
        ctx.set_mailbox_capacity(0);
        let pause = self.pause();
        let recorder = self.recorder.clone();
        if !pause.is_zero() {
            recorder.status(Status::Restarting, format!("waits {pause:?} before it starts again"));
        }
        let wait = async move {
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
        };
        ctx.wait(wrap_future::<_, A>(wait).map(move |(), actor, ctx| {
            recorder.status(Status::Running, "");
            reload(actor, ctx);
        }));
    }
}

/// Starts an actor under supervision, on this thread or on an arbiter's.
pub fn start<A, F>(on: Option<&ArbiterHandle>, make: F) -> Addr<A>
where
    A: Actor<Context = Context<A>> + Supervised,
    F: FnOnce(&mut Context<A>) -> A + Send + 'static,
{
    match on {
        Some(arbiter) => Supervisor::start_in_arbiter(arbiter, make),
        None => Supervisor::start(make),
    }
}
