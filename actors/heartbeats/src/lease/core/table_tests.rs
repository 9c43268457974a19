//! Starts, take-overs, owners, errors that a retry cannot repair, `Retry-After`.

use std::time::Duration;

use keelson_actor_system::cluster::{ApiErrorKind, JobHealth, LeaseHolder, ObservedLease, Owner, Written};

use super::{
    Answer, Counted, Event, LeasePolicy, Request,
    testing::{Bench, START_MS, Server, created, error, millis, policy, seconds},
};
use crate::lease::LeaseRecord;

fn record(uid: &str) -> LeaseRecord {
    LeaseRecord {
        name: "web-1".into(),
        uid: uid.into(),
        transitions: 3,
        holder: "web-1".into(),
        managers_forgotten: true,
        acquired_unix_us: None,
        stood_back: false,
    }
}

#[test]
fn the_figures_follow_from_the_duration() {
    for (duration, seconds_in_api, interval_ms, timeout_ms) in
        [(40_000, 40, 10_000, 10_000), (8_000, 8, 2_000, 8_000), (0, 1, 250, 1_000), (1_500, 1, 250, 1_000)]
    {
        let policy = LeasePolicy { duration: millis(duration), ..policy() };
        assert_eq!(policy.duration_seconds(), seconds_in_api);
        assert_eq!((policy.interval(), policy.request_timeout()), (millis(interval_ms), millis(timeout_ms)));
    }
    let policy = LeasePolicy { duration: Duration::MAX, ..policy() };
    assert_eq!(policy.duration_seconds(), i32::MAX);
}

#[test]
fn a_restart_renews_when_the_process_before_would_have() {
    let (mut bench, mut server) =
        (Bench::new(Some(record("lease-uid"))), Server::with_lease("web-1", seconds(4)));
    bench.pass(seconds(6), &mut server);
    assert_eq!(bench.timed_log(), [(0, "GET")]);
    assert_eq!((bench.core.health(), bench.persisted, server.writes), (JobHealth::Healthy, 0, 0));
    assert_eq!(bench.core.renewed_at().map(|at| (at.mono_ms, at.unix_ms)), Some((-4_000, START_MS - 4_000)));
    bench.pass(seconds(1), &mut server);
    let patches = bench.patches();
    assert_eq!(bench.timed_log(), [(6_200, "PATCH")]);
    assert!(!patches[0].drop_managed_fields, "once for a uid, and not once for a process");
    assert_eq!((&patches[0].owner, &patches[0].acquire), (&None, &None));
    bench.pass(seconds(60), &mut server);
    assert_eq!(bench.persisted, 0, "no renewal is written down");
}

#[test]
fn a_restart_renews_at_once_what_is_old_foreign_or_of_the_future() {
    let renewed = |renew_unix_us| {
        let mut server = Server::with_lease("web-1", Duration::ZERO);
        server.lease.as_mut().expect("there").renew_unix_us = renew_unix_us;
        server
    };
    for (what, mut server) in [
        ("future", renewed(Some(START_MS * 1000 + 1))),
        ("never", renewed(None)),
        ("old", Server::with_lease("web-1", seconds(10))),
        ("foreign", Server::with_lease("other", seconds(1))),
    ] {
        let mut bench = Bench::new(Some(record("lease-uid")));
        bench.pass(Duration::ZERO, &mut server);
        assert_eq!(bench.log(), ["GET", "PATCH"], "{what}");
    }
}

#[test]
fn a_foreign_lease_is_taken_over_once() {
    let (mut bench, mut server) = (Bench::new(None), Server::with_lease("other", seconds(1)));
    bench.pass(seconds(11), &mut server);
    let acquire = LeaseHolder { holder: "web-1".into(), acquire_unix_us: START_MS * 1000, transitions: 4 };
    let patches = bench.patches();
    assert_eq!((&patches[0].acquire, &patches[1].acquire), (&Some(acquire), &None));
    assert_eq!(bench.counted.iter().filter(|counted| **counted == Counted::Takeover).count(), 1);
    assert_eq!((bench.count_notes("taken over from other"), bench.core.transitions()), (1, Some(4)));
    assert_eq!(bench.record.map(|record| (record.holder, record.transitions)), Some(("web-1".into(), 4)));
    assert_eq!(bench.persisted, 1);
}

#[test]
fn transition_counts_stay_in_range() {
    for (seen, expect) in [(None, 1), (Some(-5), 1), (Some(i32::MAX), i32::MAX)] {
        let (mut bench, mut server) = (Bench::new(None), Server::with_lease("", seconds(1)));
        server.lease.as_mut().expect("there").transitions = seen;
        bench.pass(Duration::ZERO, &mut server);
        assert_eq!(bench.patches()[0].acquire.as_ref().map(|acquire| acquire.transitions), Some(expect));
    }
}

#[test]
fn an_owner_is_added_and_that_of_an_earlier_node_is_replaced() {
    let owner = Some(Owner { name: "web-1".into(), uid: "node-uid".into() });
    let (mut bench, mut server) = (Bench::new(None), Server::with_lease("web-1", seconds(20)));
    server.lease.as_mut().expect("there").owner_uid = None;
    bench.pass(seconds(15), &mut server);
    let patches = bench.patches();
    assert_eq!(bench.log(), ["GET", "GET node", "PATCH", "PATCH"]);
    assert_eq!((&patches[0].owner, &patches[1].owner), (&owner, &None));

    // The watch reports another Node: the old one's Lease would be deleted, so there is no wait.
    let uid = "second".to_owned();
    bench.event(Event::NodeChanged(Some(uid)));
    bench.pass(Duration::ZERO, &mut server);
    let patches = bench.patches();
    assert_eq!(bench.timed_log(), [(15_000, "PATCH")]);
    assert_eq!(patches[0].owner.as_ref().map(|owner| &*owner.uid), Some("second"));
    // At most once per interval: then it waits for the next renewal.
    bench.event(Event::NodeChanged(Some("third".into())));
    bench.event(Event::NodeChanged(Some("third".into())));
    bench.pass(seconds(10), &mut server);
    assert!(bench.log().is_empty());
    bench.pass(millis(200), &mut server);
    assert_eq!(bench.patches()[0].owner.as_ref().map(|owner| &*owner.uid), Some("third"));
}

#[test]
fn a_lease_without_owner_is_renewed_even_if_its_node_cannot_be_read() {
    for kind in [ApiErrorKind::NotFound, ApiErrorKind::Forbidden, ApiErrorKind::Timeout] {
        let (mut bench, mut server) = (Bench::new(None), Server::with_lease("web-1", seconds(20)));
        server.lease.as_mut().expect("there").owner_uid = None;
        server.next = [None, Some(kind)].into();
        bench.pass(seconds(1), &mut server);
        assert_eq!(bench.log(), ["GET", "GET node", "PATCH"], "{kind:?}");
        assert_eq!((bench.core.health(), server.writes), (JobHealth::Healthy, 1));
        bench.pass(seconds(10), &mut server);
        let owner = bench.patches()[0].owner.clone();
        assert_eq!((bench.log(), owner.is_some()), (vec!["GET node", "PATCH"], true));
    }
}

#[test]
fn an_unreadable_node_puts_creation_off_to_the_next_interval() {
    for kind in [ApiErrorKind::Timeout, ApiErrorKind::Server { retry_after: None }, ApiErrorKind::Forbidden] {
        let (mut bench, mut server) = (Bench::new(None), Server::with_node());
        server.next = [None, Some(kind)].into();
        bench.pass(seconds(5), &mut server);
        assert_eq!(bench.log(), ["GET", "GET node"], "{kind:?}");
        assert!(matches!(bench.core.health(), JobHealth::Failing { .. }));
        bench.pass(millis(5_200), &mut server);
        assert_eq!(bench.timed_log(), [(10_200, "GET node"), (10_200, "POST")]);
        assert_eq!(bench.core.health(), JobHealth::Healthy);
    }
}

#[test]
fn a_deleted_lease_is_recreated_at_once() {
    let (mut bench, mut server) = created();
    server.lease = None;
    bench.pass(seconds(10), &mut server);
    assert_eq!(bench.timed_log(), [(10_200, "PATCH"), (10_200, "GET node"), (10_200, "POST")]);
    assert_eq!(
        (bench.core.health(), bench.count_notes("deleted by another client"), bench.persisted),
        (JobHealth::Healthy, 1, 2)
    );
    bench.pass(seconds(10), &mut server);
    assert!(bench.patches()[0].drop_managed_fields, "once for each uid");
}

#[test]
fn a_lease_recreated_by_another_process_is_reported_and_renewed() {
    let (mut bench, mut server) =
        (Bench::new(Some(record("an old uid"))), Server::with_lease("web-1", seconds(4)));
    bench.pass(seconds(7), &mut server);
    assert_eq!(bench.count_notes("was recreated by another client"), 1);
    assert!(bench.patches()[0].drop_managed_fields);
    assert_eq!(
        bench.record.map(|record| (record.uid, record.managers_forgotten)),
        Some(("lease-uid".into(), true))
    );
    // Taken over, then renewed with the managers dropped.
    assert_eq!(bench.persisted, 2);
}

#[test]
fn managed_fields_are_kept_unless_dropping_is_set() {
    let mut bench = Bench::new(None);
    bench.core = super::Core::new(LeasePolicy { drops_managed_fields: false, ..policy() }, None);
    bench.pass(seconds(15), &mut Server::with_node());
    assert_eq!(bench.patches().iter().filter(|patch| patch.drop_managed_fields).count(), 0);
    assert_eq!(
        (bench.patches().len(), bench.record.map(|record| record.managers_forgotten)),
        (1, Some(false))
    );
}

#[test]
fn the_record_of_another_lease_is_ignored() {
    let other = LeaseRecord { name: "other".into(), ..record("an old uid") };
    let (mut bench, mut server) = (Bench::new(Some(other)), Server::with_lease("web-1", seconds(4)));
    bench.pass(seconds(1), &mut server);
    assert_eq!((bench.count_notes("recreated"), bench.persisted), (0, 1));
}

#[test]
fn permanent_errors_are_tried_once_per_interval() {
    for kind in [
        ApiErrorKind::Unauthorized,
        ApiErrorKind::Forbidden,
        ApiErrorKind::Credentials,
        ApiErrorKind::Invalid,
    ] {
        let (mut bench, mut server) = created();
        server.down = Some((kind, Duration::ZERO));
        bench.pass(seconds(40), &mut server);
        let at: Vec<u128> = bench.timed_log().iter().map(|(at, _)| *at).collect();
        assert_eq!(at, [10_200, 20_400, 30_600, 40_800], "{kind:?}");
        assert!(matches!(bench.core.health(), JobHealth::Failing { .. }));
        assert_eq!(bench.closes, 0);
        server.down = None;
        bench.pass(millis(10_200), &mut server);
        assert_eq!(bench.core.health(), JobHealth::Healthy);
        let (mut bench, mut server) = (Bench::new(None), Server::with_node());
        server.down = Some((kind, Duration::ZERO));
        bench.pass(seconds(40), &mut server);
        assert_eq!(bench.requests.len(), 4, "{kind:?}");
    }
}

#[test]
fn a_missing_namespace_is_reported_and_tried_once_per_interval() {
    let (mut bench, mut server) = (Bench::new(None), Server::with_node());
    server.next = [None, None, Some(ApiErrorKind::NotFound)].into();
    bench.pass(seconds(5), &mut server);
    assert_eq!(bench.log(), ["GET", "GET node", "POST"]);
    let reason = bench.failure();
    assert!(reason.contains("namespace kube-node-lease may be missing"), "{reason}");
}

#[test]
fn a_refused_patch_is_reduced_next_time() {
    let (mut bench, mut server) = created();
    server.next = [Some(ApiErrorKind::Invalid)].into();
    bench.pass(seconds(20), &mut server);
    let patches = bench.patches();
    assert_eq!(bench.log(), ["PATCH", "GET", "PATCH"]);
    assert_eq!((patches[0].drop_managed_fields, patches[1].drop_managed_fields), (true, false));
    assert_eq!(bench.core.health(), JobHealth::Healthy);
}

/// E13: at most an interval and a quarter of one, so that a Lease of four intervals has tries left.
#[test]
fn e13_a_retry_after_is_obeyed_up_to_the_interval_and_spread() {
    let asked = |seconds_asked| ApiErrorKind::TooManyRequests { retry_after: Some(seconds(seconds_asked)) };
    let busy = |seconds_asked| ApiErrorKind::Server { retry_after: Some(seconds(seconds_asked)) };
    let none = ApiErrorKind::TooManyRequests { retry_after: None };
    for (kind, pause_ms) in [
        (asked(5), 5_000),
        (asked(0), 1_000),
        (none, 1_000),
        (busy(10), 10_000),
        (busy(30), 10_000),
        (asked(86_400), 10_000),
        (ApiErrorKind::TooManyRequests { retry_after: Some(Duration::MAX) }, 10_000),
    ] {
        for (random, more_ms) in [(0.0, 0), (0.5, 1_250), (1.0, 2_500)] {
            let (mut bench, mut server) = created();
            server.next = [Some(kind)].into();
            bench.random = random;
            bench.pass(millis(23_500), &mut server);
            let log = bench.timed_log();
            let retried = 10_200 + pause_ms + more_ms;
            assert_eq!(log[..2], [(10_200, "PATCH"), (retried, "PATCH")], "{kind:?}, {random}");
            assert_eq!((bench.core.health(), bench.closes), (JobHealth::Healthy, 0));
        }
    }
}

/// E13: a `Retry-After` of a minute in each answer leaves tries for the Lease, also at a start.
#[test]
fn e13_with_a_retry_after_of_a_minute_there_are_three_tries_per_lease_duration() {
    let busy = Some(ApiErrorKind::TooManyRequests { retry_after: Some(seconds(60)) });
    for random in [0.0, 0.5, 0.999] {
        let (mut bench, mut server) = (Bench { random, ..Bench::new(None) }, Server::with_node());
        bench.pass(seconds(1), &mut server);
        bench.log();
        server.next = [busy; 100].into();
        bench.pass(seconds(39), &mut server);
        assert!(bench.log().len() >= 3, "{random}");
    }
    // The same if the Lease has to be created: for the Node's uid, and for the POST.
    for before in [1, 2] {
        let (mut bench, mut server) = (Bench::new(None), Server::with_node());
        server.next = std::iter::repeat_n(None, before).chain([busy]).collect();
        bench.pass(millis(12_500), &mut server);
        assert!(server.lease.is_some(), "{:?}", bench.timed_log());
    }
}

#[test]
fn one_try_follows_retry_after() {
    let (mut bench, mut server) = created();
    server.next = [Some(ApiErrorKind::TooManyRequests { retry_after: Some(seconds(2)) })].into();
    server.next.extend([Some(ApiErrorKind::Server { retry_after: None }); 10]);
    bench.pass(seconds(13), &mut server);
    assert_eq!(
        bench.timed_log(),
        [(10_200, "PATCH"), (13_450, "PATCH")],
        "the rest of the tries is given up"
    );
    bench.pass(seconds(11), &mut server);
    assert_eq!(bench.timed_log()[0], (23_650, "PATCH"));
}

#[test]
fn node_changes_do_not_shorten_retry_after() {
    let (mut bench, mut server) = (Bench::new(None), Server::with_node());
    server.next = [None, Some(ApiErrorKind::TooManyRequests { retry_after: Some(seconds(30)) })].into();
    bench.pass(seconds(1), &mut server);
    assert_eq!(bench.log(), ["GET", "GET node"]);
    bench.event(Event::NodeChanged(Some("node-uid".into())));
    bench.pass(seconds(10), &mut server);
    assert!(bench.log().is_empty());
    bench.pass(seconds(1), &mut server);
    assert_eq!(bench.timed_log(), [(11_250, "GET node"), (11_250, "POST")]);
}

#[test]
fn a_start_before_the_node_is_registered_waits_for_it() {
    let (mut bench, mut server) = (Bench::new(None), Server::default());
    bench.event(Event::NodeChanged(None));
    bench.pass(seconds(2), &mut server);
    assert_eq!((bench.log(), bench.count_notes("will be deleted")), (vec!["GET", "GET node"], 0));
    server.node = Some("new".into());
    bench.event(Event::NodeChanged(Some("new".into())));
    bench.pass(Duration::ZERO, &mut server);
    assert_eq!(bench.log(), ["GET node", "POST"]);
}

#[test]
fn a_lease_that_exists_at_creation_is_read() {
    for kind in [ApiErrorKind::AlreadyExists, ApiErrorKind::Timeout, ApiErrorKind::Conflict] {
        let (mut bench, mut server) = (Bench::new(None), Server::with_node());
        server.next = [None, None, Some(kind)].into();
        bench.pass(Duration::ZERO, &mut server);
        assert_eq!(bench.log(), ["GET", "GET node", "POST"]);
        server.lease = Server::with_lease("web-1", seconds(1)).lease;
        bench.pass(seconds(1), &mut server);
        assert_eq!(bench.timed_log(), [(200, "GET"), (200, "PATCH")], "{kind:?}");
    }
}

#[test]
fn a_lease_that_comes_and_goes_is_retried_with_pauses() {
    let (mut bench, mut server) = (Bench::new(None), Server::with_node());
    server.next = [Some(ApiErrorKind::NotFound), None, Some(ApiErrorKind::AlreadyExists)]
        .into_iter()
        .cycle()
        .take(300)
        .collect();
    bench.pass(seconds(60), &mut server);
    let posts: Vec<u128> =
        bench.timed_log().into_iter().filter(|(_, name)| *name == "POST").map(|(at, _)| at).collect();
    assert_eq!(posts[..7], [0, 200, 600, 1_400, 3_000, 6_200, 12_600]);
    assert!(posts[7..].windows(2).all(|two| two[1] - two[0] == 7_000), "{posts:?}");
}

#[test]
fn answers_without_a_version_or_a_uid_lead_to_no_unconditional_write() {
    let (mut bench, mut server) = (Bench::new(None), Server::with_lease("web-1", seconds(20)));
    bench.event(Event::Tick);
    bench.answer(Answer::Read(Ok(ObservedLease::default())));
    assert!(bench.patches().is_empty() && matches!(bench.core.health(), JobHealth::Failing { .. }));
    bench.pass(seconds(1), &mut server);
    assert_eq!(bench.log(), ["GET", "GET", "PATCH"]);
    bench.pass(millis(9_400), &mut server);
    let (_, request) = bench.asked.clone().map_or((0, Request::Read), |asked| asked);
    assert_eq!(request, Request::Read, "nothing is under way");
    bench.at(bench.core.next_tick().expect("planned"));
    bench.event(Event::Tick);
    bench.answer(Answer::Renewed(Ok(Written::default())));
    assert_eq!(bench.core.health(), JobHealth::Healthy);
    bench.log();
    bench.pass(millis(10_400), &mut server);
    assert_eq!(bench.log(), ["GET", "PATCH"], "read before it is renewed again");
    server.lease = None;
    bench.pass(seconds(9), &mut server);
    bench.at(bench.core.next_tick().expect("planned"));
    bench.event(Event::Tick);
    bench.answer(Answer::Renewed(Err(error(ApiErrorKind::NotFound))));
    bench.answer(Answer::Node(Ok(String::new())));
    assert!(!bench.log().contains(&"POST"), "no owner without a uid");
}

#[test]
fn unexpected_answers_are_ignored() {
    let mut bench = Bench::new(None);
    bench.event(Event::Answered { request: 0, answer: Answer::Node(Ok("x".into())) });
    bench.event(Event::Tick);
    let (number, _) = bench.asked.clone().expect("asked");
    bench
        .event(Event::Answered { request: number + 1, answer: Answer::Read(Err(error(ApiErrorKind::Gone))) });
    bench.event(Event::Answered { request: number, answer: Answer::Node(Ok("x".into())) });
    assert_eq!(bench.log(), ["GET"]);
    bench.event(Event::Tick);
    assert!(bench.log().is_empty(), "one request at a time");
}

#[test]
fn a_gone_version_is_read_like_a_conflict() {
    let (mut bench, mut server) = created();
    server.next = [Some(ApiErrorKind::Gone)].into();
    bench.pass(seconds(10), &mut server);
    assert_eq!((bench.log(), bench.closes), (vec!["PATCH", "GET", "PATCH"], 0));
    assert_eq!((bench.count("Gone"), bench.count("renewed"), bench.count("created")), (1, 1, 1));
}

#[test]
fn other_errors_use_up_the_tries_without_a_pause() {
    let (mut bench, mut server) = created();
    server.next = [Some(ApiErrorKind::Server { retry_after: None }); 5].into();
    server.next.push_back(None);
    server.next.extend([Some(ApiErrorKind::Server { retry_after: None }); 5]);
    bench.pass(seconds(10), &mut server);
    let names = bench.log();
    assert_eq!((&names[..5], names[5], &names[6..]), (&["PATCH"; 5][..], "GET", &["PATCH"; 5][..]));
    assert_eq!(bench.closes, 8, "four times in each half");
    bench.pass(seconds(10), &mut server);
    assert_eq!(bench.log(), ["PATCH"]);
}

#[test]
fn each_read_backs_off_from_the_start() {
    let down = Some(ApiErrorKind::Unreachable);
    let (mut bench, mut server) = (Bench::new(None), Server::with_lease("web-1", seconds(20)));
    server.next = [down, down, None, Some(ApiErrorKind::Conflict), down, None].into();
    bench.pass(seconds(5), &mut server);
    let expect =
        [(0, "GET"), (200, "GET"), (600, "GET"), (600, "PATCH"), (600, "GET"), (800, "GET"), (800, "PATCH")];
    assert_eq!((bench.timed_log(), bench.core.health()), (expect.to_vec(), JobHealth::Healthy));
}

#[test]
fn the_view_shows_holder_health_and_times() {
    let (mut bench, mut server) = (Bench::new(None), Server::with_lease("other", seconds(1)));
    bench.pass(seconds(3), &mut server);
    let view = bench.core.view("https://api.example", bench.now);
    for (field, expect) in [
        ("name", serde_json::json!("web-1")),
        ("holder", "web-1".into()),
        ("uid", "lease-uid".into()),
        ("resource_version", "101".into()),
        ("transitions", 4.into()),
        ("last_renewal_unix_ms", START_MS.into()),
        ("last_renewal_age_ms", 3_000.into()),
        ("next_request_in_ms", 7_200.into()),
        ("next_request_unix_ms", (START_MS + 10_200).into()),
        ("consecutive_failures", 0.into()),
        ("phase", "waiting".into()),
        ("health", "healthy".into()),
        ("server", "https://api.example".into()),
    ] {
        assert_eq!(view[field], expect, "{field} in {view:#}");
    }
    server.down = Some((ApiErrorKind::Forbidden, Duration::ZERO));
    bench.pass(seconds(10), &mut server);
    let view = bench.core.view("https://api.example", bench.now);
    assert_eq!((&view["health"], &view["consecutive_failures"]), (&"failing".into(), &1.into()));
    assert_eq!(view["failing_since_unix_ms"], START_MS + 10_200);
    assert!(view["last_error"].as_str().is_some_and(|text| text.contains("RBAC")), "{view:#}");
}
