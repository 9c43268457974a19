//! Responses that consist of a status only.

use bytes::Bytes;
use h2::server::SendResponse;
use keelson_proto::Code;
use keelson_serve::grpc::frame;

pub(super) fn refuse(respond: &mut SendResponse<Bytes>, code: Code, text: &str) {
    // A client that has gone does not read it.
    let _ = respond.send_response(frame::trailers_only(frame::status(code, text, &[])), true);
}
