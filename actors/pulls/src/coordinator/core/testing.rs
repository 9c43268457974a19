//! Test helpers.
//!
//! Owns: [`Bench`], a core with a test clock, which checks the core's invariants after every event; constructors of
//! calls and replies.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::Duration,
};

use keelson_actor_system::{clock::Now, file_system::FileSystem};
use keelson_proto::{Code, PULL_OPTION_ANNOTATION, cri};
use prost::Message as _;

use super::{
    Answer, CallerId, Core, Effect, Lane, Note, PodNotice, Policy, PullEnd, PullEvent, Refusal, Release,
    Stage, Tally,
};
use crate::{
    coordinator::{
        handover::{HandedEnd, HandedState},
        record::{KeptLease, PullRecord, Write},
    },
    request::{CredentialsSalt, PullCall, PullId},
    runtime::{
        Capabilities, Download, Outcome, Phase, Progress, PullReply, RuntimeCommand, RuntimeEvent, WireStatus,
    },
};

/// A runtime with leases and progress, but without the pull option.
pub(super) const CONTAINERD: Capabilities =
    Capabilities { pull_option: false, leases: true, content: true, ignores_namespace: true };
/// Enforces the limit itself.
pub(super) const OBEYS_PULL_OPTION: Capabilities = Capabilities { pull_option: true, ..CONTAINERD };
/// Neither leases nor progress, and may decide by namespace.
pub(super) const CRIO: Capabilities =
    Capabilities { pull_option: false, leases: false, content: false, ignores_namespace: false };

pub(super) fn limit(limit: u32) -> Policy {
    Policy { limit, ..Policy::default() }
}

pub(super) const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[derive(Debug, Clone, Default)]
pub(super) struct Ask {
    pub(super) image: String,
    pub(super) password: String,
    pub(super) handler: String,
    pub(super) pod: String,
    /// Of the pod; empty: `ns`.
    pub(super) namespace: String,
    pub(super) option: Option<u32>,
}

pub(super) fn image(image: &str) -> Ask {
    Ask { image: image.into(), ..Ask::default() }
}

impl Ask {
    pub(super) fn auth(self, password: &str) -> Self {
        Self { password: password.into(), ..self }
    }

    pub(super) fn pod(self, pod: &str) -> Self {
        Self { pod: pod.into(), ..self }
    }

    pub(super) fn namespace(self, namespace: &str) -> Self {
        Self { namespace: namespace.into(), ..self }
    }

    pub(super) fn option(self, option: u32) -> Self {
        Self { option: Some(option), ..self }
    }

    pub(super) fn handler(self, handler: &str) -> Self {
        Self { handler: handler.into(), ..self }
    }

    pub(super) fn call(&self, salt: &CredentialsSalt) -> Arc<PullCall> {
        let annotations = self.option.map(|n| (PULL_OPTION_ANNOTATION.to_owned(), n.to_string()));
        let metadata = cri::PodSandboxMetadata {
            name: self.pod.clone(),
            uid: self.pod.clone(),
            namespace: if self.namespace.is_empty() { "ns".into() } else { self.namespace.clone() },
            attempt: 0,
        };
        let request = cri::PullImageRequest {
            image: Some(cri::ImageSpec {
                image: self.image.clone(),
                runtime_handler: self.handler.clone(),
                annotations: annotations.into_iter().collect(),
                ..Default::default()
            }),
            auth: (!self.password.is_empty())
                .then(|| cri::AuthConfig { password: self.password.clone(), ..Default::default() }),
            sandbox_config: (!self.pod.is_empty())
                .then(|| cri::PodSandboxConfig { metadata: Some(metadata), ..Default::default() }),
        };
        Arc::new(PullCall::decode(request.encode_to_vec().into(), salt).expect("a valid request"))
    }
}

pub(super) fn ok() -> Outcome {
    let result = Ok(cri::PullImageResponse { image_ref: "sha256:x".into() }.encode_to_vec().into());
    Outcome::Answered(Arc::new(PullReply { result, metadata: Vec::new() }))
}

pub(super) fn fails(code: Code, message: &str) -> Outcome {
    Outcome::Answered(Arc::new(PullReply::status(code, message)))
}

pub(super) fn lost(message: &str) -> Outcome {
    Outcome::Lost(Arc::new(PullReply::status(Code::Unavailable, message)))
}

/// A reading without new bytes since the one before.
pub(super) fn reading(phase: Phase, bytes_done: u64) -> Progress {
    let download = if phase == Phase::Downloading { Download::Idle } else { Download::Unknown };
    Progress { phase, bytes_done, bytes_total: 1000, layers_done: 0, layers_total: 2, download }
}

pub(super) fn percent_free(percent: u64) -> FileSystem {
    FileSystem { capacity_bytes: 1000, available_bytes: percent * 10, inodes: 100, inodes_free: 100 }
}

#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct Journal {
    pub(super) pulls: BTreeMap<u64, PullRecord>,
    pub(super) leases: BTreeMap<String, KeptLease>,
    pub(super) limit: Option<u32>,
}

impl Journal {
    pub(super) fn apply(&mut self, write: &Write) {
        match write {
            Write::PutPull(record) => drop(self.pulls.insert(record.id, record.clone())),
            Write::DeletePull(id) => drop(self.pulls.remove(id)),
            Write::PutLease(kept) => drop(self.leases.insert(kept.lease.clone(), kept.clone())),
            Write::DeleteLease(lease) => drop(self.leases.remove(lease)),
            Write::Limit(limit) => self.limit = *limit,
        }
    }
}

pub(super) struct Bench {
    pub(super) core: Core,
    pub(super) now: Now,
    pub(super) journal: Journal,
    pub(super) answers: BTreeMap<CallerId, Answer>,
    pub(super) notes: Vec<Note>,
    /// Effects of the last event, answers and notes included.
    pub(super) last: Vec<Effect>,
    /// Pull and attempt.
    pub(super) starts: Vec<(PullId, u32)>,
    pub(super) cancels: Vec<(PullId, u32)>,
    pub(super) checks: Vec<PullId>,
    pub(super) dropped: Vec<String>,
    pub(super) collections: u32,
    pub(super) released: Vec<Release>,
    pub(super) notices: Vec<PodNotice>,
    pub(super) tallies: Vec<Tally>,
    pub(super) salt: CredentialsSalt,
    /// Answer pending presence checks with "absent".
    pub(super) absent: bool,
    next_caller: u64,
}

impl Bench {
    /// The runtime is up.
    pub(super) fn up(policy: Policy) -> Self {
        Self::with(CONTAINERD, policy)
    }

    /// A runtime with these capabilities has been up for a minute.
    pub(super) fn with(capabilities: Capabilities, policy: Policy) -> Self {
        let mut bench = Self::new(policy);
        bench.event(RuntimeEvent::RuntimeChanged(Ok(capabilities)));
        bench.pass(seconds(60));
        bench
    }

    /// The runtime is unknown.
    pub(super) fn new(policy: Policy) -> Self {
        Self {
            core: Core::new(policy, "owner"),
            now: Now { mono: Duration::ZERO, unix_ms: 1_000_000 },
            journal: Journal::default(),
            answers: BTreeMap::new(),
            notes: Vec::new(),
            last: Vec::new(),
            starts: Vec::new(),
            cancels: Vec::new(),
            checks: Vec::new(),
            dropped: Vec::new(),
            collections: 0,
            released: Vec::new(),
            notices: Vec::new(),
            tallies: Vec::new(),
            salt: CredentialsSalt::random(),
            absent: true,
            next_caller: 1,
        }
    }

    /// The agent is killed and started again: a new core from this one's journal.
    pub(super) fn kill(self, policy: Policy) -> Self {
        let mut next = Self::new(policy);
        next.now = self.now;
        next.journal = self.journal.clone();
        let pulls = self.journal.pulls.into_values().collect();
        let leases = self.journal.leases.into_values().collect();
        let effects = next.core.restore(pulls, leases, self.journal.limit, next.now);
        next.take(effects);
        next
    }

    /// As [`Self::kill`]; then the runtime is found.
    pub(super) fn restart(self, policy: Policy) -> Self {
        let mut next = self.kill(policy);
        next.runtime_up();
        next
    }

    /// Hands over, through JSON, to a second core with the same settings, whose runtime is up.
    pub(super) fn hand_over(&mut self) -> (Self, HandedState) {
        let (state, effects) = self.core.hand_over(self.now);
        self.take(effects);
        let text = serde_json::to_string(&state).expect("written");
        let mut next = Self::new(self.core.policy.clone());
        (next.now, next.salt) = (self.now, self.salt.clone());
        let effects = next.core.take_over(serde_json::from_str(&text).expect("read"), next.now);
        next.take(effects);
        next.runtime_up();
        (next, state)
    }

    pub(super) fn reconcile(&mut self, records: Vec<PullRecord>, leases: Vec<KeptLease>, limit: Option<u32>) {
        let effects = self.core.reconcile(records, leases, limit, self.now);
        self.take(effects);
    }

    pub(super) fn event(&mut self, event: impl Into<PullEvent>) {
        let effects = self.core.handle(event.into(), self.now);
        self.take(effects);
        while let Some(pull) = self.core.undecided().filter(|_| self.absent) {
            if let Some(asked) = self.checks.iter().rposition(|asked| *asked == pull) {
                self.checks.remove(asked);
            }
            let before = std::mem::take(&mut self.last);
            let effects =
                self.core.handle(RuntimeEvent::PullPresence { pull, present: Some(false) }.into(), self.now);
            self.take(effects);
            self.last.splice(0..0, before);
        }
    }

    pub(super) fn runtime_up(&mut self) {
        self.event(RuntimeEvent::RuntimeChanged(Ok(CONTAINERD)));
    }

    pub(super) fn runtime_down(&mut self, reason: &str) {
        self.event(RuntimeEvent::RuntimeChanged(Err(reason.into())));
    }

    pub(super) fn reported_ends(&self) -> Vec<HandedEnd> {
        let ended = |effect: &Effect| match effect {
            Effect::ReportToSuccessor(end) => Some(end.clone()),
            _ => None,
        };
        self.last.iter().filter_map(ended).collect()
    }

    pub(super) fn take(&mut self, mut effects: Vec<Effect>) {
        if self.core.is_handed_over() {
            effects.retain(|effect| !effect.is_left_to_successor());
        }
        for (index, effect) in effects.iter().enumerate() {
            match effect {
                Effect::Persist(write) => self.journal.apply(write),
                Effect::Runtime(RuntimeCommand::CheckPresent { pull, .. }) => self.checks.push(*pull),
                Effect::Start { pull, attempt, .. } => {
                    let persisted = effects[..index].iter().rev().any(|before| {
                        matches!(before, Effect::Persist(Write::PutPull(record))
                            if record.id == pull.0 && record.attempts == *attempt)
                    });
                    assert!(persisted, "start of {pull:?} without its record: {effects:#?}");
                    self.starts.push((*pull, *attempt));
                }
                Effect::Runtime(RuntimeCommand::CancelPull { pull, attempt }) => {
                    self.cancels.push((*pull, *attempt))
                }
                Effect::Reply { caller, answer } => {
                    let before = self.answers.insert(*caller, answer.clone());
                    assert!(before.is_none(), "{caller:?} was answered twice");
                }
                Effect::Runtime(RuntimeCommand::DropLease { lease, collect }) => {
                    self.dropped.push(lease.clone());
                    self.collections += u32::from(*collect);
                }
                Effect::Released(release) => self.released.push(release.clone()),
                Effect::Runtime(_) | Effect::ReportToSuccessor(_) | Effect::LimitStored => {}
                Effect::Notice(notice) => self.notices.push(notice.clone()),
                Effect::Count(tally) => self.tallies.push(*tally),
                Effect::Note(note) => self.notes.push(note.clone()),
            }
        }
        self.last = effects;
        self.core.check();
    }

    pub(super) fn ask(&mut self, ask: Ask) -> CallerId {
        self.ask_within(ask, None)
    }

    pub(super) fn ask_within(&mut self, ask: Ask, timeout: Option<Duration>) -> CallerId {
        let caller = CallerId(self.next_caller);
        self.next_caller += 1;
        let call = ask.call(&self.salt);
        self.event(PullEvent::Request { caller, call, timeout });
        caller
    }

    /// A new caller, and the pull it waits for.
    pub(super) fn request(&mut self, ask: Ask) -> (CallerId, PullId) {
        let caller = self.ask(ask);
        (caller, self.pull(caller))
    }

    pub(super) fn pull(&self, caller: CallerId) -> PullId {
        self.core.callers.get(&caller).unwrap_or_else(|| panic!("{caller:?} does not wait")).pull
    }

    pub(super) fn leave(&mut self, caller: CallerId) {
        self.event(PullEvent::CallerLeft(caller));
    }

    pub(super) fn finish(&mut self, pull: PullId, outcome: Outcome) {
        let attempt = self.core.pulls.get(&pull).map_or(0, |pull| pull.attempts);
        self.event(RuntimeEvent::PullFinished { pull, attempt, outcome });
    }

    /// The pull of this caller succeeds, which answers the caller.
    #[track_caller]
    pub(super) fn succeed(&mut self, caller: CallerId) {
        self.finish(self.pull(caller), ok());
        assert!(self.succeeded(caller), "{caller:?}");
    }

    pub(super) fn progress(&mut self, pull: PullId, progress: Progress) {
        self.event(RuntimeEvent::PullProgress { pull, progress });
    }

    pub(super) fn present(&mut self, pull: PullId, present: Option<bool>) {
        self.event(RuntimeEvent::PullPresence { pull, present });
    }

    /// Advances time, with a tick whenever the core asks for one.
    pub(super) fn pass(&mut self, time: Duration) {
        let end = self.now.mono + time;
        while let Some(at) = self.core.next_tick().filter(|at| *at <= end) {
            self.at(at.max(self.now.mono));
            self.event(PullEvent::Tick);
            assert!(self.core.next_tick().is_none_or(|next| next > self.now.mono), "ticks for ever");
        }
        self.at(end);
    }

    fn at(&mut self, mono: Duration) {
        self.now = Now { unix_ms: self.now.unix_ms_at(mono), mono };
    }

    pub(super) fn running(&self) -> u32 {
        self.core.counted
    }

    pub(super) fn queued(&self) -> u32 {
        self.core.counts().queued
    }

    pub(super) fn waits(&self, caller: CallerId) -> bool {
        self.core.callers.contains_key(&caller)
    }

    #[track_caller]
    pub(super) fn status(&self, caller: CallerId) -> WireStatus {
        match self.answers.get(&caller) {
            Some(Answer::Runtime(reply)) => reply.result.clone().expect_err("a status"),
            other => panic!("{caller:?}: {other:?} is no status of the runtime"),
        }
    }

    #[track_caller]
    pub(super) fn refusal(&self, caller: CallerId) -> Refusal {
        match self.answers.get(&caller) {
            Some(Answer::Refused(refusal)) => refusal.clone(),
            other => panic!("{caller:?}: {other:?} is no refusal"),
        }
    }

    /// The caller waits until a second before this time, and is refused then.
    #[track_caller]
    pub(super) fn refused_after(&mut self, caller: CallerId, after_seconds: u64) -> Refusal {
        self.pass(seconds(after_seconds - 1));
        assert!(self.waits(caller), "{caller:?} was answered too early");
        self.pass(seconds(1));
        self.refusal(caller)
    }

    pub(super) fn succeeded(&self, caller: CallerId) -> bool {
        matches!(self.answers.get(&caller), Some(Answer::Runtime(reply)) if reply.result.is_ok())
    }

    /// In the order of first starts.
    pub(super) fn started(&self) -> Vec<PullId> {
        self.starts.iter().map(|(pull, _)| *pull).collect()
    }

    pub(super) fn finished(&self) -> Vec<PullEnd> {
        self.core.finished.iter().map(|pull| pull.end.clone()).collect()
    }

    /// Lease and option of the pull's start, if the last event started it.
    pub(super) fn start_of(&self, pull: PullId) -> Option<(Option<String>, Option<u32>)> {
        self.last.iter().find_map(|effect| match effect {
            Effect::Start { pull: started, lease, option, .. } if *started == pull => {
                Some((lease.clone(), *option))
            }
            _ => None,
        })
    }

    pub(super) fn reaped(&self) -> Option<&[String]> {
        self.last.iter().find_map(|effect| {
            if let Effect::Runtime(RuntimeCommand::ReapLeases(keep)) = effect {
                Some(&keep[..])
            } else {
                None
            }
        })
    }
}

impl Core {
    pub(super) fn check(&self) {
        let lane = |lane| self.pulls.values().filter(|pull| pull.lane == Some(lane)).count();
        assert_eq!(self.counted as usize, lane(Lane::Counted), "counted slots");
        assert_eq!(self.present_running as usize, lane(Lane::Present), "present slots");
        let places = |which: fn(&super::Pull) -> bool| -> HashSet<super::Place> {
            self.pulls.values().filter(|pull| which(pull)).map(super::Pull::place).collect()
        };
        assert_eq!(places(|pull| pull.lane.is_some()), self.slots.iter().copied().collect(), "slots");
        assert_eq!(
            places(|pull| matches!(pull.stage, Stage::Held { .. })),
            self.held.iter().copied().collect(),
            "held"
        );
        assert_eq!(places(super::Pull::is_queued), self.queue.places().collect(), "queue");
        let by_registry: u32 = self.by_registry.values().sum();
        assert_eq!(by_registry, self.counted, "slots by registry");
        assert!(self.by_registry.values().all(|count| *count > 0), "no registry without a slot is kept");
        for pull in self.pulls.values() {
            let holds = matches!(
                pull.stage,
                Stage::Running | Stage::Predecessor | Stage::Lost { .. } | Stage::Pausing { .. }
            );
            assert_eq!(pull.lane.is_some(), holds, "{:?} {:?}", pull.stage, pull.lane);
            assert_eq!(pull.options.values().sum::<usize>(), pull.callers.len(), "options of callers");
            let abandoned = pull.cancel_at.is_some();
            assert!(
                !abandoned || (matches!(pull.stage, Stage::Running) && pull.callers.is_empty()),
                "{pull:?}"
            );
            let alone = pull.callers.is_empty() && !abandoned && !pull.resumed && !self.draining;
            assert!(!alone, "{pull:?} has no caller");
        }
        for (id, caller) in &self.callers {
            let pull = self.pulls.get(&caller.pull).expect("a caller's pull exists");
            assert!(pull.callers.contains(id), "a pull knows its callers");
            let gone = caller.pod.as_ref().is_some_and(|pod| self.deleted_pods.pod(&pod.uid).is_some());
            assert!(!(gone && pull.has_not_begun()), "{id:?} waits for a pod that is gone");
        }
        let callers: usize = self.pulls.values().map(|pull| pull.callers.len()).sum();
        assert_eq!(callers, self.callers.len(), "callers");
        let by_image: usize = self.by_image.values().map(Vec::len).sum();
        assert_eq!(by_image, self.pulls.len(), "index by image");
        for (key, id) in &self.by_key {
            let of_pull = self.pulls.get(id).map(|pull| self.key_of(&pull.call));
            assert_eq!(of_pull.as_ref(), Some(key), "index by key");
        }
        let present = |(_, id): &super::Place| self.pulls.get(id).is_some_and(super::Pull::is_queued);
        assert!(self.present.iter().all(present), "present are queued");
        assert!(self.retained_bytes() <= self.policy.retained_bytes_max, "the budget");
        assert!(self.retains() || self.kept.is_empty(), "retained although nothing may be");
        self.check_timers();
    }

    /// No timer outlives its purpose, and none is missing.
    fn check_timers(&self) {
        use super::Timer as T;
        for (at, timer) in &self.timers {
            let known = match timer {
                T::Deadline(caller) | T::GiveUp(caller) | T::Hold(caller) | T::Notice(caller) => {
                    self.callers.contains_key(caller)
                }
                T::Wanted => self.wanted_at == Some(*at),
                T::LeaseExpiry(lease) => self.kept.get(lease).is_some_and(|kept| kept.until == *at),
                T::Space => self.space.check_at == Some(*at),
                T::RenewLeases => self.space.renew_at == Some(*at),
                T::Reap => self.reap_at == Some(*at),
                T::Grace(id)
                | T::Held(id)
                | T::Lost(id)
                | T::Pause(id)
                | T::Presence(id)
                | T::PullTime(id)
                | T::PresentLane(id) => self
                    .pulls
                    .get(id)
                    .is_some_and(|pull| pull.timers().any(|own| own == (*at, timer.clone()))),
            };
            assert!(known, "{timer:?} at {at:?} is for nothing");
        }
        for pull in self.pulls.values() {
            assert!(pull.timers().all(|timer| self.timers.contains(&timer)), "timers of {pull:?}");
            let watched = matches!(pull.stage, Stage::Running) && self.policy.max_pull_time.is_some();
            assert_eq!(pull.give_up_at.is_some(), watched, "time limit of {pull:?}");
        }
        for (lease, kept) in &self.kept {
            assert!(self.timers.contains(&(kept.until, T::LeaseExpiry(lease.clone()))), "expiry of {lease}");
        }
    }

    /// The pull with a free slot that waits for its presence check.
    fn undecided(&self) -> Option<PullId> {
        let (_, id) = self.queue.next(|class| self.slot_free(class))?;
        let decides = !self.draining && matches!(self.health, super::Health::Up(_));
        (decides && self.awaits_presence(id)).then_some(id)
    }

    /// The journal as the core would rewrite it.
    pub(super) fn journal(&self, now: Now) -> Journal {
        let mut journal = Journal::default();
        for write in self.journal_writes(now) {
            journal.apply(&write);
        }
        journal
    }
}
