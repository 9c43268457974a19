//! Registration: the Node that the agent creates, and the labels that it repairs.
//!
//! Owns: the content of a new Node, and the differences of an existing one from the settings. In: the policy, the
//! host's facts, the status. Out: the Node to create, the patch of labels.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Node, NodeSpec, NodeStatus, Taint as ApiTaint},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde_json::{Map, Value, json};

use super::policy::StatusPolicy;
use crate::host::HostFacts;

pub(super) const OS: &str = "kubernetes.io/os";
pub(super) const ARCH: &str = "kubernetes.io/arch";

/// The labels that the Node should have, including those of the settings.
fn labels(policy: &StatusPolicy, facts: &HostFacts) -> BTreeMap<String, String> {
    let mut labels = policy.labels.0.clone();
    for (key, value) in [
        ("kubernetes.io/hostname", &policy.node_name),
        (OS, &facts.operating_system),
        (ARCH, &facts.architecture),
        ("topology.kubernetes.io/zone", &policy.zone),
        ("topology.kubernetes.io/region", &policy.region),
    ] {
        if !value.is_empty() {
            labels.insert(key.to_owned(), value.clone());
        }
    }
    labels
}

pub(super) fn new_node(policy: &StatusPolicy, facts: &HostFacts, status: NodeStatus) -> Node {
    let taint = |taint: &super::settings::Taint| ApiTaint {
        key: taint.key.clone(),
        value: (!taint.value.is_empty()).then(|| taint.value.clone()),
        effect: taint.effect.clone(),
        time_added: None,
    };
    let taints: Vec<_> = policy.taints.iter().map(taint).collect();
    let metadata = ObjectMeta {
        name: Some(policy.node_name.clone()),
        labels: Some(labels(policy, facts)),
        ..ObjectMeta::default()
    };
    let spec = NodeSpec {
        provider_id: (!policy.provider_id.is_empty()).then(|| policy.provider_id.clone()),
        taints: (!taints.is_empty()).then_some(taints),
        ..NodeSpec::default()
    };
    Node { metadata, spec: Some(spec), status: Some(status) }
}

/// The patch of an existing Node: labels that are wrong or absent, and a missing provider ID. Taints are for new Nodes
/// only, and other labels belong to other programs.
pub(super) fn repair(node: &Node, policy: &StatusPolicy, facts: &HostFacts) -> Option<Value> {
    let has = |key: &String| node.metadata.labels.as_ref().and_then(|labels| labels.get(key));
    let wrong: Map<String, Value> = labels(policy, facts)
        .into_iter()
        .filter(|(key, value)| has(key) != Some(value))
        .map(|(key, value)| (key, value.into()))
        .collect();
    let provider = node.spec.as_ref().and_then(|spec| spec.provider_id.as_deref()).unwrap_or_default();
    let mut patch = Map::new();
    if !wrong.is_empty() {
        patch.insert("metadata".into(), json!({ "labels": wrong }));
    }
    if provider.is_empty() && !policy.provider_id.is_empty() {
        patch.insert("spec".into(), json!({ "providerID": policy.provider_id }));
    }
    (!patch.is_empty()).then(|| patch.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{
        policy::Role,
        settings::{Labels, Taint},
    };

    fn policy() -> StatusPolicy {
        StatusPolicy {
            labels: Labels::parse_list("pool=a,kubernetes.io/os=other").expect("labels"),
            taints: Taint::parse_list("k=v:NoSchedule,e:NoExecute").expect("taints"),
            zone: "z1".into(),
            provider_id: "cloud://7".into(),
            ..StatusPolicy::new(Role::Node, "n1")
        }
    }

    fn facts() -> HostFacts {
        HostFacts { operating_system: "linux".into(), architecture: "amd64".into(), ..HostFacts::default() }
    }

    #[test]
    fn a_new_node_has_the_labels_and_taints_of_the_settings() {
        let node = new_node(&policy(), &facts(), NodeStatus::default());
        assert_eq!(
            serde_json::to_value(&node).expect("JSON"),
            json!({
                "apiVersion": "v1", "kind": "Node",
                "metadata": {"name": "n1", "labels": {
                    "kubernetes.io/hostname": "n1", "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
                    "topology.kubernetes.io/zone": "z1", "pool": "a",
                }},
                "spec": {"providerID": "cloud://7", "taints": [
                    {"key": "k", "value": "v", "effect": "NoSchedule"},
                    {"key": "e", "effect": "NoExecute"},
                ]},
                "status": {},
            })
        );
        assert_eq!(repair(&node, &policy(), &facts()), None);
    }

    #[test]
    fn an_existing_node_gets_missing_labels_and_keeps_others() {
        let mut node = new_node(&policy(), &facts(), NodeStatus::default());
        let labels = node.metadata.labels.as_mut().expect("there");
        labels.insert("foreign".into(), "x".into());
        labels.insert("topology.kubernetes.io/zone".into(), "z0".into());
        labels.remove("pool");
        node.spec = None;
        assert_eq!(
            repair(&node, &policy(), &facts()),
            Some(json!({
                "metadata": {"labels": {"topology.kubernetes.io/zone": "z1", "pool": "a"}},
                "spec": {"providerID": "cloud://7"},
            }))
        );
    }
}
