//! Callers that are broken, stuck, or speak another protocol. None of them may affect the others.

use keelson_serve::grpc::frame;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

const NEXT: &str = "/localnetv1.Endpoints/Next";
const WATCH: &str = "/keelson.endpoints.v1.Endpoints/Watch";
/// Longer than the detection of a dead peer takes.
const LONG: Duration = Duration::from_secs(120);

/// Reads until the server closes the connection.
async fn read_to_end(stream: &mut UnixStream) -> Vec<u8> {
    let mut all = Vec::new();
    // A reset after the answer is an end as well.
    let _ = stream.read_to_end(&mut all).await;
    all
}

async fn serves(server: &Running, source: &Source) {
    assert_eq!(next(&mut server.next().await, has((0, 0))).await.1, source.model);
}

#[tokio::test]
async fn http1_clients_get_an_error() {
    let (source, server) = one_service().await;
    for request in
        ["GET / HTTP/1.1\r\nHost: x\r\n\r\n", "POST /localnetv1.Endpoints/Next HTTP/1.1\r\n", "PUT"]
    {
        let mut stream = server.raw().await;
        stream.write_all(request.as_bytes()).await.expect("writes");
        let answer = String::from_utf8(read_to_end(&mut stream).await).expect("text");
        assert!(answer.starts_with("HTTP/1.1 400 "), "{request:?}: {answer:?}");
        assert!(answer.contains("gRPC over HTTP/2"), "{answer:?}");
    }
    serves(&server, &source).await;
}

#[tokio::test]
async fn garbage_ends_its_own_connection_only() {
    let (mut source, server) = one_service().await;
    let (mut good, mut reader) = server.follow().await;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    for garbage in [
        b"\x00\x01\x02\x03".to_vec(),
        vec![0xff; 100_000],
        // A frame larger than the maximum.
        [&preface[..], &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1], &[0; 5000]].concat(),
        // Frames before SETTINGS, and garbage after.
        [&preface[..], &[0, 0, 4, 0xee, 0xee, 0xff, 0xff, 0xff, 0xff], &[0xaa; 5000]].concat(),
    ] {
        let mut stream = server.raw().await;
        // The server may close the connection before all is written.
        let _ = stream.write_all(&garbage).await;
        let answer = read_to_end(&mut stream).await;
        assert!(answer.len() < 1000, "{} bytes", answer.len());
    }
    source.set(service("b", &[]));
    reader.sync(&mut good).await;
    assert_eq!(reader.draft, source.model);
    assert_eq!(server.watchers.count().0, 1);
}

#[tokio::test(start_paused = true)]
async fn silent_clients_are_closed() {
    let (source, server) = one_service().await;
    let mut silent = server.raw().await;
    let mut half = server.raw().await;
    half.write_all(b"PRI * HTT").await.expect("writes");
    for stream in [&mut silent, &mut half] {
        let ended = tokio::time::timeout(LONG, read_to_end(stream)).await;
        assert_eq!(ended.expect("is closed"), b"");
    }
    serves(&server, &source).await;
}

/// An HTTP/2 connection whose client can stop reading it without closing it.
struct Raw {
    send: h2::client::SendRequest<Bytes>,
    halt: oneshot::Sender<()>,
    driver: JoinHandle<Held>,
}

struct Held(#[allow(dead_code)] h2::client::Connection<UnixStream, Bytes>);

impl Raw {
    async fn connect(server: &Running) -> Self {
        // A window that is never the limit: unread data stays in the socket and in the server.
        Self::with_window(server, 1 << 30).await
    }

    /// With a window of this number of bytes per stream.
    async fn with_window(server: &Running, window: u32) -> Self {
        let (send, mut connection) = h2::client::Builder::new()
            .initial_window_size(window)
            .initial_connection_window_size(1 << 30)
            .handshake(server.raw().await)
            .await
            .expect("shakes hands");
        let (halt, halted) = oneshot::channel();
        let driver = tokio::spawn(async move {
            tokio::select! {
                _ = &mut connection => {}
                _ = halted => {}
            }
            Held(connection)
        });
        Self { send: send.ready().await.expect("ready"), halt, driver }
    }

    /// Stops reading and answering without closing the connection.
    async fn stop_reading(self) -> Held {
        self.halt.send(()).expect("runs");
        self.driver.await.expect("halts")
    }

    /// Makes a complete call; its response has begun.
    async fn call(&mut self, path: &str, message: &[u8]) -> http::Response<h2::RecvStream> {
        self.post(path, frame::frame(message)).await
    }

    async fn post(&mut self, path: &str, body: Bytes) -> http::Response<h2::RecvStream> {
        let (response, mut sending) = self.send.send_request(request(path), false).expect("sends");
        sending.send_data(body, true).expect("sends");
        response.await.expect("answers")
    }
}

fn request(path: &str) -> http::Request<()> {
    let uri = format!("http://localhost{path}");
    http::Request::post(uri).header("content-type", "application/grpc").body(()).expect("a request")
}

/// The gRPC status of one call with this body.
async fn status_of(server: &Running, path: &str, body: Bytes) -> i32 {
    let mut raw = Raw::connect(server).await;
    let response = raw.post(path, body).await;
    if let Some(code) = frame::code_of(response.headers()) {
        return code;
    }
    let mut body = response.into_body();
    while let Some(data) = body.data().await {
        body.flow_control().release_capacity(data.expect("data").len()).expect("releases");
    }
    frame::code_of(&body.trailers().await.expect("trailers").expect("a status")).expect("a status")
}

#[tokio::test]
async fn invalid_requests_are_refused_with_their_error() {
    let (source, server) = one_service().await;
    let huge = |length: usize| {
        let filter = NextFilter { stale_reason: "x".repeat(length), ..NextFilter::default() };
        frame::frame(&filter.encode_to_vec())
    };
    let two = [frame::frame(b""), frame::frame(b"")].concat().into();
    let four_gigabytes = Bytes::from_static(&[0, 255, 255, 255, 255]);
    for (what, path, body, code) in [
        ("garbage", NEXT, frame::frame(b"\xff\xff\xff\xff"), Code::InvalidArgument),
        ("garbage", WATCH, frame::frame(b"\x1a\xff"), Code::InvalidArgument),
        ("another type in the filter's field", NEXT, frame::frame(b"\x18\x01"), Code::InvalidArgument),
        ("no message", NEXT, Bytes::new(), Code::InvalidArgument),
        ("half a message", WATCH, Bytes::from_static(&[0, 0, 0, 0, 9, 1]), Code::InvalidArgument),
        ("two messages", WATCH, two, Code::InvalidArgument),
        ("a compressed one", NEXT, Bytes::from_static(&[1, 0, 0, 0, 0]), Code::Unimplemented),
        ("a length of four gigabytes", NEXT, four_gigabytes, Code::ResourceExhausted),
        ("more than is allowed", NEXT, huge(65_536), Code::ResourceExhausted),
        ("as much as is allowed", NEXT, huge(65_000), Code::Ok),
        ("another method", "/localnetv1.Endpoints/Previous", frame::frame(b""), Code::Unimplemented),
        ("another service", "/localnetv1.Nodes/Next", frame::frame(b""), Code::Unimplemented),
        ("an empty message", NEXT, frame::frame(b""), Code::Ok),
    ] {
        assert_eq!(status_of(&server, path, body).await, code as i32, "{what}");
    }
    serves(&server, &source).await;
}

#[tokio::test(start_paused = true)]
async fn a_call_without_a_request_is_ended() {
    let (source, server) = one_service().await;
    let mut raw = Raw::connect(&server).await;
    let (response, _sending) = raw.send.send_request(request(NEXT), false).expect("sends");
    let response = tokio::time::timeout(LONG, response).await.expect("is answered").expect("answers");
    assert_eq!(frame::code_of(response.headers()), Some(Code::Cancelled as i32));
    serves(&server, &source).await;
}

#[tokio::test(start_paused = true)]
async fn a_vanished_peer_loses_its_slot_and_a_waiting_one_does_not() {
    let (mut source, server) = one_service().await;
    let (mut good, mut reader) = server.follow().await;
    // It is up to date and answers nothing any more, as behind a cut cable.
    let mut raw = Raw::connect(&server).await;
    let _response = raw.call(NEXT, &has((7, 1)).encode_to_vec()).await;
    server.served(2).await;
    let stuck = raw.stop_reading().await;
    tokio::time::sleep(LONG).await;
    assert_eq!(server.watchers.count().0, 1);
    drop(stuck);
    source.set(service("b", &[]));
    reader.sync(&mut good).await;
    assert_eq!(reader.draft, source.model);
}

const WINDOW: u32 = 65_535;

/// Services that exceed any window.
async fn eight_megabytes() -> (Source, Running) {
    let mut source = Source::new(7);
    source.set_large(200, 40_000);
    let server = Running::start(&source).await;
    (source, server)
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_never_reads_costs_little_and_delays_no_other() {
    let (mut source, server) = eight_megabytes().await;
    let mut raw = Raw::connect(&server).await;
    let response = raw.call(WATCH, b"").await;
    let stuck = (raw.stop_reading().await, response);
    // Of eight megabytes, what fits the socket and the buffer.
    let taken = server.watchers.list()[0].bytes;
    for _ in 0..10 {
        source.set(large("s000", 10));
        serves(&server, &source).await;
    }
    let held = server.watchers.list()[0].bytes;
    assert!(held < 2_000_000, "{taken} then {held} bytes were taken for a caller that reads nothing");
    tokio::time::sleep(LONG).await;
    assert_eq!(server.watchers.count().0, 0, "it answers no ping either");
    drop(stuck);
}

/// E16: its connection answers every ping, but what it was sent is never read.
#[tokio::test(start_paused = true)]
async fn e16_a_caller_that_answers_pings_but_never_reads_is_closed() {
    let (mut source, server) = eight_megabytes().await;
    let (mut good, mut reader) = server.follow().await;
    for (path, message) in [(WATCH, Vec::new()), (NEXT, Vec::new())] {
        let mut raw = Raw::with_window(&server, WINDOW).await;
        let _unread = raw.call(path, &message).await;
        server.served(2).await;
        tokio::time::sleep(Duration::from_secs(50)).await;
        assert_eq!(server.watchers.count().0, 2, "{path}: it may still read");
        tokio::time::sleep(Duration::from_secs(20)).await;
        server.served(1).await;
        let ended = patiently(&mut raw.driver).await;
        assert!(ended.is_ok(), "its connection is closed");
    }
    assert_eq!(server.metrics.cut_off.get(), 2);
    // A client with nothing to read may wait indefinitely.
    tokio::time::sleep(Duration::from_secs(3600)).await;
    source.set(service("b", &[]));
    reader.sync(&mut good).await;
    assert_eq!(reader.draft, source.model);
    assert_eq!(server.metrics.cut_off.get(), 2);
}

/// E16: a slow client is not stuck.
#[tokio::test(start_paused = true)]
async fn e16_a_caller_that_reads_slowly_is_not_closed() {
    let (_source, server) = eight_megabytes().await;
    let mut raw = Raw::with_window(&server, WINDOW).await;
    let mut body = raw.call(WATCH, b"").await.into_body();
    let mut read = 0;
    for _ in 0..10 {
        let before = read;
        // More than a chunk: one message may exceed its size.
        while read - before < 2 * WINDOW as usize {
            let data = patiently(body.data()).await.expect("continues").expect("data");
            read += data.len();
            body.flow_control().release_capacity(data.len()).expect("releases");
        }
        tokio::time::sleep(Duration::from_secs(40)).await;
    }
    assert_eq!((server.watchers.count().0, server.metrics.cut_off.get()), (1, 0));
}

/// E16: each holds a different state, of which nothing is in the latest one any more.
#[tokio::test(start_paused = true)]
async fn e16_callers_at_many_revisions_do_not_retain_all_of_them() {
    const ALL: [&str; 4] = ["a", "b", "c", "d"];
    let mut source = Source::new(7);
    source.set(service("e", &[]));
    let server = Running::start(&source).await;
    let mut stuck = Vec::new();
    for _ in 0..7 {
        source.change(&ALL.map(|name| (name, Some(large(name, 4_000_000)))));
        let mut raw = Raw::with_window(&server, WINDOW).await;
        let unread = raw.call(WATCH, b"").await;
        stuck.push((raw, unread));
        server.served(stuck.len()).await;
    }
    // 15.3 MiB each, and the last one has the newest.
    tokio::time::sleep(Duration::from_secs(12)).await;
    server.served(5).await;
    assert_eq!(server.metrics.cut_off.get(), 2, "the oldest");
    let left: Vec<u64> = server.watchers.list().iter().map(|watcher| watcher.id).collect();
    assert_eq!(left, [3, 4, 5, 6, 7]);
    drop(stuck);
    server.served(0).await;
    serves(&server, &source).await;
}
