//! Owns: callers of PullImage other than a kubelet: some with a deadline, some that cancel, some without the right
//! password. In: wants. Out: arrivals, and violations if a call ended in a way that no fault excuses.

use crate::Phase;
use crate::deck::{chooser, seconds};
use crate::images::supply::{Supply, Want};
use crate::images::test_env::TestEnv;
use crate::timeline::{Broken, Timeline};
use anyhow::Result;
use futures_util::future::join_all;
use keelson_harness::cri::{Cri, Pull};
use keelson_harness::registry::{ALICE, BOB};
use rand::RngExt as _;
use rand::rngs::SmallRng;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::Status;

/// Concurrent callers: twice as many as there are slots, so that there is a queue.
const CALLERS: usize = 8;

/// What may make a pull fail. A planned restart and a broken state disk must not.
const EXCUSES: [Broken; 4] = [Broken::AgentKilled, Broken::Runtime, Broken::ImageDisk, Broken::Registry];

/// A joined pull began earlier than the call, and the runtime retries broken requests before it fails.
const AFTERMATH: Duration = Duration::from_secs(30);

/// A call that has not ended this long after its connection is closed never will.
const LOST: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq)]
enum CallKind {
    /// Waits for as long as it takes, as a kubelet does.
    Plain,
    Deadline(Duration),
    /// Cancels the call after this time.
    Cancel(Duration),
    WrongPassword,
}

impl CallKind {
    fn draw(rng: &mut SmallRng, private: bool) -> Self {
        match rng.random_range(0..10) {
            0 | 1 => Self::Deadline(seconds(rng, 0.2, 10.0)),
            2 | 3 => Self::Cancel(seconds(rng, 0.05, 8.0)),
            4 if private => Self::WrongPassword,
            _ => Self::Plain,
        }
    }
}

/// Starts callers that continue until the run is over.
pub(crate) fn start(
    supply: &Supply,
    env: &Arc<TestEnv>,
    timeline: &Timeline,
    seed: u64,
    phases: &watch::Receiver<Phase>,
) -> Vec<JoinHandle<Result<()>>> {
    let start = |n: usize| {
        let caller = Caller {
            rng: chooser(seed, &format!("caller {n}")),
            supply: supply.clone(),
            env: env.clone(),
            timeline: timeline.clone(),
            phases: phases.clone(),
        };
        tokio::spawn(caller.run())
    };
    (0..CALLERS).map(start).collect()
}

struct Caller {
    rng: SmallRng,
    supply: Supply,
    env: Arc<TestEnv>,
    timeline: Timeline,
    phases: watch::Receiver<Phase>,
}

impl Caller {
    fn phase(&self) -> Phase {
        *self.phases.borrow()
    }

    async fn run(mut self) -> Result<()> {
        while self.phase() != Phase::Done {
            match self.supply.take_direct() {
                Some(want) => self.serve(&want).await?,
                None => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
        Ok(())
    }

    async fn serve(&mut self, want: &Want) -> Result<()> {
        while self.phase() != Phase::Done {
            let calls = if self.rng.random_bool(0.15) { self.rng.random_range(2..=3) } else { 1 };
            let manners: Vec<_> = (0..calls).map(|_| self.kind(want)).collect();
            let always = self.rng.random_bool(0.5);
            let user = if self.rng.random_bool(0.5) { &ALICE } else { &BOB };
            let this = &*self;
            let calls = manners.iter().map(|kind| {
                let pull = Pull::new(&want.name);
                let pull = match (want.private, kind) {
                    (false, _) => pull,
                    (true, CallKind::WrongPassword) => pull.credentials(user.name, "wrong"),
                    (true, _) => pull.user(user),
                };
                this.call(want, *kind, pull, always)
            });
            let mut over = self.phases.clone();
            let arrived = async { join_all(calls).await.contains(&true) && this.is_present(want).await };
            let arrived = tokio::select! {
                arrived = arrived => arrived,
                // A call may hang forever; then its image is missing, which is a separate violation.
                _ = over.wait_for(|phase| *phase == Phase::Done) => return Ok(()),
            };
            if arrived {
                return self.supply.arrived(want).await;
            }
            tokio::time::sleep(seconds(&mut self.rng, 0.2, 1.5)).await;
        }
        Ok(())
    }

    fn kind(&mut self, want: &Want) -> CallKind {
        match self.phase() {
            Phase::Faults => CallKind::draw(&mut self.rng, want.private),
            Phase::Settle | Phase::Done => CallKind::Plain,
        }
    }

    /// Makes one call, and returns whether the image should be there now.
    async fn call(&self, want: &Want, kind: CallKind, pull: Pull, always: bool) -> bool {
        if !always && matches!(self.image_status(want).await, Some(Ok(true))) {
            self.timeline.count("pull: not needed");
            return true;
        }
        let began = Instant::now();
        let outcome = match kind {
            CallKind::Plain | CallKind::WrongPassword => self.pull(pull).await,
            CallKind::Deadline(time) => self.pull(pull.timeout(time)).await,
            CallKind::Cancel(time) => tokio::time::timeout(time, self.pull(pull)).await.unwrap_or_default(),
        };
        if !matches!(outcome, Some(Ok(_))) {
            self.timeline.unsuccessful(&want.name);
        }
        self.check_outcome(want, kind, began, outcome)
    }

    async fn pull(&self, pull: Pull) -> Option<Result<String, Status>> {
        self.with_connection(async move |cri: Cri| cri.pull(&pull).await).await
    }

    async fn image_status(&self, want: &Want) -> Option<Result<bool, Status>> {
        self.with_connection(async |cri: Cri| Ok(cri.image_status(&want.name).await?.is_some())).await
    }

    /// Makes one call. None if the client lost it, with its connection.
    async fn with_connection<T>(
        &self,
        call: impl AsyncFnOnce(Cri) -> Result<T, Status>,
    ) -> Option<Result<T, Status>> {
        let (cri, closed) = match Cri::for_one_call(&self.env.socket) {
            Ok(made) => made,
            Err(error) => return Some(Err(Status::internal(format!("{error:#}")))),
        };
        let lost = async {
            closed.cancelled().await;
            tokio::time::sleep(LOST).await;
        };
        tokio::select! {
            answer = call(cri) => Some(answer),
            () = lost => {
                self.timeline.count("call: lost by the client");
                None
            }
        }
    }

    fn check_outcome(
        &self,
        want: &Want,
        kind: CallKind,
        began: Instant,
        outcome: Option<Result<String, Status>>,
    ) -> bool {
        let Some(outcome) = outcome else {
            self.timeline.count("pull: caller left");
            return false;
        };
        match (outcome, kind) {
            (Ok(_), CallKind::WrongPassword) => {
                self.timeline.violation("a wrong password pulls nothing", &want.name);
                false
            }
            (Ok(_), _) => {
                self.timeline.count("pull: succeeded");
                true
            }
            (Err(status), kind) => {
                let code = format!("{:?}", status.code());
                self.timeline.count(&format!("pull: failed, {kind}, {code}", kind = kind.name()));
                let what = format!("{} ({}): {code}: {}", want.name, kind.name(), status.message());
                self.timeline.record("pull failed", &what);
                let excused = self.timeline.excused(&EXCUSES, began, Instant::now(), AFTERMATH);
                if kind == CallKind::Plain && !excused {
                    self.timeline.violation("a pull fails only while something is broken", &what);
                }
                false
            }
        }
    }

    /// Whether the runtime has the image that a pull brought.
    async fn is_present(&self, want: &Want) -> bool {
        let began = Instant::now();
        loop {
            let found = self.image_status(want).await;
            let now = Instant::now();
            match found {
                Some(Ok(true)) => return true,
                Some(Ok(false)) => {
                    let broken = [Broken::Runtime, Broken::ImageDisk];
                    if !self.timeline.excused(&broken, began, now, AFTERMATH) {
                        self.timeline.violation("a pulled image is there", &want.name);
                    }
                    return false;
                }
                // The calls of the load are checked; these are many more of the same kind.
                _ if self.phase() == Phase::Done => return false,
                _ => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    }
}

impl CallKind {
    fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Deadline(_) => "with a deadline",
            Self::Cancel(_) => "with an impatient caller",
            Self::WrongPassword => "with a wrong password",
        }
    }
}
