//! gRPC: message framing for servers that write HTTP/2 themselves, and the server for all others.

mod api;
mod connection;
pub mod frame;
mod health;
mod server;

pub use api::GrpcApi;
pub use connection::{Peer, SEND_BUFFER};
pub use health::GrpcHealth;
pub use server::{DetachedListener, Listener, serve, serve_ready};
