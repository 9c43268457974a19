//! The queue: first come, first served among those that may start.
//!
//! Owns: the order of waiting pulls. In: pulls with their place and class. Out: the first one whose class has room.
//! Pulls of one class (registry, pull option) become startable together, so only the head of each class is examined.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use crate::request::PullId;

/// Pulls under the same limits.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Class {
    /// Empty without a limit per registry.
    pub(super) registry: Arc<str>,
    /// The pull option.
    pub(super) cap: Option<u32>,
    /// The image is present: it needs no counted slot.
    pub(super) present: bool,
}

/// The order, then the ID where two pulls share one.
pub(super) type Place = (u64, PullId);

#[derive(Debug, Default)]
pub(super) struct Queue {
    classes: HashMap<Class, BTreeSet<Place>>,
    places: BTreeMap<Place, Class>,
    heads: BTreeMap<Place, Class>,
}

impl Queue {
    pub(super) fn insert(&mut self, place: Place, class: Class) {
        self.remove(place);
        let of_class = self.classes.entry(class.clone()).or_default();
        let head = of_class.first().copied();
        of_class.insert(place);
        if head.is_none_or(|head| place < head) {
            if let Some(head) = head {
                self.heads.remove(&head);
            }
            self.heads.insert(place, class.clone());
        }
        self.places.insert(place, class);
    }

    pub(super) fn remove(&mut self, place: Place) -> bool {
        let Some(class) = self.places.remove(&place) else { return false };
        let Some(of_class) = self.classes.get_mut(&class) else { return true };
        of_class.remove(&place);
        let next = of_class.first().copied();
        if next.is_none() {
            self.classes.remove(&class);
        }
        if self.heads.remove(&place).is_some()
            && let Some(next) = next
        {
            self.heads.insert(next, class);
        }
        true
    }

    pub(super) fn next(&self, may_start: impl Fn(&Class) -> bool) -> Option<Place> {
        self.heads.iter().find(|(_, class)| may_start(class)).map(|(place, _)| *place)
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Next to start first.
    pub(super) fn places(&self) -> impl Iterator<Item = Place> + '_ {
        self.places.keys().copied()
    }

    pub(super) fn count_before(&self, place: Place) -> usize {
        self.places.range(..place).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(registry: &str, cap: Option<u32>) -> Class {
        Class { registry: registry.into(), cap, present: false }
    }

    #[test]
    fn the_earliest_of_the_classes_with_room_is_next() {
        let mut queue = Queue::default();
        for (order, registry) in [(3, "a"), (1, "b"), (2, "a"), (4, "c")] {
            queue.insert((order, PullId(order)), class(registry, None));
        }
        assert_eq!(queue.next(|_| true), Some((1, PullId(1))));
        assert_eq!(queue.next(|class| &*class.registry != "b"), Some((2, PullId(2))));
        assert_eq!(queue.next(|class| &*class.registry == "c"), Some((4, PullId(4))));
        assert_eq!(queue.next(|_| false), None);
        assert!(queue.remove((1, PullId(1))));
        assert!(!queue.remove((1, PullId(1))));
        assert_eq!((queue.len(), queue.count_before((4, PullId(4)))), (3, 2));
    }

    #[test]
    fn inserting_again_moves_to_the_new_class() {
        let mut queue = Queue::default();
        queue.insert((1, PullId(1)), class("a", Some(1)));
        queue.insert((1, PullId(1)), class("a", None));
        assert_eq!(queue.len(), 1);
        assert_eq!(queue.next(|class| class.cap.is_some()), None);
        assert_eq!(queue.next(|class| class.cap.is_none()), Some((1, PullId(1))));
    }

    proptest::proptest! {
        #[test]
        fn next_agrees_with_a_linear_search(
            steps in proptest::collection::vec((0_u64..12, 0_usize..3, proptest::bool::ANY), 0..60),
        ) {
            let names = ["a", "b", "c"];
            let mut queue = Queue::default();
            let mut model = BTreeMap::new();
            for (order, of, insert) in steps {
                let place = (order, PullId(order));
                if insert {
                    queue.insert(place, class(names[of], None));
                    model.insert(place, class(names[of], None));
                } else {
                    proptest::prop_assert_eq!(queue.remove(place), model.remove(&place).is_some());
                }
                for closed in names {
                    let expect = model.iter().find(|(_, class)| &*class.registry != closed);
                    let next = queue.next(|class| &*class.registry != closed);
                    proptest::prop_assert_eq!(next, expect.map(|(place, _)| *place));
                }
                proptest::prop_assert_eq!(queue.places().collect::<Vec<_>>(), model.keys().copied().collect::<Vec<_>>());
            }
        }
    }
}
