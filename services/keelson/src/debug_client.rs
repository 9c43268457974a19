//! Connections to the debug socket of the agent or of a proxy.
//!
//! Owns: the connection and its error texts. In: the address of the socket. Out: clients of `keelson.debug.v1`;
//! connections for other services.

use std::{
    fmt, io,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use keelson_config::SocketSpec;
use keelson_proto::debug::debug_client::DebugClient;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

/// Timeout of a single answer.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Lists of ten thousand queued pulls or Services exceed gRPC's default.
pub(crate) const MAX_MESSAGE: usize = 64 * 1024 * 1024;

pub(crate) type Client = DebugClient<Channel>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// `keelson agent`.
    Agent,
    /// `keelson proxy`.
    Proxy,
}

impl Peer {
    const fn unit(self) -> &'static str {
        match self {
            Self::Agent => "keelson",
            Self::Proxy => "keelson-proxy",
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Agent => "agent",
            Self::Proxy => "proxy",
        })
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error(
        "cannot connect to the {peer} at {socket}: {reason}; start it (systemctl status {}), or pass its \
         debug socket with --socket", peer.unit()
    )]
    NotRunning { peer: Peer, socket: SocketSpec, reason: &'static str },
    #[error(
        "cannot open {socket}: permission denied; run as root or as a member of the socket's group \
         (keelson-inspect for debug.sock)"
    )]
    Denied { socket: SocketSpec },
    #[error("cannot open {socket}")]
    Other {
        socket: SocketSpec,
        #[source]
        source: io::Error,
    },
    /// A process listens, but does not speak gRPC.
    #[error("the process that listens on {socket} does not answer as a Keelson {peer}")]
    NotOurs {
        peer: Peer,
        socket: SocketSpec,
        #[source]
        source: tonic::transport::Error,
    },
}

impl ConnectError {
    fn new(peer: Peer, socket: &SocketSpec, error: io::Error) -> Self {
        let socket = socket.clone();
        match error.kind() {
            io::ErrorKind::NotFound => Self::NotRunning { peer, socket, reason: "the socket does not exist" },
            io::ErrorKind::ConnectionRefused => {
                let reason = match peer {
                    Peer::Agent => "no process is listening (the socket is left from an agent that exited)",
                    Peer::Proxy => "no process is listening (the socket is left from a proxy that exited)",
                };
                Self::NotRunning { peer, socket, reason }
            }
            io::ErrorKind::PermissionDenied => Self::Denied { socket },
            _ => Self::Other { socket, source: error },
        }
    }

    pub(crate) fn is_retryable(&self) -> bool {
        !matches!(self, Self::Denied { .. })
    }
}

/// Connects once; a connection that ends is not reconnected implicitly.
pub(crate) async fn connect(socket: &SocketSpec) -> Result<Client, ConnectError> {
    Ok(DebugClient::new(channel(Peer::Agent, socket).await?).max_decoding_message_size(MAX_MESSAGE))
}

/// As [`connect`], for any client.
pub(crate) async fn channel(peer: Peer, socket: &SocketSpec) -> Result<Channel, ConnectError> {
    let path = PathBuf::from(socket.path());
    let stream = UnixStream::connect(&path).await.map_err(|error| ConnectError::new(peer, socket, error))?;
    let once = Mutex::new(Some(TokioIo::new(stream)));
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let stream = once.lock().unwrap_or_else(PoisonError::into_inner).take();
        std::future::ready(stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)))
    });
    let endpoint = Endpoint::from_static("http://localhost")
        .connect_timeout(ANSWER_TIMEOUT)
        .http2_keep_alive_interval(Duration::from_secs(15))
        .keep_alive_timeout(Duration::from_secs(15))
        .keep_alive_while_idle(true);
    let channel = endpoint.connect_with_connector(connector).await;
    channel.map_err(|source| ConnectError::NotOurs { peer, socket: socket.clone(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(path: &std::path::Path) -> SocketSpec {
        SocketSpec::parse(&format!("unix://{}", path.display())).unwrap()
    }

    #[tokio::test]
    async fn errors_name_the_socket_and_what_to_do() {
        let folder = std::env::temp_dir().join(format!("keelson-cli-client-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let missing = connect(&spec(&folder.join("none.sock"))).await.unwrap_err();
        assert!(missing.to_string().contains("none.sock: the socket does not exist; start it"), "{missing}");
        assert!(missing.is_retryable());

        let stale = folder.join("stale.sock");
        drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
        let stale = connect(&spec(&stale)).await.unwrap_err();
        assert!(stale.to_string().contains("no process is listening"), "{stale}");

        let denied =
            ConnectError::new(Peer::Agent, &spec(&folder.join("x")), io::ErrorKind::PermissionDenied.into());
        assert!(denied.to_string().contains("socket's group"), "{denied}");
        assert!(!denied.is_retryable());
        let proxy = channel(Peer::Proxy, &spec(&folder.join("none.sock"))).await.unwrap_err();
        assert!(proxy.to_string().starts_with("cannot connect to the proxy at "), "{proxy}");
        assert!(proxy.to_string().contains("systemctl status keelson-proxy"), "{proxy}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
