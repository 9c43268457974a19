//! A stock kubelet on CRI-O, with the agent between them. CRI-O has no leases: an interrupted pull begins again.

use crate::pods::pod;
use crate::rig::run;
use crate::stage::{Agents, Stage, pod_node, program};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::KubeletOptions;
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::crio::POLICIES;
use keelson_harness::images::Image;
use keelson_harness::registry::{ALICE, Access};
use keelson_harness::registry_proxy::{Fault, Match, RuleId};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually, free_port, until};
use serde_json::json;
use std::fs;

const MIB: u64 = 1 << 20;

async fn stage(name: &str, access: Access, settings: Settings) -> Result<Stage> {
    let scratch = Scratch::new()?;
    let folder = scratch.dir("c0")?;
    let node = pod_node(scratch, &folder, Kind::Crio, access).await?;
    Stage::start(name, node, access, Agents::Everything(settings), KubeletOptions::default()).await
}

async fn namespace_with_secret(stage: &Stage, namespace: &str) -> Result<()> {
    let admin = &stage.shared.cluster.admin;
    admin.ensure_service_account(namespace, "default").await?;
    let auth = ALICE.basic.strip_prefix("Basic ").context("basic authentication")?;
    let auths = json!({"auths": {stage.node.proxy.address(): {"auth": auth}}});
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "registry", "namespace": namespace},
        "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": auths.to_string()},
    });
    admin.apply(&secret.to_string()).await.map(drop)
}

async fn pod_runs(stage: &Stage, namespace: &str, name: &str) -> Result<()> {
    eventually(2 * PATIENCE, &format!("{namespace}/{name} runs"), || async {
        let state = stage.container(namespace, name).await?.state.context("no state")?;
        ensure!(state.running.is_some(), "it is {state:?}");
        Ok(())
    })
    .await
    .with_context(|| stage.kubelet_log())
}

/// I2: during and after the pull of a private image with the Secret of a pod's namespace, pods of two other namespaces
/// do not get it: one has no Secret, and one has the same Secret but a signature policy that rejects the image.
#[test]
fn i2_a_private_image_is_refused_to_pods_of_other_namespaces() -> Result<()> {
    run(async {
        let stage = stage("crio-secrets", Access::Users, Settings::limit(3)).await?;
        let admin = &stage.shared.cluster.admin;
        admin.ensure_service_account("bare", "default").await?;
        for namespace in ["owner", "locked"] {
            namespace_with_secret(&stage, namespace).await?;
        }
        let policy = stage.node.runtime.folder()?.join(POLICIES).join("locked.json");
        fs::write(&policy, r#"{"default": [{"type": "reject"}]}"#).context("cannot write the policy")?;
        let image = stage.push(&program("private", &[MIB])?).await?;

        let hold = stage.node.proxy.rule(Match::layers().repo("private"), Fault::Hang);
        stage.make_pod_in("owner", "first", &image, Some("registry")).await?;
        let active = || stage.node.proxy.records().active_repos();
        until("the owner's pod pulls", || active().contains("private")).await?;
        check_refused_in_namespace(&stage, "early", &image).await?;
        let owner = stage.container("owner", "first").await?;
        ensure!(active().contains("private"), "the owner's pull has ended: {owner:?}");

        stage.node.proxy.remove(hold);
        pod_runs(&stage, "owner", "first").await?;
        // The image is present.
        check_refused_in_namespace(&stage, "late", &image).await?;
        stage.make_pod_in("owner", "second", &image, Some("registry")).await?;
        pod_runs(&stage, "owner", "second").await?;
        for (namespace, name) in [
            ("owner", "first"),
            ("owner", "second"),
            ("bare", "early"),
            ("bare", "late"),
            ("locked", "early"),
            ("locked", "late"),
        ] {
            admin.delete_pod(namespace, &stage.pod(name)).await?;
        }
        Ok(())
    })
}

async fn check_refused_in_namespace(stage: &Stage, name: &str, image: &Image) -> Result<()> {
    for (namespace, secret) in [("bare", None), ("locked", Some("registry"))] {
        stage.make_pod_in(namespace, name, image, secret).await?;
    }
    let message = stage.pull_failed("bare", name).await?;
    ensure!(message.contains("authentication required") || message.contains("unauthorized"), "{message}");
    // A kubelet that may not read the Secret yet, because the API server has not noticed the pod, pulls without it
    // first.
    eventually(2 * PATIENCE, "the policy of the namespace is applied", || async {
        let message = stage.pull_failed("locked", name).await?;
        // The kubelet recognizes CRI-O's error by its first word.
        ensure!(message.contains("SignatureValidationFailed"), "{message}");
        Ok(())
    })
    .await
}

/// CRI-O reports a registry that refuses connections as unavailable, and the pod has the same reason.
#[test]
fn case_16_an_unreachable_registry_is_the_reason_of_its_pod() -> Result<()> {
    run(async {
        let stage = stage("crio-away", Access::Anonymous, Settings::limit(3)).await?;
        let image = format!("127.0.0.1:{}/none:v1", free_port()?);
        let made = pod(&stage.pod("away"), &stage.name, &image);
        stage.shared.cluster.admin.apply(&made.to_string()).await?;
        let message = stage.pull_failed("default", "away").await?;
        ensure!(message.contains("RegistryUnavailable"), "the kubelet reports {message}");
        stage.delete(&["away"]).await
    })
}

/// A pod whose image is held when 5 MiB of its first layer were sent.
async fn half_way(stage: &Stage, name: &str) -> Result<(Image, RuleId)> {
    let image = stage.push(&program(name, &[MIB])?).await?;
    // The program's layer is the same in every image: the last one is unique to the image.
    let own = image.layers.last().context("pushed")?.digest.clone();
    let hold = stage.node.proxy.rule(Match::digest(&own), Fault::StallAfter(MIB / 2));
    stage.make_pod(name, &image).await?;
    until("half of the layer is sent", || stage.node.proxy.records().bytes_sent(&own) == MIB / 2).await?;
    Ok((image, hold))
}

fn fetches(stage: &Stage, image: &Image) -> usize {
    image.layers.last().map_or(0, |own| stage.node.proxy.records().gets(&own.digest).len())
}

/// A planned restart of the agent during a pod's pull: the kubelet notices nothing, and CRI-O does not restart the
/// pull.
#[test]
fn a_pod_starts_despite_an_agent_restart_during_its_pull() -> Result<()> {
    run(async {
        let settings = Settings::limit(2).set("agent.handover_timeout", "1m");
        let mut stage = stage("crio-restart", Access::Anonymous, settings).await?;
        stage.run_pod("before", &[MIB]).await?;
        let (image, hold) = half_way(&stage, "held").await?;
        stage.agent()?.restart().await?;
        let running = stage.agent()?.pulls_json().await?;
        ensure!(running["running"] == 1, "the successor knows nothing of the pull: {running}");
        stage.node.proxy.remove(hold);
        stage.runs("held").await?;
        ensure!(fetches(&stage, &image) == 1, "the layer was fetched {} times", fetches(&stage, &image));
        for reason in ["Failed", "BackOff"] {
            let failures = stage.events("Pod", &stage.pod("held"), reason).await?;
            ensure!(failures.is_empty(), "{reason}: {failures:?}");
        }
        let agent = stage.agent()?;
        eventually(PATIENCE, "the old agent has ended", || {
            let left = agent.predecessors();
            async move {
                ensure!(left == 0, "{left} are left");
                Ok(())
            }
        })
        .await?;
        stage.delete(&["before", "held"]).await
    })
}

/// The same with `kill -9`: the kubelet retries, and the pod starts.
#[test]
fn a_pod_starts_despite_an_agent_kill_during_its_pull() -> Result<()> {
    run(async {
        let mut stage = stage("crio-kill", Access::Anonymous, Settings::limit(2)).await?;
        let (image, hold) = half_way(&stage, "held").await?;
        stage.agent()?.kill9_and_start().await?;
        stage.node.proxy.remove(hold);
        stage.runs("held").await?;
        ensure!(fetches(&stage, &image) == 2, "the layer was fetched {} times", fetches(&stage, &image));
        stage.delete(&["held"]).await
    })
}
