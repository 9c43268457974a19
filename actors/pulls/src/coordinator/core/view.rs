//! The pulls as shown by the debug API and metrics.
//!
//! Owns: the debug API's `PullList` and `Limit`, made from the core, and the download rate. The cost of a call depends
//! on what it shows: a queue of ten thousand is counted, not walked.

use std::{collections::VecDeque, time::Duration};

use keelson_actor_system::{
    clock::Now,
    reports::{PullsView, RuntimeAvailability},
};
use keelson_proto::debug as pb;

use super::{Core, FinishedPull, HISTORY, Health, Lane, Pull, PullEnd, Stage};
use crate::{
    coordinator::record::{KeptLease, Write},
    request::PullId,
    runtime::Progress,
};

#[derive(Debug, Default)]
pub(super) struct Rate {
    readings: VecDeque<(Duration, u64)>,
}

impl Rate {
    const WINDOW: Duration = Duration::from_secs(5);

    pub(super) fn add(&mut self, at: Duration, bytes: u64) {
        self.readings.push_back((at, bytes));
        while self.readings.len() > 2
            && self.readings.front().is_some_and(|(first, _)| *first + Self::WINDOW < at)
        {
            self.readings.pop_front();
        }
    }

    fn per_second(&self, now: Duration) -> u64 {
        let (Some((first, before)), Some((_, after))) = (self.readings.front(), self.readings.back()) else {
            return 0;
        };
        let millis = now.saturating_sub(*first).as_millis().max(1);
        u64::try_from(u128::from(after.saturating_sub(*before)) * 1000 / millis).unwrap_or(u64::MAX)
    }
}

fn narrow_ms(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

fn narrow(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

impl Core {
    #[must_use]
    pub(crate) fn limit_view(&self) -> pb::Limit {
        let wanted = self.policy.enforce_by_runtime;
        let by_runtime = self.runtime_enforces();
        let note = match (wanted && !by_runtime, &self.health) {
            (false, _) => "",
            (true, Health::Up(_)) => {
                "the runtime does not support the pull option; the agent enforces the limit"
            }
            (true, _) => {
                "the runtime is down; the agent enforces the limit until the runtime reports its features"
            }
        };
        pb::Limit {
            max_parallel_image_pulls: self.limit(),
            configured: self.policy.limit,
            overridden: self.limit_override.is_some(),
            when_full: if self.policy.reject { "reject" } else { "wait" }.into(),
            enforced_by: if by_runtime { "runtime" } else { "agent" }.into(),
            enforce_note: note.into(),
            per_registry: self.policy.per_registry,
        }
    }

    /// Running pulls, the head of the queue, and the last finished pulls.
    #[must_use]
    pub(crate) fn list(&self, max_queued: usize, now: Now) -> pb::PullList {
        let show = |id: &PullId, position| self.pulls.get(id).map(|pull| self.show(pull, position, now));
        let mut pulls: Vec<pb::Pull> = self.slots.iter().filter_map(|(_, id)| show(id, 0)).collect();
        for (index, (_, id)) in self.queue.places().take(max_queued).enumerate() {
            pulls.extend(show(&id, narrow(index + 1)));
        }
        pulls.extend(self.held.iter().take(max_queued).filter_map(|(_, id)| show(id, 0)));
        let (runtime_health, runtime_error) = match &self.health {
            Health::Unknown => ("unknown", ""),
            Health::Up(_) => ("up", ""),
            Health::Down(reason) => ("down", reason.as_str()),
        };
        pb::PullList {
            limit: Some(self.limit_view()),
            running: self.counted,
            queued: narrow(self.queue.len()),
            callers: narrow(self.callers.len()),
            oldest_wait_ms: self
                .oldest_wait(now)
                .map_or(0, |wait| i64::try_from(wait.as_millis()).unwrap_or(0)),
            pulls,
            finished: self.finished.iter().take(HISTORY).map(finished_to_proto).collect(),
            runtime_health: runtime_health.into(),
            runtime_error: runtime_error.into(),
            retained: narrow(self.kept.len()),
            retained_bytes: self.retained_bytes(),
            // The front counts these.
            passed_through: 0,
        }
    }

    #[must_use]
    pub(crate) fn oldest_wait(&self, now: Now) -> Option<Duration> {
        let (_, id) = self.queue.places().next()?;
        self.pulls.get(&id).map(|pull| now.mono.saturating_sub(pull.requested.mono))
    }

    #[must_use]
    pub(crate) fn counts(&self) -> Counts {
        Counts {
            running: self.counted,
            present: self.present_running,
            queued: narrow(self.queue.len()),
            held: narrow(self.held.len()),
            callers: narrow(self.callers.len()),
            limit: self.limit(),
            retained: narrow(self.kept.len()),
            retained_bytes: self.retained_bytes(),
        }
    }

    /// Input of the node condition `ImagePullsStalled`. The cost does not depend on the length of the queue. The actor
    /// knows whether the state is `durable`.
    #[must_use]
    pub(crate) fn pulls_view(&self, durable: bool, now: Now) -> PullsView {
        let since = |then: Duration| now.mono.saturating_sub(then);
        PullsView {
            queued: narrow(self.queue.len()),
            running: self.counted.saturating_add(self.present_running),
            oldest_wait: self.oldest_wait(now),
            since_progress: self.last_progress.map(since),
            runtime: match &self.health {
                Health::Unknown => RuntimeAvailability::Unknown,
                Health::Up(_) => RuntimeAvailability::Up,
                Health::Down(reason) => RuntimeAvailability::Down {
                    down_for: self.away_since.map(since).unwrap_or_default(),
                    reason: reason.clone(),
                },
            },
            durable,
        }
    }

    #[must_use]
    pub(crate) fn ended(&self) -> u64 {
        self.ended
    }

    /// Pulls that ended after the first `ended` ones, among those of the last event and the twenty before.
    pub(crate) fn finished_since(&self, ended: u64) -> impl Iterator<Item = &FinishedPull> {
        let new = usize::try_from(self.ended.saturating_sub(ended)).unwrap_or(usize::MAX);
        self.finished.iter().take(new)
    }

    /// Of the first caller.
    #[must_use]
    pub(crate) fn first_wait(&self, id: PullId, now: Now) -> Duration {
        self.pulls.get(&id).map_or(Duration::ZERO, |pull| now.mono.saturating_sub(pull.requested.mono))
    }

    #[must_use]
    pub(crate) fn journal_writes(&self, now: Now) -> Vec<Write> {
        let pulls = self.pulls.values().map(|pull| Write::PutPull(pull.record()));
        let leases = self.kept.iter().map(|(lease, kept)| {
            let (image, expires_unix_ms) = (kept.image.to_string(), now.unix_ms_at(kept.until));
            Write::PutLease(KeptLease { lease: lease.clone(), image, expires_unix_ms })
        });
        pulls.chain(leases).chain([Write::Limit(self.limit_override)]).collect()
    }

    fn show(&self, pull: &Pull, position: u32, now: Now) -> pb::Pull {
        pb::Pull {
            id: pull.id.0,
            image: pull.call.image.to_string(),
            registry: pull.call.name.registry().to_string(),
            runtime_handler: pull.call.key.handler.to_string(),
            state: state(pull).into(),
            position,
            callers: narrow(pull.callers.len()),
            attempts: pull.attempts,
            with_credentials: pull.with_credentials,
            pod: pull
                .call
                .pod
                .as_ref()
                .map(|pod| format!("{}/{}", pod.namespace, pod.name))
                .unwrap_or_default(),
            requested_unix_ms: pull.requested.unix_ms,
            started_unix_ms: pull.started.map_or(0, |at| at.unix_ms),
            finished_unix_ms: 0,
            progress: pull.progress.map(|progress| {
                let idle = now.mono.saturating_sub(pull.progressed);
                progress_to_proto(progress, pull.rate.per_second(now.mono), idle)
            }),
            error: match &pull.stage {
                Stage::Lost { reply, .. } => reply
                    .result
                    .as_ref()
                    .err()
                    .map(|status| pull.call.scrub(&status.message))
                    .unwrap_or_default(),
                _ => String::new(),
            },
            resumed: pull.resumed,
            ..Default::default()
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub running: u32,
    pub present: u32,
    pub queued: u32,
    /// Pulls from the journal that wait for a caller with credentials.
    pub held: u32,
    pub callers: u32,
    /// The limit in force; 0: none.
    pub limit: u32,
    pub retained: u32,
    /// As far as measured.
    pub retained_bytes: u64,
}

fn state(pull: &Pull) -> pb::PullState {
    use pb::PullState as S;
    match (&pull.stage, pull.lane) {
        (Stage::Queued { presence: super::Presence::Asked | super::Presence::Late }, _) => S::Checking,
        (Stage::Queued { .. }, _) => S::Queued,
        (Stage::Running, _) if pull.cancel_at.is_some() => S::Abandoned,
        (Stage::Running | Stage::Predecessor, Some(Lane::Present)) => S::RunningPresent,
        (Stage::Running | Stage::Predecessor, _) => S::Running,
        (Stage::Lost { .. }, _) => S::WaitingForRuntime,
        (Stage::Pausing { .. }, _) => S::Retrying,
        (Stage::Held { .. }, _) => S::Held,
    }
}

fn progress_to_proto(progress: Progress, bytes_per_second: u64, idle: Duration) -> pb::Progress {
    pb::Progress {
        bytes_done: progress.bytes_done,
        bytes_total: progress.bytes_total,
        layers_done: progress.layers_done,
        layers_total: progress.layers_total,
        bytes_per_second,
        idle_ms: i64::try_from(idle.as_millis()).unwrap_or(i64::MAX),
        phase: progress.phase.name().into(),
    }
}

fn finished_to_proto(pull: &FinishedPull) -> pb::Pull {
    let (state, error) = match &pull.end {
        PullEnd::Succeeded => (pb::PullState::Succeeded, ""),
        PullEnd::Failed(error) | PullEnd::Refused(error) => (pb::PullState::Failed, error.as_str()),
        PullEnd::Cancelled => (pb::PullState::Cancelled, ""),
    };
    pb::Pull {
        id: pull.id.0,
        image: pull.image.to_string(),
        registry: pull.registry.to_string(),
        runtime_handler: pull.handler.to_string(),
        state: state.into(),
        attempts: pull.attempts,
        with_credentials: pull.with_credentials,
        pod: pull.pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name)).unwrap_or_default(),
        requested_unix_ms: pull.requested_unix_ms,
        started_unix_ms: pull.started_unix_ms.unwrap_or(0),
        finished_unix_ms: pull.finished_unix_ms,
        progress: pull.progress.map(|progress| progress_to_proto(progress, 0, Duration::ZERO)),
        error: error.into(),
        resumed: pull.resumed,
        reason: pull.why.reason.into(),
        queue_wait_ms: narrow_ms(pull.queue_wait),
        pull_time_ms: pull.pull_time.map_or(0, narrow_ms),
        ..Default::default()
    }
}
