//! Events on the Node.
//!
//! Owns: one part of the job of the writer of Events, and which [`NodeFacts`] are a problem. In: the view of the agent's
//! parts, read every [`INTERVAL`]. Out: Events of [`core`] into the writer's queue. Nothing waits for them; one that finds
//! the queue full is lost.

mod core;

use std::{collections::BTreeSet, time::Duration};

use keelson_actor_system::clock::Clock;
use keelson_proto::{debug as pb, endpoints::Backend, node::Condition};
use keelson_pulls::runtime::Health;

use self::core::{Observed, Repairs, Topic, core_for};
use super::{node_facts::NodeFacts, pulls::EventWriter, view::View};

const INTERVAL: Duration = Duration::from_secs(5);

/// Observes until the agent stops.
pub(super) fn start(writer: &EventWriter, view: &View, clock: Clock) {
    let (view, queue) = (view.clone(), writer.queue.clone());
    writer.job.keep_on(
        &writer.arbiter,
        1,
        |_| {},
        move || {
            let (view, queue) = (view.clone(), queue.clone());
            async move {
                let mut core = core_for(&view.node_name(), clock.now());
                while let Some(facts) = view.node_facts().await {
                    for event in core.observe(facts.observed(), clock.now()) {
                        if queue.try_send(event).is_err() {
                            view.count_dropped_event();
                        }
                    }
                    tokio::time::sleep(INTERVAL).await;
                }
                // The successor observes.
                std::future::pending().await
            }
        },
    );
}

impl NodeFacts {
    fn observed(self) -> Observed {
        let mut observed = Observed::default();
        match self.runtime {
            Health::Unknown => {}
            Health::Up { .. } => {
                observed.healthy(Topic::Runtime, "the container runtime answers again".into())
            }
            Health::Down { reason, .. } => {
                observed.problem(Topic::Runtime, format!("the container runtime does not answer: {reason}"));
            }
        }
        match self.is_passing_through {
            true => observed.problem(
                Topic::Admission,
                "image pulls are passed through to the runtime without limit; see keelson actors".into(),
            ),
            false => observed.healthy(Topic::Admission, "image pulls are admitted and limited again".into()),
        }
        for Condition { r#type, status, message, .. } in self.conditions {
            let Some(topic) = Topic::of_condition(&r#type) else { continue };
            match status.as_str() {
                "True" => observed.problem(topic, message),
                "False" => observed.healthy(topic, message),
                _ => {}
            }
        }
        // One that was replaced is silent for an hour.
        let reporting: BTreeSet<String> = self
            .backends
            .iter()
            .filter(|backend| !backend.silent)
            .map(|backend| backend.name.clone())
            .collect();
        for backend in self.backends {
            if backend.silent && reporting.contains(&backend.name) {
                continue;
            }
            let Backend { name, pid, state, reason, silent, repaired, .. } = backend;
            observed.repairs.push(Repairs { backend: name.clone(), pid, repaired });
            let topic = Topic::Backend(name.clone());
            match state.as_str() {
                _ if silent => observed.problem(topic, format!("backend {name} does not report; {reason}")),
                "failing" => {
                    observed.problem(topic, format!("backend {name} cannot sync its rules: {reason}"))
                }
                "synced" => observed.healthy(topic, format!("backend {name} is synced")),
                _ => {}
            }
        }
        observed.limit = self.limit.map(|limit| limit_text(&limit));
        observed
    }
}

fn limit_text(limit: &pb::Limit) -> String {
    let number = |limit: u32| if limit == 0 { "none".to_owned() } else { limit.to_string() };
    let (now, configured) = (number(limit.max_parallel_image_pulls), number(limit.configured));
    match limit.overridden {
        true => {
            format!("the limit on image pulls was set to {now} on the node; the settings say {configured}")
        }
        false => format!("the limit on image pulls is that of the settings again: {configured}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> NodeFacts {
        NodeFacts {
            runtime: Health::Unknown,
            is_passing_through: false,
            conditions: Vec::new(),
            backends: Vec::new(),
            limit: None,
        }
    }

    #[test]
    fn only_known_parts_are_observed() {
        let observed = facts().observed();
        assert_eq!(observed.topics.keys().collect::<Vec<_>>(), [&Topic::Admission]);
        let condition = |kind: &str, status: &str| Condition {
            r#type: kind.into(),
            status: status.into(),
            message: format!("{kind} {status}"),
            ..Condition::default()
        };
        let conditions = vec![
            condition("ImagePullsStalled", "True"),
            condition("ServiceEndpointsStale", "Unknown"),
            condition("KeelsonStateNotDurable", "False"),
            condition("KernelDeadlock", "True"),
        ];
        let backend = |name: &str, state: &str, silent: bool| Backend {
            name: name.into(),
            state: state.into(),
            reason: "why".into(),
            silent,
            ..Backend::default()
        };
        let backends = vec![
            backend("a", "failing", false),
            backend("b", "synced", true),
            backend("c", "pending", false),
            backend("d", "synced", true),
            backend("d", "synced", false),
        ];
        let observed = NodeFacts { is_passing_through: true, conditions, backends, ..facts() }.observed();
        let problem =
            |topic| observed.topics.get(&topic).map(|found| (found.is_problem, found.message.as_str()));
        assert_eq!(problem(Topic::Stalled), Some((true, "ImagePullsStalled True")));
        assert_eq!(problem(Topic::Endpoints), None, "Unknown is no problem and no end of one");
        assert_eq!(problem(Topic::State), Some((false, "KeelsonStateNotDurable False")));
        assert_eq!(problem(Topic::Backend("a".into())), Some((true, "backend a cannot sync its rules: why")));
        assert_eq!(problem(Topic::Backend("b".into())), Some((true, "backend b does not report; why")));
        assert_eq!(problem(Topic::Backend("c".into())), None);
        assert_eq!(
            problem(Topic::Backend("d".into())),
            Some((false, "backend d is synced")),
            "it was replaced"
        );
        assert_eq!(problem(Topic::Runtime), None);
    }

    #[test]
    fn a_limit_is_named_with_that_of_the_settings() {
        let limit = |now, overridden| pb::Limit {
            max_parallel_image_pulls: now,
            configured: 5,
            overridden,
            ..pb::Limit::default()
        };
        for (limit, text) in [
            (limit(2, true), "the limit on image pulls was set to 2 on the node; the settings say 5"),
            (limit(0, true), "the limit on image pulls was set to none on the node; the settings say 5"),
            (limit(5, false), "the limit on image pulls is that of the settings again: 5"),
        ] {
            assert_eq!(limit_text(&limit), text);
        }
    }
}
