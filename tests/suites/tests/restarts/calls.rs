//! Restarts while calls pass through.

use crate::runtime::{EVENTS, RUN_POD, SlowRuntime};
use anyhow::{Context as _, Result, ensure};
use http::uri::PathAndQuery;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::cri::Cri;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::PATIENCE;
use keelson_proto::cri::{VersionRequest, VersionResponse};
use tokio::task::JoinHandle;
use tonic::{Request, Status, Streaming, client::Grpc};
use tonic_prost::ProstCodec;

/// A call of a method whose responses have a string in their first field.
async fn call(cri: &Cri, path: &'static str) -> Result<Streaming<VersionResponse>, Status> {
    let mut grpc = Grpc::new(cri.channel());
    grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let codec = ProstCodec::<VersionRequest, VersionResponse>::default();
    let request = Request::new(VersionRequest::default());
    Ok(grpc.server_streaming(request, PathAndQuery::from_static(path), codec).await?.into_inner())
}

/// Retries if hyper or h2 dropped a call before it was sent, because it had just received GOAWAY: grpc-go, which
/// kubelets use, does so by itself, tonic does not.
async fn sent<T, F: Future<Output = Result<T, Status>>>(ask: impl Fn() -> F) -> Result<T, Status> {
    loop {
        match ask().await {
            Err(status) if check_not_sent(&status) => {}
            ended => return ended,
        }
    }
}

fn check_not_sent(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        // h2's error for a request after GOAWAY.
        let after_goaway = error.to_string() == "connection error received: not a result of an error";
        if after_goaway || error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_canceled) {
            return true;
        }
        source = error.source();
    }
    false
}

fn run_pod(cri: &Cri) -> JoinHandle<Result<String, Status>> {
    let cri = cri.clone();
    tokio::spawn(async move {
        let answer = call(&cri, RUN_POD).await?.message().await?;
        Ok(answer.unwrap_or_default().version)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn i8_a_slow_pod_start_survives_restarts_and_no_call_is_refused() -> Result<()> {
    let scratch = Scratch::new()?;
    let runtime = SlowRuntime::start(&scratch)?;
    let settings = Settings::new().set("agent.handover_timeout", "30s").set("agent.drain_timeout", "5m");
    let mut agent = Agent::start(&scratch, &runtime.endpoint(), &settings).await?;
    let cri = agent.cri().await?;
    let pod = run_pod(&cri);
    runtime.starting(1).await?;
    // A client that sends requests all the time, over one channel that reconnects when it receives GOAWAY.
    let (stop, mut stopped) = tokio::sync::watch::channel(false);
    let asking = tokio::spawn({
        let cri = cri.clone();
        async move {
            let mut asked = 0_u64;
            while !*stopped.borrow_and_update() {
                sent(|| cri.version()).await?;
                sent(|| cri.fs_info()).await?;
                asked += 2;
            }
            anyhow::Ok(asked)
        }
    });
    let mut old = Vec::new();
    for _ in 0..5 {
        old.push(agent.replace().await?);
    }
    ensure!(!pod.is_finished(), "it starts still");
    stop.send_replace(true);
    let asked = asking.await?.context("a call failed during a restart")?;
    ensure!(asked > 0);
    runtime.open();
    ensure!(pod.await?? == "started");
    for mut old in old {
        ensure!(old.wait(PATIENCE).await?.success());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn i8_an_event_stream_ends_with_the_drain_timeout() -> Result<()> {
    let scratch = Scratch::new()?;
    let runtime = SlowRuntime::start(&scratch)?;
    let settings = Settings::new().set("agent.handover_timeout", "30s").set("agent.drain_timeout", "3s");
    let mut agent = Agent::start(&scratch, &runtime.endpoint(), &settings).await?;
    let cri = agent.cri().await?;
    let mut events = call(&cri, EVENTS).await?;
    ensure!(events.message().await?.context("the first event")?.version == "first");
    let mut old = agent.replace().await?;
    // Both ends of it: the client is told, and the process exits.
    ensure!(tokio::time::timeout(PATIENCE, events.message()).await?.is_err(), "the stream is cut off");
    ensure!(old.wait(PATIENCE).await?.success());
    let mut again = sent(|| call(&cri, EVENTS)).await?;
    ensure!(again.message().await?.is_some(), "the client asks again");
    Ok(())
}
