//! The numbered cases of the Lease: 22 to 26, 28 and 29.

use std::time::Duration;

use keelson_actor_system::cluster::{ApiErrorKind, JobHealth, LeaseCreate, Owner};

use super::{
    Counted, Request,
    testing::{Bench, START_MS, Server, created, millis, policy, seconds},
};

#[test]
fn case_22_an_absent_lease_is_created_with_its_owner_and_renewed_after_the_interval() {
    for (random, interval_ms) in [(0.0, 10_000), (0.5, 10_200), (0.999_999, 10_399)] {
        let (mut bench, mut server) = (Bench::new(None), Server::with_node());
        bench.random = random;
        bench.pass(seconds(1), &mut server);
        let (_, create) = bench.requests[2].clone();
        let expect = LeaseCreate {
            name: "web-1".into(),
            owner: Some(Owner { name: "web-1".into(), uid: "node-uid".into() }),
            holder: "web-1".into(),
            duration_seconds: 40,
            now_unix_us: START_MS * 1000,
            transitions: 0,
        };
        assert_eq!(create, Request::Create(expect));
        assert_eq!(bench.log(), ["GET", "GET node", "POST"]);
        assert_eq!(bench.core.health(), JobHealth::Healthy);
        bench.pass(seconds(10), &mut server);
        let patches = bench.patches();
        assert_eq!(bench.timed_log(), [(interval_ms, "PATCH")]);
        // As small as possible, except for what is dropped once.
        assert_eq!((&*patches[0].resource_version, patches[0].drop_managed_fields), ("1", true));
        assert_eq!(
            (&patches[0].owner, &patches[0].acquire, patches[0].duration_seconds),
            (&None, &None, None)
        );
        bench.pass(seconds(21), &mut server);
        let patches = bench.patches();
        assert_eq!(bench.log(), ["PATCH", "PATCH"]);
        assert_eq!((&*patches[0].resource_version, patches[0].drop_managed_fields), ("2", false));
    }
}

#[test]
fn case_23_one_conflict_is_read_and_renewed_in_the_same_sync() {
    let (mut bench, mut server) = created();
    server.touch();
    bench.pass(seconds(10), &mut server);
    assert_eq!(bench.timed_log(), [(10_200, "PATCH"), (10_200, "GET"), (10_200, "PATCH")]);
    assert_eq!((bench.closes, bench.core.health(), bench.core.failures()), (0, JobHealth::Healthy, 0));
    bench.pass(seconds(10), &mut server);
    assert_eq!(bench.timed_log(), [(20_400, "PATCH")], "an interval after the end of the sync");
}

#[test]
fn case_23_conflicts_without_end_take_five_tries_twice_and_then_the_interval() {
    let (mut bench, mut server) = created();
    server.second_writer = true;
    bench.pass(seconds(10), &mut server);
    let log = bench.timed_log();
    assert!(log.iter().all(|(at, _)| *at == 10_200), "{log:?}");
    let names: Vec<&str> = log.iter().map(|(_, name)| *name).collect();
    // Five tries, the read, five more; a read between any two, and none after the last.
    let expect: Vec<&str> = ["PATCH", "GET"].into_iter().cycle().take(19).collect();
    assert_eq!(names, expect);
    assert_eq!(bench.closes, 0, "no hook");
    assert!(bench.failure().contains("another client"));
    bench.pass(seconds(10), &mut server);
    let log = bench.timed_log();
    assert!(log.iter().all(|(at, _)| *at == 20_400), "the interval: {log:?}");
    server.second_writer = false;
    bench.pass(seconds(10), &mut server);
    assert_eq!(bench.log(), ["GET", "PATCH"]);
    assert_eq!((bench.closes, bench.core.health()), (0, JobHealth::Healthy));
}

#[test]
fn case_24_an_api_server_that_is_down_for_three_minutes() {
    let (mut bench, mut server) = created();
    server.down = Some((ApiErrorKind::Unreachable, Duration::ZERO));
    bench.pass(seconds(180), &mut server);
    let log = bench.timed_log();
    let names: Vec<&str> = log.iter().map(|(_, name)| *name).collect();
    assert!(names.iter().all(|name| *name == "PATCH"), "{names:?}");
    assert!(log[..5].iter().all(|(at, _)| *at == log[0].0), "{log:?}");
    let pauses: Vec<u128> = log[4..].windows(2).map(|two| two[1].0 - two[0].0).collect();
    assert_eq!(pauses[..8], [200, 400, 800, 1600, 3200, 6400, 7000, 7000]);
    assert!(pauses[8..].iter().all(|pause| *pause == 7000), "{pauses:?}");
    assert_eq!(bench.closes as usize, log.len() - 1, "the hook, from the second failure on");
    assert!(matches!(
        bench.core.health(),
        JobHealth::Failing { since_unix_ms, .. } if since_unix_ms == START_MS + 10_200
    ));
    assert_eq!(bench.count_notes("cannot renew Lease"), 1, "reported once");
    server.down = None;
    let back = bench.now.mono;
    bench.pass(seconds(7), &mut server);
    let log = bench.requests.clone();
    assert_eq!(bench.log(), ["PATCH"], "without the read that a kubelet does first");
    assert!(log[0].0 - back <= seconds(7));
    assert_eq!((bench.core.health(), bench.count_notes("renewed again")), (JobHealth::Healthy, 1));
}

#[test]
fn e2_a_lease_that_was_written_while_the_server_was_away_is_read() {
    let (mut bench, mut server) = (Bench::new(None), Server::with_node());
    bench.pass(seconds(1), &mut server);
    server.down = Some((ApiErrorKind::Unreachable, Duration::ZERO));
    bench.pass(seconds(60), &mut server);
    bench.log();
    server.down = None;
    server.next = [Some(ApiErrorKind::Conflict)].into();
    bench.pass(seconds(7), &mut server);
    assert_eq!(bench.log(), ["PATCH", "GET", "PATCH"]);
    assert_eq!(bench.core.health(), JobHealth::Healthy);
}

#[test]
fn case_24_an_api_server_that_is_down_at_the_start() {
    let (mut bench, mut server) = (Bench::new(None), Server::with_node());
    server.down = Some((ApiErrorKind::Unreachable, Duration::ZERO));
    bench.pass(seconds(60), &mut server);
    assert!(bench.log().iter().all(|name| *name == "GET"));
    server.down = None;
    bench.pass(seconds(7), &mut server);
    assert_eq!(bench.log(), ["GET", "GET node", "POST"]);
}

#[test]
fn case_25_a_black_hole_closes_the_connections_from_the_second_failure_on() {
    let (mut bench, mut server) = created();
    assert_eq!(policy().request_timeout(), seconds(10));
    server.down = Some((ApiErrorKind::Timeout, policy().request_timeout()));
    bench.pass(millis(29_200), &mut server);
    assert_eq!(
        (bench.timed_log(), bench.closes),
        (vec![(10_200, "PATCH"), (20_200, "PATCH"), (30_200, "PATCH")], 1)
    );
    bench.pass(seconds(20), &mut server);
    assert_eq!(bench.timed_log(), [(40_200, "PATCH"), (50_200, "PATCH")]);
    assert_eq!(bench.closes, 3);
    assert_eq!(bench.core.health(), JobHealth::Healthy, "the tries are not over");
    bench.pass(seconds(60), &mut server);
    // Then reads: 10 s each, and the pauses of the back-off between them.
    assert_eq!(
        bench.timed_log(),
        [(60_200, "GET"), (70_400, "GET"), (80_800, "GET"), (91_600, "GET"), (103_200, "GET")]
    );
    assert!(matches!(bench.core.health(), JobHealth::Failing { .. }));
    assert!(bench.closes > 4, "so does a read that times out twice");
    server.down = None;
    bench.pass(seconds(17), &mut server);
    assert_eq!(bench.core.health(), JobHealth::Healthy);
}

#[test]
fn case_26_no_lease_is_created_for_a_deleted_node() {
    let (mut bench, mut server) = created();
    (server.lease, server.node) = (None, None);
    bench.pass(seconds(10), &mut server);
    assert_eq!(bench.timed_log(), [(10_200, "PATCH"), (10_200, "GET node")]);
    let since = START_MS + 10_200;
    for _ in 0..30 {
        let JobHealth::Failing { reason, since_unix_ms, .. } = bench.core.health() else {
            panic!("an alarm")
        };
        assert!(reason.contains("Node web-1 does not exist"), "{reason}");
        assert_eq!(since_unix_ms, since);
        bench.pass(millis(10_200), &mut server);
        assert_eq!(bench.log(), ["GET node"], "one check for each interval");
    }
    assert_eq!(bench.closes, 0);
    assert_eq!(bench.count_notes("does not exist"), 1);
    server.node = Some("second".into());
    bench.pass(millis(10_200), &mut server);
    assert_eq!(bench.log(), ["GET node", "POST"]);
    assert_eq!(server.lease.as_ref().and_then(|lease| lease.owner_uid.as_deref()), Some("second"));
    assert_eq!(bench.core.health(), JobHealth::Healthy);
    assert_eq!(bench.record.map(|record| record.uid), server.lease.map(|lease| lease.written.uid));
}

#[test]
fn case_26_a_node_that_comes_back_is_not_waited_for() {
    let (mut bench, mut server) = (Bench::new(None), Server::with_node());
    bench.pass(seconds(1), &mut server);
    (server.lease, server.node) = (None, None);
    bench.event(super::Event::NodeChanged(None));
    assert_eq!(bench.count_notes("is garbage collected"), 1);
    bench.pass(seconds(10), &mut server);
    bench.log();
    server.node = Some("second".into());
    bench.event(super::Event::NodeChanged(Some("second".into())));
    bench.pass(Duration::ZERO, &mut server);
    assert_eq!(bench.timed_log(), [(11_000, "GET node"), (11_000, "POST")]);
}

#[test]
fn case_28_a_wall_clock_that_steps_back_changes_no_plan() {
    case_of_a_step(-3_600_000, false);
}

#[test]
fn case_29_a_wall_clock_that_steps_forward_and_back_changes_no_plan() {
    case_of_a_step(3_600_000, true);
    let (mut bench, mut server) = (Bench::new(None), Server::with_node());
    bench.pass(seconds(15), &mut server);
    bench.log();
    for step in [3_600_000, -3_600_000] {
        bench.step(step);
        bench.pass(millis(10_200), &mut server);
        assert_eq!(bench.log(), ["PATCH"]);
    }
    let steps: Vec<&Counted> =
        bench.counted.iter().filter(|counted| matches!(counted, Counted::ClockStep { .. })).collect();
    assert_eq!(steps, [&Counted::ClockStep { forward: true }, &Counted::ClockStep { forward: false }]);
}

fn case_of_a_step(step: i64, forward: bool) {
    let (mut bench, mut server) = (Bench::new(None), Server::with_node());
    bench.pass(seconds(15), &mut server);
    bench.log();
    let planned = bench.core.next_tick();
    bench.step(step);
    assert_eq!(bench.core.next_tick(), planned);
    bench.pass(seconds(60), &mut server);
    let patches = bench.patches();
    let log = bench.timed_log();
    let at: Vec<u128> = log.iter().map(|(at, _)| *at).collect();
    assert_eq!(at, [20_400, 30_600, 40_800, 51_000, 61_200, 71_400]);
    // The wall clock's time is written, even if it is earlier than before.
    assert_eq!(patches[0].renew_unix_us, (START_MS + 20_400 + step) * 1000);
    assert_eq!(bench.counted.iter().filter(|of| **of == Counted::ClockStep { forward }).count(), 1);
    assert_eq!(bench.count_notes("the wall clock stepped"), 1);
    assert_eq!(bench.core.health(), JobHealth::Healthy);
}
