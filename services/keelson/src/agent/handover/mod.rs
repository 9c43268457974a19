//! Handover: one agent replaces another without failed calls (decision 0019).
//!
//! Owns: the handover socket beside the CRI socket. In: at the start, an agent that is stopping; at the end, an agent
//! that starts. Out: listening sockets and pulls are passed to the successor, which needs no disk; what cannot be
//! passed (calls that pass through, pulls that run in the runtime) continues in the old process until it ends.
//!
//! * [`take`]: the side of the agent that starts.
//! * [`offer`]: the socket that every agent listens on.
//! * [`relay`]: the side of an agent that has a successor.

pub(super) mod offer;
pub(super) mod relay;
pub(super) mod take;
mod wire;

use std::path::{Path, PathBuf};

/// The name of the handover socket itself: it exists all the time between two agents, so that a third one can wait.
const HANDOVER: &str = "handover";

/// The socket for the successor of the agent that listens at `cri`.
pub(super) fn socket_path(cri: &Path) -> PathBuf {
    let mut path = cri.as_os_str().to_owned();
    path.push(".handover");
    path.into()
}
