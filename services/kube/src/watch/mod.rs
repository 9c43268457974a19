//! The two watches of the agent: its own Node, and the pods bound to it.
//!
//! Owns: [`watch_node`] and [`watch_pods`], and the loop that both run. In: an [`ApiServer`]. Out: what is seen,
//! handed to a sink, and a [`ChoreHealth`]. Both run until they are dropped; no error ends them.
//!
//! kube-runtime's watcher is not used: it begins a watch again at once and for ever when the server closes it at
//! once, never comes back from an HTTP 410 at the start of a watch, and does not know `Retry-After`. What is sent
//! is what client-go's reflector sends: one request that lists and watches where the server can do that, and a
//! list and a watch where it cannot.

mod events;
mod node;
mod pods;
mod reflect;

use std::time::{SystemTime, UNIX_EPOCH};

use keelson_actors::cluster::{ApiError, ChoreHealth};
use serde::de::DeserializeOwned;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout_at},
};

use crate::{
    answers::{self, Failure},
    server::{ApiServer, Call},
    watch::{
        events::{Event, Lines},
        reflect::{Reflector, SHORT_WATCH, Step},
    },
};

pub(crate) use reflect::MAX_WATCH;

pub use node::{NodeSink, watch_node};
pub use pods::{PodEvent, PodRef, PodSink, watch_pods};

/// What is being watched: one collection, narrowed by a field selector, and what becomes of what is seen.
trait Subject: Send {
    /// An object as it is read from the events.
    type Object: DeserializeOwned + Send;
    /// For metrics.
    const RESOURCE: &'static str;
    const ACCEPT: &'static str;
    const ACCEPT_LIST: &'static str;

    /// Path of the collection.
    fn path(&self) -> &'static str;
    /// `field=value`.
    fn field_selector(&self) -> String;
    /// These and no others exist.
    fn synced(&mut self, objects: Vec<Self::Object>);
    /// This one is new or has changed.
    fn put(&mut self, object: Self::Object);
    /// This one was deleted, or no longer fits the selector.
    fn gone(&mut self, object: Self::Object);
}

/// A list, in part.
#[derive(serde::Deserialize)]
struct ListOf<T> {
    metadata: events::Meta,
    /// `null` when there are none.
    items: Option<Vec<T>>,
}

/// Runs a watch for ever.
async fn follow<S: Subject>(api: &ApiServer, subject: &mut S, health: &watch::Sender<ChoreHealth>) {
    let mut reflector = Reflector::default();
    loop {
        let outcome = match reflector.next() {
            Step::List { exact } => list(api, subject, exact, &mut reflector).await,
            Step::Watch { from } => watch_once(api, subject, from, &mut reflector, health).await,
        };
        match outcome {
            Ok(()) if reflector.synced() => well(health),
            Ok(()) => {}
            Err(Broken { err, tell }) => {
                let wait = reflector.failed(err.kind, Instant::now(), rand::random());
                if wait.is_zero() {
                    continue;
                }
                tracing::debug!(resource = S::RESOURCE, %err, ?wait, "the watch broke");
                if tell {
                    failing(health, &err);
                }
                tokio::select! {
                    () = sleep(wait) => {}
                    () = api.woken(), if err.kind.retry_after().is_none() => {}
                }
            }
        }
    }
}

/// Why a step did not succeed.
struct Broken {
    err: ApiError,
    /// A connection that broke is no failure of the chore before it cannot be made again.
    tell: bool,
}

impl Broken {
    fn told(err: ApiError) -> Self {
        Self { err, tell: true }
    }
}

async fn list<S: Subject>(
    api: &ApiServer,
    subject: &mut S,
    exact: bool,
    reflector: &mut Reflector,
) -> Result<(), Broken> {
    let fields = crate::bodies::escaped(&subject.field_selector());
    // "0" is what the server has at hand; nothing is asked of its store.
    let version = if exact { "" } else { "&resourceVersion=0" };
    let target = format!("{}?fieldSelector={fields}{version}", subject.path());
    let body = api.call(Call::get(S::RESOURCE, target, S::ACCEPT_LIST)).await.map_err(Broken::told)?;
    let list: ListOf<S::Object> = answers::json(&body).map_err(|failure| Broken::told(api.error(failure)))?;
    if list.metadata.resource_version.is_empty() {
        return Err(Broken::told(api.error(answers::senseless("the list has no resourceVersion"))));
    }
    reflector.listed(list.metadata.resource_version);
    subject.synced(list.items.unwrap_or_default());
    Ok(())
}

/// One watch from its request to its end. `from` none: the objects there are come first.
async fn watch_once<S: Subject>(
    api: &ApiServer,
    subject: &mut S,
    from: Option<String>,
    reflector: &mut Reflector,
    health: &watch::Sender<ChoreHealth>,
) -> Result<(), Broken> {
    let seconds = reflect::watch_seconds(rand::random());
    let fields = crate::bodies::escaped(&subject.field_selector());
    let version = match &from {
        Some(version) => format!("&resourceVersion={}", crate::bodies::escaped(version)),
        None => "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan".to_owned(),
    };
    let target = format!(
        "{}?watch=true&allowWatchBookmarks=true&fieldSelector={fields}&timeoutSeconds={seconds}{version}",
        subject.path()
    );
    let body = api.open(Call::get(S::RESOURCE, target, S::ACCEPT)).await.map_err(Broken::told)?;
    let opened = Instant::now();
    let mut lines = Lines::new(body);
    let mut initial = from.is_none().then(Vec::new);
    let mut seen = false;
    loop {
        let calm = !seen && initial.is_none();
        let line = tokio::select! {
            line = timeout_at(opened + MAX_WATCH, lines.next()) => line,
            () = sleep_until(opened + SHORT_WATCH), if calm => {
                // Open for a second without an error: it works, though nothing happens.
                seen = true;
                well(health);
                continue;
            }
        };
        // The server ends a watch before this; one that is still open is stuck.
        let Ok(line) = line else { return Ok(()) };
        let event = match line {
            Ok(Some(line)) => {
                events::parse::<S::Object>(&line).map_err(|failure| Broken::told(api.error(failure)))?
            }
            Ok(None) if initial.is_some() => {
                return Err(broke(api, answers::senseless("the watch ended before everything was listed")));
            }
            Ok(None) if seen || opened.elapsed() >= SHORT_WATCH => return Ok(()),
            Ok(None) => {
                return Err(Broken::told(
                    api.error(answers::senseless("the watch was closed within a second with nothing seen")),
                ));
            }
            Err(failure) => return Err(broke(api, failure)),
        };
        match event {
            Event::Error(failure) => return Err(Broken::told(api.error(failure))),
            Event::Bookmark { version, initial_end } => {
                if let Some(objects) = initial.take_if(|_| initial_end) {
                    reflector.listed(version);
                    subject.synced(objects);
                } else if initial.is_none() {
                    reflector.saw(version);
                }
            }
            Event::Put { version, object } => match &mut initial {
                Some(objects) => objects.push(object),
                None => {
                    reflector.saw(version);
                    subject.put(object);
                }
            },
            Event::Gone { version, object } => {
                if initial.is_none() {
                    reflector.saw(version);
                    subject.gone(object);
                }
            }
        }
        if initial.is_none() {
            seen = true;
            well(health);
        }
    }
}

fn broke(api: &ApiServer, failure: Failure) -> Broken {
    Broken { err: api.error(failure), tell: false }
}

fn well(health: &watch::Sender<ChoreHealth>) {
    health.send_if_modified(|health| {
        let changed = *health != ChoreHealth::Well;
        *health = ChoreHealth::Well;
        changed
    });
}

fn failing(health: &watch::Sender<ChoreHealth>, err: &ApiError) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = i64::try_from(now.as_millis()).unwrap_or(i64::MAX);
    health.send_if_modified(|health| {
        let since = match health {
            ChoreHealth::Failing { since_unix_ms, .. } => *since_unix_ms,
            _ => now,
        };
        let failing =
            ChoreHealth::Failing { reason: format!("{} ({})", err, err.kind.name()), since_unix_ms: since };
        let changed = *health != failing;
        *health = failing;
        changed
    });
}
