//! `keelson.endpoints.v1.Endpoints/Watch`.

use super::*;

#[tokio::test]
async fn a_new_caller_gets_reset_node_everything_sync_and_then_only_differences() {
    let mut source = Source::new(7);
    source.revision(
        &[("a", Some(service("a", &["r1"]))), ("b", Some(service("b", &["r1"])))],
        Some(node("n1")),
    );
    let server = Running::start(&source).await;
    let mut stream = server.open(from((0, 0))).await;
    let mut reader = Reader::default();
    let (sync, seen) = reader.sync(&mut stream).await;
    assert_eq!(seen, ["reset", "node", "+ns/a", "+ns/b"]);
    assert_eq!(sync, Sync { instance_id: 7, rev: 1, triggered_unix_ms: 1000, ..Sync::default() });
    assert_eq!(reader.draft, source.model);

    source.change(&[("a", Some(service("a", &["r1", "r2"]))), ("b", None)]);
    let (sync, seen) = reader.sync(&mut stream).await;
    assert_eq!(seen, ["+ns/a", "-ns/b"]);
    assert_eq!((sync.instance_id, sync.rev, sync.triggered_unix_ms), (7, 2, 2000));
    assert_eq!(reader.draft, source.model);

    source.revision(&[], Some(node("n1 in zone b")));
    let (sync, seen) = reader.sync(&mut stream).await;
    assert_eq!((seen, sync.rev), (vec!["node".to_owned()], 3));
    assert_eq!(reader.draft, source.model);
    still_waits(&mut stream).await;
}

#[tokio::test]
async fn nothing_is_sent_before_there_is_a_state() {
    let mut source = Source::new(7);
    let server = Running::start(&source).await;
    let mut stream = server.open(from((0, 0))).await;
    server.served(1).await;
    still_waits(&mut stream).await;
    source.set(service("a", &[]));
    let mut reader = Reader::default();
    reader.sync(&mut stream).await;
    assert_eq!(reader.draft, source.model);
}

#[tokio::test]
async fn a_returning_caller_gets_the_changes_since_its_revision() {
    let mut source = Source::new(7);
    source.revision(&[("a", Some(service("a", &[]))), ("b", Some(service("b", &[])))], Some(node("n1")));
    source.set(service("c", &[]));
    source.change(&[("b", None), ("a", Some(service("a", &["r1"])))]);
    source.revision(&[], Some(node("n2")));
    let server = Running::start(&source).await;
    for (known, expect) in [
        ((7, 4), vec![]),
        ((7, 3), vec!["node"]),
        ((7, 2), vec!["node", "+ns/a", "-ns/b"]),
        ((7, 1), vec!["node", "+ns/a", "-ns/b", "+ns/c"]),
        // All that ever existed, including deletions of Services that the caller never had.
        ((7, 0), vec!["node", "+ns/a", "-ns/b", "+ns/c"]),
        // Not known: another instance, none, a future revision.
        ((8, 4), vec!["reset", "node", "+ns/a", "+ns/c"]),
        ((0, 4), vec!["reset", "node", "+ns/a", "+ns/c"]),
        ((7, 5), vec!["reset", "node", "+ns/a", "+ns/c"]),
        ((7, u64::MAX), vec!["reset", "node", "+ns/a", "+ns/c"]),
    ] {
        let (sync, seen) = Reader::default().sync(&mut server.open(from(known)).await).await;
        assert_eq!(seen, expect, "{known:?}");
        assert_eq!((sync.instance_id, sync.rev), (7, 4));
        assert_eq!(
            sync.triggered_unix_ms,
            if known == (7, 4) { 0 } else { 4000 },
            "sent with the resulting state"
        );
    }
    assert_eq!(server.metrics.resets.get(), 3, "but the caller that knew nothing");
}

#[tokio::test]
async fn a_history_that_is_too_short_means_reset() {
    let mut source = Source::with_history(7, History::new(2, 100));
    for n in 1..=5 {
        source.set(service(&format!("s{n}"), &[]));
    }
    let server = Running::start(&source).await;
    let (_, seen) = Reader::default().sync(&mut server.open(from((7, 3))).await).await;
    assert_eq!(seen, ["+ns/s4", "+ns/s5"]);
    let (_, seen) = Reader::default().sync(&mut server.open(from((7, 2))).await).await;
    assert_eq!(seen, ["reset", "node", "+ns/s1", "+ns/s2", "+ns/s3", "+ns/s4", "+ns/s5"]);
}

#[tokio::test]
async fn a_history_of_another_instance_than_the_state_is_not_used() {
    let mut source = Source::new(7);
    source.set(service("a", &[]));
    source.set(service("b", &[]));
    let server = Running::start(&source).await;
    // The publisher is about to publish instance 8.
    source.history.restart(8, 0);
    for known in [(7, 1), (8, 1)] {
        let (sync, seen) = Reader::default().sync(&mut server.open(from(known)).await).await;
        assert_eq!(seen, ["reset", "node", "+ns/a", "+ns/b"], "{known:?}");
        assert_eq!((sync.instance_id, sync.rev), (7, 2));
    }
}

#[tokio::test]
async fn a_change_of_freshness_alone_is_a_sync_alone() {
    let (mut source, server) = one_service().await;
    let (mut stream, mut reader) = server.follow().await;
    for reason in [Some("no API server"), Some("no rights"), None] {
        source.freshness(reason);
        let (sync, seen) = reader.sync(&mut stream).await;
        assert!(seen.is_empty(), "{seen:?}");
        let stale_reason = reason.unwrap_or_default().to_owned();
        let expect = Sync {
            instance_id: 7,
            rev: 1,
            stale: reason.is_some(),
            stale_reason,
            triggered_unix_ms: 0,
            stale_since_unix_ms: reason.is_some().into(),
        };
        assert_eq!(sync, expect);
    }
    // The same again is nothing new.
    source.publish();
    still_waits(&mut stream).await;
}

#[tokio::test]
async fn another_instance_in_the_middle_of_a_stream_is_a_reset() {
    let mut source = Source::new(7);
    source.revision(&[("a", Some(service("a", &[])))], Some(node("n1")));
    let server = Running::start(&source).await;
    let (mut stream, mut reader) = server.follow().await;
    source.new_instance(8);
    let (sync, seen) = reader.sync(&mut stream).await;
    assert_eq!(seen, ["reset", "node", "+ns/a"]);
    assert_eq!((sync.instance_id, sync.rev), (8, 1));
    assert_eq!(reader.draft, source.model);
    source.set(service("b", &[]));
    let (sync, seen) = reader.sync(&mut stream).await;
    assert_eq!((seen, sync.rev), (vec!["+ns/b".to_owned()], 2));
}

#[tokio::test]
async fn a_slow_caller_skips_states_but_no_change() {
    let mut source = Source::new(7);
    source.set_large(100, 20_000);
    let first = source.model.clone();
    let server = Running::start(&source).await;
    // Two megabytes exceed the window, so the first state is not sent completely before the others are published.
    let mut client = WatchClient::new(channel(server.socket(), Some(65_535)).await);
    let mut stream = client.watch(from((0, 0))).await.expect("is taken").into_inner();
    let opening = stream.message().await.expect("comes").expect("an item");
    for rev in 2..=60 {
        let name = format!("s{:03}", rev % 7);
        source.change(&[(&name, Some(service(&name, &[&format!("r{rev}")])))]);
    }
    source.change(&[("s050", None)]);
    let mut reader = Reader::default();
    assert_eq!(reader.take(opening), None);
    let (sync, _) = reader.sync(&mut stream).await;
    assert_eq!(sync.rev, 1);
    assert!(reader.draft == first, "a mixture");
    let (sync, seen) = reader.sync(&mut stream).await;
    assert_eq!(sync.rev, 61, "the newest, and none of those between");
    assert_eq!(seen.len(), 8, "{seen:?}");
    assert!(reader.draft == source.model);
}

#[tokio::test]
async fn conditions_hold_for_the_first_state_and_for_changes() {
    let mut source = Source::new(7);
    source.set(service("a", &["r1", "x"]));
    let server = Running::start(&source).await;
    let request = WatchRequest { required_endpoint_conditions: only_ready(), ..WatchRequest::default() };
    let mut stream = server.open(request).await;
    let mut reader = Reader::default();
    reader.sync(&mut stream).await;
    assert_eq!(reader.draft.services["ns/a"], service("a", &["r1"]));
    source.set(service("a", &["y", "x"]));
    reader.sync(&mut stream).await;
    assert_eq!(reader.draft.services["ns/a"], service("a", &[]), "a Service stays without endpoints");
}
