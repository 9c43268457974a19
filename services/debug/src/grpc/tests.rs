//! The debug API over gRPC: the methods without a socket on paused time, and the server on a socket.

mod inspection;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures_util::StreamExt as _;
use hyper_util::rt::TokioIo;
use keelson_proto::{
    debug::{self as pb, debug_client::DebugClient, debug_server::Debug as _, set_limit_request::To},
    node::{self as node_pb, node_client::NodeClient, node_server::Node as _},
};
use keelson_serve::grpc::Peer;
use tempfile::TempDir;
use tokio::{net::UnixStream, time::Instant};
use tonic::{
    Code, Request, Status,
    transport::{Channel, Endpoint},
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::{v1, v1alpha};

use super::{node::NodeService, service::DebugService, *};
use crate::{
    ConditionError, ViewError,
    fake::{Fake, check},
};

fn service(fake: &Fake) -> (DebugService<Fake>, CancellationToken) {
    let stop = CancellationToken::new();
    (DebugService::new(fake.clone(), stop.clone()), stop)
}

fn connected<T>(message: T) -> Request<T> {
    let (stream, _) = UnixStream::pair().expect("a pair of sockets");
    let mut request = Request::new(message);
    request.extensions_mut().insert(Arc::new(Peer::of_unix(&stream, "test".into())));
    request
}

/// A request with or without a known user.
fn request<T>(has_peer: bool, message: T) -> Request<T> {
    if has_peer { connected(message) } else { Request::new(message) }
}

/// I12: a user with read access only, and a connection without a known user, change nothing; reading needs no right.
#[tokio::test]
async fn changes_need_a_permitted_peer() {
    let fake = Fake::new();
    let (service, _stop) = service(&fake);
    let node = NodeService::new(fake.clone());
    let limit = pb::SetLimitRequest { to: Some(To::MaxParallelImagePulls(5)) };
    let clear = node_pb::ClearConditionRequest { r#type: "KernelDeadlock".into() };
    for (may_change, peer) in [(false, true), (true, false), (true, true)] {
        fake.script().may_change = may_change;
        let errors = [
            service.set_limit(request(peer, limit)).await.err(),
            node.set_condition(request(peer, condition())).await.err(),
            node.clear_condition(request(peer, clear.clone())).await.err(),
        ];
        let allowed = may_change && peer;
        let expected = (!allowed).then_some(Code::PermissionDenied);
        assert_eq!(errors.map(|error| error.map(|status| status.code())), [expected; 3]);
        assert_eq!(fake.script().changes(), [usize::from(allowed); 3]);
        service.list_pulls(Request::new(pb::ListPullsRequest { max_queued: 0 })).await.expect("looking");
    }
}

fn watch(max_queued: u32, interval_ms: u32) -> Request<pb::WatchPullsRequest> {
    Request::new(pb::WatchPullsRequest { max_queued, interval_ms })
}

#[tokio::test]
async fn actors() {
    let (service, _stop) = service(&Fake::new());
    let get =
        async |name: &str| service.get_actor(Request::new(pb::GetActorRequest { name: name.into() })).await;
    let actor = get("PullCoordinator").await.unwrap().into_inner();
    assert_eq!((actor.state_json.as_str(), actor.events.len()), (r#"{"limit":3}"#, 1));
    for name in ["", "nobody"] {
        let status = get(name).await.unwrap_err();
        assert_eq!(status.code(), Code::NotFound);
        assert!(status.message().ends_with("the actors are: PullCoordinator, RuntimeClient"), "{status}");
    }
    let all = service.list_actors(Request::new(pb::ListActorsRequest {})).await.unwrap().into_inner();
    assert_eq!(all.actors.len(), 1);
}

#[tokio::test]
async fn version_readiness_storage_and_config() {
    let (service, _stop) = service(&Fake::new());
    let version = service.get_version(Request::new(pb::GetVersionRequest {})).await.unwrap().into_inner();
    assert_eq!(version.node_name, "n1");
    let ready = service.get_readiness(Request::new(pb::GetReadinessRequest {})).await.unwrap().into_inner();
    assert_eq!((ready.ready, ready.checks.len()), (true, 2));
    let storage = service.get_storage(Request::new(pb::GetStorageRequest {})).await.unwrap().into_inner();
    assert_eq!(storage.backend, "memory");
    let config = service.get_config(Request::new(pb::GetConfigRequest {})).await.unwrap().into_inner();
    assert_eq!(config.settings[0].value, "\"wait\"");
}

#[tokio::test]
async fn readiness_has_reasons_and_times() {
    let fake = Fake::new();
    fake.script().ready[1] = crate::Check { since_unix_ms: 7_000, ..check("runtime", false, "gone") };
    let (service, _stop) = service(&fake);
    let ready = service.get_readiness(Request::new(pb::GetReadinessRequest {})).await.unwrap().into_inner();
    let [store, runtime] = ready.checks.as_slice() else { panic!("{ready:?}") };
    assert!(!ready.ready && store.ok && !runtime.ok);
    assert_eq!((&*runtime.name, &*runtime.message, runtime.since_unix_ms), ("runtime", "gone", 7_000));
}

fn condition() -> node_pb::SetConditionRequest {
    node_pb::SetConditionRequest {
        r#type: "KernelDeadlock".into(),
        status: "False".into(),
        reason: "KernelHasNoDeadlock".into(),
        message: "the kernel works".into(),
        ttl_ms: 300_000,
    }
}

#[tokio::test]
async fn conditions_are_passed_on_unchanged() {
    let fake = Fake::new();
    let node = NodeService::new(fake.clone());
    for changed in [true, false] {
        fake.script().condition = Ok(changed);
        let answer = node.set_condition(connected(condition())).await.unwrap().into_inner();
        assert_eq!(answer.changed, changed);
    }
    assert_eq!(fake.script().conditions, [condition(), condition()]);
    let clear = node_pb::ClearConditionRequest { r#type: "KernelDeadlock".into() };
    node.clear_condition(connected(clear)).await.unwrap();
    assert_eq!(fake.script().cleared, ["KernelDeadlock"]);
}

#[tokio::test]
async fn refused_conditions_have_the_status_that_the_proto_file_names() {
    let fake = Fake::new();
    let node = NodeService::new(fake.clone());
    for (error, code) in [
        (ConditionError::Invalid("a".into()), Code::InvalidArgument),
        (ConditionError::NotYours("b".into()), Code::PermissionDenied),
        (ConditionError::TooMany("c".into()), Code::ResourceExhausted),
        (ConditionError::NotSet("d".into()), Code::NotFound),
        (ConditionError::Unavailable("e".into()), Code::Unavailable),
    ] {
        fake.script().condition = Err(error.clone());
        let set = node.set_condition(connected(condition())).await.unwrap_err();
        let clear = node.clear_condition(connected(node_pb::ClearConditionRequest::default())).await;
        for status in [set, clear.unwrap_err()] {
            assert_eq!((status.code(), status.message()), (code, error.to_string().as_str()));
        }
    }
}

#[tokio::test]
async fn heartbeats_and_why_there_are_none() {
    let fake = Fake::new();
    let node = NodeService::new(fake.clone());
    let get = async || node.get_heartbeats(Request::new(node_pb::GetHeartbeatsRequest {})).await;
    assert_eq!(get().await.unwrap().into_inner(), crate::fake::heartbeats());
    fake.script().heartbeats = Err(ViewError::Busy("full".into()));
    let status = get().await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::ResourceExhausted, "full"));
}

#[tokio::test(start_paused = true)]
async fn a_stuck_reporter_is_unavailable() {
    let fake = Fake::new();
    fake.script().stuck = true;
    let node = NodeService::new(fake.clone());
    let set = node.set_condition(connected(condition())).await.unwrap_err();
    let clear = node.clear_condition(connected(node_pb::ClearConditionRequest::default())).await;
    let get = node.get_heartbeats(Request::new(node_pb::GetHeartbeatsRequest {})).await;
    for status in [set, clear.unwrap_err(), get.unwrap_err()] {
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("did not answer within 8 s"), "{status}");
    }
}

#[tokio::test]
async fn valid_limits_are_passed_on() {
    let fake = Fake::new();
    let (service, _stop) = service(&fake);
    let set = async |to| service.set_limit(connected(pb::SetLimitRequest { to })).await;
    assert_eq!(set(Some(To::MaxParallelImagePulls(5))).await.unwrap().into_inner(), crate::fake::limit());
    set(Some(To::MaxParallelImagePulls(0))).await.unwrap();
    set(Some(To::Reset(true))).await.unwrap();
    assert_eq!(fake.script().set, [Some(5), Some(0), None]);
    for nonsense in [None, Some(To::Reset(false))] {
        assert_eq!(set(nonsense).await.unwrap_err().code(), Code::InvalidArgument);
    }
    assert_eq!(fake.script().set.len(), 3);
    fake.script().limit = Err(ViewError::Unavailable("the store refused".into()));
    let status = set(Some(To::Reset(true))).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "the store refused"));
}

#[tokio::test]
async fn pulls_and_bad_requests() {
    let fake = Fake::new();
    let (service, _stop) = service(&fake);
    let list = async |max_queued| service.list_pulls(Request::new(pb::ListPullsRequest { max_queued })).await;
    assert_eq!(list(0).await.unwrap().into_inner(), crate::fake::pulls());
    list(10_000).await.unwrap();
    assert_eq!(fake.script().asked, [100, 10_000]);
    assert_eq!(list(10_001).await.unwrap_err().code(), Code::InvalidArgument);
    for request in [watch(10_001, 0), watch(0, 99), watch(0, 3_600_001)] {
        let status = service.watch_pulls(request).await.err().unwrap();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    }
    for (error, code) in [
        (ViewError::Busy("a".into()), Code::ResourceExhausted),
        (ViewError::Unavailable("b".into()), Code::Unavailable),
        (ViewError::Invalid("c".into()), Code::InvalidArgument),
    ] {
        fake.script().pulls = Err(error.clone());
        let status = list(0).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (code, error.to_string().as_str()));
    }
}

#[tokio::test(start_paused = true)]
async fn a_watcher_gets_the_newest_state_at_its_own_pace() {
    let fake = Fake::new();
    let (service, stop) = service(&fake);
    let mut lists = service.watch_pulls(watch(7, 100)).await.unwrap().into_inner();
    let start = Instant::now();
    assert_eq!(lists.next().await.unwrap().unwrap().running, 1);
    assert_eq!(start.elapsed(), Duration::ZERO);
    for running in 2..=50 {
        fake.run(running);
    }
    assert_eq!(lists.next().await.unwrap().unwrap().running, 50);
    assert_eq!(start.elapsed(), Duration::from_millis(100));
    // A watcher that does not read for an hour then gets one list and not a backlog.
    for running in 51..=3_650 {
        tokio::time::advance(Duration::from_secs(1)).await;
        fake.run(running);
    }
    assert_eq!(lists.next().await.unwrap().unwrap().running, 3_650);
    assert_eq!(fake.script().asked, [7, 7, 7]);
    // Changes that do not affect this watcher are not sent.
    fake.bump();
    assert!(tokio::time::timeout(Duration::from_secs(60), lists.next()).await.is_err());
    stop.cancel();
    let last = lists.next().await.unwrap().unwrap_err();
    assert_eq!(last.code(), Code::Unavailable);
    assert!(lists.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_watch_survives_busy_and_ends_with_an_error() {
    let fake = Fake::new();
    let (service, _stop) = service(&fake);
    let mut lists = service.watch_pulls(watch(0, 0)).await.unwrap().into_inner();
    fake.script().pulls = Err(ViewError::Busy("full".into()));
    let waiting = tokio::spawn(async move { (lists.next().await, lists) });
    tokio::time::sleep(Duration::from_millis(10_100)).await;
    assert_eq!(fake.script().asked.len(), 21, "twice a second, not in a loop");
    fake.script().pulls = Ok(crate::fake::pulls());
    let (list, mut lists) = waiting.await.unwrap();
    assert_eq!(list.unwrap().unwrap().running, 1);
    fake.script().pulls = Err(ViewError::Unavailable("restarting".into()));
    fake.bump();
    assert_eq!(lists.next().await.unwrap().unwrap_err().message(), "restarting");
    assert!(lists.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_stuck_agent_is_unavailable() {
    let fake = Fake::new();
    fake.script().stuck = true;
    let (service, _stop) = service(&fake);
    let status = service.get_version(Request::new(pb::GetVersionRequest {})).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    let mut lists = service.watch_pulls(watch(0, 0)).await.unwrap().into_inner();
    assert_eq!(lists.next().await.unwrap().unwrap_err().code(), Code::Unavailable);
}

struct Served {
    _folder: TempDir,
    socket: PathBuf,
    stop: tokio::sync::oneshot::Sender<()>,
    server: tokio::task::JoinHandle<Result<(), ServeError>>,
}

impl Served {
    fn start(fake: &Fake) -> Self {
        let folder = TempDir::new().unwrap();
        let socket = folder.path().join("debug.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let fake = fake.clone();
        let server = tokio::spawn(async move {
            serve_grpc(listener, fake, async { stopped.await.unwrap_or_default() }).await
        });
        Self { _folder: folder, socket, stop, server }
    }
}

async fn channel(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    let connect = move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    };
    Endpoint::from_static("http://localhost")
        .connect_with_connector(tower::service_fn(connect))
        .await
        .unwrap()
}

#[tokio::test]
async fn health_follows_readiness() {
    let fake = Fake::new();
    fake.script().ready = vec![check("runtime", false, "gone")];
    let served = Served::start(&fake);
    let mut health = HealthClient::new(channel(&served.socket).await);
    for service in ["", "keelson.debug.v1.Debug", "keelson.node.v1.Node", "keelson.endpoints.v1.Inspection"] {
        let answer = health.check(HealthCheckRequest { service: service.into() }).await.unwrap();
        let status = answer.into_inner().status();
        assert_eq!(status, ServingStatus::NotServing, "{service:?} is never SERVING before it is ready");
    }
    let mut watched = health.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    assert_eq!(watched.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    fake.script().ready = vec![check("runtime", true, "")];
    while watched.message().await.unwrap().unwrap().status() != ServingStatus::Serving {}
    let unknown = health.check(HealthCheckRequest { service: "other".into() }).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    served.stop.send(()).unwrap();
    loop {
        match watched.message().await {
            Ok(Some(answer)) if answer.status() == ServingStatus::Serving => {}
            Ok(Some(answer)) => break assert_eq!(answer.status(), ServingStatus::NotServing),
            // The server may be gone before the last message is sent.
            Ok(None) | Err(_) => break,
        }
    }
    served.server.await.unwrap().unwrap();
}

#[tokio::test]
async fn reflection_lists_what_is_served_and_nothing_else() {
    let served = Served::start(&Fake::new());
    let channel = channel(&served.socket).await;

    use v1::{server_reflection_request::MessageRequest, server_reflection_response::MessageResponse};
    let questions = [
        MessageRequest::ListServices(String::new()),
        MessageRequest::FileContainingSymbol("keelson.debug.v1.Debug.WatchPulls".into()),
        MessageRequest::FileContainingSymbol("keelson.node.v1.Node.SetCondition".into()),
        MessageRequest::FileContainingSymbol("keelson.endpoints.v1.Inspection.Explain".into()),
    ]
    .map(|question| v1::ServerReflectionRequest { host: String::new(), message_request: Some(question) });
    let mut client = v1::server_reflection_client::ServerReflectionClient::new(channel.clone());
    let mut answers =
        client.server_reflection_info(futures_util::stream::iter(questions)).await.unwrap().into_inner();
    let mut answer = async || answers.message().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(list) = answer().await else { panic!("another answer") };
    let mut names: Vec<String> = list.service.into_iter().map(|service| service.name).collect();
    names.sort();
    let expected = [
        "grpc.health.v1.Health",
        "keelson.debug.v1.Debug",
        "keelson.endpoints.v1.Inspection",
        "keelson.node.v1.Node",
    ];
    assert_eq!(names, expected);
    for _ in 0..3 {
        let MessageResponse::FileDescriptorResponse(files) = answer().await else { panic!("another answer") };
        assert_eq!(files.file_descriptor_proto.len(), 1);
    }

    let list = v1alpha::server_reflection_request::MessageRequest::ListServices(String::new());
    let old = v1alpha::ServerReflectionRequest { host: String::new(), message_request: Some(list) };
    let mut client = v1alpha::server_reflection_client::ServerReflectionClient::new(channel);
    let mut answers =
        client.server_reflection_info(futures_util::stream::iter([old])).await.unwrap().into_inner();
    assert!(answers.message().await.unwrap().unwrap().message_response.is_some());
}

#[tokio::test]
async fn the_node_service_answers_on_the_same_socket() {
    let fake = Fake::new();
    let served = Served::start(&fake);
    let mut node = NodeClient::new(channel(&served.socket).await);
    assert!(node.set_condition(condition()).await.unwrap().into_inner().changed);
    let heartbeats = node.get_heartbeats(node_pb::GetHeartbeatsRequest {}).await.unwrap().into_inner();
    assert_eq!(heartbeats, crate::fake::heartbeats());
    fake.script().condition = Err(ConditionError::NotSet("none of type X was set".into()));
    let refused = node.clear_condition(node_pb::ClearConditionRequest { r#type: "X".into() }).await;
    assert_eq!(refused.unwrap_err().message(), "none of type X was set");
}

#[tokio::test]
async fn many_watchers_that_do_not_read() {
    const WATCHERS: usize = 200;
    let fake = Fake::new();
    let served = Served::start(&fake);
    let mut idle = Vec::new();
    for _ in 0..4 {
        let mut client = DebugClient::new(channel(&served.socket).await);
        for _ in 0..WATCHERS / 4 / 2 {
            idle.push(client.watch_pulls(watch(0, 100)).await.unwrap().into_inner());
        }
        // Separate calls beside the watchers of the same connection.
        assert_eq!(client.get_version(pb::GetVersionRequest {}).await.unwrap().into_inner().node_name, "n1");
    }
    let mut client = DebugClient::new(channel(&served.socket).await);
    let mut reader = client.watch_pulls(watch(0, 100)).await.unwrap().into_inner();
    reader.message().await.unwrap().unwrap();
    for running in 2..20 {
        fake.run(running);
    }
    while reader.message().await.unwrap().unwrap().running != 19 {}
    assert_eq!(fake.watchers(), idle.len() + 1);
    served.stop.send(()).unwrap();
    // The end reaches watchers that read, and does not wait for those that do not.
    let end: Status = loop {
        match reader.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the watch ended without a word"),
            Err(status) => break status,
        }
    };
    assert_eq!(end.code(), Code::Unavailable, "{end}");
    served.server.await.unwrap().unwrap();
}

#[tokio::test]
async fn invalid_bytes_do_not_affect_other_clients() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let served = Served::start(&Fake::new());
    for garbage in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nnonsense-frames"]
    {
        let mut stream = UnixStream::connect(&served.socket).await.unwrap();
        // The server may close the connection before all of it is written.
        let _ = stream.write_all(garbage).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
    }
    let mut client = DebugClient::new(channel(&served.socket).await);
    assert_eq!(client.get_limit(pb::GetLimitRequest {}).await.unwrap().into_inner(), crate::fake::limit());
}
