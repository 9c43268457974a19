//! How full the maps of session affinity are.
//!
//! Owns: a way to the kernel of its own, and the last count. In: who wants to know, and how old the answer may be. Out: numbers of
//! clients. Nothing here waits for the programmer, or makes it wait.

use std::{
    fmt,
    sync::{Mutex, MutexGuard, PoisonError, TryLockError},
    time::{Duration, Instant},
};

use crate::{
    model::Family,
    nft::{
        element::SetName,
        kernel::{AffinityClients, Tables},
        ruleset::definition,
    },
};

/// Age of a count that need not be repeated for whoever asks.
pub(super) const MAX_AGE: Duration = Duration::from_secs(10);

/// A count that took long is not repeated before this many times as long: kernels that do not count have every client read.
const SHARE: u32 = 20;

/// Clients of each family; none where there is no table, or where the kernel does not answer.
pub(super) type Clients = [Option<AffinityClients>; 2];

/// Capacity of each map.
pub(super) fn capacity() -> u64 {
    definition(Family::V4, SetName::Affinity0).size.unwrap_or(u32::MAX).into()
}

pub(super) struct AffinityMaps {
    counting: Mutex<Counting>,
    last: Mutex<Clients>,
}

struct Counting {
    tables: Box<dyn Tables>,
    families: Vec<Family>,
    /// When the last count ended, and how long it took.
    last: Option<(Instant, Duration)>,
}

impl fmt::Debug for AffinityMaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AffinityMaps").field("last", &self.last).finish_non_exhaustive()
    }
}

impl AffinityMaps {
    /// Of the families that this node supports.
    pub(super) fn new(tables: Box<dyn Tables>, families: Vec<Family>) -> Self {
        Self {
            counting: Mutex::new(Counting { tables, families, last: None }),
            last: Mutex::new(Clients::default()),
        }
    }

    /// Counts, unless the last count is not older than `max_age` or another thread counts: then returns the last count. May
    /// take seconds on a kernel before 6.16 if there are very many clients.
    pub(super) fn clients(&self, max_age: Duration) -> Clients {
        let mut counting = match self.counting.try_lock() {
            Ok(counting) => counting,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return *self.last(),
        };
        let begun = Instant::now();
        if counting.is_due(begun, max_age) {
            let clients = counting.count();
            counting.last = Some((Instant::now(), begun.elapsed()));
            *self.last() = clients;
        }
        *self.last()
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
            all[*family as usize] = match self.tables.affinity_clients(*family) {
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
    use std::{process::Command, sync::mpsc, thread};

    use super::*;
    use crate::{
        nft::kernel::{Change, Netlink},
        testing::in_namespace,
    };

    fn nft(command: &str) {
        assert!(Command::new("nft").arg(command).status().expect("the program nft").success(), "{command}");
    }

    fn add(last: u8) {
        nft(&format!("add element ip keelson affinity-2 {{ 10.0.0.{last} . 8000:0 timeout 1h : 8000:1 }}"));
    }

    #[test]
    fn p8_a_count_is_repeated_when_it_is_old() {
        in_namespace("affinity-maps", || {
            let mut netlink = Netlink::open().unwrap();
            let maps = AffinityMaps::new(Box::new(Netlink::open().unwrap()), vec![Family::V4]);
            assert_eq!(maps.clients(Duration::ZERO), [None, None], "no table");
            netlink.commit(Family::V4, &[Change::MakeTable]).unwrap();
            netlink.commit(Family::V4, &SetName::ALL.map(Change::MakeSet)).unwrap();
            add(1);
            let long = Duration::from_secs(3_600);
            assert_eq!(maps.clients(long), [None, None], "not old yet");
            maps.counting.lock().unwrap().last = None;
            assert_eq!(maps.clients(long)[0].unwrap(), [0, 0, 1, 0, 0, 0, 0, 0]);
            add(2);
            // Whoever asks while another counts gets the last count and does not wait.
            let counting = maps.counting.lock().unwrap();
            let (told, asked) = mpsc::channel();
            thread::scope(|scope| {
                scope.spawn(|| told.send(maps.clients(Duration::ZERO)).unwrap());
                let clients = asked.recv_timeout(Duration::from_secs(60)).unwrap();
                assert_eq!(clients[0].unwrap()[2], 1);
            });
            drop(counting);
            maps.counting.lock().unwrap().last = None;
            assert_eq!(maps.clients(long)[0].unwrap()[2], 2);
            assert_eq!(capacity(), 131_072);
        });
    }

    #[test]
    fn p8_a_count_that_took_long_is_repeated_later() {
        in_namespace("affinity-pause", || {
            let now = Instant::now();
            let second = Duration::from_secs(1);
            let mut counting =
                Counting { tables: Box::new(Netlink::open().unwrap()), families: Vec::new(), last: None };
            assert!(counting.is_due(now, second * 10));
            for (took, due) in [(Duration::ZERO, 10), (second / 2, 10), (second * 3, 60)] {
                counting.last = Some((now, took));
                assert!(!counting.is_due(now + second * due - second / 10, second * 10), "{took:?}");
                assert!(counting.is_due(now + second * due, second * 10), "{took:?}");
            }
        });
    }
}
