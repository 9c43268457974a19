//! Cases 18 and 19: messages at and beyond the size limit, and calls that a runtime does not have.

use crate::fake::GatedRuntime;
use anyhow::{Context as _, Result, ensure};
use http::uri::PathAndQuery;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::Kind;
use keelson_harness::cri::failed;
use keelson_harness::driver::Driver;
use keelson_harness::node::Node;
use keelson_harness::on_both_runtimes;
use keelson_harness::scratch::Scratch;
use keelson_proto::cri::{ListImagesRequest, ListImagesResponse};
use std::path::Path;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Status};

on_both_runtimes!(case_19_a_call_that_the_runtime_lacks_is_unimplemented);

#[tokio::test(flavor = "multi_thread")]
async fn case_18_nine_mebibytes_pass_and_seventeen_are_refused_by_the_client_only() -> Result<()> {
    let scratch = Scratch::new()?;
    let runtime = GatedRuntime::start(&scratch)?;
    let agent = Agent::start(&scratch, &runtime.endpoint(), &Settings::new()).await?;
    let cri = agent.cri().await?;
    let driver = Driver::new(&agent.endpoint())?;

    runtime.list(9 * 1024, 940);
    let images = cri.list_images().await?;
    ensure!(images.len() == 9 * 1024, "{} images came", images.len());
    ensure!(images.last().is_some_and(|image| image.repo_tags[0].len() > 940));
    let listed = driver.run(&["list"]).await?.success()?;
    ensure!(listed.as_array().context("no list")?.len() == 9 * 1024);

    runtime.list(17 * 1024, 1024);
    let direct = keelson_harness::cri::Cri::connect(runtime.socket()).await?;
    let expected = failed(direct.list_images().await, "it has more than 16 MiB")?;
    let status = failed(cri.list_images().await, "it has more than 16 MiB")?;
    ensure!((status.code(), status.message()) == (expected.code(), expected.message()), "{status}");
    let error = driver.run(&["list"]).await?.failure()?;
    ensure!(error.code == "ResourceExhausted", "{}", error.text);

    runtime.list(3, 3);
    ensure!(cri.list_images().await?.len() == 3);
    agent.http_get("/livez").await?.success()?;
    Ok(())
}

/// Calls a method by its path, like a client of another version.
async fn call(socket: &Path, path: &'static str) -> Result<Status> {
    let channel = Endpoint::from_shared(format!("unix://{}", socket.display()))?.connect().await?;
    let mut grpc = tonic::client::Grpc::new(channel);
    grpc.ready().await?;
    let codec = tonic_codec();
    let path = PathAndQuery::from_static(path);
    let answer = grpc.unary(Request::new(ListImagesRequest::default()), path, codec).await;
    failed(answer.map(tonic::Response::into_inner), "no server has this method")
}

fn tonic_codec() -> tonic_prost::ProstCodec<ListImagesRequest, ListImagesResponse> {
    tonic_prost::ProstCodec::default()
}

async fn case_19_a_call_that_the_runtime_lacks_is_unimplemented(kind: Kind) -> Result<()> {
    let node = Node::start(kind).await?;
    let agent = node.agent(&Settings::new()).await?;
    for path in [
        "/runtime.v1.ImageService/InventImage",
        "/runtime.v1.InventionService/Invent",
        "/runtime.v99.ImageService/ListImages",
    ] {
        let direct = call(node.runtime.socket(), path).await?;
        let status = call(&agent.socket(), path).await?;
        ensure!(status.code() == Code::Unimplemented, "{path}: {status}");
        ensure!(status.message() == direct.message(), "{path}: {status} instead of {direct}");
    }
    // A method that containerd 1.6 does not have: the kubelet's client tries it and falls back.
    let direct = Driver::new(&node.runtime.endpoint())?;
    let driver = Driver::new(&agent.endpoint())?;
    let expected = direct.run(&["stream-images"]).await?;
    let answer = driver.run(&["stream-images"]).await?;
    ensure!(answer.ok == expected.ok, "{answer:?} instead of {expected:?}");
    if kind == Kind::Debian16 {
        let (error, expected) = (answer.failure()?, expected.failure()?);
        ensure!(error.code == "Unimplemented" && error.message == expected.message, "{}", error.text);
    }
    driver.run(&["--stream", "list"]).await?.success()?;
    Ok(())
}
