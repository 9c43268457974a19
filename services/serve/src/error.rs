//! Why a server ended with an error.

/// A server cannot serve. Trouble with single connections is not among these.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The descriptors that reflection serves are broken.
    #[error("cannot serve the descriptors of the API by reflection")]
    Reflection(#[source] tonic_reflection::server::Error),
    /// The listener has no local address.
    #[error("cannot read the address of the HTTP server")]
    LocalAddress(#[source] std::io::Error),
}
