//! Places in the queue that are kept for callers that return.
//!
//! Owns: which place is kept for which pod and image, until when, and for which credentials. In: callers that left the
//! queue or a running pull (a kubelet that restarts), and callers whose pull failed (a kubelet that tries its
//! credentials in turn). Out: the order of the place when the same pod asks for the same image in time. Bounded: the
//! oldest place is dropped first.
//!
//! A caller that left may return with any credentials. After a failure the place is only for credentials that have not
//! failed from it: an image that does not exist, or that no caller may read, gains nothing from another request.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use crate::request::CredentialsId;

/// Maximum number of places.
const MAX_PLACES: usize = 4096;
/// Maximum number of credentials remembered per place; a kubelet has a few for an image.
const MAX_TRIED: usize = 32;

type Key = (String, Arc<str>);

#[derive(Debug)]
struct KeptPlace {
    order: u64,
    until: Duration,
    /// Credentials that this place was used with. `None`: anonymous.
    tried: Vec<Option<CredentialsId>>,
}

#[derive(Debug, Default)]
pub(super) struct Reentry {
    places: HashMap<Key, KeptPlace>,
    /// Oldest first. An entry whose place was kept again is ignored.
    ages: VecDeque<(Duration, Key)>,
}

impl Reentry {
    pub(super) fn keep_left(
        &mut self,
        pod_uid: String,
        image: Arc<str>,
        order: u64,
        until: Duration,
        now: Duration,
    ) {
        self.keep((pod_uid, image), KeptPlace { order, until, tried: Vec::new() }, now);
    }

    /// Keeps the place of a caller whose pull failed, for other credentials.
    pub(super) fn keep_failed(
        &mut self,
        pod_uid: String,
        image: Arc<str>,
        order: u64,
        credentials: Option<CredentialsId>,
        until: Duration,
        now: Duration,
    ) {
        let key = (pod_uid, image);
        let mut tried = self.places.remove(&key).map(|kept| kept.tried).unwrap_or_default();
        if !tried.contains(&credentials) {
            tried.push(credentials);
        }
        if tried.len() <= MAX_TRIED {
            self.keep(key, KeptPlace { order, until, tried }, now);
        }
    }

    /// The image has arrived for this pod: its place is no longer needed.
    pub(super) fn succeeded(&mut self, pod_uid: &str, image: &Arc<str>) {
        self.places.remove(&(pod_uid.to_owned(), image.clone()));
    }

    fn keep(&mut self, key: Key, kept: KeptPlace, now: Duration) {
        self.ages.push_back((kept.until, key.clone()));
        self.places.insert(key, kept);
        while self.ages.len() > MAX_PLACES || self.ages.front().is_some_and(|(until, _)| *until <= now) {
            let Some((until, key)) = self.ages.pop_front() else { return };
            if self.places.get(&key).is_some_and(|kept| kept.until == until) {
                self.places.remove(&key);
            }
        }
    }

    /// The place kept for this pod and image, once for each of its credentials.
    pub(super) fn take(
        &mut self,
        pod_uid: &str,
        image: &Arc<str>,
        credentials: Option<CredentialsId>,
        now: Duration,
    ) -> Option<u64> {
        let kept = self.places.get_mut(&(pod_uid.to_owned(), image.clone()))?;
        if kept.until <= now || kept.tried.contains(&credentials) {
            return None;
        }
        kept.tried.push(credentials);
        Some(kept.order)
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
        reentry.keep_left("u".into(), image.clone(), 7, at(30), at(0));
        assert_eq!(reentry.take("other", &image, None, at(1)), None);
        assert_eq!(reentry.take("u", &image, None, at(29)), Some(7));
        assert_eq!(reentry.take("u", &image, None, at(29)), None);
        reentry.keep_left("u".into(), image.clone(), 7, at(60), at(30));
        assert_eq!(reentry.take("u", &image, None, at(60)), None, "too late");
        reentry.keep_left("u".into(), image.clone(), 7, at(90), at(61));
        reentry.succeeded("u", &image);
        assert_eq!(reentry.take("u", &image, None, at(62)), None, "the image is there");
    }

    #[test]
    fn i20_a_pull_that_failed_from_a_place_does_not_return_to_it() {
        let (mut reentry, image) = (Reentry::default(), Arc::<str>::from("r/a"));
        reentry.keep_failed("u".into(), image.clone(), 7, None, at(30), at(0));
        assert_eq!(reentry.take("u", &image, None, at(1)), None);
        let many = MAX_TRIED as u64 + 3;
        for _ in 0..many {
            reentry.keep_failed("v".into(), image.clone(), 8, None, at(30), at(0));
        }
        assert_eq!(reentry.places.len(), 2, "the same credentials are one try");
    }

    #[test]
    fn a_renewed_place_has_a_new_expiry() {
        let (mut reentry, image) = (Reentry::default(), Arc::<str>::from("r/a"));
        reentry.keep_left("u".into(), image.clone(), 7, at(30), at(0));
        reentry.keep_left("u".into(), image.clone(), 8, at(50), at(20));
        reentry.keep_left("v".into(), image.clone(), 9, at(70), at(40));
        assert_eq!(reentry.take("u", &image, None, at(41)), Some(8));
    }

    #[test]
    fn the_number_of_places_is_bounded() {
        let (mut reentry, image) = (Reentry::default(), Arc::<str>::from("r/a"));
        for n in 0..3 * MAX_PLACES as u64 {
            reentry.keep_left(n.to_string(), image.clone(), n, at(30), at(0));
        }
        assert_eq!((reentry.places.len(), reentry.ages.len()), (MAX_PLACES, MAX_PLACES));
        assert_eq!(reentry.take("0", &image, None, at(0)), None);
        let last = 3 * MAX_PLACES as u64 - 1;
        assert_eq!(reentry.take(&last.to_string(), &image, None, at(0)), Some(last));
    }
}
