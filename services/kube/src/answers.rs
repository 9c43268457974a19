//! The meaning of answers.
//!
//! Owns: the mapping of status codes, Status bodies, headers and broken connections to [`ApiErrorKind`] and a
//! sentence, and the reading of bodies. In: the parts of an answer. Out: values. Nothing here waits.
//!
//! A sentence never holds a credential: it consists of texts of the server and of this crate's libraries about
//! connections and certificates, and is bounded.

use std::{
    error::Error as StdError,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use k8s_openapi::{api::coordination::v1::Lease, jiff::Timestamp};
use keelson_actor_system::cluster::{ApiErrorKind, ObservedLease, Written};
use serde::Deserialize;

use crate::protobuf;

/// Maximum length of a sentence about an error, in characters.
pub(crate) const REASON_MAX: usize = 500;

/// The cause (`metav1.CauseTypeResourceVersionTooLarge`) of a refusal to serve a future version.
const VERSION_TOO_LARGE: &str = "ResourceVersionTooLarge";

/// Kind and sentence of an error, without the server's name, which the caller adds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) kind: ApiErrorKind,
    pub(crate) reason: String,
}

impl Failure {
    pub(crate) fn new(kind: ApiErrorKind, reason: impl AsRef<str>) -> Self {
        Self { kind, reason: bounded(reason.as_ref()) }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// `meta/v1.Status` as JSON, in part.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Status {
    kind: Option<String>,
    pub(crate) message: Option<String>,
    pub(crate) reason: Option<String>,
    pub(crate) code: Option<u16>,
    pub(crate) details: Option<StatusDetails>,
}

impl From<protobuf::Status> for Status {
    fn from(status: protobuf::Status) -> Self {
        Self {
            kind: Some("Status".to_owned()),
            message: Some(status.message),
            reason: Some(status.reason),
            code: u16::try_from(status.code).ok(),
            details: status.details.map(|details| StatusDetails {
                retry_after_seconds: Some(i64::from(details.retry_after_seconds)),
                causes: Some(
                    details.causes.into_iter().map(|c| StatusCause { reason: Some(c.reason) }).collect(),
                ),
            }),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct StatusDetails {
    pub(crate) retry_after_seconds: Option<i64>,
    causes: Option<Vec<StatusCause>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct StatusCause {
    reason: Option<String>,
}

impl Status {
    fn retry_after(&self) -> Option<Duration> {
        let seconds = self.details.as_ref()?.retry_after_seconds?;
        u64::try_from(seconds).ok().filter(|s| *s > 0).map(Duration::from_secs)
    }

    /// The kind of error for a status code of 400 or more. A version that the store has not reached is as useless as
    /// one that it has compacted.
    fn kind(&self, code: StatusCode, retry_after: Option<Duration>) -> ApiErrorKind {
        let mut causes = self.details.iter().flat_map(|details| details.causes.iter().flatten());
        if causes.any(|cause| cause.reason.as_deref() == Some(VERSION_TOO_LARGE)) {
            return ApiErrorKind::Gone;
        }
        kind_of(code, self.reason.as_deref().unwrap_or_default(), retry_after)
    }

    /// The failure for an `ERROR` event of a watch.
    pub(crate) fn failure(&self) -> Failure {
        let code = self.code.and_then(|code| StatusCode::from_u16(code).ok());
        let reason = self.reason.as_deref().unwrap_or_default();
        let kind = match (code, reason) {
            (_, "Gone" | "Expired") => ApiErrorKind::Gone,
            (Some(code), _) if code.as_u16() >= 400 => self.kind(code, self.retry_after()),
            _ => ApiErrorKind::Unreachable,
        };
        let message = self.message.as_deref().filter(|m| !m.is_empty()).unwrap_or(reason);
        Failure::new(kind, format!("the watch ended with an error: {message}"))
    }
}

/// The kind of error for a status code of 400 or more and the `reason` of the Status.
pub(crate) fn kind_of(status: StatusCode, reason: &str, retry_after: Option<Duration>) -> ApiErrorKind {
    match (status.as_u16(), reason) {
        (409, "AlreadyExists") => ApiErrorKind::AlreadyExists,
        (409, _) => ApiErrorKind::Conflict,
        (404, _) => ApiErrorKind::NotFound,
        (410, _) => ApiErrorKind::Gone,
        (401, _) => ApiErrorKind::Unauthorized,
        (403, _) => ApiErrorKind::Forbidden,
        (429, _) => ApiErrorKind::TooManyRequests { retry_after },
        (500.., _) => ApiErrorKind::Server { retry_after },
        _ => ApiErrorKind::Invalid,
    }
}

/// `Retry-After` in either of its forms. `now` is needed for the date.
pub(crate) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

/// The failure for an answer that is not 2xx.
pub(crate) fn failure(answer: &Answer, now: SystemTime) -> Option<Failure> {
    let status = answer.status;
    if status.is_success() {
        return None;
    }
    if status.is_redirection() {
        let to = answer
            .headers
            .get(header::LOCATION)
            .and_then(|v| v.to_str().ok())
            .and_then(|v| v.parse::<http::Uri>().ok())
            .and_then(|uri| uri.host().map(str::to_owned))
            .unwrap_or_else(|| "elsewhere".to_owned());
        return Some(Failure::new(
            ApiErrorKind::Unreachable,
            format!("HTTP {status}: the server redirects to {to}; set the address of the API server itself"),
        ));
    }
    if status.as_u16() < 400 {
        return Some(Failure::new(
            ApiErrorKind::Unreachable,
            format!("unexpected HTTP status {status}; check that the address is an API server"),
        ));
    }
    let body = status_of(answer).unwrap_or_default();
    let reason = body.reason.as_deref().unwrap_or_default();
    let retry = retry_after(&answer.headers, now).or_else(|| body.retry_after());
    let message = body.message.as_deref().filter(|m| !m.is_empty()).unwrap_or(reason);
    let sentence = if message.is_empty() {
        format!("HTTP {status}")
    } else {
        format!("HTTP {}: {message}", status.as_u16())
    };
    Some(Failure::new(body.kind(status, retry), sentence))
}

/// The Status in the body, in either encoding; `None` if it is something else, such as a proxy's page.
fn status_of(answer: &Answer) -> Option<Status> {
    if let Some(status) = protobuf::status(&answer.body) {
        return Some(status.into());
    }
    serde_json::from_slice::<Status>(&answer.body)
        .ok()
        .filter(|status| status.kind.as_deref() == Some("Status"))
}

/// The requested part of an object's JSON.
#[derive(Debug, Deserialize)]
struct MetadataOnly {
    metadata: JsonMetadata,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct JsonMetadata {
    uid: String,
    resource_version: String,
}

/// uid and resourceVersion, in any of the requested encodings.
pub(crate) fn written(body: &[u8]) -> Result<Written, Failure> {
    let written = if let Some(meta) = protobuf::metadata(body) {
        Written { uid: meta.uid, resource_version: meta.resource_version }
    } else {
        let object: MetadataOnly = json(body)?;
        Written { uid: object.metadata.uid, resource_version: object.metadata.resource_version }
    };
    if written.uid.is_empty() || written.resource_version.is_empty() {
        return Err(invalid_answer("the object has no uid or no resourceVersion"));
    }
    Ok(written)
}

pub(crate) fn lease(body: &[u8]) -> Result<ObservedLease, Failure> {
    let lease: Lease = json(body)?;
    let (uid, resource_version) = (lease.metadata.uid, lease.metadata.resource_version);
    let (Some(uid), Some(resource_version)) = (uid, resource_version) else {
        return Err(invalid_answer("the Lease has no uid or no resourceVersion"));
    };
    let owner_uid = lease
        .metadata
        .owner_references
        .unwrap_or_default()
        .into_iter()
        .find(|owner| owner.kind == "Node")
        .map(|owner| owner.uid);
    let spec = lease.spec.unwrap_or_default();
    let micros = |time: Timestamp| time.as_microsecond();
    Ok(ObservedLease {
        written: Written { uid, resource_version },
        owner_uid,
        holder: spec.holder_identity,
        duration_seconds: spec.lease_duration_seconds,
        renew_unix_us: spec.renew_time.map(|t| micros(t.0)),
        acquire_unix_us: spec.acquire_time.map(|t| micros(t.0)),
        transitions: spec.lease_transitions,
    })
}

/// Decodes a JSON body. The error does not repeat its content.
pub(crate) fn json<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|err| {
        invalid_answer(format!(
            "{} bytes that are not the requested object (line {}, column {})",
            body.len(),
            err.line(),
            err.column()
        ))
    })
}

/// The failure for an invalid answer.
pub(crate) fn invalid_answer(what: impl AsRef<str>) -> Failure {
    Failure::new(
        ApiErrorKind::Unreachable,
        format!("invalid response: {}; check that the address is an API server", what.as_ref()),
    )
}

/// The failure that a watch would get, as another watch got it.
pub(crate) fn too_old() -> Failure {
    Failure::new(ApiErrorKind::Gone, "the server rejected a newer resource version as too old")
}

/// The failure for a request without a complete answer.
pub(crate) fn connection_failure(err: &(dyn StdError + 'static)) -> Failure {
    let causes: Vec<&(dyn StdError + 'static)> =
        std::iter::successors(Some(err), |err| (*err).source()).collect();
    // The output of a plugin may be a token, so its error is not repeated.
    if causes.iter().any(|cause| cause.is::<kube::client::AuthError>()) {
        return Failure::new(
            ApiErrorKind::Credentials,
            "the exec plugin of the kubeconfig did not renew the token; run its command manually to see the \
             error",
        );
    }
    if let Some(tls) = causes.iter().find_map(|cause| find_tls(*cause)) {
        return Failure::new(ApiErrorKind::Unreachable, tls_sentence(tls));
    }
    let mut parts: Vec<String> = Vec::new();
    for cause in causes {
        let text = cause.to_string();
        // Libraries repeat the text of their source.
        if !parts.iter().any(|earlier| earlier.contains(&text)) {
            parts.push(text);
        }
    }
    let text = parts.join(": ");
    let text = text.strip_prefix("client error (Connect): ").unwrap_or(&text);
    if text.starts_with("dns error") {
        return Failure::new(ApiErrorKind::Unreachable, format!("cannot resolve the server's name ({text})"));
    }
    Failure::new(ApiErrorKind::Unreachable, text)
}

/// The TLS library's error, which is inside a [`std::io::Error`] that does not return it as its source.
fn find_tls<'a>(err: &'a (dyn StdError + 'static)) -> Option<&'a rustls::Error> {
    if let Some(tls) = err.downcast_ref::<rustls::Error>() {
        return Some(tls);
    }
    let inner = err.downcast_ref::<std::io::Error>()?.get_ref()?;
    find_tls(inner)
}

/// What to do about a TLS error.
fn tls_sentence(err: &rustls::Error) -> String {
    use rustls::{CertificateError as C, Error as E};
    let advice = match err {
        // Authorities of different clusters often have the same name, and then only the signature differs.
        E::InvalidCertificate(C::UnknownIssuer | C::BadSignature) => {
            "the server's certificate is not signed by the configured certificate authority; set that of the \
             cluster"
        }
        E::InvalidCertificate(C::Expired | C::ExpiredContext { .. }) => {
            "the server's certificate has expired; renew it, or correct the clock of this machine"
        }
        E::InvalidCertificate(C::NotValidYet | C::NotValidYetContext { .. }) => {
            "the server's certificate is not valid yet; correct the clock of this machine"
        }
        E::InvalidCertificate(C::NotValidForName | C::NotValidForNameContext { .. }) => {
            "the server's certificate is for another name; set an address that it contains, or tls-server-name"
        }
        E::InvalidCertificate(_) => "the server's certificate is not accepted",
        E::AlertReceived(_) => {
            "the server rejected the TLS handshake; check that the client certificate belongs to this cluster"
        }
        E::InvalidMessage(_) => "the server does not use TLS; check the address and the port",
        _ => "no TLS connection",
    };
    format!("{advice} ({err})")
}

/// Puts `text` on one line of at most [`REASON_MAX`] characters.
pub(crate) fn bounded(text: &str) -> String {
    let mut out = String::new();
    for (n, c) in text.trim().chars().enumerate() {
        if n + 1 >= REASON_MAX {
            out.push('…');
            break;
        }
        out.push(if c.is_control() { ' ' } else { c });
    }
    out
}

#[cfg(test)]
mod tests;
