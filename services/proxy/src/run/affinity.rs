//! Counts the clients with session affinity.
//!
//! Owns: an observer of its own, and the last count. In: requests, with the maximum age of the answer. Out: numbers of
//! clients. Nothing here waits for the sync loop, or delays it.

use std::{
    fmt,
    sync::{Mutex, MutexGuard, PoisonError, TryLockError},
    time::{Duration, Instant},
};

use crate::{
    backend::{AffinityClients, Observer},
    model::Family,
};

/// A count of this age or less answers a request.
pub(super) const MAX_AGE: Duration = Duration::from_secs(10);

/// A count is repeated after this many times its duration at the earliest: some kernels do not count, and every client
/// has to be read.
const SHARE: u32 = 20;

/// Clients of each family; `None` if there is no table, or if the kernel does not answer.
pub(super) type Clients = [Option<AffinityClients>; 2];

pub(super) struct AffinityCounter {
    counting: Mutex<Counting>,
    last: Mutex<Clients>,
}

struct Counting {
    observer: Box<dyn Observer>,
    families: Vec<Family>,
    /// When the last count ended, and how long it took.
    last: Option<(Instant, Duration)>,
}

impl fmt::Debug for AffinityCounter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AffinityCounter").field("last", &self.last).finish_non_exhaustive()
    }
}

impl AffinityCounter {
    /// `families`: those that this node supports.
    pub(super) fn new(observer: Box<dyn Observer>, families: Vec<Family>) -> Self {
        Self {
            counting: Mutex::new(Counting { observer, families, last: None }),
            last: Mutex::new(Clients::default()),
        }
    }

    /// Counts the clients. Returns the last count if it is not older than `max_age`, or if another thread counts. May
    /// take seconds on a kernel before 6.16 with very many clients.
    pub(super) fn clients(&self, max_age: Duration) -> Clients {
        let mut counting = match self.counting.try_lock() {
            Ok(counting) => counting,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return self.last().clone(),
        };
        let begun = Instant::now();
        if counting.is_due(begun, max_age) {
            let clients = counting.count();
            counting.last = Some((Instant::now(), begun.elapsed()));
            *self.last() = clients;
        }
        self.last().clone()
    }

    fn last(&self) -> MutexGuard<'_, Clients> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counting {
    fn is_due(&self, now: Instant, max_age: Duration) -> bool {
        self.last.is_none_or(|(ended, took)| {
            now.saturating_duration_since(ended) >= max_age.max(took.saturating_mul(SHARE))
        })
    }

    fn count(&mut self) -> Clients {
        let mut all = Clients::default();
        for family in &self.families {
            all[*family as usize] = match self.observer.affinity_clients(*family) {
                Ok(clients) => clients,
                Err(error) => {
                    tracing::debug!(%family, %error, "cannot count the clients with session affinity");
                    None
                }
            };
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;
    use crate::backend::fake::FakeKernel;

    fn counter(kernel: &FakeKernel) -> AffinityCounter {
        AffinityCounter::new(kernel.observer(), vec![Family::V4])
    }

    #[test]
    fn p8_a_count_is_repeated_when_it_is_old() {
        let kernel = FakeKernel::default();
        let counter = counter(&kernel);
        assert_eq!(counter.clients(Duration::ZERO), [None, None], "no rules");
        kernel.change(|state| state.affinity = Some(1));
        let long = Duration::from_secs(3_600);
        assert_eq!(counter.clients(long), [None, None], "not old yet");
        counter.counting.lock().unwrap().last = None;
        assert_eq!(counter.clients(long)[0], Some(vec![("clients", 1)]));
        kernel.change(|state| state.affinity = Some(2));
        // A caller gets the last count, and does not wait for another thread's.
        let counting = counter.counting.lock().unwrap();
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| sender.send(counter.clients(Duration::ZERO)).unwrap());
            let clients = receiver.recv_timeout(Duration::from_secs(60)).unwrap();
            assert_eq!(clients[0], Some(vec![("clients", 1)]));
        });
        drop(counting);
        counter.counting.lock().unwrap().last = None;
        assert_eq!(counter.clients(long)[0], Some(vec![("clients", 2)]));
    }

    #[test]
    fn p8_a_count_that_took_long_is_repeated_later() {
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let counter = counter(&FakeKernel::default());
        let mut counting = counter.counting.lock().unwrap();
        assert!(counting.is_due(now, second * 10));
        for (took, due) in [(Duration::ZERO, 10), (second / 2, 10), (second * 3, 60)] {
            counting.last = Some((now, took));
            assert!(!counting.is_due(now + second * due - second / 10, second * 10), "{took:?}");
            assert!(counting.is_due(now + second * due, second * 10), "{took:?}");
        }
    }
}
