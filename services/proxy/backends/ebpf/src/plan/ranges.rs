//! Places of endpoints in the map `slots`.
//!
//! Owns: [`Ranges`], which of the places are free. In: lengths, ranges that are no longer needed, time. Out: ranges that no
//! set has. A range that is given back rests for [`REST`], because a program may just have read where its set begins.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

/// A program runs for microseconds.
const REST: Duration = Duration::from_secs(1);

/// Never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Range {
    pub(crate) first: u32,
    pub(crate) count: u32,
}

impl Range {
    pub(crate) fn places(self) -> impl Iterator<Item = u32> {
        (0..self.count).map(move |offset| self.first + offset)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Ranges {
    used: u32,
    /// First place : number of places. Neighbours are merged.
    free: BTreeMap<u32, u32>,
    /// The same by number, to find the smallest that suffices.
    by_count: BTreeSet<(u32, u32)>,
    resting: VecDeque<(Instant, Range)>,
}

impl Ranges {
    pub(crate) fn new(size: u32) -> Self {
        let mut ranges =
            Self { used: size, free: BTreeMap::new(), by_count: BTreeSet::new(), resting: VecDeque::new() };
        if size > 0 {
            ranges.insert(0, size);
        }
        ranges
    }

    /// `None`: no free range is that long.
    pub(crate) fn take(&mut self, count: u32) -> Option<Range> {
        let (length, first) = *self.by_count.range((count, 0)..).next().filter(|_| count > 0)?;
        self.cut(first, length, Range { first, count });
        Some(Range { first, count })
    }

    /// Takes this range; false if it is not free.
    pub(crate) fn take_at(&mut self, range: Range) -> bool {
        let found = self.free.range(..=range.first).next_back().map(|(first, length)| (*first, *length));
        let end = |first: u32, length: u32| u64::from(first) + u64::from(length);
        match found {
            Some((first, length))
                if range.count > 0 && end(range.first, range.count) <= end(first, length) =>
            {
                self.cut(first, length, range);
                true
            }
            _ => false,
        }
    }

    /// Gives a range back that was taken.
    pub(crate) fn give_back(&mut self, range: Range, now: Instant) {
        self.resting.push_back((now, range));
    }

    /// Gives a range back that no program has seen.
    pub(crate) fn cancel(&mut self, range: Range) {
        self.merge(range);
    }

    /// Frees what has rested. Returns whether there is such a range.
    pub(crate) fn wake(&mut self, now: Instant) -> bool {
        let mut has_freed = false;
        while let Some((since, range)) = self.resting.front().copied()
            && now.saturating_duration_since(since) >= REST
        {
            self.resting.pop_front();
            self.merge(range);
            has_freed = true;
        }
        has_freed
    }

    /// Places that a set has, or had a moment ago.
    pub(crate) const fn used(&self) -> u32 {
        self.used
    }

    fn cut(&mut self, first: u32, length: u32, taken: Range) {
        self.remove(first, length);
        let before = taken.first - first;
        let after = length - before - taken.count;
        if before > 0 {
            self.insert(first, before);
        }
        if after > 0 {
            self.insert(taken.first + taken.count, after);
        }
    }

    fn merge(&mut self, Range { mut first, mut count }: Range) {
        let before = self.free.range(..first).next_back().map(|(first, length)| (*first, *length));
        if let Some((start, length)) = before.filter(|(start, length)| start + length == first) {
            self.remove(start, length);
            first = start;
            count += length;
        }
        let end = first + count;
        if let Some(length) = self.free.get(&end).copied() {
            self.remove(end, length);
            count += length;
        }
        self.insert(first, count);
    }

    fn insert(&mut self, first: u32, length: u32) {
        self.used -= length;
        self.free.insert(first, length);
        self.by_count.insert((length, first));
    }

    fn remove(&mut self, first: u32, length: u32) {
        self.used += length;
        self.free.remove(&first);
        self.by_count.remove(&(length, first));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_smallest_free_range_is_taken_and_neighbours_are_merged() {
        let now = Instant::now();
        let mut ranges = Ranges::new(10);
        let [a, b, c] = [3, 2, 5].map(|count| ranges.take(count).unwrap());
        assert_eq!((a.first, b.first, c.first, ranges.take(1)), (0, 3, 5, None));
        ranges.give_back(a, now);
        ranges.give_back(b, now);
        assert_eq!((ranges.take(1), ranges.wake(now)), (None, false), "both rest");
        assert!(ranges.wake(now + REST));
        assert_eq!(ranges.take(5), Some(Range { first: 0, count: 5 }));
        ranges.give_back(c, now);
        ranges.wake(now + REST);
        assert!(!ranges.take_at(Range { first: 4, count: 2 }));
        assert!(!ranges.take_at(Range { first: 9, count: 2 }));
        assert!(!ranges.take_at(Range { first: u32::MAX, count: u32::MAX }));
        assert!(ranges.take_at(Range { first: 6, count: 2 }));
        assert_eq!(
            (ranges.take(2), ranges.take(1)),
            (Some(Range { first: 8, count: 2 }), Some(Range { first: 5, count: 1 }))
        );
        assert_eq!((ranges.take(0), ranges.used()), (None, 10));
    }

    proptest! {
        /// No place is given twice, and everything can be taken again in one piece at the end.
        #[test]
        fn ranges_never_overlap(steps in prop::collection::vec((0_u32..12, any::<prop::sample::Index>()), 1..200)) {
            let now = Instant::now();
            let mut ranges = Ranges::new(64);
            let mut taken: Vec<Range> = Vec::new();
            for (count, which) in steps {
                match count {
                    0 if !taken.is_empty() => ranges.give_back(taken.swap_remove(which.index(taken.len())), now),
                    0..=2 => { ranges.wake(now + REST); }
                    count => taken.extend(ranges.take(count)),
                }
                prop_assert_eq!(ranges.used(), 64 - ranges.free.values().sum::<u32>());
                let mut places: Vec<u32> = taken.iter().flat_map(|range| range.places()).collect();
                prop_assert!(u32::try_from(places.len()).unwrap() <= ranges.used());
                places.sort_unstable();
                let number = places.len();
                places.dedup();
                prop_assert_eq!(places.len(), number);
            }
            taken.into_iter().for_each(|range| ranges.give_back(range, now));
            ranges.wake(now + REST);
            prop_assert_eq!(ranges.take(64), Some(Range { first: 0, count: 64 }));
        }
    }
}
