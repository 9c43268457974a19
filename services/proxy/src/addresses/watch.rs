//! Changes of the node's addresses, as they happen.
//!
//! Owns: a task that hears rtnetlink's notices of addresses and asks for the whole list after each. In: notices; what they say
//! is not read, so one that was lost (ENOBUFS) costs nothing but the question. Out: a [`watch::Receiver`].

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
/// `RTMGRP_LINK`: interfaces that come, go and change.
const LINK_GROUP: u32 = 1;
/// Notices come in crowds, such as when pods start: one question answers them all.
const SETTLE: Duration = Duration::from_millis(100);
/// After the kernel could not be asked, or the socket failed.
const RETRY: Duration = Duration::from_secs(5);
/// Notices are not read, so that those cut off by this are as good.
const NOTICE_BYTES: usize = 4096;

/// What a watch hears of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notices {
    /// Changes of addresses.
    Addresses,
    /// Changes of addresses, and interfaces that come and go.
    AddressesAndInterfaces,
}

impl Notices {
    const fn groups(self) -> u32 {
        match self {
            Self::Addresses => ADDRESS_GROUPS,
            Self::AddressesAndInterfaces => ADDRESS_GROUPS | LINK_GROUP,
        }
    }
}

/// Follows the node's addresses until it is dropped.
#[derive(Debug)]
pub struct AddressWatch {
    receiver: watch::Receiver<Arc<LocalAddresses>>,
    task: JoinHandle<()>,
}

impl AddressWatch {
    /// The addresses, now and whenever they change.
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

/// Starts to follow the node's addresses; the receiver has them from the start. Those of the network namespace of the
/// calling thread. Call it within a runtime.
///
/// # Errors
/// The kernel cannot be asked, or gives no socket.
pub async fn watch(notices: Notices) -> Result<AddressWatch, AddressError> {
    // The socket first: what changes after the question is heard of.
    let socket = open(notices).map_err(AddressError::Socket)?;
    let (sender, receiver) = watch::channel(Arc::new(list().await?));
    let task = tokio::spawn(follow(notices, socket, sender));
    Ok(AddressWatch { receiver, task })
}

fn open(notices: Notices) -> io::Result<TokioSocket> {
    let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
    socket.socket_mut().bind(&SocketAddr::new(0, notices.groups()))?;
    Ok(socket)
}

async fn list() -> Result<LocalAddresses, AddressError> {
    // The kernel may make the question wait while interfaces change.
    spawn_blocking(LocalAddresses::now).await.unwrap_or(Err(AddressError::Stopping))
}

async fn follow(notices: Notices, mut socket: TokioSocket, sender: watch::Sender<Arc<LocalAddresses>>) {
    loop {
        if let Err(error) = hear(&socket).await {
            tracing::warn!(%error, retry_in = ?RETRY, "cannot read address changes of this node; reopening \
                                                       the socket");
            sleep(RETRY).await;
            socket = reopen(notices).await;
        }
        sleep(SETTLE).await;
        let addresses = ask().await;
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

/// The list, however long that takes: until then, what was known holds.
async fn ask() -> LocalAddresses {
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

/// Waits for a notice, or for word that some were lost.
async fn hear(socket: &TokioSocket) -> io::Result<()> {
    let mut notice = Vec::with_capacity(NOTICE_BYTES);
    match socket.recv(&mut notice).await {
        Err(error) if error.raw_os_error() == Some(nix::errno::Errno::ENOBUFS as i32) => Ok(()),
        heard => heard.map(drop),
    }
}

async fn reopen(notices: Notices) -> TokioSocket {
    loop {
        match open(notices) {
            Ok(socket) => return socket,
            Err(error) => {
                tracing::warn!(%error, retry_in = ?RETRY, "cannot watch the addresses of this node");
                sleep(RETRY).await;
            }
        }
    }
}
