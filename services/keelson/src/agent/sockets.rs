//! The listening sockets of the agent.
//!
//! Owns: how they are bound, in this order: passed by systemd, passed by the previous agent, created. In: settings.
//! Out: [`Listeners`], and [`Sockets`] for the end of the agent.

use std::{
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixListener,
    },
    path::PathBuf,
    rc::Rc,
    time::Duration,
};

use anyhow::Context as _;
use keelson_config::{Settings, SocketMode, SocketSpec};
use keelson_serve::unix::{Bound, SocketFile};

use super::systemd::PassedSockets;

/// Names of the sockets that a successor gets.
pub(super) const CRI: &str = "cri";
pub(super) const DEBUG: &str = "debug";

/// Maximum wait for a running agent to be stopped, or to be cleaned up by the kernel after `kill -9`.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct Listeners {
    pub(super) cri: tokio::net::UnixListener,
    /// The path at which clients reach the CRI listener.
    pub(super) cri_path: PathBuf,
    /// `None`: it could not be bound; its job gives the reason and retries.
    pub(super) debug: Option<Rc<UnixListener>>,
}

/// Binds the sockets; only the CRI socket is required. `adopted`: those of the previous agent.
pub(super) async fn bind(
    settings: &Settings,
    inherited: PassedSockets,
    adopted: PassedSockets,
) -> anyhow::Result<(Listeners, Sockets)> {
    let cri = Origin { inherited: inherited.cri, adopted: adopted.cri };
    let cri = cri.bind(&settings.cri.listen, settings.cri.socket_mode).await?;
    let debug = Origin { inherited: inherited.debug, adopted: adopted.debug };
    let debug = debug.bind_now(&settings.debug.listen, settings.debug.socket_mode).await.ok();
    let (cri, file) = cri.into_parts();
    let mut sockets = Sockets { files: vec![file], handed: Vec::new() };
    let socket = cri.as_fd().try_clone_to_owned().context("cannot duplicate the CRI listener")?;
    sockets.handed.push((CRI, socket));
    let debug = match debug {
        Some(bound) => {
            let (listener, file) = bound.into_parts();
            sockets.files.push(file);
            let socket =
                listener.as_fd().try_clone_to_owned().context("cannot duplicate the debug listener")?;
            sockets.handed.push((DEBUG, socket));
            Some(Rc::new(listener.into_std().context("cannot use the debug listener")?))
        }
        None => None,
    };
    let cri_path = socket_path(&cri, settings);
    Ok((Listeners { cri, cri_path, debug }, sockets))
}

/// Removes socket files at the end, unless they are a successor's by then.
pub(super) struct Sockets {
    /// Of listeners that can be handed over.
    files: Vec<SocketFile>,
    /// Listeners to hand over, by name.
    pub(super) handed: Vec<(&'static str, OwnedFd)>,
}

impl Sockets {
    /// Closes the listeners; `handed`: a successor has them.
    pub(super) fn leave(self, handed: bool) {
        if handed {
            self.files.into_iter().for_each(SocketFile::disown);
        }
    }
}

/// The path at which clients reach the CRI listener: that of a socket from systemd may differ from the settings. A
/// socket that the agent made was renamed, so its own name is outdated.
fn socket_path(listener: &tokio::net::UnixListener, settings: &Settings) -> PathBuf {
    let address = listener.local_addr().ok();
    let own = address.as_ref().and_then(|address| address.as_pathname()).filter(|path| path.exists());
    own.unwrap_or_else(|| settings.cri.listen.path()).to_owned()
}

/// Sources of a listening socket.
struct Origin {
    inherited: Option<UnixListener>,
    /// From the previous agent.
    adopted: Option<UnixListener>,
}

impl Origin {
    async fn bind(self, spec: &SocketSpec, mode: SocketMode) -> anyhow::Result<Bound> {
        match (self.inherited, self.adopted) {
            (Some(listener), _) => Bound::inherited(listener)
                .with_context(|| format!("cannot use the socket from systemd for {spec}")),
            (None, Some(listener)) => Bound::adopted(listener, spec.path())
                .with_context(|| format!("cannot use the socket of the previous agent for {spec}")),
            (None, None) => Ok(Bound::bind_within(spec.path(), mode.bits(), TIMEOUT).await?),
        }
    }

    /// As [`Origin::bind`], but does not wait for a socket to become free.
    async fn bind_now(self, spec: &SocketSpec, mode: SocketMode) -> anyhow::Result<Bound> {
        match self {
            Self { inherited: None, adopted: None } => Ok(Bound::bind(spec.path(), mode.bits()).await?),
            given => given.bind(spec, mode).await,
        }
    }
}
