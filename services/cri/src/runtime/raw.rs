//! Unary calls whose messages are not decoded.
//!
//! Owns: a codec that hands bytes through. In: a message's bytes. Out: the answer's bytes, with
//! headers and trailers.

use bytes::{Buf as _, BufMut as _, Bytes};
use keelson_serve::grpc::frame::MAX_MESSAGE;
use tonic::{
    Request, Response, Status,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::http::uri::PathAndQuery,
    transport::Channel,
};

#[derive(Debug, Default, Clone, Copy)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

pub(super) async fn unary(
    channel: &Channel,
    path: &'static str,
    request: Request<Bytes>,
) -> Result<Response<Bytes>, Status> {
    let mut grpc = Grpc::new(channel.clone())
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(MAX_MESSAGE + 1024);
    grpc.ready().await.map_err(|error| Status::from_error(Box::new(error)))?;
    grpc.unary(request, PathAndQuery::from_static(path), Raw).await
}
