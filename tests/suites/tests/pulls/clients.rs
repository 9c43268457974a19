//! Clients in Rust and Go, through the agent and directly to containerd: the responses are the same.

use crate::common::TestEnv;
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::driver::{Driver, DriverAnswer};
use keelson_harness::images::TINY;
use keelson_harness::{on_both_runtimes, on_crio};
use serde_json::Value;

on_both_runtimes!(
    the_go_client_gets_the_same_answers_as_directly,
    tonic_gets_the_same_answers_as_directly,
    case_19_stream_images_is_answered_by_the_runtime,
);

on_crio!(
    the_go_client_gets_the_same_answers_as_directly,
    tonic_gets_the_same_answers_as_directly,
    case_19_stream_images_is_answered_by_the_runtime,
);

/// Response or error, without what differs between calls: times, and the order of lists.
fn comparable(mut answer: DriverAnswer) -> (Value, Option<(u32, String)>) {
    settle(&mut answer.result);
    (answer.result, answer.error.map(|error| (error.number, error.text)))
}

fn settle(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|name, _| name != "timestamp");
            fields.values_mut().for_each(settle);
        }
        Value::Array(items) => {
            items.iter_mut().for_each(settle);
            items.sort_by_cached_key(Value::to_string);
        }
        _ => {}
    }
}

async fn the_go_client_gets_the_same_answers_as_directly(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::limit(2)).await?;
    let images = env.node.push_many("go", 3, TINY).await?;
    let names: Vec<_> = images.iter().map(|image| env.node.name(image)).collect();
    let (agent, direct) = (Driver::new(&env.agent.endpoint())?, Driver::new(&env.node.runtime.endpoint())?);

    let answer = agent.run(&["pull", "--pod", "default/web/uid-1", &names[0]]).await?.success()?;
    assert_eq!(answer["imageRef"], env.node.reference(&images[0]));
    let answer = agent.run(&["pulls", "--clients", "2", &names[1], &names[2]]).await?.success()?;
    let references: Vec<_> =
        answer.as_array().into_iter().flatten().filter_map(|one| one["imageRef"].as_str()).collect();
    assert_eq!(references, [env.node.reference(&images[1]), env.node.reference(&images[2])]);

    let missing = format!("{}/missing:v1", env.node.proxy.address());
    let calls: [&[&str]; 10] = [
        &["version"],
        &["status"],
        &["runtime-config"],
        &["pods"],
        &["containers"],
        &["list"],
        &["fsinfo"],
        &["image-status", &names[0]],
        &["image-status", &missing],
        &["container-status", "nothing"],
    ];
    let mut succeeded = 0;
    for call in calls {
        let (through, straight) = (agent.run(call).await?, direct.run(call).await?);
        succeeded += u32::from(straight.ok);
        assert_eq!(comparable(through), comparable(straight), "{call:?}");
    }
    ensure!(succeeded >= 7, "most of the calls failed with the runtime itself");
    agent.run(&["remove", &names[0]]).await?.success()?;
    let left = direct.run(&["list"]).await?.success()?;
    assert_eq!(left.as_array().map(Vec::len), Some(2));
    Ok(())
}

async fn tonic_gets_the_same_answers_as_directly(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::limit(2)).await?;
    let images = env.node.push_many("tonic", 2, TINY).await?;
    let direct = env.node.runtime.cri().await?;
    for image in &images {
        assert_eq!(env.begin(image).await??, env.node.reference(image));
    }
    let name = env.node.name(&images[0]);
    let found = env.cri.image_status(&name).await?.context("the image is there")?;
    let id = found.id.clone();
    assert_eq!(Some(found), direct.image_status(&name).await?);
    let (mut through, mut straight) = (env.cri.list_images().await?, direct.list_images().await?);
    for list in [&mut through, &mut straight] {
        // containerd lists in no order.
        list.sort_by(|one, other| one.id.cmp(&other.id));
    }
    assert_eq!(through, straight);
    assert_eq!(through.len(), 2);
    assert_eq!(env.cri.version().await?, direct.version().await?);
    assert_eq!(env.cri.status().await?, direct.status().await?);
    let (mut through, mut straight) = (env.cri.fs_info().await?, direct.fs_info().await?);
    for info in [&mut through, &mut straight] {
        let usages = info.image_filesystems.iter_mut().chain(&mut info.container_filesystems);
        usages.for_each(|usage| usage.timestamp = 0);
    }
    assert_eq!(through, straight);
    ensure!(!through.image_filesystems.is_empty(), "the runtime does not report its file systems");
    env.cri.remove(&id).await?;
    ensure!(direct.image_status(&name).await?.is_none(), "it was not removed");
    let missing = env.node.name(&images[1]).replace("tonic", "missing");
    assert_eq!(env.cri.image_status(&missing).await?, None);
    Ok(())
}

/// A runtime without the call returns code 12 itself; one that has it streams its images.
async fn case_19_stream_images_is_answered_by_the_runtime(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::new()).await?;
    let image = &env.node.push_many("stream", 1, TINY).await?[0];
    env.begin(image).await??;
    let (agent, direct) = (Driver::new(&env.agent.endpoint())?, Driver::new(&env.node.runtime.endpoint())?);
    let (through, straight) = (agent.run(&["stream-images"]).await?, direct.run(&["stream-images"]).await?);
    match &through.error {
        Some(error) => {
            assert_eq!((error.number, error.code.as_str()), (12, "Unimplemented"), "{}", error.text)
        }
        None => assert_eq!(through.result.as_array().map(Vec::len), Some(1)),
    }
    ensure!(kind == Kind::V2 || through.error.is_some(), "containerd 1.6 does not know the call");
    assert_eq!(comparable(through), comparable(straight));
    // Like the kubelet: streaming, and the list as fallback.
    let listed = agent.run(&["--stream", "list"]).await?.success()?;
    assert_eq!(listed.as_array().map(Vec::len), Some(1));
    Ok(())
}
