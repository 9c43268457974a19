//! Cleans conntrack after changes of UDP endpoints.
//!
//! Owns: a thread of its own, so that listing a hundred thousand flows delays no rule, and its pace. In: the families
//! whose UDP endpoints have changed. Out: deleted flows. Source: kube-proxy's conntrack reconciler (also
//! service-semantics 4).
//!
//! Nothing is queued: a family is due or not, and the serving endpoints are read from the plan when the listing starts.
//! A change during a listing makes the family due again, so that the last listing always starts after the last change.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use super::shared::{Shared, TICK};
use crate::{
    conntrack::{Cleaned, ConntrackError, UdpFrontends, clean},
    metrics::ProxyMetrics,
    model::Family,
};

#[derive(Debug, Clone, Copy)]
struct CleanPace {
    /// Delay from the first change to the listing: a change of both families is one job.
    delay: Duration,
    /// Minimum and maximum pause after a job.
    min_pause: Duration,
    max_pause: Duration,
    /// Delay after a job that failed or was incomplete.
    retry: Duration,
}

const PACE: CleanPace = CleanPace {
    delay: Duration::from_millis(100),
    min_pause: Duration::from_secs(1),
    max_pause: Duration::from_secs(10),
    retry: Duration::from_secs(30),
};

/// The pause after a job is this many times its duration, within [`CleanPace::min_pause`] and [`CleanPace::max_pause`]: listing takes at
/// most a tenth of the time if a job takes no longer than 1.1 s.
const PAUSE_FACTOR: u32 = 9;

impl CleanPace {
    fn pause(&self, took: Duration) -> Duration {
        took.saturating_mul(PAUSE_FACTOR).clamp(self.min_pause, self.max_pause)
    }
}

#[derive(Debug, Default)]
struct Due([AtomicBool; 2]);

impl Due {
    fn add(&self, family: Family) {
        self.0[family as usize].store(true, Ordering::Release);
    }

    fn take(&self, family: Family) -> bool {
        self.0[family as usize].swap(false, Ordering::AcqRel)
    }
}

/// Tells the thread which families to clean. The thread ends when the last clone is dropped.
#[derive(Debug, Clone)]
pub(super) struct Cleaner {
    due: Arc<Due>,
    wake: SyncSender<()>,
}

impl Cleaner {
    fn new() -> (Self, Receiver<()>) {
        let (wake, woken) = sync_channel(1);
        (Self { due: Arc::default(), wake }, woken)
    }

    pub(super) fn clean(&self, family: Family) {
        self.due.add(family);
        // If the channel is full, the thread wakes up anyway.
        let _ = self.wake.try_send(());
    }
}

/// Starts the thread, in the network namespace of the caller.
pub(super) fn start(shared: Arc<Shared>) -> io::Result<Cleaner> {
    let (cleaner, woken) = Cleaner::new();
    let due = cleaner.due.clone();
    let body = move || work(&woken, &due, PACE, |family| clean_family(&shared, family));
    thread::Builder::new().name("conntrack".to_owned()).spawn(body)?;
    Ok(cleaner)
}

/// Cleans the families that are due. `clean` returns `false` if it has to be retried.
fn work(woken: &Receiver<()>, due: &Due, pace: CleanPace, mut clean: impl FnMut(Family) -> bool) {
    let mut retry: Option<Instant> = None;
    loop {
        let wait = retry.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
        match woken.recv_timeout(wait) {
            Err(RecvTimeoutError::Disconnected) => return,
            Ok(()) | Err(RecvTimeoutError::Timeout) => {}
        }
        thread::sleep(pace.delay);
        let begun = Instant::now();
        retry = None;
        for family in Family::ALL {
            if due.take(family) && !clean(family) {
                due.add(family);
                retry = Some(Instant::now() + pace.retry);
            }
        }
        thread::sleep(pace.pause(begun.elapsed()));
    }
}

/// Returns `false` if it has to be retried.
fn clean_family(shared: &Shared, family: Family) -> bool {
    let frontends = udp_frontends(shared, family);
    if frontends.is_empty() {
        return true;
    }
    let pass = || {
        let begun = Instant::now();
        let result = clean(family, &frontends);
        record(&shared.metrics, family, begun.elapsed(), &result);
        result
    };
    let mut result = pass();
    let offloaded = |cleaned: &Cleaned| cleaned.error.as_ref().is_some_and(ConntrackError::is_offloaded);
    if result.as_ref().is_ok_and(offloaded) && keep_udp_out(shared, family) {
        // The next tick creates another flowtable, which ends the flows of this one.
        thread::sleep(TICK * 2);
        result = pass();
    }
    match result {
        Ok(cleaned) => !cleaned.interrupted && cleaned.failed == 0,
        Err(error) => error.is_lasting(),
    }
}

/// Keeps UDP out of the flowtable. Returns `false` if it was kept out before.
fn keep_udp_out(shared: &Shared, family: Family) -> bool {
    let is_new = shared.sync().stop_udp_offload(family, Instant::now());
    if is_new {
        tracing::warn!(
            %family,
            "UDP offload disabled: the kernel does not delete conntrack entries of offloaded flows (requires \
             Linux 6.4)"
        );
        shared.record_event(format!(
            "{family}: UDP offload disabled: the kernel does not delete conntrack entries of offloaded flows \
             (requires Linux 6.4)"
        ));
    }
    is_new
}

fn record(metrics: &ProxyMetrics, family: Family, took: Duration, result: &Result<Cleaned, ConntrackError>) {
    match result {
        Ok(cleaned) => {
            metrics.conntrack_cleaned(family, took, cleaned.deleted);
            if cleaned.failed > 0 {
                metrics.conntrack_failed(family, cleaned.failed);
            }
            if let Some(error) = &cleaned.error {
                tracing::warn!(%family, %error, failed = cleaned.failed, "cannot delete stale UDP flows");
            }
            if cleaned.deleted > 0 {
                tracing::debug!(%family, deleted = cleaned.deleted, "stale UDP flows deleted");
            }
        }
        Err(error) => {
            metrics.conntrack_failed(family, 1);
            tracing::warn!(%family, %error, "cannot search for stale UDP flows");
        }
    }
}

/// The current UDP service ports. The copy is made under the lock, about 0.1 microseconds per endpoint.
fn udp_frontends(shared: &Shared, family: Family) -> UdpFrontends {
    let copied = shared.sync().backend().udp_frontends(family);
    copied.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn p15_the_pause_grows_with_the_job_and_is_bounded() {
        let ms = Duration::from_millis;
        for (took, pause) in [(0, 1_000), (5, 1_000), (200, 1_800), (1_000, 9_000), (60_000, 10_000)] {
            assert_eq!(PACE.pause(ms(took)), ms(pause), "{took} ms");
        }
    }

    type Begun = Arc<Mutex<Vec<(Family, Instant)>>>;

    const QUICK: CleanPace = CleanPace {
        delay: Duration::from_millis(1),
        min_pause: Duration::from_millis(50),
        max_pause: Duration::from_millis(60),
        retry: Duration::from_millis(80),
    };

    /// Runs the thread while `test` uses its cleaner. `answer`: whether the listing of this number (from 0) is
    /// complete.
    fn with_worker(
        answer: impl Fn(usize) -> bool + Send,
        test: impl FnOnce(Cleaner),
    ) -> Vec<(Family, Instant)> {
        let begun = Begun::default();
        let (cleaner, woken) = Cleaner::new();
        let (due, seen) = (cleaner.due.clone(), begun.clone());
        thread::scope(|scope| {
            scope.spawn(move || {
                work(&woken, &due, QUICK, |family| {
                    let mut begun = seen.lock().unwrap();
                    begun.push((family, Instant::now()));
                    answer(begun.len() - 1)
                });
            });
            test(cleaner);
        });
        Arc::into_inner(begun).unwrap().into_inner().unwrap()
    }

    #[test]
    fn p15_a_burst_causes_few_listings_and_the_last_one_follows_the_last_change() {
        let mut last = Instant::now();
        let begun = with_worker(
            |_| true,
            |cleaner| {
                let until = Instant::now() + Duration::from_millis(300);
                while Instant::now() < until {
                    cleaner.clean(Family::V4);
                    last = Instant::now();
                    thread::sleep(Duration::from_micros(100));
                }
                cleaner.clean(Family::V6);
                thread::sleep(Duration::from_millis(500));
            },
        );
        let of = |family| begun.iter().filter(|(of, _)| *of == family).map(|(_, at)| *at).collect::<Vec<_>>();
        let v4 = of(Family::V4);
        assert!(v4.len() <= 8, "{} listings", v4.len());
        assert!(v4.windows(2).all(|pair| pair[1] - pair[0] >= QUICK.min_pause), "{v4:?}");
        assert!(v4.last().is_some_and(|at| *at >= last), "the last change was not cleaned");
        assert_eq!(of(Family::V6).len(), 1);
    }

    #[test]
    fn p15_only_failed_listings_are_retried() {
        let begun = with_worker(
            |number| number > 1,
            |cleaner| {
                cleaner.clean(Family::V6);
                thread::sleep(Duration::from_millis(900));
            },
        );
        assert_eq!(begun.len(), 3, "{begun:?}");
        assert!(begun.iter().all(|(family, _)| *family == Family::V6));
    }
}
