//! Pulls: decoded, coordinated, and answered with the runtime's texts.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use h2::Reason;
use http::HeaderMap;
use keelson_proto::{PULL_OPTION_ANNOTATION, PULL_OPTION_MAX_PARALLEL, PULL_OPTIONS_HEADER, cri};
use keelson_pulls::coordinator::Policy;
use prost::Message as _;
use tokio::{sync::watch, time::Instant};

use crate::support::{
    Agent, Call, Client, EMPTY, FakeRuntime, Frame, HOLD, IMAGE_STATUS, PULL_IMAGE, Sockets, VERSION,
    connect, connect_with, frame, frame_bytes, grpc_head, grpc_ok, grpc_status, on, policy, pull_request,
    run, tonic_channel, unframe, until,
};

const SECOND: Duration = Duration::from_secs(1);

/// Answers pulls when the gate opens, and records how other calls end.
struct Pulls {
    runtime: FakeRuntime,
    gate: watch::Sender<bool>,
    requests: Arc<Mutex<Vec<Bytes>>>,
    /// Calls that were reset or lost.
    left: Arc<Mutex<Vec<Option<Reason>>>>,
}

async fn gated(policy: Policy) -> (Pulls, Agent, Client) {
    let (gate, opened) = watch::channel(false);
    let (requests, left): (Arc<Mutex<Vec<Bytes>>>, Arc<Mutex<Vec<_>>>) = (Arc::default(), Arc::default());
    let (seen, gone) = (requests.clone(), left.clone());
    let handler = on(PULL_IMAGE, move |mut call| {
        let (seen, gone, mut opened) = (seen.clone(), gone.clone(), opened.clone());
        async move {
            let body = call.read().await;
            seen.lock().unwrap().push(body);
            tokio::select! {
                _ = opened.wait_for(|open| *open) => {}
                reason = call.reset() => return gone.lock().unwrap().push(reason),
            }
            call.answer_bytes(frame(&cri::PullImageResponse { image_ref: "sha256:1".into() }), grpc_ok())
                .await;
        }
    });
    let (runtime, agent, client) = connect_with(policy, handler).await;
    (Pulls { runtime, gate, requests, left }, agent, client)
}

#[test]
fn a_pull_passes_with_every_byte_and_its_answer_comes_back() {
    run(async {
        let (pulls, agent, client) = gated(policy()).await;
        pulls.gate.send_replace(true);
        let mut request = pull_request("r.io/x:v1");
        request.auth =
            Some(cri::AuthConfig { username: "robot".into(), password: "pw".into(), ..Default::default() });
        let mut wire = request.encode_to_vec();
        // A field that this build does not know, as from a newer kubelet.
        wire.extend([0xf8, 0x07, 0x2a]);
        let reply = client.call(PULL_IMAGE, frame_bytes(&wire)).await;
        assert_eq!((reply.code(), reply.head.status.as_u16()), (0, 200));
        assert_eq!(reply.head.headers["content-type"], "application/grpc");
        assert_eq!(unframe::<cri::PullImageResponse>(&reply.body).image_ref, "sha256:1");
        assert_eq!(*pulls.requests.lock().unwrap(), [frame_bytes(&wire)]);
        let mut tonic =
            cri::image_service_client::ImageServiceClient::new(tonic_channel(&agent.socket).await);
        assert_eq!(tonic.pull_image(request).await.unwrap().into_inner().image_ref, "sha256:1");
    });
}

#[test]
fn pull_metadata_passes_without_reserved_headers() {
    run(async {
        let (pulls, _agent, client) = gated(policy()).await;
        pulls.gate.send_replace(true);
        let headers = [
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
            ("tracestate", "a=1"),
            ("tracestate", "b=2"),
            ("baggage", "k=v"),
            ("x-bytes-bin", "AAECgP8"),
            ("grpc-timeout", "100S"),
            ("grpc-trace-bin", "AAA"),
            ("containerd-lease", "not-yours"),
            ("containerd-namespace", "moby"),
            ("user-agent", "grpc-go/1.80.0"),
        ];
        let reply = client.try_call(PULL_IMAGE, &headers, frame(&pull_request("r.io/x"))).await.unwrap();
        assert_eq!(reply.code(), 0);
        let seen = &pulls.runtime.calls(PULL_IMAGE)[0].headers;
        let all = |name: &str| -> Vec<_> {
            seen.get_all(name).iter().map(|value| value.to_str().unwrap()).collect()
        };
        assert_eq!(all("traceparent"), [headers[0].1]);
        assert_eq!(all("tracestate"), ["a=1", "b=2"]);
        assert_eq!(all("baggage"), ["k=v"]);
        assert_eq!(all("x-bytes-bin"), ["AAECgP8"]);
        for name in ["grpc-timeout", "grpc-trace-bin", "containerd-lease", "containerd-namespace"] {
            assert!(all(name).is_empty(), "{name}: {:?}", all(name));
        }
        assert_eq!(all("te"), ["trailers"]);
    });
}

#[test]
fn case_16_a_runtimes_error_comes_verbatim() {
    run(async {
        let turn = Arc::new(Mutex::new(0));
        let long = "x".repeat(100_000);
        let texts = ["RegistryUnavailable: x", "100%25 %C3%A4%0Aend", long.clone().leak()];
        let (_runtime, _agent, client) = connect(on(PULL_IMAGE, move |mut call| {
            let turn = turn.clone();
            async move {
                call.read().await;
                let turn = std::mem::replace(&mut *turn.lock().unwrap(), 1);
                let image = call.headers["x-text"].to_str().unwrap().parse::<usize>().unwrap();
                let mut status = grpc_status(2, texts[image]);
                // h{"\n\x05 as a google.rpc.Status of some kind: bytes that need no padding and some that do.
                status.insert("grpc-status-details-bin", "CAISA2Zvbw".parse().unwrap());
                status.append("x-retry", "a".parse().unwrap());
                status.append("x-retry", "b".parse().unwrap());
                status.insert("x-raw-bin", "AP8B".parse().unwrap());
                if turn == 0 {
                    return call.refuse(status);
                }
                // As trailers of an answer that had begun.
                let to = call.respond.send_response(grpc_head(), false);
                to.unwrap().send_trailers(status).unwrap();
            }
        }))
        .await;
        for text in [0, 0, 1, 2] {
            let headers = [("x-text", &*text.to_string())];
            let reply = client.try_call(PULL_IMAGE, &headers, frame(&pull_request("r.io/x"))).await.unwrap();
            let status = reply.status();
            assert_eq!((reply.code(), reply.text()), (2, texts[text]));
            assert_eq!(status["grpc-status-details-bin"], "CAISA2Zvbw");
            assert_eq!(status.get_all("x-retry").iter().collect::<Vec<_>>(), ["a", "b"]);
            assert_eq!(status["x-raw-bin"], "AP8B");
        }
    });
}

#[test]
fn a_successful_pulls_metadata_comes_back_once() {
    run(async {
        let (_runtime, _agent, client) = connect(on(PULL_IMAGE, |mut call| async move {
            call.read().await;
            let mut trailers = grpc_ok();
            trailers.insert("x-took-bin", "AAEC".parse().unwrap());
            let mut head = grpc_head();
            head.headers_mut().insert("x-node", "n1".parse().unwrap());
            let answer = frame(&cri::PullImageResponse { image_ref: "sha256:1".into() });
            call.answer_with(head, answer, trailers).await;
        }))
        .await;
        let reply = client.pull("r.io/x").await;
        let mut all = HeaderMap::new();
        all.extend(reply.head.headers.clone());
        all.extend(reply.trailers.unwrap());
        assert_eq!((all.get_all("x-node").iter().count(), all.get_all("x-took-bin").iter().count()), (1, 1));
        assert_eq!((&all["x-node"], &all["x-took-bin"]), (&"n1".parse().unwrap(), &"AAEC".parse().unwrap()));
    });
}

#[test]
fn case_20_a_silent_pull_of_ten_minutes_meets_no_ping_and_no_goaway() {
    run(async {
        // No stall detection: this test is about connections.
        let (pulls, _agent, client) = gated(Policy { stall_timeout: None, ..policy() }).await;
        let pull = client.start_pull("r.io/x").await;
        for _ in 0..60 {
            tokio::time::sleep(10 * SECOND).await;
            let since = Instant::now();
            assert_eq!(client.call(IMAGE_STATUS, EMPTY).await.code(), 0);
            assert!(since.elapsed() < SECOND);
        }
        assert_eq!(pulls.runtime.calls(PULL_IMAGE).len(), 1);
        pulls.gate.send_replace(true);
        assert_eq!(pull.reply().await.unwrap().code(), 0);
        assert_eq!((pulls.runtime.frames(Frame::PING), pulls.runtime.frames(Frame::GOAWAY)), (0, 0));
        assert!(client.frames.of_kind(Frame::PING).is_empty());
        assert!(client.frames.of_kind(Frame::GOAWAY).is_empty());
        assert_eq!(pulls.runtime.connections(), 2);
    });
}

#[test]
fn case_07_a_caller_that_cancels_gives_its_pull_up_after_the_grace_period() {
    run(async {
        let (pulls, agent, client) = gated(policy()).await;
        let mut call = client.start_pull("r.io/x").await;
        until("it runs", || pulls.requests.lock().unwrap().len() == 1).await;
        call.body.send_reset(Reason::CANCEL);
        until("the coordinator knows", || agent.handled("CallerLeft") == 1).await;
        assert!(pulls.left.lock().unwrap().is_empty(), "the grace period runs");
        tokio::time::sleep(11 * SECOND).await;
        assert_eq!(*pulls.left.lock().unwrap(), [Some(Reason::CANCEL)]);
        assert_eq!(client.call(VERSION, EMPTY).await.code(), 0);
        assert_eq!(agent.metrics.in_flight.get(), 0);
    });
}

#[test]
fn case_07_a_killed_callers_pulls_leave_the_queue_at_once() {
    run(async {
        let (pulls, agent, client) = gated(Policy { limit: 3, ..policy() }).await;
        let mut calls = Vec::new();
        for n in 0..13 {
            calls.push(client.start_pull(&format!("r.io/x{n}")).await);
        }
        until("three run", || pulls.requests.lock().unwrap().len() == 3).await;
        until("ten wait", || agent.metrics.queue_depth.get() == 10).await;
        client.kill();
        tokio::time::sleep(SECOND).await;
        assert_eq!((agent.metrics.queue_depth.get(), agent.metrics.in_flight.get()), (0, 3));
        assert_eq!((agent.handled("CallerLeft"), agent.metrics.callers.get()), (13, 0));
        tokio::time::sleep(10 * SECOND).await;
        assert_eq!(agent.metrics.in_flight.get(), 0);
        assert_eq!(*pulls.left.lock().unwrap(), [Some(Reason::CANCEL); 3]);
        assert_eq!(pulls.requests.lock().unwrap().len(), 3);
    });
}

#[test]
fn an_answered_caller_is_not_counted_as_left() {
    run(async {
        let (pulls, agent, client) = gated(policy()).await;
        pulls.gate.send_replace(true);
        assert_eq!(client.pull("r.io/x").await.code(), 0);
        client.kill();
        tokio::time::sleep(SECOND).await;
        assert_eq!(agent.handled("CallerLeft"), 0);
    });
}

#[test]
fn case_03_two_callers_share_one_call() {
    run(async {
        let (pulls, agent, first) = gated(policy()).await;
        let second = agent.client().await;
        let one = first.start_pull("r.io/x").await;
        let two = second.start_pull("r.io/x").await;
        until("both wait", || agent.metrics.callers.get() == 2).await;
        pulls.gate.send_replace(true);
        for call in [one, two] {
            let reply = call.reply().await.unwrap();
            assert_eq!(unframe::<cri::PullImageResponse>(&reply.body).image_ref, "sha256:1");
        }
        assert_eq!(pulls.runtime.calls(PULL_IMAGE).len(), 1);
    });
}

#[test]
fn a_callers_deadline_is_kept_while_the_pull_waits() {
    run(async {
        let (pulls, _agent, client) = gated(Policy { limit: 1, ..policy() }).await;
        let running = client.start_pull("r.io/first").await;
        until("it runs", || pulls.requests.lock().unwrap().len() == 1).await;
        let since = Instant::now();
        let timeout = [("grpc-timeout", "45S")];
        let reply = client.try_call(PULL_IMAGE, &timeout, frame(&pull_request("r.io/second"))).await.unwrap();
        assert_eq!((reply.code(), since.elapsed().as_secs()), (4, 45));
        assert!(reply.text().contains("queued"), "{}", reply.text());
        pulls.gate.send_replace(true);
        assert_eq!(running.reply().await.unwrap().code(), 0);
    });
}

#[test]
fn pulls_are_held_for_an_absent_runtime_and_refused_by_name() {
    run(async {
        let sockets = Sockets::new();
        let agent = Agent::start(&sockets).await;
        let client = agent.client().await;
        let since = Instant::now();
        let reply = client.pull("r.io/x").await;
        assert_eq!((reply.code(), since.elapsed().as_secs()), (14, HOLD.as_secs()));
        let name = format!("unix://{}", sockets.runtime().display());
        assert!(reply.text().contains(&name), "{}", reply.text());
        let waiting = client.start_pull("r.io/x").await;
        tokio::time::sleep(50 * SECOND).await;
        let _runtime = FakeRuntime::standard(&sockets);
        assert_eq!(waiting.reply().await.unwrap().code(), 0);
    });
}

#[test]
fn a_pull_whose_connection_breaks_is_made_again() {
    run(async {
        let broken = Arc::new(Mutex::new(1));
        let (runtime, agent, client) = connect(move |mut call: Call| {
            let broken = broken.clone();
            async move {
                if call.path == PULL_IMAGE && std::mem::replace(&mut *broken.lock().unwrap(), 0) == 1 {
                    call.read().await;
                    call.drop_connection();
                    return std::future::pending().await;
                }
                call.standard().await;
            }
        })
        .await;
        client.pull("r.io/x").await.assert_ok();
        assert_eq!(runtime.calls(PULL_IMAGE).len(), 2);
        assert_eq!(agent.metrics.lost.get(), 1);
    });
}

#[test]
fn the_pull_option_goes_to_a_runtime_that_offers_it() {
    run(async {
        let requests: Arc<Mutex<Vec<cri::PullImageRequest>>> = Arc::default();
        let seen = requests.clone();
        let policy = Policy { limit: 7, enforce_by_runtime: true, ..policy() };
        let (_runtime, agent, client) = connect_with(policy, move |mut call: Call| {
            let seen = seen.clone();
            async move {
                match &*call.path {
                    VERSION => {
                        let mut head = grpc_head();
                        let offer = format!("other, {PULL_OPTION_MAX_PARALLEL}");
                        head.headers_mut().insert(PULL_OPTIONS_HEADER, offer.parse().unwrap());
                        call.answer_with(head, frame(&cri::VersionResponse::default()), grpc_ok()).await;
                    }
                    PULL_IMAGE => {
                        let request = call.message().await;
                        seen.lock().unwrap().push(request);
                        call.answer_bytes(frame(&cri::PullImageResponse::default()), grpc_ok()).await;
                    }
                    _ => call.standard().await,
                }
            }
        })
        .await;
        agent.runtime_up().await;
        client.pull("r.io/x").await.assert_ok();
        let request = requests.lock().unwrap()[0].clone();
        assert_eq!(request.image.unwrap().annotations[PULL_OPTION_ANNOTATION], "7");
        assert_eq!(request.sandbox_config, pull_request("").sandbox_config);
    });
}
