use std::{sync::Arc, time::Duration};

use keelson_actor_system::reports::EndpointsView;

use super::super::{ClientEvent, Published, ServiceName, record::Write};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointsPolicy {
    /// Name of this node. A state on disk for another node is not used.
    pub node_name: String,
    /// Minimum interval of revisions during continuous changes; ten may follow each other at once after a pause.
    pub min_interval: Duration,
    pub on_demand: bool,
    /// Service proxies beside the usual one: the values of `service.kubernetes.io/service-proxy-name` whose Services are
    /// published.
    pub service_proxy_names: Vec<String>,
    /// Number of revisions for which a deleted Service is remembered, so that clients can resume across a restart.
    pub history: u64,
    /// Maximum time that a write to the disk delays a revision.
    pub write_timeout: Duration,
    /// The kernel's boot ID; empty: unknown.
    pub boot_id: String,
    /// Maximum age of a state on disk that is served after a boot of the node.
    pub max_age_after_boot: Duration,
}

impl Default for EndpointsPolicy {
    fn default() -> Self {
        Self {
            node_name: String::new(),
            min_interval: Duration::from_millis(100),
            on_demand: false,
            service_proxy_names: Vec::new(),
            history: 1000,
            write_timeout: Duration::from_secs(5),
            boot_id: String::new(),
            max_age_after_boot: Duration::from_secs(3600),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Event {
    /// The time requested by [`super::Core::next_tick`].
    Tick,
    /// A client connected, or has a revision that this process did not make.
    Client(ClientEvent),
    /// Instance ID and revision of this write are noted outside of the store.
    Noted { number: u64 },
    Written {
        number: u64,
        /// The error is a sentence.
        result: Result<(), String>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Revision {
    pub(crate) rev: u64,
    pub(crate) services: Vec<ServiceName>,
    pub(crate) node: bool,
}

#[derive(Debug)]
pub(crate) enum Effect {
    Write {
        number: u64,
        write: Write,
    },
    Publish {
        /// The history restarts after this revision.
        restart: Option<u64>,
        /// Entries for the history, oldest first.
        revisions: Vec<Revision>,
        published: Arc<Published>,
    },
    View(EndpointsView),
    Count(Counted),
    /// Write to the log and the events of the actor.
    Note {
        warn: bool,
        text: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Counted {
    Revision {
        /// Time since the oldest change that led to the revision, in milliseconds, if known.
        delay_ms: Option<i64>,
    },
    Worked(u64),
    WriteFailed,
}
