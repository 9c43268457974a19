//! Whether changes reach the kernel in time, and whether the node is one to send traffic to.
//!
//! Owns: [`ProxyHealth`], a value, [`Health`], which is shared, and the documents of `/livez` and `/healthz`. In: changes that
//! were queued and written, the node, and times. Out: statuses and JSON.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use jiff::Timestamp;
use keelson_client::NodeInfo;
use serde::Serialize;

use crate::model::Family;

/// What Go writes for a time that never was.
const NEVER: &str = "0001-01-01T00:00:00Z";

/// Now, by the clock that is never set and by the one on the wall.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// What durations are measured by.
    pub instant: Instant,
    /// What people are told.
    pub wall: Timestamp,
}

impl Moment {
    /// Now.
    #[must_use]
    pub fn now() -> Self {
        Self { instant: Instant::now(), wall: Timestamp::now() }
    }
}

/// How a family fares.
#[derive(Debug, Clone, Copy, Default)]
struct FamilyHealth {
    /// When all of it was in the kernel last.
    synced: Option<Moment>,
    /// Since when a change waits.
    queued: Option<Instant>,
}

impl FamilyHealth {
    /// A family is late once its oldest waiting change is; not before it was in the kernel once (kube-proxy: a proxy that is
    /// starting is healthy, however long it takes).
    fn is_healthy(&self, late_after: Duration, now: Instant) -> bool {
        match (self.synced, self.queued) {
            (Some(_), Some(queued)) => now.saturating_duration_since(queued) < late_after,
            _ => true,
        }
    }
}

/// Whether the proxy is well.
#[derive(Debug, Clone)]
pub struct ProxyHealth {
    late_after: Duration,
    v4: FamilyHealth,
    v6: FamilyHealth,
    /// Load balancers may send traffic here: there is a Node of this name, it is not being deleted and has no taint that says
    /// so. False until the Node is known.
    node_eligible: bool,
}

/// An answer of `/livez` or `/healthz`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// 200 or 503.
    pub status: u16,
    /// JSON.
    pub body: String,
}

/// The document, in kube-proxy's order.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    status: BTreeMap<&'static str, FamilyDocument>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyDocument {
    last_updated: String,
    healthy: bool,
}

impl ProxyHealth {
    /// Of a proxy that starts. A change that waits for twice `sync_period` is late.
    #[must_use]
    pub fn new(sync_period: Duration) -> Self {
        let idle = FamilyHealth::default();
        Self { late_after: sync_period.saturating_mul(2), v4: idle, v6: idle, node_eligible: false }
    }

    fn family(&mut self, family: Family) -> &mut FamilyHealth {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }

    /// A change of this family has been heard of and is not in the kernel yet. The oldest counts.
    pub fn queued(&mut self, family: Family, now: Instant) {
        self.family(family).queued.get_or_insert(now);
    }

    /// Everything of this family that was heard of is in the kernel.
    pub fn synced(&mut self, family: Family, now: Moment) {
        *self.family(family) = FamilyHealth { synced: Some(now), queued: None };
    }

    /// What is known of the node: whether there is a Node of its name, and whether load balancers may send traffic to it.
    pub fn node(&mut self, exists: bool, eligible: bool) {
        self.node_eligible = exists && eligible;
    }

    /// Whether no family is late: what `/livez` and health check node ports say. The node has no part in it.
    #[must_use]
    pub fn is_healthy(&self, now: Instant) -> bool {
        [self.v4, self.v6].iter().all(|family| family.is_healthy(self.late_after, now))
    }

    /// Whether load balancers may send traffic to the node.
    #[must_use]
    pub fn is_node_eligible(&self) -> bool {
        self.node_eligible
    }

    /// The answer of `/livez`.
    #[must_use]
    pub fn livez(&self, now: Moment) -> Report {
        self.report(None, now)
    }

    /// The answer of `/healthz`: 200 needs an eligible node, too.
    #[must_use]
    pub fn healthz(&self, now: Moment) -> Report {
        self.report(Some(self.node_eligible), now)
    }

    fn report(&self, node_eligible: Option<bool>, now: Moment) -> Report {
        let healthy = self.is_healthy(now.instant);
        let passed = healthy && node_eligible.unwrap_or(true);
        let families = [(Family::V4, self.v4), (Family::V6, self.v6)];
        let status = families.iter().filter_map(|(family, state)| {
            let synced = state.synced?;
            let healthy = state.is_healthy(self.late_after, now.instant);
            Some((family.as_str(), FamilyDocument { last_updated: synced.wall.to_string(), healthy }))
        });
        let last = families.iter().filter_map(|(_, state)| state.synced).max_by_key(|synced| synced.instant);
        let last_updated = match passed {
            // As old kube-proxies did, to whose readers a time that is not recent means trouble.
            true => now.wall.to_string(),
            false => last.map_or_else(|| NEVER.to_owned(), |synced| synced.wall.to_string()),
        };
        let current_time = now.wall.to_string();
        let document =
            Document { last_updated, current_time, node_eligible, healthy, status: status.collect() };
        Report {
            status: if passed { 200 } else { 503 },
            // Strings and booleans under names that are strings: it cannot fail.
            body: serde_json::to_string(&document).unwrap_or_default(),
        }
    }
}

/// A [`ProxyHealth`] shared by those who say and those who ask. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Health(Arc<Mutex<ProxyHealth>>);

impl Health {
    /// Of a proxy that starts.
    #[must_use]
    pub fn new(sync_period: Duration) -> Self {
        Self(Arc::new(Mutex::new(ProxyHealth::new(sync_period))))
    }

    fn lock(&self) -> MutexGuard<'_, ProxyHealth> {
        // No step in between leaves it half written.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// [`ProxyHealth::queued`], now.
    pub fn queued(&self, family: Family) {
        self.lock().queued(family, Instant::now());
    }

    /// [`ProxyHealth::synced`], now.
    pub fn synced(&self, family: Family) {
        self.lock().synced(family, Moment::now());
    }

    /// [`ProxyHealth::node`], of what the agent says of the node; `None`: it says nothing.
    pub fn node(&self, node: Option<&NodeInfo>) {
        let (exists, eligible) = node.map_or((false, false), |node| (node.exists, node.eligible));
        self.lock().node(exists, eligible);
    }

    /// [`ProxyHealth::is_healthy`], now.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.lock().is_healthy(Instant::now())
    }

    /// [`ProxyHealth::is_node_eligible`].
    #[must_use]
    pub fn is_node_eligible(&self) -> bool {
        self.lock().is_node_eligible()
    }

    /// [`ProxyHealth::livez`], now.
    #[must_use]
    pub fn livez(&self) -> Report {
        self.lock().livez(Moment::now())
    }

    /// [`ProxyHealth::healthz`], now.
    #[must_use]
    pub fn healthz(&self) -> Report {
        self.lock().healthz(Moment::now())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const PERIOD: Duration = Duration::from_secs(30);

    /// A clock that starts at 2026-01-02T03:04:05.5Z.
    struct Clock(Moment);

    impl Clock {
        fn new() -> Self {
            Self(Moment { instant: Instant::now(), wall: "2026-01-02T03:04:05.5Z".parse().unwrap() })
        }

        fn at(&self, seconds: u64) -> Moment {
            let passed = Duration::from_secs(seconds);
            Moment { instant: self.0.instant + passed, wall: self.0.wall + passed }
        }
    }

    fn statuses(health: &ProxyHealth, now: Moment) -> (u16, u16) {
        (health.healthz(now).status, health.livez(now).status)
    }

    #[test]
    fn case_54_a_node_that_is_going_or_unknown_gets_no_traffic_and_the_proxy_lives() {
        let clock = Clock::new();
        let mut health = ProxyHealth::new(PERIOD);
        health.synced(Family::V4, clock.at(1));
        assert_eq!(statuses(&health, clock.at(2)), (503, 200), "no Node is known");
        for (exists, eligible, healthz) in [
            (true, true, 200),
            (true, false, 503),
            (true, true, 200),
            (false, true, 503),
            (false, false, 503),
        ] {
            health.node(exists, eligible);
            assert_eq!(
                statuses(&health, clock.at(3)),
                (healthz, 200),
                "exists {exists}, eligible {eligible}"
            );
        }
        let document: Value = serde_json::from_str(&health.healthz(clock.at(4)).body).unwrap();
        assert_eq!(document["nodeEligible"], json!(false));
        assert_eq!(document["healthy"], json!(true), "the node's state is not the proxy's");
    }

    #[test]
    fn case_55_a_late_family_makes_both_fail_until_that_family_is_synced() {
        let clock = Clock::new();
        let mut health = ProxyHealth::new(PERIOD);
        health.node(true, true);
        for family in Family::ALL {
            health.synced(family, clock.at(0));
        }
        health.queued(Family::V6, clock.at(10).instant);
        // A later change does not make the older one younger.
        health.queued(Family::V6, clock.at(60).instant);
        assert_eq!(statuses(&health, clock.at(69)), (200, 200));
        assert_eq!(statuses(&health, clock.at(70)), (503, 503), "exactly twice the period is late");
        health.queued(Family::V4, clock.at(71).instant);
        health.synced(Family::V4, clock.at(72));
        assert_eq!(statuses(&health, clock.at(73)), (503, 503), "IPv4 says nothing of IPv6");
        health.synced(Family::V6, clock.at(74));
        assert_eq!(statuses(&health, clock.at(74)), (200, 200));
        assert_eq!(statuses(&health, clock.at(9_999)), (200, 200), "nothing waits");
    }

    #[test]
    fn a_proxy_that_starts_is_healthy() {
        let clock = Clock::new();
        let mut health = ProxyHealth::new(PERIOD);
        health.node(true, true);
        assert_eq!(statuses(&health, clock.at(0)), (200, 200));
        health.queued(Family::V4, clock.at(0).instant);
        assert_eq!(statuses(&health, clock.at(900)), (200, 200), "its first sync may take long");
    }

    #[test]
    fn the_documents_are_kube_proxys() {
        let clock = Clock::new();
        let mut health = ProxyHealth::new(PERIOD);
        assert_eq!(
            health.healthz(clock.at(0)).body,
            "{\"lastUpdated\":\"0001-01-01T00:00:00Z\",\"currentTime\":\"2026-01-02T03:04:05.5Z\",\
             \"nodeEligible\":false,\"healthy\":true}"
        );
        health.node(true, true);
        health.synced(Family::V6, clock.at(1));
        health.synced(Family::V4, clock.at(2));
        assert_eq!(
            health.livez(clock.at(3)).body,
            "{\"lastUpdated\":\"2026-01-02T03:04:08.5Z\",\"currentTime\":\"2026-01-02T03:04:08.5Z\",\"healthy\":true,\
             \"status\":{\"IPv4\":{\"lastUpdated\":\"2026-01-02T03:04:07.5Z\",\"healthy\":true},\
             \"IPv6\":{\"lastUpdated\":\"2026-01-02T03:04:06.5Z\",\"healthy\":true}}}"
        );
        health.queued(Family::V6, clock.at(4).instant);
        assert_eq!(
            health.healthz(clock.at(64)).body,
            "{\"lastUpdated\":\"2026-01-02T03:04:07.5Z\",\"currentTime\":\"2026-01-02T03:05:09.5Z\",\
             \"nodeEligible\":true,\"healthy\":false,\
             \"status\":{\"IPv4\":{\"lastUpdated\":\"2026-01-02T03:04:07.5Z\",\"healthy\":true},\
             \"IPv6\":{\"lastUpdated\":\"2026-01-02T03:04:06.5Z\",\"healthy\":false}}}"
        );
    }
}
