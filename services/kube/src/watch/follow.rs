//! The loop of every watch.
//!
//! Owns: [`follow`]. In: an [`ApiServer`], a [`Subject`], and the steps of a [`Reflector`]. Out: [`Change`]s in
//! batches, each handed over before more is read, and a [`JobHealth`].

mod state;

use std::{pin::pin, time::Duration};

use bytes::Bytes;
use futures_util::{FutureExt as _, future::BoxFuture};
use keelson_actor_system::{
    clock::unix_ms,
    cluster::{ApiError, ApiErrorKind, JobHealth},
};
use keelson_endpoint_publisher::Ack;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};

use self::state::{
    Batch, Open, Reached, SLOW, SlowStep, Stop, WatchStep, check_ack, is_refusal, or_pending, too_slow,
};
use super::{
    events::{self, Encoding, Event, Frames, LIST_SILENCE, Listing, Part, WatchError},
    reflect::{self, MAX_WATCH, Pause, Reflector, SHORT_WATCH, Step, VersionRegression},
    subject::{Change, Object, Subject},
};
use crate::{
    answers,
    bodies::{ACCEPT_JSON_METADATA_LIST, escaped},
    server::{ApiServer, Call},
    signals::Rollback,
};

/// Number of objects at which a batch is handed over.
const BATCH_OBJECTS: usize = 200;
/// Number of bytes on the wire at which a batch is handed over.
const BATCH_BYTES: usize = 1 << 20;
/// Objects in a page of a list, as in client-go.
const PAGE: usize = 500;
/// Interval of requests for a kind of objects that the server does not know.
const ABSENT_RETRY: Duration = Duration::from_secs(600);
/// Maximum interval of calls to the sink of a quiet watch, like that of a server's bookmarks.
const PULSE: Duration = Duration::from_secs(60);
/// A watch that ends earlier than this before its requested end was interrupted.
const EARLY_END: Duration = Duration::from_secs(5);

pub(crate) async fn follow<S: Subject>(api: &ApiServer, subject: &mut S) {
    let mut follower = Follower {
        rollbacks: api.signals().rollbacks(),
        api,
        subject,
        reflector: Reflector::default(),
        health: JobHealth::Pending,
        batch: Batch::default(),
        listing: false,
        exact: false,
        slow: None,
        is_delivered: false,
    };
    loop {
        follower.step().await;
    }
}

struct Follower<'a, S: Subject> {
    api: &'a ApiServer,
    rollbacks: watch::Receiver<u64>,
    subject: &'a mut S,
    reflector: Reflector,
    health: JobHealth,
    batch: Batch<Object<S>>,
    /// A listing has begun and is not complete.
    listing: bool,
    /// It is no older than its request.
    exact: bool,
    slow: Option<SlowStep>,
    /// The sink has had a complete listing, or the refusal, and has not lost it.
    is_delivered: bool,
}

impl<'a, S: Subject> Follower<'a, S> {
    async fn step(&mut self) {
        if self.rollbacks.has_changed().unwrap_or_default() {
            self.rolled_back().await;
        }
        self.batch = Batch::default();
        self.listing = false;
        let step = self.reflector.next(Instant::now());
        let is_list = matches!(step, Step::List { .. });
        let outcome = match step {
            Step::List { exact, paged } => self.list(exact, paged).await,
            Step::Watch { from: Some(from) } if self.would_be_refused(&from) => {
                Err(self.api.error(answers::too_old()).into())
            }
            Step::Watch { from } => self.watch(from).await,
        };
        self.slow = None;
        match outcome {
            Ok(()) if self.reflector.synced() => {
                if let Err(stop) = self.report_healthy().await {
                    self.stopped(stop).await;
                }
            }
            Ok(()) => {}
            Err(Stop::Broken { err, .. }) if S::OPTIONAL && err.kind == ApiErrorKind::NotFound => {
                self.reflector.forget();
                if let Err(stop) = self.absent().await {
                    self.stopped(stop).await;
                }
            }
            Err(Stop::Broken { err, .. })
                if is_list && err.kind == ApiErrorKind::Invalid && self.subject.widen() =>
            {
                let resource = S::RESOURCE;
                tracing::info!(resource, %err, "API server rejected the field selector; filtering objects \
                                                locally");
            }
            Err(stop) => self.stopped(stop).await,
        }
    }

    async fn stopped(&mut self, stop: Stop) {
        match stop {
            Stop::Broken { err, is_reported, cut_off } => {
                self.failed(&err, is_reported, cut_off, is_refusal(err.kind)).await;
            }
            Stop::InvalidData(err) => {
                self.reflector.forget();
                self.failed(&err, true, false, true).await;
            }
            Stop::Forgotten => self.forgotten().await,
            Stop::RolledBack => self.rolled_back().await,
        }
    }

    async fn list(&mut self, exact: bool, paged: bool) -> Result<(), Stop> {
        self.begin(exact, "the list was not complete");
        let api = self.api;
        let mut continuation = String::new();
        loop {
            let call = self.list_call(exact, paged, &continuation);
            let body = self.unless_slow(api.open(call)).await??;
            let mut listing = Listing::<_, S::Encoding>::new(body);
            let end = loop {
                match self.unless_slow(listing.next()).await? {
                    Ok(Part::Object(object, bytes)) => self.put(object, bytes).await?,
                    Ok(Part::End(end)) => break end,
                    Ok(Part::More) => {}
                    Err(failure) => return Err(api.error(failure).into()),
                }
            };
            if end.continuation.is_empty() {
                self.listed(end.version);
                return self.flush().await;
            }
            continuation = end.continuation;
        }
    }

    /// The request for a list, or for its page at `continuation`.
    fn list_call(&self, exact: bool, paged: bool, continuation: &str) -> Call {
        let mut query = self.subject.selectors().query();
        if paged {
            query.push(format!("limit={PAGE}"));
        }
        if !continuation.is_empty() {
            query.push(format!("continue={}", escaped(continuation)));
        } else if !exact {
            // "0": from the server's cache, without a read of its store.
            query.push("resourceVersion=0".to_owned());
        }
        Call::get(S::RESOURCE, self.target(&query), S::ACCEPT_LIST)
    }

    /// Whether a watch from this version would only be refused.
    fn would_be_refused(&self, version: &str) -> bool {
        self.reflector.check_at().is_some() && self.api.signals().is_too_old(version)
    }

    /// One watch from its request to its end. `from` is `None`: the existing objects come first.
    async fn watch(&mut self, from: Option<String>) -> Result<(), Stop> {
        let what = if from.is_some() { "the watch was not answered" } else { "the list was not complete" };
        self.begin(true, what);
        let (api, requested) = (self.api, reflect::watch_seconds(rand::random()));
        let body = self.unless_slow(api.open(self.watch_call(from.as_deref(), requested))).await??;
        let mut frames = Frames::<_, S::Encoding>::new(body);
        let mut open = Open::new(from.is_none(), requested);
        if from.is_some() {
            self.slow = None;
        }
        let mut check = from.as_deref().and_then(|from| self.version_check(from));
        loop {
            // Events that have arrived are handed over together, without waiting for others.
            let turn = match frames.next().now_or_never() {
                Some(frame) => WatchStep::Frame(frame),
                None => {
                    if !open.initial {
                        self.flush().await?;
                    }
                    tokio::select! {
                        biased;
                        frame = frames.next() => WatchStep::Frame(frame),
                        Ok(()) = self.rollbacks.changed() => WatchStep::RolledBack,
                        checked = or_pending(check.as_mut()) => WatchStep::Checked(checked),
                        () = sleep_until(open.since + MAX_WATCH) => WatchStep::Stuck,
                        () = sleep_until(open.since + SHORT_WATCH), if !open.initial && !open.seen => WatchStep::Calm,
                        () = sleep_until(open.last_data + LIST_SILENCE), if open.initial => WatchStep::Silent,
                        () = too_slow(self.slow.as_ref()) => WatchStep::Slow,
                    }
                }
            };
            match turn {
                WatchStep::Frame(Ok(Some(frame))) => self.frame(frame, &mut open).await?,
                WatchStep::Frame(Ok(None)) => return self.ended(&open).await,
                WatchStep::Frame(Err(error)) => return self.handle_broken(error, &open).await,
                WatchStep::RolledBack => return Err(Stop::RolledBack),
                WatchStep::Checked(Err(err)) if err.kind == ApiErrorKind::Gone => return Err(err.into()),
                WatchStep::Checked(outcome) => {
                    self.reflector.checked(outcome.is_ok(), Instant::now(), rand::random());
                    check = from.as_deref().and_then(|from| self.version_check(from));
                }
                WatchStep::Stuck if !open.initial => {
                    self.interrupted();
                    return Ok(());
                }
                WatchStep::Calm => {
                    open.seen = true;
                    self.report_healthy().await?;
                }
                WatchStep::Stuck | WatchStep::Silent => {
                    return self.handle_broken(WatchError::Broken(events::silent()), &open).await;
                }
                WatchStep::Slow => self.say_slow().await?,
            }
        }
    }

    fn watch_call(&self, from: Option<&str>, seconds: u64) -> Call {
        let mut query = vec!["watch=true".to_owned(), "allowWatchBookmarks=true".to_owned()];
        query.extend(self.subject.selectors().query());
        query.push(format!("timeoutSeconds={seconds}"));
        match from {
            Some(version) => query.push(format!("resourceVersion={}", escaped(version))),
            None => query.push("sendInitialEvents=true&resourceVersionMatch=NotOlderThan".to_owned()),
        }
        Call::get(S::RESOURCE, self.target(&query), S::ACCEPT)
    }

    /// Checks, when it is due, whether the server knows the version from which an interrupted watch continues. If its
    /// store was rolled back and has not reached it again, it answers with an error that is read as
    /// [`ApiErrorKind::Gone`]; the watch itself would receive nothing.
    fn version_check(&self, from: &str) -> Option<BoxFuture<'a, Result<(), ApiError>>> {
        let (at, api) = (self.reflector.check_at()?, self.api);
        let mut query = self.subject.selectors().without_objects().query();
        query.push(format!("resourceVersion={}&resourceVersionMatch=NotOlderThan", escaped(from)));
        let call = Call::get(S::RESOURCE, self.target(&query), ACCEPT_JSON_METADATA_LIST);
        let check = async move {
            sleep_until(at).await;
            api.call(call).await.map(drop)
        };
        Some(check.boxed())
    }

    fn target(&self, query: &[String]) -> String {
        match query {
            [] => self.subject.path().to_owned(),
            query => format!("{}?{}", self.subject.path(), query.join("&")),
        }
    }

    /// A request begins. `exact`: its listing is no older than it.
    fn begin(&mut self, exact: bool, what: &'static str) {
        self.exact = exact;
        self.slow = Some(SlowStep { since: Instant::now(), what });
    }

    /// Waits for `work`. If it takes too long, health shows it while the work continues.
    async fn unless_slow<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Stop> {
        let mut work = pin!(work);
        tokio::select! {
            biased;
            done = &mut work => return Ok(done),
            () = too_slow(self.slow.as_ref()) => {}
        }
        self.say_slow().await?;
        Ok(work.await)
    }

    async fn say_slow(&mut self) -> Result<(), Stop> {
        let Some(SlowStep { since, what }) = self.slow.take() else { return Ok(()) };
        let lasted = i64::try_from(since.elapsed().as_millis()).unwrap_or_default();
        check_ack(self.fail(format!("{what} after {SLOW:?}"), unix_ms() - lasted, false).await)
    }

    async fn frame(&mut self, frame: Bytes, open: &mut Open) -> Result<(), Stop> {
        open.last_data = Instant::now();
        let bytes = frame.len();
        match S::Encoding::event(frame) {
            Ok(event) => self.handle_event(event, bytes, &mut open.initial).await?,
            Err(failure) => return self.handle_broken(WatchError::InvalidData(failure), open).await,
        }
        open.seen |= !open.initial;
        Ok(())
    }

    /// Processes an event. `initial`: it is one of the existing objects.
    async fn handle_event(
        &mut self,
        event: Event<Object<S>>,
        bytes: usize,
        initial: &mut bool,
    ) -> Result<(), Stop> {
        match event {
            Event::Error(failure) => {
                self.flush_events(*initial).await?;
                let err = self.api.error(failure);
                let asks_to_wait =
                    matches!(err.kind, ApiErrorKind::Gone | ApiErrorKind::TooManyRequests { .. });
                return Err(Stop::Broken { cut_off: *initial && !asks_to_wait, err, is_reported: true });
            }
            Event::Bookmark { version, initial_end } => match (*initial, initial_end) {
                (true, true) => {
                    *initial = false;
                    self.slow = None;
                    self.listed(version);
                }
                (true, false) => {}
                (false, _) => {
                    if let Some(back) = self.reflector.went_back(&version) {
                        self.went_back(back);
                        return Err(Stop::RolledBack);
                    }
                    self.batch.reached = Some(Reached::Saw(version));
                }
            },
            Event::Put { object, .. } if *initial => return self.put(object, bytes).await,
            Event::Gone { .. } if *initial => {}
            Event::Put { version, object } => {
                self.batch.reached = Some(Reached::Saw(version));
                return self.push(Change::Upsert(Box::new(object)), bytes).await;
            }
            Event::Gone { version, object } => {
                self.batch.reached = Some(Reached::Saw(version));
                return self.push(Change::Deleted(object), bytes).await;
            }
        }
        Ok(())
    }

    async fn put(&mut self, object: Object<S>, bytes: usize) -> Result<(), Stop> {
        self.begin_listing();
        self.push(Change::Upsert(Box::new(object)), bytes).await
    }

    fn begin_listing(&mut self) {
        if !self.listing {
            self.listing = true;
            self.batch.changes.push(Change::Listing);
        }
    }

    fn listed(&mut self, version: String) {
        self.begin_listing();
        self.listing = false;
        self.batch.changes.push(Change::ListComplete);
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

    /// Hands over the batch; its versions count as known only once the sink has taken it.
    async fn flush(&mut self) -> Result<(), Stop> {
        let Batch { changes, reached, .. } = std::mem::take(&mut self.batch);
        if changes.is_empty() && reached.is_none() {
            return Ok(());
        }
        check_ack(self.subject.deliver(changes).await)?;
        match reached {
            Some(Reached::Listed(version)) => {
                self.is_delivered = true;
                if let Some(back) = self.reflector.listed(version, self.exact) {
                    self.went_back(back);
                }
            }
            Some(Reached::Saw(version)) => self.reflector.saw(version),
            None => return Ok(()),
        }
        self.report_healthy().await
    }

    /// Hands over the events before the end of a watch; a partial listing is dropped.
    async fn flush_events(&mut self, initial: bool) -> Result<(), Stop> {
        if initial { Ok(()) } else { self.flush().await }
    }

    /// The server has ended the watch normally.
    async fn ended(&mut self, open: &Open) -> Result<(), Stop> {
        if open.initial {
            let failure = answers::invalid_answer("the watch ended before everything was listed");
            return Err(Stop::Broken { err: self.api.error(failure), is_reported: false, cut_off: true });
        }
        self.flush().await?;
        if open.since.elapsed() + EARLY_END < open.requested {
            self.interrupted();
        }
        if open.lasted() {
            return Ok(());
        }
        let failure = answers::invalid_answer("the watch was closed within a second without an event");
        Err(self.api.error(failure).into())
    }

    /// The connection broke, or the data is invalid.
    async fn handle_broken(&mut self, error: WatchError, open: &Open) -> Result<(), Stop> {
        self.flush_events(open.initial).await?;
        Err(match error {
            WatchError::Broken(failure) => Stop::Broken {
                err: self.api.error(failure),
                is_reported: !open.initial && !open.lasted(),
                cut_off: open.initial,
            },
            WatchError::InvalidData(failure) => Stop::InvalidData(self.api.error(failure)),
        })
    }

    /// The next connection may be to another server.
    fn interrupted(&mut self) {
        self.reflector.interrupted(Instant::now(), rand::random());
        if S::LIST_AFTER_INTERRUPTION {
            self.reflector.forget();
        }
    }

    /// Signals the rollback of the store to the other watches, unless it was signalled already.
    fn went_back(&mut self, VersionRegression { seen, now }: VersionRegression) {
        if !self.rollbacks.has_changed().unwrap_or_default() {
            self.api.signals().rolled_back(&Rollback { of: self.subject.path().to_owned(), seen, now });
        }
        self.rollbacks.borrow_and_update();
    }

    /// The store was rolled back, as another watch saw: everything is listed again.
    async fn rolled_back(&mut self) {
        self.rollbacks.borrow_and_update();
        sleep(self.reflector.roll_back(rand::random())).await;
    }

    /// The server does not know this kind of objects, so there are none.
    async fn absent(&mut self) -> Result<(), Stop> {
        let until = Instant::now() + ABSENT_RETRY;
        self.report_none().await?;
        self.report_healthy().await?;
        while Instant::now() < until {
            sleep(PULSE).await;
            check_ack(self.subject.deliver(Vec::new()).await)?;
        }
        Ok(())
    }

    /// The server answers, and lists no objects of this kind. A sink that has restarted since it was told requests to
    /// be told again.
    async fn report_refusal(&mut self) -> Ack {
        let changes = if self.is_delivered { Vec::new() } else { vec![Change::Listing, Change::Refused] };
        let answer = self.subject.deliver(changes).await;
        self.is_delivered = answer == Ack::Accepted;
        answer
    }

    async fn report_none(&mut self) -> Result<(), Stop> {
        check_ack(self.subject.deliver(vec![Change::Listing, Change::ListComplete]).await)?;
        self.is_delivered = true;
        Ok(())
    }

    /// Reports that the watch works. After a failure it signals the other watches, because the server works for them
    /// too.
    async fn report_healthy(&mut self) -> Result<(), Stop> {
        match std::mem::replace(&mut self.health, JobHealth::Healthy) {
            JobHealth::Healthy => return Ok(()),
            JobHealth::Failing { .. } => self.api.wake_watches(),
            JobHealth::Pending => {}
        }
        check_ack(self.subject.health(JobHealth::Healthy).await)
    }

    /// Reports that the watch fails, since that time unless it failed before.
    async fn fail(&mut self, reason: String, since_unix_ms: i64, refused: bool) -> Ack {
        let since_unix_ms = match self.health {
            JobHealth::Failing { since_unix_ms, .. } => since_unix_ms,
            _ => since_unix_ms,
        };
        self.health = JobHealth::Failing { reason, since_unix_ms, refused };
        self.subject.health(self.health.clone()).await
    }

    async fn failed(&mut self, err: &ApiError, is_reported: bool, cut_off: bool, refused: bool) {
        if err.kind == ApiErrorKind::Gone
            && let Some(version) = self.reflector.version()
        {
            self.api.signals().refused_as_too_old(version, &err.reason);
        }
        let pause = self.reflector.failed(err.kind, cut_off, Instant::now(), rand::random());
        if S::LIST_AFTER_INTERRUPTION {
            self.reflector.forget();
        }
        tracing::debug!(resource = S::RESOURCE, %err, wait = ?pause.wait, "the watch failed");
        if pause.is_failure {
            if S::OPTIONAL && refused && self.report_refusal().await == Ack::Relist {
                self.reflector.forget();
                self.report_refusal().await;
            }
            if is_reported {
                let reason = format!("{err} ({})", err.kind.name());
                if self.fail(reason, unix_ms(), err.kind.is_refusal()).await == Ack::Relist {
                    self.reflector.forget();
                }
            }
        }
        self.pause(pause).await;
    }

    async fn pause(&mut self, pause: Pause) {
        let end = Instant::now() + pause.wait;
        tokio::select! {
            () = sleep_until(end) => {}
            turn = self.api.signals().woken(), if pause.can_be_interrupted => {
                let rest = end.saturating_duration_since(Instant::now());
                sleep(self.reflector.interrupt_wait(rest, turn, rand::random())).await;
            }
        }
    }

    async fn forgotten(&mut self) {
        // Health has to be reported again, too.
        self.health = JobHealth::Pending;
        self.is_delivered = false;
        self.reflector.forget();
        let wait = self.reflector.again(Instant::now(), rand::random());
        tracing::debug!(resource = S::RESOURCE, ?wait, "full state requested");
        sleep(wait).await;
    }
}
