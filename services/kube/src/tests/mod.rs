//! The client against scripted servers on loopback.

mod connections;
mod credentials;
mod requests;
mod script;
mod watches;
