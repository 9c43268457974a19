//! Options of the client.
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

/// Options of the client. Every field has a default.
///
/// ```
/// use keelson_client::Options;
/// let options = Options { target: "tcp://127.0.0.1:12345".parse()?, ..Options::default() };
/// # Ok::<(), keelson_client::TargetError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Address of the server.
    pub target: Target,
    /// Which API [`crate::Client::run`] uses. [`crate::Client::next`] always uses `Next`.
    pub api: Api,
    /// With `rev`: the state that the consumer has, of a [`crate::Position`]; 0: none. The first state is then a later
    /// one, and [`crate::Client::run`] may deliver only what has changed since. For consumers that kept their own
    /// state, which they name with [`crate::Handlers::held`]; a consumer that starts empty leaves both at 0.
    pub instance_id: u64,
    /// See `instance_id`.
    pub rev: u64,
    /// Maximum pause before a retry. The first pause is a sixteenth of it, and each further one twice as long. Each is
    /// shortened at random by up to half, so that many clients do not reconnect at once. Default: 1 s.
    pub error_delay: Duration,
    /// Maximum size of a received message in bytes. A message is one Service with its endpoints. Default: 64 MiB, room
    /// for several hundred thousand endpoints in one Service.
    pub max_msg_size: usize,
    /// Receive only endpoints that meet every condition that is true here. Services are always all sent.
    pub required_endpoint_conditions: Option<EndpointConditions>,
    /// Receive only Services whose label `service.kubernetes.io/service-proxy-name` has this value; empty: those without
    /// the label. An agent older than this field sends Services without the label in any case; each Service has its
    /// value in `service_proxy_name`.
    pub service_proxy_name: String,
    /// Interval of HTTP/2 pings to a silent server, and maximum time for the answer, at most 10 s. Zero: no pings, for
    /// servers that reject frequent ones (grpc-go requires 5 min in between by default). Default: 20 s.
    pub keep_alive: Duration,
    /// Maximum pause of a server within a state before the connection is closed. Between states it may be silent
    /// indefinitely. Default: 30 s.
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
            service_proxy_name: String::new(),
            keep_alive: Duration::from_secs(20),
            stall_timeout: Duration::from_secs(30),
        }
    }
}
