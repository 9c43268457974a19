//! Random histories: invariants for any events in any order.
//!
//! After every event: the core's own invariants ([`Core::check`](super::Core)), at most one answer per caller and none
//! for one that left, no start without its record, no start above a limit, first come first served among pulls under
//! the same limits, and a journal equal to a rewrite by the core. After every kill: the same pulls, each once. At the
//! end: nothing left.

use std::collections::{BTreeSet, HashSet};

use keelson_proto::Code;
use proptest::{collection::vec, option, prelude::*, sample::select};

use super::{
    CallerId, Effect, Lane, Policy, PullEvent, Stage,
    testing::{
        Ask, Bench, CONTAINERD, CRIO, Journal, OBEYS_PULL_OPTION, fails, lost, ok, percent_free, reading,
        seconds,
    },
};
use crate::{
    coordinator::record::RecordState,
    request::PullId,
    runtime::{Capabilities, Phase, RuntimeEvent},
};

#[derive(Debug, Clone)]
enum Step {
    Ask {
        ask: Ask,
        timeout: Option<u64>,
    },
    Leave(usize),
    Present {
        which: usize,
        present: Option<bool>,
    },
    Finish {
        which: usize,
        how: End,
        stale: bool,
    },
    Progress {
        which: usize,
        phase: Phase,
        bytes: u64,
    },
    Up(Capabilities),
    /// Percent of the image file system that is free.
    ImageFs(Option<u64>),
    Pressure(bool),
    Measured {
        which: usize,
        bytes: Option<u64>,
    },
    Down,
    PodGone(&'static str),
    PodForgotten(&'static str),
    PodsSynced(bool),
    Limit(Option<u32>),
    Configure(usize),
    Pass(u64),
    Drain,
    Kill,
}

#[derive(Debug, Clone, Copy)]
enum End {
    Good,
    Bad,
    Cut,
    NoSpace,
    Full,
    Lost,
}

fn policies() -> Vec<Policy> {
    let base =
        Policy { limit: 2, stall_timeout: Some(seconds(60)), retained_bytes_max: 5000, ..Policy::default() };
    vec![
        base.clone(),
        Policy { limit: 0, ..base.clone() },
        Policy { reject: true, limit: 1, await_pods: true, ..base.clone() },
        Policy { per_registry: 1, limit: 3, queued_event_after: None, ..base.clone() },
        Policy { enforce_by_runtime: true, max_queue_time: Some(seconds(20)), ..base.clone() },
        Policy { deduplicate: false, present_slots: 1, stall_timeout: None, ..base.clone() },
        Policy { cancel_grace: seconds(0), fast_lane: false, max_callers: 6, ..base.clone() },
        Policy { keep_progress: false, runtime_retries: 0, obey_option: false, ..base },
    ]
}

fn ask() -> impl Strategy<Value = Step> {
    let ask = (
        select(vec!["r/a", "r/b", "slow.example/a", "slow.example/b"]),
        select(vec!["", "", "one", "two"]),
        select(vec!["", "p", "q"]),
        select(vec!["a", "b"]),
        option::weighted(0.2, 0_u32..4),
    )
        .prop_map(|(image, password, pod, namespace, option)| Ask {
            image: image.into(),
            password: password.into(),
            pod: pod.into(),
            handler: String::new(),
            namespace: namespace.into(),
            option,
        });
    (ask, option::weighted(0.2, 1_u64..100)).prop_map(|(ask, timeout)| Step::Ask { ask, timeout })
}

fn step() -> impl Strategy<Value = Step> {
    let which = 0_usize..8;
    let how =
        select(vec![End::Good, End::Good, End::Bad, End::Cut, End::Cut, End::NoSpace, End::Full, End::Lost]);
    let phase = select(vec![Phase::Resolving, Phase::Downloading, Phase::Unpacking]);
    prop_oneof![
        8 => ask(),
        3 => which.clone().prop_map(Step::Leave),
        4 => (which.clone(), option::weighted(0.9, any::<bool>()))
            .prop_map(|(which, present)| Step::Present { which, present }),
        6 => (which.clone(), how, prop::bool::weighted(0.1))
            .prop_map(|(which, how, stale)| Step::Finish { which, how, stale }),
        2 => option::of(0_u64..60).prop_map(Step::ImageFs),
        1 => any::<bool>().prop_map(Step::Pressure),
        2 => (which.clone(), option::weighted(0.8, 0_u64..3000))
            .prop_map(|(which, bytes)| Step::Measured { which, bytes }),
        3 => (which, phase, 0_u64..5).prop_map(|(which, phase, bytes)| Step::Progress { which, phase, bytes }),
        3 => select(vec![CONTAINERD, OBEYS_PULL_OPTION, CRIO]).prop_map(Step::Up),
        1 => Just(Step::Down),
        1 => select(vec!["p", "q"]).prop_map(Step::PodGone),
        1 => select(vec!["p", "q"]).prop_map(Step::PodForgotten),
        1 => any::<bool>().prop_map(Step::PodsSynced),
        1 => option::of(0_u32..4).prop_map(Step::Limit),
        1 => (0..policies().len()).prop_map(Step::Configure),
        4 => (0_u64..40_000).prop_map(Step::Pass),
        1 => Just(Step::Kill),
    ]
}

struct Run {
    bench: Bench,
    policy: Policy,
    left: BTreeSet<CallerId>,
}

impl Run {
    fn new(policy: Policy, absent: bool) -> Self {
        let mut bench = Bench::new(policy.clone());
        bench.absent = absent;
        bench.runtime_up();
        Self { bench, policy, left: BTreeSet::new() }
    }

    /// The n-th existing pull, in any stage.
    fn nth_pull(&self, n: usize) -> PullId {
        let all: BTreeSet<PullId> = self.bench.core.pulls.keys().copied().collect();
        all.iter().nth(n % all.len().max(1)).copied().unwrap_or(PullId(u64::MAX))
    }

    fn perform(&mut self, step: Step) {
        match step {
            Step::Ask { ask, timeout } => {
                self.bench.ask_within(ask, timeout.map(seconds));
            }
            Step::Leave(n) => {
                let waiting: BTreeSet<CallerId> = self.bench.core.callers.keys().copied().collect();
                if let Some(caller) = waiting.iter().nth(n) {
                    self.left.insert(*caller);
                    self.bench.leave(*caller);
                }
            }
            Step::Present { which, present } => self.bench.present(self.nth_pull(which), present),
            Step::Finish { which, how, stale } => self.finish(self.nth_pull(which), how, stale),
            Step::Progress { which, phase, bytes } => {
                self.bench.progress(self.nth_pull(which), reading(phase, bytes));
            }
            Step::Up(capabilities) => {
                self.bench.event(RuntimeEvent::RuntimeChanged(Ok(capabilities)));
            }
            Step::ImageFs(percent) => self.bench.event(RuntimeEvent::ImageFsRead(percent.map(percent_free))),
            Step::Pressure(is_true) => self.bench.event(PullEvent::DiskPressure(is_true)),
            Step::Measured { which, bytes } => {
                let kept = self.bench.core.kept.iter().nth(which);
                let kept = kept.map(|(lease, kept)| (lease.clone(), kept.until));
                let (lease, until) = kept.unwrap_or_default();
                self.bench.event(RuntimeEvent::LeaseMeasured { lease, until, bytes });
            }
            Step::Down => self.bench.runtime_down("away"),
            Step::PodGone(uid) => {
                self.bench.event(PullEvent::PodGone { uid: uid.into(), pod: format!("ns/{uid}") })
            }
            Step::PodForgotten(uid) => self.bench.event(PullEvent::PodForgotten(uid.into())),
            Step::PodsSynced(both) => {
                let live = ["p", "q"].into_iter().take(1 + usize::from(both)).map(str::to_owned);
                self.bench.event(PullEvent::PodsSynced(std::sync::Arc::new(live.collect())));
            }
            Step::Limit(limit) => self.bench.event(PullEvent::SetLimit(limit)),
            Step::Configure(n) => {
                self.policy = policies().swap_remove(n);
                self.bench.event(PullEvent::Configure(Box::new(self.policy.clone())));
            }
            Step::Pass(millis) => self.bench.pass(std::time::Duration::from_millis(millis)),
            Step::Drain => self.bench.event(PullEvent::Drain),
            Step::Kill => self.kill(),
        }
    }

    fn finish(&mut self, pull: PullId, how: End, stale: bool) {
        let attempt = self.bench.core.pulls.get(&pull).map_or(0, |pull| pull.attempts);
        let attempt = attempt.saturating_sub(u32::from(stale));
        let outcome = match how {
            End::Good => ok(),
            End::Bad => fails(Code::Unknown, "401"),
            End::Cut => fails(Code::Unknown, "connection reset by peer"),
            End::NoSpace => fails(Code::Unknown, "no space left on device"),
            End::Full => fails(Code::ResourceExhausted, "TooManyPullingInParallel: 9"),
            End::Lost => lost("EOF"),
        };
        self.bench.event(RuntimeEvent::PullFinished { pull, attempt, outcome });
    }

    fn kill(&mut self) {
        let ids = |bench: &Bench| -> BTreeSet<PullId> { bench.core.pulls.keys().copied().collect() };
        let is_queued = |pull: &&super::Pull| pull.record().state == RecordState::Queued;
        let before = ids(&self.bench);
        let queued: BTreeSet<PullId> =
            self.bench.core.pulls.values().filter(is_queued).map(|pull| pull.id).collect();
        let order = |bench: &Bench| -> Vec<PullId> {
            let pulls = bench.core.pulls.values().filter(|pull| queued.contains(&pull.id));
            let places: BTreeSet<_> = pulls.map(|pull| (pull.order, pull.id)).collect();
            places.into_iter().map(|(_, id)| id).collect()
        };
        let order_before = order(&self.bench);
        let bench = std::mem::replace(&mut self.bench, Bench::new(self.policy.clone()));
        let absent = bench.absent;
        self.bench = bench.kill(self.policy.clone());
        self.bench.absent = absent;
        assert_eq!(before, ids(&self.bench), "none lost, none made");
        // I8: a waiting pull keeps its place.
        assert_eq!(order_before, order(&self.bench), "the order of the queue");
        self.left.clear();
    }

    fn step(&mut self, step: Step) {
        let lone = !matches!(step, Step::Pass(_) | Step::Kill);
        let slots: HashSet<PullId> = self.bench.core.slots.iter().map(|(_, id)| *id).collect();
        let counted = self.bench.running();
        let starts = self.bench.starts.len();
        self.perform(step);
        let core = &self.bench.core;
        assert_eq!(self.bench.journal, core.journal(self.bench.now), "the journal is the truth");
        assert!(
            self.left.iter().all(|caller| !self.bench.answers.contains_key(caller)),
            "a caller that left gets no answer"
        );
        let limit = core.own_limit();
        assert!(limit == 0 || self.bench.running() <= limit.max(counted), "more than the limit");
        if !lone {
            return;
        }
        let is_counted =
            |id: &&PullId| core.pulls.get(id).is_some_and(|pull| pull.lane == Some(Lane::Counted));
        let mut in_flight = slots.iter().filter(is_counted).count();
        for id in self.bench.starts[starts..].iter().map(|(id, _)| id).filter(is_counted) {
            assert!(limit == 0 || core.counted <= limit, "started above the limit");
            if !slots.contains(id) {
                in_flight += 1;
                let pull = &core.pulls[id];
                assert!(pull.cap().is_none_or(|cap| in_flight <= cap as usize), "started above its option");
                self.check_turn(pull);
            }
        }
    }

    /// A pull just taken from the queue was the first of its class.
    fn check_turn(&self, pull: &super::Pull) {
        let core = &self.bench.core;
        let registry = |pull: &super::Pull| pull.call.name.registry().clone();
        if self.policy.per_registry > 0 {
            assert!(
                core.by_registry[&registry(pull)] <= self.policy.per_registry,
                "too many of one registry"
            );
        }
        // A pull of a present image waits for its own lane.
        let is_present =
            |pull: &super::Pull| matches!(pull.stage, Stage::Queued { presence: super::Presence::Present });
        for other in core.pulls.values().filter(|other| other.is_queued() && !is_present(other)) {
            let alike = other.cap() == pull.cap()
                && (self.policy.per_registry == 0 || registry(other) == registry(pull));
            assert!(!alike || other.place() > pull.place(), "{other:?} came before {pull:?}");
        }
        let plain = !pull.resumed && pull.call.pod.is_none();
        assert!(!plain || pull.order == pull.id.0, "its place is that of its arrival");
    }

    /// Lets everything finish successfully.
    fn settle(&mut self) {
        self.step(Step::Up(CONTAINERD));
        self.step(Step::Pressure(false));
        self.step(Step::ImageFs(None));
        self.step(Step::Limit(Some(0)));
        for _ in 0..200 {
            let running = self.bench.core.pulls.values().find(|pull| matches!(pull.stage, Stage::Running));
            let Some(pull) = running.map(|pull| pull.id) else {
                if self.bench.core.pulls.is_empty() {
                    break;
                }
                self.step(Step::Pass(10_000));
                continue;
            };
            self.finish(pull, End::Good, false);
        }
        self.step(Step::Limit(None));
        self.step(Step::Pass(4 * 3600 * 1000));
    }

    fn check_nothing_is_left(&self) {
        let core = &self.bench.core;
        assert!(core.pulls.is_empty(), "{:?}", core.pulls);
        assert!(core.callers.is_empty() && core.by_key.is_empty() && core.by_image.is_empty());
        assert!(core.present.is_empty() && core.slots.is_empty() && core.held.is_empty());
        assert!(core.by_registry.is_empty() && core.kept.is_empty());
        assert_eq!((core.queue.len(), core.counted, core.present_running), (0, 0, 0));
        assert!(core.timers.is_empty(), "{:?}", core.timers);
        assert_eq!(self.bench.journal, Journal::default());
    }
}

proptest! {
    #[test]
    fn any_history(
        policy in 0..policies().len(), absent in any::<bool>(), steps in vec(step(), 1..80),
    ) {
        let mut run = Run::new(policies().swap_remove(policy), absent);
        for step in steps {
            run.step(step);
        }
        run.settle();
        run.check_nothing_is_left();
    }

    #[test]
    fn any_history_and_then_a_drain(
        policy in 0..policies().len(), absent in any::<bool>(), steps in vec(step(), 1..40),
        more in vec(step(), 1..20),
    ) {
        let mut run = Run::new(policies().swap_remove(policy), absent);
        for step in steps {
            run.step(step);
        }
        run.step(Step::Drain);
        for step in more.into_iter().filter(|step| !matches!(step, Step::Kill)) {
            let waiting = run.bench.queued() + run.bench.core.counts().held;
            run.step(step);
            let core = &run.bench.core;
            let queued_callers = core.callers.values().filter(|caller| core.pulls[&caller.pull].lane.is_none());
            prop_assert_eq!(queued_callers.count(), 0, "a caller that could wait without end is refused");
            let starts_new = run.bench.last.iter().any(|effect| matches!(effect, Effect::Start { attempt: 1, .. }));
            prop_assert!(!starts_new, "{} wait", waiting);
        }
        run.kill();
        run.settle();
        run.check_nothing_is_left();
    }
}
