//! A stock kubelet on CRI-O, with the agent between them. CRI-O has no leases: an interrupted pull begins again.

use crate::common::run;
use crate::pods::pod;
use crate::test_env::{Agents, TestEnv, new_pod_node, program};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::KubeletOptions;
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::crio::POLICIES;
use keelson_harness::images::Image;
use keelson_harness::registry::{ALICE, Access};
use keelson_harness::registry_proxy::{Fault, Match, RuleId};
use keelson_harness::util::{PATIENCE, eventually, free_port, until};
use serde_json::json;
use std::fs;

const MIB: u64 = 1 << 20;

async fn start_env(name: &str, access: Access, settings: Settings) -> Result<TestEnv> {
    let node = new_pod_node(Kind::Crio, access).await?;
    TestEnv::start(name, node, Agents::Everything(settings), KubeletOptions::default()).await
}

async fn namespace_with_secret(env: &TestEnv, namespace: &str) -> Result<()> {
    let admin = &env.shared.cluster.admin;
    admin.ensure_service_account(namespace, "default").await?;
    let auth = ALICE.basic.strip_prefix("Basic ").context("basic authentication")?;
    let auths = json!({"auths": {env.node.proxy.address(): {"auth": auth}}});
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "registry", "namespace": namespace},
        "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": auths.to_string()},
    });
    admin.apply(&secret.to_string()).await.map(drop)
}

async fn pod_runs(env: &TestEnv, namespace: &str, name: &str) -> Result<()> {
    eventually(2 * PATIENCE, &format!("{namespace}/{name} runs"), || async {
        let state = env.container(namespace, name).await?.state.context("no state")?;
        ensure!(state.running.is_some(), "it is {state:?}");
        Ok(())
    })
    .await
    .with_context(|| env.kubelet_log())
}

/// I2: during and after the pull of a private image with the Secret of a pod's namespace, pods of two other namespaces
/// do not get it: one has no Secret, and one has the same Secret but a signature policy that rejects the image.
#[test]
fn i2_a_private_image_is_refused_to_pods_of_other_namespaces() -> Result<()> {
    run(async {
        let env = start_env("crio-secrets", Access::Users, Settings::limit(3)).await?;
        let admin = &env.shared.cluster.admin;
        admin.ensure_service_account("bare", "default").await?;
        for namespace in ["owner", "locked"] {
            namespace_with_secret(&env, namespace).await?;
        }
        let policy = env.node.runtime.folder()?.join(POLICIES).join("locked.json");
        fs::write(&policy, r#"{"default": [{"type": "reject"}]}"#).context("cannot write the policy")?;
        let image = env.push(&program("private", &[MIB])?).await?;

        let hold = env.node.proxy.rule(Match::layers().repo("private"), Fault::Hang);
        env.make_pod_in("owner", "first", &image, Some("registry")).await?;
        let active = || env.node.proxy.records().active_repos();
        until("the owner's pod pulls", || active().contains("private")).await?;
        check_refused_in_namespace(&env, "early", &image).await?;
        let owner = env.container("owner", "first").await?;
        ensure!(active().contains("private"), "the owner's pull has ended: {owner:?}");

        env.node.proxy.remove(hold);
        pod_runs(&env, "owner", "first").await?;
        // The image is present.
        check_refused_in_namespace(&env, "late", &image).await?;
        env.make_pod_in("owner", "second", &image, Some("registry")).await?;
        pod_runs(&env, "owner", "second").await?;
        for (namespace, name) in [
            ("owner", "first"),
            ("owner", "second"),
            ("bare", "early"),
            ("bare", "late"),
            ("locked", "early"),
            ("locked", "late"),
        ] {
            admin.delete_pod(namespace, &env.pod(name)).await?;
        }
        Ok(())
    })
}

async fn check_refused_in_namespace(env: &TestEnv, name: &str, image: &Image) -> Result<()> {
    for (namespace, secret) in [("bare", None), ("locked", Some("registry"))] {
        env.make_pod_in(namespace, name, image, secret).await?;
    }
    let message = env.pull_failed("bare", name).await?;
    ensure!(message.contains("authentication required") || message.contains("unauthorized"), "{message}");
    // A kubelet that may not read the Secret yet, because the API server has not noticed the pod, pulls without it
    // first.
    eventually(2 * PATIENCE, "the policy of the namespace is applied", || async {
        let message = env.pull_failed("locked", name).await?;
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
        let env = start_env("crio-away", Access::Anonymous, Settings::limit(3)).await?;
        let image = format!("127.0.0.1:{}/none:v1", free_port()?);
        let made = pod(&env.pod("away"), &env.name, &image);
        env.shared.cluster.admin.apply(&made.to_string()).await?;
        let message = env.pull_failed("default", "away").await?;
        ensure!(message.contains("RegistryUnavailable"), "the kubelet reports {message}");
        env.delete(&["away"]).await
    })
}

/// A pod whose image is held when 5 MiB of its first layer were sent.
async fn half_way(env: &TestEnv, name: &str) -> Result<(Image, RuleId)> {
    let image = env.push(&program(name, &[MIB])?).await?;
    // The program's layer is the same in every image: the last one is unique to the image.
    let own = image.layers.last().context("pushed")?.digest.clone();
    let hold = env.node.proxy.rule(Match::digest(&own), Fault::StallAfter(MIB / 2));
    env.make_pod(name, &image).await?;
    until("half of the layer is sent", || env.node.proxy.records().bytes_sent(&own) == MIB / 2).await?;
    Ok((image, hold))
}

fn fetches(env: &TestEnv, image: &Image) -> usize {
    image.layers.last().map_or(0, |own| env.node.proxy.records().gets(&own.digest).len())
}

/// A planned restart of the agent during a pod's pull: the kubelet notices nothing, and CRI-O does not restart the
/// pull.
#[test]
fn a_pod_starts_despite_an_agent_restart_during_its_pull() -> Result<()> {
    run(async {
        let settings = Settings::limit(2).set("agent.handover_timeout", "1m");
        let mut env = start_env("crio-restart", Access::Anonymous, settings).await?;
        env.run_pod("before", &[MIB]).await?;
        let (image, hold) = half_way(&env, "held").await?;
        env.agent()?.restart().await?;
        let running = env.agent()?.pulls_json().await?;
        ensure!(running["running"] == 1, "the successor knows nothing of the pull: {running}");
        env.node.proxy.remove(hold);
        env.runs("held").await?;
        ensure!(fetches(&env, &image) == 1, "the layer was fetched {} times", fetches(&env, &image));
        for reason in ["Failed", "BackOff"] {
            let failures = env.events("Pod", &env.pod("held"), reason).await?;
            ensure!(failures.is_empty(), "{reason}: {failures:?}");
        }
        let agent = env.agent()?;
        eventually(PATIENCE, "the old agent has ended", || {
            let left = agent.predecessors();
            async move {
                ensure!(left == 0, "{left} are left");
                Ok(())
            }
        })
        .await?;
        env.delete(&["before", "held"]).await
    })
}

/// The same with `kill -9`: the kubelet retries, and the pod starts.
#[test]
fn a_pod_starts_despite_an_agent_kill_during_its_pull() -> Result<()> {
    run(async {
        let mut env = start_env("crio-kill", Access::Anonymous, Settings::limit(2)).await?;
        let (image, hold) = half_way(&env, "held").await?;
        env.agent()?.kill9_and_start().await?;
        env.node.proxy.remove(hold);
        env.runs("held").await?;
        ensure!(fetches(&env, &image) == 2, "the layer was fetched {} times", fetches(&env, &image));
        env.delete(&["held"]).await
    })
}
