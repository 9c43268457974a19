//! Health of the proxy, and whether the node may receive traffic.
//!
//! Owns: [`ProxyHealth`], a value; [`Health`], which is shared; and the documents of `/livez` and `/healthz`. In:
//! changes that were queued and programmed, the node, and times. Out: statuses and JSON.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use jiff::Timestamp;
use keelson_client::NodeInfo;
use serde::Serialize;

use crate::model::Family;

/// Go's text for a zero time.
const NEVER: &str = "0001-01-01T00:00:00Z";

/// The current time of the monotonic clock and of the wall clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment {
    /// For durations.
    pub(crate) instant: Instant,
    pub(crate) wall: Timestamp,
}

impl Moment {
    pub(crate) fn now() -> Self {
        Self { instant: Instant::now(), wall: Timestamp::now() }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct FamilyHealth {
    /// When all of it was last programmed; at first, when the proxy started (`SyncLoop` of kube-proxy).
    synced: Option<Moment>,
    /// Since when the oldest change waits.
    queued: Option<Instant>,
}

impl FamilyHealth {
    /// A family is late once its oldest pending change is late, whether or not it was ever synced.
    fn is_healthy(&self, late_after: Duration, now: Instant) -> bool {
        self.queued.is_none_or(|queued| now.saturating_duration_since(queued) < late_after)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct ProxyHealth {
    late_after: Duration,
    v4: FamilyHealth,
    v6: FamilyHealth,
    max_staleness: Option<Duration>,
    /// When the endpoints were last current, in Unix milliseconds, as reported by the agent; `None`: they are current.
    stale_since_unix_ms: Option<i64>,
    agent_gone: Option<Instant>,
    /// Load balancers may send traffic here: the Node is not being deleted and has no taint that excludes it. A deleted
    /// Node counts as last seen, as in kube-proxy. False until the Node is known.
    node_eligible: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HealthResponse {
    /// 200 or 503.
    pub(crate) status: u16,
    pub(crate) body: String,
}

/// In kube-proxy's order of fields.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    /// Not in kube-proxy's document.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    endpoints_too_stale: bool,
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
    /// A change that waits for twice `sync_period` is late. Endpoints that are stale for `max_staleness` receive no
    /// traffic.
    pub(crate) fn new(sync_period: Duration, max_staleness: Option<Duration>) -> Self {
        let idle = FamilyHealth::default();
        Self {
            late_after: sync_period.saturating_mul(2),
            v4: idle,
            v6: idle,
            max_staleness,
            stale_since_unix_ms: None,
            agent_gone: None,
            node_eligible: false,
        }
    }

    fn family(&mut self, family: Family) -> &mut FamilyHealth {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }

    /// A change of this family was received and is not programmed yet. The oldest counts.
    pub(crate) fn queued(&mut self, family: Family, now: Instant) {
        self.family(family).queued.get_or_insert(now);
    }

    /// All changes received of this family are programmed.
    pub(crate) fn synced(&mut self, family: Family, now: Moment) {
        *self.family(family) = FamilyHealth { synced: Some(now), queued: None };
    }

    pub(crate) fn node(&mut self, eligible: bool) {
        self.node_eligible = eligible;
    }

    /// When the endpoints were last current, in Unix milliseconds; `None`: they are current.
    pub(crate) fn stale_since(&mut self, unix_ms: Option<i64>) {
        self.stale_since_unix_ms = unix_ms;
    }

    pub(crate) fn agent(&mut self, is_reached: bool, now: Instant) {
        self.agent_gone = if is_reached { None } else { self.agent_gone.or(Some(now)) };
    }

    /// Whether the endpoints have been stale for too long to receive traffic.
    pub(crate) fn is_too_stale(&self, now: Moment) -> bool {
        let Some(limit) = self.max_staleness else { return false };
        let gone = self.agent_gone.map(|since| now.instant.saturating_duration_since(since));
        let stale = self.stale_since_unix_ms.map(|since| {
            let passed = now.wall.as_millisecond().saturating_sub(since);
            Duration::from_millis(u64::try_from(passed).unwrap_or_default())
        });
        gone.max(stale).is_some_and(|passed| passed >= limit)
    }

    /// Whether no family is late: the result of `/livez` and health check node ports. The node does not matter.
    pub(crate) fn is_healthy(&self, now: Instant) -> bool {
        [self.v4, self.v6].iter().all(|family| family.is_healthy(self.late_after, now))
    }

    pub(crate) fn is_node_eligible(&self) -> bool {
        self.node_eligible
    }

    pub(crate) fn livez(&self, now: Moment) -> HealthResponse {
        self.report(None, now)
    }

    /// 200 also needs an eligible node.
    pub(crate) fn healthz(&self, now: Moment) -> HealthResponse {
        self.report(Some(self.node_eligible), now)
    }

    fn report(&self, node_eligible: Option<bool>, now: Moment) -> HealthResponse {
        let healthy = self.is_healthy(now.instant);
        let endpoints_too_stale = node_eligible.is_some() && self.is_too_stale(now);
        let passed = healthy && node_eligible.unwrap_or(true) && !endpoints_too_stale;
        let families = [(Family::V4, self.v4), (Family::V6, self.v6)];
        let status = families.iter().filter_map(|(family, state)| {
            let synced = state.synced?;
            let healthy = state.is_healthy(self.late_after, now.instant);
            Some((family.as_str(), FamilyDocument { last_updated: synced.wall.to_string(), healthy }))
        });
        let last = families.iter().filter_map(|(_, state)| state.synced).max_by_key(|synced| synced.instant);
        let last_updated = match passed {
            // As in older kube-proxies: readers may take an old time for a failure.
            true => now.wall.to_string(),
            false => last.map_or_else(|| NEVER.to_owned(), |synced| synced.wall.to_string()),
        };
        let current_time = now.wall.to_string();
        let document = Document {
            last_updated,
            current_time,
            node_eligible,
            healthy,
            endpoints_too_stale,
            status: status.collect(),
        };
        HealthResponse {
            status: if passed { 200 } else { 503 },
            // The document has string keys, strings and booleans only: serializing cannot fail.
            body: serde_json::to_string(&document).unwrap_or_default(),
        }
    }
}

/// Shared [`ProxyHealth`]. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Health(Arc<Mutex<ProxyHealth>>);

impl Health {
    pub(crate) fn new(sync_period: Duration, max_staleness: Option<Duration>) -> Self {
        Self(Arc::new(Mutex::new(ProxyHealth::new(sync_period, max_staleness))))
    }

    fn lock(&self) -> MutexGuard<'_, ProxyHealth> {
        // No method can leave the value inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn queued(&self, family: Family) {
        self.lock().queued(family, Instant::now());
    }

    pub(crate) fn synced(&self, family: Family) {
        self.lock().synced(family, Moment::now());
    }

    /// `None`: the agent reports no Node.
    pub(crate) fn node(&self, node: Option<&NodeInfo>) {
        self.lock().node(node.is_some_and(|node| node.eligible));
    }

    pub(crate) fn stale_since(&self, unix_ms: Option<i64>) {
        self.lock().stale_since(unix_ms);
    }

    pub(crate) fn agent(&self, is_reached: bool) {
        self.lock().agent(is_reached, Instant::now());
    }

    pub(crate) fn is_healthy(&self) -> bool {
        self.lock().is_healthy(Instant::now())
    }

    pub(crate) fn is_too_stale(&self) -> bool {
        self.lock().is_too_stale(Moment::now())
    }

    pub(crate) fn is_node_eligible(&self) -> bool {
        self.lock().is_node_eligible()
    }

    pub(crate) fn livez(&self) -> HealthResponse {
        self.lock().livez(Moment::now())
    }

    pub(crate) fn healthz(&self) -> HealthResponse {
        self.lock().healthz(Moment::now())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const PERIOD: Duration = Duration::from_secs(30);

    /// Starts at 2026-01-02T03:04:05.5Z.
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
    fn case_54_a_deleted_or_unknown_node_is_ineligible_and_the_proxy_stays_live() {
        let clock = Clock::new();
        let mut health = ProxyHealth::new(PERIOD, None);
        health.synced(Family::V4, clock.at(1));
        assert_eq!(statuses(&health, clock.at(2)), (503, 200), "no Node is known");
        for (eligible, healthz) in [(true, 200), (false, 503), (true, 200), (false, 503)] {
            health.node(eligible);
            assert_eq!(statuses(&health, clock.at(3)), (healthz, 200), "eligible {eligible}");
        }
        let document: Value = serde_json::from_str(&health.healthz(clock.at(4)).body).unwrap();
        assert_eq!(document["nodeEligible"], json!(false));
        assert_eq!(document["healthy"], json!(true), "the node's state is not the proxy's");
    }

    #[test]
    fn case_55_a_late_family_makes_both_fail_until_that_family_is_synced() {
        let clock = Clock::new();
        let mut health = ProxyHealth::new(PERIOD, None);
        health.node(true);
        for family in Family::ALL {
            health.synced(family, clock.at(0));
        }
        health.queued(Family::V6, clock.at(10).instant);
        // A later change does not reset the age of the older one.
        health.queued(Family::V6, clock.at(60).instant);
        assert_eq!(statuses(&health, clock.at(69)), (200, 200));
        assert_eq!(statuses(&health, clock.at(70)), (503, 503), "exactly twice the period is late");
        health.queued(Family::V4, clock.at(71).instant);
        health.synced(Family::V4, clock.at(72));
        assert_eq!(statuses(&health, clock.at(73)), (503, 503), "IPv4 does not affect IPv6");
        health.synced(Family::V6, clock.at(74));
        assert_eq!(statuses(&health, clock.at(74)), (200, 200));
        assert_eq!(statuses(&health, clock.at(9_999)), (200, 200), "nothing waits");
    }

    /// P5: a family that has never synced is late like any other.
    #[test]
    fn p5_a_proxy_that_starts_is_healthy_until_its_first_change_is_late() {
        let clock = Clock::new();
        let mut health = ProxyHealth::new(PERIOD, None);
        health.node(true);
        assert_eq!(statuses(&health, clock.at(900)), (200, 200), "nothing waits");
        for family in Family::ALL {
            health.queued(family, clock.at(1000).instant);
        }
        health.synced(Family::V6, clock.at(1001));
        assert_eq!(statuses(&health, clock.at(1059)), (200, 200));
        assert_eq!(statuses(&health, clock.at(1060)), (503, 503));
        health.synced(Family::V4, clock.at(1061));
        assert_eq!(statuses(&health, clock.at(1061)), (200, 200));
    }

    #[test]
    fn p7_endpoints_stale_for_too_long_get_no_traffic_and_the_proxy_stays_live() {
        type Act = fn(&mut ProxyHealth, &Clock);
        let unix_ms = |clock: &Clock, seconds| clock.at(seconds).wall.as_millisecond();
        let stale: Act = |health, clock| health.stale_since(Some(clock.at(10).wall.as_millisecond()));
        let gone: Act = |health, clock| {
            health.agent(false, clock.at(10).instant);
            health.agent(false, clock.at(90).instant);
        };
        for (name, act) in [("the API server is away", stale), ("the agent is away", gone)] {
            let clock = Clock::new();
            let mut health = ProxyHealth::new(PERIOD, Some(Duration::from_secs(100)));
            health.node(true);
            act(&mut health, &clock);
            assert_eq!(statuses(&health, clock.at(109)), (200, 200), "{name}");
            assert_eq!(statuses(&health, clock.at(110)), (503, 200), "{name}");
            let document: Value = serde_json::from_str(&health.healthz(clock.at(110)).body).unwrap();
            assert_eq!(
                (&document["endpointsTooStale"], &document["nodeEligible"], &document["healthy"]),
                (&json!(true), &json!(true), &json!(true)),
                "{name}"
            );
            health.agent(true, clock.at(120).instant);
            health.stale_since(None);
            assert_eq!(statuses(&health, clock.at(9_999)), (200, 200), "{name}");
        }
        // A clock that was set back makes nothing stale; neither does a missing limit.
        let clock = Clock::new();
        let mut health = ProxyHealth::new(PERIOD, Some(Duration::from_secs(100)));
        health.node(true);
        health.stale_since(Some(unix_ms(&clock, 5_000)));
        assert_eq!(statuses(&health, clock.at(1)), (200, 200));
        let mut health = ProxyHealth::new(PERIOD, None);
        health.node(true);
        health.stale_since(Some(0));
        assert_eq!(statuses(&health, clock.at(1)), (200, 200));
    }

    #[test]
    fn the_documents_are_kube_proxys() {
        let clock = Clock::new();
        let mut health = ProxyHealth::new(PERIOD, None);
        assert_eq!(
            health.healthz(clock.at(0)).body,
            "{\"lastUpdated\":\"0001-01-01T00:00:00Z\",\"currentTime\":\"2026-01-02T03:04:05.5Z\",\
             \"nodeEligible\":false,\"healthy\":true}"
        );
        health.node(true);
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
