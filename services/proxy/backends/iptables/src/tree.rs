//! A tree over numbers, such as addresses and ports, that leads a packet to a few of them in a few steps.
//!
//! Owns: [`tree`]. In: ordered keys of a number of bits. Out: [`Node`]s. Pure: the tree is a function of the keys, so it
//! does not matter in which order they came and went, and the difference of two trees is small if that of the keys is.
//!
//! A node covers a prefix. It is a leaf if it has few keys; otherwise it skips the bits that all its keys have in common,
//! and has up to four children, one for each value of the next two bits. Every node but a leaf has at least two, so the
//! depth is at most half of the bits; [`MAX_DEPTH`] bounds it further.

use std::ops::Range;

/// Number of keys that a leaf may have.
pub(crate) const LEAF: usize = 8;

/// Number of bits that a node decides.
const STEP: u8 = 2;

/// A node at this depth is a leaf, whatever its number of keys. nf_tables follows 16 jumps, and rejects rules that need
/// more: 3 lead to the tree, and 4 chains may follow. Without crafted keys, the tree has this depth at some 500,000.
pub(crate) const MAX_DEPTH: usize = 8;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    /// The bits after `length` are 0. The root has length 0.
    pub(crate) prefix: u128,
    pub(crate) length: u8,
    pub(crate) kind: NodeKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NodeKind {
    /// These of the keys.
    Leaf(Range<usize>),
    /// Prefix and length of each child.
    Inner(Vec<(u128, u8)>),
}

/// The nodes of the tree, the root first. `keys` are ordered, without duplicates, of `bits` bits (an even number).
pub(crate) fn tree(keys: &[u128], bits: u8) -> Vec<Node> {
    let mut nodes = Vec::new();
    add(keys, 0..keys.len(), (0, 0), bits, 0, &mut nodes);
    nodes
}

fn add(
    keys: &[u128],
    range: Range<usize>,
    (prefix, length): (u128, u8),
    bits: u8,
    depth: usize,
    nodes: &mut Vec<Node>,
) {
    let mine = &keys[range.clone()];
    let (Some(first), Some(last)) = (mine.first(), mine.last()) else {
        return nodes.push(Node { prefix, length, kind: NodeKind::Leaf(range) });
    };
    if mine.len() <= LEAF || depth >= MAX_DEPTH {
        return nodes.push(Node { prefix, length, kind: NodeKind::Leaf(range) });
    }
    // At most 128.
    let different = 128 - u8::try_from((first ^ last).leading_zeros()).unwrap_or(0);
    let common = bits.saturating_sub(different) / STEP * STEP;
    let child_length = common + STEP;
    let shift = u32::from(bits - child_length);
    let place = nodes.len();
    nodes.push(Node { prefix, length, kind: NodeKind::Inner(Vec::new()) });
    let mut children = Vec::new();
    let mut from = range.start;
    while from < range.end {
        let slot = keys[from] >> shift;
        let to = from + keys[from..range.end].partition_point(|key| key >> shift == slot);
        let child = (slot << shift, child_length);
        children.push(child);
        add(keys, from..to, child, bits, depth + 1, nodes);
        from = to;
    }
    nodes[place].kind = NodeKind::Inner(children);
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    type Content = BTreeMap<(u128, u8), Vec<u128>>;

    /// What the chain of each node depends on.
    fn content(keys: &BTreeSet<u128>, bits: u8) -> Content {
        let keys: Vec<u128> = keys.iter().copied().collect();
        let chain = |node: Node| {
            let content = match node.kind {
                NodeKind::Leaf(range) => keys[range].to_vec(),
                NodeKind::Inner(children) => {
                    children.into_iter().map(|(prefix, length)| prefix | u128::from(length) << 120).collect()
                }
            };
            ((node.prefix, node.length), content)
        };
        tree(&keys, bits).into_iter().map(chain).collect()
    }

    /// The nodes that lead to a key, and the number of rules in them; `None`: it is not found.
    fn path(nodes: &[Node], keys: &[u128], key: u128, bits: u8) -> Option<(usize, usize)> {
        let find = |prefix, length| nodes.iter().find(|node| (node.prefix, node.length) == (prefix, length));
        let (mut node, mut depth, mut rules) = (find(0, 0)?, 1, 0);
        loop {
            match &node.kind {
                NodeKind::Leaf(range) => {
                    rules += range.len();
                    return keys[range.clone()].contains(&key).then_some((depth, rules));
                }
                NodeKind::Inner(children) => {
                    assert!((2..=4).contains(&children.len()));
                    rules += children.len();
                    depth += 1;
                    let covers =
                        |(prefix, length): &&(u128, u8)| key >> (bits - length) == prefix >> (bits - length);
                    let (prefix, length) = children.iter().find(covers)?;
                    node = find(*prefix, *length)?;
                }
            }
        }
    }

    /// The most nodes that lead to a key.
    fn depth(keys: &BTreeSet<u128>, bits: u8) -> usize {
        let keys: Vec<u128> = keys.iter().copied().collect();
        let nodes = tree(&keys, bits);
        keys.iter()
            .filter_map(|key| path(&nodes, &keys, *key, bits))
            .map(|(depth, _)| depth)
            .max()
            .unwrap_or(0)
    }

    fn keys(bits: u8) -> impl Strategy<Value = BTreeSet<u128>> {
        let mask = if bits == 128 { u128::MAX } else { (1 << bits) - 1 };
        let near = (any::<u128>(), 0..300_u128).prop_map(|(base, more)| (base & !0xfff).wrapping_add(more));
        let dense = 0..2_000_u128;
        proptest::collection::btree_set(
            prop_oneof![any::<u128>(), near, dense].prop_map(move |key| key & mask),
            0..300,
        )
    }

    proptest! {
        #[test]
        fn every_key_is_found_in_a_few_steps(keys in prop_oneof![keys(16), keys(32), keys(128)], bits in Just(128_u8)) {
            let list: Vec<u128> = keys.iter().copied().collect();
            let nodes = tree(&list, bits);
            for key in &list {
                let (depth, _) = path(&nodes, &list, *key, bits).unwrap();
                prop_assert!(depth <= MAX_DEPTH + 1);
            }
            let leaves: usize = nodes.iter().map(|node| match &node.kind {
                NodeKind::Leaf(range) => range.len(),
                NodeKind::Inner(_) => 0,
            }).sum();
            prop_assert_eq!(leaves, list.len());
            // Every chain but leaves has two children or more.
            prop_assert!(nodes.len() <= 2 * list.len().max(1));
        }

        #[test]
        fn a_change_rewrites_a_few_nodes(mut keys in keys(32), key in any::<u32>(), bits in Just(32_u8)) {
            let before = content(&keys, bits);
            let mut deepest = depth(&keys, bits);
            if !keys.remove(&u128::from(key)) {
                keys.insert(key.into());
            }
            let after = content(&keys, bits);
            deepest = deepest.max(depth(&keys, bits));
            let changed = after.iter().filter(|(node, text)| before.get(*node) != Some(text)).count();
            let gone = before.keys().filter(|node| !after.contains_key(*node)).count();
            // A leaf that is split or merged, with up to 9 leaves and 8 nodes below, and the node above. Where the depth
            // is bounded, a node more or less above splits or merges several leaves.
            prop_assert!(changed + gone <= 2 * LEAF + 4 || deepest > MAX_DEPTH, "{changed} {gone}");
        }
    }

    #[test]
    fn ten_thousand_services_are_a_few_rules_away() {
        let keys: Vec<u128> = (0..10_000).map(|at| 0x0a60_0000 + at * 7).collect();
        let nodes = tree(&keys, 32);
        let steps: Vec<(usize, usize)> =
            keys.iter().step_by(97).map(|key| path(&nodes, &keys, *key, 32).unwrap()).collect();
        let deepest = steps.iter().map(|(depth, _)| depth).max().unwrap();
        let most = steps.iter().map(|(_, rules)| rules).max().unwrap();
        assert!(*deepest <= 8 && *most <= 36, "{deepest} {most}");
    }

    #[test]
    fn depth_is_bounded_for_crafted_keys() {
        // Each prefix has one key that leaves the path, so each step splits off one.
        let keys: BTreeSet<u128> = (0..128).map(|bit| u128::MAX << bit).chain(0..9).collect();
        let list: Vec<u128> = keys.into_iter().collect();
        let nodes = tree(&list, 128);
        assert!(list.iter().all(|key| path(&nodes, &list, *key, 128).unwrap().0 <= MAX_DEPTH + 1));
    }

    #[test]
    fn no_keys_are_an_empty_root() {
        assert_eq!(tree(&[], 32), [Node { prefix: 0, length: 0, kind: NodeKind::Leaf(0..0) }]);
    }
}
