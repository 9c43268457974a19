//! UDP flows that still go to endpoints which serve no more.
//!
//! Owns: which flows are stale ([`UdpFrontends`]), and the search for them and their deletion in the kernel
//! ([`clean`]). In: the UDP service ports with all their serving endpoints. Out: deleted conntrack entries; a client's next
//! packet is translated anew.
//!
//! TCP and SCTP notice a dead endpoint by themselves; a UDP flow goes on for as long as its client sends. Flows of service
//! ports without a serving endpoint are left alone until there is one again, and so are those of deleted Services: there is
//! nothing better for them.

mod error;
mod frontends;
mod kernel;
mod settings;
#[cfg(test)]
mod tests;
mod wire;

use std::net::IpAddr;

pub use error::ConntrackError;
pub use frontends::{UdpFrontend, UdpFrontends};
pub use kernel::{Conntrack, Dump};
pub use settings::{ConntrackOptions, ProcSys, Setting, Sysctls, Wanted, apply};

use crate::model::Family;

/// One direction of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tuple {
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Source port.
    pub source_port: u16,
    /// Destination port.
    pub destination_port: u16,
    /// The zone of this direction, if it has one of its own (CTA_TUPLE_ZONE).
    pub zone: Option<u16>,
}

/// An entry of conntrack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flow {
    /// The protocol's number in IP headers.
    pub protocol: u8,
    /// As the client sent it.
    pub original: Tuple,
    /// As answers come: from whom the flow was translated to.
    pub reply: Tuple,
    /// Its zone, if that is not the default one (CTA_ZONE).
    pub zone: Option<u16>,
    /// By which the kernel tells it from a later one with the same tuples.
    pub id: Option<u32>,
}

/// What [`clean`] did.
#[derive(Debug, Default)]
pub struct Cleaned {
    /// Entries that were deleted.
    pub deleted: u64,
    /// Entries that could not be.
    pub failed: u64,
    /// Why the first of them could not.
    pub error: Option<ConntrackError>,
    /// The list was incomplete each time it was asked for; what it held was used.
    pub interrupted: bool,
}

/// Deletes the stale flows of a family. Blocks: the time is in proportion to the UDP flows that there are.
///
/// # Errors
/// The kernel does not list its flows. A flow that cannot be deleted is no error here: see [`Cleaned`].
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
            // Gone by itself.
            Ok(false) => {}
            Err(error) => {
                cleaned.failed += 1;
                cleaned.error.get_or_insert(error);
            }
        }
    }
    Ok(cleaned)
}
