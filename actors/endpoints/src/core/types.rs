//! What goes into the core and what comes out of it.

use std::{sync::Arc, time::Duration};

use keelson_actor_system::reports::EndpointsView;

use super::super::{ClientEvent, Published, ServiceName, record::Write};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointsPolicy {
    /// The name of this node. A state on disk that is for another node is not used.
    pub node_name: String,
    /// Between two revisions while changes keep coming; ten may follow each other at once after a quiet time.
    pub min_interval: Duration,
    /// Whether the sources are asked only once a client follows.
    pub on_demand: bool,
    /// For how many revisions a deleted Service stays known, so that readers can resume across a restart.
    pub history: u64,
    /// How long a write to the disk may delay a revision.
    pub write_timeout: Duration,
    /// The kernel's boot ID; empty: not known.
    pub boot_id: String,
    /// How long ago a state on disk may have been current, at most, to be served after the node has booted.
    pub max_age_after_boot: Duration,
}

impl Default for EndpointsPolicy {
    fn default() -> Self {
        Self {
            node_name: String::new(),
            min_interval: Duration::from_millis(100),
            on_demand: false,
            history: 1000,
            write_timeout: Duration::from_secs(5),
            boot_id: String::new(),
            max_age_after_boot: Duration::from_secs(3600),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Event {
    /// The time that [`super::Core::next_tick`] asked for has come.
    Tick,
    /// From now on the sources are watched, or a client has a revision of an instance that was not made here.
    Client(ClientEvent),
    Written {
        number: u64,
        /// The error is a sentence.
        result: Result<(), String>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Revision {
    pub(crate) rev: u64,
    /// Services that were set or deleted, in order.
    pub(crate) services: Vec<ServiceName>,
    pub(crate) node: bool,
}

/// What is to be done, in this order.
#[derive(Debug)]
pub(crate) enum Effect {
    Write {
        /// Grows.
        number: u64,
        write: Write,
    },
    /// Bring the history up to date, then show the state to readers.
    Publish {
        /// The history begins anew after this revision.
        restart: Option<u64>,
        /// What is to be noted in it, oldest first.
        revisions: Vec<Revision>,
        published: Arc<Published>,
    },
    View(EndpointsView),
    Count(Counted),
    /// Write to the events of the actor and the log.
    Note {
        warn: bool,
        text: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Counted {
    Revision {
        /// How long after the oldest change that led to it, in milliseconds, if that is known.
        delay_ms: Option<i64>,
    },
    Worked(u64),
    WriteFailed,
}
