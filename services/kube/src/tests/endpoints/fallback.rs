//! Lists and watches that break, hang, are refused, or get a `Retry-After`.

use std::time::Duration;

use super::*;

/// Sends 250 objects of a listing, and expects all but the last.
async fn half(feed: &Feed, source: &mut Source) {
    for n in 0..250 {
        feed.slice("ADDED", &format!("s{n}"), 1);
    }
    source.expects(&[Call::Listing]).await;
    for n in 0..199 {
        source.expects(&[put(&format!("s{n}"), 1)]).await;
    }
}

#[tokio::test]
async fn e1_e15_a_streaming_list_that_is_cut_off_is_followed_by_a_list_in_pages() {
    let mut server = Server::plain().await;
    let feed = server.begin();
    let mut source = Source::slices(&server);
    half(&feed, &mut source).await;
    feed.cut();
    server.reply(answer(200, wire::page("EndpointSlice", "9", &[wire::slice("a", 3)], "go/on")));
    server.reply(answer(200, wire::page("EndpointSlice", "9", &[wire::slice("b", 4)], "")));
    let feed = server.begin();
    // No failure is reported: there is another way.
    source.expects(&[Call::Listing, put("a", 3), put("b", 4), Call::Listed, Call::Healthy]).await;
    feed.slice("ADDED", "c", 10);
    source.expects(&[put("c", 10)]).await;
    server.seen().await;
    let (first, second) = (server.seen().await, server.seen().await);
    assert_eq!((first.query("limit"), first.query("resourceVersion")), (Some("500"), Some("0")));
    assert_eq!((second.query("limit"), second.query("continue")), (Some("500"), Some("go%2Fon")));
    assert_eq!((second.query("resourceVersion"), second.query("watch")), (None, None));
    assert_eq!(server.seen().await.query("resourceVersion"), Some("9"));
    server.nothing_more();
}

#[tokio::test]
async fn e1_a_hanging_streaming_list_is_reported_and_followed_by_a_list() {
    let mut server = Server::plain().await;
    let feed = server.begin();
    let mut source = Source::slices(&server);
    half(&feed, &mut source).await;
    server.seen().await;
    pass(Duration::from_secs(11)).await;
    source.fails("the list was not complete after 10s").await;
    server.nothing_more();
    pass(Duration::from_secs(30)).await;
    feed.closed().await;
    server.reply(list_of("9", &[("a", 3)]));
    source.expects(&[Call::Listing, put("a", 3), Call::Listed, Call::Healthy]).await;
    assert_eq!(server.seen().await.query("watch"), None);
}

#[tokio::test]
async fn e1_a_list_that_never_ends_after_a_410_is_reported() {
    let (mut server, feed, mut source) = watched(&ServerSignals::default(), 4).await;
    let _hanging = server.begin();
    feed.error(410, "Expired");
    assert!(server.seen().await.query("sendInitialEvents").is_some());
    pass(Duration::from_secs(11)).await;
    let SourceEvent::Health(_, JobHealth::Failing { reason, since_unix_ms, .. }) = source.event().await
    else {
        panic!("it is stale")
    };
    assert_eq!(reason, "the list was not complete after 10s");
    // The known state was current until the listing began.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis();
    assert!(since_unix_ms <= i64::try_from(now).unwrap() - 10_000, "{since_unix_ms}");
}

#[tokio::test]
async fn e1_e14_an_unanswered_watch_is_reported_and_retried() {
    let (mut server, feed, mut source) = watched(&ServerSignals::default(), 4).await;
    drop(feed);
    assert_eq!(server.seen().await.query("resourceVersion"), Some("4"));
    pass(Duration::from_secs(11)).await;
    source.fails("the watch was not answered after 10s").await;
    // API Priority and Fairness queues requests for up to a minute.
    pass(Duration::from_secs(40)).await;
    let feed = server.begin();
    feed.slice("ADDED", "a", 5);
    source.expects(&[put("a", 5), Call::Healthy]).await;
    server.nothing_more();
}

#[tokio::test]
async fn e15_after_a_500_streaming_lists_are_tried_again() {
    let mut server = Server::plain().await;
    server.reply(refusal(500, "InternalError"));
    server.reply(list_of("9", &[("a", 3)]));
    let feed = server.begin();
    let mut source = Source::slices(&server);
    source.expects(&[Call::Listing, put("a", 3), Call::Listed, Call::Healthy]).await;
    server.skip(3).await;
    let again = server.begin();
    feed.error(410, "Expired");
    assert_eq!(server.seen().await.query("sendInitialEvents"), Some("true"));
    again.listed(12);
    source.expects(&[Call::Listing, Call::Listed]).await;
    server.nothing_more();
}

#[tokio::test]
async fn e15_pages_that_expire_are_followed_by_one_list() {
    let mut server = Server::plain().await;
    server.reply(refusal(422, "Invalid"));
    server.reply(answer(200, wire::page("EndpointSlice", "9", &[wire::slice("a", 3)], "on")));
    server.reply(refusal(410, "Expired"));
    server.reply(list_of("10", &[("b", 4)]));
    let mut source = Source::slices(&server);
    source.expects(&[Call::Listing, put("b", 4), Call::Listed, Call::Healthy]).await;
    server.skip(3).await;
    let full = server.seen().await;
    assert_eq!((full.query("limit"), full.query("continue"), full.query("watch")), (None, None, None));
}

/// The answer of a server before 1.31.
#[tokio::test]
async fn e10_a_server_that_does_not_know_the_field_is_asked_without_it() {
    let service = |name: &str, version, ip: &str| Service {
        metadata: Some(wire::meta(name, version)),
        spec: Some(keelson_proto::kubernetes::ServiceSpec { cluster_ip: ip.into(), ..Default::default() }),
        ..Service::default()
    };
    let mut server = Server::plain().await;
    server.reply(refusal(400, "BadRequest"));
    server.reply(refusal(400, "BadRequest"));
    let all = [service("web", 1, "10.0.0.1"), service("headless", 2, "None"), service("name", 3, "")];
    server.reply(answer(200, wire::list("Service", "9", &all)));
    let feed = server.begin();
    let mut source = Source::of::<Service>(server.api(), Semaphore::MAX_PERMITS);
    let names = |seen: &[ObjectEvent<Service>]| -> Vec<String> {
        let name = |seen: &ObjectEvent<Service>| match seen {
            ObjectEvent::Upsert(service) => Some(format!("+{}", service.metadata.as_ref()?.name)),
            ObjectEvent::Deleted(name) => Some(format!("-{name}")),
            _ => None,
        };
        seen.iter().filter_map(name).collect()
    };
    let SourceEvent::Services(seen) = source.event().await else { panic!() };
    assert_eq!(names(&seen), ["+web", "-ns/headless", "+name"]);
    assert_eq!(seen.last(), Some(&ObjectEvent::ListComplete));
    assert!(matches!(source.event().await, SourceEvent::Health(_, JobHealth::Healthy)), "nothing has failed");
    feed.bytes(wire::event("ADDED", "Service", &service("another", 10, "None")));
    let SourceEvent::Services(seen) = source.event().await else { panic!() };
    assert_eq!(names(&seen), ["-ns/another"]);
    for field_selector in [true, true, false, false] {
        let seen = server.seen().await;
        let selectors = (seen.query("fieldSelector").is_some(), seen.query("labelSelector").is_some());
        assert_eq!(selectors, (field_selector, true));
    }
    server.nothing_more();
}

#[tokio::test]
async fn e2_a_watch_that_recovers_wakes_those_on_other_connections() {
    let signals = ServerSignals::default();
    let (mut server, mut other) = (Server::plain().await, Server::plain().await);
    let mut waiting = Source::slices_of(other.api_with(&signals));
    for n in 0..7 {
        if n > 0 {
            // Longer than any wait.
            pass(Duration::from_secs(61)).await;
        }
        other.reply(refusal(403, "Forbidden"));
        other.seen().await;
        waiting.fails("Forbidden").await;
    }
    // By now it waits for 30 s at least.
    server.reply(refusal(403, "Forbidden"));
    let mut recovering = Source::slices_of(server.api_with(&signals));
    recovering.fails("Forbidden").await;
    server.seen().await;
    // Its first wait is less than 2 s.
    pass(Duration::from_secs(2)).await;
    let _feed = listed(&mut server, &mut recovering, 4).await;
    other.nothing_more();
    pass(Duration::from_secs(42)).await;
    let _feed = listed(&mut other, &mut waiting, 4).await;
}

#[tokio::test]
async fn e2_a_watch_that_is_interrupted_does_not_ask_for_what_another_was_refused() {
    let signals = ServerSignals::default();
    for (version, asks_for) in [(90, None), (101, Some("102"))] {
        let (server, feed, mut source) = watched(&signals, 100).await;
        let (mut other, interrupted, mut second) = watched(&signals, version).await;
        let again = server.begin();
        feed.error(410, "Expired");
        again.listed(200);
        source.expects(&[Call::Listing, Call::Listed]).await;
        interrupted.slice("ADDED", "a", version + 1);
        second.expects(&[put("a", version + 1)]).await;
        drop(interrupted);
        let _feed = other.begin();
        assert_eq!(other.seen().await.query("resourceVersion"), asks_for, "{version}");
    }
}

#[tokio::test]
async fn e11_an_older_listing_makes_all_watches_list_again() {
    let (signals, count) = counting();
    let (mut server, feed, mut source) = watched(&signals, 100).await;
    let mut other = Server::plain().await;
    let mut second = Source::slices_of(other.api_with(&signals));
    let ghost = other.begin();
    ghost.slice("ADDED", "ghost", 90);
    ghost.listed(100);
    second.expects(&[Call::Listing, put("ghost", 90), Call::Listed, Call::Healthy]).await;
    other.seen().await;
    // An earlier version is too old for a server that has listed since; its list is older still.
    let again = server.begin();
    feed.error(410, "Expired");
    again.listed(60);
    source.expects(&[Call::Listing, Call::Listed]).await;
    ghost.closed().await;
    pass(Duration::from_secs(30)).await;
    let relist = other.begin();
    let seen = other.seen().await;
    assert_eq!((seen.query("resourceVersion"), seen.query("sendInitialEvents")), (None, Some("true")));
    relist.listed(61);
    second.expects(&[Call::Listing, Call::Listed]).await;
    // The watch that has detected it has listed already.
    server.seen().await;
    server.nothing_more();
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn e11_an_older_lease_makes_all_watches_list_again() {
    use super::super::requests::renewal;
    use keelson_actor_system::cluster::LeaseApi as _;
    let (signals, count) = counting();
    let (mut server, feed, mut source) = watched(&signals, 100).await;
    let leases = Server::plain().await;
    let api = leases.api_with(&signals);
    for version in ["100", "101"] {
        let renewed = format!(r#"{{"metadata":{{"uid":"u","resourceVersion":"{version}"}}}}"#);
        leases.reply(Reply::json(200, renewed));
        api.renew_lease(renewal()).await.unwrap();
    }
    // The agent reads this after the Lease's conflict.
    leases.reply(Reply::json(200, r#"{"metadata":{"uid":"u","resourceVersion":"70"},"spec":{}}"#));
    api.get_lease("n1").await.unwrap();
    feed.closed().await;
    pass(Duration::from_secs(30)).await;
    assert_eq!(server.seen().await.query("resourceVersion"), None);
    server.begin().listed(71);
    source.expects(&[Call::Listing, Call::Listed]).await;
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

/// A watch from a future version receives nothing; only a list with a minimum version is refused.
#[tokio::test]
async fn e11_the_version_of_an_interrupted_watch_is_checked() {
    let (signals, count) = counting();
    let (mut server, feed, mut source) = watched(&signals, 100).await;
    drop(feed);
    let deaf = server.begin();
    assert_eq!(server.seen().await.query("resourceVersion"), Some("100"));
    // The head has arrived when an event has.
    deaf.slice("ADDED", "a", 101);
    source.expects(&[put("a", 101)]).await;
    pass(Duration::from_secs(59)).await;
    server.nothing_more();
    pass(Duration::from_secs(182)).await;
    let check = server.seen().await;
    assert_eq!((check.query("resourceVersion"), check.query("watch")), (Some("100"), None));
    assert_eq!(check.query("resourceVersionMatch"), Some("NotOlderThan"));
    assert_eq!(check.query("fieldSelector"), Some("metadata.name%3Dkeelson-no-such-object"));
    let cause = crate::protobuf::StatusCause { reason: "ResourceVersionTooLarge".into() };
    let details = crate::protobuf::StatusDetails { retry_after_seconds: 1, causes: vec![cause] };
    let status = crate::protobuf::Status { details: Some(details), ..wire::status(504, "Timeout") };
    server.reply(answer(504, wire::enveloped("Status", &status)));
    deaf.closed().await;
    let feed = server.begin();
    assert_eq!(server.seen().await.query("sendInitialEvents"), Some("true"));
    feed.listed(60);
    source.expects(&[Call::Listing, Call::Listed]).await;
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn e11_a_version_that_is_known_is_not_checked_again() {
    let (signals, count) = counting();
    let (mut server, feed, mut source) = watched(&signals, 100).await;
    drop(feed);
    let feed = server.begin();
    server.seen().await;
    feed.slice("ADDED", "a", 101);
    source.expects(&[put("a", 101)]).await;
    pass(Duration::from_secs(241)).await;
    server.seen().await;
    server.reply(list_of("102", &[]));
    feed.slice("ADDED", "b", 103);
    source.expects(&[put("b", 103)]).await;
    pass(Duration::from_secs(241)).await;
    feed.slice("ADDED", "c", 104);
    source.expects(&[put("c", 104)]).await;
    server.nothing_more();
    assert_eq!(count.load(Ordering::SeqCst), 0);
}
