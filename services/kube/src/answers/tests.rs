use http::HeaderValue;

use super::*;
use crate::tests::wire;

fn answer(status: u16, body: &[u8]) -> Answer {
    Answer {
        status: StatusCode::from_u16(status).unwrap(),
        headers: HeaderMap::new(),
        body: Bytes::copy_from_slice(body),
    }
}

fn status_json(reason: &str) -> Vec<u8> {
    format!(r#"{{"kind":"Status","apiVersion":"v1","status":"Failure","message":"it is so","reason":"{reason}","code":1}}"#)
        .into_bytes()
}

#[test]
fn a_status_code_and_reason_become_a_kind() {
    let none = None;
    for (code, reason, kind) in [
        (409, "Conflict", ApiErrorKind::Conflict),
        (409, "AlreadyExists", ApiErrorKind::AlreadyExists),
        (409, "", ApiErrorKind::Conflict),
        (404, "NotFound", ApiErrorKind::NotFound),
        (410, "Expired", ApiErrorKind::Gone),
        (401, "Unauthorized", ApiErrorKind::Unauthorized),
        (403, "Forbidden", ApiErrorKind::Forbidden),
        (429, "TooManyRequests", ApiErrorKind::TooManyRequests { retry_after: none }),
        (400, "BadRequest", ApiErrorKind::Invalid),
        (406, "NotAcceptable", ApiErrorKind::Invalid),
        (415, "UnsupportedMediaType", ApiErrorKind::Invalid),
        (422, "Invalid", ApiErrorKind::Invalid),
        (500, "InternalError", ApiErrorKind::Server { retry_after: none }),
        (503, "ServiceUnavailable", ApiErrorKind::Server { retry_after: none }),
        (504, "Timeout", ApiErrorKind::Server { retry_after: none }),
    ] {
        let failure = failure(&answer(code, &status_json(reason)), SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(failure.kind, kind, "{code} {reason}");
        assert_eq!(failure.reason, format!("HTTP {code}: it is so"));
    }
    for code in [200, 201, 204] {
        assert_eq!(failure(&answer(code, b""), SystemTime::UNIX_EPOCH), None);
    }
}

#[test]
fn an_error_in_protobuf_is_read_alike() {
    let status = protobuf::Status {
        code: 0,
        message: "come back".into(),
        reason: "TooManyRequests".into(),
        details: Some(protobuf::StatusDetails { retry_after_seconds: 7, causes: Vec::new() }),
    };
    let body = wire::enveloped("Status", &status);
    let failure = failure(&answer(429, &body), SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(failure.kind.retry_after(), Some(Duration::from_secs(7)));
    assert_eq!(failure.reason, "HTTP 429: come back");
}

/// The answer of kube-apiserver to a request for a version that its store has not reached.
#[test]
fn e11_a_version_that_is_in_the_future_is_of_no_use() {
    let json = br#"{"kind":"Status","status":"Failure","message":"Timeout: Too large resource version: 9, current: 5",
        "reason":"Timeout","details":{"causes":[{"reason":"ResourceVersionTooLarge","message":"Too large resource version"}],
        "retryAfterSeconds":1},"code":504}"#;
    let cause = protobuf::StatusCause { reason: "ResourceVersionTooLarge".into() };
    let status = protobuf::Status {
        code: 504,
        message: "Timeout: Too large resource version: 9, current: 5".into(),
        reason: "Timeout".into(),
        details: Some(protobuf::StatusDetails { retry_after_seconds: 1, causes: vec![cause] }),
    };
    for body in [Bytes::from_static(json), wire::enveloped("Status", &status)] {
        let failure = failure(&answer(504, &body), SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(failure.kind, ApiErrorKind::Gone);
        assert!(failure.reason.contains("Too large"), "{}", failure.reason);
    }
    assert_eq!(Status::from(status).failure().kind, ApiErrorKind::Gone);
}

#[test]
fn a_body_that_is_no_status_is_not_repeated() {
    for body in [b"<html>secret</html>".as_slice(), b"", b"{", b"k8s\0\xff\xff", b"\"secret\"", b"[]"] {
        let failure = failure(&answer(502, body), SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(failure.kind, ApiErrorKind::Server { retry_after: None });
        assert_eq!(failure.reason, "HTTP 502 Bad Gateway");
    }
}

#[test]
fn retry_after_has_two_forms() {
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
    for (text, want) in [
        ("120", Some(120)),
        (" 1 ", Some(1)),
        ("0", Some(0)),
        ("Sun, 06 Nov 1994 08:50:37 GMT", Some(60)),
        ("Sun, 06 Nov 1994 08:00:00 GMT", Some(0)),
        ("-1", None),
        ("soon", None),
        ("", None),
    ] {
        let mut headers = HeaderMap::new();
        headers.insert(header::RETRY_AFTER, HeaderValue::from_static(text));
        assert_eq!(retry_after(&headers, now), want.map(Duration::from_secs), "{text}");
    }
    assert_eq!(retry_after(&HeaderMap::new(), now), None);
}

#[test]
fn the_header_counts_before_the_body() {
    let mut answer = answer(503, br#"{"kind":"Status","reason":"x","details":{"retryAfterSeconds":9}}"#);
    let after = |answer: &Answer| failure(answer, SystemTime::UNIX_EPOCH).unwrap().kind.retry_after();
    assert_eq!(after(&answer), Some(Duration::from_secs(9)));
    answer.headers.insert(header::RETRY_AFTER, HeaderValue::from_static("2"));
    assert_eq!(after(&answer), Some(Duration::from_secs(2)));
}

#[test]
fn a_redirect_names_where_to_without_its_query() {
    let mut answer = answer(302, b"");
    let elsewhere = HeaderValue::from_static("https://login.example.org/?token=hush");
    answer.headers.insert(header::LOCATION, elsewhere);
    let failure = failure(&answer, SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(failure.kind, ApiErrorKind::Unreachable);
    assert!(failure.reason.contains("login.example.org"), "{}", failure.reason);
    assert!(!failure.reason.contains("hush"), "{}", failure.reason);
}

#[test]
fn metadata_reads_from_either_encoding() {
    let want = Written { uid: "u".into(), resource_version: "42".into() };
    let metadata = protobuf::ObjectMeta { name: "n".into(), uid: "u".into(), resource_version: "42".into() };
    let meta = protobuf::PartialObjectMetadata { metadata: Some(metadata) };
    assert_eq!(written(&wire::enveloped("PartialObjectMetadata", &meta)), Ok(want.clone()));
    let json =
        br#"{"kind":"PartialObjectMetadata","metadata":{"name":"n","uid":"u","resourceVersion":"42"}}"#;
    assert_eq!(written(json), Ok(want));
    for body in [
        b"".as_slice(),
        b"{}",
        b"null",
        br#"{"metadata":{}}"#,
        b"k8s\0",
        b"k8s\0\x12\x02\x0a",
        b"\x00\x01\x02",
        br#"{"metadata":{"uid":"u","resourceVersion":"4"#,
    ] {
        assert_eq!(written(body).unwrap_err().kind, ApiErrorKind::Unreachable, "{body:?}");
    }
}

#[test]
fn all_fields_of_a_lease_are_read() {
    let body = br#"{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"n","uid":"u",
        "resourceVersion":"5","ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"n","uid":"nu"}]},
        "spec":{"holderIdentity":"n","leaseDurationSeconds":40,"acquireTime":"1970-01-01T00:00:01.000002Z",
        "renewTime":"1970-01-01T00:00:02.000003Z","leaseTransitions":2}}"#;
    assert_eq!(
        lease(body),
        Ok(ObservedLease {
            written: Written { uid: "u".into(), resource_version: "5".into() },
            owner_uid: Some("nu".into()),
            holder: Some("n".into()),
            duration_seconds: Some(40),
            renew_unix_us: Some(2_000_003),
            acquire_unix_us: Some(1_000_002),
            transitions: Some(2),
        })
    );
    let bare = br#"{"metadata":{"uid":"u","resourceVersion":"5"}}"#;
    assert_eq!(lease(bare).unwrap().holder, None);
    assert_eq!(lease(b"{\"metadata\":{}}").unwrap_err().kind, ApiErrorKind::Unreachable);
}

#[test]
fn sentences_are_bounded_and_on_one_line() {
    let long = "ä\n".repeat(1000);
    let short = bounded(&long);
    assert_eq!(short.chars().count(), REASON_MAX);
    assert!(short.ends_with('…'));
    assert!(!short.contains('\n'));
    assert_eq!(bounded(" as it is "), "as it is");
}

#[test]
fn a_watch_error_has_a_kind() {
    let three = Some(Duration::from_secs(3));
    for (text, kind) in [
        (r#"{"kind":"Status","code":410,"reason":"Expired","message":"too old"}"#, ApiErrorKind::Gone),
        (r#"{"reason":"Gone"}"#, ApiErrorKind::Gone),
        (r#"{"code":403}"#, ApiErrorKind::Forbidden),
        (
            r#"{"code":429,"details":{"retryAfterSeconds":3}}"#,
            ApiErrorKind::TooManyRequests { retry_after: three },
        ),
        ("{}", ApiErrorKind::Unreachable),
    ] {
        assert_eq!(serde_json::from_str::<Status>(text).unwrap().failure().kind, kind, "{text}");
    }
}
