//! Changes of the devices of the flowtable.
//!
//! Owns: the difference of two sets of devices. In: names of interfaces. Out: [`Change`]s. Pure.

use std::collections::BTreeSet;

use crate::kernel::Change;

/// Devices per message; the kernel accepts 256 (`NFT_NETDEVICE_MAX`).
const IN_MESSAGE: usize = 128;

/// Changes from `found` to `wanted` devices, removals first.
#[must_use]
pub(crate) fn device_changes(found: &BTreeSet<String>, wanted: &BTreeSet<String>) -> Vec<Change> {
    let lists = |names: Vec<String>, change: fn(Vec<String>) -> Change| {
        names.chunks(IN_MESSAGE).map(|names| change(names.to_vec())).collect::<Vec<_>>()
    };
    let surplus = lists(found.difference(wanted).cloned().collect(), Change::RemoveDevices);
    let missing = lists(wanted.difference(found).cloned().collect(), Change::AddDevices);
    surplus.into_iter().chain(missing).collect()
}

/// Splits a change into one per device: the kernel rejects a whole list because of a single device that has just
/// disappeared.
#[must_use]
pub(crate) fn one_by_one(change: &Change) -> Vec<Change> {
    let each = |names: &[String], change: fn(Vec<String>) -> Change| {
        names.iter().map(|name| change(vec![name.clone()])).collect()
    };
    match change {
        Change::AddDevices(names) => each(names, Change::AddDevices),
        Change::RemoveDevices(names) => each(names, Change::RemoveDevices),
        other => vec![other.clone()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flowtable::DEVICES_MAX;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn devices_become_the_wanted_ones() {
        let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        for (found, wanted, expected) in [
            (set(&[]), set(&[]), vec![]),
            (set(&["a"]), set(&["a"]), vec![]),
            (set(&[]), set(&["b", "a"]), vec![Change::AddDevices(list(&["a", "b"]))]),
            (set(&["a", "b"]), set(&[]), vec![Change::RemoveDevices(list(&["a", "b"]))]),
            (
                set(&["a", "b"]),
                set(&["b", "c"]),
                vec![Change::RemoveDevices(list(&["a"])), Change::AddDevices(list(&["c"]))],
            ),
        ] {
            assert_eq!(device_changes(&found, &wanted), expected, "{found:?} to {wanted:?}");
        }
    }

    #[test]
    fn no_message_has_more_devices_than_the_kernel_takes() {
        let many: BTreeSet<String> = (0..DEVICES_MAX).map(|n| format!("veth{n}")).collect();
        let changes = device_changes(&set(&[]), &many);
        let counts = changes.iter().map(|change| match change {
            Change::AddDevices(names) => names.len(),
            other => panic!("{other:?}"),
        });
        assert!(counts.clone().all(|count| count <= 256));
        assert_eq!(counts.sum::<usize>(), DEVICES_MAX);
        assert_eq!(changes.iter().flat_map(one_by_one).count(), DEVICES_MAX);
    }
}
