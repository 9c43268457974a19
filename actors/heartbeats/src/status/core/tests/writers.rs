//! E3 and E22: another process reports for the same node, or writes the same condition.

use super::*;
use crate::lease::Contention;

const KIND: &str = "KernelDeadlock";
const CONTESTED: &str = "KeelsonNodeContested";

fn patch(kind: &str, status: &str, n: i64) -> Value {
    let at = |ms: i64| serde_json::to_value(crate::status::compute::conditions::time(ms)).expect("JSON");
    json!({"status": {"conditions": [{
        "type": kind, "status": status, "reason": "Theirs", "message": "",
        "lastHeartbeatTime": at(NEW_YEAR + n * SECOND), "lastTransitionTime": at(NEW_YEAR),
    }]}})
}

/// Another process overwrites the condition whenever it finds another version, as this agent would.
fn alternate_writes(world: &mut World, kind: &str, passes: i64) {
    for n in 0..passes {
        if world.condition(kind)["reason"] != "Theirs" {
            world.other(&patch(kind, "True", world.boot / SECOND + n));
        }
        world.pass_watched(11 * SECOND);
    }
}

#[test]
fn e22_two_reporters_of_one_condition_are_reported_and_do_not_alternate() {
    for role in [Role::Companion, Role::Node] {
        let mut world = World::settled(role);
        world.set(condition(KIND, ConditionStatus::False));
        world.step(Event::Changed);
        world.pass(11 * SECOND);
        world.forget();
        alternate_writes(&mut world, KIND, 2);
        let contested = world.condition(CONTESTED);
        assert_eq!(
            (&contested["status"], &contested["reason"]),
            (&json!("True"), &json!("ConditionsWrittenByAnother")),
            "within two periods, {role:?}"
        );
        assert_eq!(world.notes.iter().filter(|note| note.contains("another process also writes")).count(), 1);
        assert_eq!(world.counted.iter().filter(|of| **of == Counted::ForeignWrite).count(), 2);
        assert_eq!(world.core.contested_conditions(), 1);
        let view = world.core.view(world.now());
        let shown = view["conditions"].as_array().expect("a list").iter().find(|of| of["type"] == KIND);
        assert_eq!(shown.map(|of| of["contested"].clone()), Some(json!(true)), "{view:#}");
        // For an hour it is written at most once per report period, instead of with every pass.
        world.forget();
        let before = world.boot;
        alternate_writes(&mut world, KIND, HOUR / (11 * SECOND));
        let of_kind = |request: &&Request| request.body.to_string().contains(KIND);
        let writes = world.requests.iter().filter(|request| request.verb == "patch");
        let writes = writes.filter(of_kind).count();
        assert!((10..=13).contains(&writes), "{writes} in {} min, {role:?}", (world.boot - before) / MINUTE);
        // The other process stops: the contest is over after two report periods.
        world.pass_watched(6 * MINUTE);
        assert_eq!(world.condition(KIND)["status"], "False");
        world.pass(11 * MINUTE);
        assert_eq!(world.condition(CONTESTED)["status"], "False");
        assert_eq!(world.core.contested_conditions(), 0);
        assert!(world.notes.iter().any(|note| note.contains("no other process")), "{:?}", world.notes);
    }
}

#[test]
fn e22_single_edits_the_lifecycle_controller_and_lost_answers_are_no_second_writer() {
    let mut world = World::settled(Role::Node);
    world.other(&patch("ImagePullsStalled", "True", 1));
    world.pass_watched(11 * SECOND);
    for n in 0..5 {
        let unknown = json!({"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown",
            "message": format!("{n}"), "lastTransitionTime": "2026-01-01T00:01:00Z"});
        world.other(&json!({"status": {"conditions": [unknown]}}));
        world.pass_watched(11 * SECOND);
        assert_eq!(world.condition("Ready")["status"], "True", "written at once");
    }
    for _ in 0..5 {
        world.faults.push_back(Fault::Swallows);
        world.step(Event::ReportNow);
        world.pass_watched(30 * SECOND);
    }
    assert_eq!(world.core.contested_conditions(), 0, "{:?}", world.notes);
    assert_eq!(world.condition(CONTESTED), Value::Null, "never contested, never written");
}

#[test]
fn e22_a_condition_that_was_cleared_is_not_fought_over() {
    let mut world = World::settled(Role::Companion);
    world.set(condition(KIND, ConditionStatus::False));
    world.step(Event::Changed);
    world.clear(KIND);
    world.pass(11 * SECOND);
    assert_eq!(world.condition(KIND), Value::Null);
    world.forget();
    alternate_writes(&mut world, KIND, 60);
    assert!(world.verbs().len() < 8, "{:?}", world.verbs());
}

/// Two agents of one name, each with its own core, and one Node.
#[test]
fn e22_two_companions_of_one_name_find_each_other_by_what_they_write() {
    let mut one = World::settled(Role::Companion);
    // The finding has lasted for longer than the onset of a condition.
    one.pass(6 * MINUTE);
    one.forget();
    let mut two = World::new(Role::Companion);
    (two.node, two.version) = (one.node.clone(), one.version);
    two.collected.pulls_view = Ok(PullsView { queued: 1, runtime: away(), ..idle() });
    let mut writes = 0;
    for n in 0..(HOUR / (10 * SECOND)) {
        for turn in 0..2 {
            let (a, b) = if turn == 0 { (&mut one, &mut two) } else { (&mut two, &mut one) };
            (a.node, a.version, a.wall) = (b.node.clone(), b.version, b.wall);
            a.send_node();
            a.pass(5 * SECOND);
            writes += a.requests.drain(..).filter(|request| request.verb == "patch").count();
            (b.node, b.version) = (a.node.clone(), a.version);
        }
        if n == 11 {
            assert_eq!(one.condition(CONTESTED)["status"], "True", "within two minutes");
        }
    }
    assert_eq!(one.condition(CONTESTED)["status"], "True");
    assert!(one.core.contested_conditions() > 0 && two.core.contested_conditions() > 0);
    assert!(writes < 80, "{writes} writes of both in an hour, where a fight would take 720");
}

#[test]
fn e3_role_node_that_stands_back_writes_one_condition_and_returns() {
    let mut world = World::settled(Role::Node);
    // A kubelet starts.
    let kubelet = json!({"status": {
        "nodeInfo": {"kubeletVersion": "v1.36.3"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet"}],
    }});
    world.other(&kubelet);
    world.step(Event::Contention(Contention::StandingBack));
    world.pass(11 * SECOND);
    assert_eq!(world.verbs(), ["patch"]);
    world.assert_condition(CONTESTED, "True", "StandingBack");
    assert_eq!(world.condition("Ready")["message"], "kubelet", "unchanged");
    world.collected.runtime = Err("gone".into());
    world.collected.runtime_down = Some("gone".into());
    world.set(condition(KIND, ConditionStatus::True));
    world.forget();
    world.pass(HOUR);
    for request in &world.requests {
        let conditions = request.body["status"]["conditions"].as_array().expect("a list");
        assert!(conditions.iter().all(|of| of["type"] == CONTESTED), "{request:?}");
        assert_eq!(request.body["status"].as_object().expect("an object").len(), 1, "{request:?}");
    }
    assert!(
        (10..=13).contains(&world.requests.len()),
        "its heartbeat, every five minutes: {:?}",
        world.verbs()
    );
    assert_eq!(world.condition("Ready")["message"], "kubelet");
    // The kubelet stops.
    world.collected = healthy();
    world.forget();
    world.step(Event::Contention(Contention::Uncontested));
    world.pass(11 * SECOND);
    assert_eq!(world.condition(CONTESTED)["status"], "False");
    assert!(world.node.as_ref().expect("there")["status"]["nodeInfo"]["kubeletVersion"] != "v1.36.3");
    assert_eq!(world.condition(KIND)["status"], "True");
}

#[test]
fn e3_role_node_waits_until_a_second_writer_is_excluded() {
    let mut world = World::new(Role::Node);
    world.make_node();
    world.forget();
    world.reported = None;
    world.began = world.boot;
    world.core = Core::new(world.policy.clone());
    world.health = JobHealth::Pending;
    world.step(Event::Contention(Contention::Undecided));
    world.step(Event::Started { restored: Restored::default(), stamp: world.stamp() });
    world.send_node();
    world.step(Event::RuntimeReady);
    world.pass(15 * SECOND);
    assert_eq!((world.verbs(), world.health.clone()), (vec![], JobHealth::Pending));
    world.step(Event::Contention(Contention::Uncontested));
    assert_eq!(world.verbs(), ["repair", "get", "patch"], "at once");
    assert_eq!(world.health, JobHealth::Healthy);
}

#[test]
fn e3_a_lease_that_another_renews_is_a_condition_of_a_companion_too() {
    let mut world = World::settled(Role::Companion);
    world.step(Event::Contention(Contention::Contested));
    world.pass(11 * SECOND);
    world.assert_condition(CONTESTED, "True", "LeaseRenewedByAnother");
    // A restart is no transition.
    world.restart();
    world.pass(SECOND);
    world.step(Event::Contention(Contention::Undecided));
    world.pass(11 * SECOND);
    assert_eq!(world.condition(CONTESTED)["status"], "False", "no second writer was found");
    world.step(Event::Contention(Contention::Contested));
    world.pass(11 * SECOND);
    world.step(Event::Contention(Contention::Uncontested));
    world.pass(11 * SECOND);
    assert_eq!(world.condition(CONTESTED)["reason"], "NotContested");
}
