//! A runtime that is late, goes away, and comes back.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use h2::Reason;
use tokio::time::Instant;

use crate::support::{
    Agent, Call, Client, EMPTY, FakeRuntime, HOLD, IMAGE_FS_INFO, IMAGE_STATUS, Sockets, VERSION, client,
    connect, grpc_head, grpc_status, on, run, until,
};

const UNKNOWN: &str = "/runtime.v9.TimeService/Rewind";
const SECOND: Duration = Duration::from_secs(1);

#[test]
fn case_14_calls_are_held_for_a_runtime_that_is_late_and_then_succeed() {
    run(async {
        let sockets = Sockets::new();
        let agent = Agent::start(&sockets).await;
        let client = Arc::new(agent.client().await);
        let asking: Vec<_> = [VERSION, IMAGE_FS_INFO, IMAGE_STATUS]
            .into_iter()
            .map(|path| {
                let client = client.clone();
                tokio::spawn(async move { client.call(path, EMPTY).await })
            })
            .collect();
        tokio::time::sleep(60 * SECOND).await;
        assert!(asking.iter().all(|asking| !asking.is_finished()), "all are held");
        let since = Instant::now();
        let _runtime = FakeRuntime::standard(&sockets);
        for asking in asking {
            assert_eq!(asking.await.unwrap().code(), 0);
        }
        assert!(since.elapsed() <= 3 * SECOND, "found {:?} after it came", since.elapsed());
    });
}

#[test]
fn an_absent_runtime_is_unavailable_by_name_when_the_hold_time_is_over() {
    run(async {
        let sockets = Sockets::new();
        let agent = Agent::start(&sockets).await;
        let client = agent.client().await;
        let expected =
            format!("the container runtime at unix://{} did not answer", sockets.runtime().display());
        for path in [VERSION, IMAGE_STATUS, UNKNOWN] {
            let since = Instant::now();
            let reply = client.call(path, EMPTY).await;
            assert_eq!(since.elapsed().as_secs(), HOLD.as_secs(), "{path}");
            assert_eq!(reply.code(), 14);
            assert!(reply.text().contains(&expected), "{}", reply.text());
            assert!(reply.text().contains("cri.hold_timeout"), "{}", reply.text());
        }
        agent.settings.send_modify(|settings| settings.hold = Duration::ZERO);
        let since = Instant::now();
        assert_eq!(client.call(VERSION, EMPTY).await.code(), 14);
        assert_eq!(since.elapsed(), Duration::ZERO);
    });
}

#[test]
fn a_cancelled_held_call_is_dropped() {
    run(async {
        let sockets = Sockets::new();
        let agent = Agent::start(&sockets).await;
        let client = agent.client().await;
        let mut call = client.send(UNKNOWN, &[], Some(EMPTY)).await;
        tokio::time::sleep(10 * SECOND).await;
        call.body.send_reset(Reason::CANCEL);
        tokio::time::sleep(SECOND).await;
        let runtime = FakeRuntime::standard(&sockets);
        tokio::time::sleep(10 * SECOND).await;
        assert_eq!(runtime.calls(UNKNOWN).len(), 0);
    });
}

/// A runtime that returns UNAVAILABLE to every call at first, as containerd does while it starts, the agent, and a
/// client.
async fn not_ready(refusals: u32) -> (FakeRuntime, Agent, Client) {
    let left = Arc::new(AtomicU32::new(refusals));
    connect(move |call: Call| {
        let left = left.clone();
        async move {
            // The agent's own probes do not count.
            let of_client = call.headers.contains_key("x-client");
            if of_client
                && left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok()
            {
                return call.refuse(grpc_status(14, "server is not initialized yet"));
            }
            call.standard().await;
        }
    })
    .await
}

#[test]
fn calls_that_a_starting_kubelet_exits_on_are_tried_again_and_no_others() {
    run(async {
        for (path, code, tries) in
            [(VERSION, 0, 6), (IMAGE_FS_INFO, 0, 6), (IMAGE_STATUS, 14, 1), (UNKNOWN, 14, 1)]
        {
            let (runtime, _agent, client) = not_ready(5).await;
            let reply = client.try_call(path, &[("x-client", "1")], EMPTY).await.unwrap();
            assert_eq!(reply.code(), code, "{path}");
            let mine = runtime.calls(path).into_iter().filter(|call| call.headers.contains_key("x-client"));
            assert_eq!(mine.count(), tries, "{path}");
        }
    });
}

#[test]
fn a_runtime_that_never_gets_ready_ends_the_call_with_its_error() {
    run(async {
        let (_runtime, _agent, client) = not_ready(u32::MAX).await;
        let since = Instant::now();
        let reply = client.try_call(VERSION, &[("x-client", "1")], EMPTY).await.unwrap();
        assert_eq!((reply.code(), reply.text()), (14, "server is not initialized yet"));
        assert!(since.elapsed() > HOLD - 2 * SECOND && since.elapsed() <= HOLD, "{:?}", since.elapsed());
    });
}

#[test]
fn a_start_up_call_with_a_large_body_passes_completely() {
    run(async {
        let (_runtime, agent, _) = connect(|mut call: Call| async move {
            if !call.headers.contains_key("x-client") {
                return call.standard().await;
            }
            let body = call.read().await;
            call.answer_bytes(Bytes::from(body.len().to_string()), grpc_status(0, "")).await;
        })
        .await;
        for length in [64 * 1024, 64 * 1024 + 1, 3_000_000] {
            let body = Bytes::from(vec![1; length]);
            let reply = agent.client().await.try_call(VERSION, &[("x-client", "1")], body).await.unwrap();
            assert_eq!(reply.body, length.to_string());
        }
    });
}

#[test]
fn case_15_the_next_call_on_the_same_connection_finds_the_restarted_runtime() {
    run(async {
        let (mut runtime, _agent, client) = connect(Call::standard).await;
        for _ in 0..3 {
            assert_eq!(client.call(IMAGE_STATUS, EMPTY).await.code(), 0);
            runtime.vanish().await;
            tokio::time::sleep(300 * SECOND).await;
            runtime.appear();
            let since = Instant::now();
            assert_eq!(client.call(IMAGE_STATUS, EMPTY).await.code(), 0);
            assert!(since.elapsed() <= 3 * SECOND);
            client.pull("r.io/x").await.assert_ok();
            assert!(since.elapsed() <= 4 * SECOND, "pulls resume {:?} after it is back", since.elapsed());
        }
        assert!(client.is_open());
    });
}

#[test]
fn a_stale_socket_file_is_an_absent_runtime() {
    run(async {
        let sockets = Sockets::new();
        let mut runtime = FakeRuntime::standard(&sockets);
        runtime.die().await;
        let agent = Agent::start(&sockets).await;
        let reply = agent.client().await.call(VERSION, EMPTY).await;
        assert_eq!(reply.code(), 14);
        assert!(reply.text().contains("Connection refused"), "{}", reply.text());
    });
}

#[test]
fn a_connection_lost_before_the_answer_is_unavailable_by_name() {
    run(async {
        let (runtime, _agent, client) = connect(on(UNKNOWN, |call| async move {
            call.drop_connection();
            // Dropping the call would reset it first.
            std::future::pending().await
        }))
        .await;
        let expected =
            format!("the container runtime at unix://{} closed the connection", runtime.socket().display());
        for _ in 0..3 {
            let reply = client.call(UNKNOWN, EMPTY).await;
            assert_eq!(reply.code(), 14);
            assert!(reply.text().starts_with(&expected), "{}", reply.text());
            assert_eq!(client.call(VERSION, EMPTY).await.code(), 0, "the next call opens a connection");
        }
    });
}

#[test]
fn a_connection_lost_in_mid_stream_ends_in_trailers() {
    run(async {
        let (runtime, _agent, client) = connect(on(UNKNOWN, |mut call| async move {
            let mut to = call.respond.send_response(grpc_head(), false).unwrap();
            client::write(&mut to, Bytes::from(vec![9; 100_000]), false).await.unwrap();
            tokio::time::sleep(SECOND).await;
            call.drop_connection();
            std::future::pending::<()>().await;
        }))
        .await;
        let reply = client.call(UNKNOWN, EMPTY).await;
        assert_eq!(reply.body.len(), 100_000);
        let trailers = reply.trailers.as_ref().expect("trailers");
        assert_eq!(trailers["grpc-status"], "14");
        assert!(reply.text().contains(&runtime.socket().display().to_string()), "{}", reply.text());
        assert_eq!(client.call(VERSION, EMPTY).await.code(), 0);
    });
}

#[test]
fn connections_to_the_runtime_live_as_long_as_their_clients() {
    run(async {
        let (runtime, agent, _) = connect(Call::standard).await;
        agent.runtime_up().await;
        for _ in 0..20 {
            let client = agent.client().await;
            for _ in 0..3 {
                assert_eq!(client.call(VERSION, EMPTY).await.code(), 0);
            }
        }
        until("only the agent's own connection is left", || runtime.open_connections() == 1).await;
        assert_eq!(runtime.connections(), 21, "one for each client");
    });
}
