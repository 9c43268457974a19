//! Capacity and allocatable.
//!
//! In: the host's readings, reservations, eviction thresholds. Out: the two lists; entries of others (extended
//! resources) stay, and so do texts of equal amounts.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1::NodeStatus, apimachinery::pkg::api::resource::Quantity};

use super::Inputs;
use crate::status::{
    policy::StatusPolicy,
    quantity::{Amount, same},
    settings::Signal,
};

type Resources = BTreeMap<String, Quantity>;

/// Without these resources a node takes no pods (kubelet).
const NEEDED: [&str; 4] = ["cpu", "memory", "pods", "ephemeral-storage"];

/// The needed resources that the capacity lacks.
pub(super) fn missing(status: &NodeStatus) -> Vec<&'static str> {
    let has = |name: &str| status.capacity.as_ref().is_some_and(|capacity| capacity.contains_key(name));
    NEEDED.into_iter().filter(|name| !has(name)).collect()
}

fn put(list: &mut Resources, name: &str, amount: Amount) {
    let quantity = amount.quantity();
    match list.get(name) {
        Some(known) if same(known, &quantity) => {}
        _ => {
            list.insert(name.to_owned(), quantity);
        }
    }
}

fn get(list: &Resources, name: &str) -> Option<Amount> {
    list.get(name)?.0.parse().ok()
}

/// The capacity of some file systems (those that share a pool) changes slightly all the time; the kubelet reads it
/// once. Changes below 1% are ignored here.
fn stable_size(known: Option<Amount>, bytes: u64) -> Amount {
    let read = Amount::bytes(bytes);
    match known {
        Some(known)
            if read.saturating_sub(known).saturating_add(known.saturating_sub(read)).saturating_mul(100)
                < known =>
        {
            known
        }
        _ => read,
    }
}

pub(super) fn set(status: &mut NodeStatus, inputs: &Inputs, policy: &StatusPolicy) {
    let readings = &inputs.readings;
    let capacity = status.capacity.get_or_insert_default();
    if let Some(cpus) = readings.cpus {
        put(capacity, "cpu", Amount::count(cpus.into()));
    }
    if let Some(bytes) = readings.memory_capacity_bytes {
        put(capacity, "memory", Amount::bytes(bytes));
    }
    put(capacity, "pods", Amount::count(policy.max_pods.into()));
    if let Some(fs) = readings.node_fs {
        let amount = stable_size(get(capacity, "ephemeral-storage"), fs.capacity_bytes);
        put(capacity, "ephemeral-storage", amount);
    }
    for (page, bytes) in &readings.huge_pages {
        put(capacity, &format!("hugepages-{}", Amount::bytes(*page)), Amount::bytes(*bytes));
    }
    let capacity = capacity.clone();
    let allocatable = status.allocatable.get_or_insert_default();
    // A removed extended resource.
    allocatable.retain(|name, _| !name.contains('/') || capacity.contains_key(name));
    for (name, quantity) in &capacity {
        match quantity.0.parse::<Amount>() {
            Ok(amount) => put(allocatable, name, available(name, amount, &capacity, policy)),
            Err(_) => {
                allocatable.insert(name.clone(), quantity.clone());
            }
        }
    }
}

/// The allocatable amount of a resource.
fn available(name: &str, amount: Amount, capacity: &Resources, policy: &StatusPolicy) -> Amount {
    let reserved = policy.kube_reserved.get(name).saturating_add(policy.system_reserved.get(name));
    let signal = match name {
        "memory" => Some(Signal::MemoryAvailable),
        "ephemeral-storage" => Some(Signal::NodeFsAvailable),
        _ => None,
    };
    let kept =
        signal.and_then(|signal| policy.eviction_hard.get(signal)).map(|least| least.of(amount.units()));
    let mut left = amount.saturating_sub(reserved).saturating_sub(Amount::bytes(kept.unwrap_or(0)));
    if name == "memory" {
        for page in capacity.keys().filter(|name| name.starts_with("hugepages-")) {
            left = left.saturating_sub(get(capacity, page).unwrap_or_default());
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        host::HostReadings,
        status::{compute::tests::inputs, policy::Role, settings::ResourceList},
    };
    use keelson_actor_system::file_system::FileSystem;

    fn readings() -> HostReadings {
        HostReadings {
            cpus: Some(4),
            memory_capacity_bytes: Some(8 << 30),
            node_fs: Some(FileSystem { capacity_bytes: 100_000_001_024, ..FileSystem::default() }),
            huge_pages: vec![(2 << 20, 1 << 30), (1 << 30, 0)],
            ..HostReadings::default()
        }
    }

    fn text(list: &Option<Resources>) -> String {
        let amounts = list.iter().flatten().map(|(name, quantity)| format!("{name}={}", quantity.0));
        amounts.collect::<Vec<_>>().join(" ")
    }

    fn of(status: &mut NodeStatus, readings: HostReadings, policy: &StatusPolicy) {
        set(status, &Inputs { readings, ..inputs() }, policy);
    }

    #[test]
    fn allocatable_is_capacity_less_reservations_thresholds_and_huge_pages() {
        let mut policy = StatusPolicy::new(Role::Node, "n");
        policy.kube_reserved =
            ResourceList::parse("cpu=100m,memory=200Mi,ephemeral-storage=1Gi").expect("a list");
        policy.system_reserved = ResourceList::parse("cpu=100m").expect("a list");
        let mut status = NodeStatus::default();
        of(&mut status, readings(), &policy);
        assert_eq!(
            text(&status.capacity),
            "cpu=4 ephemeral-storage=97656251Ki hugepages-1Gi=0 hugepages-2Mi=1Gi memory=8Gi pods=110"
        );
        assert_eq!(
            text(&status.allocatable),
            "cpu=3800m ephemeral-storage=88926259098 hugepages-1Gi=0 hugepages-2Mi=1Gi memory=6868Mi pods=110"
        );
        assert!(missing(&status).is_empty());
    }

    #[test]
    fn a_reservation_beyond_the_capacity_leaves_nothing() {
        let mut policy = StatusPolicy::new(Role::Node, "n");
        policy.system_reserved = ResourceList::parse("memory=1Ti").expect("a list");
        let mut status = NodeStatus::default();
        of(&mut status, readings(), &policy);
        assert_eq!(status.allocatable.expect("a list")["memory"].0, "0");
    }

    #[test]
    fn unreadable_values_are_kept_or_missing() {
        let policy = StatusPolicy::new(Role::Node, "n");
        let mut status = NodeStatus::default();
        of(&mut status, HostReadings::default(), &policy);
        assert_eq!(missing(&status), ["cpu", "memory", "ephemeral-storage"]);
        of(&mut status, readings(), &policy);
        let before = status.clone();
        of(&mut status, HostReadings::default(), &policy);
        assert_eq!(status, before);
    }

    #[test]
    fn equal_amounts_keep_their_texts_and_foreign_ones_stay() {
        let policy = StatusPolicy::new(Role::Node, "n");
        let mut status = NodeStatus::default();
        of(&mut status, readings(), &policy);
        let capacity = status.capacity.as_mut().expect("a list");
        capacity.insert("memory".into(), Quantity("8388608Ki".into()));
        capacity.insert("example.com/gpu".into(), Quantity("2".into()));
        let allocatable = status.allocatable.as_mut().expect("a list");
        allocatable.insert("example.com/gone".into(), Quantity("1".into()));
        of(&mut status, readings(), &policy);
        assert_eq!(status.capacity.as_ref().expect("a list")["memory"].0, "8388608Ki");
        let allocatable = text(&status.allocatable);
        assert!(allocatable.contains("example.com/gpu=2 "), "{allocatable}");
        assert!(!allocatable.contains("example.com/gone"), "{allocatable}");
    }

    #[test]
    fn small_size_changes_of_a_file_system_are_ignored() {
        let policy = StatusPolicy::new(Role::Node, "n");
        let storage =
            |status: &NodeStatus| status.capacity.as_ref().expect("a list")["ephemeral-storage"].0.clone();
        let mut status = NodeStatus::default();
        let with = |capacity_bytes| HostReadings {
            node_fs: Some(FileSystem { capacity_bytes, ..FileSystem::default() }),
            ..readings()
        };
        of(&mut status, with(100 << 30), &policy);
        for bytes in [(100 << 30) + 4096, (100 << 30) - (1 << 29), 100 << 30] {
            of(&mut status, with(bytes), &policy);
            assert_eq!(storage(&status), "100Gi");
        }
        of(&mut status, with(102 << 30), &policy);
        assert_eq!(storage(&status), "102Gi");
    }
}
