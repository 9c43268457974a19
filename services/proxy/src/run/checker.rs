//! Checks whether another program has modified our tables.
//!
//! Owns: a thread with a netlink socket of its own, so that reading a large table delays no change. In: the programmer, which
//! says when a check is due; the kernel's tables. Out: repairs by the programmer, what is said of other service proxies,
//! and the metric of clients with session affinity.

use std::{
    io,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;

use super::{cleaner::Cleaner, follow::finish, shared::Shared};
use crate::{
    model::Family,
    nft::kernel::Tables,
    programmer::{Check, LOOK},
};

/// Between two looks at the clock.
const TICK: Duration = Duration::from_millis(500);

/// Interval of looking for other service proxies.
const LOOK_FOR_STRANGERS: Duration = Duration::from_secs(60);

/// Interval of counting the clients with session affinity for the metric.
const COUNT_AFFINITY: Duration = Duration::from_secs(30);

/// Between two attempts to check while changes wait for a sync, and the number of attempts before the table is read again.
const POSTPONED: Duration = Duration::from_millis(5);
const ATTEMPTS: u32 = 400;

/// Starts the thread, in the network namespace of the caller. It ends when `stop` is cancelled.
pub(super) fn start(
    shared: Arc<Shared>,
    tables: Box<dyn Tables>,
    cleaner: Cleaner,
    sync_period: Duration,
    stop: CancellationToken,
) -> io::Result<()> {
    let mut checker = Checker { shared, tables, cleaner };
    let body = move || {
        let (mut checked, mut looked) = (Instant::now(), Instant::now());
        let mut counted = None;
        while !stop.is_cancelled() {
            thread::sleep(TICK);
            if checked.elapsed() >= LOOK.min(sync_period) {
                checked = Instant::now();
                checker.check();
            }
            if looked.elapsed() >= LOOK_FOR_STRANGERS {
                looked = Instant::now();
                checker.shared.say_strangers(checker.tables.as_mut());
            }
            if counted.is_none_or(|counted: Instant| counted.elapsed() >= COUNT_AFFINITY) {
                counted = Some(Instant::now());
                checker.shared.measure_affinity();
            }
        }
    };
    thread::Builder::new().name("checker".to_owned()).spawn(body)?;
    Ok(())
}

struct Checker {
    shared: Arc<Shared>,
    tables: Box<dyn Tables>,
    cleaner: Cleaner,
}

impl Checker {
    fn check(&mut self) {
        let families = self.shared.programmer().begin_checks(Instant::now());
        for family in families {
            self.check_family(family);
        }
    }

    fn check_family(&mut self, family: Family) {
        let mut seen = match self.tables.read(family) {
            Ok(seen) => seen,
            Err(error) => {
                tracing::warn!(%family, %error, "cannot read the table to check it");
                return;
            }
        };
        for _ in 0..ATTEMPTS {
            let checked = self.shared.programmer().check(family, seen, Instant::now());
            match checked {
                Check::Postponed(again) => {
                    seen = again;
                    thread::sleep(POSTPONED);
                }
                Check::Clean => return,
                Check::Repaired(synced) => return finish(&self.shared, &self.cleaner, &[synced], None),
            }
        }
    }
}
