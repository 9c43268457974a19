//! Places of failed pulls.
//!
//! Owns: for how long the place of a failed pull is kept. In: pod UID and image of a caller whose pull
//! failed, with its order. Out: that order, once, when the same pod asks again in time (the kubelet
//! tries its credentials one after the other). Bounded: the oldest place goes when there are too many.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

/// How many places are kept at most.
const MOST: usize = 4096;

type Key = (String, Arc<str>);

#[derive(Debug, Default)]
pub(super) struct Reentry {
    places: HashMap<Key, (u64, Duration)>,
    /// In the order they were kept. An entry whose place was taken, or kept anew, means nothing.
    ages: VecDeque<(Duration, Key)>,
}

impl Reentry {
    pub(super) fn keep(
        &mut self,
        pod_uid: String,
        image: Arc<str>,
        order: u64,
        until: Duration,
        now: Duration,
    ) {
        let key = (pod_uid, image);
        self.places.insert(key.clone(), (order, until));
        self.ages.push_back((until, key));
        while self.ages.len() > MOST || self.ages.front().is_some_and(|(until, _)| *until <= now) {
            let Some((until, key)) = self.ages.pop_front() else { return };
            if self.places.get(&key).is_some_and(|(_, kept)| *kept == until) {
                self.places.remove(&key);
            }
        }
    }

    pub(super) fn take(&mut self, pod_uid: &str, image: &Arc<str>, now: Duration) -> Option<u64> {
        let (order, until) = self.places.remove(&(pod_uid.to_owned(), image.clone()))?;
        (until > now).then_some(order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_place_is_taken_once_and_in_time() {
        let (mut reentry, image) = (Reentry::default(), Arc::<str>::from("r/a"));
        reentry.keep("u".into(), image.clone(), 7, at(30), at(0));
        assert_eq!(reentry.take("other", &image, at(1)), None);
        assert_eq!(reentry.take("u", &image, at(29)), Some(7));
        assert_eq!(reentry.take("u", &image, at(29)), None);
        reentry.keep("u".into(), image.clone(), 7, at(60), at(30));
        assert_eq!(reentry.take("u", &image, at(60)), None, "too late");
    }

    #[test]
    fn a_place_kept_anew_outlives_its_first_age() {
        let (mut reentry, image) = (Reentry::default(), Arc::<str>::from("r/a"));
        reentry.keep("u".into(), image.clone(), 7, at(30), at(0));
        reentry.keep("u".into(), image.clone(), 8, at(50), at(20));
        reentry.keep("v".into(), image.clone(), 9, at(70), at(40));
        assert_eq!(reentry.take("u", &image, at(41)), Some(8));
    }

    #[test]
    fn many_failures_do_not_grow_it_without_bound() {
        let (mut reentry, image) = (Reentry::default(), Arc::<str>::from("r/a"));
        for n in 0..3 * MOST as u64 {
            reentry.keep(n.to_string(), image.clone(), n, at(30), at(0));
        }
        assert_eq!((reentry.places.len(), reentry.ages.len()), (MOST, MOST));
        assert_eq!(reentry.take("0", &image, at(0)), None);
        let last = 3 * MOST as u64 - 1;
        assert_eq!(reentry.take(&last.to_string(), &image, at(0)), Some(last));
    }
}
