//! Relays connections from frontends to endpoints.
//!
//! Owns: [`Relay`], a runtime on threads of its own, and what all listeners share. In: sockets and rules of the
//! [table](crate::table). Out: connections to endpoints.
//!
//! A listener and its rule are separate: a changed rule is exchanged, and the socket goes on listening.

mod copy;
mod descriptors;
mod listener;
mod socket;
mod state;
mod tcp;
mod udp;
mod udp_sessions;

use std::{
    collections::HashMap,
    io,
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use keelson_proxy::{
    model::{Endpoint, Family, PortName, ServicePort},
    options::RelayOptions,
};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

pub(crate) use self::listener::Listener;
pub(crate) use self::state::OpenSocket;
use self::{copy::Pipes, descriptors::Descriptors, socket::ListeningSocket, udp_sessions::ShortSessions};
use crate::{
    affinity::Affinity,
    affinity_file::AffinityFile,
    plan::{NodeFacts, Rule, SocketKey},
};

/// More threads than this only add memory.
const MAX_THREADS: usize = 4;

/// Of all sessions, those that policies drop hold at most one in this many.
const DROPPED_SHARE: usize = 8;

/// Of all sessions, and of all file descriptors for them, one in this many is free for new ones as long as UDP sessions with one
/// exchange can end, and is never used by TCP: a burst of connections must not end name resolution.
const RESERVED_SHARE: usize = 8;

/// How often the number of connections is looked at while they drain.
const DRAIN_POLL: Duration = Duration::from_millis(10);

/// Maximum time until sessions that are ended are gone.
const RESET_WAIT: Duration = Duration::from_secs(3);

/// Minimum time between two warnings of the same kind.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

pub(crate) struct Relay {
    /// Taken when it is dropped.
    runtime: Option<Runtime>,
    shared: Arc<Shared>,
}

/// What every listener uses.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) options: RelayOptions,
    facts: [RwLock<Arc<NodeFacts>>; 2],
    affinity: [Mutex<Affinity>; 2],
    pipes: Pipes,
    descriptors: Arc<Descriptors>,
    tcp_connections: AtomicUsize,
    udp_sessions: AtomicUsize,
    short_sessions: ShortSessions,
    dropped: AtomicUsize,
    warned: Mutex<HashMap<&'static str, Instant>>,
    next_id: AtomicU64,
    /// No more connections are accepted.
    stopping: CancellationToken,
    /// The time of the last connections is over.
    stopped: CancellationToken,
    affinity_file: Option<AffinityFile>,
}

/// Current numbers.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sessions {
    pub(crate) tcp_connections: usize,
    pub(crate) udp_sessions: usize,
}

/// What a limit leaves for more sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Room {
    Enough,
    /// The [reserve](RESERVED_SHARE) is in use.
    Little,
    None,
}

impl Room {
    fn of(used: usize, max: usize) -> Self {
        match used {
            _ if used > max => Self::None,
            _ if used > max - max / RESERVED_SHARE => Self::Little,
            _ => Self::Enough,
        }
    }
}

impl std::fmt::Debug for Relay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Relay").field("shared", &self.shared).finish_non_exhaustive()
    }
}

impl Relay {
    /// Starts the threads in the network namespace of the calling thread.
    pub(crate) fn start(options: RelayOptions) -> io::Result<Self> {
        Self::start_with(options, descriptors::limit())
    }

    /// `max_descriptors`: the limit of the process.
    pub(crate) fn start_with(options: RelayOptions, max_descriptors: Option<usize>) -> io::Result<Self> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name("keelson-relay")
            .enable_all()
            .build()?;
        Ok(Self { runtime: Some(runtime), shared: Arc::new(Shared::new(options, max_descriptors)) })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Listens at an address for clients that expect the Service at `place`. `routed`: only a route leads the address
    /// here.
    ///
    /// # Errors
    /// `QuotaExceeded`: no more sockets may listen. Otherwise that of the system.
    pub(crate) fn listen(
        &self,
        address: std::net::SocketAddr,
        place: SocketKey,
        rule: Arc<Rule>,
        routed: bool,
    ) -> io::Result<Listener> {
        let runtime = self.runtime.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let _context = runtime.enter();
        let slot = self.shared.descriptors.listen()?;
        let socket = ListeningSocket::bind(place.protocol, address, routed)?;
        Listener::start(self.shared.clone(), socket, slot, place, rule)
    }
}

impl Relay {
    /// Stops listening. UDP sessions end.
    pub(crate) fn stop_listening(&self) {
        self.shared.stopping.cancel();
    }

    /// Waits until TCP connections have ended, or had their time, and resets those that are left.
    pub(crate) fn drain(self) {
        let shared = &self.shared;
        let before = shared.sessions().tcp_connections;
        // The process may be killed before the connections end.
        shared.save_affinity();
        shared.wait_for(shared.options.stop_timeout, |sessions| sessions.tcp_connections == 0);
        let left = shared.sessions().tcp_connections;
        tracing::info!(ended = before.saturating_sub(left), reset = left, "connections to Services ended");
        shared.stopped.cancel();
        shared.wait_for(RESET_WAIT, |sessions| sessions == Sessions::default());
        shared.save_affinity();
    }

    /// Writes the file of session affinity, on a thread that may block.
    pub(crate) fn save_affinity(&self) {
        if let (Some(runtime), Some(_)) = (&self.runtime, &self.shared.affinity_file) {
            let shared = self.shared.clone();
            runtime.spawn_blocking(move || shared.save_affinity());
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // The caller may be on a runtime, which must not block.
            runtime.shutdown_background();
        }
    }
}

impl Shared {
    fn new(options: RelayOptions, max_descriptors: Option<usize>) -> Self {
        let affinity_file = options.affinity_file.clone().map(AffinityFile::new);
        let affinity = affinity_file.as_ref().map(AffinityFile::load).unwrap_or_default();
        Self {
            options,
            facts: Default::default(),
            affinity: affinity.map(Mutex::new),
            affinity_file,
            pipes: Pipes::default(),
            descriptors: Descriptors::with_limit(max_descriptors),
            tcp_connections: AtomicUsize::new(0),
            udp_sessions: AtomicUsize::new(0),
            short_sessions: ShortSessions::default(),
            dropped: AtomicUsize::new(0),
            warned: Mutex::default(),
            next_id: AtomicU64::new(0),
            stopping: CancellationToken::new(),
            stopped: CancellationToken::new(),
        }
    }

    fn wait_for(&self, limit: Duration, is_reached: impl Fn(Sessions) -> bool) {
        let begun = Instant::now();
        while !is_reached(self.sessions()) && begun.elapsed() < limit {
            std::thread::sleep(DRAIN_POLL);
        }
    }

    pub(crate) fn affinity_file(&self) -> Option<&AffinityFile> {
        self.affinity_file.as_ref()
    }

    fn save_affinity(&self) {
        let Some(file) = &self.affinity_file else { return };
        file.save(|now| Family::ALL.map(|family| self.affinity(family).entries(now)));
    }

    pub(crate) fn facts(&self, family: Family) -> Arc<NodeFacts> {
        self.facts[family as usize].read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_facts(&self, family: Family, facts: NodeFacts) {
        *self.facts[family as usize].write().unwrap_or_else(PoisonError::into_inner) = Arc::new(facts);
    }

    pub(crate) fn affinity(&self, family: Family) -> MutexGuard<'_, Affinity> {
        self.affinity[family as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn sessions(&self) -> Sessions {
        Sessions {
            tcp_connections: self.tcp_connections.load(Ordering::Relaxed),
            udp_sessions: self.udp_sessions.load(Ordering::Relaxed),
        }
    }

    /// The remembered endpoint of a client, otherwise one at random, if possible none of `failed`.
    fn choose(
        &self,
        port: &ServicePort,
        client: IpAddr,
        set: &[Endpoint],
        failed: &[Endpoint],
    ) -> Option<Choice> {
        if port.affinity_seconds != 0 && failed.is_empty() {
            let found = self.affinity(Family::of(client)).find(&port.name, client, set, Instant::now());
            if let Some(endpoint) = found {
                return Some(Choice { endpoint, is_remembered: true });
            }
        }
        let endpoint = match failed {
            [] => pick(set)?,
            failed => {
                let is_untried = |endpoint: &&Endpoint| !failed.contains(endpoint);
                let untried: Vec<Endpoint> = set.iter().filter(is_untried).copied().collect();
                pick(&untried).or_else(|| pick(set))?
            }
        };
        Some(Choice { endpoint, is_remembered: false })
    }

    fn remember(&self, port: &ServicePort, client: IpAddr, endpoint: Endpoint) {
        if port.affinity_seconds != 0 {
            let timeout = Duration::from_secs(port.affinity_seconds.into());
            let mut affinity = self.affinity(Family::of(client));
            affinity.remember(&port.name, client, endpoint, timeout, Instant::now());
        }
    }

    /// Whether a warning of this kind is due: the same error can occur with every connection.
    pub(crate) fn may_warn(&self, kind: &'static str) -> bool {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let is_due = warned.get(kind).is_none_or(|last| now.duration_since(*last) >= WARN_INTERVAL);
        if is_due {
            warned.insert(kind, now);
        }
        is_due
    }

    fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// By the setting and by the file descriptors: the less.
    fn room(&self, sessions: Sessions) -> Room {
        let all = sessions.tcp_connections + sessions.udp_sessions;
        Room::of(all, self.options.max_sessions).max(self.descriptors.room(sessions))
    }

    /// Counts a session of this kind; `None` if there are too many. When few are left, UDP sessions with one exchange end: lookups
    /// must not keep others out until their idle timeout.
    fn count_session(self: &Arc<Self>, kind: SessionKind) -> Option<SessionCount> {
        let counter: fn(&Self) -> &AtomicUsize = match kind {
            SessionKind::Tcp => |shared| &shared.tcp_connections,
            SessionKind::Udp => |shared| &shared.udp_sessions,
        };
        counter(self).fetch_add(1, Ordering::Relaxed);
        let session = SessionCount { shared: self.clone(), counter };
        let sessions = self.sessions();
        let Sessions { tcp_connections, udp_sessions } = sessions;
        let max = self.options.max_sessions;
        let room = self.room(sessions);
        if room > Room::Enough {
            self.short_sessions.end_oldest();
        }
        let of_tcp = Sessions { udp_sessions: 0, ..sessions };
        let is_too_many =
            room == Room::None || (kind == SessionKind::Tcp && self.room(of_tcp) > Room::Enough);
        if is_too_many && self.may_warn("sessions") {
            tracing::warn!(
                max,
                tcp_connections,
                udp_sessions,
                "too many connections to Services; new ones are refused"
            );
        }
        (!is_too_many).then_some(session)
    }

    /// Counts a connection that is held although it is dropped; `None` if there are too many.
    fn count_dropped(self: &Arc<Self>) -> Option<SessionCount> {
        let max = (self.options.max_sessions / DROPPED_SHARE).max(1);
        let before = self.dropped.fetch_add(1, Ordering::Relaxed);
        let session = SessionCount { shared: self.clone(), counter: |shared| &shared.dropped };
        (before < max).then_some(session)
    }

    pub(crate) fn clean_affinity(&self, family: Family, is_known: impl FnMut(&PortName, Endpoint) -> bool) {
        self.affinity(family).clean(Instant::now(), is_known);
    }
}

fn pick(set: &[Endpoint]) -> Option<Endpoint> {
    match set {
        [] => None,
        [one] => Some(*one),
        several => several.get(rand::random_range(0..several.len())).copied(),
    }
}

/// The endpoint of a new session.
#[derive(Debug, Clone, Copy)]
struct Choice {
    endpoint: Endpoint,
    /// By session affinity.
    is_remembered: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionKind {
    Tcp,
    Udp,
}

/// One session in a counter, until it is dropped.
#[derive(Debug)]
struct SessionCount {
    shared: Arc<Shared>,
    counter: fn(&Shared) -> &AtomicUsize,
}

impl Drop for SessionCount {
    fn drop(&mut self) {
        (self.counter)(&self.shared).fetch_sub(1, Ordering::Relaxed);
    }
}
