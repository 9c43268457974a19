//! The StatusReporter with scripted neighbours.

mod neighbours;

use std::{sync::atomic::Ordering, time::Duration};

use keelson_actor_system::{
    cluster::{ApiErrorKind, JobHealth},
    reports::{EndpointsView, PullsView, RuntimeAvailability},
    supervise::{PANIC, Restart},
    test_support::{pass, run, settle},
};
use keelson_storage::{StateStoreExt as _, StoreState, Table};
use serde_json::{Value, json};

use crate::status::{
    ConditionChanged, ConditionRefused, ConditionStatus, CountNow, EndReports, ListConditions, ReportNow,
    Role, idle,
};
use neighbours::{Fault, NEW_YEAR, World, step_wall};

/// Advances time in steps in which other threads finish as well.
async fn live(seconds: u64) {
    for _ in 0..seconds {
        pass(1000).await;
        settle().await;
    }
}

/// The reporter, and what it has requested in this time is forgotten.
async fn lived(role: Role, seconds: u64) -> World {
    let world = World::start(role);
    live(seconds).await;
    world.api.forget();
    world
}

#[test]
fn case_27_a_node_is_created_and_then_reported_when_the_report_is_old() {
    run(async {
        let world = World::start(Role::Node);
        live(1).await;
        assert_eq!(world.api.verbs(), ["get", "create"]);
        assert_eq!(world.api.condition("Ready")["status"], "True");
        assert_eq!(*world.health.borrow(), JobHealth::Healthy);
        assert!(*world.changes.borrow() > 0);
        world.send_node();
        live(3600).await;
        let requests = world.api.script().requests.clone();
        let patches: Vec<_> = requests.iter().skip(2).collect();
        assert!(patches.iter().all(|(_, verb, _)| *verb == "patch"), "{:?}", world.api.verbs());
        assert!((11..=12).contains(&patches.len()), "{}", patches.len());
        for pair in patches.windows(2) {
            let pause = pair[1].0 - pair[0].0;
            assert!((300_000..=312_000).contains(&pause.as_millis()), "{pause:?}");
        }
        world.reporter.ask(CountNow {}).await.expect("the reporter answers");
        let age = world.metrics.last_report_age.get();
        assert!((0.0..=312.0).contains(&age), "{age}");
        assert!(
            (340..=362).contains(&world.metrics.computations.get()),
            "{}",
            world.metrics.computations.get()
        );
        let state = world.state().await;
        assert_eq!((&state["uid"], &state["role"]), (&json!("uid-1"), &json!("node")));
        let ready = &state["conditions"][5];
        assert_eq!((&ready["type"], &ready["status"]), (&json!("Ready"), &json!("True")));
        assert_eq!((&ready["reason"], &ready["from_reporter"]), (&json!("KubeletReady"), &json!(false)));
    });
}

#[test]
fn a_runtime_that_dies_makes_the_node_not_ready_within_ten_seconds_and_back() {
    run(async {
        let world = World::start(Role::Node);
        live(60).await;
        for round in 0..3 {
            world.api.forget();
            world.runtime_dies();
            live(10).await;
            let ready = world.api.condition("Ready");
            assert_eq!(
                (&ready["status"], &ready["reason"]),
                (&json!("False"), &json!("KubeletNotReady")),
                "{round}"
            );
            assert!(ready["message"].as_str().expect("a text").contains("connection refused"), "{ready}");
            world.runtime_returns();
            live(11).await;
            assert_eq!(world.api.condition("Ready")["status"], "True");
            assert_eq!(world.api.verbs(), ["patch", "patch"]);
        }
        // If the rate allows, it is reported at once.
        live(60).await;
        world.runtime_dies();
        settle().await;
        assert_eq!(world.api.condition("Ready")["status"], "False");
    });
}

#[test]
fn a_server_that_never_answers_does_not_stop_the_reporter() {
    run(async {
        let world = lived(Role::Companion, 60).await;
        world.api.script().always = Some(Fault::Hangs);
        let away = RuntimeAvailability::Down { down_for: Duration::ZERO, reason: "x".into() };
        *world.source.pulls_view.lock().expect("unharmed") =
            PullsView { running: 1, runtime: away, ..idle() };
        live(1000).await;
        assert!(
            matches!(&*world.health.borrow(), JobHealth::Failing { reason, .. } if reason.contains("https://api"))
        );
        assert!(world.api.script().closed >= 4);
        assert_eq!(world.api.verbs()[..5], ["patch", "get", "get", "get", "get"]);
        world.api.script().always = None;
        live(170).await;
        assert_eq!(*world.health.borrow(), JobHealth::Healthy);
        assert_eq!(world.api.condition("ImagePullsStalled")["reason"], "RuntimeUnavailable");
    });
}

#[test]
fn retry_after_is_obeyed() {
    run(async {
        let world = lived(Role::Companion, 60).await;
        let kind = ApiErrorKind::TooManyRequests { retry_after: Some(Duration::from_secs(45)) };
        world.api.script().faults.push_back(Fault::Says(kind));
        world.reporter.offer(ReportNow {}).expect("room");
        for _ in 0..44 {
            live(1).await;
            world.reporter.offer(ReportNow {}).expect("room");
            world.reporter.offer(ConditionChanged {}).expect("room");
        }
        assert_eq!(world.api.verbs(), ["patch"]);
        live(12).await;
        assert_eq!(world.api.verbs(), ["patch", "patch"]);
        assert_eq!(*world.health.borrow(), JobHealth::Healthy);
    });
}

#[test]
fn a_restart_of_actor_or_process_writes_nothing() {
    run(async {
        for role in [Role::Node, Role::Companion] {
            let world = World::start(role);
            live(30).await;
            world.send_node();
            live(1).await;
            assert_eq!(world.records(), ["status"]);
            world.api.forget();
            // I9: a panic is a restart like any other.
            for reason in ["a test wants it", PANIC] {
                world.reporter.deliver(Restart { reason: reason.into() });
                live(30).await;
                assert_eq!(world.api.verbs(), Vec::<&str>::new(), "the watched Node is not forgotten");
            }
            assert_eq!(world.reporter.recorder().restarts(), 2);
            let successor = world.successor();
            world.reporter.deliver(Restart { reason: "silence".into() });
            live(30).await;
            let verbs = successor.api.verbs();
            assert!(verbs.iter().all(|verb| *verb == "get"), "{verbs:?}");
            assert_eq!(*successor.health.borrow(), JobHealth::Healthy);
        }
    });
}

#[test]
fn case_28_a_step_of_the_wall_clock_is_answered_with_a_status() {
    run(async {
        let world = lived(Role::Node, 30).await;
        step_wall(-3_600_000);
        live(11).await;
        assert_eq!((world.api.verbs(), world.metrics.clock_steps.get()), (vec!["patch"], 1));
        let beat = world.api.condition("Ready")["lastHeartbeatTime"].clone();
        assert!(beat.as_str().expect("a time").starts_with("2025-12-31T23:"), "{beat}");
    });
}

#[test]
fn case_26_heartbeats_fail_while_the_node_is_missing() {
    run(async {
        let world = World::start(Role::Companion);
        live(30).await;
        world.api.script().node = None;
        world.send_node();
        live(11).await;
        let health = world.health.borrow().clone();
        assert!(
            matches!(&health, JobHealth::Failing { reason, since_unix_ms, .. }
                if reason.contains("Node n1 does not exist") && *since_unix_ms > NEW_YEAR),
            "{health:?}"
        );
        let overview = world.reporter.recorder().overview();
        assert!(overview.summary.contains("does not exist"), "{}", overview.summary);
        world.api.make();
        world.send_node();
        live(1).await;
        assert_eq!(*world.health.borrow(), JobHealth::Healthy);
    });
}

#[test]
fn external_conditions_are_stored_and_sent_with_the_next_status() {
    run(async {
        let world = lived(Role::Companion, 30).await;
        assert_eq!(world.set("KernelDeadlock", ConditionStatus::False).await, Ok(true), "news");
        assert_eq!(world.records(), ["condition/KernelDeadlock", "status"], "before the answer");
        let refused = world.set("Ready", ConditionStatus::True).await;
        assert!(matches!(refused, Err(ConditionRefused::Reserved { .. })), "{refused:?}");
        let writes = world.store.writes.load(Ordering::SeqCst);
        assert_eq!(world.set("KernelDeadlock", ConditionStatus::False).await, Ok(false), "a repeat");
        assert_eq!(world.store.writes.load(Ordering::SeqCst), writes, "a repeat");
        live(11).await;
        assert_eq!(world.api.verbs(), ["patch"]);
        let successor = world.successor();
        live(11).await;
        let listed = successor.reporter.ask(ListConditions {}).await.expect("the reporter answers");
        assert_eq!(listed.len(), 1);
        assert_eq!(successor.clear("KernelDeadlock").await, Ok(()));
        let again = successor.clear("KernelDeadlock").await;
        assert!(matches!(again, Err(ConditionRefused::Unknown { .. })), "{again:?}");
        live(11).await;
        assert_eq!(successor.api.condition("KernelDeadlock"), Value::Null);
    });
}

#[test]
fn a_failing_store_costs_extra_requests_and_no_report() {
    run(async {
        let world = World::start(Role::Companion);
        live(5).await;
        world.store.fail(true);
        assert_eq!(world.set("KernelDeadlock", ConditionStatus::False).await, Ok(true));
        live(11).await;
        assert_eq!(world.api.condition("KernelDeadlock")["status"], "False");
        let error = world.reporter.recorder().overview().last_error;
        assert!(error.contains("keeping it in memory"), "{error}");
        world.store.fail(false);
        live(61).await;
        assert_eq!(world.records(), ["condition/KernelDeadlock", "status"]);
    });
}

#[test]
fn i4_a_store_that_cannot_be_read_at_the_start_delays_no_report() {
    run(async {
        let world = World::start(Role::Companion);
        world.store.fail(true);
        live(5).await;
        assert_eq!(*world.health.borrow(), JobHealth::Healthy);
        assert_eq!(world.reporter.recorder().overview().restarts, 0);
        world.store.fail(false);
        live(61).await;
        assert_eq!(world.records(), ["status"]);
    });
}

#[test]
fn a_hanging_host_call_costs_only_its_fields() {
    run(async {
        let world = World::start(Role::Node);
        live(30).await;
        let before = world.api.script().node.clone().expect("there")["status"]["capacity"].clone();
        *world.host.hangs.lock().expect("unharmed") = true;
        live(60).await;
        assert_eq!(world.api.script().node.clone().expect("there")["status"]["capacity"], before);
        assert_eq!(world.api.condition("Ready")["status"], "True");
        assert!(world.reporter.recorder().overview().last_error.contains("host was not read"));
    });
}

#[test]
fn endpoints_condition_is_reported_when_it_changes() {
    run(async {
        let world = World::start(Role::Companion);
        live(30).await;
        world.endpoints.send_replace(EndpointsView::Synced);
        world.reporter.offer(ConditionChanged {}).expect("room");
        settle().await;
        assert_eq!(world.api.condition("ServiceEndpointsStale")["status"], "False", "at once");
    });
}

/// E7: 360 passes of a companion without changes: no writes, no requests.
#[test]
fn e7_a_quiet_companion_sends_no_request_in_an_hour() {
    run(async {
        let world = World::start(Role::Companion);
        live(30).await;
        world.send_node();
        live(30).await;
        assert_eq!(world.api.verbs(), ["get", "patch"]);
        world.api.forget();
        let before = world.metrics.computations.get();
        live(3600).await;
        assert!(world.metrics.computations.get() >= before + 340, "it has not looked");
        assert_eq!(world.api.verbs(), Vec::<&str>::new());
        assert_eq!(*world.health.borrow(), JobHealth::Healthy);
    });
}

/// I4: a store failure that lasts is a condition, and so is its recovery.
#[test]
fn i4_a_store_that_is_not_open_is_a_condition() {
    run(async {
        let world = World::start(Role::Companion);
        live(30).await;
        let is = || world.api.condition("KeelsonStateNotDurable");
        assert_eq!(is()["status"], "False");
        world.api.forget();
        let since = std::time::SystemTime::UNIX_EPOCH;
        let away = StoreState::Unavailable { reason: "no space".into(), since, next_try: None };
        world.store.state.send_replace(away);
        live(41).await;
        assert_eq!((&is()["status"], &is()["reason"]), (&json!("True"), &json!("StoreNotOpen")));
        let next_try = Some(since);
        let retried = StoreState::Unavailable { reason: "no space".into(), since, next_try };
        world.store.state.send_replace(retried);
        live(60).await;
        assert_eq!(world.api.verbs(), ["patch"], "a retry is not a change");
        world.store.state.send_replace(StoreState::Open);
        live(311).await;
        assert_eq!((is()["status"].clone(), world.api.verbs().len()), (json!("False"), 2));
    });
}

/// I4: conditions of other processes that could not be read at the start are adopted when the store opens or becomes
/// readable; newer reports take precedence.
#[test]
fn i4_conditions_are_adopted_when_the_store_opens_late() {
    for opens in [true, false] {
        run(async {
            let world = World::start(Role::Companion);
            let store = &world.store;
            for kind in ["Kept", "Changed", "Cleared"] {
                let key = format!("condition/{kind}");
                let record = json!({"status": "True", "reason": "Told", "message": "m", "ttl_ms": null, "cleared": false});
                store.put_json(Table::Heartbeats, key.as_bytes(), &record).expect("written");
            }
            let since = std::time::SystemTime::UNIX_EPOCH;
            let away = StoreState::Unavailable { reason: "no space".into(), since, next_try: None };
            store.fail(true);
            if opens {
                store.state.send_replace(away);
            }
            live(5).await;
            let kinds = async || {
                let list = world.reporter.ask(ListConditions {}).await.expect("alive");
                list.into_iter().map(|of| (of.kind, of.status)).collect::<Vec<_>>()
            };
            assert_eq!(kinds().await, []);
            assert_eq!(world.set("Changed", ConditionStatus::False).await, Ok(true));
            assert_eq!(world.set("New", ConditionStatus::True).await, Ok(true));
            assert_eq!(world.set("Cleared", ConditionStatus::True).await, Ok(true));
            assert_eq!(world.clear("Cleared").await, Ok(()));
            live(11).await;
            store.fail(false);
            if opens {
                store.state.send_replace(StoreState::Open);
                live(5).await;
            } else {
                live(61).await;
            }
            let expected = [
                ("Changed".to_owned(), ConditionStatus::False),
                ("Kept".to_owned(), ConditionStatus::True),
                ("New".to_owned(), ConditionStatus::True),
            ];
            assert_eq!(kinds().await, expected, "opens: {opens}");
            live(120).await;
            assert_eq!(world.api.condition("Kept")["status"], "True");
            assert_eq!(world.api.condition("Changed")["status"], "False");
            assert_eq!(world.api.condition("Cleared"), Value::Null);
            let records = ["condition/Changed", "condition/Kept", "condition/New", "status"];
            assert_eq!(world.records(), records, "opens: {opens}");
        });
    }
}

/// I1: in role node the agent itself computes DiskPressure, and reports it to image pulls.
#[test]
fn role_node_reports_disk_pressure_to_image_pulls() {
    run(async {
        let world = World::start(Role::Node);
        live(30).await;
        assert_eq!(*world.source.pressure.lock().expect("unharmed"), [false], "once");
        let world = World::start(Role::Companion);
        live(30).await;
        assert!(world.source.pressure.lock().expect("unharmed").is_empty(), "its kubelet knows");
    });
}

/// A report that reaches the server after the removal of the conditions would restore them.
#[test]
fn e5_the_end_of_reports_waits_for_the_one_under_way() {
    run(async {
        let world = World::start(Role::Node);
        world.send_node();
        live(60).await;
        world.api.forget();
        world.api.script().always = Some(Fault::Hangs);
        world.reporter.offer(ReportNow {}).expect("room");
        live(1).await;
        assert_eq!(world.api.verbs(), ["patch"]);
        let reporter = world.reporter.clone();
        let end = tokio::task::spawn_local(async move { reporter.ask(EndReports {}).await });
        live(5).await;
        assert!(!end.is_finished());
        live(1000).await;
        assert!(end.await.expect("it ends").expect("an answer").contains(&"ImagePullsStalled".to_owned()));
        world.api.script().always = None;
        world.api.forget();
        world.reporter.offer(ReportNow {}).expect("room");
        world.runtime_dies();
        live(1000).await;
        assert_eq!(world.api.verbs(), [""; 0]);
        assert!(!world.reporter.ask(EndReports {}).await.expect("an answer").is_empty());
    });
}
