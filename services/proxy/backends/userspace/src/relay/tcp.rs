//! TCP: accepts, connects to an endpoint, copies.
//!
//! Owns: [`accept`]. In: a listening socket, the rule of its frontend. Out: connections to endpoints.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use keelson_proxy::model::Endpoint;
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    task::yield_now,
    time::{sleep, timeout},
};

use super::{
    SessionKind,
    copy::copy_both,
    socket::{Connection, connect_tcp, prepare, reset},
    state::{ListenerState, Watched},
};
use crate::{plan::Decision, proxy_protocol};

/// How long each attempt to connect may take. Source: `EndpointDialTimeouts` of kube-proxy's userspace mode.
pub(super) const CONNECT_TIMEOUTS: [Duration; 4] =
    [Duration::from_millis(250), Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(2)];

/// The same for the endpoint that a client had last: a busy node must not cost it its session.
const REMEMBERED_TIMEOUT: Duration = Duration::from_secs(2);

/// Pause after a failure to accept, such as EMFILE, which would repeat at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections that a listener accepts before others have a turn: after a burst, tens of thousands may wait.
const BATCH: usize = 16;

pub(super) async fn accept(state: Arc<ListenerState>, listener: Watched<TcpListener>) {
    for turn in (0..BATCH).cycle() {
        if turn == 0 {
            yield_now().await;
        }
        let accepted = tokio::select! {
            biased;
            () = state.closed() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            // After a burst thousands of them may wait: none costs a connection to an endpoint.
            Ok((client, _)) if has_ended(&client) => {}
            Ok((client, source)) => match state.shared.count_session(SessionKind::Tcp) {
                Some(count) => {
                    let state = state.clone();
                    tokio::spawn(async move {
                        serve(&state, client, source).await;
                        drop(count);
                    });
                }
                None => reset(&client),
            },
            Err(error) if is_of_client(&error) => {}
            Err(error) => {
                if state.shared.may_warn("accept") {
                    tracing::warn!(place = %state.place, %error, "cannot accept connections to a Service");
                }
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The client ended the connection before it was accepted. Where Linux accepts it, Windows returns an error, and Wine another one.
fn is_of_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, NotConnected};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | NotConnected)
}

/// The client reset the connection while it waited to be accepted.
fn has_ended(client: &TcpStream) -> bool {
    client.take_error().is_ok_and(|error| error.is_some())
}

async fn serve(state: &ListenerState, client: TcpStream, source: SocketAddr) {
    let mut client = Connection::new(client);
    let served = tokio::select! {
        served = relay(state, &client, source) => served,
        () = drained(state) => Err(io::ErrorKind::TimedOut.into()),
    };
    match served {
        Ok(()) => client.end(),
        Err(error) => {
            tracing::debug!(place = %state.place, %source, %error, "connection to a Service ended");
        }
    }
}

/// Completes when connections have had time to end after the frontend is gone, or the proxy stops.
async fn drained(state: &ListenerState) {
    let removed = async {
        state.removed.cancelled().await;
        sleep(state.shared.options.drain_timeout).await;
    };
    tokio::select! {
        () = removed => {}
        () = state.shared.stopped.cancelled() => {}
    }
}

/// An error resets the client.
async fn relay(state: &ListenerState, client: &TcpStream, source: SocketAddr) -> io::Result<()> {
    prepare(client)?;
    let destination = client.local_addr()?;
    let Some(endpoint) = connect(state, source, destination).await? else {
        return hold(state).await;
    };
    let mut endpoint = Connection::new(endpoint);
    if let Some(version) = state.shared.options.proxy_protocol {
        endpoint.write_all(&proxy_protocol::header(version, source, state.place.address)).await?;
    }
    copy_both(client, &endpoint, &state.shared.pipes).await?;
    endpoint.end();
    Ok(())
}

/// Holds a connection that is dropped.
async fn hold(state: &ListenerState) -> io::Result<()> {
    if let Some(_count) = state.shared.count_dropped() {
        tokio::select! {
            () = sleep(state.shared.options.drop_timeout) => {}
            () = state.closed() => {}
        }
    }
    Err(io::ErrorKind::PermissionDenied.into())
}

/// Connects to an endpoint, and to another one if that fails. `None`: the connection is to be dropped.
async fn connect(
    state: &ListenerState,
    source: SocketAddr,
    destination: SocketAddr,
) -> io::Result<Option<TcpStream>> {
    let client = source.ip().to_canonical();
    let mut failed: Vec<Endpoint> = Vec::new();
    let mut last = io::Error::from(io::ErrorKind::ConnectionRefused);
    for limit in CONNECT_TIMEOUTS {
        // The newest rule: endpoints may have changed since the last attempt.
        let rule = state.rule();
        let set = match state.decide(&rule, client, destination.ip().to_canonical()) {
            Decision::Relay(set) => set,
            Decision::Drop => return Ok(None),
            Decision::Reject => return Err(io::ErrorKind::ConnectionRefused.into()),
        };
        let Some(choice) = state.shared.choose(&rule.port, client, set, &failed) else { break };
        let endpoint = choice.endpoint;
        let limit = if choice.is_remembered { REMEMBERED_TIMEOUT } else { limit };
        let address = SocketAddr::new(endpoint.ip, endpoint.port);
        match timeout(limit, connect_tcp(address, state.transparent_source(source))).await {
            Ok(Ok(stream)) => {
                state.shared.remember(&rule.port, client, endpoint);
                return Ok(Some(stream));
            }
            Ok(Err(error)) => last = error,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
        if state.shared.may_warn("connect") {
            tracing::warn!(service_port = %rule.port.name, %endpoint, error = %last, "cannot connect to an endpoint");
        }
        failed.push(endpoint);
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use socket2::SockRef;

    use super::*;

    #[tokio::test]
    async fn a_client_that_has_gone_is_known_when_it_is_accepted() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        for is_reset in [true, false] {
            let client = std::net::TcpStream::connect(at).unwrap();
            if is_reset {
                SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
            }
            let left = (!is_reset).then_some(client);
            let has_gone = match listener.accept().await {
                Ok((accepted, _)) => has_ended(&accepted),
                Err(error) => is_of_client(&error),
            };
            assert_eq!(has_gone, is_reset);
            drop(left);
        }
    }
}
