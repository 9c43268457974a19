//! Connections of the commands to the agent or a proxy.
//!
//! Owns: the address of the debug socket, and the error texts of refused requests. In: [`AgentArgs`]. Out: clients of
//! `keelson.debug.v1`, `keelson.node.v1` and of the service Inspection of `keelson.endpoints.v1`.

use anyhow::Context as _;
use keelson_config::SocketSpec;
use keelson_proto::{endpoints::inspection_client::InspectionClient, node::node_client::NodeClient};
use tonic::{Code, Request, Status, transport::Channel};

use super::args::AgentArgs;
pub(super) use crate::debug_client::{Client, ConnectError, Peer, channel, connect};
use crate::{
    debug_client::{ANSWER_TIMEOUT, MAX_MESSAGE},
    settings::SettingsArgs,
};

/// The socket of the arguments or of the settings.
pub(super) fn socket(args: &AgentArgs) -> anyhow::Result<SocketSpec> {
    if let Some(socket) = &args.socket {
        return Ok(socket.clone());
    }
    let settings = SettingsArgs { config: args.config.clone(), sets: Vec::new(), feature_gates: Vec::new() };
    let loaded = settings
        .load_agent()
        .context("cannot read the address of the debug socket from the settings; pass it with --socket")?;
    Ok(loaded.settings.debug.listen.clone())
}

/// Determines the socket and connects.
pub(super) async fn open(args: &AgentArgs) -> anyhow::Result<Client> {
    Ok(connect(&socket(args)?).await?)
}

/// As [`open`], for heartbeats and node conditions.
pub(super) async fn open_node(args: &AgentArgs) -> anyhow::Result<NodeClient<Channel>> {
    Ok(NodeClient::new(channel(Peer::Agent, &socket(args)?).await?))
}

/// As [`open`], for service endpoints.
pub(super) async fn open_inspection(args: &AgentArgs) -> anyhow::Result<InspectionClient<Channel>> {
    Ok(InspectionClient::new(channel(Peer::Agent, &socket(args)?).await?)
        .max_decoding_message_size(MAX_MESSAGE))
}

/// A request with a timeout.
pub(super) fn request<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(ANSWER_TIMEOUT);
    request
}

/// The text of an error status.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Refused(String);

impl From<Status> for Refused {
    fn from(status: Status) -> Self {
        Self::from_peer(Peer::Agent, status)
    }
}

impl Refused {
    pub(super) fn from_peer(peer: Peer, status: Status) -> Self {
        let message = super::format::one_line(status.message());
        Self(match status.code() {
            Code::NotFound | Code::InvalidArgument | Code::FailedPrecondition | Code::PermissionDenied => {
                message
            }
            Code::ResourceExhausted => format!("the {peer} is busy, retry later: {message}"),
            Code::Unavailable => format!("the {peer} cannot answer yet: {message}"),
            Code::DeadlineExceeded | Code::Cancelled => {
                format!("the {peer} did not answer within {} s", ANSWER_TIMEOUT.as_secs())
            }
            Code::Unimplemented => {
                format!(
                    "the {peer} is older than this command and does not support this request; upgrade the {peer}"
                )
            }
            code => format!("the {peer} failed to answer ({code:?}): {message}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_in_words() {
        let message = |status: Status| Refused::from(status).to_string();
        assert_eq!(message(Status::not_found("actor \"x\" does not exist")), "actor \"x\" does not exist");
        assert_eq!(message(Status::permission_denied("Ready is the agent's")), "Ready is the agent's");
        assert_eq!(message(Status::resource_exhausted("full")), "the agent is busy, retry later: full");
        assert_eq!(message(Status::internal("a\x1bb")), "the agent failed to answer (Internal): a\u{fffd}b");
        let of_proxy = Refused::from_peer(Peer::Proxy, Status::unavailable("none yet")).to_string();
        assert_eq!(of_proxy, "the proxy cannot answer yet: none yet");
    }
}
