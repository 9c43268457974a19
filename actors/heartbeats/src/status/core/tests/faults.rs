//! Failures of the server and the runtime.

use proptest::prelude::*;

use super::*;
use crate::status::{ExternalCondition, Register};

/// Set by [`change`].
const CHANGED: &str = "Changed";

/// Sets a condition that is to be reported at once.
fn change(world: &mut World) {
    let message = format!("at {}", world.boot);
    world.set(ExternalCondition { message, ..condition(CHANGED, ConditionStatus::True) });
}

#[test]
fn a_hanging_server_is_tried_five_times_per_pass_on_new_connections() {
    let mut world = World::settled(Role::Companion);
    let start = world.boot;
    world.always = Some(Fault::Hangs);
    change(&mut world);
    world.pass(11 * SECOND);
    assert_eq!(world.verbs(), ["patch", "get", "get", "get", "get"]);
    assert_eq!(world.closed, 4, "from the second failure");
    let (reason, since) = world.fails();
    assert!(reason.contains("Timeout") && since > NEW_YEAR, "{reason}");
    let ended = world.boot;
    assert!(ended - start >= 50 * SECOND);
    world.always = None;
    world.pass(11 * SECOND);
    assert_eq!(world.health, JobHealth::Healthy);
    assert!(world.requests[5].at >= ended + 10 * SECOND, "not before the next pass");
    assert_eq!(world.condition(CHANGED)["status"], "True");
}

#[test]
fn a_lost_answer_is_detected_by_the_next_try() {
    let mut world = World::settled(Role::Companion);
    world.faults.push_back(Fault::Swallows);
    change(&mut world);
    world.pass(11 * SECOND);
    assert_eq!(world.verbs(), ["patch", "get"], "what is there needs no second patch");
    assert_eq!(world.health, JobHealth::Healthy);
}

#[test]
fn retry_after_is_obeyed_for_at_most_a_minute() {
    for (asked, left) in [(25, 25), (3600, 60)] {
        for kind in [
            ApiErrorKind::TooManyRequests { retry_after: Some(Duration::from_secs(asked)) },
            ApiErrorKind::Server { retry_after: Some(Duration::from_secs(asked)) },
        ] {
            let mut world = World::settled(Role::Companion);
            world.faults.push_back(Fault::Says(kind));
            change(&mut world);
            world.pass(11 * SECOND);
            assert_eq!((world.verbs(), world.closed), (vec!["patch"], 0));
            let at = world.requests[0].at;
            for _ in 0..40 {
                world.step(Event::Changed);
                world.step(Event::ReportNow);
                world.pass(2 * SECOND);
            }
            let next = world.requests[1].at - at;
            assert!((left * SECOND..(left + 11) * SECOND).contains(&next), "{kind:?}: {next}");
        }
    }
}

#[test]
fn permanent_errors_are_tried_once_per_pass() {
    for kind in [
        ApiErrorKind::Forbidden,
        ApiErrorKind::Unauthorized,
        ApiErrorKind::Invalid,
        ApiErrorKind::Credentials,
        ApiErrorKind::TooManyRequests { retry_after: None },
    ] {
        let mut world = World::settled(Role::Companion);
        world.always = Some(Fault::Says(kind));
        change(&mut world);
        world.pass(MINUTE);
        assert!((5..=6).contains(&world.requests.len()), "{kind:?}: {:?}", world.verbs());
        let (reason, since) = world.fails();
        assert!(reason.contains(kind.name()) && reason.contains("https://api"), "{reason}");
        assert!(since < world.wall - 40 * SECOND, "since the first");
        assert_eq!(world.notes.len(), 1, "logged once: {:?}", world.notes);
        world.always = None;
        world.pass(11 * SECOND);
        assert_eq!(world.health, JobHealth::Healthy);
        assert!(world.notes[1].contains("reported again"), "{:?}", world.notes);
    }
}

#[test]
fn a_pass_without_requests_does_not_make_the_server_healthy() {
    let mut world = World::settled(Role::Companion);
    world.always = Some(Fault::Says(ApiErrorKind::Unreachable));
    change(&mut world);
    world.pass(11 * SECOND);
    drop(world.core.clear_condition(CHANGED, world.now()).expect("was there"));
    world.pass(30 * SECOND);
    assert!(matches!(world.health, JobHealth::Failing { .. }));
    world.send_node();
    world.pass(11 * SECOND);
    assert_eq!(world.health, JobHealth::Healthy, "the watch has received it");
}

#[test]
fn runtime_death_and_recovery_are_reported_at_once() {
    let mut world = World::settled(Role::Node);
    world.collected.runtime = Err("unix:///r.sock: connection refused".into());
    world.collected.runtime_down = Some("unix:///r.sock: connection refused".into());
    let at = world.boot;
    world.step(Event::Changed);
    assert_eq!((world.verbs(), world.requests[0].at), (vec!["patch"], at));
    world.assert_condition("Ready", "False", "KubeletNotReady");
    assert_eq!(world.message("Ready"), "the container runtime is down: unix:///r.sock: connection refused");
    let before = world.node.clone().expect("a Node");
    assert_eq!(before["status"]["images"], json!([{"names": ["r/a:1"], "sizeBytes": 7}]), "kept");
    // Varying texts for the same failure are not reported.
    for n in 0..12 {
        world.collected.runtime_down = Some(format!("unix:///r.sock: no answer within {n} s"));
        world.pass(10 * SECOND);
    }
    assert_eq!(world.verbs(), ["patch"]);
    world.pass(HOUR);
    assert!(world.message("Ready").contains("within 11 s"), "later they are");
    world.forget();
    world.collected = healthy();
    world.step(Event::Changed);
    assert_eq!((world.verbs(), &world.condition("Ready")["status"]), (vec!["patch"], &json!("True")));
}

#[test]
fn a_runtime_that_comes_and_goes_costs_no_more_requests_than_the_kubelet_makes() {
    let mut world = World::settled(Role::Node);
    let start = world.boot;
    for n in 0..600 {
        let down = n % 2 == 0;
        world.collected = healthy();
        if down {
            world.collected.runtime = Err("refused".into());
            world.collected.runtime_down = Some("refused".into());
        }
        world.step(Event::Changed);
        world.pass(SECOND);
    }
    let passes = (world.boot - start) / (10 * SECOND) + 3;
    assert!(i64::try_from(world.requests.len()).expect("few") <= passes, "{}", world.requests.len());
}

#[test]
fn a_silent_runtime_is_not_ready_after_thirty_seconds() {
    let mut world = World::settled(Role::Node);
    world.collected.runtime = Err("no answer within 5s".into());
    world.pass(19 * SECOND);
    assert_eq!(world.verbs(), Vec::<&str>::new());
    world.pass(22 * SECOND);
    assert_eq!(world.verbs(), ["patch"]);
    let message = world.message("Ready");
    assert!(message.contains("does not report whether it is ready"), "{message}");
}

#[test]
fn a_runtime_or_network_that_is_not_ready_is_named_with_every_other_reason() {
    let mut world = World::settled(Role::Node);
    let report = world.collected.runtime.as_mut().expect("well");
    report.conditions[1] = RuntimeCondition {
        kind: NETWORK_READY.into(),
        ok: false,
        reason: "NetworkPluginNotReady".into(),
        message: "cni plugin not initialized".into(),
    };
    report.conditions.remove(0);
    world.pass(11 * SECOND);
    assert_eq!(
        world.condition("Ready")["message"],
        "the container runtime is not ready: the runtime does not report RuntimeReady; \
         the pod network is not ready: NetworkPluginNotReady: cni plugin not initialized"
    );
}

#[test]
fn pressure_stays_true_for_the_transition_period_across_restarts() {
    let mut world = World::settled(Role::Node);
    let status = |world: &World, kind: &str| world.condition(kind)["status"].clone();
    world.collected.readings.memory_available_bytes = Some(99 << 20);
    world.collected.readings.pids = Some((1000, 999));
    world.pass(11 * SECOND);
    assert_eq!(world.verbs(), ["patch"]);
    assert_eq!(world.condition("MemoryPressure")["reason"], "KubeletHasInsufficientMemory");
    assert_eq!(status(&world, "PIDPressure"), "False", "no threshold is set by default");
    let flipped = world.condition("MemoryPressure")["lastTransitionTime"].clone();
    world.pass(2 * MINUTE);
    world.collected.readings.memory_available_bytes = Some(6 << 30);
    world.pass(4 * MINUTE + 30 * SECOND);
    assert_eq!(status(&world, "MemoryPressure"), "True");
    assert_eq!(world.condition("MemoryPressure")["lastTransitionTime"], flipped);
    // A restart keeps the time when the pressure was seen.
    world.restart();
    world.pass(15 * SECOND);
    world.pass(60 * SECOND);
    assert_eq!(status(&world, "MemoryPressure"), "False");
    assert_eq!(world.condition("MemoryPressure")["reason"], "KubeletHasSufficientMemory");
}

#[test]
fn each_disk_signal_is_disk_pressure() {
    let spoil: [fn(&mut HostReadings); 4] = [
        |readings| readings.node_fs.as_mut().expect("there").available_bytes = (10 << 30) - 1,
        |readings| readings.node_fs.as_mut().expect("there").inodes_free = 49_999,
        |readings| readings.image_fs.as_mut().expect("there").available_bytes = (15 << 30) - 1,
        |readings| readings.image_fs.as_mut().expect("there").inodes_free = 49_999,
    ];
    for spoil in spoil {
        let mut world = World::settled(Role::Node);
        spoil(&mut world.collected.readings);
        world.pass(11 * SECOND);
        assert_eq!(world.condition("DiskPressure")["reason"], "KubeletHasDiskPressure");
    }
    let mut world = World::settled(Role::Node);
    for fs in
        [&mut world.collected.readings.node_fs, &mut world.collected.readings.image_fs].into_iter().flatten()
    {
        (fs.inodes, fs.inodes_free) = (0, 0);
    }
    world.pass(11 * SECOND);
    assert_eq!(world.condition("DiskPressure")["status"], "False", "no inodes are counted there");
}

#[test]
fn a_node_without_capacity_is_not_ready() {
    let mut world = World::without_node(StatusPolicy::new(Role::Node, "n1"));
    world.collected.readings =
        HostReadings { errors: vec!["/proc/meminfo: gone".into()], ..HostReadings::default() };
    world.restart();
    assert_eq!(
        world.condition("Ready")["message"],
        "cannot read the capacity of cpu, memory, ephemeral-storage"
    );
    assert!(world.notes.iter().any(|note| note.contains("/proc/meminfo: gone")), "{:?}", world.notes);
    let notes = world.notes.len();
    world.pass(MINUTE);
    assert_eq!(world.notes.len(), notes, "logged once");
}

#[test]
fn pulls_that_wait_for_a_dead_runtime_or_receive_nothing_are_stalled() {
    let secs = |secs| Some(Duration::from_secs(secs));
    let busy = |oldest_wait, since_progress| PullsView {
        queued: 5,
        running: 3,
        oldest_wait: secs(oldest_wait),
        since_progress,
        ..idle()
    };
    for (pulls_view, status, reason) in [
        (busy(900, secs(1)), "False", "PullsNotStalled"),
        (busy(10, secs(900)), "False", "PullsNotStalled"),
        (busy(120, secs(120)), "True", "PullsStalled"),
        (busy(120, None), "False", "PullsNotStalled"),
        (PullsView { running: 3, since_progress: secs(900), ..idle() }, "False", "PullsNotStalled"),
        (PullsView { runtime: away(), ..idle() }, "False", "PullsNotStalled"),
        (PullsView { running: 1, runtime: away(), ..idle() }, "True", "RuntimeUnavailable"),
    ] {
        let mut world = World::settled(Role::Companion);
        world.collected.pulls_view = Ok(pulls_view.clone());
        world.pass(45 * SECOND);
        let is = world.condition("ImagePullsStalled");
        assert_eq!((&is["status"], &is["reason"]), (&json!(status), &json!(reason)), "{pulls_view:?}");
    }
    // Nothing has moved since the start, which is long ago by now.
    let mut world = World::settled(Role::Companion);
    world.collected.pulls_view = Ok(PullsView { queued: 1, running: 1, oldest_wait: secs(900), ..idle() });
    world.pass(30 * SECOND);
    assert_eq!(
        world.condition("ImagePullsStalled")["reason"],
        "PullsNotStalled",
        "a restart keeps old waits"
    );
    world.pass(90 * SECOND);
    assert_eq!(world.condition("ImagePullsStalled")["reason"], "PullsStalled");
    let mut world = World::settled(Role::Companion);
    world.collected.pulls_view = Err("the mailbox of PullCoordinator is full".into());
    world.pass(19 * SECOND);
    assert_eq!(world.verbs(), Vec::<&str>::new(), "a short busy period is not reported");
    world.pass(22 * SECOND + problem::ONSET);
    assert_eq!(world.condition("ImagePullsStalled")["reason"], "PullsUnknown");
}

#[test]
fn service_endpoints_are_synced_stale_or_unknown_and_those_that_are_off_have_no_condition() {
    const KIND: &str = "ServiceEndpointsStale";
    let mut world = World::settled(Role::Companion);
    assert_eq!(world.condition(KIND), Value::Null, "endpoints are disabled");
    let stale = |cause| EndpointsView::Stale { cause, reason: "some words".into() };
    for (view, status, reason) in [
        (EndpointsView::Synced, "False", "EndpointsSynced"),
        (EndpointsView::NotWatched, "Unknown", "NotWatched"),
        (stale(StaleCause::NotSynced), "True", "NotSynced"),
        (stale(StaleCause::SourceUnavailable), "True", "SourceUnavailable"),
        (stale(StaleCause::SourceRefused), "True", "SourceRefused"),
        (EndpointsView::Synced, "False", "EndpointsSynced"),
    ] {
        world.collected.endpoints = view;
        // Longer than any delay of a change.
        world.pass(6 * MINUTE);
        world.assert_condition(KIND, status, reason);
    }
    // The state is unknown right after a restart, and the Node's condition stands.
    let before = world.condition(KIND);
    world.collected.endpoints = EndpointsView::Pending;
    world.restart();
    world.pass(11 * SECOND);
    assert_eq!(world.condition(KIND), before);
}

/// I4: a node whose agent cannot write its state reports that once; E6: in a constant text.
#[test]
fn i4_state_that_is_not_durable_is_a_condition_that_is_true() {
    const KIND: &str = "KeelsonStateNotDurable";
    let since = std::time::SystemTime::UNIX_EPOCH;
    let failing = |reason: &str| StoreState::Failing { reason: reason.into(), since };
    let unavailable =
        |reason: &str| StoreState::Unavailable { reason: reason.into(), since, next_try: Some(since) };
    let mut world = World::settled(Role::Companion);
    world.assert_condition(KIND, "False", "StateDurable");
    // The store, whether the journal is written, the condition after the onset, and the number of requests.
    let cases = [
        (StoreState::Opening { since }, true, "False", "StateDurable", "last write succeeded", 0),
        (StoreState::Opening { since }, false, "True", "StoreNotOpen", "see /readyz", 1),
        (unavailable("disk full"), false, "True", "StoreNotOpen", "see /readyz", 0),
        (StoreState::Open, false, "False", "StateDurable", "last write succeeded", 1),
        (failing("disk full"), true, "True", "StoreFailing", "see /readyz", 1),
        (failing("disk full, in other words"), false, "True", "StoreFailing", "see /readyz", 0),
        (unavailable("read-only"), false, "True", "StoreNotOpen", "see /readyz", 1),
        (StoreState::Closed, false, "True", "StoreNotOpen", "see /readyz", 0),
        (StoreState::Open, true, "False", "StateDurable", "last write succeeded", 1),
    ];
    for (index, (store, durable, status, reason, message, requests)) in cases.into_iter().enumerate() {
        world.collected.store = store;
        world.collected.pulls_view = Ok(PullsView { durable, ..idle() });
        world.forget();
        world.pass_watched(6 * MINUTE);
        let is = world.condition(KIND);
        assert_eq!((&is["status"], &is["reason"]), (&json!(status), &json!(reason)), "case {index}");
        assert!(world.message(KIND).ends_with(message), "case {index}: {is}");
        assert_eq!(world.requests.len(), requests, "case {index}: {:?}", world.verbs());
    }
}

fn any_kind() -> impl Strategy<Value = ApiErrorKind> {
    let after = proptest::option::of((0u64..200).prop_map(Duration::from_secs));
    prop_oneof![
        Just(ApiErrorKind::Conflict),
        Just(ApiErrorKind::AlreadyExists),
        Just(ApiErrorKind::NotFound),
        Just(ApiErrorKind::Gone),
        Just(ApiErrorKind::Unauthorized),
        Just(ApiErrorKind::Forbidden),
        Just(ApiErrorKind::Invalid),
        Just(ApiErrorKind::Timeout),
        Just(ApiErrorKind::Unreachable),
        Just(ApiErrorKind::Credentials),
        after.clone().prop_map(|retry_after| ApiErrorKind::TooManyRequests { retry_after }),
        after.prop_map(|retry_after| ApiErrorKind::Server { retry_after }),
    ]
}

fn any_fault() -> impl Strategy<Value = Fault> {
    prop_oneof![any_kind().prop_map(Fault::Says), Just(Fault::Hangs), Just(Fault::Swallows)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn requests_are_bounded_and_the_agent_recovers_for_any_answers(
        node: bool,
        there: bool,
        always: bool,
        script in proptest::collection::vec((any_fault(), 0i64..20_000, 0u8..8), 1..60),
    ) {
        let mut policy = StatusPolicy::new(if node { Role::Node } else { Role::Companion }, "n1");
        policy.register = if always { Register::Always } else { Register::Once };
        let mut world = World::with(policy);
        if there && world.node.is_none() {
            world.make_node();
        }
        let (start, mut lives, mut deletions) = (world.boot, 1, 0);
        for (fault, pause, event) in script {
            world.faults.push_back(fault);
            match event {
                0 => world.step(Event::Changed),
                1 => world.step(Event::ReportNow),
                2 => world.send_node(),
                3 => {
                    deletions += 1;
                    world.delete();
                }
                4 if world.node.is_none() => world.make_node(),
                5 => change(&mut world),
                6 => world.collected = healthy(),
                7 => {
                    lives += 1;
                    world.restart();
                }
                _ => {}
            }
            world.pass(pause);
        }
        // The kubelet: nine requests every ten seconds, and while it registers three after 100 ms to 7 s. Immediate
        // reports use up requests that were not made before: three passes' worth at the start of a process.
        let lived = world.boot - start;
        let most = 9 * (lived / (10 * SECOND) + 4 * lives) + 3 * (lived / (7 * SECOND) + 8 * (lives + deletions));
        prop_assert!(i64::try_from(world.requests.len()).expect("few") <= most, "{most} {:?}", world.verbs());
        world.faults.clear();
        if world.node.is_none() {
            world.make_node();
        }
        world.send_node();
        world.collected = healthy();
        world.pass(61 * SECOND + 11 * SECOND);
        world.step(Event::ReportNow);
        world.pass(11 * SECOND);
        prop_assert_eq!(&world.health, &JobHealth::Healthy);
        prop_assert_eq!(world.condition("ImagePullsStalled")["status"].clone(), json!("False"));
        if node {
            prop_assert_eq!(world.condition("Ready")["status"].clone(), json!("True"));
        }
    }
}
