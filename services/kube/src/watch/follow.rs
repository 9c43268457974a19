//! The loop that every watch runs.
//!
//! Owns: [`follow`], and what it asks of a [`Subject`]. In: an [`ApiServer`], and the steps of a
//! [`Reflector`]. Out: [`Change`]s in batches, each handed over before more is read, and a [`ChoreHealth`].

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::FutureExt as _;
use keelson_actors::{
    cluster::{ApiError, ApiErrorKind, ChoreHealth},
    endpoints::Answer,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout_at},
};

use super::{
    events::{Encoding, Event, Frames, Listing, Part, Trouble},
    reflect::{self, MAX_WATCH, Reflector, SHORT_WATCH, Step},
};
use crate::{
    answers,
    server::{ApiServer, Call},
};

/// A batch is handed over when it has so many objects.
const BATCH_OBJECTS: usize = 200;
/// Or when these were so many bytes on the wire.
const BATCH_BYTES: usize = 1 << 20;
/// A kind of objects that the server does not know is asked for again after so long.
const ABSENT_RETRY: Duration = Duration::from_secs(600);
/// A sink hears from a watch on which nothing happens this often, as it does by the bookmarks of a server.
const PULSE: Duration = Duration::from_secs(60);

/// What was seen, in the order in which it happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change<T> {
    /// A listing begins. Another before it is whole begins it anew.
    Listing,
    /// This one is new or has changed; or it is, when it comes within a listing.
    Put(T),
    /// This one was deleted, or no longer fits the selectors.
    Gone(T),
    /// The listing is whole: these and no others exist.
    Listed,
    /// The server does not list them, and nothing waits for it: what was known before stays.
    Refused,
}

/// What is being watched: one collection, narrowed by selectors, and what becomes of what is seen.
pub(crate) trait Subject: Send {
    /// How it is read.
    type Encoding: Encoding;
    /// For metrics.
    const RESOURCE: &'static str;
    const ACCEPT: &'static str;
    const ACCEPT_LIST: &'static str;
    /// A server that answers 404 has none. One that answers 403, 500 or what cannot be read leaves what was known before, and
    /// that is a failure that is told and retried.
    const OPTIONAL: bool = false;

    /// Path of the collection.
    fn path(&self) -> &'static str;
    /// `fieldSelector=…` and `labelSelector=…`, escaped.
    fn selectors(&self) -> Vec<String>;
    /// Takes what was seen; nothing more is read before the answer. An empty batch comes with a bookmark: nothing
    /// happened, and the answer says whether that is enough.
    fn tell(&mut self, changes: Vec<Change<Object<Self>>>) -> impl Future<Output = Answer> + Send;
    /// Takes how the watch fares: each time that it begins to be well, and each failure.
    fn health(&mut self, health: ChoreHealth) -> impl Future<Output = Answer> + Send;
}

pub(crate) type Object<S> = <<S as Subject>::Encoding as Encoding>::Object;

/// Runs a watch for ever.
pub(crate) async fn follow<S: Subject>(api: &ApiServer, subject: &mut S) {
    let mut follower = Follower {
        api,
        subject,
        reflector: Reflector::default(),
        health: ChoreHealth::Starting,
        batch: Batch::default(),
        listing: false,
        is_told: false,
    };
    loop {
        follower.step().await;
    }
}

/// Why a step did not succeed.
enum Stop {
    /// An error, and whether the sink is told. A connection that broke is no failure of the chore before it cannot be
    /// made again.
    Broken { err: ApiError, tell: bool },
    /// What the server sends cannot be read. What was seen of it is not to be built upon.
    Senseless(ApiError),
    /// The sink has forgotten what it was told.
    Forgotten,
}

impl From<ApiError> for Stop {
    fn from(err: ApiError) -> Self {
        Self::Broken { err, tell: true }
    }
}

/// What is about to be handed over.
struct Batch<T> {
    changes: Vec<Change<T>>,
    bytes: usize,
    /// What is known when it was taken.
    reached: Option<Reached>,
}

impl<T> Default for Batch<T> {
    fn default() -> Self {
        Self { changes: Vec::new(), bytes: 0, reached: None }
    }
}

/// A resourceVersion.
enum Reached {
    /// Of a whole listing.
    Listed(String),
    /// Of an event.
    Saw(String),
}

struct Follower<'a, S: Subject> {
    api: &'a ApiServer,
    subject: &'a mut S,
    reflector: Reflector,
    /// What the sink was told last.
    health: ChoreHealth,
    batch: Batch<Object<S>>,
    /// A listing has begun and is not whole.
    listing: bool,
    /// The sink has had a whole listing, or heard of the refusal, and has not forgotten it.
    is_told: bool,
}

impl<S: Subject> Follower<'_, S> {
    async fn step(&mut self) {
        self.batch = Batch::default();
        self.listing = false;
        let outcome = match self.reflector.next() {
            Step::List { exact } => self.list(exact).await,
            Step::Watch { from } => self.watch(from).await,
        };
        let outcome = match outcome {
            Ok(()) if self.reflector.synced() => self.well().await,
            Err(Stop::Broken { err, .. }) if S::OPTIONAL && err.kind == ApiErrorKind::NotFound => {
                self.reflector.forget();
                self.absent().await
            }
            outcome => outcome,
        };
        match outcome {
            Ok(()) => {}
            Err(Stop::Broken { err, tell }) => self.failed(&err, tell, is_refusal(err.kind)).await,
            Err(Stop::Senseless(err)) => {
                self.reflector.forget();
                self.failed(&err, true, true).await;
            }
            Err(Stop::Forgotten) => self.forgotten().await,
        }
    }

    async fn list(&mut self, exact: bool) -> Result<(), Stop> {
        let mut query = self.subject.selectors();
        if !exact {
            // "0" is what the server has at hand; nothing is asked of its store.
            query.push("resourceVersion=0".to_owned());
        }
        let body = self.api.open(Call::get(S::RESOURCE, self.target(&query), S::ACCEPT_LIST)).await?;
        let mut listing = Listing::<_, S::Encoding>::new(body);
        loop {
            match listing.next().await {
                Ok(Part::Object(object, bytes)) => self.put(object, bytes).await?,
                Ok(Part::End(version)) => {
                    self.listed(version);
                    return self.flush().await;
                }
                Ok(Part::More) => {}
                Err(failure) => return Err(self.api.error(failure).into()),
            }
        }
    }

    /// One watch from its request to its end. `from` none: the objects there are come first.
    async fn watch(&mut self, from: Option<String>) -> Result<(), Stop> {
        let mut query = vec!["watch=true".to_owned(), "allowWatchBookmarks=true".to_owned()];
        query.extend(self.subject.selectors());
        query.push(format!("timeoutSeconds={}", reflect::watch_seconds(rand::random())));
        match &from {
            Some(version) => query.push(format!("resourceVersion={}", crate::bodies::escaped(version))),
            None => query.push("sendInitialEvents=true&resourceVersionMatch=NotOlderThan".to_owned()),
        }
        let body = self.api.open(Call::get(S::RESOURCE, self.target(&query), S::ACCEPT)).await?;
        let opened = Instant::now();
        let mut frames = Frames::<_, S::Encoding>::new(body);
        let mut initial = from.is_none();
        let mut seen = false;
        loop {
            // What has arrived goes together, and nothing waits for what has not.
            let frame = match frames.next().now_or_never() {
                Some(frame) => frame,
                None => {
                    if !initial {
                        self.flush().await?;
                    }
                    let calm = !seen && !initial;
                    tokio::select! {
                        // The server ends a watch before this; one that is still open is stuck.
                        frame = timeout_at(opened + MAX_WATCH, frames.next()) => match frame {
                            Ok(frame) => frame,
                            Err(_) => return Ok(()),
                        },
                        () = sleep_until(opened + SHORT_WATCH), if calm => {
                            // Open for a second without an error: it works, though nothing happens.
                            seen = true;
                            self.well().await?;
                            continue;
                        }
                    }
                }
            };
            let frame = match frame {
                Ok(Some(frame)) => frame,
                Ok(None) => {
                    return self.ended(initial, seen || opened.elapsed() >= SHORT_WATCH).await;
                }
                Err(trouble) => return self.broke(trouble, initial).await,
            };
            let bytes = frame.len();
            match S::Encoding::event(frame) {
                Ok(event) => self.happened(event, bytes, &mut initial).await?,
                Err(failure) => return self.broke(Trouble::Senseless(failure), initial).await,
            }
            seen |= !initial;
        }
    }

    /// Takes an event. `initial`: it is one of those that tell what there is.
    async fn happened(
        &mut self,
        event: Event<Object<S>>,
        bytes: usize,
        initial: &mut bool,
    ) -> Result<(), Stop> {
        match event {
            Event::Error(failure) => {
                self.flush_events(*initial).await?;
                return Err(self.api.error(failure).into());
            }
            Event::Bookmark { version, initial_end } => match (*initial, initial_end) {
                (true, true) => {
                    *initial = false;
                    self.listed(version);
                }
                (true, false) => {}
                (false, _) => self.batch.reached = Some(Reached::Saw(version)),
            },
            Event::Put { object, .. } if *initial => return self.put(object, bytes).await,
            Event::Gone { .. } if *initial => {}
            Event::Put { version, object } => {
                self.batch.reached = Some(Reached::Saw(version));
                return self.push(Change::Put(object), bytes).await;
            }
            Event::Gone { version, object } => {
                self.batch.reached = Some(Reached::Saw(version));
                return self.push(Change::Gone(object), bytes).await;
            }
        }
        Ok(())
    }

    fn target(&self, query: &[String]) -> String {
        match query {
            [] => self.subject.path().to_owned(),
            query => format!("{}?{}", self.subject.path(), query.join("&")),
        }
    }

    /// An object of a listing.
    async fn put(&mut self, object: Object<S>, bytes: usize) -> Result<(), Stop> {
        self.begin_listing();
        self.push(Change::Put(object), bytes).await
    }

    fn begin_listing(&mut self) {
        if !self.listing {
            self.listing = true;
            self.batch.changes.push(Change::Listing);
        }
    }

    /// The listing is whole.
    fn listed(&mut self, version: String) {
        self.begin_listing();
        self.listing = false;
        self.batch.changes.push(Change::Listed);
        self.batch.reached = Some(Reached::Listed(version));
    }

    async fn push(&mut self, change: Change<Object<S>>, bytes: usize) -> Result<(), Stop> {
        self.batch.changes.push(change);
        self.batch.bytes += bytes;
        if self.batch.changes.len() >= BATCH_OBJECTS || self.batch.bytes >= BATCH_BYTES {
            self.flush().await?;
        }
        Ok(())
    }

    /// Hands over what there is; only when it was taken is it known.
    async fn flush(&mut self) -> Result<(), Stop> {
        let Batch { changes, reached, .. } = std::mem::take(&mut self.batch);
        if changes.is_empty() && reached.is_none() {
            return Ok(());
        }
        taken(self.subject.tell(changes).await)?;
        match reached {
            Some(Reached::Listed(version)) => {
                self.is_told = true;
                self.reflector.listed(version);
            }
            Some(Reached::Saw(version)) => self.reflector.saw(version),
            None => return Ok(()),
        }
        self.well().await
    }

    /// Hands over what came before the end of a watch; half a listing is of no use.
    async fn flush_events(&mut self, initial: bool) -> Result<(), Stop> {
        if initial { Ok(()) } else { self.flush().await }
    }

    /// The server has ended the watch in good order.
    async fn ended(&mut self, initial: bool, lasted: bool) -> Result<(), Stop> {
        if initial {
            let failure = answers::senseless("the watch ended before everything was listed");
            return Err(Stop::Broken { err: self.api.error(failure), tell: false });
        }
        self.flush().await?;
        if lasted {
            return Ok(());
        }
        let failure = answers::senseless("the watch was closed within a second with nothing seen");
        Err(self.api.error(failure).into())
    }

    /// The connection broke, or what came on it is no watch.
    async fn broke(&mut self, trouble: Trouble, initial: bool) -> Result<(), Stop> {
        self.flush_events(initial).await?;
        Err(match trouble {
            Trouble::Broken(failure) => Stop::Broken { err: self.api.error(failure), tell: false },
            Trouble::Senseless(failure) => Stop::Senseless(self.api.error(failure)),
        })
    }

    /// The server does not know this kind of objects, so there are none.
    async fn absent(&mut self) -> Result<(), Stop> {
        let until = Instant::now() + ABSENT_RETRY;
        self.tell_none().await?;
        self.well().await?;
        while Instant::now() < until {
            sleep(PULSE).await;
            taken(self.subject.tell(Vec::new()).await)?;
        }
        Ok(())
    }

    /// The server answers, and lists no objects of this kind. A sink that has begun anew since it was told learns that it has
    /// to be told again.
    async fn tell_refused(&mut self) -> Answer {
        let changes = if self.is_told { Vec::new() } else { vec![Change::Listing, Change::Refused] };
        let answer = self.subject.tell(changes).await;
        self.is_told = answer == Answer::Taken;
        answer
    }

    async fn tell_none(&mut self) -> Result<(), Stop> {
        taken(self.subject.tell(vec![Change::Listing, Change::Listed]).await)?;
        self.is_told = true;
        Ok(())
    }

    async fn well(&mut self) -> Result<(), Stop> {
        if self.health == ChoreHealth::Well {
            return Ok(());
        }
        self.health = ChoreHealth::Well;
        taken(self.subject.health(ChoreHealth::Well).await)
    }

    async fn failed(&mut self, err: &ApiError, tell: bool, refused: bool) {
        let wait = self.reflector.failed(err.kind, Instant::now(), rand::random());
        if wait.is_zero() {
            return;
        }
        tracing::debug!(resource = S::RESOURCE, %err, ?wait, "the watch broke");
        if S::OPTIONAL && refused && self.tell_refused().await == Answer::ListAgain {
            self.reflector.forget();
            self.tell_refused().await;
        }
        if tell {
            let since_unix_ms = match self.health {
                ChoreHealth::Failing { since_unix_ms, .. } => since_unix_ms,
                _ => unix_ms(),
            };
            let reason = format!("{err} ({})", err.kind.name());
            self.health = ChoreHealth::Failing { reason, since_unix_ms, refused: err.kind.is_refusal() };
            if self.subject.health(self.health.clone()).await == Answer::ListAgain {
                self.reflector.forget();
            }
        }
        tokio::select! {
            () = sleep(wait) => {}
            () = self.api.woken(), if err.kind.retry_after().is_none() => {}
        }
    }

    async fn forgotten(&mut self) {
        // How it fares is to be said again, too.
        self.health = ChoreHealth::Starting;
        self.is_told = false;
        self.reflector.forget();
        let wait = self.reflector.again(Instant::now(), rand::random());
        tracing::debug!(resource = S::RESOURCE, ?wait, "everything is to be said again");
        sleep(wait).await;
    }
}

/// Whether the server has answered and will not list this kind of objects, as far as one can tell. An error that concerns every
/// request, such as a lost connection, is none.
fn is_refusal(kind: ApiErrorKind) -> bool {
    matches!(kind, ApiErrorKind::Forbidden | ApiErrorKind::Invalid | ApiErrorKind::Server { .. })
}

fn taken(answer: Answer) -> Result<(), Stop> {
    match answer {
        Answer::Taken => Ok(()),
        Answer::ListAgain => Err(Stop::Forgotten),
    }
}

/// Puts `health` where others look for it.
pub(crate) fn show(to: &watch::Sender<ChoreHealth>, health: ChoreHealth) {
    to.send_if_modified(|shown| {
        let changed = *shown != health;
        *shown = health;
        changed
    });
}

fn unix_ms() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}
