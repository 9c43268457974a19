//! The body of a write.
//!
//! Owns: [`status_patch`], the strategic merge patch from the present to the desired status, as the kubelet makes it.
//! In: both statuses, the role. Out: JSON with the differences only. It carries no resourceVersion, so writes of other
//! fields do not conflict; conditions merge by type, so conditions of others stay.

use k8s_openapi::api::core::v1::{NodeCondition, NodeStatus};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::policy::Role;

/// The fields that role node writes in addition to conditions and addresses.
const MAPS: [&str; 3] = ["capacity", "allocatable", "nodeInfo"];

/// The patch of `/nodes/<name>/status` from `old` to `new`. A companion's contains only conditions, and none that is
/// equal in both; wrong labels are included.
pub(super) fn status_patch(
    old: &NodeStatus,
    new: &NodeStatus,
    role: Role,
    labels: &[(&'static str, String)],
) -> Value {
    let mut status = Map::new();
    conditions(old, new, role, &mut status);
    if role == Role::Node {
        let (old_value, new_value) = (value(old), value(new));
        for field in MAPS {
            let diff = merge(old_value.get(field), new_value.get(field));
            if let Some(diff) = diff {
                status.insert(field.into(), diff);
            }
        }
        // A list without merge keys.
        if old_value.get("images") != new_value.get("images") {
            status.insert("images".into(), value(&new.images));
        }
        if old_value.get("addresses") != new_value.get("addresses") {
            // Addresses merge by type, so two of one type would become one: the whole list replaces the old one.
            let mut all: Vec<Value> = new.addresses.iter().flatten().map(value).collect();
            all.push(json!({"$patch": "replace"}));
            status.insert("addresses".into(), all.into());
        }
    }
    let mut patch = Map::new();
    patch.insert("status".into(), status.into());
    if !labels.is_empty() {
        let labels: Map<_, _> =
            labels.iter().map(|(key, value)| ((*key).into(), value.as_str().into())).collect();
        patch.insert("metadata".into(), json!({ "labels": labels }));
    }
    patch.into()
}

/// The patch of `/nodes/<name>/status` that removes conditions of these types, including those of other processes.
#[must_use]
pub fn removal_patch<T: AsRef<str>>(kinds: &[T]) -> Value {
    let all: Vec<_> = kinds.iter().map(|kind| removal(kind.as_ref())).collect();
    json!({"status": {"conditions": all}})
}

fn removal(kind: &str) -> Value {
    json!({"$patch": "delete", "type": kind})
}

/// The API's types always serialize, so the empty object never occurs.
fn value<T: Serialize>(of: &T) -> Value {
    serde_json::to_value(of).unwrap_or_else(|_| json!({}))
}

/// `None` where they are equal.
fn merge(old: Option<&Value>, new: Option<&Value>) -> Option<Value> {
    match (old, new) {
        (old, new) if old == new => None,
        (Some(Value::Object(old)), Some(Value::Object(new))) => {
            let mut patch = Map::new();
            for (key, new) in new {
                if let Some(diff) = merge(old.get(key), Some(new)) {
                    patch.insert(key.clone(), diff);
                }
            }
            for key in old.keys().filter(|key| !new.contains_key(*key)) {
                patch.insert(key.clone(), Value::Null);
            }
            Some(patch.into())
        }
        (_, new) => Some(new.cloned().unwrap_or(Value::Null)),
    }
}

fn conditions(old: &NodeStatus, new: &NodeStatus, role: Role, status: &mut Map<String, Value>) {
    let find = |list: &NodeStatus, kind: &str| {
        list.conditions.iter().flatten().find(|condition| condition.type_ == kind).cloned()
    };
    let mut patches = Vec::new();
    for condition in new.conditions.iter().flatten() {
        patches.extend(condition_patch(find(old, &condition.type_).as_ref(), condition));
    }
    for condition in old.conditions.iter().flatten() {
        if find(new, &condition.type_).is_none() {
            patches.push(removal(&condition.type_));
        }
    }
    if patches.is_empty() {
        return;
    }
    if role == Role::Node {
        let kinds = new.conditions.iter().flatten().map(|condition| json!({"type": condition.type_}));
        status.insert("$setElementOrder/conditions".into(), kinds.collect());
    }
    status.insert("conditions".into(), patches.into());
}

fn condition_patch(old: Option<&NodeCondition>, new: &NodeCondition) -> Option<Value> {
    let Some(old) = old else { return Some(value(new)) };
    let mut patch = merge(Some(&value(old)), Some(&value(new)))?;
    if let Value::Object(patch) = &mut patch {
        patch.insert("type".into(), new.type_.clone().into());
    }
    Some(patch)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn status(json: Value) -> NodeStatus {
        serde_json::from_value(json).expect("a status")
    }

    /// Applies a patch as an API server: strategic merge as far as Nodes go.
    pub(crate) fn apply(node: &mut Value, patch: &Value) {
        let (Value::Object(node), Value::Object(patch)) = (node, patch) else { panic!("objects") };
        for (key, new) in patch {
            match (key.as_str(), new) {
                (order, _) if order.starts_with("$setElementOrder/") => {}
                (_, Value::Null) => drop(node.remove(key)),
                ("conditions", Value::Array(patches)) => {
                    let list = node.entry(key).or_insert_with(|| json!([]));
                    let list = list.as_array_mut().expect("a list");
                    patches.iter().for_each(|patch| apply_condition(list, patch));
                }
                ("addresses", Value::Array(patches)) => {
                    assert!(patches.contains(&json!({"$patch": "replace"})), "never merged by type");
                    let all = patches.iter().filter(|patch| patch.get("$patch").is_none()).cloned();
                    node.insert(key.clone(), all.collect());
                }
                (_, Value::Object(_)) => apply(node.entry(key).or_insert_with(|| json!({})), new),
                _ => drop(node.insert(key.clone(), new.clone())),
            }
        }
    }

    fn apply_condition(list: &mut Vec<Value>, patch: &Value) {
        if patch.get("$patch") == Some(&json!("delete")) {
            list.retain(|condition| condition["type"] != patch["type"]);
            return;
        }
        match list.iter_mut().find(|condition| condition["type"] == patch["type"]) {
            Some(condition) => apply(condition, patch),
            None => list.push(patch.clone()),
        }
    }

    fn base() -> NodeStatus {
        status(json!({
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": "n"}],
            "capacity": {"cpu": "4", "memory": "8Gi"},
            "conditions": [
                {"type": "MemoryPressure", "status": "False", "lastHeartbeatTime": "2026-01-01T00:00:00Z",
                 "lastTransitionTime": "2026-01-01T00:00:00Z", "reason": "R", "message": "m"},
                {"type": "Foreign", "status": "True"},
                {"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z",
                 "lastTransitionTime": "2026-01-01T00:00:00Z", "reason": "R", "message": "m"},
            ],
            "nodeInfo": {"bootID": "b"},
        }))
    }

    fn at(kind: &str, status: &mut NodeStatus, change: impl Fn(&mut NodeCondition)) {
        status.conditions.iter_mut().flatten().filter(|of| of.type_ == kind).for_each(change);
    }

    fn beat(seconds: i64) -> impl Fn(&mut NodeCondition) {
        move |condition| {
            condition.last_heartbeat_time =
                Some(crate::status::compute::conditions::time(1_767_225_600_000 + seconds * 1000));
        }
    }

    #[test]
    fn case_27_an_idle_body_holds_heartbeats_only() {
        let (old, mut new) = (base(), base());
        at("MemoryPressure", &mut new, beat(300));
        at("Ready", &mut new, beat(300));
        let body = status_patch(&old, &new, Role::Node, &[]);
        assert_eq!(
            body,
            json!({"status": {
                "$setElementOrder/conditions":
                    [{"type": "MemoryPressure"}, {"type": "Foreign"}, {"type": "Ready"}],
                "conditions": [
                    {"type": "MemoryPressure", "lastHeartbeatTime": "2026-01-01T00:05:00Z"},
                    {"type": "Ready", "lastHeartbeatTime": "2026-01-01T00:05:00Z"},
                ],
            }})
        );
    }

    #[test]
    fn a_body_names_what_changed() {
        let (old, mut new) = (base(), base());
        at("Ready", &mut new, |condition| {
            condition.status = "False".into();
            condition.message = Some("down".into());
        });
        new.conditions.as_mut().expect("there").push(NodeCondition {
            type_: "New".into(),
            status: "True".into(),
            ..NodeCondition::default()
        });
        new.capacity
            .as_mut()
            .expect("there")
            .insert("cpu".into(), serde_json::from_value(json!("8")).expect("a text"));
        new.capacity.as_mut().expect("there").remove("memory");
        new.node_info.as_mut().expect("there").boot_id = "c".into();
        new.addresses.as_mut().expect("there")[0].address = "10.0.0.2".into();
        new.images = serde_json::from_value(json!([{"names": ["a"], "sizeBytes": 1}])).expect("images");
        let labels = [("kubernetes.io/os", "linux".to_owned())];
        assert_eq!(
            status_patch(&old, &new, Role::Node, &labels),
            json!({
                "metadata": {"labels": {"kubernetes.io/os": "linux"}},
                "status": {
                    "$setElementOrder/conditions":
                        [{"type": "MemoryPressure"}, {"type": "Foreign"}, {"type": "Ready"}, {"type": "New"}],
                    "conditions": [
                        {"type": "Ready", "status": "False", "message": "down"},
                        {"type": "New", "status": "True"},
                    ],
                    "capacity": {"cpu": "8", "memory": null},
                    "nodeInfo": {"bootID": "c"},
                    "addresses": [
                        {"type": "InternalIP", "address": "10.0.0.2"},
                        {"type": "Hostname", "address": "n"},
                        {"$patch": "replace"},
                    ],
                    "images": [{"names": ["a"], "sizeBytes": 1}],
                },
            })
        );
    }

    #[test]
    fn a_companions_body_has_its_own_conditions_only() {
        let (old, mut new) = (base(), base());
        new.conditions.as_mut().expect("there").push(NodeCondition {
            type_: "ImagePullsStalled".into(),
            status: "True".into(),
            ..NodeCondition::default()
        });
        let body = status_patch(&old, &new, Role::Companion, &[]);
        assert_eq!(
            body,
            json!({"status": {"conditions": [{"type": "ImagePullsStalled", "status": "True"}]}})
        );
    }

    #[test]
    fn a_condition_that_was_cleared_is_deleted_by_its_type() {
        let (old, mut new) = (base(), base());
        new.conditions.as_mut().expect("there").retain(|condition| condition.type_ != "Foreign");
        assert_eq!(
            status_patch(&old, &new, Role::Companion, &[]),
            json!({"status": {"conditions": [{"$patch": "delete", "type": "Foreign"}]}})
        );
        new.images = None;
        let with_images = status(json!({"images": [{"names": ["a"], "sizeBytes": 1}]}));
        let body = status_patch(&with_images, &NodeStatus::default(), Role::Node, &[]);
        assert_eq!(body, json!({"status": {"images": null}}));
    }
}
