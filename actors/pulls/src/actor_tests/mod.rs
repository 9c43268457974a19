//! The actors with scripted neighbours, on paused time.
//!
//! Owns: [`World`], both actors on a [`FakeRuntime`] and a [`FakeStore`].

mod coordinator;
mod fakes;
mod pods;
mod runtime_client;
mod runtime_report;
mod storage;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use keelson_actor_system::{
    clock::Clock,
    inspect::{Mailbox, Recorder},
    supervise::{self, PANIC, Restart},
    test_support::{FakeStore, handled, pass, run, settle, until},
};
use keelson_proto::{cri, debug as pb};
use prost::Message as _;
use tokio::sync::{mpsc, oneshot, watch};

use crate::{
    coordinator::{
        Answer, AnswerTo, CallerId, Claim, Drain, HandOver, HandedState, Inspected, ListPulls, Policy,
        PullCoordinator, PullCoordinatorParts, Refusal, RequestPull,
    },
    metrics::Metrics,
    request::{CredentialsSalt, PullCall},
    runtime::{Health, RuntimeClient, RuntimeClientParts},
};
use fakes::{FakeRuntime, records};

struct World {
    runtime: Arc<FakeRuntime>,
    store: Arc<FakeStore>,
    pulls: Mailbox<PullCoordinator>,
    client: Mailbox<RuntimeClient>,
    metrics: Metrics,
    health: watch::Receiver<Health>,
    changes: watch::Receiver<u64>,
    salt: CredentialsSalt,
    next: std::cell::Cell<u64>,
}

/// A test that failed while the store was blocked must not hang.
impl Drop for World {
    fn drop(&mut self) {
        self.store.block(false);
    }
}

type Answered = oneshot::Receiver<Answer>;

fn limit(limit: u32) -> Policy {
    Policy { limit, ..Policy::default() }
}

impl World {
    fn start(policy: Policy) -> Self {
        Self::with(policy, FakeStore::new(), 20_000, None)
    }

    /// With a limit of 1.
    fn on(store: Arc<FakeStore>) -> Self {
        Self::with(limit(1), store, 100, None)
    }

    /// As [`Self::on`], with the pulls of a predecessor.
    fn successor(store: Arc<FakeStore>, handed: HandedState) -> Self {
        Self::with(limit(1), store, 100, Some(handed))
    }

    fn with(policy: Policy, store: Arc<FakeStore>, capacity: usize, handed: Option<HandedState>) -> Self {
        let runtime = FakeRuntime::new();
        let metrics = Metrics::default();
        let clock = Clock::start();
        let (health, healths) = watch::channel(Health::Unknown);
        let (changes, changed) = watch::channel(0);
        let recorder = Recorder::new("RuntimeClient", capacity);
        let parts = RuntimeClientParts {
            runtime: runtime.clone(),
            file_systems: runtime.clone(),
            clock,
            metrics: metrics.clone(),
            progress_interval: watch::channel(Duration::from_millis(500)).1,
            health,
            recorder: recorder.clone(),
        };
        let client = supervise::start(None, recorder, |_| RuntimeClient::new(parts));
        let recorder = Recorder::new("PullCoordinator", capacity);
        let parts = PullCoordinatorParts {
            policy,
            owner: "owner".into(),
            store: store.clone(),
            clock,
            runtime: client.clone(),
            metrics: metrics.clone(),
            events: None,
            changes,
            recorder: recorder.clone(),
        };
        let pulls = supervise::start(None, recorder, |_| PullCoordinator::new(parts).with_handed(handed));
        Self {
            runtime,
            store,
            pulls,
            client,
            metrics,
            health: healths,
            changes: changed,
            salt: CredentialsSalt::random(),
            next: std::cell::Cell::new(1),
        }
    }

    fn call(&self, image: &str, sandbox_config: Option<cri::PodSandboxConfig>) -> Arc<PullCall> {
        let spec = cri::ImageSpec { image: image.into(), ..Default::default() };
        let request = cri::PullImageRequest { image: Some(spec), auth: None, sandbox_config };
        Arc::new(PullCall::decode(request.encode_to_vec().into(), &self.salt).expect("a valid request"))
    }

    fn request(&self, image: &str) -> (CallerId, Answered, RequestPull) {
        let caller = CallerId(self.next.get());
        self.next.set(caller.0 + 1);
        let (answer, answered): (AnswerTo, _) = oneshot::channel();
        let call = self.call(image, None);
        (caller, answered, RequestPull { caller, call, timeout: None, claim: Claim::default(), answer })
    }

    fn ask(&self, image: &str) -> Answered {
        self.ask_as_caller(image).1
    }

    fn ask_as_caller(&self, image: &str) -> (CallerId, Answered) {
        let (caller, answered, request) = self.request(image);
        self.pulls.offer(request).expect("room in the mailbox");
        (caller, answered)
    }

    fn ask_for_each(&self, number: usize) -> Vec<Answered> {
        (0..number).map(|n| self.ask(&format!("r/{n}"))).collect()
    }

    async fn list(&self) -> pb::PullList {
        self.pulls.ask(ListPulls { max_queued: 100 }).await.expect("the coordinator answers")
    }

    async fn inspected(&self) -> serde_json::Value {
        let text = self.pulls.ask(Inspected {}).await.expect("the coordinator answers");
        serde_json::from_str(&text).expect("JSON")
    }

    async fn drain(&self) {
        let (done, drained) = oneshot::channel();
        self.pulls.deliver(Drain { done });
        drained.await.expect("reported once");
    }

    async fn hand_over(&self) -> HandedState {
        let (state, handed) = oneshot::channel();
        self.pulls.deliver(HandOver { state, ends: mpsc::unbounded_channel().0 });
        handed.await.expect("handed over").state
    }

    fn restart_pulls(&self) {
        self.pulls.deliver(Restart { reason: "a test wants it".into() });
    }
}

async fn succeeded(answered: Answered) -> bool {
    matches!(answered.await, Ok(Answer::Runtime(reply)) if reply.result.is_ok())
}

async fn all_succeed(callers: impl IntoIterator<Item = Answered>) {
    for answered in callers {
        assert!(succeeded(answered).await);
    }
}

async fn refused(answered: Answered) -> Refusal {
    match answered.await {
        Ok(Answer::Refused(refusal)) => refusal,
        other => panic!("{other:?} is no refusal"),
    }
}
