//! Client of the Endpoints API of a Keelson agent.
//!
//! Any process on a node can read the Services as they apply to that node: it connects to the agent's socket with this
//! library, and is called for every Service that is set or deleted, state by state. A state is the set of all Services
//! at one moment; it is delivered in full or not at all. If the agent restarts, is absent or hangs, the client waits,
//! reconnects and continues; the consumer is called for real changes only.
//!
//! ```no_run
//! use keelson_client::{BoxError, Handlers, Options, Position, ServiceEndpoints, ServiceName};
//!
//! struct Print;
//!
//! impl Handlers for Print {
//!     fn set(&mut self, name: &ServiceName, service: ServiceEndpoints) {
//!         println!("{name}: {} endpoints", service.endpoints.len());
//!     }
//!     fn delete(&mut self, name: &ServiceName) {
//!         println!("{name} is gone");
//!     }
//!     async fn sync(&mut self, position: &Position) -> Result<(), BoxError> {
//!         Ok(println!("-- revision {}", position.rev))
//!     }
//! }
//!
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() -> std::io::Result<()> {
//!     keelson_client::run(Options::default(), &mut Print).await.map(|_| ())
//! }
//! ```
//!
//! See also [`Client::next`] for full states one by one, [`DiffStore`] to compare such states, [`EndpointsArgs`] for
//! the flags of a program that uses clap (feature `clap`, on by default), [`Reporter`] for backends that report their
//! status to the agent, and two complete programs in the folder `examples`.
//!
//! Owns: connections, retries, comparison. In: [`Options`]. Out: calls of [`Handlers`], or [`State`]s; errors to
//! `tracing` and [`Client::on_error`].

#![deny(missing_docs)] // Other projects link this crate.

#[cfg(feature = "clap")]
mod args;
mod client;
mod connection;
mod error;
mod handlers;
mod options;
mod report;
mod retry;
mod state;
mod store;
mod target;
mod wire;

use std::io;

#[cfg(feature = "clap")]
pub use args::EndpointsArgs;
pub use client::Client;
pub use error::{BoxError, Error};
pub use handlers::Handlers;
pub use options::{Api, Options};
pub use report::{Reported, Reporter, report};
pub use retry::ErrorReport;
pub use state::{Position, RawService, ServiceName, State};
pub use store::DiffStore;
pub use target::{DEFAULT_TARGET, Target, TargetError};

/// The status report of a backend; the fields are described in `endpoints.proto`. Fields that the agent sets are left
/// at their defaults.
pub use keelson_proto::endpoints::Backend;
/// The messages for Services and the node. The fields are described in `localnetv1.proto`.
pub use keelson_proto::localnetv1;
pub use keelson_proto::localnetv1::{NodeInfo, ServiceEndpoints};
/// The token that cancels a [`Client`].
pub use tokio_util::sync::CancellationToken;

/// Reports every state to a consumer until the process receives SIGINT or SIGTERM; returns the last position. See
/// [`Client`] for more control.
///
/// # Errors
/// The signal handlers cannot be installed. Nothing else ends it.
pub async fn run<S>(options: Options, handlers: &mut impl Handlers<S>) -> io::Result<Position>
where
    S: From<ServiceEndpoints> + Send,
{
    let mut client = Client::new(options);
    client.cancel_on_signals()?;
    Ok(client.run(handlers).await)
}
