//! The Node that the agent creates, compared with the one of a stock kubelet on the same machine.

use crate::common::{node_settings, run, shared, wait_until_healthy};
use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use keelson_cluster::kube::KubeletOptions;
use keelson_harness::agent::Agent;
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Fields in which the two differ: prefix of the path, and reason. All others are equal.
const DIFFERENCES: [(&str, &str); 12] = [
    (
        "/metadata/annotations/volumes.kubernetes.io/controller-managed-attach-detach",
        "the agent mounts no volumes",
    ),
    ("/status/addresses/InternalIP6", "the kubelet was told one address, the agent names one of each family"),
    ("/status/conditions/DiskPressure/message", "texts are the agent's own"),
    ("/status/conditions/MemoryPressure/message", "texts are the agent's own"),
    ("/status/conditions/PIDPressure/message", "texts are the agent's own"),
    ("/status/conditions/Ready/message", "texts are the agent's own"),
    ("/status/conditions/ImagePullsStalled", "the agent's own condition"),
    ("/status/conditions/KeelsonStateNotDurable", "the agent's own condition"),
    ("/status/daemonEndpoints", "no kubelet serves; the API server writes 0"),
    ("/status/declaredFeatures", "features of a kubelet, by which pods are placed: the agent runs none"),
    ("/status/nodeInfo/kubeletVersion", "the agent's own version, unless node.kubelet_version is another"),
    // `features` and `runtimeHandlers` of the status.
    (RUNTIME_FEATURES, "by which pods are placed that need them: the agent runs none"),
];

/// The kubelet's fields about features of the runtime, under one name.
const RUNTIME_FEATURES: &str = "/status/runtime-features";

/// Every value with its path; an element of a list is named by its merge key.
fn flat(path: &str, value: &Value, into: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(all) => all.iter().for_each(|(key, value)| flat(&format!("{path}/{key}"), value, into)),
        Value::Array(all) => all.iter().enumerate().for_each(|(at, value)| {
            let text = |field: &str| value[field].as_str();
            let key = match (text("type"), text("address")) {
                (Some("InternalIP"), Some(ip)) => {
                    format!("InternalIP{}", if ip.contains(':') { 6 } else { 4 })
                }
                (Some(kind), _) => kind.to_owned(),
                (None, _) => text("key").map_or_else(|| at.to_string(), str::to_owned),
            };
            flat(&format!("{path}/{key}"), value, into);
        }),
        value => {
            into.insert(path.to_owned(), value.clone());
        }
    }
}

/// A Node without its name, its times, and the fields that the API server sets on every object.
fn fields(node: &Node, name: &str) -> Result<BTreeMap<String, Value>> {
    let mut node = serde_json::to_value(node)?;
    let metadata = node["metadata"].as_object_mut().context("a Node has metadata")?;
    for own in ["managedFields", "uid", "resourceVersion", "creationTimestamp"] {
        metadata.remove(own);
    }
    for condition in node["status"]["conditions"].as_array_mut().into_iter().flatten() {
        for time in ["lastHeartbeatTime", "lastTransitionTime"] {
            let time = condition.get_mut(time).with_context(|| format!("a condition without {time}"))?;
            ensure!(time.is_string(), "{time} is no time");
            *time = "TIME".into();
        }
    }
    let status = node["status"].as_object_mut().context("a Node has a status")?;
    let features: Vec<_> =
        ["features", "runtimeHandlers"].iter().filter_map(|field| status.remove(*field)).collect();
    if !features.is_empty() {
        status.insert("runtime-features".to_owned(), features.into());
    }
    let text = node.to_string().replace(name, "NAME");
    let mut fields = BTreeMap::new();
    flat("", &serde_json::from_str(&text)?, &mut fields);
    Ok(fields)
}

/// Checks that every difference is explained, and every explained field differs.
fn compare(ours: &BTreeMap<String, Value>, theirs: &BTreeMap<String, Value>) -> Result<()> {
    let mut unexplained = BTreeSet::new();
    let mut used = BTreeSet::new();
    for path in ours.keys().chain(theirs.keys()) {
        let (our, their) = (ours.get(path), theirs.get(path));
        if our == their {
            continue;
        }
        match DIFFERENCES.iter().find(|(explained, _)| path.starts_with(explained)) {
            Some((explained, _)) => drop(used.insert(*explained)),
            None => drop(unexplained.insert(format!("{path}: {our:?} instead of {their:?}"))),
        }
    }
    ensure!(unexplained.is_empty(), "fields that differ:\n{unexplained:#?}");
    eprintln!(
        "{} fields of the kubelet's Node, {} of the agent's; {} differences",
        theirs.len(),
        ours.len(),
        used.len()
    );
    for (explained, why) in DIFFERENCES {
        // A machine without IPv6 has one address, and a containerd may report no features.
        let may_be_equal = explained.ends_with("InternalIP6") || explained == RUNTIME_FEATURES;
        ensure!(may_be_equal || used.contains(explained), "{explained} is equal, though {why}");
    }
    Ok(())
}

async fn like_a_kubelets(kind: Kind, ours: &'static str, theirs: &'static str) -> Result<()> {
    let shared = shared().await?;
    let cluster = &shared.cluster;
    let scratch = Scratch::new()?;
    let options = Options { network: true, ..Options::default() };
    let containerd = Containerd::start(&scratch, kind, &options).await?;
    let labels = "pool=a,topology.kubernetes.io/zone=z1,topology.kubernetes.io/region=r1";
    let options =
        KubeletOptions { args: vec![format!("--node-labels={labels}")], ..KubeletOptions::default() };
    let options = options
        .set("registerWithTaints", json!([{"key": "k", "value": "v", "effect": "NoSchedule"}]))
        .set("providerID", "cloud://7")
        .set("kubeReserved", json!({"cpu": "100m", "memory": "200Mi"}))
        .set("systemReserved", json!({"cpu": "50m"}))
        .set("maxPods", 42);
    let _kubelet = cluster.kubelet(&scratch, theirs, &containerd, &options).await?;
    let identity = cluster.node(&scratch, ours).await?;
    let settings = node_settings(ours, &identity.kubeconfig(), scratch.path())
        .set("node.node_labels", "pool=a")
        .set("node.zone", "z1")
        .set("node.region", "r1")
        .set("node.register_with_taints", "k=v:NoSchedule")
        .set("node.provider_id", "cloud://7")
        .set("node.kube_reserved", "cpu=100m,memory=200Mi")
        .set("node.system_reserved", "cpu=50m")
        .set("node.max_pods", 42);
    let agent = Agent::start(&scratch, &containerd.endpoint(), &settings).await?;
    wait_until_healthy(&agent).await?;
    let made = |name: &'static str| async move {
        cluster.admin.await_condition(name, "Ready", "True").await?;
        // The controller removes its taint of a new node when it has seen that it is ready.
        eventually(PATIENCE, "the controller has seen the node", || async {
            let node = cluster.admin.node(name).await?.context("there is no Node")?;
            let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref()).map_or(0, Vec::len);
            ensure!(taints == 1, "{:?}", node.spec);
            // The controller also adds the old names of two labels.
            let labels = node.metadata.labels.clone().unwrap_or_default();
            let has = |name: &str| labels.contains_key(&format!("beta.kubernetes.io/{name}"));
            ensure!(has("os") && has("arch"), "{labels:?}");
            Ok(node)
        })
        .await
    };
    let (our, their) = (made(ours).await?, made(theirs).await?);
    compare(&fields(&our, ours)?, &fields(&their, theirs)?)
}

#[test]
fn a_node_created_by_the_agent_equals_one_of_a_kubelet() -> Result<()> {
    run(async {
        tokio::try_join!(
            like_a_kubelets(Kind::Debian16, "agent-16", "kubelet-16"),
            like_a_kubelets(Kind::V2, "agent-v2", "kubelet-v2"),
        )?;
        Ok(())
    })
}
