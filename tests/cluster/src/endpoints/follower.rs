//! Owns: consumers of the Endpoints API in the background, with the client library. In: a target. Out: the latest
//! complete state, all states received, and every violated invariant.
//!
//! For every state it checks that revisions of an instance grow, that a pair of instance and revision means the same to
//! all consumers, and the test's invariant. A consumer continues over restarts of the agent.

use super::expected_state::ExpectedState;
use super::full_state::{FullState, Invariant, Pairs};
use anyhow::{Context as _, Result, anyhow, bail};
use keelson_client::{
    Api, BoxError, CancellationToken, Client, DiffStore, Error, Handlers, Options, Position, ServiceName,
};
use keelson_harness::util::PATIENCE;
use keelson_proto::localnetv1::{NodeInfo, ServiceEndpoints};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Timeout of a wait for the expected state: large states take long on a busy machine.
const LONG: Duration = PATIENCE.saturating_mul(3);

/// A received state without its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub instance_id: u64,
    pub rev: u64,
    /// Why it was stale; None if it was not.
    pub stale: Option<String>,
    /// Start of the staleness, in Unix milliseconds. An agent that is killed may know it less exactly after its
    /// restart.
    pub since: Option<i64>,
}

#[derive(Default)]
struct Inner {
    full_state: FullState,
    seen: Vec<Seen>,
    faults: Vec<String>,
    errors: Vec<String>,
    /// The client is new: it may receive its current position again.
    is_new_client: bool,
}

struct FollowerState {
    inner: Mutex<Inner>,
    count: watch::Sender<usize>,
    pairs: Pairs,
    invariant: Invariant,
}

impl FollowerState {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A state is complete.
    fn complete(&self, changes: Vec<Change>, position: &Position) {
        let mut inner = self.lock();
        for change in changes {
            match change {
                Change::Node(node) => inner.full_state.set_node(node),
                Change::Set(name, service) => inner.full_state.set(&name, *service),
                Change::Delete(name) => inner.full_state.delete(&name),
            }
        }
        inner.full_state.position = position.clone();
        let stale = position.stale.then(|| position.stale_reason.clone());
        let seen = Seen {
            instance_id: position.instance_id,
            rev: position.rev,
            stale,
            since: position.stale_since_unix_ms,
        };
        let wrong = match inner.seen.last() {
            _ if seen.instance_id == 0 || seen.rev == 0 => Some("the position is missing".to_owned()),
            Some(last) if last.instance_id == seen.instance_id && last.rev > seen.rev => {
                Some("revisions go back".to_owned())
            }
            Some(last) if *last == seen && !inner.is_new_client => Some("it came twice".to_owned()),
            _ => None,
        };
        let wrong = wrong.map(|wrong| anyhow!("{wrong}"));
        let checks =
            [wrong, self.pairs.record(&inner.full_state).err(), (self.invariant)(&inner.full_state).err()];
        for error in checks.into_iter().flatten() {
            let text = format!("{seen:?} after {:?}: {error:#}", inner.seen.last());
            inner.faults.push(text);
        }
        inner.seen.push(seen);
        inner.is_new_client = false;
        let count = inner.seen.len();
        drop(inner);
        self.count.send_replace(count);
    }
}

enum Change {
    Node(NodeInfo),
    Set(ServiceName, Box<ServiceEndpoints>),
    Delete(ServiceName),
}

struct Collector {
    shared: Arc<FollowerState>,
    changes: Vec<Change>,
}

impl Handlers for Collector {
    fn held(&mut self) -> Vec<ServiceName> {
        let inner = self.shared.lock();
        let names = inner.full_state.services.values();
        names.map(|service| ServiceName::new(&service.namespace, &service.name)).collect()
    }

    fn node(&mut self, node: NodeInfo) {
        self.changes.push(Change::Node(node));
    }

    fn delete(&mut self, name: &ServiceName) {
        self.changes.push(Change::Delete(name.clone()));
    }

    fn set(&mut self, name: &ServiceName, service: ServiceEndpoints) {
        self.changes.push(Change::Set(name.clone(), Box::new(service)));
    }

    async fn sync(&mut self, position: &Position) -> Result<(), BoxError> {
        self.shared.complete(std::mem::take(&mut self.changes), position);
        Ok(())
    }
}

/// Disconnects on drop.
pub struct Follower {
    api: Api,
    target: String,
    shared: Arc<FollowerState>,
    cancel: CancellationToken,
    task: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower")
            .field("api", &self.api)
            .field("target", &self.target)
            .finish_non_exhaustive()
    }
}

impl Follower {
    /// Follows a target (`unix:///...`), which need not serve yet.
    pub fn start(target: &str, api: Api) -> Result<Self> {
        Self::checking(target, api, Pairs::default(), Arc::new(|_| Ok(())))
    }

    /// Like [`Follower::start`]; checks each state against an invariant and against what other consumers received.
    pub fn checking(target: &str, api: Api, pairs: Pairs, invariant: Invariant) -> Result<Self> {
        let shared =
            FollowerState { inner: Mutex::default(), count: watch::Sender::new(0), pairs, invariant };
        let mut follower = Self {
            api,
            target: target.to_owned(),
            shared: Arc::new(shared),
            cancel: CancellationToken::new(),
            task: None,
        };
        follower.connect()?;
        Ok(follower)
    }

    fn connect(&mut self) -> Result<()> {
        let (instance_id, rev) = self.pair();
        self.shared.lock().is_new_client = true;
        let options = Options {
            target: self.target.parse().with_context(|| format!("no target: {}", self.target))?,
            api: self.api,
            instance_id,
            rev,
            error_delay: Duration::from_millis(200),
            ..Options::default()
        };
        let mut client = Client::new(options);
        self.cancel = client.cancellation();
        let noted = self.shared.clone();
        client.on_error(move |trouble| {
            let mut inner = noted.lock();
            inner.errors.push(trouble.error.to_string());
            if matches!(trouble.error, Error::Malformed(_) | Error::Undecodable { .. } | Error::Handler(_)) {
                inner.faults.push(trouble.error.to_string());
            }
        });
        let collector = Collector { shared: self.shared.clone(), changes: Vec::new() };
        self.task = Some(tokio::spawn(match self.api {
            Api::Watch => futures_util::future::Either::Left(follow(client, collector)),
            Api::Next => futures_util::future::Either::Right(poll(client, collector)),
        }));
        Ok(())
    }

    /// Stops the client and starts another, which resumes with the state that is held.
    pub async fn restart(&mut self) -> Result<()> {
        self.cancel.cancel();
        if let Some(task) = self.task.take() {
            task.await.context("the consumer panicked")?;
        }
        self.connect()
    }

    pub fn with_state<T>(&self, look: impl FnOnce(&FullState) -> T) -> T {
        look(&self.shared.lock().full_state)
    }

    /// Instance and revision of the latest state; zeros if there is none.
    pub fn pair(&self) -> (u64, u64) {
        self.with_state(FullState::pair)
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.shared.lock().seen.clone()
    }

    /// Errors that the client reported.
    pub fn errors(&self) -> Vec<String> {
        self.shared.lock().errors.clone()
    }

    pub async fn until<T>(&self, what: &str, mut check: impl FnMut(&FullState) -> Result<T>) -> Result<T> {
        let mut count = self.shared.count.subscribe();
        let waited = tokio::time::timeout(LONG, async {
            loop {
                count.borrow_and_update();
                if let Ok(found) = self.with_state(&mut check) {
                    return Ok(found);
                }
                count.changed().await.context("the consumer is gone")?;
            }
        });
        match waited.await {
            Ok(found) => found,
            Err(_) => {
                let found = self.with_state(&mut check);
                let errors = self.errors();
                let last = &errors[errors.len().saturating_sub(3)..];
                found.with_context(|| {
                    format!("{:?} timed out after {LONG:?}: {what}; last errors: {last:?}", self.api)
                })
            }
        }
    }

    /// Waits until the latest state equals `expected`, and with `Watch` until it is current. (`Next` reports that only
    /// with the next state.)
    pub async fn settled(&self, expected: &ExpectedState) -> Result<()> {
        let says_when_current = self.api == Api::Watch;
        self.until("the state is the expected one", |full_state| {
            full_state.ensure_equals(expected)?;
            if full_state.position.stale && says_when_current {
                bail!("{:?} is stale", full_state.position);
            }
            Ok(())
        })
        .await
    }

    /// Fails if any received state violated an invariant.
    pub fn check_invariants(&self) -> Result<()> {
        let inner = self.shared.lock();
        if let Some(first) = inner.faults.first() {
            bail!("{:?}: {} faults; the first: {first}", self.api, inner.faults.len());
        }
        Ok(())
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

async fn follow(mut client: Client, mut collector: Collector) {
    client.run(&mut collector).await;
}

async fn poll(mut client: Client, mut collector: Collector) {
    let mut store = DiffStore::new(collector.held());
    while let Some(state) = client.next().await {
        if let Err(error) = store.deliver(state, &mut collector).await {
            collector.shared.lock().faults.push(error.to_string());
        }
    }
}

/// One consumer of each API; they must agree.
#[derive(Debug)]
pub struct Followers {
    /// `keelson.endpoints.v1.Endpoints/Watch`.
    pub watch: Follower,
    /// `localnetv1.Endpoints/Next`.
    pub next: Follower,
}

impl Followers {
    /// Starts both on one target, with an invariant of every complete state.
    pub fn start(
        target: &str,
        invariant: impl Fn(&FullState) -> Result<()> + Send + Sync + 'static,
    ) -> Result<Self> {
        Self::sharing(target, &Pairs::default(), Arc::new(invariant))
    }

    /// Like [`Followers::start`], beside other consumers of the same agent.
    pub fn sharing(target: &str, pairs: &Pairs, invariant: Invariant) -> Result<Self> {
        Ok(Self {
            watch: Follower::checking(target, Api::Watch, pairs.clone(), invariant.clone())?,
            next: Follower::checking(target, Api::Next, pairs.clone(), invariant)?,
        })
    }

    pub fn both(&self) -> [&Follower; 2] {
        [&self.watch, &self.next]
    }

    pub async fn settled(&self, expected: &ExpectedState) -> Result<()> {
        for follower in self.both() {
            follower.settled(expected).await?;
        }
        Ok(())
    }

    pub async fn until(&self, what: &str, mut check: impl FnMut(&FullState) -> Result<()>) -> Result<()> {
        for follower in self.both() {
            follower.until(what, &mut check).await?;
        }
        Ok(())
    }

    /// Waits until both have the Service `namespace/name`.
    pub async fn until_service(&self, name: &str) -> Result<()> {
        let has = |state: &FullState| state.service(name).map(drop).context("it is not there");
        self.until(&format!("{name} is there"), has).await
    }

    /// Waits until neither has the Service `namespace/name`.
    pub async fn until_no_service(&self, name: &str) -> Result<()> {
        let lacks = |state: &FullState| match state.service(name) {
            Some(_) => bail!("it is there"),
            None => Ok(()),
        };
        self.until(&format!("{name} is gone"), lacks).await
    }

    /// Stops both clients and starts others that resume.
    pub async fn restart(&mut self) -> Result<()> {
        self.watch.restart().await?;
        self.next.restart().await
    }

    pub async fn pair(&self) -> Result<(u64, u64)> {
        let (watch, next) = (self.watch.pair(), self.next.pair());
        if watch != next {
            bail!("Watch is at {watch:?} and Next at {next:?}");
        }
        Ok(watch)
    }

    /// Fails if any state that either received violated an invariant.
    pub fn check_invariants(&self) -> Result<()> {
        self.watch.check_invariants()?;
        self.next.check_invariants()
    }
}
