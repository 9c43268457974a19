//! `Client::next` with servers that fail in every way.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use common::{Call, LONG, Server, place, started};
use keelson_client::{
    Client, Options, State,
    localnetv1::{NextFilter, NextItem},
};
use tokio::{io::AsyncWriteExt as _, net::UnixListener, time::timeout};

/// Records the errors that a client reports.
fn recorded_errors(client: &mut Client) -> Arc<Mutex<Vec<String>>> {
    let errors = Arc::new(Mutex::new(Vec::new()));
    let sink = errors.clone();
    client.on_error(move |report| sink.lock().unwrap().push(report.error.to_string()));
    errors
}

async fn first_error(errors: &Mutex<Vec<String>>) {
    while errors.lock().unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn contents(state: &State) -> String {
    let services = state.services().iter().map(|raw| raw.decode().unwrap());
    let services = services.map(|service| format!("{}={}", service.name, service.health_check_node_port));
    let position = state.position();
    format!("{}@{} {}", position.instance_id, position.rev, services.collect::<Vec<_>>().join(" "))
}

async fn next(client: &mut Client) -> String {
    contents(&timeout(LONG, client.next()).await.expect("a state comes").unwrap())
}

#[tokio::test]
async fn states_follow_each_other() {
    let (mut server, options) = started();
    let mut client = Client::new(options);
    let serve = async {
        server.expect("Next", 0, 0).await.state(7, 1, &[("a", 1), ("b", 1)]).await;
        server.expect("Next", 7, 1).await.state(7, 4, &[("c", 1), ("b", 2)]).await;
    };
    let follow = async {
        let first = client.next().await.unwrap();
        assert_eq!(first.node().unwrap().name, "node");
        [contents(&first), next(&mut client).await]
    };
    let ((), states) = tokio::join!(serve, follow);
    assert_eq!(states, ["7@1 a=1 b=1", "7@4 b=2 c=1"]);
    assert_eq!((client.position().instance_id, client.position().rev), (7, 4));
}

/// E20: the request says what the client knows, so that the server can answer a change of staleness alone.
#[tokio::test]
async fn e20_a_state_that_becomes_stale_comes_again() {
    let (mut server, options) = started();
    let mut client = Client::new(options);
    let errors = recorded_errors(&mut client);
    let serve = async {
        for (rev, known, stale) in [(0, false, false), (1, false, true), (1, true, false)] {
            let call = server.call().await;
            assert_eq!((call.rev, call.follow_stale), (rev, Some(known)));
            let next = NextFilter { instance_id: 7, rev: 1, stale, ..NextFilter::default() };
            call.send(&NextItem { next: Some(next), ..NextItem::default() }).await;
            call.item("a", 1).await;
            call.status(0).await;
        }
    };
    let follow = async {
        for stale in [false, true, false] {
            assert_eq!(next(&mut client).await, "7@1 a=1");
            assert_eq!(client.position().stale, stale);
        }
    };
    tokio::join!(serve, follow);
    assert_eq!(*errors.lock().unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn the_request_has_the_start_position_and_the_conditions() {
    let (mut server, options) = started();
    let required = keelson_client::localnetv1::EndpointConditions { selected: true, ..Default::default() };
    let options =
        Options { instance_id: u64::MAX, rev: 12, required_endpoint_conditions: Some(required), ..options };
    let mut client = Client::new(options);
    let serve = async {
        let call = server.expect("Next", u64::MAX, 12).await;
        assert_eq!(call.required, Some(required));
        call.state(u64::MAX, 13, &[]).await;
    };
    let ((), state) = tokio::join!(serve, next(&mut client));
    assert_eq!(state, format!("{}@13 ", u64::MAX));
}

#[tokio::test]
async fn an_absent_server_is_retried() {
    let (_folder, path, options) = place();
    let mut client = Client::new(options);
    let errors = recorded_errors(&mut client);
    let serve = async {
        first_error(&errors).await;
        let mut server = Server::start(path);
        server.expect("Next", 0, 0).await.state(7, 1, &[("a", 1)]).await;
        server
    };
    let (_server, state) = tokio::join!(serve, next(&mut client));
    assert_eq!(state, "7@1 a=1");
    assert!(errors.lock().unwrap()[0].contains("the socket does not exist; check that the agent is running"));
}

/// Checks the client after `fail` answers its second request with an incomplete state.
async fn recovers_from(fail: impl AsyncFnOnce(Call), options: impl FnOnce(Options) -> Options, said: &str) {
    let (mut server, defaults) = started();
    let mut client = Client::new(options(defaults));
    let errors = recorded_errors(&mut client);
    let serve = async {
        server.expect("Next", 0, 0).await.state(7, 1, &[("a", 1)]).await;
        fail(server.expect("Next", 7, 1).await).await;
        server.expect("Next", 7, 1).await.state(7, 3, &[("a", 3)]).await;
    };
    let follow = async { [next(&mut client).await, next(&mut client).await] };
    let ((), states) = tokio::join!(serve, follow);
    assert_eq!(states, ["7@1 a=1", "7@3 a=3"]);
    let errors = errors.lock().unwrap();
    assert!(errors.len() == 1 && errors[0].contains(said), "{errors:?}");
}

async fn recovers(fail: impl AsyncFnOnce(Call), said: &str) {
    recovers_from(fail, |options| options, said).await;
}

#[tokio::test]
async fn an_incomplete_state_is_discarded() {
    const SAID: &str = "in the middle of a state";
    let fails = async |call: Call| {
        call.partial(7, 2, &[("a", 2)]).await;
        call.status(14).await;
    };
    recovers(fails, SAID).await;
    let ends_without_a_status = async |call: Call| call.partial(7, 2, &[("a", 2)]).await;
    recovers(ends_without_a_status, SAID).await;
    let truncated_message = async |call: Call| {
        call.next(7, 2).await;
        call.raw(&[0, 0, 0, 0, 100, 18, 98][..]).await;
    };
    recovers(truncated_message, SAID).await;
}

#[tokio::test]
async fn a_server_that_hangs_in_the_middle_is_left() {
    let fail = async |call: Call| {
        call.partial(7, 2, &[("a", 2)]).await;
        timeout(LONG, call.closed()).await.expect("the client leaves");
    };
    let options = |options| Options { stall_timeout: Duration::from_millis(300), ..options };
    recovers_from(fail, options, "then nothing for 300ms").await;
}

#[tokio::test]
async fn invalid_bytes_are_discarded() {
    recovers(async |call: Call| assert!(call.bytes(b"\xff\xff\xff").await), "an invalid state").await;
    let not_first = async |call: Call| call.item("a", 2).await;
    recovers(not_first, "has no position for the next request").await;
    let nameless = async |call: Call| call.partial(7, 2, &[("", 2)]).await;
    recovers(nameless, "has no name").await;
    let twice = async |call: Call| call.state(7, 2, &[("a", 1), ("b", 1), ("a", 2)]).await;
    recovers(twice, "duplicate Service ns/a").await;
    let two_states = async |call: Call| {
        call.next(7, 2).await;
        call.next(7, 3).await;
    };
    recovers(two_states, "two states in one response").await;
    recovers(async |call: Call| call.status(0).await, "ended the stream without sending a state").await;
    let the_same = async |call: Call| call.state(7, 1, &[("a", 1)]).await;
    recovers(the_same, "the state that the request excluded").await;
}

#[tokio::test]
async fn a_refusal_is_repeated_until_it_is_none() {
    recovers(async |call: Call| call.status(8).await, "has been exhausted").await;
    recovers(async |call: Call| call.status(12).await, "check the target").await;
}

#[tokio::test]
async fn a_message_larger_than_allowed_says_which_flag_helps() {
    let fail = async |call: Call| call.partial(7, 2, &[(&"x".repeat(2000), 2)]).await;
    recovers_from(fail, |options| Options { max_msg_size: 1024, ..options }, "--max-msg-size").await;
}

#[tokio::test]
async fn a_service_of_five_thousand_endpoints_passes() {
    use keelson_client::localnetv1 as local;
    let (mut server, options) = started();
    let mut client = Client::new(options);
    let mut large = common::service("large", 1);
    let endpoint = |number: u32| local::Endpoint {
        hostname: format!("pod-{number}.{}", "x".repeat(2000)),
        i_ps: Some(local::IpSet { v4: vec!["10.0.0.1".into()], ..Default::default() }),
        ..Default::default()
    };
    large.endpoints = (0..5000).map(endpoint).collect();
    let serve = async {
        let call = server.call().await;
        call.next(7, 1).await;
        call.send(&local::NextItem { endpoints: Some(large.clone()), ..Default::default() }).await;
        call.status(0).await;
    };
    let ((), state) = tokio::join!(serve, client.next());
    assert_eq!(state.unwrap().services()[0].decode().unwrap(), large);
}

#[tokio::test]
async fn a_connection_that_breaks_in_the_middle_is_made_again() {
    let (_folder, path, options) = place();
    let mut client = Client::new(options);
    let errors = recorded_errors(&mut client);
    let serve = async {
        let mut server = Server::start(path);
        let call = server.expect("Next", 0, 0).await;
        call.partial(7, 1, &[("a", 1)]).await;
        server.restart();
        server.expect("Next", 0, 0).await.state(8, 5, &[("b", 1)]).await;
        server
    };
    let (_server, state) = tokio::join!(serve, next(&mut client));
    assert_eq!(state, "8@5 b=1");
    assert!(errors.lock().unwrap()[0].contains("the connection was closed"), "{errors:?}");
}

#[tokio::test]
async fn a_server_that_does_not_speak_grpc_is_retried() {
    let (_folder, path, options) = place();
    let mut client = Client::new(options);
    let errors = recorded_errors(&mut client);
    let serve = async {
        let listener = UnixListener::bind(&path).unwrap();
        while errors.lock().unwrap().is_empty() {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(listener);
        let mut server = Server::start(path);
        server.expect("Next", 0, 0).await.state(7, 1, &[]).await;
        server
    };
    let (_server, state) = tokio::join!(serve, next(&mut client));
    assert_eq!(state, "7@1 ");
}

#[tokio::test]
async fn a_server_that_is_dead_behind_an_open_connection_is_noticed_by_pings() {
    let (_folder, path, options) = place();
    let mut client = Client::new(Options { keep_alive: Duration::from_millis(50), ..options });
    let errors = recorded_errors(&mut client);
    let listener = UnixListener::bind(&path).unwrap();
    // Accepted, and never read from.
    let silent = async {
        let (stream, _) = listener.accept().await.unwrap();
        let again = listener.accept().await.unwrap();
        (stream, again)
    };
    tokio::select! {
        state = client.next() => panic!("{state:?}"),
        again = timeout(LONG, silent) => drop(again.expect("it connects again")),
    }
    assert_eq!(errors.lock().unwrap().len(), 1, "{errors:?}");
}

#[tokio::test]
async fn cancellation_ends_any_wait() {
    // While it waits for a server, for a state, and with nothing to wait for.
    let (_folder, path, options) = place();
    let mut client = Client::new(Options { error_delay: Duration::from_secs(3600), ..options.clone() });
    let token = client.cancellation();
    let errors = recorded_errors(&mut client);
    let cancel = async {
        first_error(&errors).await;
        token.cancel();
    };
    let ((), state) = tokio::join!(cancel, timeout(LONG, client.next()));
    assert_eq!(state.unwrap(), None);
    assert_eq!(timeout(LONG, client.next()).await.unwrap(), None, "for good");

    let mut server = Server::start(path);
    let mut client = Client::new(options);
    let token = client.cancellation();
    let cancel = async {
        let call = server.call().await;
        call.next(7, 1).await;
        token.cancel();
        timeout(LONG, call.closed()).await.expect("the client leaves");
    };
    let ((), state) = tokio::join!(cancel, timeout(LONG, client.next()));
    assert_eq!(state.unwrap(), None);
}

#[tokio::test]
async fn a_dropped_next_is_repeated() {
    let (mut server, options) = started();
    let mut client = Client::new(options);
    let half = async {
        let call = server.call().await;
        call.partial(7, 1, &[("a", 1)]).await;
    };
    tokio::select! {
        () = half => {}
        state = client.next() => panic!("{state:?}"),
    }
    let serve = async { server.expect("Next", 0, 0).await.state(7, 2, &[("a", 2)]).await };
    let ((), state) = tokio::join!(serve, next(&mut client));
    assert_eq!(state, "7@2 a=2");
}
