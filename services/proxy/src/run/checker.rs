//! Checks whether another program has modified the rules.
//!
//! Owns: a thread with an observer of its own, so that reading many rules delays no change. In: the sync loop, which
//! schedules checks; what the observer reads. Out: repairs by the sync loop, take-over from other service proxies, events
//! about them, and the metric of clients with session affinity.

use std::{
    io,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;

use super::{
    cleaner::Cleaner,
    follow::finish,
    shared::{Shared, TICK},
    take_over::TakeOverTask,
};
use crate::{
    backend::Observer,
    model::Family,
    sync::{CHECK_INTERVAL, Checked},
};

const OTHER_PROXIES_INTERVAL: Duration = Duration::from_secs(60);

const AFFINITY_INTERVAL: Duration = Duration::from_secs(30);

/// Pause between two attempts to check while changes wait for a sync, and the number of attempts before the table is
/// read again.
const POSTPONED_RETRY: Duration = Duration::from_millis(5);
const POSTPONED_ATTEMPTS: u32 = 400;

/// Starts the thread, in the network namespace of the caller. It ends when `stop` is cancelled.
pub(super) fn start(
    shared: Arc<Shared>,
    observer: Box<dyn Observer>,
    cleaner: Cleaner,
    mut take_over: Option<TakeOverTask>,
    sync_period: Duration,
    stop: CancellationToken,
) -> io::Result<()> {
    let mut checker = Checker { shared, observer, cleaner };
    let body = move || {
        let (mut checked, mut looked) = (Instant::now(), Instant::now());
        let mut counted = None;
        while !stop.is_cancelled() {
            thread::sleep(TICK);
            take_over
                .take_if(|task| task.advance(&checker.shared, checker.observer.as_mut(), &checker.cleaner));
            if checked.elapsed() >= CHECK_INTERVAL.min(sync_period) {
                checked = Instant::now();
                checker.check();
            }
            if looked.elapsed() >= OTHER_PROXIES_INTERVAL {
                looked = Instant::now();
                checker.shared.look_for_other_proxies(checker.observer.as_mut());
            }
            if counted.is_none_or(|counted: Instant| counted.elapsed() >= AFFINITY_INTERVAL) {
                counted = Some(Instant::now());
                checker.shared.measure_affinity();
                checker.shared.measure_maps();
            }
        }
    };
    thread::Builder::new().name("checker".to_owned()).spawn(body)?;
    Ok(())
}

struct Checker {
    shared: Arc<Shared>,
    observer: Box<dyn Observer>,
    cleaner: Cleaner,
}

impl Checker {
    fn check(&mut self) {
        let families = self.shared.sync().begin_checks(Instant::now());
        for family in families {
            self.check_family(family);
        }
    }

    fn check_family(&mut self, family: Family) {
        if let Err(error) = self.observer.read(family) {
            tracing::warn!(%family, %error, "cannot read the table to check it");
            return;
        }
        for _ in 0..POSTPONED_ATTEMPTS {
            let checked = self.shared.sync().check(family, Instant::now());
            match checked {
                Checked::Postponed => thread::sleep(POSTPONED_RETRY),
                Checked::Clean => return,
                Checked::Repaired(synced) => return finish(&self.shared, &self.cleaner, &[synced], None),
            }
        }
    }
}
