//! Deletes UDP flows to endpoints that no longer serve, and counts translated ones.
//!
//! Owns: which flows are stale ([`UdpFrontends`]), and their search and deletion in the kernel ([`clean`]). In: the UDP
//! service ports with all their serving endpoints. Out: deleted conntrack entries; a client's next packet is translated
//! anew.
//!
//! TCP and SCTP detect a dead endpoint themselves; a UDP flow continues for as long as its client sends. Flows of
//! service ports without a serving endpoint are kept until there is one again, and flows of deleted Services are kept:
//! there is no better endpoint for them.

#[cfg(unix)]
mod error;
mod frontends;
#[cfg(unix)]
mod kernel;
mod settings;
#[cfg(test)]
mod tests;
#[cfg(unix)]
mod wire;

use std::net::IpAddr;

#[cfg(unix)]
pub use error::ConntrackError;
pub use frontends::{UdpFrontend, UdpFrontends};
#[cfg(unix)]
pub use kernel::{Conntrack, Dump};
pub use settings::{ConntrackOptions, ProcSys, Setting, Sysctls, WantedSysctl, apply};

use ipnet::IpNet;

#[cfg(unix)]
use crate::model::Family;
use crate::model::Protocol;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tuple {
    pub source: IpAddr,
    pub destination: IpAddr,
    pub source_port: u16,
    pub destination_port: u16,
    /// The zone of this direction, if it has one of its own (CTA_TUPLE_ZONE).
    pub zone: Option<u16>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flow {
    /// Number of the protocol in IP headers.
    pub protocol: u8,
    /// As the client sent it.
    pub original: Tuple,
    /// As replies come: the source is the endpoint.
    pub reply: Tuple,
    /// Its zone, if that is not the default one (CTA_ZONE).
    pub zone: Option<u16>,
    /// Distinguishes the entry from a later one with the same tuples.
    pub id: Option<u32>,
}

impl Flow {
    /// Whether it is a translated flow of TCP or UDP between addresses in this network, whose replies go to the client itself.
    #[must_use]
    pub fn is_translated_between(&self, pods: IpNet) -> bool {
        let is_known = [Protocol::Tcp, Protocol::Udp].map(Protocol::number).contains(&self.protocol);
        is_known
            && self.original.destination != self.reply.source
            && self.original.source == self.reply.destination
            && pods.contains(&self.original.source)
            && pods.contains(&self.reply.source)
    }
}

/// Number of flows that [`Flow::is_translated_between`] finds; at least 1 if every listing was interrupted. Blocks: the time is in
/// proportion to the number of all flows.
///
/// # Errors
/// The kernel does not list its flows.
#[cfg(unix)]
pub fn translated_between(family: Family, pods: IpNet) -> Result<usize, ConntrackError> {
    let dump = Conntrack::open()?.dump_all(family, |flow| flow.is_translated_between(pods))?;
    Ok(dump.flows.len().max(usize::from(dump.interrupted)))
}

#[cfg(unix)]
#[derive(Debug, Default)]
pub struct Cleaned {
    pub deleted: u64,
    /// Number of entries that could not be deleted.
    pub failed: u64,
    /// The first of these errors.
    pub error: Option<ConntrackError>,
    /// Every listing was interrupted; what it returned was used.
    pub interrupted: bool,
}

/// Deletes the stale flows of a family. Blocks: the time is in proportion to the number of UDP flows.
///
/// # Errors
/// The kernel does not list its flows. A flow that cannot be deleted is no error here: see [`Cleaned`].
#[cfg(unix)]
pub fn clean(family: Family, frontends: &UdpFrontends) -> Result<Cleaned, ConntrackError> {
    let mut cleaned = Cleaned::default();
    if frontends.is_empty() {
        return Ok(cleaned);
    }
    let mut conntrack = Conntrack::open()?;
    let dump = conntrack.dump(family, |flow| frontends.is_stale(flow))?;
    cleaned.interrupted = dump.interrupted;
    for flow in &dump.flows {
        match conntrack.delete(flow) {
            Ok(true) => {
                tracing::debug!(?flow, "stale UDP flow deleted");
                cleaned.deleted += 1;
            }
            // The flow ended in the meantime.
            Ok(false) => {}
            Err(error) => {
                cleaned.failed += 1;
                cleaned.error.get_or_insert(error);
            }
        }
    }
    Ok(cleaned)
}
