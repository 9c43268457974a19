//! systemd: readiness, watchdog, socket activation.
//!
//! Owns: the exchange with the service manager; without one, nothing happens. In:
//! `LISTEN_FDS` with the names `cri` and `debug`, `WATCHDOG_USEC`, `NOTIFY_SOCKET`. Out:
//! notifications.

use std::{os::unix::net::UnixListener, time::Duration};

use keelson_config::Settings;
use sd_notify::NotifyState;

/// Listening sockets from another process: systemd, so that no connection is refused during a restart, or the
/// previous agent.
#[derive(Debug, Default)]
pub(super) struct PassedSockets {
    pub(super) cri: Option<UnixListener>,
    pub(super) debug: Option<UnixListener>,
}

/// Takes the sockets over, by the names that the socket unit gives them (`FileDescriptorName=`); an
/// unnamed one is the CRI's.
pub(super) fn inherited_sockets() -> PassedSockets {
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let names: Vec<&str> = names.split(':').collect();
    let mut fds = listenfd::ListenFd::from_env();
    let mut inherited = PassedSockets::default();
    for index in 0..fds.len() {
        let listener = match fds.take_unix_listener(index) {
            Ok(Some(listener)) => listener,
            Ok(None) => continue,
            Err(error) => {
                tracing::warn!(index, %error, "socket from systemd is not a unix stream socket; ignored");
                continue;
            }
        };
        match names.get(index).copied().unwrap_or_default() {
            "debug" => inherited.debug = Some(listener),
            _ => inherited.cri = Some(listener),
        }
    }
    inherited
}

/// Whether systemd or a compatible manager runs this process.
pub(super) fn is_manager() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "cannot notify systemd");
    }
}

/// Sent once. `main_pid`: the process that systemd follows from now on instead of this one; systemd accepts it only
/// while the service starts or runs.
pub(super) fn ready(settings: &Settings, main_pid: Option<u32>) {
    let status = format!("serving {} before {}", settings.cri.listen, settings.cri.runtime_endpoint);
    let mut states = vec![NotifyState::Ready, NotifyState::Status(&status)];
    states.extend(main_pid.map(NotifyState::MainPid));
    notify(&states);
}

/// As [`ready`], for a proxy.
pub(crate) fn proxy_ready(target: &str) {
    notify(&[NotifyState::Ready, NotifyState::Status(&format!("connected to {target}"))]);
}

pub(super) fn stopping() {
    notify(&[NotifyState::Stopping, NotifyState::Status("draining: no new pulls, waiting for running ones")]);
}

pub(super) fn reloading(done: bool) {
    if done {
        notify(&[NotifyState::Ready]);
    } else if let Ok(at) = NotifyState::monotonic_usec_now() {
        notify(&[NotifyState::Reloading, at]);
    }
}

/// The watchdog timeout; `None` if systemd's watchdog is disabled.
pub(super) fn watchdog_limit() -> Option<Duration> {
    sd_notify::watchdog_enabled()
}

/// Tells systemd that the CRI path works.
pub(super) fn feed_watchdog() {
    notify(&[NotifyState::Watchdog]);
}
