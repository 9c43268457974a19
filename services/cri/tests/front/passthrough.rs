//! Every call but a pull is passed through unchanged.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::poll_fn;
use h2::Reason;
use http::HeaderMap;
use keelson_proto::{PULL_OPTION_MAX_PARALLEL, PULL_OPTIONS_HEADER, cri};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::support::{
    Agent, Call, Client, EMPTY, FakeRuntime, Frame, IMAGE_STATUS, VERSION, client, connect, frame, grpc_head,
    grpc_ok, grpc_status, on, run, tonic_channel, unframe, until,
};

const UNKNOWN: &str = "/runtime.v9.TimeService/Rewind";

fn pattern(length: usize) -> Bytes {
    // A prime period, so that a lost or moved piece is detected.
    (0..length).map(|i| (i % 251) as u8).collect()
}

#[test]
fn an_unknown_unary_call_passes_with_metadata_and_trailers_verbatim() {
    run(async {
        let (runtime, _agent, client) = connect(on(UNKNOWN, |mut call| async move {
            let body = call.read().await;
            let mut head = grpc_head();
            head.headers_mut().append("x-answer", "1".parse().unwrap());
            head.headers_mut().append("x-answer", "2".parse().unwrap());
            let mut trailers = grpc_status(9, "was%20here");
            trailers.insert("x-end-bin", "AP8B".parse().unwrap());
            trailers.append("x-end", "a".parse().unwrap());
            trailers.append("x-end", "b".parse().unwrap());
            call.answer_with(head, body, trailers).await;
        }))
        .await;
        let headers = [
            ("grpc-timeout", "1234567m"),
            ("x-plain", "one"),
            ("x-plain", "two"),
            ("x-bytes-bin", "AAECgP8"),
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
            ("user-agent", "grpc-go/1.80.0"),
            ("authorization", "kept"),
        ];
        let reply = client.try_call(UNKNOWN, &headers, Bytes::from_static(b"\0\0\0\0\x02hi")).await.unwrap();
        assert_eq!(reply.body, &b"\0\0\0\0\x02hi"[..]);
        assert_eq!(reply.head.status, 200);
        let answers: Vec<_> = reply.head.headers.get_all("x-answer").iter().collect();
        assert_eq!(answers, ["1", "2"]);
        let expected: HeaderMap = [
            ("grpc-status", "9"),
            ("grpc-message", "was%20here"),
            ("x-end-bin", "AP8B"),
            ("x-end", "a"),
            ("x-end", "b"),
        ]
        .into_iter()
        .map(|(name, value)| (name.parse::<http::HeaderName>().unwrap(), value.parse().unwrap()))
        .collect();
        assert_eq!(reply.trailers, Some(expected));
        let seen = runtime.calls(UNKNOWN);
        assert_eq!(seen.len(), 1);
        for (name, _) in headers {
            let sent: Vec<_> =
                headers.iter().filter(|(other, _)| *other == name).map(|(_, value)| *value).collect();
            let came: Vec<_> =
                seen[0].headers.get_all(name).iter().map(|value| value.to_str().unwrap()).collect();
            assert_eq!(came, sent, "{name}");
        }
        assert_eq!(seen[0].headers["te"], "trailers");
    });
}

#[test]
fn containerds_own_metadata_is_stripped_from_cri_calls_only() {
    run(async {
        let (runtime, _agent, client) = connect(Call::standard).await;
        let headers =
            [("containerd-lease", "mine"), ("containerd-namespace", "other"), ("x-containerd-lease", "no")];
        let own = "/containerd.services.leases.v1.Leases/Frobnicate";
        for path in [IMAGE_STATUS, own] {
            client.try_call(path, &headers, EMPTY).await.unwrap();
        }
        let cri = &runtime.calls(IMAGE_STATUS)[0].headers;
        assert_eq!((cri.get("containerd-lease"), cri.get("containerd-namespace")), (None, None));
        assert_eq!(cri["x-containerd-lease"], "no");
        let own = &runtime.calls(own)[0].headers;
        assert_eq!([&own["containerd-lease"], &own["containerd-namespace"]], ["mine", "other"]);
    });
}

#[test]
fn case_19_unimplemented_passes_as_it_is() {
    run(async {
        let (_runtime, _agent, client) = connect(Call::standard).await;
        let reply = client.call("/runtime.v1.ImageService/StreamImages", EMPTY).await;
        assert_eq!(reply.code(), 12);
        assert_eq!(reply.text(), "unknown method /runtime.v1.ImageService/StreamImages");
        assert!(reply.trailers.is_none(), "nothing but a head, as it came");
    });
}

#[test]
fn a_server_stream_arrives_piece_by_piece() {
    run(async {
        let (next, turns) = tokio::sync::mpsc::channel::<Option<&'static str>>(1);
        let turns = Arc::new(tokio::sync::Mutex::new(turns));
        let (_runtime, _agent, client) = connect(on(UNKNOWN, move |mut call| {
            let turns = turns.clone();
            async move {
                let mut to = call.respond.send_response(grpc_head(), false).unwrap();
                while let Some(Some(piece)) = turns.lock().await.recv().await {
                    to.send_data(Bytes::from_static(piece.as_bytes()), false).unwrap();
                }
                to.send_trailers(grpc_ok()).unwrap();
            }
        }))
        .await;
        let call = client.send(UNKNOWN, &[], Some(EMPTY)).await;
        let mut body = call.response.await.expect("the head comes before the first piece").into_body();
        for piece in ["one", "two", "three"] {
            next.send(Some(piece)).await.unwrap();
            let data = poll_fn(|cx| body.poll_data(cx)).await.unwrap().unwrap();
            assert_eq!(data, piece.as_bytes());
        }
        next.send(None).await.unwrap();
        assert!(poll_fn(|cx| body.poll_data(cx)).await.is_none());
        let trailers = poll_fn(|cx| body.poll_trailers(cx)).await.unwrap().unwrap();
        assert_eq!(trailers["grpc-status"], "0");
    });
}

/// Answers at once, and sends back every piece that it receives.
async fn echo(mut call: Call) {
    if call.path != UNKNOWN {
        return call.standard().await;
    }
    let mut to = call.respond.send_response(grpc_head(), false).unwrap();
    while let Some(data) = poll_fn(|cx| call.body.poll_data(cx)).await {
        let data = data.unwrap();
        call.body.flow_control().release_capacity(data.len()).unwrap();
        client::write(&mut to, data, false).await.unwrap();
    }
    to.send_trailers(grpc_ok()).unwrap();
}

#[test]
fn both_sides_of_a_bidirectional_stream_flow_at_once() {
    run(async {
        let (_runtime, _agent, client) = connect(echo).await;
        let mut call = client.send(UNKNOWN, &[], None).await;
        let mut body = call.response.await.expect("the head comes before the first piece").into_body();
        for turn in 0..100_u8 {
            let piece = Bytes::from(vec![turn; 1 + usize::from(turn) * 7]);
            client::write(&mut call.body, piece.clone(), false).await.unwrap();
            let mut came = Vec::new();
            while came.len() < piece.len() {
                let data = poll_fn(|cx| body.poll_data(cx)).await.unwrap().unwrap();
                body.flow_control().release_capacity(data.len()).unwrap();
                came.extend_from_slice(&data);
            }
            assert_eq!(came, piece);
        }
        call.body.send_data(Bytes::new(), true).unwrap();
        assert!(poll_fn(|cx| body.poll_data(cx)).await.is_none());
        assert!(poll_fn(|cx| body.poll_trailers(cx)).await.unwrap().is_some());
    });
}

#[test]
fn no_byte_is_lost_or_moved_while_the_answer_begins_within_small_windows() {
    for window in [1_000, 65_535, 1 << 20] {
        run(async move {
            let (_runtime, agent, _) = connect(echo).await;
            let mut builder = h2::client::Builder::new();
            builder.initial_window_size(window).initial_connection_window_size(65_535);
            let client = client::Client::connect_with(&agent.socket, &builder).await;
            let all = pattern(if window < 10_000 { 300_000 } else { 3_000_000 });
            let call = client.send(UNKNOWN, &[], None).await;
            let (mut to, sent) = (call.body, all.clone());
            let writing = tokio::spawn(async move {
                client::write(&mut to, sent, true).await.unwrap();
                to
            });
            let mut body = call.response.await.unwrap().into_body();
            let came = client::read(&mut body).await.unwrap();
            assert!(came == all, "window {window}: {} of {} bytes, or others", came.len(), all.len());
            assert!(poll_fn(|cx| body.poll_trailers(cx)).await.unwrap().is_some());
            drop(writing.await.unwrap());
        });
    }
}

#[test]
fn a_client_stream_is_answered_at_its_end() {
    run(async {
        let (_runtime, _agent, client) = connect(on(UNKNOWN, Call::answer_with_request)).await;
        let mut call = client.send(UNKNOWN, &[], None).await;
        for piece in [&b"first "[..], b"second ", b"third"] {
            call.body.send_data(Bytes::from_static(piece), false).unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        call.body.send_data(Bytes::new(), true).unwrap();
        let reply = call.reply().await.unwrap();
        assert_eq!((reply.body.as_ref(), reply.code()), (&b"first second third"[..], 0));
    });
}

#[test]
fn an_end_that_comes_while_the_last_piece_waits_for_room_is_not_lost() {
    run(async {
        let (open, gate) = tokio::sync::watch::channel(false);
        let (_runtime, _agent, client) = connect(on(UNKNOWN, move |mut call| {
            let mut gate = gate.clone();
            async move {
                gate.wait_for(|open| *open).await.unwrap();
                let length = call.read().await.len().to_string();
                call.answer_bytes(Bytes::from(length), grpc_ok()).await;
            }
        }))
        .await;
        let mut call = client.send(UNKNOWN, &[], None).await;
        // More than the runtime's window of 1 MiB, so that the front holds the rest.
        client::write(&mut call.body, pattern(1_500_000), false).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        call.body.send_data(Bytes::new(), true).unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        open.send_replace(true);
        let reply = call.reply().await.unwrap();
        assert_eq!(reply.body, "1500000");
    });
}

#[test]
fn an_early_answer_of_the_runtime_ends_the_upload() {
    run(async {
        let (runtime, _agent, client) = connect(on(UNKNOWN, |call| async move {
            call.refuse(grpc_status(7, "no need to read that"));
        }))
        .await;
        let mut call = client.send(UNKNOWN, &[], None).await;
        call.body.send_data(Bytes::from_static(b"the beginning"), false).unwrap();
        let reply = call.reply().await.unwrap();
        assert_eq!((reply.code(), reply.text()), (7, "no need to read that"));
        let again = client.call(VERSION, EMPTY).await;
        assert_eq!(again.code(), 0);
        assert_eq!(runtime.connections(), 2, "the client's and the agent's own");
    });
}

#[test]
fn messages_of_16_mib_pass_both_ways() {
    run(async {
        let (_runtime, _agent, client) = connect(on(UNKNOWN, Call::answer_with_request)).await;
        let message = cri::ImageSpec { image: "x".repeat(16 * 1024 * 1024 - 5), ..Default::default() };
        let framed = frame(&message);
        assert_eq!(framed.len(), 16 * 1024 * 1024 + 5);
        let reply = client.call(UNKNOWN, framed.clone()).await;
        assert!(reply.body == framed);
        assert_eq!(reply.code(), 0);
    });
}

#[test]
fn case_18_nine_mib_of_images_pass_to_tonic() {
    run(async {
        let image = cri::Image { id: "i".repeat(1024), size: 7, ..Default::default() };
        let images = cri::ListImagesResponse { images: vec![image; 9 * 1024] };
        let expected = images.clone();
        let (_runtime, agent, _) = connect(on("/runtime.v1.ImageService/ListImages", move |call| {
            let images = images.clone();
            async move { call.answer(&images).await }
        }))
        .await;
        let channel = tonic_channel(&agent.socket).await;
        let mut images = cri::image_service_client::ImageServiceClient::new(channel.clone())
            .max_decoding_message_size(16 * 1024 * 1024);
        let listed = images.list_images(cri::ListImagesRequest::default()).await.unwrap().into_inner();
        assert!(listed == expected);
        // tonic's own limit of 4 MiB is the client's error, and the connection stays open.
        let mut careful = cri::image_service_client::ImageServiceClient::new(channel);
        let error = careful.list_images(cri::ListImagesRequest::default()).await.unwrap_err();
        assert_eq!(error.code(), tonic::Code::OutOfRange);
        let mut request = tonic::Request::new(cri::ImageStatusRequest::default());
        request.set_timeout(Duration::from_secs(30));
        assert!(images.image_status(request).await.unwrap().into_inner().image.is_none());
    });
}

#[test]
fn a_client_that_does_not_read_stops_only_its_own_stream() {
    run(async {
        let accepted = Arc::new(Mutex::new(0_usize));
        let count = accepted.clone();
        let (_runtime, agent, client) = connect(on(UNKNOWN, move |mut call| {
            let count = count.clone();
            async move {
                let mut to = call.respond.send_response(grpc_head(), false).unwrap();
                loop {
                    let piece = Bytes::from_static(&[7; 16_384]);
                    if client::write(&mut to, piece, false).await.is_err() {
                        return;
                    }
                    *count.lock().unwrap() += 16_384;
                }
            }
        }))
        .await;
        let stalled = client.send(UNKNOWN, &[], Some(EMPTY)).await;
        let body = stalled.response.await.unwrap().into_body();
        let mut before = usize::MAX;
        until("the runtime is stopped", || {
            let now = *accepted.lock().unwrap();
            std::mem::replace(&mut before, now) == now && now > 0
        })
        .await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        let taken = *accepted.lock().unwrap();
        // The front's window of 1 MiB, the client's of 64 KiB, and buffers of sockets.
        assert!(taken < 4 * 1024 * 1024, "{taken} bytes were taken from the runtime");
        // Its connection has no room left for data; another connection has.
        assert_eq!(agent.client().await.call(VERSION, EMPTY).await.code(), 0);
        drop((body, stalled.body));
        assert_eq!(client.call(VERSION, EMPTY).await.code(), 0);
    });
}

#[test]
fn a_runtime_that_does_not_read_stops_the_client() {
    run(async {
        let (runtime, _agent, client, _left) = waiting_runtime().await;
        let call = client.send(UNKNOWN, &[], None).await;
        let sent = Arc::new(Mutex::new(0_usize));
        let (mut to, count) = (call.body, sent.clone());
        let writing = tokio::spawn(async move {
            // Far more than may be taken, but not endless.
            while client::write(&mut to, pattern(10_000), false).await.is_ok() {
                *count.lock().unwrap() += 10_000;
                if *count.lock().unwrap() > 16 * 1024 * 1024 {
                    return to;
                }
            }
            to
        });
        until("the call is there", || !runtime.calls(UNKNOWN).is_empty()).await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        // The runtime's window of 1 MiB, the front's window of the same size, and buffers of sockets.
        let sent = *sent.lock().unwrap();
        assert!(sent > 1024 * 1024 && sent < 4 * 1024 * 1024, "{sent} bytes were taken from the client");
        writing.abort();
    });
}

/// A runtime that reads nothing and reports how each call to [`UNKNOWN`] ended, the agent, and a client.
async fn waiting_runtime() -> (FakeRuntime, Agent, Client, UnboundedReceiver<Option<Reason>>) {
    let (ended, ends) = unbounded_channel();
    let (runtime, agent, client) = connect(on(UNKNOWN, move |mut call| {
        let ended = ended.clone();
        // A test may be over before the last call ends.
        async move { ended.send(call.reset().await).unwrap_or_default() }
    }))
    .await;
    (runtime, agent, client, ends)
}

#[test]
fn a_clients_cancel_reaches_the_runtime() {
    run(async {
        let (runtime, _agent, client, mut left) = waiting_runtime().await;
        for finished in [true, false] {
            let before = runtime.calls(UNKNOWN).len();
            let mut call = client.send(UNKNOWN, &[], finished.then_some(EMPTY)).await;
            until("the call is there", || runtime.calls(UNKNOWN).len() > before).await;
            call.body.send_reset(Reason::CANCEL);
            assert_eq!(left.recv().await.unwrap(), Some(Reason::CANCEL));
        }
        assert_eq!(runtime.frames(Frame::RST_STREAM), 2);
        assert_eq!(client.call(VERSION, EMPTY).await.code(), 0);
    });
}

#[test]
fn a_lost_client_leaves_nothing_at_the_runtime() {
    run(async {
        let (runtime, _agent, client, mut left) = waiting_runtime().await;
        let mut calls = Vec::new();
        for _ in 0..3 {
            calls.push(client.send(UNKNOWN, &[], Some(EMPTY)).await);
        }
        until("the calls are there", || runtime.calls(UNKNOWN).len() == 3).await;
        client.kill();
        for _ in &calls {
            // A reset, or the end of the connection that was made for this client.
            left.recv().await.unwrap();
        }
        until("the connection is closed", || runtime.open_connections() == 1).await;
    });
}

#[test]
fn the_runtimes_reset_reaches_the_client_with_its_reason() {
    run(async {
        let reasons =
            [Reason::INTERNAL_ERROR, Reason::ENHANCE_YOUR_CALM, Reason::REFUSED_STREAM, Reason::CANCEL];
        let (_runtime, _agent, client) = connect(on(UNKNOWN, move |mut call| async move {
            let turn: usize = call.headers["x-turn"].to_str().unwrap().parse().unwrap();
            let reason = reasons[turn / 2];
            if turn.is_multiple_of(2) {
                return call.respond.send_reset(reason);
            }
            let mut to = call.respond.send_response(grpc_head(), false).unwrap();
            to.send_data(Bytes::from_static(b"some"), false).unwrap();
            // Otherwise the reset discards what is not sent yet.
            tokio::time::sleep(Duration::from_millis(10)).await;
            to.send_reset(reason);
        }))
        .await;
        for turn in 0..reasons.len() * 2 {
            let headers = [("x-turn", &*turn.to_string())];
            let error = client.try_call(UNKNOWN, &headers, EMPTY).await.unwrap_err();
            assert_eq!((error.is_reset(), error.reason()), (true, Some(reasons[turn / 2])), "turn {turn}");
        }
        assert_eq!(client.call(VERSION, EMPTY).await.code(), 0);
    });
}

#[test]
fn the_first_answer_shows_that_the_pull_option_is_obeyed() {
    run(async {
        let (_runtime, agent, client) = connect(Call::standard).await;
        let ask = |path: &'static str| client.call(path, EMPTY);
        let version = ask(VERSION).await;
        assert_eq!(version.head.headers[PULL_OPTIONS_HEADER], PULL_OPTION_MAX_PARALLEL);
        assert_eq!(unframe::<cri::VersionResponse>(&version.body).runtime_name, "fake");
        assert!(ask(IMAGE_STATUS).await.head.headers.get(PULL_OPTIONS_HEADER).is_none());
        // An agent identifies itself as one even if it obeys no option.
        agent.settings.send_modify(|settings| settings.offer_pull_option = false);
        assert_eq!(ask(VERSION).await.head.headers[PULL_OPTIONS_HEADER], "");
    });
}
