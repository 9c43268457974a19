//! Watches the node's addresses.
//!
//! Owns: a task that receives rtnetlink notifications and lists all addresses after each. In: notifications, whose
//! content is not read, so that a lost one (ENOBUFS) only causes another listing. Out: a [`watch::Receiver`].

use std::{io, sync::Arc, time::Duration};

use netlink_sys::{AsyncSocket, AsyncSocketExt as _, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE};
use tokio::{
    sync::watch,
    task::{JoinHandle, spawn_blocking},
    time::sleep,
};

use super::{AddressError, LocalAddresses};

/// RTMGRP_IPV4_IFADDR and RTMGRP_IPV6_IFADDR (linux/rtnetlink.h).
const ADDRESS_GROUPS: u32 = 0x10 | 0x100;
/// `RTMGRP_LINK`: interfaces that are added, removed or changed.
const LINK_GROUP: u32 = 1;
/// Notifications come in bursts, such as when pods start: one listing covers a burst.
const SETTLE: Duration = Duration::from_millis(100);
/// Delay after a failed listing or a failed socket.
const RETRY: Duration = Duration::from_secs(5);
/// Longer notifications are truncated, because their content is not read.
const NOTIFICATION_BYTES: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchScope {
    Addresses,
    /// Changes of addresses, and interfaces that are added or removed.
    AddressesAndInterfaces,
}

impl WatchScope {
    const fn groups(self) -> u32 {
        match self {
            Self::Addresses => ADDRESS_GROUPS,
            Self::AddressesAndInterfaces => ADDRESS_GROUPS | LINK_GROUP,
        }
    }
}

/// Watches the node's addresses until it is dropped.
#[derive(Debug)]
pub struct AddressWatch {
    receiver: watch::Receiver<Arc<LocalAddresses>>,
    task: JoinHandle<()>,
}

impl AddressWatch {
    #[must_use]
    pub fn receiver(&self) -> watch::Receiver<Arc<LocalAddresses>> {
        self.receiver.clone()
    }
}

impl Drop for AddressWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts to watch the addresses of the calling thread's network namespace. The receiver has them from the start. Must
/// be called within a runtime.
///
/// # Errors
/// The addresses cannot be listed, or the socket cannot be opened.
pub async fn watch(scope: WatchScope) -> Result<AddressWatch, AddressError> {
    // The socket is opened first, so that no change after the listing is missed.
    let socket = open(scope).map_err(AddressError::Socket)?;
    let (sender, receiver) = watch::channel(Arc::new(list().await?));
    let task = tokio::spawn(follow(scope, socket, sender));
    Ok(AddressWatch { receiver, task })
}

fn open(scope: WatchScope) -> io::Result<TokioSocket> {
    let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
    socket.socket_mut().bind(&SocketAddr::new(0, scope.groups()))?;
    Ok(socket)
}

async fn list() -> Result<LocalAddresses, AddressError> {
    // The kernel may delay the listing while interfaces change.
    spawn_blocking(LocalAddresses::now).await.unwrap_or(Err(AddressError::Stopping))
}

async fn follow(scope: WatchScope, mut socket: TokioSocket, sender: watch::Sender<Arc<LocalAddresses>>) {
    loop {
        if let Err(error) = receive_notification(&socket).await {
            tracing::warn!(%error, retry_in = ?RETRY, "cannot read address changes of this node; reopening \
                                                       the socket");
            sleep(RETRY).await;
            socket = reopen(scope).await;
        }
        sleep(SETTLE).await;
        let addresses = list_until_success().await;
        sender.send_if_modified(|known| {
            let changed = **known != addresses;
            if changed {
                if known.as_slice() != addresses.as_slice() {
                    tracing::info!(addresses = ?addresses.as_slice(), "addresses of this node changed");
                }
                *known = Arc::new(addresses);
            }
            changed
        });
    }
}

/// Lists the addresses, and retries until that succeeds; the last known addresses stay in use until then.
async fn list_until_success() -> LocalAddresses {
    loop {
        match list().await {
            Ok(addresses) => return addresses,
            Err(error) => {
                tracing::warn!(%error, retry_in = ?RETRY, "cannot list the addresses of this node");
                sleep(RETRY).await;
            }
        }
    }
}

/// Waits for a notification, or for the error that some were lost.
async fn receive_notification(socket: &TokioSocket) -> io::Result<()> {
    let mut notification = Vec::with_capacity(NOTIFICATION_BYTES);
    match socket.recv(&mut notification).await {
        Err(error) if error.raw_os_error() == Some(nix::errno::Errno::ENOBUFS as i32) => Ok(()),
        received => received.map(drop),
    }
}

async fn reopen(scope: WatchScope) -> TokioSocket {
    loop {
        match open(scope) {
            Ok(socket) => return socket,
            Err(error) => {
                tracing::warn!(%error, retry_in = ?RETRY, "cannot watch the addresses of this node");
                sleep(RETRY).await;
            }
        }
    }
}
