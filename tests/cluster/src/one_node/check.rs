//! The check of a whole cluster, as an operator goes the way of docs/rollout.md: kube-proxy first, then Keelson's proxy in its
//! place, an upgrade of kubeadm between, the way back, and in again.
//!
//! In: a [`OneNode`] with the chart installed. Out: an error with the first thing that is not as documented.

use super::addons;
use super::{LONG, NODE, OneNode, Steps, place};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::command::run;
use keelson_harness::images::ImageSpec;
use keelson_harness::peers;
use keelson_harness::util::eventually;
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::IpAddr;
use tokio::net::TcpStream;
use tokio::process::Command;

const IN: &str = "keelson.dev/proxy=true";
const OUT: &str = "keelson.dev/proxy-";
const WEB: &str = "web.default.svc.cluster.local";

/// The patch of docs/rollout.md: kube-proxy skips nodes with the label.
pub const SKIP_LABELLED: &str = r#"{"spec":{"template":{"spec":{"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"keelson.dev/proxy","operator":"DoesNotExist"}]}]}}}}}}}"#;

/// The shipped image has a user that is not root.
const AS_ROOT: &str = r#"{"securityContext":{"privileged":true,"runAsUser":0}}"#;

pub async fn check(node: &OneNode, steps: &mut Steps) -> Result<()> {
    with_kube_proxy(node, steps).await?;
    change_over(node, steps).await?;
    upgrade_of_kubeadm(node, steps).await?;
    way_back(node, steps).await?;
    node.operator.label_for_proxy(IN).await?;
    node.operator.rolled_out("kube-system", "ds/keelson-proxy").await?;
    answers(node, 2).await?;
    steps.done("in again with one command");
    follows_changes(node).await?;
    steps.done("a third server answers: Keelson follows changes");
    at_the_socket_level(node).await?;
    steps.done("the chart with the backend ebpf: connect() decides; and back to nft");
    pulls_went_through_the_agent(node).await?;
    steps.done("every image was pulled through the agent");
    Ok(())
}

/// The state of a cluster before Keelson.
async fn with_kube_proxy(node: &OneNode, steps: &mut Steps) -> Result<()> {
    let (proxy, nft) = (peers::kubernetes("kube-proxy")?, peers::system("nft", "nftables")?);
    let programs = [(&*proxy, "usr/bin/kube-proxy"), (&*nft, "usr/sbin/nft")];
    node.operator.push(&ImageSpec::with_libraries("kube-proxy", &programs)?).await?;
    node.cluster.admin.apply(&kube_proxy(node)).await?;
    node.operator.rolled_out("kube-system", "ds/kube-proxy").await?;
    node.operator.rolled_out("kube-system", "deploy/coredns").await?;
    node.operator.start_workload().await?;
    answers(node, 2).await?;
    steps.done("kube-proxy serves: Service and DNS answer");
    Ok(())
}

fn kube_proxy(node: &OneNode) -> String {
    addons::kube_proxy(node.operator.registry.address(), node.cluster.api.endpoint())
}

async fn change_over(node: &OneNode, steps: &mut Steps) -> Result<()> {
    node.operator.label_for_proxy(IN).await?;
    kept_away(node, "app.kubernetes.io/name=keelson-proxy").await?;
    steps.done("in with one command; the proxy's pod waits, because kube-proxy is there");
    skip_labelled(node).await?;
    node.operator.rolled_out("kube-system", "ds/keelson-proxy").await?;
    ensure!(pods(node, "k8s-app=kube-proxy").await?.is_empty(), "kube-proxy is still there");
    let state = node.operator.proxy_state().await?;
    ensure!(state.is_success(), "{state:?}");
    answers(node, 2).await?;
    let rules = eventually(LONG, "the rules of kube-proxy are gone", || async {
        let tables = tables().await?;
        ensure!(!tables.contains("kube-proxy"), "there are {tables}");
        Ok(tables)
    })
    .await?;
    ensure!(rules.contains("keelson"), "there are no rules of Keelson: {rules}");
    steps.done("kube-proxy skips the node; Keelson is ready in its place");
    Ok(())
}

/// `kubeadm upgrade` replaces the DaemonSet of kube-proxy: the rule about nodes is gone.
async fn upgrade_of_kubeadm(node: &OneNode, steps: &mut Steps) -> Result<()> {
    let path = node.operator.write("kube-proxy.yaml", &kube_proxy(node))?.display().to_string();
    node.operator.kubectl(&["replace", "-f", &path]).await?.success()?;
    kept_away(node, "k8s-app=kube-proxy").await?;
    answers(node, 2).await?;
    skip_labelled(node).await?;
    eventually(LONG, "kube-proxy's pod is gone", || async {
        ensure!(pods(node, "k8s-app=kube-proxy").await?.is_empty(), "it is there");
        Ok(())
    })
    .await?;
    steps.done("an upgrade of kubeadm drops the rule; no kube-proxy starts beside Keelson");
    Ok(())
}

async fn way_back(node: &OneNode, steps: &mut Steps) -> Result<()> {
    node.operator.label_for_proxy(OUT).await?;
    eventually(LONG, "the proxy's pod is gone", || async {
        ensure!(pods(node, "app.kubernetes.io/name=keelson-proxy").await?.is_empty(), "it is there");
        Ok(())
    })
    .await?;
    ready(node, "k8s-app=kube-proxy").await?;
    // From the image, so that it is seen to work without the program on the node.
    let custom = node.operator.write("root.json", AS_ROOT)?.display().to_string();
    let (image, on) = (node.operator.image("keelson"), format!("node/{NODE}"));
    let mut debug = vec!["debug", &on, "--profile=sysadmin", "--image", &image, "--custom", &custom, "--"];
    debug.extend(["/usr/bin/keelson", "proxy", "cleanup"]);
    node.operator.kubectl(&debug).await?.success()?;
    eventually(LONG, "the rules of Keelson are gone", || async {
        let left = tables().await?;
        ensure!(!left.contains("keelson") && left.contains("kube-proxy"), "there are {left}");
        Ok(())
    })
    .await?;
    answers(node, 2).await?;
    steps.done("out with one command, kube-proxy is back; rules removed");
    Ok(())
}

async fn skip_labelled(node: &OneNode) -> Result<()> {
    let patch =
        ["-n", "kube-system", "patch", "daemonset", "kube-proxy", "--type", "merge", "-p", SKIP_LABELLED];
    node.operator.kubectl(&patch).await?.success().map(drop)
}

/// Waits until this many servers have answered by the name of their Service.
async fn answers(node: &OneNode, servers: usize) -> Result<()> {
    let mut seen = BTreeSet::new();
    for _ in 0..100 {
        let answer = eventually(LONG, "the Service answers", || node.operator.fetch(WEB)).await?;
        seen.insert(answer);
        if seen.len() >= servers {
            return Ok(());
        }
    }
    anyhow::bail!("only {seen:?} have answered")
}

async fn follows_changes(node: &OneNode) -> Result<()> {
    node.operator.kubectl(&["scale", "deploy/web", "--replicas=3"]).await?.success()?;
    node.operator.rolled_out("default", "deploy/web").await?;
    answers(node, 3).await
}

/// The programs are attached to the cgroup of the node only ([`place`]); this process is in it.
async fn at_the_socket_level(node: &OneNode) -> Result<()> {
    let folder = format!("proxy.ebpf.cgroupFolder={}", place::cgroup()?.display());
    node.operator.helm("upgrade", &["proxy.backend=ebpf".to_owned(), folder.clone()]).await?;
    node.operator.rolled_out("kube-system", "ds/keelson-proxy").await?;
    let state = eventually(LONG, "the socket level is attached", || async {
        let state = node.operator.proxy_state().await?.success()?.out;
        ensure!(state.contains("socket level: attached"), "{state}");
        Ok(state)
    })
    .await?;
    // The names of network namespaces of pods can be entered.
    ensure!(!state.contains("cannot enter"), "{state}");
    let web = node
        .operator
        .kubectl(&["get", "service", "web", "-o", "jsonpath={.spec.clusterIP}"])
        .await?
        .success()?
        .out;
    let web: IpAddr = web.trim().parse().with_context(|| format!("the address of the Service is {web:?}"))?;
    let connected = TcpStream::connect((web, 80)).await.context("no endpoint answers")?;
    ensure!(connected.peer_addr()?.ip() == web, "the peer is {:?}", connected.peer_addr());
    let state = node.operator.proxy_state().await?.success()?.out;
    let decided = state.lines().find(|line| line.contains("decisions: ")).context("no decisions")?;
    ensure!(!decided.contains("decisions: 0 "), "{decided}");
    answers(node, 3).await?;

    // Back with the rights, without which the programs would stay.
    let values = ["proxy.backend=nft".to_owned(), "proxy.ebpf.allowed=true".to_owned(), folder];
    node.operator.helm("upgrade", &values).await?;
    node.operator.rolled_out("kube-system", "ds/keelson-proxy").await?;
    eventually(LONG, "nft has taken over", || async {
        let state = node.operator.proxy_state().await?.success()?.out;
        ensure!(state.contains("nft took over from ebpf: removed "), "{state}");
        Ok(())
    })
    .await?;
    answers(node, 3).await
}

async fn pods(node: &OneNode, label: &str) -> Result<Vec<Value>> {
    let list: Value = node
        .operator
        .kubectl(&["-n", "kube-system", "get", "pods", "-l", label, "-o", "json"])
        .await?
        .json()?;
    list["items"].as_array().cloned().context("a list has items")
}

fn has(pod: &Value, condition: &str, status: &str) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.into_iter().any(|it| it["type"] == condition && it["status"] == status)
}

/// Waits until the scheduler has refused a pod, which runs nowhere.
async fn kept_away(node: &OneNode, label: &str) -> Result<()> {
    eventually(LONG, &format!("the pod with {label} is kept away"), || async {
        let all = pods(node, label).await?;
        let refused = |pod: &Value| has(pod, "PodScheduled", "False") && pod["spec"]["nodeName"] != NODE;
        ensure!(all.len() == 1 && all.iter().all(refused), "{all:?}");
        Ok(())
    })
    .await
}

async fn ready(node: &OneNode, label: &str) -> Result<()> {
    eventually(LONG, &format!("the pod with {label} is ready"), || async {
        let all = pods(node, label).await?;
        ensure!(all.len() == 1 && all.iter().all(|pod| has(pod, "Ready", "True")), "{all:?}");
        Ok(())
    })
    .await
}

async fn tables() -> Result<String> {
    let mut nft = Command::new(peers::system("nft", "nftables")?);
    nft.args(["list", "tables"]);
    Ok(run(nft).await?.success()?.out)
}

/// Of each image a pod has there is a pull in the agent's records.
async fn pulls_went_through_the_agent(node: &OneNode) -> Result<()> {
    let metrics = node.agent.http_get("/metrics").await?.success()?.text();
    let pulls: f64 = metrics
        .lines()
        .filter(|line| line.starts_with("keelson_image_pulls_total{") && line.contains("succeeded"))
        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
        .sum();
    // The proxies, CoreDNS, two servers and the client, which pulls always.
    ensure!(pulls >= 4.0, "the agent counts {pulls} pulls:\n{metrics}");
    Ok(())
}
