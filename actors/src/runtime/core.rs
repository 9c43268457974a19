//! Whether the runtime serves, decided without I/O.
//!
//! Owns: the health of the runtime and the time of the next probe. In: results of probes, calls
//! that were lost, connections that closed. Out: when to probe, and changes worth telling. A lost call is
//! not yet a dead runtime: it only makes the next probe come at once, and its answer be told even if it
//! is the old one. Nor is a closed connection: it makes the next probe come at once.

use std::time::Duration;

use super::types::{PROBE_BACKOFF, PROBE_INTERVAL, RuntimeInfo};
use crate::clock::Now;

/// What is known of the runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// Not asked yet.
    Unknown,
    /// It serves.
    Up {
        /// What it said of itself.
        info: RuntimeInfo,
        /// Unix milliseconds of the change.
        since_unix_ms: i64,
    },
    /// It does not.
    Down {
        /// Names the socket.
        reason: String,
        /// Unix milliseconds of the change.
        since_unix_ms: i64,
    },
}

/// What happens to the core.
#[derive(Debug, Clone)]
pub enum Event {
    /// A probe ended.
    Probed(Result<RuntimeInfo, String>),
    /// A call broke off without an answer.
    CallLost,
    /// A connection to the runtime closed.
    ConnectionClosed,
}

/// What the actor has to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Probe after this time, instead of any probe planned before.
    ProbeAfter(Duration),
    /// Tell the neighbours what [`Core::health`] says now.
    Announce,
}

/// The state.
#[derive(Debug)]
pub struct Core {
    health: Health,
    failures: u32,
    /// A call was lost since the last probe began: what the next one says is news.
    suspect: bool,
}

impl Default for Core {
    fn default() -> Self {
        Self { health: Health::Unknown, failures: 0, suspect: false }
    }
}

impl Core {
    /// What is known now.
    #[must_use]
    pub fn health(&self) -> &Health {
        &self.health
    }

    /// The one way in.
    pub fn handle(&mut self, event: Event, now: Now) -> Vec<Effect> {
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
            Event::Probed(Err(reason)) => self.down(reason, now),
        }
    }

    fn up(&mut self, info: RuntimeInfo, now: Now) -> Vec<Effect> {
        self.failures = 0;
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
        let (first, longest) = PROBE_BACKOFF;
        let pause = first.saturating_mul(1 << self.failures.min(10)).min(longest);
        self.failures = self.failures.saturating_add(1);
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
    use super::*;

    fn info(version: &str) -> RuntimeInfo {
        RuntimeInfo { name: "containerd".into(), version: version.into(), ..Default::default() }
    }

    fn run(core: &mut Core, event: Event) -> Vec<Effect> {
        core.handle(event, Now::default())
    }

    const SOON: Effect = Effect::ProbeAfter(Duration::ZERO);
    const LATER: Effect = Effect::ProbeAfter(PROBE_INTERVAL);

    #[test]
    fn news_is_told_once() {
        let mut core = Core::default();
        assert_eq!(run(&mut core, Event::Probed(Ok(info("1")))), [Effect::Announce, LATER]);
        assert_eq!(run(&mut core, Event::Probed(Ok(info("1")))), [LATER]);
        assert_eq!(run(&mut core, Event::Probed(Ok(info("2")))), [Effect::Announce, LATER]);
    }

    #[test]
    fn back_off_doubles_to_three_seconds_and_starts_over() {
        let mut core = Core::default();
        let mut pauses = Vec::new();
        for _ in 0..8 {
            for effect in run(&mut core, Event::Probed(Err("refused".into()))) {
                if let Effect::ProbeAfter(pause) = effect {
                    pauses.push(pause.as_millis());
                }
            }
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3000, 3000, 3000]);
        run(&mut core, Event::Probed(Ok(info("1"))));
        let effects = run(&mut core, Event::Probed(Err("refused".into())));
        assert_eq!(effects, [Effect::Announce, Effect::ProbeAfter(Duration::from_millis(100))]);
    }

    #[test]
    fn a_lost_call_probes_at_once_and_makes_the_old_answer_news() {
        let mut core = Core::default();
        run(&mut core, Event::Probed(Ok(info("1"))));
        assert_eq!(run(&mut core, Event::CallLost), [SOON]);
        assert_eq!(run(&mut core, Event::CallLost), [], "one probe for many lost calls");
        assert_eq!(run(&mut core, Event::Probed(Ok(info("1")))), [Effect::Announce, LATER]);
    }

    #[test]
    fn a_lost_call_of_a_dead_runtime_changes_nothing() {
        let mut core = Core::default();
        run(&mut core, Event::Probed(Err("refused".into())));
        assert_eq!(run(&mut core, Event::CallLost), []);
    }

    #[test]
    fn a_closed_connection_probes_at_once_and_the_old_answer_is_no_news() {
        let mut core = Core::default();
        run(&mut core, Event::Probed(Ok(info("1"))));
        assert_eq!(run(&mut core, Event::ConnectionClosed), [SOON]);
        assert_eq!(run(&mut core, Event::Probed(Ok(info("1")))), [LATER]);
        run(&mut core, Event::CallLost);
        assert_eq!(run(&mut core, Event::ConnectionClosed), [], "a probe is on its way");
    }

    #[test]
    fn a_closed_connection_of_a_dead_runtime_keeps_the_back_off() {
        let mut core = Core::default();
        run(&mut core, Event::Probed(Err("refused".into())));
        assert_eq!(run(&mut core, Event::ConnectionClosed), []);
    }
}
