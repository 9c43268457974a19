//! Misbehaving clients, and many of them.

use std::time::Duration;

use futures_util::future::join_all;
use h2::Reason;
use keelson_cri::front::Phase;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    sync::watch,
};

use crate::support::{
    Agent, Call, Client, EMPTY, FakeRuntime, Frame, IMAGE_STATUS, PULL_IMAGE, RawClient, VERSION, client,
    connect, frame, grpc_ok, pull_request, run, until,
};

const SECOND: Duration = Duration::from_secs(1);

/// Says `hello` and reads until the front hangs up.
async fn send_and_read_to_end(agent: &Agent, hello: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(&agent.socket).await.unwrap();
    // The front may hang up before everything is written.
    let _ = stream.write_all(hello).await;
    let mut received = Vec::new();
    let _ = stream.read_to_end(&mut received).await;
    received
}

#[test]
fn connections_without_http2_are_closed() {
    run(async {
        let (runtime, agent, _) = connect(Call::standard).await;
        agent.runtime_up().await;
        let garbage: Vec<u8> =
            (0..100_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut preface_then_garbage = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        preface_then_garbage.extend(&garbage);
        for hello in [
            &garbage[..],
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            &preface_then_garbage,
            b"",
            b"PRI * HTTP/2.0",
        ] {
            send_and_read_to_end(&agent, hello).await;
        }
        // A complete preface and then silence is a client that has nothing to send yet.
        let mut idle = UnixStream::connect(&agent.socket).await.unwrap();
        idle.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
        assert_eq!(agent.client().await.call(VERSION, EMPTY).await.code(), 0);
        assert_eq!(runtime.connections(), 2, "no connection is made for those that ask nothing");
    });
}

#[test]
fn a_half_open_connection_does_not_affect_others() {
    run(async {
        let (_runtime, agent, _) = connect(Call::standard).await;
        // The head of a HEADERS frame without the rest.
        let hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0\0\0\x40\x01\x04\0\0\0\x01\x83";
        let mut half = Vec::new();
        for _ in 0..50 {
            let mut stream = UnixStream::connect(&agent.socket).await.unwrap();
            stream.write_all(hello).await.unwrap();
            half.push(stream);
        }
        tokio::time::sleep(60 * SECOND).await;
        let client = agent.client().await;
        assert_eq!(client.call(VERSION, EMPTY).await.code(), 0);
        // A client that has closed its side and waits for the answer.
        let (mut reading, writing) = UnixStream::connect(&agent.socket).await.unwrap().into_split();
        writing.forget();
        drop(half);
        tokio::time::sleep(20 * SECOND).await;
        let mut received = Vec::new();
        reading.read_to_end(&mut received).await.unwrap();
        assert_eq!(client.call(VERSION, EMPTY).await.code(), 0);
    });
}

#[test]
fn five_hundred_connections_at_once() {
    run(async {
        let (runtime, agent, _) = connect(Call::standard).await;
        agent.runtime_up().await;
        let clients = join_all((0..500).map(|_| agent.client())).await;
        let replies = join_all(clients.iter().map(|client| client.call(IMAGE_STATUS, EMPTY))).await;
        assert!(replies.iter().all(|reply| reply.code() == 0));
        assert_eq!(runtime.open_connections(), 501);
        drop(clients);
        until("all are closed", || runtime.open_connections() == 1).await;
    });
}

/// A runtime that holds calls with `x-wait` until the gate opens, the agent, and a client.
async fn gated() -> (FakeRuntime, Agent, Client, watch::Sender<bool>) {
    let (gate, opened) = watch::channel(false);
    let (runtime, agent, client) = connect(move |mut call: Call| {
        let mut opened = opened.clone();
        async move {
            if call.headers.contains_key("x-wait") {
                let body = call.read().await;
                opened.wait_for(|open| *open).await.unwrap();
                return call.answer_bytes(body, grpc_ok()).await;
            }
            call.standard().await;
        }
    })
    .await;
    (runtime, agent, client, gate)
}

#[test]
fn five_thousand_calls_at_once_on_one_connection() {
    run(async {
        let (runtime, _agent, client, gate) = gated().await;
        let calls = join_all((0..5_000_u32).map(|n| {
            let body = client::frame_bytes(&n.to_be_bytes());
            client.send(IMAGE_STATUS, &[("x-wait", "1")], Some(body))
        }))
        .await;
        until("all are at the runtime", || runtime.calls(IMAGE_STATUS).len() == 5_000).await;
        assert_eq!(client.call(VERSION, EMPTY).await.code(), 0, "the connection has room for more");
        gate.send_replace(true);
        for (n, call) in calls.into_iter().enumerate() {
            let reply = call.reply().await.unwrap();
            assert_eq!(reply.body[5..], u32::try_from(n).unwrap().to_be_bytes());
        }
        assert_eq!(runtime.connections(), 2);
        assert!(client.is_open());
    });
}

#[test]
fn three_thousand_calls_cancelled_at_once_and_many_times_leave_the_connection_alive() {
    run(async {
        let (runtime, _agent, client, gate) = gated().await;
        for turn in 0..3 {
            let calls =
                join_all((0..3_000).map(|_| client.send(IMAGE_STATUS, &[("x-wait", "1")], Some(EMPTY))))
                    .await;
            if turn > 0 {
                // Otherwise they are cancelled in the packet that makes them.
                until("they are there", || runtime.calls(IMAGE_STATUS).len() >= turn * 3_000).await;
            }
            for mut call in calls {
                call.body.send_reset(Reason::CANCEL);
            }
            assert_eq!(client.call(VERSION, EMPTY).await.code(), 0, "turn {turn}");
        }
        // Late answers to cancelled calls are no error.
        gate.send_replace(true);
        tokio::time::sleep(60 * SECOND).await;
        assert_eq!(client.call(VERSION, EMPTY).await.code(), 0);
        assert!(client.is_open() && client.frames.of_kind(Frame::GOAWAY).is_empty());
        assert_eq!((runtime.connections(), runtime.frames(Frame::GOAWAY)), (2, 0));
    });
}

#[test]
fn calls_cancelled_in_the_packet_that_makes_them_leave_the_connection_alive() {
    run(async {
        let (_runtime, agent, _) = connect(Call::standard).await;
        let mut client = RawClient::connect(&agent.socket).await;
        // As after a node was suspended for a while, and every call on it timed out.
        let mut packet = Vec::new();
        for n in 0..500 {
            packet.extend(RawClient::request(2 * n + 1, IMAGE_STATUS));
            packet.extend(RawClient::cancel(2 * n + 1));
        }
        client.write(&packet).await;
        client.write(&RawClient::request(1001, VERSION)).await;
        assert!(client.answered(1001).await);
    });
}

#[test]
fn malformed_calls_do_not_add_up_over_the_life_of_a_connection() {
    run(async {
        let (_runtime, agent, _) = connect(Call::standard).await;
        let mut client = RawClient::connect(&agent.socket).await;
        for n in 0..1_500 {
            client.write(&RawClient::malformed(2 * n + 1)).await;
            assert!(!client.answered(2 * n + 1).await);
        }
        client.write(&RawClient::request(3_001, VERSION)).await;
        assert!(client.answered(3_001).await);
    });
}

#[test]
fn case_18_a_pull_request_of_17_mib_is_refused_and_the_connection_lives() {
    run(async {
        let (runtime, _agent, client) = connect(Call::standard).await;
        let mut request = pull_request("r.io/x");
        request.image.as_mut().unwrap().annotations.insert("large".into(), "x".repeat(17 * 1024 * 1024));
        let call = client.send(PULL_IMAGE, &[], None).await;
        let (mut body, large) = (call.body, frame(&request));
        // The front stops reading before the end.
        let writing = tokio::spawn(async move { client::write(&mut body, large, true).await });
        let head = call.response.await.unwrap().into_parts().0;
        assert_eq!(head.headers["grpc-status"], "8");
        let text = head.headers["grpc-message"].to_str().unwrap();
        assert!(text.contains("larger than 16777216 bytes"), "{text}");
        writing.abort();
        assert_eq!(client.call(VERSION, EMPTY).await.code(), 0);
        // 16 MiB and not a byte more.
        request.image.as_mut().unwrap().annotations.insert("large".into(), "x".repeat(16 * 1024 * 1024 - 64));
        let room = 16 * 1024 * 1024 + 5 - frame(&request).len();
        request.image.as_mut().unwrap().annotations.get_mut("large").unwrap().push_str(&"x".repeat(room));
        assert_eq!(frame(&request).len(), 16 * 1024 * 1024 + 5);
        client.call(PULL_IMAGE, frame(&request)).await.assert_ok();
        assert_eq!(runtime.calls(PULL_IMAGE).len(), 1);
    });
}

#[test]
fn a_graceful_stop_lets_running_calls_end() {
    run(async {
        let (runtime, mut agent, client, gate) = gated().await;
        let running = client.send(IMAGE_STATUS, &[("x-wait", "1")], Some(EMPTY)).await;
        let idle = agent.client().await;
        assert_eq!(idle.call(VERSION, EMPTY).await.code(), 0);
        // During its handshake, which may take 10 s.
        let mut silent = UnixStream::connect(&agent.socket).await.unwrap();
        let mut head = [0; 9];
        silent.read_exact(&mut head).await.expect("the settings of the server, once it was accepted");
        silent.read_exact(&mut vec![0; usize::from(head[2])]).await.unwrap();
        until("it is at the runtime", || !runtime.calls(IMAGE_STATUS).is_empty()).await;
        agent.phase.send_replace(Phase::Leaving);
        // I8: a client in its handshake receives GOAWAY, so that it can call elsewhere.
        let preface = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &[0, 0, 0, 4, 0, 0, 0, 0, 0]].concat();
        silent.write_all(&preface).await.unwrap();
        loop {
            silent.read_exact(&mut head).await.expect("GOAWAY comes before the end");
            if head[3] == Frame::GOAWAY {
                break;
            }
            let length = usize::from(head[1]) << 8 | usize::from(head[2]);
            silent.read_exact(&mut vec![0; length]).await.unwrap();
        }
        tokio::time::sleep(SECOND).await;
        assert!(!client.frames.of_kind(Frame::GOAWAY).is_empty());
        assert!(UnixStream::connect(&agent.socket).await.is_err(), "no listener is left");
        assert!(!idle.is_open() && client.is_open());
        let serving = agent.serving.take().unwrap();
        assert!(!serving.is_finished(), "a call still runs");
        gate.send_replace(true);
        assert_eq!(running.reply().await.unwrap().code(), 0);
        drop(silent);
        let since = tokio::time::Instant::now();
        serving.await.unwrap();
        assert!(since.elapsed() < SECOND, "{:?}", since.elapsed());
    });
}

#[test]
fn a_very_large_header_list_passes() {
    run(async {
        let (runtime, _agent, client) = connect(Call::standard).await;
        let long = "x".repeat(200_000);
        let reply = client.try_call(IMAGE_STATUS, &[("x-long", &long)], EMPTY).await.unwrap();
        assert_eq!(reply.code(), 0);
        assert_eq!(runtime.calls(IMAGE_STATUS)[0].headers["x-long"], *long);
    });
}
