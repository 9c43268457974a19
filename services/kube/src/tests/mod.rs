//! The client with scripted servers on loopback.

mod connections;
mod credentials;
mod endpoints;
mod requests;
mod script;
mod watches;
pub(crate) mod wire;
