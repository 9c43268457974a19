//! Whether the published state is the newest.
//!
//! Owns: [`Freshness`] and the view that the node's condition is made of. In: the health of watches, and time. Out:
//! both, when they change.

use std::{sync::Arc, time::Duration};

use humantime::format_duration;
use keelson_actor_system::{
    clock::Now,
    cluster::JobHealth,
    reports::{EndpointsView, StaleCause},
};
use keelson_proto::localnetv1::NodeInfo;

use super::{Core, DiskState, Effect};
use crate::{
    Freshness, Published, SourceKind,
    record::{Meta, Write},
};

/// Time after a start for which a state from disk counts as current in the node's condition, unless a watch fails. A
/// condition that changes with each restart of an agent would be noise; readers learn at once that the state is not
/// confirmed yet.
const GRACE: Duration = Duration::from_secs(10);
/// Interval in which the time of the last sync is written to the disk if nothing else is.
const STAMP_EVERY: Duration = Duration::from_secs(300);
const NO_ANSWER: &str = "the source has not answered since the start";
const NO_CLIENT: &str =
    "no client has connected yet (endpoints.watch); `keelson watch --once` starts the watch";
const NOT_LISTED: &str = "the source is not synced yet";

impl Core {
    /// The watch that has been failing for longest: kind, reason, and Unix milliseconds. A failing watch of
    /// ServiceCIDRs makes no state stale, because no endpoint depends on them; it is shown with the sources.
    pub(super) fn failing(&self) -> Option<(SourceKind, &str, i64)> {
        let required = self.health.iter().filter(|(kind, _)| **kind != SourceKind::ServiceCidrs);
        let failing = required.filter_map(|(kind, health)| match health {
            JobHealth::Failing { reason, since_unix_ms, .. } => Some((*kind, &**reason, *since_unix_ms)),
            JobHealth::Pending | JobHealth::Healthy => None,
        });
        failing.min_by_key(|(kind, _, since)| (*since, *kind))
    }

    fn failing_reason(&self) -> Option<(String, i64)> {
        let (kind, reason, since_unix_ms) = self.failing()?;
        Some((format!("{}: {reason}", kind.resource()), since_unix_ms))
    }

    /// Freshness of the published state. It is stale since it was last current, in any process.
    pub(super) fn freshness(&self) -> Freshness {
        let reason = match self.failing_reason() {
            Some((reason, _)) => reason.into(),
            None if self.is_compared => return Freshness::Synced,
            None => NO_ANSWER.into(),
        };
        Freshness::Stale { reason, since_unix_ms: self.current_unix_ms }
    }

    /// Takes the health of a watch. The state was current until the failure.
    pub(super) fn source_health(&mut self, kind: SourceKind, health: JobHealth, now: Now) {
        let until = match health {
            JobHealth::Failing { since_unix_ms, .. } => now.unix_ms.min(since_unix_ms),
            JobHealth::Pending | JobHealth::Healthy => now.unix_ms,
        };
        self.confirm(until);
        self.health.insert(kind, health);
    }

    /// Records that the state is current at this time, if it is.
    pub(super) fn confirm(&mut self, unix_ms: i64) {
        if self.is_compared && !self.is_behind() && self.failing().is_none() {
            self.current_unix_ms = unix_ms;
        }
    }

    /// Records that all sources are listed and equal the published state. If the time on disk is old, the new one is
    /// written at once.
    pub(super) fn note_first_sync(&mut self, now: Now) {
        let first = !std::mem::replace(&mut self.is_compared, true);
        let age = Duration::from_millis(now.unix_ms.abs_diff(self.current_unix_ms));
        if first && age > STAMP_EVERY {
            self.stamped = None;
        }
        self.confirm(now.unix_ms);
    }

    /// When to write that the state is still current; monotonic.
    pub(super) fn stamp_at(&self) -> Option<Duration> {
        let possible = self.disk == DiskState::Synced && self.pending_write.is_none() && self.shown.is_some();
        let is_current = self.is_compared && self.failing().is_none();
        match self.stamped.filter(|_| possible) {
            Some(stamped) => is_current.then_some(stamped + STAMP_EVERY),
            None => possible.then_some(Duration::ZERO),
        }
    }

    pub(super) fn stamp(&mut self, now: Now, effects: &mut Vec<Effect>) {
        let Some(shown) = self.shown.clone() else { return };
        let meta = Box::new(self.meta(&shown, self.shown_unix_ms));
        let (changes, forgotten) = Default::default();
        let write = Write::Changes { meta, services: shown.services.clone(), changes, forgotten };
        self.start_write(write, None, now, effects);
    }

    /// Why a state on disk is too old to be published: the node has booted since, and other pods may have its
    /// addresses. Without a boot, an old state is better than none, and the proxies have programmed it anyway.
    pub(super) fn too_old(&self, meta: &Meta, now: Now) -> Option<String> {
        let booted = meta.boot_id.is_empty() || meta.boot_id != self.policy.boot_id;
        // If the clock is far behind, the age is unknown; the distance is used.
        let age = Duration::from_millis(now.unix_ms.abs_diff(meta.last_current()));
        let limit = self.policy.max_age_after_boot;
        (booted && age > limit).then(|| {
            let age = format_duration(Duration::from_secs(age.as_secs()));
            let limit = format_duration(limit);
            format!(
                "the endpoints on disk were last synced {age} ago, before the node booted, which is more \
                 than {limit} (endpoints.max_age_after_boot); they are served after services, endpointslices \
                 and servicecidrs are listed"
            )
        })
    }

    /// Starts without the state on disk, except its Node.
    pub(super) fn discard_restored(
        &mut self,
        node: Option<&NodeInfo>,
        reason: String,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(node) = node {
            self.inputs.remember_node(node);
        }
        self.disk = DiskState::Unusable;
        self.rejected_reason = Some(reason.clone());
        effects.push(Effect::Note { warn: true, text: reason });
    }

    /// Reports changes of the freshness to readers and to the node's condition.
    pub(super) fn publish_freshness(&mut self, now: Now, effects: &mut Vec<Effect>) {
        if let Some(shown) = self.shown.clone() {
            let freshness = self.freshness();
            // A recovered watch makes the state current only after its objects are published.
            let early = freshness == Freshness::Synced && self.is_behind();
            if shown.freshness != freshness && !early {
                let published = Arc::new(Published { freshness, ..(*shown).clone() });
                self.shown = Some(published.clone());
                effects.push(Effect::Publish { restart: None, revisions: Vec::new(), published });
            }
        }
        let view = self.endpoints_view(now);
        if self.view.as_ref() != Some(&view) {
            self.view = Some(view.clone());
            effects.push(Effect::View(view));
        }
    }

    /// Why there is no state although no watch fails.
    fn not_shown(&self) -> &str {
        self.rejected_reason.as_deref().unwrap_or(NOT_LISTED)
    }

    /// Whether the sources reported something that is not published.
    fn is_behind(&self) -> bool {
        let pending_write =
            self.pending_write.as_ref().is_some_and(|pending_write| pending_write.state.is_some());
        pending_write || self.inputs.is_dirty() || !self.inputs.synced()
    }

    /// For the node's condition, whose reason must not change with the text of an error.
    fn stale_cause(&self) -> StaleCause {
        match self.failing().and_then(|(kind, ..)| self.health.get(&kind)) {
            Some(JobHealth::Failing { refused: true, .. }) => StaleCause::SourceRefused,
            Some(_) => StaleCause::SourceUnavailable,
            None => StaleCause::NotSynced,
        }
    }

    pub(crate) fn is_watched(&self) -> bool {
        !self.policy.on_demand || self.followed.is_some()
    }

    fn endpoints_view(&self, now: Now) -> EndpointsView {
        let cause = self.stale_cause();
        let stale = |reason: &str| EndpointsView::Stale { cause, reason: reason.to_owned() };
        let in_grace = self.grace_ends().is_some_and(|end| now.mono < end);
        if self.policy.on_demand && (in_grace || !self.is_watched()) {
            // Clients from before a restart reconnect within seconds.
            let before = self.view.clone().unwrap_or(EndpointsView::Pending);
            return if in_grace { before } else { EndpointsView::NotWatched };
        }
        match &self.shown {
            None => match self.failing_reason() {
                Some((reason, _)) => stale(&reason),
                None => stale(self.not_shown()),
            },
            Some(_) if in_grace => EndpointsView::Synced,
            Some(shown) => match &shown.freshness {
                Freshness::Synced => EndpointsView::Synced,
                Freshness::Stale { reason, .. } => stale(reason),
            },
        }
    }

    /// End of the time in which the node's condition does not report that the source has not answered; monotonic.
    /// `None`: it answered or fails, this was reported, or no answer is expected.
    pub(super) fn grace_ends(&self) -> Option<Duration> {
        let waits = !self.is_compared
            && self.failing().is_none()
            && (self.shown.is_some() || self.followed.is_some());
        let was_said = match self.is_watched() {
            true => matches!(self.view, Some(EndpointsView::Stale { .. })),
            false => self.view == Some(EndpointsView::NotWatched),
        };
        (waits && !was_said).then_some(self.followed.unwrap_or(self.started.mono) + GRACE)
    }

    /// State as named by the debug API, the reason, and since when in Unix milliseconds.
    pub(super) fn status(&self) -> (&'static str, String, i64) {
        if !self.is_watched() {
            return ("not-watched", NO_CLIENT.to_owned(), self.started.unix_ms);
        }
        match self.shown.as_ref().map(|shown| &shown.freshness) {
            None => match self.failing_reason() {
                Some((reason, since_unix_ms)) => ("pending", reason, since_unix_ms),
                None => ("pending", self.not_shown().to_owned(), self.started.unix_ms),
            },
            Some(Freshness::Synced) => ("synced", String::new(), 0),
            Some(Freshness::Stale { reason, since_unix_ms }) => ("stale", reason.to_string(), *since_unix_ms),
        }
    }
}
