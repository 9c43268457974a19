//! Supervision: how actors start, stop and start again.
//!
//! Owns: [`Supervision`], each actor's record of its restarts, [`start`], [`Restart`], and the panic hooks,
//! [`record_panics`] and [`end_on_panic`].
//! In: an actor that stops or panics. Out: a restart after a back-off, with state reloaded from storage, while the
//! process lives. Other actors, their threads and their calls continue.
//!
//! A restart keeps the value, the mailbox and every address of the actor: its `restarting` drops its state, its
//! `started` reloads, and between them the context waits. The message whose handler panicked is lost; those behind it
//! are handled after the restart.

use std::{
    any::Any,
    cell::RefCell,
    collections::VecDeque,
    fmt,
    future::Future,
    panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{self, Poll},
    time::Duration,
};

use actix::{
    Actor, ActorFutureExt as _, Addr, ArbiterHandle, AsyncContext as _, Context, Message, Supervised,
    dev::{ContextFut, channel::channel},
    fut::wrap_future,
};
use tokio::time::Instant;

use crate::inspect::{ActorMessage, Mailbox, Recorder, Status};
use keelson_proto::backoff::Backoff;

/// Pauses before restarts of actors and jobs.
pub const RESTARTS: Backoff = Backoff { first: Duration::from_millis(100), longest: Duration::from_secs(30) };
/// An actor with more restarts than this within [`WINDOW`] is `failing`.
const FAILING_RESTARTS: usize = 8;
/// See [`FAILING_RESTARTS`]; a quiet window also resets the pause.
const WINDOW: Duration = Duration::from_secs(300);
/// Capacity of a mailbox until the actor has started; [`Mailbox`] bounds it afterwards.
const FIRST_CAPACITY: usize = 16;

pub type Fatal = Arc<dyn Fn(&str) + Send + Sync>;

/// Panics seen by [`record_panics`].
static PANICS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Place and text of the last panic on this thread that was not taken yet.
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Stops an actor with this error, so that its supervisor restarts it from storage. Every actor accepts it; it does
/// what an actor does to itself when it cannot continue.
#[derive(Debug)]
pub struct Restart {
    pub reason: String,
}

impl Message for Restart {
    type Result = ();
}

impl ActorMessage for Restart {
    fn name(&self) -> &'static str {
        "Restart"
    }
}

/// A [`Restart`] with this reason makes the handler panic. For tests; release builds do not have it.
#[cfg(any(feature = "test-support", debug_assertions))]
pub const PANIC: &str = "panic";

/// Implements `Actor`, `Handler<Restart>` and `recorder()` for a type with a field `supervision` and a method
/// `reload`, which reads its state at each start.
#[macro_export]
macro_rules! supervised {
    ($actor:ident) => {
        impl $actor {
            pub(crate) fn recorder(&self) -> &::std::sync::Arc<$crate::inspect::Recorder> {
                self.supervision.recorder()
            }

            /// Writes a text to the log and to the events of the actor; a warning is also its last error.
            #[allow(dead_code)] // Not every actor has such texts.
            pub(crate) fn note(&self, is_warning: bool, text: String) {
                if is_warning {
                    ::tracing::warn!(actor = stringify!($actor), reason = %text, "actor reports a problem");
                    self.recorder().error(text);
                } else {
                    ::tracing::info!(actor = stringify!($actor), event = %text, "actor reports an event");
                    self.recorder().event(text);
                }
            }
        }

        impl ::actix::Actor for $actor {
            type Context = ::actix::Context<Self>;

            fn started(&mut self, ctx: &mut Self::Context) {
                self.supervision.resume(ctx, Self::reload);
            }

            fn stopped(&mut self, _: &mut Self::Context) {
                self.recorder().status($crate::inspect::Status::Stopped, "");
            }
        }

        impl ::actix::Handler<$crate::supervise::Restart> for $actor {
            type Result = ();

            fn handle(&mut self, message: $crate::supervise::Restart, ctx: &mut ::actix::Context<Self>) {
                let _handling = self.recorder().handling(&message);
                $crate::supervise::log_restart(message, self.recorder());
                ::actix::ActorContext::stop(ctx);
            }
        }
    };
}

/// Called by every actor for a [`Restart`] before it stops; see [`supervised`].
///
/// # Panics
/// The reason is `PANIC`, and this is no release build.
pub fn log_restart(message: Restart, recorder: &Recorder) {
    #[cfg(any(feature = "test-support", debug_assertions))]
    assert!(message.reason != PANIC, "a test wants a panic");
    tracing::error!(actor = recorder.name(), reason = message.reason, "actor failed; restarting");
    recorder.error(message.reason);
}

/// Logs and counts every panic; the supervisor of the job that panicked decides what follows. Panics that the store
/// catches are ignored. Call it once, before the actors start; the previous hook runs first.
pub fn record_panics() {
    hook(|_, text| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        let thread = std::thread::current();
        tracing::error!(thread = thread.name(), panic = text, "panic");
        LAST_PANIC.with(|last| *last.borrow_mut() = Some(text.to_owned()));
    });
}

/// Number of panics since [`record_panics`].
#[must_use]
pub fn panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

/// Ends the process, through `fatal`, if any thread panics. Panics that the store catches are ignored. Call it once;
/// the previous hook runs first.
pub fn end_on_panic(fatal: Fatal) {
    hook(move |_, text| {
        let thread = std::thread::current();
        fatal(&format!("panic in thread {}: {text}", thread.name().unwrap_or("without a name")));
    });
}

fn hook(then: impl Fn(&PanicHookInfo<'_>, &str) + Send + Sync + 'static) {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        before(info);
        if keelson_storage::panic_is_guarded() {
            return;
        }
        let place = info.location().map_or_else(String::new, |place| format!(" at {place}"));
        then(info, &format!("panicked{place}: {}", payload_text(info.payload())));
    }));
}

fn payload_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text")
}

/// The text of a caught panic on this thread, with its place if [`record_panics`] is installed.
#[must_use]
pub fn panic_text(payload: &(dyn Any + Send)) -> String {
    let recorded = LAST_PANIC.with(|last| last.borrow_mut().take());
    recorded.unwrap_or_else(|| format!("panicked: {}", payload_text(payload)))
}

/// An error with its causes in one line.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

pub struct Supervision {
    recorder: Arc<Recorder>,
    restarts: VecDeque<Instant>,
}

impl fmt::Debug for Supervision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Supervision").field("actor", &self.recorder.name()).finish_non_exhaustive()
    }
}

impl Supervision {
    #[must_use]
    pub fn new(recorder: Arc<Recorder>) -> Self {
        Self { recorder, restarts: VecDeque::new() }
    }

    #[must_use]
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// Call it from `Supervised::restarting`: counts the restart.
    pub fn restarting(&mut self) {
        let now = Instant::now();
        self.recorder.restarted();
        self.restarts.push_back(now);
        while self.restarts.front().is_some_and(|at| *at + WINDOW < now) {
            self.restarts.pop_front();
        }
        tracing::warn!(actor = self.recorder.name(), restarts = self.restarts.len(), "restarting actor");
    }

    /// The pause before the actor runs again: none at the first start, then doubling.
    #[must_use]
    pub fn pause(&self) -> Duration {
        match self.restarts.len() {
            0 => Duration::ZERO,
            tries => RESTARTS.pause(u32::try_from(tries).unwrap_or(u32::MAX)),
        }
    }

    /// Call it from `Actor::started`: waits for the pause without handling messages, then runs `reload`.
    pub fn resume<A>(&self, ctx: &mut Context<A>, reload: fn(&mut A, &mut Context<A>))
    where
        A: Actor<Context = Context<A>> + Supervised,
    {
        // actix bounds each sender separately and lets every clone of an address send once; the effective bound is
        // that of the mailbox (`inspect::Mailbox`).
        ctx.set_mailbox_capacity(0);
        let pause = self.pause();
        let recorder = self.recorder.clone();
        if !pause.is_zero() {
            let status = match self.restarts.len() > FAILING_RESTARTS {
                true => Status::Failing,
                false => Status::Restarting,
            };
            recorder.failed(status, recorder.overview().last_error, pause);
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

/// On this thread or on that of an arbiter.
pub fn start<A, F>(on: Option<&ArbiterHandle>, recorder: Arc<Recorder>, make: F) -> Mailbox<A>
where
    A: Actor<Context = Context<A>> + Supervised,
    F: FnOnce(&mut Context<A>) -> A + Send + 'static,
{
    let (sender, receiver) = channel(FIRST_CAPACITY);
    let notes = recorder.clone();
    let run = move || {
        let mut context = Context::with_receiver(receiver);
        let actor = make(&mut context);
        actix::spawn(Supervisor { actor: Some(context.into_future(actor)), recorder: notes });
    };
    match on {
        // An arbiter that has ended drops the receiver, which closes the mailbox.
        Some(arbiter) => drop(arbiter.spawn_fn(run)),
        None => run(),
    }
    Mailbox::new(Addr::new(sender), recorder)
}

/// Like actix's own, which does not survive a panic.
struct Supervisor<A: Actor<Context = Context<A>>> {
    /// `None` once given up.
    actor: Option<ContextFut<A, Context<A>>>,
    recorder: Arc<Recorder>,
}

impl<A> Supervisor<A>
where
    A: Actor<Context = Context<A>> + Supervised,
{
    /// Restarts an actor that has stopped or panicked. Gives it up when its address is not held any more, or when the
    /// restart panics too.
    fn restart(&mut self) {
        let Some(actor) = &mut self.actor else { return };
        // The actor's state may be inconsistent, so `restarting` keeps almost none of it.
        let restarted =
            catch_unwind(AssertUnwindSafe(|| actor.restart())).map_err(|payload| panic_text(&*payload));
        if restarted == Ok(true) {
            return;
        }
        let given_up = self.actor.take();
        // The context runs pending work when it is dropped.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(given_up)));
        if let Err(text) = restarted {
            tracing::error!(actor = self.recorder.name(), reason = %text, "actor cannot be restarted and is disabled");
            let text = format!("cannot be restarted and is disabled: {text}");
            self.recorder.error(text.clone());
            self.recorder.status(Status::Stopped, text);
        }
    }
}

impl<A> Future for Supervisor<A>
where
    A: Actor<Context = Context<A>> + Supervised,
{
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        while let Some(actor) = &mut this.actor {
            match catch_unwind(AssertUnwindSafe(|| Pin::new(actor).poll(cx))) {
                Ok(Poll::Pending) => return Poll::Pending,
                Ok(Poll::Ready(())) => {}
                Err(payload) => {
                    let text = panic_text(&*payload);
                    tracing::error!(actor = this.recorder.name(), reason = %text, "actor panicked; restarting it");
                    this.recorder.error(text);
                }
            }
            this.restart();
        }
        Poll::Ready(())
    }
}
