//! Retained content: the bytes of unfinished pulls that stay in the runtime for a retry.
//!
//! Owns: which leases are retained, for how long and at what cost, and when they are released. In: ends of pulls, sizes
//! of leases, readings of the image file system, the node condition DiskPressure, settings. Out: leases to drop, each
//! with a [`ReleaseReason`]; queries for sizes and free space; renewals.
//!
//! Retained bytes belong to no image, so the kubelet's image garbage collection cannot free them. Therefore they have a
//! budget, and all of them are released before the kubelet has to act: when less than `pulls.retain_min_free_percent`
//! of the image file system is free (stock kubelets collect images at 85% used and evict below 15% free), while
//! DiskPressure is True, and when any pull fails for lack of space.

use std::{sync::Arc, time::Duration};

use keelson_actor_system::{clock::Now, file_system::FileSystem};

use super::{Core, Effect, FailureClass, Health, PullEnd, Release, ReleaseReason, Stage, Timer};
use crate::coordinator::record::{KeptLease, Write};
use crate::runtime::RuntimeCommand;

/// Maximum number of retained leases; above it the lease that expires first is released.
const MAX_RETAINED: usize = 1024;
/// How often free space is read while anything is retained: several times between two passes of the kubelet's eviction
/// manager, which are 10 s apart.
const SPACE_INTERVAL: Duration = Duration::from_secs(2);
/// The interval while space is low and nothing is retained.
const LOW_SPACE_INTERVAL: Duration = Duration::from_secs(10);
/// How often leases in use and retained ones are checked for renewal. Leases of the runtime live for hours.
pub(super) const RENEW_INTERVAL: Duration = Duration::from_secs(600);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RetainedLease {
    /// When it expires, on the monotonic clock. Leases expire in the order in which they were retained.
    pub(super) until: Duration,
    pub(super) image: Arc<str>,
    /// `None`: not measured yet.
    bytes: Option<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Space {
    image_fs: Option<FileSystem>,
    disk_pressure: bool,
    pub(super) check_at: Option<Duration>,
    pub(super) renew_at: Option<Duration>,
}

impl Core {
    /// Why nothing can be retained now; `None`: retention is possible.
    fn no_retention(&self) -> Option<ReleaseReason> {
        let least = u64::from(self.policy.retain_min_free_percent);
        let is_low = |free: u64, all: u64| u128::from(free) * 100 < u128::from(all) * u128::from(least);
        if !self.policy.keep_progress || self.policy.retained_bytes_max == 0 {
            Some(ReleaseReason::Disabled)
        } else if self.space.disk_pressure {
            Some(ReleaseReason::DiskPressure)
        } else if self.space.image_fs.is_some_and(|fs| {
            is_low(fs.available_bytes, fs.capacity_bytes) || is_low(fs.inodes_free, fs.inodes)
        }) {
            Some(ReleaseReason::LowSpace)
        } else {
            None
        }
    }

    /// Whether the bytes of a pull that ends now without a failure of the runtime are retained.
    pub(super) fn retains(&self) -> bool {
        self.no_retention().is_none()
    }

    /// Retains or drops the lease of a pull that ended. `failure`: the runtime failed it.
    pub(super) fn settle_lease(
        &mut self,
        pull: &super::Pull,
        end: &PullEnd,
        failure: Option<FailureClass>,
        now: Now,
        fx: &mut Vec<Effect>,
    ) {
        let image = pull.call.key.image.clone();
        let Some(lease) = pull.lease.clone() else { return };
        let until = self.retained_until(pull, end, failure, now);
        if self.lease_in_use(&image, &lease) {
            self.pass_retention_on(&image, &lease, until);
            return;
        }
        let bytes = pull.progress.map(|progress| progress.bytes_done);
        let reason = if until.is_some() { self.no_retention() } else { failure.map(ReleaseReason::Failure) };
        match until {
            Some(until) if reason.is_none() => {
                self.retain(lease, image, bytes, until, now, fx);
            }
            _ => {
                let collect = reason.is_some_and(ReleaseReason::is_for_space);
                fx.push(Effect::Runtime(RuntimeCommand::DropLease { lease, collect }));
                // Settings that disable retention release at every end: not worth a report.
                if let Some(reason) = reason.filter(|reason| *reason != ReleaseReason::Disabled) {
                    fx.push(Effect::Released(Release { image, bytes, reason }));
                }
            }
        }
        if failure == Some(FailureClass::NoSpace) {
            self.release_all(ReleaseReason::Failure(FailureClass::NoSpace), fx);
        }
    }

    /// Until when a retry may use the content of the lease; `None`: it cannot.
    fn retained_until(
        &self,
        pull: &super::Pull,
        end: &PullEnd,
        failure: Option<FailureClass>,
        now: Now,
    ) -> Option<Duration> {
        match failure {
            _ if *end == PullEnd::Succeeded => None,
            // A denial says nothing about the content that pulls with other credentials have fetched.
            Some(FailureClass::Denied) => pull.inherited.filter(|until| *until > now.mono),
            Some(class) if !class.is_resumable() => None,
            _ => Some(now.mono + self.policy.progress_retention),
        }
    }

    /// Passes what a retry can use to the pulls that use the same lease.
    fn pass_retention_on(&mut self, image: &Arc<str>, lease: &str, until: Option<Duration>) {
        for id in self.by_image.get(image).into_iter().flatten() {
            if let Some(heir) = self.pulls.get_mut(id).filter(|pull| pull.lease.as_deref() == Some(lease)) {
                heir.inherited = heir.inherited.max(until);
            }
        }
    }

    fn retain(
        &mut self,
        lease: String,
        image: Arc<str>,
        bytes: Option<u64>,
        until: Duration,
        now: Now,
        fx: &mut Vec<Effect>,
    ) {
        // A reading of 0 may be older than the first bytes.
        let bytes = bytes.filter(|bytes| *bytes > 0);
        fx.push(Effect::Persist(Write::PutLease(KeptLease {
            lease: lease.clone(),
            image: image.to_string(),
            expires_unix_ms: now.unix_ms_at(until),
        })));
        self.keep_lease(lease.clone(), image, until);
        if let Some(kept) = self.kept.get_mut(&lease) {
            kept.bytes = bytes;
        }
        fx.push(Effect::Runtime(RuntimeCommand::MeasureLease { lease, until }));
        if self.policy.retain_min_free_percent > 0 {
            fx.push(Effect::Runtime(RuntimeCommand::CheckImageFs));
        }
        if self.kept.len() > MAX_RETAINED
            && let Some(first) = self.first_to_expire()
        {
            self.release(&first, ReleaseReason::Count, fx);
        }
        self.keep_budget(fx);
    }

    pub(super) fn keep_lease(&mut self, lease: String, image: Arc<str>, until: Duration) {
        if let Some(before) = self.kept.insert(lease.clone(), RetainedLease { until, image, bytes: None }) {
            self.disarm(before.until, Timer::LeaseExpiry(lease.clone()));
        }
        self.arm(until, Timer::LeaseExpiry(lease));
    }

    /// A pull uses the lease again. Returns until when its content was retained.
    pub(super) fn take_kept(&mut self, lease: &str, fx: &mut Vec<Effect>) -> Option<Duration> {
        let kept = self.kept.remove(lease)?;
        self.disarm(kept.until, Timer::LeaseExpiry(lease.to_owned()));
        fx.push(Effect::Persist(Write::DeleteLease(lease.to_owned())));
        Some(kept.until)
    }

    fn first_to_expire(&self) -> Option<String> {
        self.kept.iter().min_by_key(|(_, kept)| kept.until).map(|(lease, _)| lease.clone())
    }

    pub(super) fn release(&mut self, lease: &str, reason: ReleaseReason, fx: &mut Vec<Effect>) {
        let Some(kept) = self.kept.remove(lease) else { return };
        self.disarm(kept.until, Timer::LeaseExpiry(lease.to_owned()));
        fx.push(Effect::Runtime(RuntimeCommand::DropLease {
            lease: lease.to_owned(),
            collect: reason.is_for_space(),
        }));
        fx.push(Effect::Persist(Write::DeleteLease(lease.to_owned())));
        fx.push(Effect::Released(Release { image: kept.image, bytes: kept.bytes, reason }));
    }

    fn release_all(&mut self, reason: ReleaseReason, fx: &mut Vec<Effect>) {
        let all: Vec<String> = self.kept.keys().cloned().collect();
        for lease in all {
            self.release(&lease, reason, fx);
        }
    }

    pub(super) fn keep_space(&mut self, fx: &mut Vec<Effect>) {
        if let Some(reason) = self.no_retention() {
            self.release_all(reason, fx);
        }
    }

    /// Enforces the budget: releases first what alone exceeds it, then the oldest.
    pub(super) fn keep_budget(&mut self, fx: &mut Vec<Effect>) {
        let most = self.policy.retained_bytes_max;
        let too_large = |kept: &&RetainedLease| kept.bytes.is_some_and(|bytes| bytes > most);
        let large: Vec<String> =
            self.kept.iter().filter(|(_, kept)| too_large(kept)).map(|(lease, _)| lease.clone()).collect();
        for lease in large {
            self.release(&lease, ReleaseReason::Budget, fx);
        }
        while self.retained_bytes() > most
            && let Some(first) = self.first_to_expire()
        {
            self.release(&first, ReleaseReason::Budget, fx);
        }
    }

    /// `until`: of the retention that asked. A pull may have used the lease since an earlier one.
    pub(super) fn lease_measured(
        &mut self,
        lease: &str,
        until: Duration,
        bytes: Option<u64>,
        fx: &mut Vec<Effect>,
    ) {
        let kept = self.kept.get_mut(lease).filter(|kept| kept.until == until);
        let (Some(kept), Some(bytes)) = (kept, bytes) else { return };
        kept.bytes = Some(bytes);
        if bytes == 0 {
            self.release(lease, ReleaseReason::Empty, fx);
        } else {
            self.keep_budget(fx);
        }
    }

    pub(super) fn image_fs_read(&mut self, image_fs: Option<FileSystem>, fx: &mut Vec<Effect>) {
        self.space.image_fs = image_fs;
        self.keep_space(fx);
    }

    pub(super) fn disk_pressure(&mut self, is_true: bool, fx: &mut Vec<Effect>) {
        self.space.disk_pressure = is_true;
        self.keep_space(fx);
    }

    /// For the next life of the coordinator: a persistent condition is not reported again.
    pub(in crate::coordinator) fn has_disk_pressure(&self) -> bool {
        self.space.disk_pressure
    }

    /// To be called before [`Core::restore`].
    pub(in crate::coordinator) fn set_disk_pressure(&mut self, is_true: bool) {
        self.space.disk_pressure = is_true;
    }

    /// The runtime is up again: sends the queries that failed.
    pub(super) fn ask_about_kept(&self, fx: &mut Vec<Effect>) {
        self.measure_unknown(fx);
        if !self.kept.is_empty() && self.policy.retain_min_free_percent > 0 {
            fx.push(Effect::Runtime(RuntimeCommand::CheckImageFs));
        }
    }

    fn measure_unknown(&self, fx: &mut Vec<Effect>) {
        let unknown = self.kept.iter().filter(|(_, kept)| kept.bytes.is_none());
        fx.extend(unknown.map(|(lease, kept)| {
            Effect::Runtime(RuntimeCommand::MeasureLease { lease: lease.clone(), until: kept.until })
        }));
    }

    pub(super) fn space_due(&mut self, fx: &mut Vec<Effect>) {
        self.space.check_at = None;
        if matches!(self.health, Health::Up(_)) {
            self.measure_unknown(fx);
            if self.policy.retain_min_free_percent > 0 {
                fx.push(Effect::Runtime(RuntimeCommand::CheckImageFs));
            }
        }
    }

    pub(super) fn renewal_due(&mut self, fx: &mut Vec<Effect>) {
        self.space.renew_at = None;
        let leases = self.leases_in_need();
        if matches!(self.health, Health::Up(_)) && !leases.is_empty() {
            fx.push(Effect::Runtime(RuntimeCommand::RenewLeases(leases)));
        }
    }

    fn leases_in_need(&self) -> Vec<String> {
        let running = self.slots.iter().filter_map(|(_, id)| {
            let pull = self.pulls.get(id)?;
            matches!(pull.stage, Stage::Running | Stage::Lost { .. }).then(|| pull.lease.clone())?
        });
        let mut leases: Vec<String> = self.kept.keys().cloned().chain(running).collect();
        leases.sort_unstable();
        leases.dedup();
        leases
    }

    /// Starts the timers of free space and renewals, or stops them if they are not needed. Free space is also read
    /// while it is low, so that it is known when a pull ends.
    pub(super) fn watch_kept(&mut self, now: Now) {
        let is_low = self.no_retention() == Some(ReleaseReason::LowSpace);
        let space = !self.kept.is_empty() || is_low;
        let leases = !self.kept.is_empty() || self.slots.iter().any(|(_, id)| self.has_lease(*id));
        let set = |timers: &mut std::collections::BTreeSet<(Duration, Timer)>,
                   at: &mut Option<Duration>,
                   wanted: bool,
                   pause: Duration,
                   timer: Timer| match (*at, wanted) {
            (None, true) => {
                *at = Some(now.mono + pause);
                timers.insert((now.mono + pause, timer));
            }
            (Some(planned), false) => {
                *at = None;
                timers.remove(&(planned, timer));
            }
            _ => {}
        };
        let pause = if self.kept.is_empty() { LOW_SPACE_INTERVAL } else { SPACE_INTERVAL };
        set(&mut self.timers, &mut self.space.check_at, space, pause, Timer::Space);
        set(&mut self.timers, &mut self.space.renew_at, leases, RENEW_INTERVAL, Timer::RenewLeases);
    }

    fn has_lease(&self, id: super::PullId) -> bool {
        self.pulls.get(&id).is_some_and(|pull| pull.lease.is_some())
    }

    #[must_use]
    pub(crate) fn kept_leases(&self) -> usize {
        self.kept.len()
    }

    /// The bytes that they hold, as far as measured.
    #[must_use]
    pub(crate) fn retained_bytes(&self) -> u64 {
        self.kept.values().filter_map(|kept| kept.bytes).fold(0, u64::saturating_add)
    }
}
