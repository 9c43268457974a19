//! The source of endpoints against a scripted server, in protobuf.

mod fallback;
mod optional;

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use futures_util::{FutureExt as _, future::BoxFuture, stream};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use keelson_actor_system::cluster::JobHealth;
use keelson_endpoint_publisher::{
    Ack, EndpointSlice, EventSink, ObjectEvent, Service, ServiceCidr, SourceEvent, SourceKind,
};
use prost::Message;
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinSet,
};

use super::{
    script::{Feed, Reply, Server, counting, pass},
    wire,
};
use crate::{
    ApiServer, ServerSignals, ServiceSelection,
    watch::{Collected, collect},
    watch_endpoints,
};

/// Receives events, and passes them to the test.
struct Sink {
    tell: mpsc::UnboundedSender<SourceEvent>,
    /// Its answers; [`Ack::Accepted`] after these.
    answers: Mutex<VecDeque<Ack>>,
    room: Semaphore,
}

impl EventSink for Sink {
    fn send(&self, event: SourceEvent) -> BoxFuture<'_, Ack> {
        let _ = self.tell.send(event);
        async {
            self.room.acquire().await.unwrap().forget();
            self.answers.lock().unwrap().pop_front().unwrap_or(Ack::Accepted)
        }
        .boxed()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Call {
    Listing,
    Put(String, String),
    Gone(String),
    Listed,
    Refused,
    Healthy,
    Failing(String),
    Nothing,
}

struct Source {
    events: mpsc::UnboundedReceiver<SourceEvent>,
    calls: VecDeque<Call>,
    sink: Arc<Sink>,
    /// Aborted on drop.
    _task: JoinSet<()>,
}

impl Source {
    fn with<F>(room: usize, run: impl FnOnce(Arc<Sink>) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (tell, events) = mpsc::unbounded_channel();
        let sink = Arc::new(Sink { tell, answers: Mutex::default(), room: Semaphore::new(room) });
        let task = JoinSet::from_iter([run(Arc::clone(&sink))]);
        Self { events, calls: VecDeque::new(), sink, _task: task }
    }

    fn slices(server: &Server) -> Self {
        Self::slices_of(server.api())
    }

    fn slices_of(api: ApiServer) -> Self {
        Self::of::<EndpointSlice>(api, Semaphore::MAX_PERMITS)
    }

    fn of<T: Collected>(api: ApiServer, room: usize) -> Self {
        Self::with(room, |sink| async move { collect::<T>(&api, sink).await })
    }

    async fn event(&mut self) -> SourceEvent {
        self.events.recv().await.unwrap()
    }

    async fn next(&mut self) -> Call {
        while self.calls.is_empty() {
            let calls: Vec<_> = match self.event().await {
                SourceEvent::EndpointSlices(seen) => in_short(seen, |slice| {
                    (slice.metadata.unwrap().name, slice.endpoints[0].addresses[0].clone())
                }),
                SourceEvent::ServiceCidrs(seen) => {
                    in_short(seen, |cidr| (cidr.metadata.unwrap().name, cidr.spec.unwrap().cidrs.join(",")))
                }
                SourceEvent::Health(_, JobHealth::Healthy) => vec![Call::Healthy],
                SourceEvent::Health(_, JobHealth::Failing { reason, .. }) => vec![Call::Failing(reason)],
                other => panic!("{other:?}"),
            };
            self.calls.extend(calls);
        }
        self.calls.pop_front().unwrap()
    }

    async fn expects(&mut self, expected: &[Call]) {
        for calls in expected {
            assert_eq!(self.next().await, *calls);
        }
    }

    async fn fails(&mut self, why: &str) {
        let Call::Failing(reason) = self.next().await else { panic!("it does not fail: {why}") };
        assert!(reason.contains(why), "{why}: {reason}");
    }
}

fn in_short<T>(seen: Vec<ObjectEvent<T>>, of: impl Fn(T) -> (String, String)) -> Vec<Call> {
    if seen.is_empty() {
        return vec![Call::Nothing];
    }
    let short = seen.into_iter().map(|seen| match seen {
        ObjectEvent::Listing => Call::Listing,
        ObjectEvent::Upsert(object) => {
            let (name, what) = of(*object);
            Call::Put(name, what)
        }
        ObjectEvent::Deleted(name) => Call::Gone(name.as_str().to_owned()),
        ObjectEvent::ListComplete => Call::Listed,
        ObjectEvent::Refused => Call::Refused,
    });
    short.collect()
}

fn put(name: &str, version: u64) -> Call {
    Call::Put(name.to_owned(), format!("10.0.0.{version}"))
}

fn gone(name: &str) -> Call {
    Call::Gone(format!("ns/{name}"))
}

/// A list of these slices, each with its version.
fn list_of(version: &str, slices: &[(&str, u64)]) -> Reply {
    let slices: Vec<_> = slices.iter().map(|(name, version)| wire::slice(name, *version)).collect();
    answer(200, wire::list("EndpointSlice", version, &slices))
}

/// Lists nothing at `version`, and expects that the watch works.
async fn listed(server: &mut Server, source: &mut Source, version: u64) -> Feed {
    let feed = server.begin();
    feed.listed(version);
    source.expects(&[Call::Listing, Call::Listed, Call::Healthy]).await;
    server.seen().await;
    feed
}

/// A server, a working watch that has listed nothing at `version`, and its source.
async fn watched(signals: &ServerSignals, version: u64) -> (Server, Feed, Source) {
    let mut server = Server::plain().await;
    let mut source = Source::slices_of(server.api_with(signals));
    let feed = listed(&mut server, &mut source, version).await;
    (server, feed, source)
}

/// The same with slice `a`, at version 4.
async fn watched_with_a() -> (Server, Feed, Source) {
    let mut server = Server::plain().await;
    let (feed, mut source) = (server.begin(), Source::slices(&server));
    feed.slice("ADDED", "a", 1);
    feed.listed(4);
    source.expects(&[Call::Listing, put("a", 1), Call::Listed, Call::Healthy]).await;
    server.seen().await;
    (server, feed, source)
}

trait Slices {
    fn slice(&self, of: &str, name: &str, version: u64);
    fn listed(&self, version: u64);
    fn error(&self, code: i32, reason: &str);
}

impl Slices for Feed {
    fn slice(&self, of: &str, name: &str, version: u64) {
        self.bytes(wire::event(of, "EndpointSlice", &wire::slice(name, version)));
    }

    fn listed(&self, version: u64) {
        self.bytes(wire::event("BOOKMARK", "EndpointSlice", &wire::bookmark(version, true)));
    }

    fn error(&self, code: i32, reason: &str) {
        self.bytes(wire::event("ERROR", "Status", &wire::status(code, reason)));
    }
}

fn answer(code: u16, body: Bytes) -> Reply {
    Reply::Answer(code, vec![("content-type", "application/vnd.kubernetes.protobuf".into())], body)
}

fn refusal(code: u16, reason: &str) -> Reply {
    answer(code, wire::enveloped("Status", &wire::status(code.into(), reason)))
}

#[tokio::test]
async fn the_list_and_the_changes_come_from_one_request() {
    let mut server = Server::plain().await;
    let feed = server.begin();
    let mut source = Source::slices(&server);
    feed.slice("ADDED", "a", 1);
    feed.slice("ADDED", "b", 2);
    feed.listed(4);
    source.expects(&[Call::Listing, put("a", 1), put("b", 2), Call::Listed, Call::Healthy]).await;
    feed.slice("MODIFIED", "a", 5);
    feed.slice("DELETED", "b", 6);
    feed.slice("ADDED", "c", 7);
    source.expects(&[put("a", 5), gone("b"), put("c", 7)]).await;
    let seen = server.seen().await;
    let path = "GET /apis/discovery.k8s.io/v1/endpointslices?watch=true&";
    assert!(seen.line.starts_with(path), "{}", seen.line);
    assert_eq!(seen.query("labelSelector"), Some("%21service.kubernetes.io%2Fheadless"));
    assert_eq!((seen.query("fieldSelector"), seen.query("resourceVersion")), (None, None));
    assert_eq!(seen.query("sendInitialEvents"), Some("true"));
    assert_eq!(seen.query("resourceVersionMatch"), Some("NotOlderThan"));
    assert_eq!(seen.query("allowWatchBookmarks"), Some("true"));
    assert_eq!(seen.header("accept"), "application/vnd.kubernetes.protobuf;stream=watch");
    server.nothing_more();
}

/// A server without streaming lists refuses as its answer, or within the watch.
#[tokio::test]
async fn without_streaming_lists_a_list_and_a_watch_are_requested() {
    for within in [false, true] {
        let mut server = Server::plain().await;
        if within {
            server.begin().error(500, "InternalError");
        } else {
            server.reply(refusal(422, "Invalid"));
        }
        server.reply(list_of("9", &[("a", 3), ("b", 4)]));
        let feed = server.begin();
        let mut source = Source::slices(&server);
        source.expects(&[Call::Listing, put("a", 3), put("b", 4), Call::Listed, Call::Healthy]).await;
        feed.slice("ADDED", "c", 10);
        source.expects(&[put("c", 10)]).await;
        assert!(server.seen().await.query("sendInitialEvents").is_some());
        let list = server.seen().await;
        assert_eq!(
            list.line,
            "GET /apis/discovery.k8s.io/v1/endpointslices?labelSelector=%21service.kubernetes.io%2Fheadless\
             &limit=500&resourceVersion=0"
        );
        assert_eq!(list.header("accept"), "application/vnd.kubernetes.protobuf");
        let watch = server.seen().await;
        assert_eq!((watch.query("resourceVersion"), watch.query("sendInitialEvents")), (Some("9"), None));
        server.nothing_more();
    }
}

#[tokio::test]
async fn an_empty_list_is_complete() {
    let server = Server::plain().await;
    server.reply(refusal(400, "BadRequest"));
    server.reply(list_of("9", &[]));
    let mut source = Source::slices(&server);
    source.expects(&[Call::Listing, Call::Listed, Call::Healthy]).await;
}

#[tokio::test]
async fn a_bookmark_moves_on_and_lets_the_sink_answer() {
    let (mut server, feed, mut source) = watched_with_a().await;
    feed.bytes(wire::event("BOOKMARK", "EndpointSlice", &wire::bookmark(50, false)));
    source.expects(&[Call::Nothing]).await;
    // The server ends the watch normally, as it does every few minutes.
    drop(feed);
    let feed = server.begin();
    assert_eq!(server.seen().await.query("resourceVersion"), Some("50"));
    feed.slice("MODIFIED", "a", 51);
    source.expects(&[put("a", 51)]).await;
    // Then it breaks.
    feed.cut();
    let feed = server.begin();
    assert_eq!(server.seen().await.query("resourceVersion"), Some("51"));
    feed.slice("DELETED", "a", 52);
    source.expects(&[gone("a")]).await;
    server.nothing_more();
}

#[tokio::test]
async fn after_a_410_everything_is_listed_again() {
    let (mut server, feed, mut source) = watched_with_a().await;
    // In the stream, after a change that is not lost.
    feed.slice("ADDED", "b", 5);
    let again = server.begin();
    feed.error(410, "Expired");
    let feed = again;
    // At once and silently: nothing has failed.
    source.expects(&[put("b", 5)]).await;
    let relist = server.seen().await;
    assert_eq!((relist.query("resourceVersion"), relist.query("sendInitialEvents")), (None, Some("true")));
    feed.slice("ADDED", "b", 5);
    feed.listed(60);
    source.expects(&[Call::Listing, put("b", 5), Call::Listed]).await;
    drop(feed);
    // As the answer, so soon after the other that it is a failure.
    server.reply(refusal(410, "Gone"));
    let feed = server.begin();
    assert_eq!(server.seen().await.query("resourceVersion"), Some("60"));
    source.fails("HTTP 410").await;
    assert_eq!(server.seen().await.query("resourceVersion"), None);
    feed.listed(70);
    source.expects(&[Call::Listing, Call::Listed, Call::Healthy]).await;
}

#[tokio::test]
async fn a_broken_list_is_repeated() {
    let server = Server::plain().await;
    // More than a batch, so that the sink has received some.
    let feed = server.begin();
    let mut source = Source::slices(&server);
    for n in 0..250 {
        feed.slice("ADDED", &format!("s{n}"), 1);
    }
    for _ in 0..200 {
        source.next().await;
    }
    feed.cut();
    // At once as a list, which breaks too.
    let objects: Vec<_> = (0..250).map(|n| wire::slice(&format!("s{n}"), 2)).collect();
    let list = wire::list("EndpointSlice", "9", &objects);
    let half = server.begin();
    half.bytes(list.slice(..list.len() - 10));
    assert_eq!(source.next().await, Call::Listing);
    for n in 0..199 {
        source.expects(&[put(&format!("s{n}"), 2)]).await;
    }
    let feed = server.begin();
    drop(half);
    source.fails("ended before it was complete").await;
    feed.slice("ADDED", "a", 3);
    feed.listed(10);
    source.expects(&[Call::Listing, put("a", 3), Call::Listed, Call::Healthy]).await;
}

#[tokio::test]
async fn health_has_a_reason_and_a_time() {
    let server = Server::plain().await;
    server.reply(refusal(403, "Forbidden"));
    server.reply(refusal(401, "Unauthorized"));
    server.reply(Reply::Answer(429, vec![("retry-after", "1".into())], Bytes::new()));
    let mut source = Source::slices(&server);
    let mut sinces = Vec::new();
    for why in ["Forbidden is what it said (Forbidden)", "HTTP 401", "HTTP 429"] {
        let SourceEvent::Health(SourceKind::EndpointSlices, JobHealth::Failing { reason, since_unix_ms, .. }) =
            source.event().await
        else {
            panic!("{why}")
        };
        assert!(reason.contains(why), "{why}: {reason}");
        sinces.push(since_unix_ms);
    }
    assert!(sinces.iter().all(|since| *since == sinces[0]), "{sinces:?}");
    // A list follows, because it may mean that the server has no streaming lists.
    server.reply(refusal(500, "InternalError"));
    server.reply(list_of("9", &[("a", 3)]));
    let feed = server.begin();
    source.expects(&[Call::Listing, put("a", 3), Call::Listed, Call::Healthy]).await;
    feed.slice("DELETED", "a", 10);
    source.expects(&[gone("a")]).await;
}

#[tokio::test]
async fn invalid_watch_data_is_a_failure_followed_by_a_relist() {
    for garbage in [
        Bytes::from_static(b"<html><body>"),
        wire::framed(b"\xff\xff\xff"),
        wire::event("ADDED", "Pod", &wire::slice("a", 3)),
        wire::event("ADDED", "EndpointSlice", &"no object".to_owned()),
    ] {
        let (mut server, feed, mut source) = watched(&ServerSignals::default(), 4).await;
        feed.slice("ADDED", "a", 5);
        feed.bytes(garbage);
        source.expects(&[put("a", 5)]).await;
        source.fails("invalid response").await;
        feed.closed().await;
        let feed = server.begin();
        assert_eq!(server.seen().await.query("resourceVersion"), None);
        feed.listed(6);
        source.expects(&[Call::Listing, Call::Listed, Call::Healthy]).await;
    }
}

#[tokio::test]
async fn a_restarted_sink_gets_a_relist() {
    let (mut server, feed, mut source) = watched_with_a().await;
    let feed_again = server.begin();
    source.sink.answers.lock().unwrap().push_back(Ack::Relist);
    feed.slice("ADDED", "b", 5);
    source.expects(&[put("b", 5)]).await;
    feed.closed().await;
    assert_eq!(server.seen().await.query("resourceVersion"), None);
    feed_again.slice("ADDED", "a", 1);
    feed_again.slice("ADDED", "b", 5);
    feed_again.listed(6);
    // The health of the watch is reported again, too.
    source.expects(&[Call::Listing, put("a", 1), put("b", 5), Call::Listed, Call::Healthy]).await;
    server.nothing_more();
}

/// An empty batch lets a sink report that it has lost its state.
#[tokio::test]
async fn a_restarted_sink_asks_for_a_relist_without_events() {
    let (mut server, feed, mut source) = watched(&ServerSignals::default(), 4).await;
    source.sink.answers.lock().unwrap().push_back(Ack::Relist);
    feed.bytes(wire::event("BOOKMARK", "EndpointSlice", &wire::bookmark(50, false)));
    source.expects(&[Call::Nothing]).await;
    let feed = server.begin();
    assert_eq!(server.seen().await.query("resourceVersion"), None);
    feed.listed(60);
    source.expects(&[Call::Listing, Call::Listed, Call::Healthy]).await;
}

/// A list larger than the buffers is not read on while the sink has not answered, and arrives in batches.
#[tokio::test]
async fn a_slow_sink_holds_the_list_back() {
    const COPIES: usize = 20_000;
    let mut object = wire::slice("a", 3);
    object.endpoints = vec![object.endpoints[0].clone(); 100];
    let piece = wire::list("EndpointSlice", "9", &vec![object; COPIES]);
    let total = piece.len();
    assert!(total > 24 << 20, "{total}");
    let pulled = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&pulled);
    let pieces = stream::iter((0..total).step_by(64 << 10).map(move |at| {
        let piece = piece.slice(at..total.min(at + (64 << 10)));
        count.fetch_add(piece.len(), Ordering::SeqCst);
        Ok(Frame::data(piece))
    }));
    let server = Server::plain().await;
    server.reply(refusal(400, "BadRequest"));
    server.reply(Reply::Body(StreamBody::new(pieces).boxed_unsync()));
    let mut source = Source::of::<EndpointSlice>(server.api(), 0);
    let (mut seen, mut batches) = (0, 0);
    loop {
        let batch = match source.event().await {
            SourceEvent::EndpointSlices(batch) => batch,
            // On a slow machine the list takes longer than it should, and continues.
            SourceEvent::Health(_, JobHealth::Failing { reason, .. }) => {
                assert!(reason.contains("not complete"), "{reason}");
                source.sink.room.add_permits(1);
                continue;
            }
            other => panic!("{other:?}"),
        };
        assert!(batch.len() <= 202, "{} at once", batch.len());
        if batches == 0 {
            // Data in flight fills the sockets' buffers, and then nothing moves.
            let mut before = usize::MAX;
            while before != pulled.load(Ordering::SeqCst) {
                before = pulled.load(Ordering::SeqCst);
                tokio::time::sleep(std::time::Duration::from_millis(300)).await;
            }
            assert!(before < total, "{before} of {total} bytes were read for one batch");
        }
        seen += batch.iter().filter(|seen| matches!(seen, ObjectEvent::Upsert(_))).count();
        batches += 1;
        source.sink.room.add_permits(1);
        if batch.last() == Some(&ObjectEvent::ListComplete) {
            break;
        }
    }
    assert_eq!(seen, COPIES);
    assert!(batches >= COPIES / 200, "{batches}");
}

/// For the other kinds a 404 is a failure.
#[tokio::test]
async fn a_server_without_slices_is_a_failure() {
    let server = Server::plain().await;
    server.reply(Reply::Answer(404, Vec::new(), Bytes::from_static(b"404 page not found")));
    let mut source = Source::slices(&server);
    source.fails("HTTP 404").await;
}

#[tokio::test]
async fn three_kinds_are_watched_side_by_side() {
    let mut server = Server::plain().await;
    for _ in 0..3 {
        server.reply(refusal(403, "Forbidden"));
    }
    let api = server.api();
    let mut source = Source::with(Semaphore::MAX_PERMITS, |sink| async move {
        watch_endpoints(&api, sink, ServiceSelection::Unlabelled).await
    });
    let mut kinds = Vec::new();
    let mut lines = Vec::new();
    while kinds.len() < 3 {
        let SourceEvent::Health(kind, JobHealth::Failing { reason, .. }) = (match source.event().await {
            // These are optional.
            SourceEvent::ServiceCidrs(_) => source.event().await,
            event => event,
        }) else {
            panic!("all are refused")
        };
        assert!(reason.contains("Forbidden"), "{reason}");
        kinds.push(kind);
        let seen = server.seen().await;
        let selectors = (seen.query("labelSelector"), seen.query("fieldSelector"));
        let path = seen.line.split('?').next().unwrap().to_owned();
        lines.push(format!("{path} {selectors:?}"));
    }
    kinds.sort();
    assert_eq!(kinds, [SourceKind::Services, SourceKind::EndpointSlices, SourceKind::ServiceCidrs]);
    lines.sort();
    let services =
        "(Some(\"%21service.kubernetes.io%2Fservice-proxy-name\"), Some(\"spec.clusterIP%21%3DNone\"))";
    let slices = "(Some(\"%21service.kubernetes.io%2Fheadless\"), None)";
    assert_eq!(
        lines,
        [
            format!("GET /api/v1/services {services}"),
            format!("GET /apis/discovery.k8s.io/v1/endpointslices {slices}"),
            "GET /apis/networking.k8s.io/v1/servicecidrs (None, None)".to_owned(),
        ]
    );
}

/// An event that has arrived is not held back for one that has not.
#[tokio::test]
async fn an_event_is_delivered_at_once() {
    let (_server, feed, mut source) = watched(&ServerSignals::default(), 4).await;
    let full = wire::event("ADDED", "EndpointSlice", &wire::slice("b", 6));
    feed.slice("ADDED", "a", 5);
    feed.bytes(full.slice(..10));
    source.expects(&[put("a", 5)]).await;
    feed.bytes(full.slice(10..));
    source.expects(&[put("b", 6)]).await;
    assert!(full.len() > wire::slice("b", 6).encoded_len());
}
