//! Errors of the runtime: code, message and details are passed on unchanged.

use crate::common::TestEnv;
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::{Pull, failed};
use keelson_harness::driver::Driver;
use keelson_harness::images::{Blob, ImageSpec, TINY};
use keelson_harness::node::Node;
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::util::free_port;
use keelson_harness::{on_both_runtimes, on_crio};
use std::fs;
use tonic::{Code, Status};

on_both_runtimes!(case_16_errors_of_the_runtime_are_passed_on);

on_crio!(case_16_errors_of_the_runtime_are_passed_on,);

fn seen(status: &Status) -> (Code, String, Vec<u8>) {
    (status.code(), status.message().to_owned(), status.details().to_vec())
}

async fn case_16_errors_of_the_runtime_are_passed_on(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::new()).await?;
    let images = env.node.push_many("wrong", 2, TINY).await?;
    let (broken, refused) = (&images[0], &images[1]);
    spoil(&env.node, &broken.layers[0])?;
    env.node.proxy.rule(Match::any().repo(&refused.repo), Fault::status(500));
    let at = env.node.proxy.address();
    let nobody = free_port()?;
    let nobody = format!("127.0.0.1:{nobody}");
    env.node.runtime.configure_registry(&nobody, &nobody)?;

    let cases = [
        ("no such image", format!("{at}/missing:v1")),
        ("no such tag", format!("{at}/{}:v2", broken.repo)),
        ("no such digest", format!("{at}/{}@sha256:{}", broken.repo, "0".repeat(64))),
        ("the registry answers 500", env.node.name(refused)),
        ("a layer that is not what its digest says", env.node.name(broken)),
        ("no process listens", format!("{nobody}/app:v1")),
    ];
    let direct = env.node.runtime.cri().await?;
    let driver = Driver::new(&env.node.runtime.endpoint())?;
    let driver_here = Driver::new(&env.agent.endpoint())?;
    let mut codes = Vec::new();
    for (why, name) in &cases {
        let expected = failed(direct.pull_image(name).await, why)?;
        let got = failed(env.cri.pull_image(name).await, why)?;
        assert_eq!(seen(&got), seen(&expected), "{why}");
        ensure!(!expected.message().is_empty(), "{why}: the runtime returns no message");
        if kind == Kind::Crio && *why == "no process listens" {
            // The kubelet takes the reason of the pod's waiting container from this prefix.
            ensure!(expected.message().starts_with("RegistryUnavailable"), "{expected}");
        }
        codes.push(expected.code());
        // The client in Go sees the same.
        let expected = driver.run(&["pull", name]).await?.failure()?;
        let got = driver_here.run(&["pull", name]).await?.failure()?;
        assert_eq!((got.code, got.text), (expected.code, expected.text), "{why}");
    }
    codes.dedup();
    ensure!(codes.len() > 1 || kind == Kind::Crio, "all cases have one code, which proves little: {codes:?}");
    env.idle().await
}

/// Changes a byte of a blob on the registry's disk.
fn spoil(node: &Node, blob: &Blob) -> Result<()> {
    let (_, port) = node.registry.address().rsplit_once(':').context("an address has a port")?;
    let hex = blob.digest.0.trim_start_matches("sha256:");
    let blobs = format!("registry-{port}/data/docker/registry/v2/blobs/sha256/{}/{hex}/data", &hex[..2]);
    let path = node.scratch.path().join(blobs);
    let mut content = fs::read(&path).with_context(|| format!("no blob at {}", path.display()))?;
    let last = content.len() - 1;
    content[last] ^= 1;
    fs::write(&path, content).context("cannot write the blob")
}

/// Invalid requests are refused by the runtime or by the agent, without side effects.
#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_are_refused_without_side_effects() -> Result<()> {
    let env = TestEnv::start(Kind::V2, &Settings::limit(1)).await?;
    let long = format!("{}/{}:v1", env.node.proxy.address(), "x".repeat(300));
    let endless = "y".repeat(1 << 20);
    let names =
        ["", " ", "UPPER/Case:v1", "a b", "http://example/app", "app:", "app@sha256:12", &long, &endless];
    for name in names {
        let status = failed(env.cri.pull_image(name).await, "it is no name of an image")?;
        let shown: String = name.chars().take(30).collect();
        ensure!(
            matches!(status.code(), Code::InvalidArgument | Code::Unknown) && status.message().len() > 10,
            "{shown:?}: {status}"
        );
        ensure!(
            status.message().len() < 4096,
            "{shown:?}: the message repeats {} bytes",
            status.message().len()
        );
    }
    let mut empty = Pull::new("app").request();
    empty.get_mut().image = None;
    let status = failed(env.cri.images().pull_image(empty).await, "it names no image")?;
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    // None of them took a slot or a place in the queue.
    env.idle().await?;
    let image = ImageSpec::single("fine", TINY).push(&env.node.registry).await?;
    assert_eq!(env.begin(&image).await??, image.config.0);
    Ok(())
}
