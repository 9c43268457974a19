//! The node's Lease: the heartbeat for the API server.
//!
//! Owns: [`core`] (when to send which request, pure), the record of the Lease, and [`LeaseRenewer`], the actor that
//! makes the requests. In: `NodeChanged` from the watch of the Node, and time. Out: requests on
//! [`keelson_actor_system::cluster::LeaseApi`], [`keelson_actor_system::cluster::JobHealth`], metrics.
//!
//! The algorithm is the kubelet's (`component-helpers/apimachinery/lease`), with these differences, none of which sends
//! the server more requests than the kubelet does:
//!
//! * A renewal is a patch of the renewTime that carries the resourceVersion, and not an update of the whole object.
//! * A conflict at the last try of the first five is followed by one read instead of two.
//! * A Lease without an owner is renewed even if the Node cannot be read. The kubelet loses a try to that.
//! * A Lease of another holder is taken over. The kubelet renews it in the other's name indefinitely.
//! * A renewal that finds no Lease is not tried four more times, and while the Node is gone only the Node is requested:
//!   one request per interval.
//! * What a retry cannot repair (401, 403, an invalid request) is tried once per interval; 429, and 5xx with
//!   `Retry-After`, end the tries until that time has passed, an interval at most.
//! * A second process that renews the Lease is detected, and the agent stands back if the settings say so.
//! * Reads that time out close the connections from the second one on, as renewals do.
//! * A start does not renew a Lease that the agent renewed less than an interval ago.

mod actor;
pub(crate) mod core;
mod metrics;
mod record;

pub use actor::{LeaseRenewer, LeaseRenewerParts, LeaseState, LeaseTick, NodeChanged, WallClock};
pub use core::{Contention, LeasePolicy};
pub use metrics::{ClockStep, LeaseMetrics};
pub use record::LeaseRecord;
