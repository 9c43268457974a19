//! I9: pulls when the coordinator restarts, fails or does not answer; and whether the front answers pings.

use std::time::Duration;

use keelson_actor_system::supervise::Restart;
use keelson_cri::front::{PingError, ping};
use keelson_pulls::coordinator::Policy;
use tokio::time::{Instant, timeout};

use crate::support::{
    Agent, Call, Client, DECISION, EMPTY, FakeRuntime, PULL_IMAGE, Sockets, VERSION, connect, connect_with,
    on, policy, run, until,
};

/// A runtime whose pulls take this number of seconds, the agent, and a client.
async fn slow_pulls(seconds: u64, policy: Policy) -> (FakeRuntime, Agent, Client) {
    let pull = on(PULL_IMAGE, move |call| async move {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        call.standard().await;
    });
    connect_with(policy, pull).await
}

fn passed(agent: &Agent) -> u64 {
    agent.metrics.passed_through_total()
}

/// Restarts it so often that the next restart is later than a pull waits for a decision.
async fn keep_restarting(agent: &Agent) {
    for restart in 1..=9 {
        agent.pulls.deliver(Restart { reason: "a test wants it".into() });
        until("the restart", || agent.pulls.recorder().restarts() == restart).await;
    }
}

#[test]
fn an_undecided_pull_passes_through_and_is_not_started_later() {
    run(async {
        let (runtime, agent, client) = connect(Call::standard).await;
        agent.runtime_up().await;
        keep_restarting(&agent).await;
        let since = Instant::now();
        let reply = client.pull("r.io/x").await;
        assert_eq!((reply.code(), passed(&agent)), (0, 1), "{}", reply.text());
        assert!(since.elapsed() >= DECISION, "not before the limit");
        assert_eq!(agent.metrics.passing_through.get(), 1);
        assert_eq!(client.call(VERSION, EMPTY).await.code(), 0);
        until("the coordinator runs again", || agent.handled("RequestPull") == 1).await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(runtime.calls(PULL_IMAGE).len(), 1, "the late coordinator does not start it");
        assert_eq!(client.pull("r.io/y").await.code(), 0);
        assert_eq!((passed(&agent), runtime.calls(PULL_IMAGE).len()), (1, 2), "decided again");
    });
}

#[test]
fn a_pull_that_waits_in_the_queue_does_not_pass_through() {
    run(async {
        let policy = Policy { limit: 1, stall_timeout: None, ..policy() };
        let (_runtime, agent, client) = slow_pulls(600, policy).await;
        let since = Instant::now();
        let (first, second) = tokio::join!(client.pull("r.io/x"), client.pull("r.io/y"));
        assert_eq!((first.code(), second.code(), passed(&agent)), (0, 0, 0));
        assert!(since.elapsed() >= Duration::from_secs(1200), "one after the other");
    });
}

#[test]
fn a_restart_of_the_coordinator_is_no_error_of_its_callers() {
    // `panic` is a panic in debug builds and a plain restart in others.
    for reason in ["panic", "a test wants it"] {
        run(async {
            let (runtime, agent, client) = slow_pulls(20, policy()).await;
            let pulling = client.pull("r.io/x");
            let restarting = async {
                until("the pull runs", || runtime.calls(PULL_IMAGE).len() == 1).await;
                agent.pulls.deliver(Restart { reason: reason.into() });
                // Other calls are not affected.
                assert_eq!(agent.client().await.call(VERSION, EMPTY).await.code(), 0);
            };
            let (reply, ()) = tokio::join!(pulling, restarting);
            assert_eq!((reply.code(), passed(&agent)), (0, 0), "{}", reply.text());
            assert_eq!(agent.handled("RequestPull"), 2, "its front has repeated the request");
            assert_eq!(agent.pulls.recorder().restarts(), 1);
        });
    }
}

#[test]
fn a_pull_passes_through_when_the_coordinator_keeps_failing() {
    run(async {
        let (runtime, agent, client) = slow_pulls(20, policy()).await;
        agent.runtime_up().await;
        let pulling = client.pull("r.io/x");
        let failing = async {
            for request in 1..=4 {
                until("the request", || agent.handled("RequestPull") == request).await;
                agent.pulls.deliver(Restart { reason: "panic".into() });
            }
        };
        let (reply, ()) = tokio::join!(pulling, failing);
        assert_eq!((reply.code(), passed(&agent)), (0, 1), "{}", reply.text());
        assert!(!runtime.calls(PULL_IMAGE).is_empty());
    });
}

#[test]
fn a_front_answers_pings_without_a_runtime_and_a_stuck_one_does_not() {
    run(async {
        let agent = Agent::start(&Sockets::new()).await;
        ping(&agent.socket).await.expect("the front answers");
        let absent = agent.socket.with_extension("absent");
        assert!(matches!(ping(&absent).await, Err(PingError::Connect(_))));
        let stuck = agent.socket.with_extension("stuck");
        // Its backlog accepts the connection, and no process serves it.
        let _listener = std::os::unix::net::UnixListener::bind(&stuck).expect("binds");
        assert!(timeout(Duration::from_secs(5), ping(&stuck)).await.is_err());
    });
}
