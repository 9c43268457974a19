//! Lists and watches that break, hang, are refused, or get a `Retry-After`.

use std::time::Duration;

use keelson_endpoint_publisher::Service;

use super::*;
use crate::{ApiServerParts, ClusterSource, ServerSignals};

/// A client that shares these signals with others.
fn connected(server: &Server, signals: &ServerSignals) -> ApiServer {
    let parts = ApiServerParts::new(ClusterSource::Explicit(server.source()));
    ApiServer::new(ApiServerParts { signals: signals.clone(), ..parts })
}

/// Lists nothing at `version`, and expects that the watch works.
async fn listed(server: &mut Server, source: &mut Source, version: u64) -> Feed {
    let feed = begin(server);
    feed.listed(version);
    source.expects(&[Call::Listing, Call::Listed, Call::Healthy]).await;
    server.seen().await;
    feed
}

/// Advances the time at once; no data may be in flight.
async fn pass(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

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
    let feed = begin(&server);
    let mut source = Source::slices(&server);
    half(&feed, &mut source).await;
    feed.cut();
    server.reply(answer(200, wire::page("EndpointSlice", "9", &[wire::slice("a", 3)], "go/on")));
    server.reply(answer(200, wire::page("EndpointSlice", "9", &[wire::slice("b", 4)], "")));
    let feed = begin(&server);
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
    let feed = begin(&server);
    let mut source = Source::slices(&server);
    half(&feed, &mut source).await;
    server.seen().await;
    pass(Duration::from_secs(11)).await;
    source.fails("the list was not complete after 10s").await;
    server.nothing_more();
    pass(Duration::from_secs(30)).await;
    feed.closed().await;
    server.reply(answer(200, wire::list("EndpointSlice", "9", &[wire::slice("a", 3)])));
    source.expects(&[Call::Listing, put("a", 3), Call::Listed, Call::Healthy]).await;
    assert_eq!(server.seen().await.query("watch"), None);
}

#[tokio::test]
async fn e1_a_list_that_never_ends_after_a_410_is_reported() {
    let mut server = Server::plain().await;
    let mut source = Source::slices(&server);
    let feed = listed(&mut server, &mut source, 4).await;
    let _hanging = begin(&server);
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
    let mut server = Server::plain().await;
    let mut source = Source::slices(&server);
    drop(listed(&mut server, &mut source, 4).await);
    assert_eq!(server.seen().await.query("resourceVersion"), Some("4"));
    pass(Duration::from_secs(11)).await;
    source.fails("the watch was not answered after 10s").await;
    // API Priority and Fairness queues requests for up to a minute.
    pass(Duration::from_secs(40)).await;
    let feed = begin(&server);
    feed.slice("ADDED", "a", 5);
    source.expects(&[put("a", 5), Call::Healthy]).await;
    server.nothing_more();
}

#[tokio::test]
async fn e15_after_a_500_streaming_lists_are_tried_again() {
    let mut server = Server::plain().await;
    server.reply(refusal(500, "InternalError"));
    server.reply(answer(200, wire::list("EndpointSlice", "9", &[wire::slice("a", 3)])));
    let feed = begin(&server);
    let mut source = Source::slices(&server);
    source.expects(&[Call::Listing, put("a", 3), Call::Listed, Call::Healthy]).await;
    for _ in 0..3 {
        server.seen().await;
    }
    let again = begin(&server);
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
    server.reply(answer(200, wire::list("EndpointSlice", "10", &[wire::slice("b", 4)])));
    let mut source = Source::slices(&server);
    source.expects(&[Call::Listing, put("b", 4), Call::Listed, Call::Healthy]).await;
    for _ in 0..3 {
        server.seen().await;
    }
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
    let feed = begin(&server);
    let api = server.api();
    let mut source =
        Source::with(Semaphore::MAX_PERMITS, |sink| async move { collect::<Service>(&api, sink).await });
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
    let selectors: Vec<_> =
        [server.seen().await, server.seen().await, server.seen().await, server.seen().await]
            .iter()
            .map(|seen| (seen.query("fieldSelector").is_some(), seen.query("labelSelector").is_some()))
            .collect();
    assert_eq!(selectors, [(true, true), (true, true), (false, true), (false, true)]);
    server.nothing_more();
}

#[tokio::test]
async fn e2_a_watch_that_recovers_wakes_those_on_other_connections() {
    let signals = ServerSignals::default();
    let (mut server, mut other) = (Server::plain().await, Server::plain().await);
    let mut waiting = Source::slices_of(connected(&other, &signals), Semaphore::MAX_PERMITS);
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
    let mut recovering = Source::slices_of(connected(&server, &signals), Semaphore::MAX_PERMITS);
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
        let (mut server, mut other) = (Server::plain().await, Server::plain().await);
        let mut source = Source::slices_of(connected(&server, &signals), Semaphore::MAX_PERMITS);
        let feed = listed(&mut server, &mut source, 100).await;
        let mut second = Source::slices_of(connected(&other, &signals), Semaphore::MAX_PERMITS);
        let interrupted = listed(&mut other, &mut second, version).await;
        let again = begin(&server);
        feed.error(410, "Expired");
        again.listed(200);
        source.expects(&[Call::Listing, Call::Listed]).await;
        interrupted.slice("ADDED", "a", version + 1);
        second.expects(&[put("a", version + 1)]).await;
        drop(interrupted);
        let _feed = begin(&other);
        assert_eq!(other.seen().await.query("resourceVersion"), asks_for, "{version}");
    }
}

fn counting() -> (ServerSignals, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let signals = ServerSignals::new(move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
    });
    (signals, count)
}

#[tokio::test]
async fn e11_an_older_listing_makes_all_watches_list_again() {
    let (signals, count) = counting();
    let (mut server, mut other) = (Server::plain().await, Server::plain().await);
    let mut source = Source::slices_of(connected(&server, &signals), Semaphore::MAX_PERMITS);
    let feed = listed(&mut server, &mut source, 100).await;
    let mut second = Source::slices_of(connected(&other, &signals), Semaphore::MAX_PERMITS);
    let ghost = begin(&other);
    ghost.slice("ADDED", "ghost", 90);
    ghost.listed(100);
    second.expects(&[Call::Listing, put("ghost", 90), Call::Listed, Call::Healthy]).await;
    other.seen().await;
    // An earlier version is too old for a server that has listed since; its list is older still.
    let again = begin(&server);
    feed.error(410, "Expired");
    again.listed(60);
    source.expects(&[Call::Listing, Call::Listed]).await;
    ghost.closed().await;
    pass(Duration::from_secs(30)).await;
    let relist = begin(&other);
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
    use keelson_actor_system::cluster::{LeaseApi as _, LeasePatch};
    let (signals, count) = counting();
    let (mut server, leases) = (Server::plain().await, Server::plain().await);
    let mut source = Source::slices_of(connected(&server, &signals), Semaphore::MAX_PERMITS);
    let feed = listed(&mut server, &mut source, 100).await;
    let api = connected(&leases, &signals);
    for version in ["100", "101"] {
        leases.reply(Reply::json(
            200,
            format!(r#"{{"metadata":{{"uid":"u","resourceVersion":"{version}"}}}}"#),
        ));
        let patch = LeasePatch {
            name: "n1".into(),
            resource_version: "1".into(),
            renew_unix_us: 0,
            duration_seconds: None,
            owner: None,
            acquire: None,
            drop_managed_fields: false,
        };
        api.renew_lease(patch).await.unwrap();
    }
    // The agent reads this after the Lease's conflict.
    leases.reply(Reply::json(200, r#"{"metadata":{"uid":"u","resourceVersion":"70"},"spec":{}}"#));
    api.get_lease("n1").await.unwrap();
    feed.closed().await;
    pass(Duration::from_secs(30)).await;
    assert_eq!(server.seen().await.query("resourceVersion"), None);
    begin(&server).listed(71);
    source.expects(&[Call::Listing, Call::Listed]).await;
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

/// A watch from a future version receives nothing; only a list with a minimum version is refused.
#[tokio::test]
async fn e11_the_version_of_an_interrupted_watch_is_checked() {
    let (signals, count) = counting();
    let mut server = Server::plain().await;
    let mut source = Source::slices_of(connected(&server, &signals), Semaphore::MAX_PERMITS);
    drop(listed(&mut server, &mut source, 100).await);
    let deaf = begin(&server);
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
    let feed = begin(&server);
    assert_eq!(server.seen().await.query("sendInitialEvents"), Some("true"));
    feed.listed(60);
    source.expects(&[Call::Listing, Call::Listed]).await;
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn e11_a_version_that_is_known_is_not_checked_again() {
    let (signals, count) = counting();
    let mut server = Server::plain().await;
    let mut source = Source::slices_of(connected(&server, &signals), Semaphore::MAX_PERMITS);
    drop(listed(&mut server, &mut source, 100).await);
    let feed = begin(&server);
    server.seen().await;
    feed.slice("ADDED", "a", 101);
    source.expects(&[put("a", 101)]).await;
    pass(Duration::from_secs(241)).await;
    server.seen().await;
    server.reply(answer(200, wire::list::<EndpointSlice>("EndpointSlice", "102", &[])));
    feed.slice("ADDED", "b", 103);
    source.expects(&[put("b", 103)]).await;
    pass(Duration::from_secs(241)).await;
    feed.slice("ADDED", "c", 104);
    source.expects(&[put("c", 104)]).await;
    server.nothing_more();
    assert_eq!(count.load(Ordering::SeqCst), 0);
}
