//! Whether another process renews the same Lease, and which one stands back.
//!
//! Owns: [`Contest`], which compares the renewTime that is read with those that this process wrote. In: Leases that
//! were read, own writes. Out: a [`Verdict`] for each Lease that is read, and [`Contention`] for the StatusReporter.
//!
//! A renewTime that changed and that this process did not write is a renewal by another process; two of them within two
//! periods are a second writer. A single one is a manual edit, or the last renewal of the predecessor.
//!
//! An agent that may stand back marks the Lease as its own with `spec.acquireTime`, its *claim*. A kubelet does not
//! change the field and never yields, so the agent yields to a second writer without a claim; of two claims the earlier
//! one wins.

use std::{collections::VecDeque, time::Duration};

use keelson_actor_system::{clock::Now, cluster::ObservedLease};

use crate::lease::LeaseRecord;

/// Maximum number of own renewTimes remembered: more than the tries of two syncs.
const SENT_MAX: usize = 32;
/// Maximum validity of another process's Lease that is waited for: that of `node.lease_duration`.
const MAX_LEASE_DURATION: Duration = Duration::from_secs(600);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Contention {
    /// The Lease has not been read since the start, or was renewed recently by a process that may still run.
    Undecided,
    #[default]
    Uncontested,
    /// Another process renews the Lease too, and this one continues.
    Contested,
    /// Another process renews the Lease, and this one does not.
    StandingBack,
}

impl Contention {
    /// The value of `contention` in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Undecided => "undecided",
            Self::Uncontested => "uncontested",
            Self::Contested => "contested",
            Self::StandingBack => "standing back",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Renew,
    /// Read it again after this time: another process may renew it.
    Observe(Duration),
    /// Leave it to the other process, and read it again after an interval.
    StandBack,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Unread,
    /// Read again at this time of the monotonic clock.
    Observing {
        until: Duration,
    },
    Free,
    Contested {
        since: Duration,
    },
    /// The last renewal by the other process was at `last_renewed`; after `silence` without one this process takes the
    /// Lease.
    StandingBack {
        last_renewed: Duration,
        silence: Duration,
    },
}

#[derive(Debug)]
pub(super) struct Contest {
    may_stand_back: bool,
    interval: Duration,
    duration: Duration,
    mode: Mode,
    /// renewTimes of this process's writes, including those whose answer was lost, in Unix microseconds.
    sent: VecDeque<i64>,
    /// renewTime as last read or confirmed, in Unix microseconds.
    known: Option<i64>,
    /// The last renewal by another process, on the monotonic clock.
    foreign: Option<Duration>,
    since_unix_ms: Option<i64>,
    /// The acquireTime that this process writes, in Unix microseconds.
    claim: Option<i64>,
    unreadable: bool,
}

impl Contest {
    pub(super) fn new(may_stand_back: bool, interval: Duration, duration: Duration) -> Self {
        Self {
            may_stand_back,
            interval,
            duration,
            mode: Mode::Unread,
            sent: VecDeque::new(),
            known: None,
            foreign: None,
            since_unix_ms: None,
            claim: None,
            unreadable: false,
        }
    }

    pub(super) fn contention(&self) -> Contention {
        match self.mode {
            // A status does not wait for an unreadable Lease.
            Mode::Unread if !self.may_stand_back || self.unreadable => Contention::Uncontested,
            Mode::Unread | Mode::Observing { .. } => Contention::Undecided,
            Mode::Free => Contention::Uncontested,
            Mode::Contested { .. } => Contention::Contested,
            Mode::StandingBack { .. } => Contention::StandingBack,
        }
    }

    pub(super) fn since_unix_ms(&self) -> Option<i64> {
        self.since_unix_ms
    }

    /// The acquireTime to write with the next renewal, if it has to change.
    pub(super) fn claim(&mut self, now_unix_us: i64, acquired: Option<i64>) -> Option<i64> {
        if !self.may_stand_back {
            return None;
        }
        let claim = *self.claim.get_or_insert(now_unix_us);
        (acquired != Some(claim)).then_some(claim)
    }

    pub(super) fn sends(&mut self, renew_unix_us: i64) {
        if self.sent.len() >= SENT_MAX {
            self.sent.pop_front();
        }
        self.sent.push_back(renew_unix_us);
    }

    /// This process created the Lease, with this acquireTime and renewTime.
    pub(super) fn made(&mut self, unix_us: i64) {
        self.claim = Some(unix_us);
        self.known = Some(unix_us);
    }

    pub(super) fn renewed(&mut self, renew_unix_us: i64, now: Now) {
        self.known = Some(renew_unix_us);
        let is_quiet = self.foreign.is_none_or(|at| now.mono.saturating_sub(at) >= self.duration);
        if let Mode::Contested { .. } = self.mode
            && is_quiet
        {
            self.free();
        }
    }

    fn free(&mut self) {
        self.mode = Mode::Free;
        self.foreign = None;
        self.since_unix_ms = None;
    }

    /// The Lease could not be read: a silent process cannot be distinguished from a failing API server.
    pub(super) fn unread(&mut self, now: Now) {
        self.unreadable = true;
        if let Mode::StandingBack { last_renewed, .. } = &mut self.mode {
            *last_renewed = now.mono;
        }
    }

    /// The Lease does not exist. Returns whether this process may create it.
    pub(super) fn may_create(&mut self, now: Now) -> bool {
        self.unreadable = false;
        match self.mode {
            Mode::StandingBack { last_renewed, silence }
                if now.mono.saturating_sub(last_renewed) < silence =>
            {
                false
            }
            Mode::Unread | Mode::Observing { .. } | Mode::StandingBack { .. } => {
                self.take();
                true
            }
            Mode::Free | Mode::Contested { .. } => true,
        }
    }

    fn take(&mut self) {
        self.claim = None;
        self.free();
    }

    /// The Lease was read. `record`: from an earlier process with this state folder.
    pub(super) fn read(
        &mut self,
        seen: &ObservedLease,
        record: Option<&LeaseRecord>,
        now: Now,
    ) -> (Verdict, bool) {
        self.unreadable = false;
        let is_own = seen.renew_unix_us.is_none_or(|at| self.sent.contains(&at));
        let is_foreign = !is_own && self.known.is_some() && seen.renew_unix_us != self.known;
        self.known = seen.renew_unix_us.or(self.known);
        let verdict = match self.mode {
            Mode::Unread => self.first_read(seen, record, now),
            Mode::Observing { .. } if is_foreign => self.stand_back(seen, now),
            Mode::Observing { until } if now.mono < until => Verdict::Observe(until.saturating_sub(now.mono)),
            Mode::Observing { .. } => {
                self.take();
                Verdict::Renew
            }
            Mode::StandingBack { silence, .. } if is_foreign => {
                self.mode = Mode::StandingBack { last_renewed: now.mono, silence };
                Verdict::StandBack
            }
            Mode::StandingBack { last_renewed, silence }
                if now.mono.saturating_sub(last_renewed) < silence =>
            {
                Verdict::StandBack
            }
            Mode::StandingBack { .. } => {
                self.take();
                Verdict::Renew
            }
            Mode::Free | Mode::Contested { .. } if is_foreign => self.second_writer(seen, now),
            Mode::Free | Mode::Contested { .. } => Verdict::Renew,
        };
        (verdict, is_foreign)
    }

    /// The renewal period of this Lease: a quarter of its duration, at least this process's own.
    fn period(&self, seen: &ObservedLease) -> Duration {
        (Self::lease_duration(seen) / 4).max(self.interval)
    }

    fn lease_duration(seen: &ObservedLease) -> Duration {
        let seconds = u64::try_from(seen.duration_seconds.unwrap_or_default()).unwrap_or_default();
        Duration::from_secs(seconds).min(MAX_LEASE_DURATION)
    }

    /// A Lease renewed within one and a half periods may have a process that renews it, unless that was a predecessor
    /// of this one.
    fn first_read(&mut self, seen: &ObservedLease, record: Option<&LeaseRecord>, now: Now) -> Verdict {
        let is_predecessors = record.is_some_and(|record| {
            !record.stood_back
                && record.uid == seen.written.uid
                && seen.holder.as_ref() == Some(&record.holder)
                && (record.acquired_unix_us.is_none() || record.acquired_unix_us == seen.acquire_unix_us)
        });
        let limit = self.period(seen).mul_f64(1.5);
        let age = seen.renew_unix_us.map(|at| super::unix_us(now).saturating_sub(at));
        // A time in the future counts as now.
        let age = age.map(|age| Duration::from_micros(u64::try_from(age).unwrap_or_default()));
        match age {
            Some(age) if self.may_stand_back && !is_predecessors && age < limit => {
                let pause = limit.saturating_sub(age);
                self.mode = Mode::Observing { until: now.mono.saturating_add(pause) };
                Verdict::Observe(pause)
            }
            _ => {
                self.free();
                Verdict::Renew
            }
        }
    }

    fn second_writer(&mut self, seen: &ObservedLease, now: Now) -> Verdict {
        let within = self.period(seen).mul_f64(2.5);
        let again = self.foreign.replace(now.mono).is_some_and(|at| now.mono.saturating_sub(at) <= within);
        if self.mode == Mode::Free && again {
            self.mode = Mode::Contested { since: now.mono };
            self.since_unix_ms = Some(now.unix_ms);
        }
        match self.mode {
            Mode::Contested { since } if self.yields(seen, now.mono.saturating_sub(since)) => {
                self.stand_back(seen, now)
            }
            _ => Verdict::Renew,
        }
    }

    /// Whether this process stands back. One with a later claim has the duration of a Lease to do so.
    fn yields(&self, seen: &ObservedLease, contested_for: Duration) -> bool {
        let is_later = match (seen.acquire_unix_us, self.claim) {
            (Some(theirs), Some(ours)) => theirs > ours,
            _ => false,
        };
        self.may_stand_back && (!is_later || contested_for >= self.duration)
    }

    fn stand_back(&mut self, seen: &ObservedLease, now: Now) -> Verdict {
        self.since_unix_ms.get_or_insert(now.unix_ms);
        let silence = self.duration.max(Self::lease_duration(seen));
        self.mode = Mode::StandingBack { last_renewed: now.mono, silence };
        Verdict::StandBack
    }
}
