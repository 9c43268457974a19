//! Test helpers.
//!
//! Owns: [`Bench`], a core with test clocks, which checks that at most one request is under way; [`Server`], an API
//! server with one Lease and one Node that fails on demand.

use std::{collections::VecDeque, time::Duration};

use keelson_actor_system::{
    clock::Now,
    cluster::{ApiError, ApiErrorKind, JobHealth, LeaseCreate, LeasePatch, ObservedLease, Written},
};

use super::{Answer, Core, Counted, Effect, Event, LeasePolicy, Request};
use crate::lease::LeaseRecord;

pub(crate) const SERVER: &str = "https://api.example";
pub(crate) const START_MS: i64 = 1_700_000_000_000;

pub(crate) const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub(crate) const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(crate) fn policy() -> LeasePolicy {
    LeasePolicy {
        name: "web-1".into(),
        holder: "web-1".into(),
        node: "web-1".into(),
        duration: seconds(40),
        drops_managed_fields: true,
        may_stand_back: false,
    }
}

pub(crate) fn error(kind: ApiErrorKind) -> ApiError {
    ApiError { server: SERVER.into(), kind, reason: kind.name().into() }
}

pub(crate) fn name_of(request: &Request) -> &'static str {
    match request {
        Request::Read => "GET",
        Request::Create(_) => "POST",
        Request::Renew(_) => "PATCH",
        Request::Node => "GET node",
    }
}

#[derive(Debug, Default)]
pub(crate) struct Server {
    pub(crate) lease: Option<ObservedLease>,
    pub(crate) node: Option<String>,
    /// Answer to every request, and its delay.
    pub(crate) down: Option<(ApiErrorKind, Duration)>,
    /// Answers to the next requests; `None`: no fault.
    pub(crate) next: VecDeque<Option<ApiErrorKind>>,
    /// Every renewal finds that another process was faster.
    pub(crate) second_writer: bool,
    /// Number of renewals that are carried out with a lost answer.
    pub(crate) swallows: u32,
    pub(crate) version: u64,
    pub(crate) writes: u32,
}

impl Server {
    pub(crate) fn with_node() -> Self {
        Self { node: Some("node-uid".into()), ..Self::default() }
    }

    /// A Lease that was renewed this long ago.
    pub(crate) fn with_lease(holder: &str, renewed_ago: Duration) -> Self {
        let age = i64::try_from(renewed_ago.as_micros()).expect("small");
        let lease = ObservedLease {
            written: Written { uid: "lease-uid".into(), resource_version: "100".into() },
            owner_uid: Some("node-uid".into()),
            holder: Some(holder.into()),
            duration_seconds: Some(40),
            renew_unix_us: Some(START_MS * 1000 - age),
            acquire_unix_us: None,
            transitions: Some(3),
        };
        Self { lease: Some(lease), version: 100, ..Self::with_node() }
    }

    /// Another process writes the Lease.
    pub(crate) fn touch(&mut self) {
        self.version += 1;
        if let Some(lease) = &mut self.lease {
            lease.written.resource_version = self.version.to_string();
        }
    }

    pub(crate) fn renew_as_kubelet(&mut self, unix_ms: i64) {
        self.touch();
        if let Some(lease) = &mut self.lease {
            lease.renew_unix_us = Some(unix_ms * 1000 + 123);
        }
    }

    fn next_error(&mut self) -> Option<ApiErrorKind> {
        self.next.pop_front().flatten().or(self.down.map(|(kind, _)| kind))
    }

    pub(crate) fn serve(&mut self, request: &Request) -> Answer {
        let not_found = || error(ApiErrorKind::NotFound);
        let fault = self.next_error().map_or(Ok(()), |kind| Err(error(kind)));
        match request {
            Request::Read => Answer::Read(fault.and_then(|()| self.lease.clone().ok_or_else(not_found))),
            Request::Node => Answer::Node(fault.and_then(|()| self.node.clone().ok_or_else(not_found))),
            Request::Create(create) => Answer::Created(fault.and_then(|()| self.create(create))),
            Request::Renew(patch) if self.swallows > 0 => {
                self.swallows -= 1;
                // A conflict is no answer either.
                let _ = self.patch(patch);
                Answer::Renewed(Err(error(ApiErrorKind::Timeout)))
            }
            Request::Renew(patch) => Answer::Renewed(fault.and_then(|()| self.patch(patch))),
        }
    }

    fn create(&mut self, create: &LeaseCreate) -> Result<Written, ApiError> {
        if self.lease.is_some() {
            return Err(error(ApiErrorKind::AlreadyExists));
        }
        self.version += 1;
        self.writes += 1;
        let written =
            Written { uid: format!("uid-{}", self.version), resource_version: self.version.to_string() };
        self.lease = Some(ObservedLease {
            written: written.clone(),
            owner_uid: create.owner.as_ref().map(|owner| owner.uid.clone()),
            holder: Some(create.holder.clone()),
            duration_seconds: Some(create.duration_seconds),
            renew_unix_us: Some(create.now_unix_us),
            acquire_unix_us: Some(create.now_unix_us),
            transitions: Some(create.transitions),
        });
        Ok(written)
    }

    fn patch(&mut self, patch: &LeasePatch) -> Result<Written, ApiError> {
        if self.second_writer {
            self.touch();
        }
        let Some(lease) = &mut self.lease else { return Err(error(ApiErrorKind::NotFound)) };
        assert!(!patch.resource_version.is_empty(), "an unconditional patch");
        if lease.written.resource_version != patch.resource_version {
            return Err(error(ApiErrorKind::Conflict));
        }
        self.version += 1;
        self.writes += 1;
        lease.written.resource_version = self.version.to_string();
        lease.renew_unix_us = Some(patch.renew_unix_us);
        lease.duration_seconds = patch.duration_seconds.or(lease.duration_seconds);
        if let Some(owner) = &patch.owner {
            lease.owner_uid = Some(owner.uid.clone());
        }
        if let Some(acquire) = &patch.acquire {
            lease.holder = Some(acquire.holder.clone());
            lease.acquire_unix_us = Some(acquire.acquire_unix_us);
            lease.transitions = Some(acquire.transitions);
        }
        Ok(lease.written.clone())
    }
}

/// A second after the agent created the Lease; what it has requested until then is not in the log.
pub(crate) fn created() -> (Bench, Server) {
    let (mut bench, mut server) = (Bench::new(None), Server::with_node());
    bench.pass(seconds(1), &mut server);
    bench.log();
    (bench, server)
}

pub(crate) struct Bench {
    pub(crate) core: Core,
    pub(crate) now: Now,
    pub(crate) random: f64,
    pub(crate) asked: Option<(u64, Request)>,
    pub(crate) requests: Vec<(Duration, Request)>,
    /// When requests were sent after a pause that the server had asked for.
    pub(crate) after_pauses: Vec<Duration>,
    pub(crate) asked_for_pause: bool,
    pub(crate) closes: u32,
    pub(crate) record: Option<LeaseRecord>,
    pub(crate) persisted: u32,
    pub(crate) notes: Vec<(bool, String)>,
    pub(crate) counted: Vec<Counted>,
}

impl Bench {
    pub(crate) fn new(record: Option<LeaseRecord>) -> Self {
        Self::with(policy(), record)
    }

    pub(crate) fn with(policy: LeasePolicy, record: Option<LeaseRecord>) -> Self {
        Self {
            core: Core::new(policy, record.clone()),
            now: Now { mono: Duration::ZERO, unix_ms: START_MS },
            random: 0.5,
            asked: None,
            requests: Vec::new(),
            after_pauses: Vec::new(),
            asked_for_pause: false,
            closes: 0,
            record,
            persisted: 0,
            notes: Vec::new(),
            counted: Vec::new(),
        }
    }

    pub(crate) fn event(&mut self, event: Event) {
        for effect in self.core.handle(event, self.now, self.random) {
            match effect {
                Effect::Ask { number, request } => {
                    assert!(self.asked.is_none(), "two requests at once: {:?} and {request:?}", self.asked);
                    if self.asked_for_pause {
                        self.after_pauses.push(self.now.mono);
                    }
                    self.requests.push((self.now.mono, request.clone()));
                    self.asked = Some((number, request));
                }
                Effect::CloseConnections => self.closes += 1,
                Effect::Persist(record) => {
                    assert_ne!(self.record.as_ref(), Some(&record), "written without need");
                    self.record = Some(record);
                    self.persisted += 1;
                }
                Effect::Count(counted) => self.counted.push(counted),
                Effect::Note { warn, text } => self.notes.push((warn, text)),
            }
        }
        assert_eq!(self.core.next_tick().is_none(), self.asked.is_some(), "waits for a timer or an answer");
        // The view must never fail.
        let _ = self.core.view(SERVER, self.now);
    }

    pub(crate) fn answer(&mut self, answer: Answer) {
        let error = match &answer {
            Answer::Read(result) => result.as_ref().err(),
            Answer::Created(result) | Answer::Renewed(result) => result.as_ref().err(),
            Answer::Node(result) => result.as_ref().err(),
        };
        self.asked_for_pause = error.is_some_and(|error| {
            matches!(error.kind, ApiErrorKind::TooManyRequests { .. }) || error.kind.retry_after().is_some()
        });
        let (request, _) = self.asked.take().expect("a request under way");
        self.event(Event::Answered { request, answer });
    }

    pub(crate) fn at(&mut self, mono: Duration) {
        self.now = Now { unix_ms: self.now.unix_ms_at(mono), mono };
    }

    /// Advances time with this server, including timers and answers.
    pub(crate) fn pass(&mut self, time: Duration, server: &mut Server) {
        let end = self.now.mono + time;
        let mut turns = 0;
        loop {
            turns += 1;
            assert!(turns < 100_000, "sends requests without end");
            if let Some((_, request)) = self.asked.clone() {
                let takes = server.down.map_or(Duration::ZERO, |(_, takes)| takes);
                if self.now.mono + takes > end {
                    break;
                }
                self.at(self.now.mono + takes);
                let answer = server.serve(&request);
                self.answer(answer);
                continue;
            }
            match self.core.next_tick() {
                Some(at) if at <= end => {
                    self.at(at.max(self.now.mono));
                    self.event(Event::Tick);
                }
                _ => break,
            }
        }
        self.at(end.max(self.now.mono));
    }

    /// Steps the wall clock, but not the monotonic one.
    pub(crate) fn step(&mut self, millis: i64) {
        self.now.unix_ms += millis;
    }

    /// The requests since the last call, by name.
    pub(crate) fn log(&mut self) -> Vec<&'static str> {
        self.requests.drain(..).map(|(_, request)| name_of(&request)).collect()
    }

    /// As [`Self::log`], with the times of the requests in milliseconds.
    pub(crate) fn timed_log(&mut self) -> Vec<(u128, &'static str)> {
        self.requests.drain(..).map(|(at, request)| (at.as_millis(), name_of(&request))).collect()
    }

    pub(crate) fn patches(&self) -> Vec<LeasePatch> {
        let patch = |(_, request): &(Duration, Request)| {
            if let Request::Renew(patch) = request { Some(patch.clone()) } else { None }
        };
        self.requests.iter().filter_map(patch).collect()
    }

    /// Why the Lease is failing.
    #[track_caller]
    pub(crate) fn failure(&self) -> String {
        match self.core.health() {
            JobHealth::Failing { reason, .. } => reason,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn count_notes(&self, words: &str) -> usize {
        self.notes.iter().filter(|(_, text)| text.contains(words)).count()
    }

    pub(crate) fn count(&self, result: &str) -> usize {
        self.counted
            .iter()
            .filter(|counted| matches!(counted, Counted::Result(name) if *name == result))
            .count()
    }
}
