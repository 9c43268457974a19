//! One connection to a server.
//!
//! Owns: how it is opened, the calls of both APIs, and the rule that a state is complete or discarded. In: [`Options`],
//! positions. Out: [`State`]s of `Next`, [`Batch`]es of `Watch`, or an error.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use keelson_proto::{
    endpoints::{Backend, WatchRequest},
    localnetv1::{EndpointConditions, NextFilter, NodeInfo},
};
use prost::Message;
use tokio::time::timeout;
use tonic::{
    Request, Status, Streaming,
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};

use crate::{
    Error, Options, Position, ServiceName, State,
    store::Batch,
    wire::{NextItem, RawCodec, WatchItem},
};

const NEXT: &str = "/localnetv1.Endpoints/Next";
const REPORT: &str = "/keelson.endpoints.v1.Endpoints/Report";
const WATCH: &str = "/keelson.endpoints.v1.Endpoints/Watch";
/// Maximum time until the connection is accepted.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time until a ping is answered; never longer than the ping interval.
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// Flow-control window of a stream and of the connection, in bytes: a state of 10,000 Services is sent at once.
const STREAM_WINDOW: u32 = 8 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// Not usable after the first error.
#[derive(Debug)]
pub(crate) struct Connection {
    channel: Channel,
    max_msg_size: usize,
    stall_timeout: Duration,
    required: Option<EndpointConditions>,
    service_proxy_name: String,
}

impl Connection {
    pub(crate) async fn open(options: &Options) -> Result<Self, Error> {
        let target = &options.target;
        let fault = |error: tonic::transport::Error| Error::connect(target, &error);
        let mut endpoint = Endpoint::from_shared(target.uri())
            .map_err(fault)?
            .connect_timeout(CONNECT_TIMEOUT)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW);
        if !options.keep_alive.is_zero() {
            endpoint = endpoint
                .http2_keep_alive_interval(options.keep_alive)
                .keep_alive_timeout(PING_TIMEOUT.min(options.keep_alive))
                .keep_alive_while_idle(true);
        }
        // Connecting to a unix socket whose queue is full blocks without end, whatever the endpoint's own timeout.
        let late = |_| Error::Connect {
            target: target.clone(),
            reason: format!("the connection was not accepted within {CONNECT_TIMEOUT:?}"),
        };
        let channel = timeout(CONNECT_TIMEOUT, endpoint.connect()).await.map_err(late)?.map_err(fault)?;
        Ok(Self {
            channel,
            max_msg_size: options.max_msg_size,
            stall_timeout: options.stall_timeout,
            required: options.required_endpoint_conditions,
            service_proxy_name: options.service_proxy_name.clone(),
        })
    }

    async fn call<M: Message + 'static>(
        &self,
        path: &'static str,
        message: M,
    ) -> Result<Streaming<Bytes>, Error> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(self.max_msg_size);
        grpc.ready().await.map_err(|error| Error::status(Status::from_error(error.into()), false))?;
        let path = PathAndQuery::from_static(path);
        let answer = grpc.server_streaming(Request::new(message), path, RawCodec::default()).await;
        Ok(answer.map_err(|status| Error::status(status, false))?.into_inner())
    }

    /// Waits for a state other than the one at `from`, or for that state to become stale or current again.
    pub(crate) async fn next(&self, from: &Position) -> Result<State, Error> {
        let request = NextFilter {
            instance_id: from.instance_id,
            rev: from.rev,
            required_endpoint_conditions: self.required,
            // Answer also when nothing else has changed; servers that do not know the field ignore it.
            follow_stale: true,
            stale: from.stale,
            service_proxy_name: self.service_proxy_name.clone(),
            ..NextFilter::default()
        };
        let mut stream = self.call(NEXT, request).await?;
        let first = stream.message().await.map_err(|status| Error::status(status, false))?;
        let first = NextItem::read(&first.ok_or(Error::Ended("without sending a state"))?)?;
        let next = first
            .next
            .ok_or_else(|| Error::malformed("the first item has no position for the next request"))?;
        let mut services = Vec::from_iter(first.service);
        while let Some(message) = receive(&mut stream, Some(self.stall_timeout)).await? {
            let item = NextItem::read(&message)?;
            if item.next.is_some() {
                return Err(Error::malformed("two states in one response"));
            }
            services.extend(item.service);
        }
        State::new(next.into(), first.node, services)
    }

    /// # Errors
    /// The server refuses the report or does not support reports: [`Error::is_unimplemented`].
    pub(crate) async fn report(&self, backend: Backend) -> Result<(), Error> {
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready().await.map_err(|error| Error::status(Status::from_error(error.into()), false))?;
        let path = PathAndQuery::from_static(REPORT);
        let answer = grpc.unary(Request::new(backend), path, RawCodec::default()).await;
        // The answer is empty; fields of later servers are ignored.
        answer.map(|_| ()).map_err(|status| Error::status(status, false))
    }

    /// Reads the changes since the state at `from`.
    ///
    /// # Errors
    /// The server refuses or does not support it: [`Error::is_unimplemented`].
    pub(crate) async fn watch(&self, from: &Position) -> Result<Watch, Error> {
        let request = WatchRequest {
            instance_id: from.instance_id,
            rev: from.rev,
            required_endpoint_conditions: self.required,
            service_proxy_name: self.service_proxy_name.clone(),
        };
        let stream = self.call(WATCH, request).await?;
        Ok(Watch { stream, stall_timeout: self.stall_timeout, reset_first: from.instance_id == 0 })
    }
}

/// The next message; `None`: the stream ended with OK. With a limit, a state is incomplete.
async fn receive(stream: &mut Streaming<Bytes>, limit: Option<Duration>) -> Result<Option<Bytes>, Error> {
    let received = match limit {
        None => stream.message().await,
        Some(limit) => timeout(limit, stream.message()).await.map_err(|_| Error::Stalled(limit))?,
    };
    received.map_err(|status| Error::status(status, limit.is_some()))
}

#[derive(Debug)]
pub(crate) struct Watch {
    stream: Streaming<Bytes>,
    stall_timeout: Duration,
    /// The request had no position to start from.
    reset_first: bool,
}

impl Watch {
    /// The changes that lead to the next complete state.
    ///
    /// # Errors
    /// The stream ended or broke, or an item is malformed. The incomplete state is discarded.
    pub(crate) async fn batch(&mut self) -> Result<Batch, Error> {
        let mut begun = false;
        let mut is_full = false;
        let mut node: Option<NodeInfo> = None;
        let mut services: BTreeMap<ServiceName, Option<Bytes>> = BTreeMap::new();
        loop {
            let message = receive(&mut self.stream, begun.then_some(self.stall_timeout)).await?;
            let message =
                message.ok_or(Error::Ended(if begun { "in the middle of a state" } else { "of deltas" }))?;
            begun = true;
            match WatchItem::read(&message)? {
                WatchItem::Reset => {
                    (is_full, node) = (true, None);
                    services.clear();
                }
                WatchItem::Set(raw) => {
                    services.insert(raw.name, Some(raw.bytes));
                }
                WatchItem::Delete(name) => {
                    services.insert(name, None);
                }
                WatchItem::Node(info) => node = Some(info),
                WatchItem::Sync(sync) => {
                    if std::mem::take(&mut self.reset_first) && !is_full {
                        return Err(Error::malformed("deltas without a full state before them"));
                    }
                    if is_full {
                        services.retain(|_, service| service.is_some());
                    }
                    let services = services.into_iter().collect();
                    return Ok(Batch { is_full, position: sync.into(), node, services });
                }
                WatchItem::Unknown => {}
            }
        }
    }
}
