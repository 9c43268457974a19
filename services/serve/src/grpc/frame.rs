//! The parts of gRPC over HTTP/2 that servers without generated code need.
//!
//! Owns: message framing, status trailers, timeouts. In: headers and bytes. Out: the same. Source of every rule: "gRPC
//! over HTTP2" (doc/PROTOCOL-HTTP2.md of gRPC).

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use tonic::{Code, Status};

/// Maximum size of a message in both directions, as in the kubelet and containerd: 16 MiB.
pub const MAX_MESSAGE: usize = 16 * 1024 * 1024;
/// Flag byte and length before a message.
pub const PREFIX: usize = 5;

pub const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");

/// Why a request's body is not one message. The text is sent to the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Shorter than its prefix says, or than a prefix.
    #[error("the request body ends in the middle of a gRPC message")]
    Truncated,
    /// More than one message for a unary call.
    #[error("the request body holds more than one gRPC message")]
    TooMany,
    /// Compression is not offered.
    #[error("compressed requests are not supported; send identity encoding")]
    Compressed,
    /// Larger than [`MAX_MESSAGE`].
    #[error("the message is larger than {MAX_MESSAGE} bytes")]
    TooLarge,
}

impl FrameError {
    /// The code with which gRPC servers answer it.
    #[must_use]
    pub fn code(self) -> Code {
        match self {
            Self::Truncated | Self::TooMany => Code::InvalidArgument,
            Self::Compressed => Code::Unimplemented,
            Self::TooLarge => Code::ResourceExhausted,
        }
    }
}

/// The message of a unary request's body, which must be exactly one uncompressed message.
pub fn unframe(mut body: Bytes) -> Result<Bytes, FrameError> {
    let Some((prefix, _)) = body.split_at_checked(PREFIX) else { return Err(FrameError::Truncated) };
    let (flag, length) =
        (prefix[0], u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize);
    if flag != 0 {
        return Err(FrameError::Compressed);
    }
    if length > MAX_MESSAGE {
        return Err(FrameError::TooLarge);
    }
    match (body.len() - PREFIX).cmp(&length) {
        std::cmp::Ordering::Less => Err(FrameError::Truncated),
        std::cmp::Ordering::Greater => Err(FrameError::TooMany),
        std::cmp::Ordering::Equal => Ok(body.split_off(PREFIX)),
    }
}

/// Adds the prefix to a message.
#[must_use]
pub fn frame(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::new();
    append(&mut framed, message);
    framed.freeze()
}

/// Appends an uncompressed message with its prefix.
pub fn append(frames: &mut BytesMut, message: &[u8]) {
    frames.reserve(PREFIX + message.len());
    frames.put_u8(0);
    // Messages never reach 4 GiB.
    frames.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    frames.put_slice(message);
}

#[must_use]
pub fn response_headers() -> Response<()> {
    let mut response = Response::new(());
    response.headers_mut().insert(header::CONTENT_TYPE, CONTENT_TYPE);
    response
}

/// Status fields, for trailers or for a trailers-only response. The message is escaped as by grpc-go, so that a
/// runtime's error is passed on byte for byte.
#[must_use]
pub fn status(code: Code, message: &str, details: &[u8]) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert(Status::GRPC_STATUS, HeaderValue::from(code as i32));
    if !message.is_empty() {
        trailers.insert(Status::GRPC_MESSAGE, percent_encode(message));
    }
    if !details.is_empty()
        && let Ok(value) = HeaderValue::from_str(&STANDARD_NO_PAD.encode(details))
    {
        trailers.insert(Status::GRPC_STATUS_DETAILS, value);
    }
    trailers
}

/// Encodes bytes outside printable ASCII, and `%` itself, as `%XX`.
fn percent_encode(text: &str) -> HeaderValue {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if (0x20..0x7f).contains(&byte) && byte != b'%' {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    HeaderValue::from_str(&out).unwrap_or(HeaderValue::from_static(""))
}

#[must_use]
pub fn trailers_only(trailers: HeaderMap) -> Response<()> {
    let mut response = response_headers();
    *response.status_mut() = StatusCode::OK;
    response.headers_mut().extend(trailers);
    response
}

/// The status of a response or of trailers; `None` if there is none.
#[must_use]
pub fn code_of(headers: &HeaderMap) -> Option<i32> {
    headers.get(Status::GRPC_STATUS)?.to_str().ok()?.parse().ok()
}

/// The caller's deadline, from `grpc-timeout`; an invalid value counts as no deadline.
#[must_use]
pub fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(GRPC_TIMEOUT)?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

/// A `grpc-timeout` value, rounded up to milliseconds; the format has at most eight digits.
#[must_use]
pub fn timeout_value(left: Duration) -> HeaderValue {
    let millis = left.as_micros().div_ceil(1000);
    match u32::try_from(millis) {
        Ok(millis) if millis < 100_000_000 => HeaderValue::from_str(&format!("{millis}m")),
        _ => HeaderValue::from_str(&format!("{}S", left.as_secs().min(99_999_999))),
    }
    .unwrap_or(HeaderValue::from_static("99999999S"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_round_trip_and_everything_else_is_refused() {
        assert_eq!(unframe(frame(b"abc")), Ok(Bytes::from_static(b"abc")));
        assert_eq!(unframe(frame(b"")), Ok(Bytes::new()));
        assert_eq!(unframe(Bytes::new()), Err(FrameError::Truncated));
        assert_eq!(unframe(Bytes::from_static(&[0, 0, 0, 0, 2, 1])), Err(FrameError::Truncated));
        assert_eq!(unframe(Bytes::from_static(&[0, 0, 0, 0, 1, 1, 1])), Err(FrameError::TooMany));
        assert_eq!(unframe(Bytes::from_static(&[1, 0, 0, 0, 0])), Err(FrameError::Compressed));
        assert_eq!(unframe(Bytes::from_static(&[0, 0xff, 0, 0, 0])), Err(FrameError::TooLarge));
    }

    #[test]
    fn timeouts() {
        for (text, expect) in [
            ("100m", Some(Duration::from_millis(100))),
            ("2S", Some(Duration::from_secs(2))),
            ("1M", Some(Duration::from_secs(60))),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("5u", Some(Duration::from_micros(5))),
            ("7n", Some(Duration::from_nanos(7))),
            ("", None),
            ("S", None),
            ("-1S", None),
            ("123456789S", None),
            ("1X", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(GRPC_TIMEOUT, HeaderValue::from_str(text).expect("a header"));
            assert_eq!(timeout(&headers), expect, "{text:?}");
        }
    }

    #[test]
    fn status_fields_are_encoded_as_grpc_does() {
        let fields = status(Code::Unavailable, "100% ä\n", &[0xfb, 0xff, 1, 2]);
        assert_eq!(fields[Status::GRPC_STATUS], "14");
        assert_eq!(fields[Status::GRPC_MESSAGE], "100%25 %C3%A4%0A");
        assert_eq!(fields[Status::GRPC_STATUS_DETAILS], "+/8BAg");
        assert_eq!(code_of(&fields), Some(14));
        assert_eq!(code_of(&HeaderMap::new()), None);
    }

    proptest::proptest! {
        #[test]
        fn no_body_breaks_the_decoder(body in proptest::collection::vec(proptest::num::u8::ANY, 0..64)) {
            if let Ok(message) = unframe(body.clone().into()) {
                proptest::prop_assert_eq!(frame(&message), Bytes::from(body));
            }
        }
    }
}
