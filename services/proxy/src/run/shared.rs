//! What the threads of a proxy share.
//!
//! Owns: [`Shared`]: the [`Programmer`] behind a lock, where the agent stands, and the last events. In: what the follower did.
//! Out: what the servers show. The lock is held while the kernel works, milliseconds as a rule and a second at the start of
//! a large cluster; servers wait for it on threads of their own.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
};

use keelson_client::{Position, ServiceName};
use keelson_proto::proxy as pb;
use tokio::sync::watch;

use super::{Doors, follow::Checks, unix_ms};
use crate::{
    health::{Health, HealthChecks, ListenOn, ServiceHealthCheck},
    metrics::ProxyMetrics,
    model::Family,
    nft::{element::SetName, kernel::TABLE, strangers::strangers},
    programmer::{Programmer, Synced},
};

/// How many events are kept.
pub const EVENTS: usize = 50;

/// How the agent is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Link {
    /// Not yet.
    Connecting,
    /// States come.
    Following,
    /// It does not answer, for this reason.
    Failing(String),
}

/// What is said of the proxy as a whole.
#[derive(Debug, Clone)]
pub(super) struct Standing {
    pub(super) link: Link,
    /// The last whole state that was heard, and the last that is in effect.
    heard: Position,
    pub(super) position: Position,
    /// When each family's rules were last brought up to date, in Unix milliseconds.
    pub(super) synced_unix_ms: [i64; 2],
    /// Those of both families together.
    pub(super) service_ports: u64,
    pub(super) strangers: Vec<(Family, String)>,
    pub(super) events: VecDeque<pb::Event>,
    /// UDP endpoints have changed since conntrack of the family was cleaned.
    udp: [bool; 2],
    wanted: Wanted,
}

/// The health check node ports that there shall be, and where they shall listen; whether that has changed.
#[derive(Debug, Clone, Default)]
struct Wanted {
    checks: Checks,
    listen_on: Option<ListenOn>,
    changed: bool,
}

/// What the threads of a proxy share.
#[derive(Debug)]
pub struct Shared {
    programmer: Mutex<Programmer>,
    standing: Mutex<Standing>,
    changes: watch::Sender<u64>,
    pub(super) health: Health,
    pub(super) metrics: ProxyMetrics,
    pub(super) checks: HealthChecks,
    pub(super) target: String,
    pub(super) settings: Vec<String>,
    pub(super) started_unix_ms: i64,
}

impl Shared {
    pub(super) fn new(
        programmer: Programmer,
        health: Health,
        metrics: ProxyMetrics,
        checks: HealthChecks,
        doors: &Doors,
    ) -> Self {
        Self {
            programmer: Mutex::new(programmer),
            standing: Mutex::new(Standing {
                link: Link::Connecting,
                heard: Position::default(),
                position: Position::default(),
                synced_unix_ms: [0; 2],
                service_ports: 0,
                strangers: Vec::new(),
                events: VecDeque::new(),
                udp: [false; 2],
                wanted: Wanted::default(),
            }),
            changes: watch::Sender::new(0),
            health,
            metrics,
            checks,
            target: doors.target.to_string(),
            settings: doors.settings_in_words.clone(),
            started_unix_ms: unix_ms(),
        }
    }

    /// The programmer. A panic while it was held ends the process anyway.
    pub(super) fn programmer(&self) -> MutexGuard<'_, Programmer> {
        self.programmer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Told of every change of what there is to show.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Something that is shown has changed.
    pub(super) fn changed(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Writes an event down.
    pub(super) fn say(&self, text: String) {
        let mut standing = self.standing();
        standing.events.push_front(pb::Event { at_unix_ms: unix_ms(), text });
        standing.events.truncate(EVENTS);
        drop(standing);
        self.changed();
    }

    /// How the agent is reached now; said when it changes.
    pub(super) fn link(&self, link: Link) {
        let mut standing = self.standing();
        if standing.link == link {
            return;
        }
        let text = match &link {
            Link::Connecting => "connecting to the agent".to_owned(),
            Link::Following => "the agent's states come".to_owned(),
            Link::Failing(reason) => format!("the agent does not answer; rules stay as they are: {reason}"),
        };
        // The reason may differ a little each time.
        let same = matches!((&standing.link, &link), (Link::Failing(_), Link::Failing(_)));
        self.metrics.connected(link == Link::Following);
        standing.link = link;
        drop(standing);
        if same { self.changed() } else { self.say(text) }
    }

    /// A Service has such a health check node port, or none.
    pub(super) fn check(&self, name: &ServiceName, check: Option<ServiceHealthCheck>) {
        let wanted = &mut self.standing().wanted;
        wanted.changed |= match check {
            Some(check) if wanted.checks.get(name) == Some(&check) => false,
            Some(check) => {
                wanted.checks.insert(name.clone(), check);
                true
            }
            None => wanted.checks.remove(name).is_some(),
        };
    }

    /// Opens and closes health check node ports, if any has changed or they shall listen elsewhere.
    pub(super) fn apply_wanted(&self, listen_on: ListenOn) {
        let mut standing = self.standing();
        let wanted = &mut standing.wanted;
        if wanted.changed || wanted.listen_on.as_ref() != Some(&listen_on) {
            wanted.changed = false;
            wanted.listen_on = Some(listen_on.clone());
            let checks = wanted.checks.values().cloned().collect();
            drop(standing);
            self.checks.apply(checks, listen_on);
        }
    }

    /// A Service with UDP ports has changed.
    pub(super) fn udp_changed(&self) {
        self.standing().udp = [true; 2];
    }

    /// Whether one has since it was last asked.
    pub(super) fn take_udp(&self, family: Family) -> bool {
        std::mem::take(&mut self.standing().udp[family as usize])
    }

    /// What became of syncs, and which state they were of.
    pub(super) fn note(&self, synced: &[Synced], position: Option<&Position>) {
        let programmer = self.programmer();
        let counts = Family::ALL.map(|family| programmer.side(family).programme.plan().counts());
        let failing = programmer.is_failing();
        drop(programmer);
        for (family, counts) in Family::ALL.into_iter().zip(&counts) {
            self.metrics.elements(family, SetName::ALL.iter().map(|&set| counts.elements(set)).sum());
        }
        let mut standing = self.standing();
        for done in synced.iter().filter(|done| done.result.is_ok()) {
            standing.synced_unix_ms[done.family as usize] = unix_ms();
        }
        if let Some(position) = position {
            standing.heard = position.clone();
        }
        let news = !synced.is_empty() || position.is_some();
        // A family that failed catches up later: the state is in effect when both have it.
        if !failing {
            self.metrics.nothing_pending();
        }
        if !failing && standing.heard != standing.position {
            standing.position = standing.heard.clone();
            standing.service_ports = counts.iter().map(|counts| counts.service_ports as u64).sum();
            // A Service of both families is one.
            let services = counts.iter().map(|counts| counts.services).max().unwrap_or(0);
            self.metrics.applied(standing.position.rev, services);
        }
        drop(standing);
        if news {
            self.changed();
        }
    }

    /// Looks whether something else programs Services here, and says so.
    pub(super) fn say_strangers(&self) {
        let found = strangers(self.programmer().tables());
        let strangers = match found {
            Ok(strangers) => strangers,
            Err(error) => {
                tracing::warn!(%error, "cannot tell whether something else programs Services here");
                return;
            }
        };
        let before = std::mem::replace(&mut self.standing().strangers, strangers.clone());
        for (family, what) in &strangers {
            if !before.contains(&(*family, what.clone())) {
                tracing::warn!(
                    %family,
                    "{what} is on this node: our rules (table {TABLE}) come first and win for every Service that we know; what is left \
                     of it may still answer for others, until `keelson proxy cleanup --kube-proxy` (or `kube-proxy --cleanup` for \
                     iptables and ipvs) removes it"
                );
                self.say(format!("{what} is on this node ({family}); our rules come before it"));
            }
        }
        for (family, what) in before {
            if !strangers.contains(&(family, what.clone())) {
                self.say(format!("{what} is gone from this node ({family})"));
            }
        }
    }
}
