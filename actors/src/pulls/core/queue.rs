//! The queue: first come, first served among those that may start.
//!
//! Owns: the order of waiting pulls. In: pulls with their place and class. Out: the first one whose
//! class has room. Pulls of one class (registry, cap of the pull option) become startable together,
//! so finding the next one looks at the head of each class and not at every pull.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use super::types::PullId;

/// Pulls that the same limits apply to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Class {
    /// Empty while there is no limit by registry.
    pub(super) registry: Arc<str>,
    /// The pull option.
    pub(super) cap: Option<u32>,
}

/// A place: the order it was given, then the id where two share one.
pub(super) type Place = (u64, PullId);

#[derive(Debug, Default)]
pub(super) struct Queue {
    classes: HashMap<Class, BTreeMap<Place, PullId>>,
    places: BTreeMap<Place, Class>,
}

impl Queue {
    pub(super) fn insert(&mut self, place: Place, class: Class) {
        self.remove(place);
        self.classes.entry(class.clone()).or_default().insert(place, place.1);
        self.places.insert(place, class);
    }

    pub(super) fn remove(&mut self, place: Place) -> bool {
        let Some(class) = self.places.remove(&place) else { return false };
        if let Some(of_class) = self.classes.get_mut(&class) {
            of_class.remove(&place);
            if of_class.is_empty() {
                self.classes.remove(&class);
            }
        }
        true
    }

    /// The first pull of a class that `may_start` agrees to.
    pub(super) fn next(&self, may_start: impl Fn(&Class) -> bool) -> Option<Place> {
        self.classes
            .iter()
            .filter(|(class, _)| may_start(class))
            .filter_map(|(_, of_class)| of_class.keys().next().copied())
            .min()
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// In order.
    pub(super) fn places(&self) -> impl Iterator<Item = Place> + '_ {
        self.places.keys().copied()
    }

    /// How many are before `place`.
    pub(super) fn before(&self, place: Place) -> usize {
        self.places.range(..place).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(registry: &str, cap: Option<u32>) -> Class {
        Class { registry: registry.into(), cap }
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
        assert_eq!((queue.len(), queue.before((4, PullId(4)))), (3, 2));
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
}
