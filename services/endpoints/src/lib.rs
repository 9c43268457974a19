//! Serves what Services mean on this node, and reads them from manifests.

pub mod files;
pub mod server;
