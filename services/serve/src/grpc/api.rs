//! What a gRPC server serves.

#[derive(Debug, Clone, Copy)]
pub struct GrpcApi {
    /// For the log and for clients that do not use HTTP/2: `Endpoints API`.
    pub name: &'static str,
    /// Full names of the services, as reflection lists them.
    pub services: &'static [&'static str],
    /// Maximum number of connections at each listener. One takes a file descriptor and a few kilobytes.
    pub connections: usize,
    /// Maximum number of concurrent calls on one connection.
    pub calls: u32,
}
