//! Heartbeats: the node's Lease and the status of the Node.
//!
//! Owns: the LeaseRenewer ([`lease`]), the StatusReporter ([`status`]), and the trait [`host::Host`] that reads the
//! machine. In: the watched Node; reports of the container runtime, of image pulls and of service endpoints; conditions
//! of other processes; readings of the host. Out: requests on [`LeaseApi`](keelson_actor_system::cluster::LeaseApi) and
//! [`NodeApi`](keelson_actor_system::cluster::NodeApi), which a service implements. No sockets are opened here.

pub mod host;
pub mod lease;
pub mod status;

#[cfg(test)]
mod actor_tests;
