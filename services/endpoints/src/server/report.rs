//! `keelson.endpoints.v1.Endpoints/Report`: the status of a backend.
//!
//! Owns: [`serve`], one unary call, and the validation of a report: it is shown on terminals and in browsers, and any
//! process may send one. In: HTTP/2 requests. Out: an empty answer, or an error about the report.

use std::{convert::Infallible, sync::Arc};

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{Request, Response, Uri};
use http_body_util::StreamBody;
use hyper::body::Frame;
use keelson_proto::endpoints::{Backend, ReportAnswer};
use keelson_serve::grpc::{Peer, frame};
use prost::Message as _;
use tonic::{Code, Status, body::Body};

use super::{
    backends::STATES,
    call::{Shared, message, stopping},
};

/// Lengths in bytes.
const NAME: usize = 32;
const VERSION: usize = 64;
const ADDRESS: usize = 256;
const REASON: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum ReportError {
    #[error("{name:?} is not a valid backend name: use 1 to {NAME} letters, digits, '-', '_' and '.'")]
    Name { name: String },
    #[error("{field} has {length} bytes; the maximum is {most}")]
    Long { field: &'static str, length: usize, most: usize },
    #[error("{field} has a control character; write it on one line")]
    Control { field: &'static str },
    #[error("{state:?} is not a state; use one of {}", STATES.join(", "))]
    State { state: String },
    #[error("{field} is not a valid address: it must begin with {right} and contain no user name")]
    Address { field: &'static str, right: &'static str },
    #[error("last_sync_unix_ms is {0}; it must be milliseconds since 1970, or 0 for never")]
    Time(i64),
}

pub(super) async fn serve<B>(shared: Arc<Shared>, request: Request<B>) -> Response<Body>
where
    B: hyper::body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<tonic::codegen::StdError>,
{
    match take(shared, request).await {
        Ok(()) => accepted(),
        Err(status) => status.into_http(),
    }
}

async fn take<B>(shared: Arc<Shared>, request: Request<B>) -> Result<(), Status>
where
    B: hyper::body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<tonic::codegen::StdError>,
{
    let (mut head, body) = request.into_parts();
    let peer = head.extensions.remove::<Arc<Peer>>().unwrap_or_default();
    let report = Backend::decode(message(body).await?).map_err(|error| {
        Status::invalid_argument(format!("the report is not a valid Backend message: {error}"))
    })?;
    check(&report).map_err(|wrong| Status::invalid_argument(wrong.to_string()))?;
    if shared.stop.is_cancelled() {
        return Err(stopping());
    }
    tracing::debug!(
        name = report.name,
        pid = report.pid,
        state = report.state,
        peer = peer.name,
        "backend reported"
    );
    shared.backends.take(report, peer.pid).map_err(|error| Status::resource_exhausted(error.to_string()))
}

fn accepted() -> Response<Body> {
    let answer = Frame::data(frame::frame(&ReportAnswer {}.encode_to_vec()));
    let end = Frame::trailers(frame::status(Code::Ok, "", &[]));
    let frames = stream::iter([answer, end].map(Ok::<_, Infallible>));
    frame::response_headers().map(|()| Body::new(StreamBody::new(frames.boxed())))
}

fn check(report: &Backend) -> Result<(), ReportError> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if !(1..=NAME).contains(&report.name.len()) || !report.name.bytes().all(fits) {
        return Err(ReportError::Name { name: shorten(&report.name) });
    }
    for (field, text, most) in [
        ("version", &report.version, VERSION),
        ("debug", &report.debug, ADDRESS),
        ("http", &report.http, ADDRESS),
        ("reason", &report.reason, REASON),
    ] {
        if text.len() > most {
            return Err(ReportError::Long { field, length: text.len(), most });
        }
        if text.chars().any(char::is_control) {
            return Err(ReportError::Control { field });
        }
    }
    if !STATES.contains(&report.state.as_str()) {
        return Err(ReportError::State { state: shorten(&report.state) });
    }
    if !report.debug.is_empty() && !is_socket(&report.debug) {
        return Err(ReportError::Address { field: "debug", right: "unix:/// or tcp://" });
    }
    if !report.http.is_empty() && !is_page(&report.http) {
        return Err(ReportError::Address { field: "http", right: "http:// or https://" });
    }
    match report.last_sync_unix_ms {
        time if time < 0 => Err(ReportError::Time(time)),
        _ => Ok(()),
    }
}

/// Shortens a value for an error text.
fn shorten(text: &str) -> String {
    text.chars().take(80).collect()
}

fn is_socket(text: &str) -> bool {
    let tcp = |address: &str| !address.is_empty() && !address.contains('@');
    text.strip_prefix("unix://").is_some_and(|path| path.starts_with('/'))
        || text.strip_prefix("tcp://").is_some_and(tcp)
}

/// Whether it can become a link.
fn is_page(text: &str) -> bool {
    let Ok(uri) = text.parse::<Uri>() else { return false };
    matches!(uri.scheme_str(), Some("http" | "https"))
        && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn valid_backend() -> Backend {
        Backend {
            name: "nft".into(),
            pid: 7,
            version: "0.1.0".into(),
            debug: "unix:///run/keelson/proxy.sock".into(),
            http: "http://127.0.0.1:9441/".into(),
            state: "synced".into(),
            ..Backend::default()
        }
    }

    #[test]
    fn valid_reports() {
        let least = Backend { name: "x".into(), state: "pending".into(), ..Backend::default() };
        let most = Backend {
            name: "n".repeat(NAME),
            version: "v".repeat(VERSION),
            debug: "tcp://127.0.0.1:1".into(),
            http: "https://[::1]:9441/x?y#z".into(),
            state: "failing".into(),
            reason: "\u{e9}".repeat(REASON / 2),
            last_sync_unix_ms: i64::MAX,
            ..valid_backend()
        };
        for report in [valid_backend(), least, most] {
            assert_eq!(check(&report), Ok(()), "{report:?}");
        }
    }

    #[test]
    fn refused_reports_and_their_errors() {
        type Change = fn(&mut Backend);
        let cases: [(Change, &str); 18] = [
            (|it| it.name.clear(), "is not a valid backend name"),
            (|it| it.name = "a b".into(), "is not a valid backend name"),
            (|it| it.name = "<b>".into(), "is not a valid backend name"),
            (|it| it.name = "n".repeat(33), "1 to 32 letters"),
            (|it| it.version = "v".repeat(65), "version has 65 bytes; the maximum is 64"),
            (|it| it.version = "1\n2".into(), "version has a control character"),
            (|it| it.reason = "x".repeat(1025), "reason has 1025 bytes"),
            (|it| it.reason = "\u{1b}[2J".into(), "reason has a control character"),
            (|it| it.debug = "\u{7f}".into(), "debug has a control character"),
            (|it| it.state.clear(), "\"\" is not a state; use one of pending, synced, failing"),
            (|it| it.state = "healthy".into(), "\"healthy\" is not a state"),
            (|it| it.debug = "/run/x.sock".into(), "debug is not a valid address"),
            (|it| it.debug = "tcp://joe:hunter2@h:1".into(), "debug is not a valid address"),
            (|it| it.http = "javascript:alert(1)".into(), "http is not a valid address"),
            (|it| it.http = "http://joe:hunter2@h/".into(), "no user name"),
            (|it| it.http = "/page".into(), "begin with http:// or https://"),
            (|it| it.http = format!("http://h/{}", "x".repeat(256)), "http has 265 bytes"),
            (|it| it.last_sync_unix_ms = -1, "last_sync_unix_ms is -1"),
        ];
        for (change, words) in cases {
            let mut report = valid_backend();
            change(&mut report);
            let wrong = check(&report).expect_err(words).to_string();
            assert!(wrong.contains(words) && !wrong.contains("hunter2"), "{wrong}");
            assert!(wrong.len() < 250 && !wrong.contains(char::is_control), "{wrong}");
        }
    }
}
