//! When something on the node is worth an Event.
//!
//! Owns: [`NodeEvents`]: which problems have an Event, and the Events of the last hour. In: [`Observed`] and the time.
//! Out: [`ClusterEvent`]s. No I/O.
//!
//! A problem gets a Warning when it has lasted for [`ONSET`], and a Normal Event when it has been away for [`CLEAR`].
//! Conditions of the Node wait as long before they change, so theirs follow at once; one that was True at the
//! first observation had its Event from the previous agent. An Event that occurs again within [`AGGREGATE`] updates
//! the last one. So a topic writes at most two Events in [`CLEAR`], or one for what happens at once.

use std::{collections::BTreeMap, time::Duration};

use keelson_actor_system::{
    clock::Now,
    cluster::{ClusterEvent, EventObject},
};

/// Longer than a restart of the runtime or of a backend.
const ONSET: Duration = Duration::from_secs(30);
/// As the conditions (`node.eviction_pressure_transition_period`).
const CLEAR: Duration = Duration::from_secs(300);
/// The API server keeps an Event for an hour by default; an update makes a new one if it is gone.
const AGGREGATE: Duration = Duration::from_secs(3600);
/// Minimum time between two Events of repairs, and of limits.
const PACE: Duration = Duration::from_secs(60);
/// Backends whose process has another number each time are not kept.
const MAX_BACKENDS: usize = 64;

const REPAIRED: &str = "ServiceProxyRulesRepaired";
const LIMIT_SET: &str = "ImagePullLimitSet";

/// What can be a problem.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Topic {
    Runtime,
    Admission,
    Stalled,
    Endpoints,
    State,
    Contested,
    /// By its name.
    Backend(String),
}

impl Topic {
    /// `None`: the agent writes no Events for this condition.
    pub(super) fn of_condition(kind: &str) -> Option<Self> {
        match kind {
            "ImagePullsStalled" => Some(Self::Stalled),
            "ServiceEndpointsStale" => Some(Self::Endpoints),
            "KeelsonStateNotDurable" => Some(Self::State),
            "KeelsonNodeContested" => Some(Self::Contested),
            _ => None,
        }
    }

    fn is_condition(&self) -> bool {
        matches!(self, Self::Stalled | Self::Endpoints | Self::State | Self::Contested)
    }

    /// The reasons of its Events: the problem, and its end.
    fn reasons(&self) -> (&'static str, &'static str) {
        match self {
            Self::Runtime => ("ContainerRuntimeUnavailable", "ContainerRuntimeAvailable"),
            Self::Admission => ("ImagePullsPassedThrough", "ImagePullsAdmitted"),
            Self::Stalled => ("ImagePullsStalled", "ImagePullsNotStalled"),
            Self::Endpoints => ("ServiceEndpointsStale", "ServiceEndpointsSynced"),
            Self::State => ("KeelsonStateNotDurable", "KeelsonStateDurable"),
            Self::Contested => ("KeelsonNodeContested", "KeelsonNodeNotContested"),
            Self::Backend(_) => ("ServiceProxyFailing", "ServiceProxySynced"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) is_problem: bool,
    pub(super) message: String,
}

/// Successful repairs of a backend's rules since its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Repairs {
    pub(super) backend: String,
    pub(super) pid: u32,
    pub(super) repaired: u64,
}

/// What is known at one time. What is absent is not known, and stays as it was, except for backends.
#[derive(Debug, Clone, Default)]
pub(super) struct Observed {
    pub(super) topics: BTreeMap<Topic, Finding>,
    /// Of every backend that is known.
    pub(super) repairs: Vec<Repairs>,
    /// The message about the limit that was last set on the node.
    pub(super) limit: Option<String>,
}

impl Observed {
    pub(super) fn problem(&mut self, topic: Topic, message: String) {
        self.topics.insert(topic, Finding { is_problem: true, message });
    }

    pub(super) fn healthy(&mut self, topic: Topic, message: String) {
        // Of two backends of a name the failing one counts.
        self.topics.entry(topic).or_insert(Finding { is_problem: false, message });
    }
}

#[derive(Debug, Default)]
struct TopicState {
    /// A Warning was written, and no end.
    is_reported: bool,
    /// Since when the finding differs from what was reported.
    differs_since: Option<Duration>,
}

#[derive(Debug)]
struct Written {
    name: String,
    count: u32,
    first_unix_ms: i64,
    at: Duration,
}

#[derive(Debug)]
pub(super) struct NodeEvents {
    topics: BTreeMap<Topic, TopicState>,
    /// By reason and backend.
    written: BTreeMap<(&'static str, Option<String>), Written>,
    repairs: BTreeMap<(String, u32), u64>,
    limit: Option<String>,
    /// Begins names that no other process has used.
    prefix: String,
    number: u32,
}

/// `node`: the Node's name.
pub(super) fn core_for(node: &str, now: Now) -> NodeEvents {
    // Object names have at most 253 characters, and a part does not end in a dash.
    let node: String = node.chars().take(200).collect();
    NodeEvents {
        topics: BTreeMap::new(),
        written: BTreeMap::new(),
        repairs: BTreeMap::new(),
        limit: None,
        prefix: format!("{}.{:x}", node.trim_end_matches(['.', '-']), now.unix_ms),
        number: 0,
    }
}

impl NodeEvents {
    pub(super) fn observe(&mut self, observed: Observed, now: Now) -> Vec<ClusterEvent> {
        self.written.retain(|_, written| now.mono.saturating_sub(written.at) < AGGREGATE);
        let is_observed = |name: &String| observed.repairs.iter().any(|report| report.backend == *name);
        self.topics.retain(|topic, _| !matches!(topic, Topic::Backend(name) if !is_observed(name)));
        let mut events = Vec::new();
        for (topic, finding) in observed.topics {
            events.extend(self.observe_topic(topic, finding, now));
        }
        events.extend(self.observe_repairs(observed.repairs, now));
        events.extend(self.observe_limit(observed.limit, now));
        events
    }

    fn observe_topic(&mut self, topic: Topic, finding: Finding, now: Now) -> Option<ClusterEvent> {
        let Finding { is_problem, message } = finding;
        let (onset, clear) = if topic.is_condition() { Default::default() } else { (ONSET, CLEAR) };
        if topic.is_condition() && !self.topics.contains_key(&topic) {
            self.topics.insert(topic, TopicState { is_reported: is_problem, differs_since: None });
            return None;
        }
        let state = self.topics.entry(topic.clone()).or_default();
        if state.is_reported == is_problem {
            state.differs_since = None;
            return None;
        }
        let since = *state.differs_since.get_or_insert(now.mono);
        if now.mono.saturating_sub(since) < if is_problem { onset } else { clear } {
            return None;
        }
        *state = TopicState { is_reported: is_problem, differs_since: None };
        let reasons = topic.reasons();
        let backend = match topic {
            Topic::Backend(name) => Some(name),
            _ => None,
        };
        let reason = if is_problem { reasons.0 } else { reasons.1 };
        Some(self.event((reason, backend), is_problem, message, now))
    }

    /// The first report of a process is no repair that is new.
    fn observe_repairs(&mut self, repairs: Vec<Repairs>, now: Now) -> Vec<ClusterEvent> {
        let known = |repairs: &[Repairs], key: &(String, u32)| {
            repairs.iter().any(|report| (&report.backend, report.pid) == (&key.0, key.1))
        };
        self.repairs.retain(|key, _| known(&repairs, key));
        let mut events = Vec::new();
        for Repairs { backend, pid, repaired } in repairs.into_iter().take(MAX_BACKENDS) {
            let before = *self.repairs.entry((backend.clone(), pid)).or_insert(repaired);
            let topic = (REPAIRED, Some(backend.clone()));
            if repaired <= before || !self.may_write(&topic, now) {
                continue;
            }
            self.repairs.insert((backend.clone(), pid), repaired);
            let message = format!(
                "another program modified the rules of backend {backend}; repaired {repaired} times since its start"
            );
            events.push(self.event(topic, true, message, now));
        }
        events
    }

    fn observe_limit(&mut self, limit: Option<String>, now: Now) -> Option<ClusterEvent> {
        let topic = (LIMIT_SET, None);
        let message = limit.filter(|limit| self.limit.as_ref() != Some(limit))?;
        if !self.may_write(&topic, now) {
            return None;
        }
        self.limit = Some(message.clone());
        Some(self.event(topic, false, message, now))
    }

    fn may_write(&self, topic: &(&'static str, Option<String>), now: Now) -> bool {
        self.written.get(topic).is_none_or(|written| now.mono.saturating_sub(written.at) >= PACE)
    }

    fn event(
        &mut self,
        topic: (&'static str, Option<String>),
        is_warning: bool,
        message: String,
        now: Now,
    ) -> ClusterEvent {
        let reason = topic.0;
        let written = self.written.entry(topic).or_insert_with(|| {
            self.number += 1;
            let name = format!("{}.{:x}", self.prefix, self.number);
            Written { name, count: 0, first_unix_ms: now.unix_ms, at: now.mono }
        });
        written.count = written.count.saturating_add(1);
        written.at = now.mono;
        ClusterEvent {
            name: written.name.clone(),
            object: EventObject::OwnNode,
            is_warning,
            reason,
            message,
            count: written.count,
            first_unix_ms: written.first_unix_ms,
            last_unix_ms: now.unix_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bench(NodeEvents);

    impl Bench {
        fn new() -> Self {
            Self(core_for("n1", Now { mono: Duration::ZERO, unix_ms: 1_000 }))
        }

        /// What the Events of this second say: warning or not, reason, count.
        fn at(&mut self, second: u64, observed: Observed) -> Vec<(bool, &'static str, u32)> {
            let now = Now {
                mono: Duration::from_secs(second),
                unix_ms: 1_000 + 1_000 * i64::try_from(second).unwrap(),
            };
            let events = self.0.observe(observed, now);
            events.into_iter().map(|event| (event.is_warning, event.reason, event.count)).collect()
        }
    }

    fn found(topic: &Topic, is_problem: bool) -> Observed {
        let mut observed = Observed::default();
        match is_problem {
            true => observed.problem(topic.clone(), "why".into()),
            false => observed.healthy(topic.clone(), "well".into()),
        }
        observed
    }

    fn repaired(pid: u32, repaired: u64) -> Observed {
        let repairs = vec![Repairs { backend: "nft".into(), pid, repaired }];
        Observed { repairs, ..Observed::default() }
    }

    fn limit(text: &str) -> Observed {
        Observed { limit: Some(text.into()), ..Observed::default() }
    }

    const DOWN: (bool, &str, u32) = (true, "ContainerRuntimeUnavailable", 1);
    const UP: (bool, &str, u32) = (false, "ContainerRuntimeAvailable", 1);

    /// Second, problem or not, Events.
    type Step = (u64, Option<bool>, &'static [(bool, &'static str, u32)]);

    #[test]
    fn a_problem_that_lasts_has_an_event_and_so_has_its_end() {
        let cases: [(&str, &[Step]); 5] = [
            (
                "it lasts",
                &[
                    (0, Some(true), &[]),
                    (29, Some(true), &[]),
                    (30, Some(true), &[DOWN]),
                    (99, Some(true), &[]),
                ],
            ),
            (
                "it does not last",
                &[(0, Some(true), &[]), (20, Some(false), &[]), (40, Some(true), &[]), (60, Some(true), &[])],
            ),
            (
                "it ends",
                &[
                    (0, Some(true), &[]),
                    (30, Some(true), &[DOWN]),
                    (40, Some(false), &[]),
                    (300, Some(true), &[]),
                    (310, Some(false), &[]),
                    (610, Some(false), &[UP]),
                ],
            ),
            (
                "it comes again within the hour",
                &[
                    (0, Some(true), &[]),
                    (30, Some(true), &[DOWN]),
                    (40, Some(false), &[]),
                    (340, Some(false), &[UP]),
                    (400, Some(true), &[]),
                    (430, Some(true), &[(true, "ContainerRuntimeUnavailable", 2)]),
                ],
            ),
            (
                "it is not known for a while",
                &[(0, Some(true), &[]), (10, None, &[]), (30, Some(true), &[DOWN])],
            ),
        ];
        for (name, steps) in cases {
            let mut bench = Bench::new();
            for (second, problem, events) in steps {
                let observed =
                    problem.map_or_else(Observed::default, |problem| found(&Topic::Runtime, problem));
                assert_eq!(bench.at(*second, observed), *events, "{name}, second {second}");
            }
        }
    }

    #[test]
    fn after_an_hour_an_event_begins_anew() {
        let mut bench = Bench::new();
        assert_eq!(bench.at(0, limit("2")), [(false, LIMIT_SET, 1)]);
        assert_eq!(bench.at(3599, limit("3")), [(false, LIMIT_SET, 2)]);
        assert_eq!(bench.at(3599 + 3600, limit("4")), [(false, LIMIT_SET, 1)]);
    }

    #[test]
    fn a_condition_has_an_event_at_once_and_none_for_what_the_previous_agent_found() {
        for was in [false, true] {
            let mut bench = Bench::new();
            assert_eq!(bench.at(0, found(&Topic::Stalled, was)), []);
            assert_eq!(bench.at(5, found(&Topic::Stalled, was)), []);
            let reason = if was { "ImagePullsNotStalled" } else { "ImagePullsStalled" };
            assert_eq!(bench.at(10, found(&Topic::Stalled, !was)), [(!was, reason, 1)]);
        }
    }

    #[test]
    fn repairs_are_counted_from_the_first_report_of_a_process_and_aggregated() {
        let mut bench = Bench::new();
        assert_eq!(bench.at(0, repaired(7, 3)), [], "the first report");
        assert_eq!(bench.at(5, repaired(7, 4)), [(true, REPAIRED, 1)]);
        assert_eq!(bench.at(10, repaired(7, 9)), [], "too soon");
        assert_eq!(bench.at(65, repaired(7, 9)), [(true, REPAIRED, 2)]);
        assert_eq!(bench.at(130, repaired(7, 9)), [], "no more of them");
        assert_eq!(bench.at(200, repaired(8, 0)), [], "another process");
        assert_eq!(bench.at(205, repaired(8, 1)), [(true, REPAIRED, 3)]);
    }

    #[test]
    fn a_limit_has_one_event_and_the_last_of_many_in_a_row_is_reported() {
        let mut bench = Bench::new();
        assert_eq!(bench.at(0, Observed::default()), []);
        assert_eq!(bench.at(5, limit("2")), [(false, LIMIT_SET, 1)]);
        assert_eq!(bench.at(10, limit("2")), []);
        assert_eq!(bench.at(15, limit("3")), [], "too soon");
        assert_eq!(bench.at(20, limit("4")), [], "too soon");
        assert_eq!(bench.at(65, limit("4")), [(false, LIMIT_SET, 2)]);
    }

    #[test]
    fn backends_are_told_apart_and_the_failing_one_of_a_name_counts() {
        let mut bench = Bench::new();
        let both = || {
            let mut observed = Observed::default();
            observed.problem(Topic::Backend("a".into()), "why".into());
            observed.healthy(Topic::Backend("a".into()), "well".into());
            observed.problem(Topic::Backend("b".into()), "why".into());
            let report = |name: &str| Repairs { backend: name.into(), pid: 1, repaired: 0 };
            observed.repairs = vec![report("a"), report("b")];
            observed
        };
        assert_eq!(bench.at(0, both()), []);
        let failing = (true, "ServiceProxyFailing", 1);
        assert_eq!(bench.at(30, both()), [failing, failing]);
        let mut names: Vec<_> = bench.0.written.values().map(|written| &written.name).collect();
        names.dedup();
        assert_eq!(names.len(), 2, "each has an Event of its own");
    }

    #[test]
    fn backends_that_are_gone_are_not_kept() {
        let mut bench = Bench::new();
        for name in 0..100 {
            let mut observed = Observed::default();
            observed.problem(Topic::Backend(format!("b{name}")), "why".into());
            observed.repairs = vec![Repairs { backend: format!("b{name}"), pid: 1, repaired: 0 }];
            assert_eq!(bench.at(name, observed), []);
            assert_eq!(bench.0.topics.len(), 1);
        }
    }
}
