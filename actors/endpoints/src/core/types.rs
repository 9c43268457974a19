//! What goes into the core and what comes out of it.

use std::{sync::Arc, time::Duration};

use keelson_actor_system::reports::EndpointsView;

use super::super::{Published, ServiceName, record::Write};

/// The settings the core decides by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointsPolicy {
    /// The name of this node. A state on disk that is for another node is not used.
    pub node_name: String,
    /// Between two revisions while changes keep coming; ten may follow each other at once after a quiet time.
    pub min_interval: Duration,
    /// Whether the sources are asked only once somebody follows.
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

/// What happened, beside what sources say.
#[derive(Debug)]
pub(crate) enum Event {
    /// The time that [`super::Core::next_tick`] asked for has come.
    Tick,
    /// Somebody follows: from now on the sources are asked.
    Followed,
    /// A reader has a revision of an instance that was not made here.
    Later {
        /// The instance.
        instance_id: u64,
        /// The revision.
        rev: u64,
    },
    /// A write ended.
    Written {
        /// Of [`Effect::Write`].
        number: u64,
        /// The error is a sentence.
        result: Result<(), String>,
    },
}

/// What changed at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Revision {
    /// Which.
    pub(crate) rev: u64,
    /// Services that were set or deleted, in order.
    pub(crate) services: Vec<ServiceName>,
    /// Whether the node changed.
    pub(crate) node: bool,
}

/// What is to be done, in this order.
#[derive(Debug)]
pub(crate) enum Effect {
    /// Write, and tell with [`Event::Written`].
    Write {
        /// Grows.
        number: u64,
        /// What.
        write: Write,
    },
    /// Bring the history up to date, then show the state to readers.
    Publish {
        /// The history begins anew after this revision.
        restart: Option<u64>,
        /// What is to be noted in it, oldest first.
        revisions: Vec<Revision>,
        /// The state.
        published: Arc<Published>,
    },
    /// Tell the node's condition.
    View(EndpointsView),
    /// Count.
    Count(Counted),
    /// Write into the note-book and the log.
    Note {
        /// Whether something is wrong.
        warn: bool,
        /// What.
        text: String,
    },
}

/// Something that is counted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Counted {
    /// A revision was published.
    Revision {
        /// How long after the oldest change that led to it, in milliseconds, if that is known.
        delay_ms: Option<i64>,
    },
    /// So many Services were worked out.
    Worked(u64),
    /// A write failed.
    WriteFailed,
}
