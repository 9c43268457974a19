//! Whether a status has changed.
//!
//! Owns: the kubelet's comparison of two statuses. In: the present and the desired status. Out: whether they differ in
//! more than heartbeats.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Node, NodeStatus},
    apimachinery::pkg::api::resource::Quantity,
};

use super::quantity::Amount;

/// Conditions are compared by type and without heartbeats, amounts by value, an empty field equals an absent one, and
/// everything else exactly. Messages and images count.
pub(super) fn differ(one: &NodeStatus, other: &NodeStatus) -> bool {
    canonical(one) != canonical(other)
}

fn canonical(status: &NodeStatus) -> NodeStatus {
    let mut status = status.clone();
    for condition in status.conditions.iter_mut().flatten() {
        condition.last_heartbeat_time = None;
        // The server omits empty texts.
        condition.reason = condition.reason.take().filter(|text| !text.is_empty());
        condition.message = condition.message.take().filter(|text| !text.is_empty());
    }
    if let Some(conditions) = &mut status.conditions {
        conditions.sort_by(|one, other| one.type_.cmp(&other.type_));
    }
    for list in [&mut status.capacity, &mut status.allocatable] {
        *list = list.take().filter(|list| !list.is_empty()).map(amounts);
    }
    status.conditions = status.conditions.filter(|list| !list.is_empty());
    status.addresses = status.addresses.filter(|list| !list.is_empty());
    status.images = status.images.filter(|list| !list.is_empty());
    status.node_info = Some(status.node_info.unwrap_or_default());
    status
}

fn amounts(list: BTreeMap<String, Quantity>) -> BTreeMap<String, Quantity> {
    let canonical = |quantity: Quantity| match quantity.0.parse::<Amount>() {
        Ok(amount) => Quantity(amount.plain()),
        Err(_) => quantity,
    };
    list.into_iter().map(|(name, quantity)| (name, canonical(quantity))).collect()
}

/// The system labels that are wrong on the Node: the kubelet's comparison includes these.
pub(super) fn wrong_system_labels(node: &Node, os: &str, arch: &str) -> Vec<(&'static str, String)> {
    let has =
        |key: &str| node.metadata.labels.as_ref().and_then(|labels| labels.get(key)).map(String::as_str);
    [(super::register::OS, os), (super::register::ARCH, arch)]
        .into_iter()
        .filter(|(key, value)| !value.is_empty() && has(key) != Some(value))
        .map(|(key, value)| (key, value.to_owned()))
        .collect()
}

/// Whether a resourceVersion is older than another; false for texts that are not numbers.
pub(super) fn older(one: Option<&str>, other: &str) -> bool {
    match (one.map(str::parse::<u128>), other.parse::<u128>()) {
        (Some(Ok(one)), Ok(other)) => one < other,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{ContainerImage, NodeCondition, NodeSystemInfo};
    use serde_json::json;

    use super::*;

    fn status(json: serde_json::Value) -> NodeStatus {
        serde_json::from_value(json).expect("a status")
    }

    #[test]
    fn heartbeat_times_order_and_number_format_are_no_change() {
        let one = status(json!({
            "capacity": {"cpu": "4", "memory": "8Gi", "ephemeral-storage": "0.5"},
            "conditions": [
                {"type": "A", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z", "message": ""},
                {"type": "B", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            ],
            "images": [],
        }));
        let other = status(json!({
            "capacity": {"cpu": "4000m", "memory": "8388608Ki", "ephemeral-storage": "500m"},
            "conditions": [
                {"type": "B", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                {"type": "A", "status": "True", "lastHeartbeatTime": "2026-01-01T00:05:00Z"},
            ],
        }));
        assert!(!differ(&one, &other) && !differ(&other, &one));
    }

    #[test]
    fn everything_else_is_a_change() {
        let base = || {
            status(json!({
                "capacity": {"cpu": "4"},
                "conditions": [{"type": "A", "status": "True", "message": "m", "reason": "R",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"}],
                "nodeInfo": {},
            }))
        };
        assert!(!differ(&base(), &base()));
        let changes: [fn(&mut NodeStatus); 8] = [
            |status| {
                drop(status.capacity.as_mut().expect("there").insert("cpu".into(), Quantity("5".into())))
            },
            |status| drop(status.capacity.as_mut().expect("there").insert("x".into(), Quantity("0".into()))),
            |status| status.conditions.as_mut().expect("there")[0].message = Some("other".into()),
            |status| status.conditions.as_mut().expect("there")[0].reason = Some("Other".into()),
            |status| status.conditions.as_mut().expect("there")[0].last_transition_time = None,
            |status| status.conditions.as_mut().expect("there").push(NodeCondition::default()),
            |status| status.images = Some(vec![ContainerImage::default()]),
            |status| {
                let info = NodeSystemInfo { boot_id: "b".into(), ..NodeSystemInfo::default() };
                status.node_info = Some(info);
            },
        ];
        for (n, change) in changes.into_iter().enumerate() {
            let mut changed = base();
            change(&mut changed);
            assert!(differ(&base(), &changed), "change {n}");
        }
    }

    #[test]
    fn versions_are_numbers() {
        assert!(older(Some("99"), "100") && !older(Some("100"), "100") && !older(Some("101"), "100"));
        assert!(!older(Some("a"), "100") && !older(None, "100") && !older(Some("1"), "b"));
    }
}
