//! Pulls with the version of the CRI before `v1`, which containerd 1.6 still serves (I21).

use crate::common::TestEnv;
use anyhow::{Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::images::TINY;
use keelson_proto::cri::{PullImageRequest, PullImageResponse};
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;

/// I21: a pull with `runtime.v1alpha2` counts: it waits in the queue behind a `v1` pull, and then succeeds.
#[tokio::test(flavor = "multi_thread")]
async fn a_pull_by_v1alpha2_counts() -> Result<()> {
    let env = TestEnv::start(Kind::Debian16, &Settings::limit(1)).await?;
    let images = env.node.push_many("alpha", 2, TINY).await?;
    let held = env.hold(&images[0]);
    let first = env.begin(&images[0]);
    env.wait_for_active(&images[..1]).await?;
    let channel = Endpoint::from_shared(env.agent.endpoint())?.connect().await?;
    let request = env.pull_of(&images[1]).request();
    let second = tokio::spawn(async move {
        let mut grpc = Grpc::new(channel);
        grpc.ready().await.map_err(|error| tonic::Status::unavailable(error.to_string()))?;
        let path = PathAndQuery::from_static("/runtime.v1alpha2.ImageService/PullImage");
        grpc.unary(request, path, ProstCodec::<PullImageRequest, PullImageResponse>::default()).await
    });
    env.wait_for_pulls("the pull by v1alpha2 waits", |pulls| pulls.running == 1 && pulls.callers == 2)
        .await?;
    env.wait_for_active(&images[..1]).await?;
    env.node.proxy.remove(held);
    first.await??;
    let answer = second.await??.into_inner();
    ensure!(!answer.image_ref.is_empty(), "{answer:?}");
    Ok(())
}
