//! Classes of failed pulls: whether a retry can use the bytes that were fetched.
//!
//! Owns: [`FailureClass`]. In: the gRPC status of a failed `PullImage`. Out: its class. Runtimes give most failures the
//! code `UNKNOWN`, so the class follows from the text: containerd 1.6 and 2.x wrap the errors of their Go packages,
//! CRI-O those of containers/image. The text is compared in lower case. Image names cannot contain a space or end in a
//! colon, so every pattern that is not a plain HTTP status has one of the two or cannot be part of a name.

use keelson_proto::Code;

use crate::runtime::WireStatus;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum FailureClass {
    /// ENOSPC or EDQUOT. The fetched bytes use the missing space.
    NoSpace,
    /// Digest or size differ from what the manifest says.
    BadContent,
    /// A layer cannot be extracted. A retry fails at the same blob.
    Unpack,
    Denied,
    /// 404, or no manifest for the platform.
    NotFound,
    /// A bad reference or an unsupported media type.
    Invalid,
    /// 408, 429 or 5xx of the registry.
    Registry,
    /// The connection to the registry failed, or the pull was cancelled.
    Network,
    /// The runtime died, or was busy.
    Runtime,
    /// None of these. The bytes are released, as the runtime alone does.
    Unknown,
}

const NO_SPACE: &[&str] = &["no space left on device", "disk quota exceeded"];
const BAD_CONTENT: &[&str] = &[
    "unexpected commit digest",
    "unexpected commit size",
    "failed size validation",
    "size validation failed",
    "digest did not match",
    "does not match digest",
    "digest mismatch",
    "wrong diff id",
    "mismatched image rootfs",
];
const UNPACK: &[&str] = &[
    "failed to extract layer",
    "apply layer error",
    "failed to apply layer",
    "adding layer with blob",
    "error creating layer",
    "processing tar file",
    "archive/tar:",
    "gzip: invalid",
    "zstd: invalid",
];
/// A limit of the runtime's own; or a snapshot that containerd cannot begin, because it was killed between the rename
/// of a snapshot's folder and its record. Until garbage collection has removed that folder, it answers
/// `failed to rename: ... file exists`.
const RUNTIME: &[&str] = &["toomanypullinginparallel", "failed to prepare extraction snapshot"];
const DENIED: &[&str] = &[
    "unauthorized:",
    "access denied",
    "access to the resource is denied",
    "denied: ",
    "authorization failed",
    "authentication required",
    "invalid username/password",
    "insufficient_scope:",
    "no basic auth credentials",
];
const NOT_FOUND: &[&str] = &[
    "manifest unknown",
    "name unknown",
    "repository name not known",
    ": not found",
    "no match for platform",
    "no image found in manifest list",
    "no image found in image index",
];
const INVALID: &[&str] = &[
    "invalid reference format",
    "failed to parse image reference",
    "unsupported media type",
    "unsupported manifest",
    "unsupported schema",
    "schema version",
    "media type \"application/vnd.docker.distribution.manifest.v1+prettyjws\" is no longer supported",
    "unexpected media type",
];
const REGISTRY: &[&str] = &["toomanyrequests:", "too many requests", "retry-after:"];
const NETWORK: &[&str] = &[
    "unexpected eof",
    ": eof",
    "connection reset",
    "connection refused",
    "connection timed out",
    "connection closed",
    "broken pipe",
    "i/o timeout",
    "tls handshake timeout",
    "client.timeout exceeded",
    "timeout awaiting response headers",
    "no route to host",
    "network is unreachable",
    "host is down",
    "no such host",
    "server misbehaving",
    "temporary failure in name resolution",
    "dial tcp",
    "use of closed network connection",
    "server closed idle connection",
    "stream error:",
    "http2: ",
    "connection error:",
    "transport is closing",
    "context canceled",
    "context deadline exceeded",
    "deadline exceeded",
    "operation was canceled",
];

impl FailureClass {
    #[must_use]
    pub(crate) fn of(status: &WireStatus) -> Self {
        let text = status.message.to_lowercase();
        let has = |patterns: &[&str]| patterns.iter().any(|pattern| text.contains(pattern));
        // A failed extraction may name any of the causes below it, and a full disk any above it.
        if has(NO_SPACE) {
            return Self::NoSpace;
        }
        if has(BAD_CONTENT) {
            return Self::BadContent;
        }
        if has(UNPACK) {
            return Self::Unpack;
        }
        if has(RUNTIME) {
            return Self::Runtime;
        }
        // An expired deadline of the token request also says "failed to authorize": its cause comes first.
        match http_status(&text) {
            Some(401 | 403) => return Self::Denied,
            Some(404) => return Self::NotFound,
            Some(408 | 429 | 500..) => return Self::Registry,
            Some(_) => return Self::Invalid,
            None => {}
        }
        let by_text = [
            (REGISTRY, Self::Registry),
            (DENIED, Self::Denied),
            (INVALID, Self::Invalid),
            (NETWORK, Self::Network),
            (NOT_FOUND, Self::NotFound),
        ];
        by_text
            .into_iter()
            .find(|(patterns, _)| has(patterns))
            .map_or_else(|| Self::of_code(status.code), |(_, class)| class)
    }

    fn of_code(code: Code) -> Self {
        match code {
            Code::PermissionDenied | Code::Unauthenticated => Self::Denied,
            Code::NotFound => Self::NotFound,
            Code::InvalidArgument | Code::OutOfRange | Code::Unimplemented => Self::Invalid,
            Code::FailedPrecondition | Code::DataLoss => Self::BadContent,
            Code::Cancelled | Code::DeadlineExceeded => Self::Network,
            Code::Unavailable | Code::Aborted => Self::Runtime,
            _ => Self::Unknown,
        }
    }

    #[must_use]
    pub(crate) fn is_resumable(self) -> bool {
        matches!(self, Self::Registry | Self::Network | Self::Runtime)
    }

    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::NoSpace => "no_space",
            Self::BadContent => "bad_content",
            Self::Unpack => "unpack",
            Self::Denied => "denied",
            Self::NotFound => "not_found",
            Self::Invalid => "invalid",
            Self::Registry => "registry",
            Self::Network => "network",
            Self::Runtime => "runtime",
            Self::Unknown => "unknown",
        }
    }
}

/// The HTTP status in a text of Go's `net/http` users: `...: 503 Service Unavailable`, `status code 503`,
/// `HTTP status: 503`. Ports and sizes do not match: three digits of 400 to 599 have to follow `: ` or `status code `,
/// after the word "status" or at the start of the reason phrase.
fn http_status(text: &str) -> Option<u16> {
    let tail = &text[text.find("status")?..];
    let after = |mark: &str| {
        tail.match_indices(mark).find_map(|(at, _)| {
            let rest = &tail[at + mark.len()..];
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            let ends = rest[digits.len()..].chars().next().is_none_or(|next| !next.is_ascii_alphanumeric());
            let status = digits.parse::<u16>().ok()?;
            (digits.len() == 3 && ends && (400..600).contains(&status)).then_some(status)
        })
    };
    after(": ").or_else(|| after("status code ")).or_else(|| after("status "))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::{FailureClass as F, *};

    const ALL: [F; 10] = [
        F::NoSpace,
        F::BadContent,
        F::Unpack,
        F::Denied,
        F::NotFound,
        F::Invalid,
        F::Registry,
        F::Network,
        F::Runtime,
        F::Unknown,
    ];

    fn class(code: Code, message: &str) -> F {
        F::of(&WireStatus { code, message: message.into(), details: Bytes::new() })
    }

    /// I1: texts as containerd 1.6 and 2.x and CRI-O give them.
    #[test]
    fn texts_of_the_runtimes() {
        let pull = r#"failed to pull and unpack image "r.example:5000/a/denied:1": "#;
        let v2 = r#"failed to pull and unpack image "r.example:5000/a/b:eof": "#;
        let unknown = |class| -> &[&str] {
            match class {
                F::NoSpace => &[
                    r#"failed to copy: failed to send write: write /c/root/ingest/1/data: no space left on device"#,
                    r#"failed to extract layer sha256:1: write /c/fs/file: no space left on device"#,
                    "mkdir /c/root/snapshots/9: disk quota exceeded",
                    "failed to prepare extraction snapshot \"extract-9-xy sha256:1\": mkdir /c/snapshots/new-1: no space left on device",
                ],
                F::BadContent => &["writing blob: Digest did not match, expected sha256:1, got sha256:2"],
                F::Unpack => &[
                    "failed to extract layer sha256:1: failed to convert whiteout file: operation not permitted",
                    "failed to extract layer sha256:1: failed to get stream processor: unexpected EOF",
                    "apply layer error for \"x\": archive/tar: invalid tar header",
                    "copying system image from manifest list: writing blob: adding layer with blob \"sha256:1\": processing tar file(exit status 1)",
                ],
                F::Runtime => &[
                    "failed to prepare extraction snapshot \"extract-9-xy sha256:1\": failed to rename: rename /c/snapshots/new-1 /c/snapshots/2: file exists",
                ],
                F::Denied => &[
                    "failed to resolve reference \"r/a:1\": pull access denied, repository does not exist or may require authorization: server message: insufficient_scope: authorization failed",
                    "failed to resolve reference \"r/a:1\": unexpected status from HEAD request to https://r.example:443/v2/a/manifests/1: 401 Unauthorized",
                    "failed to copy: httpReadSeeker: failed open: unexpected status code https://cdn.example/blobs/1: 403 Forbidden",
                    "reading manifest 1 in r/a: unauthorized: authentication required",
                    "denied: requested access to the resource is denied",
                ],
                F::NotFound => &[
                    "reading manifest 1 in r/a: manifest unknown",
                    "unexpected status from GET request to https://r/v2/a/blobs/1: 404 Not Found",
                ],
                F::Invalid => &["unexpected status code https://r/v2/: 400 Bad Request"],
                F::Registry => &[
                    "failed to copy: httpReadSeeker: failed open: unexpected status code http://r:500/v2/a/blobs/1: 503 Service Unavailable",
                    "failed to resolve reference \"r/a:1\": unexpected status from HEAD request to http://r/v2/a/manifests/1: 500 Internal Server Error",
                    "fetching blob: received unexpected HTTP status: 502 Bad Gateway",
                    "unexpected status from GET request to https://r/v2/a: 429 Too Many Requests\ntoomanyrequests: You have reached your pull rate limit",
                ],
                F::Network => &[
                    "failed to copy: httpReadSeeker: failed open: failed to do request: Get \"https://r:443/v2/a\": dial tcp 10.0.0.1:443: connect: connection refused",
                    "failed to copy: read tcp 10.0.0.1:400->10.0.0.2:443: read: connection reset by peer",
                    "failed to copy: unexpected EOF",
                    "Head \"https://r/v2/\": dial tcp: lookup r on 10.0.0.2:53: no such host",
                    "failed to authorize: failed to fetch anonymous token: Get \"https://auth/token\": net/http: TLS handshake timeout",
                ],
                F::Unknown => &["something else"],
            }
        };
        let others = [
            (
                Code::ResourceExhausted,
                "writing blob: storing blob to file \"/var/tmp/x\": write /var/tmp/x: no space left on device",
                F::NoSpace,
            ),
            (
                Code::FailedPrecondition,
                r#"failed commit on ref "layer-sha256:1": unexpected commit digest sha256:2, expected sha256:1: failed precondition"#,
                F::BadContent,
            ),
            (
                Code::FailedPrecondition,
                r#"failed commit on ref "layer-sha256:1": "layer-sha256:1" failed size validation: 10 != 20: failed precondition"#,
                F::BadContent,
            ),
            (Code::Unavailable, "the container runtime closed the connection during the pull", F::Runtime),
            (Code::ResourceExhausted, "TooManyPullingInParallel: 3", F::Runtime),
            (Code::PermissionDenied, "by policy", F::Denied),
            (Code::NotFound, "failed to resolve reference \"r/a:1\": r/a:1: not found", F::NotFound),
            (Code::NotFound, "no match for platform in manifest: not found", F::NotFound),
            (
                Code::InvalidArgument,
                "failed to parse image reference \"A\": invalid reference format",
                F::Invalid,
            ),
            (Code::Unavailable, "unexpected status code 503 Service Unavailable", F::Registry),
            (Code::Cancelled, "failed to copy: context canceled", F::Network),
            (Code::DeadlineExceeded, "", F::Network),
            (Code::Unavailable, "error reading from server: EOF", F::Network),
            (Code::Internal, "", F::Unknown),
        ];
        let unknown = ALL
            .into_iter()
            .flat_map(|class| unknown(class).iter().map(move |text| (Code::Unknown, *text, class)));
        for (code, message, expected) in unknown.chain(others) {
            for prefix in ["", pull, v2] {
                let message = format!("{prefix}{message}");
                assert_eq!(class(code, &message), expected, "{code:?} {message}");
            }
        }
    }

    /// I1: only what a retry can use is retained.
    #[test]
    fn failures_after_which_a_retry_uses_the_content() {
        let resumable: Vec<&str> =
            ALL.into_iter().filter(|class| class.is_resumable()).map(FailureClass::name).collect();
        assert_eq!(resumable, ["registry", "network", "runtime"]);
    }

    #[test]
    fn numbers_that_are_not_http_statuses() {
        for text in ["status of http://r:443/x: failed", "status: 4040 bytes", "exit status 500a", "404"] {
            assert_eq!(http_status(text), None, "{text}");
        }
    }
}
