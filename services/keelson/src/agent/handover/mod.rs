//! One agent replaces another, and no caller notices (decision 0019).
//!
//! Owns: the hand-over socket beside the CRI socket. In: at the start, an agent that is stopping; at the end, an agent
//! that starts. Out: listening sockets and pulls change hands, so that no disk is needed for it; what cannot change
//! hands (calls that pass through, pulls that the runtime works on) goes on in the old process until it ends.
//!
//! * [`take`]: the side of the agent that starts.
//! * [`offer`]: the socket that every agent listens on.
//! * [`relay`]: what an agent does once it has a successor.

pub(super) mod offer;
pub(super) mod relay;
pub(super) mod take;
mod wire;

use std::path::{Path, PathBuf};

/// Names of the sockets that change hands.
pub(super) const CRI: &str = "cri";
pub(super) const DEBUG: &str = "debug";
/// The hand-over socket itself: it never vanishes between two agents, so that a third one waits for its turn.
const HANDOVER: &str = "handover";

/// Where the agent that listens at `cri` is reached by its successor.
pub(super) fn socket_path(cri: &Path) -> PathBuf {
    let mut path = cri.as_os_str().to_owned();
    path.push(".handover");
    path.into()
}
