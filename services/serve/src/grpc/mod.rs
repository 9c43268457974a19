//! gRPC: message framing for servers that write HTTP/2 themselves, and the server for all others.

mod connection;
pub mod frame;
mod health;
mod server;

pub use connection::{Peer, SEND_BUFFER};
pub use health::GrpcHealth;
pub use server::{DetachedListener, GrpcApi, Listener, serve, serve_ready};
