//! How endpoints are followed.
//!
//! Owns: [`Options`] and [`Api`]. In and out: plain values.

use std::time::Duration;

use keelson_proto::localnetv1::EndpointConditions;

use crate::Target;

/// The API by which [`crate::Client::run`] reads states. Consumers notice no difference except in cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Api {
    /// Receive deltas (`keelson.endpoints.v1.Endpoints/Watch`); falls back to `Next` if the server does not support it.
    #[default]
    Watch,
    /// Receive full states (`localnetv1.Endpoints/Next`) and compare them in the client.
    Next,
}

/// How endpoints are followed. Every field has a default.
///
/// ```
/// use keelson_client::Options;
/// let options = Options { target: "tcp://127.0.0.1:12345".parse()?, ..Options::default() };
/// # Ok::<(), keelson_client::TargetError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Where the endpoints are served.
    pub target: Target,
    /// Which API [`crate::Client::run`] uses. [`crate::Client::next`] always uses `Next`.
    pub api: Api,
    /// With `rev`: the state that is known already, of a [`crate::Position`]; 0: none. The first state is then
    /// one after it. What [`crate::Client::run`] delivers at first may be nothing but what has changed since, so
    /// this is for consumers that kept their own state, which they name by [`crate::Handlers::held`]; one that starts empty
    /// leaves both at 0.
    pub instance_id: u64,
    /// See `instance_id`.
    pub rev: u64,
    /// The longest pause before the next attempt when something failed. The first pause is a sixteenth of it, each
    /// further one twice as long, and each is shortened at random by up to half, so that many clients do not
    /// come at once. Default: 1 s.
    pub error_delay: Duration,
    /// The largest message that is accepted, in bytes. A message is one Service with its endpoints. Default: 64 MiB,
    /// room for several hundred thousand endpoints in one Service.
    pub max_msg_size: usize,
    /// Only endpoints for which every condition that is true here is true are sent. Services are always all sent.
    pub required_endpoint_conditions: Option<EndpointConditions>,
    /// How often a silent server is asked by an HTTP/2 ping whether it is still there; it has as long to answer, but no
    /// longer than 10 s. Zero: never, for servers that do not like to be asked (those of grpc-go want 5 min in between
    /// unless told otherwise). Default: 20 s.
    pub keep_alive: Duration,
    /// How long a server may pause in the middle of a state before the connection is given up. Between states it may be
    /// silent for ever. Default: 30 s.
    pub stall_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            target: Target::default(),
            api: Api::default(),
            instance_id: 0,
            rev: 0,
            error_delay: Duration::from_secs(1),
            max_msg_size: 64 * 1024 * 1024,
            required_endpoint_conditions: None,
            keep_alive: Duration::from_secs(20),
            stall_timeout: Duration::from_secs(30),
        }
    }
}
