//! File descriptors: sockets that listen leave some of them for connections.
//!
//! Owns: [`Descriptors`]. In: the limit of the process, sockets that listen, numbers of sessions. Out: whether one more may listen, and how much
//! room sessions have.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::{Room, Sessions};

/// Of all descriptors, one in this many is not for sockets that listen.
const SESSIONS_SHARE: usize = 4;

/// Files, servers, timers and the pipes that are kept.
const OTHERS: usize = 128;

/// Two sockets of a TCP connection, and a pipe while one of its sides reads slowly.
const TCP_CONNECTION: usize = 4;

#[derive(Debug)]
pub(super) struct Descriptors {
    /// `None`: the system has none.
    limit: Option<usize>,
    listening: AtomicUsize,
}

impl Descriptors {
    pub(super) fn with_limit(limit: Option<usize>) -> Arc<Self> {
        Arc::new(Self { limit, listening: AtomicUsize::new(0) })
    }

    /// One more socket that listens.
    ///
    /// # Errors
    /// `QuotaExceeded`: what is left is for connections.
    pub(super) fn listen(self: &Arc<Self>) -> io::Result<ListeningSlot> {
        let listening = self.listening.fetch_add(1, Ordering::Relaxed);
        let slot = ListeningSlot(self.clone());
        match self.limit {
            Some(limit) if listening >= limit - limit / SESSIONS_SHARE => Err(io::Error::new(
                io::ErrorKind::QuotaExceeded,
                format!(
                    "{listening} sockets listen, and the rest of {limit} open files is for connections; raise the limit of open files \
                     (LimitNOFILE)"
                ),
            )),
            _ => Ok(slot),
        }
    }

    /// With these sessions.
    pub(super) fn room(&self, sessions: Sessions) -> Room {
        let Some(limit) = self.limit else { return Room::Enough };
        let free = limit.saturating_sub(OTHERS + self.listening.load(Ordering::Relaxed));
        Room::of(sessions.tcp_connections * TCP_CONNECTION + sessions.udp_sessions, free)
    }
}

/// The limit of this process.
#[cfg(target_os = "linux")]
pub(super) fn limit() -> Option<usize> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current?;
    usize::try_from(limit).ok()
}

#[cfg(not(target_os = "linux"))]
pub(super) fn limit() -> Option<usize> {
    None
}

/// A socket that listens, until it is dropped.
#[derive(Debug)]
pub(super) struct ListeningSlot(Arc<Descriptors>);

impl Drop for ListeningSlot {
    fn drop(&mut self) {
        self.0.listening.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_that_listen_leave_a_quarter() {
        let descriptors = Descriptors::with_limit(Some(1_000));
        let mut slots: Vec<_> = (0..750).map(|_| descriptors.listen().unwrap()).collect();
        let error = descriptors.listen().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
        assert!(
            error.to_string().starts_with("750 sockets listen, and the rest of 1000 open files"),
            "{error}"
        );
        slots.pop();
        assert!(descriptors.listen().is_ok(), "one has ended");
    }

    #[test]
    fn sessions_have_what_listeners_do_not_use() {
        let descriptors = Descriptors::with_limit(Some(1_000));
        let room =
            |tcp_connections, udp_sessions| descriptors.room(Sessions { tcp_connections, udp_sessions });
        for (udp_sessions, expected) in
            [(763, Room::Enough), (764, Room::Little), (872, Room::Little), (873, Room::None)]
        {
            assert_eq!(room(0, udp_sessions), expected, "{udp_sessions} UDP sessions");
        }
        assert_eq!((room(190, 0), room(218, 0), room(219, 0)), (Room::Enough, Room::Little, Room::None));
        let _slots: Vec<_> = (0..700).map(|_| descriptors.listen().unwrap()).collect();
        assert_eq!((room(37, 0), room(43, 0), room(44, 0)), (Room::Enough, Room::Little, Room::None));
    }

    #[test]
    fn a_system_without_a_limit_permits_everything() {
        let descriptors = Descriptors::with_limit(None);
        assert!(descriptors.listen().is_ok());
        let many = Sessions { tcp_connections: 1 << 20, udp_sessions: 1 << 20 };
        assert_eq!(descriptors.room(many), Room::Enough);
    }
}
