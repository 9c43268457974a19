//! The wire types of Keelson, generated from the files in `proto/proto/`.
//!
//! Owns: message and service types of the CRI part that the agent reads, of the containerd services that keep and
//! report a pull's progress, and of the agent's own APIs. In: nothing. Out: types, clients, servers, and the
//! descriptor set for gRPC reflection. No I/O.

#![deny(missing_docs)] // Other projects link this crate.

pub mod backoff;
pub mod family;
mod json;
pub mod names;

/// The part of the CRI (package `runtime.v1`) that the agent reads or calls.
pub mod cri {
    #![allow(missing_docs, clippy::all, unreachable_pub, rustdoc::all)]
    tonic::include_proto!("runtime.v1");
}

/// The parts of containerd's API that pulls use.
pub mod containerd {
    /// Leases protect content and ingests from garbage collection.
    pub mod leases {
        #![allow(missing_docs, clippy::all, unreachable_pub, rustdoc::all)]
        tonic::include_proto!("containerd.services.leases.v1");
    }
    /// Content lists blobs and ingests.
    pub mod content {
        #![allow(missing_docs, clippy::all, unreachable_pub, rustdoc::all)]
        tonic::include_proto!("containerd.services.content.v1");
    }
    /// Snapshots reports the size of unpacked layers.
    pub mod snapshots {
        #![allow(missing_docs, clippy::all, unreachable_pub, rustdoc::all)]
        tonic::include_proto!("containerd.services.snapshots.v1");
    }
}

/// The agent's debug API.
pub mod debug {
    #![allow(missing_docs, clippy::all, unreachable_pub, rustdoc::all)]
    tonic::include_proto!("keelson.debug.v1");
}

/// Heartbeats, and the node conditions that other processes report.
pub mod node {
    #![allow(missing_docs, clippy::all, unreachable_pub, rustdoc::all)]
    tonic::include_proto!("keelson.node.v1");
}

/// The endpoints of Services on this node, as full states.
pub mod localnetv1 {
    #![allow(missing_docs, clippy::all, unreachable_pub, rustdoc::all)]
    tonic::include_proto!("localnetv1");
}

// Generated code refers to other packages by relative module paths.
mod keelson {
    pub(crate) mod endpoints {
        pub mod v1 {
            #![allow(missing_docs, clippy::all, unreachable_pub, rustdoc::all)]
            tonic::include_proto!("keelson.endpoints.v1");
        }
    }
}

/// The endpoints of Services on this node, as deltas.
pub use keelson::endpoints::v1 as endpoints;

/// Inspection of a proxy.
pub mod proxy {
    #![allow(missing_docs, clippy::all, unreachable_pub, rustdoc::all)]
    tonic::include_proto!("keelson.proxy.v1");
}

/// The fields of Kubernetes objects that Services on a node depend on, for protobuf and JSON.
pub mod kubernetes {
    #![allow(missing_docs, clippy::all, unreachable_pub, rustdoc::all)]
    tonic::include_proto!("keelson.kubernetes");
}

/// The encoded `FileDescriptorSet` of every file in `proto/proto/`, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The annotation that passes the limit as a pull option: a whole number, 0 for no limit.
pub const PULL_OPTION_ANNOTATION: &str = "keelson.dev/max-parallel-image-pulls";

/// The response header in which a CRI server lists the pull options it supports.
pub const PULL_OPTIONS_HEADER: &str = "keelson-pull-options";

/// The value of [`PULL_OPTIONS_HEADER`] for [`PULL_OPTION_ANNOTATION`].
pub const PULL_OPTION_MAX_PARALLEL: &str = "max-parallel-image-pulls";

/// The time in the form of the APIs: milliseconds since the Unix epoch. 0 on a machine whose clock is before it.
#[must_use]
pub fn unix_ms() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// The gRPC status codes, for crates that do not use gRPC themselves.
pub use tonic::Code;
