//! The check of a whole cluster, as an operator goes the way of docs/rollout.md by its commands ([`Rollout`]): kube-proxy first,
//! then Keelson's proxy in its place, an upgrade of kubeadm between, the way back, in again, and back by the program of the host.
//!
//! In: a [`OneNode`] with the images in its registry. Out: an error with the first thing that is not as documented.

use super::addons;
use super::rollout::Rollout;
use super::{CLUSTER_CIDR, LONG, NODE, OneNode, Steps, place};
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

// How commands of docs/rollout.md begin.
const INSTALL: &str = "helm install keelson ";
const SKIP_LABELLED: &str = "kubectl -n kube-system patch daemonset kube-proxy ";
const IN: &str = "kubectl label node NODE keelson.dev/proxy=true";
const OUT: &str = "kubectl label node NODE keelson.dev/proxy-";

const WEB: &str = "web.default.svc.cluster.local";

pub async fn check(node: &OneNode, steps: &mut Steps) -> Result<()> {
    let rollout = Rollout::new(node)?;
    with_kube_proxy(node, &rollout, steps).await?;
    change_over(node, &rollout, steps).await?;
    upgrade_of_kubeadm(node, &rollout, steps).await?;
    way_back_by_the_image(node, &rollout, steps).await?;
    rollout.run(IN).await?;
    node.operator.rolled_out("kube-system", "ds/keelson-proxy").await?;
    answers(node, 2).await?;
    steps.done("in again with one command");
    follows_changes(node).await?;
    steps.done("a third server answers: Keelson follows changes");
    at_the_socket_level(node).await?;
    steps.done("the chart with the backend ebpf: connect() decides; and back to nft");
    way_back_by_the_host(node, &rollout, steps).await?;
    pulls_went_through_the_agent(node).await?;
    steps.done("every image was pulled through the agent");
    rollout.is_complete()
}

/// The state of a cluster before Keelson's proxy; the chart is installed.
async fn with_kube_proxy(node: &OneNode, rollout: &Rollout, steps: &mut Steps) -> Result<()> {
    let (proxy, nft) = (peers::kubernetes("kube-proxy")?, peers::system("nft", "nftables")?);
    let programs = [(&*proxy, "usr/bin/kube-proxy"), (&*nft, "usr/sbin/nft")];
    node.operator.push(&ImageSpec::with_libraries("kube-proxy", &programs)?).await?;
    node.cluster.admin.apply(&kube_proxy(node)).await?;
    let network = rollout.run("kubectl -n kube-system get configmap kube-proxy ").await?.out;
    ensure!(network.contains(CLUSTER_CIDR), "the configuration of kube-proxy says {network:?}");
    rollout.run(INSTALL).await?;
    steps.done("the chart is installed");
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

async fn change_over(node: &OneNode, rollout: &Rollout, steps: &mut Steps) -> Result<()> {
    rollout.run(IN).await?;
    kept_away(node, "app.kubernetes.io/name=keelson-proxy").await?;
    steps.done("in with one command; the proxy's pod waits, because kube-proxy is there");
    rollout.run(SKIP_LABELLED).await?;
    node.operator.rolled_out("kube-system", "ds/keelson-proxy").await?;
    ensure!(pods(node, "k8s-app=kube-proxy").await?.is_empty(), "kube-proxy is still there");
    let shown = rollout
        .run("kubectl -n kube-system get pods -o wide -l app.kubernetes.io/name=keelson-proxy")
        .await?
        .out;
    ensure!(shown.contains("Running") && shown.contains(NODE), "the proxy's pods are {shown}");
    rollout.run("kubectl -n kube-system exec ds/keelson-proxy -- keelson proxy state").await?;
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
async fn upgrade_of_kubeadm(node: &OneNode, rollout: &Rollout, steps: &mut Steps) -> Result<()> {
    let path = node.operator.write("kube-proxy.yaml", &kube_proxy(node))?.display().to_string();
    node.operator.kubectl(&["replace", "-f", &path]).await?.success()?;
    kept_away(node, "k8s-app=kube-proxy").await?;
    answers(node, 2).await?;
    rollout.run(SKIP_LABELLED).await?;
    eventually(LONG, "kube-proxy's pod is gone", || async {
        ensure!(pods(node, "k8s-app=kube-proxy").await?.is_empty(), "it is there");
        Ok(())
    })
    .await?;
    steps.done("an upgrade of kubeadm drops the rule; no kube-proxy starts beside Keelson");
    Ok(())
}

/// The proxy's pod is gone, and kube-proxy is back.
async fn out(node: &OneNode, rollout: &Rollout) -> Result<()> {
    rollout.run(OUT).await?;
    eventually(LONG, "the proxy's pod is gone", || async {
        ensure!(pods(node, "app.kubernetes.io/name=keelson-proxy").await?.is_empty(), "it is there");
        Ok(())
    })
    .await?;
    ready(node, "k8s-app=kube-proxy").await
}

async fn only_kube_proxys_rules() -> Result<()> {
    eventually(LONG, "the rules of Keelson are gone", || async {
        let left = tables().await?;
        ensure!(!left.contains("keelson") && left.contains("kube-proxy"), "there are {left}");
        Ok(())
    })
    .await
}

/// Without the program on the node.
async fn way_back_by_the_image(node: &OneNode, rollout: &Rollout, steps: &mut Steps) -> Result<()> {
    out(node, rollout).await?;
    ensure!(tables().await?.contains("keelson"), "the rules are gone before they were removed");
    rollout.run("echo ").await?;
    rollout.run("kubectl debug node/NODE ").await?;
    only_kube_proxys_rules().await?;
    answers(node, 2).await?;
    steps.done("out with one command, kube-proxy is back; rules removed by the program of the image");
    Ok(())
}

async fn way_back_by_the_host(node: &OneNode, rollout: &Rollout, steps: &mut Steps) -> Result<()> {
    out(node, rollout).await?;
    let shown = rollout.run("kubectl -n kube-system get pods -o wide -l k8s-app=kube-proxy ").await?.out;
    ensure!(shown.contains("1/1"), "kube-proxy's pods are {shown}");
    rollout.run("keelson proxy cleanup").await?;
    only_kube_proxys_rules().await?;
    answers(node, 3).await?;
    steps.done("out again, and rules removed by the program of the host");
    Ok(())
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
