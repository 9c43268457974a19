//! Verbs between the RuntimeClient, its subscriber and people.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use keelson_actor_system::{file_system::FileSystem, verbs};

use super::types::{Capabilities, Outcome, Progress, RuntimePull};
use crate::request::{PullCall, PullId};

verbs! {
    /// Ask the runtime for an image.
    Pull => () {
        /// The pull that [`PullFinished`] and [`PullProgress`] will name.
        pull: PullId,
        /// Counted from 1 for each pull.
        attempt: u32,
        /// Image, credentials and lease.
        request: RuntimePull,
        /// How long its first caller has waited already, for the kubelet's metric.
        waited: Duration,
        /// Its image is present, so it is not counted: tell at once when it turns out to be a download.
        present: bool,
    }
    /// Stop an attempt; no [`PullFinished`] follows.
    CancelPull => () {
        /// As in [`Pull`].
        pull: PullId,
        /// As in [`Pull`]: a later attempt goes on.
        attempt: u32,
    }
    /// Stop every attempt; no [`PullFinished`] follows. A restarted subscriber begins with this.
    CancelAll => () {}
    /// Ask whether the image is there; [`PullPresence`] answers.
    CheckPresent => () {
        /// The pull that the answer will name.
        pull: PullId,
        /// Names the image and the runtime handler.
        call: Arc<PullCall>,
    }
    /// Delete a lease. A pull that needs it next waits for the deletion.
    DropLease => () {
        /// Its ID in containerd.
        lease: String,
        /// The runtime frees the space at once.
        collect: bool,
    }
    /// Delete all leases of this agent but these and those in use.
    ReapLeases => () {
        /// IDs of the leases that stay.
        keep: BTreeSet<String>,
    }
    /// Probe the runtime now, not at the next interval.
    Probe => () {}
    /// What is known of the runtime, as JSON for people.
    RuntimeState => String {}
    /// To the subscriber: an attempt ended.
    PullFinished => () {
        /// As in [`Pull`].
        pull: PullId,
        /// As in [`Pull`].
        attempt: u32,
        /// The runtime's reply, or that the call was lost.
        outcome: Outcome,
    }
    /// To the subscriber: whether the image is there.
    PullPresence => () {
        /// As in [`CheckPresent`].
        pull: PullId,
        /// `None`: the runtime could not say.
        present: Option<bool>,
    }
    /// To the subscriber: how far a pull is.
    PullProgress => () {
        /// As in [`Pull`].
        pull: PullId,
        /// Bytes, layers and phase at the last reading.
        progress: Progress,
    }
    /// To the subscriber: the runtime came or went.
    RuntimeChanged => () {
        /// What it can do, or why it is away.
        state: Result<Capabilities, String>,
    }
    /// Ask how many bytes a lease holds.
    MeasureLease => () {
        /// Its ID in containerd.
        lease: String,
    }
    /// Ask how much of the image file system is free.
    CheckImageFs => () {}
    /// Give these leases a new expiry where theirs is near.
    RenewLeases => () {
        /// Their IDs in containerd.
        leases: Vec<String>,
    }
    /// To the subscriber: how many bytes a lease holds.
    LeaseMeasured => () {
        /// Its ID in containerd.
        lease: String,
        /// `None`: the runtime could not say.
        bytes: Option<u64>,
    }
    /// To the subscriber: the size of the image file system.
    ImageFsRead => () {
        /// `None`: not known.
        image_fs: Option<FileSystem>,
    }
    /// From an attempt's task to the RuntimeClient itself.
    CallEnded => () {
        /// As in [`Pull`].
        pull: PullId,
        /// As in [`Pull`].
        attempt: u32,
        /// The connection broke before the runtime answered.
        lost: bool,
    }
}
