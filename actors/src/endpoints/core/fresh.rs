//! Whether what readers see is the newest there is.
//!
//! Owns: [`Freshness`] and the view that the node's condition is made of. In: how the watches fare, and time. Out:
//! both, when they change.

use std::{sync::Arc, time::Duration};

use super::{Core, Effect};
use crate::{
    clock::Now,
    cluster::ChoreHealth,
    endpoints::{Freshness, Published, SourceKind},
    status::EndpointsView,
};

/// For how long after a start a state from disk counts as current for the node's condition, unless a watch fails. A
/// condition that turns with each restart of an agent would be noise; readers are told at once that the state is
/// not confirmed yet.
const GRACE: Duration = Duration::from_secs(10);
/// Why a state from disk is stale.
const NOT_HEARD: &str = "the source has not been heard since the start";
/// Why there is none.
const NOT_LISTED: &str = "the source has not told everything yet";

impl Core {
    /// The watch that has been failing for longest: what is wrong, and since when.
    fn failing(&self) -> Option<(SourceKind, &str, i64)> {
        let failing = self.health.iter().filter_map(|(kind, health)| match health {
            ChoreHealth::Failing { reason, since_unix_ms } => Some((*kind, &**reason, *since_unix_ms)),
            ChoreHealth::Starting | ChoreHealth::Well => None,
        });
        failing.min_by_key(|(kind, _, since)| (*since, *kind))
    }

    /// How new the state is that readers see.
    pub(super) fn freshness(&self) -> Freshness {
        match self.failing() {
            Some((kind, reason, since_unix_ms)) => {
                let reason = format!("{}: {reason}", kind.resource()).into();
                Freshness::Stale { reason, since_unix_ms }
            }
            None if self.heard => Freshness::Current,
            None => Freshness::Stale { reason: NOT_HEARD.into(), since_unix_ms: self.started.unix_ms },
        }
    }

    /// Tells readers and the node's condition what has changed of it.
    pub(super) fn tell(&mut self, now: Now, effects: &mut Vec<Effect>) {
        if let Some(shown) = self.shown.clone() {
            let freshness = self.freshness();
            // A watch that works again makes a state current only with what it brought.
            let early = freshness == Freshness::Current && self.is_behind();
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

    /// Whether something that was said is not in what readers see.
    fn is_behind(&self) -> bool {
        let coming = self.coming.as_ref().is_some_and(|coming| coming.state.is_some());
        coming || self.inputs.is_dirty() || !self.inputs.synced()
    }

    fn endpoints_view(&self, now: Now) -> EndpointsView {
        let stale = |reason: &str| EndpointsView::Stale { reason: reason.to_owned() };
        match &self.shown {
            None => match self.freshness() {
                Freshness::Stale { reason, .. } if self.failing().is_some() => stale(&reason),
                _ => stale(NOT_LISTED),
            },
            Some(_) if self.grace_ends().is_some_and(|end| now.mono < end) => EndpointsView::Current,
            Some(shown) => match &shown.freshness {
                Freshness::Current => EndpointsView::Current,
                Freshness::Stale { reason, .. } => stale(reason),
            },
        }
    }

    /// When a state from disk stops counting as current, if it does; monotonic.
    pub(super) fn grace_ends(&self) -> Option<Duration> {
        let waits = self.shown.is_some() && !self.heard && self.failing().is_none();
        (waits && self.view != Some(EndpointsView::Stale { reason: NOT_HEARD.to_owned() }))
            .then_some(self.started.mono + GRACE)
    }

    /// As the debug API names it, with the reason and since when, in Unix milliseconds.
    pub(super) fn standing(&self) -> (&'static str, String, i64) {
        match self.shown.as_ref().map(|shown| &shown.freshness) {
            None => match self.freshness() {
                Freshness::Stale { reason, since_unix_ms } if self.failing().is_some() => {
                    ("waiting", reason.to_string(), since_unix_ms)
                }
                _ => ("waiting", NOT_LISTED.to_owned(), self.started.unix_ms),
            },
            Some(Freshness::Current) => ("current", String::new(), 0),
            Some(Freshness::Stale { reason, since_unix_ms }) => ("stale", reason.to_string(), *since_unix_ms),
        }
    }
}
