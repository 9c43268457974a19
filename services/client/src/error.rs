//! Errors of the client.
//!
//! Owns: [`Error`]. None of these ends a [`crate::Client`]: each is reported and followed by a retry.

use std::{error::Error as StdError, io, time::Duration};

use keelson_proto::names::ServiceName;
use tonic::{Code, Status};

use crate::Target;

/// An error of a consumer, of any kind.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// Why an attempt failed. The client retries by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The connection cannot be opened.
    #[error("cannot connect to {target}: {reason}")]
    Connect {
        /// The address.
        target: Target,
        /// The cause, and what to do.
        reason: String,
    },
    /// The server refused, failed, or the connection was closed.
    #[error("{}", describe_status(status, *within))]
    Status {
        /// The status that the server sent, or one that describes the broken connection.
        status: Box<Status>,
        /// Whether it arrived within a state; the incomplete state was discarded.
        within: bool,
    },
    /// The stream ended early.
    #[error("the server ended the stream {0}")]
    Ended(&'static str),
    /// The server paused within a state.
    #[error("the server sent an incomplete state and then nothing for {0:?}; the state was discarded")]
    Stalled(Duration),
    /// The server sent an invalid item.
    #[error("the server sent an invalid state: {0}; it was discarded")]
    Malformed(String),
    /// One Service cannot be decoded.
    #[error("cannot decode Service {name} ({source}); the state was discarded")]
    Undecodable {
        /// Name of the Service.
        name: ServiceName,
        /// The cause.
        source: prost::DecodeError,
    },
    /// The consumer failed to apply a state. It is offered again.
    #[error("cannot apply the state; retrying: {0}")]
    Handler(BoxError),
}

impl Error {
    pub(crate) fn malformed(reason: impl Into<String>) -> Self {
        Self::Malformed(reason.into())
    }

    pub(crate) fn status(status: Status, within: bool) -> Self {
        Self::Status { status: Box::new(status), within }
    }

    pub(crate) fn connect(target: &Target, error: &(dyn StdError + 'static)) -> Self {
        let kind = io_kind(error);
        let reason = match kind {
            Some(io::ErrorKind::NotFound) if target.unix_path().is_some() => {
                "the socket does not exist; check that the agent is running and that the address is one of \
                 its endpoints.listen"
                    .into()
            }
            Some(io::ErrorKind::ConnectionRefused) => {
                "no process is listening; check that the agent is running and that the address is one of its \
                 endpoints.listen"
                    .into()
            }
            Some(io::ErrorKind::PermissionDenied) => {
                "permission denied; run as root or as a member of the socket's group".into()
            }
            _ => chain(error),
        };
        Self::Connect { target: target.clone(), reason }
    }

    /// Whether the server does not know the method that was called.
    pub(crate) fn is_unimplemented(&self) -> bool {
        matches!(self, Self::Status { status, .. } if status.code() == Code::Unimplemented)
    }
}

fn io_kind(error: &(dyn StdError + 'static)) -> Option<io::ErrorKind> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return Some(error.kind());
        }
        next = error.source();
    }
    None
}

/// The text of an error, and what its sources add to it.
fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        let said = error.to_string();
        if !text.ends_with(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        next = error.source();
    }
    text
}

fn describe_status(status: &Status, within: bool) -> String {
    let code = status.code();
    let mut text = match (code, status.message()) {
        (Code::Unimplemented, message) => {
            format!("the server does not serve the Endpoints API; check the target ({message})")
        }
        // A status with a source was made by this client: the connection was closed, or is not HTTP/2.
        _ if status.source().is_some() && within => "the connection was closed".to_owned(),
        _ if status.source().is_some() => {
            "the connection was closed; check that the target serves the Endpoints API".to_owned()
        }
        (_, "") => format!("the server failed: {code}"),
        (_, message) => format!("the server failed: {message} ({code:?})"),
    };
    if let Some(source) = status.source() {
        text.push_str(": ");
        text.push_str(&chain(source));
    }
    if code == Code::OutOfRange {
        text.push_str("; raise --max-msg-size");
    }
    if within {
        text.push_str("; this was in the middle of a state, which was discarded");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_target_and_the_remedy() {
        let target = Target::default();
        let connect = |kind: io::ErrorKind| Error::connect(&target, &io::Error::from(kind)).to_string();
        assert!(
            connect(io::ErrorKind::NotFound)
                .contains("endpoints.sock: the socket does not exist; check that the agent")
        );
        assert!(connect(io::ErrorKind::ConnectionRefused).contains("no process is listening"));
        assert!(connect(io::ErrorKind::PermissionDenied).contains("the socket's group"));
        assert!(connect(io::ErrorKind::TimedOut).ends_with("timed out"));
        let tcp = Error::connect(&"tcp://a:1".parse().unwrap(), &io::Error::from(io::ErrorKind::NotFound));
        assert!(tcp.to_string().starts_with("cannot connect to tcp://a:1: "), "{tcp}");
        assert!(!tcp.to_string().contains("socket"), "{tcp}");
    }

    #[test]
    fn statuses_in_words() {
        let large = Error::status(Status::out_of_range("found 70000000 bytes"), true).to_string();
        assert!(large.contains("70000000 bytes") && large.contains("--max-msg-size"), "{large}");
        assert!(large.ends_with("which was discarded"), "{large}");
        let wrong = Error::status(Status::unimplemented("no such method"), false);
        assert!(wrong.is_unimplemented() && wrong.to_string().contains("check the target"));
        let empty = Error::status(Status::new(Code::Unavailable, ""), false);
        assert_eq!(empty.to_string(), "the server failed: The service is currently unavailable");
        assert!(!empty.is_unimplemented());
    }
}
