//! Errors of servers.

/// A server cannot serve. Errors of single connections are not among these.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The descriptors that reflection serves are broken.
    #[error("cannot serve the descriptors of the API by reflection")]
    Reflection(#[source] tonic_reflection::server::Error),
    #[error("cannot read the address of the HTTP server")]
    LocalAddress(#[source] std::io::Error),
}
