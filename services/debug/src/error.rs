//! Why a debug server could not serve.

/// Why [`serve_grpc`](crate::serve_grpc) or [`serve_http`](crate::serve_http) ended with an error.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The transport failed.
    #[error("the debug API's gRPC server failed")]
    Grpc(#[source] tonic::transport::Error),
    /// The descriptors that reflection serves are broken.
    #[error("cannot serve the descriptors of the debug API by reflection")]
    Reflection(#[source] tonic_reflection::server::Error),
    /// The listener has no local address.
    #[error("cannot read the address of the debug page")]
    LocalAddress(#[source] std::io::Error),
}
