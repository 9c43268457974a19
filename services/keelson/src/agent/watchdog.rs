//! Whether the CRI path works, from end to end.
//!
//! Owns: a thread that asks every few seconds, so that no other job can delay the question. In: the CRI socket, and the
//! actors behind it. Out: for `/livez`, `/readyz` and `keelson version`, what does not answer; for systemd's watchdog, a
//! sign of life only while everything does, so that systemd restarts an agent whose CRI path is stuck. Jobs off the CRI
//! path do not count here: their restarts are the supervisor's.

use std::{path::Path, time::Duration};

use anyhow::Context as _;
use keelson_actor_system::inspect::Status;
use keelson_cri::front;
use keelson_debug::Check;
use tokio::{sync::watch, time::timeout};

use super::{handles::Handle, systemd, view::View};

/// A part of the path that takes longer to answer is stuck.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often the path is asked, at least.
const EVERY: Duration = Duration::from_secs(5);
/// Name of the check of the CRI socket.
const SOCKET: &str = "cri-socket";

/// Ends the questions when dropped.
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

/// Asks the socket's own thread and the actors behind it; one check each.
pub(super) async fn ask(socket: &Path, actors: impl Iterator<Item = &Handle>) -> Vec<Check> {
    let pinged = async {
        let wrong = match timeout(PATIENCE, front::ping(socket)).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => {
                Some(format!("{} does not answer: {:#}", socket.display(), anyhow::Error::new(error)))
            }
            Err(_) => Some(format!("{} does not answer within {PATIENCE:?}", socket.display())),
        };
        check(SOCKET, wrong)
    };
    let asked = actors.map(|actor| async move {
        let name = actor.recorder().name();
        let answers = match actor.recorder().current_status() {
            // It is retried, and the front passes pulls through meanwhile.
            Status::Starting | Status::Restarting | Status::Failing => true,
            Status::Running | Status::Stopped | Status::Off => actor.answers(PATIENCE).await,
        };
        check(name, (!answers).then(|| format!("does not answer within {PATIENCE:?}")))
    });
    let (socket, mut checks) = tokio::join!(pinged, futures_util::future::join_all(asked));
    checks.insert(0, socket);
    checks
}

fn check(name: &str, wrong: Option<String>) -> Check {
    Check {
        name: name.to_owned(),
        ok: wrong.is_none(),
        message: wrong.unwrap_or_else(|| "answers".to_owned()),
        since_unix_ms: 0,
    }
}
