//! When a status is written.

use proptest::prelude::*;

use super::*;

fn pauses(moments: &[i64]) -> Vec<i64> {
    moments.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

#[test]
fn case_27_an_idle_hour_is_a_first_post_then_one_in_half_a_turn_to_one_and_a_half_then_every_turn() {
    for random in [0.0, 0.25, 0.999] {
        let mut world = World::with_node(Role::Node);
        world.random = random;
        world.restart();
        world.forget();
        world.reported = None;
        world.restart();
        world.pass(HOUR);
        let writes = world.writes();
        let first = writes[0] - (world.boot - HOUR);
        assert!(first <= 3 * SECOND, "at the start: {first}");
        let pauses = pauses(&writes);
        assert!((150 * SECOND..460 * SECOND).contains(&pauses[0]), "{pauses:?}");
        assert!(pauses[1..].iter().all(|pause| (300 * SECOND..=311 * SECOND).contains(pause)), "{pauses:?}");
        assert!(writes.len() >= 11, "{writes:?}");
        for request in &world.requests[world.requests.len() - 9..] {
            let status = &request.body["status"];
            let keys: Vec<_> = status.as_object().expect("an object").keys().collect();
            assert_eq!(keys, ["$setElementOrder/conditions", "conditions"]);
            for condition in status["conditions"].as_array().expect("a list") {
                let keys: Vec<_> = condition.as_object().expect("an object").keys().collect();
                assert_eq!(keys, ["lastHeartbeatTime", "type"]);
            }
        }
    }
}

/// E7: a companion without changes writes once, and never again; the same without its record.
#[test]
fn e7_a_quiet_companion_writes_nothing_in_an_hour() {
    let mut world = World::with_node(Role::Companion);
    world.restart();
    world.pass(SECOND);
    assert_eq!(world.verbs(), ["patch"]);
    world.send_node();
    world.forget();
    world.pass(HOUR);
    assert_eq!(world.verbs(), Vec::<&str>::new());
    world.reported = None;
    world.restart();
    world.pass(HOUR);
    assert_eq!(world.verbs(), Vec::<&str>::new(), "the Node has it already");
    assert_eq!(world.core.view(world.now())["next_report_in_ms"], json!(null));
}

#[test]
fn passes_come_as_often_as_the_kubelets() {
    let mut world = World::after(Role::Companion, MINUTE);
    world.random = 0.5;
    world.always = Some(Fault::Says(ApiErrorKind::Forbidden));
    world.collected.pulls_view = Err("broken".into());
    world.pass(5 * MINUTE);
    let pauses = pauses(&world.requests.iter().map(|request| request.at).collect::<Vec<_>>());
    assert!(!pauses.is_empty() && pauses.iter().all(|pause| *pause == 10_200), "{pauses:?}");
}

#[test]
fn a_change_is_written_once_and_the_watch_may_lag() {
    let mut world = World::with_node(Role::Node);
    world.restart();
    world.send_node();
    world.pass(MINUTE);
    world.forget();
    world.collected.readings.memory_capacity_bytes = Some(16 << 30);
    world.pass(20 * SECOND);
    assert_eq!(world.verbs(), ["patch"]);
    assert_eq!(
        world.requests[0].body["status"]["capacity"],
        json!({"memory": "16Gi"}),
        "and nothing else of the capacity"
    );
    // The watch reports earlier writes, repeatedly.
    let mut old = world.node.clone().expect("a Node");
    old["metadata"]["resourceVersion"] = "101".into();
    old["status"]["capacity"]["memory"] = "8Gi".into();
    world.step(Event::Node(Some(Arc::new(typed(&old)))));
    world.pass(50 * SECOND);
    assert_eq!(world.verbs(), ["patch"]);
    world.send_node();
    world.pass(50 * SECOND);
    assert_eq!(world.verbs(), ["patch"]);
}

#[test]
fn an_overwritten_status_is_written_again() {
    let mut world = World::after(Role::Companion, 6 * MINUTE);
    let flip = json!({"status": {"conditions": [{"type": "ImagePullsStalled", "status": "True"}]}});
    world.other(&flip);
    world.pass(11 * SECOND);
    assert_eq!(world.verbs(), ["patch"]);
    assert_eq!(world.condition("ImagePullsStalled")["status"], "False");
}

#[test]
fn case_30_unknown_conditions_are_overwritten_by_the_next_pass() {
    let mut world = World::after(Role::Node, 2 * MINUTE);
    world.random = 0.0;
    let unknown = |kind: &str| {
        json!({"type": kind, "status": "Unknown", "reason": "NodeStatusUnknown", "message": "stopped posting",
               "lastTransitionTime": "2026-01-01T00:01:00Z"})
    };
    let kinds = ["Ready", "MemoryPressure", "DiskPressure", "PIDPressure"];
    world.other(&json!({"status": {"conditions": kinds.map(unknown)}}));
    // Others write the Node's metadata so often that the server returns a conflict now and then.
    world.faults.extend([Fault::Says(ApiErrorKind::Conflict); 3]);
    world.pass(11 * SECOND);
    assert_eq!(world.verbs(), ["patch", "get", "get", "get", "patch"], "{:?}", world.health);
    world.assert_condition("Ready", "True", "KubeletReady");
    let ready = world.condition("Ready");
    assert_eq!(ready["lastTransitionTime"], ready["lastHeartbeatTime"], "now");
    assert_eq!(world.condition("MemoryPressure")["status"], "False");
    assert_eq!(world.closed, 0, "a conflict is no reason to close connections");
    let at = world.boot;
    world.forget();
    world.pass(HOUR);
    let first = world.writes()[0] - at;
    assert!((139 * SECOND..161 * SECOND).contains(&first), "the delay was drawn again: {first}");
}

#[test]
fn case_28_a_step_back_is_answered_with_two_statuses_and_the_plan_stays() {
    let mut world = World::after(Role::Node, 6 * MINUTE);
    let planned = world.core.view(world.now())["next_report_unix_ms"].as_i64().expect("planned") - world.wall;
    world.wall -= HOUR;
    world.pass(11 * SECOND);
    assert_eq!(world.verbs(), ["patch"]);
    assert!(world.counted.contains(&Counted::ClockStep), "{:?}", world.counted);
    assert!(world.notes.iter().any(|note| note.contains("stepped back by 3600000 ms")), "{:?}", world.notes);
    let beat = world.condition("Ready")["lastHeartbeatTime"].clone();
    assert!(beat.as_str().expect("a time").starts_with("2025-12-31T23:"), "{beat}");
    // The Lease has been renewed by the new time 10.4 s after the first status.
    world.pass(HOUR - 11 * SECOND);
    let writes = world.writes();
    let again = writes[1] - writes[0];
    assert!((15 * SECOND..=21 * SECOND).contains(&again), "once more, after a renewal: {again}");
    let third = writes[2] - (world.boot - HOUR);
    assert!((planned..planned + 11 * SECOND).contains(&third), "as planned: {third}, {planned}");
    assert!(pauses(&writes[2..]).iter().all(|pause| (300 * SECOND..=311 * SECOND).contains(pause)));
}

#[test]
fn case_29_a_step_forward_and_back_costs_three_statuses() {
    let mut world = World::after(Role::Node, 6 * MINUTE);
    world.wall += HOUR;
    world.pass(30 * SECOND);
    assert_eq!(world.verbs(), ["patch"]);
    world.wall -= HOUR;
    world.pass(30 * SECOND);
    assert_eq!(world.verbs(), ["patch", "patch", "patch"]);
    world.forget();
    world.pass(HOUR);
    assert!((11..=13).contains(&world.writes().len()), "{:?}", world.writes());
}

#[test]
fn a_slow_clock_and_a_companion_write_nothing_for_a_clock() {
    let mut world = World::after(Role::Companion, 6 * MINUTE);
    world.wall -= HOUR;
    world.pass(30 * SECOND);
    assert_eq!((world.verbs(), world.counted.contains(&Counted::ClockStep)), (vec![], true));
    let mut world = World::after(Role::Node, 6 * MINUTE);
    for _ in 0..6 {
        world.wall += 400;
        world.pass(10 * SECOND);
    }
    assert!(!world.counted.contains(&Counted::ClockStep), "{:?}", world.notes);
}

#[test]
fn a_manual_report_does_not_change_the_schedule() {
    let mut world = World::after(Role::Companion, 6 * MINUTE);
    let planned = |world: &World| world.core.view(world.now())["next_report_unix_ms"].clone();
    let before = planned(&world);
    world.step(Event::ReportNow);
    assert_eq!((world.verbs(), planned(&world)), (vec!["patch"], before));
}

/// Advances time without changes, with restarts at these moments; returns when status was written, since the start.
fn lived(role: Role, restarts: &[i64], during: i64) -> Vec<i64> {
    let mut world = World::with_node(role);
    world.random = 0.3;
    world.restart();
    let start = world.boot;
    world.forget();
    for at in restarts {
        world.pass((start + at - world.boot).max(0));
        world.wall += 7 * 60 * MINUTE;
        world.restart();
    }
    world.pass((start + during - world.boot).max(0));
    world.writes().into_iter().map(|at| at - start).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_restart_writes_nothing_that_a_running_agent_would_not_have_written(
        node: bool,
        mut restarts in proptest::collection::vec(MINUTE..40 * MINUTE, 0..6),
    ) {
        restarts.sort_unstable();
        let role = if node { Role::Node } else { Role::Companion };
        let (calm, restarted) = (lived(role, &[], 40 * MINUTE), lived(role, &restarts, 40 * MINUTE));
        prop_assert!(restarted.len() <= calm.len(), "{calm:?} {restarted:?} {restarts:?}");
        for pause in pauses(&restarted).into_iter().skip(1) {
            prop_assert!((300 * SECOND..=325 * SECOND).contains(&pause), "{restarted:?} {restarts:?}");
        }
    }

    #[test]
    fn quiet_readings_write_nothing_before_the_report_is_old(
        node: bool,
        noise in proptest::collection::vec((0u64..1 << 30, 0u64..1000, 0u32..50, any::<bool>()), 12),
    ) {
        let mut world = World::with_node(if node { Role::Node } else { Role::Companion });
        world.restart();
        world.pass_watched(20 * SECOND);
        world.random = 0.5;
        world.forget();
        for (bytes, pids, pulls, asks) in noise {
            let collected = &mut world.collected;
            collected.readings.memory_available_bytes = Some((4 << 30) + bytes);
            collected.readings.pids = Some((32_768, 500 + pids));
            for fs in [&mut collected.readings.node_fs, &mut collected.readings.image_fs].into_iter().flatten() {
                fs.available_bytes = (40 << 30) + bytes;
                fs.inodes_free = 500_000 + pids;
                fs.capacity_bytes = (100 << 30) + bytes / 4;
            }
            collected.pulls_view = Ok(PullsView {
                queued: pulls,
                running: pulls.min(3),
                oldest_wait: (pulls > 3).then_some(Duration::from_secs(pids)),
                since_progress: Some(Duration::from_millis(pulls.into())),
                durable: asks,
                ..idle()
            });
            if asks {
                world.step(Event::Changed);
            }
            world.pass_watched(10 * SECOND);
        }
        prop_assert_eq!(world.verbs(), Vec::<&str>::new());
    }
}

#[test]
fn a_restart_after_a_reboot_reports_the_new_boot_id_and_no_time_in_reverse() {
    let mut world = World::after(Role::Node, MINUTE);
    world.collected.facts.boot_id = "boot-2".into();
    world.boot = 30 * SECOND;
    world.wall -= 2 * HOUR;
    world.restart();
    assert_eq!(world.verbs(), ["patch"]);
    assert_eq!(world.requests[0].body["status"]["nodeInfo"], json!({"bootID": "boot-2"}));
}

#[test]
fn a_restart_with_a_watch_that_begins_in_the_past_writes_nothing() {
    let mut world = World::with_node(Role::Node);
    world.restart();
    let old = world.node.clone();
    world.pass(MINUTE);
    world.collected.readings.memory_capacity_bytes = Some(16 << 30);
    world.pass(MINUTE);
    world.watches = false;
    world.forget();
    world.began = world.boot;
    // As `started()`, but with the Node as it was a minute ago.
    let (node, restored) = (world.node.clone(), world.reported.clone());
    world.core = Core::new(world.policy.clone());
    let restored = Restored { reported: restored.map(Box::new), ..Restored::default() };
    world.step(Event::Started { restored, stamp: world.stamp() });
    world.step(Event::Node(old.map(|old| Arc::new(typed(&old)))));
    world.step(Event::RuntimeReady);
    world.pass(30 * SECOND);
    assert_eq!((world.verbs(), world.node.clone()), (vec![], node));
}

#[test]
fn a_record_of_another_node_is_ignored() {
    let mut world = World::after(Role::Companion, MINUTE);
    world.write(None);
    world.make_node();
    world.restart();
    world.pass(SECOND);
    assert_eq!(world.verbs(), ["patch"]);
}

/// E18: the controller ignores renewals that are earlier than those it has seen; a running agent would have answered
/// the step with a status at once and another one when the Lease was renewed.
#[test]
fn e18_a_clock_that_was_set_back_while_the_agent_was_down_is_answered_as_a_step() {
    for (role, away, step, expected) in [
        (Role::Node, MINUTE, -HOUR, 2),
        (Role::Node, MINUTE, -30 * SECOND, 2),
        (Role::Node, MINUTE, -SECOND, 0),
        (Role::Node, MINUTE, HOUR, 0),
        (Role::Companion, MINUTE, -HOUR, 0),
    ] {
        let mut world = World::with_node(role);
        world.restart();
        world.pass(11 * MINUTE);
        // Right after a report, so that none is due.
        let age = |world: &World| world.core.report_age(world.now()).expect("reported");
        while role == Role::Node && age(&world) > Duration::from_secs(15) {
            world.pass(SECOND);
        }
        world.forget();
        world.boot += away;
        world.wall += away + step;
        let start = world.boot;
        world.restart();
        world.pass(30 * SECOND);
        let writes: Vec<_> = world.writes().iter().map(|at| at - start).collect();
        assert_eq!(writes.len(), expected, "{role:?} {step}: {writes:?}");
        assert_eq!(world.counted.contains(&Counted::ClockStep), step < -2 * SECOND);
        if let [first, second] = writes[..] {
            assert!(first <= SECOND, "once the runtime has answered: {first}");
            assert!((15 * SECOND..=21 * SECOND).contains(&(second - first)), "after a renewal: {second}");
        }
    }
}

/// E18: across a boot only the wall clock is left; a report of the future does not delay the first one.
#[test]
fn e18_a_report_of_the_future_does_not_delay_the_first_one_after_a_boot() {
    for role in [Role::Node, Role::Companion] {
        let mut world = World::after(role, 6 * MINUTE);
        world.collected.facts.boot_id = "boot-2".into();
        world.boot = 30 * SECOND;
        world.wall -= 2 * HOUR;
        world.restart();
        world.pass(SECOND);
        if role == Role::Companion {
            world.pass(HOUR);
            assert!(world.writes().is_empty(), "a quiet companion writes nothing");
            continue;
        }
        assert_eq!(world.verbs(), ["patch"]);
        world.pass(HOUR);
        assert!(world.writes().len() <= 15, "{:?}", world.writes());
    }
}
