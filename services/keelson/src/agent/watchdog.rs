//! Checks of the whole CRI path.
//!
//! Owns: a thread that checks every few seconds, so that no other job can delay the check. In: the CRI socket, and the
//! actors behind it. Out: for `/livez`, `/readyz` and `keelson version`, what does not answer; for systemd's watchdog,
//! a notification only while everything answers, so that systemd restarts an agent whose CRI path is stuck. Jobs off
//! the CRI path do not count: the supervisor restarts them.

use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::watch;

use super::{systemd, view::View};

/// Maximum interval of checks.
const EVERY: Duration = Duration::from_secs(5);
#[derive(Debug)]
pub(super) struct Watchdog {
    _stop: watch::Sender<()>,
}

pub(super) fn start(view: View) -> anyhow::Result<Watchdog> {
    let limit = systemd::watchdog_limit();
    let pause = limit.map_or(EVERY, |limit| (limit / 3).clamp(Duration::from_millis(10), EVERY));
    let (stop, mut stopped) = watch::channel(());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime of the watchdog")?;
    let run = async move {
        loop {
            let checks = view.check_cri_path().await;
            let stuck = checks.iter().find(|check| !check.ok);
            match stuck {
                Some(check) => {
                    tracing::error!(part = check.name, reason = check.message, "CRI path does not answer");
                }
                None if limit.is_some() => systemd::feed_watchdog(),
                None => {}
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = stopped.changed() => return,
            }
        }
    };
    std::thread::Builder::new()
        .name("watchdog".into())
        .spawn(move || runtime.block_on(run))
        .context("cannot start the thread of the watchdog")?;
    Ok(Watchdog { _stop: stop })
}
