//! `localnetv1.Endpoints/Next`.

use super::*;

#[tokio::test]
async fn nothing_is_sent_before_there_is_a_state_and_then_it_is() {
    let mut source = Source::new(7);
    let server = Running::start(&source).await;
    let mut client = server.next().await;
    let mut waiting = ask(&mut client, has((0, 0))).await;
    let mut knowing = ask(&mut client, has((7, 3))).await;
    server.served(2).await;
    still_waits(&mut waiting).await;
    still_waits(&mut knowing).await;
    source.set(service("a", &["r1"]));
    for stream in [&mut waiting, &mut knowing] {
        let (next, state) = read_state(stream).await;
        assert_eq!((next.instance_id, next.rev), (7, 1));
        assert_eq!(state, source.model);
    }
}

#[tokio::test]
async fn a_full_state_is_next_with_the_node_then_every_service_in_order_then_the_end() {
    let mut source = Source::new(7);
    source.revision(
        &[
            ("b", Some(service("b", &["r1"]))),
            ("a", Some(service("a", &[]))),
            ("c", Some(service("c", &["x"]))),
        ],
        Some(node("n1")),
    );
    let server = Running::start(&source).await;
    let mut over_tcp = server.next_over_tcp().await;
    for client in [&mut server.next().await, &mut over_tcp] {
        let (next, state) = next(client, has((0, 0))).await;
        assert_eq!(
            next,
            NextFilter { instance_id: 7, rev: 1, triggered_unix_ms: 1000, ..Default::default() }
        );
        assert_eq!(state, source.model);
        assert_eq!(state.services.len(), 3);
    }
}

#[tokio::test]
async fn a_current_caller_waits_and_an_outdated_one_gets_the_latest_state() {
    let mut source = Source::new(7);
    source.set(service("a", &["r1"]));
    source.set(service("b", &["r1"]));
    let server = Running::start(&source).await;
    let mut client = server.next().await;
    // Nothing known, older, of another instance, newer than the latest, and a Rev without an instance.
    for known in [(0, 0), (7, 1), (7, 0), (8, 2), (7, 3), (7, u64::MAX), (0, 2)] {
        let (next, state) = next(&mut client, has(known)).await;
        assert_eq!((next.instance_id, next.rev), (7, 2), "{known:?}");
        assert_eq!(state, source.model);
    }
    let mut waiting = ask(&mut client, has((7, 2))).await;
    server.served(1).await;
    still_waits(&mut waiting).await;
    source.change(&[("a", None)]);
    let (next, state) = read_state(&mut waiting).await;
    assert_eq!((next.instance_id, next.rev), (7, 3));
    assert_eq!(state, source.model);
    assert!(!state.services.contains_key("ns/a"));
}

#[tokio::test]
async fn a_waiting_caller_gets_a_new_instance() {
    let (mut source, server) = one_service().await;
    let mut waiting = ask(&mut server.next().await, has((7, 1))).await;
    server.served(1).await;
    still_waits(&mut waiting).await;
    source.new_instance(9);
    let (next, state) = read_state(&mut waiting).await;
    assert_eq!((next.instance_id, next.rev), (9, 1));
    assert_eq!(state, source.model);
}

#[tokio::test]
async fn staleness_marks_answers_and_wakes_no_caller() {
    let (mut source, server) = one_service().await;
    let mut client = server.next().await;
    let mut waiting = ask(&mut client, has((7, 1))).await;
    server.served(1).await;
    source.freshness(Some("the API server cannot be reached"));
    still_waits(&mut waiting).await;
    let (answer, _) = next(&mut client, has((0, 0))).await;
    assert!(answer.stale);
    assert_eq!(answer.stale_reason, "the API server cannot be reached");
    assert_eq!(answer.stale_since_unix_ms, 1);
    source.freshness(None);
    still_waits(&mut waiting).await;
    let (answer, _) = next(&mut client, has((0, 0))).await;
    assert_eq!((answer.stale, answer.stale_reason.as_str(), answer.stale_since_unix_ms), (false, "", 0));
}

/// E20: the same state again, when it has become stale or current.
#[tokio::test(start_paused = true)]
async fn e20_staleness_changes_are_sent_on_request() {
    let (mut source, server) = one_service().await;
    let mut client = server.next().await;
    let mut known = NextFilter { follow_stale: true, ..has((0, 0)) };
    (known, _) = next(&mut client, known).await;
    assert!(known.follow_stale && !known.stale, "an answer is what to ask for next");
    for (reason, since) in [(Some("the API server cannot be reached"), 1), (None, 0)] {
        let mut waiting = ask(&mut client, known.clone()).await;
        server.served(1).await;
        still_waits(&mut waiting).await;
        // A short staleness, such as that of a restart, wakes no caller.
        source.freshness(reason);
        tokio::time::sleep(Duration::from_millis(4_500)).await;
        source.freshness(reason.is_none().then_some("x"));
        tokio::time::sleep(Duration::from_secs(60)).await;
        still_waits(&mut waiting).await;
        source.freshness(reason);
        let (answer, state) = read_state(&mut waiting).await;
        assert_eq!((answer.instance_id, answer.rev), (7, 1));
        assert_eq!(
            (answer.stale, answer.stale_reason.as_str()),
            (reason.is_some(), reason.unwrap_or_default())
        );
        assert_eq!(answer.stale_since_unix_ms, since);
        assert_eq!(state, source.model, "and complete");
        known = answer;
    }
    // Another reason is no change; a caller with the wrong freshness is answered at once.
    source.freshness(Some("one reason"));
    (known, _) = next(&mut client, known).await;
    let mut waiting = ask(&mut client, known.clone()).await;
    source.freshness(Some("another reason"));
    still_waits(&mut waiting).await;
    let wrong = NextFilter { stale: false, ..known };
    let (got, _) = next(&mut client, wrong).await;
    assert_eq!((got.stale, got.stale_reason.as_str()), (true, "another reason"));
}

#[tokio::test]
async fn only_endpoints_that_meet_the_conditions_come_and_every_service() {
    let mut source = Source::new(7);
    source.change(&[("a", Some(service("a", &["r1", "x", "r2"]))), ("b", Some(service("b", &["x"])))]);
    let server = Running::start(&source).await;
    let mut client = server.next().await;
    let asked = NextFilter { required_endpoint_conditions: only_ready(), ..NextFilter::default() };
    let (answer, state) = next(&mut client, asked).await;
    assert_eq!(state.services["ns/a"], service("a", &["r1", "r2"]));
    assert_eq!(state.services["ns/b"], service("b", &[]));
    assert_eq!(answer.required_endpoint_conditions, only_ready(), "an answer is what to ask for next");
    // Required conditions that are all false require nothing.
    let asked =
        NextFilter { required_endpoint_conditions: Some(Default::default()), ..NextFilter::default() };
    assert_eq!(next(&mut client, asked).await.1, source.model);
    // A request that repeats the answer waits.
    let mut waiting = ask(&mut client, answer).await;
    still_waits(&mut waiting).await;
}

#[tokio::test]
async fn a_deadline_ends_the_wait_on_the_servers_side() {
    let (_source, server) = one_service().await;
    let mut request = tonic::Request::new(has((7, 1)));
    // The client, too, gives up after it, if the call has not begun.
    request.set_timeout(Duration::from_secs(1));
    let mut stream = server.next().await.next(request).await.expect("is taken").into_inner();
    ends_with(stream.message().await, Code::DeadlineExceeded, "");
    server.served(0).await;
}

#[tokio::test]
async fn an_answer_is_one_snapshot_whatever_is_published_meanwhile() {
    let mut source = Source::new(7);
    source.set_large(100, 20_000);
    let first = source.model.clone();
    let server = Running::start(&source).await;
    // Two megabytes exceed the window: most of it is not read from the snapshot yet.
    let mut client = NextClient::new(channel(server.socket(), Some(65_535)).await);
    let mut stream = ask(&mut client, has((0, 0))).await;
    let opening = stream.message().await.expect("comes").expect("an item");
    assert_eq!(opening.next.map(|next| next.rev), Some(1));
    source.set_large(100, 10);
    let names: Vec<String> = (0..100).map(|n| format!("s{n:03}")).collect();
    source.change(&names.iter().map(|name| (name.as_str(), None)).collect::<Vec<_>>());
    let mut got = BTreeMap::new();
    while let Some(item) = stream.message().await.expect("comes") {
        let service = item.endpoints.expect("a Service");
        let twice = got.insert(format!("ns/{}", service.name), service);
        assert!(twice.is_none());
    }
    assert!(got == first.services, "a mixture");
    let (_, last) = next(&mut client, has((7, 1))).await;
    assert_eq!(last, source.model);
    assert!(last.services.is_empty());
}
