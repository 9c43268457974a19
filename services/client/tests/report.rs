//! `Reporter` with servers that accept reports, refuse them, do not support them, or do not answer.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{LONG, Server, place, started};
use keelson_client::{Backend, Client, Error, Reported, Reporter, report};
use keelson_proto::endpoints::ReportAnswer;
use tokio::{net::UnixListener, time::timeout};

fn backend() -> Backend {
    Backend {
        name: "nft".into(),
        pid: 7,
        state: "failing".into(),
        reason: "netlink:\nno such set".into(),
        instance_id: 9,
        rev: 3,
        ..Backend::default()
    }
}

/// Answers the next report with this status.
async fn answered(server: &mut Server, code: i32) -> Backend {
    let mut call = server.expect("Report", 9, 3).await;
    let backend = call.backend.take().unwrap();
    if code == 0 {
        call.send(&ReportAnswer {}).await;
    }
    call.status(code).await;
    backend
}

/// The report that the server got, and what became of it. Boxed, because the future is large.
fn exchange<T>(
    server: &mut Server,
    code: i32,
    report: impl Future<Output = T>,
) -> impl Future<Output = (Backend, T)> {
    Box::pin(with_timeout(async move { tokio::join!(answered(server, code), report) }))
}

async fn with_timeout<T>(coming: impl Future<Output = T>) -> T {
    timeout(LONG, coming).await.expect("it ends")
}

#[tokio::test]
async fn a_report_is_taken_and_its_reason_made_to_fit() {
    let (mut server, options) = started();
    let mut reporter = Reporter::new(options.target.clone());
    for _ in 0..3 {
        let (answered, reported) = exchange(&mut server, 0, reporter.report(backend())).await;
        assert_eq!(reported.unwrap(), Reported::Accepted);
        assert_eq!(answered, Backend { reason: "netlink: no such set".into(), ..backend() });
    }
    let (_, reported) = exchange(&mut server, 0, report(&options.target, backend())).await;
    assert_eq!(reported.unwrap(), Reported::Accepted);
}

#[tokio::test]
async fn an_older_agent_is_no_error_and_a_refusal_is_one() {
    let (mut server, options) = started();
    let mut reporter = Reporter::new(options.target);
    for _ in 0..2 {
        let (_, reported) = exchange(&mut server, 12, reporter.report(backend())).await;
        assert_eq!(reported.unwrap(), Reported::Unsupported);
    }
    let (_, reported) = exchange(&mut server, 3, reporter.report(backend())).await;
    let refused = reported.unwrap_err().to_string();
    assert!(refused.contains("invalid argument"), "{refused}");
    // The agent was replaced by one that supports them.
    let (_, reported) = exchange(&mut server, 0, reporter.report(backend())).await;
    assert_eq!(reported.unwrap(), Reported::Accepted);
}

#[tokio::test]
async fn reports_resume_when_the_agent_is_back() {
    let (_folder, path, options) = place();
    let mut reporter = Reporter::new(options.target);
    let away = with_timeout(reporter.report(backend())).await.unwrap_err();
    assert!(matches!(away, Error::Connect { .. }), "{away}");
    for _ in 0..2 {
        let mut server = Server::start(path.clone());
        let (_, reported) =
            with_timeout(async { tokio::join!(answered(&mut server, 0), reporter.report(backend())) }).await;
        assert_eq!(reported.unwrap(), Reported::Accepted);
        drop(server);
        // The connection broke with the server.
        with_timeout(reporter.report(backend())).await.unwrap_err();
    }
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_does_not_answer_is_not_waited_for() {
    let (_folder, path, options) = place();
    let silent = UnixListener::bind(&path).unwrap();
    let mut reporter = Reporter::new(options.target);
    let error = reporter.report(backend()).await.unwrap_err().to_string();
    assert!(error.contains("within 5s"), "{error}");
    drop(silent);
    std::fs::remove_file(&path).unwrap();
}

#[tokio::test]
async fn reports_do_not_disturb_a_watch() {
    let (mut server, options) = started();
    let mut client = Client::new(options.clone());
    let (state, ()) = with_timeout(Box::pin(async {
        tokio::join!(client.next(), async {
            let next = server.expect("Next", 0, 0).await;
            for code in [0, 3, 12] {
                let (_, reported) = exchange(&mut server, code, report(&options.target, backend())).await;
                assert_eq!(reported.is_err(), code == 3);
            }
            next.state(9, 3, &[("a", 1)]).await;
        })
    }))
    .await;
    assert_eq!(state.unwrap().position().rev, 3);
}
