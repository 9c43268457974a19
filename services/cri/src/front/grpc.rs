//! The little of gRPC-over-HTTP/2 that the front has to speak itself.
//!
//! Owns: message framing, status trailers, timeouts, and the names of calls for metrics. In: headers
//! and bytes. Out: the same. See the gRPC "over HTTP2" protocol description for every rule here.

use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use keelson_proto::Code;

/// The largest message, both ways, as in the kubelet and containerd: 16 MiB.
pub const MAX_MESSAGE: usize = 16 * 1024 * 1024;
/// Flag byte and length before a message.
pub const PREFIX: usize = 5;

pub(super) const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC_DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
pub(super) const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");

/// Why a request's body is not one message. The text goes to the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Shorter than its prefix says, or than a prefix.
    #[error("the request body ends in the middle of a gRPC message")]
    Truncated,
    /// More than one message for a unary call.
    #[error("the request body holds more than one gRPC message")]
    TooMany,
    /// Compression was never offered.
    #[error("compressed requests are not supported; send identity encoding")]
    Compressed,
    /// Over [`MAX_MESSAGE`].
    #[error("the message is larger than {MAX_MESSAGE} bytes")]
    TooLarge,
}

impl FrameError {
    /// As gRPC servers answer them.
    #[must_use]
    pub fn code(self) -> Code {
        match self {
            Self::Truncated | Self::TooMany => Code::InvalidArgument,
            Self::Compressed => Code::Unimplemented,
            Self::TooLarge => Code::ResourceExhausted,
        }
    }
}

/// The one message of a unary request's whole body.
///
/// # Errors
/// It is not exactly one uncompressed message.
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

/// A message with its prefix.
#[must_use]
pub fn frame(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(PREFIX + message.len());
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    framed.put_slice(message);
    framed.freeze()
}

/// The headers of a successful response.
#[must_use]
pub fn response_headers() -> Response<()> {
    let mut response = Response::new(());
    response.headers_mut().insert(header::CONTENT_TYPE, CONTENT_TYPE);
    response
}

/// Status fields, for trailers or for a response that is nothing but trailers.
#[must_use]
pub fn status(code: Code, message: &str, details: &[u8]) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert(GRPC_STATUS, HeaderValue::from(code as i32));
    if !message.is_empty() {
        trailers.insert(GRPC_MESSAGE, percent_encode(message));
    }
    if !details.is_empty()
        && let Ok(value) = HeaderValue::from_str(&base64(details))
    {
        trailers.insert(GRPC_DETAILS, value);
    }
    trailers
}

/// A response that is nothing but a status.
#[must_use]
pub fn trailers_only(trailers: HeaderMap) -> Response<()> {
    let mut response = response_headers();
    *response.status_mut() = StatusCode::OK;
    response.headers_mut().extend(trailers);
    response
}

/// The status of a response or trailers, if they carry one.
#[must_use]
pub fn code_of(headers: &HeaderMap) -> Option<i32> {
    headers.get(GRPC_STATUS)?.to_str().ok()?.parse().ok()
}

/// Bytes outside printable ASCII, and `%` itself, as `%XX`.
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

/// Base64 without padding, as gRPC writes binary headers.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word =
            chunk.iter().fold(0_u32, |word, byte| (word << 8) | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for index in 0..=chunk.len() {
            let six = (word >> (18 - 6 * index)) & 0x3f;
            out.push(char::from(ALPHABET[six as usize]));
        }
    }
    out
}

/// The caller's deadline, from `grpc-timeout`; an unreadable one is no deadline.
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

/// A `grpc-timeout` of this length, rounded up to milliseconds; at most eight digits are allowed.
#[must_use]
pub fn timeout_value(left: Duration) -> HeaderValue {
    let millis = left.as_micros().div_ceil(1000);
    match u32::try_from(millis) {
        Ok(millis) if millis < 100_000_000 => HeaderValue::from_str(&format!("{millis}m")),
        _ => HeaderValue::from_str(&format!("{}S", left.as_secs().min(99_999_999))),
    }
    .unwrap_or(HeaderValue::from_static("99999999S"))
}

macro_rules! operations {
    ($($method:literal => $name:literal),+ $(,)?) => {
        /// The kubelet's `operation_type` of a call; `other` for what this build has no name for, so
        /// that no caller can make labels up.
        #[must_use]
        pub fn operation(path: &str) -> &'static str {
            let Some((service, method)) = path.strip_prefix("/runtime.v1.").and_then(|path| path.split_once('/')) else {
                return "other";
            };
            match (service, method) {
                ("RuntimeService" | "ImageService", method) => match method {
                    $($method => $name,)+
                    _ => "other",
                },
                _ => "other",
            }
        }
    };
}

operations! {
    "Version" => "version", "Status" => "status", "RuntimeConfig" => "runtime_config",
    "UpdateRuntimeConfig" => "update_runtime_config",
    "RunPodSandbox" => "run_podsandbox", "StopPodSandbox" => "stop_podsandbox",
    "RemovePodSandbox" => "remove_podsandbox", "PodSandboxStatus" => "podsandbox_status",
    "ListPodSandbox" => "list_podsandbox", "UpdatePodSandboxResources" => "update_podsandbox_resources",
    "CreateContainer" => "create_container", "StartContainer" => "start_container",
    "StopContainer" => "stop_container", "RemoveContainer" => "remove_container",
    "ListContainers" => "list_containers", "ContainerStatus" => "container_status",
    "UpdateContainerResources" => "update_container", "ReopenContainerLog" => "reopen_container_log",
    "ExecSync" => "exec_sync", "Exec" => "exec", "Attach" => "attach", "PortForward" => "port_forward",
    "ContainerStats" => "container_stats", "ListContainerStats" => "list_container_stats",
    "PodSandboxStats" => "podsandbox_stats", "ListPodSandboxStats" => "list_podsandbox_stats",
    "CheckpointContainer" => "checkpoint_container", "GetContainerEvents" => "get_container_events",
    "ListMetricDescriptors" => "list_metric_descriptors", "ListPodSandboxMetrics" => "list_podsandbox_metrics",
    "ListImages" => "list_images", "ImageStatus" => "image_status", "RemoveImage" => "remove_image",
    "ImageFsInfo" => "image_fs_info", "PullImage" => "pull_image",
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
        assert_eq!(fields[GRPC_STATUS], "14");
        assert_eq!(fields[GRPC_MESSAGE], "100%25 %C3%A4%0A");
        assert_eq!(fields[GRPC_DETAILS], "+/8BAg");
        assert_eq!(code_of(&fields), Some(14));
        assert_eq!(code_of(&HeaderMap::new()), None);
    }

    #[test]
    fn labels_are_a_closed_set() {
        assert_eq!(operation("/runtime.v1.ImageService/PullImage"), "pull_image");
        assert_eq!(operation("/runtime.v1.RuntimeService/Made-up"), "other");
        assert_eq!(operation("/x/Version"), "other");
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
