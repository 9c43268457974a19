//! Input that no valid client sends. Its sender gets an error or is disconnected, others are served meanwhile, and the
//! log stays short.

use crate::common::{LONG, TestEnv, ensure_contains, plain};
use crate::wire::{self, Connection, NEXT, WATCH, framed, prefixed};
use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use http::{Method, Request};
use http_body_util::Full;
use keelson_cluster::endpoints::{Followers, FullState};
use keelson_harness::util::Seeded;
use keelson_proto::localnetv1::{EndpointConditions, NextFilter, NextItem};
use prost::Message as _;
use rand::RngExt as _;
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tonic::Code;

/// Maximum number of lines that the log may grow by.
const LINES: usize = 20;

/// An agent, consumers that must not be disturbed, and the length of the log before.
struct Victim {
    env: TestEnv,
    followers: Followers,
    lines: usize,
    rev: u64,
}

impl Victim {
    async fn new() -> Result<Self> {
        Self::of(TestEnv::started().await?).await
    }

    async fn of(env: TestEnv) -> Result<Self> {
        let followers = Followers::start(&env.target(), |_| Ok(()))?;
        followers.until("the first state", |full_state: &FullState| at(full_state, 1)).await?;
        let lines = env.log_lines()?;
        Ok(Self { env, followers, lines, rev: 1 })
    }

    /// Consumers get the next change and were not disturbed, and the log is short.
    async fn check_undisturbed(&mut self) -> Result<()> {
        self.changes().await?;
        let all: Vec<_> = self.followers.both().into_iter().flat_map(|follower| follower.errors()).collect();
        ensure!(all.is_empty(), "consumers were disturbed: {all:?}");
        let more = self.env.log_lines()? - self.lines;
        ensure!(more <= LINES, "the log has {more} lines more:\n{}", self.env.agent.log()?);
        Ok(())
    }

    async fn changes(&mut self) -> Result<()> {
        self.rev += 1;
        let address = format!("10.1.0.{}", self.rev);
        self.env.manifests.put("web.json", &plain("web", "10.96.0.1", &[&address]))?;
        let rev = self.rev;
        self.followers.until("the next state", |full_state| at(full_state, rev)).await?;
        self.followers.check_invariants()
    }
}

fn at(full_state: &FullState, rev: u64) -> Result<()> {
    ensure!(full_state.position.rev == rev, "{:?}", full_state.position);
    Ok(())
}

/// Contents of a response to `Next`: its filter, and the numbers of Services and endpoints.
fn state(body: &Bytes) -> Result<(NextFilter, usize, usize)> {
    let (mut filter, mut services, mut endpoints, mut rest) = (None, 0, 0, body.clone());
    while !rest.is_empty() {
        let length = u32::from_be_bytes(rest.get(1..5).context("no prefix")?.try_into()?) as usize;
        let mut message = rest.split_off(5);
        rest = message.split_off(length);
        let item = NextItem::decode(message)?;
        filter = filter.or(item.next);
        services += usize::from(item.endpoints.is_some());
        endpoints += item.endpoints.map_or(0, |service| service.endpoints.len());
    }
    Ok((filter.context("no filter")?, services, endpoints))
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_are_refused_with_a_reason() -> Result<()> {
    let mut victim = Victim::new().await?;
    let mut connection = Connection::open(&victim.env.socket()).await?;
    let megabyte = vec![0; 1 << 20];
    let two = [framed(&[]), framed(&[])].concat();
    // A filter whose nested message has a length beyond its end.
    let cut = framed(&[0x1a, 0x7f, 0x08, 0x01]);
    for (what, body, code, parts) in [
        ("nothing", Bytes::new(), Code::InvalidArgument, &["message"][..]),
        ("4 GiB by its prefix", prefixed(0, u32::MAX as usize, &[1]), Code::ResourceExhausted, &[]),
        ("1 GiB by its prefix", prefixed(0, 1 << 30, &[1]), Code::ResourceExhausted, &[]),
        ("more by its prefix than comes", prefixed(0, 100, &[1]), Code::InvalidArgument, &[]),
        ("less by its prefix than comes", prefixed(0, 0, &[8, 1]), Code::InvalidArgument, &[]),
        ("a megabyte", framed(&megabyte), Code::ResourceExhausted, &["65536 bytes"]),
        ("compressed", prefixed(1, 2, &[8, 1]), Code::Unimplemented, &["compress"]),
        ("a strange flag", prefixed(7, 2, &[8, 1]), Code::Unimplemented, &[]),
        ("two messages", two.into(), Code::InvalidArgument, &[]),
        ("no protobuf", framed(&[0xff; 40]), Code::InvalidArgument, &["is not a valid message of"]),
        ("cut protobuf", cut, Code::InvalidArgument, &["is not a valid message of"]),
        ("text for a number", framed(b"\x0a\x03abc"), Code::InvalidArgument, &["is not a valid message of"]),
    ] {
        for path in [NEXT, WATCH] {
            let answer = connection.call(path, body.clone()).await.with_context(|| what.to_owned())?;
            let status = answer.status.as_ref().with_context(|| format!("{what}: {answer:?}"))?;
            ensure!(status.code() == code && answer.body.is_empty(), "{what}: {answer:?}");
            ensure!(!status.message().is_empty(), "{what}: {answer:?}");
            ensure_contains(status.message(), parts).with_context(|| what.to_owned())?;
        }
    }
    for path in
        ["/localnetv1.Endpoints/Prev", "/localnetv1.Sets/Next", "/", "/localnetv1.Endpoints/Next/", "/x"]
    {
        let answer = connection.call(path, framed(&[])).await?;
        ensure!(answer.code() == Some(Code::Unimplemented), "{path}: {answer:?}");
    }
    // A request that is not gRPC gets a response too, without a state.
    for method in [Method::GET, Method::PUT, Method::DELETE, Method::OPTIONS] {
        let request = Request::builder().method(method.clone()).uri(format!("http://localhost{NEXT}"));
        let answer = connection.request(request.body(Full::new(Bytes::new()))?).await?;
        eprintln!("{method}: {answer:?}");
        ensure!(answer.body.is_empty() && answer.code() != Some(Code::Ok), "{method}: {answer:?}");
    }
    victim.check_undisturbed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_filters_return_the_latest_state() -> Result<()> {
    let mut victim = Victim::new().await?;
    let mut connection = Connection::open(&victim.env.socket()).await?;
    let instance_id = victim.env.wait_for_rev(1).await?;
    let filter = |instance_id, rev, required: Option<EndpointConditions>| NextFilter {
        instance_id,
        rev,
        required_endpoint_conditions: required,
        ..NextFilter::default()
    };
    let serving = EndpointConditions { serving: true, ..EndpointConditions::default() };
    let terminating = EndpointConditions { terminating: true, ..EndpointConditions::default() };
    let unknown = {
        let mut bytes = filter(0, 0, None).encode_to_vec();
        // Field 1000, a number; field 999, bytes; inside the conditions, field 100.
        bytes.extend([0xc0, 0x3e, 0x05, 0xba, 0x3e, 0x02, 0x61, 0x62, 0x1a, 0x03, 0xa0, 0x06, 0x01]);
        bytes
    };
    // Fields that a response has and a request need not.
    let answer = NextFilter {
        stale: true,
        stale_reason: "x".repeat(9_000),
        triggered_unix_ms: -1,
        ..filter(0, 0, None)
    };
    // E12: a future revision is treated as a sign of a restored state folder.
    let mut may_be_renamed = false;
    for (what, request, endpoints) in [
        ("no instance and a revision", filter(0, 5, None).encode_to_vec(), 1),
        ("an instance and no revision", filter(instance_id, 0, None).encode_to_vec(), 1),
        ("a revision of the future", filter(instance_id, 2, None).encode_to_vec(), 1),
        ("the last revision", filter(instance_id, u64::MAX, None).encode_to_vec(), 1),
        ("the last instance", filter(u64::MAX, u64::MAX, None).encode_to_vec(), 1),
        ("serving ones", filter(0, 0, Some(serving)).encode_to_vec(), 1),
        ("terminating ones", filter(0, 0, Some(terminating)).encode_to_vec(), 0),
        ("unknown fields", unknown, 1),
        ("fields of answers", answer.encode_to_vec(), 1),
    ] {
        let answer = connection.call(NEXT, framed(&request)).await.with_context(|| what.to_owned())?;
        ensure!(answer.code() == Some(Code::Ok), "{what}: {answer:?}");
        let (next, services, found) = state(&answer.body).with_context(|| what.to_owned())?;
        may_be_renamed |= what == "a revision of the future";
        ensure!(next.rev == 1 && (may_be_renamed || next.instance_id == instance_id), "{what}: {next:?}");
        ensure!((services, found) == (1, endpoints), "{what}: {services} Services, {found} endpoints");
    }
    victim.check_undisturbed().await
}

/// Sends bytes, and returns what it receives until the agent closes the connection.
async fn until_closed(socket: &Path, bytes: &[u8]) -> Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket).await.context("cannot connect")?;
    // It may close the connection during the write.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    match tokio::time::timeout(LONG, stream.read_to_end(&mut answer)).await {
        Ok(Err(error)) if error.kind() != std::io::ErrorKind::ConnectionReset => Err(error.into()),
        Ok(_) => Ok(answer),
        Err(_) => anyhow::bail!("the connection stays open, after {answer:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_protocols_are_refused_or_disconnected() -> Result<()> {
    let mut victim = Victim::new().await?;
    let socket = victim.env.socket();
    let host = victim.env.tcp.trim_start_matches("tcp://").to_owned();
    let get = format!("GET / HTTP/1.1\r\nHost: {host}\r\nUser-Agent: curl/8\r\nAccept: */*\r\n\r\n");
    let post = format!(
        "POST {NEXT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/grpc\r\nContent-Length: 5\r\n\r\n\0\0\0\0\0"
    );
    let upgrade = format!(
        "GET / HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\
         HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
    );
    for request in [get, post, upgrade, "PUT /".to_owned(), "GET / HTTP/1.0\r\n\r\n".to_owned()] {
        let answer = until_closed(&socket, request.as_bytes()).await?;
        let answer = String::from_utf8(answer).context("no text")?;
        ensure!(answer.starts_with("HTTP/1.1 400 "), "{request:?}: {answer:?}");
        ensure_contains(&answer, &["gRPC over HTTP/2", "localnetv1", "Connection: close"])?;
    }
    // The same over TCP, with an HTTP/1 client.
    let answer = keelson_harness::util::http_get(&format!("http://{host}/metrics")).await?;
    ensure!(answer.status == 400 && answer.text().contains("gRPC over HTTP/2"), "{answer:?}");

    // A ClientHello of TLS 1.3 up to its session id, zeros of a binary protocol, an empty line, half of a preface.
    let hello: Vec<u8> =
        [&[0x16, 3, 1, 0, 0xc8, 1, 0, 0, 0xc4, 3, 3][..], &[7; 32], &[32], &[9; 32]].concat();
    for bytes in [hello, vec![0; 4096], b"\r\n\r\n".to_vec(), b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n".to_vec()] {
        until_closed(&socket, &bytes).await.with_context(|| format!("{:?}", &bytes[..4]))?;
    }
    let mut seeded = Seeded::new()?;
    for round in 0..200 {
        let mut bytes: Vec<u8> =
            (0..seeded.rng().random_range(24..2000)).map(|_| seeded.rng().random()).collect();
        if round % 2 == 0 {
            // Random bytes instead of frames.
            let length = seeded.rng().random_range(0..0x0100_0000_u32).to_be_bytes();
            let garbage = [wire::PREFACE, &length[1..], &bytes].concat();
            let mut stream = UnixStream::connect(&socket).await.context("cannot connect")?;
            let _ = stream.write_all(&garbage).await;
            // A frame may be longer than the bytes sent: then the agent waits for the rest.
            drop(stream);
        } else {
            // It would wait for the rest of a preface after its first byte.
            bytes[0] |= 0x80;
            until_closed(&socket, &bytes).await?;
        }
    }
    victim.check_undisturbed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn half_open_connections_delay_no_client() -> Result<()> {
    let mut victim = Victim::new().await?;
    let socket = victim.env.socket();
    let host = victim.env.tcp.trim_start_matches("tcp://").to_owned();
    let megabytes = prefixed(0, 100 << 20, &[0; 1000]);
    let beginnings: [Vec<u8>; 8] = [
        Vec::new(),
        b"P".to_vec(),
        wire::PREFACE.to_vec(),
        wire::opening(),
        // A call without a body, one without the end of it, one with a larger length than its body, an incomplete
        // frame.
        [wire::opening(), wire::head(1, NEXT)].concat(),
        [wire::opening(), wire::head(1, WATCH), wire::frame(0, 0, 1, &framed(&[]))].concat(),
        [wire::opening(), wire::head(1, NEXT), wire::frame(0, 0, 1, &megabytes)].concat(),
        [wire::opening(), wire::head(1, NEXT), vec![0, 0xff, 0xff, 0, 0, 0, 0, 0, 1, 1, 2]].concat(),
    ];
    let (mut unix, mut tcp) = (Vec::new(), Vec::new());
    for round in 0..64 {
        let beginning = &beginnings[round % beginnings.len()];
        let mut stream = UnixStream::connect(&socket).await.context("cannot connect")?;
        stream.write_all(beginning).await?;
        unix.push(stream);
        let mut stream = TcpStream::connect(&host).await.context("cannot connect")?;
        stream.write_all(beginning).await?;
        if round % 2 == 0 {
            // Half closed: the agent may still write.
            stream.shutdown().await?;
        }
        tcp.push(stream);
    }
    // They are all connected while others are served, new ones too.
    victim.changes().await?;
    let mut connection = Connection::open(&socket).await?;
    let answer = connection.call(NEXT, framed(&[])).await?;
    ensure!(answer.code() == Some(Code::Ok) && state(&answer.body)?.0.rev == victim.rev, "{answer:?}");
    // The agent ends those that sent nothing, or an incomplete preface or request.
    for (at, stream) in unix.iter_mut().enumerate().filter(|(at, _)| at % beginnings.len() < 2) {
        let mut rest = Vec::new();
        let closed = tokio::time::timeout(LONG, stream.read_to_end(&mut rest)).await;
        closed.with_context(|| format!("connection {at} stays open"))??;
    }
    // Calls whose request never completes are not kept among watchers forever.
    victim.env.wait_for_watchers(2, victim.rev).await?;
    drop((unix, tcp));
    victim.check_undisturbed().await
}

/// A connection, kept, that looks like a client that has no request yet. The kernel queues or refuses one that is not
/// accepted.
async fn newcomer(
    number: usize,
    socket: &Path,
    host: &str,
) -> Option<(Option<UnixStream>, Option<TcpStream>)> {
    let connected = tokio::time::timeout(Duration::from_secs(1), async {
        if number.is_multiple_of(2) {
            let mut stream = UnixStream::connect(socket).await?;
            stream.write_all(&wire::opening()).await?;
            std::io::Result::Ok((Some(stream), None))
        } else {
            let mut stream = TcpStream::connect(host).await?;
            stream.write_all(&wire::opening()).await?;
            Ok((None, Some(stream)))
        }
    });
    connected.await.ok()?.ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn excess_connections_delay_new_ones_only_while_they_are_open() -> Result<()> {
    let mut env = TestEnv::new()?;
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.1"]))?;
    env.agent.set("endpoints.max_watchers", 16)?;
    env.agent.start_live().await?;
    env.wait_for_rev(1).await?;
    let mut victim = Victim::of(env).await?;
    let socket = victim.env.socket();
    let host = victim.env.tcp.trim_start_matches("tcp://").to_owned();
    for round in 0..4 {
        let crowd =
            futures_util::future::join_all((0..600).map(|number| newcomer(number, &socket, &host))).await;
        let crowd: Vec<_> = crowd.into_iter().flatten().collect();
        eprintln!("{} of 600 connections are open or queued", crowd.len());
        ensure!(crowd.len() > 200, "round {round}: only {} connections were made", crowd.len());
        // Clients that were connected before notice nothing.
        victim.changes().await?;
        victim.changes().await?;
    }
    eprintln!("the agent has {} MB in use", victim.env.memory()? >> 20);
    // Once they are gone others can connect again.
    let mut connection = Connection::open(&socket).await?;
    let answer = connection.call(NEXT, framed(&[])).await?;
    ensure!(answer.code() == Some(Code::Ok) && state(&answer.body)?.0.rev == victim.rev, "{answer:?}");
    victim.check_undisturbed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_are_reset_at_once_cost_no_memory() -> Result<()> {
    let mut victim = Victim::new().await?;
    for path in [NEXT, WATCH] {
        let mut stream = UnixStream::connect(victim.env.socket()).await.context("cannot connect")?;
        stream.write_all(&wire::opening()).await?;
        for call in 0..20_000 {
            let id = 2 * call + 1;
            let cancel = wire::frame(3, 0, id, &8_u32.to_be_bytes());
            let bytes = [wire::head(id, path), wire::body(id, &framed(&[])), cancel].concat();
            // The agent may have closed the connection.
            if stream.write_all(&bytes).await.is_err() {
                eprintln!("{path}: the connection was closed after {call} calls");
                break;
            }
        }
        victim.changes().await?;
    }
    victim.env.wait_for_watchers(2, victim.rev).await?;
    eprintln!("the agent has {} MB in use", victim.env.memory()? >> 20);
    victim.check_undisturbed().await
}
