//! Health of the runtime, decided without I/O.
//!
//! Owns: the health of the runtime and the time of the next probe. In: results of probes, lost calls, closed
//! connections. Out: times of probes, and changes to announce. A lost call does not mean that the runtime is down: the
//! next probe is made at once, and its result is announced even if unchanged. A closed connection makes the next probe
//! come at once. A slow runtime stays up: it is down when its connection is gone, when it reports that itself, or after
//! [`SILENT_PROBES`] probes in a row without any answer.

use std::time::Duration;

use keelson_actor_system::clock::Now;

use super::types::{FailureKind, PROBE_INTERVAL, PROBES, ProbeFailure, RuntimeInfo};

/// Probes in a row without any answer after which a runtime is down.
pub(crate) const SILENT_PROBES: u32 = 3;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    Unknown,
    Up {
        info: RuntimeInfo,
        since_unix_ms: i64,
    },
    /// Its connection is gone, it answers UNAVAILABLE, or [`SILENT_PROBES`] probes were not answered.
    Down {
        reason: String,
        since_unix_ms: i64,
    },
}

#[derive(Debug, Clone)]
pub(crate) enum Event {
    Probed(Result<RuntimeInfo, ProbeFailure>),
    /// A call ended without an answer.
    CallLost,
    ConnectionClosed,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Replaces any probe planned before.
    ProbeAfter(Duration),
    Announce,
    /// The runtime began to fail probes, and stays up.
    Warn(String),
}

#[derive(Debug)]
pub(crate) struct Core {
    health: Health,
    failures: u32,
    silent: u32,
    degraded: Option<String>,
    /// A call was lost since the last probe began: the next result is announced.
    suspect: bool,
}

impl Default for Core {
    fn default() -> Self {
        Self { health: Health::Unknown, failures: 0, silent: 0, degraded: None, suspect: false }
    }
}

impl Core {
    #[must_use]
    pub(crate) fn health(&self) -> &Health {
        &self.health
    }

    #[must_use]
    pub(crate) fn degraded(&self) -> Option<&str> {
        self.degraded.as_deref()
    }

    pub(crate) fn handle(&mut self, event: Event, now: Now) -> Vec<Effect> {
        match event {
            Event::CallLost => {
                if self.suspect || matches!(self.health, Health::Down { .. }) {
                    return Vec::new();
                }
                self.suspect = true;
                vec![Effect::ProbeAfter(Duration::ZERO)]
            }
            Event::ConnectionClosed => {
                if self.suspect || matches!(self.health, Health::Down { .. }) {
                    return Vec::new();
                }
                vec![Effect::ProbeAfter(Duration::ZERO)]
            }
            Event::Probed(Ok(info)) => self.up(info, now),
            Event::Probed(Err(failure)) => self.failed(failure, now),
        }
    }

    fn failed(&mut self, failure: ProbeFailure, now: Now) -> Vec<Effect> {
        let ProbeFailure { error, kind } = failure;
        let reason = error.to_string();
        self.silent = if kind == FailureKind::Silent { self.silent.saturating_add(1) } else { 0 };
        let stays = match kind {
            FailureKind::Gone => false,
            FailureKind::Silent => self.silent < SILENT_PROBES,
            FailureKind::Busy => true,
        };
        if !stays || !matches!(self.health, Health::Up { .. }) {
            return self.down(reason, now);
        }
        let mut effects = vec![Effect::ProbeAfter(self.back_off())];
        if self.degraded.replace(reason.clone()).is_none() {
            effects.insert(0, Effect::Warn(reason));
        }
        effects
    }

    fn back_off(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        PROBES.pause(self.failures)
    }

    fn up(&mut self, info: RuntimeInfo, now: Now) -> Vec<Effect> {
        (self.failures, self.silent, self.degraded) = (0, 0, None);
        let news = match &self.health {
            Health::Up { info: known, .. } => self.suspect || *known != info,
            _ => true,
        };
        self.suspect = false;
        let since_unix_ms = match &self.health {
            Health::Up { since_unix_ms, .. } => *since_unix_ms,
            _ => now.unix_ms,
        };
        self.health = Health::Up { info, since_unix_ms };
        let mut effects = vec![Effect::ProbeAfter(PROBE_INTERVAL)];
        if news {
            effects.insert(0, Effect::Announce);
        }
        effects
    }

    fn down(&mut self, reason: String, now: Now) -> Vec<Effect> {
        self.suspect = false;
        self.degraded = None;
        let pause = self.back_off();
        let (news, since_unix_ms) = match &self.health {
            Health::Down { reason: known, since_unix_ms } => (*known != reason, *since_unix_ms),
            _ => (true, now.unix_ms),
        };
        self.health = Health::Down { reason, since_unix_ms };
        let mut effects = vec![Effect::ProbeAfter(pause)];
        if news {
            effects.insert(0, Effect::Announce);
        }
        effects
    }
}

#[cfg(test)]
mod tests {
    use super::{super::types::RuntimeError, *};

    fn info(version: &str) -> RuntimeInfo {
        RuntimeInfo { name: "containerd".into(), version: version.into(), ..Default::default() }
    }

    fn failure(kind: FailureKind, reason: &str) -> Event {
        let error = RuntimeError { endpoint: "unix:///r".into(), reason: reason.into() };
        Event::Probed(Err(ProbeFailure { error, kind }))
    }

    fn refused() -> Event {
        failure(FailureKind::Gone, "refused")
    }

    fn run(core: &mut Core, event: Event) -> Vec<Effect> {
        core.handle(event, Now::default())
    }

    fn up() -> Core {
        let mut core = Core::default();
        run(&mut core, Event::Probed(Ok(info("1"))));
        core
    }

    const PROBE_NOW: Effect = Effect::ProbeAfter(Duration::ZERO);
    const PROBE_LATER: Effect = Effect::ProbeAfter(PROBE_INTERVAL);

    #[test]
    fn news_is_told_once() {
        let mut core = Core::default();
        assert_eq!(run(&mut core, Event::Probed(Ok(info("1")))), [Effect::Announce, PROBE_LATER]);
        assert_eq!(run(&mut core, Event::Probed(Ok(info("1")))), [PROBE_LATER]);
        assert_eq!(run(&mut core, Event::Probed(Ok(info("2")))), [Effect::Announce, PROBE_LATER]);
    }

    #[test]
    fn back_off_doubles_to_three_seconds_and_starts_over() {
        let mut core = Core::default();
        let mut pauses = Vec::new();
        for _ in 0..8 {
            for effect in run(&mut core, refused()) {
                if let Effect::ProbeAfter(pause) = effect {
                    pauses.push(pause.as_millis());
                }
            }
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3000, 3000, 3000]);
        run(&mut core, Event::Probed(Ok(info("1"))));
        let effects = run(&mut core, refused());
        assert_eq!(effects, [Effect::Announce, Effect::ProbeAfter(Duration::from_millis(100))]);
    }

    #[test]
    fn a_lost_call_probes_at_once_and_reports_the_next_answer() {
        let mut core = up();
        assert_eq!(run(&mut core, Event::CallLost), [PROBE_NOW]);
        assert_eq!(run(&mut core, Event::CallLost), [], "one probe for many lost calls");
        assert_eq!(run(&mut core, Event::Probed(Ok(info("1")))), [Effect::Announce, PROBE_LATER]);
    }

    #[test]
    fn a_lost_call_of_a_runtime_that_is_down_changes_nothing() {
        let mut core = Core::default();
        run(&mut core, refused());
        assert_eq!(run(&mut core, Event::CallLost), []);
    }

    #[test]
    fn a_closed_connection_probes_at_once_and_an_equal_answer_is_not_reported() {
        let mut core = up();
        assert_eq!(run(&mut core, Event::ConnectionClosed), [PROBE_NOW]);
        assert_eq!(run(&mut core, Event::Probed(Ok(info("1")))), [PROBE_LATER]);
        run(&mut core, Event::CallLost);
        assert_eq!(run(&mut core, Event::ConnectionClosed), [], "a probe is on its way");
    }

    #[test]
    fn a_closed_connection_of_a_dead_runtime_keeps_the_back_off() {
        let mut core = Core::default();
        run(&mut core, refused());
        assert_eq!(run(&mut core, Event::ConnectionClosed), []);
    }

    /// I10: one missed probe does not stop new pulls.
    #[test]
    fn a_slow_runtime_is_up_and_three_unanswered_probes_make_it_down() {
        use FailureKind::{Busy, Gone, Silent};
        let cases: [(&[FailureKind], bool); 8] = [
            (&[Gone], false),
            (&[Silent], true),
            (&[Silent, Silent], true),
            (&[Silent, Silent, Silent], false),
            (&[Silent, Silent, Busy, Silent, Silent], true),
            (&[Busy; 20], true),
            (&[Busy, Gone], false),
            (&[Silent, Gone], false),
        ];
        for (kinds, stays) in cases {
            let mut core = up();
            let mut warnings = 0;
            for kind in kinds {
                let effects = run(&mut core, failure(*kind, "slow"));
                warnings += effects.iter().filter(|effect| matches!(effect, Effect::Warn(_))).count();
            }
            assert_eq!(matches!(core.health(), Health::Up { .. }), stays, "{kinds:?}");
            assert_eq!(core.degraded().is_some(), stays, "{kinds:?}");
            assert_eq!(warnings, usize::from(kinds != [Gone]), "logged once: {kinds:?}");
            run(&mut core, Event::Probed(Ok(info("1"))));
            assert_eq!(core.degraded(), None);
            run(&mut core, failure(Silent, "slow"));
            run(&mut core, failure(Silent, "slow"));
            assert!(matches!(core.health(), Health::Up { .. }), "it counts from the last answer");
        }
    }

    /// I10: as for the kubelet.
    #[test]
    fn a_runtime_that_is_not_up_yet_must_answer_the_whole_probe() {
        for kind in [FailureKind::Gone, FailureKind::Silent, FailureKind::Busy] {
            let mut core = Core::default();
            run(&mut core, failure(kind, "not yet"));
            assert!(matches!(core.health(), Health::Down { .. }), "{kind:?}");
        }
    }

    #[test]
    fn a_slow_runtime_is_probed_with_back_off_and_pulls_that_were_lost_wait_for_its_answer() {
        let mut core = up();
        run(&mut core, Event::CallLost);
        let effects = run(&mut core, failure(FailureKind::Busy, "slow"));
        let [first, second] = [100, 200].map(|ms| Effect::ProbeAfter(Duration::from_millis(ms)));
        assert_eq!(effects, [Effect::Warn("unix:///r: slow".into()), first]);
        assert_eq!(run(&mut core, failure(FailureKind::Busy, "slow")), [second]);
        assert_eq!(run(&mut core, Event::Probed(Ok(info("1")))), [Effect::Announce, PROBE_LATER]);
    }
}
