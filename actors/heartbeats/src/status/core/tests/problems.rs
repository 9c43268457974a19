//! Problem conditions: changes, texts, and removal from the Node (E5, E6).

use super::*;
use crate::status::{ExternalCondition, recorded_conditions};

const ENDPOINTS: &str = "ServiceEndpointsStale";

/// The view of each second.
type Pattern = fn(i64) -> EndpointsView;

fn stale(cause: StaleCause, words: &str) -> EndpointsView {
    EndpointsView::Stale { cause, reason: words.into() }
}

fn unavailable(second: i64) -> EndpointsView {
    stale(StaleCause::SourceUnavailable, &format!("https://api: no answer within {second} s"))
}

/// A companion with synced endpoints, and nothing to report.
fn synced() -> World {
    let mut world = World::with_node(Role::Companion);
    world.collected.endpoints = EndpointsView::Synced;
    world.restart();
    world.pass_watched(10 * MINUTE);
    world.forget();
    world
}

/// Advances time, with `view` as the state of endpoints in each second.
fn pass_with(world: &mut World, seconds: i64, view: impl Fn(i64) -> EndpointsView) {
    pass_without_event(world, seconds, view);
    world.send_node();
}

/// As [`pass_with`], without events of the watch of the Node.
fn pass_without_event(world: &mut World, seconds: i64, view: impl Fn(i64) -> EndpointsView) {
    for second in 0..seconds {
        world.collected.endpoints = view(second);
        world.pass(SECOND);
    }
}

/// An API server that does not answer for three minutes.
fn outage(world: &mut World) {
    world.always = Some(Fault::Says(ApiErrorKind::Unreachable));
    world.watches = false;
    pass_without_event(world, 180, unavailable);
    assert!(matches!(world.health, JobHealth::Failing { .. }));
    assert!(world.verbs().len() <= TRIES as usize, "one pass and no more: {:?}", world.verbs());
    world.always = None;
    world.watches = true;
    world.forget();
    world.send_node();
}

/// E6: views during ten minutes of a failing API server, and the maximum cost.
#[test]
fn e6_ten_minutes_of_api_errors_cost_at_most_two_patches() {
    let cases: [(&str, usize, Pattern); 7] = [
        ("down, in ever new words", 2, unavailable),
        ("down for 20 s of each minute", 0, |second| match second % 60 {
            0..20 => unavailable(second),
            _ => EndpointsView::Synced,
        }),
        ("down for 10 s, up for 10 s", 0, |second| match second / 10 % 2 {
            0 => unavailable(second),
            _ => EndpointsView::Synced,
        }),
        ("down for 50 s, up for 50 s", 0, |second| match second / 50 % 2 {
            0 => unavailable(second),
            _ => EndpointsView::Synced,
        }),
        ("down for a minute, up for four", 0, |second| match second % 300 {
            0..60 => unavailable(second),
            _ => EndpointsView::Synced,
        }),
        ("refused, unreachable and listing in turns of 15 s", 2, |second| match second / 15 % 3 {
            0 => stale(StaleCause::SourceRefused, "403"),
            1 => unavailable(second),
            _ => stale(StaleCause::NotSynced, "relisting"),
        }),
        ("refused and unreachable in turns of a minute", 2, |second| match second / 60 % 2 {
            0 => stale(StaleCause::SourceRefused, "403"),
            _ => unavailable(second),
        }),
    ];
    for (name, most, view) in cases {
        let mut world = synced();
        pass_with(&mut world, 600, view);
        let during = world.condition(ENDPOINTS)["status"].clone();
        assert_eq!(during, json!(if most == 0 { "False" } else { "True" }), "{name}");
        pass_with(&mut world, 600, |_| EndpointsView::Synced);
        // Before the report that the server does not answer, it is asked.
        let asked = usize::from(most > 0 && world.verbs()[0] == "get");
        assert_eq!(world.verbs()[asked..], vec!["patch"; most], "{name}");
        assert_eq!(world.condition(ENDPOINTS)["reason"], "EndpointsSynced", "{name}");
    }
}

/// E6: an unreachable API server is reported after 2 min, and cleared 5 min after it was last seen.
#[test]
fn e6_a_problem_is_reported_when_it_has_lasted_and_stays_for_the_transition_period() {
    let mut world = synced();
    let status = |world: &World| world.condition(ENDPOINTS)["status"].clone();
    pass_with(&mut world, 119, unavailable);
    assert_eq!(status(&world), "False");
    pass_with(&mut world, 24, unavailable);
    assert_eq!(status(&world), "True");
    let since = world.condition(ENDPOINTS)["lastTransitionTime"].clone();
    pass_with(&mut world, 290, |_| EndpointsView::Synced);
    assert_eq!(status(&world), "True");
    // A restart resets that.
    world.restart();
    pass_with(&mut world, 290, |_| EndpointsView::Synced);
    assert_eq!(
        (status(&world), world.condition(ENDPOINTS)["lastTransitionTime"].clone()),
        (json!("True"), since)
    );
    pass_with(&mut world, 22, |_| EndpointsView::Synced);
    assert_eq!((status(&world), world.verbs()), (json!("False"), vec!["get", "patch", "patch"]));

    world.policy.pressure_transition = Duration::ZERO;
    world.restart();
    pass_with(&mut world, 145, unavailable);
    assert_eq!(status(&world), "True");
    pass_with(&mut world, 11, |_| EndpointsView::Synced);
    assert_eq!(status(&world), "False", "with a period of 0s it is withdrawn at once");
}

/// E6: the text of an error never reaches the Node; a reason that lasts does.
#[test]
fn e6_a_condition_has_one_text_for_each_reason() {
    let mut world = synced();
    pass_with(&mut world, 145, unavailable);
    let condition = world.condition(ENDPOINTS);
    assert_eq!(condition["reason"], "SourceUnavailable");
    assert!(!world.message(ENDPOINTS).contains("no answer within"), "{condition}");
    pass_with(&mut world, 290, |_| stale(StaleCause::SourceRefused, "403 Forbidden"));
    assert_eq!(world.condition(ENDPOINTS)["reason"], "SourceUnavailable");
    pass_with(&mut world, 30, |_| stale(StaleCause::SourceRefused, "401 Unauthorized"));
    let refused = world.condition(ENDPOINTS);
    assert_eq!(refused["reason"], "SourceRefused");
    assert_eq!(refused["lastTransitionTime"], condition["lastTransitionTime"], "a reason is no transition");
    assert!(!refused.to_string().contains("401"), "{refused}");
    assert_eq!(world.verbs(), ["get", "patch", "patch"]);
}

/// E6: a first start is one write, whatever happens in its first seconds.
#[test]
fn e6_a_first_start_reports_no_problem_before_its_onset_time() {
    let start = |view: EndpointsView| {
        let mut world = World::with_node(Role::Companion);
        world.collected.endpoints = view;
        world.restart();
        world.send_node();
        world
    };
    let mut world = start(EndpointsView::Pending);
    pass_with(&mut world, 8, |_| stale(StaleCause::NotSynced, "listing"));
    assert_eq!(world.condition(ENDPOINTS), Value::Null);
    pass_with(&mut world, 20, |_| EndpointsView::Synced);
    assert_eq!((&world.condition(ENDPOINTS)["status"], world.verbs().len()), (&json!("False"), 2));
    for (view, status) in
        [(stale(StaleCause::SourceRefused, "403"), "True"), (EndpointsView::NotWatched, "Unknown")]
    {
        let mut world = start(view.clone());
        pass_with(&mut world, 25, |_| view.clone());
        assert_eq!(world.condition(ENDPOINTS), Value::Null);
        pass_with(&mut world, 20, |_| view.clone());
        assert_eq!(world.condition(ENDPOINTS)["status"], status);
    }
    // Watchers that reconnect after a restart of the agent find the condition unchanged.
    let mut world = synced();
    world.restart();
    pass_with(&mut world, 25, |_| EndpointsView::NotWatched);
    pass_with(&mut world, 600, |_| EndpointsView::Synced);
    assert_eq!(world.verbs(), Vec::<&str>::new());
}

/// E17: on a node whose Services come from files this condition does not mention an API server.
#[test]
fn e17_with_manifests_as_the_source_the_texts_are_about_their_folder() {
    for (view, reason) in [
        (EndpointsView::Synced, "EndpointsSynced"),
        (stale(StaleCause::NotSynced, "x"), "NotSynced"),
        (stale(StaleCause::SourceUnavailable, "x"), "SourceUnavailable"),
    ] {
        let origins =
            [(EndpointsOrigin::ApiServer, "API server"), (EndpointsOrigin::Manifests, "manifests directory")];
        for (origin, word) in origins {
            let mut world = World::with(StatusPolicy {
                endpoints_origin: origin,
                ..StatusPolicy::new(Role::Companion, "n1")
            });
            world.make_node();
            world.collected.endpoints = view.clone();
            world.restart();
            world.pass(3 * MINUTE);
            let condition = world.condition(ENDPOINTS);
            assert_eq!(condition["reason"], reason);
            let message = world.message(ENDPOINTS);
            assert!(message.contains(word), "{origin:?}: {message}");
            assert!(origin == EndpointsOrigin::ApiServer || !message.contains("API"), "{message}");
        }
    }
}

/// E5: conditions of an earlier version or another configuration of the agent are removed; others stay.
#[test]
fn e5_conditions_that_are_not_reported_any_more_leave_the_node() {
    for role in [Role::Node, Role::Companion] {
        let mut world = World::with_node(role);
        world.collected.endpoints = EndpointsView::Synced;
        world.restart();
        world.pass(MINUTE);
        assert_eq!(world.condition(ENDPOINTS)["status"], "False");
        let old = ["ImagePullsFlowing", "ServiceEndpointsCurrent"];
        world.other(
            &json!({"status": {"conditions": old.map(|kind| json!({"type": kind, "status": "True"}))}}),
        );
        world.forget();
        // Endpoints are disabled, and the agent restarts.
        world.collected.endpoints = EndpointsView::Disabled;
        world.restart();
        world.pass(MINUTE);
        for kind in old.into_iter().chain([ENDPOINTS]) {
            assert_eq!(world.condition(kind), Value::Null, "{role:?}");
        }
        assert_eq!(world.condition("Foreign")["status"], "True");
        assert_eq!(world.verbs(), ["patch"], "{role:?}: one write for all of it");
        world.send_node();
        world.restart();
        world.pass(MINUTE);
        assert_eq!(world.verbs(), ["patch"], "{role:?}: and none after that");
    }
}

/// E5: with the gate off, conditions set by others are removed from the Node and the disk.
#[test]
fn e5_external_conditions_are_removed_when_they_are_no_longer_accepted() {
    let mut world = synced();
    world.set(condition("KernelDeadlock", ConditionStatus::True));
    world.pass_watched(11 * SECOND);
    assert_eq!(world.condition("KernelDeadlock")["status"], "True");
    assert!(world.core.removable_conditions().contains(&"KernelDeadlock".to_owned()));
    world.policy.external_conditions = false;
    world.restart();
    world.pass_watched(11 * SECOND);
    assert_eq!(world.condition("KernelDeadlock"), Value::Null);
    world.pass(2 * MINUTE);
    assert!(world.conditions.is_empty(), "{:?}", world.conditions);
}

/// E5: `keelson cleanup` finds conditions of others on disk, cleared or not.
#[test]
fn e5_external_conditions_are_restored_from_disk() {
    use keelson_storage::{MemoryStore, StateStore};
    let mut externals = Externals::default();
    let report = |kind: &str| ExternalCondition { ..condition(kind, ConditionStatus::True) };
    let mut writes: Vec<ExternalWrite> =
        ["A", "B"].into_iter().filter_map(|kind| externals.set(report(kind), 0).expect("taken")).collect();
    writes.push(externals.clear("B", 0).expect("was there"));
    let store: Arc<dyn StateStore> = Arc::new(MemoryStore::new());
    let mut unsaved = crate::status::state::Unsaved::default();
    unsaved.add(Write::Conditions(writes));
    unsaved.save(&store).expect("saved");
    assert_eq!(recorded_conditions(&store).expect("readable"), ["A", "B"]);
}

/// E6, E2: after an outage of the API server the nodes do not all report it.
#[test]
fn e6_an_outage_of_the_api_server_causes_no_write_after_it() {
    for role in [Role::Companion, Role::Node] {
        let mut world = World::with_node(role);
        world.collected.endpoints = EndpointsView::Synced;
        world.policy.report_frequency = Duration::from_secs(900);
        world.restart();
        world.pass_watched(MINUTE);
        world.forget();
        outage(&mut world);
        pass_with(&mut world, 22, unavailable);
        pass_with(&mut world, 120, |_| EndpointsView::Synced);
        assert_eq!((world.health.clone(), world.verbs()), (JobHealth::Healthy, vec![]), "{role:?}");
        // A problem that lasts while the server answers is reported.
        pass_with(&mut world, 140, unavailable);
        assert_eq!(world.condition(ENDPOINTS)["status"], "True", "{role:?}");
    }
}

/// E6, E2: the same for an outage in which no status was due, whenever it ends; the watches reconnect 42 s after it at
/// the latest.
#[test]
fn e6_an_outage_between_reports_causes_no_write() {
    for away in 40..=120 {
        let mut world = synced();
        world.watches = false;
        world.always = Some(Fault::Says(ApiErrorKind::Unreachable));
        pass_without_event(&mut world, away, unavailable);
        world.always = None;
        world.forget();
        pass_without_event(&mut world, 42, unavailable);
        world.watches = true;
        pass_with(&mut world, 120, |_| EndpointsView::Synced);
        assert!(matches!(world.verbs()[..], [] | ["get"]), "{away} s: {:?}", world.verbs());
    }
}

/// E6: watches that do not catch up when the server is back are a problem that is reported.
#[test]
fn e6_a_problem_that_outlasts_the_outage_is_reported() {
    let mut world = synced();
    outage(&mut world);
    pass_with(&mut world, 44, unavailable);
    assert_eq!(world.condition(ENDPOINTS)["status"], "False");
    pass_with(&mut world, 15, unavailable);
    assert_eq!(world.condition(ENDPOINTS)["status"], "True");
}
