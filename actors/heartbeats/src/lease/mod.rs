//! The node's Lease: the heartbeat that the API server counts.
//!
//! Owns: [`core`] (when to ask what, pure), what of the Lease outlives the process, and [`LeaseRenewer`], the actor
//! that makes the requests. In: `NodeChanged` from the watch of the Node, and time. Out: requests on
//! [`keelson_actor_system::cluster::LeaseApi`], [`keelson_actor_system::cluster::ChoreHealth`], metrics.
//!
//! The algorithm is the kubelet's (`component-helpers/apimachinery/lease`), with these differences, none of which
//! asks the server for more than the kubelet does:
//!
//! * A renewal is a patch of the renewTime that carries the resourceVersion, and not an update of the whole object.
//! * A conflict at the last try of the first five is followed by one read and not by two.
//! * A Lease without an owner is renewed even if the Node cannot be read. The kubelet loses a try to that.
//! * A Lease of another holder is taken over. The kubelet renews it in the other's name forever.
//! * A renewal that finds no Lease does not try four times more, and while the Node is gone only the Node is asked
//!   for: one request in each interval.
//! * What another try cannot repair (401, 403, a request that the server finds wrong) is tried once in each interval;
//!   429, and 5xx with `Retry-After`, end the tries until the server's time has passed, an interval at most.
//! * A second process that renews the Lease is noticed, and left alone with it where the settings say so.
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
