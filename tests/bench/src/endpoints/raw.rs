//! A caller with minimal cost.
//!
//! Owns: [`Caller`], which counts messages and decodes only the last. In: the agent's socket. Out: [`Received`].

use std::marker::PhantomData;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use bytes::{Buf as _, Bytes};
use http::uri::PathAndQuery;
use keelson_proto::endpoints::{WatchItem, WatchRequest, watch_item};
use keelson_proto::localnetv1::{NextFilter, NextItem};
use prost::Message;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};

use super::test_env::PATIENCE;

const NEXT: &str = "/localnetv1.Endpoints/Next";
const WATCH: &str = "/keelson.endpoints.v1.Endpoints/Watch";
/// The window of the client library.
const STREAM_WINDOW: u32 = 8 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// The default window of HTTP/2.
const LIBRARY_WINDOW: u32 = (1 << 16) - 1;
/// Interval between attempts to connect.
const RETRY: Duration = Duration::from_millis(2);
/// The keys of `WatchItem.set` and `WatchItem.sync`.
const SET: u8 = 2 << 3 | 2;
const SYNC: u8 = 4 << 3 | 2;

struct RawCodec<T>(PhantomData<T>);

impl<T: Message + 'static> Codec for RawCodec<T> {
    type Encode = T;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self(PhantomData)
    }

    fn decoder(&mut self) -> Self {
        Self(PhantomData)
    }
}

impl<T: Message + 'static> Encoder for RawCodec<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }
}

impl<T: Message + 'static> Decoder for RawCodec<T> {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Received {
    pub(super) rev: u64,
    pub(super) stale: bool,
    pub(super) services: usize,
    pub(super) bytes: usize,
}

#[derive(Clone)]
pub(super) struct Caller(Channel);

impl Caller {
    /// Connects. Fails if nothing listens.
    pub(super) async fn connect(target: &str) -> Result<Self> {
        Self::connect_with(target, STREAM_WINDOW, CONNECTION_WINDOW).await
    }

    /// The same with the default windows of HTTP/2.
    pub(super) async fn with_small_windows(target: &str) -> Result<Self> {
        Self::connect_with(target, LIBRARY_WINDOW, LIBRARY_WINDOW).await
    }

    async fn connect_with(target: &str, stream: u32, connection: u32) -> Result<Self> {
        let endpoint = Endpoint::from_shared(target.to_owned()).context("not a target")?;
        let endpoint = endpoint.initial_stream_window_size(stream).initial_connection_window_size(connection);
        Ok(Self(endpoint.connect().await.context("cannot connect to the Endpoints API")?))
    }

    /// Connects as soon as the agent listens.
    pub(super) async fn wait_for(target: &str) -> Result<Self> {
        let until = Instant::now() + PATIENCE;
        loop {
            match Self::connect(target).await {
                Ok(caller) => return Ok(caller),
                Err(error) if Instant::now() > until => return Err(error),
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        }
    }

    async fn call<T: Message + 'static>(&self, path: &'static str, request: T) -> Result<Streaming<Bytes>> {
        let mut grpc = Grpc::new(self.0.clone()).max_decoding_message_size(usize::MAX);
        grpc.ready().await.context("the connection is gone")?;
        let path = PathAndQuery::from_static(path);
        let answer = grpc.server_streaming(Request::new(request), path, RawCodec(PhantomData)).await;
        Ok(answer.context("the agent refuses")?.into_inner())
    }

    /// One response of `Next`: waits for a state other than this revision of this instance.
    pub(super) async fn next(&self, instance_id: u64, rev: u64) -> Result<(u64, Received)> {
        let request = NextFilter { instance_id, rev, ..NextFilter::default() };
        let mut stream = self.call(NEXT, request).await?;
        let first = stream.message().await?.context("an answer without a state")?;
        let next = NextItem::decode(first.clone())?.next.context("a state without a position")?;
        let mut received =
            Received { rev: next.rev, stale: next.stale, bytes: first.len(), ..Received::default() };
        while let Some(message) = stream.message().await? {
            received.services += 1;
            received.bytes += message.len();
        }
        Ok((next.instance_id, received))
    }

    /// The complete state at the beginning of `Watch`.
    pub(super) async fn reset(&self) -> Result<Received> {
        self.watch(false).await
    }

    /// Follows until the state is current; counts everything before.
    pub(super) async fn current(&self) -> Result<Received> {
        self.watch(true).await
    }

    async fn watch(&self, current: bool) -> Result<Received> {
        let mut stream = self.call(WATCH, WatchRequest::default()).await?;
        let mut received = Received::default();
        while let Some(message) = stream.message().await? {
            received.bytes += message.len();
            match message.first() {
                Some(&SET) => received.services += 1,
                Some(&SYNC) => {
                    let Some(watch_item::Item::Sync(sync)) = WatchItem::decode(message)?.item else {
                        bail!("a sync that is none");
                    };
                    (received.rev, received.stale) = (sync.rev, sync.stale);
                    if !(current && sync.stale) {
                        return Ok(received);
                    }
                }
                _ => {}
            }
        }
        bail!("the stream ended within a state")
    }
}
