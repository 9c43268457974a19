//! Maximum numbers, inspection, and shutdown.

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use super::*;
use crate::server::{EndpointsThread, SPARE_CONNECTIONS};

/// The status that the health service has for this name.
async fn status(health: &mut HealthClient<Channel>, service: &str) -> &'static str {
    let request = HealthCheckRequest { service: service.into() };
    health.check(request).await.expect("is known").into_inner().status().as_str_name()
}

#[tokio::test]
async fn callers_above_the_limit_are_refused_until_a_slot_is_free() {
    let mut source = Source::new(7);
    source.set(service("a", &[]));
    let server = Running::with_most(&source, 2).await;
    let (mut nexts, mut watches) = (server.next().await, server.watch().await);
    let waiting = nexts.next(has((7, 1))).await.expect("is taken");
    let _watching = watches.watch(from((7, 1))).await.expect("is taken");
    ends_with(nexts.next(has((0, 0))).await, Code::ResourceExhausted, "endpoints.max_watchers");
    ends_with(watches.watch(from((0, 0))).await, Code::ResourceExhausted, "2 clients");
    assert_eq!(server.metrics.refused.get(), 2);
    drop(waiting);
    server.served(1).await;
    next(&mut nexts, has((0, 0))).await;
}

/// P9: a client of a loopback TCP port takes no place and no connection at the socket of the node's proxies.
#[tokio::test]
async fn p9_callers_at_a_port_leave_the_slots_of_the_socket_free() {
    let mut source = Source::new(7);
    source.set(service("a", &[]));
    let server = Running::with_most(&source, 2).await;
    let mut others = server.next_over_tcp().await;
    let _taken = [ask(&mut others, has((7, 1))).await, ask(&mut others, has((7, 1))).await];
    ends_with(others.next(has((0, 0))).await, Code::ResourceExhausted, "endpoints.max_watchers");
    // All connections that a listener accepts but one: one that is answered has been accepted. Then more than it
    // accepts: further ones wait at that listener.
    let mut idle = Vec::new();
    for _ in 0..SPARE_CONNECTIONS {
        let mut other = TcpStream::connect(server.tcp).await.expect("connects");
        other.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("is taken");
        other.read_u8().await.expect("is answered");
        idle.push(other);
    }
    for _ in 0..2 {
        idle.push(TcpStream::connect(server.tcp).await.expect("connects"));
    }
    // More than one: a listener reserves a place before it accepts.
    let mut proxies = Vec::new();
    for number in 1..=2 {
        let proxy = tokio::time::timeout(Duration::from_secs(30), server.follow()).await;
        proxies.push(proxy.unwrap_or_else(|_| panic!("proxy {number} is not served among idle clients")));
    }
}

#[tokio::test]
async fn five_hundred_callers_at_once_all_get_every_state() {
    let mut source = Source::new(7);
    source.change(&[("a", Some(large("a", 5000))), ("b", Some(service("b", &["r1"])))]);
    let server = Running::start(&source).await;
    let mut streams = Vec::new();
    for n in 0..500 {
        // Every fifth on a connection of its own with the next four.
        if n % 5 == 0 {
            streams.push((server.watch().await, Vec::new()));
        }
        let (client, of) = streams.last_mut().expect("a connection");
        of.push((client.watch(from((0, 0))).await.expect("is taken").into_inner(), Reader::default()));
    }
    server.served(500).await;
    for round in 1..=3 {
        for (_, of) in &mut streams {
            for (stream, reader) in of {
                let (sync, _) = reader.sync(stream).await;
                assert_eq!(sync.rev, round);
                assert_eq!(reader.draft, source.model);
            }
        }
        source.set(service("b", &[&format!("r{round}")]));
    }
    drop(streams);
    server.served(0).await;
}

#[tokio::test]
async fn the_list_has_watchers_addresses_and_lag() {
    let (mut source, server) = one_service().await;
    let _watching = server.follow().await;
    let mut over_tcp = server.next_over_tcp().await;
    let _waiting = over_tcp.next(has((7, 1))).await.expect("is taken");
    let mut other = server.next().await;
    server.served(2).await;

    let list = server.watchers.list();
    let [watch, next] = &list[..] else { panic!("{list:?}") };
    assert!(watch.id < next.id && watch.since_unix_ms > 0);
    assert!(watch.peer.starts_with(&format!("pid {} (", std::process::id())), "{}", watch.peer);
    assert_eq!((watch.api.as_str(), watch.listener.as_str()), ("Watch", "unix://endpoints.sock"));
    assert_eq!((watch.rev, watch.behind, watch.items), (1, 0, 4));
    assert!(watch.bytes > 0);
    assert!(next.peer.starts_with("127.0.0.1:"), "{}", next.peer);
    assert_eq!((next.api.as_str(), &next.listener), ("Next", &format!("tcp://{}", server.tcp)));
    assert_eq!((next.rev, next.behind, next.items, next.bytes), (1, 0, 0, 0));

    // Published before any call could see it.
    source.newest.rev = 5;
    source.publish();
    assert_eq!(server.watchers.list()[0].behind, 4);
    // What it has is of an instance that is not served any more.
    source.newest.instance_id = 9;
    source.publish();
    let list = server.watchers.list();
    assert_eq!((list[0].rev, list[0].behind), (0, 5));
    super::next(&mut other, has((0, 0))).await;
}

#[tokio::test]
async fn sent_bytes_and_states_are_counted() {
    let (mut source, server) = one_service().await;
    next(&mut server.next().await, has((0, 0))).await;
    let (mut stream, mut reader) = server.follow().await;
    source.set(service("b", &[]));
    reader.sync(&mut stream).await;
    source.new_instance(8);
    reader.sync(&mut stream).await;
    server.served(1).await;
    let mut registry = prometheus_client::registry::Registry::default();
    server.metrics.register(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).expect("encodes");
    let bytes = server.watchers.list()[0].bytes;
    for line in [
        "keelson_endpoints_watchers{api=\"Next\"} 0",
        "keelson_endpoints_watchers{api=\"Watch\"} 1",
        "keelson_endpoints_items_sent_total{api=\"Next\"} 2",
        // Reset, node, a, Sync; b, Sync; Reset, node, a, b, Sync.
        "keelson_endpoints_items_sent_total{api=\"Watch\"} 11",
        &format!("keelson_endpoints_bytes_sent_total{{api=\"Watch\"}} {bytes}"),
        "keelson_endpoints_states_sent_total{api=\"Next\",kind=\"full\"} 1",
        "keelson_endpoints_states_sent_total{api=\"Watch\",kind=\"full\"} 2",
        "keelson_endpoints_states_sent_total{api=\"Watch\",kind=\"delta\"} 1",
        "keelson_endpoints_resets_total 1",
        "keelson_endpoints_refused_total 0",
        // The first state of a call existed before it.
        "keelson_endpoints_send_delay_seconds_count{api=\"Watch\"} 2",
    ] {
        assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
    }
}

#[tokio::test]
async fn at_the_end_calls_get_unavailable_and_no_caller_is_accepted() {
    let (_source, mut server) = one_service().await;
    let mut waiting = ask(&mut server.next().await, has((7, 1))).await;
    let mut watching = server.open(from((7, 1))).await;
    Reader::default().sync(&mut watching).await;
    server.served(2).await;
    server.stop();
    ends_with(waiting.message().await, Code::Unavailable, "the agent is stopping");
    ends_with(watching.message().await, Code::Unavailable, "the agent is stopping");
    (&mut server.serving).await.expect("ends");
    assert_eq!(server.watchers.count().0, 0);
    UnixStream::connect(server.socket()).await.expect_err("no listener");
}

#[tokio::test]
async fn the_end_of_the_feed_ends_calls_and_not_the_server() {
    let (source, server) = one_service().await;
    let mut client = server.next().await;
    let mut waiting = ask(&mut client, has((7, 1))).await;
    server.served(1).await;
    drop(source);
    ends_with(waiting.message().await, Code::Unavailable, "stopping");
    let (answer, _) = next(&mut client, has((0, 0))).await;
    assert_eq!(answer.rev, 1);
}

#[tokio::test]
async fn without_deltas_only_watch_is_disabled() {
    let mut source = Source::new(7);
    source.set(service("a", &["r1"]));
    let server = Running::with(&source, ServerSettings { deltas: false, ..SETTINGS }).await;
    ends_with(
        server.watch().await.watch(from((0, 0))).await,
        Code::Unimplemented,
        "feature gate EndpointDeltas",
    );
    server.watch().await.report(reports::synced("nft", 1, (7, 1))).await.expect("a report is taken");
    assert_eq!(next(&mut server.next().await, has((0, 0))).await.1, source.model);
    // Reports are served under this name.
    status(&mut HealthClient::new(server.channel().await), "keelson.endpoints.v1.Endpoints").await;
}

#[tokio::test]
async fn on_a_thread_of_its_own_it_serves_and_stops() {
    let mut source = Source::new(7);
    source.set(service("a", &["r1"]));
    let folder = tempfile::tempdir().expect("a folder");
    let (listeners, _, _file) = listeners(&folder).await;
    let settings = ServerSettings { max_watchers: 10, ..SETTINGS };
    let server = EndpointsServer::new(source.feed(), settings, ServerMetrics::default());
    let watchers = server.watchers().clone();
    let thread: EndpointsThread = server.start(listeners).expect("starts");
    let socket = folder.path().join("endpoints.sock");
    let mut stream = WatchClient::new(channel(socket.clone(), None).await)
        .watch(from((0, 0)))
        .await
        .expect("is taken")
        .into_inner();
    let mut reader = Reader::default();
    reader.sync(&mut stream).await;
    source.set(service("b", &[]));
    reader.sync(&mut stream).await;
    assert_eq!(reader.draft, source.model);
    assert_eq!(watchers.count(), (1, 10));
    thread.stop(Duration::from_secs(60)).await;
    ends_with(stream.message().await, Code::Unavailable, "the agent is stopping");
    UnixStream::connect(socket).await.expect_err("no listener");
    assert_eq!(watchers.count(), (0, 10));
}

#[tokio::test]
async fn reflection_names_what_is_served_and_health_follows_the_feed() {
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let mut source = Source::new(7);
    let server = Running::start(&source).await;
    let ask = |message_request| ServerReflectionRequest {
        host: String::new(),
        message_request: Some(message_request),
    };
    let questions = futures_util::stream::iter([
        ask(MessageRequest::ListServices(String::new())),
        ask(MessageRequest::FileContainingSymbol("keelson.endpoints.v1.Endpoints".into())),
        ask(MessageRequest::FileContainingSymbol("localnetv1.NextFilter".into())),
    ]);
    let mut reflection = ServerReflectionClient::new(server.channel().await);
    let mut answers = reflection.server_reflection_info(questions).await.expect("is taken").into_inner();
    let mut answer = async || answers.message().await.expect("comes").and_then(|a| a.message_response);
    let Some(MessageResponse::ListServicesResponse(list)) = answer().await else { panic!("no list") };
    let names: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
    for name in ["localnetv1.Endpoints", "keelson.endpoints.v1.Endpoints", "grpc.health.v1.Health"] {
        assert!(names.iter().any(|have| have == name), "{name} in {names:?}");
    }
    assert!(!names.iter().any(|name| name.contains("runtime.v1")), "{names:?}");
    for _ in 0..2 {
        assert!(matches!(answer().await, Some(MessageResponse::FileDescriptorResponse(_))));
    }

    let mut health = HealthClient::new(server.channel().await);
    let served = ["", "localnetv1.Endpoints", "keelson.endpoints.v1.Endpoints"];
    for name in served {
        assert_eq!(status(&mut health, name).await, "NOT_SERVING", "{name}");
    }
    source.set(service("a", &[]));
    for name in served {
        until(async || status(&mut health, name).await == "SERVING").await;
    }
}

/// A client that waits for SERVING before it calls must not wait for ever.
#[tokio::test]
async fn on_demand_the_health_is_serving_until_the_first_call_asks_for_a_state() {
    let mut source = Source::new(7);
    let server = Running::with(&source, ServerSettings { on_demand: true, ..SETTINGS }).await;
    let mut health = HealthClient::new(server.channel().await);
    let mut becomes = async |wanted: &str| until(async || status(&mut health, "").await == wanted).await;
    becomes("SERVING").await;
    assert!(!server.hints.borrow().has_followed, "to ask for health is not to follow");
    let mut stream = server.open(from((0, 0))).await;
    becomes("NOT_SERVING").await;
    assert!(server.hints.borrow().has_followed);
    source.set(service("a", &[]));
    becomes("SERVING").await;
    Reader::default().sync(&mut stream).await;
    // E12: a revision that was not made here.
    assert_eq!(server.hints.borrow().later_revision, None);
    next(&mut server.next().await, has((7, 9))).await;
    assert_eq!(server.hints.borrow().later_revision, Some((7, 9)));
}
