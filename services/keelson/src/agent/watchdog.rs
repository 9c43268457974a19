//! Whether the CRI path works, from end to end.
//!
//! Owns: a thread that asks every few seconds, so that no other job can delay the question. In: the CRI socket, and the
//! actors behind it. Out: for `/livez`, `/readyz` and `keelson version`, what does not answer; for systemd's watchdog, a
//! sign of life only while everything does, so that systemd restarts an agent whose CRI path is stuck. Jobs off the CRI
//! path do not count here: their restarts are the supervisor's.

use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::watch;

use super::{systemd, view::View};

/// How often the path is asked, at least.
const EVERY: Duration = Duration::from_secs(5);
#[derive(Debug)]
pub(super) struct Watchdog {
    _stop: watch::Sender<()>,
}

/// Starts the thread.
///
/// # Errors
/// The system gave no thread or no runtime.
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
