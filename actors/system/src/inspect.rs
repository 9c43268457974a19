//! Inspection of actors.
//!
//! Owns: [`Recorder`], the shared record of one actor (mailbox depth, messages by type with latency, restarts,
//! errors, events), and [`Mailbox`], the only way to send to an actor: it counts messages and returns an error when
//! the mailbox is full.
//! In: reports of senders and handlers. Out: [`keelson_proto::debug::Actor`].

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use actix::{
    Actor, Addr, Context, Handler, Message,
    dev::{SendError, ToEnvelope},
};
use hdrhistogram::Histogram;
use keelson_proto::debug as pb;
use tokio::sync::Notify;

use crate::clock::unix_ms;

/// Maximum number of events kept per actor.
const EVENTS: usize = 50;
/// Ten minutes. Longer handling is recorded as this, so that the histogram stays small.
const MAX_MICROS: u64 = 600_000_000;

/// Declares messages of one actor: structs with a result, or an enum of events without one.
///
/// The name of the struct or variant is displayed.
#[macro_export]
macro_rules! messages {
    (
        $(#[$meta:meta])*
        $vis:vis enum $name:ident {
            $($(#[$variant_meta:meta])* $variant:ident $({ $($fields:tt)* })? $(($($types:tt)*))?,)+
        }
    ) => {
        $(#[$meta])*
        $vis enum $name {
            $($(#[$variant_meta])* $variant $({ $($fields)* })? $(($($types)*))?,)+
        }
        impl ::actix::Message for $name { type Result = (); }
        impl $crate::inspect::ActorMessage for $name {
            fn name(&self) -> &'static str {
                match self { $(Self::$variant { .. } => stringify!($variant),)+ }
            }
        }
    };
    ($($(#[$meta:meta])* $name:ident => $result:ty { $($(#[$field_meta:meta])* $field:ident: $ty:ty),* $(,)? })+) => {
        $(
            $(#[$meta])*
            #[derive(Debug)]
            pub struct $name { $($(#[$field_meta])* pub $field: $ty),* }
            impl ::actix::Message for $name { type Result = $result; }
            impl $crate::inspect::ActorMessage for $name {
                fn name(&self) -> &'static str { stringify!($name) }
            }
        )+
    };
}

/// Handles messages of an actor with `recorder()`, which counts and times them: `Message(pattern) => answer`.
#[macro_export]
macro_rules! handlers {
    ($actor:ty, $this:ident, $ctx:ident; $($message:ident($pattern:pat) => $answer:expr,)+) => {$(
        impl ::actix::Handler<$message> for $actor {
            type Result = ::actix::MessageResult<$message>;

            fn handle(&mut $this, message: $message, $ctx: &mut ::actix::Context<Self>) -> Self::Result {
                let _handling = $this.recorder().handling(&message);
                let _ = &$ctx;
                let $pattern = message;
                ::actix::MessageResult($answer)
            }
        }
    )+};
}

/// The displayed name, such as `RequestPull`.
pub trait ActorMessage: Message {
    fn name(&self) -> &'static str;
}

#[derive(Debug)]
struct Traffic {
    handled: u64,
    busy: u64,
    micros: Histogram<u64>,
}

impl Default for Traffic {
    fn default() -> Self {
        // Two digits of precision; the range grows with the recorded values. The library accepts a precision from 0
        // to 5.
        #[allow(clippy::expect_used)]
        let micros = Histogram::new(2).expect("two digits are within 0..=5");
        Self { handled: 0, busy: 0, micros }
    }
}

#[derive(Debug, Default)]
struct Notes {
    status: Status,
    summary: String,
    started_unix_ms: i64,
    failure: Option<Failure>,
    last_error: Option<(i64, String)>,
    traffic: BTreeMap<&'static str, Traffic>,
    events: VecDeque<(i64, String)>,
}

/// Why a job or actor does not run, and when it is retried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// A sentence without a full stop.
    pub reason: String,
    pub since_unix_ms: i64,
    pub next_try_unix_ms: i64,
}

impl Failure {
    /// The reason, the time since the failure began, and the time until the next attempt.
    #[must_use]
    pub fn text(&self, now_unix_ms: i64) -> String {
        let Self { reason, since_unix_ms, next_try_unix_ms } = self;
        let seconds = |millis: i64| millis.max(0) / 1000;
        let since = seconds(now_unix_ms - since_unix_ms);
        match seconds(next_try_unix_ms - now_unix_ms) {
            0 => format!("{reason}; failing for {since} s, next try in less than 1 s"),
            next => format!("{reason}; failing for {since} s, next try in {next} s"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Status {
    #[default]
    Starting,
    Running,
    /// Stopped, waits for its back-off.
    Restarting,
    /// Keeps failing; retried with back-off while the process lives.
    Failing,
    Stopped,
    /// Not started, because what it requires is not configured.
    Disabled,
}

impl Status {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Restarting => "restarting",
            Self::Failing => "failing",
            Self::Stopped => "stopped",
            Self::Disabled => "disabled",
        }
    }
}

/// The record of one actor, shared with its readers. It can be read while the actor is stuck.
pub struct Recorder {
    name: &'static str,
    capacity: usize,
    depth: AtomicI64,
    restarts: AtomicU64,
    /// Notified when a message leaves the mailbox.
    room: Notify,
    notes: Mutex<Notes>,
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Recorder {
    #[must_use]
    pub fn new(name: &'static str, capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            name,
            capacity,
            depth: AtomicI64::new(0),
            restarts: AtomicU64::new(0),
            room: Notify::new(),
            notes: Mutex::new(Notes::default()),
        })
    }

    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        // A panic leaves no inconsistent note that matters.
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn status(&self, status: Status, summary: impl Into<String>) {
        let mut notes = self.notes();
        notes.status = status;
        notes.summary = summary.into();
        notes.failure = None;
        if status == Status::Running && notes.started_unix_ms == 0 {
            notes.started_unix_ms = unix_ms();
        }
    }

    /// Records that the actor does not run, why, and the time until the next attempt. `status` is
    /// [`Status::Restarting`] or [`Status::Failing`].
    pub fn failed(&self, status: Status, reason: impl Into<String>, next_try: Duration) {
        let (mut notes, now) = (self.notes(), unix_ms());
        let since_unix_ms = notes.failure.as_ref().map_or(now, |failure| failure.since_unix_ms);
        let next_try_unix_ms = now.saturating_add(i64::try_from(next_try.as_millis()).unwrap_or(i64::MAX));
        notes.status = status;
        notes.failure = Some(Failure { reason: reason.into(), since_unix_ms, next_try_unix_ms });
    }

    /// `None` while it runs, starts, or is off.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        let notes = self.notes();
        match notes.status {
            Status::Restarting | Status::Failing => notes.failure.clone(),
            Status::Stopped => {
                let reason = notes.summary.clone();
                Some(Failure { reason, since_unix_ms: 0, next_try_unix_ms: i64::MAX })
            }
            Status::Starting | Status::Running | Status::Disabled => None,
        }
    }

    #[must_use]
    pub fn current_status(&self) -> Status {
        self.notes().status
    }

    /// Drops the oldest of more than 50.
    pub fn event(&self, text: impl Into<String>) {
        let mut notes = self.notes();
        notes.events.push_back((unix_ms(), text.into()));
        if notes.events.len() > EVENTS {
            notes.events.pop_front();
        }
    }

    /// An error is also an event.
    pub fn error(&self, text: impl Into<String>) {
        let text = text.into();
        self.notes().last_error = Some((unix_ms(), text.clone()));
        self.event(text);
    }

    pub fn restarted(&self) {
        self.restarts.fetch_add(1, Ordering::Relaxed);
        let mut notes = self.notes();
        notes.started_unix_ms = 0;
        notes.status = Status::Restarting;
    }

    #[must_use]
    pub fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }

    /// Messages that are sent and not handled yet.
    #[must_use]
    pub fn depth(&self) -> u64 {
        self.depth.load(Ordering::Relaxed).max(0).unsigned_abs()
    }

    /// Must be held while `message` is handled.
    pub fn handling<M: ActorMessage>(self: &Arc<Self>, message: &M) -> Handling {
        self.leave();
        Handling { recorder: self.clone(), message: message.name(), since: Instant::now() }
    }

    fn leave(&self) {
        self.depth.fetch_sub(1, Ordering::Relaxed);
        self.room.notify_one();
    }

    fn handled(&self, message: &'static str, since: Instant) {
        let micros = u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX).max(1);
        let mut notes = self.notes();
        let traffic = notes.traffic.entry(message).or_default();
        traffic.handled += 1;
        traffic.micros.saturating_record(micros.min(MAX_MICROS));
    }

    fn busy(&self, message: &'static str) {
        self.notes().traffic.entry(message).or_default().busy += 1;
    }

    /// Everything except the state and the events.
    #[must_use]
    pub fn overview(&self) -> pb::Actor {
        let notes = self.notes();
        let (last_error_unix_ms, last_error) = notes.last_error.clone().unwrap_or_default();
        pb::Actor {
            name: self.name.into(),
            status: notes.status.name().into(),
            summary: match &notes.failure {
                Some(failure) => failure.text(unix_ms()),
                None => notes.summary.clone(),
            },
            mailbox_depth: self.depth(),
            mailbox_capacity: self.capacity as u64,
            restarts: self.restarts(),
            started_unix_ms: notes.started_unix_ms,
            last_error,
            last_error_unix_ms,
            messages: notes.traffic.iter().map(|(name, traffic)| show_traffic(name, traffic)).collect(),
            events: Vec::new(),
            state_json: String::new(),
        }
    }

    /// The overview and the events.
    #[must_use]
    pub fn detail(&self) -> pb::Actor {
        let overview = self.overview();
        let event =
            |(unix_ms, text): &(i64, String)| pb::ActorEvent { unix_ms: *unix_ms, text: text.clone() };
        let events = self.notes().events.iter().map(event).collect();
        pb::Actor { events, ..overview }
    }
}

fn show_traffic(name: &str, traffic: &Traffic) -> pb::MessageStats {
    let quantile = |q| if traffic.handled == 0 { 0 } else { traffic.micros.value_at_quantile(q) };
    pb::MessageStats {
        message: name.into(),
        handled: traffic.handled,
        rejected_busy: traffic.busy,
        p50_us: quantile(0.5),
        p90_us: quantile(0.9),
        p99_us: quantile(0.99),
        max_us: if traffic.handled == 0 { 0 } else { traffic.micros.max() },
    }
}

/// Times the handling of one message, until it is dropped.
#[derive(Debug)]
pub struct Handling {
    recorder: Arc<Recorder>,
    message: &'static str,
    since: Instant,
}

impl Drop for Handling {
    fn drop(&mut self) {
        self.recorder.handled(self.message, self.since);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MailboxError {
    #[error("the mailbox of {0} is full")]
    Full(&'static str),
    #[error("{0} is not running")]
    Closed(&'static str),
}

pub struct Mailbox<A: Actor> {
    addr: Addr<A>,
    recorder: Arc<Recorder>,
}

impl<A: Actor> Clone for Mailbox<A> {
    fn clone(&self) -> Self {
        Self { addr: self.addr.clone(), recorder: self.recorder.clone() }
    }
}

impl<A: Actor> fmt::Debug for Mailbox<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Mailbox").field(&self.recorder.name).finish()
    }
}

impl<A: Actor<Context = Context<A>>> Mailbox<A> {
    #[must_use]
    pub fn new(addr: Addr<A>, recorder: Arc<Recorder>) -> Self {
        Self { addr, recorder }
    }

    #[must_use]
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// The actor was given up: no message is handled any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        !self.addr.connected()
    }

    /// Sends if there is room.
    ///
    /// # Errors
    /// The mailbox is full or closed; the message was not taken.
    pub fn offer<M>(&self, message: M) -> Result<(), MailboxError>
    where
        M: ActorMessage + Send + 'static,
        M::Result: Send,
        A: Handler<M>,
        A::Context: ToEnvelope<A, M>,
    {
        self.admit(&message)?;
        match self.addr.try_send(message) {
            Ok(()) => Ok(()),
            // actix has its own bound until the actor has started.
            Err(SendError::Full(message)) => {
                self.addr.do_send(message);
                Ok(())
            }
            Err(SendError::Closed(_)) => {
                self.recorder.leave();
                Err(MailboxError::Closed(self.recorder.name))
            }
        }
    }

    /// Sends even if the mailbox is full. Only for messages that must not be lost and of which there is at most one
    /// per message that [`Mailbox::offer`] took (an end for a beginning), so that the depth stays bounded.
    pub fn deliver<M>(&self, message: M)
    where
        M: ActorMessage + Send + 'static,
        M::Result: Send,
        A: Handler<M>,
        A::Context: ToEnvelope<A, M>,
    {
        self.recorder.depth.fetch_add(1, Ordering::Relaxed);
        self.addr.do_send(message);
    }

    /// Sends if there is room, and waits for the result.
    ///
    /// # Errors
    /// The mailbox is full or closed, or the actor stopped before it answered.
    pub async fn ask<M>(&self, message: M) -> Result<M::Result, MailboxError>
    where
        M: ActorMessage + Send + 'static,
        M::Result: Send,
        A: Handler<M>,
        A::Context: ToEnvelope<A, M>,
    {
        self.admit(&message)?;
        self.addr.send(message).await.map_err(|_| MailboxError::Closed(self.recorder.name))
    }

    /// Waits for room, sends, and waits for the result. Only for few senders, because each may hold a large message.
    ///
    /// # Errors
    /// The mailbox is closed, or the actor stopped before it answered.
    pub async fn ask_waiting<M>(&self, message: M) -> Result<M::Result, MailboxError>
    where
        M: ActorMessage + Send + 'static,
        M::Result: Send,
        A: Handler<M>,
        A::Context: ToEnvelope<A, M>,
    {
        while self.admit(&message).is_err() {
            // A permit is stored for a sender that checked before a message left.
            self.recorder.room.notified().await;
        }
        self.addr.send(message).await.map_err(|_| MailboxError::Closed(self.recorder.name))
    }

    fn admit(&self, message: &impl ActorMessage) -> Result<(), MailboxError> {
        let capacity = i64::try_from(self.recorder.capacity).unwrap_or(i64::MAX);
        let take = |depth: i64| (depth < capacity).then_some(depth + 1);
        if self.recorder.depth.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
            return Ok(());
        }
        self.recorder.busy(message.name());
        Err(MailboxError::Full(self.recorder.name))
    }
}
