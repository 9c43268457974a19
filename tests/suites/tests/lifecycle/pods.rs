//! Pods that are deleted while their image pull waits for a slot.

use crate::common::{ACCOUNT, companion, on_cluster, settings, wait_until_healthy};
use crate::test_env::{new_pod_node, program};
use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::kube::{Cluster, KubeletOptions};
use keelson_harness::agent::Agent;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::{Cri, Pull, failed};
use keelson_harness::images::Image;
use keelson_harness::node::Node;
use keelson_harness::registry::Access;
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::util::{PATIENCE, eventually};
use kube::ResourceExt as _;
use kube::api::DeleteParams;
use serde_json::{Value, json};
use std::time::Instant;
use tokio::task::JoinHandle;
use tonic::{Code, Status};

/// Number of pulls with a slot, and number of queued ones.
async fn counts(agent: &Agent) -> Result<(u64, u64)> {
    let pulls = agent.pulls_json().await?;
    let count = |field: &str| pulls[field].as_u64().with_context(|| format!("no {field} in {pulls}"));
    Ok((count("running")?, count("queued")?))
}

pub(crate) async fn pulls_are(agent: &Agent, running: u64, queued: u64) -> Result<()> {
    eventually(PATIENCE, &format!("{running} pulls run and {queued} wait"), || async {
        let now = counts(agent).await?;
        ensure!(now == (running, queued), "now it is {now:?}: {}", agent.pulls_json().await?);
        Ok(())
    })
    .await
}

pub(crate) fn pod(name: &str, node: &str, image: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "hostNetwork": true, "automountServiceAccountToken": false, "nodeName": node,
        "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "app", "image": image, "imagePullPolicy": "Always"}],
    }})
}

/// Deletes a pod like `kubectl delete pod`, with its grace period.
async fn delete(cluster: &Cluster, name: &str) -> Result<()> {
    let params = DeleteParams::default();
    cluster.admin.pods("default").delete(name, &params).await.map(drop).context("cannot delete the pod")
}

pub(crate) async fn phase(cluster: &Cluster, name: &str, phase: &str) -> Result<()> {
    eventually(2 * PATIENCE, &format!("the pod {name} is {phase}"), || async {
        let status = cluster.admin.pods("default").get(name).await?.status.context("no status")?;
        ensure!(status.phase.as_deref() == Some(phase), "it is {status:?}");
        Ok(())
    })
    .await
}

/// Images that run, each with a unique layer beside the program.
pub(crate) async fn apps(node: &Node, names: &[&str]) -> Result<Vec<Image>> {
    let specs: Vec<_> = names.iter().map(|name| program(name, &[1 << 20])).collect::<Result<_>>()?;
    node.push(&specs).await
}

#[test]
fn case_06_a_pod_deleted_while_its_pull_waits_terminates_while_the_first_pull_runs() -> Result<()> {
    on_cluster(async |cluster| {
        let node = new_pod_node(Kind::V2, Access::Anonymous).await?;
        let images = apps(&node, &["one", "two", "three"]).await?;

        let identity = companion(cluster, &node.scratch, ACCOUNT, "worker").await?;
        let settings = settings("worker", &identity.kubeconfig()).set("pulls.max_parallel_image_pulls", 1);
        let settings = settings.set("node.node_status_update_frequency", "1s");
        let mut agent = Agent::new(&node.scratch, &node.runtime.endpoint(), &settings)?;
        // It is not ready before the kubelet has created the Node, and the kubelet not before the agent serves.
        agent.start_live().await?;
        let options = KubeletOptions { image_endpoint: Some(agent.endpoint()), ..KubeletOptions::default() };
        let kubelet = cluster.kubelet(&node.scratch, "worker", &node.runtime, &options).await?;
        cluster.admin.await_condition("worker", "Ready", "True").await?;
        wait_until_healthy(&agent).await?;

        let hold = node.proxy.rule(Match::layers().repo("one"), Fault::Hang);
        cluster.admin.apply(&pod("one", "worker", &node.name(&images[0])).to_string()).await?;
        pulls_are(&agent, 1, 0).await?;
        cluster.admin.apply(&pod("two", "worker", &node.name(&images[1])).to_string()).await?;
        pulls_are(&agent, 1, 1).await?;

        let deleted = Instant::now();
        delete(cluster, "two").await?;
        pulls_are(&agent, 1, 0).await?;
        eprintln!("the pull that waited failed after {:.2} s", deleted.elapsed().as_secs_f64());
        eventually(2 * PATIENCE, "the pod that was deleted is gone", || async {
            match cluster.admin.pods("default").get_opt("two").await? {
                Some(pod) => bail!("it is there: {:?}", pod.status),
                None => Ok(()),
            }
        })
        .await
        .with_context(|| format!("the kubelet reports {}", kubelet.log().unwrap_or_default()))?;
        eprintln!("its pod was gone after {:.1} s", deleted.elapsed().as_secs_f64());
        ensure!(counts(&agent).await? == (1, 0), "the first pull has not continued");
        let reported = agent.log()?;
        ensure!(
            node.proxy.records().active_repos().contains("one"),
            "the first pull has not continued: {reported}"
        );
        ensure!(!node.proxy.records().order().iter().any(|repo| repo == "two"), "the second one was begun");

        // The slot of the first is still in use, and free when it is done.
        cluster.admin.apply(&pod("three", "worker", &node.name(&images[2])).to_string()).await?;
        pulls_are(&agent, 1, 1).await?;
        node.proxy.remove(hold);
        phase(cluster, "one", "Running").await?;
        phase(cluster, "three", "Running").await?;
        pulls_are(&agent, 0, 0).await?;
        ensure!(node.proxy.records().max_concurrent_repos() == 1, "the limit did not hold");
        for name in ["one", "three"] {
            cluster.admin.delete_pod("default", name).await?;
        }
        Ok(())
    })
}

type RunningPull = JoinHandle<Result<String, Status>>;

fn begin(cri: &Cri, pull: Pull) -> RunningPull {
    let cri = cri.clone();
    tokio::spawn(async move { cri.pull(&pull).await })
}

#[test]
fn case_06_waiting_pulls_fail_when_their_pod_is_deleted() -> Result<()> {
    on_cluster(async |cluster| {
        let node = Node::start(Kind::Debian16).await?;
        let images = node.push_many("pods", 4, 1 << 20).await?;
        let identity = companion(cluster, &node.scratch, ACCOUNT, "callers").await?;
        cluster.admin.create_node("callers", &[]).await?;
        let settings = settings("callers", &identity.kubeconfig()).set("pulls.max_parallel_image_pulls", 1);
        let agent = node.agent(&settings).await?;
        wait_until_healthy(&agent).await?;

        let (cri, hold) = (agent.cri().await?, node.proxy.rule(Match::layers(), Fault::Hang));
        let mut going = Vec::new();
        for (n, image) in images.iter().enumerate() {
            let name = format!("caller-{n}");
            let made = cluster.admin.apply(&pod(&name, "callers", &node.name(image)).to_string()).await?;
            let uid = made.first().and_then(|pod| pod.uid()).context("a pod has a uid")?;
            going.push(begin(&cri, Pull::new(&node.name(image)).pod(&name, &uid)));
            pulls_are(&agent, 1, n.try_into()?).await?;
        }
        let [first, second, third, fourth] =
            <[RunningPull; 4]>::try_from(going).map_err(|_| anyhow::anyhow!("there are four"))?;

        // One is deleted, one is only terminating (there is no kubelet to end it), and one has a pull with a slot,
        // which continues.
        cluster.admin.delete_pod("default", "caller-1").await?;
        gone(second, "caller-1").await?;
        delete(cluster, "caller-2").await?;
        gone(third, "caller-2").await?;
        delete(cluster, "caller-0").await?;
        let pods = cluster.admin.pods("default");
        ensure!(pods.get("caller-2").await?.metadata.deletion_timestamp.is_some(), "it is terminating");
        pulls_are(&agent, 1, 1).await?;
        ensure!(!first.is_finished() && !fourth.is_finished(), "a pull failed that should not");

        node.proxy.remove(hold);
        ensure!(first.await?? == images[0].config.0, "another image came");
        ensure!(fourth.await?? == images[3].config.0, "another image came");
        pulls_are(&agent, 0, 0).await?;
        let begun = node.proxy.records().order();
        ensure!(begun == [images[0].repo.clone(), images[3].repo.clone()], "these were begun: {begun:?}");
        for n in [0, 2, 3] {
            cluster.admin.delete_pod("default", &format!("caller-{n}")).await?;
        }
        Ok(())
    })
}

/// With the gate `PodAwarePulls` off, what happens to pods changes nothing.
#[test]
fn case_06_without_the_gate_a_pull_waits_although_its_pod_is_deleted() -> Result<()> {
    on_cluster(async |cluster| {
        let node = Node::start(Kind::Debian16).await?;
        let images = node.push_many("unaware", 2, 1 << 20).await?;
        let identity = companion(cluster, &node.scratch, ACCOUNT, "unaware").await?;
        cluster.admin.create_node("unaware", &[]).await?;
        let settings = settings("unaware", &identity.kubeconfig())
            .set("pulls.max_parallel_image_pulls", 1)
            .set("feature_gates.PodAwarePulls", false);
        let agent = node.agent(&settings).await?;
        wait_until_healthy(&agent).await?;
        let (cri, hold) = (agent.cri().await?, node.proxy.rule(Match::layers(), Fault::Hang));
        let first = begin(&cri, Pull::new(&node.name(&images[0])));
        pulls_are(&agent, 1, 0).await?;
        let pod = pod("unaware", "unaware", &node.name(&images[1])).to_string();
        let made = cluster.admin.apply(&pod).await?;
        let uid = made.first().and_then(|pod| pod.uid()).context("a pod has a uid")?;
        let second = begin(&cri, Pull::new(&node.name(&images[1])).pod("unaware", &uid));
        pulls_are(&agent, 1, 1).await?;
        cluster.admin.delete_pod("default", "unaware").await?;
        node.proxy.remove(hold);
        ensure!(first.await?? == images[0].config.0, "another image came");
        ensure!(second.await?? == images[1].config.0, "another image came");
        Ok(())
    })
}

/// Checks that the pull of this pod failed, with the reason.
async fn gone(pull: RunningPull, pod: &str) -> Result<()> {
    let answer = tokio::time::timeout(PATIENCE, pull).await.context("the pull still waits")??;
    let status = failed(answer, "its pod is gone")?;
    ensure!(status.code() == Code::Aborted, "{status:?}");
    let expected = format!("pod default/{pod} was deleted while its image pull was queued");
    ensure!(status.message().contains(&expected), "{status:?}");
    Ok(())
}
